"""Export of spans through OpenTelemetry, with any of its exporters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import holdfast
from holdfast.api.ports import port_of
from holdfast.broker.engine import BrokerEngine
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.telemetry.export import SpanFacts, TraceExport

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext


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
            f"the traces of {of!r} are not here: export them in the process that owns the folder, or by the server"
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
