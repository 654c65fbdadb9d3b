"""The settings that a topic and its groups keep in the folder, so that every opener means the same."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from holdfast.broker.folder.layout import GROUPS, SETTINGS, check_name, names_in
from holdfast.broker.folder.sealed import sealed, unsealed
from holdfast.env import World
from holdfast.errors import BadSettings, CorruptData
from holdfast.settings import QueueSettings, TopicSettings, load
from holdfast.storage.files import durable_replace, join, read_file, remove_tree

# Chosen by each program for itself: a weaker promise must never come from a file. And `partitions` is no wish: it is
# noted with the topic.
NOT_KEPT: Final = frozenset({"durability", "ack_durability", "partitions"})

_DEFAULTS: Final = TopicSettings()


def settings_for(
    world: World,
    folder: str,
    given: QueueSettings | None,
    changes: Mapping[str, Any],
    base: TopicSettings = _DEFAULTS,
) -> TopicSettings:
    """Those given, or those that the folder keeps on top of the base, with the changes."""
    if given is None:
        kept = kept_settings(world, join(folder, SETTINGS))
        return load(TopicSettings, {**msgspec.structs.asdict(base), **kept, **changes})
    return check_settings(given, changes)


def check_settings(given: QueueSettings | None, changes: Mapping[str, Any]) -> TopicSettings:
    """Those given with the changes; BadSettings where they do not fit."""
    if given is not None and not isinstance(given, QueueSettings):
        raise BadSettings(f"settings must be QueueSettings or TopicSettings, not {type(given).__name__}")
    return load(TopicSettings, {**msgspec.structs.asdict(given or _DEFAULTS), **changes})


def keep_settings(world: World, folder: str, settings: TopicSettings, base: TopicSettings = _DEFAULTS) -> None:
    """Note what differs from the base, where that has changed."""
    differing = differing_settings(settings, base)
    content = sealed(msgspec.json.format(msgspec.json.encode(differing)))
    known = read_file(world.disk, join(folder, SETTINGS))
    if content != known and (differing or known is not None):
        durable_replace(world.disk, folder, SETTINGS, content)


def differing_settings(settings: TopicSettings, base: TopicSettings) -> dict[str, Any]:
    """What is to be kept of the settings."""
    return {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name not in NOT_KEPT and getattr(settings, name) != getattr(base, name)
    }


def dead_settings(settings: TopicSettings) -> TopicSettings:
    """Dead letters are kept for a time of their own, are never retried, and have no dead letters themselves."""
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
        key_order=False,
        key_group_concurrency=None,
        key_group_rate=None,
        key_group_fair=False,
    )


def log_settings(settings: TopicSettings) -> TopicSettings:
    """As the logs of its partitions follow them: a topic that is only compacted keeps the last of each key for ever."""
    if settings.cleanup != "compact":
        return settings
    return msgspec.structs.replace(
        settings, retention_ms=None, retention_bytes=None, retention_segments=None, retention_done_bytes=None
    )


def kept_settings(world: World, path: str) -> dict[str, Any]:
    """What a file of settings says, checked; nothing where there is none."""
    content = read_file(world.disk, path)
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(unsealed(content, path), type=dict[str, Any])
        if isinstance(kept.get("priority_weights"), list):
            kept["priority_weights"] = tuple(kept["priority_weights"])
        load(TopicSettings, kept)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}. Mend it, or remove it to get the defaults") from error
    except BadSettings as error:
        raise BadSettings(f"{path} cannot be used: {error}. Mend it, or remove it to get the defaults") from None
    return kept


# What is noted of a topic's groups in queue mode: where each began, what it does differently, whether it is to go.


class GroupNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note of one group. `positions` are where it began, for each partition that there was then."""

    positions: list[int] = msgspec.field(default_factory=list)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    deleted: bool = False

    def start(self, number: int) -> int | None:
        """Where it begins in a partition; None: with the oldest message there."""
        return self.positions[number] if number < len(self.positions) else None


_decode = msgspec.json.Decoder(GroupNote).decode


class GroupNotes:
    """The notes in a topic's folder. A group that nobody said anything special of needs none."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._topic = folder
        self._folder = join(folder, GROUPS)

    def names(self, partitions: int) -> list[str]:
        """The groups that have a note, or a journal in any of the partitions."""
        noted = {name.removesuffix(".json") for name in names_in(self._world, self._folder) if name.endswith(".json")}
        for number in range(partitions):
            noted.update(names_in(self._world, f"{self._topic}/{number}/{GROUPS}"))
        return sorted(noted)

    def read(self, group: str) -> GroupNote:
        """The note of a group; an empty one where there is none."""
        path = self._path(group)
        content = read_file(self._world.disk, path)
        if content is None:
            return GroupNote()
        try:
            return _decode(unsealed(content, path))
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{path} cannot be read: {error}. Restore it from a backup, or remove it: the group then has the "
                "settings of its topic"
            ) from error

    def write(self, group: str, note: GroupNote, *, needed: bool = True) -> None:
        """Keep a note, if there is anything in it to keep."""
        if needed:
            self._world.disk.make_folder(self._folder)
            durable_replace(
                self._world.disk, self._folder, f"{check_name(group, 'group')}.json", sealed(msgspec.json.encode(note))
            )

    def deleted(self) -> list[str]:
        """The groups that are to go."""
        noted = [name.removesuffix(".json") for name in names_in(self._world, self._folder) if name.endswith(".json")]
        found = []
        for group in noted:
            with suppress(CorruptData):  # then that group does not open, and its user is told
                if self.read(group).deleted:
                    found.append(group)
        return found

    def forget(self, group: str, partitions: int) -> None:
        """Take away all that a group has here, for good before its note goes: without that nobody would look for it."""
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
