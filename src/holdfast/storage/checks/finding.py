"""The results of a check and their wording: what happened, what it costs, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.codec.frame import FrameHeader
from holdfast.storage.checks.survey import IndexVerdict, MissingStretch, Oddity, SegmentSurvey
from holdfast.storage.examine import Cut, Findings, SegmentDamage
from holdfast.storage.files import EPOCHS, STATE, index_name, segment_name

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


def count_of(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


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
            next_step="no version of Holdfast packs so much; see who wrote the file"
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
