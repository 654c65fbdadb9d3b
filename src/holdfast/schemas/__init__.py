"""Schemas of message bodies: Avro, JSON Schema and Protobuf, checked, read and compared; the state of a registry.

Pure: nothing here opens a folder, and importing it needs none of the libraries for the three formats.

    from holdfast.schemas import Schema, compile_schema

    order = compile_schema(Schema("AVRO", text))
    order.decode(payload)            # the value, or SchemaMismatch
    order.problems_reading(older)    # why it could not read what was written by an older schema

Of several schemas by their ids, a `SchemaDecoder` reads whatever messages name them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.schemas.decoding import SchemaDecoder, compile_schema
    from holdfast.schemas.source import Kind, Reference, Schema
    from holdfast.schemas.wire import split_header, with_header
else:
    from holdfast.later import names

    __getattr__ = names(
        __name__,
        {
            "Kind": "holdfast.schemas.source",
            "Reference": "holdfast.schemas.source",
            "Schema": "holdfast.schemas.source",
            "SchemaDecoder": "holdfast.schemas.decoding",
            "compile_schema": "holdfast.schemas.decoding",
            "split_header": "holdfast.schemas.wire",
            "with_header": "holdfast.schemas.wire",
        },
    )

__all__ = ["Kind", "Reference", "Schema", "SchemaDecoder", "compile_schema", "split_header", "with_header"]
