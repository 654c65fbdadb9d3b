"""What the server reports about itself: metrics for Prometheus, and its log lines."""

from __future__ import annotations

import collections
import logging
import platform
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, TypeVar

import msgspec

import holdfast
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Counter, Histogram, Metrics, edge
from holdfast.broker.sampler import Ages
from holdfast.broker.streams.queries import query_gauges
from holdfast.broker.topic import Topic
from holdfast.errors import BadSettings, HoldfastError, NotInstalled
from holdfast.otel import ENDPOINT, TRACES_ENDPOINT, TraceExport, export
from holdfast.server.http.messages import Meter, close_chunks
from holdfast.storage.log import Log
from holdfast.storage.retention import tiered_bytes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric


# The engine's metrics are read from its counters on each scrape; nothing is kept here.
#
# Only open topics are read; a scrape opens none. Counters of a topic start when it is opened, so they go back to 0 when
# it is closed and opened again, as after a restart. At most `most_groups` (topic, group) pairs are shown, in the order
# in which their topics were opened, so that a pair once shown stays shown.
#
# prometheus_client is imported on the first scrape.

PREFIX: Final = "holdfast_"

# Bucket bounds: FAST for disks and calls, SLOW for what depends on people or other programs.
FAST: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
SLOW: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0,
)  # fmt: skip


class Buckets:
    """The bounds of a histogram's buckets. Counts are exact at the nearest slot border, within 1/32 of each bound."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._edges = [edge(seconds) for seconds in bounds_s]

    @cached_property
    def _names(self) -> list[str]:
        from prometheus_client.utils import floatToGoString

        return [*map(floatToGoString, self._bounds_s), "+Inf"]

    def add(self, family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
        """Add a histogram to the family as cumulative buckets. An empty histogram adds nothing."""
        if histogram.max_ns < 0:
            return
        counts, total = histogram.cumulated(self._edges)
        family.add_metric(labels, list(zip(self._names, [*counts, total], strict=True)), histogram.sum_ns / 1e9)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """A family of counters; Prometheus adds `_total` to the name."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """A family of gauges."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def times(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    """A family of histograms of seconds."""
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(PREFIX + name, text, labels=labels)


logger = logging.getLogger(__name__)
_Family = TypeVar("_Family", "CounterMetricFamily", "GaugeMetricFamily")

OF_TOPIC: Final = {
    "published": "Messages stored.",
    "published_bytes": "Bytes of their bodies.",
    "duplicates": "Messages not stored again because their dedup id was known.",
    "released": "Delayed messages that came due.",
}
OF_GROUP: Final = {
    "delivered": "Messages handed out.",
    "acked": "Messages acked.",
    "nacked": "Messages nacked.",
    "deferred": "Messages deferred.",
    "rejected": "Messages rejected.",
    "expired_leases": "Leases that expired.",
    "returned": "Messages returned to be delivered again.",
    "buried": "Messages that became dead letters.",
    "redriven": "Dead letters that were redriven.",
    "expired": "Messages skipped because their time to live had passed.",
    "cancelled": "Messages cancelled.",
    "lost_leases": "Calls refused because the lease was lost.",
    "damaged": "Messages skipped because they are damaged on disk.",
}
_FAST, _SLOW = Buckets(FAST), Buckets(SLOW)
TIMES_OF_TOPIC: Final = {
    "put_seconds": ("From a put to its return; of puts that do not wait for the disk, one in 64 is timed.", _FAST),
    "lateness_seconds": ("From a delayed message's due time to its release.", _SLOW),
    "sync_seconds": ("Syncs of the disk, of the topic's logs and its groups' journals.", _FAST),
}
TIMES_OF_GROUP: Final = {
    "wait_seconds": ("From publication, or the due time, to delivery.", _SLOW),
    "handle_seconds": ("From delivery to the ack.", _SLOW),
}


# What is counted where it happens has a family by its own name above. Here is what is read on each scrape: name, help
# text, labels.
GAUGES: Final = {
    "partitions": ("Partitions of the topic.", "topic"),
    "log_bytes": ("Bytes of the files of the topic's logs.", "topic"),
    "log_segments": ("Files of the topic's logs.", "topic"),
    "log_tiered_bytes": ("Bytes of them that only the store has.", "topic"),
    "log_damaged_messages": ("Messages in them that are known to be damaged.", "topic"),
    "dead_messages": ("Dead letters of the topic.", "topic"),
    "queries": ("Queries of other processes that read the topic.", "topic"),
    "query_lag_messages": ("Messages that the last of them has not read.", "topic"),
    "query_lag_seconds": ("Age of the oldest message that one has not read.", "topic"),
    "ready_messages": ("Messages that can be taken now.", "topic", "group"),
    "leased_messages": ("Messages that are leased.", "topic", "group"),
    "delayed_messages": ("Messages that are not due yet.", "topic", "group"),
    "waiters": ("Consumers that wait for a message.", "topic", "group"),
    "group_paused": ("1 while the group is paused, otherwise 0.", "topic", "group"),
    "lag_messages": ("Messages that the group has not handled.", "topic", "group", "mode"),
    "lag_seconds": ("Age of the oldest message that the group has not handled.", "topic", "group", "mode"),
    "group_members": ("Members of a group in stream mode.", "group"),
    "workers": ("Workers that are reporting, or did within the last hour.", "state"),
    "topics": ("Topics in the folder, open or not.",),
    "open_topics": ("Topics that are open.",),
    "open_partitions": ("Partitions that are open.",),
    "metrics_left_out_groups": ("Open groups that are left out here, to limit the size.",),
    "metrics_failed_topics": ("Open topics whose numbers could not be read just now.",),
    "disk_free_bytes": ("Bytes free on the disk of the data folder.",),
    "store_epoch": ("Number of owners that the folder in the store has had.",),
    "store_silent_seconds": ("Time since the last object that the store has was sent.",),
    "store_unsent_bytes": ("Bytes that the store does not have yet.",),
    "store_standbys": ("Processes that wait to take the folder over.",),
    "store_standby_lag_seconds": ("Age of the oldest object that a standby may lack.", "process"),
}


class _Families:
    """The families of the engine's metrics, filled during one scrape."""

    def __init__(self) -> None:
        self.topic_counters = {name: counter(name, text, "topic") for name, text in OF_TOPIC.items()}
        self.topic_times = {name: times(name, text, "topic") for name, (text, _) in TIMES_OF_TOPIC.items()}
        self.group_counters = {name: counter(name, text, "topic", "group") for name, text in OF_GROUP.items()}
        self.group_times = {name: times(name, text, "topic", "group") for name, (text, _) in TIMES_OF_GROUP.items()}
        self.gauges = {name: gauge(name, text, *labels) for name, (text, *labels) in GAUGES.items()}

    def set(self, labels: list[str], **values: float) -> None:
        """Set the gauges of these names, all with the same labels."""
        for name, value in values.items():
            self.gauges[name].add_metric(labels, value)

    def __iter__(self) -> Iterator[Metric]:
        for families in vars(self).values():
            yield from families.values()


class EngineMetrics:
    """Reads all open topics of an engine."""

    def __init__(self, engine: BrokerEngine, most_groups: int) -> None:
        self._engine = engine
        self._most_groups = most_groups
        self._ages = Ages(engine.world.clock)
        self._logged_error = ""

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine."""
        families, engine = _Families(), self._engine
        topics = engine.open_topics()
        (shown, left_out), failed = self._shown(topics), 0
        for topic in shown.values():
            try:
                self._topic(families, topic)
            except (HoldfastError, OSError) as error:
                failed += not topic.closed
                self._tell(topic, error)
        self._streams(families, shown)
        self._ages.end_round()
        families.set(
            [],
            topics=len(engine.topics()),
            open_topics=len(topics),
            open_partitions=sum(len(topic.partitions) for topic in topics),
            metrics_left_out_groups=left_out,
            metrics_failed_topics=failed,
        )
        for state, count in engine.workers.states().items():
            families.set([state], workers=count)
        with suppress(OSError):
            families.set([], disk_free_bytes=engine.world.disk.free_bytes(engine.folder))
        if (chain := engine.store) is not None:
            families.set([], store_epoch=chain.epoch, store_silent_seconds=chain.silent_s)
            families.set([], store_unsent_bytes=chain.unsent_bytes, store_standbys=len(chain.standbys()))
            for process, lag_s in {each.process: each.lag_seconds for each in chain.standbys()}.items():
                families.set([process], store_standby_lag_seconds=lag_s)
        yield from families
        tier, schedules, transactions = engine.world.tier, engine.schedules(), engine.transactions()
        for name, text, value in (
            ("tier_moved_bytes", "Bytes of segments moved to the store.", engine.tiering.moved_bytes),
            ("tier_fetched_bytes", "Bytes of segments fetched from it.", 0 if tier is None else tier.fetched_bytes),
            ("trace_steps_lost", "Trace steps that could not be written.", engine.traces.log.lost),
            ("transactions_committed", "Transactions that were committed.", transactions.committed.value),
            ("transactions_refused", "Transactions that were refused as a whole.", transactions.refused.value),
            ("schedules_fired", "Firings of schedules.", schedules.fired.value),
            ("schedules_missed", "Dues of schedules that were missed.", schedules.missed.value),
            ("schedules_failed", "Firings of schedules that failed and are tried again.", schedules.failed.value),
        ):
            yield _filled(counter(name, text), value)
        lateness = times("schedules_lateness_seconds", "From when a schedule was to fire until it did.")
        _SLOW.add(lateness, [], schedules.lateness_seconds)
        yield lateness

    def _shown(self, topics: list[Topic]) -> tuple[dict[str, Topic], int]:
        """The topics that are shown, and the number of groups left out; a topic without groups counts as one."""
        shown: dict[str, Topic] = {}
        groups = left_out = 0
        for topic in topics:
            size = max(len(topic.groups), 1)
            if groups + size > self._most_groups:
                left_out += size
            else:
                shown[topic.name] = topic
                groups += size
        return shown, left_out

    def _topic(self, families: _Families, topic: Topic) -> None:
        labels = [topic.name]
        segments = [segment for partition in topic.partitions for segment in partition.log.segments()]
        self._instruments(families.topic_counters, families.topic_times, topic.metrics, labels)
        queries = query_gauges(self._engine.queries, topic)
        families.set(
            labels,
            partitions=len(topic.partitions),
            log_bytes=sum(segment.bytes for segment in segments),
            log_segments=len(segments),
            log_tiered_bytes=tiered_bytes(segments),
            log_damaged_messages=sum(len(each.log.damaged()) for each in topic.partitions),
            dead_messages=topic.dead_count(),
            queries=queries["queries"],
            query_lag_messages=queries["query_lag"],
            query_lag_seconds=queries["query_lag_seconds"],
        )
        for group in list(topic.groups.values()):
            self._group(families, topic, group)

    def _group(self, families: _Families, topic: Topic, group: QueueGroup) -> None:
        labels = [topic.name, group.name]
        self._instruments(families.group_counters, families.group_times, group.metrics, labels)
        ready = leased = delayed = lag = 0
        age_s = 0.0
        for delivery in list(group.deliveries):
            log, state, store = delivery.partition.log, delivery.group, delivery.partition.delayed
            with delivery.lock:
                floor, ready_here = state.floor, delivery.ready_count()
                ready += ready_here
                leased += len(state.leases)
                delayed += len(state.waiting) + (0 if store is None else len(store))
                lag += ready_here + len(state.leases) + len(state.waiting) + len(state.burials)
            age_s = max(age_s, self._age_s(topic, delivery.number, log, floor))
        families.set(labels, ready_messages=ready, leased_messages=leased, delayed_messages=delayed)
        families.set(labels, waiters=len(group.waiters), group_paused=group.paused is not None)
        families.set([*labels, "queue"], lag_messages=lag, lag_seconds=age_s)

    @staticmethod
    def _instruments(
        counters: Mapping[str, CounterMetricFamily],
        histograms: Mapping[str, HistogramMetricFamily],
        metrics: Metrics,
        labels: list[str],
    ) -> None:
        for name, family in counters.items():
            instrument: Counter = getattr(metrics, name)
            family.add_metric(labels, instrument.value)
        for name, timed in histograms.items():
            _, buckets = TIMES_OF_TOPIC.get(name) or TIMES_OF_GROUP[name]
            buckets.add(timed, labels, getattr(metrics, name))

    def _streams(self, families: _Families, shown: Mapping[str, Topic]) -> None:
        """Add the stream groups: their members, and their lag on the topics that are shown."""
        for group in self._engine.streams.all():
            families.set([group.name], group_members=len(group.members.members))
            lags: dict[str, tuple[int, float]] = {}
            for entry in group.offsets.entries():
                topic = shown.get(entry.topic)
                if topic is None or topic.id != entry.topic_id or entry.partition >= len(topic.partitions):
                    continue
                log = topic.partitions[entry.partition].log
                at = max(log.start, min(entry.offset, log.end))
                messages, age_s = lags.get(topic.name, (0, 0.0))
                try:
                    age_s = max(age_s, self._age_s(topic, entry.partition, log, at))
                except (HoldfastError, OSError) as error:
                    self._tell(topic, error)
                    continue
                lags[topic.name] = messages + log.end - at, age_s
            for name, (messages, age_s) in lags.items():
                families.set([name, group.name, "stream"], lag_messages=messages, lag_seconds=age_s)

    def _age_s(self, topic: Topic, number: int, log: Log, offset: int) -> float:
        return self._ages.age_s(log, (topic.name, number), topic.id, offset)

    def _tell(self, topic: Topic, error: Exception) -> None:
        if not topic.closed and str(error) != self._logged_error:  # once, not on every scrape
            self._logged_error = str(error)
            logger.warning("metrics of a topic cannot be read", extra={"topic": topic.name, "error": str(error)})


# HTTP metrics are plain numbers that the event loop updates without a lock. A scrape on another thread may miss the
# latest call.

# A client may invent other methods, and each would become a new label.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"
UNKNOWN_ROUTE: Final = "unknown"

_BUCKETS: Final = Buckets(FAST)


class _Answered:
    """The calls of one route, method and status."""

    __slots__ = ("count", "received", "seconds", "sent")

    def __init__(self) -> None:
        self.count = self.received = self.sent = 0
        self.seconds = Histogram()


class HttpMetrics(Meter):
    """The numbers of one server's calls and connections."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, str, int], _Answered] = {}
        self._streamed: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._opened = self._closed = 0
        self._streams: collections.Counter[str] = collections.Counter()

    def request_done(
        self, route: str | None, method: str, status: int, took_ns: int, bytes_in: int, bytes_out: int
    ) -> None:
        """Count an answered call. `route` is its pattern, never its path; None if no route matched."""
        answered = self._answered.get((route or UNKNOWN_ROUTE, method, status))  # as it is said, for nearly all calls
        if answered is None:
            labels = route or UNKNOWN_ROUTE, method if method in _METHODS else OTHER, status
            answered = self._answered.get(labels)
            if answered is None:
                answered = self._answered[labels] = _Answered()
        answered.count += 1
        answered.received += bytes_in
        answered.sent += bytes_out
        answered.seconds.observe_ns(took_ns)

    def connection_opened(self) -> None:
        self._opened += 1

    def connection_closed(self) -> None:
        self._closed += 1

    def connection_refused(self, reason: str) -> None:
        """Count a connection that was refused or cut off; `reason` is one of a few fixed words."""
        self._refused[reason] += 1

    async def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of a streamed answer, and count their bytes as they go out."""
        self._streams[route] += 1
        try:
            async for chunk in chunks:
                self._streamed[route] += len(chunk)
                yield chunk
        finally:
            self._streams[route] -= 1
            await close_chunks(chunks)

    def collect(self) -> Iterator[Metric]:
        """The metrics of calls and connections."""
        requests = counter("http_requests", "Calls answered.", "route", "method", "status")
        seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        received: collections.Counter[str] = collections.Counter()
        sent = collections.Counter(self._streamed)
        for (route, method, status), answered in list(self._answered.items()):
            requests.add_metric([route, method, str(status)], answered.count)
            seconds[route, method].merge(answered.seconds)
            received[route] += answered.received
            sent[route] += answered.sent
        taken = times(
            "http_request_seconds", "From a call to its response; for a stream, to its first byte.", "route", "method"
        )
        for of, histogram in seconds.items():
            _BUCKETS.add(taken, of, histogram)
        yield from (requests, taken)
        yield _by_label(counter("http_received_bytes", "Bytes of the bodies of calls.", "route"), received)
        yield _by_label(counter("http_sent_bytes", "Bytes of the bodies of responses.", "route"), sent)
        yield _filled(counter("http_connections", "Connections accepted."), self._opened)
        yield _filled(gauge("http_open_connections", "Connections that are open now."), self._opened - self._closed)
        yield _by_label(counter("http_refused_connections", "Connections refused or cut off.", "reason"), self._refused)
        yield _by_label(gauge("http_streams", "Responses that are being streamed now.", "route"), self._streams)


def _filled(family: _Family, value: float) -> _Family:
    family.add_metric([], value)
    return family


def _by_label(family: _Family, values: Mapping[str, int]) -> _Family:
    for label, value in list(values.items()):
        family.add_metric([label], value)
    return family


MOST_GROUPS: Final = 200


class ServerMetrics(HttpMetrics):
    """The metrics of one server, in its own registry, so that two servers in one process do not mix."""

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
        """Add a gauge that `read` returns on each scrape; its name gets the common prefix."""
        self._gauges[name] = text, read

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, in the format that the `Accept` header asks for.

        This reads files, so call it on a thread, not on the event loop.
        """
        try:
            from prometheus_client.exposition import choose_encoder
        except ImportError:
            raise NotInstalled("metrics need prometheus-client; run: pip install 'holdfast[server]'") from None
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        """No names in advance. Without this method the registry would collect all values on registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics except those of the process."""
        build = gauge("build_info", "Always 1; the labels say what runs.", "version", "python")
        build.add_metric([holdfast.__version__, platform.python_version()], 1)
        yield build
        yield from self._engine.collect()
        yield from super().collect()
        yield from self._spans()
        for name, (text, read) in list(self._gauges.items()):
            yield _filled(gauge(name, text), read())

    def _spans(self) -> Iterator[Metric]:
        spans = counter("trace_spans", "Spans given to OpenTelemetry, by outcome.", "outcome")
        dropped = counter("trace_steps_dropped", "Trace steps that were not exported because too many were waiting.")
        if self.trace_export is not None:
            counts = self.trace_export.counts()
            for outcome in ("exported", "failed"):
                spans.add_metric([outcome], counts[outcome])
            dropped.add_metric([], counts["dropped"])
        yield from (spans, dropped)


# Log lines must not contain tokens, passwords or other credentials.

HIDDEN: Final = "[hidden]"

_NAMES: Final = frozenset(
    {"authorization", "cookie", "credential", "credentials", "passwd", "password", "secret", "token"}
)
_PARTS: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

# In free text: what follows `Bearer` or `Basic`, the value after such a name, and the user info of a URL.
_IN_TEXT: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"(?i)\b(bearer\s+)[^\s,;\"']{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(basic\s+)[a-z0-9+/_-]{12,}=*"), rf"\1{HIDDEN}"),
    (re.compile(r"(\w://)[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"(?i)\b((?:[a-z0-9]+[_-])*(?:api[_-]?key|authorization|cookie|passwd|password|secret|token)[\"']?\s*[:=]\s*)"
            r"(?:(?:bearer|basic)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)"
        ),
        rf"\1{HIDDEN}",
    ),
)
# A text without any of these matches none of the patterns, so most texts are searched only once.
_MAYBE: Final = re.compile(r"(?i)bearer|basic|://|api[_-]?key|authorization|cookie|passw|secret|token")


def is_secret(name: str) -> bool:
    """Whether a field of this name holds a secret: `Authorization`, `auth_token`; not `token_name`, `tokens_file`."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    return bool(parts) and (parts[-1] in _NAMES or parts[-1] == "apikey" or parts[-2:] == ["api", "key"])


def hidden(text: str) -> str:
    """The text with its secrets replaced."""
    if _MAYBE.search(text):
        for pattern, instead in _IN_TEXT:
            text = pattern.sub(instead, text)
    return text


# A log line is one line of text or one JSON object, with everything passed as `extra=`. Secrets are removed, and
# line breaks escaped, so that nothing a caller sends can forge a line.

_DEPTH: Final = 6
_MOST_INT: Final = 2**63

# The attributes of every record; any other attribute came from `extra=`.
_OWN: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_FIRST: Final = frozenset({"time", "level", "logger", "message", "exception"})

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
# JSON allows these characters unescaped, but some readers take them for a line break or a terminal command.
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., every extra, "exception": {...}}`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line. An extra with the name of a standard field gets a trailing underscore."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _extras(record):
            line[f"{name}_" if name in _FIRST else name] = value
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = {
                "type": record.exc_info[0].__qualname__,
                "message": _clean(_text(record.exc_info[1])),
                "traceback": _clean(self.formatException(record.exc_info)),
            }
        if record.stack_info:
            line["stack"] = _clean(self.formatStack(record.stack_info))
        return msgspec.json.encode(line).decode().translate(_JSON_ESCAPES)


class TextFormatter(logging.Formatter):
    """`2026-11-16 10:00:00.000 WARNING holdfast.broker.topic: upkeep failed topic=orders error="no space left"`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the traceback if there is one."""
        at = _time(record).replace("T", " ").removesuffix("000Z")
        parts = [f"{at} {record.levelname} {record.name}: {_message(record).translate(_ESCAPES)}"]
        parts += [f"{name}={_quoted(value)}" for name, value in _extras(record)]
        line = " ".join(parts)
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + _indented(_clean(self.formatException(record.exc_info)))
        if record.stack_info:
            line += "\n" + _indented(_clean(self.formatStack(record.stack_info)))
        return line


FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {"text": TextFormatter, "json": JsonFormatter}


def start_logging(form: Literal["text", "json"], stream: TextIO, level: int = logging.INFO) -> logging.Handler:
    """Send all log records to the stream in this form. Replaces the handlers of the root logger."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    root = logging.getLogger()
    for before in list(root.handlers):
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(level)
    return handler


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return _clean(record.getMessage())
    except Exception:  # format and arguments do not match: a poor line is better than none
        return _clean(f"{record.msg} {record.args!r}")


def _extras(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for name, value in vars(record).items():
        if name not in _OWN and not name.startswith("_"):
            yield name, HIDDEN if is_secret(name) else _plain(value)


def _plain(value: object, depth: int = _DEPTH) -> Any:
    """Any value, as one that JSON can encode."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value) if -_MOST_INT <= value < _MOST_INT else str(value)
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            _clean(_text(key)): HIDDEN if is_secret(_text(key)) else _plain(inner, depth - 1)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return [_plain(inner, depth - 1) for inner in value]
    return _clean(_text(value))


def _text(value: object) -> str:
    try:
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    except Exception:  # a broken __str__ must not lose the line
        return f"<{type(value).__name__} that cannot be shown>"


def _clean(text: str) -> str:
    """The text without secrets, and without characters that UTF-8 cannot encode."""
    return hidden(text).encode("utf-8", "backslashreplace").decode()


def _quoted(value: object) -> str:
    """The value unquoted where that is unambiguous, otherwise as JSON."""
    if isinstance(value, str) and value and not any(char.isspace() or char in '"=\\' for char in value):
        return value.translate(_ESCAPES)
    return msgspec.json.encode(value).decode().translate(_ESCAPES)


def _indented(text: str) -> str:
    """The text indented, so that none of its lines looks like a log line."""
    return "\n".join("  " + line.translate(_ESCAPES) for line in text.split("\n"))


_DISABLED: Final = "OTEL_SDK_DISABLED"


def start_export(engine: BrokerEngine, endpoint: str | None, environment: Mapping[str, str]) -> TraceExport | None:
    """Export traces to the endpoint in the settings or in OpenTelemetry's environment variables; None without one.

    A setting that cannot be used is an error. For a variable there is only a warning: it may be meant for another
    program on the machine.
    """
    if endpoint is not None:
        return export(engine, endpoint=endpoint)
    asked = environment.get(ENDPOINT) or environment.get(TRACES_ENDPOINT)
    if not asked or environment.get(_DISABLED, "").strip().lower() == "true":
        return None
    try:
        return export(engine)
    except BadSettings as error:
        logger.warning("traces are not exported", extra={"error": str(error)})
        return None
