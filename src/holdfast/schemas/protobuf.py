"""Protobuf: schemas as descriptors, values by the messages that protobuf makes of them.

A schema is given as text, or as a serialized FileDescriptorProto in Base64, as Confluent's serializer for Python
registers it. The limits on nesting and size are those of protobuf's own parser, which is safe for values of strangers.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from holdfast.errors import InvalidSchema
from holdfast.schemas.decoding import mismatch
from holdfast.schemas.protobuf_rules import problems
from holdfast.schemas.source import Schema, missing_package
from holdfast.schemas.wire import split_indexes

try:
    from google.protobuf import descriptor_pb2 as pb
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise missing_package(error, "PROTOBUF") from error

from holdfast.schemas.proto_text import parse_proto

_FILE: Final = "schema.proto"  # the name of a schema that is not referred to
_KNOWN: Final = ("any", "api", "duration", "empty", "field_mask", "source_context", "struct", "timestamp", "type",
    "wrappers", "descriptor")  # fmt: skip


class ProtobufSchema:
    """A Protobuf schema: a file, of which each message may be a value. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.files = {name: _file_of(used.text, name) for name, used in schema.with_uses()}
        self.file = _file_of(schema.text, _FILE)
        self.pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()
        try:
            for name in self.files:
                self._add(self.files[name])
            self._add(self.file)
            self.descriptor = self.pool.FindFileByName(_FILE)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidSchema(f"the schema is not a Protobuf schema: {_said(error)}") from None
        if not self.descriptor.message_types_by_name and not self.descriptor.enum_types_by_name:
            raise InvalidSchema("the schema has no message: add one")
        copied = pb.FileDescriptorProto()
        self.descriptor.CopyToProto(copied)  # with all types by their full names
        copied.ClearField("source_code_info")
        self.canonical = base64.b64encode(copied.SerializeToString(deterministic=True)).decode()
        self._classes: dict[tuple[int, ...], Any] = {}

    def _add(self, file: pb.FileDescriptorProto, level: int = 0) -> None:
        if file.name in self._added:
            return
        self._added.add(file.name)
        for name in file.dependency:
            needed = self.files.get(name) or _known_file(name)
            if needed is None:
                raise InvalidSchema(
                    f"the schema imports {name!r}, which is not among its references: register it first"
                )
            self._add(needed, level + 1)
        self.pool.Add(file) if hasattr(self.pool, "Add") else self.pool.AddSerializedFile(file.SerializeToString())

    def check(self, payload: bytes) -> None:
        """Raise SchemaMismatch unless this is a message of the schema, with its path in front."""
        self.message(payload)

    def decode(self, payload: bytes) -> Any:
        """Return the message as a dict of its fields. Raises SchemaMismatch."""
        return _as_dict(self.message(payload))

    def message(self, payload: bytes) -> Any:
        """Return the message as protobuf's object. Raises SchemaMismatch."""
        path, data = split_indexes(payload)
        try:
            return self._class_at(path).FromString(data)
        except (DecodeError, UnicodeError) as error:
            raise mismatch(f"it is not a message of this kind: {error}") from None

    def _class_at(self, path: tuple[int, ...]) -> Any:
        if path not in self._classes:
            level: Any = self.file.message_type
            name = [self.file.package] if self.file.package else []
            for index in path:
                if not 0 <= index < len(level):
                    raise mismatch(f"its schema has no message {'.'.join(map(str, path))}")
                name.append(level[index].name)
                level = level[index].nested_type
            found = self.pool.FindMessageTypeByName(".".join(name))
            self._classes[path] = message_factory.GetMessageClass(found)
        return self._classes[path]

    def problems_reading(self, written: ProtobufSchema) -> list[str]:
        """Return why a program with this schema could not read what was written with another, by Confluent's rules."""
        return problems(self.descriptor, written.descriptor)


def _file_of(text: str, name: str) -> pb.FileDescriptorProto:
    try:
        file = pb.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return parse_proto(text, name)
    if not text:
        raise InvalidSchema("the schema is empty: give a Protobuf schema")
    file.name = name
    return file


def _known_file(name: str) -> pb.FileDescriptorProto | None:
    """Return one of the files that come with protobuf."""
    folder, _, rest = name.rpartition("/")
    if folder != "google/protobuf" or rest.removesuffix(".proto") not in _KNOWN:
        return None
    import importlib

    module = importlib.import_module(f"google.protobuf.{rest.removesuffix('.proto')}_pb2")
    return pb.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def _said(error: Exception) -> str:
    text = str(error).strip("'\"")
    return text.partition("descriptor pool: ")[2] or text[:300]


def _as_dict(message: Any) -> dict[str, Any]:
    """Return all fields by name; None for those that are not set, where that is not the same as their default."""
    made: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            value = getattr(message, field.name)
            entry = field.message_type
            if entry is not None and entry.GetOptions().map_entry:
                of = entry.fields_by_name["value"]
                made[field.name] = {key: _plain(of, value[key]) for key in value}
            else:
                made[field.name] = [_plain(field, each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            made[field.name] = None
        else:
            made[field.name] = _plain(field, getattr(message, field.name))
    return made


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _as_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
