"""Which topics a data folder has. The folders are the catalog: nothing else could say something different.

A topic comes and goes with a rename, which is all or nothing; what a crash leaves half made or half deleted has a
name that no topic can have, and is removed at the next opening.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.broker.folder.contents import Contents, TopicFacts, load_contents, save_contents
from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    SETTINGS,
    TOPIC,
    TOPICS,
    is_users_topic,
    names_in,
    topic_folder,
)
from holdfast.broker.folder.policy import differing_settings
from holdfast.broker.folder.sealed import is_sealed, sealed, unsealed
from holdfast.env import World
from holdfast.errors import CorruptData, TopicExists, UnknownTopic
from holdfast.settings import TopicSettings
from holdfast.storage.files import durable_replace, join, read_file, remove_tree
from holdfast.storage.opening import translated

_NEW: Final = ".new-"
_GONE: Final = ".gone-"
__all__ = ["Catalog", "TopicFacts"]

_LEFT: Final = re.compile(r"(\.new-|\.gone-)(.*)-[0-9]+")


_decode = msgspec.json.Decoder(TopicFacts).decode


class Catalog:
    """The topics of one data folder; its owner has the folder's lock."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._folder = join(root, TOPICS)

    def names(self) -> list[str]:
        """The topics that users made."""
        return [name for name in names_in(self._world, self._folder) if is_users_topic(name)]

    def __contains__(self, name: str) -> bool:
        return self._world.disk.exists(topic_folder(self._root, name))

    def facts(self, name: str) -> TopicFacts:
        """What is noted of a topic; of one that was made before anything was noted, the defaults."""
        if name not in self:
            known = self.names()
            there = f"there are {', '.join(known[:10])}" if known else "there is none yet"
            how = "Make it with create_topic, or in a shell with `holdfast topic create`"
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
        """What `topic.json` says, None where there is none; CorruptData where it is not what was written."""
        path, content = self._note_of(name)
        if content is None:
            return None
        try:
            return _decode(unsealed(content, path))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptData(f"{path} cannot be read: {error}. Restore it from a backup") from error

    def is_listed(self, name: str) -> bool:
        """Whether the topic was written by a release that keeps a list of its parts."""
        return is_sealed(self._note_of(name)[1] or b"")

    def bring_up_to_date(self, name: str, facts: TopicFacts) -> None:
        """Write `topic.json` anew where it is lost, damaged, or of an older release.

        It tells that there is a list of parts, and waits for that: there may have been no room for one.
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
        """The copy of the facts in the list of parts."""
        with suppress(CorruptData):
            contents = load_contents(self._world, self._root, name)
            return None if contents is None else contents.facts
        return None

    def create(self, name: str, settings: TopicSettings, base: TopicSettings) -> TopicFacts:
        """Make a topic with its settings, wholly or not at all."""
        if name in self:
            raise TopicExists(
                f"there is a topic {name} in {self._root} already; alter it, choose another name, or say exist_ok=True "
                "where that is fine"
            )
        self.tidy(name)  # or it would find the dead letters of an earlier one of its name
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
        """Note that the topic has so many partitions."""
        facts = msgspec.structs.replace(self.facts(name), partitions=partitions)
        self._note(topic_folder(self._root, name), facts)
        return facts

    def delete(self, name: str) -> None:
        """Take the topic and its dead letters away. From the first rename on it is gone, whatever happens then."""
        gone = join(self._folder, f"{_GONE}{name}-{self._world.ids.random_u32()}")
        self.facts(name)  # or UnknownTopic
        self._world.disk.rename(topic_folder(self._root, name), gone)
        self._world.disk.sync_folder(self._folder)
        self.tidy(name)

    def leftovers(self) -> set[str]:
        """The names of topics of which something was left half made or half deleted, or is so at this moment."""
        return {found[2] for left in names_in(self._world, self._folder) if (found := _LEFT.fullmatch(left))}

    def deleted(self) -> set[str]:
        """The names of topics that were deleted, and of which something is left."""
        left = filter(None, map(_LEFT.fullmatch, names_in(self._world, self._folder)))
        return {found[2] for found in left if found[1] == _GONE and found[2] not in self}

    def tidy(self, name: str | None = None) -> None:
        """Remove what was left half made or half deleted, of one name or of all. Nobody else is at work on them."""
        disk, deleted = self._world.disk, self.deleted()
        for left in names_in(self._world, self._folder):
            found = _LEFT.fullmatch(left)
            if found is None or name not in (None, found[2]):
                continue
            letters = join(self._folder, found[2] + DEAD_SUFFIX)
            if found[2] in deleted:
                remove_tree(disk, letters)  # for good, and first: without what is left of the topic nobody would look
                disk.sync_folder(self._folder)
            remove_tree(disk, join(self._folder, left))

    def _note(self, folder: str, facts: TopicFacts) -> None:
        durable_replace(self._world.disk, folder, TOPIC, sealed(msgspec.json.encode(facts)))
