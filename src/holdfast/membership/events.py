"""What happens to the membership of a group.

The way of one partition from ann to bob, when bob joins (cooperative):

    Joined bob  ->  Targeted: it shall be bob's  ->  ann is told, gives it back: GaveBack  ->  bob asks: Granted

What ann keeps she works on all the time. Whoever does not give back in time has Left.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.membership.wishes import Target, TopicPartition


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
