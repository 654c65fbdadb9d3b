"""What is noted of a topic's groups in queue mode: where each began, what it does differently, whether it is to go."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from holdfast.broker.layout import GROUPS, check_name, names_in
from holdfast.broker.sealed import sealed, unsealed
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.storage.files import durable_replace, join, read_file, remove_tree


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
