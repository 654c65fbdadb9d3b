"""Between protobuf's messages and the values that HTTP carries: dictionaries, lists, texts, numbers and bytes.

The names are the same on both sides, so nothing is mapped by hand. A field of a request that was not given is left out
where protobuf can tell; otherwise it has its empty value, which means the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeAlias

from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from holdfast.errors import InvalidRequest

_Converter: TypeAlias = Callable[[Any], Any] | None  # None: as it is

MOST_VALUES: Final = 500_000  # of one request
_JSON: Final = "google.protobuf."


def given(message: Any) -> dict[str, Any]:
    """What a request says, by the names of its fields. Raises InvalidRequest if that is too many values."""
    return _Reader().fields(message)


def filled(kind: Any, values: dict[str, Any]) -> Any:
    """A message of this kind with these values; those that it has no field for are left out."""
    try:
        return _made(kind, values, quick=True)
    except (TypeError, ValueError):  # a time, or a value that is new
        return _made(kind, values, quick=False)


def _made(kind: Any, values: dict[str, Any], *, quick: bool) -> Any:
    converters = _converters(kind.DESCRIPTOR, quick)
    return kind(
        **{
            name: value if (convert := converters[name]) is None else convert(value)
            for name, value in values.items()
            if value is not None and name in converters
        }
    )


class _Reader:
    """Reads one request, up to a number of values: a byte or two can be one, and each costs a microsecond."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def fields(self, message: Any) -> dict[str, Any]:
        found = dict(_empty(message.DESCRIPTOR))
        for field, value in message.ListFields():
            self._count(1)
            found[field.name] = self._value(field, value)
        return found

    def _value(self, field: FieldDescriptor, value: Any) -> Any:
        if field.is_repeated:
            self._count(len(value))
            if field.message_type is None:
                return list(value)
            if _is_map(field):
                return dict(value)
            return [self._plain(each) for each in value]
        return value if field.message_type is None else self._plain(value)

    def _plain(self, message: Any) -> Any:
        return self._json(message) if message.DESCRIPTOR.full_name.startswith(_JSON) else self.fields(message)

    def _json(self, message: Any) -> Any:
        """The JSON value in one of protobuf's own messages. A whole number is an integer there, as JSON has it."""
        match message.DESCRIPTOR.name:
            case "Struct":
                self._count(len(message.fields))
                return {name: self._json(value) for name, value in message.fields.items()}
            case "ListValue":
                self._count(len(message.values))
                return [self._json(value) for value in message.values]
        kind = message.WhichOneof("kind")
        value: Any = getattr(message, kind) if kind else None
        match kind:
            case "struct_value" | "list_value":
                return self._json(value)
            case "number_value":
                return int(value) if value.is_integer() else value
            case "null_value":
                return None
        return value

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise InvalidRequest(
                f"the request has more than {MOST_VALUES:,} values, which is the limit; nothing was done. "
                "Send fewer messages at a time"
            )


@lru_cache(maxsize=1_000)
def _empty(descriptor: Descriptor) -> tuple[tuple[str, Any], ...]:
    """The fields for which protobuf cannot tell whether they were given."""
    return tuple(
        (field.name, [] if field.is_repeated else field.default_value)
        for field in descriptor.fields
        if not field.has_presence and not (field.is_repeated and field.message_type and _is_map(field))
    )


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type.GetOptions().map_entry)


@lru_cache(maxsize=1_000)
def _converters(descriptor: Descriptor, quick: bool) -> dict[str, _Converter]:  # noqa: FBT001  for the cache
    """What converts the value of each field. The quick ones leave to protobuf what it can do, and may fail."""
    return {field.name: _converter(field, quick=quick) for field in descriptor.fields}


def _converter(field: FieldDescriptor, *, quick: bool) -> _Converter:
    is_map = field.message_type is not None and _is_map(field)
    one = _one(field.message_type.fields_by_name["value"] if is_map else field, quick=quick)
    if one is None or not field.is_repeated:
        return one
    if is_map:
        return lambda values: {name: one(each) for name, each in values.items()}
    return lambda values: [one(each) for each in values]


def _one(field: FieldDescriptor, *, quick: bool) -> _Converter:
    kind = field.message_type
    if kind is not None:
        if kind.full_name.startswith(_JSON):
            return _MADE[kind.name]
        if quick and not any(_converters(kind, quick).values()):
            return None
        made = message_factory.GetMessageClass(kind)
        return lambda values: _made(made, values, quick=quick)
    if quick or field.type == FieldDescriptor.TYPE_BYTES:
        return None
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _text
    return int if field.cpp_type == FieldDescriptor.CPPTYPE_INT64 else None


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _value(value: Any) -> struct_pb2.Value:
    match value:
        case None:
            return struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)
        case bool():
            return struct_pb2.Value(bool_value=value)
        case int() | float():
            return struct_pb2.Value(number_value=value)
        case dict():
            return struct_pb2.Value(struct_value=_struct(value))
        case list():
            return struct_pb2.Value(list_value=_list(value))
    return struct_pb2.Value(string_value=_text(value))


def _struct(values: dict[str, Any]) -> struct_pb2.Struct:
    return struct_pb2.Struct(fields={str(name): _value(value) for name, value in values.items()})


def _list(values: list[Any]) -> struct_pb2.ListValue:
    return struct_pb2.ListValue(values=list(map(_value, values)))


_MADE: Final[dict[str, Callable[[Any], Any]]] = {"Value": _value, "Struct": _struct, "ListValue": _list}
