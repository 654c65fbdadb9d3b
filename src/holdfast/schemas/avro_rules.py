"""When a reader with one Avro schema can read what was written with another: Avro's rules of schema resolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.schemas.avro import AvroField, AvroType

# What a reader's type can read besides itself.
_PROMOTED: Final = {
    "long": {"int"},
    "float": {"int", "long"},
    "double": {"int", "long", "float"},
    "bytes": {"string"},
    "string": {"bytes"},
}


def problems(reader: AvroType, writer: AvroType) -> list[str]:
    """Return why values of the writer's type cannot be read as the reader's, each with its place; [] if they can."""
    return _Resolution().problems(reader, writer, "")


class _Resolution:
    """Compares types once: a pair that is met again, in a record that contains itself, counts as fine there."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[str]] = {}

    def problems(self, reader: AvroType, writer: AvroType, place: str) -> list[str]:
        pair = (id(reader), id(writer))
        if pair not in self._known:
            self._known[pair] = []
            self._known[pair] = self._compared(reader, writer, place)
        return self._known[pair]

    def _compared(self, reader: AvroType, writer: AvroType, place: str) -> list[str]:
        if writer.kind == "union":
            return [
                f"{_at(place)}: the branch {branch} of the union cannot be read"
                for branch in writer.of
                if not self._fits(reader, branch, place)
            ]
        if reader.kind == "union":
            if any(self._fits(branch, writer, place) for branch in reader.of):
                return []
            return [f"{_at(place)}: the union has no branch that can read {writer}"]
        if reader.kind != writer.kind:
            if writer.kind in _PROMOTED.get(reader.kind, ()):
                return []
            return [f"{_at(place)}: {writer} cannot be read as {reader}"]
        if reader.kind in ("array", "map"):
            return self.problems(reader.of[0], writer.of[0], place + "[]")
        if reader.kind in ("record", "enum", "fixed"):
            return self._named(reader, writer, place)
        return []

    def _fits(self, reader: AvroType, writer: AvroType, place: str) -> bool:
        return not self.problems(reader, writer, place)

    def _named(self, reader: AvroType, writer: AvroType, place: str) -> list[str]:
        if reader.short_name != writer.short_name and writer.name not in reader.aliases:
            return [f"{_at(place)}: the {reader.kind} is called {reader.name}, and was called {writer.name}"]
        if reader.kind == "fixed":
            same = reader.size == writer.size
            return [] if same else [f"{_at(place)}: {reader.name} has {reader.size} bytes, and had {writer.size}"]
        if reader.kind == "enum":
            missing = [symbol for symbol in writer.symbols if symbol not in reader.symbols]
            if not missing or reader.default in reader.symbols:
                return []
            return [f"{_at(place)}: the enum {reader.name} has no default and lacks {', '.join(missing)}"]
        found: list[str] = []
        written = {field.name: field for field in writer.fields}
        for field in reader.fields:
            found += self._field(field, written, f"{place}.{field.name}".lstrip("."))
        return found

    def _field(self, field: AvroField, written: dict[str, AvroField], place: str) -> list[str]:
        other = next((written[name] for name in (field.name, *field.aliases) if name in written), None)
        if other is not None:
            return self.problems(field.type, other.type, place)
        if field.has_default:
            return []
        return [f"field {place} has no default, and is missing in what was written"]


def _at(place: str) -> str:
    return f"field {place}" if place else "the schema"
