"""Traces of the server: out to OpenTelemetry where that is asked for, and along with the calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from holdfast.broker.broker import BrokerEngine
from holdfast.codec.tracecontext import TRACEPARENT, TRACESTATE, format_tracestate, parse_traceparent, parse_tracestate
from holdfast.embedded.otel import ENDPOINT, TRACES_ENDPOINT, export
from holdfast.embedded.trace_export import TraceExport
from holdfast.errors import BadSettings
from holdfast.model import HeaderPairs

logger = logging.getLogger(__name__)

_DISABLED: Final = "OTEL_SDK_DISABLED"


def start_export(engine: BrokerEngine, endpoint: str | None, environment: Mapping[str, str]) -> TraceExport | None:
    """Export to the endpoint of the settings, or of OpenTelemetry's variables; None where nobody asked for it.

    A setting that cannot be followed is an error. A variable may be meant for another program of the same machine.
    """
    if endpoint is not None:
        return export(engine, endpoint=endpoint)
    asked = environment.get(ENDPOINT) or environment.get(TRACES_ENDPOINT)
    if not asked or environment.get(_DISABLED, "").strip().lower() == "true":
        return None
    try:
        return export(engine)
    except BadSettings as error:
        logger.warning("traces are not exported", extra={"error": str(error)})
        return None


def trace_of_call(headers: Mapping[str, str]) -> HeaderPairs:
    """The trace that a call belongs to, as headers for messages and for the answer; empty where it names none.

    `headers` are those of the request, with names in small letters. What is not valid is no trace.
    """
    parent = headers.get(TRACEPARENT)
    context = None if parent is None else parse_traceparent(parent)
    if context is None:
        return ()
    state = format_tracestate(parse_tracestate(headers.get(TRACESTATE, "")) or ())
    found = ((TRACEPARENT, context.traceparent.encode()),)
    return (*found, (TRACESTATE, state.encode())) if state else found


def with_trace(headers: HeaderPairs, trace: HeaderPairs) -> HeaderPairs:
    """The headers of a message that a call publishes: with the call's trace, where they name none themselves."""
    if not trace or any(name.lower() == TRACEPARENT for name, _ in headers):
        return headers
    return (*[pair for pair in headers if pair[0].lower() != TRACESTATE], *trace)
