"""Which member gets which partition: pure functions of who wants what, and of who has what now.

    range        each topic by itself: a run of neighbouring partitions for each member that wants it
    round_robin  all partitions in order, dealt to one member after the other
    sticky       as even as can be, and as much as can be stays where it is

Every partition that somebody wants has exactly one member. The answer depends on the names alone, not on the
order in which they come.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from holdfast.membership.sticky import sticky
from holdfast.membership.wishes import Target, TopicPartition, Wishes

Assignor: TypeAlias = Literal["range", "round_robin", "sticky"]


def assign(
    how: Assignor,
    wants: Mapping[str, Collection[str]],
    counts: Mapping[str, int],
    current: Mapping[str, Collection[TopicPartition]] | None = None,
) -> Target:
    """For each member its partitions, in order; `wants` are each member's topics, `counts` the topics' partitions."""
    wishes = Wishes(wants, counts)
    if how == "range":
        return by_range(wishes)
    if how == "round_robin":
        return round_robin(wishes)
    return sticky(wishes, current or {})


def by_range(wishes: Wishes) -> Target:
    """The first members by name get one more where a topic's partitions do not divide evenly."""
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
    """A member that does not want the next partition is passed over, and stays next for another."""
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
