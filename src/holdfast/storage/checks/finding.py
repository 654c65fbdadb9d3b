"""What a check finds, in one pass over segments, and how it is worded: what happened, what it costs, what to do next.

Nothing is stored for a good frame, so memory use does not grow with the log. Bytes are read with calls that can fail
before they are accessed through a map: a page that the disk cannot read then costs that page, not the process.
"""

from __future__ import annotations

import errno
import shlex
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.codec.frame import MOST_RAW_BYTES, FrameHeader, Kind, frame_at
from holdfast.env import World
from holdfast.env.disk import File
from holdfast.errors import CorruptData, MessageTooLarge
from holdfast.model import count_of
from holdfast.storage.examine import Cut, Findings, SegmentDamage
from holdfast.storage.files import EPOCHS, STATE, index_name, join, read_file, segment_name
from holdfast.storage.frames import NO_TIME, Damage, FrameRules, SegmentIndex, parse_index, walk
from holdfast.storage.state import Epochs

Severity: TypeAlias = Literal["note", "torn", "damage"]

NO_MESSAGE: Final = "no message is lost"
NOTHING: Final = "nothing to do"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of a check. `code` is stable and meant for programs; the sentences are for people."""

    severity: Severity
    code: str
    file: str
    what: str
    cost: str
    next_step: str
    position: int | None = None
    first_offset: int | None = None
    next_offset: int | None = None
    messages: int = 0
    bytes: int = 0


class CheckCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked: good frames, their messages, how many were removed, the bytes of the segment files."""

    segments: int = 0
    frames: int = 0
    messages: int = 0
    removed: int = 0
    bytes: int = 0


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that were removed from the log earlier and kept, with the fields of their note, if there is one."""

    file: str
    bytes: int
    segment: str | None = None
    position: int | None = None
    first_offset: int | None = None
    next_offset: int | None = None
    reason: str | None = None
    at_ns: int | None = None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check. `ok` means that nothing is damaged; a torn tail is not damage, opening cuts it off."""

    folder: str
    ok: bool
    log_id: int | None
    epoch: int
    start: int
    end: int
    counts: CheckCounts
    lost_messages: int
    findings: tuple[Finding, ...] = ()
    hidden_findings: int = 0
    quarantine: tuple[Quarantined, ...] = ()


def offsets(first: int, next_offset: int) -> str:
    """Describe the offsets [first, next_offset)."""
    return f"offset {first}" if next_offset - first == 1 else f"offsets {first} to {next_offset - 1}"


def lost(first: int, next_offset: int) -> str:
    """Describe what a stretch costs."""
    if next_offset <= first:
        return NO_MESSAGE
    return f"{count_of(next_offset - first, 'message')} lost ({offsets(first, next_offset)}); all others stay readable"


def remains(cut: Cut) -> str:
    """Describe what is after the end of a log."""
    size = cut.used_end - cut.position
    parts = [count_of(size, "byte")] if size or not cut.later_bases else []
    return " and ".join([*parts, *([count_of(len(cut.later_bases), "segment")] if cut.later_bases else [])])


def torn_cost(findings: Findings) -> str:
    """Describe what cutting off a torn tail costs."""
    if findings.identity is None:
        return "not known: the state file, which told what was synced, is gone"
    return "no acknowledged message is lost" if findings.cache_kept else "no synced message is lost"


def _note(code: str, file: str, *, what: str, next_step: str, cost: str = NO_MESSAGE, **more: int) -> Finding:
    """Return a finding that is worth knowing and harmless."""
    return Finding(severity="note", code=code, file=file, what=what, cost=cost, next_step=next_step, **more)


class FindingTexts:
    """Builds the findings about the log in one folder."""

    def __init__(self, folder: str) -> None:
        self._repair = f"run `holdfast repair {shlex.quote(folder)}`"

    def stretch(self, stretch: MissingStretch) -> Finding:
        code, what = {
            "damaged": ("damaged_frames", f"not what was written: {stretch.reason}"),
            "undecodable": ("undecodable_frame", f"intact, but its messages cannot be decoded: {stretch.reason}"),
            "missing": ("missing_messages", self._missing(stretch)),
            "behind": (
                "bytes_behind_end",
                "after the last frame there are bytes that are not a frame, where zeros should be",
            ),
        }[stretch.kind]
        advice = f"restore the file from a copy, or {self._repair}: it keeps the bytes and marks the loss"
        return self._damage(code, stretch, what, advice)

    def _missing(self, stretch: MissingStretch) -> str:
        first, next_offset = stretch.first_offset, stretch.next_offset
        return (
            f"{offsets(first, next_offset)} should follow here and do not: the end of this file is gone, or a "
            f"segment behind it ({segment_name(first)}) is missing"
        )

    def damage_behind(self, damage: SegmentDamage) -> Finding:
        advice = f"{self._repair}: it keeps the bytes and marks the loss"
        return self._damage("damaged_frames", damage, f"not what was written: {damage.reason}", advice)

    def _damage(self, code: str, found: MissingStretch | SegmentDamage, what: str, next_step: str) -> Finding:
        first, next_offset = found.first_offset, found.next_offset
        return Finding(
            severity="damage",
            code=code,
            file=segment_name(found.base),
            position=found.position,
            first_offset=first,
            next_offset=next_offset,
            messages=next_offset - first,
            bytes=found.end - found.position,
            what=what,
            cost=lost(first, next_offset),
            next_step=next_step,
        )

    def unreadable(self, file: str, start: int, end: int) -> Finding:
        return Finding(
            severity="damage",
            code="unreadable",
            file=file,
            position=start,
            bytes=end - start,
            what=f"the disk cannot read bytes {start} to {end - 1} (input/output error)",
            cost="what lies there cannot be read from this disk",
            next_step="save a copy of the folder on a healthy disk (ddrescue reads around bad places), "
            "then check and repair the copy",
        )

    def unjudged(self) -> Finding:
        return Finding(
            severity="damage",
            code="unjudged_end",
            file=STATE,
            what="the end of the log cannot be judged, because the disk cannot read a segment there",
            cost="not known",
            next_step="check a copy of the folder on a healthy disk",
        )

    def lost_tail(self, findings: Findings, first: int, next_offset: int) -> Finding:
        cut = findings.cut
        why = f" ({cut.reason})" if cut is not None else ""
        return Finding(
            severity="damage",
            code="lost_tail",
            file=segment_name(findings.active_base),
            position=findings.active_position,
            first_offset=first,
            next_offset=next_offset,
            messages=next_offset - first,
            bytes=0 if cut is None else cut.used_end - cut.position,
            what=f"messages up to offset {next_offset - 1} were on disk; what is left ends at {first}{why}",
            cost=lost(first, next_offset),
            next_step="restore the file from a copy if there is one; otherwise open the log or "
            f"{self._repair}: the lost offsets are marked and never used again",
        )

    def no_segments(self, end: int) -> Finding:
        return Finding(
            severity="damage",
            code="segments_missing",
            file=segment_name(end),
            next_offset=end,
            what=f"messages were written up to offset {end - 1}, and no segment is left: the files are gone",
            cost=f"all messages that it still held are lost; none has an offset above {end - 1}",
            next_step=f"restore the files from a copy; otherwise {self._repair}: it continues at offset {end}",
        )

    def torn(self, cut: Cut, findings: Findings) -> Finding:
        return Finding(
            severity="torn",
            code="torn_tail",
            file=segment_name(cut.base),
            position=cut.position,
            first_offset=cut.offset,
            bytes=cut.used_end - cut.position,
            what=f"after the end is what a crash left of a write: {remains(cut)} ({cut.reason})",
            cost=torn_cost(findings),
            next_step=f"{NOTHING}: opening the log cuts this off and keeps it in quarantine",
        )

    def unpublished(self, first: int, next_offset: int) -> Finding:
        return _note(
            "unpublished",
            STATE,
            first_offset=first,
            next_offset=next_offset,
            messages=next_offset - first,
            what=f"{offsets(first, next_offset)}: whole, but not published to readers: a sync is under way, or a crash "
            "came before it",
            next_step=f"{NOTHING}: opening the log keeps them",
        )

    def gap(self, file: str, header: FrameHeader) -> Finding:
        return _note(
            "gap",
            file,
            position=header.position,
            first_offset=header.base_offset,
            next_offset=header.next_offset,
            messages=header.count,
            bytes=header.end - header.position,
            what="a gap is in place of damaged messages; their bytes, if any were left, are in quarantine",
            cost=f"{count_of(header.count, 'message')} lost earlier ({offsets(header.base_offset, header.next_offset)})"
            if header.count
            else NO_MESSAGE,
            next_step=f"{NOTHING}: readers get an error for the gap and continue after it",
        )

    def oddity(self, file: str, oddity: Oddity) -> Finding:
        too_large = oddity.code == "too_large"
        return Finding(
            severity="note" if too_large else "damage",
            code=oddity.code,
            file=file,
            position=oddity.position,
            first_offset=oddity.first_offset,
            next_offset=oddity.next_offset,
            messages=oddity.next_offset - oddity.first_offset,
            what=f"{offsets(oddity.first_offset, oddity.next_offset)}: {oddity.what}",
            cost="they cannot be read" if too_large else NO_MESSAGE,
            next_step="no version of Holdfast writes a frame that large; see who wrote the file"
            if too_large
            else "a repair cannot fix this; look for a file that does not belong to this log, and report it as a bug",
        )

    def odd_end(self, found: SegmentSurvey, *, index_expected: bool) -> Iterator[Finding]:
        """Yield findings about a sealed segment that ends where it should."""
        if found.open_batch:
            yield self._half_batch_at_end(segment_name(found.base), found.end)
        if found.index in ("damaged", "disagrees") or (found.index == "missing" and index_expected):
            yield self._index(found.base, found.index)

    def _half_batch_at_end(self, file: str, position: int) -> Finding:
        return Finding(
            severity="damage",
            code="half_batch",
            file=file,
            position=position,
            what="the last batch in this file lacks its last frames",
            cost="the batch is there only in part",
            next_step="a repair cannot fix this; restore the file from a copy, or report it as a bug",
        )

    def _index(self, base: int, verdict: IndexVerdict) -> Finding:
        what = {
            "missing": "is missing",
            "damaged": "is damaged",
            "disagrees": "does not agree with its segment",
        }[verdict]
        return _note(
            f"index_{verdict}",
            index_name(base),
            what=f"the index {what}; it is a cache and will be rebuilt when it is needed",
            next_step=f"{NOTHING}; {self._repair} to rewrite it now",
        )

    def no_state(self, *, there: bool) -> Finding:
        return Finding(
            severity="damage",
            code="state_damaged" if there else "state_missing",
            file=STATE,
            what=f"the state file is {'damaged' if there else 'missing'}: what was synced and published is not known",
            cost=f"{NO_MESSAGE} that the frames still hold; a lost end would go unnoticed",
            next_step=f"{self._repair}, or just open the log: it is rebuilt from the frames",
        )

    def wrong_state(self, readable_end: int, synced_end: int, end: int) -> Finding:
        return Finding(
            severity="damage",
            code="state_wrong",
            file=STATE,
            first_offset=end,
            what=f"the state file says readable up to {readable_end} and synced up to {synced_end}, "
            f"but the log ends at {end}",
            cost=NO_MESSAGE,
            next_step=f"{self._repair}, or just open the log: it puts this right",
        )

    def no_epochs(self, *, there: bool) -> Finding:
        return Finding(
            severity="damage",
            code="epochs_damaged" if there else "epochs_missing",
            file=EPOCHS,
            what=f"the table of epochs is {'damaged' if there else 'missing'}",
            cost=f"{NO_MESSAGE}; positions kept outside from earlier epochs can no longer be checked against it",
            next_step=f"restore it from a copy, or {self._repair}, or just open the log: it starts a new table",
        )

    def unknown_epochs(self, first: int, next_offset: int) -> Finding:
        return _note(
            "epochs_incomplete",
            EPOCHS,
            first_offset=first,
            next_offset=next_offset,
            what=f"the table of epochs does not tell who wrote {offsets(first, next_offset)}: "
            "it was lost and started again since",
            cost=f"{NO_MESSAGE}; positions kept outside from these epochs cannot be checked against it",
            next_step=NOTHING,
        )

    def foreign(self, name: str) -> Finding:
        return _note(
            "foreign_file",
            name,
            what="not part of the log",
            next_step="left alone; keep other files elsewhere",
        )

    def leftover(self, name: str, size: int) -> Finding:
        return _note(
            "leftover_file",
            name,
            bytes=size,
            what="left over from a write that a crash cut short, or being written at this moment",
            next_step=f"{NOTHING}: opening the log removes it",
        )

    def backup(self, name: str) -> Finding:
        return _note(
            "backup",
            name,
            what="a backup made by a repair",
            next_step="remove it when you no longer need it",
        )


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
        frame = frame_at(data, header.position, header, max_raw_bytes=MOST_RAW_BYTES)
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
