"""The chain: numbered objects, each created only if absent. Creating object n is the commit of all that it holds.

Why no acknowledged change can be lost, whatever owners do:

- A caller is answered when its object *and all before it* exist. So what was answered is in an unbroken row.
- A new owner walks that row to its end, the first missing number n, and creates a FENCE there. Either it succeeds, and
  the old owner can never fill n, so it can never answer for anything from n on; or it fails, because somebody was
  faster, and it walks on.
- The old owner may have had objects beyond n in flight: at most its window, so none at or beyond n + window. The chain
  goes on there (`resume_at`), and what lies between is skipped by everyone.

No clock takes part in this. Time only decides when a new owner tries, and how long an old one may believe that it is
still the owner; see `is_current`.

A create that gets no answer may have taken effect. It is repeated with the same bytes: "exists" and the same bytes mean
that it was ours. One that takes longer than `slowest_s` is never counted, even if it succeeds, because by then its
number may have been cleaned up and made anew.

The same may happen to a process that was stopped for hours and believes that it is the owner, or at the end of the
chain. So a fence, and the first object after a silence, count only if there is no checkpoint beyond them: what is
cleaned up is always before one. That is looked up after the create, and needs no clock either.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, TypeVar

import msgspec

from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable
from holdfast.env.chain.format import BadObject, ChangeBatch, ObjectHeader, ObjectKind, decode, encode
from holdfast.env.process import asyncio
from holdfast.env.threads import DaemonThreads
from holdfast.env.world import Clock

WINDOW: Final = 8  # objects in flight
_READ_AHEAD: Final = 32
_RETRY_S: Final = 0.05
_SEND_BYTES: Final = 64 * 1024  # worth an object of its own while others are in flight
_SOON_BYTES: Final = 1024 * 1024  # sent at once, also if nobody waits, so that few ever have to
_MOST_UNSENT_BYTES: Final = 16 * 1024 * 1024  # what may be lost with this process is bounded
_NS: Final = 1_000_000_000

_Answer = TypeVar("_Answer")


class ChainTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, in seconds."""

    lease_s: float = 10.0  # an owner that is silent for so long is taken for dead
    send_s: float = 0.2  # changes that nobody waits for are in the store by then
    linger_s: float = 0.002  # between two objects in flight, so that more callers share one
    slowest_s: float = 10.0  # a create that took longer is not counted


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the chain: all objects before `number` are known."""

    number: int = 0
    epoch: int = 0
    window: int = 0  # of the owner of this epoch
    writer: bytes = b""
    is_closed: bool = False  # the last object said that its owner is gone

    def after(self, header: ObjectHeader) -> Position:
        return Position(
            number=header.next,
            epoch=header.epoch,
            window=header.window,
            writer=header.writer,
            is_closed=header.kind == ObjectKind.CLOSED,
        )


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """A process that waits to take over. It has all objects before `number`, and by now perhaps more."""

    process: str
    number: int
    lag_objects: int  # at most
    lag_seconds: float  # the age of the oldest object that it is not known to have


def key_of(root: str, number: int) -> str:
    """Return the key of an object."""
    return f"{root}chain/{number:020}"


def has_chain(store: Store, root: str) -> bool:
    """Whether a data folder lives there."""
    return any(next(store.keys(f"{root}{part}/"), None) is not None for part in ("chain", "checkpoint"))


def is_left_behind(store: Store, root: str, number: int) -> bool:
    """Whether a checkpoint is beyond the number. Then the object may be missing because it was cleaned up."""
    prefix = f"{root}checkpoint/"
    return next(store.keys(prefix, after=f"{prefix}{number:020}"), None) is not None


def walk(
    store: Store, root: str, start: Position, *, at_once: int = _READ_AHEAD
) -> Iterator[tuple[ObjectHeader, memoryview]]:
    """Return the objects from a position to the end of the chain, as it is when we get there. Reads ahead."""
    position, ahead = start, 1
    with ExitStack() as closing:
        read: Callable[[Iterable[int]], Iterator[bytes | None]] = partial(map, lambda n: store.read(key_of(root, n)))
        while True:
            numbers = range(position.number, position.number + ahead)
            for number, content in zip(numbers, read(numbers), strict=True):
                if content is None:
                    return
                header, payload = decode(content, number)
                if header.kind == ObjectKind.FENCE:
                    belongs = header.epoch > position.epoch
                else:  # one owner in each epoch: another one would not know what this one has changed
                    belongs = (header.epoch, header.writer) == (position.epoch, position.writer)
                if not belongs:
                    raise BadObject(
                        f"object {number} was written by a process that did not own the folder (epoch {header.epoch})"
                    )
                yield header, payload
                position = position.after(header)
                if position.number != number + 1:
                    break  # behind a fence: what was read ahead is not part of the chain
            if ahead == 1 < at_once:  # there is more than one: worth threads
                pool = closing.enter_context(DaemonThreads(at_once, "holdfast-chain-read"))
                read = partial(pool.map, lambda n: store.read(key_of(root, n)))
            ahead = min(at_once, ahead * 4)


def _settle(answered: Future[_Answer], ask: Callable[[], _Answer]) -> None:
    try:
        answered.set_result(ask())
    except BaseException as error:
        answered.set_exception(error)


class OwnershipLost(OSError):
    """Another owner has taken over, or this one can no longer prove that it is the owner. Final."""

    advice = "Whatever was acknowledged with fsync is in the store: open the folder again to continue"

    def __init__(self, why: str) -> None:
        super().__init__(errno.EIO, why)


class Chain:
    """The chain as its owner writes it. `lock` guards `batch`: changes of files and their records are one step."""

    def __init__(
        self, store: Store, root: str, clock: Clock, *, at: Position, writer: bytes, times: ChainTimes | None = None
    ) -> None:
        self.store = store
        self.root = root
        self.times = times or ChainTimes()
        self.epoch = at.epoch
        self.batch = ChangeBatch()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._clock = clock
        self.writer = writer
        self.window = at.window or WINDOW
        self._next = at.number
        self._committed = at.number  # all objects before it exist
        self._in_flight: dict[int, bytes] = {}
        self._in_flight_bytes = 0
        self._orphans: list[int] = []  # in flight, and the thread that created them was interrupted
        self._created: dict[int, tuple[int, int]] = {}  # beyond a gap, and when each was sent, by both clocks
        self._sent_ns = 0
        self._confirmed_ns = clock.monotonic_ns()  # when the last object that is committed was sent
        self._confirmed_at_ns = clock.now_ns()  # the same by the wall clock, which does not stop with the machine
        self._waiting_since_ns: int | None = None
        self._failure: OwnershipLost | None = None
        self.urgent = threading.Event()  # there is something for `tick` to do
        self.on_failure: Callable[[], None] = lambda: None  # called once, by any thread
        self.bytes_sent = 0
        self.note = b""  # what this owner says about itself
        self.standbys: Callable[[], list[Standby]] = list  # who waits to take over

    # Fencing

    @staticmethod
    def take_over(
        store: Store, root: str, clock: Clock, *, at: Position, writer: bytes, note: bytes = b"",
        times: ChainTimes | None = None, window: int = WINDOW,
    ) -> Chain | None:  # fmt: skip
        """Become the owner, from the end of the chain on; None if somebody else was faster."""
        resume_at = at.number + max(1, at.window)
        header = ObjectHeader(
            kind=ObjectKind.FENCE, number=at.number, epoch=at.epoch + 1, writer=writer, window=window,
            time_ns=clock.now_ns(), resume_at=resume_at,
        )  # fmt: skip
        chain = Chain(store, root, clock, at=at.after(header), writer=writer, times=times)
        chain.note = note
        try:
            chain._put(at.number, encode(header, note), doubted=True)
        except OwnershipLost:
            return None
        return chain

    # Appending

    @property
    def next_number(self) -> int:
        """The number that the next object gets, if this stays the owner."""
        return self._next

    @property
    def committed(self) -> int:
        """All objects before this number exist."""
        return self._committed

    @property
    def silent_s(self) -> float:
        """How long ago the last object that the store has was sent."""
        return (self._clock.monotonic_ns() - self._confirmed_ns) / _NS

    @property
    def unsent_bytes(self) -> int:
        """What the store does not have yet, and would be lost with this process."""
        with self.lock:
            return self.batch.bytes + self._in_flight_bytes

    @property
    def failure(self) -> OSError | None:
        """Why nothing can be written any more; None as long as all is well."""
        return self._failure

    def check(self) -> None:
        """Raise if this is no longer the owner."""
        if self._failure is not None:
            raise OwnershipLost(str(self._failure.strerror))

    def noted(self) -> None:
        """Say that the batch has grown; called with the lock held."""
        if self._waiting_since_ns is None:
            self._waiting_since_ns = self._clock.monotonic_ns()
        if self.batch.bytes >= _SOON_BYTES:
            self.urgent.set()

    def make_room(self) -> None:
        """Wait while too much is on its way: what a lost process may cost is bounded. Without the lock."""
        if not self._has_room():
            self._wait_for(self._has_room)

    def is_ready(self) -> bool:
        """Whether a write would not wait for the store. If it failed, a write says so at once."""
        return self._failure is not None or (self._has_plenty() and self.is_current())

    def wait_ready(self) -> None:
        """Wait for the store in advance, for those who must not wait when they write; a failure shows then."""
        with suppress(OSError):
            self.require_current()
            self._wait_for(self._has_plenty)

    async def ready(self) -> None:
        """Wait without holding up the event loop, before something is written on it."""
        if not self.is_ready():
            await asyncio.to_thread(self.wait_ready)

    def _has_room(self) -> bool:
        return self.batch.bytes + self._in_flight_bytes <= _MOST_UNSENT_BYTES

    def _has_plenty(self) -> bool:
        """Whether a call that writes several times will not have to wait in the middle."""
        return self.batch.bytes + self._in_flight_bytes <= _MOST_UNSENT_BYTES // 2

    def _wait_for(self, is_enough: Callable[[], bool]) -> None:
        with self._changed:
            wanted = self._next + 1
        self._reach(wanted, is_enough)

    def commit(self) -> int:
        """Return when all changes made so far are in the store; returns the number that they are before."""
        with self._changed:
            self.check()
            wanted = self._next + 1 if self.batch.count else self._next
        self._reach(wanted)
        return wanted

    def cut(self, look: Callable[[], None]) -> int:
        """Call `look` at a moment between two objects, and return the number of the later one once all before it exist.

        What is waiting becomes an object in the same step: nothing can be added to it after the look.
        """
        while True:
            with self._changed:
                self.check()
                if self.batch.count and self._next >= self._committed + self.window:
                    self._changed.wait(1.0)
                    continue
                look()
                taken = self._take(ObjectKind.DATA) if self.batch.count else None
                number = self._next
            if taken is not None:
                self._send(*taken)
            self._reach(number)
            return number

    def confirm(self) -> None:
        """Prove that this is the owner still, with an object of its own if there is nothing to commit."""
        with self._changed:
            self.check()
            number = self._next
        self._reach(number + 1)

    def is_current(self) -> bool:
        """Whether nobody else can have become the owner by now, if all clocks run at about the same speed.

        Counted from when the last committed object was *sent*: a challenger saw it at that moment at the earliest. The
        monotonic clock of some systems stands still while the machine sleeps, so the wall clock is asked, too.
        """
        limit_ns = self.times.lease_s * 0.8 * _NS
        if self._clock.monotonic_ns() - self._confirmed_ns >= limit_ns:
            return False
        return self._clock.now_ns() - self._confirmed_at_ns < limit_ns

    def require_current(self) -> None:
        """Before handing something out, or saying how things are: be sure that no other owner can do so as well."""
        self.check()
        if not self.is_current():
            self.confirm()

    async def require_current_async(self) -> None:
        """Do the same without holding up the event loop."""
        if self._failure is not None or not self.is_current():
            await asyncio.to_thread(self.require_current)

    def tick(self) -> None:
        """Send what nobody waits for, and show that the owner lives. Called every now and then."""
        now_ns = self._clock.monotonic_ns()
        with self._changed:
            self.urgent.clear()
            if self._failure is not None:
                return
            since_ns = self._waiting_since_ns
            due = since_ns is not None and now_ns - since_ns >= self.times.send_s * _NS
            due = due or self.batch.bytes >= _SOON_BYTES
            silent = now_ns - self._confirmed_ns >= self.times.lease_s * _NS / 4
        if due:
            self.commit()
        elif silent:
            self.confirm()

    def close(self) -> None:
        """Commit what is waiting, and say that the owner is gone, so that the next need not wait."""
        self.commit()
        with self._changed:
            number, content = self._take(ObjectKind.CLOSED)
        self._send(number, content)
        self._reach(number + 1)
        self._fail("the folder was closed")

    def patiently(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask the store until it answers; raises StoreUnreachable if it does not for as long as a create may take."""
        began_ns = self._clock.monotonic_ns()
        while True:
            try:
                return ask()
            except StoreUnreachable:
                if self._clock.monotonic_ns() - began_ns > self.times.slowest_s * _NS:
                    raise
                self._clock.wait(threading.Event(), _RETRY_S)

    # Within

    def _reach(self, wanted: int, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Return when all objects before `wanted` exist. The thread that finds something to send sends it itself."""
        while True:
            with self._changed:
                self.check()
                if self._committed >= wanted or is_enough():
                    return
                if self._orphans:
                    number = self._orphans.pop()
                    content = self._in_flight[number]
                elif self._next < wanted and self._may_send():
                    number, content = self._take(ObjectKind.DATA if self.batch.count else ObjectKind.NOOP)
                else:
                    self._changed.wait(self.times.linger_s if self._next < wanted else 1.0)
                    continue
            self._send(number, content)

    def _may_send(self) -> bool:
        """Whether another object is worth it: at once if none is in flight, otherwise after a while or when large."""
        if not self._in_flight:
            return True
        if self._next >= self._committed + self.window:
            return False
        waited_ns = self._clock.monotonic_ns() - self._sent_ns
        return self.batch.bytes >= _SEND_BYTES or waited_ns >= self.times.linger_s * _NS

    def _take(self, kind: ObjectKind) -> tuple[int, bytes]:
        """Make the next object of what is waiting. Called with the lock held."""
        number, batch, now_ns = self._next, self.batch, self._clock.monotonic_ns()
        self._next = number + 1
        self.batch, self._waiting_since_ns, self._sent_ns = ChangeBatch(), None, now_ns
        header = ObjectHeader(
            kind=kind, number=number, epoch=self.epoch, writer=self.writer, window=self.window,
            time_ns=self._clock.now_ns(),
        )  # fmt: skip
        content = encode(header, batch.payload())
        self._in_flight[number] = content
        self._in_flight_bytes += len(content)
        return number, content

    def _send(self, number: int, content: bytes) -> None:
        try:
            self._put(number, content, doubted=not self.is_current())
        except OwnershipLost:
            raise
        except BaseException:  # the thread was interrupted: another one, or its next call, tries the same bytes again
            with self._changed:
                self._orphans.append(number)
                self._changed.notify_all()
            raise

    def _put(self, number: int, content: bytes, *, doubted: bool = False) -> None:
        """Create one object, however often it takes; raises OwnershipLost if that cannot be."""
        key = key_of(self.root, number)
        began_ns, began_at_ns = self._clock.monotonic_ns(), self._clock.now_ns()
        in_doubt = doubted and len(self._in_flight) > 1  # the store may hang, and others know that before us
        try:
            while not self._in_time(lambda: self.store.create(key, content), began_ns, aside=in_doubt):
                found = self._in_time(lambda: self.store.read(key), began_ns, aside=in_doubt)
                if found == content:  # an earlier attempt that got no answer
                    break
                if found is not None:
                    raise self._fail(self._taken_over())
                if self._clock.monotonic_ns() - began_ns > self.times.slowest_s * _NS:
                    raise StoreUnreachable(f"{key} exists and cannot be read")
                self._clock.wait(threading.Event(), _RETRY_S)
            if doubted and self._in_time(lambda: is_left_behind(self.store, self.root, number), began_ns):
                raise self._fail(self._taken_over())
        except StoreUnreachable as error:
            raise self._fail(f"the store did not respond for {self.times.slowest_s:g} s: {error}") from error
        except StoreRefused as error:
            raise self._fail(f"the store refused an object: {error}") from error
        if self._clock.monotonic_ns() - began_ns > self.times.slowest_s * _NS:
            raise self._fail(f"the store took longer than {self.times.slowest_s:g} s, so this is not counted as stored")
        self._made(number, (began_ns, began_at_ns), len(content))

    def _in_time(self, ask: Callable[[], _Answer], began_ns: int, *, aside: bool = False) -> _Answer:
        """Ask the store until it answers; raises StoreUnreachable once an answer would come too late to count.

        A call that hangs goes on for longer than that. So only the first one is made by this thread, and not even that
        with `aside`.
        """
        while True:
            try:
                return self._ask_aside(ask, began_ns) if aside else ask()
            except StoreUnreachable:
                if self._left_s(began_ns) <= 0:
                    raise
                self.check()
                self._clock.wait(threading.Event(), _RETRY_S)
            aside = True

    def _left_s(self, began_ns: int) -> float:
        return self.times.slowest_s - (self._clock.monotonic_ns() - began_ns) / _NS

    def _ask_aside(self, ask: Callable[[], _Answer], began_ns: int) -> _Answer:
        """Ask on another thread, and leave it alone when its answer would come too late, or this owner has failed."""
        answered: Future[_Answer] = Future()
        try:
            threading.Thread(target=_settle, args=(answered, ask), name="holdfast-chain-ask", daemon=True).start()
        except RuntimeError:  # there are no threads any more: the process ends
            return ask()
        while True:
            wait([answered], timeout=min(1.0, max(0.0, self._left_s(began_ns))))
            if answered.done():
                return answered.result()
            self.check()
            if self._left_s(began_ns) <= 0:
                raise StoreUnreachable(f"{self.store.name}: no answer in time")

    def _made(self, number: int, sent: tuple[int, int], length: int) -> None:
        with self._changed:
            self._in_flight_bytes -= len(self._in_flight.pop(number, b""))
            self._created[number] = sent
            self.bytes_sent += length
            while self._committed in self._created:
                sent_ns, sent_at_ns = self._created.pop(self._committed)
                if sent_ns >= self._confirmed_ns:
                    self._confirmed_ns, self._confirmed_at_ns = sent_ns, sent_at_ns
                self._committed += 1
            self._changed.notify_all()

    def _taken_over(self) -> str:
        return f"another process has taken over {self.store.name}; open it again to continue there"

    def _fail(self, why: str) -> OwnershipLost:
        with self._changed:
            is_first = self._failure is None
            self._failure = failure = self._failure or OwnershipLost(why)
            self._changed.notify_all()
        if is_first:
            self.on_failure()
        return OwnershipLost(str(failure.strerror))
