"""Parcels into partitions: with their sequences, again where it failed, and never a second time what is there.

Every message of an idempotent producer has a number in its partition. A parcel gets its numbers when it is written
first, and keeps them however often it is written again: the partition knows what it has and takes nothing twice, nor
anything before what comes ahead of it. Where a parcel fails for good, what the partition has decides the next number.
A producer with a name ends with such a failure instead: if later messages were stored without the one that failed, one
that resumes would count wrongly.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from holdfast.broker.folder.layout import check_name
from holdfast.broker.producers import ProducerId
from holdfast.errors import Closed, HoldfastError, InvalidRequest, OutOfSequence
from holdfast.model import Durability
from holdfast.producing.parcels import Outbox, Parcel
from holdfast.producing.port import ProducerPort
from holdfast.settings import ProducerSettings

logger = logging.getLogger(__name__)

_NUMBERS: Final = 2**32


class Sender:
    """Writes the parcels of one producer, one after the other. Only one round at a time may use it."""

    def __init__(self, port: ProducerPort, settings: ProducerSettings, name: str | None, *, resume: bool) -> None:
        if not isinstance(resume, bool):
            raise InvalidRequest(f"resume={resume!r} cannot be used: give True or False")
        if (name is not None or resume) and not settings.idempotent:
            raise InvalidRequest("a producer with a name is idempotent: leave out idempotent=False, or the name")
        if resume and name is None:
            raise InvalidRequest("resume=True needs a name: it goes on where the last producer of that name had got to")
        self._port = port
        self._settings = settings
        self._durability: Durability = "fsync" if settings.acks == "all" else "os"
        self._name = None if name is None else check_name(name, "producer")
        self._resume = resume
        self._beginning = threading.Lock()
        self.identity: ProducerId | None = None
        self.failure: Exception | None = None  # with which a named producer has ended

    @property
    def begun(self) -> bool:
        return self.identity is not None or not self._settings.idempotent

    def begin(self) -> None:
        """Get an id; one with a name fences those before it, from now on."""
        with self._beginning:  # a producer that began twice would fence itself
            if not self.begun:
                self.identity = self._port.begin(self._name, resume=self._resume)

    def write(self, parcel: Parcel) -> Any:
        """Put it into its partition; answers what to wait for."""
        self._check_usable()
        parcel.attempts += 1
        parcel.durability = self._durability
        if parcel.loose:
            return self._port.publish(parcel, self.identity, self._durability)
        if self.identity is not None and parcel.sequence is None:
            self._number(parcel)
        count = len(parcel.values) - parcel.skipped
        if not count:
            return self._port.written(parcel, self._durability)
        waiting = self._append(parcel)
        if parcel.sequence is not None:
            parcel.outbox.sequence = (parcel.sequence + count) % _NUMBERS
        return waiting

    def fails(self, parcel: Parcel, error: Exception, now_ns: int) -> bool:
        """Decide what an error means: whether it is the parcel's answer. Otherwise it is tried again, later."""
        outbox, settings = parcel.outbox, self._settings
        again = isinstance(error, HoldfastError) and error.retryable and self.failure is None
        if again and (settings.retries is None or parcel.attempts <= settings.retries):
            wait_ms = min(settings.retry_backoff_ms << min(parcel.attempts - 1, 30), settings.retry_backoff_max_ms)
            outbox.retry_at_ns = now_ns + wait_ms * 1_000_000
            return False
        outbox.retry_at_ns = 0
        outbox.sequence = None  # what the partition has of it is what counts
        if self._name is not None and self.failure is None:
            self.failure = error
        if parcel.unheeded:
            logger.warning(
                "messages not stored",
                extra={"topic": outbox.destination.name, "partition": outbox.number, "messages": len(parcel.values)}
                | {"error": str(error)},
            )
        return True

    def _check_usable(self) -> None:
        self._port.check_open()
        if self.failure is not None:
            raise Closed(
                f"the producer has ended with an error: {self.failure}. This message was not stored; begin a new "
                "producer of its name"
            ) from self.failure
        if self._name is not None and self.identity is not None:
            self._port.check(self.identity)

    def _number(self, parcel: Parcel) -> None:
        """Give the parcel its sequence; skip what the one before this has stored already."""
        assert self.identity is not None
        outbox, count = parcel.outbox, len(parcel.values)
        if outbox.sequence is None:
            outbox.sequence = self._first_sequence(outbox)
        if outbox.counted < outbox.known:
            parcel.skipped = min(count, outbox.known - outbox.counted)
            first = outbox.counted % _NUMBERS
            parcel.skipped_offsets = self._port.offsets(outbox, self.identity, first, parcel.skipped)
        outbox.counted += count
        parcel.sequence = outbox.sequence

    def _first_sequence(self, outbox: Outbox) -> int:
        assert self.identity is not None
        if not self._resume and (self._name is not None or not outbox.counted):
            return 0
        expected = self._port.next_sequence(outbox, self.identity)
        if self._resume and not outbox.counted:
            outbox.known = expected
        return expected

    def _append(self, parcel: Parcel) -> Any:
        try:
            return self._port.append(parcel, self.identity, self._durability)
        except OutOfSequence as error:
            if error.known or self._name is not None or parcel.attempts > 1 or not parcel.sequence:
                raise
            # Idle for so long that the partition has forgotten it: nothing is missing, it may begin anew.
            parcel.sequence = 0
            return self._port.append(parcel, self.identity, self._durability)
