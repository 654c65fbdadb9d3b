"""A registry of schemas: subjects with versions, and the ids that messages carry. Pure: a state, and what changes it.

A *subject* is a name under which the versions of one schema are kept: `orders-value` for the values of the topic
`orders`. Every schema has an *id*, which is the same wherever the same schema is registered, and is never given to
another. A subject has a *compatibility level*, or the registry's.

All changes are records with a key, as Confluent's registry keeps them in its topic `_schemas`; the last record of each
key counts. `change` returns the records, and only `apply` changes the state: on the way in, and when it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from holdfast.errors import Conflict, IncompatibleSchema, InvalidRequest, InvalidSchema, QueueFull, SchemaNotFound
from holdfast.later import hashlib
from holdfast.schemas.source import MOST_REFERENCES, CompiledSchema, Kind, Reference, Schema

Level: TypeAlias = Literal[
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
]
VersionNumber: TypeAlias = int | Literal["latest"]

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
DEFAULT_LEVEL: Final[Level] = "BACKWARD"
MOST_VERSIONS: Final = 100_000
MOST_BYTES: Final = 256 * 1024 * 1024
_MOST_SUBJECT_CHARS: Final = 255
_MOST_NESTED: Final = 32  # references of references


class SchemaVersion(msgspec.Struct, frozen=True):
    """A version of a subject."""

    subject: str
    version: int
    id: int
    kind: Kind
    text: str
    references: tuple[Reference, ...] = ()
    deleted: bool = False


class RegistryRecord(NamedTuple):
    """A record of the registry: a key, and a value or None if the key is deleted."""

    key: bytes
    value: bytes | None


class _RecordKey(msgspec.Struct, omit_defaults=True):
    keytype: str
    subject: str | None = None
    version: int = 0
    magic: int = 1


class _Value(msgspec.Struct, omit_defaults=True):
    subject: str
    version: int
    id: int
    schema: str
    schemaType: Kind = "AVRO"  # noqa: N815
    references: tuple[Reference, ...] = ()
    deleted: bool = False
    digest: str = ""


class _LevelValue(msgspec.Struct, rename="camel"):
    compatibility_level: Level


class _LastId(msgspec.Struct):
    id: int


_encode = msgspec.json.Encoder().encode


class RegistryState:
    """What is registered. Not thread-safe."""

    def __init__(self) -> None:
        self.subjects: dict[str, dict[int, SchemaVersion]] = {}
        self.levels: dict[str | None, Level] = {}
        self.skipped = 0  # records that are no records of a registry
        self._digests: dict[str, int] = {}
        self._digest_of: dict[int, str] = {}
        self._places: dict[int, set[tuple[str, int]]] = {}  # subjects and versions, by id
        self._users: dict[tuple[str, int], set[tuple[str, int]]] = {}
        self._last_id = 0
        self._bytes = 0
        self._versions = 0

    # Records

    def apply(self, entry: RegistryRecord) -> None:
        """Take over a record. One that is none is counted and passed over."""
        try:
            key = msgspec.json.decode(entry.key, type=_RecordKey)
            if key.keytype == "SCHEMA" and key.subject is not None:
                self._take_version(key, entry.value)
            elif key.keytype == "CONFIG":
                if entry.value is None:
                    self.levels.pop(key.subject, None)
                else:
                    self.levels[key.subject] = msgspec.json.decode(entry.value, type=_LevelValue).compatibility_level
            elif key.keytype == "LAST_ID" and entry.value is not None:
                self._last_id = max(self._last_id, msgspec.json.decode(entry.value, type=_LastId).id)
            else:
                self.skipped += 1
        except (msgspec.DecodeError, UnicodeError):
            self.skipped += 1

    def _take_version(self, key: _RecordKey, value: bytes | None) -> None:
        subject, number = key.subject or "", key.version
        made = None if value is None else msgspec.json.decode(value, type=_Value)
        versions = self.subjects.setdefault(subject, {})
        before = versions.pop(number, None)
        if before is not None:
            self._versions -= 1
            self._bytes -= len(before.text)
            self._places[before.id].discard((subject, number))
            for each in before.references:
                self._users.get((each.subject, each.version), set()).discard((subject, number))
        if made is not None:
            versions[number] = SchemaVersion(
                subject, number, made.id, made.schemaType, made.schema, made.references, made.deleted
            )
            self._versions += 1
            self._bytes += len(made.schema)
            self._last_id = max(self._last_id, made.id)
            self._places.setdefault(made.id, set()).add((subject, number))
            digest = made.digest or digest_of(made.schemaType, made.schema, made.references)
            self._digests.setdefault(digest, made.id)
            self._digest_of[made.id] = digest
            for each in made.references:
                self._users.setdefault((each.subject, each.version), set()).add((subject, number))
        if not versions:
            del self.subjects[subject]
        if before is not None and not self._places[before.id]:
            self._forget(before.id)

    def _forget(self, gone: int) -> None:
        """Forget an id whose last version is gone; it is not given again."""
        del self._places[gone]
        digest = self._digest_of.pop(gone, "")
        if self._digests.get(digest) == gone:
            del self._digests[digest]

    # Questions

    def names(self, *, deleted: bool = False) -> list[str]:
        """Return the subjects, in order."""
        return sorted(
            subject
            for subject, versions in self.subjects.items()
            if deleted or any(not each.deleted for each in versions.values())
        )

    def versions(self, subject: str, *, deleted: bool = False) -> list[SchemaVersion]:
        """Return the versions of a subject in order. Raises SchemaNotFound if there are none."""
        found = [each for _, each in sorted(self.subjects.get(subject, {}).items()) if deleted or not each.deleted]
        if not found:
            raise SchemaNotFound(
                f"there is no subject {subject}: list the subjects with `holdfast schema ls`", reason="subject"
            )
        return found

    def version(self, subject: str, number: VersionNumber, *, deleted: bool = False) -> SchemaVersion:
        """Return one version. Raises SchemaNotFound."""
        found = self.versions(subject, deleted=deleted)
        if number == "latest":
            return found[-1]
        for each in found:
            if each.version == number:
                return each
        numbers = [str(each.version) for each in found[-20:]]
        raise SchemaNotFound(
            f"the subject {subject} has no version {number}; its last ones are {', '.join(numbers)}",
            reason="version",
        )

    def by_id(self, schema_id: int) -> SchemaVersion:
        """Return a version with this id, a deleted one if there is no other. Raises SchemaNotFound."""
        found = self.uses_of_id(schema_id, deleted=True)
        return next((each for each in found if not each.deleted), found[0])

    def uses_of_id(self, schema_id: int, *, deleted: bool = False) -> list[SchemaVersion]:
        """Return all versions with this id. Raises SchemaNotFound."""
        places = self._places.get(schema_id)
        if not places:
            raise SchemaNotFound(f"there is no schema with the id {schema_id}", reason="schema")
        found = [self.subjects[subject][number] for subject, number in sorted(places)]
        return [each for each in found if deleted or not each.deleted]

    def users_of(self, subject: str, number: int) -> list[SchemaVersion]:
        """Return the versions that refer to a version."""
        return [self.subjects[name][version] for name, version in sorted(self._users.get((subject, number), ()))]

    def level(self, subject: str | None = None) -> Level:
        """Return the compatibility level that applies to a subject, or the registry's."""
        return self.levels.get(subject) or self.levels.get(None) or DEFAULT_LEVEL

    def resolved(self, kind: Kind, text: str, references: Sequence[Reference]) -> Schema:
        """Return a schema with all that it refers to. Raises InvalidSchema if something is missing."""
        return self._resolved(kind, text, references, 0, [0])

    def _resolved(self, kind: Kind, text: str, references: Sequence[Reference], level: int, count: list[int]) -> Schema:
        uses = []
        for each in references:
            count[0] += 1
            if level > _MOST_NESTED or count[0] > MOST_REFERENCES:
                raise InvalidSchema(f"the schema refers to more than {MOST_REFERENCES} others: join some of them")
            found = self.subjects.get(each.subject, {}).get(each.version)
            if found is None:
                raise InvalidSchema(
                    f"the schema refers to version {each.version} of {each.subject}, which is not there: register it"
                )
            uses.append((each.name, self._resolved(found.kind, found.text, found.references, level + 1, count)))
        return Schema(kind, text, tuple(uses))

    def find(self, subject: str, digest: str, *, deleted: bool = False) -> SchemaVersion | None:
        """Return the version of a subject that is this schema."""
        schema_id = self._digests.get(digest)
        found = [each for each in self.subjects.get(subject, {}).values() if each.id == schema_id]
        return max((each for each in found if deleted or not each.deleted), key=lambda each: each.version, default=None)

    def compared_with(self, subject: str, level: Level) -> list[SchemaVersion]:
        """Return the versions that a new one must be compatible with, the newest first."""
        if level == "NONE":
            return []
        found = [each for _, each in sorted(self.subjects.get(subject, {}).items(), reverse=True) if not each.deleted]
        return found if level.endswith("_TRANSITIVE") else found[:1]

    # Changes

    def registering(
        self, subject: str, kind: Kind, text: str, references: tuple[Reference, ...], digest: str
    ) -> tuple[SchemaVersion, list[RegistryRecord]]:
        """Return the version that a schema becomes, and the records to write for it."""
        if self._versions >= MOST_VERSIONS or self._bytes + len(text) > MOST_BYTES:
            raise QueueFull(
                f"the schema was not registered: the registry has {self._versions} versions with {self._bytes} "
                f"characters, and the limits are {MOST_VERSIONS} and {MOST_BYTES}. Delete some permanently"
            )
        known = self._digests.get(digest)
        schema_id = self._last_id + 1 if known is None else known
        number = max(self.subjects.get(subject, {}), default=0) + 1
        made = SchemaVersion(subject, number, schema_id, kind, text, references)
        return made, [_entry(made, digest)]

    def deleting(self, subject: str, numbers: Iterable[int], *, permanent: bool) -> list[RegistryRecord]:
        """Return the records that delete versions. Permanently, only versions that are deleted already."""
        entries = []
        versions = self.subjects[subject]
        for number in numbers:
            version = versions[number]
            users = [each for each in self.users_of(subject, number) if not each.deleted or permanent]
            if users:
                raise Conflict(
                    f"version {number} of {subject} is used by {users[0].subject}, version {users[0].version}: delete "
                    "that first"
                )
            if permanent:
                entries.append(RegistryRecord(_key_of(subject, number), None))
            else:
                gone = msgspec.structs.replace(version, deleted=True)
                entries.append(_entry(gone, self._digest_of.get(version.id, "")))
        if permanent:  # first, so that no id is ever given twice
            entries.insert(0, RegistryRecord(_encode(_RecordKey("LAST_ID")), _encode(_LastId(self._last_id))))
        return entries


def level_entry(subject: str | None, level: Level | None) -> RegistryRecord:
    """Return the record that sets a level, or with None removes it."""
    return RegistryRecord(
        _encode(_RecordKey("CONFIG", subject, magic=0)), None if level is None else _encode(_LevelValue(level))
    )


def _entry(made: SchemaVersion, digest: str) -> RegistryRecord:
    value = _Value(made.subject, made.version, made.id, made.text, made.kind, made.references, made.deleted, digest)
    return RegistryRecord(_key_of(made.subject, made.version), _encode(value))


def _key_of(subject: str, version: int) -> bytes:
    return _encode(_RecordKey("SCHEMA", subject, version))


def digest_of(kind: Kind, canonical: str, references: Sequence[Reference]) -> str:
    """Return what tells whether two schemas are the same."""
    return hashlib.sha256(_encode((kind, canonical, tuple(references)))).hexdigest()


def incompatibilities(new: CompiledSchema, old: CompiledSchema, level: Level) -> list[str]:
    """Return why a schema is not compatible with an earlier one, at a level; [] if it is."""
    if level == "NONE":
        return []
    if new.schema.kind != old.schema.kind:
        return [f"the schema is of the type {new.schema.kind}, and was {old.schema.kind}"]
    found: list[str] = []
    if not level.startswith("FORWARD"):
        found += new.problems_reading(old)
    if not level.startswith("BACKWARD"):
        found += [f"{each} (for readers of the earlier version)" for each in old.problems_reading(new)]
    return found


def incompatible(subject: str, version: int, level: Level, problems: Sequence[str]) -> IncompatibleSchema:
    """Return the error for a schema that is not compatible."""
    more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
    return IncompatibleSchema(
        f"the schema is not compatible with version {version} of {subject} ({level}): {'; '.join(problems[:3])}{more}. "
        "Nothing was registered",
        problems=problems,
    )


def check_subject(subject: object) -> str:
    """Return the name of a subject; raises InvalidRequest."""
    if not isinstance(subject, str) or not 0 < len(subject) <= _MOST_SUBJECT_CHARS or not subject.isprintable():
        raise InvalidRequest(
            f"subject {subject!r} cannot be used: give 1 to {_MOST_SUBJECT_CHARS} printable characters"
        )
    return subject


def check_version(version: object) -> VersionNumber:
    """Return the number of a version, or "latest"; raises InvalidRequest."""
    if version in ("latest", "-1", -1):
        return "latest"
    if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 10:
        version = int(version)
    if type(version) is not int or version < 1:
        raise InvalidRequest(f"version {version!r} cannot be used: give a number from 1, or latest")
    return version


def check_level(level: object) -> Level:
    """Return a compatibility level, whatever the case of its letters; raises InvalidRequest."""
    wanted: Any = level.upper() if isinstance(level, str) else level
    for known in LEVELS:
        if wanted == known:
            return known
    raise InvalidRequest(f"compatibility level {level!r} cannot be used: give one of {', '.join(LEVELS)}")


def subject_topic(subject: str) -> str:
    """Return the topic whose rights count for a subject: that of `orders-value` and `orders-key` is orders."""
    for end in ("-value", "-key"):
        if subject.endswith(end) and len(subject) > len(end):
            return subject[: -len(end)]
    return subject
