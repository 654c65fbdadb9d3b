"""The steps of a message's life: which messages are traced, and what is written down of them.

Whether a message is traced, in which trace and under which span follows from the message alone: from its headers,
or from a hash of its place. So every step answers alike, in every group and after a restart, and nothing is kept.

    its header `holdfast.trace`          it was traced before it was redriven
    its header `traceparent`, flag 01    whoever sent it records the trace
    hash of topic, partition, place      one of the share that `trace_sample` asks for

A delivery is a span of its own below the message's; all its steps carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from holdfast.broker.folder.layout import message_id
from holdfast.broker.messages import DELAYED_ID, PREFIX, DeadNote
from holdfast.codec.tracecontext import (
    SAMPLED,
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    format_tracestate,
    parse_traceparent,
    parse_tracestate,
)
from holdfast.model import HeaderPairs, Record

if TYPE_CHECKING:
    from holdfast.broker.delayed import Delayed

PUBLISHED: Final = "published"
DELAYED: Final = "delayed"
RELEASED: Final = "released"
LEASED: Final = "leased"
EXTENDED: Final = "extended"
ACKED: Final = "acked"
NACKED: Final = "nacked"
RETURNED: Final = "returned"
BURIED: Final = "buried"
REDRIVEN: Final = "redriven"
EXPIRED: Final = "expired"
CANCELLED: Final = "cancelled"
SKIPPED: Final = "skipped"
LOST: Final = "lost"
REPLAYED: Final = "replayed"
OMITTED: Final = "omitted"  # in a history: so many steps, which are not told

STEPS: Final = (
    PUBLISHED, DELAYED, RELEASED, LEASED, EXTENDED, ACKED, NACKED, RETURNED, BURIED, REDRIVEN, EXPIRED, CANCELLED,
    SKIPPED, LOST, REPLAYED, OMITTED,
)  # fmt: skip

# With a message that was redriven goes the trace that it had; ours, so that the user's headers stay as they are.
TRACE: Final = PREFIX + "trace"

_MASK: Final = 2**64 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TraceStep(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One step of one message. `due_ms` says when it comes next, `until_ms` how long its lease lasts."""

    at_ns: int
    step: str
    id: str
    topic: str
    partition: int = 0
    offset: int | None = None
    group: str = ""
    holder: str = ""
    attempt: int = 0
    why: str = ""
    error: str = ""
    due_ms: int = 0
    until_ms: int = 0
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    state: str = ""
    related: str = ""  # the message that this one was redriven into, or out of

    @property
    def time(self) -> datetime:
        """When it happened, in UTC."""
        return _EPOCH + timedelta(microseconds=self.at_ns // 1000)


encode_step = msgspec.msgpack.Encoder().encode
decode_step = msgspec.msgpack.Decoder(TraceStep).decode


class Sink(Protocol):
    """Where steps go. It answers whatever happens: a message's own call never fails for its trace."""

    def record(self, steps: Sequence[TraceStep]) -> None:
        """Write the steps down, in one write."""

    def failed(self, error: BaseException) -> None:
        """Steps could not even be made."""


class Traced(msgspec.Struct, frozen=True, gc=False):
    """A message that is traced."""

    id: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    state: str = ""

    @property
    def context(self) -> TraceContext:
        """What to hand on to whatever continues the trace."""
        return TraceContext(self.trace_id, self.span_id, SAMPLED)


class Sampler:
    """Says of the messages of one partition which are traced."""

    def __init__(self, topic: str, topic_id: int, partition: int, rate: float) -> None:
        self.topic = topic
        self.partition = partition
        self._name = f"{topic_id}/{topic}/{partition}"
        self._below = round(rate * 2**64)
        self._choice, self._trace_high, self._trace_low, self._span = _seeds(self._name, 4)

    def group_seed(self, group: str) -> int:
        """What tells the spans of one group from those of another."""
        return _seeds(f"{self._name}/{group}", 1)[0]

    def of(self, record: Record) -> Traced | None:
        """What is to be known of a message in the log, if it is traced."""
        return self.message(record.headers, record.offset)

    def message(self, headers: HeaderPairs, offset: int | None, delayed_id: int | None = None) -> Traced | None:
        """The same for a message with these headers in this place; one that was delayed keeps its delayed id."""
        ours = sent = None
        state = b""
        for name, value in headers:
            if name == TRACE:
                ours = parse_traceparent(value)
            elif name == DELAYED_ID and value.isdigit():
                delayed_id = int(value)
            elif len(name) == len(TRACEPARENT) and name.lower() == TRACEPARENT:
                sent = parse_traceparent(value)
            elif len(name) == len(TRACESTATE) and name.lower() == TRACESTATE:
                state = value
        number = _number(offset, delayed_id)
        if ours is None and (sent is None or not sent.sampled) and not self.chosen(number):
            return None
        context = ours or sent
        return Traced(
            message_id(self.topic, self.partition, offset, delayed_id),
            self._trace_id(number) if context is None else context.trace_id,
            _span_id(self._span, number),
            "" if context is None else context.span_id,
            "" if sent is None or not state else format_tracestate(parse_tracestate(state) or ()),
        )

    def chosen(self, number: int) -> bool:
        """Whether the share takes it. A larger share takes all that a smaller one does."""
        return _mixed(self._choice, number) < self._below

    def _trace_id(self, number: int) -> str:
        return f"{_mixed(self._trace_high, number) or 1:016x}{_mixed(self._trace_low, number):016x}"


class PartitionTracer:
    """Notes what happens to the messages of one partition outside of any group."""

    def __init__(self, sampler: Sampler, sink: Sink, now_ns: Callable[[], int]) -> None:
        self.sampler = sampler
        self._sink = sink
        self.now_ns = now_ns

    def published(self, headers: Sequence[HeaderPairs] | None, first: int, count: int, at_ns: int) -> None:
        """Messages were written from `first` on; `at_ns` is from before that, or a lease might seem earlier."""
        try:
            found = [
                (offset, self.sampler.message(() if headers is None else headers[offset - first], offset))
                for offset in range(first, first + count)
            ]
            self._sink.record([self._step(PUBLISHED, traced, offset, at_ns) for offset, traced in found if traced])
        except Exception as error:  # whatever is wrong with a trace, the message is safe
            self._sink.failed(error)

    def delayed(self, headers: Sequence[HeaderPairs], first: int, dues_ms: Sequence[int], at_ns: int) -> None:
        """Messages that are not due yet were written, with delayed ids from `first` on."""
        try:
            steps: list[TraceStep] = []
            for i, due_ms in enumerate(dues_ms):
                traced = self.sampler.message(headers[i], None, first + i)
                if traced is not None:
                    steps.append(self._step(PUBLISHED, traced, None, at_ns))
                    steps.append(self._step(DELAYED, traced, None, at_ns, due_ms=due_ms))
            self._sink.record(steps)
        except Exception as error:
            self._sink.failed(error)

    def released(self, messages: Sequence[Delayed], first: int) -> None:
        """Messages that were delayed have entered the log, from the offset `first` on."""
        try:
            at_ns = self.now_ns()
            found = [
                (offset, self.sampler.message(message.record.headers, None, message.id))
                for offset, message in enumerate(messages, first)
            ]
            self._sink.record([self._step(RELEASED, traced, offset, at_ns) for offset, traced in found if traced])
        except Exception as error:
            self._sink.failed(error)

    def cancelled(self, delayed_id: int, headers: HeaderPairs) -> None:
        """A delayed message was taken back."""
        try:
            traced = self.sampler.message(headers, None, delayed_id)
            if traced is not None:
                self._sink.record([self._step(CANCELLED, traced, None, self.now_ns())])
        except Exception as error:
            self._sink.failed(error)

    def trace_header(self, letter: Record, note: DeadNote) -> tuple[tuple[str, bytes], ...]:
        """What to add to the headers of a dead letter that comes back, so that its trace goes on."""
        traced = self.sampler.message(letter.headers, note.offset)
        return () if traced is None else ((TRACE, traced.context.traceparent.encode()),)

    def redriven(self, letters: Sequence[tuple[Record, DeadNote | None]], first: int, at_ns: int) -> None:
        """Dead letters came back as new messages, from the offset `first` on; `at_ns` is from before that."""
        try:
            self._sink.record(list(self._redriven(letters, first, at_ns)))
        except Exception as error:
            self._sink.failed(error)

    def _redriven(
        self, letters: Sequence[tuple[Record, DeadNote | None]], first: int, at_ns: int
    ) -> Iterator[TraceStep]:
        for offset, (letter, note) in enumerate(letters, first):
            before = None if note is None else self.sampler.message(letter.headers, note.offset)
            if before is None or note is None:
                continue
            after = self.sampler.message(((TRACE, before.context.traceparent.encode()),), offset)
            assert after is not None
            yield self._step(REDRIVEN, before, note.offset, at_ns, group=note.group, related=after.id)
            yield self._step(PUBLISHED, after, offset, at_ns, why=REDRIVEN, group=note.group, related=before.id)

    def _step(
        self,
        name: str,
        traced: Traced,
        offset: int | None,
        at_ns: int,
        *,
        group: str = "",
        why: str = "",
        due_ms: int = 0,
        related: str = "",
    ) -> TraceStep:
        return TraceStep(
            at_ns,
            name,
            traced.id,
            self.sampler.topic,
            self.sampler.partition,
            offset,
            group=group,
            why=why,
            due_ms=due_ms,
            trace_id=traced.trace_id,
            span_id=traced.span_id,
            parent_id=traced.parent_id,
            state=traced.state if name == PUBLISHED else "",
            related=related,
        )


def delivery_span(group_seed: int, traced: Traced, fence: int) -> str:
    """The span of one delivery: of a message, to a group, under this fencing number."""
    return _span_id(group_seed, int(traced.span_id, 16) + fence)


def _number(offset: int | None, delayed_id: int | None) -> int:
    """One number for both kinds of places."""
    if delayed_id is not None:
        return delayed_id << 1 | 1
    assert offset is not None
    return offset << 1


def _span_id(seed: int, number: int) -> str:
    return f"{_mixed(seed, number) or 1:016x}"


def _mixed(seed: int, number: int) -> int:
    """64 bits that look like chance and are the same each time (the finish of SplitMix64)."""
    mixed = seed + number * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def _seeds(name: str, count: int) -> Sequence[int]:
    digest = blake2b(name.encode(), digest_size=8 * count).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]
