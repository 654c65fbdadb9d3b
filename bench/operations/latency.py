"""From put to get: one thread puts at a steady rate, another waits for each message and acks it."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import Sample, TooSlow
from bench.harness import Case, Operation, Timed
from bench.operations.takes import opened_queue, queue_case
from bench.queues import QUEUES, Queue
from bench.scale import Scale

_RATES = (1_000, 5_000)
_WARM_UP_SHARE = 0.1
_NUMBER_DIGITS = 10

# A queue that is this late at the end is slower than the rate: the messages pile up, and their age says only
# how long that went on.
_LATE_S = 0.1
_PATIENCE_S = 5.0
_NOTHING = f"no message came in {_PATIENCE_S:.0f} s"

_PR_SET_TIMERSLACK = 29


def cases(scale: Scale) -> list[Case]:
    """Every queue at every rate."""
    return [
        queue_case(_operation(rate), queue, partial(latency, rate, queue, scale)) for rate in _RATES for queue in QUEUES
    ]


def _operation(rate: int) -> Operation:
    return Operation(
        f"latency at {rate:,}/s",
        "From put to get, between two threads; each message is acked before the next get.",
        measures="latency",
        most_rounds=3,
    )


@contextmanager
def latency(
    rate: int, queue: type[Queue], scale: Scale, folder: Path, *, putters: int = 1, most: int = 1
) -> Iterator[Timed]:
    """So many threads put, in turn; the consumer takes up to `most` messages at a time."""
    with opened_queue(queue, scale, folder) as made, ExitStack() as opened:
        count = max(10, round(rate * scale.latency_seconds))
        others = [made.other_side() for _ in range(putters)]
        for other in others:
            if other is not made:
                opened.callback(other.close)
        sides = [made, *others[1:]], others[0]
        _Run(*sides, scale.body_bytes, rate, round(count * _WARM_UP_SHARE), most).sample()
        yield _Run(*sides, scale.body_bytes, rate, count, most).sample


class _Run:
    """So many messages at one rate; a message carries its number, and the times lie in arrays beside."""

    def __init__(
        self, putters: Sequence[Queue], getter: Queue, body_bytes: int, rate: int, count: int, most: int = 1
    ) -> None:
        self.putters, self.getter = putters, getter
        self.most = most
        self.interval_s = 1 / rate
        filler = b"x" * max(0, body_bytes - _NUMBER_DIGITS)
        self.bodies = [b"%0*d" % (_NUMBER_DIGITS, number) + filler for number in range(count)]
        self.put_at = array("d", bytes(8 * count))
        self.got_at = array("d", bytes(8 * count))
        self.problems: list[BaseException] = []

    def sample(self) -> Sample:
        """Run all threads; the calling one puts, too."""
        cpu_began, began = time.process_time(), time.perf_counter()
        threads = [threading.Thread(target=self._reporting, args=(self._consume,), daemon=True)]
        threads += [
            threading.Thread(target=self._reporting, args=(self._produce, began, turn), daemon=True)
            for turn in range(1, len(self.putters))
        ]
        for thread in threads:
            thread.start()
        self._produce(began, 0)
        for thread in threads:
            thread.join()
        ended, cpu_ended = time.perf_counter(), time.process_time()
        if self.problems:
            raise self.problems[0]
        self._check_rate(ended - began)
        ages_ns = sorted(1e9 * (got - put) for put, got in zip(self.put_at, self.got_at, strict=True))
        return Sample(
            len(ages_ns),
            ended - began,
            cpu_ended - cpu_began,
            p50_ns=quantile(ages_ns, 0.50),
            p99_ns=quantile(ages_ns, 0.99),
        )

    def _reporting(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as problem:
            self.problems.append(problem)

    def _produce(self, began: float, turn: int) -> None:
        """A put that comes late because the one before took long counts from when it was due; what the
        kernel oversleeps is our own fault and does not count.
        """
        wake_up_in_time()
        put, put_at, clock = self.putters[turn].put, self.put_at, time.perf_counter
        for number in range(turn, len(self.bodies), len(self.putters)):
            due = began + (number + 1) * self.interval_s
            now = clock()
            if now < due:
                time.sleep(due - now)
                put_at[number] = clock()
            else:
                put_at[number] = due
            put(self.bodies[number])

    def _consume(self) -> None:
        wake_up_in_time()
        if self.most == 1:
            self._consume_each()
        else:
            self._consume_some()

    def _consume_each(self) -> None:
        get, ack, got_at, clock = self.getter.get, self.getter.ack, self.got_at, time.perf_counter
        for _ in self.bodies:
            taken = get(_PATIENCE_S)
            if taken is None:
                raise LookupError(_NOTHING)
            got_at[int(taken.body[:_NUMBER_DIGITS])] = clock()
            ack(taken.receipt)

    def _consume_some(self) -> None:
        left, got_at, clock = len(self.bodies), self.got_at, time.perf_counter
        while left:
            some = self.getter.get_some(self.most, _PATIENCE_S)
            now = clock()
            if not some:
                raise LookupError(_NOTHING)
            for taken in some:
                got_at[int(taken.body[:_NUMBER_DIGITS])] = now
            self.getter.ack_some([taken.receipt for taken in some])
            left -= len(some)

    def _check_rate(self, seconds: float) -> None:
        count = len(self.bodies)
        if seconds > count * self.interval_s + _LATE_S:
            raise TooSlow(f"moved {count / seconds:,.0f} messages a second")


def quantile(ordered: list[float], share: float) -> float:
    """The smallest of the ordered figures that at least this share does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def wake_up_in_time() -> None:
    """Linux lets a sleeping thread lie 50 µs longer, to wake several at once; here that would be the figure."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, 1)
