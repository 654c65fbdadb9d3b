"""Tracing while it is enabled: partitions and groups report to an observer, which records the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyroaring import BitMap64

from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import message_id, parse_message_id, partition_folder, topic_of_id
from holdfast.broker.messages import DELAYED_ID, mark
from holdfast.broker.partition import Partition
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import (
    ACKED,
    BURIED,
    CANCELLED,
    EXPIRED,
    EXTENDED,
    LEASED,
    LOST,
    RELEASED,
    RETURNED,
    SKIPPED,
    TRACES,
    PartitionTracer,
    Sampler,
    Search,
    StepSink,
    Traced,
    TraceLog,
    TraceStats,
    delivery_span,
    extent,
    looking_for,
    newest,
    search,
    stats,
)
from holdfast.broker.tracing.log import NACKED as NACKED_STEP
from holdfast.delivery.events import (
    NACKED,
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    Event,
    Expired,
    Extended,
    Leased,
    Lost,
    Phase,
    Released,
    Replayed,
    Returned,
    Skipped,
    each,
)
from holdfast.delivery.group import Group, Lease
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import HoldfastError
from holdfast.model import Record
from holdfast.storage.files import join

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine


# Messages read at a time when a whole range is settled without having been read.
_READ_MOST: Final = 1_000


class GroupTracer:
    """Traces one group on one partition. Hold the group's lock while calling it.

    `steps` reads the state before the events are applied; `written` completes it once they are journaled. It only
    knows the traced messages that are leased or delayed.
    """

    def __init__(
        self,
        sampler: Sampler,
        name: str,
        group: Group,
        fetch: Callable[[Sequence[int]], Sequence[Record]],
        sink: StepSink,
    ) -> None:
        self._sampler = sampler
        self._name = name
        self._seed = sampler.group_seed(name)
        self._group = group
        self._fetch = fetch
        self._sink = sink
        self._known: dict[int, Traced] = {}
        # Leased or waiting before tracing began: only the log tells which of them are traced.
        self._unseen = BitMap64([*group.leases, *group.waiting])
        self._at_hand: dict[int, Record] = {}
        self._gone: list[int] = []
        self._at_ns = 0

    def loaded(self, records: Sequence[Record]) -> None:
        """Note messages that were just read and are likely to be leased next."""
        self._at_hand = {record.offset: record for record in records}

    def steps(self, events: Sequence[Event], at_ns: int) -> list[TraceStep]:
        """Return the steps that the events mean for traced messages."""
        self._gone = []
        self._at_ns = at_ns
        steps: list[TraceStep] = []
        try:
            for event in events:
                meant = self._STEPS.get(type(event))
                if meant is not None:
                    steps += meant(self, event)
            if len(events) > 1:
                return _without_short_waits(steps)
        except Exception as error:  # a failing trace must not affect the message
            self._sink.failed(error)
        return steps

    def lease_one(self, record: Record, lease: Lease, at_ns: int) -> TraceStep | None:
        """Fused form of `steps` for the lease of one message, which was just read; then call `written_one`."""
        offset = record.offset
        try:
            traced = self._sampler.message(record.headers, offset)
            if traced is None:
                return None
            self._known[offset] = traced
            self._at_ns = at_ns
            return self._step(LEASED, traced, offset, lease, until_ms=lease.at_ms + lease.lease_ms)
        except Exception as error:  # as in `steps`
            self._sink.failed(error)
            return None

    def ack_one(self, offset: int, lease: Lease, at_ns: int) -> TraceStep | None:
        """Fused form of `steps` for the ack of one message; then call `written_one`."""
        try:
            if self._unseen:
                deque(self._held([offset]), maxlen=0)
            traced = self._known.get(offset)
            if traced is None:
                return None
            self._at_ns = at_ns
            return self._step(ACKED, traced, offset, lease)
        except Exception as error:  # as in `steps`
            self._sink.failed(error)
            return None

    def written_one(self, step: TraceStep, offset: int) -> None:
        """Fused form of `written` for one message."""
        if step.step is ACKED:
            self._known.pop(offset, None)
        self._sink.record_one(step)

    def written(self, steps: Sequence[TraceStep]) -> None:
        """Record the steps, whose events are journaled and applied."""
        for offset in self._gone:
            self._known.pop(offset, None)
        self._gone = []
        self._at_hand = {}
        if steps:
            self._sink.record(steps)

    def _leased(self, event: Leased) -> Iterator[TraceStep]:
        lease = Lease(event.fence, event.session, event.lease_ms, event.until_ms, event.at_ms, event.holder)
        for offset, traced in self._read(each(event.runs)):
            self._known[offset] = traced
            yield self._step(LEASED, traced, offset, lease, until_ms=event.at_ms + event.lease_ms)

    def _acked(self, event: Acked) -> Iterator[TraceStep]:
        for offset, traced in self._held(each(event.runs)):
            self._gone.append(offset)
            yield self._step(ACKED, traced, offset, self._group.leases.get(offset))

    def _extended(self, event: Extended) -> Iterator[TraceStep]:
        until_ms = self._at_ns // 1_000_000 + event.lease_ms
        for offset, traced in self._held(each(event.runs)):
            yield self._step(EXTENDED, traced, offset, self._group.leases.get(offset), until_ms=until_ms)

    def _returned(self, event: Returned) -> Iterator[TraceStep]:
        name, why = (NACKED_STEP, "") if event.why == NACKED else (RETURNED, event.why)
        for offset, traced in self._held([event.offset]):
            lease = self._group.leases.get(offset)
            due_ms = event.due_ms if event.due_ms > event.at_ms else 0
            yield self._step(name, traced, offset, lease, why=why, error=event.error, due_ms=due_ms)

    def _released(self, event: Released) -> Iterator[TraceStep]:
        for offset, traced in self._held(each(event.runs)):
            self._gone.append(offset)
            yield self._step(RELEASED, traced, offset, None)

    def _buried(self, event: Buried) -> Iterator[TraceStep]:
        for offset, traced in self._either([event.offset]):
            self._gone.append(offset)
            lease = self._group.leases.get(offset)
            yield self._step(BURIED, traced, offset, lease, why=event.reason, error=event.error)

    def _buried_ready(self, event: BuriedReady) -> Iterator[TraceStep]:
        for offset, traced in self._read(each(event.runs)):
            self._gone.append(offset)
            yield self._step(BURIED, traced, offset, None, why=event.reason, error=event.error)

    def _expired(self, event: Expired) -> Iterator[TraceStep]:
        for offset, traced in self._read(each(event.runs)):
            yield self._step(EXPIRED, traced, offset, None)

    def _cancelled(self, event: Cancelled) -> Iterator[TraceStep]:
        for offset, traced in self._either(each(event.runs)):
            self._gone.append(offset)
            yield self._step(CANCELLED, traced, offset, None)

    def _lost(self, event: Lost) -> Iterator[TraceStep]:
        # Their headers cannot be read, so only the hash of the place decides which are traced.
        for offset in each(event.runs):
            traced = self._sampler.message((), offset)
            if traced is not None:
                yield self._step(LOST, traced, offset, None)

    def _skipped(self, event: Skipped) -> Iterator[TraceStep]:
        """Only messages that waited for a retry get a step: a seek may skip millions that were never read."""
        for offset, traced in self._held([offset for offset in self._group.waiting if offset < event.to]):
            self._gone.append(offset)
            yield self._step(SKIPPED, traced, offset, None)

    def _replayed(self, event: Replayed) -> Iterator[TraceStep]:
        self._gone += [offset for offset in self._known if offset >= event.to and offset in self._group.waiting]
        return iter(())

    def _either(self, offsets: Iterable[int]) -> Iterator[tuple[int, Traced]]:
        for offset in offsets:
            ready = self._group.phase(offset) is Phase.READY
            yield from self._read([offset]) if ready else self._held([offset])

    def _held(self, offsets: Iterable[int]) -> Iterator[tuple[int, Traced]]:
        """Yield the leased or delayed messages among the offsets that are traced."""
        for offset in offsets:
            if self._unseen and offset in self._unseen:
                self._unseen.discard(offset)
                self._known.update(self._read([offset]))
            traced = self._known.get(offset)
            if traced is not None:
                yield offset, traced

    def _read(self, offsets: Iterable[int]) -> Iterator[tuple[int, Traced]]:
        """Read the messages at the offsets and yield those that are traced."""
        missing: list[int] = []
        for offset in offsets:
            record = self._at_hand.get(offset)
            if record is None:
                missing.append(offset)
            elif (traced := self._sampler.of(record)) is not None:
                yield offset, traced
        rest = iter(missing)
        while some := list(islice(rest, _READ_MOST)):
            for record in self._fetch(some):
                if (traced := self._sampler.of(record)) is not None:
                    yield record.offset, traced

    def _step(
        self,
        name: str,
        traced: Traced,
        offset: int,
        lease: Lease | None,
        *,
        why: str = "",
        error: str = "",
        due_ms: int = 0,
        until_ms: int = 0,
    ) -> TraceStep:
        held = lease is not None
        return TraceStep(
            self._at_ns,
            name,
            traced.id,
            self._sampler.topic,
            self._sampler.partition,
            offset,
            self._name,
            lease.holder if lease is not None else "",
            self._group.attempts(offset) + held,
            why,
            error,
            due_ms,
            until_ms,
            traced.trace_id,
            delivery_span(self._seed, traced, lease.fence) if lease is not None else traced.span_id,
            traced.span_id if held else traced.parent_id,
        )

    # All other events are not steps of a message's life: a document saved, the second half of a burial, an opening.
    _STEPS: ClassVar[dict[type, Callable[[Any, Any], Iterator[TraceStep]]]] = {
        Leased: _leased,
        Acked: _acked,
        Extended: _extended,
        Returned: _returned,
        Released: _released,
        Buried: _buried,
        BuriedReady: _buried_ready,
        Expired: _expired,
        Cancelled: _cancelled,
        Lost: _lost,
        Skipped: _skipped,
        Replayed: _replayed,
    }


def _without_short_waits(steps: list[TraceStep]) -> list[TraceStep]:
    """Drop the release of a message that becomes ready again at once: it has not waited."""
    back = {step.offset for step in steps if step.step in (NACKED_STEP, RETURNED)}
    return [step for step in steps if step.step != RELEASED or step.offset not in back]


# Enabling tracing: while a topic is sampled, its partitions and its groups have a tracer that they report to.
#
# The fast path of a plain put knows no tracer: it is not taken while a topic is sampled.


logger = get_logger(__name__)

# Setting the clock back a little must not hide the beginning of a message's life.
_MARGIN_NS: Final = 60_000_000_000

_AFTER_ERROR_MS: Final = 60_000


class Traces:
    """The traces of one data folder: records steps and searches them."""

    def __init__(self, world: World, root: str, retention_ms: int | None) -> None:
        self.log = TraceLog.open(world, join(partition_folder(root, TRACES), "log"), retention_ms)
        self._logged_error = ""

    def tick(self) -> int | None:
        """Do what is due by now; return the ms until the next call. A failure is logged, not raised."""
        try:
            return self.log.tick()
        except HoldfastError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                logger.error("upkeep of traces failed", extra={"error": str(error)})
            return _AFTER_ERROR_MS

    def looking_for(self, message: str, published_ns: int = 0) -> Generator[int, None, list[TraceStep]]:
        """Search for the life of one message, including the messages that it was redriven to or from."""
        log = self.log.readable()
        return [] if log is None else (yield from looking_for(log, message, max(published_ns - _MARGIN_NS, 0)))

    def search(self, wanted: Search, limit: int, *, last: bool = False) -> list[TraceStep]:
        """Return the oldest or the newest matching steps, oldest first."""
        log = self.log.readable()
        if log is None:
            return []
        found = search(log, wanted)
        return newest(found, limit) if last else list(islice(found, limit))

    def steps(self, wanted: Search, places: range, look: Callable[[int], None]) -> Iterator[TraceStep]:
        """Yield the matching steps in these places; calls `look` with each place before reading it."""
        log = self.log.readable()
        if log is None:
            return iter(())
        return search(log, wanted, after=places.start - 1, before=places.stop, look=look)

    def extent(self, wanted: Search) -> range:
        """Return the places that may hold matching steps."""
        log = self.log.readable()
        return range(0) if log is None else extent(log, wanted.since_ns)

    def stats(self, wanted: Search) -> TraceStats:
        """Return the statistics of the matching steps."""
        log = self.log.readable()
        return stats(iter(()) if log is None else search(log, wanted))


class TopicTracing:
    """Keeps the tracers of one topic in step with its setting `trace_sample`."""

    def __init__(self, now_ns: Callable[[], int], sink: TraceLog, topic: str, topic_id: int) -> None:
        self._now_ns = now_ns
        self._sink = sink
        self._topic = topic
        self._topic_id = topic_id

    def follow_partition(self, partition: Partition, number: int, rate: float) -> None:
        """Trace the partition from now on, at this rate; 0 stops tracing."""
        sampler = self._sampler(number, rate)
        partition.tracer = PartitionTracer(sampler, self._sink, self._now_ns) if rate else None

    def follow_group(self, delivery: Delivery, name: str, number: int, rate: float) -> None:
        """Trace a group on a partition from now on, at this rate; 0 stops tracing."""
        with delivery.lock:  # no event may be seen only in part
            sampler = self._sampler(number, rate)
            delivery.tracer = GroupTracer(sampler, name, delivery.group, delivery.read, self._sink) if rate else None

    def _sampler(self, number: int, rate: float) -> Sampler:
        return Sampler(self._topic, self._topic_id, number, rate)


def traced_as(engine: BrokerEngine, message: object) -> tuple[str, int]:
    """Return the id under which a message is traced, and a time before which it has no steps."""
    name = topic_of_id(message)
    place = parse_message_id(message, name)
    known, published_ns = message_id(name, place.partition, place.offset, place.delayed_id), 0
    if place.offset is not None:
        with suppress(HoldfastError), engine.using(name) as topic:
            record = next(topic.partition(place.partition).log.records(place.offset, whole=False), None)
            delayed_id = None if record is None else mark(record, DELAYED_ID)
            if delayed_id is not None:
                known = message_id(name, place.partition, None, int(delayed_id))
            elif record is not None:
                published_ns = record.timestamp_ns
    return known, published_ns
