"""Which members of a group work on which partitions. Pure: no clock, disk, randomness or threads.

Partitions are assigned by pure functions of what members want, and of what they have now:

    range        topic by topic: a run of neighbouring partitions for each member that wants the topic
    round_robin  all partitions in order, dealt to one member after the other
    sticky       as even as possible, and as few moves as possible

Every partition that somebody wants gets exactly one member. The result depends on the names alone, not on the order in
which they are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import Final, Literal, TypeAlias

TopicPartition: TypeAlias = tuple[str, int]
Target: TypeAlias = dict[str, tuple[TopicPartition, ...]]


class Wishes:
    """Members and topics in order of their names; topics without partitions or takers are left out."""

    def __init__(self, wants: Mapping[str, Collection[str]], counts: Mapping[str, int]) -> None:
        self.members = sorted(wants)
        self.counts = {topic: counts[topic] for topic in sorted(counts) if counts[topic] > 0}
        self.topics = {m: frozenset(topic for topic in wants[m] if topic in self.counts) for m in self.members}
        self.takers = {
            topic: takers for topic in self.counts if (takers := [m for m in self.members if topic in self.topics[m]])
        }

    def partitions(self) -> Iterator[TopicPartition]:
        """Yield every partition that somebody wants."""
        for topic in self.takers:
            for partition in range(self.counts[topic]):
                yield topic, partition

    def kept(self, current: Mapping[str, Collection[TopicPartition]]) -> dict[TopicPartition, str]:
        """Return who has each partition now and still wants it; if two claim it, the first by name."""
        owners: dict[TopicPartition, str] = {}
        for member in self.members:
            for topic, partition in current.get(member, ()):
                if topic in self.topics[member] and 0 <= partition < self.counts[topic]:
                    owners.setdefault((topic, partition), member)
        return owners


# Sticky assignment: the best possible balance, and among those the assignment that moves the fewest partitions.
#
# If all members want the same topics, quotas are enough. Otherwise a chain may be needed: ann gives one to bob, so that
# bob can give another to eve, who does not want ann's. Such chains are paths in a graph:
#
#     member -> topic   gives up a partition of that topic: costs 1 move if all it has of it are its own, else 0
#     topic -> member   takes it
#     member -> member  gives a partition back to the member that had it: saves a move
#     pool -> member, member -> pool   the ends of a chain: the gain of one partition fewer, the cost of one more
#
# A cycle with negative total cost is an improvement; when there is none left, there is no better assignment (the
# optimality criterion of minimum cost flows). Balance outweighs any number of moves.
# Members, topics and the pool are nodes of one graph; a name may be both a member's and a topic's.
_Node: TypeAlias = tuple[str, str]
_Edge: TypeAlias = tuple[_Node, _Node, int]
_MEMBER: Final = "member"
_TOPIC: Final = "topic"
_POOL: Final[_Node] = ("pool", "")


def sticky(wishes: Wishes, current: Mapping[str, Collection[TopicPartition]]) -> Target:
    """Assign as evenly as possible, and let as much as possible stay where it is."""
    owners = wishes.kept(current)
    if len(set(wishes.topics.values())) <= 1:
        held = _by_quota(wishes, owners)
    else:
        held = _by_chains(wishes, owners)
    return {member: tuple(sorted(held[member])) for member in wishes.members}


def _by_quota(wishes: Wishes, owners: Mapping[TopicPartition, str]) -> dict[str, list[TopicPartition]]:
    """All members want the same: those that have most may keep one more."""
    held: dict[str, list[TopicPartition]] = {member: [] for member in wishes.members}
    for place in wishes.partitions():
        if place in owners:
            held[owners[place]].append(place)
    share, more = divmod(sum(wishes.counts[topic] for topic in wishes.takers), max(len(held), 1))
    for i, member in enumerate(sorted(held, key=lambda name: (-len(held[name]), name))):
        del held[member][share + (i < more) :]
    _deal(wishes, held)
    return held


def _deal(wishes: Wishes, held: dict[str, list[TopicPartition]]) -> None:
    """Give each free partition to the member that has least; all members want the same."""
    taken = {place for places in held.values() for place in places}
    line = [(len(places), member) for member, places in held.items()]
    heapify(line)
    for place in wishes.partitions():
        if place not in taken:
            load, member = line[0]
            held[member].append(place)
            heapreplace(line, (load + 1, member))


def _by_chains(wishes: Wishes, owners: Mapping[TopicPartition, str]) -> dict[str, list[TopicPartition]]:
    """Members want different topics: start with what each has, then improve as long as possible."""
    holdings = _Holdings(wishes, owners)
    for place in sorted(wishes.partitions(), key=lambda place: (place[1], place[0])):  # loads rise evenly: few chains
        if place not in owners:
            least = min(wishes.takers[place[0]], key=lambda member: (holdings.load[member], member))
            holdings.give(least, place)
    while cycle := _improvement(holdings):
        holdings.turn(cycle)
    return {member: holdings.of(member) for member in wishes.members}


class _Holdings:
    """What each member would get, and what a change would cost."""

    def __init__(self, wishes: Wishes, owners: Mapping[TopicPartition, str]) -> None:
        self._wishes = wishes
        self._owners = owners
        self.load = dict.fromkeys(wishes.members, 0)
        self._own: dict[tuple[str, str], list[TopicPartition]] = defaultdict(list)  # by member and topic
        self._foreign: dict[tuple[str, str], list[TopicPartition]] = defaultdict(list)
        self._balance = len(wishes.members) + 1  # outweighs any chain, which has at most one move per member
        for place in sorted(owners):
            self.give(owners[place], place)

    def give(self, member: str, place: TopicPartition) -> None:
        kind = self._own if self._owners.get(place) == member else self._foreign
        kind[member, place[0]].append(place)
        self.load[member] += 1

    def of(self, member: str) -> list[TopicPartition]:
        found: list[TopicPartition] = []
        for topic in self._wishes.takers:
            found += self._own.get((member, topic), []) + self._foreign.get((member, topic), [])
        return found

    def edges(self) -> Iterator[_Edge]:
        for member in self._wishes.members:
            node = (_MEMBER, member)
            load = self.load[member]
            yield node, _POOL, (2 * load + 1) * self._balance
            if load:
                yield _POOL, node, -(2 * load - 1) * self._balance
        for topic, takers in self._wishes.takers.items():
            middle = (_TOPIC, topic)
            for member in takers:
                node = (_MEMBER, member)
                yield middle, node, 0
                foreign = self._foreign.get((member, topic))
                if foreign or self._own.get((member, topic)):
                    yield node, middle, 0 if foreign else 1
                for owner in sorted({self._owners[place] for place in foreign or () if place in self._owners}):
                    yield node, (_MEMBER, owner), -1

    def turn(self, cycle: list[_Node]) -> None:
        """Make the moves of a cycle; all are chosen before the first is made."""
        after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        moves: list[tuple[str, TopicPartition]] = []
        for node in cycle:
            following = after[node]
            if node[0] != _MEMBER or following == _POOL:
                continue
            taker = after[following] if following[0] == _TOPIC else following
            moves.append((taker[1], self._take(node[1], following)))
        for member, place in moves:
            self.give(member, place)

    def _take(self, giver: str, following: _Node) -> TopicPartition:
        self.load[giver] -= 1
        kind, name = following
        if kind == _TOPIC:
            return (self._foreign.get((giver, name)) or self._own[giver, name]).pop()
        for topic in self._wishes.takers:
            foreign = self._foreign.get((giver, topic), [])
            for place in foreign:
                if self._owners.get(place) == name:
                    foreign.remove(place)
                    return place
        raise AssertionError(f"{giver} has nothing that was {name}'s")


def _improvement(holdings: _Holdings) -> list[_Node]:
    """Return a cycle with negative cost, or an empty list if there is none (Bellman-Ford)."""
    edges = list(holdings.edges())
    cost: dict[_Node, int] = defaultdict(int)
    before: dict[_Node, _Node] = {}
    changed = True
    while changed:
        changed = False
        for start, stop, price in edges:
            if cost[start] + price < cost[stop]:
                cost[stop] = cost[start] + price
                before[stop] = start
                changed = True
        if cycle := _cycle(before):
            return cycle
    return []


def _cycle(before: Mapping[_Node, _Node]) -> list[_Node]:
    """Return a cycle among the backward steps, in forward order."""
    done: set[_Node] = set()
    for first in before:
        path: list[_Node] = []
        on_path: set[_Node] = set()
        node: _Node | None = first
        while node is not None and node not in done and node not in on_path:
            path.append(node)
            on_path.add(node)
            node = before.get(node)
        if node is not None and node in on_path:
            return path[path.index(node) :][::-1]
        done |= on_path
    return []


Assignor: TypeAlias = Literal["range", "round_robin", "sticky"]


def assign(
    how: Assignor,
    wants: Mapping[str, Collection[str]],
    counts: Mapping[str, int],
    current: Mapping[str, Collection[TopicPartition]] | None = None,
) -> Target:
    """Return each member's partitions in order; `wants` has each member's topics, `counts` the partitions of topics."""
    wishes = Wishes(wants, counts)
    if how == "range":
        return by_range(wishes)
    if how == "round_robin":
        return round_robin(wishes)
    return sticky(wishes, current or {})


def by_range(wishes: Wishes) -> Target:
    """If a topic's partitions do not divide evenly, the first members by name get one more."""
    found: dict[str, list[TopicPartition]] = {member: [] for member in wishes.members}
    for topic, members in wishes.takers.items():
        share, more = divmod(wishes.counts[topic], len(members))
        start = 0
        for i, member in enumerate(members):
            stop = start + share + (i < more)
            found[member] += [(topic, partition) for partition in range(start, stop)]
            start = stop
    return _in_order(found)


def round_robin(wishes: Wishes) -> Target:
    """A member that does not want the next partition is skipped, and stays first in line."""
    found: dict[str, list[TopicPartition]] = {member: [] for member in wishes.members}
    line = list(wishes.members)
    for topic, partition in wishes.partitions():
        i = next(i for i, member in enumerate(line) if topic in wishes.topics[member])
        member = line.pop(i)
        line.append(member)
        found[member].append((topic, partition))
    return _in_order(found)


def _in_order(found: Mapping[str, Collection[TopicPartition]]) -> Target:
    return {member: tuple(sorted(found[member])) for member in sorted(found)}
