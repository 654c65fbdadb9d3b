"""Static members, as they are remembered beyond a restart: whoever comes back in time finds its share untouched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast.membership.assignment import assign
from holdfast.membership.events import Counted, Event, Granted, Joined, Targeted
from holdfast.membership.members import Members
from holdfast.membership.wishes import TopicPartition


class StaticMember(msgspec.Struct, frozen=True, array_like=True):
    """One static member, and what it had."""

    id: str
    instance_id: str
    topics: tuple[str, ...]
    session_ms: int
    rebalance_ms: int
    holder: str
    owned: tuple[TopicPartition, ...]


def statics_of(members: Members) -> tuple[StaticMember, ...]:
    """The static members, and what each keeps."""
    return tuple(
        StaticMember(
            m.id,
            m.instance_id,
            m.topics,
            m.session_ms,
            m.rebalance_ms,
            m.holder,
            members.share(m.id).partitions,
        )
        for m in members.members.values()
        if m.instance_id
    )


def remembered(statics: Sequence[StaticMember], counts: Mapping[str, int], epoch: int, now_ms: int) -> Iterator[Event]:
    """What brings a new group, at this epoch, to where its static members left it; sessions begin anew.

    What the other members had is meant for the static ones now, until others join again.
    """
    yield Counted(dict(counts))
    if not statics:
        return
    for number, static in enumerate(statics, epoch + 1):
        yield Joined(
            member=static.id,
            topics=static.topics,
            instance_id=static.instance_id,
            session_ms=static.session_ms,
            rebalance_ms=static.rebalance_ms,
            holder=static.holder,
            epoch=number,
            at_ms=now_ms,
        )
    current = {static.id: static.owned for static in statics}
    target = assign("sticky", {static.id: static.topics for static in statics}, counts, current)
    yield Targeted(epoch + len(statics), target, now_ms)
    for static in statics:
        kept = tuple(place for place in static.owned if place in target[static.id])
        if kept:
            yield Granted(static.id, kept)
