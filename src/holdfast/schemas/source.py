"""Schemas as they are written down: their text, its format, and the schemas it refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import msgspec

from holdfast.errors import InvalidRequest, InvalidSchema, NotInstalled

Kind: TypeAlias = Literal["AVRO", "JSON", "PROTOBUF"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

MOST_TEXT_BYTES: Final = 512 * 1024  # of a schema with all that it refers to
MOST_REFERENCES: Final = 200
MOST_DEPTH: Final = 64  # of a schema's text, and of a value that is checked


class Reference(msgspec.Struct, frozen=True):
    """A schema that another one uses: the name by which it does, and where it is registered."""

    name: str
    subject: str
    version: int


class Schema(msgspec.Struct, frozen=True):
    """A schema with everything that it needs, so that it can be sent to where it is used."""

    kind: Kind
    text: str
    uses: tuple[tuple[str, Schema], ...] = ()  # what it refers to, by the name that it uses

    def with_uses(self) -> Iterator[tuple[str, Schema]]:
        """Return all schemas that it refers to, with theirs, those that others need first, each once."""
        yield from _used(self, set())


def _used(schema: Schema, seen: set[str]) -> Iterator[tuple[str, Schema]]:
    for name, each in schema.uses:
        if name not in seen:
            seen.add(name)
            yield from _used(each, seen)
            yield name, each


class CompiledSchema(Protocol):
    """A schema that is ready for use."""

    schema: Schema
    canonical: str  # the same for schemas that differ in spaces, order and comments only

    def check(self, payload: bytes) -> None:
        """Raise SchemaMismatch unless this is a value of the schema; bounded in time and memory."""

    def decode(self, payload: bytes) -> Any:
        """Return the value. Raises SchemaMismatch."""

    def problems_reading(self, written: Any) -> list[str]:
        """Return why a program with this schema could not read what was written with another of the same kind."""


def check_size(schema: Schema) -> None:
    """Refuse a schema that is too large, or refers to too many. Raises InvalidSchema."""
    size, count = len(schema.text), 0
    for _, each in schema.with_uses():
        size, count = size + len(each.text), count + 1
        if each.kind != schema.kind:
            raise InvalidSchema(f"a schema of the type {schema.kind} cannot refer to one of the type {each.kind}")
    if size > MOST_TEXT_BYTES or count > MOST_REFERENCES:
        raise InvalidSchema(
            f"the schema has {size} characters with the {count} that it refers to; the limit is {MOST_TEXT_BYTES} "
            f"characters and {MOST_REFERENCES} schemas. Split it"
        )


def check_kind(kind: object) -> Kind:
    """Return the format of a schema, whatever the case of its letters; raises InvalidRequest."""
    found = kind.upper() if isinstance(kind, str) else kind
    for known in KINDS:
        if found == known:
            return known
    raise InvalidRequest(f"schema type {kind!r} cannot be used: give one of {', '.join(KINDS)}")


def missing_package(error: ImportError, kind: Kind) -> NotInstalled:
    """Return the error for a library that is not installed."""
    return NotInstalled(
        f"{kind} schemas need the package {(error.name or '').partition('.')[0]}, which is not installed: run pip "
        "install 'holdfast[schemas]'"
    )


def is_too_deep(value: Any, most: int = MOST_DEPTH) -> bool:
    """Whether a value of lists and dicts is nested too deeply, found without recursion."""
    level = [value]
    for _ in range(most + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
        if not below:
            return False
        level = below
    return True


def parsed_json(text: str, what: str) -> Any:
    """Return the JSON of a schema; raises InvalidSchema."""
    try:
        value = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidSchema(f"{what} is not JSON: {error}") from None
    if is_too_deep(value):
        raise InvalidSchema(f"{what} is nested deeper than {MOST_DEPTH} levels: give parts of it names of their own")
    return value
