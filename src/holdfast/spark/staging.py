"""The staging area: tasks store rows here as frames, and the driver's commit appends them to the log.

staging/WRITE/done.json                        the last batch of this write that is in the log
staging/WRITE/BATCH/TASK-ATTEMPT-ID-TIME-N.frames the rows of one attempt of a task
staging/WRITE/BATCH/manifest.json              the files that count: the batch is committed once this exists

A staged file is a sequence of frames, as in a segment. In a header `log_id` is a random number of the attempt, `epoch`
is the number of the frame's lane in the file, and `base_offset` counts the lane's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Final, TypeVar

import msgspec

from holdfast.broker.folder.layout import STAGING
from holdfast.broker.streams.queries import DONE, MANIFEST, staged_names
from holdfast.codec.encode import Body, FramePlace, header_for
from holdfast.codec.frame import HEADER_BYTES, Frame, read_frame
from holdfast.env import File, World
from holdfast.errors import CorruptData, Unavailable, UnknownFormat
from holdfast.storage.files import durable_replace, join, read_file, remove_tree, translated, write_fully

VERSION: Final = 1
_SUFFIX: Final = ".frames"
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


class FrameFiles:
    """Writes bodies of frames into the files of one attempt. They are durable after `finish`."""

    def __init__(self, world: World, folder: str, prefix: str) -> None:
        self._world = world
        self._folder = folder
        self._log_id = world.ids.random_u32()
        # A name that no manifest has yet: each driver counts attempts from 0 again, and clocks may be set back.
        self._prefix = f"{prefix}-{self._log_id:08x}-{world.clock.now_ns() // 1_000_000}"
        self._file: File | None = None
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
            self._world.disk.sync_folder(self._folder)
        return tuple(self._finished)

    def discard(self) -> None:
        """Remove the files after an error."""
        if self._file is not None:
            self._file.close()
        for name in self._names:
            with suppress(OSError):
                self._world.disk.remove(join(self._folder, name))

    def _begin(self) -> None:
        self._end()
        disk = self._world.disk
        disk.make_folder(self._folder)
        name = f"{self._prefix}-{len(self._names)}{_SUFFIX}"
        self._names.append(name)
        self._file = disk.open(join(self._folder, name), write=True, create=True)

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
                    f"{path} has {size} bytes, and a task staged {staged.size} there: somebody has removed them, or "
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
                raise CorruptData(f"{path} has {len(buffer)} bytes; {staged.size} were written to it")
            at = 0
            while at < staged.size:
                frame = read_frame(buffer, at, at, max_raw_bytes=_MOST_RAW_BYTES)
                header = frame.header
                if header.log_id != staged.log_id or header.epoch >= len(staged.lanes):
                    raise CorruptData(f"the frame at {at} of {path} is not one that was written to it")
                yield staged.lanes[header.epoch][0], frame, buffer[at + HEADER_BYTES : header.end]
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
        return all(_begun_ms(name) < now_ms - _LEFT_MS for name in names)

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
            raise CorruptData(f"{path} cannot be read: {error}") from error
        if found.version != VERSION:
            raise UnknownFormat(f"{path} has version {found.version}: written by a newer release; upgrade to read it")
        return found


def _begun_ms(name: str) -> int:
    parts = name.removesuffix(_SUFFIX).split("-")
    return int(parts[-2]) if len(parts) >= 3 and parts[-2].isdigit() else 0
