"""The arguments of calls about schemas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast.errors import InvalidRequest
from holdfast.schemas.registry import VersionNumber, check_level, check_subject, check_version
from holdfast.schemas.source import Kind, Reference, check_kind


class SchemaRequest(NamedTuple):
    """A schema for a subject."""

    subject: str
    kind: Kind
    text: str
    references: tuple[Reference, ...]


def schema_request(subject: object, text: object, kind: object, references: object) -> SchemaRequest:
    """Check a schema that is to be registered or looked for; raises InvalidRequest."""
    if not isinstance(text, str):
        raise InvalidRequest(f"a schema must be a str, not {type(text).__name__}: pass its text")
    return SchemaRequest(check_subject(subject), check_kind(kind), text, references_of(references))


def references_of(references: Any) -> tuple[Reference, ...]:
    """Check references; raises InvalidRequest."""
    if isinstance(references, str) or not isinstance(references, Iterable):
        raise InvalidRequest("references must be a list of Reference(name, subject, version)")
    found = tuple(references)
    for each in found:
        if not isinstance(each, Reference):
            raise InvalidRequest(f"references must be a list of Reference(name, subject, version), not of {each!r}")
    return found


def one_version(version: object) -> VersionNumber:
    """Check the number of a version; raises InvalidRequest."""
    return check_version(version)


def schema_id(number: object) -> int:
    """Check the id of a schema; raises InvalidRequest."""
    if type(number) is not int or not 0 < number < 1 << 32:
        raise InvalidRequest(f"{number!r} is not the id of a schema: give the number that a message carries")
    return number


__all__ = [
    "SchemaRequest",
    "check_level",
    "check_subject",
    "one_version",
    "references_of",
    "schema_id",
    "schema_request",
]
