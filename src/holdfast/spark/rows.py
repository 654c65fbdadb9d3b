"""The rows of the other tables of a data folder: dead letters, groups, delayed messages, traces and more.

A table is planned when it is loaded and read when it is used, by tasks that open the files themselves, or by a server
for them, where Spark need not be installed. They take no lock: another process may own the folder and write to it
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.broker.folder.contents import Catalog
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id, partition_folder
from holdfast.broker.inspect import GroupStanding
from holdfast.broker.inspect.messages import damage_in, frames_beside, letters_of, waiting_beside
from holdfast.broker.inspect.status import FolderStatus
from holdfast.broker.messages import users_headers
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import TRACES, decode_step
from holdfast.env import World
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.model import HeaderPairs
from holdfast.spark.options import Subscription, TableOptions
from holdfast.spark.ranges import DataFolder
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join

# Which tables there are: their columns, how each is cut into tasks, and where its rows come from.


# The rows of each table are tuples in the order of its columns, read from the files without a lock. Times are
# microseconds since 1970, as Arrow takes them, or None.


Row: TypeAlias = tuple[Any, ...]

NEVER_NS: Final = 2**63 - 1


class Piece(msgspec.Struct, frozen=True):
    """What one task reads: a whole table, a partition of it, or a range of offsets. Without `stop`, to the end."""

    topic: str = ""
    partition: int = 0
    start: int = 0
    stop: int | None = None


class TableFilter(msgspec.Struct, frozen=True):
    """Which rows to return: those of some topics or of all, between two times, and of which groups (mode and name)."""

    path: str
    topics: frozenset[str] | None = None
    since_ns: int = 0
    until_ns: int = NEVER_NS
    shows: Callable[[str, str], bool] = lambda mode, group: True

    def has(self, topic: str) -> bool:
        return self.topics is None or topic in self.topics


# Each row comes with the `start` of the piece from which reading goes on after it.
Resumable: TypeAlias = Iterator[tuple[int, Row]]
Rows: TypeAlias = Callable[[World, TableFilter, Piece], Resumable]


def _counted(rows: Callable[[World, TableFilter, Piece], Iterator[Row]]) -> Rows:
    """Rows that have no place of their own: reading goes on behind so many of them."""

    def counted(world: World, wanted: TableFilter, piece: Piece) -> Resumable:
        return islice(enumerate(rows(world, wanted, piece), 1), piece.start, None)

    return counted


def dead_letters(world: World, wanted: TableFilter, piece: Piece) -> Resumable:
    for seen in letters_of(world, wanted.path, piece.topic, piece.partition, piece.start):
        record, note = seen.record, seen.note
        if not wanted.shows("queue", note.group):
            continue
        yield (
            record.offset + 1,
            (
                message_id(piece.topic + DEAD_SUFFIX, piece.partition, record.offset, None),
                note.id,
                piece.topic,
                piece.partition,
                note.offset,
                note.group,
                seen.state,
                note.reason,
                note.error,
                note.attempts,
                note.timestamp_ns // 1000,
                _us(note.first_ms),
                _us(note.last_ms),
                _us(note.dead_at_ms),
                note.holder,
                note.priority,
                record.key,
                bytes(record.value),
                _pairs(record.headers),
                None if note.state is None else note.state.decode(errors="replace"),
                [
                    {"at": _us(failure.at_ms), "holder": failure.holder, "why": failure.why, "error": failure.error}
                    for failure in note.failures
                ],
                record.offset,
            ),
        )


@_counted
def groups(world: World, wanted: TableFilter, piece: Piece) -> Iterator[Row]:
    for topic in FolderStatus(world, wanted.path).topics():
        if wanted.has(topic.name):
            for group in topic.groups:
                if wanted.shows(group.mode, group.name):
                    yield from _group(group)


def _group(group: GroupStanding) -> Iterator[Row]:
    head = (group.name, group.topic)
    members = list(group.static_members) if group.query is None else [group.query.holder]
    for each in group.partitions:
        numbers = (each.offset, each.end, each.lag, each.lag_seconds, each.leased, each.waiting)
        yield (*head, each.partition, group.mode, *numbers, members, None)
    for problem in group.wrong:
        yield (*head, None, group.mode, *[None] * 6, members, problem)


@_counted
def delayed(world: World, wanted: TableFilter, piece: Piece) -> Iterator[Row]:
    for message in waiting_beside(world, partition_folder(wanted.path, piece.topic, piece.partition)):
        record = message.record
        yield (
            message_id(piece.topic, piece.partition, None, message.id),
            piece.topic,
            piece.partition,
            _us(message.due_at_ms),
            record.timestamp_ns // 1000,
            _us(record.expires_at_ms),
            record.priority,
            record.key,
            bytes(record.value),
            _pairs(record.headers),
        )


_BEFORE: Final = attrgetter("id", "trace_id", "step")
_BETWEEN: Final = attrgetter("topic", "partition", "offset", "group", "holder", "attempt", "why", "error")
_AFTER: Final = attrgetter("related", "span_id", "parent_id", "state")


def traces(world: World, wanted: TableFilter, piece: Piece) -> Resumable:
    folder = trace_folder(wanted.path)
    if not is_log(world, folder):
        return
    reader = LogReader(folder, world=world)
    stop = reader.end if piece.stop is None else piece.stop
    for frame in frames_beside(reader, piece.start, stop):
        for offset, value in zip(frame.offsets(), frame.values(), strict=True):
            step = _step(value) if piece.start <= offset < stop else None
            if step is not None and wanted.has(step.topic) and wanted.since_ns <= step.at_ns <= wanted.until_ns:
                times = (_us(step.due_ms), _us(step.until_ms))
                yield offset + 1, (*_BEFORE(step), step.at_ns // 1000, *_BETWEEN(step), *times, *_AFTER(step))


def _step(value: bytes) -> TraceStep | None:
    with suppress(msgspec.MsgspecError):  # another release may have another format
        return decode_step(value)
    return None


@_counted
def corrupt(world: World, wanted: TableFilter, piece: Piece) -> Iterator[Row]:
    folder = join(partition_folder(wanted.path, piece.topic, piece.partition), "log")
    if is_log(world, folder):
        for damage in damage_in(world, folder):
            yield piece.topic, piece.partition, damage.first_offset, damage.next_offset, damage.reason


@_counted
def topics(world: World, wanted: TableFilter, piece: Piece) -> Iterator[Row]:
    catalog, standing = Catalog(world, wanted.path), FolderStatus(world, wanted.path)
    for name in filter(wanted.has, catalog.names()):
        try:
            facts, kept = catalog.facts(name), standing.partitions(name)
        except (OSError, HoldfastError):
            if name in catalog:
                raise
            continue  # deleted meanwhile
        head = (name, facts.id, _us(facts.created_ms), facts.partitions)
        for part in kept:
            yield (*head, part.number, part.start, part.end, part.bytes, part.segments)


def trace_folder(path: str) -> str:
    """The folder of the log of traces."""
    return join(partition_folder(path, TRACES), "log")


def _pairs(headers: HeaderPairs) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in users_headers(headers)]


def _us(ms: int) -> int | None:
    return ms * 1000 if ms else None


# About how many bytes of traces a task reads.
_PIECE_BYTES: Final = 32 << 20


class TableSpec(msgspec.Struct, frozen=True):
    """One table: its columns, how it is cut into tasks, and where its rows come from."""

    name: str
    columns: str  # such as "id string, partition int"; readers make Spark's types of them
    pieces: Callable[[DataFolder, Subscription, TableFilter], Iterator[Piece]]
    rows: Rows
    timed: bool = False  # takes startingTimestamp and endingTimestamp


def _whole(folder: DataFolder, subscription: Subscription, wanted: TableFilter) -> Iterator[Piece]:
    yield Piece()


def _by_partition(folder: DataFolder, subscription: Subscription, wanted: TableFilter) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)


def _by_log(folder: DataFolder, subscription: Subscription, wanted: TableFilter) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)
        yield Piece(topic + DEAD_SUFFIX, number)
    if wanted.topics is None:
        yield Piece(TRACES)


def _by_segments(folder: DataFolder, subscription: Subscription, wanted: TableFilter) -> Iterator[Piece]:
    """The log of traces in pieces. The last one has no end, so that the task reads all that is there by then."""
    place = trace_folder(folder.path)
    if not is_log(folder.world, place):
        return
    reader = LogReader(place, world=folder.world)
    start = reader.find_time(wanted.since_ns) if wanted.since_ns else reader.start
    size = 0
    for segment in reader.segments():
        if size >= _PIECE_BYTES and segment.base_offset > start:
            yield Piece(TRACES, 0, start, segment.base_offset)
            start, size = segment.base_offset, 0
        size += segment.bytes
    yield Piece(TRACES, 0, start)


_TABLES: Final = (
    TableSpec(
        "dead_letters",
        (
            "id string, message_id string, topic string, partition int, offset long, group string, "
            "state string, reason string, error string, attempts int, published_at timestamp, "
            "first_at timestamp, last_at timestamp, dead_at timestamp, holder string, priority int, "
            "key binary, value binary, headers headers, document string, failures failures, "
            "letter_offset long"
        ),
        _by_partition,
        dead_letters,
    ),
    TableSpec(
        "groups",
        (
            "group string, topic string, partition int, mode string, position long, end long, lag long, "
            "lag_seconds double, leased long, waiting long, members strings, problem string"
        ),
        _whole,
        groups,
    ),
    TableSpec(
        "delayed",
        (
            "id string, topic string, partition int, due_at timestamp, published_at timestamp, "
            "expires_at timestamp, priority int, key binary, value binary, headers headers"
        ),
        _by_partition,
        delayed,
    ),
    TableSpec(
        "traces",
        (
            "id string, trace_id string, step string, at timestamp, topic string, partition int, "
            "offset long, group string, holder string, attempt int, why string, error string, "
            "due_at timestamp, lease_until timestamp, related_id string, span_id string, parent_id string, "
            "trace_state string"
        ),
        _by_segments,
        traces,
        timed=True,
    ),
    TableSpec(
        "corrupt",
        "topic string, partition int, first_offset long, next_offset long, reason string",
        _by_log,
        corrupt,
    ),
    TableSpec(
        "topics",
        (
            "name string, id long, created_at timestamp, partitions int, partition int, start long, "
            "end long, bytes long, segments int"
        ),
        _whole,
        topics,
    ),
)
TABLES: Final = {table.name: table for table in _TABLES}


MESSAGES: Final = "messages"


def opened(folder: DataFolder, asked: TableOptions) -> TableFilter:
    """What the options ask for in this folder. Raises UnknownTopic if it is not there."""
    named = None if asked.all_topics else frozenset(folder.topics(asked.subscription))
    return TableFilter(folder.path, named, asked.starting_ns or 0, asked.ending_ns or NEVER_NS)


def rows_of(name: str, folder: DataFolder, wanted: TableFilter, piece: Piece) -> Resumable:
    """The rows of a piece of a table, until its topic is deleted."""
    try:
        yield from TABLES[name].rows(folder.world, wanted, piece)
    except (OSError, HoldfastError):
        if not piece.topic or piece.topic in Catalog(folder.world, folder.path):
            raise


def table_named(name: str) -> TableSpec:
    """The table by this name. Raises InvalidRequest if there is none."""
    found = TABLES.get(name.lower())
    if found is None:
        known = (MESSAGES, *TABLES)
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidRequest(f"there is no table {name!r}; {hint}choose from {', '.join(known)}")
    return found
