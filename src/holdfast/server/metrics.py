"""`/metrics`: all that the engine and the server count, in the format that Prometheus reads."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Final

import holdfast
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.metrics import Histogram
from holdfast.errors import NotInstalled
from holdfast.server.engine_metrics import EngineMetrics
from holdfast.server.families import FAST, Buckets, counter, gauge, times
from holdfast.telemetry.export import TraceExport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


# What is counted and timed of HTTP: plain numbers while calls are served, families when somebody asks.
#
# They are changed by the loop that serves, with no lock; a look from another thread meanwhile may miss the last call.


# Any other word is a client's invention, and would be one more label each time.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"
UNKNOWN_ROUTE: Final = "unknown"

_BUCKETS: Final = Buckets(FAST)


class HttpMetrics:
    """The numbers of one server's calls and connections."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._opened = self._closed = 0
        self._streams: Counter[str] = Counter()

    def request_done(
        self, route: str | None, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int
    ) -> None:
        """A call was answered; `route` is its pattern, never its path, and None where no route fits."""
        route = route or UNKNOWN_ROUTE
        if method not in _METHODS:
            method = OTHER
        self._requests[route, method, str(status)] += 1
        self._seconds[route, method].observe_ns(int(seconds * 1e9))
        self._received[route] += bytes_in
        self._sent[route] += bytes_out

    def connection_opened(self) -> None:
        self._opened += 1

    def connection_closed(self) -> None:
        self._closed += 1

    def connection_refused(self, reason: str) -> None:
        """A connection was not let in, or cut off; `reason` is one of a few fixed words."""
        self._refused[reason] += 1

    async def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """An answer that lasts, or is large, as it goes out; its bytes are counted as they do."""
        self._streams[route] += 1
        try:
            async for chunk in chunks:
                self._sent[route] += len(chunk)
                yield chunk
        finally:
            self._streams[route] -= 1
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    def collect(self) -> Iterator[Metric]:
        """All of them, as Prometheus knows them."""
        requests = counter("http_requests", "Calls answered.", "route", "method", "status")
        for labels, count in list(self._requests.items()):
            requests.add_metric(labels, count)
        seconds = times(
            "http_request_seconds", "From a call to its answer; of a stream: to its beginning.", "route", "method"
        )
        for of, histogram in list(self._seconds.items()):
            _BUCKETS.add(seconds, of, histogram)
        received = counter("http_received_bytes", "Bytes of the bodies of calls.", "route")
        sent = counter("http_sent_bytes", "Bytes of the bodies of answers.", "route")
        for route, size in list(self._received.items()):
            received.add_metric([route], size)
        for route, size in list(self._sent.items()):
            sent.add_metric([route], size)
        opened = counter("http_connections", "Connections accepted.")
        opened.add_metric([], self._opened)
        still = gauge("http_open_connections", "Connections that are open now.")
        still.add_metric([], self._opened - self._closed)
        refused = counter("http_refused_connections", "Connections refused or cut off.", "reason")
        for reason, count in list(self._refused.items()):
            refused.add_metric([reason], count)
        streams = gauge("http_streams", "Answers that are going out in pieces now.", "route")
        for route, count in list(self._streams.items()):
            streams.add_metric([route], count)
        yield from (requests, seconds, received, sent, opened, still, refused, streams)


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
