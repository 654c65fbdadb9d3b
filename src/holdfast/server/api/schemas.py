"""The registry of schemas, with the API of Confluent's registry below /schema-registry.

A subject belongs to the topic of its name without -value or -key: whoever may read, consume from or publish to that
topic may see its schemas, whoever may publish to it may register them, and admins of it may delete them and set levels.
"""

from __future__ import annotations

import asyncio

import msgspec

from holdfast.api.schemas import SchemaRequest, schema_request
from holdfast.errors import Forbidden, InvalidRequest, SchemaNotFound
from holdfast.protocol.schemas import (
    REGISTRY,
    REGISTRY_JSON,
    Compatible,
    DeletedQuery,
    LevelAnswer,
    LevelQuery,
    LevelSet,
    PermanentQuery,
    RegistryMode,
    SchemaBody,
    SubjectVersion,
    VerboseQuery,
    VersionAnswer,
    version_answer,
)
from holdfast.schemas.registry import (
    SchemaVersion,
    VersionNumber,
    check_level,
    check_subject,
    check_version,
    subject_topic,
)
from holdfast.schemas.source import KINDS, Reference
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes
from holdfast.server.service import Call

routes = Routes("schemas")

_SUBJECT = f"{REGISTRY}/subjects/{{subject}}"
_VERSIONS = f"{_SUBJECT}/versions"
_VERSION = f"{_VERSIONS}/{{version}}"
_CONFIG = f"{REGISTRY}/config"
_CHECK = f"{REGISTRY}/compatibility/subjects/{{subject}}/versions"
_ID = f"{REGISTRY}/schemas/ids/{{id}}"


def sees(call: Call, subject: str) -> bool:
    """Whether the caller may see the schemas of a subject."""
    topic = subject_topic(subject)
    return any(call.principal.may(action, topic) for action in ("read", "consume", "publish"))


async def _may_see(call: Call) -> None:
    if not sees(call, _subject(call)):
        raise Forbidden(
            f"{call.principal.name} may not see the subject {_subject(call)}: it needs the right to read, consume from "
            f"or publish to the topic {subject_topic(_subject(call))}"
        )


async def _may_publish(call: Call) -> None:
    call.principal.check("publish", subject_topic(_subject(call)))
    for each in _request(call).references:
        if not sees(call, each.subject):
            raise Forbidden(f"{call.principal.name} may not see the subject {each.subject}, which the schema refers to")


async def _may_compare(call: Call) -> None:
    await _may_see(call)
    for each in _request(call).references:
        if not sees(call, each.subject):
            raise Forbidden(f"{call.principal.name} may not see the subject {each.subject}, which the schema refers to")


async def _may_change(call: Call) -> None:
    call.principal.check("admin", subject_topic(_subject(call)))


@routes.add("GET", f"{REGISTRY}/subjects", action="read", scope="any", instead=True, query=DeletedQuery)
async def list_subjects(call: Call) -> list[str]:
    """List the subjects that you may see."""
    found = await call.service.schemas.subjects(deleted=call.query.deleted)
    return [each for each in found if sees(call, each) and each.startswith(call.query.subject_prefix)]


@routes.add(
    "GET",
    _VERSIONS,
    action="read",
    scope="any",
    instead=True,
    query=DeletedQuery,
    allowed=_may_see,
    errors=("schema_not_found",),
)
async def list_versions(call: Call) -> list[int]:
    """List the numbers of a subject's versions."""
    return await call.service.schemas.versions(_subject(call), deleted=call.query.deleted)


@routes.add(
    "GET",
    _VERSION,
    action="read",
    scope="any",
    instead=True,
    query=DeletedQuery,
    allowed=_may_see,
    errors=("schema_not_found",),
)
async def get_version(call: Call) -> VersionAnswer:
    """Return a version of a subject, by its number or as `latest`."""
    found = await call.service.schemas.version(_subject(call), _number(call), deleted=call.query.deleted)
    return version_answer(await _as_asked(call, found))


@routes.add(
    "GET",
    f"{_VERSION}/schema",
    action="read",
    scope="any",
    instead=True,
    query=DeletedQuery,
    allowed=_may_see,
    errors=("schema_not_found",),
)
async def get_version_schema(call: Call) -> Response:
    """Return the text of a version of a subject."""
    found = await call.service.schemas.version(_subject(call), _number(call), deleted=call.query.deleted)
    return Response(200, found.text.encode(), REGISTRY_JSON)


@routes.add(
    "GET",
    f"{_VERSION}/referencedby",
    action="read",
    scope="any",
    instead=True,
    allowed=_may_see,
    errors=("schema_not_found",),
)
async def get_users(call: Call) -> list[int]:
    """List the ids of the schemas that refer to a version."""
    subject = _subject(call)
    found = await call.service.schemas.version(subject, _number(call), deleted=True)
    users = call.service.engine.body_checks.schemas().users_of(subject, found.version)
    return sorted({each.id for each in users if not each.deleted and sees(call, each.subject)})


@routes.add(
    "POST",
    _VERSIONS,
    action="publish",
    scope="any",
    body=SchemaBody,
    query=VerboseQuery,
    allowed=_may_publish,
    act=True,
    errors=("invalid_schema", "incompatible_schema", "not_installed", "queue_full"),
)
async def register_schema(call: Call) -> VersionAnswer:
    """Register a schema as the newest version of a subject, unless it is registered there already."""
    return version_answer(await call.service.schemas.register(_request(call)))


@routes.add(
    "POST",
    _SUBJECT,
    action="read",
    scope="any",
    instead=True,
    body=SchemaBody,
    query=DeletedQuery,
    allowed=_may_compare,
    errors=("schema_not_found", "invalid_schema", "not_installed"),
)
async def find_schema(call: Call) -> VersionAnswer:
    """Return the version of a subject that is this schema."""
    return version_answer(await call.service.schemas.find(_request(call)))


@routes.add(
    "DELETE",
    _SUBJECT,
    action="admin",
    scope="any",
    query=PermanentQuery,
    allowed=_may_change,
    act=True,
    errors=("schema_not_found", "conflict"),
)
async def delete_subject(call: Call) -> list[int]:
    """Delete a subject; with `permanent`, remove one that is deleted already."""
    return await call.service.schemas.delete(_subject(call), None, permanent=call.query.permanent)


@routes.add(
    "DELETE",
    _VERSION,
    action="admin",
    scope="any",
    query=PermanentQuery,
    allowed=_may_change,
    act=True,
    errors=("schema_not_found", "conflict"),
)
async def delete_version(call: Call) -> int:
    """Delete a version; with `permanent`, remove one that is deleted already."""
    (number,) = await call.service.schemas.delete(_subject(call), _number(call), permanent=call.query.permanent)
    return number


@routes.add("GET", _ID, action="read", scope="any", instead=True, query=DeletedQuery, errors=("schema_not_found",))
async def get_schema(call: Call) -> VersionAnswer:
    """Return the schema with an id: what a message carries."""
    return version_answer(await _as_asked(call, await _by_id(call)))


@routes.add(
    "GET", f"{_ID}/schema", action="read", scope="any", instead=True, query=DeletedQuery, errors=("schema_not_found",)
)
async def get_schema_text(call: Call) -> Response:
    """Return the text of the schema with an id."""
    return Response(200, (await _by_id(call)).text.encode(), REGISTRY_JSON)


@routes.add(
    "GET", f"{_ID}/versions", action="read", scope="any", instead=True, query=DeletedQuery, errors=("schema_not_found",)
)
async def get_schema_versions(call: Call) -> list[SubjectVersion]:
    """List the subjects and versions where the schema with an id is registered."""
    await _by_id(call)
    found = call.service.engine.body_checks.schemas().uses_of_id(_id(call), deleted=call.query.deleted)
    return [SubjectVersion(subject=each.subject, version=each.version) for each in found if sees(call, each.subject)]


@routes.add(
    "GET", f"{_ID}/subjects", action="read", scope="any", instead=True, query=DeletedQuery, errors=("schema_not_found",)
)
async def get_schema_subjects(call: Call) -> list[str]:
    """List the subjects where the schema with an id is registered."""
    await _by_id(call)
    found = call.service.engine.body_checks.schemas().uses_of_id(_id(call), deleted=call.query.deleted)
    return sorted({each.subject for each in found if sees(call, each.subject)})


@routes.add("GET", f"{REGISTRY}/schemas/types", action="read", scope="any", instead=True)
async def list_types(call: Call) -> list[str]:
    """List the types of schemas."""
    return list(KINDS)


@routes.add(
    "POST",
    _CHECK,
    action="read",
    scope="any",
    instead=True,
    body=SchemaBody,
    query=VerboseQuery,
    allowed=_may_compare,
    errors=("schema_not_found", "invalid_schema", "not_installed"),
)
async def check_versions(call: Call) -> Compatible:
    """Say whether a schema is compatible with a subject, as far as its level demands."""
    return _compatible(call, await call.service.schemas.problems(_request(call), None))


@routes.add(
    "POST",
    f"{_CHECK}/{{version}}",
    action="read",
    scope="any",
    instead=True,
    body=SchemaBody,
    query=VerboseQuery,
    allowed=_may_compare,
    errors=("schema_not_found", "invalid_schema", "not_installed"),
)
async def check_version_of(call: Call) -> Compatible:
    """Say whether a schema is compatible with one version of a subject, at the subject's level."""
    return _compatible(call, await call.service.schemas.problems(_request(call), _number(call)))


@routes.add("GET", _CONFIG, action="read", scope="any", instead=True, query=LevelQuery)
async def get_level(call: Call) -> LevelAnswer:
    """Return the compatibility level of the registry."""
    return LevelAnswer(compatibility_level=await call.service.schemas.level(None))


@routes.add("PUT", _CONFIG, action="admin", body=LevelSet, act=True)
async def set_level(call: Call) -> LevelSet:
    """Set the compatibility level of the registry."""
    return await _set_level(call, None)


@routes.add("DELETE", _CONFIG, action="admin", act=True)
async def unset_level(call: Call) -> LevelAnswer:
    """Remove the compatibility level of the registry, so that it is BACKWARD. Returns the one that was set."""
    return await _unset_level(call, None)


@routes.add(
    "GET",
    f"{_CONFIG}/{{subject}}",
    action="read",
    scope="any",
    instead=True,
    query=LevelQuery,
    allowed=_may_see,
    errors=("schema_not_found",),
)
async def get_subject_level(call: Call) -> LevelAnswer:
    """Return the compatibility level of a subject."""
    own = not call.query.default_to_global
    return LevelAnswer(compatibility_level=call.service.engine.body_checks.schemas().level(_subject(call), own=own))


@routes.add("PUT", f"{_CONFIG}/{{subject}}", action="admin", scope="any", body=LevelSet, allowed=_may_change, act=True)
async def set_subject_level(call: Call) -> LevelSet:
    """Set the compatibility level of a subject."""
    return await _set_level(call, _subject(call))


@routes.add(
    "DELETE",
    f"{_CONFIG}/{{subject}}",
    action="admin",
    scope="any",
    allowed=_may_change,
    act=True,
    errors=("schema_not_found",),
)
async def unset_subject_level(call: Call) -> LevelAnswer:
    """Remove the compatibility level of a subject, so that the registry's applies. Returns the one that was set."""
    return await _unset_level(call, _subject(call))


@routes.add("GET", f"{REGISTRY}/mode", action="read", scope="any", instead=True)
async def get_mode(call: Call) -> RegistryMode:
    """Return what may be done: READWRITE."""
    return RegistryMode(mode="READWRITE")


async def _set_level(call: Call, subject: str | None) -> LevelSet:
    level = check_level(call.body.compatibility)
    await call.service.schemas.set_level(level, subject)
    return LevelSet(compatibility=level)


async def _unset_level(call: Call, subject: str | None) -> LevelAnswer:
    schemas = call.service.schemas
    before = await schemas.level(subject)
    await schemas.set_level(None, subject)
    return LevelAnswer(compatibility_level=before)


def _compatible(call: Call, problems: list[str]) -> Compatible:
    return Compatible(is_compatible=not problems, messages=tuple(problems) if call.query.verbose else ())


async def _as_asked(call: Call, version: SchemaVersion) -> SchemaVersion:
    """Return a version whose text has the format that the query asks for: `serialized` is for Protobuf."""
    if call.query.format != "serialized" or version.kind != "PROTOBUF":
        return version
    compiled = await asyncio.to_thread(call.service.engine.body_checks.schemas().compiled, version)
    return msgspec.structs.replace(version, text=compiled.canonical)


async def _by_id(call: Call) -> SchemaVersion:
    """Return the schema with an id, if the caller may see a subject where it is, or was, registered."""
    found = await call.service.schemas.by_id(_id(call))
    if not any(
        sees(call, each.subject)
        for each in call.service.engine.body_checks.schemas().uses_of_id(found.id, deleted=True)
    ):
        raise SchemaNotFound(f"there is no schema with the id {found.id}", reason="schema")
    return found


def _subject(call: Call) -> str:
    return check_subject(call.path["subject"].replace("%2F", "/"))


def _number(call: Call) -> VersionNumber:
    return check_version(call.path["version"])


def _id(call: Call) -> int:
    text = call.path["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise SchemaNotFound(f"{text!r} is not the id of a schema: give a number", reason="schema")
    return int(text)


def _request(call: Call) -> SchemaRequest:
    given: SchemaBody = call.body
    if given.metadata is not None or given.rule_set is not None:
        raise InvalidRequest("metadata and rules of schemas are not known here: leave them out")
    references = [Reference(each.name, each.subject, each.version) for each in given.references or ()]
    return schema_request(_subject(call), given.schema, given.schema_type, references)
