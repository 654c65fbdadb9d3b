"""The members of one stream group: who is a member, which partitions each should have, and which it has now.

How one partition moves from ann to bob when bob joins (cooperative):

    Joined bob  ->  Targeted: it is meant for bob  ->  ann learns it and stops: GaveBack  ->  bob asks: Granted

A partition never has two owners: it is granted only after its previous owner has given it back or has Left. Ann keeps
working on the partitions that stay with her. A member that does not give back in time is removed (Left).

As in `delivery`, commands are decided into events, and only events change the state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import singledispatch, singledispatchmethod
from typing import Final, Literal, NoReturn, TypeAlias

import msgspec

from holdfast.errors import Fenced, InvalidRequest
from holdfast.membership import Assignor, Target, TopicPartition, Wishes, assign


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A member joined with this epoch, or as the next incarnation of member `replaces`, whose share it takes over."""

    member: str
    topics: tuple[str, ...]
    instance_id: str
    session_ms: int
    rebalance_ms: int
    holder: str
    epoch: int
    at_ms: int
    replaces: str = ""


class Heard(msgspec.Struct, frozen=True):
    """A member sent a heartbeat; it knows everything up to this epoch now."""

    member: str
    epoch: int
    at_ms: int


class Left(msgspec.Struct, frozen=True):
    """A member left or was removed; its partitions are free."""

    member: str
    why: str


class Counted(msgspec.Struct, frozen=True):
    """The number of partitions of each topic."""

    counts: dict[str, int]


class Targeted(msgspec.Struct, frozen=True):
    """Which partitions each member should have from now on."""

    epoch: int
    target: Target
    at_ms: int


class GaveBack(msgspec.Struct, frozen=True):
    """A member has stopped working on these partitions."""

    member: str
    partitions: tuple[TopicPartition, ...]


class Granted(msgspec.Struct, frozen=True):
    """A member may work on these partitions."""

    member: str
    partitions: tuple[TopicPartition, ...]


Event: TypeAlias = Joined | Heard | Left | Counted | Targeted | GaveBack | Granted


Rebalance: TypeAlias = Literal["cooperative", "eager"]

# For how many former members it is remembered how they ended.
_REMEMBERED: Final = 1_000


class Member(msgspec.Struct, kw_only=True):
    """A member that works on partitions of the group."""

    id: str
    topics: tuple[str, ...]
    instance_id: str = ""  # not empty for a static member
    session_ms: int
    rebalance_ms: int
    holder: str = ""
    joined_epoch: int
    epoch: int  # the last one it was told
    heard_ms: int
    asked_ms: int | None = None  # since when it has partitions to give back
    owned: dict[TopicPartition, int] = msgspec.field(default_factory=dict)  # with the epoch of the grant

    @staticmethod
    def of(joined: Joined) -> Member:
        """Return the member as it is when it has just joined."""
        return Member(
            id=joined.member,
            topics=joined.topics,
            instance_id=joined.instance_id,
            session_ms=joined.session_ms,
            rebalance_ms=joined.rebalance_ms,
            holder=joined.holder,
            joined_epoch=joined.epoch,
            epoch=joined.epoch,
            heard_ms=joined.at_ms,
        )

    @property
    def name(self) -> str:
        """The name used for assignment; that of a static member outlives its incarnations."""
        return f"static:{self.instance_id}" if self.instance_id else f"member:{self.id}"


class Share(msgspec.Struct, frozen=True):
    """What a member is told: its epoch, what to work on, and what to give back before others may have it."""

    epoch: int
    partitions: tuple[TopicPartition, ...]
    give_back: tuple[TopicPartition, ...]


class Members:
    """The membership of a group; changed by events only."""

    def __init__(self, assignor: Assignor = "sticky", rebalance: Rebalance = "cooperative", *, epoch: int = 0) -> None:
        self.assignor: Assignor = assignor
        self.rebalance: Rebalance = rebalance
        self.epoch = epoch
        self.target_epoch = epoch
        self.counts: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        self.target: Target = {}
        self.owners: dict[TopicPartition, str] = {}
        self.gone: OrderedDict[str, str] = OrderedDict()  # former members, and how they ended

    def share(self, member: str) -> Share:
        """Return what the member should be told now."""
        known = self.members[member]
        stale = set(self.stale(known))
        kept = tuple(sorted(place for place in known.owned if place not in stale))
        return Share(known.epoch, kept, tuple(sorted(stale)))

    def stale(self, member: Member) -> list[TopicPartition]:
        """Return what the member must give back; in an eager group, all it had before the target changed."""
        target = set(self.target[member.id])
        oldest = self.target_epoch if self.rebalance == "eager" else 0
        return [place for place, epoch in member.owned.items() if place not in target or epoch < oldest]

    def known(self, member: str, epoch: int) -> Member:
        """Return the member if this is its current incarnation; raises Fenced otherwise."""
        found = self.members.get(member)
        if found is None:
            self._refuse(member, self.gone.get(member, "is not a member"))
        if epoch < found.joined_epoch:
            self._refuse(
                member, f"has restarted with epoch {found.joined_epoch}, and this call is from its epoch {epoch}"
            )
        if epoch > self.epoch:
            self._refuse(member, f"sent epoch {epoch}, which the group has not reached")
        return found

    def may_commit(self, member: str, epoch: int, topic: str, partition: int) -> None:
        """Raise Fenced, with the reason, unless the member may commit an offset of the partition."""
        found = self.known(member, epoch)
        if epoch != found.epoch:
            self._refuse(member, f"sent the old epoch {epoch} instead of {found.epoch}")
        if (topic, partition) not in found.owned:
            owner = self.owners.get((topic, partition))
            now = f"{owner} has it" if owner else "nobody has it"
            self._refuse(member, f"no longer owns partition {partition} of {topic} ({now})")

    def due_ms(self) -> int | None:
        """Return when the next member must be removed if nothing is heard from it."""
        times = [member.heard_ms + member.session_ms for member in self.members.values()]
        times += [m.asked_ms + m.rebalance_ms for m in self.members.values() if m.asked_ms is not None]
        return min(times, default=None)

    def lateness(self, member: Member, now_ms: int) -> str:
        """Return why the member must be removed; empty if it may stay."""
        if now_ms >= member.heard_ms + member.session_ms:
            return f"sent no heartbeat for {member.session_ms} ms (its session timeout) and was removed"
        if member.asked_ms is not None and now_ms >= member.asked_ms + member.rebalance_ms:
            return f"did not give back its partitions within {member.rebalance_ms} ms, and was removed"
        return ""

    @singledispatchmethod
    def apply(self, event: Event) -> None:
        """Apply an event; one that does not fit is a bug."""
        raise TypeError(f"{event!r} is not an event")

    @apply.register(Joined)
    def _(self, event: Joined) -> None:
        assert event.epoch > self.epoch
        self.epoch = event.epoch
        member = Member.of(event)
        target: tuple[TopicPartition, ...] = ()
        if event.replaces:
            # The new incarnation is working on nothing yet, so it has nothing to give back.
            before = self.members[event.replaces]
            self._free(before, self.stale(before))
            member.owned = before.owned
            target = self.target.pop(before.id)
            del self.members[before.id]
            if before.id != member.id:
                self._remember(before.id, f"was replaced by {member.id}, with the same instance_id {event.instance_id}")
        assert member.id not in self.members
        self.gone.pop(member.id, None)
        self.members[member.id] = member
        self.target[member.id] = target
        for place in member.owned:
            self.owners[place] = member.id

    @apply.register(Heard)
    def _(self, event: Heard) -> None:
        member = self.members[event.member]
        assert member.epoch <= event.epoch <= self.epoch
        member.epoch = event.epoch
        member.heard_ms = max(event.at_ms, member.heard_ms)

    @apply.register(Left)
    def _(self, event: Left) -> None:
        member = self.members.pop(event.member)
        self._free(member, list(member.owned))
        self.target.pop(member.id, None)
        self._remember(member.id, event.why)

    @apply.register(Counted)
    def _(self, event: Counted) -> None:
        self.counts = dict(event.counts)

    @apply.register(Targeted)
    def _(self, event: Targeted) -> None:
        assert event.epoch > self.target_epoch
        assert event.epoch >= self.epoch
        assert set(event.target) == set(self.members)
        self.epoch = self.target_epoch = event.epoch
        self.target = dict(event.target)
        for member in self.members.values():
            if not self.stale(member):
                member.asked_ms = None
            elif member.asked_ms is None:
                member.asked_ms = event.at_ms

    @apply.register(GaveBack)
    def _(self, event: GaveBack) -> None:
        member = self.members[event.member]
        self._free(member, event.partitions)
        if not self.stale(member):
            member.asked_ms = None

    @apply.register(Granted)
    def _(self, event: Granted) -> None:
        member = self.members[event.member]
        for place in event.partitions:
            assert place not in self.owners, f"{place} has an owner"
            assert place in self.target[member.id], f"{place} is not meant for {member.id}"
            self.owners[place] = member.id
            member.owned[place] = self.epoch

    def _free(self, member: Member, places: Iterable[TopicPartition]) -> None:
        for place in places:
            del member.owned[place]
            del self.owners[place]

    def _remember(self, member: str, why: str) -> None:
        self.gone[member] = why
        if len(self.gone) > _REMEMBERED:
            self.gone.popitem(last=False)

    def _refuse(self, member: str, why: str) -> NoReturn:
        raise Fenced(
            f"member {member} {why}. Nothing that it has done since then was accepted: join again, and continue from "
            "the last commit"
        )


class StaticMember(msgspec.Struct, frozen=True, array_like=True):
    """A static member and its partitions, as stored across a restart: if it comes back in time, it keeps its share."""

    id: str
    instance_id: str
    topics: tuple[str, ...]
    session_ms: int
    rebalance_ms: int
    holder: str
    owned: tuple[TopicPartition, ...]


def statics_of(members: Members) -> tuple[StaticMember, ...]:
    """Return the static members and the partitions each keeps."""
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
    """Yield the events that bring a new group, at this epoch, to where its static members left it; sessions restart.

    The partitions of other members are meant for the static ones now, until others join again.
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


def check(members: Members) -> list[str]:
    """Return what is wrong with the state; empty if nothing is. Tests call it after every step."""
    return [*_owners(members), *_target(members), *_epochs(members), *_names(members)]


def _owners(members: Members) -> list[str]:
    wrong: list[str] = []
    owners: dict[TopicPartition, str] = {}
    for name, member in members.members.items():
        for place in member.owned:
            if place in owners:
                wrong.append(f"{place} has two owners: {owners[place]} and {name}")
            owners[place] = name
        if bool(members.stale(member)) != (member.asked_ms is not None):
            wrong.append(f"{name} has {members.stale(member)} to give back, since {member.asked_ms}")
    if owners != members.owners:
        wrong.append("the table of owners is not what the members own")
    return wrong


def _target(members: Members) -> list[str]:
    wrong: list[str] = []
    if set(members.target) != set(members.members):
        wrong.append("the target is not for those who are members")
    wishes = Wishes({name: member.topics for name, member in members.members.items()}, members.counts)
    meant = Counter(place for places in members.target.values() for place in places)
    if meant != Counter(wishes.partitions()):
        wrong.append("the target does not have each wanted partition once")
    for name, places in members.target.items():
        wrong += [
            f"{place} shall be {name}'s, who does not want it" for place in places if not _wants(wishes, name, place)
        ]
    return wrong


def _wants(wishes: Wishes, name: str, place: TopicPartition) -> bool:
    return place[0] in wishes.topics.get(name, ())


def _epochs(members: Members) -> list[str]:
    wrong: list[str] = []
    if members.target_epoch > members.epoch:
        wrong.append(f"the target is of epoch {members.target_epoch}, the group of {members.epoch}")
    for name, member in members.members.items():
        if not member.joined_epoch <= member.epoch <= members.epoch:
            wrong.append(f"{name} is at epoch {member.epoch}, the group at {members.epoch}")
        wrong += [
            f"{name} got {place} in epoch {epoch}" for place, epoch in member.owned.items() if epoch > members.epoch
        ]
    return wrong


def _names(members: Members) -> list[str]:
    names = Counter(member.name for member in members.members.values())
    wrong = [f"{count} members are called {name}" for name, count in names.items() if count > 1]
    return wrong + [f"{name} is kept as {member.id}" for name, member in members.members.items() if name != member.id]


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A client wants a share of these topics' partitions.

    With an `instance_id` it is a static member: a client that joins with the same one takes its place and its share.
    """

    member: str
    topics: tuple[str, ...]
    instance_id: str = ""
    session_ms: int = 30_000
    rebalance_ms: int = 60_000
    holder: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """A member is alive; `owned` is what it works on now, or None if it does not say and wants nothing new."""

    member: str
    epoch: int
    owned: tuple[TopicPartition, ...] | None = None


class Leave(msgspec.Struct, frozen=True):
    """A member has stopped working on everything it had."""

    member: str
    epoch: int


class Partitions(msgspec.Struct, frozen=True):
    """How many partitions each topic has now; topics not named are gone."""

    counts: dict[str, int]


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Command: TypeAlias = Join | Heartbeat | Leave | Partitions | Tick


LEFT: Final = "has left"


def decide(members: Members, command: Command, now_ms: int) -> list[Event]:
    """Return the events that the command leads to; raises Fenced if the caller is no longer a member.

    A member that joins gets its share with its first heartbeat.
    """
    return list(_events(command, members, now_ms))


# Registered by class, not by annotation: evaluating one takes a tenth of a millisecond, at every start.
@singledispatch
def _events(command: Command, members: Members, now_ms: int) -> Iterator[Event]:
    raise TypeError(f"{command!r} is not a command")


@_events.register(Join)
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
        newcomer = Member.of(joined)
        there = {name: member for name, member in members.members.items() if member is not before}
        there[newcomer.id] = newcomer
        current = _current(members)
        if before is not None:
            current[newcomer.id] = current.pop(before.id)
        yield Targeted(joined.epoch, _new_target(members, there, members.counts, current), now_ms)


@_events.register(Heartbeat)
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


@_events.register(Leave)
def _(command: Leave, members: Members, now_ms: int) -> Iterator[Event]:
    if command.member in members.members:
        member = members.known(command.member, command.epoch)
        yield from _without(members, {member.id: LEFT}, now_ms)


@_events.register(Partitions)
def _(command: Partitions, members: Members, now_ms: int) -> Iterator[Event]:
    if command.counts == members.counts:
        return
    # A new epoch only if a share changes: otherwise all members would be told of a change that concerns none of them.
    yield Counted(dict(command.counts))
    target = _new_target(members, members.members, command.counts, _current(members))
    if target != members.target:
        yield Targeted(members.epoch + 1, target, now_ms)


@_events.register(Tick)
def _(_: Tick, members: Members, now_ms: int) -> Iterator[Event]:
    late = {name: why for name, member in members.members.items() if (why := members.lateness(member, now_ms))}
    if late:
        yield from _without(members, late, now_ms)


def _incarnation(members: Members, command: Join) -> Member | None:
    """Return the member whose place the new one takes."""
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
    yield Targeted(members.epoch + 1, _new_target(members, there, members.counts, current), now_ms)


def _new_target(
    members: Members,
    there: Mapping[str, Member],
    counts: Mapping[str, int],
    current: Mapping[str, list[TopicPartition]],
) -> Target:
    """Return which partitions each member should have, assigned by the names that members have after a restart."""
    found = assign(
        members.assignor,
        {member.name: member.topics for member in there.values()},
        counts,
        {member.name: current.get(member.id, []) for member in there.values()},
    )
    return {member.id: found[member.name] for member in there.values()}


def _current(members: Members, leavers: Container[str] = ()) -> dict[str, list[TopicPartition]]:
    """Return what each member has, and what is meant for it and is free, or will be when the leavers are gone."""
    current = {name: list(member.owned) for name, member in members.members.items()}
    owned = {place for place, owner in members.owners.items() if owner not in leavers}
    for name, places in members.target.items():
        current[name] += [place for place in places if place not in owned]
    return current


def _grant(members: Members, member: Member, given: set[TopicPartition]) -> tuple[TopicPartition, ...]:
    """Return what is meant for the member and free, now that it has given those back."""
    if members.rebalance == "eager" and any(
        set(members.stale(other)) - (given if other is member else set()) for other in members.members.values()
    ):
        return ()  # in an eager group, everyone gives back first
    return tuple(p for p in members.target[member.id] if p not in members.owners or p in given)
