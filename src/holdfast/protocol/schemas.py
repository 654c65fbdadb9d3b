"""What the registry of schemas takes and answers: the API of Confluent's registry, with its names."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta

from holdfast.api.schemas import SchemaRequest
from holdfast.errors import (
    Conflict,
    Forbidden,
    HoldfastError,
    IncompatibleSchema,
    InvalidRequest,
    InvalidSchema,
    SchemaNotFound,
    Unauthenticated,
)
from holdfast.protocol.media import Fault
from holdfast.protocol.messages import ServerValue
from holdfast.schemas.registry import Level, SchemaVersion
from holdfast.schemas.source import Kind, Reference

REGISTRY: Final = "/schema-registry"
REGISTRY_JSON: Final = "application/vnd.schemaregistry.v1+json"

# The codes of Confluent's registry.
_NOT_FOUND: Final = {
    "subject": 40401, "version": 40402, "schema": 40403, "deleted subject": 40404, "undeleted subject": 40405,
    "deleted version": 40406, "undeleted version": 40407, "level": 40408,
}  # fmt: skip
_INVALID: Final = {"version ": 42202, "compatibility level ": 42203}


class SchemaReference(ServerValue, kw_only=True):
    """A registered schema that a schema uses, by the name that it uses for it."""

    name: str
    subject: str
    version: int


class SchemaBody(ServerValue, kw_only=True, rename="camel"):
    """A schema: its text, its type (Avro by default), and the registered schemas that it uses."""

    schema: str
    schema_type: str = "AVRO"
    references: list[SchemaReference] | None = None
    metadata: Any = None
    rule_set: Any = None


class VersionAnswer(ServerValue, kw_only=True, rename="camel"):
    """A version of a subject: its number, the id of its schema, and the schema."""

    subject: str
    version: int
    id: int
    schema: str
    schema_type: Kind = "AVRO"
    references: tuple[SchemaReference, ...] = ()
    deleted: bool = False


class SubjectVersion(ServerValue, kw_only=True):
    """A subject and the number of one of its versions."""

    subject: str
    version: int


class Compatible(ServerValue, kw_only=True):
    """Whether a schema is compatible; with `verbose`, what speaks against it."""

    is_compatible: bool
    messages: tuple[str, ...] = ()


class LevelAnswer(ServerValue, kw_only=True, rename="camel"):
    """The compatibility level of a subject, or of the registry."""

    compatibility_level: Level


class LevelSet(ServerValue, kw_only=True):
    """The compatibility level that was set, or is to be set."""

    compatibility: str


class RegistryMode(ServerValue, kw_only=True):
    """What may be done: always READWRITE."""

    mode: str


class DeletedQuery(ServerValue, kw_only=True):
    """Whether to include what was deleted, though not permanently; only subjects that begin with a text."""

    deleted: bool = False
    subject_prefix: str = msgspec.field(name="subjectPrefix", default="")
    normalize: bool = False
    format: Annotated[str, Meta(max_length=100)] = ""
    fetch_max_id: bool = msgspec.field(name="fetchMaxId", default=False)
    subject: Annotated[str, Meta(max_length=255)] = ""


class PermanentQuery(ServerValue, kw_only=True):
    """Whether to remove for good what is deleted already."""

    permanent: bool = False


class VerboseQuery(ServerValue, kw_only=True):
    """Whether to say what speaks against a schema."""

    verbose: bool = False
    normalize: bool = False


class LevelQuery(ServerValue, kw_only=True):
    """Whether the level of the registry is an answer if the subject has none of its own."""

    default_to_global: bool = msgspec.field(name="defaultToGlobal", default=False)


class RegistryFault(ServerValue, kw_only=True):
    """An error as Confluent's registry says it, and as all other calls say it."""

    error_code: int
    message: str
    error: Fault


def registry_error(error: HoldfastError | None, status: int) -> tuple[int, int]:
    """Return the status and the code for an error of the registry."""
    if isinstance(error, SchemaNotFound):
        return 404, _NOT_FOUND.get(error.reason, 40403)
    if isinstance(error, IncompatibleSchema):
        return 409, 409
    if isinstance(error, InvalidSchema):
        return 422, 42201
    if isinstance(error, Conflict):
        return 422, 42206
    if type(error) is InvalidRequest:
        found = (code for start, code in _INVALID.items() if str(error).startswith(start))
        return 422, next(found, 42201)
    if isinstance(error, Unauthenticated | Forbidden):
        return status, status * 100 + 1
    return status, status if status < 500 else 50001


def registry_path(*parts: str, **query: Any) -> str:
    """Return a path of the registry; a query of what is not False."""
    given = "&".join(f"{name}={'true' if value is True else value}" for name, value in query.items() if value)
    path = "/".join([REGISTRY, *(quote(part, safe="") for part in parts)])
    return f"{path}?{given}" if given else path


def schema_body(request: SchemaRequest) -> SchemaBody:
    """Return a schema as it is sent."""
    references = [
        SchemaReference(name=each.name, subject=each.subject, version=each.version) for each in request.references
    ]
    return SchemaBody(schema=request.text, schema_type=request.kind, references=references or None)


def version_answer(version: SchemaVersion) -> VersionAnswer:
    """Return a version as it is sent."""
    return VersionAnswer(
        subject=version.subject,
        version=version.version,
        id=version.id,
        schema=version.text,
        schema_type=version.kind,
        references=tuple(
            SchemaReference(name=r.name, subject=r.subject, version=r.version) for r in version.references
        ),
        deleted=version.deleted,
    )


def version_of(answer: VersionAnswer) -> SchemaVersion:
    """Return a version as it was sent."""
    references = tuple(Reference(each.name, each.subject, each.version) for each in answer.references)
    return SchemaVersion(
        answer.subject, answer.version, answer.id, answer.schema_type, answer.schema, references, answer.deleted
    )
