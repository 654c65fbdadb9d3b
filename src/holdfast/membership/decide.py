"""What follows from a command: events, or a refusal. A decision reads the members and changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import singledispatch
from typing import Final, TypeAlias

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.membership.assignment import Target, TopicPartition, assign
from holdfast.membership.members import (
    Counted,
    Event,
    GaveBack,
    Granted,
    Heard,
    Joined,
    Left,
    Member,
    Members,
    Targeted,
)

# What may be asked of the membership of a group.


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants a share of these topics' partitions.

    With an `instance_id` it is a static member: whoever joins with the same one takes its place, and its share.
    """

    member: str
    topics: tuple[str, ...]
    instance_id: str = ""
    session_ms: int = 30_000
    rebalance_ms: int = 60_000
    holder: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """A member is alive; `owned` is what it works on now, None if it does not say and wants nothing new."""

    member: str
    epoch: int
    owned: tuple[TopicPartition, ...] | None = None


class Leave(msgspec.Struct, frozen=True):
    """A member has stopped working on all it had."""

    member: str
    epoch: int


class Partitions(msgspec.Struct, frozen=True):
    """How many partitions each topic has now; a topic that is not named is gone."""

    counts: dict[str, int]


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Command: TypeAlias = Join | Heartbeat | Leave | Partitions | Tick


LEFT: Final = "has left"


def decide(members: Members, command: Command, now_ms: int) -> list[Event]:
    """The events that the command leads to; Fenced where it comes from somebody who is no member any more.

    Whoever joins gets its share with its first heartbeat.
    """
    return list(_events(command, members, now_ms))


@singledispatch
def _events(command: Command, members: Members, now_ms: int) -> Iterator[Event]:
    raise TypeError(f"{command!r} is no command")


@_events.register
def _(command: Join, members: Members, now_ms: int) -> Iterator[Event]:
    before = _incarnation(members, command)
    joined = Joined(
        member=command.member,
        topics=tuple(sorted(set(command.topics))),
        instance_id=command.instance_id,
        session_ms=command.session_ms,
        rebalance_ms=command.rebalance_ms,
        holder=command.holder,
        epoch=members.epoch + 1,
        at_ms=now_ms,
        replaces="" if before is None else before.id,
    )
    yield joined
    if before is None or before.topics != joined.topics:
        newcomer = Member(
            id=joined.member,
            topics=joined.topics,
            instance_id=joined.instance_id,
            session_ms=joined.session_ms,
            rebalance_ms=joined.rebalance_ms,
            joined_epoch=joined.epoch,
            epoch=joined.epoch,
            heard_ms=now_ms,
        )
        there = {name: member for name, member in members.members.items() if member is not before}
        there[newcomer.id] = newcomer
        current = _current(members)
        if before is not None:
            current[newcomer.id] = current.pop(before.id)
        yield Targeted(joined.epoch, _target(members, there, members.counts, current), now_ms)


@_events.register
def _(command: Heartbeat, members: Members, now_ms: int) -> Iterator[Event]:
    member = members.known(command.member, command.epoch)
    if command.owned is None:
        yield Heard(member.id, member.epoch, now_ms)
        return
    yield Heard(member.id, members.epoch, now_ms)
    still = set(command.owned)
    given = tuple(sorted(place for place in members.stale(member) if place not in still))
    if given:
        yield GaveBack(member.id, given)
    granted = _grant(members, member, set(given))
    if granted:
        yield Granted(member.id, granted)


@_events.register
def _(command: Leave, members: Members, now_ms: int) -> Iterator[Event]:
    if command.member in members.members:
        member = members.known(command.member, command.epoch)
        yield from _without(members, {member.id: LEFT}, now_ms)


@_events.register
def _(command: Partitions, members: Members, now_ms: int) -> Iterator[Event]:
    if command.counts == members.counts:
        return
    yield Counted(dict(command.counts))
    target = _target(members, members.members, command.counts, _current(members))
    if target != members.target:
        yield Targeted(members.epoch + 1, target, now_ms)


@_events.register
def _(_: Tick, members: Members, now_ms: int) -> Iterator[Event]:
    late = {name: why for name, member in members.members.items() if (why := members.lateness(member, now_ms))}
    if late:
        yield from _without(members, late, now_ms)


def _incarnation(members: Members, command: Join) -> Member | None:
    """The member that the newcomer takes the place of."""
    same_name = members.members.get(command.member)
    if not command.instance_id:
        return same_name
    for member in members.members.values():
        if member.instance_id == command.instance_id:
            if same_name is not None and same_name is not member:
                raise InvalidRequest(
                    f"member {command.member} cannot be instance {command.instance_id}, which is {member.id}: "
                    "give each instance an id of its own"
                )
            return member
    return same_name


def _without(members: Members, leavers: Mapping[str, str], now_ms: int) -> Iterator[Event]:
    for name, why in leavers.items():
        yield Left(name, why)
    there = {name: member for name, member in members.members.items() if name not in leavers}
    current = _current(members, leavers)
    yield Targeted(members.epoch + 1, _target(members, there, members.counts, current), now_ms)


def _target(
    members: Members,
    there: Mapping[str, Member],
    counts: Mapping[str, int],
    current: Mapping[str, list[TopicPartition]],
) -> Target:
    """Who shall have what; each member goes by the name that it would have after a restart."""
    found = assign(
        members.assignor,
        {member.name: member.topics for member in there.values()},
        counts,
        {member.name: current.get(member.id, []) for member in there.values()},
    )
    return {member.id: found[member.name] for member in there.values()}


def _current(members: Members, leavers: Container[str] = ()) -> dict[str, list[TopicPartition]]:
    """What each member has, and what is meant for it and free, or will be when those are gone."""
    current = {name: list(member.owned) for name, member in members.members.items()}
    owned = {place for place, owner in members.owners.items() if owner not in leavers}
    for name, places in members.target.items():
        current[name] += [place for place in places if place not in owned]
    return current


def _grant(members: Members, member: Member, given: set[TopicPartition]) -> tuple[TopicPartition, ...]:
    """What is meant for the member and free, now that it has given those back."""
    if members.rebalance == "eager" and any(
        set(members.stale(other)) - (given if other is member else set()) for other in members.members.values()
    ):
        return ()  # first all give back
    return tuple(p for p in members.target[member.id] if p not in members.owners or p in given)
