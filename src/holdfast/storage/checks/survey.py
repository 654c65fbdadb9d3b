"""One pass over segments, front to back: which frames are good, which stretches are not, and what else is odd.

Nothing is stored for a good frame, so memory use does not grow with the log. Bytes are read with calls that can fail
before they are accessed through a map: a page that the disk cannot read then costs that page, not the process.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable
from contextlib import closing
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.codec.frame import HEADER_BYTES, MOST_RAW_BYTES, Frame, FrameHeader, Kind
from holdfast.env import World
from holdfast.env.disk import File
from holdfast.errors import CorruptData, MessageTooLarge
from holdfast.storage.files import index_name, join, read_file, segment_name
from holdfast.storage.frames import NO_TIME, Damage, FrameRules, SegmentIndex, parse_index, walk
from holdfast.storage.state import Epochs

StretchKind: TypeAlias = Literal["damaged", "undecodable", "missing", "behind"]
IndexVerdict: TypeAlias = Literal["agrees", "missing", "damaged", "disagrees", "unknown"]
OnBytes: TypeAlias = Callable[[int], None]

_CHUNK: Final = 1 << 20
_PAGE: Final = 4096


class MissingStretch(msgspec.Struct, frozen=True, gc=False):
    """Bytes [position, end) of a segment where messages [first_offset, next_offset) should be but are not.

    `epoch` and `time_ns` are those of the last good frame before it; 0 and NO_TIME if there is none.
    """

    base: int
    position: int
    end: int
    first_offset: int
    next_offset: int
    kind: StretchKind
    reason: str
    epoch: int
    time_ns: int
    followed: bool = False  # by a good frame in the same segment


class Oddity(msgspec.Struct, frozen=True, gc=False):
    """An intact frame that says something impossible."""

    code: str
    position: int
    first_offset: int
    next_offset: int
    what: str


class SegmentSurvey(msgspec.Struct):
    """What one segment holds."""

    base: int
    size: int
    frames: int = 0
    messages: int = 0
    removed: int = 0
    end: int = 0
    stretches: list[MissingStretch] = []
    gaps: list[FrameHeader] = []
    oddities: list[Oddity] = []
    unreadable: list[tuple[int, int]] = []
    index: IndexVerdict = "unknown"
    open_batch: bool = False  # the last frame's batch should continue, but nothing follows


class Survey:
    """Goes from segment to segment; each must continue where the one before ended."""

    def __init__(
        self,
        world: World,
        folder: str,
        *,
        log_id: int,
        epochs: Epochs,
        start: int,
        on_bytes: OnBytes,
    ) -> None:
        self._world = world
        self._folder = folder
        self._epochs = epochs
        self._on_bytes = on_bytes
        self._wanted = FrameRules(log_id, start, epochs=epochs)
        self._time_ns = NO_TIME
        self._known_epoch = (-1, -1)
        self._remaining = 0  # frames that the last one's batch still lacks
        self.unknown_epochs: tuple[int, int] | None = None  # offsets whose epoch is not the one in the table

    def skip_to(self, offset: int) -> None:
        """Continue at a later offset: what was before it has been trimmed meanwhile."""
        self._wanted.offset = offset

    def segment(self, base: int, upto: int, *, last: bool) -> SegmentSurvey:
        """Survey one segment, which should hold the messages up to `upto`; what follows in the last one is left out."""
        with closing(self._world.disk.open(join(self._folder, segment_name(base)))) as file:
            data, unreadable = segment_data(file)
        survey = SegmentSurvey(base, len(data), unreadable=unreadable)
        proof = self._index_proof(base)
        # Earlier segments accounted for everything below this base, or reported what is missing.
        self._wanted.offset = max(self._wanted.offset, base)
        self._remaining = 0
        tail = self._walk(survey, data, upto, proof, last=last)
        self._finish(survey, upto, tail, last=last)
        survey.open_batch = bool(self._remaining)
        # An index from before the damage may well disagree with frames that were damaged since.
        damaged = survey.unreadable or any(stretch.end > stretch.position for stretch in survey.stretches)
        verdict = proof.verdict()
        survey.index = "unknown" if damaged and verdict == "disagrees" else verdict
        return survey

    def _walk(
        self, survey: SegmentSurvey, data: memoryview, upto: int, proof: _IndexProof, *, last: bool
    ) -> Damage | None:
        """Go through good frames and the stretches between them; returns what is after the last good frame."""
        reported = 0
        for found in walk(data, self._wanted):
            if isinstance(found, FrameHeader):
                if found.base_offset >= upto:
                    if not last:
                        self._odd(survey, "overlap", found, "the next segment should hold its messages")
                    break
                proof.frame(found)
                self._frame(survey, data, found)
                if found.end - reported >= _CHUNK:
                    self._on_bytes(found.end - reported)
                    reported = found.end
            elif found.next_offset is None or found.first_offset >= upto:
                self._on_bytes(len(data) - reported)
                return found
            else:
                kind: StretchKind = "damaged" if found.end > found.position else "missing"
                self._stretch(survey, found, min(found.next_offset, upto), kind)
                self._wanted.offset = min(found.next_offset, upto)
        self._on_bytes(len(data) - reported)
        return None

    def _finish(self, survey: SegmentSurvey, upto: int, tail: Damage | None, *, last: bool) -> None:
        expected = self._wanted.offset
        if expected < upto:
            found = tail or Damage(survey.end, survey.end, expected, None, "nothing but zeros is where they should be")
            self._stretch(survey, found, upto, "damaged" if tail else "missing")
            self._wanted.offset = upto
        elif tail is not None and not last:
            self._stretch(survey, tail, expected, "behind")

    def _stretch(
        self, survey: SegmentSurvey, found: Damage, next_offset: int, kind: StretchKind, epoch: int | None = None
    ) -> None:
        self._remaining = 0
        survey.stretches.append(
            MissingStretch(
                survey.base,
                found.position,
                found.end,
                found.first_offset,
                max(next_offset, found.first_offset),
                kind,
                found.reason,
                self._wanted.epoch if epoch is None else epoch,
                self._time_ns,
            )
        )

    def _frame(self, survey: SegmentSurvey, data: memoryview, header: FrameHeader) -> None:
        if survey.stretches and not survey.stretches[-1].followed:
            survey.stretches[-1] = msgspec.structs.replace(survey.stretches[-1], followed=True)
        survey.end = header.end
        if header.kind == Kind.GAP:
            survey.gaps.append(header)
            self._remaining = 0
        elif header.kind == Kind.HOLE:
            survey.frames += 1
            survey.removed += header.count
            self._look_at_header(survey, header)
        else:
            problem = self._decode(survey, data, header)
            if problem is not None:
                lost = Damage(header.position, header.end, header.base_offset, header.next_offset, problem)
                self._stretch(survey, lost, header.next_offset, "undecodable", header.epoch)
            else:
                survey.frames += 1
                self._look_at_header(survey, header)
        self._look_at_epoch(header)
        self._time_ns = max(self._time_ns, header.max_time_ns)

    def _decode(self, survey: SegmentSurvey, data: memoryview, header: FrameHeader) -> str | None:
        """Say why the body cannot be decoded although its checksum is right; None if it can."""
        start = header.position + HEADER_BYTES
        frame = Frame(header, data[start : start + header.body_bytes], max_raw_bytes=MOST_RAW_BYTES)
        try:
            columns = frame.columns()
            frame.stored_values()  # a large value is not copied
            columns.keys()
            columns.headers()
            values_end = array("i", bytes(columns.value_ends()[-4:]))[0]
            if values_end != len(columns.value_bytes()):
                return f"its values end at {values_end}, its body at {len(columns.value_bytes())}"
            kept = header.count if (rows := columns.kept()) is None else sum(rows)
            survey.messages += kept
            survey.removed += header.count - kept
            times = columns.times_ns()
            if times is not None and max(times, default=header.max_time_ns) != header.max_time_ns:
                self._odd(survey, "wrong_time", header, "its latest time is not that of its messages")
        except CorruptData as error:
            return str(error)
        except MessageTooLarge as error:
            survey.messages += header.count
            self._odd(survey, "too_large", header, str(error))
        return None

    def _look_at_header(self, survey: SegmentSurvey, header: FrameHeader) -> None:
        if self._remaining and header.batch_remaining != self._remaining - 1:
            self._odd(survey, "half_batch", header, "the batch before it lacks its last frames")
        self._remaining = header.batch_remaining
        if header.synced_offset > header.base_offset:
            self._odd(
                survey, "wrong_sync", header, f"it says that {header.synced_offset} was synced before it was written"
            )

    def _look_at_epoch(self, header: FrameHeader) -> None:
        """Check that the epoch table knows this frame's epoch; done once per run of frames of one epoch."""
        epoch, until = self._known_epoch
        if not self._epochs.entries or (header.epoch == epoch and header.base_offset < until):
            return
        if self._epochs.at(header.base_offset) == header.epoch:
            end = self._epochs.end_of(header.epoch)
            self._known_epoch = (header.epoch, 2**64 if end is None else end)
            return
        first = header.base_offset if self.unknown_epochs is None else self.unknown_epochs[0]
        self.unknown_epochs = (first, header.next_offset)

    def _odd(self, survey: SegmentSurvey, code: str, header: FrameHeader, what: str) -> None:
        survey.oddities.append(Oddity(code, header.position, header.base_offset, header.next_offset, what))

    def _index_proof(self, base: int) -> _IndexProof:
        try:
            content = read_file(self._world.disk, join(self._folder, index_name(base)))
        except OSError:
            content = b""
        if content is None:
            return _IndexProof(None, "missing")
        return _IndexProof(parse_index(content, self._wanted.log_id, base, 1), "damaged")


class _IndexProof:
    """Compares an index with the frames as they pass. An index may cover only the first part of its segment."""

    def __init__(self, index: SegmentIndex | None, without: IndexVerdict) -> None:
        self._index = index
        self._without = without
        self._entry = 0
        self._frames = 0
        self._time_ns = NO_TIME
        self._agrees = True
        self._reached = index is not None and index.end == 0 and index.next_offset == index.base_offset

    def frame(self, header: FrameHeader) -> None:
        index = self._index
        if index is None or header.position >= index.end:
            return
        if self._entry < len(index.positions) and index.positions[self._entry] <= header.position:
            self._agrees &= (
                index.positions[self._entry] == header.position
                and index.offsets[self._entry] == header.base_offset
                and index.times[self._entry] == self._time_ns
            )
            self._entry += 1
        self._frames += 1
        self._time_ns = max(self._time_ns, header.max_time_ns)
        if header.end == index.end:
            self._reached = (
                index.next_offset == header.next_offset
                and index.max_time_ns == self._time_ns
                and len(index.positions) == self._entry
            )

    def verdict(self) -> IndexVerdict:
        if self._index is None:
            return self._without
        return "agrees" if self._agrees and self._reached else "disagrees"


def segment_data(file: File) -> tuple[memoryview, list[tuple[int, int]]]:
    """Return all bytes of a file, and which of them the disk could not read; those are zeros."""
    size = file.size()
    if all(_reads(file, position, min(_CHUNK, size - position)) for position in range(0, size, _CHUNK)):
        return file.view(0, size), []
    content = bytearray(size)
    unreadable: list[tuple[int, int]] = []
    for position in range(0, size, _PAGE):
        length = min(_PAGE, size - position)
        if _reads(file, position, length):
            content[position : position + length] = file.read(position, length)
        elif unreadable and unreadable[-1][1] == position:
            unreadable[-1] = (unreadable[-1][0], position + length)
        else:
            unreadable.append((position, position + length))
    return memoryview(content).toreadonly(), unreadable


def _reads(file: File, position: int, length: int) -> bool:
    try:
        file.read(position, length)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True
