"""One partition: the log that messages are published to, with the dedup check and the delays in front of it.

publish ──► dedup id seen within the window? ── yes ──► answered as a duplicate
                 │ no
                 ├── due later ──► delayed/ ── when due ──┐
                 │                                       v
                 └──────────────────────────────────► the log ──► the groups

A batch is written as a whole: if any of its messages has a delay, all of them go to `delayed/`, because one write is
atomic and two are not. A release appends the due messages to the log, synced, before `delayed/` forgets them. If a
crash comes in between, the next opening finds them in the log by their delayed ids and does not release them again.

Lock order: `_urgent_lock` is taken before the locks of all deliveries, and those are held during a write with
priorities: no consumer may see a message before its group knows the message's priority. `_release_lock` comes before
both. It covers everything that leaves `delayed/`, so a message is either released or cancelled, never both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import structs

from holdfast.broker.dedup.runs import Covered
from holdfast.broker.messages import (
    DELAYED_ID,
    Draft,
    DraftFields,
    Manner,
    Place,
    Publication,
    batch_of,
    mark,
    moved_records,
    released_batch,
)
from holdfast.broker.metrics import Metrics
from holdfast.broker.producers import KnownBatch, Sequences
from holdfast.broker.tracing.log import PartitionTracer
from holdfast.broker.waiters import Waiters
from holdfast.codec.encode import single_head
from holdfast.delivery.group import LEVELS
from holdfast.env import World
from holdfast.env.process import asyncio, stand_back
from holdfast.errors import Closed, CorruptData
from holdfast.later import on_demand
from holdfast.model import NO_PRODUCER, Appended, Batch, CodecName, Durability, LogPosition, Producer
from holdfast.settings import TopicSettings
from holdfast.storage.files import join
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.broker import delayed
    from holdfast.broker.dead_letters import DeadPartition
    from holdfast.broker.delayed import Delayed, DelayStore
    from holdfast.broker.delivery import Delivery
    from holdfast.broker.leases import Prover
else:  # most queues have no delayed messages
    delayed = on_demand("holdfast.broker.delayed")

__all__ = ["Draft", "LostPartition", "Partition", "Place", "Publication", "Site"]


# Messages released at a time: about 5 ms of work, during which newly due messages wait. If the sync takes longer than
# the rest of the work, the next batch grows until both take about as long. While releases are late it doubles, as long
# as the work for it stays short: what comes due meanwhile has to wait.
_RELEASE_MOST: Final = 1_000
_RELEASE_MOST_EVER: Final = 8_000
_RELEASE_WORK_NS: Final = 40_000_000
# If releases are this late, callers that publish delayed messages help to release those that are due.
_HELP_FROM_MS: Final = 10
_ALONE: Final = [bytes([level]) for level in range(LEVELS)]  # the priorities of a batch of one
_SOON_MS: Final = 1_000  # a message due sooner may be due by the time it is written
STREAM_PIN: Final = "stream:"  # prefix of the pins of groups in stream mode

_Written = TypeVar("_Written", bound=Appended | int)  # the int is an offset, or -1 if nothing was written


class Site(NamedTuple):
    """Where a delivery belongs, and what it shares with the rest of its topic."""

    topic: str
    number: int
    partition: Partition
    check_open: Callable[[], None]
    open_dead: Callable[[int], DeadPartition]
    prover: Callable[[], Prover]


class Partition:
    """Accepts messages. Thread-safe."""

    lost: CorruptData | None = None  # set by LostPartition

    def __init__(self, world: World, folder: str, settings: TopicSettings, metrics: Metrics, log: Log) -> None:
        self.world = world
        self._folder = folder
        self._settings = settings
        self._metrics = metrics
        self.log = log
        self.log.on_readable = self.wake
        self.log.done_before = self._done_before
        self.deliveries: list[Delivery] = []
        self.lines: tuple[Waiters, ...] = ()  # waiting consumers, one line for each group
        self._lines_lock = threading.Lock()
        self.on_attention: Callable[[], None] = lambda: None
        self.on_new_part: Callable[[], None] = lambda: None  # called when `delayed/` is created
        self.on_pause: Callable[[], object] = self.release_late  # called at intervals during long work
        self.tracer: PartitionTracer | None = None  # set while the topic is sampled
        self.delayed: DelayStore | None = None
        self.lost_delays: CorruptData | None = None  # why its delayed messages cannot be used
        self.publish_unseen: Callable[[Sequence[Draft], Manner], Publication] = self.store  # or the dedup check
        self.publish_one_unseen: Callable[[DraftFields, Durability, int], int] = self.store_one
        self._needed_for_dedup: Covered | None = None
        self.sequences: Sequences | None = None
        self._lock = threading.Lock()  # guards the opening of `sequences`
        self._release_lock = threading.Lock()  # guards the opening of `delayed` and what leaves it
        self._release_most = _RELEASE_MOST  # size of the next batch
        self._urgent_lock = threading.Lock()  # held during a write with priorities
        self.closed = False

    @staticmethod
    def open(
        world: World,
        folder: str,
        settings: TopicSettings,
        metrics: Metrics,
        *,
        lost_delays: CorruptData | None = None,
    ) -> Partition:
        """Open the partition in the folder; it is created if there is none.

        `lost_delays` is raised by every call that needs the delayed messages, which are lost.
        """
        log = Log.open(join(folder, "log"), settings, world)
        partition = Partition(world, folder, settings, metrics, log)
        partition.lost_delays = lost_delays
        try:
            if lost_delays is None and world.disk.exists(join(folder, "delayed")):
                try:
                    partition._open_delayed()
                except CorruptData as error:
                    partition.lost_delays = error
            if partition.lost_delays is not None:
                # If they are restored, the log must still show what was released, or it would be released again.
                log.pin("delayed", log.start)
            if world.disk.exists(join(folder, "producers")):
                partition.open_sequences()
        except BaseException:
            partition.close()
            raise
        return partition

    def change(self, settings: TopicSettings) -> None:
        """Apply new settings."""
        self._settings = settings
        self.log.change(settings)

    def publish(
        self,
        drafts: Sequence[Draft],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        any_size: bool = False,
    ) -> Publication:
        """Write messages, all or none, leaving out duplicates. Call `wait` afterwards.

        With `any_size`, the size limits are not checked: the messages were accepted and staged before.
        """
        manner = Manner(durability, codec, any_size)
        if any(draft.dedup_id is not None for draft in drafts):
            return self.publish_unseen(drafts, manner)
        return self.store(drafts, manner)

    def publish_one(self, fields: DraftFields, chosen: Durability, time_ns: int = 0) -> int:
        """Fused form of `publish` for the fields of one draft; -1 if only `publish` can write it.

        That is so for duplicates, and for messages that are large or to be compressed. Returns the offset, or the
        delayed id if there is a due time. Unless it is to be synced, nothing has to be waited for.
        """
        if fields[6] is None:
            return self.store_one(fields, chosen, time_ns)
        return self.publish_one_unseen(fields, chosen, time_ns)

    def store_one(self, fields: DraftFields, chosen: Durability, time_ns: int = 0) -> int:
        """Fused form of `store` for one message; -1 if only that can write it."""
        value, key, headers, priority, expires_at_ms, due_at_ms, _, flags = fields
        head, columns = single_head(len(value), key, headers, priority, expires_at_ms, due_at_ms, flags)
        tracer = self.tracer
        if tracer is None and not due_at_ms and not priority:
            return self.log.write_alone(value, chosen, head, columns, time_ns)
        at_ns = 0 if tracer is None else time_ns or tracer.now_ns()  # before the write: it may be received at once
        if due_at_ms:
            place = self._open_delayed().write_one(fields, head, columns, chosen, time_ns)
        elif priority:
            # Not a lambda: it would slow down all uses of its variables here.
            write = partial(self.log.write_alone, value, chosen, head, columns, time_ns)
            place = self.telling_groups(write, _ALONE[priority])
        else:
            place = self.log.write_alone(value, chosen, head, columns, time_ns)
        if tracer is not None and place >= 0:
            if due_at_ms:
                tracer.delayed([headers], place, [due_at_ms], at_ns)
            else:
                tracer.published_one(headers, place, at_ns)
        return place

    def append(
        self,
        messages: Sequence[bytes] | Batch,
        producer: Producer = NO_PRODUCER,
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> tuple[Appended, KnownBatch | None]:
        """Write messages without delays or dedup ids. Call `log.wait` afterwards.

        Returns the known batch instead if the producer has already written these messages.
        """
        known = None
        if not producer.id:
            appended = self._write(messages, durability, codec)
        else:
            count = len(messages.values if isinstance(messages, Batch) else messages)
            sequences = self.open_sequences()
            with sequences.lock:
                known = sequences.check(producer, count)
                if known is not None:
                    # The answer "duplicate" also acknowledges: the first copy must be as durable as requested now.
                    return Appended(0, self.log.written_end, durability or self._settings.durability), known
                appended = self._write(messages, durability, codec, producer=producer)
                sequences.record(producer, count, appended.offset)
        if appended.durability != "fsync":  # otherwise the sync wakes them
            self.wake(appended.next_offset - appended.offset)
        return appended, known

    def append_one(self, value: bytes, producer: Producer, chosen: Durability) -> int:
        """Fused form of `append` for one plain value of a producer: its offset, or -1 if only that can write it.

        That is so for what it has written before, and for what has to be synced or traced.
        """
        sequences = self.sequences
        if sequences is None or chosen == "fsync" or self.tracer is not None or self.lost is not None:
            return -1
        offset = sequences.append_one(value, producer, chosen)
        if offset >= 0:
            self.wake()
        return offset

    def wait(self, publication: Publication) -> None:
        """Wait until the messages are as durable as requested, then wake consumers."""
        if publication.in_log is not None:
            self.log.wait(publication.in_log)
        if publication.in_delayed is not None and self.delayed is not None:
            self.delayed.wait(publication.in_delayed)
        for log, first in publication.firsts:
            log.wait(first)
        self._tell(publication)

    async def wait_async(self, publication: Publication) -> None:
        """Async version of `wait`."""
        if publication.in_log is not None:
            await self.log.wait_async(publication.in_log)
        if publication.in_delayed is not None and self.delayed is not None:
            await self.delayed.wait_async(publication.in_delayed)
        for log, first in publication.firsts:
            await log.wait_async(first)
        if publication.due_now or self._is_to_help(publication):
            await asyncio.to_thread(self._tell, publication)
        else:
            self._tell(publication)

    def follow(self, delivery: Delivery) -> None:
        """Tell a group the priorities of all messages here, and of new ones from now on."""
        with self._urgent_lock:
            if self.log.end < self.log.written_end and self.log.usable:
                self.log.sync()  # or the scan would not see all of them
            with delivery.lock:
                delivery.scan()
            self.deliveries.append(delivery)

    def unfollow(self, delivery: Delivery) -> None:
        """Stop telling a group about new messages."""
        with self._urgent_lock:
            self.deliveries.remove(delivery)

    def wake(self, messages: int = 1) -> None:
        """Wake consumers of each group for this many new messages."""
        for line in self.lines:
            if line:
                line.wake(messages)

    def join(self, line: Waiters) -> None:
        """Wake this line for new messages from now on."""
        with self._lines_lock:
            self.lines = (*self.lines, line)

    def leave(self, line: Waiters) -> None:
        """Stop waking this line."""
        with self._lines_lock:
            self.lines = tuple([each for each in self.lines if each is not line])

    def release(self) -> int:
        """Move the delayed messages that are due now into the log; returns how many.

        Messages that become due meanwhile may stay: under load there are always more, and this would never end.
        """
        total, now_ms = 0, self.world.clock.now_ns() // 1_000_000
        while released := self._release_some():
            total += released
            if self.delayed is None or self.delayed.late_ms(now_ms) < 0:
                break
        return total

    def release_late(self, late_ms: int = 0, portions: int = 1) -> None:
        """Release up to `portions` batches while messages are `late_ms` late; called in the middle of other work."""
        for _ in range(portions):
            if self._late_ms() < late_ms:
                return
            self._release_some(late_ms)

    def _late_ms(self) -> int:
        return -1 if self.delayed is None else self.delayed.late_ms(self.world.clock.now_ns() // 1_000_000)

    def _release_some(self, late_ms: int | None = None) -> int:
        """Release one batch of due messages; with `late_ms`, only if they are still that late under the lock."""
        store = self.delayed
        if store is None:
            return 0
        with self._release_lock:
            if late_ms is not None and self._late_ms() < late_ms:
                return 0
            now_ns = self.world.clock.now_ns()
            began_ns = self.world.clock.monotonic_ns()
            due = store.due(now_ns // 1_000_000, self._release_most)
            if due:
                # Always synced: if this write were lost, the messages would be released again, even if acked.
                appended = self._write(released_batch(due), "fsync", moved=True)
                written_ns = self.world.clock.monotonic_ns()
                self.log.wait(appended)
                synced_ns = self.world.clock.monotonic_ns()
                store.released([message.id for message in due], appended.next_offset)
                self._resize_releases(len(due), work_ns=written_ns - began_ns, sync_ns=synced_ns - written_ns)
                self._released(due, appended.offset, now_ns)
            store.settled(self.log.synced_end)
            return len(due)

    def _resize_releases(self, released: int, *, work_ns: int, sync_ns: int) -> None:
        """Choose how many messages the next batch may have, from how long this one took."""
        most = released * sync_ns // max(work_ns, 1)
        if released >= self._release_most and self._late_ms() >= _HELP_FROM_MS:
            most = max(most, min(2 * released, released * _RELEASE_WORK_NS // max(work_ns, 1)))
        self._release_most = min(max(most, _RELEASE_MOST), _RELEASE_MOST_EVER)

    def release_now(self, delayed_id: int) -> bool:
        """Move one delayed message into the log before its time; False if it is not waiting any more."""
        self.check_delayed()
        with self._release_lock:
            store = self.delayed
            waiting = None if store is None else store.get(delayed_id)
            if store is None or waiting is None:
                return False
            store.intake.sync()  # as in `due`: what is released must be known after a crash
            appended = self.append_moved(released_batch([waiting]))
            store.released([delayed_id], appended.next_offset)
            self._metrics.released.add()
            if self.tracer is not None:
                self.tracer.released([waiting], appended.offset)
            store.settled(self.log.synced_end)
        self.wake()
        return True

    def _released(self, due: Sequence[Delayed], first: int, now_ns: int) -> None:
        """Count and trace released messages. Only those that had to wait count; others just shared their batch."""
        dues_ms = [message.due_at_ms for message in due if message.due_at_ms > message.record.timestamp_ns // 1_000_000]
        self._metrics.released.add(len(dues_ms))
        if dues_ms:
            self._metrics.lateness_seconds.observe_since(now_ns, dues_ms, unit_ns=1_000_000)
        if self.tracer is not None:
            self.tracer.released(due, first)

    def append_moved(self, batch: Batch) -> Appended:
        """Append messages from another log, synced, so that the other log may forget them."""
        appended = self._write(batch, "fsync", moved=True)
        self.log.wait(appended)
        return appended

    def check_delayed(self) -> None:
        """Raise CorruptData if the delayed messages are lost."""
        if self.lost_delays is not None:
            raise self.lost_delays

    def cancel_delayed(self, delayed_id: int) -> bool:
        """Cancel a delayed message; False if it is not waiting any more."""
        self.check_delayed()
        tracer = self.tracer
        waiting = None if tracer is None or self.delayed is None else self.delayed.get(delayed_id)
        with self._release_lock:
            done = self.delayed is not None and self.delayed.cancel(delayed_id)
        if done and tracer is not None:
            tracer.cancelled(delayed_id, () if waiting is None else waiting.record.headers)
        return done

    def purge_delayed(self) -> int:
        """Cancel every delayed message, durably; returns how many."""
        self.check_delayed()
        store = self.delayed
        if store is None:
            return 0
        with self._release_lock:
            written = [store.write_cancel(each.id) for each in store.waiting()]
            done = [appended for appended in written if appended is not None]
            if done:
                store.wait(done[-1])
        return len(done)

    def was_delayed(self, delayed_id: int) -> bool:
        """Whether a message ever had this delayed id."""
        self.check_delayed()
        return self.delayed is not None and delayed_id < self.delayed.intake.written_end

    def find_released(self, delayed_id: int, start: int) -> int | None:
        """Search the log from `start` for a released message; returns its offset or None."""
        wanted = b"%d" % delayed_id
        for record in moved_records(self.log, start):
            if mark(record, DELAYED_ID) == wanted:
                return record.offset
        return None

    def tick(self) -> int | None:
        """Do what is due; returns in how many ms to call again."""
        self.release()
        due = [self.log.tick()]
        now_ms = self.world.clock.now_ns() // 1_000_000
        if self.delayed is not None:
            due += [self.delayed.tick(now_ms), self.due_ms()]
        if self.sequences is not None:
            self.sequences.tick()
        self._pin()
        return soonest(*due)

    def due_ms(self) -> int | None:
        """Ms until the next delayed message is due; None if there is none."""
        next_ms = None if self.delayed is None else self.delayed.next_due_ms()
        return None if next_ms is None else max(next_ms - self.world.clock.now_ns() // 1_000_000, 0)

    def keep_for_dedup(self, covered: Covered) -> None:
        """Keep both logs from these positions on: later dedup ids are stored nowhere else yet."""
        self._needed_for_dedup = covered
        self.log.pin("dedup", covered.partition.offset)
        if self.delayed is not None:
            self.delayed.intake.pin("dedup", covered.intake.offset)

    def positions(self) -> Covered:
        """The ends of the message log and the delayed log."""
        intake = LogPosition(0, 0) if self.delayed is None else _end_of(self.delayed.intake)
        return Covered(_end_of(self.log), intake)

    def save(self) -> None:
        """Save the state of delays and producer sequences, so that the log need not keep messages for them."""
        if self.delayed is not None:
            self._settle_delayed()
            self.delayed.save()
        if self.sequences is not None:
            self.sequences.save()
        self._pin()

    def bring_pins(self) -> None:
        """Let the log be trimmed up to what delays, producers and groups still need now."""
        self.save()
        for delivery in self.deliveries:
            delivery.bring_pin()

    def sync(self) -> None:
        """Wait until everything published so far is on disk."""
        self.log.sync()
        if self.delayed is not None:
            self.delayed.intake.sync()

    def close(self) -> None:
        """Save, sync and close all files, even if one of them fails."""
        with self._lock, self._release_lock:  # a thread opening one of them has finished, or will be refused
            self.closed = True
        with ExitStack() as closing:
            closing.callback(self.log.close)
            if self.delayed is not None:
                closing.callback(self.delayed.close)
                closing.callback(self._settle_delayed)
            if self.sequences is not None:
                closing.callback(self.sequences.close)

    def _settle_delayed(self) -> None:
        if self.delayed is not None:
            with self._release_lock:
                self.log.sync()
                self.delayed.settled(self.log.synced_end)

    def _done_before(self) -> int | None:
        """The offset below which all groups are done, counting only acks that are on disk.

        None if there is no group in queue mode, or one in stream mode: streams can be read again, so they never finish.
        """
        pins = self.log.pins
        floors = [pins.get(delivery.journal.log.folder) for delivery in list(self.deliveries)]
        known = [floor for floor in floors if floor is not None]
        if not known or len(known) < len(floors) or any(name.startswith(STREAM_PIN) for name in pins):
            return None
        return min(known)

    def _pin(self) -> None:
        if self.delayed is not None:
            self.log.pin("delayed", self.delayed.accounted)

    def store(self, drafts: Sequence[Draft], manner: Manner) -> Publication:
        """Write messages without checking their dedup ids."""
        chosen, codec, any_size = self.log.chosen(manner.durability), manner.codec, manner.any_size
        delayed = any(draft.due_at_ms for draft in drafts)
        if len(drafts) == 1 and codec is None and not any_size:
            now_ms = self.world.clock.now_ns() // 1_000_000
            at = self.store_one(structs.astuple(drafts[0]), chosen)
            if at >= 0:
                one = Appended(at, at + 1, chosen)
                if delayed:
                    due_now = drafts[0].due_at_ms <= now_ms
                    return Publication([Place(None, at)], chosen, in_delayed=one, due_now=due_now)
                return Publication([Place(at)], chosen, in_log=one)
        if delayed:
            return self._publish_delayed(drafts, Manner(chosen, codec, any_size))
        appended = self._write(batch_of(drafts), chosen, codec, any_size=any_size)
        places = [Place(offset) for offset in range(appended.offset, appended.next_offset)]
        return Publication(places, appended.durability, in_log=appended)

    def _publish_delayed(self, drafts: Sequence[Draft], manner: Manner) -> Publication:
        tracer = self.tracer
        at_ns = 0 if tracer is None else tracer.now_ns()  # before the write: a due message may be received at once
        store = self._open_delayed()
        now_ms = self.world.clock.now_ns() // 1_000_000
        batch = msgspec.structs.replace(batch_of(drafts), due_at_ms=[draft.due_at_ms or now_ms for draft in drafts])
        appended = store.write(batch, **manner._asdict())
        places = [Place(None, delayed_id) for delayed_id in range(appended.offset, appended.next_offset)]
        due_now = any(draft.due_at_ms <= now_ms for draft in drafts)
        if tracer is not None:
            dues_ms = [draft.due_at_ms or at_ns // 1_000_000 for draft in drafts]
            tracer.delayed([draft.headers for draft in drafts], appended.offset, dues_ms, at_ns)
        return Publication(places, appended.durability, in_delayed=appended, due_now=due_now)

    def _write(
        self,
        batch: Sequence[bytes] | Batch,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        *,
        moved: bool = False,
        any_size: bool = False,
        producer: Producer = NO_PRODUCER,
    ) -> Appended:
        any_size = any_size or moved
        tracer = None if moved else self.tracer  # moves are traced by their callers
        at_ns = 0 if tracer is None else tracer.now_ns()
        if not isinstance(batch, Batch) or batch.priorities is None:
            appended = self.log.write(batch, durability=durability, codec=codec, any_size=any_size, producer=producer)
        else:
            appended = self.telling_groups(
                lambda: self.log.write(batch, durability=durability, codec=codec, any_size=any_size, producer=producer),
                bytes(batch.priorities),
            )
        if tracer is not None:
            headers = batch.headers if isinstance(batch, Batch) else None
            tracer.published(headers, appended.offset, appended.next_offset - appended.offset, at_ns)
        return appended

    def telling_groups(self, write: Callable[[], _Written], priorities: bytes) -> _Written:
        """Write messages with priorities and tell all groups; their locks are held, so that none sees them before."""
        if self._urgent_lock.locked():
            stand_back(self._urgent_lock)
        with self._urgent_lock:
            deliveries = self.deliveries
            if len(deliveries) == 1:
                lock = deliveries[0].lock
                if lock.locked():
                    stand_back(lock)
                with lock:
                    return self._write_and_tell(write, priorities)
            with ExitStack() as locks:
                for delivery in deliveries:
                    locks.enter_context(delivery.lock)
                return self._write_and_tell(write, priorities)

    def _write_and_tell(self, write: Callable[[], _Written], priorities: bytes) -> _Written:
        written = write()
        first = written.offset if isinstance(written, Appended) else written
        if first >= 0:
            level = priorities[0] if len(priorities) == 1 else 0
            for delivery in self.deliveries:
                if level:
                    delivery.group.arrive_one(first, level)
                else:
                    delivery.group.arrive(first, priorities)
        return written

    def _tell(self, publication: Publication) -> None:
        if publication.in_log is not None and publication.durability != "fsync":
            self.wake(len(publication.places))  # otherwise the sync has woken them
        if publication.due_now:
            self.release()
        elif self._is_to_help(publication):
            self.release_late(_HELP_FROM_MS, portions=-(-len(publication.places) // _RELEASE_MOST))

    def _is_to_help(self, publication: Publication) -> bool:
        """Whether the publisher must help because releases are late: otherwise it could outrun them forever."""
        return publication.in_delayed is not None and self._late_ms() >= _HELP_FROM_MS

    def delays_at_once(self, due_at_ms: int, now_ms: int) -> bool:
        """Whether a message due then can be published without opening the store and without releasing anything."""
        store = self.delayed
        return store is not None and due_at_ms > now_ms + _SOON_MS and store.late_ms(now_ms) < _HELP_FROM_MS

    def _open_delayed(self) -> DelayStore:
        store = self.delayed
        if store is None:
            with self._release_lock:
                if self.delayed is None:
                    self._check_open()
                    self.check_delayed()
                    store = delayed.DelayStore.open(self.world, join(self._folder, "delayed"), self._settings)
                    if store.intake.written_end:  # nothing was ever released from a new store
                        found = [mark(record, DELAYED_ID) for record in moved_records(self.log, store.accounted)]
                        store.forget([int(delayed_id) for delayed_id in found if delayed_id is not None])
                    store.settled(self.log.end)
                    store.on_attention = self._attend
                    store.on_pause = self._pause
                    if self._needed_for_dedup is not None:
                        store.intake.pin("dedup", self._needed_for_dedup.intake.offset)
                    self.delayed = store
                    if not store.intake.written_end:
                        self.on_new_part()
                return self.delayed
        return store

    def open_sequences(self) -> Sequences:
        """The producers' sequences; read from the log on first use."""
        if self.sequences is None:
            with self._lock:
                if self.sequences is None:
                    self._check_open()
                    self.sequences = Sequences.open(
                        self.world, self._folder, self.log, idle_ms=self._settings.producer_idle_ms
                    )
        return self.sequences

    def _check_open(self) -> None:
        """Raise Closed rather than create files for a deleted topic, which would bring it back."""
        if self.closed:
            raise Closed(f"the partition in {self._folder} is closed: its topic was deleted or closed; open it again")

    def _attend(self) -> None:
        self.on_attention()

    def _pause(self) -> None:
        self.on_pause()


def _end_of(log: Log) -> LogPosition:
    return LogPosition(log.epoch, log.written_end)


class LostPartition(Partition):
    """Placeholder for a partition whose log is missing or cannot be opened: always empty, refuses every write.

    It and its groups' journals are in memory only. Nothing on disk is created or changed, so a log that is restored
    finds everything as it was. Callers that go through all partitions see an empty one; publishing to it, or asking
    for it by number, raises the error that says what is lost and what to do.
    """

    def __init__(self, world: World, folder: str, settings: TopicSettings, metrics: Metrics, lost: CorruptData) -> None:
        from holdfast.env.sim.disk import SimulatedDisk  # rarely needed

        nowhere = World(clock=world.clock, disk=SimulatedDisk(), ids=world.ids)
        super().__init__(nowhere, folder, settings, metrics, Log.open(join(folder, "log"), settings, nowhere))
        self.lost: CorruptData = lost

    def _write(self, *_: object, **__: object) -> NoReturn:
        raise self.lost

    def store_one(self, *_: object) -> NoReturn:
        raise self.lost

    def _open_delayed(self) -> NoReturn:
        raise self.lost
