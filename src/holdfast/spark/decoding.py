"""Columns of values that were written with a schema: Avro, Protobuf or JSON Schema, decoded without any jar.

The schema says which columns there are. The driver reads it, or asks the registry for it, once; the tasks get it with
the function that decodes. A value that names its schema is read with that one, and then fitted to the columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from holdfast.client.opening import is_address
from holdfast.errors import HoldfastError, InvalidRequest, InvalidSchema, SchemaMismatch
from holdfast.schemas.decoding import SchemaDecoder, compile_schema
from holdfast.schemas.source import Kind, Schema
from holdfast.schemas.wire import split_header, with_indexes

Mode: TypeAlias = Literal["FAILFAST", "PERMISSIVE"]
_MODES: Final = ("FAILFAST", "PERMISSIVE")
_MOST_DECIMAL_DIGITS: Final = 38


def from_avro(
    value: Column | str,
    schema: str | Path | None = None,
    *,
    subject: str | None = None,
    path: str | None = None,
    framed: bool = False,
    mode: Mode = "FAILFAST",
) -> Column:
    """A struct made of Avro values.

        orders.select(from_avro("value", subject="orders-value", path="http://shop:7700").alias("order")).select("order.*")

    Args:
        value: The column with the values.
        schema: The schema with which they were written, as text; a `Path` names a file with it.
        subject: Instead of a schema, a subject of the schema registry. Its newest version says which columns there are,
            and each value is read with the version that it names.
        path: The data folder or the server with that registry.
        framed: Whether values begin with a zero byte and the id of their schema, although the schema is given. They are
            skipped. With `subject`, values always begin with them.
        mode: What a value that does not match does: `FAILFAST` fails the query, `PERMISSIVE` makes it null.

    Returns:
        The column. It is null where the value is, and so are fields that an older version does not have.

    Raises:
        InvalidRequest: Arguments do not fit together, or the schema has a type that no column can have.
        InvalidSchema: The schema is not valid.
        SchemaNotFound: The registry has no such subject.
        NotInstalled: A package is missing: `pip install 'holdfast[spark,schemas]'`.
    """
    return _decoded(value, _Wanted("AVRO", schema, subject, path, framed), mode)


def from_protobuf(
    value: Column | str,
    schema: str | Path | None = None,
    *,
    message: str | None = None,
    subject: str | None = None,
    path: str | None = None,
    framed: bool = False,
    mode: Mode = "FAILFAST",
) -> Column:
    """A struct made of Protobuf messages.

    Args:
        value: The column with the messages.
        schema: The .proto file as text; a `Path` names the file.
        message: The name of the message in it; by default the first.
        subject: Instead of a schema, a subject of the schema registry, as in `from_avro`.
        path: The data folder or the server with that registry.
        framed: Whether messages begin with the id of their schema, although the schema is given.
        mode: What a message that does not match does: `FAILFAST` fails the query, `PERMISSIVE` makes it null.

    Returns:
        The column. A field that is not set is null if Protobuf can tell that from its default.

    Raises:
        InvalidRequest: Arguments do not fit together, or the schema has a type that no column can have.
        InvalidSchema: The schema is not valid, or has no such message.
        SchemaNotFound: The registry has no such subject.
        NotInstalled: A package is missing: `pip install 'holdfast[spark,schemas]'`.
    """
    return _decoded(value, _Wanted("PROTOBUF", schema, subject, path, framed, message), mode)


def from_json_schema(
    value: Column | str,
    schema: str | Path | None = None,
    *,
    subject: str | None = None,
    path: str | None = None,
    framed: bool = False,
    mode: Mode = "FAILFAST",
) -> Column:
    """A struct made of JSON values, each checked against a JSON Schema.

    Args:
        value: The column with the values.
        schema: The JSON Schema as text; a `Path` names a file with it.
        subject: Instead of a schema, a subject of the schema registry, as in `from_avro`.
        path: The data folder or the server with that registry.
        framed: Whether values begin with the id of their schema, although the schema is given.
        mode: What a value that does not match does: `FAILFAST` fails the query, `PERMISSIVE` makes it null.

    Returns:
        The column. What the schema leaves open, such as one of several types, is a string with the JSON of it.

    Raises:
        InvalidRequest: Arguments do not fit together.
        InvalidSchema: The schema is not valid.
        SchemaNotFound: The registry has no such subject.
        NotInstalled: A package is missing: `pip install 'holdfast[spark,schemas]'`.
    """
    return _decoded(value, _Wanted("JSON", schema, subject, path, framed), mode)


class _Wanted(msgspec.Struct, frozen=True):
    """What a caller asked for."""

    kind: Kind
    schema: str | Path | None
    subject: str | None
    path: str | None
    framed: bool
    message: str | None = None


def _decoded(value: Column | str, wanted: _Wanted, mode: str) -> Column:
    if mode not in _MODES:
        raise InvalidRequest(f"mode {mode!r} cannot be used: give one of {', '.join(_MODES)}")
    if (wanted.schema is None) == (wanted.subject is None):
        raise InvalidRequest("say how the values were written: give a schema, or a subject of the schema registry")
    if (wanted.subject is None) != (wanted.path is None):
        raise InvalidRequest("subject and path belong together: give both, or a schema")
    known: dict[int, Schema] = {}
    if wanted.subject is None:
        schema = Schema(wanted.kind, _text_of(wanted.schema))
    else:
        schema, known = _registered(wanted)
    columns, message = columns_of(schema, wanted.message)
    framed = wanted.framed or wanted.subject is not None
    reader = _Reader(schema, known, message, framed=framed, fails=mode == "FAILFAST")
    arrow = to_arrow_type(columns, timezone="UTC")

    # What kind of function it is Spark sees by the hints.
    def decode(values: pa.Array) -> pa.Array:
        return reader.read(values, columns, arrow)

    made: Column = arrow_udf(decode, columns)(value)  # type: ignore[call-overload]
    return made


def _text_of(schema: str | Path | None) -> str:
    if isinstance(schema, Path):
        try:
            return schema.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the schema {schema} cannot be read: {error}") from None
    if not isinstance(schema, str):
        raise InvalidRequest(f"a schema is its text or a Path, not {type(schema).__name__}")
    return schema


def _registered(wanted: _Wanted) -> tuple[Schema, dict[int, Schema]]:
    """The newest schema of a subject, and all of it by their ids."""
    import holdfast

    path, subject = str(wanted.path), str(wanted.subject)
    known: dict[int, Schema] = {}
    with closing(holdfast.connect(path) if is_address(path) else holdfast.open_broker(path)) as broker:
        registry = broker.schemas
        newest = registry.get(subject)
        if newest.kind != wanted.kind:
            raise InvalidRequest(f"the subject {subject} has schemas of the type {newest.kind}, not {wanted.kind}")
        for version in registry.versions(subject, deleted=True):
            number = registry.get(subject, version, deleted=True).id
            known[number] = registry.schema(number)
        return known[newest.id], known


class _Reader:
    """Reads the values of a column, in a task. It is sent there without the schemas in their compiled form."""

    def __init__(
        self, schema: Schema, known: Mapping[int, Schema], message: tuple[int, ...] | None, *, framed: bool, fails: bool
    ) -> None:
        self._schema = schema
        self._known = dict(known)
        self._message = message
        self._framed = framed
        self._fails = fails
        self._decode: Callable[[bytes], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decode": None}

    def read(self, values: pa.Array, columns: DataType, arrow: pa.DataType) -> pa.Array:
        """The values as structs with these columns."""
        if self._decode is None:
            self._decode = self._begin()
        found = [None if value is None else self._one(value, columns) for value in values.to_pylist()]
        try:
            return pa.array(found, arrow)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return pa.array([self._checked(each, arrow) for each in found], arrow)

    def _one(self, value: bytes | str, columns: DataType) -> Any:
        assert self._decode is not None
        try:
            return fitted(self._decode(value.encode() if isinstance(value, str) else value), columns)
        except (SchemaMismatch, ValueError, TypeError, ArithmeticError) as error:
            if self._fails:
                raise SchemaMismatch(_as_words(error)) from None
            return None

    def _checked(self, found: Any, arrow: pa.DataType) -> Any:
        try:
            pa.array([found], arrow)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            if self._fails:
                raise SchemaMismatch(f"a value does not fit into its column: {error}") from None
            return None
        return found

    def _begin(self) -> Callable[[bytes], Any]:
        if self._known:
            return SchemaDecoder(self._find).decode
        decode, prefix = compile_schema(self._schema).decode, b""
        if self._message is not None and not self._framed:
            prefix = with_indexes(self._message, b"")
        if self._framed:
            return lambda value: decode(split_header(value)[1])
        return (lambda value: decode(prefix + value)) if prefix else decode

    def _find(self, number: int) -> Schema:
        if number not in self._known:
            raise SchemaMismatch(
                f"the value names the schema {number}, which is not of the subject, or was registered after the query "
                "was made: make it again"
            )
        return self._known[number]


def _as_words(error: Exception) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"the value does not fit into its columns: {error}"


# Which columns a schema has.


def columns_of(schema: Schema, message: str | None = None) -> tuple[DataType, tuple[int, ...] | None]:
    """The type of the values, and for Protobuf the path of the message. Raises InvalidRequest or InvalidSchema."""
    compiled: Any = compile_schema(schema)
    if schema.kind == "PROTOBUF":
        return _of_protobuf(compiled, message)
    if schema.kind == "AVRO":
        named: dict[str, Any] = {}
        for _, used in schema.with_uses():
            _AvroColumns(named).of(_avro_json(used.text), "", ())
        return _AvroColumns(named).of(_avro_json(schema.text), "", ()), None
    return _json_column(compiled.root, compiled.root, ()), None


def _avro_json(text: str) -> Any:
    return json.loads(text) if text.lstrip()[:1] in ('"', "{", "[") else text.strip()


_AVRO: Final[dict[str, DataType]] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
}
_AVRO_LOGICAL: Final[dict[tuple[str, str], DataType]] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
    ("int", "time-millis"): StringType(),
    ("long", "time-micros"): StringType(),
    ("string", "uuid"): StringType(),
}
_WIDER: Final = (({"int", "long"}, LongType()), ({"float", "double"}, DoubleType()))


class _AvroColumns:
    """Types of Avro as types of columns; `named` are the definitions so far."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named

    def of(self, value: Any, space: str, within: tuple[str, ...]) -> DataType:
        if isinstance(value, list):
            return self._union([each for each in value if each != "null"], space, within)
        if isinstance(value, str):
            return self._by_name(value, space, within)
        kind, logical = value["type"], value.get("logicalType")
        if logical == "decimal":
            return _decimal(value)
        if isinstance(kind, str) and (kind, logical) in _AVRO_LOGICAL:
            return _AVRO_LOGICAL[kind, logical]
        if kind == "array":
            return ArrayType(self.of(value["items"], space, within))
        if kind == "map":
            return MapType(StringType(), self.of(value["values"], space, within))
        if not isinstance(kind, str) or kind not in ("record", "error", "enum", "fixed"):
            return self.of(kind, space, within)
        return self._named_type(kind, value, space, within)

    def _named_type(self, kind: str, value: Mapping[str, Any], space: str, within: tuple[str, ...]) -> DataType:
        name = _full_name(value, space)
        space = name.rpartition(".")[0]
        self._named[name] = (value, space)
        if kind == "enum":
            return StringType()
        if kind == "fixed":
            return StringType() if value.get("logicalType") == "uuid" else BinaryType()
        fields = [StructField(each["name"], self.of(each["type"], space, (*within, name))) for each in value["fields"]]
        return StructType(fields)

    def _by_name(self, name: str, space: str, within: tuple[str, ...]) -> DataType:
        if name in _AVRO:
            return _AVRO[name]
        full = name if "." in name or not space else f"{space}.{name}"
        full = full if full in self._named else name
        if name == "null" or full not in self._named:
            raise InvalidRequest(f"no column can have the type {name}: give the field another one")
        if full in within:
            raise _endless(full)
        definition, defined_in = self._named[full]
        return self.of(definition, defined_in, within)

    def _union(self, branches: list[Any], space: str, within: tuple[str, ...]) -> DataType:
        if len(branches) == 1:
            return self.of(branches[0], space, within)
        for kinds, wider in _WIDER:
            if all(isinstance(each, str) and each in kinds for each in branches) and branches:
                return wider
        raise InvalidRequest(
            "no column can be one of several types, as a union of the schema says: only null and one type can be "
            "decoded, int and long, and float and double"
        )


def _full_name(value: Mapping[str, Any], space: str) -> str:
    name: str = value["name"]
    if "." in name:
        return name
    space = value.get("namespace", space) or ""
    return f"{space}.{name}" if space else name


def _decimal(value: Mapping[str, Any]) -> DataType:
    digits = int(value.get("precision", 0))
    if not 0 < digits <= _MOST_DECIMAL_DIGITS:
        raise InvalidRequest(f"no column can have a decimal of {digits} digits: the most is {_MOST_DECIMAL_DIGITS}")
    return DecimalType(digits, int(value.get("scale", 0)))


def _endless(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} contains itself, and columns have an end: decode it in a function of your own")


def _of_protobuf(compiled: Any, message: str | None) -> tuple[DataType, tuple[int, ...]]:
    found = _messages(compiled.file.message_type, compiled.file.package, ())
    if message is None:
        name, path = next(iter(found.items()), (None, ()))
    else:
        name = next((each for each in found if each == message or each.endswith(f".{message}")), None)
        path = found[name] if name is not None else ()
    if name is None:
        raise InvalidSchema(f"the schema has no message {message}: it has {', '.join(found)}")
    return _of_message(compiled.pool.FindMessageTypeByName(name), ()), path


def _messages(level: Any, package: str, path: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The messages of a file, those within others too, by their full names."""
    found: dict[str, tuple[int, ...]] = {}
    for index, each in enumerate(level):
        name = f"{package}.{each.name}" if package else each.name
        found[name] = (*path, index)
        found |= _messages(each.nested_type, name, (*path, index))
    return found


_STAMP: Final = "google.protobuf.Timestamp"
_PROTOBUF: Final[dict[str, DataType]] = {
    "double": DoubleType(),
    "float": FloatType(),
    "int32": IntegerType(),
    "sint32": IntegerType(),
    "sfixed32": IntegerType(),
    "uint32": LongType(),
    "fixed32": LongType(),
    "int64": LongType(),
    "sint64": LongType(),
    "sfixed64": LongType(),
    "uint64": DecimalType(20, 0),
    "fixed64": DecimalType(20, 0),
    "bool": BooleanType(),
    "string": StringType(),
    "bytes": BinaryType(),
}


def _of_message(descriptor: Any, within: tuple[str, ...]) -> DataType:
    if descriptor.full_name == _STAMP:
        return TimestampType()
    if descriptor.full_name in within:
        raise _endless(descriptor.full_name)
    within = (*within, descriptor.full_name)
    fields = []
    for field in descriptor.fields:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            kind: DataType = MapType(_of_field(key, within), _of_field(value, within))
        else:
            kind = _of_field(field, within)
            kind = ArrayType(kind) if field.is_repeated else kind
        fields.append(StructField(field.name, kind))
    return StructType(fields)


def _of_field(field: Any, within: tuple[str, ...]) -> DataType:
    if field.message_type is not None:
        return _of_message(field.message_type, within)
    if field.enum_type is not None:
        return StringType()
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return _PROTOBUF[name]


_JSON: Final[dict[str, DataType]] = {
    "string": StringType(),
    "integer": LongType(),
    "number": DoubleType(),
    "boolean": BooleanType(),
}


def _json_column(schema: Any, root: Any, within: tuple[str, ...]) -> DataType:
    """The type for values of a JSON Schema: text, the JSON itself, where the schema does not settle it."""
    if not isinstance(schema, dict):
        return StringType()
    place = schema.get("$ref")
    if place is not None:
        found = _at_place(root, place)
        return StringType() if found is None or place in within else _json_column(found, root, (*within, place))
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else "number" if set(kinds) == {"integer", "number"} else None
    if kind == "object" and schema.get("properties"):
        return StructType(
            [StructField(name, _json_column(each, root, within)) for name, each in schema["properties"].items()]
        )
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return MapType(StringType(), _json_column(schema["additionalProperties"], root, within))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return ArrayType(_json_column(schema["items"], root, within))
    return _JSON.get(kind or "", StringType())


def _at_place(root: Any, place: str) -> Any:
    """What a reference within the schema means; None for any other."""
    if not place.startswith("#"):
        return None
    found = root
    for part in place.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


# Values as Arrow takes them.

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def fitted(value: Any, kind: DataType) -> Any:
    """A decoded value in the form of its column. Raises ValueError or TypeError if it cannot have that."""
    if value is None:
        return None
    if isinstance(kind, StructType):
        if not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} instead of fields")
        return {field.name: fitted(value.get(field.name), field.dataType) for field in kind.fields}
    if isinstance(kind, ArrayType):
        return [fitted(each, kind.elementType) for each in value]
    if isinstance(kind, MapType):
        return [(fitted(key, kind.keyType), fitted(each, kind.valueType)) for key, each in value.items()]
    make = _FIT.get(type(kind))
    return value if make is None else make(value)


def _moment(value: Any) -> Any:
    """An instant; one of Protobuf has seconds and nanoseconds."""
    if not isinstance(value, Mapping):
        return value
    return _EPOCH + timedelta(seconds=value["seconds"], microseconds=value["nanos"] // 1000)


def _whole(value: Any) -> Any:
    """A whole number; JSON may write it as 1.0."""
    return int(value) if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return msgspec.json.encode(value).decode()


_FIT: Final[dict[type[DataType], Callable[[Any], Any]]] = {
    StringType: _text,
    DoubleType: float,
    FloatType: float,
    DecimalType: Decimal,
    TimestampType: _moment,
    LongType: _whole,
}
