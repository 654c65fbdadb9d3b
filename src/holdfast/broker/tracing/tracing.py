"""Tracing switched on: while a topic is sampled, hooks stand in the place of some methods of its partitions and groups.

Nothing on the way of a message asks whether it is traced: without hooks the methods are those of the class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.broker.delayed import Delayed
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import message_id, parse_message_id, partition_folder, topic_of_id
from holdfast.broker.messages import DELAYED_ID, Manner, mark
from holdfast.broker.partition import Draft, Partition, Publication
from holdfast.broker.tracing.group import GroupTracer
from holdfast.broker.tracing.log import TRACES, Search, TraceLog, TraceStats, newest, search, stats, trace
from holdfast.broker.tracing.steps import PartitionTracer, Sampler, TraceStep
from holdfast.delivery.decide import Moment
from holdfast.delivery.events import Event
from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.model import NO_PRODUCER, Appended, Batch, CodecName, Durability, Producer, Record
from holdfast.storage.files import join

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

logger = logging.getLogger(__name__)

# A clock that is set back a little must not hide the beginning of a life.
_MARGIN_NS: Final = 60_000_000_000

_AFTER_ERROR_MS: Final = 60_000

_OF_PARTITION: Final = ("_write", "_publish_delayed", "cancel_delayed", "_released")
_OF_DELIVERY: Final = ("commit_events", "_load")


class Traces:
    """The traces of one data folder: where steps go, and where they are found again."""

    def __init__(self, world: World, root: str, retention_ms: int | None) -> None:
        self.log = TraceLog.open(world, join(partition_folder(root, TRACES), "log"), retention_ms)
        self._told = ""

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due. Its troubles are nobody else's."""
        try:
            return self.log.tick()
        except HoldfastError as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.error("upkeep of traces failed", extra={"error": str(error)})
            return _AFTER_ERROR_MS

    def trace(self, message: str, published_ns: int = 0) -> list[TraceStep]:
        """The life of one message, with that of the messages that it was redriven into or out of."""
        log = self.log.readable()
        return [] if log is None else trace(log, message, max(published_ns - _MARGIN_NS, 0))

    def search(self, wanted: Search, limit: int, *, last: bool = False) -> list[TraceStep]:
        """The oldest or the newest steps that are wanted, oldest first."""
        log = self.log.readable()
        if log is None:
            return []
        found = search(log, wanted)
        return newest(found, limit) if last else list(islice(found, limit))

    def steps(self, wanted: Search, after: int, look: Callable[[int], None]) -> Iterator[TraceStep]:
        """The steps that are wanted, behind a place; each place is told to `look` before it is looked at."""
        log = self.log.readable()
        return iter(()) if log is None else search(log, wanted, after=after, look=look)

    def stats(self, wanted: Search) -> TraceStats:
        """What the steps that are wanted add up to."""
        log = self.log.readable()
        return stats(iter(()) if log is None else search(log, wanted))


class TopicTracing:
    """Keeps the hooks of one topic in step with its setting `trace_sample`."""

    def __init__(self, now_ns: Callable[[], int], sink: TraceLog, topic: str, topic_id: int) -> None:
        self._now_ns = now_ns
        self._sink = sink
        self._topic = topic
        self._topic_id = topic_id

    def follow_partition(self, partition: Partition, number: int, rate: float) -> None:
        """Trace the partition from now on, at this rate; at 0 no longer."""
        if not rate:
            partition.tracer = None
            _take_out(partition, _OF_PARTITION)
            return
        tracer = PartitionTracer(self._sampler(number, rate), self._sink, self._now_ns)
        partition.tracer = tracer
        _put_in(partition, _partition_hooks(partition, tracer, self._now_ns))

    def follow_group(self, delivery: Delivery, name: str, number: int, rate: float) -> None:
        """Trace a group on a partition from now on, at this rate; at 0 no longer."""
        with delivery.lock:  # no event may be half seen
            if not rate:
                _take_out(delivery, _OF_DELIVERY)
                return
            tracer = GroupTracer(self._sampler(number, rate), name, delivery.group, _reader_of(delivery), self._sink)
            _put_in(delivery, _delivery_hooks(delivery, tracer, self._now_ns))

    def _sampler(self, number: int, rate: float) -> Sampler:
        return Sampler(self._topic, self._topic_id, number, rate)


def _partition_hooks(
    partition: Partition, tracer: PartitionTracer, now_ns: Callable[[], int]
) -> tuple[Callable[..., object], ...]:
    kind = type(partition)

    def write(
        batch: Sequence[bytes] | Batch,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        *,
        moved: bool = False,
        any_size: bool = False,
        producer: Producer = NO_PRODUCER,
    ) -> Appended:
        at_ns = now_ns()
        appended = kind._write(partition, batch, durability, codec, moved=moved, any_size=any_size, producer=producer)
        if not moved:  # whoever moves messages says itself what that was
            headers = batch.headers if isinstance(batch, Batch) else None
            tracer.published(headers, appended.offset, appended.next_offset - appended.offset, at_ns)
        return appended

    def publish_delayed(drafts: Sequence[Draft], manner: Manner) -> Publication:
        at_ns = now_ns()
        publication = kind._publish_delayed(partition, drafts, manner)
        if publication.in_delayed is not None:
            dues_ms = [draft.due_at_ms or at_ns // 1_000_000 for draft in drafts]
            tracer.delayed([draft.headers for draft in drafts], publication.in_delayed.offset, dues_ms, at_ns)
        return publication

    def cancel_delayed(delayed_id: int) -> bool:
        waiting = None if partition.delayed is None else partition.delayed.get(delayed_id)
        done = kind.cancel_delayed(partition, delayed_id)
        if done:
            tracer.cancelled(delayed_id, () if waiting is None else waiting.record.headers)
        return done

    def released(due: Sequence[Delayed], first: int, at_ns: int) -> None:
        kind._released(partition, due, first, at_ns)
        tracer.released(due, first)

    return write, publish_delayed, cancel_delayed, released


def _delivery_hooks(
    delivery: Delivery, tracer: GroupTracer, now_ns: Callable[[], int]
) -> tuple[Callable[..., object], ...]:
    kind = type(delivery)

    def commit_events(events: Sequence[Event], durability: Durability | None = None) -> Appended:
        steps = tracer.steps(events, now_ns())
        appended = kind.commit_events(delivery, events, durability)
        tracer.written(steps)
        return appended

    def load(offsets: Sequence[int], now: Moment) -> list[Record]:
        records = kind._load(delivery, offsets, now)
        tracer.loaded(records)
        return records

    return commit_events, load


def _reader_of(delivery: Delivery) -> Callable[[Sequence[int]], list[Record]]:
    """Reads messages for somebody who holds the delivery's lock; those that are not for the group are left out."""
    return lambda offsets: delivery._supply.load(offsets, now_ms=0).records


def _put_in(whose: Partition | Delivery, hooks: Sequence[Callable[..., object]]) -> None:
    names = _OF_PARTITION if isinstance(whose, Partition) else _OF_DELIVERY
    for name, hook in zip(names, hooks, strict=True):
        setattr(whose, name, hook)


def _take_out(whose: Partition | Delivery, names: Sequence[str]) -> None:
    for name in names:
        vars(whose).pop(name, None)


def traced_as(engine: BrokerEngine, message: object) -> tuple[str, int]:
    """The id by which traces know a message, and the time before which it has no step."""
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
