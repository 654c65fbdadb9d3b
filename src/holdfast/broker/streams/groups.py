"""The groups in stream mode of a data folder: opened together, so that each keeps what it has not read."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from holdfast.broker.folder.contents import lacking_root
from holdfast.broker.folder.layout import GROUPS, check_name, names_in, stream_group_folder
from holdfast.broker.streams.group import StreamGroup
from holdfast.broker.streams.offsets import Offsets
from holdfast.errors import CorruptData, HoldfastError, InvalidRequest, UnknownGroup, UnknownTopic
from holdfast.storage.files import join, remove_tree
from holdfast.storage.keeper import soonest
from holdfast.storage.opening import open_error, translated

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.topic import Topic

logger = logging.getLogger(__name__)

_AFTER_ERROR_MS: Final = 1_000
_GONE: Final = re.compile(r"\.gone-.*")


class StreamGroups:
    """All groups in stream mode. Safe to use from any thread; the engine may hold its lock when it calls."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._folder = join(engine.folder, GROUPS)
        self._lock = threading.Lock()
        self._groups: dict[str, StreamGroup] = {}
        self.spoiled: dict[str, CorruptData] = {}  # those that cannot be opened, and why; the others go on
        self._closed = False
        self._told = ""
        try:
            for name in names_in(engine.world, self._folder):
                if _GONE.fullmatch(name):
                    remove_tree(engine.world.disk, join(self._folder, name))
                else:
                    self._open_or_note(name)
            for name in engine.missing_groups():
                self.spoiled[name] = lacking_root(engine.folder, f"{GROUPS}/{name}")
        except BaseException:
            self.close()
            raise
        engine.on_topic.append(self._pin)

    def names(self) -> list[str]:
        return sorted([*self._groups, *self.spoiled])

    def all(self) -> list[StreamGroup]:
        return list(self._groups.values())

    def group(self, name: str, *, create: bool = False) -> StreamGroup:
        """The group of this name; UnknownGroup where there is none, unless it is to be made."""
        check_name(name, "group")
        with self._lock:
            self._engine.check_open()
            known = self._groups.get(name)
            if known is not None:
                return known
            if name in self.spoiled:
                raise self.spoiled[name]
            if not create:
                there = f"there are {', '.join(self.names()[:10])}" if self._groups else "there is none yet"
                unknown = UnknownGroup(f"there is no group {name} in stream mode in {self._engine.folder}; {there}")
                unknown.brief = f"there is no group {name} in stream mode"
                raise unknown
            made = self._open(name)
            self._engine.list_parts()
            return made

    def on(self, topic: Topic) -> list[StreamGroup]:
        """The groups that read this topic, or have read it."""
        return [
            group
            for _, group in sorted(self._groups.items())
            if any(entry.topic == topic.name and entry.topic_id == topic.id for entry in group.offsets.entries())
        ]

    def check_free(self, name: str, topic: Topic) -> None:
        """Refuse a name for queue mode that reads the topic in stream mode already."""
        if any(group.name == name for group in self.on(topic)):
            raise InvalidRequest(
                f"the group {name} reads {topic.name} in stream mode; choose another name, or delete that group first"
            )

    def bring_pins(self, topic: Topic) -> None:
        """Let the topic's logs go up to what is committed now."""
        for group in self.on(topic):
            group.offsets.log.sync()
            group.pin(topic)

    def delete(self, name: str) -> None:
        """Forget a group and all that it committed; it must have no members."""
        if name in self.spoiled:
            self._delete_spoiled(name)
            return
        group = self.group(name)
        with group.lock:
            if group.members.members:
                raise InvalidRequest(
                    f"group {name} has {len(group.members.members)} members: close its consumers first"
                )
            disk = self._engine.world.disk
            gone = join(self._folder, f".gone-{name}-{self._engine.world.ids.random_u32()}")
            with self._lock:
                del self._groups[name]
                group.close()
                self._take_away(name, gone)
        for topic_name in {entry.topic for entry in group.offsets.entries()}:
            try:
                with self._engine.using(topic_name) as topic:
                    group.unpin(topic)
            except UnknownTopic:
                continue
        with translated(gone):
            remove_tree(disk, gone)

    def _delete_spoiled(self, name: str) -> None:
        gone = join(self._folder, f".gone-{name}-{self._engine.world.ids.random_u32()}")
        with self._lock:
            self._take_away(name, gone)
            del self.spoiled[name]
        for topic in self._engine.open_topics():
            for partition in topic.partitions:
                partition.log.unpin(stream_group_folder(self._engine.folder, name))
        with translated(gone):
            remove_tree(self._engine.world.disk, gone)

    def _take_away(self, name: str, gone: str) -> None:
        folder, disk = stream_group_folder(self._engine.folder, name), self._engine.world.disk
        try:
            with self._engine.parting(f"{GROUPS}/{name}"):
                if disk.exists(folder):
                    disk.rename(folder, gone)
                    disk.sync_folder(self._folder)
        except OSError as error:
            if disk.exists(folder) and name not in self.spoiled:
                self._open(name)  # it goes on
            raise open_error(folder, error) from error

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        return soonest(*map(self._tick, list(self._groups.values())))

    def _tick(self, group: StreamGroup) -> int | None:
        try:
            return group.tick()
        except HoldfastError as error:  # one group that fails must not keep the others from their work
            if self._groups.get(group.name) is not group or self._closed or self._engine.closed:
                return None
            if str(error) != self._told:  # once, not at every tick
                self._told = str(error)
                logger.error("upkeep failed", extra={"group": group.name, "error": str(error)})
            return _AFTER_ERROR_MS

    def sync(self) -> None:
        """Return when everything committed so far is on disk."""
        for group in list(self._groups.values()):
            group.offsets.log.sync()

    def close(self) -> None:
        """Keep what was committed; whoever waits is woken. Closing twice is fine."""
        with self._lock, ExitStack() as closing:
            self._closed = True
            for group in self._groups.values():
                closing.callback(group.close)

    def _pin(self, topic: Topic) -> None:
        for group in list(self._groups.values()):
            group.pin(topic)
            group.nudge()  # it may have grown
        for name in list(self.spoiled):
            # How far it has come nobody knows: nothing goes until it is repaired or deleted.
            for partition in topic.partitions:
                partition.log.pin(stream_group_folder(self._engine.folder, name), partition.log.start)

    def _open_or_note(self, name: str) -> None:
        try:
            self._open(name)
        except CorruptData as error:
            self.spoiled[name] = error
            logger.error("a group in stream mode cannot be opened", extra={"group": name, "error": str(error)})

    def _open(self, name: str) -> StreamGroup:
        folder = stream_group_folder(self._engine.folder, name)
        try:
            offsets = Offsets.open(self._engine.world, folder)
        except OSError as error:
            raise open_error(folder, error) from error
        offsets.log.on_attention = self._attention
        group = self._groups[name] = StreamGroup(self._engine, name, offsets)
        return group

    def _attention(self) -> None:
        self._engine.on_attention()  # looked up now: whoever keeps the engine has set it since
