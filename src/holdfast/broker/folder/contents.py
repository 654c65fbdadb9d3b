"""The topics of a data folder, their settings and those of their groups, and the list of parts that must be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    GROUPS,
    INTERNAL_PREFIX,
    LOCKS,
    SETTINGS,
    TOPIC,
    TOPICS,
    check_name,
    is_sealed,
    is_users_topic,
    names_in,
    sealed,
    topic_folder,
    unsealed,
)
from holdfast.broker.leases import KEY_FILE
from holdfast.env import World
from holdfast.errors import BadSettings, CorruptData, TopicExists, UnknownTopic
from holdfast.later import pattern, shlex
from holdfast.model import Pause
from holdfast.settings import QueueSettings, TopicSettings, check_settings, load
from holdfast.storage.files import durable_replace, is_log, join, read_file, remove_tree, translated

__all__ = ["Catalog", "TopicFacts"]

_Decoded = TypeVar("_Decoded")

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
    DEDUP: "repeated messages are recognized only while the logs still hold the originals",
    PRODUCERS: "what producers wrote is known only as far as the log still holds it",
    _JOURNAL: "which messages were handled is not known, and all stored messages are delivered again",
}


_ROOT_COSTS: Final = {
    PRODUCERS: "named producers start over: what they resend after a crash is stored twice",
    LOCKS: "no lock is held, there are no documents, and fencing numbers start again",
    KEY_FILE: "outstanding receipts and lease ids are refused; their messages and locks are freed when the leases end",
    TRACES_LOG: "the traces of messages are lost",
}


class TopicFacts(msgspec.Struct, frozen=True):
    """The identity of a topic, apart from its settings. A topic created again under the same name gets another id."""

    id: int = 0
    created_ms: int = 0
    partitions: int = 1


class Contents(msgspec.Struct, frozen=True):
    """The list of parts that a topic, or the data folder itself, must have."""

    facts: TopicFacts = TopicFacts()
    parts: frozenset[str] = frozenset()


_decode = msgspec.json.Decoder(Contents).decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def load_contents(world: World, root: str, topic: str) -> Contents | None:
    """Load the list of a topic; None if there is none. Raises CorruptData if it is not what was written."""
    return _load(world, topic_folder(root, topic))


def _load(world: World, folder: str) -> Contents | None:
    path = join(folder, CONTENTS)
    return _read(_decode, read_file(world.disk, path), path)


def _read(decode: Callable[[bytes], _Decoded], content: bytes | None, path: str, advice: str = "") -> _Decoded | None:
    """Decode a sealed file; None if there is none. Raises CorruptData if it is not what was written."""
    if content is None:
        return None
    try:
        return decode(unsealed(content, path))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}{advice}") from error


def save_contents(world: World, folder: str, contents: Contents) -> None:
    """Write a list to the folder of a topic, durably."""
    durable_replace(world.disk, folder, CONTENTS, sealed(_encode(contents)))


def renew_contents(world: World, root: str, topic: str, facts: TopicFacts) -> None:
    """Add the parts that exist now to a topic's list. Strike a part off before removing it, or it will be missed."""
    _renew(world, topic_folder(root, topic), facts, parts_there(world, root, topic, facts.partitions))


def renew_root(world: World, root: str) -> None:
    """Add the parts of the data folder that exist now, apart from topics, to its list."""
    _renew(world, root, TopicFacts(), root_parts_there(world, root))


def _renew(world: World, folder: str, facts: TopicFacts, there: Iterable[str]) -> None:
    try:
        known = _load(world, folder)
    except CorruptData:
        known = None  # `check` reports the damage; rebuilding the list fixes it
    contents = Contents(facts, frozenset([*there, *(() if known is None else known.parts)]))
    if known != contents:
        save_contents(world, folder, contents)


def root_parts_there(world: World, root: str) -> list[str]:
    """Return the parts of the data folder that exist, apart from topics."""
    streams = [f"{GROUPS}/{name}" for name in names_in(world, join(root, GROUPS)) if not name.startswith(".")]
    return [part for part in (PRODUCERS, KEY_FILE, LOCKS, TRACES_LOG, *streams) if root_has(world, root, part)]


def root_has(world: World, root: str, part: str) -> bool:
    path = join(root, part)
    return world.disk.exists(path) if part in (PRODUCERS, KEY_FILE) else _holds_log(world, path)


def missing_root_parts(world: World, root: str) -> list[str]:
    """Return the listed parts of the data folder that do not exist, in order; none if the list is unusable."""
    try:
        contents = _load(world, root)
    except CorruptData:
        return []
    return [] if contents is None else sorted(part for part in contents.parts if not root_has(world, root, part))


def strike_off_root(world: World, root: str, part: str) -> None:
    """Take a part off the list before it is removed, or because it is given up."""
    _strike_off(world, root, frozenset([part]))


def root_list_error(world: World, root: str) -> str | None:
    """Describe what is wrong with the list of the data folder; None if nothing is."""
    try:
        return None if _load(world, root) is not None else f"{join(root, CONTENTS)} is missing"
    except CorruptData as error:
        return str(error)


def lacking_root(root: str, part: str) -> CorruptData:
    """Return the error for a missing part of the data folder."""
    return CorruptData(
        f"{join(root, part)} is missing: {root_cost_of(part)}. Nothing was changed. Restore it from a copy; or run "
        f"`holdfast repair {shlex.quote(root)}` to continue without it"
    )


def root_cost_of(part: str) -> str:
    """Describe what is lost with a part of the data folder."""
    return _ROOT_COSTS.get(part, "the group starts over: what it committed is unknown")


def strike_off(world: World, root: str, topic: str, parts: frozenset[str]) -> None:
    """Take parts off a topic's list before they are removed, or because they are given up."""
    _strike_off(world, topic_folder(root, topic), parts)


def _strike_off(world: World, folder: str, parts: frozenset[str]) -> None:
    with suppress(CorruptData):  # a damaged list is rebuilt from what exists
        known = _load(world, folder)
        if known is not None and known.parts & parts:
            save_contents(world, folder, msgspec.structs.replace(known, parts=known.parts - parts))


def missing_parts(world: World, root: str, topic: str) -> list[str]:
    """Return the listed parts that do not exist, in order."""
    contents = load_contents(world, root, topic)
    if contents is None or not contents.parts:
        return []
    return sorted(part for part in contents.parts if not is_there(world, root, topic, part))


def _kind(part: str) -> str:
    """Return the kind of a part: its last name, except for groups, whose names are free and may even be `log`."""
    place, _, name = part.rpartition("/")
    if place == GROUPS:
        return _NOTE
    return _JOURNAL if place.endswith(f"/{GROUPS}") else name


def is_vital(part: str, partitions: int) -> bool:
    """Whether a topic with this number of partitions cannot be used without this part."""
    return _kind(part) == SETTINGS or (is_messages(part) and partitions == 1)


def is_messages(part: str) -> bool:
    """Whether this part is the message log of a partition."""
    return _kind(part) == _LOG and not part.startswith(DEAD_SUFFIX)


def is_delayed(part: str) -> bool:
    """Whether this part is the store of delayed messages of a partition."""
    return _kind(part) == DELAYED


def is_dedup(part: str) -> bool:
    """Whether this part is the topic's dedup ids, or those of a partition from before topics kept them."""
    return _kind(part) == DEDUP


def groups_of(parts: Iterable[str]) -> set[str]:
    """Return the groups that any of these parts belong to."""
    found = set()
    for part in parts:
        name = part.rpartition("/")[2]
        if _kind(part) == _NOTE:
            found.add(name.removesuffix(".json"))
        elif _kind(part) == _JOURNAL and not part.startswith(DEAD_SUFFIX):
            found.add(name)
    return found


def lacking(root: str, topic: str, part: str) -> CorruptData:
    """Return the error for a missing part of a topic."""
    path = part_path(root, topic, part)
    named = path.removeprefix(f"{root}/")
    return CorruptData(
        f"{path} is missing: {cost_of(part)}. Nothing was changed. Restore it from a copy; or run "
        f"`holdfast repair {shlex.quote(root)} --part {shlex.quote(named)}` to continue without it"
    )


def cost_of(part: str) -> str:
    """Describe what is lost with a part."""
    kind = _kind(part)
    return (
        "its dead letters are lost"
        if kind == _LOG and part.startswith(DEAD_SUFFIX)
        else _COSTS.get(kind, _COSTS[_JOURNAL])
    )


def part_path(root: str, topic: str, part: str) -> str:
    """Return the path of a part."""
    folder = topic_folder(root, topic)
    return folder + part if part.startswith(DEAD_SUFFIX + "/") else join(folder, part)


def is_there(world: World, root: str, topic: str, part: str) -> bool:
    """Whether a part, or a remainder of it, exists."""
    path, kind = part_path(root, topic, part), _kind(part)
    if kind in (_LOG, _JOURNAL):
        return _holds_log(world, path)
    return _holds_log(world, join(path, "intake")) if kind == DELAYED else world.disk.exists(path)


def _holds_log(world: World, folder: str) -> bool:
    return is_log(world, folder) or any(name.endswith(".log") for name in names_in(world, folder))


def parts_there(world: World, root: str, topic: str, partitions: int) -> list[str]:
    """Return the parts that a topic has now."""
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


# The settings of a topic and of its groups, kept in the folder so that every process uses the same.


# Durability is chosen by each program: a file must never weaken a promise. And `partitions` is a fact of the topic,
# recorded with it.
NOT_KEPT: Final = frozenset({"durability", "ack_durability", "partitions"})

_DEFAULTS: Final = TopicSettings()


def settings_for(
    world: World,
    folder: str,
    given: QueueSettings | None,
    changes: Mapping[str, Any],
    base: TopicSettings = _DEFAULTS,
) -> TopicSettings:
    """Return the settings given, or else those kept in the folder on top of the base, with the changes applied."""
    if given is None:
        kept = kept_settings(world, join(folder, SETTINGS))
        return load(TopicSettings, {**msgspec.structs.asdict(base), **kept, **changes})
    return check_settings(given, changes)


def keep_settings(world: World, folder: str, settings: TopicSettings, base: TopicSettings = _DEFAULTS) -> None:
    """Write down what differs from the base, if that has changed."""
    differing = differing_settings(settings, base)
    content = sealed(msgspec.json.format(msgspec.json.encode(differing)))
    known = read_file(world.disk, join(folder, SETTINGS))
    if content != known and (differing or known is not None):
        durable_replace(world.disk, folder, SETTINGS, content)


def differing_settings(settings: TopicSettings, base: TopicSettings) -> dict[str, Any]:
    """Return the settings that differ from the base and are kept."""
    return {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name not in NOT_KEPT and getattr(settings, name) != getattr(base, name)
    }


def dead_settings(settings: TopicSettings) -> TopicSettings:
    """Return the settings of the dead letters: own retention, no retries, and no dead letters of their own."""
    return msgspec.structs.replace(
        settings,
        durability="fsync",
        retention_ms=settings.dead_retention_ms,
        retention_ignores_pins=True,
        max_attempts=None,
        ttl_ms=None,
        expired_to_dead=False,
        promote_after_ms=None,
        cleanup="delete",
        trace_sample=0.0,
        schema_check="off",
        key_order=False,
        key_group_concurrency=None,
        key_group_rate=None,
        key_group_fair=False,
    )


def log_settings(settings: TopicSettings) -> TopicSettings:
    """Return the settings of the partitions' logs. If a topic is only compacted, the last of each key stays forever."""
    if settings.cleanup != "compact":
        return settings
    return msgspec.structs.replace(
        settings, retention_ms=None, retention_bytes=None, retention_segments=None, retention_done_bytes=None
    )


def kept_settings(world: World, path: str) -> dict[str, Any]:
    """Read and validate a settings file; empty if there is none."""
    content = read_file(world.disk, path)
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(unsealed(content, path), type=dict[str, Any])
        if isinstance(kept.get("priority_weights"), list):
            kept["priority_weights"] = tuple(kept["priority_weights"])
        load(TopicSettings, kept)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}. Correct it, or remove it to get the defaults") from error
    except BadSettings as error:
        raise BadSettings(f"{path} cannot be used: {error}. Correct it, or remove it to get the defaults") from None
    return kept


# Notes on a topic's groups in queue mode: where each began, its own settings, whether it is paused or being deleted.


class GroupNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note of one group. `positions` has its start in each partition that existed when it began."""

    positions: list[int] = msgspec.field(default_factory=list)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    deleted: bool = False
    paused: Pause | None = None

    def start(self, number: int) -> int | None:
        """Return where the group begins in a partition; None for the oldest message."""
        return self.positions[number] if number < len(self.positions) else None


class GroupNotes:
    """The notes in a topic's folder. A group with nothing special about it needs none."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._topic = folder
        self._folder = join(folder, GROUPS)

    def names(self, partitions: int) -> list[str]:
        """Return the groups that have a note, or a journal in any partition."""
        noted = {name.removesuffix(".json") for name in names_in(self._world, self._folder) if name.endswith(".json")}
        for number in range(partitions):
            noted.update(names_in(self._world, f"{self._topic}/{number}/{GROUPS}"))
        return sorted(noted)

    def read(self, group: str) -> GroupNote:
        """Return the note of a group; an empty one if there is none."""
        path = self._path(group)
        content = read_file(self._world.disk, path)
        if content is None:
            return GroupNote()
        try:
            return msgspec.json.decode(unsealed(content, path), type=GroupNote)
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{path} cannot be read: {error}. Restore it from a backup, or remove it: the group then has the "
                "settings of its topic"
            ) from error

    def write(self, group: str, note: GroupNote, *, needed: bool = True) -> None:
        """Write a note, if it has any content."""
        if needed:
            self._world.disk.make_folder(self._folder)
            durable_replace(
                self._world.disk, self._folder, f"{check_name(group, 'group')}.json", sealed(msgspec.json.encode(note))
            )

    def deleted(self) -> list[str]:
        """Return the groups that are being deleted."""
        noted = [name.removesuffix(".json") for name in names_in(self._world, self._folder) if name.endswith(".json")]
        found = []
        for group in noted:
            with suppress(CorruptData):  # that group does not open, and its user gets the error
                if self.read(group).deleted:
                    found.append(group)
        return found

    def forget(self, group: str, partitions: int) -> None:
        """Remove everything of a group durably, its note last: without the note, leftovers would never be found."""
        disk = self._world.disk
        for number in range(partitions):
            folder = f"{self._topic}/{number}/{GROUPS}"
            if disk.exists(folder):
                remove_tree(disk, join(folder, group))
                disk.sync_folder(folder)
        disk.remove(self._path(group))
        disk.sync_folder(self._folder)

    def _path(self, group: str) -> str:
        return join(self._folder, f"{check_name(group, 'group')}.json")


# The catalog: which topics a data folder has. The folders themselves are the catalog, so nothing can contradict it.
#
# A topic is created and deleted by a rename, which is atomic. What a crash leaves half created or half deleted has a
# name that no topic can have, and is removed at the next opening.


_NEW: Final = ".new-"
_GONE: Final = ".gone-"


_LEFT: Final = pattern(r"(\.new-|\.gone-)(.*)-[0-9]+")


_decode_catalog = msgspec.json.Decoder(TopicFacts).decode


class Catalog:
    """The topics of one data folder. Only the holder of the folder's lock may change them."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._folder = join(root, TOPICS)

    def names(self) -> list[str]:
        """Return the topics that users created."""
        return [name for name in names_in(self._world, self._folder) if is_users_topic(name)]

    def __contains__(self, name: str) -> bool:
        return self._world.disk.exists(topic_folder(self._root, name))

    def facts(self, name: str) -> TopicFacts:
        """Return what is recorded about a topic; defaults for a topic from before anything was recorded."""
        if name not in self:
            known = self.names()
            there = f"known topics: {', '.join(known[:10])}" if known else "there is none yet"
            how = "Create it with create_topic, or in a shell with `holdfast topic create`"
            unknown = UnknownTopic(f"there is no topic {name} in {self._root}; {there}. {how}")
            unknown.brief = f"there is no topic {name}. {how}"
            raise unknown
        try:
            return self.noted(name) or self._listed(name) or TopicFacts()
        except CorruptData:
            listed = self._listed(name)
            if listed is None:
                raise
            return listed

    def noted(self, name: str) -> TopicFacts | None:
        """Read `topic.json`; None if there is none. Raises CorruptData if it is not what was written."""
        path, content = self._note_of(name)
        return _read(_decode_catalog, content, path, ". Restore it from a backup")

    def is_listed(self, name: str) -> bool:
        """Whether the topic was written by a release that keeps a list of its parts."""
        return is_sealed(self._note_of(name)[1] or b"")

    def bring_up_to_date(self, name: str, facts: TopicFacts) -> None:
        """Rewrite `topic.json` if it is missing, damaged, or of an older release.

        It says that a list of parts exists, so that list comes first: the disk may have had no room for it.
        """
        if self._listed(name) is None:
            return
        with suppress(CorruptData):
            if self.noted(name) == facts and self.is_listed(name):
                return
        self._note(topic_folder(self._root, name), facts)

    def _note_of(self, name: str) -> tuple[str, bytes | None]:
        path = join(topic_folder(self._root, name), TOPIC)
        with translated(path):
            return path, read_file(self._world.disk, path)

    def _listed(self, name: str) -> TopicFacts | None:
        """Return the copy of the facts in the list of parts."""
        with suppress(CorruptData):
            contents = load_contents(self._world, self._root, name)
            return None if contents is None else contents.facts
        return None

    def create(self, name: str, settings: TopicSettings, base: TopicSettings) -> TopicFacts:
        """Create a topic with its settings, atomically."""
        if name in self:
            raise TopicExists(
                f"topic {name} already exists in {self._root}; alter it, choose another name, or pass exist_ok=True "
                "to accept it"
            )
        self.tidy(name)  # otherwise it would inherit the dead letters of a deleted topic of this name
        disk = self._world.disk
        fresh = join(self._folder, f"{_NEW}{name}-0")
        facts = TopicFacts(self._world.ids.random_u32(), self._world.clock.now_ns() // 1_000_000, settings.partitions)
        disk.make_folder(fresh)
        self._note(fresh, facts)
        kept = differing_settings(settings, base)
        if kept:
            durable_replace(disk, fresh, SETTINGS, sealed(msgspec.json.format(msgspec.json.encode(kept))))
        save_contents(self._world, fresh, Contents(facts, frozenset([SETTINGS] if kept else [])))
        disk.rename(fresh, topic_folder(self._root, name))
        disk.sync_folder(self._folder)
        return facts

    def grow(self, name: str, partitions: int) -> TopicFacts:
        """Record the new number of partitions."""
        facts = msgspec.structs.replace(self.facts(name), partitions=partitions)
        self._note(topic_folder(self._root, name), facts)
        return facts

    def delete(self, name: str) -> None:
        """Delete a topic and its dead letters. It is gone from the first rename on, whatever fails after that."""
        gone = join(self._folder, f"{_GONE}{name}-{self._world.ids.random_u32()}")
        self.facts(name)  # raises UnknownTopic
        self._world.disk.rename(topic_folder(self._root, name), gone)
        self._world.disk.sync_folder(self._folder)
        self.tidy(name)

    def leftovers(self) -> set[str]:
        """Return the names of topics that are half created or half deleted."""
        return {found[2] for left in names_in(self._world, self._folder) if (found := _LEFT.fullmatch(left))}

    def deleted(self) -> set[str]:
        """Return the names of deleted topics of which something is left."""
        left = filter(None, map(_LEFT.fullmatch, names_in(self._world, self._folder)))
        return {found[2] for found in left if found[1] == _GONE and found[2] not in self}

    def tidy(self, name: str | None = None) -> None:
        """Remove what is half created or half deleted, of one topic or of all. Nobody may be using them."""
        disk, deleted = self._world.disk, self.deleted()
        for left in names_in(self._world, self._folder):
            found = _LEFT.fullmatch(left)
            if found is None or name not in (None, found[2]):
                continue
            letters = join(self._folder, found[2] + DEAD_SUFFIX)
            if found[2] in deleted:
                remove_tree(disk, letters)  # durably and first: without the rest of the topic they would never be found
                disk.sync_folder(self._folder)
            remove_tree(disk, join(self._folder, left))

    def _note(self, folder: str, facts: TopicFacts) -> None:
        durable_replace(self._world.disk, folder, TOPIC, sealed(msgspec.json.encode(facts)))
