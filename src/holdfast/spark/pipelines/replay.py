"""`replay`: a slice of topics or of a table, once more into a topic; no faster than asked, each message once.

1. The slice is frozen: its rows are copied into the pipeline's checkpoint, in batches, and a small file says so. Before
   that nothing was sent. After it the rows to send are settled, however long it takes and whatever is trimmed,
   compacted or published meanwhile.
2. The batches are written to the topic one by one. Each has a write id of its own, so that a batch that was stored
   before a crash and is sent again is stored once.
3. When all batches are sent, the copy is removed. Another run does nothing.

Rows of one partition keep their order, and so do messages of one key.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.broker.folder.layout import check_name
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.options import EARLIEST, LATEST, moment_ns
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.checkpoint import ledger_of
from holdfast.spark.pipelines.lake import read_table
from holdfast.spark.pipelines.origin import partitions_there
from holdfast.spark.pipelines.parquet import BATCH
from holdfast.spark.pipelines.spec import Context, PipelineKind, PipelineOptions, Plan, Read, Summary
from holdfast.storage.files import durable_replace, join, read_file, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


REPLAY_ID: Final = "replay-id"
REPLAY_OF: Final = "replay-of"

_ROWS: Final = "rows"
_STATE: Final = "replay.json"
_BATCH: Final = "_replay_batch"
_EXAMPLES: Final = 5
_SHOWN_CHARACTERS: Final = 60
# A write costs Spark about a second: a rate is kept over this time, not from message to message.
_BURST_S: Final = 5.0


Offsets = dict[str, dict[int, int]]


class ReplayOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of `replay`: which messages of topics, or of the table of `source`, and where and how to send them.

    `since` and `starting_offsets` are the first that are meant, `until` and `ending_offsets` the first that are not.
    Times are ISO 8601, or `-2h` from now. Offsets are by topic and partition; other partitions are read as a whole.
    With another `id` the same messages are sent once more.
    """

    topics: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    key: str | None = None
    starting_offsets: Offsets = msgspec.field(default_factory=dict)
    ending_offsets: Offsets = msgspec.field(default_factory=dict)
    where: str | None = None
    to: str
    id: str | None = None
    rate: float | None = None
    batch_rows: int = 100_000
    partitions: Literal["by-key", "same"] = "by-key"
    text: bool = False

    def __post_init__(self) -> None:
        if bool(self.topics) == (self.source is not None):
            raise BadSettings(
                "say what to read: topics, or source (a pipeline whose table holds messages); one of them"
            )
        if self.id is not None:
            check_name(self.id, "replay id")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise BadSettings(f"rate is {self.rate:g}: give messages per second, above 0")
        if self.batch_rows < 1:
            raise BadSettings(f"batch_rows is {self.batch_rows}: give a number of 1 or more")

    @property
    def rows_at_once(self) -> int:
        """The most rows of a batch."""
        return self.batch_rows if self.rate is None else max(1, min(self.batch_rows, int(self.rate * _BURST_S)))


# These must not change between the runs of one replay.
_SETTLED: Final = ("source", "topics", "since", "until", "key", "starting_offsets", "ending_offsets", "where", "to")


def messages_in(context: Context) -> DataFrame:
    """The messages that the options choose, with their headers."""
    options: ReplayOptions = context.options
    found = _of_topics(context, options) if options.topics else _of_table(context, options)
    now_ms = context.world.clock.now_ns() // 1_000_000
    for name, text in (("since", options.since), ("until", options.until)):
        if text is not None:
            moment = f.timestamp_micros(f.lit(moment_ns(text, now_ms, name, name) // 1000))
            found = found.where(f.col("timestamp") >= moment if name == "since" else f.col("timestamp") < moment)
    if options.key is not None:
        found = found.where(f.col("key") == f.encode(f.lit(options.key), "UTF-8"))
    return found if options.where is None else found.where(options.where)


def _of_topics(context: Context, options: ReplayOptions) -> DataFrame:
    places = [(each.topic, each.partition) for each in partitions_there(context, options.topics)]
    given: dict[str, str | None] = {"subscribe": ",".join(options.topics)}
    given |= dict.fromkeys(("includeHeaders", "includeMetadata"), "true")
    # The source finds times by its index and offsets as they are, and reads nothing else.
    for name, offsets, moment, other in (
        ("starting", options.starting_offsets, options.since, EARLIEST),
        ("ending", options.ending_offsets, options.until, LATEST),
    ):
        if offsets:
            given[f"{name}Offsets"] = _all_places(f"{name}_offsets", offsets, places, other)
        else:
            given[f"{name}Timestamp"] = moment
    return context.reader(**given).load()


def _of_table(context: Context, options: ReplayOptions) -> DataFrame:
    source = options.source or ""
    last = ledger_of(context, source).last()
    found = None if last is None else read_table(context, source, through=last.batch)
    if found is None:
        raise InvalidRequest(f"the table of {source} has no rows yet: run {source} first")
    missing = {"topic", "partition", "offset", "timestamp", "key", "value"} - set(found.columns)
    if missing:
        raise InvalidRequest(
            f"the table of {source} does not hold messages, it has no {', '.join(sorted(missing))}: "
            "name a pipeline of the kind land or compact"
        )
    for offsets, is_inside in (
        (options.starting_offsets, f.col("offset").__ge__),
        (options.ending_offsets, f.col("offset").__lt__),
    ):
        for topic, places in offsets.items():
            for partition, offset in places.items():
                elsewhere = (f.col("topic") != topic) | (f.col("partition") != partition)
                found = found.where(elsewhere | is_inside(offset))
    return found.drop(BATCH)


def _all_places(name: str, given: Offsets, places: list[tuple[str, int]], other: int) -> str:
    """Offsets for all partitions that are read, as the source wants them."""
    wanted: Offsets = {}
    for topic, partition in places:
        wanted.setdefault(topic, {})[partition] = given.get(topic, {}).get(partition, other)
    for topic, offsets in given.items():
        for partition in offsets:
            if (topic, partition) not in places:
                raise InvalidRequest(f"{name} names {topic}/{partition}, which is not read here: leave it out")
    return json.dumps(wanted)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A replay that is settled. `counts` are the rows of each batch, and `sent` is the number of batches stored."""

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
    """The messages with the number of their batch. A batch has equal numbers from every partition, in their order."""
    from pyspark.sql import Window

    share = max(1, rows_at_once // max(1, partitions))
    order = Window.partitionBy("topic", "partition").orderBy("offset")
    return messages.withColumn(_BATCH, f.floor((f.row_number().over(order) - 1) / share).cast("int"))


def as_new_messages(rows: DataFrame, replay_id: str, *, same_partitions: bool, text: bool) -> DataFrame:
    """The rows as the sink takes them, with two headers that mark a replay."""
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
    return f.struct(f.lit(name).alias("key"), f.encode(value, "UTF-8").alias("value"))


def plan(context: Context) -> Plan:
    options: ReplayOptions = context.options
    to = (f"topic {options.to}",)
    known = _known(context)
    if known is not None:
        left = known.rows - known.sent_rows
        read = Read(what="the frozen slice", start=f"batch {known.sent}", end=f"batch {len(known.counts)}", rows=left)
        state = "is done" if known.is_done else f"continues: {left} rows are left"
        return context.plan([read], writes=to, notes=[f"replay {known.id} {state}"])
    if options.source is not None and ledger_of(context, options.source).last() is None:
        return context.plan([], writes=to, notes=[f"{options.source} has not run yet: run it first"])
    messages = messages_in(context)
    extent = [
        f.min("offset").alias("first"),
        f.max("offset").alias("last"),
        f.count("*").alias("count"),
        f.sum(f.octet_length("value")).alias("bytes"),
    ]
    counted = messages.groupBy("topic", "partition").agg(*extent).orderBy("topic", "partition").collect()
    reads = [
        Read.of_offsets(
            row["topic"], row["partition"], row["first"], row["last"] + 1, rows=row["count"], bytes=row["bytes"]
        )
        for row in counted
    ]
    rows = sum(row["count"] for row in counted)
    notes = [f"such as {_example(row)}" for row in messages.orderBy("timestamp").limit(_EXAMPLES).collect()]
    if options.rate is not None and rows:
        notes.append(f"takes about {rows / options.rate:.0f} s at {options.rate:g} messages per second")
    return context.plan(reads, writes=to, notes=notes)


def run(context: Context) -> Summary:
    """Send the batches that were not sent yet."""
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
        context.report(replay.sent, sent, sent, left)
        if context.options.rate is not None and not replay.is_done:
            _wait_until(context, began_ns + round(sent / context.options.rate * 1e9))
    if replay.is_done:
        remove_tree(context.disk, join(folder, _ROWS))
    left = replay.rows - replay.sent_rows
    return context.summary(
        batches=replay.sent,
        rows_in=replay.rows,
        rows_out=replay.sent_rows - before,
        lag=left,
        notes=(f"replay {replay.id}: {'done' if not left else f'{left} rows are left, run it again to continue'}",),
        details={"replay_id": replay.id, "rows": replay.rows},
    )


def _known(context: Context) -> Replay | None:
    """The replay by this id, if it was begun before. Raises InvalidRequest if its options were others."""
    options: ReplayOptions = context.options
    replay_id = options.id or context.name
    content = read_file(context.disk, join(_folder(context, replay_id), _STATE))
    if content is None:
        return None
    replay = msgspec.json.decode(content, type=Replay)
    for name, value in _settled(options).items():
        if replay.selection[name] != value:
            raise InvalidRequest(
                f"replay {replay_id} of {context.name} was started with {name} {replay.selection[name]!r}, and now it "
                "is "
                f"{value!r}: give it another id, id: {replay_id}-2, to send this as well"
            )
    return replay


def _freeze(context: Context) -> Replay:
    """Settle what to send: copy the rows, count them, and write that down."""
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
    """Raise UnknownTopic if the topic to send to does not exist."""
    partitions_there(context, [context.options.to])


def _wait_until(context: Context, moment_ns: int) -> None:
    clock = context.world.clock
    while (left_ns := moment_ns - clock.monotonic_ns()) > 0 and not context.stopping.is_set():
        clock.wait(context.stopping, left_ns / 1e9)


def _settled(options: ReplayOptions) -> dict[str, Any]:
    settled: dict[str, Any] = json.loads(msgspec.json.encode({name: getattr(options, name) for name in _SETTLED}))
    return settled


def _folder(context: Context, replay_id: str) -> str:
    return join(context.checkpoint, f"replay-{replay_id}")


def _example(row: Any) -> str:
    key = "" if row["key"] is None else f" {bytes(row['key'])[:_SHOWN_CHARACTERS].decode('utf-8', 'replace')}:"
    value = "" if row["value"] is None else bytes(row["value"])[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
    shown = "".join(each if each.isprintable() else "." for each in f"{key} {value}")
    return f"{row['topic']}-{row['partition']}-{row['offset']}{shown}"


_TEMPLATE: Final = """\
    kind: replay
    topics: [orders]                        # or the table of a pipeline: source: orders-land
    to: orders-again                        # the topic that gets them, which must exist
    since: "-2h"                            # ISO 8601, or so long ago; until: as well
    # key: customer-7
    # starting_offsets: {orders: {0: 100}}
    # where: "get_json_object(decode(value, 'UTF-8'), '$.country') = 'SE'"
    rate: 500                               # messages per second
    # id: after-the-incident                # with another id, the same slice is sent again
"""
KIND: Final = PipelineKind(ReplayOptions, plan, run, _TEMPLATE, follows=False)
