"""Which tables there are: their columns, how each is cut into tasks, and where its rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.broker.folder.contents import Catalog
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id, partition_folder
from holdfast.broker.inspect.messages import damage_in, frames_beside, letters_of, waiting_beside
from holdfast.broker.inspect.status import FolderStatus, GroupStanding
from holdfast.broker.messages import users_headers
from holdfast.broker.tracing.log import TRACES, TraceStep, decode_step
from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.model import HeaderPairs
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import Subscription
from holdfast.spark.source.schema import HEADERS
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

# The rows of each table: tuples in the order of its columns, read from the files without a lock.
#
# Times are microseconds since 1970, as Arrow takes them; None where there is none.


Row: TypeAlias = tuple[Any, ...]

NEVER_NS: Final = 2**63 - 1


class Piece(msgspec.Struct, frozen=True):
    """What one task reads of a table: all of it, a partition, or some offsets of that; None is "to the end"."""

    topic: str = ""
    partition: int = 0
    start: int = 0
    stop: int | None = None


class Wanted(msgspec.Struct, frozen=True):
    """What was asked for: topics, or all where there are none named, and times."""

    path: str
    topics: frozenset[str] | None = None
    since_ns: int = 0
    until_ns: int = NEVER_NS

    def has(self, topic: str) -> bool:
        return self.topics is None or topic in self.topics


Rows: TypeAlias = Callable[[World, Wanted, Piece], Iterator[Row]]


def dead_letters(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
    for seen in letters_of(world, wanted.path, piece.topic, piece.partition):
        record, note = seen.record, seen.note
        yield (
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
        )


def groups(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
    for topic in FolderStatus(world, wanted.path).topics():
        if wanted.has(topic.name):
            for group in topic.groups:
                yield from _group(group)


def _group(group: GroupStanding) -> Iterator[Row]:
    head = (group.name, group.topic)
    members = list(group.static_members) if group.query is None else [group.query.holder]
    for each in group.partitions:
        yield (
            *head,
            each.partition,
            group.mode,
            each.offset,
            each.end,
            each.lag,
            each.lag_seconds,
            each.leased,
            each.waiting,
            members,
            None,
        )
    for problem in group.wrong:
        yield (*head, None, group.mode, None, None, None, None, None, None, members, problem)


def delayed(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
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


def traces(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
    folder = trace_folder(wanted.path)
    if not is_log(world, folder):
        return
    reader = LogReader(folder, world=world)
    stop = reader.end if piece.stop is None else piece.stop
    for frame in frames_beside(reader, piece.start, stop):
        for offset, value in zip(frame.offsets(), frame.values(), strict=True):
            step = _step(value) if piece.start <= offset < stop else None
            if step is not None and wanted.has(step.topic) and wanted.since_ns <= step.at_ns <= wanted.until_ns:
                yield _trace(step)


def _step(value: bytes) -> TraceStep | None:
    with suppress(msgspec.MsgspecError):  # of a release that writes them otherwise
        return decode_step(value)
    return None


def _trace(step: TraceStep) -> Row:
    return (
        step.id,
        step.trace_id,
        step.step,
        step.at_ns // 1000,
        step.topic,
        step.partition,
        step.offset,
        step.group,
        step.holder,
        step.attempt,
        step.why,
        step.error,
        _us(step.due_ms),
        _us(step.until_ms),
        step.related,
        step.span_id,
        step.parent_id,
        step.state,
    )


def corrupt(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
    folder = join(partition_folder(wanted.path, piece.topic, piece.partition), "log")
    if is_log(world, folder):
        for damage in damage_in(world, folder):
            yield piece.topic, piece.partition, damage.first_offset, damage.next_offset, damage.reason


def topics(world: World, wanted: Wanted, piece: Piece) -> Iterator[Row]:
    catalog, standing = Catalog(world, wanted.path), FolderStatus(world, wanted.path)
    for name in filter(wanted.has, catalog.names()):
        try:
            facts, kept = catalog.facts(name), standing.partitions(name)
        except (OSError, HoldfastError):
            if name in catalog:
                raise
            continue  # deleted meanwhile
        for part in kept:
            yield (
                name,
                facts.id,
                _us(facts.created_ms),
                facts.partitions,
                part.number,
                part.start,
                part.end,
                part.bytes,
                part.segments,
            )


def trace_folder(path: str) -> str:
    """Where the log of traces is."""
    return join(partition_folder(path, TRACES), "log")


def _pairs(headers: HeaderPairs) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in users_headers(headers)]


def _us(ms: int) -> int | None:
    return ms * 1000 if ms else None


# A task for so many bytes of traces, about.
_PIECE_BYTES: Final = 32 << 20

_FAILURES: Final = ArrayType(
    StructType(
        [
            StructField("at", TimestampType()),
            StructField("holder", StringType()),
            StructField("why", StringType()),
            StructField("error", StringType()),
        ]
    )
)


class Table(msgspec.Struct, frozen=True):
    """One table: its columns, how it is cut into tasks, and where its rows come from."""

    name: str
    schema: StructType
    pieces: Callable[[DataFolder, Subscription, Wanted], Iterator[Piece]]
    rows: Rows
    timed: bool = False  # takes startingTimestamp and endingTimestamp


def _schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def _whole(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    yield Piece()


def _by_partition(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)


def _by_log(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)
        yield Piece(topic + DEAD_SUFFIX, number)
    if wanted.topics is None:
        yield Piece(TRACES)


def _by_segments(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    """The log of traces in pieces; the last is open, so that it is read up to where it ends then."""
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
    Table(
        "dead_letters",
        _schema(
            id=StringType(),
            message_id=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            offset=LongType(),
            group=StringType(),
            state=StringType(),
            reason=StringType(),
            error=StringType(),
            attempts=IntegerType(),
            published_at=TimestampType(),
            first_at=TimestampType(),
            last_at=TimestampType(),
            dead_at=TimestampType(),
            holder=StringType(),
            priority=IntegerType(),
            key=BinaryType(),
            value=BinaryType(),
            headers=HEADERS,
            document=StringType(),
            failures=_FAILURES,
            letter_offset=LongType(),
        ),
        _by_partition,
        dead_letters,
    ),
    Table(
        "groups",
        _schema(
            group=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            mode=StringType(),
            position=LongType(),
            end=LongType(),
            lag=LongType(),
            lag_seconds=DoubleType(),
            leased=LongType(),
            waiting=LongType(),
            members=ArrayType(StringType()),
            problem=StringType(),
        ),
        _whole,
        groups,
    ),
    Table(
        "delayed",
        _schema(
            id=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            due_at=TimestampType(),
            published_at=TimestampType(),
            expires_at=TimestampType(),
            priority=IntegerType(),
            key=BinaryType(),
            value=BinaryType(),
            headers=HEADERS,
        ),
        _by_partition,
        delayed,
    ),
    Table(
        "traces",
        _schema(
            id=StringType(),
            trace_id=StringType(),
            step=StringType(),
            at=TimestampType(),
            topic=StringType(),
            partition=IntegerType(),
            offset=LongType(),
            group=StringType(),
            holder=StringType(),
            attempt=IntegerType(),
            why=StringType(),
            error=StringType(),
            due_at=TimestampType(),
            lease_until=TimestampType(),
            related_id=StringType(),
            span_id=StringType(),
            parent_id=StringType(),
            trace_state=StringType(),
        ),
        _by_segments,
        traces,
        timed=True,
    ),
    Table(
        "corrupt",
        _schema(
            topic=StringType(),
            partition=IntegerType(),
            first_offset=LongType(),
            next_offset=LongType(),
            reason=StringType(),
        ),
        _by_log,
        corrupt,
    ),
    Table(
        "topics",
        _schema(
            name=StringType(),
            id=LongType(),
            created_at=TimestampType(),
            partitions=IntegerType(),
            partition=IntegerType(),
            start=LongType(),
            end=LongType(),
            bytes=LongType(),
            segments=IntegerType(),
        ),
        _whole,
        topics,
    ),
)
TABLES: Final = {table.name: table for table in _TABLES}
