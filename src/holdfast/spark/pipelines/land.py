"""`land`: topics to a table, every message once, with all that is known of it (bronze).

Spark decides what a batch holds: it notes the offsets before the batch begins, and after a crash asks for the same
batch with the same offsets. The ledger tells whether that batch is written already. Together they make it exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.spark.options import Subscription, stream_read_options
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import check_columns, retried, write_batch
from holdfast.spark.pipelines.checkpoint import Tally, ledger_of
from holdfast.spark.pipelines.lake import DATE, finish_pending, is_delta, optimize_if_worthwhile
from holdfast.spark.pipelines.spec import Context, LakeOptions, PipelineKind, Plan, Positive, Read, Summary
from holdfast.spark.ranges import DataFolder, Positions, from_json, starting_offset
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


SPARK: Final = "spark"


class LandOptions(LakeOptions, frozen=True, kw_only=True):
    """Options of `land`. `starting` and `since` count only for the first run."""

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


def stream_options(folder: str, group: str, options: LandOptions) -> dict[str, str]:
    """The options of the source that a stream of the topics has."""
    by_name, since = options.pattern is None, options.since
    return {
        "path": folder,
        "includeHeaders": "true",
        "groupId": group,
        "subscribe" if by_name else "subscribePattern": options.pattern or ",".join(options.topics),
        "startingOffsets" if since is None else "startingTimestamp": since or options.starting,
        "failOnDataLoss": str(options.fail_on_data_loss).lower(),
    }


def _stream_options(context: Context) -> dict[str, str]:
    most = context.options.max_rows_per_batch
    limit = {} if most is None else {"maxOffsetsPerTrigger": str(most)}
    return stream_options(context.folder, context.name, context.options) | limit


def _offsets_file(context: Context, batch: int) -> str | None:
    """The offsets at which a batch ends, as Spark noted them before it began."""
    content = read_file(context.disk, join(context.checkpoint, f"{SPARK}/offsets/{batch}"))
    return None if content is None else content.decode("utf-8")


def _last_committed(context: Context) -> int:
    """The last batch that Spark has finished; -1 before the first."""
    folder = join(context.checkpoint, f"{SPARK}/commits")
    names = context.disk.names(folder) if context.disk.exists(folder) else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def positions_in(text: str | None) -> Positions | None:
    """The positions in the source's own line of a file of offsets."""
    documents = [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]
    return next((from_json(document) for document in documents if "topics" in document), None)


def unread(context: Context) -> list[Read]:
    """What each partition has that was not landed yet."""
    options = stream_read_options(_stream_options(context), context.world.clock.now_ns() // 1_000_000)
    folder = DataFolder(context.folder, context.world)
    last = ledger_of(context).last()
    known = None if last is None else positions_in(last.offsets)
    found = []
    for topic, number in folder.partitions(options.subscription):
        reader = folder.reader(topic, number)
        if reader is None:
            found.append(Read.of_offsets(topic, number, 0, 0, bytes=0))
            continue
        end = reader.end
        at = None if known is None else known.at(topic, number)
        if at is not None:
            start = at.offset
        else:
            start = starting_offset(reader, options, topic, number, end) if known is None else reader.start
        found.append(Read.of_offsets(topic, number, start, end, bytes=_bytes_between(reader, start, end)))
    return found


def rows_left(context: Context) -> int | None:
    """The number of messages that were not landed yet; None if the folder cannot be read."""
    try:
        return sum(read.rows or 0 for read in unread(context))
    except HoldfastError:
        return None


def _bytes_between(reader: Any, start: int, end: int) -> int:
    """About how many bytes these messages have in the log: whole segments, and a share of those at the ends."""
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


def bronze(rows: DataFrame) -> DataFrame:
    """Messages as they are stored in the lake: with all columns, the time of landing, and the day."""
    return rows.select("*", f.current_timestamp().alias(LANDED_AT), f.to_date("timestamp").alias(DATE))


def plan(context: Context) -> Plan:
    reads = unread(context)
    return context.plan(reads, notes=("offsets that key compaction removed count as rows",) if reads else ())


def run(context: Context) -> Summary:
    finish_pending(context)
    _check_checkpoint(context)
    # A missing folder or topic is our error, not one of Spark's.
    DataFolder(context.folder, context.world).topics(Subscription(names=context.options.topics))
    landing = _Landing(context)
    rows = bronze(context.spark.readStream.format("holdfast").options(**_stream_options(context)).load())
    check_columns(rows, context.options.expect, context.name)
    # On a busy machine Spark's Python worker may take too long to start; nothing has happened then.
    retried(lambda: landing.wait(_start(context, rows, landing.write)), _TRIES, _SLOW)
    landing.merge()
    landing.tally.lag = rows_left(context)
    return landing.tally.summary()


def _start(context: Context, rows: DataFrame, write: Callable[[DataFrame, int], None]) -> StreamingQuery:
    writer = rows.writeStream.queryName(context.name).foreachBatch(write)
    writer = writer.option("checkpointLocation", join(context.checkpoint, SPARK))
    every = f"{context.every_ms} milliseconds"
    return (writer.trigger(processingTime=every) if context.follow else writer.trigger(availableNow=True)).start()


class _Landing:
    """Writes each batch of the query, and stops the query between two of them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = ledger_of(context)
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
                self._errors.append(error)  # Spark would wrap it in its own
                raise

    def _write(self, rows: DataFrame, batch: int) -> None:
        offsets = _offsets_file(self._context, batch)
        last = self._ledger.last()
        if last is not None and last.batch >= batch:
            self._check_same(batch, offsets)
            return
        self._sync_offsets(batch)
        written = write_batch(self._context, batch, rows, partition_by=(DATE, "topic"), offsets=offsets)
        self.tally.add(written, rows_left(self._context))
        if self._context.follow and self.tally.batches % _MERGE_EVERY == 0:
            self.merge()

    def wait(self, query: StreamingQuery) -> None:
        """Wait until the query ends, by itself or because the run is stopped."""
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
            with self._writing:  # nothing may be written once the caller releases its lock
                pass
        if self._errors:
            raise self._errors[0]

    def merge(self) -> None:
        context = self._context
        if context.options.compact_files and is_delta(context.disk, context.table):
            optimize_if_worthwhile(context.table, context.options.target_file_bytes)

    def _check_same(self, batch: int, offsets: str | None) -> None:
        """Raise InvalidRequest if the batch of this number that is written is another one than Spark's."""
        if batch in self._ledger.numbers() and _ends(self._ledger.read(batch).offsets) != _ends(offsets):
            raise InvalidRequest(
                f"{self._context.name}: Spark's checkpoint and the lake do not agree on batch {batch}: one of them was "
                "restored or changed. Run it with --full-refresh to land everything again"
            )

    def _sync_offsets(self, batch: int) -> None:
        """Sync what Spark noted: after a power cut, its checkpoint and the ledger must agree."""
        disk, folder = self._context.disk, join(self._context.checkpoint, SPARK)
        for path in (f"{folder}/metadata", f"{folder}/offsets/{batch}", f"{folder}/offsets/.{batch}.crc"):
            with suppress(FileNotFoundError):
                disk.sync_file(path)
        disk.sync_folder(f"{folder}/offsets")
        disk.sync_folder(folder)


class _Stopping(Exception):
    """The run is being stopped: this batch is left to the next one."""


def _ends(offsets: str | None) -> list[str]:
    """The offsets without Spark's own line, which holds the time."""
    return [] if offsets is None else offsets.splitlines()[2:]


def _check_checkpoint(context: Context) -> None:
    written = ledger_of(context).last()
    if written is not None and not context.disk.exists(join(context.checkpoint, f"{SPARK}/offsets")):
        raise InvalidRequest(
            f"{context.name}: {context.checkpoint}/{SPARK} is gone, and with it how far the topics were read: put it "
            "back, or land everything again with --full-refresh"
        )
    if _last_committed(context) > (-1 if written is None else written.batch):
        raise InvalidRequest(
            f"{context.name}: Spark's checkpoint is further than {context.checkpoint}/batches, which was lost or put "
            "back from a copy: messages in between are not in the lake. Land everything again with --full-refresh"
        )


_TEMPLATE: Final = """\
    kind: land
    topics: [orders]            # or pattern: "orders-.*"
    # starting: latest          # earliest by default; counts only for the first run
    # since: "-7d"              # or from a time: ISO 8601, or so long ago
    # max_rows_per_batch: 1000000
    # format: parquet           # plain files instead of a Delta table
    # compact_files: false      # leave small files alone
    # expect:
    #   - {name: has_key, check: "key IS NOT NULL", on_fail: warn}   # warn, drop, quarantine or fail
"""
KIND: Final = PipelineKind(
    LandOptions,
    plan,
    run,
    _TEMPLATE,
    identity=lambda options: {"topics": sorted(options.topics), "pattern": options.pattern},
)
