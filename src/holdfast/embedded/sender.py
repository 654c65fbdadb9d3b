"""Parcels into partitions: with their sequences, again where it failed, and never a second time what is there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker.folder.layout import check_name
from holdfast.broker.messages import DEDUP_ID
from holdfast.broker.partition import Draft, Partition, Publication
from holdfast.broker.producers import ProducerId, Producers
from holdfast.embedded.parcels import Lane, Parcel
from holdfast.errors import Closed, HoldfastError, InvalidRequest, OutOfSequence
from holdfast.model import NO_PRODUCER, Appended, Durability, Producer
from holdfast.settings import ProducerSettings

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

logger = logging.getLogger(__name__)

_NUMBERS: Final = 2**32


class Sender:
    """Stores the parcels of one producer, one after the other. Only one round at a time may use it."""

    def __init__(self, engine: BrokerEngine, settings: ProducerSettings, name: str | None, *, resume: bool) -> None:
        if (name is not None or resume) and not settings.idempotent:
            raise InvalidRequest("a producer with a name is idempotent: leave out idempotent=False, or the name")
        if resume and name is None:
            raise InvalidRequest("resume=True needs a name: it goes on where the last producer of that name had got to")
        self._engine = engine
        self._settings = settings
        self._durability: Durability = "fsync" if settings.acks == "all" else "os"
        self._name = None if name is None else check_name(name, "producer")
        self._named = name is not None
        self._resume = resume
        self._producers: Producers | None = None
        self.identity: ProducerId | None = None
        self.failure: Exception | None = (
            None  # a named producer ends with its first error: later messages must not pass
        )

    @property
    def begun(self) -> bool:
        return self.identity is not None or not self._settings.idempotent

    def begin(self) -> None:
        """Get an id; one with a name fences those before it, from now on."""
        if not self.begun:
            self._producers = self._engine.producers()
            self.identity = self._producers.init(self._name, resume=self._resume)

    def _mark_loose(self, parcel: Parcel) -> None:
        """Messages that go without a sequence get a dedup id each, which makes them known when they are sent again.

        In the order in which they leave: whatever never came into a parcel has no number.
        """
        for i, draft in parcel.rest.items():
            if draft.dedup_id is None:
                parcel.rest[i] = self._marked(parcel.lane, draft)

    def _marked(self, lane: Lane, draft: Draft) -> Draft:
        if self.identity is None:
            return draft
        numbers = (self.identity.id, self.identity.since, lane.number, next(lane.loose))
        dedup_id = b"producer-%x-%x-%d-%d" % numbers
        headers = (*draft.headers, (DEDUP_ID, dedup_id))
        return msgspec.structs.replace(draft, dedup_id=dedup_id, headers=headers)

    def write(self, parcel: Parcel) -> tuple[Partition, Publication | Appended]:
        """Put it into its partition; answers what to wait for, and where: its topic may be another by then."""
        self._check_usable()
        parcel.attempts += 1
        partition = self._partition(parcel)
        parcel.durability = self._durability
        if parcel.loose:
            self._mark_loose(parcel)
            publication = partition.publish(parcel.drafts(), durability=self._durability)
            parcel.places = publication.places
            fresh = sum(not place.duplicate for place in publication.places)
            self._count(parcel, fresh)
            return partition, publication
        if self.identity is not None and parcel.sequence is None:
            self._number(parcel, partition)
        count = len(parcel.values) - parcel.skipped
        if not count:
            return partition, Appended(0, partition.log.written_end, self._durability)
        waiting = self._append(parcel, partition)
        if parcel.sequence is not None:
            parcel.lane.sequence = (parcel.sequence + count) % _NUMBERS
        self._count(parcel, count)
        return partition, waiting

    def fail(self, parcel: Parcel, error: Exception, now_ns: int) -> bool:
        """Decide what an error means: whether the parcel is tried again, later; otherwise it has its answer."""
        lane, settings = parcel.lane, self._settings
        again = isinstance(error, HoldfastError) and error.retryable and self.failure is None
        if again and (settings.retries is None or parcel.attempts <= settings.retries):
            wait_ms = min(settings.retry_backoff_ms << min(parcel.attempts - 1, 30), settings.retry_backoff_max_ms)
            lane.retry_at_ns = now_ns + wait_ms * 1_000_000
            return True
        parcel.error = error
        lane.retry_at_ns = 0
        lane.sequence = None  # what the partition has of it is what counts
        if self._named and self.failure is None:
            self.failure = error
        if parcel.unheeded:
            logger.warning(
                "messages not stored",
                extra={"topic": lane.route.name, "partition": lane.number, "messages": len(parcel.values)}
                | {"error": str(error)},
            )
        return False

    def _partition(self, parcel: Parcel) -> Partition:
        return parcel.lane.route.topic.partition(parcel.lane.number)

    def _check_usable(self) -> None:
        self._engine.check_open()
        if self.failure is not None:
            raise Closed(
                f"the producer has ended with an error: {self.failure}. This message was not stored; begin a new "
                "producer of its name"
            ) from self.failure
        if self._named and self.identity is not None and self._producers is not None:
            self._producers.check(self.identity.id, self.identity.epoch)

    def _number(self, parcel: Parcel, partition: Partition) -> None:
        """Give the parcel its sequence; skip what the one before this has stored already."""
        assert self.identity is not None
        lane, count = parcel.lane, len(parcel.values)
        if lane.sequence is None:
            lane.sequence = self._begin(lane, partition)
        if lane.counted < lane.known:
            parcel.skipped = min(count, lane.known - lane.counted)
            sequences = partition.open_sequences()
            parcel.skipped_offsets = sequences.offsets(self.identity.id, lane.counted % _NUMBERS, parcel.skipped)
        lane.counted += count
        parcel.sequence = lane.sequence

    def _begin(self, lane: Lane, partition: Partition) -> int:
        assert self.identity is not None
        if self._named and not self._resume:
            return 0
        expected = partition.open_sequences().next_sequence(self.identity.id, self.identity.since)
        if self._resume and not lane.counted:
            lane.known = expected
        return expected

    def _append(self, parcel: Parcel, partition: Partition) -> Appended:
        try:
            return self._append_once(parcel, partition)
        except OutOfSequence as error:
            if error.known or self._named or parcel.attempts > 1 or not parcel.sequence:
                raise
            # Idle for so long that the partition has forgotten it: nothing is missing, it may begin anew.
            parcel.sequence = 0
            return self._append_once(parcel, partition)

    def _append_once(self, parcel: Parcel, partition: Partition) -> Appended:
        producer = NO_PRODUCER
        if self.identity is not None:
            producer = Producer(self.identity.id, self.identity.epoch, parcel.sequence or 0)
        appended, known = partition.append(parcel.contents(), producer, durability=self._durability)
        if known is None:
            parcel.offset = appended.offset
        elif known.offsets:  # it was stored by the attempt before, whatever went wrong then
            parcel.offset = known.offsets[0]
        else:
            parcel.skipped = len(parcel.values)
        return appended

    def _count(self, parcel: Parcel, messages: int) -> None:
        metrics = parcel.lane.route.topic.metrics
        metrics.published.add(messages)
        metrics.published_bytes.add(parcel.bytes)
