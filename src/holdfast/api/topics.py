"""Topics, groups, and consumers of stream groups: how they are described, and their arguments, checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeAlias

import msgspec

from holdfast.api.contents import Body, Home, MessageFields, PartitionHome
from holdfast.api.drafts import Bodies, instant_ns
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.streams import To
from holdfast.env.process import asyncio
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.membership import TopicPartition
from holdfast.model import Pause, Record
from holdfast.settings import ConsumerSettings, QueueSettings, TopicSettings, check_settings

_MOST_LISTED: Final = 100_000


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One partition at one moment. `bytes` includes `tiered_bytes`, which are only in the store.

    `problem` says why this partition has stopped, while the others continue, and what to do.
    """

    number: int
    start: int
    end: int
    bytes: int
    segments: int
    problem: str = ""
    tiered_bytes: int = 0


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One topic at one moment; `settings` are those that differ from the defaults. In a cluster it has a shard."""

    name: str
    id: int
    created_at: datetime | None
    partitions: list[PartitionInfo]
    groups: list[str]
    stream_groups: list[str]
    settings: dict[str, Any]
    shard: int | None = None

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
                f"{name} is not a setting of the topic: each program chooses it for itself, when it opens the broker "
                f"(open_broker(durability=...), or the settings file) or for one call"
            )
    if "retention_hours" in changes:
        hours = changes.pop("retention_hours")
        if "retention_ms" in changes:
            raise BadSettings("give retention_hours or retention_ms, not both")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours <= 100 * 365 * 24):
            raise BadSettings(
                f"retention_hours={hours!r} cannot be used: give a number of hours, or None to keep messages forever"
            )
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
        raise InvalidRequest(f'start={start!r} cannot be used: give "earliest" or "latest"')


def check_read(offset: object, limit: object, on_damage: object) -> None:
    """Refuse bad arguments of `read`."""
    if type(limit) is not int or not 1 <= limit <= _MOST_LISTED:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_LISTED}")
    if on_damage not in ("raise", "skip"):
        raise InvalidRequest(f'on_damage={on_damage!r} cannot be used: give "raise" or "skip"')
    if offset is not None and type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} is not an offset; give a whole number")


class StreamHome(PartitionHome):
    """One partition during one assignment to a consumer: messages of an earlier assignment cannot be committed."""


# A struct: more than a million are created per second, in C four times as fast as ordinary objects.
class StreamMessage(
    MessageFields[Body], msgspec.Struct, Generic[Body], frozen=True, gc=False, eq=False, repr_omit_defaults=True
):
    """A message that a consumer read. It is not leased; `commit` records how far the group has read."""

    _home: Home
    _bodies: Bodies
    _record: Record

    __repr__ = MessageFields.__repr__


class ConsumedPartition:
    """One partition assigned to a consumer, and its progress there.

    Messages below offset `given` were returned to the user, those below `handled` are handled, and those below `kept`
    are committed.
    """

    def __init__(self, place: TopicPartition, position: int) -> None:
        self.place = place
        self.home = StreamHome(*place)
        self.given = self.handled = self.kept = position
        self.paused = False

    @property
    def start(self) -> int:
        """The offset of the oldest stored message, as far as this process knows."""
        return 0

    def move(self, position: int) -> None:
        """Continue reading at this offset, which the next commit will also commit."""
        self.given = self.handled = position


# The arguments of a consumer, checked once for every face and for the server.


Listener: TypeAlias = Callable[[list[TopicPartition]], Any]

_MOST_POLLED: Final = 1_000_000
_MOST_TEXT: Final = 200


class MemberRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member that wants to join a group. Its settings are `settings`, or the defaults, with these changes."""

    topics: tuple[str, ...]
    group: str
    instance_id: str
    holder: str
    on_assigned: Listener | None
    on_revoked: Listener | None
    settings: ConsumerSettings | None
    changes: Mapping[str, Any]
    bodies: Bodies


def member_request(
    topics: str | Iterable[str],
    group: str,
    *,
    body_type: Any = None,
    instance_id: str | None = None,
    holder: str | None = None,
    on_assigned: Listener | None = None,
    on_revoked: Listener | None = None,
    settings: ConsumerSettings | None = None,
    **changes: Any,
) -> MemberRequest:
    """Check the arguments of `Broker.consumer`. Raises InvalidRequest if one of them cannot be used."""
    for name, listener in (("on_assigned", on_assigned), ("on_revoked", on_revoked)):
        if listener is not None and not callable(listener):
            raise InvalidRequest(f"{name}={listener!r} cannot be used: give a function that takes a list of partitions")
    return MemberRequest(
        topics=_topic_names(topics),
        group=check_name(group, "group"),
        instance_id=_text(instance_id, "instance_id"),
        holder=_text(holder, "holder"),
        on_assigned=on_assigned,
        on_revoked=on_revoked,
        settings=settings,
        changes=changes,
        bodies=Bodies(body_type),
    )


class SeekTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where to continue reading, and in which partitions: one, all of a topic, or all."""

    topic: str | None
    partition: int | None
    offset: int | None = None
    to: Literal["start", "end"] | None = None
    time: datetime | None = None


def check_count(count: object) -> int:
    """Return the number of messages to poll, checked."""
    if type(count) is not int or not 1 <= count <= _MOST_POLLED:
        raise InvalidRequest(f"max_records={count!r} cannot be used: give a whole number from 1 to {_MOST_POLLED}")
    return count


def check_offsets(offsets: object) -> Mapping[TopicPartition, int]:
    """Return the offsets to commit, by partition, checked."""
    if not isinstance(offsets, Mapping) or not all(
        isinstance(place, tuple) and tuple(map(type, place)) == (str, int) and type(offset) is int
        for place, offset in offsets.items()
    ):
        raise InvalidRequest(f"offsets={offsets!r} cannot be used: give {{(topic, partition): offset}}")
    return offsets


def owned_partition(
    partitions: Mapping[TopicPartition, ConsumedPartition], topic: object, partition: object
) -> ConsumedPartition:
    """Return one of the consumer's partitions. Raises InvalidRequest if it is not assigned to the consumer."""
    found = partitions.get((topic, partition)) if type(topic) is str and type(partition) is int else None
    if found is None:
        ours = ", ".join(f"{name}-{number}" for name, number in sorted(partitions)[:10]) or "none"
        raise InvalidRequest(
            f"partition {partition!r} of {topic!r} is not assigned to this consumer: use one of its partitions: {ours}"
        )
    return found


def chosen_partitions(
    partitions: Mapping[TopicPartition, ConsumedPartition],
    topics: tuple[str, ...],
    topic: str | None,
    partition: int | None,
) -> list[ConsumedPartition]:
    """Return one partition of the consumer, all of a topic, or all."""
    if partition is not None:
        return [owned_partition(partitions, topic, partition)]
    if topic is not None and topic not in topics:
        raise InvalidRequest(f"this consumer reads {', '.join(topics)}, not {topic!r}: name one of its topics")
    return [found for place, found in sorted(partitions.items()) if topic in (None, place[0])]


def _topic_names(topics: object) -> tuple[str, ...]:
    if isinstance(topics, str):
        return (check_topic_name(topics),)
    if not isinstance(topics, Iterable):
        raise InvalidRequest(f"topics={topics!r} cannot be used: give a list of names")
    names = tuple(dict.fromkeys(check_topic_name(name) for name in topics))
    if not names:
        raise InvalidRequest("a consumer needs at least one topic: name the topics to read")
    return names


def _text(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value or len(value) > _MOST_TEXT or not value.isprintable():
        raise InvalidRequest(f"{name}={value!r} cannot be used: give a short text")
    return value


# The current user of an object that is for one task or thread at a time.


class AsyncUser:
    """The task that creates this object."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def is_elsewhere(self) -> bool:
        """Return whether it is still running and not the caller."""
        task = self._task
        return task is not None and task is not asyncio.current_task() and not task.done()


class User:
    """The thread that creates this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def is_elsewhere(self) -> bool:
        """Return whether it is still running and not the caller."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()
