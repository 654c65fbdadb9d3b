"""Descriptions of topics and groups, and their arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from holdfast.api.drafts import instant_ns
from holdfast.broker.folder.contents import check_settings
from holdfast.broker.streams.offsets import To
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.model import Pause
from holdfast.settings import QueueSettings, TopicSettings

_MOST_AT_ONCE: Final = 100_000


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One partition at one moment. `problem` says why it has stopped, while the others continue, and what to do."""

    number: int
    start: int
    end: int
    bytes: int
    segments: int
    problem: str = ""


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One topic at one moment; `settings` are those that differ from the defaults."""

    name: str
    id: int
    created_at: datetime | None
    partitions: list[PartitionInfo]
    groups: list[str]
    stream_groups: list[str]
    settings: dict[str, Any]

    @property
    def messages(self) -> int:
        """The number of stored messages."""
        return sum(partition.end - partition.start for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """The size of the stored messages in bytes."""
        return sum(partition.bytes for partition in self.partitions)


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one topic: its mode and its lag.

    A query that runs in another process is listed as a group as long as `renewed_seconds` is below its
    `timeout_seconds`. If a group cannot be opened, `problem` says why and what to do; its progress is unknown, so all
    stored messages count as its lag.
    """

    name: str
    topic: str
    mode: Literal["queue", "stream", "query"]
    lag: int
    members: int
    lag_seconds: float
    renewed_seconds: float | None = None
    timeout_seconds: float | None = None
    problem: str = ""
    paused: Pause | None = None


def topic_settings(differing: Mapping[str, Any]) -> TopicSettings:
    """Return full settings from those that differ from the defaults. Unknown names are ignored."""
    known = {name: value for name, value in differing.items() if name in TopicSettings.__struct_fields__}
    return msgspec.convert(known, TopicSettings)


class QueueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A queue to open. Without a name, the only one is meant; `changes` are settings by name."""

    name: str | None
    body_type: Any = None
    settings: QueueSettings | None = None
    changes: Mapping[str, Any] = {}
    create: bool = True


def to_of(to: object) -> To:
    """Return the target of a reset: "earliest", "latest", a time or an offset."""
    if isinstance(to, str) and to in ("earliest", "latest"):
        return To(end="earliest" if to == "earliest" else "latest")
    if isinstance(to, datetime):
        return To(time_ns=instant_ns(to, "to"))
    if type(to) is int and to >= 0:
        return To(offset=to)
    raise InvalidRequest(f'to={to!r} cannot be used: give "earliest", "latest", a time or an offset')


def changes_to(settings: QueueSettings | None, kept: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must change so that a topic with the stored settings `kept` gets the given ones, with the changes.

    Given settings replace the stored ones: what only the stored ones set goes back to its default.
    """
    if settings is None:
        return changes_of(changes)
    usual = TopicSettings()
    given = msgspec.structs.asdict(check_settings(settings, {}))
    differing = {name: value for name, value in given.items() if value != getattr(usual, name)}
    reset = {name: getattr(usual, name) for name in kept if hasattr(usual, name)}
    wanted = {**reset, **differing}
    return changes_of({**{name: value for name, value in wanted.items() if kept.get(name) != value}, **changes})


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name; `retention_hours` becomes `retention_ms`."""
    changes = dict(given)
    for name in ("durability", "ack_durability"):
        if name in changes:
            raise BadSettings(
                f"{name} is not kept with a topic: each program chooses it for itself, when it opens the broker "
                f"(open_broker(durability=...), or the settings file) or for one call"
            )
    if "retention_hours" in changes:
        hours = changes.pop("retention_hours")
        if "retention_ms" in changes:
            raise BadSettings("give retention_hours or retention_ms, not both")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours <= 100 * 365 * 24):
            raise BadSettings(f"retention_hours={hours!r} cannot be used: give a number of hours, or None for ever")
        changes["retention_ms"] = None if hours is None else max(round(hours * 3_600_000), 1)
    return changes


def check_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a topic to change, of which there must be at least one."""
    if not given:
        raise BadSettings("alter_topic changes settings: give at least one, such as max_attempts=3")
    return changes_of(given)


def check_partitions(count: object) -> None:
    """Refuse a bad number of partitions for a new topic."""
    if count is not None:
        check_settings(None, {"partitions": count})


def check_added(count: object) -> None:
    """Refuse a bad number of partitions to add."""
    if type(count) is not int or count < 1:
        raise InvalidRequest(f"count={count!r} cannot be used: give how many partitions to add, 1 or more")


def check_start(start: object) -> None:
    """Refuse anything but a position where a new group can begin."""
    if start not in ("earliest", "latest"):
        raise InvalidRequest(f'start={start!r} cannot be used: "earliest" or "latest"')


def check_read(offset: object, limit: object, on_damage: object) -> None:
    """Refuse bad arguments of `read`."""
    if type(limit) is not int or not 1 <= limit <= _MOST_AT_ONCE:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
    if on_damage not in ("raise", "skip"):
        raise InvalidRequest(f'on_damage={on_damage!r} cannot be used: give "raise" or "skip"')
    if offset is not None and type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
