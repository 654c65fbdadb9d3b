"""JSON Schema: values are checked by jsonschema-rs, in bounds.

jsonschema-rs is fast, but a schema and a value together can make it work for hours, or end the process:

- Patterns are matched by an engine whose time is linear; those it does not know (look-around, back-references) are
  refused, and so are large ones. What is matched against patterns is limited in bytes.
- A reference is only looked up among the schemas that are registered with this one. Nothing is fetched.
- References and combinations can multiply: thirty definitions that each name the one before twice are applied 2³⁰
  times. So it is counted beforehand how often the parts of a schema apply to one value, at each level of nesting
  (`json_work`), and a value is checked only if that, times its parts, is within bounds.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.errors import InvalidSchema, SchemaMismatch
from holdfast.schemas.decoding import mismatch
from holdfast.schemas.json_rules import problems
from holdfast.schemas.json_work import JsonWork, Resources
from holdfast.schemas.source import MOST_DEPTH, Schema, missing_package, parsed_json

try:
    import jsonschema_rs
except ImportError as error:
    raise missing_package(error, "JSON") from error

_BASE: Final = "http://schemas.invalid/"  # where a schema without an id is, for references relative to it
_MOST_STEPS: Final = 2_000_000  # parts of the schema, each applied to a part of the value
_MOST_PATTERN_BYTES: Final = 32 * 1024  # of a compiled pattern
_MOST_MATCHED_BYTES: Final = 1 << 20  # of a value, times the patterns of its schema
_decode = msgspec.json.Decoder().decode


class JsonSchema:
    """A JSON Schema. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.root = _root_of(schema.text, "the schema")
        self.canonical = msgspec.json.encode(self.root, order="sorted").decode()
        named = {name: _root_of(used.text, f"the schema {name}") for name, used in schema.with_uses()}
        self.resources = Resources(self.root, named, _BASE)
        self._work = JsonWork(self.resources)
        self._validator = self._compiled()

    def _compiled(self) -> jsonschema_rs.Validator:
        options: dict[str, Any] = {}
        if self.resources.named:
            options["registry"] = jsonschema_rs.Registry(list(self.resources.named.items()), retriever=_refuse)
        try:
            return jsonschema_rs.validator_for(
                self.root,
                retriever=_refuse,
                base_uri=_BASE,
                pattern_options=jsonschema_rs.RegexOptions(
                    size_limit=_MOST_PATTERN_BYTES, dfa_size_limit=_MOST_PATTERN_BYTES
                ),
                **options,
            )
        except jsonschema_rs.ValidationError as error:
            raise InvalidSchema(f"the schema is not a JSON Schema: {_said(error)}") from None
        except (jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
            raise InvalidSchema(f"the schema is not a JSON Schema: {str(error)[:300]}") from None

    def check(self, payload: bytes) -> None:
        """Raise SchemaMismatch unless this is a value of the schema, in JSON."""
        self.decode(payload)

    def decode(self, payload: bytes) -> Any:
        """Return the value. Raises SchemaMismatch."""
        try:
            value = _decode(payload)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise mismatch(f"it is not JSON: {error}") from None
        except RecursionError:
            raise mismatch(f"it is nested deeper than {MOST_DEPTH} levels") from None
        self._check_bounds(payload, value)
        try:
            if not self._validator.is_valid(value):
                raise _why(self._validator, value)
        except ValueError as error:  # of numbers that have no end, and the like
            raise mismatch(error) from None
        return value

    def _check_bounds(self, payload: bytes, value: Any) -> None:
        work = self._work
        if work.patterns * len(payload) > _MOST_MATCHED_BYTES:
            raise mismatch(
                f"it has {len(payload)} bytes, and its schema has {work.patterns} patterns; the product is limited to "
                f"{_MOST_MATCHED_BYTES}"
            )
        opened = payload.count(b"{") + payload.count(b"[")
        parts = 1 + opened + payload.count(b",")
        if opened <= MOST_DEPTH and parts * work.most_to(opened) <= _MOST_STEPS:
            return
        steps = work.steps_for(value)
        if steps is None:
            raise mismatch(f"it is nested deeper than {work.levels} levels, as far as its schema can be checked")
        if steps > _MOST_STEPS:
            raise mismatch(
                f"it would take {steps} steps to check it, the limit is {_MOST_STEPS}: parts of its schema apply to "
                "the same parts of the value again and again"
            )

    def problems_reading(self, written: JsonSchema) -> list[str]:
        """Return why this schema does not accept all that another one accepts, by Confluent's rules."""
        return problems(self, written)


def _root_of(text: str, what: str) -> Any:
    root = parsed_json(text, what)
    if not isinstance(root, dict | bool):
        raise InvalidSchema(f"{what} is not a JSON Schema: it must be an object, true or false")
    return root


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not among the schema's references, and nothing is fetched: register it, and name it")


def _said(error: jsonschema_rs.ValidationError) -> str:
    place = "/".join(map(str, error.instance_path))
    return f"{error.message[:300]}{f', at {place}' if place else ''}"


def _why(validator: jsonschema_rs.Validator, value: Any) -> SchemaMismatch:
    """Return the error that names the part that does not fit."""
    error = next(iter(validator.iter_errors(value)), None)
    if error is None:
        return mismatch("it is not valid")
    place = ".".join(map(str, error.instance_path))
    return mismatch(f"field {place}: {error.message}" if place else error.message)
