"""The driver's commit: staged rows go into the log, each exactly once, whatever stops it on the way.

1. own the folder; finish what earlier commits left; stop here if this batch is in the log already
2. note where the logs end, durably with the list of staged files: from now on the batch is committed
3. append the files' frames, each with its writer and the number of its first row in the lane
4. sync; note the batch as done; remove its files

A commit that stops between 2 and 4 leaves a manifest. The next commit goes on from it: what the logs hold after the
noted ends tells how many rows of each lane were written.

A lane is the way of rows into one partition: plain, as frames, or general, as drafts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import STAGING
from holdfast.broker.messages import DEDUP_ID, WRITTEN, BulkFrame, Draft, append_frames, mark
from holdfast.broker.partition import Partition
from holdfast.broker.streams.queries import DONE, MANIFEST, staged_names
from holdfast.broker.topic import Topic
from holdfast.codec.columns import HEADERS
from holdfast.codec.encode import Body, FramePlace, header_for
from holdfast.codec.frame import Frame, read_frame, stored_body
from holdfast.env import World
from holdfast.env.disk import Writable, write_fully
from holdfast.errors import Busy, CorruptData, HoldfastError, InvalidRequest, Unavailable, UnknownFormat, UnknownTopic
from holdfast.later import pattern
from holdfast.model import Producer, Record
from holdfast.settings import BrokerSettings
from holdfast.storage.files import durable_replace, join, read_file, remove_tree, translated
from holdfast.storage.log import Log

_APPEND_BYTES: Final = 8 << 20
_PUBLISH_ROWS: Final = 1_000


def producer_id(write_id: str) -> int:
    """The number of the write in the log's frames, as producers have one."""
    return int.from_bytes(blake2b(write_id.encode(), digest_size=8).digest(), "big") >> 1 | 1


class Track:
    """Writes the rows of one lane into its partition. The first `done` rows are in the log already, and are skipped."""

    def __init__(self, partition: Partition, done: int) -> None:
        self._partition = partition
        self._done = done
        self._seen = 0
        self._pending: list[Any] = []
        self._pending_bytes = 0

    def take(self, frame: Frame, stored: memoryview) -> None:
        """Take the rows of one frame, and write when there are enough."""
        raise NotImplementedError

    def make_way(self) -> None:
        """Write what was taken, before rows of another lane of the same partition are: they must not overtake it."""
        self.put_down()

    def put_down(self) -> None:
        """Write what was taken."""
        if self._pending:
            self._write(self._pending)
            self._pending, self._pending_bytes = [], 0

    def _write(self, pending: list[Any]) -> None:
        raise NotImplementedError


class _PlainTrack(Track):
    """Frames that go into the log as they are."""

    def __init__(self, partition: Partition, done: int, producer: Producer, world: World) -> None:
        super().__init__(partition, done)
        self._producer = producer
        self._world = world

    def take(self, frame: Frame, stored: memoryview) -> None:
        first, self._seen = self._seen, self._seen + frame.count
        if self._seen <= self._done:
            return
        if first < self._done:
            raise CorruptData(
                f"{self._done} rows of a batch are in {self._partition.log.folder}, but its staged frames start at row "
                f"{first} and end at {self._seen}: they are not those that were written. Nothing more was written; "
                "restore the staged files from a backup"
            )
        if self._pending_bytes + len(stored) > _APPEND_BYTES:
            self.put_down()
        self._pending.append(BulkFrame.of(frame, stored))
        self._pending_bytes += len(stored)

    def _write(self, pending: list[BulkFrame]) -> None:
        append_frames(self._partition, pending, self._producer.after(self._done), self._world.clock.now_ns())
        self._done += sum(frame.header.count for frame in pending)


class _GeneralTrack(Track):
    """Rows that become drafts, each marked with its number. Some of the first `done` may have been duplicates."""

    def __init__(self, partition: Partition, done: int, prefix: bytes) -> None:
        super().__init__(partition, done)
        self._prefix = prefix

    def take(self, frame: Frame, stored: memoryview) -> None:
        for record in frame.records():
            number, self._seen = self._seen, self._seen + 1
            if number >= self._done:
                self._pending.append(
                    Draft(
                        record.value,
                        record.key,
                        (*record.headers, (WRITTEN, self._prefix + b"%d" % number)),
                        record.priority,
                        record.expires_at_ms,
                        record.due_at_ms,
                        mark(record, DEDUP_ID),
                        record.flags,
                    )
                )
                self._pending_bytes += len(record.value)
            if len(self._pending) >= _PUBLISH_ROWS or self._pending_bytes >= _APPEND_BYTES:
                self.put_down()

    def make_way(self) -> None:
        if not all(draft.due_at_ms for draft in self._pending):  # delayed rows come later in any case
            self.put_down()

    def _write(self, pending: list[Draft]) -> None:
        # Their sizes were checked when they were staged, without the mark.
        self._partition.wait(self._partition.publish(pending, durability="fsync", any_size=True))


def _track(world: World, manifest: CommitManifest, start: LaneStart, partition: Partition, *, resumed: bool) -> Track:
    """The track of a lane, with the number of rows that an interrupted commit has written."""
    writer = Producer(producer_id(manifest.write_id), manifest.batch + 1)
    if not start.lane.general:
        return _PlainTrack(partition, _rows_by(writer, partition, start) if resumed else 0, writer, world)
    prefix = b"%d.%d." % (writer.id, writer.epoch)
    return _GeneralTrack(partition, _rows_marked(prefix, partition, start) if resumed else 0, prefix)


def _rows_by(writer: Producer, partition: Partition, start: LaneStart) -> int:
    done = 0
    for frame in _from(partition.log, start.log_end):
        header = frame.header
        if (header.producer_id, header.producer_epoch) == (writer.id, writer.epoch):
            done = header.first_sequence + header.count
    return done


def _rows_marked(prefix: bytes, partition: Partition, start: LaneStart) -> int:
    """The number of rows that were handled: each piece was on disk before the next, so all before the last mark."""
    found: Iterable[Record] = _records(partition.log, start.log_end)
    store = partition.delayed
    if store is not None:
        found = chain(found, _records(store.intake, start.intake_end))
        if store.intake.start > start.intake_end:  # some were moved on meanwhile
            found = chain(found, (waiting.record for waiting in store.waiting()))
    marks = [written for record in found if (written := mark(record, WRITTEN)) and written.startswith(prefix)]
    return max((int(written.removeprefix(prefix)) + 1 for written in marks), default=0)


def _from(log: Log, offset: int) -> Iterator[Frame]:
    return log.read(min(max(offset, log.start), log.end))


def _records(log: Log, offset: int) -> Iterator[Record]:
    for frame in _from(log, offset):
        if frame.header.columns & HEADERS:
            yield from frame.records()


logger = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 0.05
_MOST_ROWS: Final = 2**32 - 1  # the log numbers them with 32 bits


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A batch to commit. `kept`: the write continues after this batch, so it must be remembered.

    `streaming`: it belongs to a query, which repeats only its last batch.
    """

    write_id: str
    batch: int
    files: tuple[StagedFile, ...]
    kept: bool = True
    streaming: bool = False
    new_partitions: int | None = None


@contextmanager
def owning(
    world: World,
    root: str,
    settings: BrokerSettings,
    wait_ms: int,
    is_shared: Callable[[str], bool] | None = None,
) -> Iterator[BrokerEngine | None]:
    """Own the folder for the block. Waits up to `wait_ms` while another process owns it, then raises Busy.

    Yields None if the owner shares the folder.
    """
    deadline_ns = world.clock.monotonic_ns() + wait_ms * 1_000_000
    engine: BrokerEngine | None = None
    while engine is None:
        try:
            engine = BrokerEngine.open(root, create=False, settings=settings, world=world)
        except Busy as error:
            if is_shared is not None and is_shared(root):
                yield None
                return
            if world.clock.monotonic_ns() >= deadline_ns:
                owner = str(error).partition("; ")[0]
                raise Busy(
                    f"{owner}, and does not share it: Spark can write there only while no such process owns it. Close "
                    "it there, then write again; nothing is lost or duplicated"
                ) from None
            world.clock.wait(threading.Event(), _LOOK_AGAIN_S)
    try:
        yield engine
    finally:
        engine.close()


def commit(engine: BrokerEngine, write: CommitRequest) -> bool:
    """Write the rows of a batch into the log. Returns False if they are there already."""
    staging = Staging(engine.world, engine.folder)
    finish_pending(engine, write.write_id)
    done = staging.done(write.write_id)
    fresh = done.batch < write.batch
    if not fresh:
        _check_again(write, done)
    elif write.files:
        with translated(staging.root):
            staging.check_there(write.write_id, write.batch, write.files)
        manifest = _manifest(engine, write)
        staging.note_manifest(manifest)
        with _telling_that_it_counts(write):
            _carry_out(engine, staging, manifest, resumed=False)
    try:
        staging.tidy()
    except (HoldfastError, OSError) as error:  # the rows are in the log, and the next commit tidies up
        logger.warning("staged rows not removed", extra={"folder": staging.root, "error": str(error)})
    return fresh


def _check_again(write: CommitRequest, done: Done) -> None:
    """Raise InvalidRequest if another batch with the same number was written."""
    if write.streaming and write.batch < done.batch:
        raise InvalidRequest(
            f"batch {write.batch} of query {write.write_id} was sent again, and those up to {done.batch} are already "
            "written: "
            "its checkpoint is a copy, or older than what the query wrote. Nothing was written; start the query with a "
            "new checkpoint, at the offsets where the old one ended"
        )
    topics = {lane.topic for staged in write.files for lane, _ in staged.lanes}
    if write.batch == done.batch and done.topics and topics.isdisjoint(done.topics) and topics:
        raise InvalidRequest(
            f"batch {write.batch} of write {write.write_id} was written to {', '.join(done.topics)}, and is now for "
            f"{', '.join(sorted(topics))}. Nothing was written; give each write an id, or each batch a number, of "
            "its own"
        )


@contextmanager
def _telling_that_it_counts(write: CommitRequest) -> Iterator[None]:
    """Add to errors that the rows are committed, for a write that cannot be repeated under its number."""
    try:
        yield
    except HoldfastError as error:
        if not write.kept:
            advice = "do not write them again, the next write of Spark's to this folder brings them in"
            error.args = (f"{error}. The rows are committed nevertheless: {advice}",)
        raise


def finish_pending(engine: BrokerEngine, write_id: str | None = None) -> int:
    """Finish interrupted commits. Returns their number. One that cannot be finished stops only its own write."""
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


def _manifest(engine: BrokerEngine, write: CommitRequest) -> CommitManifest:
    """The manifest of a batch, after checking all that could keep it from being written."""
    rows: dict[SinkLane, int] = {}
    for staged in write.files:
        for lane, count in staged.lanes:
            rows[lane.bare] = rows.get(lane.bare, 0) + count
    _check_topics(engine, write)
    starts = []
    for lane, count in sorted(rows.items()):
        if count > _MOST_ROWS:
            raise InvalidRequest(f"{count} rows for one partition of {lane.topic} are too many; write them in parts")
        with _topic(engine, lane.topic) as topic:
            partition = topic.partition(lane.partition)
            partition.sync()  # nothing below the noted ends may be lost: a later commit counts from there
            intake = 0 if partition.delayed is None else partition.delayed.intake.written_end
            starts.append(LaneStart(lane, topic.id, partition.log.written_end, intake))
    return CommitManifest(
        write_id=write.write_id,
        batch=write.batch,
        kept=write.kept,
        noted_at_ms=engine.world.clock.now_ns() // 1_000_000,
        lanes=tuple(starts),
        files=write.files,
    )


def _check_topics(engine: BrokerEngine, write: CommitRequest) -> None:
    """Check that the topics are those that the tasks found, and make missing ones."""
    wanted = write.new_partitions
    for name, topic_id in sorted({(lane.topic, lane.topic_id) for staged in write.files for lane, _ in staged.lanes}):
        if not topic_id and wanted is not None:
            if name not in engine.catalog:
                engine.create_topic(name, changes={"partitions": wanted})
            there = engine.catalog.facts(name).partitions
            if there != wanted:
                raise Unavailable(
                    f"topic {name} was created by someone else in the meantime: it has {there} partitions, and the "
                    "rows were "
                    f"meant for {wanted}. Nothing was written; write again"
                )
        with _topic(engine, name, topic_id):
            pass


@contextmanager
def _topic(engine: BrokerEngine, name: str, topic_id: int = 0) -> Iterator[Topic]:
    with engine.using(name) as topic:
        if topic_id not in (0, topic.id):
            raise UnknownTopic(
                f"topic {name} was deleted and recreated while rows were on their way to it; they were for the old "
                "one, and are not written. To write them to the new one, write again"
            )
        yield topic


def _carry_out(engine: BrokerEngine, staging: Staging, manifest: CommitManifest, *, resumed: bool) -> None:
    """Write the rows of a committed batch that are not in the log yet, and note the batch as done."""
    with ExitStack() as topics:
        tracks: dict[SinkLane, Track] = {}
        partitions: list[Partition] = []
        for start in manifest.lanes:
            lane = start.lane
            try:
                topic = topics.enter_context(_topic(engine, lane.topic, start.topic_id))
            except UnknownTopic:
                if not resumed:
                    raise
                facts = {"write": manifest.write_id, "batch": manifest.batch, "topic": lane.topic}
                logger.warning("rows for a topic were dropped when it was deleted", extra=facts)
                continue
            partition = topic.partition(lane.partition)
            partitions.append(partition)
            tracks[lane] = _track(engine.world, manifest, start, partition, resumed=resumed)
        last: dict[tuple[str, int], Track] = {}
        for staged in manifest.files:
            for lane, frame, stored in staging.frames(manifest, staged):
                track = tracks.get(lane.bare)
                if track is None:
                    continue
                before = last.setdefault((lane.topic, lane.partition), track)
                if before is not track:
                    before.make_way()
                    last[lane.topic, lane.partition] = track
                track.take(frame, stored)
            for track in tracks.values():  # before the file is closed
                track.put_down()
        for partition in partitions:
            partition.sync()
    staging.note_done(manifest)


# The staging area: tasks store rows here as frames, and the driver's commit appends them to the log.
#
# staging/WRITE/done.json                        the last batch of this write that is in the log
# staging/WRITE/BATCH/TASK-ATTEMPT-ID-TIME-N.frames the rows of one attempt of a task
# staging/WRITE/BATCH/manifest.json              the files that count: the batch is committed once this exists
#
# A staged file is a sequence of frames, as in a segment. In a header, `log_id` is a random number of the attempt,
# `epoch` is the number of the frame's lane in the file, and `base_offset` counts the lane's rows.


VERSION: Final = 1
_SUFFIX: Final = ".frames"
STAGED_NAME: Final = pattern(r"[0-9]{1,10}-[0-9]{1,20}-[0-9a-f]{8}-[0-9]{1,16}-[0-9]{1,6}\.frames")
_GATHER_BYTES: Final = 1 << 20
_GATHER_PARTS: Final = 900  # what one call of the kernel takes is 1024
_FILE_BYTES: Final = 1 << 30
_MOST_RAW_BYTES: Final = 2**32 - 1  # the frames are our own, so their sizes can be trusted
_LEFT_MS: Final = 7 * 24 * 3_600_000


class SinkLane(msgspec.Struct, frozen=True, order=True):
    """Where rows go. `general`: as drafts, because they are delayed, have a dedup id or are traced."""

    topic: str
    topic_id: int
    partition: int
    general: bool = False

    @property
    def bare(self) -> SinkLane:
        """The lane without the topic's id, which tasks do not know if the topic is to be made."""
        return SinkLane(self.topic, 0, self.partition, self.general)


class StagedFile(msgspec.Struct, frozen=True):
    """One file of frames: its name, its size, and the number of rows of each of its lanes."""

    name: str
    log_id: int
    size: int
    lanes: tuple[tuple[SinkLane, int], ...]


class LaneStart(msgspec.Struct, frozen=True):
    """Where a lane's log and its delayed messages ended before the first row of the batch."""

    lane: SinkLane
    topic_id: int
    log_end: int
    intake_end: int = 0


class CommitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed batch: its files, in order, and where their rows go. `kept`: its write goes on after it."""

    version: int = VERSION
    write_id: str
    batch: int
    kept: bool
    noted_at_ms: int = 0
    lanes: tuple[LaneStart, ...]
    files: tuple[StagedFile, ...]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch that is in the log, and the topics that it went to."""

    version: int = VERSION
    batch: int = -1
    kept: bool = True
    topics: tuple[str, ...] = ()


Noted = TypeVar("Noted", Done, CommitManifest)


class StageFile(Writable, Protocol):
    """A file to write frames to: here, or on a server."""

    def sync(self) -> None: ...

    def close(self) -> None: ...


class StageDisk(Protocol):
    """Where staged files are made."""

    def make_folder(self, path: str) -> None: ...

    def open(self, path: str, *, write: bool, create: bool) -> StageFile: ...

    def sync_folder(self, path: str) -> None: ...

    def remove(self, path: str) -> None: ...


class FrameFiles:
    """Writes bodies of frames into the files of one attempt. They are durable after `finish`."""

    def __init__(self, world: World, folder: str, prefix: str, disk: StageDisk | None = None) -> None:
        self._disk = disk or world.disk
        self._folder = folder
        self._log_id = world.ids.random_u32()
        # A name that no manifest has yet: each driver counts attempts from 0 again, and clocks may be set back.
        self._prefix = f"{prefix}-{self._log_id:08x}-{world.clock.now_ns() // 1_000_000}"
        self._file: StageFile | None = None
        self._names: list[str] = []
        self._finished: list[StagedFile] = []
        self._lanes: dict[SinkLane, int] = {}
        self._rows: list[int] = []
        self._parts: list[bytes | memoryview] = []
        self._gathered = self._position = 0

    def add(self, lane: SinkLane, body: Body) -> None:
        if self._file is None or self._position + body.frame_bytes > _FILE_BYTES:
            self._begin()
        number = self._lanes.setdefault(lane, len(self._lanes))
        if number == len(self._rows):
            self._rows.append(0)
        place = FramePlace(self._log_id, number, self._position, self._rows[number], 0)
        self._parts += [header_for(body, place, batch_remaining=0), *body.parts]
        self._rows[number] += body.count
        self._position += body.frame_bytes
        self._gathered += body.frame_bytes
        if self._gathered >= _GATHER_BYTES or len(self._parts) > _GATHER_PARTS:
            self._store()

    def finish(self) -> tuple[StagedFile, ...]:
        """Sync all files, and return them."""
        self._end()
        if self._finished:
            self._disk.sync_folder(self._folder)
        return tuple(self._finished)

    def discard(self) -> None:
        """Remove the files after an error."""
        if self._file is not None:
            self._file.close()
        for name in self._names:
            with suppress(OSError):
                self._disk.remove(join(self._folder, name))

    def _begin(self) -> None:
        self._end()
        self._disk.make_folder(self._folder)
        name = f"{self._prefix}-{len(self._names)}{_SUFFIX}"
        self._names.append(name)
        self._file = self._disk.open(join(self._folder, name), write=True, create=True)

    def _store(self) -> None:
        assert self._file is not None
        write_fully(self._file, self._position - self._gathered, self._parts)
        self._parts, self._gathered = [], 0

    def _end(self) -> None:
        if self._file is None:
            return
        self._store()
        self._file.sync()
        self._file.close()
        lanes = tuple(zip(self._lanes, self._rows, strict=True))
        self._finished.append(StagedFile(self._names[-1], self._log_id, self._position, lanes))
        self._file, self._lanes, self._rows, self._position = None, {}, [], 0


class Staging:
    """The staging area of a data folder."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self.root = join(root, STAGING)

    def batch_folder(self, write_id: str, batch: int) -> str:
        return f"{self.root}/{write_id}/{batch}"

    def done(self, write_id: str) -> Done:
        """The last batch of a write that is in the log."""
        return self._read(f"{self.root}/{write_id}/{DONE}", Done) or Done()

    def note_done(self, manifest: CommitManifest) -> None:
        folder = f"{self.root}/{manifest.write_id}"
        topics = sorted({start.lane.topic for start in manifest.lanes})
        done = Done(batch=manifest.batch, kept=manifest.kept, topics=tuple(topics))
        with translated(folder):
            durable_replace(self._world.disk, folder, DONE, msgspec.json.encode(done))

    def manifest(self, write_id: str, batch: int) -> CommitManifest | None:
        return self._read(join(self.batch_folder(write_id, batch), MANIFEST), CommitManifest)

    def note_manifest(self, manifest: CommitManifest) -> None:
        """Commit the batch."""
        folder = self.batch_folder(manifest.write_id, manifest.batch)
        with translated(folder):
            durable_replace(self._world.disk, folder, MANIFEST, msgspec.json.encode(manifest))

    def check_there(self, write_id: str, batch: int, files: Sequence[StagedFile]) -> None:
        """Raise Unavailable if staged files are gone, while the batch can still be repeated."""
        for staged in files:
            path = join(self.batch_folder(write_id, batch), staged.name)
            try:
                size = self._size(path)
            except FileNotFoundError:
                size = 0
            if size < staged.size:
                raise Unavailable(
                    f"{path} has {size} bytes, and a task staged {staged.size} there: they were removed, or "
                    "tasks and driver do not share the folder. Nothing was written; write again"
                )

    def _size(self, path: str) -> int:
        with closing(self._world.disk.open(path)) as file:
            return file.size()

    def pending(self) -> Iterator[CommitManifest]:
        """The manifests of batches that are committed but not noted as done."""
        for write_id, batches in self._writes():
            last = self.done(write_id).batch
            for batch in batches:
                manifest = self.manifest(write_id, batch) if batch > last else None
                if manifest is not None:
                    yield manifest

    def frames(self, manifest: CommitManifest, staged: StagedFile) -> Iterator[tuple[SinkLane, Frame, memoryview]]:
        """The frames of a file, each with its lane and its stored bytes, with padding. Raises CorruptData."""
        path = join(self.batch_folder(manifest.write_id, manifest.batch), staged.name)
        with translated(path), closing(self._world.disk.open(path)) as file:
            buffer = file.view(0, staged.size)
            if len(buffer) < staged.size:
                raise CorruptData(
                    f"{path} has {len(buffer)} bytes, not the {staged.size} that were written; restore it from a backup"
                )
            at = 0
            while at < staged.size:
                frame = read_frame(buffer, at, at, max_raw_bytes=_MOST_RAW_BYTES)
                header = frame.header
                if header.log_id != staged.log_id or header.epoch >= len(staged.lanes):
                    raise CorruptData(
                        f"the frame at {at} of {path} belongs to another file; restore this one from a backup"
                    )
                yield staged.lanes[header.epoch][0], frame, stored_body(buffer, at, header)
                at = header.end

    def remove(self, write_id: str, batch: int, names: Sequence[str]) -> None:
        """Remove staged files, unless their batch is committed."""
        if self.manifest(write_id, batch) is None:
            disk, folder = self._world.disk, self.batch_folder(write_id, batch)
            for name in names:
                with suppress(OSError):
                    disk.remove(join(folder, name))
            with suppress(OSError):  # as long as others have something there
                disk.remove_folder(folder)
                disk.remove_folder(f"{self.root}/{write_id}")

    def tidy(self) -> None:
        """Remove batches that are in the log, and those that were abandoned a week ago."""
        for write_id, batches in self._writes():
            done = self.done(write_id)
            gone = [batch for batch in batches if batch <= done.batch or self._is_left(write_id, batch)]
            for batch in gone:
                remove_tree(self._world.disk, self.batch_folder(write_id, batch))
            if gone == batches and (not done.kept or done.batch < 0):
                # A manifest that comes back after a power cut must find the note that it is done.
                self._world.disk.sync_folder(f"{self.root}/{write_id}")
                remove_tree(self._world.disk, f"{self.root}/{write_id}")

    def _is_left(self, write_id: str, batch: int) -> bool:
        """Whether the batch was staged a week ago and never committed."""
        names = staged_names(self._world, self.batch_folder(write_id, batch))
        if MANIFEST in names or not names:
            return False
        now_ms = self._world.clock.now_ns() // 1_000_000
        return all(staged_since_ms(name) < now_ms - _LEFT_MS for name in names)

    def _writes(self) -> Iterator[tuple[str, list[int]]]:
        """Each write that has staged batches, with their numbers."""
        for write_id in staged_names(self._world, self.root):
            names = staged_names(self._world, f"{self.root}/{write_id}")
            batches = sorted(int(name) for name in names if name.isdigit())
            if batches:
                yield write_id, batches

    def _read(self, path: str, kind: type[Noted]) -> Noted | None:
        content = None
        with translated(path), suppress(FileNotFoundError):  # others may remove it just now
            content = read_file(self._world.disk, path)
        if content is None:
            return None
        try:
            found = msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{path} cannot be read: {error}. Restore it from a backup") from error
        if found.version != VERSION:
            raise UnknownFormat(f"{path} has version {found.version}: written by a newer release; upgrade to read it")
        return found


def staged_since_ms(name: str) -> int:
    """When a file was staged, by its name."""
    parts = name.removesuffix(_SUFFIX).split("-")
    return int(parts[-2]) if len(parts) >= 3 and parts[-2].isdigit() else 0
