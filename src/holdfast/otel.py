"""Traces of messages as spans of OpenTelemetry: `holdfast.otel.export(broker)`.

    publish orders   PRODUCER   published                       below the sender's span
    process orders   CONSUMER   leased ... acked, nacked, ...   below publish, linked to it and to the previous attempt
    bury orders      INTERNAL   buried; also released, redriven, expired, cancelled, skipped and lost

Spans have the ids of the steps, so those of another program that passes on the message's `traceparent` join them.

    publish, receive, ack   --steps-->   a bounded queue   --thread-->   spans, in batches   -->   an outlet

Nobody waits for the export: if the outlet is slow or gone, the queue fills up, and further steps are dropped and
counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

import holdfast
from holdfast.api import port_of
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.tracing import TraceStep, log
from holdfast.delivery.events import CLOSED, DEFERRED
from holdfast.errors import BadSettings, InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

__all__ = ["TraceExport", "export"]


Attributes: TypeAlias = dict[str, str | int | float]
Kind: TypeAlias = Literal["producer", "consumer", "internal"]

_MOST_EVENTS: Final = 128

# Each is a span of its own: the span it belongs to has ended long ago, and cannot be extended.
_SHORT: Final = {
    log.RELEASED: "release",
    log.BURIED: "bury",
    log.REDRIVEN: "redrive",
    log.EXPIRED: "expire",
    log.CANCELLED: "cancel",
    log.SKIPPED: "skip",
    log.LOST: "lose",
}
_ENDS: Final = frozenset({log.ACKED, log.NACKED, log.RETURNED, log.BURIED})
_UNHARMED: Final = frozenset({DEFERRED, CLOSED})


class SpanLink(msgspec.Struct, frozen=True):
    """A related span, and how it is related."""

    trace_id: str
    span_id: str
    why: str


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened during a span."""

    at_ns: int
    name: str
    attributes: Attributes


class SpanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One span; `error` is None if nothing went wrong."""

    name: str
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    state: str = ""
    links: tuple[SpanLink, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None


class _Delivery(msgspec.Struct):
    """A delivery that has not ended yet."""

    leased: TraceStep
    events: list[SpanEvent]


class SpanMaker:
    """Turns steps into spans, in the order in which they come. Remembers a limited number of open deliveries."""

    def __init__(self, most_open: int = 20_000) -> None:
        self._most_open = most_open
        self._open: dict[str, _Delivery] = {}  # by span id
        self._failed: dict[tuple[str, str], str] = {}  # (message, group) -> span id of the previous attempt
        self.forgotten = 0  # deliveries dropped before their end was seen, because there were too many

    def spans(self, steps: Sequence[TraceStep], written_ns: int) -> Iterator[SpanFacts]:
        """Yield the spans that end with these steps, which were recorded at that time."""
        dues_ms = {step.id: step.due_ms for step in steps if step.step == log.DELAYED}
        for step in steps:
            if step.step == log.PUBLISHED:
                yield _publish(step, written_ns, dues_ms.get(step.id, 0))
            elif step.step == log.LEASED:
                self._begin(step)
            elif step.step == log.EXTENDED:
                self._extend(step)
            else:
                yield from self._others(step)

    def _begin(self, step: TraceStep) -> None:
        self._open[step.span_id] = _Delivery(step, [])
        if len(self._open) > self._most_open:
            del self._open[next(iter(self._open))]
            self.forgotten += 1

    def _extend(self, step: TraceStep) -> None:
        delivery = self._open.get(step.span_id)
        if delivery is not None and len(delivery.events) < _MOST_EVENTS:
            delivery.events.append(SpanEvent(step.at_ns, log.EXTENDED, {"holdfast.until_ms": step.until_ms}))

    def _others(self, step: TraceStep) -> Iterator[SpanFacts]:
        if step.step in _ENDS and (step.step != log.BURIED or step.span_id in self._open):
            yield self._process(step)
        # A retry that becomes due needs no span: it shows as the gap between two attempts.
        if step.step in _SHORT and not (step.step == log.RELEASED and step.group):
            yield _short(step)

    def _process(self, step: TraceStep) -> SpanFacts:
        delivery = self._open.pop(step.span_id, None)
        start_ns = step.at_ns if delivery is None else min(delivery.leased.at_ns, step.at_ns)
        key = (step.id, step.group)
        links = [SpanLink(step.trace_id, step.parent_id, "published")]
        before = self._failed.pop(key, None)
        if before is not None:
            links.append(SpanLink(step.trace_id, before, "attempt before"))
        if step.step in (log.NACKED, log.RETURNED):
            self._failed[key] = step.span_id
            if len(self._failed) > self._most_open:
                del self._failed[next(iter(self._failed))]
        attributes = _attributes(step, "process", "process") | {"holdfast.outcome": step.step}
        error = _error(step)
        if error is not None:
            attributes["error.type"] = step.why or step.step
        return SpanFacts(
            name=f"process {step.topic}",
            kind="consumer",
            trace_id=step.trace_id,
            span_id=step.span_id,
            parent_id=step.parent_id,
            start_ns=start_ns,
            end_ns=step.at_ns,
            attributes=attributes,
            links=tuple(links),
            events=() if delivery is None else tuple(delivery.events),
            error=error,
        )


def _publish(step: TraceStep, written_ns: int, due_ms: int) -> SpanFacts:
    attributes = _attributes(step, "publish", "send")
    if due_ms:
        attributes["holdfast.due_ms"] = due_ms
    redriven = step.why == log.REDRIVEN
    return SpanFacts(
        name=f"publish {step.topic}",
        kind="producer",
        trace_id=step.trace_id,
        span_id=step.span_id,
        parent_id=step.parent_id,
        start_ns=step.at_ns,
        end_ns=max(step.at_ns, written_ns),
        attributes=attributes,
        state=step.state,
        links=(SpanLink(step.trace_id, step.parent_id, log.REDRIVEN),) if redriven and step.parent_id else (),
    )


def _short(step: TraceStep) -> SpanFacts:
    verb = _SHORT[step.step]
    source = f"{step.span_id}/{step.step}/{step.group}/{step.at_ns}"
    return SpanFacts(
        name=f"{verb} {step.topic}",
        kind="internal",
        trace_id=step.trace_id,
        span_id=blake2b(source.encode(), digest_size=8).hexdigest(),
        parent_id=step.span_id,
        start_ns=step.at_ns,
        end_ns=step.at_ns,
        attributes=_attributes(step, verb, ""),
        error=(step.error or step.why) if step.step in (log.BURIED, log.LOST) else None,
    )


def _attributes(step: TraceStep, operation: str, kind: str) -> Attributes:
    """Return attributes by OpenTelemetry's conventions for messaging, and our own."""
    found: Attributes = {
        "messaging.system": "holdfast",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": step.topic,
        "messaging.destination.partition.id": str(step.partition),
        "messaging.message.id": step.id,
        "messaging.consumer.group.name": step.group,
        "messaging.client.id": step.holder,
        "holdfast.attempt": step.attempt,
        "holdfast.reason": step.why,
        "holdfast.related": step.related,
    }
    if step.offset is not None:
        found["holdfast.offset"] = step.offset
    return {name: value for name, value in found.items() if value != "" and (name, value) != ("holdfast.attempt", 0)}


def _error(step: TraceStep) -> str | None:
    if step.step == log.ACKED or step.why in _UNHARMED:
        return None
    return step.error or step.why or step.step


logger = logging.getLogger(__name__)

MOST_WAITING: Final = 20_000
_MOST_TOGETHER: Final = 512
_NS: Final = 1_000_000_000


class Outlet(Protocol):
    """Where spans go."""

    def send(self, spans: Sequence[SpanFacts]) -> bool:
        """Send spans; returns whether they arrived. May take its time."""

    def shutdown(self) -> None:
        """Abort whatever is under way."""


class TraceExport:
    """Exports the traces of one engine until it or the engine is closed."""

    def __init__(
        self,
        engine: BrokerEngine,
        outlet: Outlet,
        *,
        every_s: float = 1.0,
        close_s: float = 5.0,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._clock = engine.world.clock
        self._log = engine.traces.log
        self._outlet = outlet
        self._every_ns = round(every_s * _NS)
        self._close_s = close_s
        self._most_waiting = most_waiting
        # Not a Queue: a finalizer may add steps at any point of any thread, even while that thread holds the lock.
        self._queue: SimpleQueue[tuple[Sequence[TraceStep], int] | None] = SimpleQueue()
        self._put = self._taken = 0  # numbers of steps
        self._maker = SpanMaker(most_waiting)
        self._exported = self._failed = self._dropped = 0
        self._reported = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-otel", daemon=True)
        self._thread.start()
        self._log.listeners = (*self._log.listeners, self._listen)
        engine.at_close(self.close)

    def counts(self) -> dict[str, int]:
        """Return how many spans arrived and how many did not, and how many steps were dropped without a span."""
        return {"exported": self._exported, "failed": self._failed, "dropped": self._dropped + self._maker.forgotten}

    def _listen(self, steps: Sequence[TraceStep]) -> None:
        count = len(steps)
        if self._put - self._taken + count > self._most_waiting:
            self._dropped += count
            return
        self._put += count
        self._queue.put((steps, self._clock.now_ns()))

    def _run(self) -> None:
        spans: list[SpanFacts] = []
        due_ns: int | None = None
        going_on = True
        while going_on:
            with suppress(Empty):
                found = self._queue.get(timeout=None if due_ns is None else max(due_ns - self._mono_ns(), 0) / _NS)
                if found is None:
                    going_on = False
                else:
                    spans += self._maker.spans(*found)
                    self._taken += len(found[0])
            if spans and due_ns is None:
                due_ns = self._mono_ns() + self._every_ns
            if spans and (len(spans) >= _MOST_TOGETHER or not going_on or self._is_over(due_ns)):
                self._send(spans)
                spans, due_ns = [], None

    def _is_over(self, due_ns: int | None) -> bool:
        return due_ns is not None and self._mono_ns() >= due_ns

    def _mono_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _send(self, spans: Sequence[SpanFacts]) -> None:
        for first in range(0, len(spans), _MOST_TOGETHER):
            some = spans[first : first + _MOST_TOGETHER]
            try:
                arrived = self._outlet.send(some)
            except Exception as error:  # whatever it is: the next ones may arrive
                arrived = False
                self._report(repr(error))
            if arrived:
                self._exported += len(some)
                self._reported = False
            else:
                self._failed += len(some)
                self._report("they were not accepted")

    def _report(self, error: str) -> None:
        if not self._reported:  # once, until it works again
            self._reported = True
            logger.warning("spans of traces could not be exported", extra={"error": error})

    def close(self) -> None:
        """Send what is pending, for a few seconds at most, and stop. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._log.listeners = tuple(each for each in self._log.listeners if each != self._listen)
        self._queue.put(None)
        self._thread.join(self._close_s)
        self._outlet.shutdown()
        self._thread.join(1.0)

    def __enter__(self) -> TraceExport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Export of spans through OpenTelemetry, with any of its exporters.


ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PATH: Final = "/v1/traces"


def export(
    of: holdfast.Broker | holdfast.Queue[Any] | holdfast.aio.AsyncBroker | holdfast.aio.AsyncQueue[Any] | BrokerEngine,
    *,
    endpoint: str | None = None,
    headers: Mapping[str, str] | None = None,
    exporter: SpanExporter | None = None,
    **options: Any,
) -> TraceExport:
    """Export the traces of a broker or queue from now on, until it or the returned export is closed.

    They go to an OTLP collector at `endpoint` ("http://localhost:4318") or where OpenTelemetry's own variables point,
    or to any OpenTelemetry exporter.
    """
    engine = _engine_of(of)
    engine.check_open()
    return TraceExport(engine, OtelOutlet(exporter or _otlp(endpoint, headers)), **options)


def _engine_of(of: object) -> BrokerEngine:
    engine = of if isinstance(of, BrokerEngine) else getattr(port_of(of), "engine", None)
    if not isinstance(engine, BrokerEngine):
        raise InvalidRequest(
            f"this process does not have the traces of {of!r}: export them in the process that owns the folder, or by "
            "the server"
        )
    return engine


def _otlp(endpoint: str | None, headers: Mapping[str, str] | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise BadSettings(
            f"traces cannot be exported: OpenTelemetry is not installed ({error}); run `pip install 'holdfast[otel]'`"
        ) from error
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise BadSettings(f"the endpoint {endpoint!r} cannot be used: give a URL such as http://localhost:4318")
    if endpoint is not None and not endpoint.endswith(_PATH):
        endpoint = endpoint.rstrip("/") + _PATH
    return OTLPSpanExporter(endpoint=endpoint, headers=None if headers is None else dict(headers))


class OtelOutlet:
    """Sends spans through an OpenTelemetry exporter."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._resource = _resource()

    def send(self, spans: Sequence[SpanFacts]) -> bool:
        from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
        from opentelemetry.sdk.trace.export import SpanExportResult

        # If the program traces its HTTP calls, those that export traces must not be traced.
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True))
        try:
            return (
                self._exporter.export([_readable(span, self._resource) for span in spans]) is SpanExportResult.SUCCESS
            )
        finally:
            detach(token)

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _resource() -> Resource:
    """Describe this service: as OpenTelemetry's variables say, or by our own name."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    given = Resource.create()
    named = not str(given.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    return given if named else given.merge(Resource({SERVICE_NAME: "holdfast"}))


def _readable(span: SpanFacts, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id, span.state),
        parent=_context(span.trace_id, span.parent_id, remote=True) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
        links=[
            Link(_context(link.trace_id, link.span_id, remote=True), {"holdfast.link": link.why}) for link in span.links
        ],
        kind=SpanKind[span.kind.upper()],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("holdfast", holdfast.__version__),
    )


def _context(trace_id: str, span_id: str, state: str = "", *, remote: bool = False) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([state]) if state else None,
    )
