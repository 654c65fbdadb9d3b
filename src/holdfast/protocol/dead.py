"""Dead letters and delayed messages on the wire."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.api.letters import DeadGroup
from holdfast.delivery.group import Failure
from holdfast.protocol.messages import Instant, Name, Told, Wire
from holdfast.protocol.queues import After, InGroup, Limit, Listed, Where

LetterId = Annotated[str, Meta(min_length=1, max_length=300)]


class DeadQuery(InGroup, kw_only=True):
    """Which dead letters to show."""

    where: Where | None = None
    limit: Limit = 100
    bodies: bool = True
    after: After | None = None


class DeadGroupsQuery(InGroup, kw_only=True):
    """Which dead letters to group."""

    where: Where | None = None
    limit: Limit = 100


class Letter(Listed, kw_only=True):
    """A message that died: as it was, with every error, the reason and its original place."""

    original_id: str
    original_offset: int
    original_timestamp: Instant
    dead_at: Instant
    failures: list[Failure] = msgspec.field(default_factory=list)
    first_delivery: Instant | None = None
    last_delivery: Instant | None = None
    state: Any = None


class Letters(Told, kw_only=True):
    """Dead letters, oldest first; `next` is what `after` goes on from, if there may be more.

    That may be so of a page with few letters, or none: one call looks at so many (`scanned`) and no more.
    So many were `damaged`, and are left out.
    """

    letters: list[Letter]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class DeadGroups(Told, kw_only=True):
    """Dead letters by reason and kind of error, the most frequent first."""

    groups: list[DeadGroup]


class Purge(InGroup, kw_only=True):
    """Which dead letters to drop for good: by id, by a condition, or all; with `dry_run` only say which."""

    ids: Annotated[list[LetterId], Meta(max_length=100_000)] | None = None
    where: Where | None = None
    limit: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    dry_run: bool = False


class Redrive(Purge, kw_only=True):
    """Which dead letters to put back, and how many a second; `to` another topic, where they become new messages."""

    to: Name | None = None

    rate: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


class RedriveTold(Told, kw_only=True):
    """What a redrive or a purge found and did; in a stream, how far it is, and `ended` in the last line."""

    matched: int
    done: int
    ids: list[str] = msgspec.field(default_factory=list)
    ended: bool = True


class DelayedQuery(Wire, kw_only=True):
    """How many delayed messages to show, behind which place, and whether with their bodies."""

    limit: Limit = 100
    bodies: bool = True
    after: After | None = None
