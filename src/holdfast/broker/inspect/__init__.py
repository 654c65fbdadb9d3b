"""The state of a data folder, read while another process may own it: takes no lock and writes nothing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.model import Pause


class PartitionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one partition. `bytes` includes `tiered_bytes`, which are only in the store.

    `problem` says why this partition has stopped, while the others continue, and what to do.
    """

    number: int
    start: int = 0
    end: int = 0
    bytes: int = 0
    segments: int = 0
    tiered_bytes: int = 0
    problem: str = ""


class PartitionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A group's progress in one partition: `lag` messages are unhandled, the oldest of them for `lag_seconds`."""

    topic: str
    partition: int
    offset: int
    end: int
    lag: int
    lag_seconds: float
    leased: int = 0
    waiting: int = 0


class QueryStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a query reports: who runs it, when it last reported, and how long a report is valid."""

    kind: str
    holder: str
    renewed_seconds: float
    timeout_seconds: float
    stale: bool


class GroupStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one topic, or a query of another process that reads the topic."""

    name: str
    topic: str
    mode: Literal["queue", "stream", "query"]
    static_members: tuple[str, ...]
    partitions: list[PartitionProgress]
    wrong: tuple[str, ...] = ()
    query: QueryStanding | None = None
    paused: Pause | None = None

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.partitions)

    @property
    def lag_seconds(self) -> float:
        return max((each.lag_seconds for each in self.partitions), default=0.0)

    @property
    def leased(self) -> int:
        return sum(each.leased for each in self.partitions)

    @property
    def document(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self),
            "lag": self.lag,
            "lag_seconds": self.lag_seconds,
            "leased": self.leased,
        }


class TopicStanding(msgspec.Struct, frozen=True, kw_only=True):
    """One topic; `settings` are those stored in its folder."""

    name: str
    id: int
    created_ms: int
    partitions: list[PartitionStanding]
    groups: list[GroupStanding]
    dead: int
    settings: dict[str, Any]

    @property
    def messages(self) -> int:
        return sum(each.end - each.start for each in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.partitions)

    @property
    def tiered_bytes(self) -> int:
        return sum(each.tiered_bytes for each in self.partitions)
