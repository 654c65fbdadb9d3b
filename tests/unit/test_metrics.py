"""Counters, histograms and the observer: exact counts, quantiles as near as promised, errors that go nowhere."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.broker.metrics import LIMIT_NS, RESOLUTION, Counter, Histogram, Metrics, MetricsSnapshot, Times, edge

YEAR_NS = 365 * 24 * 3600 * 10**9
COUNTERS = {name for name, kind in MetricsSnapshot.__annotations__.items() if kind == "int"}
HISTOGRAMS = {name for name, kind in MetricsSnapshot.__annotations__.items() if kind == "Times"}

# As likely a microsecond as a year: each power of two has the same chance.
TIMES_NS = st.integers(0, 58).flatmap(lambda bits: st.integers(0, 2**bits))


def filled(times_ns: list[int]) -> Histogram:
    histogram = Histogram()
    for ns in times_ns:
        histogram.observe_ns(ns)
    return histogram


def exact_ns(times_ns: list[int], q: float) -> int:
    return sorted(times_ns)[max(1, math.ceil(q * len(times_ns))) - 1]


class Recorder:
    """An observer that keeps what it is told; it raises if `error` is set."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.recorded: list[tuple[str, float]] = []
        self.error = error

    def count(self, name: str, n: int) -> None:
        self.recorded.append((name, n))
        if self.error is not None:
            raise self.error

    observe = count


@given(st.lists(TIMES_NS, min_size=1), st.sampled_from([0, 0.5, 0.95, 0.99, 1]) | st.floats(0, 1))
@example([10 * YEAR_NS], 0.5)
@example([1_000, 1_000_000], 0.5)
@example([2**40 - 1, 2**40], 0.5)
@example([15, 16, 17, 31, 32, 33], 0.5)
def test_a_quantile_is_within_the_promised_part_of_the_true_one(times_ns: list[int], q: float):
    found = filled(times_ns).quantile(q)
    assert found is not None
    true_s = exact_ns(times_ns, q) / 1e9
    assert abs(found - true_s) <= true_s * RESOLUTION * (1 + 1e-9)
    assert min(times_ns) / 10**9 <= found <= max(times_ns) / 10**9


def test_the_resolution_is_about_five_percent_up_to_ten_years():
    assert RESOLUTION <= 0.05
    assert LIMIT_NS > 10 * YEAR_NS


@given(st.lists(TIMES_NS, min_size=1))
def test_a_snapshot_agrees_with_the_data_and_with_itself(times_ns: list[int]):
    histogram = filled(times_ns)
    shown = histogram.snapshot()
    assert shown.count == histogram.count == len(times_ns)
    assert shown.sum == pytest.approx(sum(times_ns) / 1e9)
    assert (shown.min, shown.max) == (min(times_ns) / 10**9, max(times_ns) / 10**9)
    assert (shown.p50, shown.p95, shown.p99) == tuple(histogram.quantile(q) for q in (0.5, 0.95, 0.99))


@given(st.lists(TIMES_NS), st.lists(TIMES_NS))
def test_two_histograms_merge_as_if_all_had_been_observed_in_one(ours: list[int], theirs: list[int]):
    merged, other = filled(ours), filled(theirs)
    merged.merge(other)
    assert merged.snapshot() == filled(ours + theirs).snapshot()
    assert other.snapshot() == filled(theirs).snapshot()


@given(st.lists(TIMES_NS), st.floats(1e-6, 1e6))
def test_as_many_times_lie_up_to_an_edge_as_the_resolution_allows(times_ns: list[int], seconds: float):
    (found,), total = filled(times_ns).cumulated([edge(seconds)])
    assert total == len(times_ns)
    assert sum(ns <= seconds * 1e9 * (1 - 1 / 16) for ns in times_ns) <= found
    assert found <= sum(ns <= seconds * 1e9 * (1 + 1 / 16) for ns in times_ns)


def test_an_empty_histogram_has_no_quantiles():
    assert Histogram().quantile(0.5) is None
    assert Histogram().snapshot() == Times(count=0, sum=0.0)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_0_to_1_is_refused(q: float):
    with pytest.raises(ValueError, match="between 0 and 1"):
        filled([1]).quantile(q)


def test_a_time_below_zero_counts_as_zero_and_one_beyond_the_limit_in_the_last_slot():
    histogram = filled([-5, 2**70])
    shown = histogram.snapshot()
    assert (shown.count, shown.min, shown.max) == (2, 0, 2**70 / 1e9)
    assert shown.p50 == 0
    assert shown.p99 is not None
    assert shown.p99 >= LIMIT_NS / 1e9 * (1 - RESOLUTION)
    assert shown.sum == 2**70 / 1e9


@pytest.mark.parametrize("bits", range(60))
def test_every_power_of_two_and_its_neighbours_land_near_themselves(bits: int):
    for ns in {max(0, 2**bits - 1), 2**bits, 2**bits + 1}:
        if ns < LIMIT_NS:
            # Beside a smaller and a larger one, so that the limits do not help.
            found = filled([0, ns, 2 * LIMIT_NS]).quantile(0.5)
            assert found == pytest.approx(ns / 1e9, rel=RESOLUTION)


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_lose_no_count():
    counter, histogram = Counter("published"), Histogram()
    start = threading.Barrier(4)
    rounds = 60_000

    def work(first: int) -> None:
        start.wait()
        for number in range(first, first + rounds):
            counter.add(2)
            histogram.observe_ns(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in (100, 200, 300, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        assert counter.value == 4 * 2 * rounds
        assert histogram.count == 4 * rounds
        assert histogram.sum_ns == sum(sum(range(first, first + rounds)) for first in (100, 200, 300, 400))
    assert (histogram.min_ns, histogram.max_ns) == (100, 400 + rounds - 1)


def test_the_snapshot_has_every_instrument_and_nothing_else():
    metrics = Metrics()
    for name in COUNTERS:
        getattr(metrics, name).add(len(name))
    for name in HISTOGRAMS:
        getattr(metrics, name).observe_ns(len(name))
    shown = metrics.snapshot()
    assert {name: getattr(shown, name) for name in COUNTERS} == {name: len(name) for name in COUNTERS}
    assert {name: getattr(shown, name).max for name in HISTOGRAMS} == {name: len(name) / 1e9 for name in HISTOGRAMS}
    instruments = {name for name, part in vars(metrics).items() if isinstance(part, Counter | Histogram)}
    assert instruments == COUNTERS | HISTOGRAMS
    assert all(getattr(metrics, name).name == name for name in instruments)


def test_a_snapshot_is_frozen_and_goes_through_json():
    metrics = Metrics()
    metrics.published.add()
    metrics.put_seconds.observe_ns(2_000)
    metrics.gauge("ready", lambda: 3)
    shown = metrics.snapshot()
    metrics.published.add()
    assert shown.published == 1
    assert msgspec.json.decode(msgspec.json.encode(shown), type=MetricsSnapshot) == shown
    with pytest.raises(AttributeError):
        shown.published = 5  # type: ignore[misc]


def test_a_gauge_is_read_when_a_snapshot_is_taken():
    ready: list[int] = []
    metrics = Metrics()
    metrics.gauge("ready", lambda: len(ready))
    assert metrics.snapshot().gauges == {"ready": 0}
    ready.append(1)
    assert metrics.snapshot().gauges == {"ready": 1}


def test_an_observer_is_told_of_every_change():
    recorder = Recorder()
    metrics = Metrics(recorder)
    metrics.published.add(3)
    metrics.wait_seconds.observe_ns(1_500_000_000)
    metrics.lateness_seconds.observe_ns(-1)
    assert recorder.recorded == [("published", 3), ("wait_seconds", 1.5), ("lateness_seconds", 0)]


def test_an_observer_can_be_changed_and_taken_away():
    first, second = Recorder(), Recorder()
    metrics = Metrics(first)
    metrics.set_observer(second)
    metrics.acked.add()
    metrics.set_observer(None)
    metrics.acked.add()
    assert first.recorded == []
    assert second.recorded == [("acked", 1)]
    assert metrics.acked.value == 2


CHANGES: list[Callable[[Metrics], None]] = [
    lambda metrics: metrics.published.add(),
    lambda metrics: metrics.put_seconds.observe_ns(5),
]


@pytest.mark.parametrize("change", CHANGES, ids=["count", "observe"])
def test_an_observer_that_raises_is_logged_once_and_dropped(
    change: Callable[[Metrics], None], caplog: pytest.LogCaptureFixture
):
    recorder = Recorder(ZeroDivisionError("no luck"))
    metrics = Metrics(recorder)
    with caplog.at_level(logging.DEBUG, "holdfast"):
        for _ in range(3):
            change(metrics)
            metrics.delivered.add()
    assert len(recorder.recorded) == 1
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "observer dropped after an error")
    assert (record.observer, record.error) == ("Recorder", "no luck")  # type: ignore[attr-defined]
    assert metrics.delivered.value == 3
    assert metrics.published.value + metrics.put_seconds.count == 3


def test_an_observer_that_fails_in_several_threads_at_once_is_logged_once(caplog: pytest.LogCaptureFixture):
    together = threading.Barrier(3)

    class Failing(Recorder):
        def count(self, name: str, n: int) -> None:
            together.wait(30)
            raise ValueError(name)

    metrics = Metrics(Failing())
    threads = [threading.Thread(target=metrics.published.add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1
    assert metrics.published.value == 3


def test_an_old_observer_that_fails_late_does_not_take_the_new_one_along():
    kept = Recorder()

    class Leaving(Recorder):
        def count(self, _name: str, _n: int) -> None:
            metrics.set_observer(kept)
            raise ValueError

    metrics = Metrics(Leaving())
    metrics.published.add()
    metrics.published.add(5)
    assert kept.recorded == [("published", 5)]


def test_an_interrupt_in_an_observer_is_not_held_back():
    metrics = Metrics(Recorder(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        metrics.published.add()
    assert metrics.published.value == 1
