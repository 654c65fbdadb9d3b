"""Schemas made ready for use, and the values of messages by the ids of their schemas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import SchemaMismatch
from holdfast.schemas.source import CompiledSchema, Schema, check_kind, check_size
from holdfast.schemas.wire import split_header

_KEPT: Final = 1_000  # compiled schemas


def compile_schema(schema: Schema) -> CompiledSchema:
    """Make a schema ready for use.

    Raises:
        InvalidSchema: It is no schema of its type, or checking values against it could take too long.
        NotInstalled: The library for its type is not installed.
    """
    kind = check_kind(schema.kind)
    check_size(schema)
    if kind == "AVRO":
        from holdfast.schemas.avro import AvroSchema

        return AvroSchema(schema)
    if kind == "JSON":
        from holdfast.schemas.json_schema import JsonSchema

        return JsonSchema(schema)
    from holdfast.schemas.protobuf import ProtobufSchema

    return ProtobufSchema(schema)


class SchemaDecoder:
    """Reads values by the ids in front of them. `find` returns the schema with an id; each is asked for once."""

    def __init__(self, find: Callable[[int], Schema]) -> None:
        self._find = find
        self._compiled: OrderedDict[int, CompiledSchema] = OrderedDict()

    def decode(self, value: bytes) -> Any:
        """Return the value of a message. Raises SchemaMismatch, and what `find` raises."""
        schema_id, payload = split_header(value)
        return self.schema(schema_id).decode(payload)

    def decode_plain(self, schema_id: int, payload: bytes) -> Any:
        """Return a value that does not name its schema."""
        return self.schema(schema_id).decode(payload)

    def schema(self, schema_id: int) -> CompiledSchema:
        """Return the schema with an id, ready for use."""
        found = self._compiled.get(schema_id)
        if found is None:
            found = self._compiled[schema_id] = compile_schema(self._find(schema_id))
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found


def mismatch(reason: object) -> SchemaMismatch:
    """Return the error for a value that is not one of its schema."""
    return SchemaMismatch(f"the value does not match its schema: {str(reason)[:500]}")
