"""The log of traces: steps are written as they happen, and found by message, or by topic and time.

It is the only partition of an internal topic, `__traces`. Each step is a record whose key is the id of its message,
so that a search for one message decodes no other. Steps survive kill -9; a power cut may lose the last of them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from holdfast.broker.folder.layout import message_id
from holdfast.broker.messages import DELAYED_ID, PREFIX, DeadNote
from holdfast.broker.metrics import Histogram, Times
from holdfast.broker.tracing import (
    SAMPLED,
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    TraceStep,
    format_tracestate,
    parse_traceparent,
    parse_tracestate,
)
from holdfast.codec.columns import KEYS
from holdfast.codec.encode import single_head
from holdfast.codec.frame import Frame
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import Closed, HoldfastError, InvalidRequest
from holdfast.later import difflib, hashlib
from holdfast.model import Batch, HeaderPairs, Record
from holdfast.settings import LogSettings
from holdfast.storage.files import is_log
from holdfast.storage.log import Log
from holdfast.storage.view import OnDamage

if TYPE_CHECKING:
    from holdfast.broker.delayed import Delayed


# The steps of a message's life: which messages are traced, and what is recorded about them.
#
# Whether a message is traced, in which trace and under which span, depends only on the message: on its headers, or on
# a hash of its place. So every step agrees, in every group and after a restart, without any state being kept.
#
#     its header `holdfast.trace`          it was traced before it was redriven
#     its header `traceparent`, flag 01    the sender records the trace
#     hash of topic, partition, place      it is in the share that `trace_sample` selects
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
OMITTED: Final = "omitted"  # in a history: stands for a number of steps that are left out

STEPS: Final = (
    PUBLISHED, DELAYED, RELEASED, LEASED, EXTENDED, ACKED, NACKED, RETURNED, BURIED, REDRIVEN, EXPIRED, CANCELLED,
    SKIPPED, LOST, REPLAYED, OMITTED,
)  # fmt: skip

# A redriven message carries its trace in a header of ours, so that the user's headers stay as they are.
TRACE: Final = PREFIX + "trace"

_MASK: Final = 2**64 - 1
_ONE_NUMBER: Final = Struct(">Q").pack
_TWO_NUMBERS: Final = Struct(">QQ").pack


encode_step = msgspec.msgpack.Encoder().encode
decode_step = msgspec.msgpack.Decoder(TraceStep).decode


class StepSink(Protocol):
    """Takes steps. It never raises: an operation on a message must not fail because of its trace."""

    def record(self, steps: Sequence[TraceStep]) -> None:
        """Write the steps, in one write."""

    def record_one(self, step: TraceStep) -> None:
        """Write one step."""

    def failed(self, error: BaseException) -> None:
        """Report that steps could not be made."""


class Traced(msgspec.Struct, frozen=True, gc=False):
    """The trace of a message that is traced."""

    id: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    state: str = ""

    @property
    def context(self) -> TraceContext:
        """Return the context for whatever continues the trace."""
        return TraceContext(self.trace_id, self.span_id, SAMPLED)


class Sampler:
    """Decides which messages of one partition are traced."""

    def __init__(self, topic: str, topic_id: int, partition: int, rate: float) -> None:
        self.topic = topic
        self.partition = partition
        self._name = f"{topic_id}/{topic}/{partition}"
        self._below = round(rate * 2**64)
        self._all = rate >= 1  # then nothing has to be computed to choose
        self._choice, self._trace_high, self._trace_low, self._span = _seeds(self._name, 4)

    def group_seed(self, group: str) -> int:
        """Return a number that tells the spans of this group from those of others."""
        return _seeds(f"{self._name}/{group}", 1)[0]

    def of(self, record: Record) -> Traced | None:
        """Return the trace of a message in the log; None if it is not traced."""
        return self.message(record.headers, record.offset)

    def message(self, headers: HeaderPairs, offset: int | None, delayed_id: int | None = None) -> Traced | None:
        """Return the trace of a message with these headers and this place. A delayed message keeps its delayed id."""
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
        if not self._all and ours is None and (sent is None or not sent.sampled) and not self.chosen(number):
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
        """Whether the sample includes this number. A larger share includes everything that a smaller one does."""
        return _mixed(self._choice, number) < self._below

    def _trace_id(self, number: int) -> str:
        return _TWO_NUMBERS(_mixed(self._trace_high, number) or 1, _mixed(self._trace_low, number)).hex()


class PartitionTracer:
    """Records what happens to the messages of one partition outside of any group."""

    def __init__(self, sampler: Sampler, sink: StepSink, now_ns: Callable[[], int]) -> None:
        self.sampler = sampler
        self._sink = sink
        self.now_ns = now_ns

    def published(self, headers: Sequence[HeaderPairs] | None, first: int, count: int, at_ns: int) -> None:
        """Messages were written from `first` on. `at_ns` was taken before that, or a lease might seem earlier."""
        try:
            steps: list[TraceStep] = []
            for offset in range(first, first + count):
                traced = self.sampler.message(() if headers is None else headers[offset - first], offset)
                if traced is not None:
                    steps.append(self._step(PUBLISHED, traced, offset, at_ns))
            self._sink.record(steps)
        except Exception as error:  # a failing trace must not affect the message
            self._sink.failed(error)

    def published_one(self, headers: HeaderPairs, offset: int, at_ns: int) -> None:
        """Fused form of `published` for one message."""
        try:
            traced = self.sampler.message(headers, offset)
            if traced is not None:
                self._sink.record_one(self._step(PUBLISHED, traced, offset, at_ns))
        except Exception as error:
            self._sink.failed(error)

    def delayed(self, headers: Sequence[HeaderPairs], first: int, dues_ms: Sequence[int], at_ns: int) -> None:
        """Delayed messages were written, with delayed ids from `first` on."""
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
        """Delayed messages were moved to the log, from the offset `first` on."""
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
        """A delayed message was cancelled."""
        try:
            traced = self.sampler.message(headers, None, delayed_id)
            if traced is not None:
                self._sink.record([self._step(CANCELLED, traced, None, self.now_ns())])
        except Exception as error:
            self._sink.failed(error)

    def trace_header(self, letter: Record, note: DeadNote) -> tuple[tuple[str, bytes], ...]:
        """Return the header to add to a redriven dead letter so that its trace continues."""
        traced = self.sampler.message(letter.headers, note.offset)
        return () if traced is None else ((TRACE, traced.context.traceparent.encode()),)

    def redriven(self, letters: Sequence[tuple[Record, DeadNote | None]], first: int, at_ns: int) -> None:
        """Dead letters were redriven as new messages, from the offset `first` on; `at_ns` was taken before that."""
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
    """Return the span of one delivery of a message to a group, under this fencing number."""
    return _span_id(group_seed, int(traced.span_id, 16) + fence)


def _number(offset: int | None, delayed_id: int | None) -> int:
    """Map both kinds of places to one number."""
    if delayed_id is not None:
        return delayed_id << 1 | 1
    assert offset is not None
    return offset << 1


def _span_id(seed: int, number: int) -> str:
    return _ONE_NUMBER(_mixed(seed, number) or 1).hex()


def _mixed(seed: int, number: int) -> int:
    """Return 64 bits that look random but are reproducible (the finalizer of SplitMix64)."""
    mixed = seed + number * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def _seeds(name: str, count: int) -> Sequence[int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8 * count).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]


logger = get_logger(__name__)

TRACES: Final = "__traces"

_WRITE_MOST: Final = 10_000
_NEVER_NS: Final = 2**63 - 1
_LAST: Final = 2**62  # greater than any offset

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
    """Takes the steps of all topics of one broker. Safe to use from any thread; recording a step never raises."""

    def __init__(self, open_log: Callable[[], Log], is_there: Callable[[], bool] = lambda: True) -> None:
        self._open_log = open_log
        self._is_there = is_there
        self._log: Log | None = None
        self._lock = threading.Lock()
        self._refusal: HoldfastError | None = None  # why it could not be opened; cleared by the next tick to retry
        self._closed = False
        self._logged_error = ""
        self.on_attention: Callable[[], None] = lambda: None
        self.listeners: tuple[Callable[[Sequence[TraceStep]], None], ...] = ()  # get all steps; quick, and never raise
        self.lost = 0  # steps that could not be written

    @staticmethod
    def open(world: World, folder: str, retention_ms: int | None) -> TraceLog:
        """Return the traces in this folder; their log is opened or created when the first step comes."""
        return TraceLog(lambda: Log.open(folder, trace_settings(retention_ms), world), lambda: is_log(world, folder))

    @property
    def log(self) -> Log:
        """Return the log, and open it if necessary."""
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
        """Return the log for reading; None if nothing was ever traced, because reading creates no files."""
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
        """Write the steps. A failure is counted, and logged once."""
        if not steps:
            return
        for listener in self.listeners:
            listener(steps)
        for first in range(0, len(steps), _WRITE_MOST):
            some = steps if len(steps) <= _WRITE_MOST else steps[first : first + _WRITE_MOST]
            try:
                if len(some) > 1 or not self._write_one(some[0]):
                    self.log.write(_batch(some), durability="os")
            except Exception as error:  # whatever it is, the operation on the message has succeeded
                self.failed(error, len(some))

    def take_over(self, steps: Sequence[TraceStep]) -> None:
        """Write steps that another log has recorded, and that listeners have got from there."""
        if steps:
            self.log.write(_batch(steps), durability="os")

    def record_one(self, step: TraceStep) -> None:
        """Fused form of `record` for one step."""
        if self.listeners:
            self.record((step,))
            return
        try:
            if not self._write_one(step):
                self.log.write(_batch((step,)), durability="os")
        except Exception as error:
            self.failed(error)

    def _write_one(self, step: TraceStep) -> bool:
        """Write a step on the fast path; returns False if that is not possible."""
        value = encode_step(step)
        head, columns = single_head(len(value), step.id.encode(), (), 0, 0, 0, 0)
        return (self._log or self.log).write_alone(value, "os", head, columns, step.at_ns) >= 0

    def failed(self, error: BaseException, steps: int = 1) -> None:
        """Report that this many steps were lost, and why."""
        with self._lock:
            self.lost += steps
            first = self._logged_error != type(error).__name__
            self._logged_error = type(error).__name__
        if first:
            logger.error("trace steps lost; the messages are safe", extra={"error": repr(error)})

    def tick(self) -> int | None:
        """Do what is due by now, mainly retention; return the ms until the next call."""
        log = self._log
        if log is not None:
            return log.tick()
        if not self._closed:
            self._refusal = None
        return None

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            log, self._log, self._closed = self._log, None, True
            self._refusal = Closed("the traces are closed, because their broker is: open it again to read them")
        if log is not None:
            log.close()


def trace_settings(retention_ms: int | None) -> LogSettings:
    """Return the settings for the log of traces."""
    return LogSettings(durability="os", segment_bytes=16 * 1024 * 1024, retention_ms=retention_ms)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Criteria for steps; a field that is not set matches any step. Times are inclusive."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None  # a part of the error, in any case
    since_ns: int = 0
    until_ns: int = _NEVER_NS

    def __post_init__(self) -> None:
        for name in ("topic", "group", "event", "holder", "error"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"{name}={getattr(self, name)!r} cannot be searched for: give a text")
        if self.event is not None and self.event not in STEPS:
            near = difflib.get_close_matches(self.event, STEPS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidRequest(f"there is no event {self.event!r}; {hint}choose from {', '.join(STEPS)}")

    def wants(self, step: TraceStep) -> bool:
        """Whether the step matches."""
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
    """Yield the matching steps in the order written, oldest first, between two places in the log.

    Calls `look` with each place before reading it; `look` may raise to end the search there.
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
    """Return the last steps, oldest first."""
    return list(deque(steps, maxlen=limit))


def extent(log: ReadableLog, since_ns: int = 0) -> range:
    """Return the places in the log that may hold steps of that time or later."""
    return range(_start(log, since_ns), log.end)


def trace(log: ReadableLog, message: str, since_ns: int = 0) -> list[TraceStep]:
    """Return the life of one message; see `looking_for`."""
    return found_by(looking_for(log, message, since_ns))


def found_by(looking: Generator[int, None, _Found]) -> _Found:
    """Run a search to its end without interruption, and return what it found."""
    while True:
        try:
            next(looking)
        except StopIteration as end:
            found: _Found = end.value
            return found


def looking_for(log: ReadableLog, message: str, since_ns: int = 0) -> Generator[int, None, list[TraceStep]]:
    """Search for the life of one message, in order of time, including the messages that it was redriven to or from.

    `since_ns` is a time before which the message did not exist, which shortens the search in a long log. Yields the
    number of steps passed after each frame, so that other work can take its turn.
    """
    asked = {message}
    found: dict[int, TraceStep] = {}
    while True:
        found |= yield from _of_messages(log, asked, since_ns)
        related = {step.related for step in found.values() if step.related} - asked
        if not related:
            break
        asked |= related
        since_ns = 0  # the message that it was redriven from is older
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
        if not any(key in in_frame for key in wanted):  # searches all keys of the frame at once
            continue
        values = frame.values()
        for i, key in enumerate(columns.keys() or ()):
            if key in wanted:
                found |= dict(enumerate(_decoded(values[i : i + 1]), frame.base_offset + i))
    return found


def _last_lives(steps: Sequence[TraceStep]) -> list[TraceStep]:
    """Drop the steps of earlier messages in the same places, from a deleted topic or a lost tail."""
    begins = {step.id: i for i, step in enumerate(steps) if step.step == PUBLISHED}
    return [step for i, step in enumerate(steps) if i >= begins.get(step.id, 0)]


def _batch(steps: Sequence[TraceStep]) -> Batch:
    """Return the steps as records, each with its own time and its message's id as key."""
    return Batch(
        values=[encode_step(step) for step in steps],
        times_ns=[step.at_ns for step in steps],
        keys=[step.id.encode() for step in steps],
    )


def _frames(log: ReadableLog, since_ns: int, since: int = 0) -> Iterator[Frame]:
    """Yield the frames that may hold steps of that time and place or later; damaged frames are skipped."""
    return log.read(min(max(_start(log, since_ns), since), log.end), on_damage="skip")


def _start(log: ReadableLog, since_ns: int) -> int:
    return max(log.find_time(since_ns), log.start) if since_ns > 0 else log.start


def _decoded(values: Sequence[bytes]) -> Iterator[TraceStep]:
    for value in values:
        with suppress(msgspec.MsgspecError):  # written by a release with another format
            yield decode_step(value)


def _at(step: TraceStep) -> int:
    return step.at_ns


# Statistics of many steps: how long messages waited and were handled, how often they were tried, and what failed.


_MOST_ERRORS: Final = 20
_ENDS: Final = frozenset({ACKED, NACKED, RETURNED, BURIED})


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of steps. Times are in seconds; `attempts` maps a number of attempts to how many messages took it."""

    messages: int
    steps: dict[str, int]
    first_delivery: Times
    handling: Times
    attempts: dict[int, int]
    errors: list[tuple[str, int]]


class Tallied:
    """Counts steps in order of time. What began before the first step is not timed.

    A message is first ready when it is published or released from its delay. Handling lasts from a lease to its
    end, however it ends.
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
        """Count the next step."""
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
        """Return the statistics of the steps so far."""
        return TraceStats(
            messages=len(self._messages),
            steps=dict(self._counts.most_common()),
            first_delivery=self._first_delivery.snapshot(),
            handling=self._handling.snapshot(),
            attempts=dict(sorted(self._attempts.items())),
            errors=self._errors.most_common(_MOST_ERRORS),
        )


def stats(steps: Iterable[TraceStep]) -> TraceStats:
    """Return the statistics of these steps."""
    tallied = Tallied()
    for step in steps:
        tallied.add(step)
    return tallied.stats()
