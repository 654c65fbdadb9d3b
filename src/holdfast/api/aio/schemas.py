"""The registry of schemas, for tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.api.arguments import switch
from holdfast.api.schemas import check_level, check_subject, one_version, schema_id, schema_request
from holdfast.schemas.registry import Level, SchemaVersion
from holdfast.schemas.source import Kind, Reference, Schema

if TYPE_CHECKING:
    from holdfast.api.aio.ports import AsyncSchemasPort


class AsyncSchemas:
    """The schemas of a data folder: subjects with versions, and the ids that messages carry.

    Safe to use from any task.
    """

    def __init__(self, port: AsyncSchemasPort) -> None:
        self._port = port

    async def register(
        self, subject: str, text: str, *, kind: Kind = "AVRO", references: Sequence[Reference] = ()
    ) -> SchemaVersion:
        """Register a schema as the newest version of a subject. One that is registered there already stays as it is.

            await broker.schemas.register("orders-value", text, kind="JSON")

        Args:
            subject: The name of the subject: for the values of a topic, its name with -value.
            text: The schema.
            kind: "AVRO", "JSON" or "PROTOBUF".
            references: The registered schemas that this one uses, by the names that it uses for them.

        Returns:
            The version, with its id.

        Raises:
            InvalidSchema: The text is no schema of this kind, or refers to something that is not registered.
            IncompatibleSchema: It is not compatible with earlier versions, at the level that is set.
            NotInstalled: The library for this kind is not installed: `pip install 'holdfast[schemas]'`.
        """
        return await self._port.register(schema_request(subject, text, kind, references))

    async def problems(
        self,
        subject: str,
        text: str,
        *,
        kind: Kind = "AVRO",
        references: Sequence[Reference] = (),
        version: int | str | None = None,
    ) -> list[str]:
        """Return why a schema is not compatible with a subject, without registering anything; [] if it is.

        Args:
            subject: The subject.
            text: The schema.
            kind: "AVRO", "JSON" or "PROTOBUF".
            references: The registered schemas that this one uses.
            version: Compare with this version only; by default with those that the subject's level demands.

        Raises:
            InvalidSchema: The text is no schema of this kind.
            SchemaNotFound: There is no such version.
        """
        number = None if version is None else one_version(version)
        return await self._port.problems(schema_request(subject, text, kind, references), number)

    async def find(
        self, subject: str, text: str, *, kind: Kind = "AVRO", references: Sequence[Reference] = ()
    ) -> SchemaVersion:
        """Return the version of a subject that is this schema.

        Args:
            subject: The subject.
            text: The schema; spaces and the order of its parts make no difference.
            kind: "AVRO", "JSON" or "PROTOBUF".
            references: The registered schemas that this one uses.

        Raises:
            SchemaNotFound: There is no such subject, or no version of it is this schema.
        """
        return await self._port.find(schema_request(subject, text, kind, references))

    async def get(self, subject: str, version: int | str = "latest", *, deleted: bool = False) -> SchemaVersion:
        """Return a version of a subject.

        Args:
            subject: The subject.
            version: Its number, or "latest".
            deleted: Also a version that was deleted, though not permanently.

        Raises:
            SchemaNotFound: There is no such subject or version.
        """
        return await self._port.version(
            check_subject(subject), one_version(version), deleted=switch(deleted, "deleted")
        )

    async def by_id(self, number: int) -> SchemaVersion:
        """Return a version with this id.

        Args:
            number: The id that a message carries.

        Raises:
            SchemaNotFound: There is no schema with this id.
        """
        return await self._port.by_id(schema_id(number))

    async def schema(self, number: int) -> Schema:
        """Return the schema with this id and all that it refers to, for `holdfast.schemas.compile_schema`.

        Args:
            number: The id that a message carries.

        Raises:
            SchemaNotFound: There is no schema with this id.
        """
        return await self._whole(await self.by_id(number))

    async def _whole(self, version: SchemaVersion) -> Schema:
        uses = []
        for each in version.references:
            used = await self._port.version(each.subject, each.version, deleted=True)
            uses.append((each.name, await self._whole(used)))
        return Schema(version.kind, version.text, tuple(uses))

    async def subjects(self, *, deleted: bool = False) -> list[str]:
        """Return the subjects, in order.

        Args:
            deleted: Also those that were deleted, though not permanently.
        """
        return await self._port.subjects(deleted=switch(deleted, "deleted"))

    async def versions(self, subject: str, *, deleted: bool = False) -> list[int]:
        """Return the numbers of the versions of a subject.

        Args:
            subject: The subject.
            deleted: Also those that were deleted, though not permanently.

        Raises:
            SchemaNotFound: There is no such subject.
        """
        return await self._port.versions(check_subject(subject), deleted=switch(deleted, "deleted"))

    async def delete(self, subject: str, version: int | str | None = None, *, permanent: bool = False) -> list[int]:
        """Delete a version, or all of a subject. Messages that carry the id can still be read.

        Args:
            subject: The subject.
            version: The version; all of them by default.
            permanent: Remove what is deleted already, with its id: what carries it cannot be read any more.

        Returns:
            The numbers of the versions that were deleted.

        Raises:
            SchemaNotFound: There is no such subject or version, or it is not deleted yet and `permanent` is given.
            Conflict: Another schema refers to it.
        """
        number = None if version is None else one_version(version)
        return await self._port.delete(check_subject(subject), number, permanent=switch(permanent, "permanent"))

    async def level(self, subject: str | None = None) -> Level:
        """Return the compatibility level that applies to a subject, or that of the registry.

        Args:
            subject: The subject.
        """
        return await self._port.level(None if subject is None else check_subject(subject))

    async def set_level(self, level: Level | None, subject: str | None = None) -> None:
        """Set the compatibility level of a subject, or of the registry.

        Args:
            level: "NONE", "BACKWARD", "FORWARD" or "FULL", each but the first also with _TRANSITIVE; None removes it,
                so that the registry's level applies, and BACKWARD to the registry.
            subject: The subject; the whole registry by default.
        """
        name = None if subject is None else check_subject(subject)
        await self._port.set_level(None if level is None else check_level(level), name)
