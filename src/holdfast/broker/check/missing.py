"""What a queue should have and has not: messages at the start of its log, whole folders."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.broker.catalog import Catalog
from holdfast.broker.check.parts import GroupState
from holdfast.broker.contents import (
    TRACES_LOG,
    cost_of,
    is_vital,
    load_contents,
    missing_parts,
    missing_root_parts,
    part_path,
    root_cost_of,
)
from holdfast.broker.folder_key import KEY_FILE
from holdfast.broker.groups import GroupNotes
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    GROUPS,
    SETTINGS,
    TOPICS,
    topic_folder,
    topic_for,
    topics,
)
from holdfast.broker.offsets import Committed
from holdfast.broker.replay import folders_in, holds_log
from holdfast.env import World
from holdfast.errors import CorruptData, UnknownTopic
from holdfast.storage.files import join, read_file
from holdfast.storage.finding import CheckReport, count_of

_ADVICE: Final = "Restore the folder from a copy before you open the queue: opening goes on without them"
_RESTORE: Final = "Restore it from a copy; without it the topic opens only after a repair"

_RESTORE_PART: Final = "Restore it from a copy; without it this part is used only after a repair"
_ROOT_ADVICE: Final = {
    KEY_FILE: "Restore it from a copy; opening makes another one",
    TRACES_LOG: "Restore it from a copy",
}

# An owner that makes a topic just now is through with it soon.
_TRIES: Final = 5
_LOOK_EVERY_S: Final = 0.1


def missing_start(world: World, folder: str, topic: str, group: str, log: CheckReport, state: GroupState) -> str | None:
    """What the log lacks before its first message, in words; None where all that is gone was settled."""
    if not state.missing or may_be_forced(world, folder, topic):
        return None
    lost, last = count_of(state.missing, "message"), log.start - 1
    span = f"{state.floor}" if last == state.floor else f"{state.floor} to {last}"
    some = "" if state.missing == log.start - state.floor else "of "
    are = "is" if state.missing == 1 else "are"
    of_group = "" if group == DEFAULT_GROUP else f" {group}"
    return (
        f"{lost} ({some}{span}) {are} missing: the log begins at {log.start}, "
        f"the group{of_group} had settled only up to {state.floor}. {_ADVICE}"
    )


def may_be_forced(world: World, folder: str, topic: str) -> bool:
    """Whether retention takes messages of this topic that nobody has handled."""
    if topic.endswith(DEAD_SUFFIX):
        return True
    content = read_file(world.disk, join(folder, f"{TOPICS}/{topic}/{SETTINGS}"))
    try:
        kept = msgspec.json.decode(content or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(kept, dict) and kept.get("retention_ignores_pins") is True


def missing_folders(world: World, folder: str, ends: Mapping[str, int], *, owned: bool) -> list[str]:
    """The folders that every topic has and one here has not, in words.

    `ends` tells of each log by its name how far it goes, and of each journal how far its group has come.
    """
    never = threading.Event()
    for _ in range(_TRIES - 1 if owned else 0):
        if not _missing_folders(world, folder, ends):
            return []
        world.clock.wait(never, _LOOK_EVERY_S)
    return _missing_folders(world, folder, ends)


def _missing_folders(world: World, folder: str, ends: Mapping[str, int]) -> list[str]:
    found = [
        f"{part} is missing: {root_cost_of(part)}. {_ROOT_ADVICE.get(part, _RESTORE_PART)}"
        for part in missing_root_parts(world, folder)
    ]
    for topic in topics(world, folder):
        listed = _missing_listed(world, folder, topic, ends)
        if listed is not None:
            found += listed
            continue
        # A topic from before there were lists: as far as it can be told from what the others have.
        count, letters = _partitions(world, folder, topic), f"{TOPICS}/{topic}{DEAD_SUFFIX}"
        groups = _groups(world, folder, topic, count)
        for number in range(count):
            place = f"{TOPICS}/{topic}/{number}"
            # One that was added just before a crash is made at the next opening.
            if not number or _is_folder(world, join(folder, place)) or _is_folder(world, join(folder, letters)):
                found += _missing_of(world, folder, place, groups, ends)
        for number in map(int, filter(str.isdigit, folders_in(world, join(folder, letters)))):
            place = f"{letters}/{number}"
            # They are made with the first letter, the log before its journal: with neither that was cut short.
            if any(holds_log(world, join(folder, f"{place}/{part}")) for part in ("log", f"{GROUPS}/{DEFAULT_GROUP}")):
                found += _missing_of(world, folder, place, [DEFAULT_GROUP], ends)
    return found


def _missing_listed(world: World, folder: str, topic: str, ends: Mapping[str, int]) -> list[str] | None:
    """What the list of a topic's parts names and is not there; None where there is no list, or none to be trusted."""
    try:
        if load_contents(world, folder, topic) is None:
            return None
        parts = missing_parts(world, folder, topic)
    except CorruptData:
        return None
    found = []
    for part in parts:
        name = part_path(folder, topic, part).removeprefix(f"{folder}/")
        come = _come_to(name, ends) if part.endswith("/log") else 0
        far = f"; the group had come up to {come}" if come else ""
        advice = _RESTORE if is_vital(part) else "Restore it from a copy to prevent that"
        found.append(f"{name} {_lack(world, folder, name)}{far}: {cost_of(part)}. {advice}")
    return found


def _come_to(log: str, ends: Mapping[str, int]) -> int:
    """How far any group had come in a log that is gone."""
    groups = f"{log.removesuffix('/log')}/{GROUPS}/"
    return max((end for name, end in ends.items() if name.startswith(groups)), default=0)


def _partitions(world: World, folder: str, topic: str) -> int:
    try:
        return Catalog(world, folder).facts(topic).partitions
    except (CorruptData, UnknownTopic):  # said elsewhere; deleted meanwhile
        numbers = [int(name) for name in folders_in(world, join(folder, f"{TOPICS}/{topic}")) if name.isdigit()]
        return max(numbers, default=-1) + 1


def _groups(world: World, folder: str, topic: str, count: int) -> list[str]:
    """The groups in queue mode that the topic has, as far as anything is left of them; a queue has always one."""
    notes, found = GroupNotes(world, topic_folder(folder, topic)), []
    for name in notes.names(count):
        with suppress(CorruptData):
            if notes.read(name).deleted:
                continue
        found.append(name)
    simple = topic == topic_for(folder) or _is_folder(world, topic_folder(folder, topic + DEAD_SUFFIX))
    streams = folders_in(world, join(folder, GROUPS))
    return found or ([DEFAULT_GROUP] if simple and not streams else [])


def _missing_of(world: World, folder: str, place: str, groups: Sequence[str], ends: Mapping[str, int]) -> list[str]:
    log = f"{place}/log"
    found = []
    if not holds_log(world, join(folder, log)):
        come = max((ends.get(f"{place}/groups/{group}", 0) for group in groups), default=0)
        far = f"; the group had come up to {come}" if come else ""
        found.append(f"{log} {_lack(world, folder, log)}{far}: its messages are lost. {_ADVICE}")
    for name in groups:
        group = f"{place}/groups/{name}"
        # A log without a message and without a group: making the queue was cut short, and nothing is lost.
        if not holds_log(world, join(folder, group)) and (found or ends.get(log)):
            again = "what was handled is not known, and all messages that are kept come again"
            found.append(f"{group} {_lack(world, folder, group)}: {again}. Restore it from a copy to prevent that")
    return found


def unread_start(name: str, entry: Committed, start: int) -> str | None:
    """What a group in stream mode has not read and the log no longer has, in words."""
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
