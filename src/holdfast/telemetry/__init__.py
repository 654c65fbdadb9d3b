"""Traces for other systems: spans, their export, OpenTelemetry."""
