"""Counters and histograms of a queue, and the interface for observers.

Instruments are changed without a lock. With CPython's global lock nothing is lost: a change makes no calls, and threads
switch only at calls and loops. On a free-threaded build two simultaneous changes may count as one; nothing worse can
happen. A snapshot may contain one part of a concurrent observation and not the other.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import Any, Final, Protocol

import msgspec

from holdfast.delivery.events import LEASE_ENDED, Buried, Event, Returned
from holdfast.env.process import get_logger
from holdfast.model import Durability, Pause

logger = get_logger(__name__)

# 16 slots for each power of two: a slot is at most 1/16 of its values wide, so its middle is within 1/32 of each of
# them. Slots 0 to 31 hold one nanosecond each.
_SLOT_BITS: Final = 4
_OCTAVE_SLOTS: Final = 1 << _SLOT_BITS
_MAX_BITS: Final = 59  # 2**59 ns are 18 years; longer times share the last slot
_SLOTS: Final = (_MAX_BITS - _SLOT_BITS + 1) * _OCTAVE_SLOTS
_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 80

# Relative error of a quantile, for times up to LIMIT_NS.
RESOLUTION: Final = 1 / 32
LIMIT_NS: Final = 1 << _MAX_BITS


class Observer(Protocol):
    """Receives every count and time as it happens, for your own metrics (Prometheus, StatsD).

    It is called by the thread that uses the queue, possibly under the queue's lock: be quick, and do not call the
    queue. If it raises, the error is logged and it is not called again.
    """

    def count(self, name: str, n: int) -> None:
        """Called when a counter grows.

        Args:
            name: The counter.
            n: By how much.
        """

    def observe(self, name: str, seconds: float) -> None:
        """Called for each time added to a histogram.

        Args:
            name: The histogram.
            seconds: The time.
        """


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram at one moment, in seconds; while it is empty, all but `count` and `sum` are null."""

    count: int = 0
    sum: float = 0.0
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics of a queue at one moment, since it was opened."""

    published: int
    published_bytes: int
    delivered: int
    acked: int
    nacked: int
    deferred: int
    rejected: int
    expired_leases: int
    returned: int
    buried: int
    redriven: int
    expired: int
    cancelled: int
    duplicates: int
    released: int
    lost_leases: int
    damaged: int = 0
    put_seconds: Times
    wait_seconds: Times
    handle_seconds: Times
    lateness_seconds: Times
    sync_seconds: Times
    gauges: dict[str, float]


class Counter:
    """A number that only grows."""

    __slots__ = ("name", "relay", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = 0
        self.relay: _Relay | None = None

    def add(self, n: int = 1) -> None:
        self.value += n
        relay = self.relay
        if relay is not None:
            relay.count(self.name, n)


class Histogram:
    """A histogram of durations: slots of about equal relative width, in constant memory."""

    __slots__ = ("_slots", "max_ns", "min_ns", "name", "relay", "sum_ns")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.sum_ns = 0
        self.max_ns = -1  # below every time, as min_ns is above, so that the first one is no special case
        self.min_ns = _NEVER_NS
        self._slots = [0] * _SLOTS
        self.relay: _Relay | None = None

    def observe_since(self, now_ns: int, moments: Sequence[int], *, unit_ns: int = 1) -> None:
        """Observe the time from each moment until now; the moments of one batch are mostly equal."""
        first = moments[0]
        together = moments.count(first) == len(moments)
        for moment, times in ({first: len(moments)} if together else Tally(moments)).items():
            self.observe_ns(now_ns - moment * unit_ns, times)

    def observe_ns(self, ns: int, times: int = 1) -> None:
        """Add a time, `times` times over; a negative one (a clock was set back) counts as 0."""
        if ns < 16:
            if ns < 0:
                ns = 0
            slot = ns
        else:
            # The highest five bits: the first is always set, four choose the slot within the octave.
            shift = ns.bit_length() - 5
            slot = (shift << 4) + (ns >> shift)
        try:
            self._slots[slot] += times
        except IndexError:
            self._slots[-1] += times
        self.sum_ns += ns * times
        if ns > self.max_ns:
            self.max_ns = ns
        if ns < self.min_ns:
            self.min_ns = ns
        relay = self.relay
        if relay is not None:
            relay.observe(self.name, ns / 1e9)

    @property
    def count(self) -> int:
        return sum(self._slots)

    def quantile(self, q: float) -> float | None:
        """The quantile in seconds, within RESOLUTION; None if empty. Raises ValueError if `q` is not in 0 to 1."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
        return self._quantiles(list(self._slots), (q,))[0]

    @staticmethod
    def quantiles_between(before: Sequence[int], after: Sequence[int], wanted: tuple[float, ...]) -> list[float | None]:
        """Quantiles, in ascending order, of the times that came between two calls of `slots`."""
        came = Histogram()
        came.min_ns, came.max_ns = 0, LIMIT_NS
        return came._quantiles(list(map(sub, after, before)), wanted)

    def slots(self) -> list[int]:
        """How many times there are in each slot, for `quantiles_between`."""
        return list(self._slots)

    def cumulated(self, edges: Sequence[int]) -> tuple[list[int], int]:
        """The number of times up to each edge (see `edge`), and their total number."""
        sums = list(accumulate(self._slots, initial=0))
        return [sums[slots] for slots in edges], sums[-1]

    def merge(self, other: Histogram) -> None:
        """Add the times of another histogram without calling the observer.

        Not for histograms in use: a time that another thread observes here meanwhile may be lost.
        """
        self._slots = [mine + theirs for mine, theirs in zip(self._slots, other._slots, strict=True)]
        self.sum_ns += other.sum_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.min_ns = min(self.min_ns, other.min_ns)

    def snapshot(self) -> Times:
        slots = list(self._slots)
        count = sum(slots)
        if not count:
            return Times()
        p50, p95, p99 = self._quantiles(slots, (0.5, 0.95, 0.99))
        return Times(
            count=count,
            sum=self.sum_ns / _NS,
            min=self.min_ns / _NS,
            max=self.max_ns / _NS,
            p50=p50,
            p95=p95,
            p99=p99,
        )

    def _quantiles(self, slots: list[int], wanted: tuple[float, ...]) -> list[float | None]:
        """Quantiles by nearest rank; `wanted` is in ascending order."""
        count = sum(slots)
        if not count:
            return [None] * len(wanted)
        found: list[float | None] = []
        slot, seen = 0, slots[0]
        for q in wanted:
            rank = max(1, math.ceil(q * count))
            while seen < rank:
                slot += 1
                seen += slots[slot]
            # The middle of a slot may lie outside the times observed; a quantile must not.
            found.append(min(max(_middle_ns(slot), self.min_ns), self.max_ns) / _NS)
        return found


def edge(seconds: float) -> int:
    """The number of slots for times up to `seconds`, not counting a slot whose middle lies above."""
    return bisect_right(range(_SLOTS), seconds * _NS, key=_middle_ns)


def _middle_ns(slot: int) -> float:
    if slot < 2 * _OCTAVE_SLOTS:
        return slot
    shift = slot // _OCTAVE_SLOTS - 1
    first_ns = (slot - shift * _OCTAVE_SLOTS) << shift
    return first_ns + ((1 << shift) - 1) / 2


class Metrics:
    """The instruments of one queue, each an attribute: `metrics.published.add(3)`."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.published = Counter("published")
        self.published_bytes = Counter("published_bytes")
        self.delivered = Counter("delivered")
        self.acked = Counter("acked")
        self.nacked = Counter("nacked")
        self.deferred = Counter("deferred")
        self.rejected = Counter("rejected")
        self.expired_leases = Counter("expired_leases")
        self.returned = Counter("returned")
        self.buried = Counter("buried")
        self.redriven = Counter("redriven")
        self.expired = Counter("expired")
        self.cancelled = Counter("cancelled")
        self.duplicates = Counter("duplicates")
        self.released = Counter("released")  # delayed messages that came due
        self.lost_leases = Counter("lost_leases")
        self.damaged = Counter("damaged")  # messages skipped because they could not be read
        self.put_seconds = Histogram("put_seconds")
        self.wait_seconds = Histogram("wait_seconds")  # published to delivered
        self.handle_seconds = Histogram("handle_seconds")  # delivered to acked
        self.lateness_seconds = Histogram("lateness_seconds")  # due to released
        self.sync_seconds = Histogram("sync_seconds")  # syncs of the logs and the groups' journals
        self._instruments = [part for part in vars(self).values() if isinstance(part, Counter | Histogram)]
        self._gauges: dict[str, Callable[[], float]] = {}
        self._many_gauges: list[Callable[[], Mapping[str, float]]] = []
        self.set_observer(observer)

    def set_observer(self, observer: Observer | None) -> None:
        """Replace the observer; None removes it."""
        relay = None if observer is None else _Relay(observer, self._drop)
        for instrument in self._instruments:
            instrument.relay = relay

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Add a gauge, which is read only when a snapshot is taken."""
        self._gauges[name] = read

    def gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Add several gauges that are read together, by name."""
        self._many_gauges.append(read)

    def count_returned(self, events: Sequence[Event]) -> None:
        """Count returned messages and expired leases."""
        ways = [event.why for event in events if isinstance(event, Returned)]
        if ways:
            self.returned.add(len(ways))
        ended = ways.count(LEASE_ENDED)
        ended += sum(isinstance(event, Buried) and event.error == LEASE_ENDED for event in events)
        if ended:
            self.expired_leases.add(ended)

    def snapshot(self) -> MetricsSnapshot:
        values: dict[str, Any] = {
            part.name: part.value if isinstance(part, Counter) else part.snapshot() for part in self._instruments
        }
        gauges = {name: read() for name, read in self._gauges.items()}
        for read_many in self._many_gauges:
            gauges.update(read_many())
        return MetricsSnapshot(gauges=gauges, **values)

    def _drop(self, relay: _Relay) -> None:
        for instrument in self._instruments:
            if instrument.relay is relay:
                instrument.relay = None


class _Relay:
    """Calls an observer and catches its errors."""

    __slots__ = ("_drop", "_failed", "_lock", "_observer")

    def __init__(self, observer: Observer, drop: Callable[[_Relay], None]) -> None:
        self._observer = observer
        self._drop = drop
        self._lock = threading.Lock()
        self._failed = False

    def count(self, name: str, n: int) -> None:
        try:
            self._observer.count(name, n)
        except Exception as error:
            self._fail(error)

    def observe(self, name: str, seconds: float) -> None:
        try:
            self._observer.observe(name, seconds)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failed:
                return
            self._failed = True
        self._drop(self)
        logger.warning(
            "observer dropped after an error",
            extra={"observer": type(self._observer).__name__, "error": str(error)},
            exc_info=error,
        )


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment: messages by phase, their size on disk, and the metrics since opening.

    With several partitions all numbers are sums, including `start`, `end` and `floor`.
    """

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
    group: str = "default"
    partitions: int = 1
    damaged: int = 0
    paused: Pause | None = None


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction freed."""

    segments: int
    bytes: int
    journal_bytes: int
