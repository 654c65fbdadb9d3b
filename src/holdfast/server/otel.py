"""Traces of a server to OpenTelemetry, where a setting or a variable asks for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from holdfast.broker.broker import BrokerEngine
from holdfast.embedded.otel import ENDPOINT, TRACES_ENDPOINT, export
from holdfast.embedded.trace_export import TraceExport
from holdfast.errors import BadSettings

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
