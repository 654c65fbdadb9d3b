"""Takes a sample of every open topic and its groups every few seconds, from counters that are there anyway.

Nothing is added to a put, a get or an ack: the counters and histograms of `broker/metrics.py` are read on a thread of
their own, and compared with what they were at the last look. What takes a lock or reads a file, such as the number of
ready messages, is read only where the counters have moved, and once a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Counter, Histogram, Metrics
from holdfast.broker.samples import TOTAL, SampleStore
from holdfast.broker.streams import lag_of
from holdfast.broker.topic import Topic
from holdfast.codec.samples import RINGS, SeriesKey, Slot
from holdfast.env import Clock
from holdfast.env.process import get_logger
from holdfast.errors import HoldfastError
from holdfast.membership import TopicPartition
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.streams.group import StreamGroup
    from holdfast.broker.streams.offsets import CommittedOffset

logger = get_logger(__name__)

EVERY_S: Final = RINGS[0].step_s
_SAVE_EVERY: Final = 12  # samples: a minute
# Samples: with several groups, counting dead letters reads all of them. In between, counters tell what came and went.
_COUNT_DEAD_EVERY: Final = 60
_MOST_STEPS: Final = 12  # a sample that comes late is spread over so many steps at most
_NO_TIMES: Final = [0] * len(Histogram().slots())
_QUANTILES: Final = (0.5, 0.99)


class Levels(NamedTuple):
    """What a group holds at one moment."""

    ready: int = 0
    dead: int = 0
    oldest_s: float = 0.0


class Counts(NamedTuple):
    """What was counted since a topic was opened, or what came since the last look."""

    published: int = 0
    handled: int = 0
    failed: int = 0


_NO_COUNTS: Final = Counts()

_Committed: TypeAlias = "dict[tuple[str, int], dict[StreamGroup, list[CommittedOffset]]]"  # by topic and its id


class _Watched:
    """What was seen of a series at the last look."""

    def __init__(self, source: object, counts: Counts) -> None:
        self.source = source  # other counters mean that the topic was closed and opened again: they began at 0
        self.counts = counts
        self.moved = -1
        self.levels = Levels()
        self.looked = 0
        self.died: int | None = None
        self.counted_dead = 0
        self.times: Sequence[int] = _NO_TIMES
        self.bases: list[tuple[int, Sequence[int]]] = [(-1, _NO_TIMES)] * len(RINGS)


class QueueSampler:
    """Samples one engine; ticked by a keeper of its own."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.store = SampleStore(engine.world, engine.folder)
        self.folder = engine.folder
        self.before_close: Callable[[], None] = lambda: None
        self.on_attention: Callable[[], None] = lambda: None
        self._engine = engine
        self._ages = Ages(engine.world.clock)
        self._watched: dict[SeriesKey, _Watched] = {}
        self._looked: set[SeriesKey] = set()
        self._committed: _Committed = {}
        self._traffic: defaultdict[SeriesKey, float] = defaultdict(float)
        self._total_times: Sequence[int] = _NO_TIMES
        self._round = 0
        self._logged_error = ""
        self._last_ns = engine.world.clock.monotonic_ns()
        self._due_ns = self._last_ns + self._until_next_ns()

    def tick(self) -> int | None:
        """Take a sample if it is time; returns in how many ms to call again."""
        self._engine.check_open()
        now_ns = self._engine.world.clock.monotonic_ns()
        if now_ns >= self._due_ns:
            self.sample(max(1, min(round((now_ns - self._last_ns) / (EVERY_S * 1e9)), _MOST_STEPS)))
            self._last_ns = now_ns
            self._due_ns = now_ns + self._until_next_ns()
            if self._round % _SAVE_EVERY == 0:
                self._tidy()
        return max(self._due_ns - now_ns, 0) // 1_000_000 + 1

    def close(self) -> None:
        """Save what was sampled since the last time."""
        self.store.save()

    def _tidy(self) -> None:
        self.store.note_traffic(dict(self._traffic))
        self._traffic.clear()
        self.store.save()

    def _until_next_ns(self) -> int:
        step_ns = EVERY_S * 1_000_000_000
        return step_ns - self._engine.world.clock.now_ns() % step_ns

    def sample(self, steps: int = 1) -> None:
        """Take a sample of the last so many steps."""
        self._round += 1
        self._recording = _Recording(self._engine.world.clock.now_ns() // 1_000_000 / 1000, steps)
        total, levels = Counts(), Levels()
        self._committed = _by_topic(self._engine.streams.all())
        self._looked, failed = set(), set()
        for topic in self._engine.open_topics():
            try:
                came, held = self._topic(topic)
            except (HoldfastError, OSError) as error:
                failed.add(topic.name)
                self._tell(topic, error)
                continue
            total = Counts(*map(int.__add__, total, came))
            levels = Levels(levels.ready + held.ready, levels.dead + held.dead, max(levels.oldest_s, held.oldest_s))
        self._ages.end_round()
        self._record(TOTAL, self._known(TOTAL, self), total, levels, self._total_times)
        known = self._watched.items()
        self._watched = {key: watched for key, watched in known if key in self._looked or key.topic in failed}

    def _topic(self, topic: Topic) -> tuple[Counts, Levels]:
        """Sample a topic and its groups. Returns what came, and what it holds: each message once."""
        key = SeriesKey("topic", topic.name, "", topic.id)
        watched, published = self._known(key, topic.metrics), topic.metrics.published.value
        came = published - watched.counts.published
        watched.counts = Counts(published)
        groups = list(topic.groups.values())
        for stream, entries in self._committed.get((topic.name, topic.id), {}).items():
            self._stream_group(topic, stream, entries, came)
        if not groups:
            self._record(key, watched, Counts(came), Levels(), _NO_TIMES)
            return Counts(came), Levels()
        found = [self._queue_group(topic, group, came) for group in groups]
        counts, held = [each for each, _ in found], [each for _, each in found]
        # What several groups read counts once, as the group has it that is behind most.
        return (
            Counts(came, sum(each.handled for each in counts), sum(each.failed for each in counts)),
            Levels(
                max(each.ready for each in held), sum(each.dead for each in held), max(each.oldest_s for each in held)
            ),
        )

    def _queue_group(self, topic: Topic, group: QueueGroup, came: int) -> tuple[Counts, Levels]:
        key, metrics = SeriesKey("queue", topic.name, group.name, topic.id), group.metrics
        watched = self._known(key, metrics)
        failed = metrics.nacked.value + metrics.rejected.value + metrics.expired_leases.value
        before, watched.counts = watched.counts, Counts(0, metrics.acked.value, failed)
        counts = Counts(came, watched.counts.handled - before.handled, failed - before.failed)
        watched.levels = levels = self._levels(topic, group, watched)
        times: Sequence[int] = watched.times
        if counts.handled:
            times = metrics.handle_seconds.slots()
            self._total_times = list(map(add, self._total_times, map(sub, times, watched.times)))
        self._record(key, watched, counts, levels, times)
        return counts, levels

    def _levels(self, topic: Topic, group: QueueGroup, watched: _Watched) -> Levels:
        ready, dead, _ = watched.levels
        deliveries = list(group.deliveries)
        moved = moved_of(topic.metrics) + moved_of(group.metrics)
        if moved != watched.moved or self._round - watched.looked >= _SAVE_EVERY:
            watched.moved, watched.looked, ready = moved, self._round, 0
            for delivery in deliveries:
                with delivery.lock:
                    ready += delivery.ready_count()
        died = group.metrics.buried.value - group.metrics.redriven.value
        is_due = watched.died is None or self._round - watched.counted_dead >= _COUNT_DEAD_EVERY
        if is_due or (died != watched.died and all(delivery.dead.counts_fast for delivery in deliveries)):
            watched.counted_dead = self._round
            dead = sum(delivery.dead.count() for delivery in deliveries)
        elif watched.died is not None:
            dead = max(dead + died - watched.died, 0)
        watched.died = died
        ages = [
            self._ages.age_s(each.partition.log, (topic.name, each.number), topic.id, each.group.floor)
            for each in deliveries
        ]
        return Levels(ready, dead, max(ages, default=0.0))

    def _stream_group(self, topic: Topic, group: StreamGroup, entries: list[CommittedOffset], came: int) -> None:
        committed = lag = 0
        age_s = 0.0
        for entry in entries:
            if entry.partition < len(topic.partitions):
                log = topic.partitions[entry.partition].log
                at = max(log.start, min(entry.offset, log.end))
                committed, lag = committed + entry.offset, lag + log.end - at
                age_s = max(age_s, self._ages.age_s(log, entry.place, topic.id, at))
        key = SeriesKey("stream", topic.name, group.name, topic.id)
        # Offsets are no counters: what was committed before the first look is not counted.
        watched = self._known(key, group, Counts(0, committed))
        before, watched.counts = watched.counts, Counts(0, committed)
        # A group that was moved back has handled nothing for it.
        counts = Counts(came, max(committed - before.handled, 0))
        self._record(key, watched, counts, Levels(lag, 0, age_s), _NO_TIMES)

    def _known(self, key: SeriesKey, source: object, counts: Counts = _NO_COUNTS) -> _Watched:
        self._looked.add(key)
        watched = self._watched.get(key)
        if watched is None or watched.source is not source:
            watched = self._watched[key] = _Watched(source, counts)
        return watched

    def _record(self, key: SeriesKey, watched: _Watched, came: Counts, levels: Levels, times: Sequence[int]) -> None:
        """Add what came to the store. A series that never held anything gets no place there."""
        recording = self._recording
        if key is TOTAL or any(came) or levels.ready or levels.dead or self.store.has(key):
            quantiles = recording.quantiles(watched, times)
            for slot in recording.slots(came, levels):
                self.store.merge(key, slot, quantiles)
        watched.times = times
        self._traffic[key] += came.published + came.handled

    def _tell(self, topic: Topic, error: Exception) -> None:
        if not topic.closed and str(error) != self._logged_error:  # once, not at every sample
            self._logged_error = str(error)
            logger.warning("a topic cannot be sampled", extra={"topic": topic.name, "error": str(error)})


def _by_topic(groups: Sequence[StreamGroup]) -> _Committed:
    """What groups in stream mode have committed, by topic: each is read once, however many topics there are."""
    found: _Committed = {}
    for group in groups:
        for entry in group.offsets.entries():
            found.setdefault((entry.topic, entry.topic_id), {}).setdefault(group, []).append(entry)
    return found


def moved_of(metrics: Metrics) -> int:
    """A number that changes whenever messages of a group change their phase."""
    return sum([part.value for part in vars(metrics).values() if isinstance(part, Counter)])


class _Recording:
    """One look at everything: its time, and how many steps it stands for."""

    def __init__(self, now_s: float, steps: int) -> None:
        # A sample stands for the time before it, so its middle says in which step it belongs.
        self._times_s = [int(now_s - EVERY_S * (late + 0.5)) for late in reversed(range(steps))]
        self._steps = steps

    def slots(self, came: Counts, levels: Levels) -> Iterator[Slot]:
        for at_s in self._times_s:
            published, handled, failed = (count / self._steps for count in came)
            yield Slot(at_s, published, handled, failed, levels.ready, levels.dead, levels.oldest_s)

    def quantiles(self, watched: _Watched, times: Sequence[int]) -> list[tuple[float, float]] | None:
        """The quantiles of the handling time in each ring's step so far; None if nothing was handled since."""
        found: list[tuple[float, float]] = []
        for i, ring in enumerate(RINGS):
            at_s = self._times_s[-1] // ring.step_s
            if watched.bases[i][0] != at_s:
                watched.bases[i] = at_s, watched.times
            if times is not watched.times:
                p50_s, p99_s = Histogram.quantiles_between(watched.bases[i][1], times, _QUANTILES)
                found.append((_number(p50_s), _number(p99_s)))
        return found or None


def _number(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds


class Ages:
    """The ages of the first messages at or after offsets, for whoever asks again and again.

    When a message was published never changes, so it is read once for as long as it is asked for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._published_ns: dict[tuple[str, int, int, int], int] = {}
        self._asked: dict[tuple[str, int, int, int], int] = {}

    def age_s(self, log: Log, place: TopicPartition, topic_id: int, offset: int) -> float:
        """The age of the first message at or after the offset, in seconds; 0 if there is none."""
        if offset >= log.end:
            return 0.0
        key, now_ns = (*place, topic_id, offset), self._clock.now_ns()
        known = self._published_ns.get(key)
        if known is None:
            known = now_ns - round(lag_of(log, place, offset, now_ns).seconds * 1e9)
        self._asked[key] = known
        return max(now_ns - known, 0) / 1e9

    def end_round(self) -> None:
        """Forget the messages that were not asked for since the last call."""
        self._published_ns, self._asked = self._asked, {}
