"""From put to get: one thread puts at a steady rate, another waits for each message and acks it."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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
def latency(rate: int, queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(queue, scale, folder) as made:
        count = max(10, round(rate * scale.latency_seconds))
        other = made.other_side()
        _Run(made, other, scale.body_bytes, rate, round(count * _WARM_UP_SHARE)).sample()
        yield _Run(made, other, scale.body_bytes, rate, count).sample
        if other is not made:
            other.close()


class _Run:
    """So many messages at one rate; a message carries its number, and the times lie in arrays beside."""

    def __init__(self, putter: Queue, getter: Queue, body_bytes: int, rate: int, count: int) -> None:
        self.putter, self.getter = putter, getter
        self.interval_s = 1 / rate
        filler = b"x" * max(0, body_bytes - _NUMBER_DIGITS)
        self.bodies = [b"%0*d" % (_NUMBER_DIGITS, number) + filler for number in range(count)]
        self.put_at = array("d", bytes(8 * count))
        self.got_at = array("d", bytes(8 * count))
        self.problem: BaseException | None = None

    def sample(self) -> Sample:
        """Run both threads; the calling one puts."""
        consumer = threading.Thread(target=self._consume, daemon=True)
        consumer.start()
        cpu_started, started = time.process_time(), time.perf_counter()
        self._produce()
        consumer.join()
        ended, cpu_ended = time.perf_counter(), time.process_time()
        if self.problem is not None:
            raise self.problem
        self._check_rate(ended - started)
        ages_ns = sorted(1e9 * (got - put) for put, got in zip(self.put_at, self.got_at, strict=True))
        return Sample(
            len(ages_ns),
            ended - started,
            cpu_ended - cpu_started,
            p50_ns=quantile(ages_ns, 0.50),
            p99_ns=quantile(ages_ns, 0.99),
        )

    def _produce(self) -> None:
        """A put that comes late because the one before took long counts from when it was due; what the
        kernel oversleeps is our own fault and does not count.
        """
        wake_up_in_time()
        put, put_at, clock = self.putter.put, self.put_at, time.perf_counter
        due = clock()
        for number, body in enumerate(self.bodies):
            due += self.interval_s
            now = clock()
            if now < due:
                time.sleep(due - now)
                put_at[number] = clock()
            else:
                put_at[number] = due
            put(body)

    def _consume(self) -> None:
        get, ack, got_at, clock = self.getter.get, self.getter.ack, self.got_at, time.perf_counter
        wake_up_in_time()
        try:
            for _ in self.bodies:
                taken = get(_PATIENCE_S)
                if taken is None:
                    raise LookupError(f"no message came in {_PATIENCE_S:.0f} s")
                got_at[int(taken.body[:_NUMBER_DIGITS])] = clock()
                ack(taken.receipt)
        except BaseException as problem:
            self.problem = problem

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
