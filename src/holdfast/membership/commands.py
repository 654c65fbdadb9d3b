"""What may be asked of the membership of a group."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.membership.wishes import TopicPartition


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
