"""Tracing switched on: while a topic is sampled, its partitions and its groups have a tracer that they tell of all.

The short ways of a message never ask for one: where a topic is sampled they are shut, and every message goes the long
way, where it is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import message_id, parse_message_id, partition_folder, topic_of_id
from holdfast.broker.messages import DELAYED_ID, mark
from holdfast.broker.partition import Partition
from holdfast.broker.tracing.group import GroupTracer
from holdfast.broker.tracing.log import TRACES, Search, TraceLog, TraceStats, extent, looking_for, newest, search, stats
from holdfast.broker.tracing.steps import PartitionTracer, Sampler, TraceStep
from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.storage.files import join

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

logger = logging.getLogger(__name__)

# A clock that is set back a little must not hide the beginning of a life.
_MARGIN_NS: Final = 60_000_000_000

_AFTER_ERROR_MS: Final = 60_000


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

    def looking_for(self, message: str, published_ns: int = 0) -> Generator[int, None, list[TraceStep]]:
        """Look for the life of one message, with that of the messages that it was redriven into or out of."""
        log = self.log.readable()
        return [] if log is None else (yield from looking_for(log, message, max(published_ns - _MARGIN_NS, 0)))

    def search(self, wanted: Search, limit: int, *, last: bool = False) -> list[TraceStep]:
        """The oldest or the newest steps that are wanted, oldest first."""
        log = self.log.readable()
        if log is None:
            return []
        found = search(log, wanted)
        return newest(found, limit) if last else list(islice(found, limit))

    def steps(self, wanted: Search, places: range, look: Callable[[int], None]) -> Iterator[TraceStep]:
        """The steps that are wanted, in these places; each is told to `look` before it is looked at."""
        log = self.log.readable()
        if log is None:
            return iter(())
        return search(log, wanted, after=places.start - 1, before=places.stop, look=look)

    def extent(self, wanted: Search) -> range:
        """The places in which there may be steps that are wanted."""
        log = self.log.readable()
        return range(0) if log is None else extent(log, wanted.since_ns)

    def stats(self, wanted: Search) -> TraceStats:
        """What the steps that are wanted add up to."""
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
        """Trace the partition from now on, at this rate; at 0 no longer."""
        sampler = self._sampler(number, rate)
        partition.tracer = PartitionTracer(sampler, self._sink, self._now_ns) if rate else None

    def follow_group(self, delivery: Delivery, name: str, number: int, rate: float) -> None:
        """Trace a group on a partition from now on, at this rate; at 0 no longer."""
        with delivery.lock:  # no event may be half seen
            sampler = self._sampler(number, rate)
            delivery.tracer = GroupTracer(sampler, name, delivery.group, delivery.read, self._sink) if rate else None

    def _sampler(self, number: int, rate: float) -> Sampler:
        return Sampler(self._topic, self._topic_id, number, rate)


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
