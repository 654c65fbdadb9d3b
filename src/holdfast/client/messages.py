"""Messages as a client has them: what each says, where it stands, and what became of its lease."""

from __future__ import annotations

from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, Generic

from holdfast.api.bodies import Bodies
from holdfast.api.chunks import Chunks
from holdfast.api.contents import Body, Headers
from holdfast.api.times import to_datetime
from holdfast.client.http import path_of
from holdfast.client.payloads import Payload
from holdfast.large import CHUNK_BYTES
from holdfast.protocol import messages

if TYPE_CHECKING:
    from holdfast.client.client import Client


class Heard(Generic[Body]):
    """What a message says, as the server told it."""

    __slots__ = ()

    _bodies: Bodies
    _told: messages.Said

    def _payload(self) -> Payload:
        """The body of a message that came without it, because it is large."""
        raise NotImplementedError

    @property
    def id(self) -> str:
        return self._told.id

    @property
    def topic(self) -> str:
        return self._told.topic

    @property
    def partition(self) -> int:
        return self._told.partition

    @property
    def offset(self) -> int:
        return self._told.offset

    @property
    def raw(self) -> bytes:
        """The body's bytes, as they were stored. A large one is fetched now, and then kept: see `open`."""
        told = self._told
        if told.omitted:
            told.body, told.omitted = bytes(self._payload()), False
        return told.body

    @property
    def size(self) -> int:
        """How many bytes the body has; a large one is not fetched for it."""
        return self._told.size or len(self._told.body)

    def open(self) -> BinaryIO:
        """The body's bytes as a file to read front to back: a large one is not held in memory.

        Unavailable instead of the rest where the connection breaks.
        """
        return self._payload().open() if self._told.omitted else BytesIO(self._told.body)

    def chunks(self, size: int = CHUNK_BYTES) -> Chunks:
        """The same in pieces, for `for` and for `async for`."""
        return Chunks(self._payload() if self._told.omitted else self._told.body, size)

    @property
    def body(self) -> Body:
        """The body, of the type that the queue was opened with; BadBody where it does not fit.

        None for a tombstone: whatever had its key is gone.
        """
        if self._told.tombstone:
            return None  # type: ignore[return-value]
        body: Body = self._bodies.decode(self.raw)
        return body

    @property
    def key(self) -> str | bytes | None:
        told = self._told
        return told.key if told.key is not None else told.key_data

    @property
    def headers(self) -> Headers:
        pairs = [(each.name, each.value if each.data is None else each.data) for each in self._told.headers]
        return Headers(tuple(pairs))

    @property
    def priority(self) -> int:
        return self._told.priority

    @property
    def original_id(self) -> str:
        """The id under which it was published first: another one, if it has died and was redriven since."""
        return self._told.original_id or self._told.id

    @property
    def correlation_id(self) -> str:
        """The one given at `put`; the message's id where none was."""
        return self._told.correlation_id or self._told.id

    @property
    def timestamp(self) -> datetime:
        """When it was published; for a delayed message: when it came due."""
        return to_datetime(self._told.timestamp_ns)

    @property
    def timestamp_ns(self) -> int:
        return self._told.timestamp_ns

    @property
    def expires_at(self) -> datetime | None:
        return _moment(self._told.expires_at_ms)

    @property
    def due_at(self) -> datetime | None:
        """The time that it was delayed to, if it was."""
        return _moment(self._told.due_at_ms)

    def __repr__(self) -> str:
        body = self._told.body
        if self._told.size > len(body):
            return f"<{type(self).__name__} {self.id}: {self.size:,} bytes>"
        return f"<{type(self).__name__} {self.id}: {body[:40]!r}{'…' if len(body) > 40 else ''}>"


def payload_at(client: Client, told: messages.Said) -> Payload:
    """A body by its place."""
    path = path_of("topics", told.topic, "partitions", told.partition, "payload", offset=told.offset)
    return Payload(client.beside, path, told.size)


def _moment(ms: int) -> datetime | None:
    return to_datetime(ms * 1_000_000) if ms else None
