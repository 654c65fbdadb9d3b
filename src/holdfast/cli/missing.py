"""What a queue should have and has not: messages at the start of its log, whole folders."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.broker.layout import DEAD_SUFFIX, DEFAULT_GROUP, SETTINGS, TOPICS, topics
from holdfast.cli.parts import GroupState, holds_log
from holdfast.env import World
from holdfast.storage.files import join, read_file
from holdfast.storage.finding import CheckReport, count_of

_ADVICE: Final = "Restore the folder from a copy before you open the queue: opening goes on without them"

# An owner that makes a topic just now is through with it soon.
_TRIES: Final = 5
_LOOK_EVERY_S: Final = 0.1


def missing_start(world: World, folder: str, topic: str, log: CheckReport, state: GroupState) -> str | None:
    """What the log lacks before its first message, in words; None where all that is gone was settled."""
    if not state.missing or may_be_forced(world, folder, topic):
        return None
    lost, last = count_of(state.missing, "message"), log.start - 1
    span = f"{state.floor}" if last == state.floor else f"{state.floor} to {last}"
    some = "" if state.missing == log.start - state.floor else "of "
    are = "is" if state.missing == 1 else "are"
    return (
        f"{lost} ({some}{span}) {are} missing: the log begins at {log.start}, "
        f"the group had settled only up to {state.floor}. {_ADVICE}"
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
    for _ in range(_TRIES - 1 if owned else 0):
        if not _missing_folders(world, folder, ends):
            return []
        time.sleep(_LOOK_EVERY_S)
    return _missing_folders(world, folder, ends)


def _missing_folders(world: World, folder: str, ends: Mapping[str, int]) -> list[str]:
    found = []
    for topic in topics(world, folder):
        for name in (topic, topic + DEAD_SUFFIX):
            if _is_folder(world, join(folder, f"{TOPICS}/{name}")):
                found += _missing_of(world, folder, f"{TOPICS}/{name}/0", ends)
    return found


def _missing_of(world: World, folder: str, place: str, ends: Mapping[str, int]) -> list[str]:
    log, group = f"{place}/log", f"{place}/groups/{DEFAULT_GROUP}"
    found = []
    if not holds_log(world, join(folder, log)):
        come = f"; the group had come up to {ends[group]}" if ends.get(group) else ""
        found.append(f"{log} {_lack(world, folder, log)}{come}: its messages are lost. {_ADVICE}")
    # A log without a message and without a group: making the queue was cut short, and nothing is lost.
    if not holds_log(world, join(folder, group)) and (found or ends.get(log)):
        again = "what was handled is not known, and all messages that are kept come again"
        found.append(f"{group} {_lack(world, folder, group)}: {again}. Restore it from a copy to prevent that")
    return found


def _lack(world: World, folder: str, name: str) -> str:
    return "holds no log" if _is_folder(world, join(folder, name)) else "is missing"


def _is_folder(world: World, path: str) -> bool:
    try:
        world.disk.names(path)
    except OSError:
        return False
    return True
