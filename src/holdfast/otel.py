"""Traces of messages as spans of OpenTelemetry: `holdfast.otel.export(broker)`."""

from holdfast.telemetry.export import TraceExport
from holdfast.telemetry.otel import export

__all__ = ["TraceExport", "export"]
