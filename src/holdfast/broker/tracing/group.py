"""What a group does with traced messages, told from its events while they are being committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

from pyroaring import BitMap64

from holdfast.broker.tracing.steps import (
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
    Sampler,
    Sink,
    Traced,
    TraceStep,
    delivery_span,
)
from holdfast.broker.tracing.steps import NACKED as NACKED_STEP
from holdfast.delivery.commands import NACKED
from holdfast.delivery.events import (
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
)
from holdfast.delivery.group import Group, Lease
from holdfast.delivery.runs import each
from holdfast.model import Record

# How many messages are read at a time where a whole run of them is settled unread.
_READ_MOST: Final = 1_000


class GroupTracer:
    """Follows one group on one partition; whoever calls holds the group's lock.

    `steps` reads the state as it is before the events, `written` ends what `steps` began, once they are journaled.
    It knows the traced messages that are leased or delayed, nothing of the others.
    """

    def __init__(
        self, sampler: Sampler, name: str, group: Group, fetch: Callable[[Sequence[int]], Sequence[Record]], sink: Sink
    ) -> None:
        self._sampler = sampler
        self._name = name
        self._seed = sampler.group_seed(name)
        self._group = group
        self._fetch = fetch
        self._sink = sink
        self._known: dict[int, Traced] = {}
        self._unseen = BitMap64([*group.leases, *group.waiting])  # from before: whether they are traced is in the log
        self._at_hand: dict[int, Record] = {}
        self._gone: list[int] = []
        self._at_ns = 0

    def loaded(self, records: Sequence[Record]) -> None:
        """These were read just now, most likely to be leased next."""
        self._at_hand = {record.offset: record for record in records}

    def steps(self, events: Sequence[Event], at_ns: int) -> list[TraceStep]:
        """What the events mean for traced messages."""
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
        except Exception as error:  # whatever is wrong with a trace, the message must not feel it
            self._sink.failed(error)
        return steps

    def written(self, steps: Sequence[TraceStep]) -> None:
        """The events are journaled and have happened: so have these steps."""
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
        # Nobody can read what they said of themselves; the share is chosen by the place alone.
        for offset in each(event.runs):
            traced = self._sampler.message((), offset)
            if traced is not None:
                yield self._step(LOST, traced, offset, None)

    def _skipped(self, event: Skipped) -> Iterator[TraceStep]:
        """Only of those that waited for a retry: a seek may pass over millions that nobody has ever looked at."""
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
        """Those of the leased or delayed messages that are traced."""
        for offset in offsets:
            if self._unseen and offset in self._unseen:
                self._unseen.discard(offset)
                self._known.update(self._read([offset]))
            traced = self._known.get(offset)
            if traced is not None:
                yield offset, traced

    def _read(self, offsets: Iterable[int]) -> Iterator[tuple[int, Traced]]:
        """Those of any messages that are traced, by what they say themselves."""
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

    # All others are no steps of a message's life: a document saved, the second half of a burial, an opening.
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
    """Whatever comes back to be ready at once has not waited: its release is no step of its own."""
    back = {step.offset for step in steps if step.step in (NACKED_STEP, RETURNED)}
    return [step for step in steps if step.step != RELEASED or step.offset not in back]
