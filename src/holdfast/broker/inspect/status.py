"""The state of topics and groups, read without owning the folder and while an owner may be at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec

from holdfast.broker.folder.contents import (
    Catalog,
    GroupNote,
    GroupNotes,
    groups_of,
    kept_settings,
    lacking,
    lacking_root,
    missing_parts,
    missing_root_parts,
)
from holdfast.broker.folder.layout import (
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
from holdfast.broker.inspect import GroupStanding, PartitionProgress, PartitionStanding, QueryStanding, TopicStanding
from holdfast.broker.journal import SNAPSHOT, Journal, SnapshotFiles, damaged_snapshot, newest_snapshot
from holdfast.broker.scratch import GroupReplay, scratch_words
from holdfast.broker.streams.offsets import CommitTable, CommittedOffset, decode_event, decode_image
from holdfast.broker.streams.queries import list_queries
from holdfast.delivery.group import Group, IllegalMove
from holdfast.delivery.image import group_of
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, OffsetOutOfRange
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join
from holdfast.storage.retention import tiered_bytes

# An owner may take a snapshot and drop old events while we read: retry, but not forever.
TRIES: Final = 3


# What a group in stream mode has committed.


class CommitState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the commits of a group add up to, and what is wrong with them."""

    epoch: int = 0
    static_members: tuple[str, ...] = ()
    committed: tuple[CommittedOffset, ...] = ()
    wrong: tuple[str, ...] = ()


def commits_of(world: World, folder: str, end: int | None = None) -> CommitState:
    """Replay the commits in a folder as opening would. `end` is where opening would end their log, if known."""
    for _ in range(TRIES - 1):
        try:
            return _replayed(world, folder, end)
        except (OSError, HoldfastError):
            continue  # an owner changed it in the meantime, or it is damaged, and then it fails again
    try:
        return _replayed(world, folder, end)
    except (OSError, HoldfastError) as error:
        return CommitState(wrong=(str(error),))


def _replayed(world: World, folder: str, end: int | None) -> CommitState:
    image, name = SnapshotFiles(world, folder).newest(decode_image)
    if name != SNAPSHOT and world.disk.exists(join(folder, SNAPSHOT)):
        raise damaged_snapshot(folder, name)
    reader = LogReader(folder, world=world, end=end)
    state, wrong = CommitTable(image), []
    at = state.position
    if at < reader.start:
        raise CorruptData(f"the commits start at event {reader.start}, and no snapshot covers the events before")
    while at < reader.end:
        try:
            for record in reader.records(at):
                state.apply(decode_event(bytes(record.value)))
                at = record.offset + 1
        except DamagedRange as damage:
            lost = f"events {damage.first_offset} to {damage.next_offset - 1} are lost"
            wrong.append(f"{lost}: some messages may be delivered again")
            at = damage.next_offset
        except msgspec.DecodeError as error:
            wrong.append(f"event {at} cannot be read: {error}")
            break
    return CommitState(
        epoch=state.epoch,
        static_members=tuple(member.instance_id for member in state.remembered.statics),
        committed=tuple(state.ordered()),
        wrong=tuple(wrong),
    )


class FolderStatus:
    """The state of a data folder at one moment."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._catalog = Catalog(world, folder)
        self._queries = list_queries(world, folder)
        missing = {part.removeprefix(f"{GROUPS}/"): part for part in missing_root_parts(world, folder)}
        gone = {name: part for name, part in missing.items() if name != part}
        self._streams = {name: CommitState(wrong=(str(lacking_root(folder, part)),)) for name, part in gone.items()}
        self._streams |= {
            name: commits_of(world, join(folder, f"{GROUPS}/{name}"))
            for name in names_in(world, join(folder, GROUPS))
            if not name.startswith(".") and name not in gone
        }

    def topics(self) -> Iterator[TopicStanding]:
        """Yield all topics except those deleted in the meantime."""
        for name in self.names():
            yield from self.if_there(name)

    def names(self) -> list[str]:
        """Return the names of all topics, in order."""
        return sorted(topics(self._world, self._folder))

    def if_there(self, name: str) -> list[TopicStanding]:
        """Return one topic in a list; an empty list if it was deleted in the meantime."""
        try:
            return [self.topic(name)]
        except (OSError, HoldfastError):
            if name in self._catalog:
                raise
            return []

    def topic(self, name: str) -> TopicStanding:
        """Return one topic; raises UnknownTopic if there is none of this name."""
        facts = self._catalog.facts(name)
        readers = dict(self._readers(name, facts.partitions))
        return TopicStanding(
            name=name,
            id=facts.id,
            created_ms=facts.created_ms,
            partitions=self._kept(name, readers, facts.partitions),
            groups=[
                *self._queue_groups(name, readers),
                *self._stream_groups(name, facts.id, readers),
                *self._query_groups(name, facts.id, readers),
            ],
            dead=self._dead(name, facts.partitions),
            settings=kept_settings(self._world, join(topic_folder(self._folder, name), SETTINGS)),
        )

    def partitions(self, name: str) -> list[PartitionStanding]:
        """Return what the partitions of a topic hold."""
        count = self._catalog.facts(name).partitions
        return self._kept(name, dict(self._readers(name, count)), count)

    def groups(self, topic: str | None = None) -> list[GroupStanding]:
        """Return the groups of one topic, or of all topics."""
        chosen = self.topics() if topic is None else [self.topic(topic)]
        return sorted((group for each in chosen for group in each.groups), key=lambda group: (group.name, group.topic))

    def _kept(self, topic: str, readers: dict[int, LogReader], count: int) -> list[PartitionStanding]:
        missing = self._missing(topic) if len(readers) < count else set()
        return [
            _partition(number, readers[number])
            if number in readers
            else PartitionStanding(
                number=number,
                problem=str(lacking(self._folder, topic, part)) if (part := f"{number}/log") in missing else "",
            )
            for number in range(count)
        ]

    def _missing(self, topic: str) -> set[str]:
        """Return the listed parts that are missing."""
        try:
            return set(missing_parts(self._world, self._folder, topic))
        except CorruptData:  # `check` reports what is wrong with the list
            return set()

    def _readers(self, topic: str, count: int) -> Iterator[tuple[int, LogReader]]:
        for number in range(count):
            folder = join(partition_folder(self._folder, topic, number), "log")
            if is_log(self._world, folder):  # a partition has no log before its first use
                yield number, LogReader(folder, world=self._world)

    def _queue_groups(self, topic: str, readers: dict[int, LogReader]) -> Iterator[GroupStanding]:
        notes = GroupNotes(self._world, topic_folder(self._folder, topic))
        missing = self._missing(topic)
        for name in sorted({*notes.names(max(readers, default=-1) + 1), *groups_of(missing)}):
            lags: list[PartitionProgress] = []
            parts = sorted(part for part in missing if groups_of([part]) == {name})
            wrong = [str(lacking(self._folder, topic, part)) for part in parts]
            try:
                note = notes.read(name)
            except CorruptData as error:
                note = GroupNote()
                wrong.append(str(error))
            if note.deleted:
                continue
            for number, reader in readers.items():
                if wrong:
                    break
                folder = group_folder(self._folder, topic, number, name)
                begun = note.start(number)
                start = reader.start if begun is None else begun
                try:
                    group = replayed_group(self._world, folder, start).group
                except (OSError, HoldfastError) as error:
                    wrong.append(str(error))
                    continue
                lag = PartitionProgress(
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
                name=name,
                topic=topic,
                mode="queue",
                static_members=(),
                partitions=lags,
                wrong=tuple(wrong),
                paused=note.paused,
            )

    def _dead(self, topic: str, count: int) -> int:
        """Return the number of dead letters."""
        name, found = topic + DEAD_SUFFIX, 0
        for number, reader in self._readers(name, count):
            folder = group_folder(self._folder, name, number, DEFAULT_GROUP)
            with suppress(OSError, HoldfastError):  # `check` reports what is wrong
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
                lags.append(self._lag_of(reader, topic, entry.partition, entry.offset))
            if lags or (commits.wrong and not commits.committed):  # a damaged group may have read any topic
                yield GroupStanding(
                    name=name,
                    topic=topic,
                    mode="stream",
                    static_members=commits.static_members,
                    partitions=lags,
                    wrong=commits.wrong,
                )

    def _query_groups(self, topic: str, topic_id: int, readers: dict[int, LogReader]) -> Iterator[GroupStanding]:
        for query in self._queries:
            pins = query.topics.get(topic)
            if query.wrong or pins is None or pins.id != topic_id:
                continue
            yield GroupStanding(
                name=query.group,
                topic=topic,
                mode="query",
                static_members=(),
                partitions=[
                    self._lag_of(reader, topic, number, floor)
                    for number, reader in readers.items()
                    if (floor := query.floor(topic, topic_id, number)) is not None
                ],
                query=QueryStanding(
                    kind=query.kind,
                    holder=query.holder,
                    renewed_seconds=(query.renewed_ms_ago or 0) / 1000,
                    timeout_seconds=query.ttl_ms / 1000,
                    stale=query.stale,
                ),
            )

    def _lag_of(self, reader: LogReader, topic: str, partition: int, offset: int) -> PartitionProgress:
        at = max(reader.start, min(offset, reader.end))
        return PartitionProgress(
            topic=topic,
            partition=partition,
            offset=offset,
            end=reader.end,
            lag=reader.end - at,
            lag_seconds=self._age_s(reader, at),
        )

    def _held(self, group: Group) -> int:
        """Return the number of messages in flight, without expired leases, which stay until an owner ends them."""
        now_ms = self._world.clock.monotonic_ns() // 1_000_000
        return sum(lease.until_ms > now_ms for lease in group.leases.values())

    def _age_s(self, reader: LogReader, offset: int) -> float:
        """Return the age of the first message from the offset on; 0 if there is none."""
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


def _partition(number: int, reader: LogReader) -> PartitionStanding:
    segments = reader.segments()
    return PartitionStanding(
        number=number,
        start=reader.start,
        end=reader.end,
        bytes=sum(segment.bytes for segment in segments),
        segments=len(segments),
        tiered_bytes=tiered_bytes(segments),
    )


# Replaying the journal of a group while another process may own it.
#
# The journal is replayed from the newest snapshot up to the end that the owner has published, so the state is that of
# one moment in the group's life, never a mix of two. An owner that takes snapshots meanwhile may drop events that are
# still to be read; then everything is read again.


class ReplayedJournal(NamedTuple):
    """A group after replaying its journal; `known` says whether the journal tells where the group began."""

    group: Group
    known: bool
    wrong: list[str]


def replayed_group(world: World, folder: str, start: int = 0, end: int | None = None) -> ReplayedJournal:
    """Replay the journal in the folder; without a snapshot the group began at `start`.

    `end` is where opening would end the journal, if known: after a restart, the published end may be out of date.
    """
    for _ in range(TRIES - 1):
        try:
            return _replayed_journal(world, folder, start, end)
        except (OSError, HoldfastError):
            continue  # an owner changed it in the meantime, or it is damaged, and then it fails again
    return _replayed_journal(world, folder, start, end)


def _replayed_journal(world: World, folder: str, start: int, end: int | None) -> ReplayedJournal:
    if not holds_log(world, folder):
        return ReplayedJournal(Group(start), known=False, wrong=[])
    snapshot, name = newest_snapshot(world, folder)
    group = Group(start) if snapshot is None else group_of(snapshot.image)
    at = 0 if snapshot is None else snapshot.position
    events = GroupReplay(group, at)
    wrong = replay_beside(world, folder, at, name, events.apply, Journal.damage_means, end)
    if not wrong:
        # Beside a living owner these are the notes of this moment, or none if it has stored them in the meantime.
        events.take_in(partial(scratch_words, world, folder))
    return ReplayedJournal(group, known=snapshot is not None, wrong=wrong)


def replay_beside(
    world: World,
    folder: str,
    at: int,
    snapshot: str,
    apply: Callable[[bytes], object],
    damage_means: str,
    end: int | None = None,
) -> list[str]:
    """Apply the events of a journal from `at` on, after the given snapshot; return what is wrong."""
    if snapshot != SNAPSHOT and world.disk.exists(join(folder, SNAPSHOT)):
        raise damaged_snapshot(folder, snapshot)
    reader = LogReader(folder, world=world, end=end)
    if at < reader.start:
        raise CorruptData(f"the journal starts at event {reader.start}, and no snapshot covers the events before")
    wrong: list[str] = []
    while at < reader.end:
        try:
            for record in reader.records(at):
                apply(bytes(record.value))
                at = record.offset + 1
        except DamagedRange as damage:
            wrong.append(f"events {damage.first_offset} to {damage.next_offset - 1} are lost: {damage_means}")
            break  # later events need not fit any more; opening skips those that do not
        except (IllegalMove, msgspec.DecodeError) as error:
            wrong.append(f"event {at} does not fit: {error}")
            break
    return wrong


def holds_log(world: World, folder: str) -> bool:
    """Whether the folder holds a log, even one whose state file is missing."""
    return is_log(world, folder) or any(name.endswith(".log") for name in folders_in(world, folder))


def folders_in(world: World, folder: str) -> list[str]:
    """Return the names in a folder, without what is half created or half deleted; none if it does not exist."""
    try:
        return sorted(name for name in world.disk.names(folder) if not name.startswith("."))
    except OSError:
        return []
