"""The schemas of a data folder: kept in its topic `_schemas`, compacted by key, and in memory while it is open.

The topic is the one place where they are: it is read when the schemas are first used, and a change is in it, on disk,
before it counts. Only the owner of the folder writes to it, and nobody else may (see `body_checks`), so what is
in memory is what is there. Records have the form of Confluent's topic of the same name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.broker.folder.layout import SCHEMAS_TOPIC
from holdfast.broker.messages import TOMBSTONE
from holdfast.env.process import get_logger
from holdfast.errors import SchemaMismatch, SchemaNotFound, TopicExists
from holdfast.model import Batch
from holdfast.schemas.decoding import compile_schema
from holdfast.schemas.registry import (
    Level,
    RegistryRecord,
    RegistryState,
    SchemaVersion,
    VersionNumber,
    digest_of,
    incompatibilities,
    incompatible,
    level_entry,
)
from holdfast.schemas.source import CompiledSchema, Kind, Reference, Schema
from holdfast.schemas.wire import split_header

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

logger = get_logger(__name__)

_KEPT: Final = 500  # compiled schemas


class FolderSchemas:
    """The schemas of a data folder. Thread-safe; its calls wait for the disk."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._state: RegistryState | None = None  # read at first use
        self._compiled: OrderedDict[int, CompiledSchema] = OrderedDict()
        self._by_subject: dict[str, dict[int, SchemaVersion]] = {}  # versions that count, by id; the newest last

    # Questions

    def subjects(self, *, deleted: bool = False) -> list[str]:
        """Return the subjects, in order."""
        with self._lock:
            return self._loaded().names(deleted=deleted)

    def versions(self, subject: str, *, deleted: bool = False) -> list[SchemaVersion]:
        """Return the versions of a subject in order. Raises SchemaNotFound."""
        with self._lock:
            return self._loaded().versions(subject, deleted=deleted)

    def version(self, subject: str, number: VersionNumber, *, deleted: bool = False) -> SchemaVersion:
        """Return one version. Raises SchemaNotFound."""
        with self._lock:
            return self._loaded().version(subject, number, deleted=deleted)

    def by_id(self, schema_id: int) -> SchemaVersion:
        """Return a version with this id. Raises SchemaNotFound."""
        with self._lock:
            return self._loaded().by_id(schema_id)

    def uses_of_id(self, schema_id: int, *, deleted: bool = False) -> list[SchemaVersion]:
        """Return all versions with this id."""
        with self._lock:
            return self._loaded().uses_of_id(schema_id, deleted=deleted)

    def users_of(self, subject: str, number: int) -> list[SchemaVersion]:
        """Return the versions that refer to a version."""
        with self._lock:
            return self._loaded().users_of(subject, number)

    def level(self, subject: str | None, *, own: bool = False) -> Level:
        """Return the level that applies; with `own`, only one that is set for the subject itself."""
        with self._lock:
            state = self._loaded()
            if own and subject is not None and subject not in state.levels:
                raise SchemaNotFound(
                    f"the subject {subject} has no compatibility level of its own: that of the registry applies",
                    reason="level",
                )
            return state.level(subject)

    def schema(self, version: SchemaVersion) -> Schema:
        """Return a schema with all that it refers to."""
        with self._lock:
            return self._loaded().resolved(version.kind, version.text, version.references)

    def compiled(self, version: SchemaVersion) -> CompiledSchema:
        """Return a schema ready for use."""
        found = self._compiled.get(version.id)
        if found is None:
            found = compile_schema(self.schema(version))
            with self._lock:
                self._compiled[version.id] = found
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return found

    def newest(self, subject: str) -> CompiledSchema:
        """Return the newest schema of a subject, ready for use. Raises SchemaNotFound."""
        versions = self._of_subject(subject)
        return self._ready(next(reversed(versions.values())))

    def carried(self, subject: str, value: bytes) -> None:
        """Check a value that carries the id of its schema. Raises SchemaMismatch and SchemaNotFound."""
        versions = self._of_subject(subject)
        schema_id, payload = split_header(value)
        version = versions.get(schema_id)
        if version is None:
            raise SchemaMismatch(f"the value carries the schema id {schema_id}, which is no version of {subject}")
        self._ready(version).check(payload)

    def _ready(self, version: SchemaVersion) -> CompiledSchema:
        return self._compiled.get(version.id) or self.compiled(version)

    def _of_subject(self, subject: str) -> dict[int, SchemaVersion]:
        found = self._by_subject.get(subject)
        if found is None:
            with self._lock:
                found = {each.id: each for each in self._loaded().versions(subject)}
                self._by_subject[subject] = found
        return found

    def find(
        self, subject: str, kind: Kind, text: str, references: tuple[Reference, ...], *, deleted: bool = False
    ) -> SchemaVersion:
        """Return the version of a subject that is this schema. Raises SchemaNotFound."""
        _, digest = self._made(kind, text, references)
        with self._lock:
            state = self._loaded()
            found = state.find(subject, digest, deleted=deleted)
            if found is None:
                state.versions(subject, deleted=deleted)
                raise SchemaNotFound(f"no version of {subject} is this schema", reason="schema")
            return found

    def problems(
        self,
        subject: str,
        kind: Kind,
        text: str,
        references: tuple[Reference, ...],
        number: VersionNumber | None = None,
    ) -> list[str]:
        """Return why a schema cannot become a version of a subject; with a number, only compared with that version."""
        compiled, _ = self._made(kind, text, references)
        with self._lock:
            state = self._loaded()
            level = state.level(subject)
            if number is None:
                compared = state.compared_with(subject, level)
            else:
                compared = [state.version(subject, number)]
        return [
            f"version {each.version}: {problem}"
            for each in compared
            for problem in incompatibilities(compiled, self.compiled(each), level)
        ]

    # Changes

    def register(self, subject: str, kind: Kind, text: str, references: tuple[Reference, ...]) -> SchemaVersion:
        """Register a schema, unless it is already. Raises InvalidSchema and IncompatibleSchema."""
        compiled, digest = self._made(kind, text, references)  # outside the lock: it may take a while
        with self._lock:
            state = self._loaded()
            known = state.find(subject, digest)
            if known is not None:
                return known
            level = state.level(subject)
            for each in state.compared_with(subject, level):
                problems = incompatibilities(compiled, self.compiled(each), level)
                if problems:
                    raise incompatible(subject, each.version, level, problems)
            made, entries = state.registering(subject, kind, text, references, digest)
            self._write(entries)
            self._compiled[made.id] = compiled
            return made

    def delete(self, subject: str, number: VersionNumber | None, *, permanent: bool) -> list[int]:
        """Delete a version, or all of a subject; permanently only what is deleted already. Returns their numbers."""
        with self._lock:
            state = self._loaded()
            if number is not None:
                each = state.version(subject, number, deleted=True)
                if not permanent and each.deleted:
                    raise SchemaNotFound(
                        f"version {each.version} of {subject} is deleted already; delete it permanently to remove it",
                        reason="deleted version",
                    )
                if permanent and not each.deleted:
                    raise SchemaNotFound(
                        f"version {each.version} of {subject} is not deleted: delete it first, then permanently",
                        reason="undeleted version",
                    )
                numbers = [each.version]
            else:
                found = state.versions(subject, deleted=True)
                if permanent and any(not each.deleted for each in found):
                    raise SchemaNotFound(
                        f"the subject {subject} is not deleted: delete it first, then permanently",
                        reason="undeleted subject",
                    )
                if not permanent and all(each.deleted for each in found):
                    raise SchemaNotFound(
                        f"the subject {subject} is deleted already; delete it permanently to remove it",
                        reason="deleted subject",
                    )
                numbers = [each.version for each in found if permanent or not each.deleted]
            entries = state.deleting(subject, numbers, permanent=permanent)
            if number is None and subject in state.levels:
                entries.append(level_entry(subject, None))
            self._write(entries)
            return numbers

    def set_level(self, subject: str | None, level: Level | None) -> Level:
        """Set the level of a subject or of the registry; None removes it. Returns the one that was there."""
        with self._lock:
            before = self._loaded().level(subject)
            self._write([level_entry(subject, level)])
            return before

    def _made(self, kind: Kind, text: str, references: tuple[Reference, ...]) -> tuple[CompiledSchema, str]:
        with self._lock:
            schema = self._loaded().resolved(kind, text, references)
        compiled = compile_schema(schema)
        return compiled, digest_of(kind, compiled.canonical, references)

    # The topic

    def _loaded(self) -> RegistryState:
        self._engine.check_open()
        if self._state is None:
            state = RegistryState()
            if SCHEMAS_TOPIC in self._engine.topics():
                with self._engine.using(SCHEMAS_TOPIC) as topic:
                    log = topic.partition(0).log
                    for frame in log.read(log.start):
                        for record in frame.records():
                            value = None if record.flags & TOMBSTONE else bytes(record.value)
                            state.apply(RegistryRecord(bytes(record.key or b""), value))
            if state.skipped:
                logger.warning("records of the topic of schemas were skipped", extra={"count": state.skipped})
            self._state = state
        return self._state

    def _write(self, entries: Sequence[RegistryRecord]) -> None:
        """Write records, wait until they are on disk, and take them over. The caller holds the lock."""
        state = self._loaded()
        with suppress(TopicExists):
            if SCHEMAS_TOPIC not in self._engine.topics():
                self._engine.create_topic(
                    SCHEMAS_TOPIC, None, {"partitions": 1, "cleanup": "compact", "retention_ms": None, "ttl_ms": None}
                )
        batch = Batch(
            values=[entry.value or b"" for entry in entries],
            keys=[entry.key for entry in entries],
            flags=[TOMBSTONE if entry.value is None else 0 for entry in entries],
        )
        with self._engine.using(SCHEMAS_TOPIC) as topic:
            partition = topic.partition(0)
            try:
                appended, _ = partition.append(batch, durability="fsync")
                partition.log.wait(appended)
            except BaseException:
                self._state, self._by_subject = None, {}  # whether it is there is seen when the topic is read again
                raise
            partition.wake(len(entries))
        for entry in entries:
            state.apply(entry)
        self._by_subject = {}
