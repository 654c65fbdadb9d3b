"""How topics and groups stand, seen without owning anything: beside whoever owns the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import msgspec

from holdfast.broker.catalog import Catalog
from holdfast.broker.groups import GroupNotes
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    GROUPS,
    SETTINGS,
    group_folder,
    names_in,
    partition_folder,
    topic_folder,
    topics,
)
from holdfast.broker.policy import kept_settings
from holdfast.cli.commits import commits_of
from holdfast.cli.parts import replayed_group
from holdfast.delivery.group import Group
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, OffsetOutOfRange
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log


class PartitionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """One partition: what it keeps."""

    number: int
    start: int = 0
    end: int = 0
    bytes: int = 0
    segments: int = 0


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is in one partition: `lag` messages are not handled, the oldest of them for `lag_seconds`."""

    topic: str
    partition: int
    offset: int
    end: int
    lag: int
    lag_seconds: float
    leased: int = 0
    waiting: int = 0


class GroupStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one topic."""

    name: str
    topic: str
    mode: Literal["queue", "stream"]
    static_members: tuple[str, ...]
    partitions: list[PartitionLag]
    wrong: tuple[str, ...] = ()

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
    """One topic; `settings` are those that it keeps."""

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


class Standing:
    """A data folder at one moment."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._catalog = Catalog(world, folder)
        self._streams = {
            name: commits_of(world, join(folder, f"{GROUPS}/{name}"))
            for name in names_in(world, join(folder, GROUPS))
            if not name.startswith(".")
        }

    def topics(self) -> Iterator[TopicStanding]:
        """All of them; one that is deleted meanwhile is left out."""
        for name in topics(self._world, self._folder):
            try:
                yield self.topic(name)
            except HoldfastError:
                if name in self._catalog:
                    raise

    def topic(self, name: str) -> TopicStanding:
        """One of them; UnknownTopic where there is none."""
        facts = self._catalog.facts(name)
        readers = dict(self._readers(name, facts.partitions))
        partitions = []
        for number in range(facts.partitions):
            reader = readers.get(number)
            if reader is None:
                partitions.append(PartitionStanding(number=number))
                continue
            segments = reader.segments()
            partitions.append(
                PartitionStanding(
                    number=number,
                    start=reader.start,
                    end=reader.end,
                    bytes=sum(segment.bytes for segment in segments),
                    segments=len(segments),
                )
            )
        return TopicStanding(
            name=name,
            id=facts.id,
            created_ms=facts.created_ms,
            partitions=partitions,
            groups=[*self._queue_groups(name, readers), *self._stream_groups(name, facts.id, readers)],
            dead=self._dead(name, facts.partitions),
            settings=kept_settings(self._world, join(topic_folder(self._folder, name), SETTINGS)),
        )

    def groups(self, topic: str | None = None) -> list[GroupStanding]:
        """The groups of a topic, or of all."""
        chosen = self.topics() if topic is None else [self.topic(topic)]
        return sorted((group for each in chosen for group in each.groups), key=lambda group: (group.name, group.topic))

    def _readers(self, topic: str, count: int) -> Iterator[tuple[int, LogReader]]:
        for number in range(count):
            folder = join(partition_folder(self._folder, topic, number), "log")
            if is_log(self._world, folder):  # it has none before its first use
                yield number, LogReader(folder, world=self._world)

    def _queue_groups(self, topic: str, readers: dict[int, LogReader]) -> Iterator[GroupStanding]:
        notes = GroupNotes(self._world, topic_folder(self._folder, topic))
        for name in notes.names(max(readers, default=-1) + 1):
            note, lags, wrong = notes.read(name), [], []
            if note.deleted:
                continue
            for number, reader in readers.items():
                folder = group_folder(self._folder, topic, number, name)
                begun = note.start(number)
                start = reader.start if begun is None else begun
                try:
                    group = replayed_group(self._world, folder, start).group
                except (OSError, HoldfastError) as error:
                    wrong.append(str(error))
                    continue
                lag = PartitionLag(
                    topic=topic,
                    partition=number,
                    offset=group.floor,
                    end=reader.end,
                    lag=max(reader.end - group.floor - len(group.done), 0),
                    lag_seconds=self._age_s(reader, group.floor),
                    leased=self._held(group),
                    waiting=len(group.waiting),
                )
                lags.append(lag)
            yield GroupStanding(
                name=name, topic=topic, mode="queue", static_members=(), partitions=lags, wrong=tuple(wrong)
            )

    def _dead(self, topic: str, count: int) -> int:
        """How many dead letters there are."""
        name, found = topic + DEAD_SUFFIX, 0
        for number, reader in self._readers(name, count):
            folder = group_folder(self._folder, name, number, DEFAULT_GROUP)
            with suppress(OSError, HoldfastError):  # `check` says what is wrong
                group = replayed_group(self._world, folder, reader.start).group
                found += max(reader.end - max(group.floor, reader.start) - len(group.done), 0)
        return found

    def _stream_groups(self, topic: str, topic_id: int, readers: dict[int, LogReader]) -> Iterator[GroupStanding]:
        for name, commits in sorted(self._streams.items()):
            lags = []
            for entry in commits.committed:
                reader = readers.get(entry.partition)
                if (entry.topic, entry.topic_id) != (topic, topic_id) or reader is None:
                    continue
                at = max(reader.start, min(entry.offset, reader.end))
                lags.append(
                    PartitionLag(
                        topic=topic,
                        partition=entry.partition,
                        offset=entry.offset,
                        end=reader.end,
                        lag=reader.end - at,
                        lag_seconds=self._age_s(reader, at),
                    )
                )
            if lags:
                yield GroupStanding(
                    name=name,
                    topic=topic,
                    mode="stream",
                    static_members=commits.static_members,
                    partitions=lags,
                    wrong=commits.wrong,
                )

    def _held(self, group: Group) -> int:
        """How many messages are in hand; leases that have ended are there until an owner looks."""
        now_ms = self._world.clock.monotonic_ns() // 1_000_000
        return sum(lease.until_ms > now_ms for lease in group.leases.values())

    def _age_s(self, reader: LogReader, offset: int) -> float:
        """How long ago the first message from the offset on was published; 0 where there is none."""
        now_ns, at = self._world.clock.now_ns(), max(offset, reader.start)
        while at < reader.end:
            try:
                first = next(reader.records(at), None)
                return 0.0 if first is None else max(now_ns - first.timestamp_ns, 0) / 1e9
            except DamagedRange as damage:
                at = damage.next_offset
            except OffsetOutOfRange as trimmed:
                at = max(trimmed.start, at + 1)
            except CorruptData:
                return 0.0
        return 0.0
