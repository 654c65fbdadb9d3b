"""Where calls to a cluster go: the address that was given, or the owner that an answer has named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast.client.calling import Ask, Caller
from holdfast.client.network import ThreadNetwork, run
from holdfast.client.opening import parse_address
from holdfast.client.owners import STRAIGHT_WAIT_S, owner_address, place_of
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.integration.store_servers import free_port


class FakeNode:
    """Answers each request with its own name as the body; and with the owner that it was told to name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: str | None = None
        self.heads: list[str] = []
        self.silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                made, _ = self._listener.accept()
                self._open.append(made)
                threading.Thread(target=self._serve, args=(made,), daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        with suppress(OSError):
            while asked := made.recv(65536):
                self.heads.append(asked.decode())
                if self.silent:
                    continue
                more = "" if self.owner is None else f"x-holdfast-owner: {self.owner}\r\n"
                body = self.name.encode()
                made.sendall(f"HTTP/1.1 200 OK\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body)

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for made in self._open:
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
            made.close()


@pytest.fixture
def nodes() -> Iterator[tuple[FakeNode, FakeNode]]:
    made = FakeNode("first"), FakeNode("second")
    yield made
    for node in made:
        with suppress(OSError):
            node.end()


@pytest.fixture
def world() -> World:
    return World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))


def ask(path: str = "/v1/topics/orders/messages", **options: object) -> Ask:
    return Ask(method="GET", path=path, answers=bytes, **options)  # type: ignore[arg-type]


def test_a_call_goes_straight_to_the_owner_that_the_last_answer_named(nodes, world):
    first, second = nodes
    first.owner = second.url
    caller = Caller(world, ThreadNetwork(world.clock), parse_address(first.url), token="secret")
    assert [run(caller.call(ask())) for _ in range(3)] == [b"first", b"second", b"second"]
    assert second.url.removeprefix("http://") in second.heads[0], "the Host header is the owner's"
    assert run(caller.call(ask("/v1/topics/other"))) == b"first", "nothing is known of another topic"
    second.owner = first.url  # it has moved: the last owner passes the call on, and says so
    assert [run(caller.call(ask())) for _ in range(2)] == [b"second", b"first"]
    caller.close()


def test_a_call_that_cannot_be_repeated_or_waits_for_long_takes_the_given_address(nodes, world):
    first, second = nodes
    first.owner = second.url
    caller = Caller(world, ThreadNetwork(world.clock), parse_address(first.url))
    run(caller.call(ask()))
    assert run(caller.call(ask(again=False))) == b"first"
    assert run(caller.call(ask(wait_s=STRAIGHT_WAIT_S + 1))) == b"first"
    assert run(caller.call(ask(wait_s=STRAIGHT_WAIT_S))) == b"second"
    assert caller.most_wait_s == STRAIGHT_WAIT_S
    caller.close()


def test_an_owner_out_of_reach_is_left_alone_each_time_for_longer(nodes, world):
    first, _ = nodes
    first.owner = f"http://127.0.0.1:{free_port(1)[0]}"
    caller = Caller(world, ThreadNetwork(world.clock), parse_address(first.url))
    tries = []
    connect = caller.ways.connect

    async def counted(address, *more):
        tries.append(address.port)
        return await connect(address, *more)

    caller.ways.connect = counted  # type: ignore[method-assign]
    out_of_reach = int(first.owner.rpartition(":")[2])
    for pause_s in (1, 2, 4):
        before = tries.count(out_of_reach)
        for _ in range(5):
            assert run(caller.call(ask())) == b"first"
        assert tries.count(out_of_reach) == before + 1
        world.clock.advance(seconds=pause_s)
    caller.close()


def test_an_owner_that_ends_or_falls_silent_is_forgotten(nodes, world, monkeypatch):
    first, second = nodes
    first.owner = second.url
    caller = Caller(world, ThreadNetwork(world.clock), parse_address(first.url))
    assert [run(caller.call(ask())) for _ in range(2)] == [b"first", b"second"]
    monkeypatch.setattr("holdfast.client.calling.straight_s", lambda *_: 0.05)
    second.silent = True
    assert run(caller.call(ask())) == b"first"
    second.silent = False
    world.clock.advance(seconds=1)
    assert [run(caller.call(ask())) for _ in range(2)] == [b"first", b"second"]
    second.end()
    assert run(caller.call(ask())) == b"first"
    caller.close()


@pytest.mark.parametrize(
    ("given", "named", "is_called"),
    [
        ("http://10.0.0.1:7700", "http://10.0.0.2:7700", True),
        ("https://queue.example", "https://node-2.example:7700", True),
        ("https://queue.example", "http://node-2.example:7700", False),  # the token would be readable
        ("http://queue.example", "https://node-2.example:7700", False),  # nobody has said whom to trust
        ("http://127.0.0.1:7700", "http://127.0.0.1:7701", True),
        ("http://localhost:7700", "http://127.0.0.1:7701", True),
        ("http://127.0.0.1:7700", "http://10.0.0.2:7700", False),  # a tunnel: the network was not agreed to
        ("http://[::1]:7700", "http://10.0.0.2:7700", False),
        ("http://10.0.0.1:7700", "http://127.0.0.1:7700", False),  # whatever listens here is not the node
        ("http://10.0.0.1:7700", "http://localhost:7700", False),
        ("http://10.0.0.1:7700", "http://[::ffff:127.0.0.1]:7700", False),
        ("http://10.0.0.1:7700", "http://0.0.0.0:7700", False),
        ("unix:/run/holdfast", "http://10.0.0.2:7700", False),
        ("http://10.0.0.1:7700", "unix:/run/holdfast", False),
        ("http://10.0.0.1:7700", "http://10.0.0.2:7700/orders", False),
        ("http://10.0.0.1:7700", "http://user@10.0.0.2:7700", False),
        ("http://10.0.0.1:7700", "http://10.0.0.2:7700,http://10.0.0.3:7700", False),
        ("http://10.0.0.1:7700", "http://10.0.0.2:99999", False),
        ("http://10.0.0.1:7700", "http://" + "a" * 300, False),
        ("http://10.0.0.1:7700", "", False),
    ],
)
def test_a_token_goes_only_where_the_given_address_would_let_it(given: str, named: str, is_called: bool):
    assert (owner_address(named, parse_address(given)) is not None) is is_called


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/queues/jobs/ack", "/v1/queues/jobs"),
        ("/v1/topics/orders/partitions/0/append?producer=1&sequence=", "/v1/topics/orders"),
        ("/v1/topics/orders?x=1", "/v1/topics/orders"),
        ("/v1/locks/a%2Fb/acquire", "/v1/locks/a%2Fb"),
        ("/v1/state/doc", "/v1/state/doc"),
        ("/v1/groups/g/members/3-x/poll", "/v1/groups/g/members/3-x"),
        ("/v1/groups/g/members", ""),
        ("/v1/groups/g", ""),
        ("/v1/producers", ""),
        ("/v1/topics", ""),
        ("/healthz", ""),
    ],
)
def test_the_place_of_a_call_is_in_its_path(path: str, place: str):
    assert place_of(path) == place
