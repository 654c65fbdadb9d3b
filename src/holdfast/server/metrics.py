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
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

import msgspec

import holdfast
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Counter, Histogram, Metrics, Times, edge
from holdfast.broker.streams.offsets import lag_of
from holdfast.broker.streams.queries import query_gauges
from holdfast.broker.topic import Topic
from holdfast.errors import HoldfastError, NotInstalled
from holdfast.server.http.connection import Meter
from holdfast.server.http.messages import close_chunks
from holdfast.storage.log import Log
from holdfast.telemetry.export import TraceExport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric


# What the engine counts, read when Prometheus asks: nothing is kept here.
#
# Only topics that are open are looked at; none is opened for it. Numbers of a topic count since its opening, so they
# begin at 0 again where it was let go meanwhile, as those of a process that starts again do. Of the (topic, group)
# pairs that are open the first `most_groups` are shown, in the order in which the topics were opened: what is shown
# stays so.


# Metrics as Prometheus knows them, made from ours when somebody asks; its package is not loaded before.


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


logger = logging.getLogger(__name__)

OF_TOPIC: Final = {
    "published": "Messages stored.",
    "published_bytes": "Bytes of their bodies.",
    "duplicates": "Messages that were known by their dedup id, and not stored again.",
    "released": "Delayed messages that came due.",
}
OF_GROUP: Final = {
    "delivered": "Messages handed out.",
    "acked": "Messages handled.",
    "nacked": "Messages given back as failed.",
    "deferred": "Messages given back unharmed.",
    "rejected": "Messages refused for good.",
    "expired_leases": "Leases that ended by time.",
    "returned": "Messages that came back to be delivered again.",
    "buried": "Messages that became dead letters.",
    "redriven": "Dead letters put back.",
    "expired": "Messages passed over because their time to live was over.",
    "cancelled": "Messages taken back.",
    "lost_leases": "Calls refused because the lease was lost.",
    "damaged": "Messages passed over because they are damaged on disk.",
}
_FAST, _SLOW = Buckets(FAST), Buckets(SLOW)
TIMES_OF_TOPIC: Final = {
    "put_seconds": ("From a put's call to its answer; puts that wait for no disk are timed one in 64.", _FAST),
    "lateness_seconds": ("From a delayed message's due time to its release.", _SLOW),
    "sync_seconds": ("Syncs of the disk, of the topic's logs and its groups' journals.", _FAST),
}
TIMES_OF_GROUP: Final = {
    "wait_seconds": ("From published, or come due, to delivered.", _SLOW),
    "handle_seconds": ("From delivered to acked.", _SLOW),
}


def sync_times(engine: BrokerEngine) -> Times:
    """How long syncs of the disk took, of all topics that are open, since each was opened."""
    total = Histogram()
    for topic in engine.open_topics():
        total.merge(topic.metrics.sync_seconds)
    return total.snapshot()


class _Families:
    """All metrics of the engine, to be filled."""

    def __init__(self) -> None:
        self.topic_counters = {name: counter(name, text, "topic") for name, text in OF_TOPIC.items()}
        self.topic_times = {name: times(name, text, "topic") for name, (text, _) in TIMES_OF_TOPIC.items()}
        self.group_counters = {name: counter(name, text, "topic", "group") for name, text in OF_GROUP.items()}
        self.group_times = {name: times(name, text, "topic", "group") for name, (text, _) in TIMES_OF_GROUP.items()}
        self.partitions = gauge("partitions", "Partitions of the topic.", "topic")
        self.log_bytes = gauge("log_bytes", "Bytes of the files of the topic's logs.", "topic")
        self.log_segments = gauge("log_segments", "Files of the topic's logs.", "topic")
        self.log_damaged = gauge("log_damaged_messages", "Messages in them that are known to be damaged.", "topic")
        self.dead = gauge("dead_messages", "Dead letters of the topic.", "topic")
        self.queries = gauge("queries", "Queries of other processes that read the topic.", "topic")
        self.query_lag = gauge("query_lag_messages", "Messages that the last of them has not read.", "topic")
        self.query_age = gauge("query_lag_seconds", "Age of the oldest message that one has not read.", "topic")
        self.ready = gauge("ready_messages", "Messages that can be taken now.", "topic", "group")
        self.leased = gauge("leased_messages", "Messages in somebody's hands.", "topic", "group")
        self.delayed = gauge("delayed_messages", "Messages that are not due yet.", "topic", "group")
        self.waiters = gauge("waiters", "Consumers that wait for a message.", "topic", "group")
        self.lag = gauge("lag_messages", "Messages that the group has not handled.", "topic", "group", "mode")
        self.age = gauge("lag_seconds", "Age of the oldest message not handled.", "topic", "group", "mode")
        self.members = gauge("group_members", "Members of a group in stream mode.", "group")
        self.topics = gauge("topics", "Topics in the folder, open or not.")
        self.open_topics = gauge("open_topics", "Topics that are open.")
        self.open_partitions = gauge("open_partitions", "Partitions that are open.")
        self.left_out = gauge("metrics_left_out_groups", "Open groups that are not shown here, to keep this short.")
        self.failed = gauge("metrics_failed_topics", "Open topics whose numbers could not be read just now.")
        self.free = gauge("disk_free_bytes", "Bytes free on the disk of the data folder.")
        self.steps_lost = counter("trace_steps_lost", "Steps of traces that could not be written down.")

    def __iter__(self) -> Iterator[Metric]:
        for part in vars(self).values():
            yield from part.values() if isinstance(part, dict) else [part]


class EngineMetrics:
    """Reads all open topics of an engine."""

    def __init__(self, engine: BrokerEngine, most_groups: int) -> None:
        self._engine = engine
        self._most_groups = most_groups
        # When the message at a place was published never changes: read once, for as long as it is the first.
        self._published_ns: dict[tuple[str, int, int, int], int] = {}
        self._seen: dict[tuple[str, int, int, int], int] = {}
        self._told = ""

    def collect(self) -> Iterator[Metric]:
        """All of them, as Prometheus knows them."""
        families, engine = _Families(), self._engine
        self._seen = {}
        topics = engine.open_topics()
        (shown, left_out), failed = self._shown(topics), 0
        for topic in shown.values():
            try:
                self._topic(families, topic)
            except (HoldfastError, OSError) as error:
                failed += not topic.closed
                self._tell(topic, error)
        self._streams(families, shown)
        self._published_ns = self._seen
        families.topics.add_metric([], len(engine.topics()))
        families.open_topics.add_metric([], len(topics))
        families.open_partitions.add_metric([], sum(len(topic.partitions) for topic in topics))
        families.left_out.add_metric([], left_out)
        families.failed.add_metric([], failed)
        with suppress(OSError):
            families.free.add_metric([], engine.world.disk.free_bytes(engine.folder))
        families.steps_lost.add_metric([], engine.traces.log.lost)
        return iter(families)

    def _shown(self, topics: list[Topic]) -> tuple[dict[str, Topic], int]:
        """The topics whose numbers are shown; how many groups of the others are not, a topic without one as well."""
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
        families.partitions.add_metric(labels, len(topic.partitions))
        families.log_bytes.add_metric(labels, sum(segment.bytes for segment in segments))
        families.log_segments.add_metric(labels, len(segments))
        families.log_damaged.add_metric(labels, sum(len(each.log.damaged()) for each in topic.partitions))
        families.dead.add_metric(labels, topic.dead_count())
        queries = query_gauges(self._engine.queries, topic)
        families.queries.add_metric(labels, queries["queries"])
        families.query_lag.add_metric(labels, queries["query_lag"])
        families.query_age.add_metric(labels, queries["query_lag_seconds"])
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
        families.ready.add_metric(labels, ready)
        families.leased.add_metric(labels, leased)
        families.delayed.add_metric(labels, delayed)
        families.waiters.add_metric(labels, len(group.waiters))
        families.lag.add_metric([*labels, "queue"], lag)
        families.age.add_metric([*labels, "queue"], age_s)

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
        """How far the groups in stream mode are in the topics that are shown; whoever reads a topic has it open."""
        for group in self._engine.streams.all():
            families.members.add_metric([group.name], len(group.members.members))
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
                families.lag.add_metric([name, group.name, "stream"], messages)
                families.age.add_metric([name, group.name, "stream"], age_s)

    def _age_s(self, topic: Topic, number: int, log: Log, offset: int) -> float:
        """How long ago the first message from the offset on was published; 0 where there is none."""
        if offset >= log.end:
            return 0.0
        key, now_ns = (topic.name, topic.id, number, offset), self._engine.world.clock.now_ns()
        known = self._published_ns.get(key)
        if known is None:
            known = now_ns - round(lag_of(log, (topic.name, number), offset, now_ns).seconds * 1e9)
        self._seen[key] = known
        return max(now_ns - known, 0) / 1e9

    def _tell(self, topic: Topic, error: Exception) -> None:
        if not topic.closed and str(error) != self._told:  # once, not at every look
            self._told = str(error)
            logger.warning("metrics of a topic cannot be read", extra={"topic": topic.name, "error": str(error)})


# What is counted and timed of HTTP: plain numbers while calls are served, families when somebody asks.
#
# They are changed by the loop that serves, with no lock; a look from another thread meanwhile may miss the last call.


# Any other word is a client's invention, and would be one more label each time.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"
UNKNOWN_ROUTE: Final = "unknown"

_BUCKETS: Final = Buckets(FAST)


class HttpMetrics(Meter):
    """The numbers of one server's calls and connections."""

    def __init__(self) -> None:
        self._requests: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self._seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self._received: collections.Counter[str] = collections.Counter()
        self._sent: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._opened = self._closed = 0
        self._streams: collections.Counter[str] = collections.Counter()

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
            await close_chunks(chunks)

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


# What must never be read in a log: tokens, passwords, and whatever else a caller proves itself with.


HIDDEN: Final = "[hidden]"

_NAMES: Final = frozenset(
    {"authorization", "cookie", "credential", "credentials", "passwd", "password", "secret", "token"}
)
_PARTS: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

# In texts: what follows `Bearer` or `Basic`, what is said after such a name, and who stands before the @ of a URL.
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
# Without one of these no pattern fits: most texts are looked through once.
_MAYBE: Final = re.compile(r"(?i)bearer|basic|://|api[_-]?key|authorization|cookie|passw|secret|token")


def is_secret(name: str) -> bool:
    """Whether what goes by this name is one: `Authorization`, `auth_token`; not `token_name`, `tokens_file`."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    return bool(parts) and (parts[-1] in _NAMES or parts[-1] == "apikey" or parts[-2:] == ["api", "key"])


def hidden(text: str) -> str:
    """The text, without the secrets in it."""
    if _MAYBE.search(text):
        for pattern, instead in _IN_TEXT:
            text = pattern.sub(instead, text)
    return text


# Log lines for people and for machines: one line of text, or one JSON object, with all facts of `extra=`.
#
# Secrets are in neither, and nothing that a caller sends can begin a line of its own.


_DEPTH: Final = 6
_MOST_INT: Final = 2**63

# What every record has; anything else came with `extra=`.
_OWN: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_FIRST: Final = frozenset({"time", "level", "logger", "message", "exception"})

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
# JSON may hold these as they are, but some who read lines take them for the end of one, or for a command.
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., every extra, "exception": {...}}`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line. An extra by the name of one of the first fields gets an underscore."""
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
        """One line, and the traceback below where there is one."""
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
    """Send all that is logged to the stream, in this form, in place of what the program sent it to before."""
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
    except Exception:  # a phrase and arguments that do not fit: better a poor line than none
        return _clean(f"{record.msg} {record.args!r}")


def _extras(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for name, value in vars(record).items():
        if name not in _OWN and not name.startswith("_"):
            yield name, HIDDEN if is_secret(name) else _plain(value)


def _plain(value: object, depth: int = _DEPTH) -> Any:
    """The value as JSON knows it, whatever it is."""
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
    except Exception:  # somebody's own __str__: no reason to lose the line
        return f"<{type(value).__name__} that cannot be shown>"


def _clean(text: str) -> str:
    """Without secrets, and such that it can be encoded."""
    return hidden(text).encode("utf-8", "backslashreplace").decode()


def _quoted(value: object) -> str:
    """Bare where that cannot be misread, otherwise as JSON."""
    if isinstance(value, str) and value and not any(char.isspace() or char in '"=\\' for char in value):
        return value.translate(_ESCAPES)
    return msgspec.json.encode(value).decode().translate(_ESCAPES)


def _indented(text: str) -> str:
    """Set in, so that no line of it looks like a line of the log."""
    return "\n".join("  " + line.translate(_ESCAPES) for line in text.split("\n"))
