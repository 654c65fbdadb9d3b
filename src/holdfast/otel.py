"""Traces of messages as spans of OpenTelemetry: `holdfast.otel.export(broker)`."""

from holdfast.embedded.otel import export
from holdfast.embedded.trace_export import TraceExport

__all__ = ["TraceExport", "export"]
