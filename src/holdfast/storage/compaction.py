"""Key compaction: only the last message of each key stays, offsets never change, and readers continue meanwhile.

One pass over the keys of the log finds out which messages may go, in bounded memory. Then sealed segments below a floor
are rewritten one by one, oldest first:

    1. look at all keys up to the synced end: only a message that is on disk may replace another
    2. write what stays of a segment to a temporary file, sync it, and read it back
    3. under the writer's lock, if nothing has changed the segment meanwhile: rename the file to the segment's name
    4. sync the folder, write the index

A crash at any point leaves either the old file or the new one; a temporary file is removed by the next opening. Readers
that have the old file mapped continue with it. A message without a key always stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.codec.columns import HEADERS, KEYS, TOMBSTONE, Columns
from holdfast.codec.encode import Body, FramePlace, Packing, header_for, hole_body, plain_value, same_body, without
from holdfast.codec.frame import TIMES_REWRITTEN, Codec, Frame, FrameHeader, Kind, frame_at, short_frame, stored_body
from holdfast.env import File, World
from holdfast.env.disk import write_fully
from holdfast.env.process import get_logger
from holdfast.errors import CorruptData, DiskFull, HoldfastError, MessageTooLarge, Unavailable, UnknownFormat
from holdfast.later import hashlib
from holdfast.model import Producer
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, advice, index_name, join, opened_folder, rewritten_name, room
from holdfast.storage.frames import FrameRules, SegmentIndex, walk
from holdfast.storage.segment import Segment
from holdfast.storage.state import Epochs
from holdfast.storage.writer import Writer

# A key is held as it is, or as a 16-byte digest if it is longer, together with the offset of its last message: about
# 150 bytes each. With more keys than may be held, the pass is made several times, each for a part of the keys. The
# result is kept as bitmaps of offsets, a few bytes each.


MOST_KEYS: Final = 500_000
_DIGEST_BYTES: Final = 16


class CompactionSource:
    """One segment up to an offset, as seen by a pass."""

    def __init__(self, segment: Segment, upto: int, epochs: Epochs, go_on: Callable[[], None]) -> None:
        self.segment = segment
        self.upto = upto
        self._epochs = epochs
        self._go_on = go_on  # raises if the log was closed

    def frames(self) -> Iterator[tuple[Frame, memoryview] | None]:
        """Yield its frames, each with its body and the padding; None for a stretch that is damaged."""
        segment = self.segment
        try:
            _, data, _ = segment.opened(self.upto)
        except FileNotFoundError:  # trimmed meanwhile, or removed by somebody: readers will get an error
            yield None
            return
        for found in self.frames_in(data):
            self._go_on()
            yield found

    def frames_in(self, data: memoryview) -> Iterator[tuple[Frame, memoryview] | None]:
        """Yield frames like `frames`, from bytes that are to become the segment's."""
        reached = self.segment.base_offset
        for found in walk(data, FrameRules(self.segment.log_id, reached, epochs=self._epochs)):
            if not isinstance(found, FrameHeader):
                if found.first_offset < self.upto:
                    yield None
                continue
            if found.base_offset >= self.upto:
                break
            reached = found.next_offset
            yield frame_at(data, found.position, found), stored_body(data, found.position, found)
        if reached < self.upto:
            yield None


class KeyFacts:
    """The result of a pass."""

    def __init__(self) -> None:
        self.superseded = BitMap64()  # a later message has the same key
        self.alone = BitMap64()  # tombstones with no other message of their key before or after them
        self.young = BitMap64()  # those among `alone` that are too young to be removed
        self.damaged: set[int] = set()  # base offsets of segments that could not be read completely

    def removable(self) -> BitMap64:
        return self.superseded | (self.alone - self.young)


class _TooManyKeys(Exception):
    """There are more keys than may be held at once."""


def look_at_keys(
    sources: Sequence[CompactionSource], *, old_ns: int, apart_header: str | None = None, most_keys: int = MOST_KEYS
) -> KeyFacts:
    """Read the keys of the log, oldest first. A tombstone from `old_ns` or before is old enough to be removed.

    Messages with the header `apart_header` stay and replace no others, as if they had no key.
    """
    parts = 1
    while True:
        facts = KeyFacts()
        try:
            for part in range(parts):
                _KeyPass(facts, parts, part, old_ns, apart_header, most_keys).run(sources)
        except _TooManyKeys:
            parts *= 2
        else:
            return facts


class _KeyPass:
    """One pass, for one part of the keys."""

    def __init__(
        self, facts: KeyFacts, parts: int, part: int, old_ns: int, apart_header: str | None, most_keys: int
    ) -> None:
        self._facts = facts
        self._parts = parts
        self._part = part
        self._old_ns = old_ns
        self._apart_header = apart_header
        self._most_keys = most_keys
        self._last: dict[bytes, int] = {}
        self._blind = False  # whether some messages could not be read, so that their keys are not known

    def run(self, sources: Sequence[CompactionSource]) -> None:
        for source in sources:
            for found in source.frames():
                if found is None or not self._look_at(found[0]):
                    self._facts.damaged.add(source.segment.base_offset)
                    self._blind = True
                if len(self._last) > self._most_keys:
                    raise _TooManyKeys

    def _look_at(self, frame: Frame) -> bool:
        """Record the frame's keys; returns False if they cannot be read."""
        header = frame.header
        if header.kind != Kind.DATA or not header.columns & KEYS:
            return True
        try:
            columns = frame.columns()
            keys, flags = columns.keys() or [], columns.flags()
            if self._apart_header is not None and header.columns & HEADERS:
                _forget_apart(keys, columns, self._apart_header)
        except UnknownFormat:
            raise
        except (CorruptData, MessageTooLarge):
            return False
        superseded, alone = self._note(header.base_offset, keys, flags)
        facts = self._facts
        facts.superseded.update(superseded)
        # With unread messages before it, a tombstone may not be alone: a value of its key could come back to life.
        if alone and not self._blind:
            times_ns = columns.times_ns() or [header.max_time_ns] * header.count
            facts.alone.update(alone)
            facts.young.update([at for at in alone if times_ns[at - header.base_offset] > self._old_ns])
        if facts.alone:
            facts.alone.difference_update(BitMap64(superseded))
        return True

    def _note(
        self, offset: int, keys: Sequence[bytes | None], flags: Sequence[int] | None
    ) -> tuple[list[int], list[int]]:
        """Return the offsets that are now superseded, and those of tombstones of a key not seen before."""
        last, parts = self._last, self._parts
        superseded, alone = [], []
        for at, key in enumerate(keys, offset):
            if key is None:
                continue
            name = key if len(key) < _DIGEST_BYTES else hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()
            if parts > 1 and hash(name) % parts != self._part:
                continue
            if name in last:
                superseded.append(last[name])
            elif flags is not None and flags[at - offset] & TOMBSTONE:
                alone.append(at)
            last[name] = at
        return superseded, alone


def _forget_apart(keys: list[bytes | None], columns: Columns, name: str) -> None:
    """Clear the keys of messages with this header."""
    span = columns.span(HEADERS)
    if span is None or name.encode() not in bytes(span):
        return
    for i, pairs in enumerate(columns.headers() or ()):
        if any(header == name for header, _ in pairs):
            keys[i] = None


_CHUNK: Final = 1 << 20
_MOST_U32: Final = 2**32 - 1
# The largest count that a segment's first frame can hold; after it comes 1 again.
_MOST_TIMES: Final = TIMES_REWRITTEN


def messages_in(frame: Frame) -> int:
    """Return the number of messages in a frame."""
    return 0 if frame.header.kind == Kind.GAP else len(frame.offsets())


class _Placed(msgspec.Struct, frozen=True, gc=False):
    """A body and the contents of its header, except for its position."""

    body: Body
    offset: int
    epoch: int
    synced_offset: int
    producer: Producer
    short: bytes | None = None  # the value, if the frame stays a short one

    def joined(self, other: _Placed) -> _Placed | None:
        """Merge two adjacent holes into one if this loses nothing about who wrote the messages; otherwise None."""
        body, later = self.body, other.body
        count = body.count + later.count
        if (
            body.kind != Kind.HOLE
            or later.kind != Kind.HOLE
            or self.epoch != other.epoch
            or self.producer.after(body.count) != other.producer
            or count > _MOST_U32
        ):
            return None
        hole = hole_body(count, max(body.max_time_ns, later.max_time_ns))
        return _Placed(hole, self.offset, self.epoch, self.synced_offset, self.producer)


class Output:
    """Writes frames one after the other to a new file; adjacent holes are merged. Every frame is its own batch."""

    def __init__(self, file: File, log_id: int) -> None:
        self._file = file
        self._log_id = log_id
        self._rewritten: int | None = None
        self._last: _Placed | None = None
        self._parts: list[bytes | memoryview] = []
        self._parts_bytes = 0
        self._position = 0
        self.messages = 0

    def put(self, body: Body, origin: FrameHeader, row: int = 0) -> None:
        """Add the next body, made from a frame from this row on."""
        if self._rewritten is None:
            self._rewritten = (origin.flags & TIMES_REWRITTEN) % _MOST_TIMES + 1
        producer = Producer(origin.producer_id, origin.producer_epoch, origin.first_sequence).after(row)
        short = plain_value(body) if origin.is_short else None
        placed = _Placed(body, origin.base_offset + row, origin.epoch, origin.synced_offset, producer, short)
        if self._last is not None:
            joined = self._last.joined(placed)
            if joined is not None:
                self._last = joined
                return
            self._seal(self._last)
        self._last = placed

    def finish(self) -> None:
        if self._last is not None:
            self._seal(self._last)
        self._store()

    def _seal(self, placed: _Placed) -> None:
        at = self._position + self._parts_bytes
        if at > _MOST_U32:
            raise Unavailable("the new file would be larger than a segment may be; it stays as it was")
        if placed.short is not None and at:
            time_ns = placed.body.max_time_ns
            content = short_frame(self._log_id, at, placed.epoch, placed.offset, time_ns, placed.short)
            self._add((content,), len(content))
            return
        place = FramePlace(self._log_id, placed.epoch, at, placed.offset, placed.synced_offset)
        flags = 0 if at else self._rewritten or 0
        header = header_for(placed.body, place, batch_remaining=0, producer=placed.producer, flags=flags)
        if placed.body.frame_bytes >= _CHUNK:  # written directly, without a copy in memory
            self._store()
            write_fully(self._file, self._position, [header, *placed.body.parts])
            self._position += placed.body.frame_bytes
            return
        self._add((header, *placed.body.parts), placed.body.frame_bytes)

    def _add(self, parts: Sequence[bytes | memoryview], length: int) -> None:
        self._parts += parts
        self._parts_bytes += length
        if self._parts_bytes >= _CHUNK:
            self._store()

    def _store(self) -> None:
        write_fully(self._file, self._position, [b"".join(self._parts)])
        self._position += self._parts_bytes
        self._parts, self._parts_bytes = [], 0


logger = get_logger(__name__)

Progress = Callable[[int, int], None]


class KeysCompacted(msgspec.Struct, frozen=True, gc=False):
    """The result of a key compaction: segments rewritten, messages removed, bytes freed."""

    segments: int
    removed_messages: int
    freed_bytes: int


class CompactionLimits(msgspec.Struct, frozen=True):
    """What a compaction may do. All readers of this process have passed everything below `floor`.

    `needed_outside` returns the first offset that a reader in another process still needs; one may appear at any time.
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
    """Rewrite the sealed segments for which it pays. Only one at a time per log; the caller has synced."""
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
            counts = {"folder": self._folder, "segments": segments, "messages": removed, "bytes": freed}
            logger.info("keys compacted", extra=counts)
        return KeysCompacted(segments, removed, freed)

    def _sources(self) -> list[CompactionSource]:
        """Return all segments up to the synced end, the active one last."""
        ends = [segment.base_offset for segment in self._segments[1:]] + [self._end]
        go_on = self._writer.check_usable
        return [
            CompactionSource(segment, min(end, self._end), self._epochs, go_on)
            for segment, end in zip(self._segments, ends, strict=False)  # without segments there is one end too many
        ]

    def _look(self, sources: list[CompactionSource]) -> KeyFacts:
        old_ns = self._world.clock.now_ns() - self._limits.tombstone_ms * 1_000_000
        limits = self._limits
        return look_at_keys(sources, old_ns=old_ns, apart_header=limits.apart_header, most_keys=limits.most_keys)

    def _pays(self, source: CompactionSource, gone: BitMap64, facts: KeyFacts) -> bool:
        """Whether enough of the segment can be removed, or all its tombstones that are no longer needed."""
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

    def _rewrite(self, source: CompactionSource, gone: BitMap64) -> int | None:
        """Replace the segment's file and return the bytes this freed; None if the segment must stay as it is."""
        segment = source.segment
        temporary = join(self._folder, rewritten_name(segment.base_offset))
        with contextlib.ExitStack() as opened:
            # Everything that can run short is done or opened before the rename, after which only the sync can fail.
            with self._or_nothing(segment, temporary):
                size = segment.size()
                self._check_room(size)
                folder = opened.enter_context(opened_folder(self._world.disk, self._folder))
                index = self._write(source, gone, temporary)
                # Asked again at the last moment: a reader may have appeared while the copy was written.
                if self._is_needed(source) or not self._put_in_place(segment, temporary, index):
                    self._world.disk.remove(temporary)
                    return None
            try:
                folder.sync()
            except OSError as error:
                raise self._writer.fail("compacting keys failed", error) from error
        segment.save_index()
        return size - index.end

    def _is_needed(self, source: CompactionSource) -> bool:
        floor = self._limits.needed_outside()
        return floor is not None and source.upto > floor

    def _write(self, source: CompactionSource, gone: BitMap64, temporary: str) -> SegmentIndex:
        """Write what stays of the segment to the temporary name and sync it; returns its index."""
        with contextlib.closing(self._world.disk.open(temporary, write=True, create=True)) as file:
            file.truncate(0)
            output = Output(file, self._writer.log_id)
            for found in source.frames():
                if found is None:
                    raise CorruptData(
                        f"{source.segment.path} was damaged while it was compacted; run `holdfast check` on the folder"
                    )
                self._copy(*found, gone, output)
            output.finish()
            file.sync()
            return self._proven(file.view(0, file.size()), source, output.messages)

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

    def _proven(self, data: memoryview, source: CompactionSource, messages: int) -> SegmentIndex:
        """Return the index of the new file, which is read back completely before it may replace the old one."""
        segment = source.segment
        index = SegmentIndex(segment.base_offset, self._settings.index_bytes)
        found_messages = 0
        for found in source.frames_in(data):
            if found is None:
                break
            index.add_header(found[0].header)
            found_messages += messages_in(found[0])
        if (index.next_offset, index.end, found_messages) != (source.upto, len(data), messages):
            raise CorruptData(
                f"the compacted copy of {segment.path} is not right, so the original was kept: check the disk"
            )
        return index

    def _put_in_place(self, segment: Segment, temporary: str, index: SegmentIndex) -> bool:
        """Rename the file, unless the segment was trimmed, or messages that replace others were truncated."""
        writer, disk = self._writer, self._world.disk
        with writer.lock:
            writer.check_usable()
            if writer.epoch != self._epoch or segment not in writer.segments or segment is writer.active:
                return False
            # The index first: a crash must not leave the old index next to the new file.
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
        """If anything fails before the rename, leave the segment as it was."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._world.disk.remove(temporary)
            if not isinstance(error, OSError):
                raise
            kind: type[HoldfastError] = DiskFull if error.errno in FULL_DISK else Unavailable
            raise kind(
                f"{segment.path} could not be compacted: {advice(error)}. It stays as it was; check the disk, and try "
                "again"
            ) from error


def _between(source: CompactionSource) -> BitMap64:
    """Return the offsets of a source."""
    offsets = BitMap64()
    offsets.add_range(source.segment.base_offset, source.upto)
    return offsets


def _marks(frame: Frame, gone: BitMap64) -> list[bool] | None:
    """Return for each row of a frame whether it is removed, now or before; None if nothing new is."""
    first, stop = frame.base_offset, frame.next_offset
    if frame.header.kind != Kind.DATA or not gone.range_cardinality(first, stop):
        return None
    marks = [offset in gone for offset in range(first, stop)]
    kept = frame.columns().kept()
    if kept is not None:
        marks = [is_gone or not is_kept for is_gone, is_kept in zip(marks, kept, strict=True)]
    return marks


def _share(frame: Frame, marks: Sequence[bool]) -> float:
    """Return roughly which part of a frame's bytes belongs to the marked messages."""
    if all(marks):
        return 1.0
    columns = frame.columns()
    sizes = [len(value) for value in columns.values()]
    for i, key in enumerate(columns.keys() or ()):
        sizes[i] += len(key or b"")
    return sum(size for size, is_gone in zip(sizes, marks, strict=True) if is_gone) / max(sum(sizes), 1)
