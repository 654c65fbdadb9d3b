"""The log of traces: steps go in as they happen, and are found again by message, or by topic and time.

It is the only partition of an internal topic, `__traces`. Each step is a record whose key is the id of its message,
so that a look for one message decodes no other. Steps survive kill -9; a power cut may take the last of them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from holdfast.broker.folder.layout import message_id
from holdfast.broker.messages import DELAYED_ID, PREFIX, DeadNote
from holdfast.broker.metrics import Histogram, Times
from holdfast.codec.columns import KEYS
from holdfast.codec.frame import Frame
from holdfast.codec.tracecontext import (
    SAMPLED,
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    format_tracestate,
    parse_traceparent,
    parse_tracestate,
)
from holdfast.env import World
from holdfast.errors import Closed, HoldfastError, InvalidRequest
from holdfast.model import Batch, HeaderPairs, Record
from holdfast.settings import LogSettings
from holdfast.storage.files import is_log
from holdfast.storage.log import Log
from holdfast.storage.view import OnDamage

if TYPE_CHECKING:
    from holdfast.broker.delayed import Delayed


# The steps of a message's life: which messages are traced, and what is written down of them.
#
# Whether a message is traced, in which trace and under which span follows from the message alone: from its headers,
# or from a hash of its place. So every step answers alike, in every group and after a restart, and nothing is kept.
#
#     its header `holdfast.trace`          it was traced before it was redriven
#     its header `traceparent`, flag 01    whoever sent it records the trace
#     hash of topic, partition, place      one of the share that `trace_sample` asks for
#
# A delivery is a span of its own below the message's; all its steps carry it.


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


class StepSink(Protocol):
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

    def __init__(self, sampler: Sampler, sink: StepSink, now_ns: Callable[[], int]) -> None:
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


logger = logging.getLogger(__name__)

TRACES: Final = "__traces"

_WRITE_MOST: Final = 10_000
_NEVER_NS: Final = 2**63 - 1
_LAST: Final = 2**62  # behind all that is in a log

_Found = TypeVar("_Found")


class ReadableLog(Protocol):
    """A log that can be read, by its owner or by another process."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def read(self, offset: int, *, on_damage: OnDamage = "raise") -> Iterator[Frame]: ...
    def find_time(self, time_ns: int) -> int: ...


class TraceLog:
    """Takes in the steps of all topics of one broker. Safe to use from any thread; it never raises at a step."""

    def __init__(self, open_log: Callable[[], Log], is_there: Callable[[], bool] = lambda: True) -> None:
        self._open_log = open_log
        self._is_there = is_there
        self._log: Log | None = None
        self._lock = threading.Lock()
        self._refusal: HoldfastError | None = None  # why it could not be opened; the next tick lets it be tried again
        self._closed = False
        self._told = ""
        self.on_attention: Callable[[], None] = lambda: None
        self.listeners: tuple[Callable[[Sequence[TraceStep]], None], ...] = ()  # told of all steps; quick, and no error
        self.lost = 0  # steps that could not be written

    @staticmethod
    def open(world: World, folder: str, retention_ms: int | None) -> TraceLog:
        """The traces in the folder of their partition's log; it is opened, or made, when the first step comes."""
        return TraceLog(lambda: Log.open(folder, trace_settings(retention_ms), world), lambda: is_log(world, folder))

    @property
    def log(self) -> Log:
        """The log itself; opened where it was not yet."""
        log = self._log
        if log is None:
            with self._lock:
                if self._refusal is not None:
                    raise self._refusal
                if self._log is None:
                    self._log = self._opened()
                log = self._log
        return log

    def readable(self) -> Log | None:
        """The log, for a look into it; None where nothing was ever traced: a look makes no files."""
        return self.log if self._log is not None or self._is_there() else None

    def _opened(self) -> Log:
        try:
            log = self._open_log()
        except HoldfastError as error:
            self._refusal = error
            raise
        log.on_attention = self.on_attention
        return log

    def record(self, steps: Sequence[TraceStep]) -> None:
        """Write the steps down. Where that fails, it is counted, and said once."""
        for listener in self.listeners if steps else ():
            listener(steps)
        for first in range(0, len(steps), _WRITE_MOST):
            some = steps[first : first + _WRITE_MOST]
            try:
                self.log.write(_batch(some), durability="os")
            except Exception as error:  # whatever it is: the message that it is about has been served
                self.failed(error, len(some))

    def failed(self, error: BaseException, steps: int = 1) -> None:
        """So many steps are lost, for this reason."""
        with self._lock:
            self.lost += steps
            first = self._told != type(error).__name__
            self._told = type(error).__name__
        if first:
            logger.error("trace steps lost; the messages are safe", extra={"error": repr(error)})

    def tick(self) -> int | None:
        """Do what is due by now, retention above all; answers in how many ms more will be due."""
        log = self._log
        if log is not None:
            return log.tick()
        if not self._closed:
            self._refusal = None
        return None

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            log, self._log, self._closed = self._log, None, True
            self._refusal = Closed("the traces are closed, with the broker that they belong to")
        if log is not None:
            log.close()


def trace_settings(retention_ms: int | None) -> LogSettings:
    """Settings of the log of traces."""
    return LogSettings(durability="os", segment_bytes=16 * 1024 * 1024, retention_ms=retention_ms)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps are wanted; what is left out does not matter. Times are inclusive."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None  # a part of it, in any case of letters
    since_ns: int = 0
    until_ns: int = _NEVER_NS

    def __post_init__(self) -> None:
        for name in ("topic", "group", "event", "holder", "error"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"{name}={getattr(self, name)!r} cannot be searched for: give a text")
        if self.event is not None and self.event not in STEPS:
            near = get_close_matches(self.event, STEPS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidRequest(f"there is no event {self.event!r}; {hint}choose from {', '.join(STEPS)}")

    def wants(self, step: TraceStep) -> bool:
        """Whether the step is one of them."""
        return (
            self.since_ns <= step.at_ns <= self.until_ns
            and self.event in (None, step.step)
            and self.topic in (None, step.topic)
            and self.group in (None, step.group)
            and self.holder in (None, step.holder)
            and (self.error is None or self.error.casefold() in step.error.casefold())
        )


def search(
    log: ReadableLog, wanted: Search, *, after: int = -1, before: int = _LAST, look: Callable[[int], None] | None = None
) -> Iterator[TraceStep]:
    """The steps that are wanted, as they were written down, oldest first, behind a place in the log, before another.

    Each place is told to `look` before it is looked at; that may raise, to end the search there.
    """
    for frame in _frames(log, wanted.since_ns, after + 1):
        if frame.base_offset >= before:
            return
        if min(frame.columns().times_ns() or [0]) > wanted.until_ns:
            continue
        if look is None and frame.base_offset > after and frame.next_offset <= before:
            yield from filter(wanted.wants, _decoded(frame.values()))
            continue
        for offset, value in enumerate(frame.values(), frame.base_offset):
            if after < offset < before:
                if look is not None:
                    look(offset)
                yield from filter(wanted.wants, _decoded([value]))


def newest(steps: Iterator[TraceStep], limit: int) -> list[TraceStep]:
    """The last of them, oldest first."""
    return list(deque(steps, maxlen=limit))


def extent(log: ReadableLog, since_ns: int = 0) -> range:
    """The places in which there may be steps of that time or later."""
    return range(_start(log, since_ns), log.end)


def trace(log: ReadableLog, message: str, since_ns: int = 0) -> list[TraceStep]:
    """The life of one message; see `looking_for`."""
    return found_by(looking_for(log, message, since_ns))


def found_by(looking: Generator[int, None, _Found]) -> _Found:
    """What a look finds that nobody interrupts."""
    while True:
        try:
            next(looking)
        except StopIteration as end:
            found: _Found = end.value
            return found


def looking_for(log: ReadableLog, message: str, since_ns: int = 0) -> Generator[int, None, list[TraceStep]]:
    """Look for the life of one message, in the order of time, with those of what it was redriven into or out of.

    `since_ns` is a moment before which the message is known not to have existed: it makes a long log short. Says
    after each frame how many steps were passed, so that others can have their turn.
    """
    asked = {message}
    found: dict[int, TraceStep] = {}
    while True:
        found |= yield from _of_messages(log, asked, since_ns)
        related = {step.related for step in found.values() if step.related} - asked
        if not related:
            break
        asked |= related
        since_ns = 0  # what it was redriven out of is older
    in_log = [step for _, step in sorted(found.items())]
    return _last_lives(sorted(in_log, key=_at))


def _of_messages(log: ReadableLog, ids: set[str], since_ns: int) -> Generator[int, None, dict[int, TraceStep]]:
    wanted = {text.encode() for text in ids}
    found: dict[int, TraceStep] = {}
    for frame in _frames(log, since_ns):
        columns = frame.columns()
        span = columns.span(KEYS)
        in_frame = b"" if span is None else bytes(span)
        yield frame.count
        if not any(key in in_frame for key in wanted):  # one look at all keys at once
            continue
        values = frame.values()
        for i, key in enumerate(columns.keys() or ()):
            if key in wanted:
                found |= dict(enumerate(_decoded(values[i : i + 1]), frame.base_offset + i))
    return found


def _last_lives(steps: Sequence[TraceStep]) -> list[TraceStep]:
    """Without the lives of earlier messages in the same places, of a topic that was deleted or a tail that was lost."""
    begins = {step.id: i for i, step in enumerate(steps) if step.step == PUBLISHED}
    return [step for i, step in enumerate(steps) if i >= begins.get(step.id, 0)]


def _batch(steps: Sequence[TraceStep]) -> Batch:
    """The steps as records, each with its own time and the id of its message as key."""
    return Batch(
        values=[encode_step(step) for step in steps],
        times_ns=[step.at_ns for step in steps],
        keys=[step.id.encode() for step in steps],
    )


def _frames(log: ReadableLog, since_ns: int, since: int = 0) -> Iterator[Frame]:
    """The frames that may hold steps of that time and place or later; damage costs those that it hit, no others."""
    return log.read(min(max(_start(log, since_ns), since), log.end), on_damage="skip")


def _start(log: ReadableLog, since_ns: int) -> int:
    return max(log.find_time(since_ns), log.start) if since_ns > 0 else log.start


def _decoded(values: Sequence[bytes]) -> Iterator[TraceStep]:
    for value in values:
        with suppress(msgspec.MsgspecError):  # of a release that writes them otherwise
            yield decode_step(value)


def _at(step: TraceStep) -> int:
    return step.at_ns


# What many steps add up to: how long messages waited and were worked on, how often they were tried, what failed.


_MOST_ERRORS: Final = 20
_ENDS: Final = frozenset({ACKED, NACKED, RETURNED, BURIED})


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in numbers. Times are in seconds; `attempts` says how many messages were done after how many."""

    messages: int
    steps: dict[str, int]
    first_delivery: Times
    handling: Times
    attempts: dict[int, int]
    errors: list[tuple[str, int]]


class Tallied:
    """Steps as they are counted, in the order of time; what began before the first of them is not timed.

    A message is first ready when it was published, or released from its delay. Handling is from a lease to its end,
    whichever way it ends.
    """

    def __init__(self) -> None:
        self._messages: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._attempts: Counter[int] = Counter()
        self._errors: Counter[str] = Counter()
        self._ready_at: dict[str, int] = {}
        self._leased_at: dict[tuple[str, str], int] = {}
        self._first_delivery, self._handling = Histogram(), Histogram()

    def add(self, step: TraceStep) -> None:
        """Count the next one."""
        self._messages.add(step.id)
        self._counts[step.step] += 1
        if step.error:
            self._errors[step.error] += 1
        if step.step == PUBLISHED or (step.step == RELEASED and not step.group):
            self._ready_at[step.id] = step.at_ns
        elif step.step == LEASED:
            self._leased_at[step.id, step.group] = step.at_ns
            if step.attempt == 1 and step.id in self._ready_at:
                self._first_delivery.observe_ns(step.at_ns - self._ready_at[step.id])
        elif step.step in _ENDS:
            since = self._leased_at.pop((step.id, step.group), None)
            if since is not None:
                self._handling.observe_ns(step.at_ns - since)
            if step.step in (ACKED, BURIED):
                self._attempts[step.attempt] += 1

    def stats(self) -> TraceStats:
        """Those so far, in numbers."""
        return TraceStats(
            messages=len(self._messages),
            steps=dict(self._counts.most_common()),
            first_delivery=self._first_delivery.snapshot(),
            handling=self._handling.snapshot(),
            attempts=dict(sorted(self._attempts.items())),
            errors=self._errors.most_common(_MOST_ERRORS),
        )


def stats(steps: Iterable[TraceStep]) -> TraceStats:
    """The numbers of these steps."""
    tallied = Tallied()
    for step in steps:
        tallied.add(step)
    return tallied.stats()
