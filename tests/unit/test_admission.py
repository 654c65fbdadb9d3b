"""Which connections are let in, and which make room."""

from __future__ import annotations

from holdfast.server.limits import Admitted, ConnectionAdmission, ConnectionLimits


class Client:
    """A connection as far as it is counted; `rests_since` None is one at work."""

    def __init__(self, address: str, rests_since: float | None = None) -> None:
        self.admitted = Admitted.NOT
        self.address = address
        self.rests_since = rests_since
        self.gone = False

    def shed(self) -> None:
        self.gone = True


class Door:
    """Clients that come one after the other."""

    def __init__(self, **limits: int) -> None:
        self.admission = ConnectionAdmission(ConnectionLimits(**limits))
        self.clients: list[Client] = []

    def come(self, address: str, rests_since: float | None = None) -> Client:
        client = Client(address, rests_since)
        self.admission.admit(client, self.clients)
        self.clients.append(client)
        return client

    def go(self, client: Client) -> None:
        self.clients.remove(client)
        self.admission.leave(client)


def test_one_address_has_three_quarters_of_all_unless_it_is_said_otherwise():
    assert ConnectionLimits(connections=10_000).per_address == 7_500
    assert [ConnectionLimits(connections=few).per_address for few in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert ConnectionLimits(connections=10, connections_per_address=10).per_address == 10


def test_the_address_with_the_most_that_rest_makes_room_oldest_first():
    door = Door(connections=5, connections_per_address=5)
    crowd = [door.come("crowd", since) for since in (3, 1, 2)]
    lone = door.come("lone", 0)
    door.come("busy")
    assert door.come("new").admitted is Admitted.FULLY
    assert [client.gone for client in crowd] == [False, True, False]
    assert not lone.gone


def test_an_address_that_has_its_share_makes_room_for_itself():
    door = Door(connections=100, connections_per_address=2)
    others = door.come("others", 0)
    first, second = door.come("one", 5), door.come("one", 4)
    assert door.come("one").admitted is Admitted.FULLY
    assert (others.gone, first.gone, second.gone) == (False, False, True)


def test_clients_at_work_stay_and_the_next_ones_are_in_reserve_then_refused():
    door = Door(connections=2, reserve=2)
    busy = [door.come("a"), door.come("b")]
    reserve = [door.come("c"), door.come("a")]
    assert [client.admitted for client in reserve] == [Admitted.IN_RESERVE] * 2
    assert door.come("d").admitted is Admitted.NOT
    assert not any(client.gone for client in (*busy, *reserve))
    reserve[0].rests_since = 1  # it has said nothing yet
    assert door.come("d").admitted is Admitted.IN_RESERVE
    assert reserve[0].gone
    door.go(busy[0])
    assert door.come("d").admitted is Admitted.FULLY


def test_every_place_is_free_again_when_all_are_gone():
    door = Door(connections=3, reserve=1)
    for turn in range(20):
        door.come(f"{turn % 3}", None if turn % 2 else turn)
    for client in list(door.clients):
        door.go(client)
    assert (door.admission._total, dict(door.admission._by_address), door.admission._in_reserve) == (0, {}, set())
