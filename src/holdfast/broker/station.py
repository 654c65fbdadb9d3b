"""One group on one partition: what it hands out, what its holders say of it, and its dead letters."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import msgspec

from holdfast.broker.dead_letters import DeadLetter, DeadPartition, Graveyard
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import MessagePlace, ReceiptText, message_id
from holdfast.broker.leases import Delivered
from holdfast.broker.messages import id_of
from holdfast.broker.metrics import Metrics
from holdfast.broker.partition import Partition
from holdfast.broker.receipts import Prover
from holdfast.delivery.commands import Cancel, Command, Receipt
from holdfast.delivery.events import Buried, BuriedReady, Event, Interred
from holdfast.delivery.group import Lease
from holdfast.delivery.runs import runs_of
from holdfast.errors import CorruptData, HoldfastError, InvalidRequest, LeaseLost
from holdfast.model import Appended, Durability, Record
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest

logger = logging.getLogger(__name__)


class Pending(msgspec.Struct, frozen=True, gc=False):
    """Something was decided and written; `Station.wait` returns when it is as safe as it should be."""

    events: Sequence[Event] = ()
    appended: Appended | None = None
    refused: LeaseLost | None = None  # for some of the messages; the others count

    @property
    def buried(self) -> bool:
        """Whether a message died, and has still to be moved."""
        return any(isinstance(event, Buried | BuriedReady) for event in self.events)


class Station:
    """What the faces for threads and for tasks stand on. Calls are short; only the waits wait."""

    def __init__(
        self,
        topic: str,
        number: int,
        group: str,
        partition: Partition,
        delivery: Delivery,
        *,
        check_open: Callable[[], None],
        open_dead: Callable[[int], DeadPartition],
        prover: Callable[[], Prover],
    ) -> None:
        self.topic = topic
        self.number = number
        self.group = group
        self.partition = partition
        self.delivery = delivery
        self.settings: TopicSettings = delivery.settings
        self.metrics: Metrics = delivery.metrics
        self.check_open = check_open
        self._open_dead = open_dead
        self._new_prover = prover
        self._graves_lock = threading.Lock()
        self._graves: Graveyard | None = None
        delivery.dead_end = self._dead_end
        delivery.home = self

    def recover(self, *, dead: bool) -> None:
        """End what a crash cut short; `dead` tells whether the partition has dead letters already."""
        if dead:
            self.graves().recover()
        self.delivery.recover()
        self._inter_if_possible()

    def graves(self) -> Graveyard:
        """The dead letters; their topic is made when first needed."""
        with self._graves_lock:
            if self._graves is None:
                self.check_open()
                self._graves = Graveyard(
                    self._open_dead(self.number),
                    self.delivery,
                    topic=self.topic,
                    number=self.number,
                    group=self.group,
                    id_of=self.id_of,
                )
            return self._graves

    def letters(self, start: int = 0, look: Callable[[int], None] | None = None) -> Iterator[DeadLetter]:
        """The dead letters from an offset of their log on, also those on their way; each place is told to `look`."""
        self.check_open()
        self.inter()
        return iter(()) if self._graves is None else self._graves.all(start, look)

    def lost_letters(self, start: int, stop: int) -> int:
        """How many dead letters there cannot be read, as far as that is known; whose they were nobody can say."""
        if self._graves is None:
            return 0
        letters, log = self._graves.letters, self._graves.target.log
        return letters.group.ready_of(log.damaged()).range_cardinality(start, stop)

    def letter(self, offset: int, *, gone: bool = False) -> DeadLetter | None:
        """The dead letter at an offset of its own log, if there is one; with `gone` even if redriven or purged."""
        self.check_open()
        self.inter()
        return None if self._graves is None else self._graves.letter(offset, gone=gone)

    def ready_count(self) -> int:
        """How many messages are ready here."""
        with self.delivery.lock:
            return self.delivery.ready_count()

    def letter_of(self, message: int) -> DeadLetter | None:
        """The dead letter that the message at an offset became, if it is there; looks through all of them."""
        self.check_open()
        self.inter()
        return None if self._graves is None else self._graves.letter_of(message)

    def dead_count(self) -> int:
        """How many dead letters the group has here, those on their way included."""
        graves, buried = self._graves, len(self.delivery.group.burials)
        if graves is None:
            return buried
        if len(self.partition.deliveries) == 1:  # then all of them are ours
            return buried + graves.letters.ready_count()
        return buried + sum(1 for _ in graves.all())

    def _dead_end(self) -> int:
        return 0 if self._graves is None else self._graves.target.log.written_end

    def inter(self) -> None:
        """Move what died into the dead letters, whose topic is made when the first one does."""
        if self._graves is not None:
            self._graves.end_redrives()
        burials = self.delivery.group.burials
        if not burials:
            return
        if self.settings.dead_letters:
            self.graves().inter()
            return
        with self.delivery.lock:
            dropped = sorted(burials)
            for offset in dropped:
                failures = burials[offset].history.failures
                logger.warning(
                    "message %s-%d-%d dropped, for the topic keeps no dead letters: %s: %s",
                    self.topic,
                    self.number,
                    offset,
                    burials[offset].reason,
                    failures[-1].error if failures else "",
                )
            self.delivery.commit_events([Interred(runs_of(dropped))])
            self.metrics.buried.add(len(dropped))

    def _inter_if_possible(self) -> None:
        """The same for whoever has done his part: what the journal calls dead is dead.

        If the letter cannot be moved now, for the disk is full, then later: upkeep tries until it succeeds. Who
        rejected the message must not be told of an error, and do again what is done.
        """
        try:
            self.inter()
        except HoldfastError as error:
            logger.warning(
                "dead letters wait to be moved",
                extra={"topic": self.topic, "partition": self.number, "group": self.group, "error": str(error)},
            )
            self.delivery.on_attention()

    def close(self) -> None:
        """Let go of the journal. A move into the dead letters that is under way is finished first."""
        graves = self._graves
        if graves is None:
            self.delivery.close()
        else:
            graves.close()

    @cached_property
    def _prover(self) -> Prover:
        return self._new_prover()

    def receipt_text(self, offset: int, lease: Lease) -> str:
        """The receipt for a message under this lease, for whoever holds it and nobody else."""
        return self._prover.text(message_id(self.topic, self.number, offset, None), lease.fence, lease.at_ms)

    def proof(self, given: ReceiptText) -> Receipt | None:
        """The delivery that a receipt proves, held or not; None where it proves none of this group."""
        name = message_id(self.topic, self.number, given.offset, None)
        proven = self._prover.read(name, given.token)
        if proven is not None:
            receipt, lease = Receipt(given.offset, proven.fence), self.delivery.group.leases.get(given.offset)
            if lease is None or lease.fence != receipt.fence or proven.is_of(lease.at_ms):
                return receipt
        return None

    def unproven(self, given: ReceiptText) -> LeaseLost:
        """The error for a receipt that proves nothing here."""
        name = message_id(self.topic, self.number, given.offset, None)
        # One answer for all that may be wrong with it: whoever tries texts learns nothing.
        return LeaseLost(
            f"this receipt does not prove that message {name} is yours: it is of another group, of an earlier topic or "
            f"group of this name, or {self.topic} never gave it. Nothing was changed; what you hold by it, if "
            "anything, comes back when its lease ends",
            offsets=(given.offset,),
            why="the receipt is not one of this group",
        )

    def resume(self, receipt: Receipt) -> Delivered:
        """The message that a receipt stands for, if it is still held."""
        self.check_open()
        if not self.delivery.holds(receipt):
            raise self.delivery.refusal(receipt)
        (record,) = self.delivery.fetch([receipt.offset]) or (None,)
        if record is None:
            raise CorruptData(
                f"message {receipt.offset} cannot be read; run `holdfast check` on {self.partition.log.folder}"
            )
        group = self.delivery.group
        return Delivered(record, group.leases[receipt.offset], group.attempts(receipt.offset) + 1, self)

    def cancel(self, place: MessagePlace, message: object) -> bool:
        """Take back a message that nobody works on, wherever it waits; False where it is too late."""
        self.check_open()
        offset, delayed_id = place.offset, place.delayed_id
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

    def purge(self, *, delayed: bool) -> int:
        """Drop all that nobody has in hand, `delayed` messages too; answers how many."""
        self.check_open()
        count = self.partition.purge_delayed() if delayed else 0  # first: what comes due meanwhile is dropped below
        count += self.delivery.purge()
        self.metrics.cancelled.add(count)
        return count

    def settle(self, command: Command, durability: Durability | None = None) -> Pending:
        """Carry out a command of a holder or an operator. Then `wait`."""
        self.check_open()
        return Pending(*self.delivery.settle(command, durability))

    def settle_all(self, commands: Sequence[Command], durability: Durability | None = None) -> Pending:
        """Carry out commands for different messages as one; `wait` raises LeaseLost for those that are refused."""
        self.check_open()
        return Pending(*self.delivery.settle_all(commands, durability))

    def ack(self, receipts: Sequence[Receipt], durability: Durability | None = None) -> Pending:
        """Ack what is still held; `wait` raises LeaseLost for the others."""
        self.check_open()
        appended, refused = self.delivery.ack(receipts, durability)
        return Pending(appended=appended, refused=refused)

    def ack_taken(self, taken: Sequence[Delivered], durability: Durability | None = None) -> Pending:
        """The same for messages in hand."""
        self.check_open()
        appended, refused = self.delivery.ack_taken(taken, durability)
        return Pending(appended=appended, refused=refused)

    def wait(self, pending: Pending) -> None:
        """Return when what was decided is as durable as asked, and dead letters have moved if there is room."""
        if pending.appended is not None:
            self.delivery.journal.log.wait(pending.appended)
        if pending.buried:
            self._inter_if_possible()
        if pending.refused is not None:
            raise pending.refused

    async def wait_async(self, pending: Pending) -> None:
        """The same for a task."""
        if pending.appended is not None:
            await self.delivery.journal.log.wait_async(pending.appended)
        if pending.buried:
            await asyncio.to_thread(self._inter_if_possible)
        if pending.refused is not None:
            raise pending.refused

    def id_of(self, record: Record) -> str:
        """The message's id: it keeps the one that it had while it was delayed."""
        return id_of(self.topic, self.number, record)

    def due_ms(self) -> int | None:
        """In how many ms something happens to a message by itself; upkeep of the files is not counted."""
        return soonest(self.partition.due_ms(), self.delivery.due_ms())
