"""`land`: topics to Parquet, every message once, with all that is known of it (bronze).

Spark says what a batch holds: it notes the offsets before the batch begins, and after a crash asks for the same batch
with the same offsets. The ledger says whether that batch is written already. Both together make it exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.spark.options import Subscription
from holdfast.spark.pipelines.batches import check_columns, write_batch
from holdfast.spark.pipelines.checkpoint import Ledger, Tally
from holdfast.spark.pipelines.lake import DATE, finish_pending, merge_small_files
from holdfast.spark.pipelines.spec import PipelineKind, PipelineOptions, Plan, Positive, Read, Summary
from holdfast.spark.ranges import DataFolder, Positions, from_json, starting_offset
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from holdfast.spark.pipelines.spec import Context


# The topics that a pipeline reads: as a stream for Spark, and as numbers for a plan.


SPARK: Final = "spark"


def stream_options(context: Context) -> dict[str, str]:
    """The options of the source, from those of the pipeline."""
    options = context.options
    given = {"path": context.folder, "includeHeaders": "true", "groupId": context.name}
    if options.pattern is not None:
        given["subscribePattern"] = options.pattern
    else:
        given["subscribe"] = ",".join(options.topics)
    if options.since is not None:
        given["startingTimestamp"] = options.since
    else:
        given["startingOffsets"] = options.starting
    if options.max_rows_per_batch is not None:
        given["maxOffsetsPerTrigger"] = str(options.max_rows_per_batch)
    given["failOnDataLoss"] = str(options.fail_on_data_loss).lower()
    return given


def messages(context: Context) -> DataFrame:
    """The topics as a stream."""
    return context.spark.readStream.format("holdfast").options(**stream_options(context)).load()


def offsets_file(context: Context, batch: int) -> str | None:
    """What Spark noted about a batch before it began: the offsets that it reaches."""
    content = read_file(context.disk, join(context.checkpoint, f"{SPARK}/offsets/{batch}"))
    return None if content is None else content.decode("utf-8")


def position(context: Context) -> Positions | None:
    """How far the topics were landed; None before the first batch."""
    last = Ledger(context.world, context.checkpoint).last()
    return None if last is None or last.offsets is None else positions_in(last.offsets)


def last_committed(context: Context) -> int:
    """The last batch that Spark is through with; -1 before the first."""
    folder = join(context.checkpoint, f"{SPARK}/commits")
    names = context.disk.names(folder) if context.disk.exists(folder) else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def positions_in(text: str) -> Positions | None:
    """The source's own line in a file of offsets."""
    for line in text.splitlines():
        if line.startswith("{"):
            document = json.loads(line)
            if "topics" in document:
                return from_json(document)
    return None


def unread(context: Context) -> list[Read]:
    """What each partition has that was not landed yet."""
    from holdfast.spark.options import stream_read_options as checked

    now_ms = context.world.clock.now_ns() // 1_000_000
    options = checked(stream_options(context), now_ms)
    folder = DataFolder(context.folder, context.world)
    known = position(context)
    found = []
    for topic, number in folder.partitions(options.subscription):
        reader = folder.reader(topic, number)
        if reader is None:
            found.append(Read(what=f"{topic}/{number}", start="0", end="0", rows=0, bytes=0))
            continue
        end = reader.end
        at = None if known is None else known.at(topic, number)
        if at is not None:
            start = at.offset
        else:
            start = starting_offset(reader, options, topic, number, end) if known is None else reader.start
        size = _bytes_between(reader, start, end)
        found.append(
            Read(what=f"{topic}/{number}", start=str(start), end=str(end), rows=max(end - start, 0), bytes=size)
        )
    return found


def rows_left(context: Context) -> int | None:
    """How many messages are beyond what was landed; None where the folder cannot be looked at."""
    try:
        return sum(read.rows or 0 for read in unread(context))
    except HoldfastError:
        return None


def check_topics(context: Context) -> None:
    """Refuse a folder or a topic that is not there, before Spark is asked."""
    DataFolder(context.folder, context.world).topics(Subscription(names=tuple(context.options.topics)))


def _bytes_between(reader: Any, start: int, end: int) -> int:
    """About how many bytes the log has for these messages: whole segments, and a share of those at the ends."""
    total = 0.0
    for segment in reader.segments():
        first, last = max(segment.base_offset, start), min(segment.next_offset, end)
        if first < last:
            total += segment.bytes * (last - first) / max(segment.next_offset - segment.base_offset, 1)
    return round(total)


# A slice of topics, or of a table that was made of them: by time, key, offsets and SQL, as one DataFrame.


def as_json(value: object) -> str:
    """An option of the source that is more than a word."""
    return json.dumps(value)


LANDED_AT: Final = "_landed_at"
_LOOK_S: Final = 1
_MERGE_EVERY: Final = 50
_TRIES: Final = 3
_SLOW: Final = "failed to connect back"


class LandOptions(PipelineOptions, frozen=True, kw_only=True):
    """What `land` may be told. `starting` and `since` count only for the first run."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Literal["earliest", "latest"] = "earliest"
    since: str | None = None
    max_rows_per_batch: Positive | None = None
    fail_on_data_loss: bool = True
    compact_files: bool = True
    target_file_bytes: Positive = 128 << 20

    def __post_init__(self) -> None:
        if self.source is not None:
            raise BadSettings("a pipeline of the kind land reads topics: write topics: [NAME], not source")
        if bool(self.topics) == bool(self.pattern):
            raise BadSettings("say which topics it lands, with topics: [NAME] or with pattern: REGEX")
        if self.since is not None and self.starting != "earliest":
            raise BadSettings("starting and since both say where the first run begins: give one of them")


def bronze(rows: DataFrame) -> DataFrame:
    """Messages as they are stored in the lake: nothing left out, and the day for the folder's name."""
    from pyspark.sql import functions as f

    return rows.select("*", f.current_timestamp().alias(LANDED_AT), f.to_date("timestamp").alias(DATE))


def plan(context: Context) -> Plan:
    reads = tuple(unread(context))
    return Plan(
        pipeline=context.name,
        kind="land",
        reads=reads,
        rows=sum(read.rows or 0 for read in reads),
        bytes=sum(read.bytes or 0 for read in reads),
        writes=(context.table,),
        notes=("offsets that key compaction removed count as rows",) if reads else (),
    )


def run(context: Context) -> Summary:
    finish_pending(context)
    _check_checkpoint(context)
    check_topics(context)
    landing = _Landing(context)
    rows = bronze(messages(context))
    check_columns(rows, context.options.expect, context.name)
    for attempt in range(1, _TRIES + 1):
        try:
            landing.wait(_start(context, rows, landing.write))
            break
        except Exception as error:
            # On a busy machine Spark's Python worker may take too long to start; nothing has happened then.
            if attempt == _TRIES or _SLOW not in str(error):
                raise
    landing.merge()
    tally = landing.tally
    tally.lag = rows_left(context)
    return tally.summary()


def _start(context: Context, rows: DataFrame, write: Callable[[DataFrame, int], None]) -> StreamingQuery:
    writer = rows.writeStream.queryName(context.name).foreachBatch(write)
    writer = writer.option("checkpointLocation", join(context.checkpoint, SPARK))
    if context.follow:
        return writer.trigger(processingTime=f"{context.every_ms} milliseconds").start()
    return writer.trigger(availableNow=True).start()


class _Landing:
    """What is done with each batch, and how the query is ended between two of them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = Ledger(context.world, context.checkpoint)
        self._writing = Lock()
        self._errors: list[Exception] = []
        self.tally = Tally(context)

    def write(self, rows: DataFrame, batch: int) -> None:
        """Called by Spark for each batch, maybe a second time after a crash."""
        with self._writing:
            if self._context.stopping.is_set():
                raise _Stopping
            try:
                self._write(rows, batch)
            except Exception as error:
                self._errors.append(error)  # as it is, before Spark makes a stack of it
                raise

    def _write(self, rows: DataFrame, batch: int) -> None:
        offsets = offsets_file(self._context, batch)
        last = self._ledger.last()
        if last is not None and last.batch >= batch:
            self._check_same(batch, offsets)
            return
        self._sync_offsets(batch)
        written = write_batch(
            self._context,
            batch,
            rows,
            expectations=self._context.options.expect,
            partition_by=(DATE, "topic"),
            offsets=offsets,
        )
        self.tally.add(written, rows_left(self._context))
        if self._context.follow and self.tally.batches % _MERGE_EVERY == 0:
            self.merge()

    def wait(self, query: StreamingQuery) -> None:
        """Until the query has ended, by itself or because it was told to."""
        self._errors.clear()  # of an earlier try
        try:
            while not query.awaitTermination(_LOOK_S):
                if self._context.stopping.is_set():
                    with self._writing:  # a batch that has begun is finished
                        pass
                    query.stop()
                    break
        except Exception:
            if not self._errors and not self._context.stopping.is_set():
                raise
        finally:
            if query.isActive:
                query.stop()
            with self._writing:  # whoever frees the lock behind us must find nobody writing
                pass
        if self._errors:
            raise self._errors[0]

    def merge(self) -> None:
        if self._context.options.compact_files:
            self.tally.notes += merge_small_files(
                self._context, self._context.table, self._context.options.target_file_bytes
            )

    def _check_same(self, batch: int, offsets: str | None) -> None:
        """A batch that is written already must be the one that Spark means."""
        if batch in self._ledger.numbers() and _ends(self._ledger.read(batch).offsets) != _ends(offsets):
            raise InvalidRequest(
                f"{self._context.name}: Spark's checkpoint and the lake do not agree on batch {batch}: one of them was "
                "restored or changed. Run it with --full-refresh to land everything anew"
            )

    def _sync_offsets(self, batch: int) -> None:
        """What Spark noted must be as durable as what we note, or a power cut leaves two stories."""
        disk, folder = self._context.disk, join(self._context.checkpoint, SPARK)
        for path in (f"{folder}/metadata", f"{folder}/offsets/{batch}", f"{folder}/offsets/.{batch}.crc"):
            with suppress(FileNotFoundError):
                disk.sync_file(path)
        disk.sync_folder(f"{folder}/offsets")
        disk.sync_folder(folder)


class _Stopping(Exception):
    """The query is about to be stopped: this batch is for the next run."""


def _ends(offsets: str | None) -> list[str]:
    """The offsets without Spark's own line, which holds the time."""
    return [] if offsets is None else offsets.splitlines()[2:]


def _check_checkpoint(context: Context) -> None:
    written = Ledger(context.world, context.checkpoint).last()
    if written is not None and not context.disk.exists(join(context.checkpoint, f"{SPARK}/offsets")):
        raise InvalidRequest(
            f"{context.name}: {context.checkpoint}/{SPARK} is gone, and with it how far the topics were read: put it "
            "back, or land everything anew with --full-refresh"
        )
    if last_committed(context) > (-1 if written is None else written.batch):
        raise InvalidRequest(
            f"{context.name}: Spark's checkpoint is further than {context.checkpoint}/batches, which was lost or put "
            "back from a copy: messages in between are not in the lake. Land everything anew with --full-refresh"
        )


def _identity(options: LandOptions) -> dict[str, Any]:
    return {"topics": sorted(options.topics), "pattern": options.pattern}


TEMPLATE: Final = """\
    kind: land
    topics: [orders]            # or pattern: "orders-.*"
    # starting: latest          # earliest by default; counts only for the first run
    # since: "-7d"              # or from a time: ISO 8601, or so long ago
    # max_rows_per_batch: 1000000
    # compact_files: false      # leave small files alone
    # expect:
    #   - {name: has_key, check: "key IS NOT NULL", on_fail: warn}   # warn, drop, quarantine or fail
"""

KIND: Final = PipelineKind(
    name="land",
    says="topics to Parquet by day and topic, every message once (bronze)",
    options=LandOptions,
    plan=plan,
    run=run,
    template=TEMPLATE,
    identity=_identity,
)
