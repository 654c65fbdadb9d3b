"""Rows of a DataFrame on their way into frames: which columns they may have, and which lane each row takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from holdfast.api.topics import TopicInfo
from holdfast.broker.folder.contents import Catalog, settings_for
from holdfast.broker.folder.layout import check_topic_name, topic_folder
from holdfast.broker.messages import (
    CORRELATION_ID,
    DEDUP_ID,
    PREFIX,
    TEXT_HEADERS,
    TEXT_KEY,
    TOMBSTONE,
    check_partition,
    partitions_for,
)
from holdfast.codec.arrow import Bytes, HeaderColumns, Rows, binary, encode_rows, murmur3_of, without_nulls
from holdfast.codec.encode import Body, Packing
from holdfast.env import World
from holdfast.errors import InvalidRequest, MessageTooLarge, UnknownTopic
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.commits import SinkLane

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FlagArray: TypeAlias = npt.NDArray[np.uint8]

_TEXT: Final = (BinaryType, StringType)
_WHOLE: Final = (IntegerType, LongType, ShortType, ByteType)
_DURATION: Final = (DoubleType, FloatType, DecimalType, *_WHOLE, DayTimeIntervalType)

# Each column with the types that it may have, and their names in errors.
_COLUMNS: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "value": (_TEXT, "binary or string"),
    "key": (_TEXT, "binary or string"),
    "headers": ((ArrayType, MapType), "array<struct<key:string,value:binary>> or map<string,string>"),
    "topic": ((StringType,), "string"),
    "partition": (_WHOLE, "int"),
    "priority": (_WHOLE, "int"),
    "delay": (_DURATION, "double, in seconds, or an interval"),
    "due_at": ((TimestampType,), "timestamp"),
    "ttl": (_DURATION, "double, in seconds, or an interval"),
    "expires_at": ((TimestampType,), "timestamp"),
    "dedup_id": (_TEXT, "string or binary"),
    "correlation_id": ((StringType,), "string"),
}
_EITHER: Final = (("delay", "due_at"), ("ttl", "expires_at"))
_MOST_ID_BYTES: Final = 1_024
_MOST_MS: Final = 100 * 365 * 24 * 3_600_000


def check_columns(schema: StructType, *, has_topic: bool) -> None:
    """Raise InvalidRequest if a DataFrame cannot be written, before any task runs."""
    for field in schema.fields:
        if field.name not in _COLUMNS:
            raise InvalidRequest(
                f"column {field.name!r} cannot be written: messages are made of {', '.join(_COLUMNS)}. "
                "Select those that you mean, or put it into value, headers or key"
            )
        kinds, wanted = _COLUMNS[field.name]
        if not isinstance(field.dataType, kinds) or (field.name == "headers" and not _are_pairs(field.dataType)):
            raise InvalidRequest(f"column {field.name!r} is {field.dataType.simpleString()}; it must be {wanted}")
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest(
            f"there is no column 'value' among {', '.join(names)}; a message needs one: "
            'to_json(struct("*")) AS value makes one of all columns'
        )
    if not has_topic and "topic" not in names:
        raise InvalidRequest('say where to write: option "topic", or a column topic')
    for one, other in _EITHER:
        if one in names and other in names:
            raise InvalidRequest(f"columns {one!r} and {other!r} say the same thing in two ways; choose one of them")


def _are_pairs(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, _TEXT)
    pair = kind.elementType if isinstance(kind, ArrayType) else None
    return (
        isinstance(pair, StructType)
        and pair.fieldNames() == ["key", "value"]
        and isinstance(pair["key"].dataType, StringType)
        and isinstance(pair["value"].dataType, _TEXT)
    )


class Incoming:
    """Rows for one topic: when they are due and expire, and the messages that they become."""

    def __init__(self, batch: pa.RecordBatch, topic: str, settings: TopicSettings, now_ms: int) -> None:
        if settings.schema_check == "reject":
            raise InvalidRequest(
                f"Spark cannot write to {topic}, whose messages are checked against a schema (schema_check=reject): "
                "write to a topic without that setting, or set it to warn"
            )
        self._batch = batch
        self._topic = topic
        self._settings = settings
        self.count: int = batch.num_rows
        self.due_at_ms = self._due_at_ms(now_ms)
        self.expires_at_ms = self._expires_at_ms(now_ms)

    def column(self, name: str) -> Any:
        """The column; None if it does not exist or has only nulls."""
        return _column(self._batch, name)

    def is_general(self) -> BoolArray | None:
        """Which rows cannot go into the log as they are: delayed, with a dedup id, or traced. None if no row.

        If one row has a dedup id, none can: rows must not overtake each other.
        """
        if self._settings.trace_sample or self.column("dedup_id") is not None:
            return np.ones(self.count, np.bool_)
        found = None if self.due_at_ms is None else self.due_at_ms != 0
        return found if found is not None and found.any() else None

    def rows(self, order: IntArray | None) -> Rows:
        """The messages, in the given order. Raises InvalidRequest or MessageTooLarge if one cannot be written."""
        batch, due_at_ms, expires_at_ms = self._batch, self.due_at_ms, self.expires_at_ms
        if order is not None:
            batch = batch.take(pa.array(order))
            due_at_ms = None if due_at_ms is None else due_at_ms[order]
            expires_at_ms = None if expires_at_ms is None else expires_at_ms[order]
        flags = np.zeros(self.count, np.uint8)
        keys, keyed = _keys(batch, flags)
        rows = Rows(
            values=self._values(batch, flags, keyed),
            keys=keys,
            keyed=keyed,
            headers=self._headers(batch, flags),
            priorities=_priorities(batch),
            expires_at_ms=expires_at_ms,
            due_at_ms=due_at_ms,
            flags=flags if flags.any() else None,
        )
        longest = int(rows.sizes().max(initial=0))
        if longest > self._settings.max_message_bytes:
            raise MessageTooLarge(
                f"a row has {longest} bytes with key and headers, the limit of topic {self._topic} is "
                f"{self._settings.max_message_bytes}: write smaller values, or raise its max_message_bytes"
            )
        return rows

    def _values(self, batch: pa.RecordBatch, flags: FlagArray, keyed: BoolArray | None) -> Bytes:
        values = batch.column("value")
        if values.null_count:
            if self._settings.cleanup == "delete":
                raise InvalidRequest(
                    f"{values.null_count} rows for topic {self._topic} have no value; only a topic with "
                    'cleanup="compact" takes such rows, as tombstones. Leave them out, or give them an empty value'
                )
            gone = _numpy(pc.is_null(values))
            if _column(batch, "key") is None or (keyed is not None and not keyed[gone].all()):
                raise InvalidRequest(
                    f"a row for topic {self._topic} has neither value nor key: a tombstone needs a key"
                )
            flags |= gone.astype(np.uint8) * np.uint8(TOMBSTONE)
        return Bytes.of(without_nulls(binary(values)))

    def _headers(self, batch: pa.RecordBatch, flags: FlagArray) -> HeaderColumns | None:
        headers = _column(batch, "headers")
        found = None
        if headers is not None:
            headers = _as_list(headers)
            lengths = _numpy(pc.fill_null(pc.list_value_length(headers), 0))
            names, values = headers.flatten().flatten()
            if names.null_count or values.null_count or pc.any(pc.equal(pc.binary_length(names), 0)).as_py():
                raise InvalidRequest(f"a header of a row for topic {self._topic} has no name, or no value")
            if pc.any(pc.starts_with(names, PREFIX)).as_py():
                raise InvalidRequest(
                    f"a row for topic {self._topic} has a header whose name begins with {PREFIX}: such names are "
                    "reserved"
                )
            if _is_text(values):
                flags |= (lengths > 0).astype(np.uint8) * np.uint8(TEXT_HEADERS)
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            found = HeaderColumns(ends, Bytes.of(binary(names)), Bytes.of(binary(values)))
        marks = {mark: ids for mark, name in _MARKS.items() if (ids := _ids(batch, name)) is not None}
        return _with_marks(found, marks, self.count) if marks else found

    def _due_at_ms(self, now_ms: int) -> IntArray | None:
        due = _moments(self.column("due_at"))
        if due is None:
            delays = _durations(self.column("delay"), "delay")
            due = None if delays is None else np.where(delays > 0, now_ms + delays, 0)
        return None if due is None else np.where(due > now_ms, due, 0)

    def _expires_at_ms(self, now_ms: int) -> IntArray | None:
        default = self._settings.ttl_ms or 0
        moments = _moments(self.column("expires_at"))
        if moments is not None:
            given = _numpy(pc.is_valid(self.column("expires_at")))
            return np.where(given, np.maximum(moments, 1), self._after(now_ms, default))
        ttl = _durations(self.column("ttl"), "ttl")
        if ttl is None:
            if not default:
                return None
            ttl = np.full(self.count, default, np.int64)
        else:
            given = _numpy(pc.is_valid(self.column("ttl")))
            if (ttl[given] < 1).any():
                raise InvalidRequest(
                    "a ttl is 0: a row that expires at once cannot be written; leave it null to keep it"
                )
            ttl = np.where(given, ttl, default)
        return self._after(now_ms, ttl)

    def _after(self, now_ms: int, ttl: Any) -> IntArray:
        """The end of a time to live, which begins when the message becomes ready."""
        start: Any = now_ms if self.due_at_ms is None else np.where(self.due_at_ms > 0, self.due_at_ms, now_ms)
        return np.where(np.asarray(ttl) > 0, start + ttl, 0).astype(np.int64)


_MARKS: Final = {DEDUP_ID: "dedup_id", CORRELATION_ID: "correlation_id"}


def _column(batch: pa.RecordBatch, name: str) -> Any:
    """The column; None if it does not exist or has only nulls."""
    if name not in batch.schema.names:
        return None
    array = batch.column(name)
    return None if array.null_count == len(array) else array


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _is_text(array: Any) -> bool:
    return not pa.types.is_binary(array.type) and not pa.types.is_large_binary(array.type)


def _keys(batch: pa.RecordBatch, flags: FlagArray) -> tuple[Bytes | None, BoolArray | None]:
    """The keys, and which rows have one if not all do."""
    keys = _column(batch, "key")
    if keys is None:
        return None, None
    keyed = _numpy(pc.is_valid(keys)) if keys.null_count else None
    if _is_text(keys):
        flags |= np.uint8(TEXT_KEY) if keyed is None else keyed.astype(np.uint8) * np.uint8(TEXT_KEY)
    return Bytes.of(without_nulls(binary(keys))), keyed


def _ids(batch: pa.RecordBatch, name: str) -> list[bytes | None] | None:
    column = _column(batch, name)
    if column is None:
        return None
    ids: list[bytes | None] = binary(column).to_pylist()
    lengths = {len(each) for each in ids if each is not None}
    if lengths and not 0 < min(lengths) <= max(lengths) <= _MOST_ID_BYTES:
        raise InvalidRequest(f"a {name} is empty or has more than {_MOST_ID_BYTES} bytes; leave it null, or shorten it")
    return ids


def _priorities(batch: pa.RecordBatch) -> FlagArray | None:
    found = _column(batch, "priority")
    if found is None:
        return None
    numbers: IntArray = _numpy(pc.fill_null(found, 0))
    low, high = numbers.min(), numbers.max()
    if low < 0 or high > 9:
        raise InvalidRequest(
            f"priority {low if low < 0 else high} cannot be used: give a whole number from 0 to 9, 9 is most urgent"
        )
    return numbers.astype(np.uint8)


def _moments(array: Any) -> IntArray | None:
    """Milliseconds since 1970, rounded up; 0 for null."""
    if array is None:
        return None
    micros = _numpy(pc.fill_null(array.cast(pa.int64()), 0))
    return -(-micros // 1000)  # type: ignore[no-any-return]


def _durations(array: Any, name: str) -> IntArray | None:
    """Milliseconds, rounded up; 0 for null."""
    if array is None:
        return None
    found: npt.NDArray[np.float64]
    if pa.types.is_duration(array.type):
        found = _numpy(pc.fill_null(array.cast(pa.duration("us")).cast(pa.int64()), 0)) / 1000
    else:
        found = _numpy(pc.fill_null(array.cast(pa.float64()), 0.0)) * 1000
    if not (found >= 0).all() or (found > _MOST_MS).any():
        raise InvalidRequest(f"a {name} cannot be used: give seconds from 0 to {_MOST_MS // 1000}, or null")
    return np.ceil(found).astype(np.int64)


def _with_marks(headers: HeaderColumns | None, marks: dict[str, list[bytes | None]], count: int) -> HeaderColumns:
    """The headers with our own after those of each row. It goes row by row, as they are rare."""
    names: list[bytes] = []
    values: list[bytes] = []
    ends = np.zeros(count + 1, np.int32)
    for row in range(count):
        if headers is not None:
            for pair in range(headers.ends[row], headers.ends[row + 1]):
                names.append(_item(headers.names, pair))
                values.append(_item(headers.values, pair))
        for mark, ids in marks.items():
            found = ids[row]
            if found is not None:
                names.append(mark.encode())
                values.append(found)
        ends[row + 1] = len(names)
    return HeaderColumns(ends, Bytes.of(pa.array(names, pa.binary())), Bytes.of(pa.array(values, pa.binary())))


def _as_list(headers: Any) -> Any:
    """A map as the list of pairs that it is."""
    if not pa.types.is_map(headers.type):
        return headers
    pairs, buffers = headers.values, headers.buffers()[:2]
    return pa.Array.from_buffers(pa.list_(pairs.type), len(headers), buffers, offset=headers.offset, children=[pairs])


def _item(column: Bytes, at: int) -> bytes:
    return bytes(column.data[column.ends[at] : column.ends[at + 1]])


class Target(msgspec.Struct, frozen=True):
    """A topic to write to. Its id is 0 if the commit is to make it."""

    name: str
    id: int
    partitions: int
    settings: TopicSettings


_MAKE_IT: Final = 'make it first, or let the write make it: .option("createTopics", "true").option("partitions", "4")'


class Targets:
    """The topics of a data folder, each looked up once. With `new_partitions` the commit makes missing ones."""

    def __init__(self, world: World, root: str, settings: BrokerSettings, new_partitions: int | None) -> None:
        self._world = world
        self._root = root
        self._settings = settings
        self._new_partitions = new_partitions
        self._catalog = Catalog(world, root)
        self._known: dict[str, Target] = {}

    def find(self, name: str) -> Target:
        """The topic by this name. Raises UnknownTopic if it does not exist and is not to be made."""
        if name not in self._known:
            self._known[name] = self._look(check_topic_name(name))
        return self._known[name]

    def names(self) -> list[str]:
        """All topics that there are."""
        return self._catalog.names()

    def _look(self, name: str) -> Target:
        filed = self._settings.topics.get(name, {})
        if name in self._catalog:
            facts = self._catalog.facts(name)
            settings = settings_for(self._world, topic_folder(self._root, name), None, filed, self._settings.topic)
            return Target(name, facts.id, facts.partitions, settings)
        if self._new_partitions is None:
            there = ", ".join(self.names()[:10]) or "none yet"
            raise UnknownTopic(f"there is no topic {name} in {self._root} (there are: {there}); {_MAKE_IT}")
        settings = settings_for(self._world, "", None, filed, self._settings.topic)
        return Target(name, 0, self._new_partitions, settings)


class ServerTargets(Targets):
    """The topics of a server, as it describes them; `describe` returns None for one that does not exist."""

    def __init__(self, place: str, describe: Callable[[str], TopicInfo | None], new_partitions: int | None) -> None:
        self._root = place
        self._describe = describe
        self._new_partitions = new_partitions
        self._known = {}

    def _look(self, name: str) -> Target:
        info = self._describe(name)
        if info is not None:
            settings = msgspec.convert(info.settings, TopicSettings, strict=False)
            return Target(name, info.id, len(info.partitions), settings)
        if self._new_partitions is None:
            raise UnknownTopic(f"there is no topic {name} on {self._root}; {_MAKE_IT}")
        return Target(name, 0, self._new_partitions, TopicSettings())


class RowRouter:
    """Turns record batches into bodies of frames, each for its lane. Rows of one lane keep their order.

    `turn` is the partition at which rows without a key begin.
    """

    def __init__(self, world: World, targets: Targets, topic: str | None, turn: int) -> None:
        self._world = world
        self._targets = targets
        self._topic = topic
        self._turn = turn
        self._packings: dict[str, Packing] = {}

    def bodies(self, batch: pa.RecordBatch) -> Iterator[tuple[SinkLane, Body]]:
        """The bodies of all rows of the batch."""
        for name, rows in self._by_topic(batch):
            yield from self._of_topic(self._targets.find(name), rows)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic").dictionary_encode()
        if topics.null_count:
            raise InvalidRequest(f'{topics.null_count} rows have no topic; fill the column, or give the option "topic"')
        if len(topics.dictionary) == 1:
            yield topics.dictionary[0].as_py(), batch
            return
        for number, name in enumerate(topics.dictionary.to_pylist()):
            yield name, batch.filter(pc.equal(topics.indices, number))

    def _of_topic(self, target: Target, batch: pa.RecordBatch) -> Iterator[tuple[SinkLane, Body]]:
        now_ns = self._world.clock.now_ns()
        incoming = Incoming(batch, target.name, target.settings, now_ns // 1_000_000)
        lanes, general = self._partitions(incoming, target) * 2, incoming.is_general()
        if general is not None:
            lanes = lanes + general
        order = None if (lanes[1:] >= lanes[:-1]).all() else np.argsort(lanes, kind="stable")
        placed = lanes if order is None else lanes[order]
        rows = incoming.rows(order)
        cuts = [0, *(np.flatnonzero(np.diff(placed)) + 1).tolist(), incoming.count]
        for start, stop in pairwise(cuts):
            number = int(placed[start])
            lane = SinkLane(target.name, target.id, number >> 1, bool(number & 1))
            packing = self._packing(target)
            for body in encode_rows(rows, start, stop, now_ns, cap_bytes=target.settings.frame_bytes, packing=packing):
                yield lane, body

    def _partitions(self, incoming: Incoming, target: Target) -> IntArray:
        """The partition of each row: the one that it names, or that of its key, or one in turn."""
        count = target.partitions
        wanted = incoming.column("partition")
        if count == 1 and wanted is None:
            return np.zeros(incoming.count, np.int64)
        found = _by_key(incoming.column("key"), incoming.count, count)
        free = found < 0
        if free.any():
            found[free] = self._in_turn(int(free.sum()), count)
        if wanted is not None:
            given = _numpy(pc.is_valid(wanted))
            numbers = _numpy(pc.fill_null(wanted, 0))
            for end in (int(numbers.min()), int(numbers.max())):
                check_partition(end, target.name, count)
            found = np.where(given, numbers, found).astype(np.int64)
        return found

    def _in_turn(self, rows: int, partitions: int) -> IntArray:
        """Partitions for rows without a key, in long runs: each gets its share of every batch."""
        first, self._turn = self._turn, self._turn + 1
        return (np.arange(rows, dtype=np.int64) * partitions // rows + first) % partitions

    def _packing(self, target: Target) -> Packing:
        settings = target.settings
        if target.name not in self._packings:
            self._packings[target.name] = Packing.named(
                settings.codec,
                level=settings.codec_level,
                min_bytes=settings.codec_min_bytes,
                min_saving_percent=settings.codec_min_saving_percent,
                max_bytes=settings.max_raw_bytes,
            )
        return self._packings[target.name]


def _by_key(keys: Any, rows: int, partitions: int) -> IntArray:
    """The partition of each key, as the library chooses it; -1 without a key."""
    if keys is None:
        return np.full(rows, -1, np.int64)
    if not keys.null_count:
        laid_out = Bytes.of(binary(keys))
        hashes = murmur3_of(laid_out.ends, np.frombuffer(laid_out.data, np.uint8))
        if hashes is not None:
            return (hashes % np.uint32(partitions)).astype(np.int64)
    coded = binary(keys).dictionary_encode()
    of_key = np.array([*partitions_for(coded.dictionary.to_pylist(), partitions), -1], np.int64)
    which: IntArray = _numpy(pc.fill_null(coded.indices, len(of_key) - 1))
    return of_key[which]
