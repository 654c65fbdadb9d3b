"""`/metrics`: all that the engine and the server count, in the format that Prometheus reads."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Final

import holdfast
from holdfast.broker.broker import BrokerEngine
from holdfast.embedded.trace_export import TraceExport
from holdfast.errors import NotInstalled
from holdfast.server.engine_metrics import EngineMetrics
from holdfast.server.families import counter, gauge
from holdfast.server.http_metrics import HttpMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

MOST_GROUPS: Final = 200


class ServerMetrics(HttpMetrics):
    """The metrics of one server. It has a registry of its own: two servers in one process do not mix."""

    def __init__(self, engine: BrokerEngine, *, most_groups: int = MOST_GROUPS) -> None:
        super().__init__()
        self.trace_export: TraceExport | None = None
        self._engine = EngineMetrics(engine, most_groups)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    @cached_property
    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

        made = CollectorRegistry()
        made.register(self)
        ProcessCollector(registry=made)
        GCCollector(registry=made)
        return made

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """One more value, read when somebody asks; its name gets the prefix of all."""
        self._gauges[name] = text, read

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, in the format that the header `Accept` asks for.

        It reads files: call it from a thread of its own, not from the loop that serves.
        """
        try:
            from prometheus_client.exposition import choose_encoder
        except ImportError:
            raise NotInstalled("metrics need prometheus-client; run: pip install 'holdfast[server]'") from None
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        """Names are known when there are values; said so, nobody collects them when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them but those of the process, as Prometheus knows them."""
        build = gauge("build_info", "Always 1; the labels say what runs.", "version", "python")
        build.add_metric([holdfast.__version__, platform.python_version()], 1)
        yield build
        yield from self._engine.collect()
        yield from super().collect()
        yield from self._spans()
        for name, (text, read) in list(self._gauges.items()):
            family = gauge(name, text)
            family.add_metric([], read())
            yield family

    def _spans(self) -> Iterator[Metric]:
        spans = counter("trace_spans", "Spans given to OpenTelemetry, by what became of them.", "outcome")
        dropped = counter("trace_steps_dropped", "Steps of traces that were not exported, for too many waited.")
        if self.trace_export is not None:
            counts = self.trace_export.counts()
            for outcome in ("exported", "failed"):
                spans.add_metric([outcome], counts[outcome])
            dropped.add_metric([], counts["dropped"])
        yield from (spans, dropped)
