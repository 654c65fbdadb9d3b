"""Key compaction: of each key the last message stays, offsets never change, and readers go on meanwhile.

Sealed segments below a floor are written anew, one by one, oldest first:

    1. look at all keys up to the synced end: only what is on disk may take the place of something else
    2. write what stays of a segment to a temporary file, sync it, and read it back
    3. under the writer's lock, if nothing has changed the segment meanwhile: put the file in the segment's place
    4. sync the folder, write the index

A crash at any point leaves the old file or the new one; a temporary file is removed by the next opening. Who has
the old file mapped goes on with it. A message without a key always stays.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from pyroaring import BitMap64

from holdfast.codec.compression import Codec
from holdfast.codec.encode import Packing
from holdfast.codec.frame import Frame, Kind
from holdfast.codec.rewrite import hole_body, same_body, without
from holdfast.env import World
from holdfast.errors import CorruptData, DiskFull, HoldfastError, Unavailable
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, index_name, join, opened_folder, rewritten_name
from holdfast.storage.index import SegmentIndex
from holdfast.storage.keys import MOST_KEYS, KeyFacts, Source, look_at_keys
from holdfast.storage.rewriting import Output, messages_in
from holdfast.storage.segment import Segment
from holdfast.storage.shortage import advice, room
from holdfast.storage.writer import Writer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class KeysCompacted(msgspec.Struct, frozen=True, gc=False):
    """What a key compaction did: segments written anew, messages removed, bytes freed."""

    segments: int
    removed_messages: int
    freed_bytes: int


@dataclass(frozen=True)
class CompactionLimits:
    """What is asked of a compaction. Everything below `floor` has been passed by all who read.

    `needed_outside` tells from where on somebody in another process has not; one may come at any time.
    """

    floor: int
    tombstone_ms: int
    min_saving_percent: int
    apart_header: str | None = None
    most_keys: int = MOST_KEYS
    needed_outside: Callable[[], int | None] = lambda: None


def compact_keys(
    world: World,
    writer: Writer,
    folder: str,
    settings: LogSettings,
    limits: CompactionLimits,
    progress: Progress | None = None,
) -> KeysCompacted:
    """Write the sealed segments anew in which it pays. One at a time on a log; the caller has synced."""
    return _Compaction(world, writer, folder, settings, limits).run(progress or (lambda done, total: None))


class _Compaction:
    """One run."""

    def __init__(
        self, world: World, writer: Writer, folder: str, settings: LogSettings, limits: CompactionLimits
    ) -> None:
        self._world = world
        self._writer = writer
        self._folder = folder
        self._settings = settings
        self._limits = limits
        with writer.lock:
            writer.check_usable()
            self._epoch, self._epochs = writer.epoch, writer.epochs
            self._segments = writer.segments
            self._end = min(writer.readable_end, writer.synced_end)

    def run(self, progress: Progress) -> KeysCompacted:
        sources = self._sources()
        needed = self._limits.needed_outside()
        most = min(self._limits.floor, self._end if needed is None else min(needed, self._end))
        todo = [source for source in sources[:-1] if source.upto <= most]
        segments = removed = freed = 0
        facts = self._look(sources) if todo else KeyFacts()
        removable = facts.removable()
        for done, source in enumerate(todo):
            progress(done, len(todo))
            gone = removable & _between(source)
            if gone and source.segment.base_offset not in facts.damaged and self._pays(source, gone, facts):
                saved = self._rewrite(source, gone)
                if saved is not None:
                    segments, removed, freed = segments + 1, removed + len(gone), freed + saved
        progress(len(todo), len(todo))
        if segments:
            told = {"folder": self._folder, "segments": segments, "messages": removed, "bytes": freed}
            logger.info("keys compacted", extra=told)
        return KeysCompacted(segments, removed, freed)

    def _sources(self) -> list[Source]:
        """All segments up to the end that counts, the active one last."""
        ends = [segment.base_offset for segment in self._segments[1:]] + [self._end]
        go_on = self._writer.check_usable
        return [
            Source(segment, min(end, self._end), self._epochs, go_on)
            for segment, end in zip(self._segments, ends, strict=False)  # one end too many where there is no segment
        ]

    def _look(self, sources: list[Source]) -> KeyFacts:
        old_ns = self._world.clock.now_ns() - self._limits.tombstone_ms * 1_000_000
        limits = self._limits
        return look_at_keys(sources, old_ns=old_ns, apart_header=limits.apart_header, most_keys=limits.most_keys)

    def _pays(self, source: Source, gone: BitMap64, facts: KeyFacts) -> bool:
        """Whether enough of the segment can go, or all of its tombstones that nothing holds any more."""
        if facts.alone & gone and not facts.alone & facts.young & _between(source):
            return True
        used, saved = 0, 0.0
        for found in source.frames():
            if found is None:
                return False
            header = found[0].header
            used += header.end - header.position
            marks = _marks(found[0], gone)
            if marks is not None:
                saved += (header.end - header.position) * _share(found[0], marks)
        return saved * 100 >= self._limits.min_saving_percent * used

    def _rewrite(self, source: Source, gone: BitMap64) -> int | None:
        """Put a new file in the segment's place and answer the bytes that this freed; None where it must stay."""
        segment = source.segment
        temporary = join(self._folder, rewritten_name(segment.base_offset))
        with contextlib.ExitStack() as opened:
            with self._or_nothing(segment, temporary):
                size = segment.size()
                self._check_room(size)
                folder = opened.enter_context(opened_folder(self._world.disk, self._folder))
                index = self._write(source, gone, temporary)
                if self._is_needed(source) or not self._put_in_place(segment, temporary, index):
                    self._world.disk.remove(temporary)
                    return None
            try:
                folder.sync()
            except OSError as error:
                raise self._writer.fail("compacting keys failed", error) from error
        segment.save_index()
        return size - index.end

    def _is_needed(self, source: Source) -> bool:
        floor = self._limits.needed_outside()
        return floor is not None and source.upto > floor

    def _write(self, source: Source, gone: BitMap64, temporary: str) -> SegmentIndex:
        """What stays of the segment, durable under the temporary name; answers its index."""
        file = self._world.disk.open(temporary, write=True, create=True)
        try:
            file.truncate(0)
            output = Output(file, self._writer.log_id)
            for found in source.frames():
                if found is None:
                    raise CorruptData(f"{source.segment.path} has been damaged since it was looked at")
                self._copy(*found, gone, output)
            output.finish()
            file.sync()
            return self._proven(file.view(0, file.size()), source, output.messages)
        finally:
            file.close()

    def _copy(self, frame: Frame, stored: memoryview, gone: BitMap64, output: Output) -> None:
        header = frame.header
        marks = _marks(frame, gone)
        if header.kind == Kind.HOLE:
            output.put(hole_body(header.count, header.max_time_ns), header)
        elif marks is None:
            output.put(same_body(header, stored), header)
            output.messages += messages_in(frame)
        else:
            for row, body in without(frame, marks, self._packing(Codec(header.codec))):
                output.put(body, header, row)
            output.messages += marks.count(False)

    def _packing(self, codec: Codec) -> Packing:
        settings = self._settings
        return Packing(
            codec,
            settings.codec_level if settings.codec == codec.name.lower() else None,
            settings.codec_min_bytes,
            settings.codec_min_saving_percent,
            settings.max_raw_bytes,
        )

    def _proven(self, data: memoryview, source: Source, messages: int) -> SegmentIndex:
        """The index of the new file, which is read back before it may take the place of the old one."""
        segment = source.segment
        index = SegmentIndex(segment.base_offset, self._settings.index_bytes)
        found_messages = 0
        for found in source.frames_in(data):
            if found is None:
                break
            index.add_header(found[0].header)
            found_messages += messages_in(found[0])
        if (index.next_offset, index.end, found_messages) != (source.upto, len(data), messages):
            raise CorruptData(f"the new file for {segment.path} is not right; nothing was put in its place")
        return index

    def _put_in_place(self, segment: Segment, temporary: str, index: SegmentIndex) -> bool:
        """Rename, unless the segment was trimmed away, or the messages that take the place of others were cut off."""
        writer, disk = self._writer, self._world.disk
        with writer.lock:
            writer.check_usable()
            if writer.epoch != self._epoch or segment not in writer.segments or segment is writer.active:
                return False
            with contextlib.suppress(FileNotFoundError):
                disk.remove(join(self._folder, index_name(segment.base_offset)))
            disk.rename(temporary, segment.path)
            segment.use_new_file(index)
        return True

    def _check_room(self, size: int) -> None:
        free, keep = self._world.disk.free_bytes(self._folder), self._settings.min_free_bytes
        if free - size < keep:
            raise DiskFull(
                f"compacting {self._folder} takes room for a while: {room(free, size, keep)}. Nothing was changed; "
                "free some space"
            )

    @contextlib.contextmanager
    def _or_nothing(self, segment: Segment, temporary: str) -> Iterator[None]:
        """Whatever fails before the rename leaves the segment as it was."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._world.disk.remove(temporary)
            if not isinstance(error, OSError):
                raise
            kind: type[HoldfastError] = DiskFull if error.errno in FULL_DISK else Unavailable
            raise kind(
                f"{segment.path} could not be compacted: {advice(error)}. It stays as it was; look at "
                "the disk, and try again"
            ) from error


def _between(source: Source) -> BitMap64:
    """The offsets of a source."""
    offsets = BitMap64()
    offsets.add_range(source.segment.base_offset, source.upto)
    return offsets


def _marks(frame: Frame, gone: BitMap64) -> list[bool] | None:
    """For each row of a frame whether it is gone, now or before; None where nothing new goes."""
    first, stop = frame.base_offset, frame.next_offset
    if frame.header.kind != Kind.DATA or not gone.range_cardinality(first, stop):
        return None
    marks = [offset in gone for offset in range(first, stop)]
    kept = frame.columns().kept()
    if kept is not None:
        marks = [is_gone or not is_kept for is_gone, is_kept in zip(marks, kept, strict=True)]
    return marks


def _share(frame: Frame, marks: Sequence[bool]) -> float:
    """About what part of a frame's bytes goes with the marked messages."""
    if all(marks):
        return 1.0
    columns = frame.columns()
    sizes = [len(value) for value in columns.values()]
    for i, key in enumerate(columns.keys() or ()):
        sizes[i] += len(key or b"")
    return sum(size for size, is_gone in zip(sizes, marks, strict=True) if is_gone) / max(sum(sizes), 1)
