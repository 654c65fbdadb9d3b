"""What the engine counts, read when Prometheus asks: nothing is kept here.

Only topics that are open are looked at; none is opened for it. Numbers of a topic count since its opening, so they
begin at 0 again where it was let go meanwhile, as those of a process that starts again do. Of the (topic, group) pairs
that are open the first `most_groups` are shown, in the order in which the topics were opened: what is shown stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Counter, Histogram, Metrics, Times
from holdfast.broker.streams.offsets import lag_of
from holdfast.broker.streams.queries import query_gauges
from holdfast.broker.topic import Topic
from holdfast.errors import HoldfastError
from holdfast.server.families import FAST, SLOW, Buckets, counter, gauge, times
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

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
