"""`replay`: a slice of topics or of a table, once more into a topic; no faster than asked, each message once.

1. The slice is frozen: its rows are copied into the pipeline's checkpoint, in batches, and a small file says so. Before
   that moment nothing was sent; from there on it is settled what is, however long it takes and whatever is trimmed,
   compacted or published meanwhile.
2. Batch by batch is written to the topic. Each has a write id of its own, so that a batch that was stored before a
   crash and is sent again is stored once.
3. When all is sent the copy is removed. A run more finds that and does nothing.

Rows of one partition go in their order, so messages of one key do, too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.api.times import instant_ns, parse_instant
from holdfast.broker.folder.layout import check_name
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.options import Subscription
from holdfast.spark.pipelines.checkpoint import Ledger
from holdfast.spark.pipelines.lake import BATCH, read_table
from holdfast.spark.pipelines.land import as_json
from holdfast.spark.pipelines.spec import PipelineKind, PipelineOptions, Plan, Progress, Read, Summary
from holdfast.spark.ranges import DataFolder
from holdfast.storage.files import durable_replace, join, read_file, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.spec import Context

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.spec import Context

REPLAY_ID: Final = "replay-id"
REPLAY_OF: Final = "replay-of"

_ROWS: Final = "rows"
_STATE: Final = "replay.json"
_BATCH: Final = "_replay_batch"
_EXAMPLES: Final = 5
_SHOWN_CHARACTERS: Final = 60
# A write costs Spark about a second: a rate is kept over this time, not from message to message.
_BURST_S: Final = 5.0


_FIRST, _LAST = -2, -1


Offsets = dict[str, dict[int, int]]


class SliceOptions(PipelineOptions, frozen=True, kw_only=True):
    """Which messages: of topics, or of the table of the pipeline `source`.

    `since` is the first moment meant and `until` the first that is not, as ISO 8601 or `-2h` from now; so are
    `starting_offsets` and `ending_offsets`, by topic and partition. Partitions that they leave out are read as wholes.
    """

    topics: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    key: str | None = None
    starting_offsets: Offsets = msgspec.field(default_factory=dict)
    ending_offsets: Offsets = msgspec.field(default_factory=dict)
    where: str | None = None

    def __post_init__(self) -> None:
        if bool(self.topics) == (self.source is not None):
            raise BadSettings(
                "say what to read: topics, or source (a pipeline whose table holds messages); one of them"
            )


def messages_in(context: Context) -> DataFrame:
    """The messages that the options mean, with their headers."""
    from pyspark.sql import functions as f

    options: SliceOptions = context.options
    found = _of_topics(context, options) if options.topics else _of_table(context, options)
    now_ms = context.world.clock.now_ns() // 1_000_000
    for name, text in (("since", options.since), ("until", options.until)):
        if text is not None:
            moment = f.timestamp_micros(f.lit(_instant_ns(name, text, now_ms) // 1000))
            found = found.where(f.col("timestamp") >= moment if name == "since" else f.col("timestamp") < moment)
    if options.key is not None:
        found = found.where(f.col("key") == f.encode(f.lit(options.key), "UTF-8"))
    return found if options.where is None else found.where(options.where)


def _of_topics(context: Context, options: SliceOptions) -> DataFrame:

    places = list(DataFolder(context.folder, context.world).partitions(Subscription(names=options.topics)))
    reader = context.spark.read.format("holdfast").option("path", context.folder)
    reader = reader.option("subscribe", ",".join(options.topics)).option("includeHeaders", "true")
    # Times are found by the index, offsets are asked for as such: nothing else is read.
    for name, offsets, since, other in (
        ("starting", options.starting_offsets, options.since, _FIRST),
        ("ending", options.ending_offsets, options.until, _LAST),
    ):
        if offsets:
            reader = reader.option(f"{name}Offsets", _all_places(f"{name}_offsets", offsets, places, other))
        elif since is not None:
            reader = reader.option(f"{name}Timestamp", since)
    return reader.load()


def _of_table(context: Context, options: SliceOptions) -> DataFrame:
    from pyspark.sql import functions as f

    assert options.source is not None
    last = Ledger(context.world, context.project.checkpoint(options.source)).last()
    table = context.project.table(options.source)
    found = None if last is None else read_table(context.spark, context.disk, table, after=-1, through=last.batch)
    if found is None:
        raise InvalidRequest(f"the table of {options.source} has no rows yet: run {options.source} first")
    missing = {"topic", "partition", "offset", "timestamp", "key", "value"} - set(found.columns)
    if missing:
        raise InvalidRequest(
            f"the table of {options.source} does not hold messages, it has no {', '.join(sorted(missing))}: "
            "name a pipeline of the kind land or compact"
        )
    for offsets, first in ((options.starting_offsets, True), (options.ending_offsets, False)):
        for topic, places in offsets.items():
            for partition, offset in places.items():
                found = found.where(~_is_outside(f.col("topic") == topic, partition, offset, first=first))
    return found.drop(BATCH)


def _is_outside(of_topic: Column, partition: int, offset: int, *, first: bool) -> Column:
    from pyspark.sql import functions as f

    there = of_topic & (f.col("partition") == partition)
    return there & (f.col("offset") < offset if first else f.col("offset") >= offset)


def _all_places(name: str, given: Offsets, places: list[tuple[str, int]], other: int) -> str:
    """Offsets for all partitions that are read, as the source wants them."""
    wanted: dict[str, dict[str, int]] = {}
    for topic, partition in places:
        wanted.setdefault(topic, {})[str(partition)] = given.get(topic, {}).get(partition, other)
    for topic, offsets in given.items():
        for partition in offsets:
            if (topic, partition) not in places:
                raise InvalidRequest(f"{name} names {topic}/{partition}, which is not among what is read")
    return as_json(wanted)


def _instant_ns(name: str, text: str, now_ms: int) -> int:
    if text.isascii() and text.isdigit() and len(text) >= 10:
        return int(text) * 1_000_000
    return instant_ns(parse_instant(text, now_ms, name), name)


def selection_of(options: SliceOptions) -> dict[str, Any]:
    """The options that say which messages are meant, as plain values."""
    return {name: getattr(options, name) for name in SELECTING}


SELECTING: Final = ("source", "topics", "since", "until", "key", "starting_offsets", "ending_offsets", "where")


class ReplayOptions(SliceOptions, frozen=True, kw_only=True):
    """What is sent again, where to and how. With another `id` the same slice is sent once more."""

    to: str
    id: str | None = None
    rate: float | None = None
    batch_rows: int = 100_000
    partitions: Literal["by-key", "same"] = "by-key"
    text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.id is not None:
            check_name(self.id, "replay id")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise BadSettings(f"rate is {self.rate:g}: give messages a second, above 0")
        if self.batch_rows < 1:
            raise BadSettings(f"batch_rows is {self.batch_rows}: give a number of 1 or more")

    @property
    def rows_at_once(self) -> int:
        """How many rows a batch has, at most."""
        return self.batch_rows if self.rate is None else max(1, min(self.batch_rows, int(self.rate * _BURST_S)))


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A replay that is settled: `counts` are the rows of each batch, `sent` says how many batches are stored."""

    id: str
    write: str
    selection: dict[str, Any]
    counts: tuple[int, ...]
    sent: int = 0
    sent_rows: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def is_done(self) -> bool:
        return self.sent == len(self.counts)


def in_batches(messages: DataFrame, rows_at_once: int, partitions: int) -> DataFrame:
    """The messages with the number of their batch: each takes as many from every partition, in their order."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    share = max(1, rows_at_once // max(1, partitions))
    order = Window.partitionBy("topic", "partition").orderBy("offset")
    return messages.withColumn(_BATCH, f.floor((f.row_number().over(order) - 1) / share).cast("int"))


def as_new_messages(rows: DataFrame, replay_id: str, *, same_partitions: bool, text: bool) -> DataFrame:
    """The rows as the sink takes them: what they were, and two headers that say that they come again."""
    from pyspark.sql import functions as f

    old = f.concat_ws("-", "topic", f.col("partition").cast("string"), f.col("offset").cast("string"))
    given = f.coalesce("headers", f.array().cast("array<struct<key:string,value:binary>>"))
    kept = f.filter(given, lambda header: ~header["key"].isin(REPLAY_ID, REPLAY_OF))
    headers = f.concat(kept, f.array(_header(REPLAY_ID, f.lit(replay_id)), _header(REPLAY_OF, old)))
    key: Column = f.col("key")
    if text:
        key = f.decode("key", "UTF-8")
        headers = f.transform(
            headers, lambda each: f.struct(each["key"].alias("key"), f.decode(each["value"], "UTF-8").alias("value"))
        )
    columns = [
        key.alias("key"),
        f.when(~f.col("tombstone"), f.col("value")).alias("value"),
        headers.alias("headers"),
        f.col("priority"),
    ]
    return rows.select(*columns, *(["partition"] if same_partitions else []))


def _header(name: str, value: Column) -> Column:
    from pyspark.sql import functions as f

    return f.struct(f.lit(name).alias("key"), f.encode(value, "UTF-8").alias("value"))


def plan(context: Context) -> Plan:
    """How many messages would be sent, and some of them."""
    options: ReplayOptions = context.options
    known = _known(context)
    if known is not None:
        left = known.rows - known.sent_rows
        reads = (
            Read(what="the frozen slice", start=f"batch {known.sent}", end=f"batch {len(known.counts)}", rows=left),
        )
        notes = [f"replay {known.id} is done" if known.is_done else f"replay {known.id} goes on: {left} rows are left"]
        return _plan(context, reads, left, notes)
    messages = messages_in(context)
    counted = messages.groupBy("topic", "partition").agg(*_extent()).orderBy("topic", "partition").collect()
    found = tuple(
        Read(
            what=f"{row['topic']}/{row['partition']}",
            start=str(row["first"]),
            end=str(row["last"] + 1),
            rows=row["count"],
            bytes=row["bytes"],
        )
        for row in counted
    )
    rows = sum(row["count"] for row in counted)
    notes = [f"such as {_example(row)}" for row in messages.orderBy("timestamp").limit(_EXAMPLES).collect()]
    if options.rate is not None and rows:
        notes.append(f"takes about {rows / options.rate:.0f} s at {options.rate:g} messages a second")
    return _plan(context, found, rows, notes)


def _plan(context: Context, reads: tuple[Read, ...], rows: int, notes: list[str]) -> Plan:
    size = sum(read.bytes or 0 for read in reads)
    to = (f"topic {context.options.to}",)
    return Plan(
        pipeline=context.name, kind=KIND.name, reads=reads, rows=rows, bytes=size, writes=to, notes=tuple(notes)
    )


def run(context: Context) -> Summary:
    """Send what is not sent yet."""
    began_ns = context.world.clock.monotonic_ns()
    replay = _known(context) or _freeze(context)
    before = replay.sent_rows
    folder = _folder(context, replay.id)
    while not replay.is_done and not context.stopping.is_set():
        _send(context, replay, folder)
        count = replay.counts[replay.sent]
        replay = msgspec.structs.replace(replay, sent=replay.sent + 1, sent_rows=replay.sent_rows + count)
        durable_replace(context.disk, folder, _STATE, msgspec.json.encode(replay))
        left = replay.rows - replay.sent_rows
        sent = replay.sent_rows - before
        context.tell(Progress(pipeline=context.name, batch=replay.sent, rows_in=sent, rows_out=sent, lag=left))
        if context.options.rate is not None and not replay.is_done:
            _wait_until(context, began_ns + round(sent / context.options.rate * 1e9))
    if replay.is_done:
        remove_tree(context.disk, join(folder, _ROWS))
    left = replay.rows - replay.sent_rows
    return Summary(
        pipeline=context.name,
        kind=KIND.name,
        batches=replay.sent,
        rows_in=replay.rows,
        rows_out=replay.sent_rows - before,
        lag=left,
        notes=(f"replay {replay.id}: {'done' if not left else f'{left} rows are left, run it again to go on'}",),
        details={"replay_id": replay.id, "rows": replay.rows},
    )


def _known(context: Context) -> Replay | None:
    """The replay by this id, if it was begun before."""
    options: ReplayOptions = context.options
    replay_id = options.id or context.name
    content = read_file(context.disk, join(_folder(context, replay_id), _STATE))
    if content is None:
        return None
    replay = msgspec.json.decode(content, type=Replay)
    for name, value in _settled(options).items():
        if replay.selection[name] != value:
            raise InvalidRequest(
                f"replay {replay_id} of {context.name} was begun with {name} {replay.selection[name]!r}, and now it is "
                f"{value!r}: give it another id, id: {replay_id}-2, to send this as well"
            )
    return replay


def _freeze(context: Context) -> Replay:
    """Settle what is sent: copy the rows, count them, write that down."""
    from pyspark.sql import functions as f

    options: ReplayOptions = context.options
    _check_target(context)
    replay_id = options.id or context.name
    folder = _folder(context, replay_id)
    rows = join(folder, _ROWS)
    remove_tree(context.disk, rows)
    context.disk.make_folder(folder)
    messages = messages_in(context)
    if "headers" not in messages.columns:
        messages = messages.withColumn("headers", f.lit(None).cast("array<struct<key:string,value:binary>>"))
    wanted = messages.select("topic", "partition", "offset", "key", "value", "headers", "priority", "tombstone")
    places = messages.select("topic", "partition").distinct().count()
    batched = in_batches(wanted, options.rows_at_once, places)
    # Sorted by batch, so that reading one of them skips the rest by the files' own statistics.
    batched.sortWithinPartitions(_BATCH, "topic", "partition", "offset").write.parquet(rows)
    for name in context.disk.files_below(rows):
        context.disk.sync_file(join(rows, name))
    counted = context.spark.read.parquet(rows).groupBy(_BATCH).count().orderBy(_BATCH).collect()
    replay = Replay(
        id=replay_id,
        write=f"replay-{context.world.ids.random_u32():08x}{context.world.ids.random_u32():08x}",
        selection=_settled(options),
        counts=tuple(row["count"] for row in counted),
    )
    durable_replace(context.disk, folder, _STATE, msgspec.json.encode(replay))
    return replay


def _send(context: Context, replay: Replay, folder: str) -> None:
    options: ReplayOptions = context.options
    rows = context.spark.read.parquet(join(folder, _ROWS)).where(f"{_BATCH} = {replay.sent}")
    # One task for each partition that they came from: the sink keeps the order of a task.
    ordered = rows.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    messages = as_new_messages(ordered, replay.id, same_partitions=options.partitions == "same", text=options.text)
    writer = messages.write.format("holdfast").mode("append").option("path", context.folder).option("topic", options.to)
    writer.option("writeId", replay.write).option("batchId", str(replay.sent)).save()


def _check_target(context: Context) -> None:
    """A replay that cannot be sent anywhere is not begun."""

    DataFolder(context.folder, context.world).topics(Subscription(names=(context.options.to,)))


def _wait_until(context: Context, moment_ns: int) -> None:
    clock = context.world.clock
    while (left_ns := moment_ns - clock.monotonic_ns()) > 0 and not context.stopping.is_set():
        clock.wait(context.stopping, left_ns / 1e9)


def _settled(options: ReplayOptions) -> dict[str, Any]:
    """What must not change in the middle, as it comes out of JSON."""
    settled: dict[str, Any] = json.loads(msgspec.json.encode({**selection_of(options), "to": options.to}))
    return settled


def _folder(context: Context, replay_id: str) -> str:
    return join(context.checkpoint, f"replay-{replay_id}")


def _extent() -> list[Column]:
    from pyspark.sql import functions as f

    size = f.sum(f.octet_length("value"))
    return [
        f.min("offset").alias("first"),
        f.max("offset").alias("last"),
        f.count("*").alias("count"),
        size.alias("bytes"),
    ]


def _example(row: Any) -> str:
    key = "" if row["key"] is None else f" {bytes(row['key'])[:_SHOWN_CHARACTERS].decode('utf-8', 'replace')}:"
    value = "" if row["value"] is None else bytes(row["value"])[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
    shown = "".join(each if each.isprintable() else "." for each in f"{key} {value}")
    return f"{row['topic']}-{row['partition']}-{row['offset']}{shown}"


assert {*SELECTING} <= {*ReplayOptions.__struct_fields__}

KIND: Final = PipelineKind(
    name="replay",
    says="a slice of topics or of a table once more into a topic: by time, key, offsets, SQL; at a rate",
    options=ReplayOptions,
    plan=plan,
    run=run,
    follows=False,
    template="""\
    kind: replay
    topics: [orders]                        # or the table of a pipeline: source: orders-land
    to: orders-again                        # the topic that gets them, which must be there
    since: "-2h"                            # ISO 8601, or so long ago; until: as well
    # key: customer-7
    # starting_offsets: {orders: {0: 100}}
    # where: "get_json_object(decode(value, 'UTF-8'), '$.country') = 'SE'"
    rate: 500                               # messages a second
    # id: after-the-incident                # with another id the same slice is sent once more
""",
)
