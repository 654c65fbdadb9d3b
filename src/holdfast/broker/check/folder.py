"""Look at a whole data folder: each of its logs, what the journals add up to, and the small files beside them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from os import PathLike, fspath

import msgspec

from holdfast.broker.check.parts import (
    GroupState,
    LocksState,
    Part,
    damaged_notes,
    damaged_runs,
    is_of_journal,
    locks_state,
    may_be_forced,
    missing_folders,
    missing_start,
    parts_of,
    state_of,
    unread_start,
)
from holdfast.broker.folder.catalog import Catalog
from holdfast.broker.folder.layout import TOPICS
from holdfast.broker.inspect.standing import CommitState, commits_of
from holdfast.broker.journal import damaged_pasts
from holdfast.env import World, real_world
from holdfast.errors import HoldfastError
from holdfast.storage.checks.check import Progress, check
from holdfast.storage.checks.finding import CheckReport


class PartReport(msgspec.Struct, frozen=True):
    """What was found in one log of a data folder."""

    part: Part
    log: CheckReport
    state: GroupState | CommitState | LocksState | None
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.log.ok and not self.wrong


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a data folder. `missing` and `wrong` are damage, in words; `notes` cost nothing."""

    folder: str
    owned: bool
    parts: tuple[PartReport, ...]
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged: a torn tail is not, opening cuts it."""
        return not self.missing and not self.wrong and all(part.ok for part in self.parts)


def check_folder(
    folder: str | PathLike[str],
    world: World | None = None,
    *,
    owned: bool = False,
    progress: Progress | None = None,
) -> FolderReport:
    """Look at every byte of a data folder; takes no lock and changes nothing. `owned`: a process owns it now."""
    world, folder = world or real_world(), fspath(folder)
    found = _checked_all(world, folder, progress, owned=owned)
    ends = {
        report.part.name: report.state.cursor if isinstance(report.state, GroupState) else report.log.end
        for report in found
    }
    missing = missing_folders(world, folder, ends, owned=owned)
    noted = list(damaged_notes(world, folder))
    journals = [report.part.folder for report in found if report.part.kind == "journal"]
    pasts = [what for journal in journals for what in damaged_pasts(world, journal)]
    return FolderReport(
        folder=folder,
        owned=owned,
        parts=tuple(found),
        missing=tuple(missing),
        wrong=tuple(what for severity, what in noted if severity == "damage"),
        notes=(*(what for severity, what in noted if severity == "note"), *pasts),
    )


def _checked_all(world: World, folder: str, progress: Progress | None, *, owned: bool) -> list[PartReport]:
    """Each log, and the journals held against the logs of their messages."""
    found: dict[str, PartReport] = {}
    for part in parts_of(world, folder):
        log = found.get(f"{part.name.partition('/groups/')[0]}/log") if part.kind == "journal" else None
        report = _checked(world, part, progress, owned=owned, log_start=log.log.start if log is not None else 0)
        found[part.name] = report
        if part.kind == "commits":
            found[part.name] = _against_logs(world, folder, report, found)
        if (
            not isinstance(report.state, GroupState)
            or log is None
            or any(each.code == "unpublished" for each in report.log.findings)
        ):
            continue  # of events that only the next opening will see, some may have settled what seems to be missing
        _, topic, _, _, group = part.name.split("/")
        what = missing_start(world, folder, topic, group, log.log, report.state)
        if what is not None:
            found[log.part.name] = msgspec.structs.replace(log, wrong=(*log.wrong, what))
    return list(found.values())


def _against_logs(world: World, folder: str, report: PartReport, found: Mapping[str, PartReport]) -> PartReport:
    """A group in stream mode held against the logs that it reads: they were looked at before."""
    wrong = list(report.wrong)
    assert isinstance(report.state, CommitState)
    catalog = Catalog(world, folder)
    for entry in report.state.committed:
        log = found.get(f"{TOPICS}/{entry.topic}/{entry.partition}/log")
        if log is None or may_be_forced(world, folder, entry.topic):
            continue
        with suppress(HoldfastError):  # deleted meanwhile, or damaged, which is said elsewhere
            if catalog.facts(entry.topic).id == entry.topic_id:
                what = unread_start(report.part.name.rpartition("/")[2], entry, log.log.start)
                wrong += [] if what is None else [what]
    return msgspec.structs.replace(report, wrong=tuple(wrong))


def _checked(world: World, part: Part, progress: Progress | None, *, owned: bool, log_start: int) -> PartReport:
    report = check(part.folder, world, owned=True if owned else None, progress=progress)
    if part.kind in ("journal", "commits", "locks"):
        findings = tuple(
            finding
            for finding in report.findings
            if not (finding.code == "foreign_file" and is_of_journal(finding.file))
        )
        report = msgspec.structs.replace(report, findings=findings)
        # What opening would keep counts: after a restart the state file may tell of an end long past.
        state = _state(world, part, log_start, None if owned else report.end)
        return PartReport(part, report, state, state.wrong)
    # An owner drops these files while we look: only without one is a file that is not there a missing one.
    wrong = tuple(damaged_runs(world, part)) if part.kind == "delayed" and not owned else ()
    return PartReport(part, report, None, wrong)


def _state(world: World, part: Part, log_start: int, end: int | None) -> GroupState | CommitState | LocksState:
    """What the events of a journal add up to, up to `end`."""
    if part.kind == "locks":
        return locks_state(world, part.folder.rpartition("/")[0], end)
    return commits_of(world, part.folder, end) if part.kind == "commits" else state_of(world, part, log_start, end)
