"""The membership of a stream group, as stories in commands: who may work on which partition, and who no longer."""

from __future__ import annotations

import pytest

from holdfast.errors import Fenced, InvalidRequest
from holdfast.membership.members import (
    Command,
    Event,
    GaveBack,
    Granted,
    Heard,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    Members,
    Partitions,
    Targeted,
    Tick,
    check,
    decide,
)


class Circle:
    """A group without disk or threads: the members, and what each of them believes to own."""

    def __init__(self, partitions: int = 4, **policy) -> None:
        self.members = Members(**policy)
        self.now_ms = 1_000
        self.epochs: dict[str, int] = {}
        self.held: dict[str, set[int]] = {}
        self.when(Partitions({"orders": partitions}))

    def when(self, command: Command, *, after_ms: int = 0) -> list[Event]:
        self.now_ms += after_ms
        events = decide(self.members, command, self.now_ms)
        for event in events:
            self.members.apply(event)
        assert check(self.members) == []
        return events

    def join(self, *names: str, **options) -> None:
        for name in names:
            self.when(Join(member=name, topics=("orders",), **options))
            self.epochs[name] = self.members.members[name].epoch
            self.held[name] = {partition for _, partition in self.members.share(name).partitions}

    def beat(self, *names: str, after_ms: int = 0) -> None:
        """Each says what it works on, and then does as it is told."""
        for name in names:
            owned = tuple(("orders", partition) for partition in sorted(self.held[name]))
            self.when(Heartbeat(name, self.epochs[name], owned), after_ms=after_ms)
            share = self.members.share(name)
            self.epochs[name] = share.epoch
            self.held[name] = {partition for _, partition in share.partitions}

    def settle(self) -> None:
        for _ in range(3):
            self.beat(*self.members.members)

    def may_commit(self, name: str, partition: int, epoch: int | None = None) -> bool:
        try:
            self.members.may_commit(name, self.epochs[name] if epoch is None else epoch, "orders", partition)
        except Fenced:
            return False
        return True


def test_the_first_member_gets_everything_with_its_first_heartbeat():
    circle = Circle()
    circle.join("ann")
    assert circle.held == {"ann": set()}
    circle.beat("ann")
    assert circle.held == {"ann": {0, 1, 2, 3}}


def test_a_partition_moves_only_when_its_owner_has_given_it_back():
    circle = Circle()
    circle.join("ann")
    circle.beat("ann")
    circle.join("bob")
    circle.beat("bob")
    assert circle.held["bob"] == set()  # ann does not know yet
    circle.beat("ann")
    assert circle.held["ann"] == {0, 1}  # she knows, but has not confirmed
    circle.beat("bob")
    assert circle.held["bob"] == set()
    circle.beat("ann")
    circle.beat("bob")
    assert circle.held == {"ann": {0, 1}, "bob": {2, 3}}


def test_members_keep_working_on_what_they_keep():
    circle = Circle()
    circle.join("ann")
    circle.beat("ann")
    circle.join("bob")
    assert all(circle.may_commit("ann", partition) for partition in range(4))
    circle.beat("ann")
    assert all(circle.may_commit("ann", partition) for partition in range(4))  # a last commit before giving back
    circle.beat("ann")
    assert [circle.may_commit("ann", partition) for partition in range(4)] == [True, True, False, False]


def test_the_events_of_one_move():
    circle = Circle(partitions=2)
    circle.join("ann")
    circle.beat("ann")
    joined, targeted = circle.when(Join(member="bob", topics=("orders",), holder="host:1"))
    assert isinstance(joined, Joined)
    assert targeted == Targeted(joined.epoch, {"ann": (("orders", 0),), "bob": (("orders", 1),)}, circle.now_ms)
    epoch, at_ms = joined.epoch, circle.now_ms
    both, first, second = (("orders", 0), ("orders", 1)), (("orders", 0),), (("orders", 1),)
    assert circle.when(Heartbeat("ann", 1, both)) == [Heard("ann", epoch, at_ms)]
    assert circle.when(Heartbeat("ann", epoch, first)) == [Heard("ann", epoch, at_ms), GaveBack("ann", second)]
    assert circle.when(Heartbeat("bob", epoch, ())) == [Heard("bob", epoch, at_ms), Granted("bob", second)]


def test_a_heartbeat_that_only_shows_life_takes_and_gives_nothing():
    circle = Circle()
    circle.join("ann")
    assert circle.when(Heartbeat("ann", 1)) == [Heard("ann", 1, circle.now_ms)]
    assert circle.members.share("ann").partitions == ()


def test_in_an_eager_group_all_give_back_first():
    circle = Circle(rebalance="eager")
    circle.join("ann")
    circle.settle()
    circle.join("bob")
    circle.beat("bob", "ann")
    assert circle.held == {"ann": set(), "bob": set()}
    circle.beat("bob")
    assert circle.held["bob"] == set()  # ann was told, and has not confirmed
    circle.beat("ann", "bob")
    assert circle.held == {"ann": {0, 1}, "bob": {2, 3}}


def test_in_an_eager_group_a_static_member_comes_back_without_disturbing_anybody():
    circle = Circle(rebalance="eager")
    circle.join("ann", "bob", instance_id="")
    circle.join("eve.1", instance_id="eve")
    circle.settle()
    before = {name: set(held) for name, held in circle.held.items()}
    circle.join("eve.2", instance_id="eve")
    circle.settle()
    assert circle.held == {**before, "eve.2": before["eve.1"]}


# Seen in the originals.
def test_no_assignment_is_lost_when_members_come_and_go():
    circle = Circle(partitions=7)
    for newcomer in ("ann", "bob", "eve", "joe"):
        circle.join(newcomer)
        circle.settle()
        assert sorted(p for held in circle.held.values() for p in held) == list(range(7))
    for leaver in ("bob", "ann", "joe"):
        circle.when(Leave(leaver, circle.epochs[leaver]))
        del circle.held[leaver]
        circle.settle()
        assert sorted(p for held in circle.held.values() for p in held) == list(range(7))


def test_a_member_that_joins_in_the_middle_of_a_rebalance_loses_nothing_for_anybody():
    circle = Circle(partitions=6)
    circle.join("ann")
    circle.beat("ann")
    circle.join("bob")
    circle.beat("ann")
    circle.join("eve")
    circle.when(Leave("bob", circle.epochs["bob"]))
    del circle.held["bob"]
    circle.settle()
    assert {name: len(held) for name, held in circle.held.items()} == {"ann": 3, "eve": 3}


# Seen in the originals.
def test_what_was_meant_for_a_member_stays_meant_for_it_when_its_owner_leaves():
    circle = Circle(partitions=3)
    circle.join("ann")
    circle.settle()
    circle.join("bob", "cid")
    meant = circle.members.target
    circle.when(Leave("ann", circle.epochs["ann"]))
    for name in ("bob", "cid"):
        assert set(meant[name]) <= set(circle.members.target[name])


def test_an_old_epoch_is_refused():
    circle = Circle()
    circle.join("ann", "bob")
    circle.settle()
    old = circle.epochs["ann"]
    circle.join("eve")
    circle.settle()
    kept = min(circle.held["ann"])
    assert circle.may_commit("ann", kept)
    assert not circle.may_commit("ann", kept, old)
    with pytest.raises(Fenced, match=f"old epoch {old} instead of {circle.epochs['ann']}"):
        circle.members.may_commit("ann", old, "orders", kept)


def test_an_epoch_that_was_never_reached_is_refused():
    circle = Circle()
    circle.join("ann")
    with pytest.raises(Fenced, match="has not reached"):
        circle.when(Heartbeat("ann", 99, ()))


# Seen in the originals.
def test_an_expired_member_is_put_out_and_its_share_goes_to_the_others():
    circle = Circle()
    circle.join("ann", "bob", session_ms=100)
    circle.settle()
    circle.beat("ann", after_ms=60)
    assert circle.when(Tick(), after_ms=39) == []
    left, targeted = circle.when(Tick(), after_ms=1)
    assert (type(left), left.member, type(targeted)) == (Left, "bob", Targeted)
    assert list(circle.members.members) == ["ann"]
    circle.beat("ann")
    assert circle.held["ann"] == {0, 1, 2, 3}
    with pytest.raises(Fenced, match="bob sent no heartbeat for 100 ms"):
        circle.beat("bob")
    assert not circle.may_commit("bob", 2)


def test_when_everybody_expires_at_once_nothing_is_left_behind():
    circle = Circle()
    circle.join("ann", "bob", session_ms=100)
    circle.settle()
    circle.when(Tick(), after_ms=100)
    assert (circle.members.members, circle.members.owners, circle.members.target) == ({}, {}, {})
    assert circle.members.due_ms() is None


def test_whoever_does_not_give_back_in_time_is_put_out():
    circle = Circle()
    circle.join("ann", session_ms=10_000, rebalance_ms=500)
    circle.beat("ann")
    circle.join("bob", session_ms=10_000)
    for _ in range(4):  # she is alive, but goes on with what she has
        circle.when(Heartbeat("ann", 1), after_ms=100)
    assert circle.when(Tick(), after_ms=99) == []
    assert circle.when(Tick(), after_ms=1)[0].member == "ann"
    circle.beat("bob")
    assert circle.held["bob"] == {0, 1, 2, 3}
    assert not circle.may_commit("ann", 0)


def test_what_falls_due_next():
    circle = Circle()
    circle.join("ann", session_ms=300, rebalance_ms=200)
    circle.beat("ann", after_ms=50)
    assert circle.members.due_ms() == circle.now_ms + 300
    circle.now_ms += 10
    circle.join("bob", session_ms=1_000)
    assert circle.members.due_ms() == circle.now_ms + 200
    circle.beat("ann", "ann")
    assert circle.members.due_ms() == circle.now_ms + 300


def test_a_static_member_that_comes_back_in_time_keeps_its_partitions_without_a_rebalance():
    circle = Circle()
    circle.join("ann.1", instance_id="ann", session_ms=100)
    circle.join("bob")
    circle.settle()
    before, target_epoch = set(circle.held["ann.1"]), circle.members.target_epoch
    circle.now_ms += 90
    circle.join("ann.2", instance_id="ann", session_ms=100)
    assert circle.held["ann.2"] == before
    assert circle.members.target_epoch == target_epoch
    circle.when(Tick(), after_ms=90)
    assert "ann.2" in circle.members.members


def test_the_earlier_incarnation_of_a_static_member_is_refused():
    circle = Circle()
    circle.join("ann.1", instance_id="ann")
    circle.beat("ann.1")
    circle.join("ann.2", instance_id="ann")
    with pytest.raises(Fenced, match=r"ann\.1 was replaced by ann\.2"):
        circle.beat("ann.1")
    assert not circle.may_commit("ann.1", 0)
    assert circle.may_commit("ann.2", 0)
    assert circle.when(Leave("ann.1", circle.epochs["ann.1"])) == []  # it must not take its successor along


def test_an_incarnation_with_the_same_id_is_told_apart_by_its_epoch():
    circle = Circle()
    circle.join("ann")
    circle.beat("ann")
    old = circle.epochs["ann"]
    circle.join("ann")
    assert circle.held["ann"] == {0, 1, 2, 3}
    assert not circle.may_commit("ann", 0, old)
    for command in (Heartbeat("ann", old, ()), Leave("ann", old)):
        with pytest.raises(Fenced, match="has restarted"):
            circle.when(command)


def test_a_static_member_that_stays_away_loses_its_share():
    circle = Circle()
    circle.join("ann.1", instance_id="ann", session_ms=100)
    circle.join("bob")
    circle.settle()
    circle.when(Tick(), after_ms=100)
    circle.settle()
    assert len(circle.held["bob"]) == 4


def test_a_static_member_may_come_back_for_other_topics():
    circle = Circle()
    circle.when(Partitions({"orders": 4, "prices": 2}))
    circle.join("ann.1", instance_id="ann")
    circle.beat("ann.1")
    circle.when(Join(member="ann.2", topics=("prices",), instance_id="ann"))
    circle.when(Heartbeat("ann.2", circle.members.epoch, ()))
    circle.when(Heartbeat("ann.2", circle.members.epoch, ()))
    assert circle.members.share("ann.2").partitions == (("prices", 0), ("prices", 1))
    assert circle.members.owners == {("prices", 0): "ann.2", ("prices", 1): "ann.2"}


def test_two_members_cannot_be_one_instance():
    circle = Circle()
    circle.join("ann", instance_id="one")
    circle.join("bob")
    with pytest.raises(InvalidRequest, match="its own id"):
        circle.when(Join(member="bob", topics=("orders",), instance_id="one"))


def test_new_partitions_are_shared_out_and_old_ones_stay():
    circle = Circle(partitions=4)
    circle.join("ann", "bob")
    circle.settle()
    before = {name: set(held) for name, held in circle.held.items()}
    circle.when(Partitions({"orders": 7}))
    circle.settle()
    assert all(before[name] <= circle.held[name] for name in before)
    assert sorted(p for held in circle.held.values() for p in held) == list(range(7))


def test_partitions_of_a_topic_that_is_gone_are_given_back():
    circle = Circle()
    circle.join("ann")
    circle.beat("ann")
    circle.when(Partitions({}))
    circle.settle()
    assert circle.held["ann"] == set()
    assert circle.members.owners == {}


def test_counts_that_change_nothing_for_anybody_raise_no_epoch():
    circle = Circle()
    circle.join("ann")
    circle.settle()
    epoch = circle.members.epoch
    assert circle.when(Partitions({"orders": 4})) == []
    circle.when(Partitions({"orders": 4, "others": 9}))
    assert circle.members.epoch == epoch


def test_a_lost_answer_is_told_again():
    circle = Circle()
    circle.join("ann")
    circle.when(Heartbeat("ann", 1, ()))  # she was granted all, and never heard of it
    circle.beat("ann")
    assert circle.held["ann"] == {0, 1, 2, 3}


def test_members_may_want_different_topics():
    circle = Circle()
    circle.when(Partitions({"orders": 2, "prices": 2}))
    circle.when(Join(member="ann", topics=("orders", "prices")))
    circle.when(Join(member="bob", topics=("prices", "unheard-of")))
    for _ in range(2):
        for name in ("ann", "bob"):
            owned = circle.members.share(name).partitions
            circle.when(Heartbeat(name, circle.members.epoch, owned))
    assert circle.members.share("ann").partitions == (("orders", 0), ("orders", 1))
    assert circle.members.share("bob").partitions == (("prices", 0), ("prices", 1))


def test_leaving_twice_is_fine():
    circle = Circle()
    circle.join("ann")
    circle.when(Leave("ann", 1))
    assert circle.when(Leave("ann", 1)) == []


def test_the_invariants_notice_what_is_wrong():
    circle = Circle()
    circle.join("ann", "bob")
    circle.settle()
    members = circle.members
    members.members["bob"].owned[("orders", 0)] = 1
    members.target["bob"] += (("orders", 0),)
    members.members["ann"].epoch = 99
    found = " ".join(check(members))
    for part in ("two owners", "table of owners", "wanted partition once", "epoch 99"):
        assert part in found
