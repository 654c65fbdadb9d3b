"""Topics that leave a data folder for another one, or come from there: what each of the two owners does.

A topic moves with all that belongs to it, file by file: its logs, the journals of its groups, its delayed messages and
dedup ids, its dead letters. What the folder keeps for all topics together goes along as *luggage*: the offsets that
stream groups committed, schedules, traced steps, and the key that signs receipts.

    moves/out/<topic>/note        this topic is about to leave: nobody may use it here
    moves/out/<topic>/...         its luggage
    moves/in/<topic>/note         this topic is about to come
    moves/in/<topic>/topic/       its files; `dead/` has those of its dead letters, and `luggage/` its luggage

Which folder has the topic is not decided here. The two notes carry the id of the move, and some third place that knows
one answer for good says whether the move with this id has taken place; in a cluster this is the table of placements.
Until that is known, a topic with a note cannot be used, neither here nor there. A note is durable before anything
depends on it, and is removed last. So whoever opens the folder after a crash finds what was begun, asks for the answer,
and finishes the move or undoes it. Each step may be repeated.

Sealed segments are copied while the topic is in use: they change only by being replaced, which their stamps show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    INTERNAL_PREFIX,
    LOCKS,
    TOPICS,
    names_in,
    sealed,
    topic_folder,
    unsealed,
)
from holdfast.broker.leases import KEY_FILE
from holdfast.broker.schedules import drop_schedules, schedules_for, take_schedules
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import Search, extent, search
from holdfast.env.disk import file_facts, write_fully
from holdfast.env.process import get_logger
from holdfast.errors import Conflict, CorruptData, HoldfastError, TopicExists, Unavailable
from holdfast.storage.files import LOCK, durable_replace, join, read_file, remove_tree, translated

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.streams.offsets import CommittedOffset
    from holdfast.broker.topic import Topic
    from holdfast.storage.log import Log

logger = get_logger(__name__)

MOVES: Final = "moves"
OUT: Final = f"{MOVES}/out"
IN: Final = f"{MOVES}/in"
PIECE_BYTES: Final = 1024 * 1024
_NOTE: Final = "note"
_TOPIC: Final = "topic"
_DEAD: Final = "dead"
_LUGGAGE: Final = "luggage"
_GROUPS: Final = "groups"
_TRACES: Final = "traces"
_SCHEDULES: Final = "schedules"
_ROLL_BYTES: Final = 4 * PIECE_BYTES  # an active segment of this size is sealed, so that it can be copied early
_STEPS_AT_ONCE: Final = 1_000


class MoveNote(msgspec.Struct, frozen=True, kw_only=True):
    """A move that was begun: its id, where the topic was and is to be, and the id of the move that took it there."""

    move: str
    topic: str
    source: int
    target: int
    before: str = ""


class MovedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that goes along, by its name at the target. The same stamp means the same bytes; none, that it may change.

    `at` is where it is in the folder of the source.
    """

    path: str
    at: str
    size: int
    stamp: tuple[int, ...] = ()


class TopicMoves:
    """The topics of one folder that are leaving or coming. Thread-safe; only the folder's owner has one.

    `is_elsewhere` says of any topic whether it belongs to another folder.
    """

    def __init__(self, engine: BrokerEngine, is_elsewhere: Callable[[str], bool]) -> None:
        self._engine = engine
        self._disk = engine.world.disk
        self.is_elsewhere = is_elsewhere
        self._lock = threading.Lock()
        self._traced: dict[str, int] = {}  # up to where the traces of a topic were packed
        self.leaving = self._notes(OUT)
        self.coming = self._notes(IN)
        engine.moves = self

    def refusal(self, name: str) -> HoldfastError | None:
        """Why a topic cannot be used here; None if it can."""
        if name in self.leaving or name in self.coming:
            return Unavailable(f"the topic {name} is moving to another shard; nothing was done. Try again")
        if self.is_elsewhere(name) and not name.startswith(INTERNAL_PREFIX):
            return Unavailable(f"the topic {name} is in another shard; nothing was done. Try again")
        return None

    def is_refused(self, name: str) -> bool:
        """Whether a topic, or the one that dead letters are of, is leaving or coming at the moment."""
        return bool(self.leaving or self.coming) and (
            (name := name.removesuffix(DEAD_SUFFIX)) in self.leaving or name in self.coming
        )

    # The source

    def sealed_files(self, name: str) -> list[MovedFile]:
        """What can be copied while the topic is in use; none if there is no such topic."""
        engine = self._engine
        if name not in engine.catalog:
            return []
        found = []
        with engine.using(name) as topic:
            for log in topic.logs():
                found += [self._file(name, path) for path in self._sealed(log)]
        return found

    def _sealed(self, log: Log) -> Iterator[str]:
        facts = log.segments()
        if facts and facts[-1].bytes > _ROLL_BYTES:
            log.roll()
            facts = log.segments()
        for each in facts:
            segment = log.sealed(each.base_offset)
            if segment is not None:
                yield segment.path.removeprefix(f"{self._engine.folder}/")

    def depart(self, note: MoveNote, *, only_new: bool = False) -> list[MovedFile]:
        """Stop all use of a topic, durably, until `stay` or `gone`; returns everything that goes along.

        Raises UnknownTopic if there is no such topic; with `only_new`, raises TopicExists if there is one. May be
        repeated with the same note.
        """
        name, engine = note.topic, self._engine
        with engine.alone_here(name):
            if self.leaving.get(name) == note:  # asked for once more
                return list(self._files(name))
            if name in self.leaving:
                raise Conflict(f"the topic {name} is already moving to shard {self.leaving[name].target}")
            engine.check_here(name)
            exists = name in engine.catalog
            if not exists and not only_new:
                engine.catalog.facts(name)  # raises UnknownTopic
            if only_new and exists:
                raise TopicExists(
                    f"topic {name} already exists in shard {note.source}. Nothing was changed; `holdfast topic move` "
                    "takes it to another one"
                )
            topic = engine.open_topic(name) if exists else None
            self._write_note(OUT, note)
            with self._lock:
                self.leaving = {**self.leaving, name: note}
            if topic is None:
                return []
            engine.let_go(topic)
            with translated(topic_folder(engine.folder, name)):
                self._pack(topic)
                return list(self._files(name))

    def packed_early(self, name: str) -> None:
        """Write the traced steps until now to the luggage, so that few are left for the pause."""
        with self._engine.alone_here(name):
            if name in self.leaving:  # a call that comes late: what is there now is needed
                return
            remove_tree(self._disk, join(self._engine.folder, f"{OUT}/{name}"))  # of an attempt that was undone
            self._traced[name] = 0
            self._pack_traces(name, f"{_TRACES}-0")

    def stay(self, name: str) -> None:
        """The move was undone: the topic can be used here as before."""
        self._forget(OUT, name)

    def gone(self, name: str) -> None:
        """The move has taken place: delete what is left of the topic."""
        engine = self._engine
        with translated(topic_folder(engine.folder, name)):
            if name in engine.catalog:
                engine.catalog.delete(name)
            for group in engine.streams.all():
                if any(entry.topic == name for entry in group.offsets.entries()):
                    group.offsets.forget(name)
            schedules = schedules_for(engine.locks(), name) if self._may_have_schedules() else {}
            if schedules:
                drop_schedules(engine.locks(), schedules)
                engine.schedules_changed()
        self._forget(OUT, name)

    def read(self, at: str, position: int, length: int) -> bytes:
        """Return a part of a file that goes along. Raises Unavailable if it was replaced or removed since."""
        if ".." in at.split("/") or not at.startswith((f"{TOPICS}/", f"{OUT}/")):
            raise Conflict(f"{at} is no file of a topic")
        try:
            with closing(self._disk.open(join(self._engine.folder, at))) as file:
                return file.read(position, length)
        except FileNotFoundError:
            raise Unavailable(f"{at} was removed before it could be copied; try again") from None

    # The target

    def expect(self, note: MoveNote) -> None:
        """Note durably that a topic is about to come. Until `arrive` or `give_up`, it cannot be used here."""
        with self._engine.alone_here(note.topic):
            if note.topic in self.coming or note.topic in self.leaving:
                raise Unavailable(f"the topic {note.topic} is already moving; try again")
            if note.topic in self._engine.catalog:
                raise TopicExists(
                    f"there is a topic {note.topic} in shard {note.target} that nobody can use: it does not belong "
                    "there. Nothing was moved; look at it with `holdfast check`"
                )
            self._write_note(IN, note)
            with self._lock:
                self.coming = {**self.coming, note.topic: note}

    def write(self, name: str, path: str, position: int, content: bytes, size: int) -> None:
        """Write a part of a file that has come; the last one syncs it. Stretches of zeros take no room."""
        if name not in self.coming or ".." in path.split("/"):
            raise Conflict(f"{path} does not belong to a topic that is coming")
        place = join(self._engine.folder, f"{IN}/{name}/{path}")
        with translated(place):
            if not position:
                self._disk.make_folder(place.rpartition("/")[0])
            with closing(self._disk.open(place, write=True, create=True)) as file:
                if not position:
                    file.truncate(0)
                if content.strip(b"\0"):
                    write_fully(file, position, [content])
                if position + len(content) >= size:
                    file.truncate(size)
                    file.sync()

    def complete(self, name: str, files: Sequence[MovedFile]) -> None:
        """Remove files that came early and do not go along after all, and wait until the rest is durable."""
        root = join(self._engine.folder, f"{IN}/{name}")
        wanted = {file.path for file in files}
        with translated(root):
            for path in list(self._below(root)):
                if path != _NOTE and path not in wanted:
                    self._disk.remove(join(root, path))
            for folder in {path.rpartition("/")[0] for path in wanted}:
                self._disk.sync_folder(join(root, folder))
            self._disk.sync_folder(root)

    def arrive(self, name: str) -> None:
        """The move has taken place: the topic lives here. May be repeated after a crash at any point."""
        engine, disk = self._engine, self._disk
        root = join(engine.folder, f"{IN}/{name}")
        here, luggage = topic_folder(engine.folder, name), join(root, _LUGGAGE)
        with translated(root), engine.alone_here(name):
            key = read_file(disk, join(luggage, KEY_FILE))
            if key is not None and disk.exists(join(root, _TOPIC)):
                durable_replace(disk, join(root, _TOPIC), KEY_FILE, key)
            self._unpack_groups(luggage)
            content = read_file(disk, join(luggage, _SCHEDULES))
            schedules = {} if content is None else msgspec.msgpack.decode(content, type=dict[str, bytes])
            if schedules:
                take_schedules(engine.locks(), schedules)
            for part, place in ((_DEAD, here + DEAD_SUFFIX), (_TOPIC, here)):  # by the latter, it is a topic
                if disk.exists(join(root, part)):
                    disk.make_folder(join(engine.folder, TOPICS))
                    disk.rename(join(root, part), place)
                    disk.sync_folder(join(engine.folder, TOPICS))
            self._unpack_traces(luggage)
            self._forget(IN, name)
        engine.list_parts()
        if schedules:
            engine.schedules_changed()

    def give_up(self, name: str) -> None:
        """The move was undone: remove what has come."""
        self._forget(IN, name)

    # Within

    def _notes(self, above: str) -> dict[str, MoveNote]:
        found, folder = {}, join(self._engine.folder, above)
        for name in names_in(self._engine.world, folder):
            path = join(folder, f"{name}/{_NOTE}")
            content = read_file(self._disk, path)
            if content is None:  # nothing depends on it yet, or any more
                remove_tree(self._disk, join(folder, name))
                continue
            try:
                found[name] = msgspec.json.decode(unsealed(content, path), type=MoveNote)
            except msgspec.MsgspecError as error:
                raise CorruptData(f"{path} cannot be read: {error}. Restore it from a copy") from error
        return found

    def _write_note(self, above: str, note: MoveNote) -> None:
        folder = join(self._engine.folder, f"{above}/{note.topic}")
        with translated(folder):
            if above == IN:  # what an earlier attempt has left
                remove_tree(self._disk, folder)
            self._disk.make_folder(join(self._engine.folder, TOPICS))  # first: it makes this a data folder
            self._disk.make_folder(folder)
            durable_replace(self._disk, folder, _NOTE, sealed(msgspec.json.encode(note)))

    def _forget(self, above: str, name: str) -> None:
        """Remove a note and what is beside it, the note first: what has none is removed by the next owner."""
        folder = join(self._engine.folder, f"{above}/{name}")
        with translated(folder):
            if self._disk.exists(join(folder, _NOTE)):
                self._disk.remove(join(folder, _NOTE))
                self._disk.sync_folder(folder)
            with self._lock:
                kept = {each: note for each, note in self._of(above).items() if each != name}
                if above == OUT:
                    self.leaving = kept
                else:
                    self.coming = kept
            with suppress(OSError):
                remove_tree(self._disk, folder)
        self._traced.pop(name, None)

    def _of(self, above: str) -> dict[str, MoveNote]:
        return self.leaving if above == OUT else self.coming

    def _files(self, name: str) -> Iterator[MovedFile]:
        folder = self._engine.folder
        for at in (f"{TOPICS}/{name}", f"{TOPICS}/{name}{DEAD_SUFFIX}", f"{OUT}/{name}"):
            for path in self._below(join(folder, at)):
                base = path.rpartition("/")[2]
                if base != LOCK and not base.endswith(".tmp") and not (at.startswith(OUT) and path == _NOTE):
                    yield self._file(name, f"{at}/{path}")

    def _file(self, name: str, at: str) -> MovedFile:
        """A file of the topic. What is in a store and not here has no stamp: it is fetched in any case."""
        place = join(self._engine.folder, at)
        path = at.removeprefix(f"{OUT}/{name}/")
        if path != at:
            path = f"{_LUGGAGE}/{path}"
        elif at.startswith(f"{TOPICS}/{name}{DEAD_SUFFIX}/"):
            path = at.replace(f"{TOPICS}/{name}{DEAD_SUFFIX}", _DEAD, 1)
        else:
            path = at.replace(f"{TOPICS}/{name}", _TOPIC, 1)
        facts = file_facts(place)
        if facts is not None:
            stamp = (facts.inode, facts.size, facts.changed_ns, facts.renamed_ns)
            return MovedFile(path, at, facts.size, stamp)
        with closing(self._disk.open(place)) as file:
            return MovedFile(path, at, file.size())

    def _below(self, folder: str) -> Iterator[str]:
        if not self._disk.exists(folder):
            return
        for name in self._disk.names(folder):
            if self._disk.is_folder(join(folder, name)):
                yield from (f"{name}/{path}" for path in self._below(join(folder, name)))
            else:
                yield name

    # Luggage

    def _pack(self, topic: Topic) -> None:
        engine, folder = self._engine, join(self._engine.folder, f"{OUT}/{topic.name}")
        key = topic.key.existing()
        if key is not None:
            durable_replace(self._disk, folder, KEY_FILE, key)
        groups: dict[str, list[CommittedOffset]] = {}
        for group in engine.streams.all():
            entries = [each for each in group.offsets.entries() if each.topic == topic.name]
            if entries:
                groups[group.name] = entries
        durable_replace(self._disk, folder, _GROUPS, msgspec.msgpack.encode(groups))
        if self._may_have_schedules():
            schedules = schedules_for(engine.locks(), topic.name)
            durable_replace(self._disk, folder, _SCHEDULES, msgspec.msgpack.encode(schedules))
        self._pack_traces(topic.name, f"{_TRACES}-1")

    def _may_have_schedules(self) -> bool:
        return self._engine.has_locks or self._disk.exists(join(self._engine.folder, LOCKS))

    def _pack_traces(self, name: str, file_name: str) -> None:
        log = self._engine.traces.log.readable()
        if log is None:
            return
        folder = join(self._engine.folder, f"{OUT}/{name}")
        self._disk.make_folder(folder)
        since = max(self._traced.get(name, 0), log.start)
        until = extent(log).stop
        steps = list(search(log, Search(topic=name), after=since - 1, before=until))
        if steps:
            durable_replace(self._disk, folder, file_name, msgspec.msgpack.encode(steps))
        self._traced[name] = until

    def _unpack_groups(self, luggage: str) -> None:
        from holdfast.broker.streams.offsets import CommittedOffset

        content = read_file(self._disk, join(luggage, _GROUPS))
        if content is None:
            return
        for name, entries in msgspec.msgpack.decode(content, type=dict[str, list[CommittedOffset]]).items():
            offsets = self._engine.streams.group(name, create=True).offsets
            offsets.wait(offsets.commit(entries, "fsync"))

    def _unpack_traces(self, luggage: str) -> None:
        for name in names_in(self._engine.world, luggage):
            if name.startswith(_TRACES):
                content = read_file(self._disk, join(luggage, name)) or b"\x90"
                steps = msgspec.msgpack.decode(content, type=list[TraceStep])
                for first in range(0, len(steps), _STEPS_AT_ONCE):
                    self._engine.traces.log.take_over(steps[first : first + _STEPS_AT_ONCE])
                self._disk.remove(join(luggage, name))
