"""The transactions of a data folder: messages, acks, offsets and documents that take effect together, or not at all.

Nothing of a transaction is stored before it commits: its caller keeps what it is to do. So readers see committed
messages only, nothing has to be taken back, and a folder without transactions pays nothing for them. A commit is then
one write that decides, and others that can be repeated:

    1.  check      every lease is still valid, every offset may be committed, every message can be stored
    2.  decide     one frame in the journal of the documents: the documents that change, and the state of the
                   transaction with all that is still to be done. It is on disk before anything else happens
    3.  apply      publish the messages, settle those that were acked, commit the offsets; wait until all is on disk
    4.  note       the state without what was to be done, and with the places of the messages

    killed before 2, or during it     nothing has happened, and nothing will: the leases end by themselves
    killed after 2                    the next owner of the folder does 3 and 4 before anything else
    killed after 4                    a caller that asks again is told the same places

What is applied a second time changes nothing: each message has a dedup id, its own or one made of the transaction's
name, epoch and its number, which is looked for in its topic, however old (see `schedules`); a message that is done
stays done; offsets never go back.

A transaction is known by its name and its epoch. `begin` raises the epoch of a name, so that an earlier life of the
same program can no longer commit. One without a name has a random one and the epoch 1; its state is forgotten after a
while, since nobody asks for it again.

Between 1 and 3, a message that is acked must not come to another consumer: its lease is extended, and its receipt is
reserved, so that no other transaction acks it. The lock of a stream group is held for the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker.folder.layout import LOCKS, TRANSACTION_PREFIX, UNNAMED, check_name
from holdfast.broker.locks import replayed_locks
from holdfast.broker.messages import Draft, Place
from holdfast.broker.metrics import Counter
from holdfast.broker.streams.offsets import CommittedOffset
from holdfast.delivery.events import Extend, Finish, Receipt
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import Conflict, Fenced, HoldfastError, InvalidRequest, LeaseLost, MessageTooLarge, UnknownTopic
from holdfast.locking import Remove, ReplaceDocument
from holdfast.model import HeaderPairs
from holdfast.storage.files import join
from holdfast.storage.keeper import Keeper

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.leases import Pending
    from holdfast.broker.streams.group import StreamGroup
    from holdfast.broker.topic import Topic

logger = get_logger(__name__)

MOST_BYTES: Final = 8 * 1024 * 1024  # of a decision, which is one record of a journal
MOST_TRANSACTIONS: Final = 10_000  # with a name
_MOST_UNNAMED: Final = 1_000
_UNNAMED_KEPT_MS: Final = 600_000
_SHORTEST_LEASE_MS: Final = 60_000  # of what a transaction acks, while it is decided
_AGAIN_MS: Final = 1_000


class StoredMessage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message to be published: where, and all fields of a draft."""

    topic: str
    topic_id: int
    partition: int
    value: bytes
    key: bytes | None
    headers: HeaderPairs
    priority: int
    expires_at_ms: int
    due_at_ms: int
    dedup_id: bytes
    flags: int

    @property
    def draft(self) -> Draft:
        return Draft(
            self.value, self.key, self.headers, self.priority, self.expires_at_ms, self.due_at_ms, self.dedup_id,
            self.flags,
        )  # fmt: skip


class AckedOffsets(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Messages of a group on one partition that are done."""

    topic: str
    topic_id: int
    group: str
    partition: int
    offsets: list[int]


class CommittedOffsets(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a stream group goes on."""

    group: str
    entries: list[CommittedOffset]


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What a transaction does, apart from its documents."""

    messages: list[StoredMessage] = []
    acked: list[AckedOffsets] = []
    offsets: list[CommittedOffsets] = []


class TransactionState(msgspec.Struct, frozen=True, array_like=True):
    """A transaction as it is stored. With `pending`, it is decided, and not all of it is known to be done."""

    epoch: int
    decided: int  # the epoch of the last one that was committed; 0 if none was
    at_ms: int
    pending: Decision | None = None
    places: list[StoredPlace] = []


class StoredPlace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a message was stored; nowhere if its topic was deleted meanwhile."""

    topic: str
    partition: int
    offset: int | None = None
    delayed_id: int | None = None
    duplicate: bool = False


class Commit(msgspec.Struct, frozen=True):
    """A transaction to commit: its decision, the documents it changes, and what its acks and offsets rest on."""

    name: str
    epoch: int
    messages: list[StoredMessage]
    documents: Sequence[ReplaceDocument | Remove]
    claims: Sequence[tuple[Topic, str, Delivery, Sequence[Receipt]]]
    members: Sequence[tuple[StreamGroup, str, Mapping[tuple[str, int], int]]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TransactionState).decode


def dedup_id(name: str, epoch: int, number: int) -> str:
    """Return the dedup id of a message that has none of its own."""
    return f"{name}@{epoch}#{number}"


class FolderTransactions:
    """The transactions of a data folder. Thread-safe; its calls wait for the disk."""

    def __init__(self, engine: BrokerEngine, *, kept: bool) -> None:
        self._engine = engine
        self._clock = engine.world.clock
        self._lock = threading.Condition()  # guards the sets and dicts below, and is held briefly
        self._busy: set[str] = set()  # names that somebody begins, commits or finishes
        self._reserved: set[tuple[Delivery, int]] = set()
        self._states: dict[str, TransactionState] | None = None  # read at first use
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self.committed, self.refused = Counter("committed"), Counter("refused")
        self._logged_error = ""
        if kept:
            Keeper(self).start()
            engine.at_close(self.before_close)

    # Calls

    def begin(self, name: str) -> int:
        """Begin a transaction of this name, durably; returns its epoch. Earlier ones can no longer commit."""
        check_name(name, "transaction")
        with self._alone(name):
            state = self._loaded().get(name)
            if state is None and sum(not each.startswith(UNNAMED) for each in self._loaded()) >= MOST_TRANSACTIONS:
                raise InvalidRequest(
                    f"transaction {name} was not begun: there are {MOST_TRANSACTIONS} names already, which is the "
                    "limit. Delete some, or use transactions without a name"
                )
            if state is None:
                state = TransactionState(0, 0, self._now_ms())
            elif state.pending is not None:
                state = self._finish(name, state, again=True)
            state = msgspec.structs.replace(state, epoch=state.epoch + 1, at_ms=self._now_ms())
            self._write(name, state, wait=True)
            return state.epoch

    def commit(self, wanted: Commit) -> list[StoredPlace]:
        """Commit a transaction; returns where its messages are. One that is committed already is only reported.

        Raises LeaseLost, Conflict or Fenced if it must be refused; then nothing has happened.
        """
        name = wanted.name
        try:
            with self._alone(name):
                known = self._committed(name, wanted.epoch)
                if known is not None:
                    return known
                with ExitStack() as held:
                    state = self._decided(wanted, self._current(wanted), held)
                    self.committed.add()
                    return self._finished_now(name, state)
        except (Conflict, Fenced, InvalidRequest, LeaseLost):
            self.refused.add()
            raise

    def _finished_now(self, name: str, state: TransactionState) -> list[StoredPlace]:
        try:
            return self._finish(name, state).places
        except HoldfastError as error:
            error.add_note(
                "the transaction is committed all the same: it is on disk, and what is missing is done as soon as "
                "possible. Do not repeat it"
            )
            self.on_attention()
            raise

    def committed_places(self, name: str, epoch: int) -> list[StoredPlace] | None:
        """Return where the messages of a transaction are that is committed already; None if it is not."""
        with self._alone(name):
            return self._committed(name, epoch)

    def _committed(self, name: str, epoch: int) -> list[StoredPlace] | None:
        state = self._loaded().get(name)
        if state is None or state.decided != epoch:
            return None
        return (state if state.pending is None else self._finish(name, state, again=True)).places

    def all(self) -> dict[str, TransactionState]:
        """Return all transactions by name, with those without a name that are still known."""
        with self._lock:
            return dict(sorted(self._loaded().items()))

    def forget(self, name: str) -> bool:
        """Forget a name: a program that still uses it cannot commit. False if it is unknown."""
        with self._alone(name):
            state = self._loaded().get(name)
            if state is None:
                return False
            if state.pending is not None:
                self._finish(name, state, again=True)
            self._remove(name, wait=True)
            return True

    # Upkeep

    def recover(self) -> None:
        """Finish what an earlier owner decided, before anybody can receive or publish."""
        self._finish_pending()

    def tick(self) -> int | None:
        """Finish what could not be finished, and forget old transactions without a name."""
        self._engine.check_open()
        try:
            if not self._has_any():
                return None
        except OSError as error:
            self._report("transactions cannot be read", error)
            return _AGAIN_MS
        left = self._finish_pending()
        self._forget_unnamed()
        return _AGAIN_MS if left else self._forget_in_ms()

    def _finish_pending(self) -> int:
        """Finish what is decided and nobody is busy with; returns how many could not be finished."""
        left = 0
        try:
            with self._lock:
                names = [name for name, each in self._loaded().items() if each.pending is not None]
        except (HoldfastError, OSError) as error:
            self._report("transactions cannot be read", error)
            return 1
        for name in names:
            try:
                with self._alone(name):  # whoever is busy with it may be finishing it
                    state = self._loaded().get(name)
                    if state is not None and state.pending is not None:
                        self._finish(name, state, again=True)
            except (HoldfastError, OSError) as error:
                self._engine.check_open()
                self._report(f"transaction {name} is decided, but cannot be finished yet", error)
                left += 1
        return left

    def _report(self, what: str, error: Exception) -> None:
        if str(error) != self._logged_error:
            self._logged_error = str(error)
            logger.error(what, extra={"folder": self.folder, "error": str(error)})

    def _forget_unnamed(self) -> None:
        """Forget those without a name that nobody can ask for again."""
        with self._lock:
            done = [
                (each.at_ms, name)
                for name, each in self._loaded().items()
                if name.startswith(UNNAMED) and each.pending is None and name not in self._busy
            ]
        old_ms = self._now_ms() - _UNNAMED_KEPT_MS
        for i, (at_ms, name) in enumerate(sorted(done)):
            if at_ms <= old_ms or i < len(done) - _MOST_UNNAMED:
                with suppress(HoldfastError):
                    self._remove(name)

    def _forget_in_ms(self) -> int | None:
        with self._lock:
            times = [each.at_ms for name, each in self._loaded().items() if name.startswith(UNNAMED)]
        return max(min(times) + _UNNAMED_KEPT_MS - self._now_ms(), _AGAIN_MS) if times else None

    # Deciding

    def _current(self, wanted: Commit) -> TransactionState:
        """Return the state that the commit goes on from. Raises Fenced if the transaction is over."""
        name, state = wanted.name, self._loaded().get(wanted.name)
        if name.startswith(UNNAMED):
            return state or TransactionState(1, 0, self._now_ms())
        if state is None or wanted.epoch > state.epoch:
            raise Fenced(
                f"transaction {name} with epoch {wanted.epoch} is not known here: it was deleted, or begun in another "
                "folder. Nothing was done; begin again"
            )
        if wanted.epoch < state.epoch and wanted.epoch != state.decided:
            raise Fenced(
                f"transaction {name} with epoch {wanted.epoch} is fenced: epoch {state.epoch} of the same name has "
                "begun. Nothing was done; only the newest program of a name may continue: end this one"
            )
        return state

    def _decided(self, wanted: Commit, state: TransactionState, held: ExitStack) -> TransactionState:
        """Check the transaction and write its decision; what must not change until it is applied is held."""
        offsets = []
        for group, member, positions in sorted(wanted.members, key=lambda each: each[0].name):
            held.enter_context(group.lock)
            offsets.append(CommittedOffsets(group.name, group.checked(member, group.epoch_of(member), positions)))
        held.callback(self._release, self._reserve(wanted.claims))
        acked = [
            AckedOffsets(topic.name, topic.id, group_name, delivery.number, [receipt.offset for receipt in receipts])
            for topic, group_name, delivery, receipts in wanted.claims
        ]
        decision = Decision(wanted.messages, acked, offsets)
        state = TransactionState(state.epoch, wanted.epoch, self._now_ms(), decision)
        content = _encode(state)
        if len(content) > MOST_BYTES:
            raise MessageTooLarge(
                f"the transaction has {len(content)} bytes, the limit is {MOST_BYTES}. Nothing was done; publish less "
                "in one transaction"
            )
        locks = self._engine.locks()
        decided = locks.change_all([*wanted.documents, ReplaceDocument(TRANSACTION_PREFIX + wanted.name, content)])
        if decided.refused is None:
            with self._lock:
                self._loaded()[wanted.name] = state
        if decided.appended is not None:
            locks.journal.log.wait(decided.appended)
        if decided.refused is not None:
            raise decided.refused
        return state

    def _reserve(self, claims: Iterable[tuple[Topic, str, Delivery, Sequence[Receipt]]]) -> list[tuple[Delivery, int]]:
        """Keep the leases until the transaction is over. Raises LeaseLost if one has ended or is spoken for."""
        reserved: list[tuple[Delivery, int]] = []
        try:
            for _, _, delivery, receipts in claims:
                for receipt in receipts:
                    place = (delivery, receipt.offset)
                    with self._lock:
                        if place in self._reserved:
                            raise LeaseLost(
                                f"message {receipt.offset} is being acked by another transaction. Nothing was done",
                                offsets=(receipt.offset,),
                                why="another transaction acks it",
                            )
                        self._reserved.add(place)
                    reserved.append(place)
                self._keep_leased(delivery, receipts)
        except BaseException:
            self._release(reserved)
            raise
        return reserved

    @staticmethod
    def _keep_leased(delivery: Delivery, receipts: Sequence[Receipt]) -> None:
        """Extend the leases that could end too soon; the others are longer than that. Raises LeaseLost."""
        for receipt in receipts:
            if not delivery.holds(receipt):
                raise delivery.refusal(receipt)
        leases, until_ms = delivery.group.leases, delivery.moment().mono_ms + _SHORTEST_LEASE_MS
        short = [each for each in receipts if (held := leases.get(each.offset)) is None or held.until_ms < until_ms]
        if short:
            delivery.settle(Extend(short, _SHORTEST_LEASE_MS))

    def _release(self, reserved: Iterable[tuple[Delivery, int]]) -> None:
        with self._lock:
            self._reserved.difference_update(reserved)

    # Applying

    def _finish(self, name: str, state: TransactionState, *, again: bool = False) -> TransactionState:
        """Do what is decided, and note it; `again` if some of it may have been done before."""
        assert state.pending is not None
        with ExitStack() as held:
            places = self._apply(state.pending, held, again=again)
        state = msgspec.structs.replace(state, pending=None, places=places, at_ms=self._now_ms())
        self._write(name, state)  # not synced: without the note, the next owner finds all of it done
        if name.startswith(UNNAMED):
            self.on_attention()
        return state

    def _apply(self, decision: Decision, held: ExitStack, *, again: bool) -> list[StoredPlace]:
        """Publish, ack and commit. Everything is written first, so that syncs are shared, then waited for."""
        places = [StoredPlace(each.topic, each.partition) for each in decision.messages]
        waits: list[Callable[[], None]] = []
        topics: dict[str, Topic] = {}
        # What needs no room comes first: on a full disk, messages may have to wait, and must not come again meanwhile.
        for each in decision.acked:
            topic = self._topic(each.topic, each.topic_id, topics, held)
            if topic is not None and each.group in topic.groups:
                waits.append(_finished(topic.groups[each.group].deliveries[each.partition], each.offsets))
        for moved in decision.offsets:
            if moved.group in self._engine.streams.names():
                waits.append(_moved(self._engine.streams.group(moved.group), moved.entries, again=again))
        for (name, topic_id, number), indexes in _by_partition(decision.messages).items():
            topic = self._topic(name, topic_id, topics, held)
            if topic is not None:
                drafts = {i: decision.messages[i].draft for i in indexes}
                waits.append(self._published(topic, number, drafts, places, again=again))
        for wait in waits:
            wait()
        return places

    def _topic(self, name: str, topic_id: int, topics: dict[str, Topic], held: ExitStack) -> Topic | None:
        """Return the topic, which stays open meanwhile; None if it was deleted since."""
        if name not in topics:
            try:
                topics[name] = held.enter_context(self._engine.using(name))
            except UnknownTopic:
                return None
        return topics[name] if topics[name].id == topic_id else None

    def _published(
        self, topic: Topic, number: int, drafts: Mapping[int, Draft], places: list[StoredPlace], *, again: bool
    ) -> Callable[[], None]:
        """Publish to one partition what was not published before; returns what to wait for."""
        fresh = dict(drafts)
        if again:
            for i, draft in drafts.items():
                found = None if draft.dedup_id is None else topic.duplicates.find(draft.dedup_id)
                if found is not None:
                    places[i] = _stored(topic.name, number, found)
                    del fresh[i]
            if not fresh:
                return topic.sync
        partition = topic.partitions[topic.usable(number)]
        publication = partition.publish(list(fresh.values()), durability="fsync", any_size=True)
        stored = dict(zip(fresh, publication.places, strict=True))
        for i, place in stored.items():
            places[i] = _stored(topic.name, number, place)
        new = [len(fresh[i].value) for i, place in stored.items() if not place.duplicate]
        topic.metrics.published.add(len(new))
        topic.metrics.published_bytes.add(sum(new))
        return lambda: partition.wait(publication)

    # The states

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Let one caller at a time work with a name."""
        with self._lock:
            while name in self._busy:
                self._lock.wait()
            self._busy.add(name)
        try:
            yield
        finally:
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        with self._lock:
            self._busy.discard(name)
            self._lock.notify_all()

    def _has_any(self) -> bool:
        engine = self._engine
        return self._states is not None or engine.has_locks or engine.world.disk.exists(join(self.folder, LOCKS))

    def _loaded(self) -> dict[str, TransactionState]:
        if self._states is None:
            with self._lock:
                if self._states is None:
                    self._states = states_in(self._engine.locks().transactions())
        return self._states

    def _write(self, name: str, state: TransactionState, *, wait: bool = False) -> None:
        locks = self._engine.locks()
        decided = locks.change(ReplaceDocument(TRANSACTION_PREFIX + name, _encode(state)), bounded=False)
        with self._lock:
            self._loaded()[name] = state
        if wait and decided.appended is not None:
            locks.journal.log.wait(decided.appended)

    def _remove(self, name: str, *, wait: bool = False) -> None:
        locks = self._engine.locks()
        decided = locks.change(Remove(TRANSACTION_PREFIX + name))
        with self._lock:
            self._loaded().pop(name, None)
        if wait and decided.appended is not None:
            locks.journal.log.wait(decided.appended)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000


def states_in(contents: Mapping[str, bytes]) -> dict[str, TransactionState]:
    """Decode the states of transactions. One that cannot be read is reported and left out: the others must go on."""
    found = {}
    for name, content in contents.items():
        try:
            found[name] = _decode(content)
        except msgspec.MsgspecError as error:
            logger.error("a transaction cannot be read", extra={"transaction": name, "error": str(error)})
    return found


def stored_transactions(world: World, root: str) -> dict[str, TransactionState]:
    """Return the transactions of a data folder by name, without owning it, while its owner may be running."""
    if not world.disk.exists(join(root, LOCKS)):
        return {}
    return states_in(replayed_locks(world, root).transactions)


def _by_partition(messages: Sequence[StoredMessage]) -> dict[tuple[str, int, int], list[int]]:
    found: dict[tuple[str, int, int], list[int]] = {}
    for i, each in enumerate(messages):
        found.setdefault((each.topic, each.topic_id, each.partition), []).append(i)
    return found


def _stored(topic: str, number: int, place: Place) -> StoredPlace:
    number = number if place.partition is None else place.partition
    return StoredPlace(topic, number, place.offset, place.delayed_id, place.duplicate)


def _finished(delivery: Delivery, offsets: Sequence[int]) -> Callable[[], None]:
    """Settle messages, whoever has them now; returns what to wait for."""
    pending: Pending = delivery.settle(Finish(offsets), "fsync")
    delivery.metrics.acked.add(len(offsets))
    return lambda: delivery.wait(pending)


def _moved(group: StreamGroup, entries: Sequence[CommittedOffset], *, again: bool) -> Callable[[], None]:
    """Commit offsets, if none of them was passed since; returns what to wait for."""
    with group.lock:
        if again:
            known = {entry.place: entry for entry in group.offsets.entries()}
            entries = [
                entry
                for entry in entries
                if (there := known.get(entry.place)) is None
                or there.topic_id != entry.topic_id
                or there.offset < entry.offset
            ]
        if not entries:
            return group.offsets.log.sync
        appended = group.offsets.commit(entries, "fsync")
    return lambda: group.offsets.wait(appended)
