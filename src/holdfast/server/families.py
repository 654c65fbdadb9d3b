"""Metrics as Prometheus knows them, made from ours when somebody asks; its package is not loaded before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from holdfast.broker.metrics import Histogram, edge

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

PREFIX: Final = "holdfast_"

# What a disk or a call takes, and what people or other programs do.
FAST: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
SLOW: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0,
)  # fmt: skip


class Buckets:
    """Where the buckets of a histogram end. The counts are exact at the slots' borders: within 1/32 of each bound."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._edges = [edge(seconds) for seconds in bounds_s]

    @cached_property
    def _names(self) -> list[str]:
        from prometheus_client.utils import floatToGoString

        return [*map(floatToGoString, self._bounds_s), "+Inf"]

    def add(self, family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
        """The times of a histogram, each bucket with all up to its bound; nothing before the first one."""
        if histogram.max_ns < 0:
            return
        counts, total = histogram.cumulated(self._edges)
        family.add_metric(labels, list(zip(self._names, [*counts, total], strict=True)), histogram.sum_ns / 1e9)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """A number that only grows; `_total` is added to its name."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """A number as it is now."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def times(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    """How long something took."""
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(PREFIX + name, text, labels=labels)
