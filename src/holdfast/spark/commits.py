"""The driver's commit: staged rows go into the log, each exactly once, whatever stops it on the way.

1. own the folder; finish what earlier commits left; stop here if this batch is in the log already
2. note where the logs end, durably with the list of staged files: from now on the batch is committed
3. append the files' frames, each with who wrote it and which of the lane's rows it begins with
4. sync; note the batch as done; remove its files

Who stops between 2 and 4 leaves a manifest. The next commit goes on from it: what the logs hold behind the noted
ends says how far each lane had come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.bulk import BulkFrame, append_frames
from holdfast.broker.drafts import Draft
from holdfast.broker.marks import DEDUP_ID, WRITTEN, mark
from holdfast.broker.partition import Partition
from holdfast.broker.topic import Topic
from holdfast.codec.columns import HEADERS
from holdfast.codec.frame import Frame
from holdfast.env import World
from holdfast.errors import Busy, CorruptData, HoldfastError, InvalidRequest, UnknownTopic
from holdfast.model import Producer
from holdfast.settings import BrokerSettings
from holdfast.spark.staging import Lane, LaneStart, Manifest, StagedFile, Staging
from holdfast.storage.log import Log
from holdfast.storage.opening import translated

logger = logging.getLogger(__name__)

_APPEND_BYTES: Final = 8 << 20
_PUBLISH_ROWS: Final = 1_000
_LOOK_AGAIN_S: Final = 0.05
_MOST_ROWS: Final = 2**32 - 1  # the log numbers them with 32 bits


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be committed. `kept`: the write goes on after this batch, so that its end must be remembered."""

    write_id: str
    batch: int
    files: tuple[StagedFile, ...]
    kept: bool = True
    new_partitions: int | None = None


@contextmanager
def owning(world: World, root: str, settings: BrokerSettings, wait_ms: int) -> Iterator[BrokerEngine]:
    """The folder, owned; waits for a while where somebody else has it, as other writes may be at their commits."""
    deadline_ns = world.clock.monotonic_ns() + wait_ms * 1_000_000
    engine: BrokerEngine | None = None
    while engine is None:
        try:
            engine = BrokerEngine.open(root, create=False, settings=settings, world=world)
        except Busy as error:
            if world.clock.monotonic_ns() >= deadline_ns:
                owner = str(error).partition("; ")[0]
                raise Busy(
                    f"{owner}, and Spark can write to a folder only while no other process owns it. Close it there, "
                    "then write again; nothing is lost or doubled by that"
                ) from None
            world.clock.wait(threading.Event(), _LOOK_AGAIN_S)
    try:
        yield engine
    finally:
        engine.close()


def commit(engine: BrokerEngine, write: Write) -> bool:
    """Bring the rows into the log, or learn that they are there: then the answer is False."""
    staging = Staging(engine.world, engine.folder)
    finish_pending(engine, write.write_id)
    fresh = staging.done(write.write_id).batch < write.batch
    if fresh and write.files:
        manifest = _manifest(engine, write)
        staging.note_manifest(manifest)
        _carry_out(engine, staging, manifest, resumed=False)
    try:
        staging.tidy()
    except (HoldfastError, OSError) as error:  # the rows are in the log; whoever commits next tidies up
        logger.warning("staged rows not removed", extra={"folder": staging.root, "error": str(error)})
    return fresh


def finish_pending(engine: BrokerEngine, write_id: str | None = None) -> int:
    """Finish the commits that were cut short; answers how many. One that cannot be stops none but its own write."""
    staging = Staging(engine.world, engine.folder)
    finished = 0
    with translated(staging.root):
        found = list(staging.pending())
    for manifest in found:
        try:
            _carry_out(engine, staging, manifest, resumed=True)
            finished += 1
        except HoldfastError as error:
            if manifest.write_id == write_id:
                raise
            facts = {"write": manifest.write_id, "batch": manifest.batch, "error": str(error)}
            logger.warning("a commit that was cut short cannot be finished", extra=facts)
    return finished


def _manifest(engine: BrokerEngine, write: Write) -> Manifest:
    """The batch as it will be written down, after a look at all that could keep it from being carried out."""
    rows: dict[Lane, int] = {}
    for staged in write.files:
        for lane, count in staged.lanes:
            rows[lane] = rows.get(lane, 0) + count
    starts = []
    for lane, count in sorted(rows.items()):
        if count > _MOST_ROWS:
            raise InvalidRequest(f"{count} rows for one partition of {lane.topic} are too many; write them in parts")
        if not lane.topic_id and write.new_partitions is not None and lane.topic not in engine.catalog:
            engine.create_topic(lane.topic, changes={"partitions": write.new_partitions})
        with _topic(engine, lane.topic, lane.topic_id) as topic:
            partition = topic.partition(lane.partition)
            partition.sync()  # what lies below the noted ends must never be lost: they would say too little
            intake = 0 if partition.delayed is None else partition.delayed.intake.written_end
            starts.append(LaneStart(lane, topic.id, partition.log.written_end, intake))
    return Manifest(write_id=write.write_id, batch=write.batch, kept=write.kept, lanes=tuple(starts), files=write.files)


@contextmanager
def _topic(engine: BrokerEngine, name: str, topic_id: int) -> Iterator[Topic]:
    with engine.using(name) as topic:
        if topic_id not in (0, topic.id):
            raise UnknownTopic(
                f"topic {name} was deleted and made anew while rows were on their way to it; they were for the old "
                "one, and are not written"
            )
        yield topic


class _Track(Protocol):
    """One lane's way into its partition."""

    def take(self, frame: Frame, stored: memoryview) -> None: ...

    def put_down(self) -> None:
        """Write what was taken."""


def _carry_out(engine: BrokerEngine, staging: Staging, manifest: Manifest, *, resumed: bool) -> None:
    writer = _Writer(engine.world, manifest, resumed)
    with ExitStack() as topics:
        tracks: dict[Lane, _Track] = {}
        partitions: list[Partition] = []
        for start in manifest.lanes:
            topic = topics.enter_context(_topic(engine, start.lane.topic, start.topic_id))
            partition = topic.partition(start.lane.partition)
            partitions.append(partition)
            tracks[start.lane] = (
                writer.general(partition, start) if start.lane.general else writer.plain(partition, start)
            )
        for staged in manifest.files:
            for lane, frame, stored in staging.frames(manifest, staged):
                tracks[lane].take(frame, stored)
            for track in tracks.values():  # before the file is let go
                track.put_down()
        for partition in partitions:
            partition.sync()
    staging.note_done(manifest)


class _Writer:
    """Who the log is told that it was, and how far that one had come."""

    def __init__(self, world: World, manifest: Manifest, resumed: bool) -> None:  # noqa: FBT001
        self._world = world
        self._resumed = resumed
        self._id = producer_id(manifest.write_id)
        self._epoch = manifest.batch + 1

    def plain(self, partition: Partition, start: LaneStart) -> _Track:
        done = 0
        if self._resumed:
            for frame in _from(partition.log, start.log_end):
                header = frame.header
                if header.producer_id == self._id and header.producer_epoch == self._epoch:
                    done = header.first_sequence + header.count
        return _PlainTrack(self._world, partition, Producer(self._id, self._epoch), done)

    def general(self, partition: Partition, start: LaneStart) -> _Track:
        prefix = b"%d.%d." % (self._id, self._epoch)
        done: set[bytes] = set()
        if self._resumed:
            done |= _marks(partition.log, start.log_end, prefix)
            if partition.delayed is not None:
                done |= _marks(partition.delayed.intake, start.intake_end, prefix)
        return _GeneralTrack(partition, prefix, done)


def producer_id(write_id: str) -> int:
    """The write's number in the log's frames, where producers have theirs."""
    return int.from_bytes(blake2b(write_id.encode(), digest_size=8).digest(), "big") >> 1 | 1


class _PlainTrack:
    """Frames that go into the log as they are; those that are there already are passed over."""

    def __init__(self, world: World, partition: Partition, producer: Producer, done: int) -> None:
        self._world = world
        self._partition = partition
        self._producer = producer
        self._done = done
        self._seen = 0
        self._pending: list[BulkFrame] = []
        self._pending_bytes = 0

    def take(self, frame: Frame, stored: memoryview) -> None:
        first, self._seen = self._seen, self._seen + frame.count
        if self._seen <= self._done:
            return
        if first < self._done:
            raise CorruptData(
                f"{self._done} rows of a batch are in {self._partition.log.folder}, and its staged frames begin at row "
                f"{first} and end at {self._seen}: they are not those that were written. Nothing more was written"
            )
        if self._pending_bytes + len(stored) > _APPEND_BYTES:
            self.put_down()
        self._pending.append(BulkFrame.of(frame, stored))
        self._pending_bytes += len(stored)

    def put_down(self) -> None:
        if self._pending:
            now_ns = self._world.clock.now_ns()
            append_frames(self._partition, self._pending, self._producer.after(self._done), now_ns)
            self._done += sum(frame.header.count for frame in self._pending)
            self._pending, self._pending_bytes = [], 0


class _GeneralTrack:
    """Rows that become drafts, each marked with its number; those that are there already are passed over."""

    def __init__(self, partition: Partition, prefix: bytes, done: set[bytes]) -> None:
        self._partition = partition
        self._prefix = prefix
        self._done = done
        self._seen = 0
        self._pending: list[Draft] = []

    def take(self, frame: Frame, stored: memoryview) -> None:
        for record in frame.records():
            written = self._prefix + b"%d" % self._seen
            self._seen += 1
            if written not in self._done:
                self._pending.append(
                    Draft(
                        record.value,
                        record.key,
                        (*record.headers, (WRITTEN, written)),
                        record.priority,
                        record.expires_at_ms,
                        record.due_at_ms,
                        mark(record, DEDUP_ID),
                        record.flags,
                    )
                )
            if len(self._pending) >= _PUBLISH_ROWS:
                self.put_down()

    def put_down(self) -> None:
        if self._pending:
            self._partition.wait(self._partition.publish(self._pending, durability="fsync"))
            self._pending = []


def _from(log: Log, offset: int) -> Iterator[Frame]:
    return log.read(min(max(offset, log.start), log.end))


def _marks(log: Log, offset: int, prefix: bytes) -> set[bytes]:
    """Which rows of this batch the log holds from `offset` on."""
    found: set[bytes] = set()
    for frame in _from(log, offset):
        if frame.header.columns & HEADERS:
            for record in frame.records():
                written = mark(record, WRITTEN)
                if written is not None and written.startswith(prefix):
                    found.add(written)
    return found
