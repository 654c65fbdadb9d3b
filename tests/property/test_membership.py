"""Assignments of any wishes, and groups through any order of joins, heartbeats, leaves and growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import Fenced
from holdfast.membership import Target, TopicPartition, assign
from holdfast.membership.members import (
    Command,
    Heartbeat,
    Join,
    Leave,
    Members,
    Partitions,
    Targeted,
    Tick,
    check,
    decide,
)

TOPICS = ("a", "b", "c")
MEMBERS = ("p", "q", "r", "s")
HOWS = ("range", "round_robin", "sticky")

all_counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 7), max_size=3)
some_topics = st.lists(st.sampled_from(TOPICS), max_size=3, unique=True)
all_wants = st.dictionaries(st.sampled_from(MEMBERS), some_topics, max_size=4)
claims = st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, 8)), max_size=12)
all_current = st.dictionaries(st.sampled_from((*MEMBERS, "gone")), claims, max_size=4)


def all_places(counts: Mapping[str, int]) -> list[TopicPartition]:
    return [(topic, partition) for topic in counts for partition in range(counts[topic])]


def wanted(wants: Mapping[str, Collection[str]], counts: Mapping[str, int]) -> list[TopicPartition]:
    return [place for place in all_places(counts) if any(place[0] in topics for topics in wants.values())]


@given(st.sampled_from(HOWS), all_wants, all_counts, all_current)
def test_each_partition_goes_once_to_somebody_who_wants_it(how, wants, counts, current):
    found = assign(how, wants, counts, current)
    assert set(found) == set(wants)
    assert sorted(place for places in found.values() for place in places) == sorted(wanted(wants, counts))
    assert all(topic in wants[member] for member in found for topic, _ in found[member])


@given(st.sampled_from(HOWS), all_wants, all_counts, all_current, st.randoms(use_true_random=False))
def test_the_order_in_which_names_come_changes_nothing(how, wants, counts, current, random):
    def shuffled(mapping):
        keys = list(mapping)
        random.shuffle(keys)
        return {key: mapping[key] for key in keys}

    def stirred(lists):
        return {key: random.sample(lists[key], len(lists[key])) for key in shuffled(lists)}

    found = assign(how, wants, counts, current)
    assert assign(how, stirred(wants), shuffled(counts), stirred(current)) == found
    assert list(found) == sorted(found)


@given(st.sampled_from(["round_robin", "sticky"]), st.integers(1, 6), all_counts, all_current)
def test_members_that_want_the_same_get_shares_that_differ_by_one_at_most(how, members, counts, current):
    wants = {name: list(counts) for name in "pqrstu"[:members]}
    loads = [len(places) for places in assign(how, wants, counts, current).values()]
    assert max(loads) - min(loads) <= 1


@given(st.integers(1, 6), all_counts, all_current)
def test_where_all_want_the_same_sticky_keeps_as_much_as_quotas_allow(members, counts, current):
    wants = {name: list(counts) for name in "pqrstu"[:members]}
    owners = first_claims(wants, counts, current)
    share, more = divmod(len(all_places(counts)), members)
    had = sorted((list(owners.values()).count(name) for name in wants), reverse=True)
    most = sum(min(count, share + (i < more)) for i, count in enumerate(had))
    assert kept(assign("sticky", wants, counts, current), owners) == most


def first_claims(
    wants: Mapping[str, Collection[str]], counts: Mapping[str, int], current: Mapping[str, Collection[TopicPartition]]
) -> dict[TopicPartition, str]:
    there = set(all_places(counts))
    owners: dict[TopicPartition, str] = {}
    for member in sorted(wants):
        for place in current.get(member, ()):
            if place in there and place[0] in wants[member]:
                owners.setdefault(place, member)
    return owners


def kept(found: Target, owners: Mapping[TopicPartition, str]) -> int:
    return sum(owners.get(place) == member for member in found for place in found[member])


@given(
    st.dictionaries(st.sampled_from("pqr"), some_topics, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 2), max_size=3),
    all_current,
)
def test_no_assignment_at_all_is_more_even_or_moves_less_than_sticky(wants, counts, current):
    owners = first_claims(wants, counts, current)
    found = assign("sticky", wants, counts, current)
    best = min(
        (unevenness(choice), -sum(owners.get(place) == member for place, member in choice.items()))
        for choice in every_assignment(wants, counts)
    )
    chosen = {place: member for member in found for place in found[member]}
    assert (unevenness(chosen), -kept(found, owners)) == best


def every_assignment(
    wants: Mapping[str, Collection[str]], counts: Mapping[str, int]
) -> Iterator[dict[TopicPartition, str]]:
    places = wanted(wants, counts)
    takers = [[member for member in wants if place[0] in wants[member]] for place in places]
    for choice in product(*takers):
        yield dict(zip(places, choice, strict=True))


def unevenness(choice: Mapping[TopicPartition, str]) -> int:
    return sum(load * load for load in Counter(choice.values()).values())


@given(
    st.dictionaries(st.sampled_from("pqrstuvw"), some_topics, min_size=1, max_size=8),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 30), max_size=3),
    st.data(),
)
def test_what_is_balanced_stays_where_it_is(wants, counts, data):
    before = assign("sticky", wants, counts)
    assert assign("sticky", wants, counts, before) == before
    fewer = {member: wants[member] for member in wants if member != data.draw(st.sampled_from(sorted(wants)))}
    without = assign("sticky", fewer, counts, before)
    assert assign("sticky", fewer, counts, without) == without


class Client:
    """What one member believes: its epoch, and what it works on."""

    def __init__(self, member: str, epoch: int, held: Collection[TopicPartition]) -> None:
        self.member = member
        self.epoch = epoch
        self.held = set(held)


class Circles(RuleBasedStateMachine):
    """Members, the clients that believe to be members, and those that were and do not know it yet."""

    @initialize(assignor=st.sampled_from(HOWS), rebalance=st.sampled_from(["cooperative", "cooperative", "eager"]))
    def begin(self, assignor, rebalance):
        self.members = Members(assignor, rebalance)
        self.now_ms = 0
        self.made = 0
        self.clients: dict[str, Client] = {}
        self.zombies: list[Client] = []
        self.epoch = 0
        self.when(Partitions({"a": 3, "b": 2}))

    def when(self, command: Command) -> None:
        events = decide(self.members, command, self.now_ms)
        for event in events:
            if isinstance(event, Targeted):
                self._look_at_moves(event)
            self.members.apply(event)
        gone = [name for name in self.clients if name not in self.members.members]
        self.zombies += [self.clients.pop(name) for name in gone]

    def _look_at_moves(self, event: Targeted) -> None:
        """Where all want the same, no more moves than it must."""
        there = [self.members.members[name] for name in event.target]
        if self.members.assignor != "sticky" or not there or len({member.topics for member in there}) > 1:
            return
        current = {m.id: [*m.owned] for m in there}
        for m in there:
            current[m.id] += [place for place in self.members.target.get(m.id, ()) if place not in self.members.owners]
        wants = {m.id: m.topics for m in there}
        owners = first_claims(wants, self.members.counts, current)
        total = len(wanted(wants, self.members.counts))
        share, more = divmod(total, len(there))
        had = sorted((list(owners.values()).count(m.id) for m in there), reverse=True)
        assert kept(event.target, owners) == sum(min(count, share + (i < more)) for i, count in enumerate(had))

    @rule(topics=st.sampled_from([("a",), ("a", "b"), ("a", "b"), ("a", "b"), ("b",)]))
    def join(self, topics):
        self._join(f"m{self.made}", topics, "")

    @rule(instance=st.sampled_from(["x", "y"]))
    def join_static(self, instance):
        self._join(f"m{self.made}", ("a", "b"), instance)

    def _join(self, name: str, topics: tuple[str, ...], instance_id: str) -> None:
        if len(self.members.members) >= 6:
            return
        self.made += 1
        target_epoch = self.members.target_epoch
        old = next((m for m in self.members.members.values() if instance_id and m.instance_id == instance_id), None)
        self.when(Join(member=name, topics=topics, instance_id=instance_id, session_ms=100, rebalance_ms=70))
        share = self.members.share(name)
        if old is not None:
            assert self.members.target_epoch == target_epoch
        self.clients[name] = Client(name, share.epoch, share.partitions)

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 5), answered=st.sampled_from([True, True, True, False]))
    def heartbeat(self, pick, answered):
        client = list(self.clients.values())[pick % len(self.clients)]
        self.when(Heartbeat(client.member, client.epoch, tuple(client.held)))
        if answered:
            share = self.members.share(client.member)
            client.epoch, client.held = share.epoch, set(share.partitions)

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 5))
    def show_life(self, pick):
        client = list(self.clients.values())[pick % len(self.clients)]
        self.when(Heartbeat(client.member, client.epoch))

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 5))
    def leave(self, pick):
        client = list(self.clients.values())[pick % len(self.clients)]
        self.when(Leave(client.member, client.epoch))

    @rule(ms=st.integers(0, 60))
    def wait(self, ms):
        self.now_ms += ms
        self.when(Tick())
        late = [m.id for m in self.members.members.values() if m.heard_ms + m.session_ms <= self.now_ms]
        assert late == []

    @rule(topic=st.sampled_from("ab"), more=st.integers(1, 3))
    def grow(self, topic, more):
        self.when(Partitions({**self.members.counts, topic: min(self.members.counts.get(topic, 0) + more, 9)}))

    @rule()
    def lose_a_topic(self):
        self.when(Partitions({"a": self.members.counts.get("a", 3)}))

    @rule()
    def settle(self):
        """Once all have been heard a few times, all partitions are owned, as the target says."""
        for _ in range(4):
            for name in list(self.members.members):
                client = self.clients[name]
                self.when(Heartbeat(client.member, client.epoch, tuple(client.held)))
                share = self.members.share(name)
                client.epoch, client.held = share.epoch, set(share.partitions)
        wants = {m.id: m.topics for m in self.members.members.values()}
        assert set(self.members.owners) == set(wanted(wants, self.members.counts))
        for name, client in self.clients.items():
            assert client.held == set(self.members.target[name])
        if len(set(wants.values())) == 1 and self.members.assignor != "range":
            loads = [len(client.held) for client in self.clients.values()]
            assert max(loads) - min(loads) <= 1

    @invariant()
    def the_promises_hold(self):
        if not hasattr(self, "members"):
            return
        assert check(self.members) == []
        assert self.members.epoch >= self.epoch
        self.epoch = self.members.epoch
        held = Counter(place for client in self.clients.values() for place in client.held)
        assert all(count == 1 for count in held.values())
        for client in self.clients.values():
            assert all(self.members.owners.get(place) == client.member for place in client.held)
        for zombie in self.zombies:
            for topic, partition in zombie.held:
                with pytest.raises(Fenced):
                    self.members.may_commit(zombie.member, zombie.epoch, topic, partition)


TestCircles = Circles.TestCase
