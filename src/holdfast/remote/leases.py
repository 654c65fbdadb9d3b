"""What goes on beside the calls of a client: leases renewed, dropped messages given back, members kept alive.

One thread for each client does it. It depends on no event loop: a handler that blocks one loses no lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from queue import Empty as NothingThere
from queue import SimpleQueue
from typing import Any, Final, Protocol

from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import run
from holdfast.errors import HoldfastError, LeaseLost, Unavailable
from holdfast.protocol.messages import Extend, Nack, Settled

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000
_AT_ONCE: Final = 1_000
_SOON_NS: Final = 250 * _NS
_UNHANDLED: Final = (
    "a message of %s was dropped without ack or nack, and comes back as after a failed attempt; use `with message:` "
    "(this is said only once)"
)


class HeldLease:
    """A message in somebody's hands, without the message: what the thread must know of it."""

    __slots__ = ("detached", "due_ns", "ended", "group", "lease_ms", "lost", "receipt", "renew", "topic", "until_ns")

    def __init__(self, topic: str, group: str, receipt: str, lease_ms: int, now_ns: int) -> None:
        self.topic = topic
        self.group = group
        self.receipt = receipt
        self.renew = self.detached = self.ended = self.lost = False
        self.begin(lease_ms, now_ns)

    def begin(self, lease_ms: int, now_ns: int) -> None:
        """The lease begins anew."""
        self.lease_ms = lease_ms
        self.until_ns = now_ns + lease_ms * _NS
        self.due_ns = now_ns + lease_ms * _NS // 3

    def is_lost(self, now_ns: int) -> bool:
        return self.lost or now_ns >= self.until_ns


class Beating(Protocol):
    """Something that must say now and then that it lives."""

    closed: bool

    def beat(self, now_ns: int) -> int:
        """Say so, if it is time; answers when it is time again."""


class LeaseThread:
    """The thread of one client. `drop` may be called by a finalizer, anywhere."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False

    def begin(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._ended:
                work = _LeaseWork(self._caller, self._inbox)
                self._thread = threading.Thread(target=work.run, name="holdfast-client", daemon=True)
                self._thread.start()

    def renew(self, held: HeldLease) -> None:
        """Keep the lease for as long as the message is in hand."""
        held.renew = True
        self.begin()
        self._inbox.put(held)

    def drop(self, held: HeldLease) -> None:
        """Nobody has the message in hand any more, and nobody settled it: give it back. Callable from a finalizer."""
        held.ended = True
        self._inbox.put((held,))

    def beat(self, beating: Beating) -> None:
        """Let this one say that it lives, until it is closed."""
        self.begin()
        self._inbox.put(beating)

    def disown(self) -> None:
        """In a child after a fork: the thread is the parent's, and so is all that it does."""
        self._thread = None
        self._inbox = SimpleQueue()
        self._lock = threading.Lock()

    def end(self, timeout_s: float = 2.0) -> None:
        """Give back what was dropped, then stop."""
        self._ended = True
        if self._thread is not None:
            self._inbox.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)

    def __del__(self) -> None:
        self._inbox.put(None)  # nobody has the client any more


class _LeaseWork:
    """What the thread does; it knows the caller and the inbox, and keeps no client alive."""

    def __init__(self, caller: Caller, inbox: SimpleQueue[Any]) -> None:
        self._caller = caller
        self._inbox = inbox
        self._clock = caller.world.clock
        self._held: dict[HeldLease, None] = {}
        self._beating: dict[Beating, int] = {}
        self._dropped: list[HeldLease] = []
        self._ending = self._warned = False

    def run(self) -> None:
        """Until the client is closed, or gone."""
        while not self._ending:
            self._take_in()
            try:
                self._round()
            except Exception:  # whatever it was: without its thread every lease would end
                logger.exception("a round of upkeep failed", extra={"server": self._caller.address.text})

    def _take_in(self) -> None:
        """Wait for the next thing to do; then take all that is there."""
        wait_s = self._wait_s()
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s is None or wait_s > 0 else self._inbox.get_nowait()
            while True:
                self._note(item)
                item = self._inbox.get_nowait()
        except NothingThere:
            return

    def _note(self, item: Any) -> None:
        if item is None:
            self._ending = True
        elif isinstance(item, HeldLease):
            self._held[item] = None
        elif isinstance(item, tuple):
            self._dropped.append(item[0])
        else:
            self._beating[item] = 0

    def _wait_s(self) -> float | None:
        due_ns = min((*(held.due_ns for held in self._held), *self._beating.values()), default=None)
        if due_ns is None:
            return None
        return max(due_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _round(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self._give_back(dropped)
        now_ns = self._clock.monotonic_ns()
        for held in [held for held in self._held if held.ended or held.is_lost(now_ns)]:
            del self._held[held]
        due = [held for held in self._held if held.due_ns <= now_ns]
        for topic, group, some in _by_group(due):
            self._renew(topic, group, some)
        for beating, due_ns in list(self._beating.items()):
            if beating.closed:
                del self._beating[beating]
            elif due_ns <= now_ns:
                self._beating[beating] = beating.beat(now_ns)

    def _renew(self, topic: str, group: str, due: list[HeldLease]) -> None:
        now_ns = self._clock.monotonic_ns()
        lease_ms = due[0].lease_ms
        body = Extend(receipts=[held.receipt for held in due], group=group, lease=lease_ms / 1000)
        try:
            self._ask(topic, "extend", body)
        except LeaseLost as error:
            gone = set(error.receipts) or {held.receipt for held in due}
            for held in due:
                if held.receipt in gone:
                    held.lost = not held.ended
                    self._held.pop(held, None)
                else:
                    held.begin(held.lease_ms, now_ns)
        except Unavailable as error:
            logger.warning("leases not renewed yet", extra={"topic": topic, "messages": len(due), "why": str(error)})
            for held in due:
                held.due_ns = now_ns + _SOON_NS
        except HoldfastError as error:
            logger.warning("leases cannot be renewed", extra={"topic": topic, "messages": len(due), "why": str(error)})
            for held in due:
                self._held.pop(held, None)
        else:
            for held in due:
                held.begin(held.lease_ms, now_ns)

    def _give_back(self, dropped: list[HeldLease]) -> None:
        for held in dropped:
            self._held.pop(held, None)
        for topic, group, some in _by_group(dropped):
            if not self._warned:
                self._warned = True
                logger.warning(_UNHANDLED, topic)
            # Whoever drops a message may have begun with it: as a deferral, one that breaks its handler each time
            # would come again and again, at once.
            body = Nack(receipts=[held.receipt for held in some], group=group, intent="drop")
            try:
                self._ask(topic, "nack", body)
            except LeaseLost:
                continue  # it was settled, or had ended by itself
            except HoldfastError as error:
                logger.warning("dropped messages come back when their leases end", extra={"why": str(error)})

    def _ask(self, topic: str, verb: str, body: Any) -> None:
        run(
            self._caller.call(
                Ask(method="POST", path=path_of("queues", topic, verb), body=packed(body), answers=Settled)
            )
        )


def _by_group(held: Iterable[HeldLease]) -> list[tuple[str, str, list[HeldLease]]]:
    """Those of one group, with the same lease, together; not too many at a time."""
    found: dict[tuple[str, str, int], list[HeldLease]] = {}
    for each in held:
        found.setdefault((each.topic, each.group, each.lease_ms), []).append(each)
    return [
        (topic, group, some[i : i + _AT_ONCE])
        for (topic, group, _), some in found.items()
        for i in range(0, len(some), _AT_ONCE)
    ]
