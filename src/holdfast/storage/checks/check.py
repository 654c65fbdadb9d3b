"""Checks a log: reads every byte, takes no lock, writes nothing, and reports what it found.

There are three severities. *Damage*: stored bytes are not what was written; messages are lost, or someone has to look.
*Torn*: what a crash leaves of writes that were never acknowledged; opening cuts it off. *Note*: worth knowing,
harmless.

It works next to a live owner, and then looks no further than readers may. What comes after that is judged as opening
would judge it, but only if it looks the same before and after the rest of the check: a working owner changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import zip_longest
from os import PathLike, fspath
from typing import Final

import msgspec

from holdfast.env import World, real_world
from holdfast.settings import LogSettings
from holdfast.storage import files
from holdfast.storage.checks.finding import (
    CheckCounts,
    CheckReport,
    Finding,
    FindingTexts,
    MissingStretch,
    Quarantined,
    SegmentSurvey,
    Survey,
    segment_data,
)
from holdfast.storage.examine import Findings, examine
from holdfast.storage.state import NO_EPOCHS, Epochs, Identity, LogState, load_epochs

Progress = Callable[[int, int], None]

# If an owner truncates or opens the log during the check, it starts over, but not forever.
_TRIES: Final = 5
# For a log that is damaged all over, the first findings are enough; the counts stay right.
_MOST_FINDINGS: Final = 10_000


def check(
    folder: str | PathLike[str],
    world: World | None = None,
    settings: LogSettings | None = None,
    *,
    owned: bool | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check the whole log. `owned` says whether somebody owns it now; None if that is not known."""
    world, settings = world or real_world(), settings or LogSettings()
    return inspect(fspath(folder), world, settings, owned=owned, progress=progress).report


@dataclass
class Inspection:
    """A report, and what a repair must know beyond it."""

    report: CheckReport
    stretches: list[MissingStretch]
    findings: Findings | None
    end: int


def inspect(
    folder: str,
    world: World,
    settings: LogSettings,
    *,
    owned: bool | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Like `check`, but returns the damaged stretches as well, for a repair."""
    try:
        files.require_log(world, folder)
        for _ in range(_TRIES - 1):
            # A file that is gone by the time it is read was trimmed or truncated away.
            with suppress(FileNotFoundError):
                one = _Pass(folder, world, settings, owned=owned, progress=progress)
                inspection = one.run()
                if not one.disturbed():
                    return inspection
        return _Pass(folder, world, settings, owned=owned, progress=progress).run()
    except OSError as error:
        raise files.open_error(folder, error) from error


class _Facts(msgspec.Struct, frozen=True):
    """What the small files say."""

    names: tuple[str, ...]
    bases: tuple[int, ...]
    identity: Identity | None
    readable_end: int
    synced_end: int
    epochs: Epochs | None
    log_id: int | None


def _facts(world: World, folder: str) -> _Facts:
    state = LogState.open(world.disk, folder, write=False)
    try:
        identity = None if state is None else state.identity
        readable_end = 0 if state is None else state.readable_end
        synced_end = 0 if state is None else state.synced_end
    finally:
        if state is not None:
            state.close()
    # The ends are read first: what they cover exists by the time the names are listed.
    table = load_epochs(world.disk, folder)
    names = tuple(world.disk.names(folder))
    log_id = identity.log_id if identity is not None else table[0] if table is not None else None
    epochs = table[1] if table is not None and table[0] == log_id else None
    return _Facts(names, tuple(files.segment_bases(names)), identity, readable_end, synced_end, epochs, log_id)


class _Pass:
    """One pass over everything."""

    def __init__(
        self, folder: str, world: World, settings: LogSettings, *, owned: bool | None, progress: Progress | None
    ) -> None:
        self._folder = folder
        self._world = world
        self._settings = settings
        self._progress = progress
        self._words = FindingTexts(folder)
        self._facts = facts = _facts(world, folder)
        identity = facts.identity
        self._same_boot = identity is not None and identity.boot_id == world.ids.boot_id() != 0
        self._closed = identity is not None and identity.clean_end is not None
        # Only a log that was left open, and in this very boot, can have an owner.
        may_live = identity is not None and not self._closed and (self._same_boot or world.ids.boot_id() == 0)
        self._may_live = owned is True or (owned is None and may_live)
        self._owned = owned is True
        self._found: list[Finding] = []
        self._hidden = 0
        self._damaged = False
        self._counts = CheckCounts()
        self._lost_messages = 0
        self._stretches: list[MissingStretch] = []
        self._start: int | None = None
        self._done_bytes = 0
        self._total_bytes = 0

    def run(self) -> Inspection:
        self._add_all(self._small_files())
        findings = self._examine()
        end = self._look_until(findings)
        self._survey(findings, end)
        self._add_all([self._words.unjudged()] if findings is None else self._tail(findings, end))
        self._add_all(file_findings(self._world, self._folder, self._facts.names, self._words))
        return Inspection(self._report(findings, end), self._stretches, findings, end)

    def disturbed(self) -> bool:
        """Whether somebody opened, closed or truncated the log during the pass."""
        before, now = self._facts, _facts(self._world, self._folder)
        return now.identity != before.identity or _entries(now) != _entries(before)

    def _small_files(self) -> Iterator[Finding]:
        facts = self._facts
        if facts.identity is None:
            yield self._words.no_state(there=files.STATE in facts.names)
        if facts.epochs is None:
            yield self._words.no_epochs(there=files.EPOCHS in facts.names)

    def _examine(self) -> Findings | None:
        """Return what opening would do; None if the disk cannot even read what that requires."""
        if self._unreadable_tail():
            return None
        state = LogState.open(self._world.disk, self._folder, write=False)
        try:
            return examine(self._world, self._folder, state, index_bytes=self._settings.index_bytes)
        finally:
            if state is not None:
                state.close()

    def _unreadable_tail(self) -> bool:
        """Whether the disk fails to read segments that opening would have to judge."""
        facts = self._facts
        for base, next_base in zip_longest(facts.bases, facts.bases[1:]):
            if facts.identity is None or next_base is None or next_base > facts.synced_end:
                with closing(self._world.disk.open(files.join(self._folder, files.segment_name(base)))) as file:
                    if segment_data(file)[1]:
                        return True
        return False

    def _look_until(self, findings: Findings | None) -> int:
        """Return the offset up to which messages must exist and be intact."""
        if findings is None:
            return self._facts.synced_end
        return min(findings.end, self._facts.readable_end) if self._may_live else findings.end

    def _survey(self, findings: Findings | None, end: int) -> None:
        facts = self._facts
        log_id = facts.log_id if findings is None else findings.log_id
        last_base = end if findings is None else min(findings.active_base, end)
        bases = [base for base in facts.bases if base <= last_base or base == facts.bases[0]]
        if not bases or log_id is None:
            return
        self._total_bytes = sum(
            file_size(self._world, files.join(self._folder, files.segment_name(base))) for base in bases
        )
        survey = Survey(
            self._world,
            self._folder,
            log_id=log_id,
            epochs=facts.epochs or NO_EPOCHS,
            start=bases[0],
            on_bytes=self._advance,
        )
        for base, next_base in zip_longest(bases, bases[1:]):
            upto = end if next_base is None else min(next_base, end)
            found = self._unless_trimmed(survey, base, upto, last=next_base is None)
            if found is None:
                survey.skip_to(upto)
                continue
            self._start = base if self._start is None else self._start
            self._add_segment(found)
            if next_base is not None or self._ends_in_order(findings):
                self._add_all(self._words.odd_end(found, index_expected=next_base is not None or self._closed))
        if survey.unknown_epochs is not None:
            self._add(self._words.unknown_epochs(*survey.unknown_epochs))

    def _unless_trimmed(self, survey: Survey, base: int, upto: int, *, last: bool) -> SegmentSurvey | None:
        """Return what the segment holds; None if its owner removed it meanwhile."""
        try:
            found = survey.segment(base, upto, last=last)
        except FileNotFoundError:
            return None
        return found if self._world.disk.exists(files.join(self._folder, files.segment_name(base))) else None

    def _add_segment(self, found: SegmentSurvey) -> None:
        counts = self._counts
        self._counts = CheckCounts(
            segments=counts.segments + 1,
            frames=counts.frames + found.frames,
            messages=counts.messages + found.messages,
            removed=counts.removed + found.removed,
            bytes=counts.bytes + found.size,
        )
        name = files.segment_name(found.base)
        self._add_all(self._words.unreadable(name, start, end) for start, end in found.unreadable)
        for stretch in found.stretches:
            self._stretches.append(stretch)
            self._lost_messages += stretch.next_offset - stretch.first_offset
            self._add(self._words.stretch(stretch))
        for header in found.gaps:
            self._lost_messages += header.count
            self._add(self._words.gap(name, header))
        self._add_all(self._words.oddity(name, oddity) for oddity in found.oddities)

    def _ends_in_order(self, findings: Findings | None) -> bool:
        return findings is not None and findings.lost_tail is None and not self._may_live

    def _tail(self, findings: Findings, end: int) -> Iterator[Finding]:
        """Yield findings about the end and what follows it, unless an owner is writing there."""
        words = self._words
        again = self._examine() if self._may_live else findings
        if again is None:
            return
        yield from (words.damage_behind(d) for d in findings.damage if d.first_offset >= end and d in again.damage)
        if findings.end > end and not self._owned:
            yield words.unpublished(end, findings.end)
        cut, lost = findings.cut, findings.lost_tail
        if lost is not None and again.lost_tail is not None and lost[0] == again.lost_tail[0]:
            self._lost_messages += lost[1] - lost[0]
            yield words.lost_tail(findings, *lost)
        elif cut is not None and cut == again.cut and not self._owned:
            yield words.torn(cut, findings)
        if not findings.bases and self._facts.identity is not None:
            written = max(findings.end, self._facts.readable_end if findings.cache_kept else 0)
            if written:
                yield words.no_segments(written)
        yield from self._state_against(findings)

    def _state_against(self, findings: Findings) -> Iterator[Finding]:
        """Compare the ends in the state file with where the frames end."""
        facts = self._facts
        if facts.identity is None:
            return
        end = findings.end if findings.lost_tail is None else findings.lost_tail[1]
        closed_end = facts.identity.clean_end
        readable_end = findings.epochs.cap(facts.identity.epoch, facts.readable_end)
        # If the cache was lost, the state may be ahead: it was stored, but what it describes was not synced.
        beyond = findings.cache_kept and readable_end > end and bool(findings.bases)
        if beyond or (closed_end is not None and (facts.readable_end, facts.synced_end) != (closed_end, closed_end)):
            yield self._words.wrong_state(facts.readable_end, facts.synced_end, end)

    def _report(self, findings: Findings | None, end: int) -> CheckReport:
        identity = self._facts.identity
        log_id = identity.log_id if identity is not None else findings.log_id if findings is not None else None
        return CheckReport(
            folder=self._folder,
            ok=not self._damaged,
            log_id=log_id,
            epoch=identity.epoch if identity is not None else findings.last_epoch if findings is not None else 0,
            start=end if self._start is None else self._start,
            end=end,
            counts=self._counts,
            lost_messages=self._lost_messages,
            findings=tuple(self._found),
            hidden_findings=self._hidden,
            quarantine=quarantined(self._world, self._folder),
        )

    def _add_all(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._add(finding)

    def _add(self, finding: Finding) -> None:
        self._damaged = self._damaged or finding.severity == "damage"
        if len(self._found) < _MOST_FINDINGS:
            self._found.append(finding)
        else:
            self._hidden += 1

    def _advance(self, length: int) -> None:
        self._done_bytes += length
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _entries(facts: _Facts) -> tuple[tuple[int, int], ...]:
    return () if facts.epochs is None else facts.epochs.entries


BACKUP_PREFIX: Final = "backup-"
TEMPORARY: Final = ".tmp"
_OURS: Final = frozenset({files.LOCK, files.STATE, files.EPOCHS, files.QUARANTINE})


def file_findings(world: World, folder: str, names: Sequence[str], words: FindingTexts) -> Iterator[Finding]:
    """Yield a note for each name that is not a live part of the log."""
    passing = set(leftovers(names))
    known = _OURS.union(
        map(files.segment_name, files.segment_bases(names)), map(files.index_name, files.index_bases(names))
    )
    for name in names:
        if name in passing:
            yield words.leftover(name, file_size(world, files.join(folder, name)))
        elif name.startswith(BACKUP_PREFIX):
            yield words.backup(name)
        elif name not in known:
            yield words.foreign(name)


def leftovers(names: Sequence[str]) -> list[str]:
    """Return the files that opening removes: half-written ones, and indexes without a segment."""
    segments = set(files.segment_bases(names))
    orphans = [files.index_name(base) for base in files.index_bases(names) if base not in segments]
    return [*orphans, *(name for name in names if name.endswith(TEMPORARY))]


def quarantined(world: World, folder: str) -> tuple[Quarantined, ...]:
    """Return what is kept in quarantine, with the contents of its notes."""
    quarantine = files.join(folder, files.QUARANTINE)
    if not world.disk.exists(quarantine):
        return ()
    names = world.disk.names(quarantine)
    return tuple(
        _quarantined(world, quarantine, name, names) for name in names if not name.endswith((".json", TEMPORARY))
    )


def file_size(world: World, path: str) -> int:
    """Return the length of a file; 0 if it is gone by now, or is a folder."""
    try:
        file = world.disk.open(path)
    except OSError:
        return 0
    with closing(file):
        return file.size()


def _quarantined(world: World, quarantine: str, name: str, names: Sequence[str]) -> Quarantined:
    file, size = f"{files.QUARANTINE}/{name}", file_size(world, files.join(quarantine, name))
    note_name = name.removesuffix(".bin") + ".json"
    content = files.read_file(world.disk, files.join(quarantine, note_name)) if note_name in names else None
    try:
        note = msgspec.json.decode(content or b"", type=files.QuarantineNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Quarantined(file=file, bytes=size, reason="its note is missing or damaged")
    return Quarantined(
        file=file,
        bytes=size,
        segment=note.segment,
        position=note.position,
        first_offset=note.first_offset,
        next_offset=note.next_offset,
        reason=note.reason,
        at_ns=note.at_ns,
    )
