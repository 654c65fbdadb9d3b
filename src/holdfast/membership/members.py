"""The members of one stream group: who is there, who shall have which partition, who has it now.

The epoch rises with every join and every change of the target. A member shows the epoch that it was last told;
one that shows an older one has missed something, or is an earlier incarnation: it is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import singledispatchmethod
from typing import Final, Literal, NoReturn, TypeAlias

import msgspec

from holdfast.errors import Fenced
from holdfast.membership.assignment import Assignor, Target, TopicPartition, assign

# What happens to the membership of a group.
#
# The way of one partition from ann to bob, when bob joins (cooperative):
#
#     Joined bob  ->  Targeted: it shall be bob's  ->  ann is told, gives it back: GaveBack  ->  bob asks: Granted
#
# What ann keeps she works on all the time. Whoever does not give back in time has Left.


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A member began, with this epoch; or the next incarnation of the member `replaces`, whose share it takes over."""

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
    """A member showed that it is alive; it knows all up to this epoch now."""

    member: str
    epoch: int
    at_ms: int


class Left(msgspec.Struct, frozen=True):
    """A member ended, of itself or not; what it had is free."""

    member: str
    why: str


class Counted(msgspec.Struct, frozen=True):
    """The topics have so many partitions."""

    counts: dict[str, int]


class Targeted(msgspec.Struct, frozen=True):
    """Who shall have what from now on."""

    epoch: int
    target: Target
    at_ms: int


class GaveBack(msgspec.Struct, frozen=True):
    """A member has stopped working on these."""

    member: str
    partitions: tuple[TopicPartition, ...]


class Granted(msgspec.Struct, frozen=True):
    """A member may work on these."""

    member: str
    partitions: tuple[TopicPartition, ...]


Event: TypeAlias = Joined | Heard | Left | Counted | Targeted | GaveBack | Granted


Rebalance: TypeAlias = Literal["cooperative", "eager"]

# Of so many former members it is known how they ended.
_REMEMBERED: Final = 1_000


class Member(msgspec.Struct, kw_only=True):
    """One who works on partitions of the group."""

    id: str
    topics: tuple[str, ...]
    instance_id: str = ""  # static, if not empty
    session_ms: int
    rebalance_ms: int
    holder: str = ""
    joined_epoch: int
    epoch: int  # the last that it was told
    heard_ms: int
    asked_ms: int | None = None  # since when it has something to give back
    owned: dict[TopicPartition, int] = msgspec.field(default_factory=dict)  # with the epoch of the grant

    @property
    def name(self) -> str:
        """The name by which shares are dealt: that of a static member outlives its incarnations."""
        return f"static:{self.instance_id}" if self.instance_id else f"member:{self.id}"


class Share(msgspec.Struct, frozen=True):
    """What a member is told: its epoch, what to work on, and what to give back before anybody else may have it."""

    epoch: int
    partitions: tuple[TopicPartition, ...]
    give_back: tuple[TopicPartition, ...]


class Members:
    """The state of a group's membership; changed by events only."""

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
        """What the member should be told now."""
        known = self.members[member]
        stale = set(self.stale(known))
        kept = tuple(sorted(place for place in known.owned if place not in stale))
        return Share(known.epoch, kept, tuple(sorted(stale)))

    def stale(self, member: Member) -> list[TopicPartition]:
        """What the member has and must give back; in an eager group that is all it had before the target changed."""
        target = set(self.target[member.id])
        oldest = self.target_epoch if self.rebalance == "eager" else 0
        return [place for place, epoch in member.owned.items() if place not in target or epoch < oldest]

    def known(self, member: str, epoch: int) -> Member:
        """The member, if this is its present incarnation; else Fenced."""
        found = self.members.get(member)
        if found is None:
            self._refuse(member, self.gone.get(member, "is not a member"))
        if epoch < found.joined_epoch:
            self._refuse(member, f"has begun anew with epoch {found.joined_epoch}, and this is its epoch {epoch}")
        if epoch > self.epoch:
            self._refuse(member, f"shows epoch {epoch}, which the group has not reached")
        return found

    def may_commit(self, member: str, epoch: int, topic: str, partition: int) -> None:
        """Return if the member may say how far it came with the partition; else raise Fenced, with the reason."""
        found = self.known(member, epoch)
        if epoch != found.epoch:
            self._refuse(member, f"shows the old epoch {epoch} instead of {found.epoch}")
        if (topic, partition) not in found.owned:
            owner = self.owners.get((topic, partition))
            now = f"{owner} has it" if owner else "nobody has it"
            self._refuse(member, f"does not own partition {partition} of {topic} any more ({now})")

    def due_ms(self) -> int | None:
        """When the next member must be taken for gone, if nothing is heard until then."""
        times = [member.heard_ms + member.session_ms for member in self.members.values()]
        times += [m.asked_ms + m.rebalance_ms for m in self.members.values() if m.asked_ms is not None]
        return min(times, default=None)

    def lateness(self, member: Member, now_ms: int) -> str:
        """Why the member must go; nothing, if it may stay."""
        if now_ms >= member.heard_ms + member.session_ms:
            return f"was not heard for {member.session_ms} ms, its session, and was taken for gone"
        if member.asked_ms is not None and now_ms >= member.asked_ms + member.rebalance_ms:
            return f"gave nothing back within {member.rebalance_ms} ms, when others should have it, and was put out"
        return ""

    @singledispatchmethod
    def apply(self, event: Event) -> None:
        """Make it so; an event that does not fit is a mistake of ours."""
        raise TypeError(f"{event!r} is no event")

    @apply.register
    def _(self, event: Joined) -> None:
        assert event.epoch > self.epoch
        self.epoch = event.epoch
        member = Member(
            id=event.member,
            topics=event.topics,
            instance_id=event.instance_id,
            session_ms=event.session_ms,
            rebalance_ms=event.rebalance_ms,
            holder=event.holder,
            joined_epoch=event.epoch,
            epoch=event.epoch,
            heard_ms=event.at_ms,
        )
        target: tuple[TopicPartition, ...] = ()
        if event.replaces:
            # The new incarnation holds nothing yet, so it has nothing to give back.
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

    @apply.register
    def _(self, event: Heard) -> None:
        member = self.members[event.member]
        assert member.epoch <= event.epoch <= self.epoch
        member.epoch = event.epoch
        member.heard_ms = max(event.at_ms, member.heard_ms)

    @apply.register
    def _(self, event: Left) -> None:
        member = self.members.pop(event.member)
        self._free(member, list(member.owned))
        self.target.pop(member.id, None)
        self._remember(member.id, event.why)

    @apply.register
    def _(self, event: Counted) -> None:
        self.counts = dict(event.counts)

    @apply.register
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

    @apply.register
    def _(self, event: GaveBack) -> None:
        member = self.members[event.member]
        self._free(member, event.partitions)
        if not self.stale(member):
            member.asked_ms = None

    @apply.register
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
            f"member {member} {why}. What it did since then counts for nothing: join again and go on from there"
        )


# Static members, as they are remembered beyond a restart: whoever comes back in time finds its share untouched.


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
