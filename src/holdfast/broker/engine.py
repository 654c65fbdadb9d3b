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
from holdfast.broker.hands import Delivered
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    group_folder,
    message_id,
    parse_message_id,
    partition_folder,
    topic_folder,
    topic_for,
    topics,
)
from holdfast.broker.marks import DELAYED_ID, mark
from holdfast.broker.metrics import Metrics, MetricsSnapshot, Observer
from holdfast.broker.partition import Partition
from holdfast.broker.policy import dead_settings, keep_settings, settings_for
from holdfast.delivery.commands import Cancel, Command, Receipt
from holdfast.delivery.events import Buried, Event
from holdfast.env import World, close_in_children, real_world
from holdfast.errors import (
    Closed,
    CorruptData,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    NotALog,
    NotAQueue,
)
from holdfast.model import Appended, Durability, Record
from holdfast.settings import QueueSettings
from holdfast.storage.keeper import Keeper, soonest
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
    refused: LeaseLost | None = None  # for some of the messages; the others count

    @property
    def buried(self) -> bool:
        """Whether a message died, and has still to be moved."""
        return any(isinstance(event, Buried) for event in self.events)


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
        self._told = ""
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
            self._inter()
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
            chosen = settings_for(world, topic_folder(folder, topic), settings, changes or {})
            world.disk.make_folder(topic_folder(folder, topic))
            engine = QueueEngine(world, folder, topic, chosen, Metrics(observer))
        except OSError as error:
            raise _open_error(folder, error) from error
        try:
            keep_settings(world, topic_folder(folder, topic), chosen)
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
        self._inter()
        return iter(()) if self._graves is None else self._graves.all()

    def letter(self, offset: int) -> DeadLetter | None:
        """The dead letter at an offset of its own log, if there is one."""
        self.check_open()
        self._inter()
        return None if self._graves is None else self._graves.letter(offset)

    def _open_graves(self) -> Graveyard:
        topic, settings = self.topic + DEAD_SUFFIX, dead_settings(self.settings)
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

    def resume(self, receipt: Receipt) -> Delivered:
        """The message that a receipt stands for, if it is still held."""
        self.check_open()
        if not self.delivery.holds(receipt):
            raise self.delivery.refusal(receipt)
        (record,) = self.delivery.fetch([receipt.offset]) or (None,)
        if record is None:
            raise CorruptData(f"message {receipt.offset} cannot be read; run `holdfast check` on {self.folder}")
        group = self.delivery.group
        return Delivered(record, group.leases[receipt.offset], group.attempts(receipt.offset) + 1)

    def cancel(self, message: object) -> bool:
        """Take back a message that nobody works on, wherever it waits; False where it is too late."""
        offset, delayed_id = parse_message_id(message, self.topic)
        self.check_open()
        done = False
        if delayed_id is not None:
            if not self.partition.was_delayed(delayed_id):
                raise InvalidRequest(f"there is no message {message}")
            done = self.partition.cancel_delayed(delayed_id)
            offset = None if done else self.partition.find_released(delayed_id, self.delivery.group.floor)
        if offset is not None:
            if offset >= self.partition.log.written_end:
                raise InvalidRequest(f"there is no message {message}")
            pending = self.settle(Cancel(offset))
            self.wait(pending)
            done = bool(pending.events)
        if done:
            self.metrics.cancelled.add()
        return done

    def settle(self, command: Command, durability: Durability | None = None) -> Pending:
        """Carry out a command of a holder or an operator. Then `wait`."""
        self.check_open()
        return Pending(*self.delivery.settle(command, durability))

    def settle_all(self, commands: Sequence[Command]) -> Pending:
        """Carry out commands for different messages as one; `wait` raises LeaseLost for those that are refused."""
        self.check_open()
        return Pending(*self.delivery.settle_all(commands))

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
            self._inter()
        if pending.refused is not None:
            raise pending.refused

    async def wait_async(self, pending: Pending) -> None:
        """The same for a task."""
        if pending.appended is not None:
            await self.delivery.journal.log.wait_async(pending.appended)
        if pending.buried:
            await asyncio.to_thread(self._inter)
        if pending.refused is not None:
            raise pending.refused

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        self.check_open()
        due: list[int | None] = []
        failure: Exception | None = None
        for upkeep in self._upkeep():
            try:
                due.append(upkeep())
            except (HoldfastError, OSError) as error:  # one part that fails must not keep the others from their work
                failure = failure or error
                due.append(_AFTER_ERROR_MS)
        if failure is not None and str(failure) != self._told:  # once, not at every tick
            self._told = str(failure)
            logger.error("upkeep failed", extra={"folder": self.folder, "error": str(failure)})
        return soonest(*due)

    def due_ms(self) -> int | None:
        """In how many ms something happens to a message by itself; upkeep of the files is not counted."""
        return soonest(self.partition.due_ms(), self.delivery.due_ms())

    def _upkeep(self) -> Iterator[Callable[[], int | None]]:
        yield self.partition.tick
        yield self.delivery.tick
        yield self._inter
        if self._graves is not None:
            yield self._graves.target.tick
            yield self._graves.letters.tick

    def _inter(self) -> None:
        """Move what died into the dead letters, whose topic is made when the first one does."""
        if self.delivery.group.burials:
            self.graves().inter()

    def compact(self) -> Compacted:
        """Let go of all messages that are done, and of the journal behind a new snapshot."""
        self.check_open()
        segments = size = journal_bytes = 0
        for partition, delivery in self._parts():
            journal_bytes += delivery.compact()
            partition.save()
            partition.log.roll()
            freed = partition.log.trim(delivery.group.floor)
            segments += freed.segments
            size += freed.bytes
        return Compacted(segments=segments, bytes=size, journal_bytes=journal_bytes)

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
