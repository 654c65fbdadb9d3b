"""`compact`: sealed segments of topics as a table, which Spark reads at its own speed (cold tier); the latest by key.

A sealed segment never changes except by key compaction, so each is read once. The ledger holds the offsets reached, in
the same file that makes a batch count. Small files are merged as those of `land` are.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import BadSettings, InvalidRequest, OffsetOutOfRange
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import write_batch
from holdfast.spark.pipelines.checkpoint import LedgerBatch, TableChange, Tally, ledger_of
from holdfast.spark.pipelines.lake import (
    DATE,
    LATEST_SUFFIX,
    change,
    convert_plain,
    finish_pending,
    is_delta,
    optimize_if_worthwhile,
    stage,
)
from holdfast.spark.pipelines.origin import PartitionThere, partitions_there, sealed_there
from holdfast.spark.pipelines.spec import Context, LakeOptions, PipelineKind, Plan, Read, Summary
from holdfast.spark.pipelines.stores import remove_all
from holdfast.spark.ranges import Range

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


POSITIONS: Final = "positions"
# A key stays in its partition unless partitions were added. Offsets say which message is newer in one; otherwise times.
_NEWER: Final = (
    "CASE WHEN s.partition = t.partition THEN s.offset > t.offset "
    "WHEN s.timestamp = t.timestamp THEN s.partition > t.partition ELSE s.timestamp > t.timestamp END"
)


class CompactOptions(LakeOptions, frozen=True, kw_only=True):
    """Options of `compact`. `latest` also keeps a table with the last message of each key."""

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


class SealedRange(Range, frozen=True):
    """Messages of one partition that are sealed and not in the cold tier yet."""

    topic_id: int = 0
    bytes: int = 0


Positions = dict[str, dict[str, Any]]  # by topic: its id, and the offsets reached


def latest_by_key(messages: DataFrame) -> DataFrame:
    """The last message of each key of each topic, which may be a tombstone.

    A key stays in its partition unless partitions were added, so the offset says which is last, and where it does not,
    the time.
    """
    whole = f.struct(*[f.col(name) for name in messages.columns])
    keyed = messages.where(f.col("key").isNotNull())
    last_there = keyed.groupBy("topic", "key", "partition").agg(f.max_by(whole, "offset").alias("last"))
    newest = f.max_by("last", f.struct("last.timestamp", "last.partition")).alias("last")
    return last_there.groupBy("topic", "key").agg(newest).select("last.*")


def sealed(
    there: Iterable[PartitionThere], ranges: Iterable[Range], known: Positions, *, fail_on_data_loss: bool
) -> list[SealedRange]:
    """The sealed messages of each partition that are not in the cold tier yet."""
    found = []
    facts = {(each.topic, each.partition): each for each in there}
    for each in ranges:
        topic, partition, stop = each.topic, each.partition, each.stop
        part = facts.get((topic, partition))
        if part is None:  # it was just added
            continue
        topic_id = part.topic_id
        reached = known.get(topic)
        if reached is not None and reached["id"] != topic_id:
            raise InvalidRequest(
                f"topic {topic} was deleted and recreated since its cold tier was started: give this pipeline another "
                "name, or start over with --full-refresh"
            )
        start = (reached or {"offsets": {}})["offsets"].get(str(partition), each.start)
        if start < each.start:
            if fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"messages {start} to {each.start - 1} of {topic}/{partition} were dropped before they reached "
                    "the cold tier: run this pipeline more often, or skip them with fail_on_data_loss: false",
                    offset=start,
                    start=each.start,
                    end=part.end,
                )
            start = each.start
        if start < stop:
            size = part.bytes * (stop - start) // max(part.end - part.start, 1)
            found.append(SealedRange(topic, partition, start, stop, topic_id, size))
    return found


def limited(ranges: list[SealedRange], most_rows: int) -> list[SealedRange]:
    """As much of each range as fits into one batch."""
    share = max(1, most_rows // max(1, len(ranges)))
    return [msgspec.structs.replace(each, stop=min(each.stop, each.start + share)) for each in ranges]


def plan(context: Context) -> Plan:
    reads = [
        Read.of_offsets(each.topic, each.partition, each.start, each.stop, bytes=each.bytes)
        for each in _sealed(context)
    ]
    writes = [context.table, *([_latest_table(context)] if context.options.latest else [])]
    notes = () if reads else ("no segment was sealed since; the one that is being written stays in the log only",)
    return context.plan(reads, writes=writes, notes=notes)


def run(context: Context) -> Summary:
    """Write batch by batch, until every sealed segment is in the table."""
    finish_pending(context)
    tally = Tally(context)
    while not context.stopping.is_set():
        ranges = _sealed(context)
        if not ranges:
            break
        taken = limited(ranges, context.options.max_rows_per_batch)
        left = sum(each.stop for each in ranges) - sum(each.stop for each in taken)
        tally.add(_one_batch(context, taken), left)
    for table in (context.table, _latest_table(context)):
        if is_delta(context.tables, table):
            optimize_if_worthwhile(table, context.options.target_file_bytes)
    tally.lag = sum(each.stop - each.start for each in _sealed(context))
    return tally.summary()


def _one_batch(context: Context, ranges: list[SealedRange]) -> LedgerBatch:
    last = ledger_of(context).last()
    number = 0 if last is None else last.batch + 1
    rows = context.reader(includeHeaders="true", includeMetadata="true", **offset_options(ranges)).load()
    facts: dict[str, Any] = {"state": {POSITIONS: _reached(_known(last), ranges)}}
    if context.options.latest:
        facts["changes"] = [_latest_change(context, rows, number)]
    dated = rows.withColumn(DATE, f.to_date("timestamp"))
    return write_batch(context, number, dated, partition_by=(DATE, "topic"), **facts)


def _latest_change(context: Context, rows: DataFrame, number: int) -> TableChange:
    """What the batch does to the table of the last messages, which is a Delta table whatever the other one is."""
    table = _latest_table(context)
    if number == 0:  # it starts over: the table is an old one
        remove_all(context.tables, table)
    convert_plain(context, table)
    newest = latest_by_key(rows)
    staged = stage(context, newest, "latest", ())
    return change(
        context,
        table,
        newest,
        ("topic",),
        staged=posixpath.relpath(staged, context.project.lake),
        keys=("topic", "key"),
        newer=_NEWER,
        deleted="s.tombstone",
    )


def offset_options(ranges: Iterable[Range]) -> dict[str, str]:
    """The options of the source to read these ranges, one for each partition."""
    assign: dict[str, list[int]] = {}
    starts: dict[str, dict[int, int]] = {}
    stops: dict[str, dict[int, int]] = {}
    for each in ranges:
        assign.setdefault(each.topic, []).append(each.partition)
        starts.setdefault(each.topic, {})[each.partition] = each.start
        stops.setdefault(each.topic, {})[each.partition] = each.stop
    places = {"assign": assign, "startingOffsets": starts, "endingOffsets": stops}
    return {name: json.dumps(value) for name, value in places.items()}


def _sealed(context: Context) -> list[SealedRange]:
    options: CompactOptions = context.options
    known = _known(ledger_of(context).last())
    there, ranges = partitions_there(context, options.topics), sealed_there(context, options.topics)
    return sealed(there, ranges, known, fail_on_data_loss=options.fail_on_data_loss)


def _known(last: LedgerBatch | None) -> Positions:
    return {} if last is None else last.state[POSITIONS]


def _reached(before: Positions, ranges: list[SealedRange]) -> Positions:
    after = {topic: {"id": known["id"], "offsets": dict(known["offsets"])} for topic, known in before.items()}
    for each in ranges:
        offsets = after.setdefault(each.topic, {"id": each.topic_id, "offsets": {}})["offsets"]
        offsets[str(each.partition)] = each.stop
    return after


def _latest_table(context: Context) -> str:
    return context.table + LATEST_SUFFIX


_TEMPLATE: Final = """\
    kind: compact
    topics: [orders]
    latest: true                # also NAME.latest: the last message of each key, without those deleted
    # format: parquet           # plain files instead of a Delta table
    # max_rows_per_batch: 5000000
    # fail_on_data_loss: false  # go on where retention was faster
"""
KIND: Final = PipelineKind(
    CompactOptions,
    plan,
    run,
    _TEMPLATE,
    identity=lambda options: {"topics": sorted(options.topics), "latest": options.latest},
    follows=False,
)
