"""What every queue can do, in the words of the benchmarks: a log takes puts, a queue gives them out again."""

from __future__ import annotations

import time
from typing import Any, ClassVar, NamedTuple

from bench.peers.base import Peer
from bench.programs import Program

# How often a queue without a waiting get is asked. Most would ask more rarely, and answer later.
POLL_S = 0.001


class Taken(NamedTuple):
    """A message in hand, and what its queue wants back to settle it."""

    body: bytes
    receipt: Any


class Queue(Peer):
    """A contestant whose messages are taken and settled.

    `ack_survives` is the worst after which a message whose ack returned does not come back. A queue without an
    ack forgets a message when it gives it out: if its taker dies, the message is gone.
    """

    ack_survives: ClassVar[str]
    programs: ClassVar[tuple[Program, ...]] = ()
    depth: ClassVar[int] = 100_000
    """How many messages it can be given in seconds, to see what a take costs then; 0: too slow for any."""

    def get(self, wait_s: float) -> Taken | None:
        """The next message, waiting for it if need be; None if none came. With 0 it never waits."""
        raise NotImplementedError

    def ack(self, receipt: Any) -> None:
        """Settle a message. Does nothing where there is no ack."""

    def get_some(self, most: int, wait_s: float) -> list[Taken]:
        """What is there, waiting for the first; one alone where there is no call for more."""
        taken = self.get(wait_s)
        return [] if taken is None else [taken]

    def ack_some(self, receipts: list[Any]) -> None:
        """Settle them, together where the peer has a way to do that."""
        for receipt in receipts:
            self.ack(receipt)

    def take_each(self, count: int) -> None:
        """Get and ack, one by one; raises if there are fewer. A fast peer has its own loop."""
        for _ in range(count):
            self.ack(_present(self.get(0)).receipt)

    def take_many(self, count: int) -> None:
        """Together where the peer has a way to do that, else one by one."""
        self.take_each(count)

    def kill_server(self) -> None:
        """With -9, where there is one."""

    def other_side(self) -> Queue:
        """The same queue for another thread, with a connection of its own where it needs one."""
        return self

    def read_all(self) -> int:
        """Take everything; answers how many there were."""
        count = 0
        while (taken := self.get(0)) is not None:
            self.ack(taken.receipt)
            count += 1
        return count


class Polled(Queue):
    """A queue that has no get which waits: its consumers ask again and again."""

    def try_get(self) -> Taken | None:
        """The next message; None if there is none now."""
        raise NotImplementedError

    def get(self, wait_s: float) -> Taken | None:
        ends = time.monotonic() + wait_s
        while (taken := self.try_get()) is None and time.monotonic() < ends:
            time.sleep(POLL_S)
        return taken

    def take_each(self, count: int) -> None:
        for _ in range(count):
            self.ack(_present(self.try_get()).receipt)


def _present(taken: Taken | None) -> Taken:
    if taken is None:
        raise LookupError("the queue is empty though messages were put")
    return taken
