"""Holdfast for Spark: a source and a sink without jars, and pipelines from queues to tables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Loaded at once, and light: were it loaded later, the module `session` would hide the function.
from holdfast.spark.session import register, session

if TYPE_CHECKING:
    from holdfast.spark.decoding import from_avro, from_json_schema, from_protobuf
    from holdfast.spark.pipelines.lake import read_delta
    from holdfast.spark.pipelines.project import Pipeline, run
    from holdfast.spark.pipelines.python import pipeline
    from holdfast.spark.ranges import lag
    from holdfast.spark.tables import read, read_stream, register_tables, table

__all__ = [
    "Pipeline", "from_avro", "from_json_schema", "from_protobuf", "lag", "pipeline", "read", "read_delta",
    "read_stream", "register", "register_tables", "run", "session", "table",
]  # fmt: skip

_LATER = {
    **dict.fromkeys(("Pipeline", "run"), "holdfast.spark.pipelines.project"),
    "pipeline": "holdfast.spark.pipelines.python",
    **dict.fromkeys(("from_avro", "from_json_schema", "from_protobuf"), "holdfast.spark.decoding"),
    "lag": "holdfast.spark.ranges",
    "read_delta": "holdfast.spark.pipelines.lake",
    **dict.fromkeys(("read", "read_stream", "register_tables", "table"), "holdfast.spark.tables"),
}


def __getattr__(name: str) -> Any:
    """The other names, when they are first asked for: workers import this package for every task."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
