"""A queue in a folder: one topic, one partition, one group, and its dead letters."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from typing import Any, Final

import msgspec

from holdfast.broker.dead import DeadLetter, Graveyard
from holdfast.broker.delivery import Delivery
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    SETTINGS,
    group_folder,
    message_id,
    partition_folder,
    topic_folder,
    topic_for,
    topics,
)
from holdfast.broker.marks import DELAYED_ID, mark
from holdfast.broker.metrics import Metrics, MetricsSnapshot, Observer
from holdfast.broker.partition import Partition
from holdfast.delivery.commands import Command, Receipt
from holdfast.delivery.events import Buried, Event
from holdfast.env import World, close_in_children, real_world
from holdfast.errors import (
    BadSettings,
    Closed,
    CorruptData,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    NotALog,
    NotAQueue,
)
from holdfast.model import Appended, Durability, Record, Trimmed
from holdfast.settings import QueueSettings, load
from holdfast.storage.files import durable_replace, join, read_file
from holdfast.storage.keeper import Keeper
from holdfast.storage.lock import take_lock
from holdfast.storage.opening import open_error

logger = logging.getLogger(__name__)

_AFTER_ERROR_MS: Final = 1_000
_SHARE_IT: Final = "Close it there and try again; in one process share the queue object: it is safe for threads"


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment: how many messages stand where, what they take, and what was counted since opening."""

    name: str
    folder: str
    ready: int
    leased: int
    delayed: int
    dead: int
    start: int
    end: int
    floor: int
    bytes: int
    segments: int
    waiters: int
    durability: Durability
    metrics: MetricsSnapshot


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction freed."""

    segments: int
    bytes: int
    journal_bytes: int


class Pending(msgspec.Struct, frozen=True, gc=False):
    """Something was decided and written; `QueueEngine.wait` returns when it is as safe as it should be."""

    events: Sequence[Event] = ()
    appended: Appended | None = None
    buried: bool = False
    refused: LeaseLost | None = None  # for some of the messages; the others count


class QueueEngine:
    """What both faces of a queue, for threads and for tasks, stand on. Calls are short; only the waits wait."""

    def __init__(self, world: World, folder: str, topic: str, settings: QueueSettings, metrics: Metrics) -> None:
        self.world = world
        self.folder = folder
        self.topic = topic
        self.settings = settings
        self.metrics = metrics
        self.closed = False
        self._forked = False
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        note = world.ids.process_note()
        self.holder = f"{note['host']}:{note['pid']}"
        self._told: Exception | None = None
        self._graves_lock = threading.Lock()
        self._graves: Graveyard | None = None
        close_in_children(self)
        self._closing = ExitStack()  # lets go of everything, in the other order, whatever fails on the way
        try:
            self._closing.callback(take_lock(world, folder, _SHARE_IT).release)
            self.partition = Partition.open(world, partition_folder(folder, topic), settings, metrics)
            self._closing.callback(self.partition.close)
            self.delivery = self._open_delivery(self.partition, topic, settings, metrics)
            self.delivery.dead_end = self._dead_end
            self.delivery.holder = self.holder
            if world.disk.exists(topic_folder(folder, topic + DEAD_SUFFIX)):
                self.graves()
            self.delivery.recover()
            if self.delivery.group.burials:
                self.graves().inter()
        except BaseException:
            self.closed = True
            self._closing.close()
            raise

    @staticmethod
    def open(
        folder: str | PathLike[str],
        *,
        create: bool = True,
        settings: QueueSettings | None = None,
        changes: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
        world: World | None = None,
    ) -> QueueEngine:
        """Own the queue in the folder. `changes` to its settings are kept there for the next opening."""
        folder = _path(folder)
        world = world or real_world()
        try:
            found = topics(world, folder)
            if not found and not create:
                there = "holds no queue" if world.disk.exists(folder) else "does not exist"
                raise NotAQueue(f"{folder} {there}; open it with create=True to make one")
            if not found:
                _check_empty(world, folder)
            topic = found[0] if found else topic_for(folder)
            chosen = _settings(world, topic_folder(folder, topic), settings, changes or {})
            world.disk.make_folder(topic_folder(folder, topic))
            engine = QueueEngine(world, folder, topic, chosen, Metrics(observer))
        except OSError as error:
            raise _open_error(folder, error) from error
        try:
            _keep_settings(world, topic_folder(folder, topic), chosen)
        except OSError as error:
            engine.close()
            raise _open_error(folder, error) from error
        return engine

    def keep(self) -> None:
        """Give it a thread that looks after what falls due."""
        # Now and then a look at the wall clock, which may have been set.
        Keeper(self, at_most_ms=60_000).start()

    def graves(self) -> Graveyard:
        """The dead letters; their topic is made when first needed."""
        with self._graves_lock:
            if self._graves is None:
                self.check_open()
                self._graves = self._open_graves()
            return self._graves

    def letters(self) -> Iterator[DeadLetter]:
        """The dead letters, those on their way included."""
        self.check_open()
        if self.delivery.group.burials:
            self.graves().inter()
        return iter(()) if self._graves is None else self._graves.all()

    def letter(self, offset: int) -> DeadLetter | None:
        """The dead letter at an offset of its own log, if there is one."""
        self.check_open()
        if self.delivery.group.burials:
            self.graves().inter()
        return None if self._graves is None else self._graves.letter(offset)

    def _open_graves(self) -> Graveyard:
        topic, settings = self.topic + DEAD_SUFFIX, _dead_settings(self.settings)
        try:
            self.world.disk.make_folder(topic_folder(self.folder, topic))
        except OSError as error:
            raise _open_error(topic_folder(self.folder, topic), error) from error
        metrics = Metrics()
        with ExitStack() as opened:
            partition = Partition.open(self.world, partition_folder(self.folder, topic), settings, metrics)
            opened.callback(partition.close)
            letters = self._open_delivery(partition, topic, settings, metrics, opened)
            graves = Graveyard(
                self.partition,
                self.delivery,
                partition,
                letters,
                topic=self.topic,
                group=DEFAULT_GROUP,
                id_of=self.id_of,
            )
            graves.recover_redrives()
            letters.recover()
            graves.recover()
            self._closing.callback(opened.pop_all().close)
        return graves

    def _open_delivery(
        self,
        partition: Partition,
        topic: str,
        settings: QueueSettings,
        metrics: Metrics,
        closing: ExitStack | None = None,
    ) -> Delivery:
        folder = group_folder(self.folder, topic, 0, DEFAULT_GROUP)
        delivery = Delivery.open(self.world, partition.log, folder, settings, metrics)
        (closing or self._closing).callback(delivery.close)
        partition.deliveries.append(delivery)
        for part in (delivery, partition.log, delivery.journal.log):
            part.on_attention = self._attention
        return delivery

    def _dead_end(self) -> int:
        return 0 if self._graves is None else self._graves.target.log.written_end

    def settle(self, command: Command, durability: Durability | None = None) -> Pending:
        """Carry out a command of a holder or an operator. Then `wait`."""
        self.check_open()
        events, appended = self.delivery.settle(command, durability)
        return Pending(events, appended, any(isinstance(event, Buried) for event in events))

    def settle_all(self, commands: Sequence[Command]) -> Pending:
        """Carry out commands for different messages as one; `wait` raises LeaseLost for those that are refused."""
        self.check_open()
        events, appended, refused = self.delivery.settle_all(commands)
        return Pending(events, appended, any(isinstance(event, Buried) for event in events), refused)

    def ack(self, receipts: Sequence[Receipt], durability: Durability | None = None) -> Pending:
        """Ack what is still held; `wait` raises LeaseLost for the others."""
        self.check_open()
        appended, refused = self.delivery.ack(receipts, durability)
        return Pending(appended=appended, refused=refused)

    def wait(self, pending: Pending) -> None:
        """Return when what was decided is as durable as asked, and dead letters are where they belong."""
        if pending.appended is not None:
            self.delivery.journal.log.wait(pending.appended)
        if pending.buried:
            self.graves().inter()
        if pending.refused is not None:
            raise pending.refused

    async def wait_async(self, pending: Pending) -> None:
        """The same for a task."""
        if pending.appended is not None:
            await self.delivery.journal.log.wait_async(pending.appended)
        if pending.buried:
            await asyncio.to_thread(lambda: self.graves().inter())
        if pending.refused is not None:
            raise pending.refused

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        self.check_open()
        due: list[int] = []
        failure: Exception | None = None
        for upkeep in self._upkeep():
            try:
                ms = upkeep()
            except (HoldfastError, OSError) as error:  # one part that fails must not keep the others from their work
                failure = failure or error
                ms = _AFTER_ERROR_MS
            if ms is not None:
                due.append(ms)
        if failure is not None and failure is not self._told and str(failure) != str(self._told):
            self._told = failure
            logger.error("upkeep failed", extra={"folder": self.folder, "error": str(failure)})
        return min(due, default=None)

    def due_ms(self) -> int | None:
        """In how many ms something happens to a message by itself; upkeep of the files is not counted."""
        due = [self.partition.due_ms(), self.delivery.due_ms()]
        return min((ms for ms in due if ms is not None), default=None)

    def _upkeep(self) -> Iterator[Callable[[], int | None]]:
        yield self.partition.tick
        yield self.delivery.tick
        if self.delivery.group.burials:
            yield self._inter
        if self._graves is not None:
            yield self._graves.target.tick
            yield self._graves.letters.tick

    def _inter(self) -> None:
        self.graves().inter()

    def compact(self) -> Compacted:
        """Let go of all messages that are done, and of the journal behind a new snapshot."""
        self.check_open()
        journal_bytes = 0
        trimmed = Trimmed(0, 0, 0)
        for partition, delivery in self._parts():
            journal_bytes += delivery.compact()
            delivery.pin()
            delivery.pin()
            partition.save()
            partition.log.roll()
            freed = partition.log.trim(delivery.group.floor)
            trimmed = Trimmed(trimmed.segments + freed.segments, trimmed.bytes + freed.bytes, 0)
        return Compacted(segments=trimmed.segments, bytes=trimmed.bytes, journal_bytes=journal_bytes)

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self.check_open()
        for partition, delivery in self._parts():
            partition.sync()
            delivery.journal.log.sync()

    def stats(self) -> QueueStats:
        self.check_open()
        log, group = self.partition.log, self.delivery.group
        segments = log.segments()  # reads indexes from disk: not while consumers wait for the lock
        with self.delivery.lock:
            waiting = 0 if self.partition.delayed is None else len(self.partition.delayed)
            return QueueStats(
                name=self.topic,
                folder=self.folder,
                ready=group.ready_count(log.end),
                leased=len(group.leases),
                delayed=len(group.waiting) + waiting,
                dead=len(group.burials) + self._dead_count(),
                start=log.start,
                end=log.end,
                floor=group.floor,
                bytes=sum(segment.bytes for segment in segments),
                segments=len(segments),
                waiters=len(self.delivery.waiters),
                durability=self.settings.durability,
                metrics=self.metrics.snapshot(),
            )

    def _dead_count(self) -> int:
        graves = self._graves
        return 0 if graves is None else graves.letters.group.ready_count(graves.target.log.end)

    def id_of(self, record: Record) -> str:
        """The message's id: it keeps the one that it had while it was delayed."""
        delayed_id = mark(record, DELAYED_ID) if record.headers else None
        return message_id(self.topic, 0, record.offset, None if delayed_id is None else int(delayed_id))

    def disown(self) -> None:
        """In a child after a fork: the parent owns the folder, and goes on with it."""
        self.closed = self._forked = True

    def check_open(self) -> None:
        if self._forked:
            raise Closed(
                f"the queue in {self.folder} was opened before a fork, by the parent, which still owns it. Open queues "
                "after forking, in the one process that is to own them"
            )
        if self.closed:
            raise Closed(f"the queue in {self.folder} is closed; open it again to use it")

    def close(self) -> None:
        """Sync, save, let go of the folder. Closing twice is fine."""
        with self._graves_lock:
            if self.closed:
                return
            self.closed = True
        self.before_close()
        self._closing.close()

    def _parts(self) -> list[tuple[Partition, Delivery]]:
        parts = [(self.partition, self.delivery)]
        if self._graves is not None:
            parts.append((self._graves.target, self._graves.letters))
        return parts

    def _attention(self) -> None:
        self.on_attention()


def _open_error(folder: str, error: OSError) -> HoldfastError:
    failure = open_error(folder, error)
    if isinstance(failure, NotALog):
        return NotAQueue(f"cannot open {folder}: {error.strerror or error}; a queue lives in a folder")
    return failure


def _path(folder: str | PathLike[str]) -> str:
    try:
        path: object = fspath(folder)
    except TypeError:
        raise InvalidRequest(f"the folder must be a path, not {type(folder).__name__}") from None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest(f"{path!r} cannot be the path of a folder")
    return path.rstrip("/") or "/"


def _check_empty(world: World, folder: str) -> None:
    """A queue is made in a folder that is new or empty: never among somebody's files."""
    if world.disk.exists(folder):
        names = [name for name in world.disk.names(folder) if name != "lock"]
        if names and names != ["topics"]:
            raise NotAQueue(
                f"{folder} holds other files ({', '.join(names[:3])}, ...) and no queue; choose a new or empty folder"
            )


def _settings(world: World, folder: str, given: QueueSettings | None, changes: Mapping[str, Any]) -> QueueSettings:
    """Those given, or those that the folder keeps, with the changes."""
    if given is not None:
        if not isinstance(given, QueueSettings):
            raise BadSettings(f"settings must be QueueSettings, not {type(given).__name__}")
        return load(QueueSettings, {**msgspec.structs.asdict(given), **changes})
    return load(QueueSettings, {**_kept_settings(world, join(folder, SETTINGS)), **changes})


def _kept_settings(world: World, path: str) -> dict[str, Any]:
    content = read_file(world.disk, path)
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(content, type=dict[str, Any])
        if isinstance(kept.get("priority_weights"), list):
            kept["priority_weights"] = tuple(kept["priority_weights"])
        load(QueueSettings, kept)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}. Mend it, or remove it to get the defaults") from error
    except BadSettings as error:
        raise BadSettings(f"{path} cannot be used: {error}. Mend it, or remove it to get the defaults") from None
    return kept


# Chosen by each program for itself: a weaker promise must never come from a file.
_NOT_KEPT: Final = frozenset({"durability", "ack_durability"})


def _keep_settings(world: World, folder: str, settings: QueueSettings) -> None:
    """Note what differs from the defaults, so that every opener means the same queue."""
    defaults = QueueSettings()
    differing = {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name not in _NOT_KEPT and getattr(settings, name) != getattr(defaults, name)
    }
    content = msgspec.json.format(msgspec.json.encode(differing))
    known = read_file(world.disk, join(folder, SETTINGS))
    if content != known and (differing or known is not None):
        durable_replace(world.disk, folder, SETTINGS, content)


def _dead_settings(settings: QueueSettings) -> QueueSettings:
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
    )
