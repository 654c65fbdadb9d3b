"""Avro: schemas as trees, values by fastavro.

fastavro reads values in C, without bounds: a value that is nested deeply enough ends the process, and an array of a
trillion nulls takes ten bytes. So what has no end is found before:

- A record that contains itself without a choice has no values; its schema is refused.
- Items of arrays without bytes of their own (null, records of nulls) are refused, and so are records that unfold to
  many such fields. Then a value has at most as many parts as it has bytes, times a constant.
- The values of a schema that refers to itself are walked first, to see how deep they are.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidSchema, SchemaMismatch
from holdfast.schemas.avro_rules import problems
from holdfast.schemas.decoding import mismatch
from holdfast.schemas.source import Schema, missing_package, parsed_json

try:
    import fastavro
except ImportError as error:
    raise missing_package(error, "AVRO") from error

_PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_MOST_LEVELS: Final = 200  # of a value whose schema refers to itself
_MOST_WITHOUT_BYTES: Final = 1_000
_WITHOUT_DEFAULT: Final = object()


class AvroField(msgspec.Struct):
    """A field of a record."""

    name: str
    type: AvroType
    has_default: bool
    aliases: tuple[str, ...] = ()


class AvroType(msgspec.Struct, eq=False):
    """A type, with those it consists of. A record that refers to itself is in its own tree."""

    kind: str
    name: str = ""  # of records, enums and fixed: with the namespace
    aliases: tuple[str, ...] = ()
    fields: list[AvroField] = []
    symbols: tuple[str, ...] = ()
    default: str | None = None  # of an enum
    size: int = 0
    of: list[AvroType] = []  # items of an array, values of a map, branches of a union

    @property
    def short_name(self) -> str:
        """The name without the namespace."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return self.name or self.kind


class AvroSchema:
    """An Avro schema. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        names: dict[str, AvroType] = {}
        known: dict[str, Any] = {}
        for name, used in schema.with_uses():
            _parse(used.text, names, known, f"the schema {name}, which it refers to,")
        self.type, self._parsed, value = _parse(schema.text, names, known, "the schema")
        self.canonical = msgspec.json.encode(value, order="sorted").decode()
        self._is_recursive = _check_bounds(self.type)

    def check(self, payload: bytes) -> None:
        """Raise SchemaMismatch unless this is a value of the schema."""
        self.decode(payload)

    def decode(self, payload: bytes) -> Any:
        """Return the value. Raises SchemaMismatch."""
        if self._is_recursive:
            _Walk(payload).over(self.type, 0)
        source = io.BytesIO(payload)
        try:
            value = fastavro.schemaless_reader(source, self._parsed, None)
        except RecursionError:
            raise mismatch("it is nested too deeply") from None
        except Exception as error:  # whatever a malformed value leads to
            raise mismatch(f"{type(error).__name__} {error}") from None
        if source.tell() != len(payload):
            raise mismatch(f"{len(payload) - source.tell()} bytes are left after it")
        return value

    def problems_reading(self, written: AvroSchema) -> list[str]:
        """Return why a reader with this schema could not read what was written with another."""
        return problems(self.type, written.type)


def _parse(text: str, names: dict[str, AvroType], known: dict[str, Any], what: str) -> tuple[AvroType, Any, Any]:
    value = parsed_json(text if text.lstrip()[:1] in ('"', "{", "[") else f'"{text.strip()}"', what)
    try:
        parsed = fastavro.parse_schema(value, known)
        return _Tree(names).of(value, ""), parsed, value
    except InvalidSchema:
        raise
    except RecursionError:
        raise InvalidSchema(f"{what} is nested too deeply") from None
    except Exception as error:  # fastavro has several kinds, and passes on those of Python
        raise InvalidSchema(f"{what} is not an Avro schema: {_said(error)}") from None


def _said(error: Exception) -> str:
    text = f"{error}"[:300]
    return f"there is no type {text}" if type(error).__name__ == "UnknownType" else text


class _Tree:
    """Builds types from JSON that fastavro has accepted."""

    def __init__(self, names: dict[str, AvroType]) -> None:
        self._names = names

    def of(self, value: Any, space: str) -> AvroType:
        if isinstance(value, str):
            return AvroType(value) if value in _PRIMITIVES else self._named(value, space)
        if isinstance(value, list):
            return AvroType("union", of=[self.of(each, space) for each in value])
        kind = value["type"]
        if not isinstance(kind, str):
            return self.of(kind, space)
        if kind == "array":
            return AvroType(kind, of=[self.of(value["items"], space)])
        if kind == "map":
            return AvroType(kind, of=[self.of(value["values"], space)])
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition("record" if kind == "error" else kind, value, space)
        return self.of(kind, space)

    def _named(self, name: str, space: str) -> AvroType:
        full = name if "." in name or not space else f"{space}.{name}"
        found = self._names.get(full) or self._names.get(name)
        if found is None:
            raise InvalidSchema(f"the schema is not an Avro schema: there is no type {name}")
        return found

    def _definition(self, kind: str, value: Mapping[str, Any], space: str) -> AvroType:
        name: str = value["name"]
        if "." not in name:
            space = value.get("namespace", space) or ""
            name = f"{space}.{name}" if space else name
        space = name.rpartition(".")[0]
        made = self._names[name] = AvroType(
            kind,
            name=name,
            aliases=tuple(_full(each, space) for each in value.get("aliases") or ()),
            symbols=tuple(value.get("symbols") or ()),
            default=value.get("default") if kind == "enum" else None,
            size=value.get("size") or 0,
        )
        made.fields = [
            AvroField(
                each["name"],
                self.of(each["type"], space),
                each.get("default", _WITHOUT_DEFAULT) is not _WITHOUT_DEFAULT,
                tuple(each.get("aliases") or ()),
            )
            for each in value.get("fields") or ()
        ]
        return made


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _check_bounds(root: AvroType) -> bool:
    """Refuse what has values without end, or far more parts than bytes; returns whether a type is part of itself."""
    bounds = _Bounds()
    bounds.check(root, 0)
    return bounds.is_recursive


class _Bounds:
    """Looks at every type once, and at a record's fields before the record."""

    def __init__(self) -> None:
        self.is_recursive = False
        self._open: dict[int, int] = {}  # the types on the way here, and how many choices and lists were passed then
        self._done: dict[int, tuple[int, int]] = {}  # least bytes of a value, and parts of it without bytes
        self._choices = 0

    def check(self, each: AvroType, level: int) -> tuple[int, int]:
        if level > _MOST_LEVELS:
            raise InvalidSchema(f"the schema is nested deeper than {_MOST_LEVELS} levels")
        if id(each) in self._done:
            return self._done[id(each)]
        if id(each) in self._open:
            self.is_recursive = True
            if self._open[id(each)] == self._choices:
                raise InvalidSchema(
                    f"the record {each.name} has no values, since it contains itself: make the field a union with null"
                )
            return 1, 0  # the choice on the way takes a byte
        self._open[id(each)] = self._choices
        found = self._done[id(each)] = self._measure(each, level + 1)
        del self._open[id(each)]
        return found

    def _measure(self, each: AvroType, level: int) -> tuple[int, int]:
        if each.kind == "record":
            fields = [self.check(field.type, level) for field in each.fields]
            least = sum(size for size, _ in fields)
            empty = sum(count for _, count in fields) + (least == 0)
            if empty > _MOST_WITHOUT_BYTES:
                raise InvalidSchema(
                    f"the record {each.name} has {empty} fields without bytes (null, or records of nothing else); the "
                    f"limit is {_MOST_WITHOUT_BYTES}"
                )
            return least, empty
        if each.of:
            self._choices += 1
            parts = [self.check(part, level) for part in each.of]
            self._choices -= 1
            if each.kind == "array" and parts[0][0] == 0:
                raise InvalidSchema(
                    "an array of values without bytes (null, or records of nothing else) cannot be checked: a few "
                    "bytes could hold any number of them. Give its items another type"
                )
            return 1, 0
        least = each.size if each.kind == "fixed" else 0 if each.kind == "null" else 1
        return least, 0 if least else 1


class _Walk:
    """Passes over a value, to see how deep it is, and that its parts end within it. Raises SchemaMismatch."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def over(self, each: AvroType, level: int) -> None:
        if level > _MOST_LEVELS:
            raise mismatch(f"it is nested deeper than {_MOST_LEVELS} levels")
        match each.kind:
            case "int" | "long" | "enum":
                self._number()
            case "boolean":
                self._skip(1)
            case "float" | "double" | "fixed":
                self._skip({"float": 4, "double": 8}.get(each.kind, each.size))
            case "bytes" | "string":
                self._skip(self._number())
            case "record":
                for field in each.fields:
                    self.over(field.type, level + 1)
            case "union":
                branch = self._number()
                if not 0 <= branch < len(each.of):
                    raise mismatch(f"a union has no branch {branch}")
                self.over(each.of[branch], level + 1)
            case "array" | "map":
                self._blocks(each, level)

    def _blocks(self, each: AvroType, level: int) -> None:
        while count := self._number():
            if count < 0:  # then the size of the block follows
                count = -count
                self._number()
            for _ in range(count):
                if each.kind == "map":
                    self._skip(self._number())
                self.over(each.of[0], level + 1)

    def _number(self) -> int:
        number = shift = 0
        while shift < 70:
            if self._at >= len(self._data):
                raise _cut()
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7
        raise mismatch("a number has too many bytes")

    def _skip(self, count: int) -> None:
        self._at += count
        if count < 0 or self._at > len(self._data):
            raise _cut()


def _cut() -> SchemaMismatch:
    return mismatch("it ends too early")
