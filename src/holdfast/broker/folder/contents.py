"""What must be in the folder of a topic: a list of its parts, so that one that is gone is missed.

A part is made, durably, then listed, then used; it is struck off the list, then removed. So what the list names was
there, wherever a crash came. A topic from before there were lists has none until it is opened: then what is there is
listed. The data folder has such a list, too, of what is no topic's: named producers, locks, groups in stream mode, the
key of receipts, traces. The list of a topic also has a copy of the topic's facts, should `topic.json` be lost.

The file `contents` is JSON with a checksum: `{"check": …, "facts": {…}, "parts": […]}`. A part is named by its path
from the topic's folder; the dead letters lie beside it, and their parts begin with `.dlq/`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    GROUPS,
    INTERNAL_PREFIX,
    LOCKS,
    SETTINGS,
    TOPICS,
    names_in,
    topic_folder,
)
from holdfast.broker.folder.sealed import sealed, unsealed
from holdfast.broker.receipts import KEY_FILE
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.storage.files import durable_replace, join, read_file
from holdfast.storage.opening import is_log

CONTENTS: Final = "contents"
DELAYED: Final = "delayed"
DEDUP: Final = "dedup"
PRODUCERS: Final = "producers"
TRACES_LOG: Final = f"{TOPICS}/{INTERNAL_PREFIX}traces/0/log"


_LOG: Final = "log"
_NOTE: Final = "note of a group"
_JOURNAL: Final = "journal of a group"

_COSTS: Final = {
    SETTINGS: "the topic would have the default settings",
    _NOTE: "the group would have the settings of its topic, and begin with the oldest message where it is new",
    _LOG: "its messages are lost",
    DELAYED: "its delayed messages are lost",
    DEDUP: "messages that are put again are known only as far as the logs still hold the first ones",
    PRODUCERS: "what producers wrote is known only as far as the log still holds it",
    _JOURNAL: "what was handled is not known, and all messages that are kept come again",
}


_ROOT_COSTS: Final = {
    PRODUCERS: "named producers are new ones: what they send again after a crash is stored twice",
    LOCKS: "no lock is held, there is no document, and fencing numbers begin anew",
    KEY_FILE: "receipts and lease ids that are out are refused, and what they were for comes back when its lease ends",
    TRACES_LOG: "the traces of messages are lost",
}


class TopicFacts(msgspec.Struct, frozen=True):
    """What a topic is, whatever its settings: another one of the same name has another id."""

    id: int = 0
    created_ms: int = 0
    partitions: int = 1


class Contents(msgspec.Struct, frozen=True):
    """The list."""

    facts: TopicFacts = TopicFacts()
    parts: frozenset[str] = frozenset()


_decode = msgspec.json.Decoder(Contents).decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def load_contents(world: World, root: str, topic: str) -> Contents | None:
    """The list of a topic, None where there is none; CorruptData where it is not what was written."""
    return _load(world, topic_folder(root, topic))


def _load(world: World, folder: str) -> Contents | None:
    path = join(folder, CONTENTS)
    content = read_file(world.disk, path)
    if content is None:
        return None
    try:
        return _decode(unsealed(content, path))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}") from error


def save_contents(world: World, folder: str, contents: Contents) -> None:
    """Put a list into the folder of a topic, durably."""
    durable_replace(world.disk, folder, CONTENTS, sealed(_encode(contents)))


def renew_contents(world: World, root: str, topic: str, facts: TopicFacts) -> None:
    """List what is there now, beside what is listed: that is struck off before it goes, or else it is missed."""
    _renew(world, topic_folder(root, topic), facts, parts_there(world, root, topic, facts.partitions))


def renew_root(world: World, root: str) -> None:
    """The same for what is no topic's."""
    _renew(world, root, TopicFacts(), root_parts_there(world, root))


def _renew(world: World, folder: str, facts: TopicFacts, there: Iterable[str]) -> None:
    try:
        known = _load(world, folder)
    except CorruptData:
        known = None  # `check` tells; made anew, it is good again
    contents = Contents(facts, frozenset([*there, *(() if known is None else known.parts)]))
    if known != contents:
        save_contents(world, folder, contents)


def root_parts_there(world: World, root: str) -> list[str]:
    """What the data folder has besides topics."""
    streams = [f"{GROUPS}/{name}" for name in names_in(world, join(root, GROUPS)) if not name.startswith(".")]
    return [part for part in (PRODUCERS, KEY_FILE, LOCKS, TRACES_LOG, *streams) if root_has(world, root, part)]


def root_has(world: World, root: str, part: str) -> bool:
    path = join(root, part)
    return world.disk.exists(path) if part in (PRODUCERS, KEY_FILE) else _holds_log(world, path)


def missing_root_parts(world: World, root: str) -> list[str]:
    """What is listed of the data folder and not there, in order; nothing where its list is not to be trusted."""
    try:
        contents = _load(world, root)
    except CorruptData:
        return []
    return [] if contents is None else sorted(part for part in contents.parts if not root_has(world, root, part))


def strike_off_root(world: World, root: str, part: str) -> None:
    """It is about to go, or is given up."""
    _strike_off(world, root, frozenset([part]))


def root_list_error(world: World, root: str) -> str | None:
    """What is wrong with the list of the data folder; None where nothing is."""
    try:
        return None if _load(world, root) is not None else f"{join(root, CONTENTS)} is missing"
    except CorruptData as error:
        return str(error)


def lacking_root(root: str, part: str) -> CorruptData:
    """The error for a part of the data folder that is not there."""
    return CorruptData(
        f"{join(root, part)} is missing: {root_cost_of(part)}. Nothing was changed. Restore it from a copy; or run "
        f"`holdfast repair {shlex.quote(root)}` to go on without it"
    )


def root_cost_of(part: str) -> str:
    """What is lost with a part of the data folder."""
    return _ROOT_COSTS.get(part, "the group begins anew: what it committed is not known")


def strike_off(world: World, root: str, topic: str, parts: frozenset[str]) -> None:
    """These are about to go, or are given up."""
    _strike_off(world, topic_folder(root, topic), parts)


def _strike_off(world: World, folder: str, parts: frozenset[str]) -> None:
    with suppress(CorruptData):  # a list that is damaged names nothing, and is made anew of what is there
        known = _load(world, folder)
        if known is not None and known.parts & parts:
            save_contents(world, folder, msgspec.structs.replace(known, parts=known.parts - parts))


def missing_parts(world: World, root: str, topic: str) -> list[str]:
    """The parts that are listed and not there, in order."""
    contents = load_contents(world, root, topic)
    if contents is None or not contents.parts:
        return []
    return sorted(part for part in contents.parts if not is_there(world, root, topic, part))


def _kind(part: str) -> str:
    """What a part is: its own name, but where that is a group's, which may have any name, `log` too."""
    place, _, name = part.rpartition("/")
    if place == GROUPS:
        return _NOTE
    return _JOURNAL if place.endswith(f"/{GROUPS}") else name


def is_vital(part: str, partitions: int) -> bool:
    """Whether a topic of so many partitions cannot be used without this part."""
    return _kind(part) == SETTINGS or (is_messages(part) and partitions == 1)


def is_messages(part: str) -> bool:
    """Whether these are the messages of a partition."""
    return _kind(part) == _LOG and not part.startswith(DEAD_SUFFIX)


def is_delayed(part: str) -> bool:
    """Whether this is where the delayed messages of a partition wait."""
    return _kind(part) == DELAYED


def is_dedup(part: str) -> bool:
    """Whether this is the topic's dedup ids, or those that a partition kept before topics did."""
    return _kind(part) == DEDUP


def groups_of(parts: Iterable[str]) -> set[str]:
    """The groups that have any of these parts."""
    found = set()
    for part in parts:
        name = part.rpartition("/")[2]
        if _kind(part) == _NOTE:
            found.add(name.removesuffix(".json"))
        elif _kind(part) == _JOURNAL and not part.startswith(DEAD_SUFFIX):
            found.add(name)
    return found


def lacking(root: str, topic: str, part: str) -> CorruptData:
    """The error for a part that is not there."""
    path = part_path(root, topic, part)
    named = path.removeprefix(f"{root}/")
    return CorruptData(
        f"{path} is missing: {cost_of(part)}. Nothing was changed. Restore it from a copy; or run "
        f"`holdfast repair {shlex.quote(root)} --part {shlex.quote(named)}` to go on without it"
    )


def cost_of(part: str) -> str:
    """What is lost with a part."""
    kind = _kind(part)
    return (
        "its dead letters are lost"
        if kind == _LOG and part.startswith(DEAD_SUFFIX)
        else _COSTS.get(kind, _COSTS[_JOURNAL])
    )


def part_path(root: str, topic: str, part: str) -> str:
    """Where a part lies."""
    folder = topic_folder(root, topic)
    return folder + part if part.startswith(DEAD_SUFFIX + "/") else join(folder, part)


def is_there(world: World, root: str, topic: str, part: str) -> bool:
    """Whether a part is there, or what is left of it."""
    path, kind = part_path(root, topic, part), _kind(part)
    if kind in (_LOG, _JOURNAL):
        return _holds_log(world, path)
    return _holds_log(world, join(path, "intake")) if kind == DELAYED else world.disk.exists(path)


def _holds_log(world: World, folder: str) -> bool:
    return is_log(world, folder) or any(name.endswith(".log") for name in names_in(world, folder))


def parts_there(world: World, root: str, topic: str, partitions: int) -> list[str]:
    """The parts that a topic has now."""
    folder = topic_folder(root, topic)
    found: list[str] = [SETTINGS] if world.disk.exists(join(folder, SETTINGS)) else []
    found += [f"{GROUPS}/{name}" for name in names_in(world, join(folder, GROUPS)) if name.endswith(".json")]
    found += [DEDUP] if world.disk.exists(join(folder, DEDUP)) else []
    for number in range(partitions):
        found += _parts_of(world, root, topic, f"{number}")
    letters = folder + DEAD_SUFFIX
    for name in names_in(world, letters):
        if name.isdigit():
            found += _parts_of(world, root, topic, f"{DEAD_SUFFIX}/{name}")
    return found


def _parts_of(world: World, root: str, topic: str, place: str) -> list[str]:
    folder = part_path(root, topic, place)
    names = names_in(world, folder)
    found: list[str] = [name for name in ("log", DELAYED, DEDUP, PRODUCERS) if name in names]
    if GROUPS in names:
        found += [f"{GROUPS}/{name}" for name in names_in(world, join(folder, GROUPS)) if not name.startswith(".")]
    return [part for name in found if is_there(world, root, topic, part := f"{place}/{name}")]
