"""Check a whole data folder: every log, the state that each journal adds up to, and the small files.

Nothing is locked or changed, so a folder can be checked while a process owns it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.broker.dedup.runs import damaged_dedup
from holdfast.broker.delayed.runs import load_manifest, open_run
from holdfast.broker.folder import contents, layout
from holdfast.broker.inspect.status import CommitState, commits_of, folders_in, holds_log, replayed_group
from holdfast.broker.journal import BEFORE, SNAPSHOT
from holdfast.broker.leases import KEY_FILE, key_is_whole
from holdfast.broker.locks import replayed_locks
from holdfast.broker.past import damaged_pasts, is_past
from holdfast.broker.producers import Producers, load_snapshot
from holdfast.broker.samples import check_samples
from holdfast.broker.scratch import SCRATCH
from holdfast.broker.streams.offsets import CommittedOffset
from holdfast.broker.streams.queries import list_queries
from holdfast.delivery.image import check as check_group
from holdfast.env import World, real_world
from holdfast.errors import BadSettings, CorruptData, HoldfastError, UnknownFormat, UnknownTopic
from holdfast.model import count_of
from holdfast.storage.checks.check import Progress, check
from holdfast.storage.checks.finding import CheckReport
from holdfast.storage.files import join, read_file


class PartReport(msgspec.Struct, frozen=True):
    """The result of checking one log of a data folder."""

    part: FolderPart
    log: CheckReport
    state: GroupState | CommitState | LocksState | None
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.log.ok and not self.wrong


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a data folder. `missing` and `wrong` describe damage; `notes` cost no data."""

    folder: str
    owned: bool
    parts: tuple[PartReport, ...]
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged. A torn tail is not damage: opening the folder cuts it off."""
        return not self.missing and not self.wrong and all(part.ok for part in self.parts)


def check_folder(
    folder: str | PathLike[str], world: World | None = None, *, owned: bool = False, progress: Progress | None = None
) -> FolderReport:
    """Read every byte of a data folder, without a lock or a change. `owned`: a process owns the folder now."""
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
    """Check each log, and compare the journals with the logs that they refer to."""
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
            continue  # unpublished events, seen only by the next opening, may have settled what seems to be missing
        _, topic, _, _, group = part.name.split("/")
        what = missing_start(world, folder, topic, group, log.log, report.state)
        if what is not None:
            found[log.part.name] = msgspec.structs.replace(log, wrong=(*log.wrong, what))
    return list(found.values())


def _against_logs(world: World, folder: str, report: PartReport, found: Mapping[str, PartReport]) -> PartReport:
    """Compare a group in stream mode with the logs that it reads, which were checked before it."""
    wrong = list(report.wrong)
    assert isinstance(report.state, CommitState)
    catalog = contents.Catalog(world, folder)
    for entry in report.state.committed:
        log = found.get(f"{layout.TOPICS}/{entry.topic}/{entry.partition}/log")
        if log is None or may_be_forced(world, folder, entry.topic):
            continue
        with suppress(HoldfastError):  # deleted in the meantime, or damaged, which is reported elsewhere
            if catalog.facts(entry.topic).id == entry.topic_id:
                what = unread_start(report.part.name.rpartition("/")[2], entry, log.log.start)
                wrong += [] if what is None else [what]
    return msgspec.structs.replace(report, wrong=tuple(wrong))


def _checked(world: World, part: FolderPart, progress: Progress | None, *, owned: bool, log_start: int) -> PartReport:
    report = check(part.folder, world, owned=True if owned else None, progress=progress)
    if part.kind in ("journal", "commits", "locks"):
        findings = tuple(
            finding
            for finding in report.findings
            if not (finding.code == "foreign_file" and is_of_journal(finding.file))
        )
        report = msgspec.structs.replace(report, findings=findings)
        # Without an owner, only what opening would keep counts: the end in the state file may predate the last restart.
        state = _state(world, part, log_start, None if owned else report.end)
        return PartReport(part, report, state, state.wrong)
    # An owner removes these files while we read, so a file is only known to be missing if nobody owns the folder.
    wrong = tuple(damaged_runs(world, part)) if part.kind == "delayed" and not owned else ()
    return PartReport(part, report, None, wrong)


def _state(world: World, part: FolderPart, log_start: int, end: int | None) -> GroupState | CommitState | LocksState:
    """Replay the events of a journal up to `end`."""
    if part.kind == "locks":
        return locks_state(world, part.folder.rpartition("/")[0], end)
    return commits_of(world, part.folder, end) if part.kind == "commits" else state_of(world, part, log_start, end)


# The logs of a data folder, and the state that its journals add up to.


_MOST_WRONG: Final = 20


def is_of_journal(name: str) -> bool:
    """Whether a journal's folder has a file of this name besides its log."""
    return name in (SNAPSHOT, BEFORE, SCRATCH) or is_past(name)


class FolderPart(msgspec.Struct, frozen=True):
    """One log of a data folder; `name` is its path relative to that folder."""

    kind: Literal["messages", "delayed", "journal", "traces", "commits", "locks"]
    name: str
    folder: str


class LocksState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the journal of locks adds up to, and what is wrong with it."""

    held: int = 0
    documents: int = 0
    schedules: int = 0
    transactions: int = 0
    wrong: tuple[str, ...] = ()


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a group's journal adds up to, and what is wrong with it.

    `missing` counts messages that are not settled and no longer in the log.
    """

    floor: int = 0
    cursor: int = 0
    missing: int = 0
    leased: int = 0
    waiting: int = 0
    dying: int = 0
    wrong: tuple[str, ...] = ()


def parts_of(world: World, folder: str) -> list[FolderPart]:
    """Return every log in a data folder, messages before what is derived from them, without what is being deleted."""
    found = []
    gone = {name + layout.DEAD_SUFFIX for name in contents.Catalog(world, folder).deleted()}
    for topic in folders_in(world, join(folder, layout.TOPICS)):
        if topic in gone:
            continue
        kind: Literal["messages", "traces"] = "traces" if topic.startswith(layout.INTERNAL_PREFIX) else "messages"
        going = contents.GroupNotes(world, join(folder, f"{layout.TOPICS}/{topic}")).deleted()
        numbers = [name for name in folders_in(world, join(folder, f"{layout.TOPICS}/{topic}")) if name.isdigit()]
        for number in sorted(numbers, key=int):
            place = f"{layout.TOPICS}/{topic}/{number}"
            found.append(FolderPart(kind, f"{place}/log", join(folder, f"{place}/log")))
            found.append(FolderPart("delayed", f"{place}/delayed/intake", join(folder, f"{place}/delayed/intake")))
            for group in folders_in(world, join(folder, f"{place}/groups")):
                name = f"{place}/groups/{group}"
                if group not in going:
                    found.append(FolderPart("journal", name, join(folder, name)))
    for group in folders_in(world, join(folder, layout.GROUPS)):
        found.append(FolderPart("commits", f"{layout.GROUPS}/{group}", join(folder, f"{layout.GROUPS}/{group}")))
    found.append(FolderPart("locks", layout.LOCKS, join(folder, layout.LOCKS)))
    return [part for part in found if holds_log(world, part.folder)]


def state_of(world: World, part: FolderPart, log_start: int = 0, end: int | None = None) -> GroupState:
    """Replay a journal as opening would, and check the resulting state.

    Read `log_start` before this call: an owner raises the floor before it trims messages.
    """
    try:
        return _replayed(world, part, log_start, end)
    except (OSError, HoldfastError) as error:
        return GroupState(wrong=(str(error),))


def _replayed(world: World, part: FolderPart, log_start: int, end: int | None) -> GroupState:
    group, begun, wrong = replayed_group(world, part.folder, end=end)
    if not wrong:
        wrong = check_group(group)
    # Without a snapshot the group's start is unknown: it may have begun at `log_start`, with a new journal.
    known = begun and not wrong and group.floor < log_start
    return GroupState(
        floor=group.floor,
        cursor=group.cursor,
        missing=log_start - group.floor - group.done.range_cardinality(group.floor, log_start) if known else 0,
        leased=len(group.leases),
        waiting=len(group.waiting),
        dying=len(group.burials),
        wrong=tuple(wrong[:_MOST_WRONG]),
    )


def locks_state(world: World, folder: str, end: int | None = None) -> LocksState:
    """Replay the journal of locks and documents, and check the resulting state."""
    try:
        found = replayed_locks(world, folder, end)
    except (OSError, HoldfastError) as error:
        return LocksState(wrong=(str(error),))
    return LocksState(
        held=len(found.table.held),
        documents=len(found.documents),
        schedules=len(found.schedules),
        transactions=len(found.transactions),
        wrong=tuple(found.wrong[:_MOST_WRONG]),
    )


def damaged_runs(world: World, part: FolderPart) -> Iterator[str]:
    """Yield what is wrong with the manifest and the runs of delayed messages; the intake is checked as a log."""
    folder = part.folder.rpartition("/")[0]
    try:
        manifest = load_manifest(world.disk, folder)
    except UnknownFormat as error:
        yield str(error)
        return
    except CorruptData as error:
        yield f"{error}; opening the folder rebuilds it, but cancellations may be lost"
        return
    for entry in manifest.runs if manifest is not None else ():
        try:
            run = open_run(world.disk, folder, entry.name, entry.run_id or None)
            for block in range(len(run.first_dues_ms)):
                run.records(block)
        except FileNotFoundError:
            yield f"{entry.name} is missing: {entry.messages} delayed messages are lost"
        except (CorruptData, OSError) as error:
            yield f"{entry.name}: {error}"


# The small files of a data folder that are not logs.


Note: TypeAlias = tuple[Literal["damage", "note"], str]


def damaged_notes(world: World, folder: str) -> Iterator[Note]:
    """Yield what is damaged in the catalog, the settings, and the files of groups, producers and queries."""
    try:
        Producers.open(world, folder)
    except CorruptData as error:
        yield "damage", str(error)
    catalog = contents.Catalog(world, folder)
    wrong = contents.root_list_error(world, folder)
    if wrong and any(map(catalog.is_listed, catalog.names())):
        yield "damage", f"{wrong}; opening the folder rebuilds it, but missing parts then go unnoticed"
    elif wrong and not wrong.endswith("is missing"):
        yield "damage", wrong
    if not key_is_whole(world, folder):
        yield (
            "damage",
            f"{join(folder, KEY_FILE)} is damaged: opening makes another one; {contents.root_cost_of(KEY_FILE)}",
        )
    for topic in layout.topics(world, folder):
        try:
            count = catalog.facts(topic).partitions
            yield from _of_topic(world, folder, topic, count)
            yield from _facts(world, folder, topic, catalog)
            places = [layout.partition_folder(folder, topic, number) for number in range(count)]
            for place in places:
                yield from _sequences(world, place)
            for place in (layout.topic_folder(folder, topic), *places):
                yield from (("damage", what) for what in damaged_dedup(world, join(place, contents.DEDUP)))
        except CorruptData as error:
            yield "damage", str(error)
        except UnknownTopic:
            continue  # deleted in the meantime
    yield from _queries(world, folder)
    for note in (check_samples(world, folder), layout.short_reserve(world, folder)):
        if note is not None:
            yield "note", note


def _queries(world: World, folder: str) -> Iterator[Note]:
    """Report unreadable query files. They hold no data: a running query rewrites its file and removes it at the end."""
    for query in list_queries(world, folder):
        if query.wrong:
            place = f"{layout.QUERIES}/{query.file}"
            yield "note", f"{place} cannot be read: {query.wrong}; while it is there, no old message is removed"


def _facts(world: World, folder: str, topic: str, catalog: contents.Catalog) -> Iterator[Note]:
    """Check `topic.json` and the list of parts. Each can be rebuilt from the other, so a missing one is reported."""
    place = layout.topic_folder(folder, topic)
    again = "opening the topic rebuilds it, and nothing is lost"
    listed = None
    try:
        listed = contents.load_contents(world, folder, topic)
        if listed is None and catalog.is_listed(topic):
            yield (
                "damage",
                f"{join(place, contents.CONTENTS)} is missing: {again}, but missing parts then go unnoticed",
            )
    except CorruptData as error:
        yield "damage", f"{error}; {again}, but missing parts then go unnoticed"
    try:
        if catalog.noted(topic) is None and listed is not None:
            yield "damage", f"{join(place, layout.TOPIC)} is missing: {again}"
    except CorruptData as error:
        if listed is None:
            raise
        yield "damage", f"{error}: {again}"


def _of_topic(world: World, folder: str, topic: str, count: int) -> Iterator[Note]:
    place = layout.topic_folder(folder, topic)
    try:
        contents.kept_settings(world, join(place, layout.SETTINGS))
    except (CorruptData, BadSettings) as error:
        yield "damage", str(error)
    notes = contents.GroupNotes(world, place)
    for group in notes.names(count):
        try:
            notes.read(group)
        except CorruptData as error:
            yield "damage", str(error)


def _sequences(world: World, place: str) -> Iterator[Note]:
    """Check the snapshot of producer sequences. It is a cache: if it is damaged, opening reads the log instead."""
    try:
        load_snapshot(world.disk, place, 0)
    except UnknownFormat as error:
        yield "damage", str(error)
    except CorruptData as error:
        yield "note", f"{error}; opening reads the log instead, and loses nothing but time"


# Missing data: messages at the start of a log, and whole folders.


_ADVICE: Final = "Restore the folder from a copy before you open the queue: opening continues without them"
_RESTORE: Final = "Restore it from a copy; without it the topic opens only after a repair"

_RESTORE_PART: Final = "Restore it from a copy; without it this part is used only after a repair"
_ROOT_ADVICE: Final = {
    KEY_FILE: "Restore it from a copy; opening makes another one",
    contents.TRACES_LOG: "Restore it from a copy",
}

# While an owner is creating a topic, parts of it are missing for a moment.
_TRIES: Final = 5
_LOOK_EVERY_S: Final = 0.1


def missing_start(world: World, folder: str, topic: str, group: str, log: CheckReport, state: GroupState) -> str | None:
    """Describe the messages missing before the start of the log; None if all of them were settled."""
    if not state.missing or may_be_forced(world, folder, topic):
        return None
    lost, last = count_of(state.missing, "message"), log.start - 1
    span = f"{state.floor}" if last == state.floor else f"{state.floor} to {last}"
    some = "" if state.missing == log.start - state.floor else "of "
    are = "is" if state.missing == 1 else "are"
    of_group = "" if group == layout.DEFAULT_GROUP else f" {group}"
    return (
        f"{lost} ({some}{span}) {are} missing: the log begins at {log.start}, "
        f"the group{of_group} had settled only up to {state.floor}. {_ADVICE}"
    )


def may_be_forced(world: World, folder: str, topic: str) -> bool:
    """Whether retention may remove messages of this topic that no group has handled."""
    if topic.endswith(layout.DEAD_SUFFIX):
        return True
    content = read_file(world.disk, join(folder, f"{layout.TOPICS}/{topic}/{layout.SETTINGS}"))
    try:
        kept = msgspec.json.decode(content or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(kept, dict) and kept.get("retention_ignores_pins") is True


def missing_folders(world: World, folder: str, ends: Mapping[str, int], *, owned: bool) -> list[str]:
    """Describe the folders that should exist and do not.

    `ends` maps the name of each log to its end, and the name of each journal to its group's cursor.
    """
    never = threading.Event()
    for _ in range(_TRIES - 1 if owned else 0):
        if not _missing_folders(world, folder, ends):
            return []
        world.clock.wait(never, _LOOK_EVERY_S)
    return _missing_folders(world, folder, ends)


def _missing_folders(world: World, folder: str, ends: Mapping[str, int]) -> list[str]:
    found = [
        f"{part} is missing: {contents.root_cost_of(part)}. {_ROOT_ADVICE.get(part, _RESTORE_PART)}"
        for part in contents.missing_root_parts(world, folder)
    ]
    for topic in layout.topics(world, folder):
        listed = _missing_listed(world, folder, topic, ends)
        if listed is not None:
            found += listed
            continue
        # A topic from before parts were listed: infer what is missing from what the other partitions have.
        count, letters = _partitions(world, folder, topic), f"{layout.TOPICS}/{topic}{layout.DEAD_SUFFIX}"
        groups = _groups(world, folder, topic, count)
        for number in range(count):
            place = f"{layout.TOPICS}/{topic}/{number}"
            # A partition that was added just before a crash is created at the next opening.
            if not number or _is_folder(world, join(folder, place)) or _is_folder(world, join(folder, letters)):
                found += _missing_of(world, folder, place, groups, ends)
        for number in map(int, filter(str.isdigit, folders_in(world, join(folder, letters)))):
            place = f"{letters}/{number}"
            # Created with the first dead letter, the log before its journal: if neither exists, creation was cut short.
            if any(
                holds_log(world, join(folder, f"{place}/{part}"))
                for part in ("log", f"{layout.GROUPS}/{layout.DEFAULT_GROUP}")
            ):
                found += _missing_of(world, folder, place, [layout.DEFAULT_GROUP], ends)
    return found


def _missing_listed(world: World, folder: str, topic: str, ends: Mapping[str, int]) -> list[str] | None:
    """Describe the parts that a topic's list names and that do not exist; None without a usable list."""
    try:
        if contents.load_contents(world, folder, topic) is None:
            return None
        parts = contents.missing_parts(world, folder, topic)
    except CorruptData:
        return None
    count, found = _partitions(world, folder, topic), []
    for part in parts:
        name = contents.part_path(folder, topic, part).removeprefix(f"{folder}/")
        come = _come_to(name, ends) if part.endswith("/log") else 0
        far = f"; the group had reached {come}" if come else ""
        if contents.is_vital(part, count):
            advice = _RESTORE
        else:
            stops = contents.is_messages(part) or contents.is_delayed(part)
            advice = _RESTORE_PART if stops else "Restore it from a copy to prevent that"
        found.append(f"{name} {_lack(world, folder, name)}{far}: {contents.cost_of(part)}. {advice}")
    return found


def _come_to(log: str, ends: Mapping[str, int]) -> int:
    """Return the furthest cursor of any group in a log that is missing."""
    groups = f"{log.removesuffix('/log')}/{layout.GROUPS}/"
    return max((end for name, end in ends.items() if name.startswith(groups)), default=0)


def _partitions(world: World, folder: str, topic: str) -> int:
    try:
        return contents.Catalog(world, folder).facts(topic).partitions
    except (CorruptData, UnknownTopic):  # damaged, which is reported elsewhere, or deleted in the meantime
        numbers = [int(name) for name in folders_in(world, join(folder, f"{layout.TOPICS}/{topic}")) if name.isdigit()]
        return max(numbers, default=-1) + 1


def _groups(world: World, folder: str, topic: str, count: int) -> list[str]:
    """Return the topic's groups in queue mode, as far as traces of them remain; a queue always has one."""
    notes, found = contents.GroupNotes(world, layout.topic_folder(folder, topic)), []
    for name in notes.names(count):
        with suppress(CorruptData):
            if notes.read(name).deleted:
                continue
        found.append(name)
    simple = topic == layout.topic_for(folder) or _is_folder(
        world, layout.topic_folder(folder, topic + layout.DEAD_SUFFIX)
    )
    streams = folders_in(world, join(folder, layout.GROUPS))
    return found or ([layout.DEFAULT_GROUP] if simple and not streams else [])


def _missing_of(world: World, folder: str, place: str, groups: Sequence[str], ends: Mapping[str, int]) -> list[str]:
    log = f"{place}/log"
    found = []
    if not holds_log(world, join(folder, log)):
        come = max((ends.get(f"{place}/groups/{group}", 0) for group in groups), default=0)
        far = f"; the group had reached {come}" if come else ""
        found.append(f"{log} {_lack(world, folder, log)}{far}: its messages are lost. {_ADVICE}")
    for name in groups:
        group = f"{place}/groups/{name}"
        # An empty log without a group: creating the queue was cut short, and nothing is lost.
        if not holds_log(world, join(folder, group)) and (found or ends.get(log)):
            again = "which messages were handled is not known, and all stored messages are delivered again"
            found.append(f"{group} {_lack(world, folder, group)}: {again}. Restore it from a copy to prevent that")
    return found


def unread_start(name: str, entry: CommittedOffset, start: int) -> str | None:
    """Describe the messages that a group in stream mode has not read and the log no longer has."""
    if entry.offset >= start:
        return None
    lost = start - entry.offset
    are = "is" if lost == 1 else "are"
    return (
        f"{count_of(lost, 'message')} of partition {entry.partition} of {entry.topic} ({entry.offset} to {start - 1}) "
        f"{are} missing: the log begins at {start}, the group {name} had committed only up to {entry.offset}. {_ADVICE}"
    )


def _lack(world: World, folder: str, name: str) -> str:
    return "holds no log" if _is_folder(world, join(folder, name)) else "is missing"


def _is_folder(world: World, path: str) -> bool:
    try:
        world.disk.names(path)
    except OSError:
        return False
    return True
