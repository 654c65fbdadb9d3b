"""`compact`: sealed segments of topics as Parquet, which Spark reads at its own speed (cold tier); the latest by key.

A segment that is sealed never changes but for key compaction, so each is read once. How far it is stands in the ledger,
in the same file that makes a batch count; the rows of a batch and the table of the latest take their places with it.
Small files are merged as those of `land` are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import BadSettings, InvalidRequest, OffsetOutOfRange
from holdfast.spark.options import Subscription
from holdfast.spark.pipelines.batches import write_batch
from holdfast.spark.pipelines.checkpoint import Ledger, LedgerBatch, Tally
from holdfast.spark.pipelines.lake import DATE, finish_pending, merge_small_files, replacements, stage
from holdfast.spark.pipelines.spec import PipelineKind, PipelineOptions, Plan, Read, Summary
from holdfast.spark.ranges import DataFolder
from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark.pipelines.spec import Context

POSITIONS: Final = "positions"
LATEST_SUFFIX: Final = ".latest"


class CompactOptions(PipelineOptions, frozen=True, kw_only=True):
    """Which topics go to the cold tier. `latest` also keeps a table with the last message of each key."""

    topics: tuple[str, ...]
    latest: bool = False
    max_rows_per_batch: int = 5_000_000
    fail_on_data_loss: bool = True
    target_file_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        if not self.topics:
            raise BadSettings("name the topics: topics: [NAME]")
        if self.source is not None or self.expect:
            raise BadSettings("a pipeline of the kind compact reads topics as they are: it has no source and no expect")
        if self.max_rows_per_batch < 1:
            raise BadSettings(f"max_rows_per_batch is {self.max_rows_per_batch}: give a number of 1 or more")


class SealedRange(msgspec.Struct, frozen=True):
    """Messages of one partition that are sealed and not in the cold tier yet."""

    topic: str
    topic_id: int
    partition: int
    start: int
    stop: int
    bytes: int = 0


Positions = dict[str, dict[str, Any]]  # by topic: its id, and the offsets reached


def latest_by_key(messages: DataFrame) -> DataFrame:
    """The last message of each key of each topic; a key whose last message is a tombstone is gone.

    A key stays in its partition unless partitions were added, so the offset says which is last, and where it does not,
    the time.
    """
    from pyspark.sql import functions as f

    whole = f.struct(*[f.col(name) for name in messages.columns])
    keyed = messages.where(f.col("key").isNotNull())
    last_there = keyed.groupBy("topic", "key", "partition").agg(f.max_by(whole, "offset").alias("last"))
    newest = f.max_by("last", f.struct("last.timestamp", "last.partition")).alias("last")
    return last_there.groupBy("topic", "key").agg(newest).select("last.*").where(~f.col("tombstone"))


def sealed(
    folder: DataFolder, topics: tuple[str, ...], known: Positions, *, fail_on_data_loss: bool
) -> list[SealedRange]:
    """What each partition has to give."""
    found = []
    for topic, partition in folder.partitions(Subscription(names=topics)):
        reader = folder.reader(topic, partition)
        topic_id = folder.topic_id(topic)
        reached = known.get(topic)
        if reached is not None and reached["id"] != topic_id:
            raise InvalidRequest(
                f"topic {topic} was deleted and made again since its cold tier was begun: give this pipeline another "
                "name, or begin anew with --full-refresh"
            )
        segments = [] if reader is None else reader.segments()
        if reader is None or not segments:
            continue
        start = (reached or {"offsets": {}})["offsets"].get(str(partition), reader.start)
        stop = segments[-1].base_offset  # the last one is being written
        if start < reader.start:
            if fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"messages {start} to {reader.start - 1} of {topic}/{partition} were dropped before they came to "
                    "the cold tier: run this pipeline more often, or go on without them with fail_on_data_loss: false",
                    offset=start,
                    start=reader.start,
                    end=reader.end,
                )
            start = reader.start
        if start < stop:
            size = sum(segment.bytes for segment in segments[:-1] if segment.next_offset > start)
            found.append(SealedRange(topic, topic_id, partition, start, stop, size))
    return found


def limited(stretches: list[SealedRange], most_rows: int) -> list[SealedRange]:
    """As much of each as fits into one batch."""
    share = max(1, most_rows // max(1, len(stretches)))
    return [msgspec.structs.replace(each, stop=min(each.stop, each.start + share)) for each in stretches]


def plan(context: Context) -> Plan:
    """What would go to the cold tier."""
    stretches = _stretches(context)
    reads = tuple(
        Read(
            what=f"{each.topic}/{each.partition}",
            start=str(each.start),
            end=str(each.stop),
            rows=each.stop - each.start,
            bytes=each.bytes,
        )
        for each in stretches
    )
    return Plan(
        pipeline=context.name,
        kind=KIND.name,
        reads=reads,
        rows=sum(read.rows or 0 for read in reads),
        bytes=sum(read.bytes or 0 for read in reads),
        writes=(context.table, *([_latest_table(context)] if context.options.latest else [])),
        notes=() if reads else ("no segment was sealed since; the one that is being written stays in the log only",),
    )


def run(context: Context) -> Summary:
    """Batch by batch, until every sealed segment is there."""
    finish_pending(context)
    tally = Tally(context)
    while not context.stopping.is_set():
        stretches = _stretches(context)
        if not stretches:
            break
        taken = limited(stretches, context.options.max_rows_per_batch)
        left = sum(each.stop for each in stretches) - sum(each.stop for each in taken)
        tally.add(_one_batch(context, taken), left)
    tally.notes += merge_small_files(context, context.table, context.options.target_file_bytes)
    tally.lag = sum(each.stop - each.start for each in _stretches(context))
    return tally.summary()


def _one_batch(context: Context, stretches: list[SealedRange]) -> LedgerBatch:
    from pyspark.sql import functions as f

    last = Ledger(context.world, context.checkpoint).last()
    number = 0 if last is None else last.batch + 1
    rows = _messages(context, stretches)
    facts: dict[str, Any] = {"state": {POSITIONS: _reached(_known(last), stretches)}}
    if context.options.latest:
        facts["swaps"] = tuple(_stage_latest(context, rows, number))
    dated = rows.withColumn(DATE, f.to_date("timestamp"))
    return write_batch(context, number, dated, expectations=(), partition_by=(DATE, "topic"), **facts)


def _stage_latest(context: Context, rows: DataFrame, number: int) -> list[Any]:
    table = _latest_table(context)
    if number == 0:  # it was begun anew: what is there is of another time
        remove_tree(context.disk, table)
    topics = [row["topic"] for row in rows.select("topic").distinct().collect()]
    for topic in topics:
        if context.disk.exists(f"{table}/topic={topic}"):
            # With its schema given, a topic named 007 stays one.
            reader = context.spark.read.schema(rows.schema).option("basePath", table)
            rows = rows.unionByName(reader.parquet(f"{table}/topic={topic}"))
    latest = latest_by_key(rows).repartition("topic")
    staged = stage(context, latest, "latest", ("topic",))
    return replacements(context, staged, table, number)


def _messages(context: Context, stretches: list[SealedRange]) -> DataFrame:
    assign: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    stops: dict[str, dict[str, int]] = {}
    for each in stretches:
        assign.setdefault(each.topic, []).append(each.partition)
        starts.setdefault(each.topic, {})[str(each.partition)] = each.start
        stops.setdefault(each.topic, {})[str(each.partition)] = each.stop
    reader = context.spark.read.format("holdfast").option("path", context.folder).option("includeHeaders", "true")
    reader = reader.option("assign", json.dumps(assign)).option("startingOffsets", json.dumps(starts))
    return reader.option("endingOffsets", json.dumps(stops)).load()


def _stretches(context: Context) -> list[SealedRange]:
    options: CompactOptions = context.options
    known = _known(Ledger(context.world, context.checkpoint).last())
    folder = DataFolder(context.folder, context.world)
    return sealed(folder, options.topics, known, fail_on_data_loss=options.fail_on_data_loss)


def _known(last: LedgerBatch | None) -> Positions:
    return {} if last is None else last.state[POSITIONS]


def _reached(before: Positions, stretches: list[SealedRange]) -> Positions:
    after = {topic: {"id": known["id"], "offsets": dict(known["offsets"])} for topic, known in before.items()}
    for each in stretches:
        offsets = after.setdefault(each.topic, {"id": each.topic_id, "offsets": {}})["offsets"]
        offsets[str(each.partition)] = each.stop
    return after


def _latest_table(context: Context) -> str:
    return context.table + LATEST_SUFFIX


def _identity(options: CompactOptions) -> dict[str, Any]:
    return {"topics": sorted(options.topics), "latest": options.latest}


KIND: Final = PipelineKind(
    name="compact",
    says="sealed segments of topics as Parquet with small files merged (cold tier), and the latest by key",
    options=CompactOptions,
    plan=plan,
    run=run,
    identity=_identity,
    follows=False,
    template="""\
    kind: compact
    topics: [orders]
    latest: true                # also NAME.latest: the last message of each key, without those deleted
    # max_rows_per_batch: 5000000
    # fail_on_data_loss: false  # go on where retention was faster
""",
)
