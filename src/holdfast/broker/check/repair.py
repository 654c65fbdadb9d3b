"""Repair a data folder: first its logs, then inconsistent journals, damaged small files, and missing parts.

Nothing is thrown away: data that cannot be used any more is moved to a backup folder, and the plan states the cost of
each step before it is taken. The folder's lock is held throughout, so no process can open the folder meanwhile.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import Final

import msgspec

from holdfast.broker.check.folder import FolderReport, PartReport, check_folder, parts_of
from holdfast.broker.dedup.runs import damaged_note, damaged_runs, renew_note
from holdfast.broker.folder import contents
from holdfast.broker.folder.layout import DEAD_SUFFIX, GROUPS, SETTINGS, TOPIC, TOPICS, topic_folder, topics
from holdfast.broker.journal import Journal
from holdfast.broker.leases import KEY_FILE, key_is_whole
from holdfast.broker.locks import LocksJournal
from holdfast.broker.producers import NAME as PRODUCERS
from holdfast.broker.producers import Producers
from holdfast.broker.streams.offsets import Offsets
from holdfast.delivery.events import SESSION_BITS
from holdfast.delivery.image import check as check_group
from holdfast.env import World, real_world
from holdfast.errors import BadSettings, CorruptData, HoldfastError, InvalidRequest
from holdfast.settings import LogSettings
from holdfast.storage.checks.check import Progress
from holdfast.storage.checks.repair import RepairPlan, RepairResult, plan_repair, repair
from holdfast.storage.files import join, require_own, take_lock, translated

BACKUP_PREFIX: Final = "backup-"
_BEGUN_ANEW: Final = {
    "locks": LocksJournal.without_it,
    "commits": "the group starts over: reset it to where it should continue",
}
_COMES_AGAIN: Final = "which messages were handled is not known: all stored messages are delivered again"


class FolderStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a repair. `part` is the path of the affected part, relative to the data folder."""

    action: str
    part: str
    what: str
    cost: str


class FolderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair would do: to single logs, by name, and to everything else."""

    folder: str
    logs: dict[str, RepairPlan]
    steps: tuple[FolderStep, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps and not any(plan.steps for plan in self.logs.values())


class FolderRepair(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did, and a check of the folder afterwards."""

    logs: dict[str, RepairResult]
    steps: tuple[FolderStep, ...]
    after: FolderReport


@dataclass(frozen=True)
class _RepairWork:
    step: FolderStep
    carry_out: Callable[[str], None]  # called with the backup folder


def plan_folder_repair(
    folder: str | PathLike[str],
    world: World | None = None,
    *,
    part: str | None = None,
    progress: Progress | None = None,
) -> FolderPlan:
    """Plan a repair of the whole folder or of one part, without changing anything."""
    world, folder = world or real_world(), fspath(folder)
    steps = tuple(work.step for work in _Planner(world, folder, check_folder(folder, world)).works(part))
    plans = {
        each.name: plan_repair(each.folder, world, progress=progress)
        for each in parts_of(world, folder)
        if part is None or each.name == part.strip("/")
    }
    logs = {name: plan for name, plan in plans.items() if plan.steps or plan.left}
    return FolderPlan(folder=folder, logs=logs, steps=steps)


def repair_folder(
    folder: str | PathLike[str],
    world: World | None = None,
    *,
    part: str | None = None,
    backup: str | PathLike[str] | None = None,
    trust_folder: bool = False,
    progress: Progress | None = None,
) -> FolderRepair:
    """Repair the whole folder, or one part by the name that a check reports; raises Busy if a process owns the folder.

    Unusable data is moved to `backup`, by default a new folder inside the data folder.
    """
    world, folder = world or real_world(), fspath(folder)
    require_own(world, folder, trusted=trust_folder)
    kept = None if backup is None else fspath(backup).rstrip("/")
    with translated(folder):
        lock = take_lock(world, folder)
        try:
            plan = plan_folder_repair(folder, world, part=part, progress=progress)
            logs = {
                name: repair(
                    join(folder, name),
                    world,
                    backup=None if kept is None else f"{kept}/{name}",
                    progress=progress,
                    trust_folder=trust_folder,
                )
                for name, log in plan.logs.items()
                if log.steps
            }
            # Journals can only be replayed once their logs are repaired, so the rest is planned now.
            works = list(_Planner(world, folder, check_folder(folder, world)).works(part))
            for work in works:
                work.carry_out(kept or _new_backup(world, folder))
        finally:
            lock.release()
        return FolderRepair(logs=logs, steps=tuple(work.step for work in works), after=check_folder(folder, world))


def _new_backup(world: World, folder: str) -> str:
    return f"{folder}/{BACKUP_PREFIX}{world.clock.now_ns() // 1_000_000}"


def _is_unusable(wrong: str) -> bool:
    """Whether a journal with this problem cannot be opened."""
    return "no snapshot covers" in wrong or "does not fit" in wrong or "cannot be read" in wrong


def _keep_group(world: World, folder: str) -> None:
    journal, group = Journal.open(world, folder, LogSettings(), 0)
    with closing(journal):
        # As the next opening would: the event that began a session may be among those lost.
        group.session = max(group.session, group.fence >> SESSION_BITS)
        wrong = check_group(group)
        if wrong:
            raise CorruptData(wrong[0])
        journal.snapshot(group)


class _Planner:
    """Plans the repair of everything in a data folder except single logs."""

    def __init__(self, world: World, folder: str, report: FolderReport) -> None:
        self._world = world
        self._folder = folder
        self._report = report
        self._catalog = contents.Catalog(world, folder)

    def works(self, part: str | None) -> Iterator[_RepairWork]:
        found = [*self._small_files(), *self._journals(), *self._missing()]
        if part is None:
            yield from found
            return
        wanted = part.strip("/")
        chosen = [work for work in found if work.step.part == wanted]
        if not chosen and not any(each.part.name == wanted for each in self._report.parts):
            raise InvalidRequest(
                f"{wanted} is not a part of {self._folder} that needs repair; "
                f"`holdfast check {shlex.quote(self._folder)}` names them"
            )
        yield from chosen

    def _journals(self) -> Iterator[_RepairWork]:
        for report in self._report.parts:
            if report.wrong and report.part.kind in ("journal", "commits", "locks"):
                yield self._journal(report)

    def _journal(self, report: PartReport) -> _RepairWork:
        name, path, kind = report.part.name, report.part.folder, report.part.kind
        unusable = next((what for what in report.wrong if _is_unusable(what)), None)
        if unusable is None:
            what = "write a snapshot of what can still be read, so that the lost events are no longer needed"
            return self._work("snapshot", name, what, "; ".join(report.wrong), partial(self._keep_state, report))
        cost = _BEGUN_ANEW.get(kind, _COMES_AGAIN)
        what = f"keep the journal in the backup and begin a new one ({unusable})"
        return self._work("begin_anew", name, what, cost, partial(self._set_aside, path, name))

    def _keep_state(self, report: PartReport, backup: str) -> None:
        """Write a snapshot of the state that the events add up to; if they are inconsistent, start over."""
        world, folder = self._world, report.part.folder
        try:
            if report.part.kind == "commits":
                with closing(Offsets.open(world, folder)) as offsets:
                    offsets.snapshot()
            elif report.part.kind == "locks":
                locks = LocksJournal(world, folder, LogSettings())
                table = locks.load()
                with closing(locks):
                    locks.snapshot(table)
            else:
                _keep_group(world, folder)
        except CorruptData:
            self._set_aside(folder, report.part.name, backup)

    def _small_files(self) -> Iterator[_RepairWork]:
        try:
            Producers.open(self._world, self._folder)
        except CorruptData as error:
            yield self._aside(PRODUCERS, error, contents.root_cost_of(PRODUCERS))
        wrong = contents.root_list_error(self._world, self._folder)
        if wrong and any(map(self._catalog.is_listed, self._catalog.names())):
            what, cost = f"list what is there ({wrong})", "parts that are already gone go unnoticed"
            yield self._work(
                "renew", contents.CONTENTS, what, cost, lambda _: contents.renew_root(self._world, self._folder)
            )
        if not key_is_whole(self._world, self._folder):
            yield self._aside(KEY_FILE, "it is damaged", contents.root_cost_of(KEY_FILE))
        for topic in topics(self._world, self._folder):
            with suppress(HoldfastError):
                yield from self._of_topic(topic)

    def _of_topic(self, topic: str) -> Iterator[_RepairWork]:
        folder, place = topic_folder(self._folder, topic), f"{TOPICS}/{topic}"
        facts = self._catalog.facts(topic)
        try:
            noted = self._catalog.noted(topic) is not None
            listed = contents.load_contents(
                self._world, self._folder, topic
            ) is not None or not self._catalog.is_listed(topic)
        except CorruptData:
            noted = listed = False
        if not noted or not listed:

            def renew(_: str) -> None:
                contents.renew_contents(self._world, self._folder, topic, facts)
                self._catalog.bring_up_to_date(topic, facts)

            name = TOPIC if not noted else contents.CONTENTS
            yield self._work("renew", f"{place}/{name}", "rewrite it from the other file", "nothing", renew)
        try:
            contents.kept_settings(self._world, join(folder, SETTINGS))
        except (CorruptData, BadSettings) as error:
            yield self._aside(f"{place}/{SETTINGS}", error, "the topic has the default settings until you alter it")
        notes = contents.GroupNotes(self._world, folder)
        for group in notes.names(facts.partitions):
            try:
                notes.read(group)
            except CorruptData as error:
                cost = "the group has the settings of its topic until you set others, and is no longer paused if it was"
                yield self._aside(f"{place}/{GROUPS}/{group}.json", error, cost)
        # The topic's dedup ids, and those of partitions from before topics kept them.
        for part in (contents.DEDUP, *(f"{number}/{contents.DEDUP}" for number in range(facts.partitions))):
            path = join(folder, part)
            wrong, note = damaged_runs(self._world, path), damaged_note(self._world, path)
            if wrong:
                yield self._aside(f"{place}/{part}", wrong[0], contents.cost_of(part))
            elif note:
                yield self._work(
                    "renew", f"{place}/{part}", f"rewrite the note ({note})", "nothing", self._renew_note(path)
                )

    def _renew_note(self, path: str) -> Callable[[str], None]:
        return lambda _: renew_note(self._world, path)

    def _missing(self) -> Iterator[_RepairWork]:
        what = "remove it from the list of required parts, and continue without it"
        for part in contents.missing_root_parts(self._world, self._folder):
            yield self._work("give_up", part, what, contents.root_cost_of(part), partial(self._strike_off_root, part))
        for topic in topics(self._world, self._folder):
            with suppress(CorruptData):
                for part in contents.missing_parts(self._world, self._folder, topic):
                    name = contents.part_path(self._folder, topic, part).removeprefix(f"{self._folder}/")
                    yield self._work(
                        "give_up", name, what, contents.cost_of(part), partial(self._strike_off, topic, part)
                    )

    def _strike_off_root(self, part: str, _: str) -> None:
        contents.strike_off_root(self._world, self._folder, part)

    def _strike_off(self, topic: str, part: str, _: str) -> None:
        contents.strike_off(self._world, self._folder, topic, frozenset([part]))

    def _aside(self, name: str, error: object, cost: str) -> _RepairWork:
        what = f"keep it in the backup and continue without it ({error})"
        path = join(self._folder, name)
        return self._work("set_aside", name, what, cost, partial(self._set_aside, path, name))

    def _work(self, action: str, part: str, what: str, cost: str, carry_out: Callable[[str], None]) -> _RepairWork:
        return _RepairWork(FolderStep(action=action, part=part, what=what, cost=cost), carry_out)

    def _set_aside(self, path: str, name: str, backup: str) -> None:
        disk = self._world.disk
        above, _, last = f"{backup}/{name}".rpartition("/")
        disk.make_folder(above)
        disk.rename(path, f"{above}/{last}")
        disk.sync_folder(above)
        disk.sync_folder(path.rpartition("/")[0])
        contents.strike_off_root(self._world, self._folder, name)
        for topic in topics(self._world, self._folder):
            part = name.removeprefix(f"{TOPICS}/{topic}")
            if part != name and part.startswith(("/", f"{DEAD_SUFFIX}/")):
                contents.strike_off(self._world, self._folder, topic, frozenset([part.lstrip("/")]))
