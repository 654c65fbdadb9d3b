"""Messages as a client has them: what each says, where it stands, and what became of its lease."""

from __future__ import annotations

from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, Generic

from holdfast.client.http import path_of
from holdfast.client.payloads import Payload
from holdfast.delivery.group import Failure
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.chunks import Chunks
from holdfast.embedded.listed import PhaseName
from holdfast.embedded.message import Body, Headers
from holdfast.embedded.times import to_datetime
from holdfast.large import CHUNK_BYTES
from holdfast.protocol import dead, messages, queues

if TYPE_CHECKING:
    from holdfast.client.client import Client
    from holdfast.client.group_face import GroupFace
    from holdfast.client.upkeep import Held


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


class RemoteContents(Heard[Body]):
    """A stored message that was looked at."""

    __slots__ = ("_bodies", "_client", "_told")

    def __init__(self, client: Client, bodies: Bodies, told: messages.Said) -> None:
        self._client = client
        self._bodies = bodies
        self._told = told

    def _payload(self) -> Payload:
        return payload_at(self._client, self._told)


class RemoteListed(RemoteContents[Body]):
    """A message that was looked at, and where it stands."""

    __slots__ = ("_group", "_queue")

    _told: queues.Listed

    def __init__(self, face: GroupFace[Any], told: queues.Listed) -> None:
        super().__init__(face._client, face._bodies, told)
        self._queue, self._group = face.topic, face.group

    @property
    def offset(self) -> int | None:  # type: ignore[override]
        """Its place in the partition's log; None while it is delayed and in no log yet."""
        return self._told.offset

    def _payload(self) -> Payload:
        return payload_by_id(self._client, self._queue, self._group, self._told)

    @property
    def phase(self) -> PhaseName:
        return self._told.phase

    @property
    def attempts(self) -> int:
        return self._told.attempts

    @property
    def holder(self) -> str:
        return self._told.holder

    @property
    def reason(self) -> str:
        """Why it died: MAX_ATTEMPTS, REJECTED or EXPIRED; empty while it lives."""
        return self._told.reason

    @property
    def error(self) -> str:
        """What went wrong last."""
        return self._told.error

    @property
    def due_at(self) -> datetime | None:
        """When it will be ready, or was to be."""
        return _moment(self._told.due_ms or self._told.due_at_ms)


class RemoteDeadLetter(RemoteListed[Body]):
    """A message that died: as it was, with every error, the reason and its original place."""

    __slots__ = ()

    _told: dead.Letter

    @property
    def original_id(self) -> str:
        return self._told.original_id

    @property
    def original_offset(self) -> int:
        return self._told.original_offset

    @property
    def original_timestamp(self) -> datetime:
        return self._told.original_timestamp

    @property
    def failures(self) -> tuple[Failure, ...]:
        """How each delivery ended: when, with whom, why, and the error."""
        return tuple(self._told.failures)

    @property
    def first_delivery(self) -> datetime | None:
        return self._told.first_delivery

    @property
    def last_delivery(self) -> datetime | None:
        return self._told.last_delivery

    @property
    def dead_at(self) -> datetime:
        return self._told.dead_at

    @property
    def state(self) -> Any:
        """The document that went with it, or None."""
        return self._told.state


class RemoteHandle(Heard[Body], Generic[Body]):
    """A message in hand, and the facts of its delivery."""

    __slots__ = ("_face", "_held", "_settled", "_state", "_told")

    _told: messages.Delivery

    def __init__(self, face: Any, told: messages.Delivery, held: Held) -> None:
        self._face = face
        self._told = told
        self._held = held
        self._settled = False
        self._state: Any = None

    @property
    def _bodies(self) -> Bodies:  # type: ignore[override]
        bodies: Bodies = self._face._bodies
        return bodies

    def _payload(self) -> Payload:
        face, told = self._face, self._told
        if self._settled:  # its receipt is of no use any more
            return payload_by_id(face._client, face.topic, face.group, told)
        path = path_of("queues", face.topic, "payload", receipt=told.receipt, group=face.group)
        return Payload(face._client.beside, path, told.size)

    def __del__(self) -> None:
        if not self._settled:
            self._face._let_go(self._held)

    @property
    def attempt(self) -> int:
        """Which delivery this is: 1 for the first. Deferred ones are not counted."""
        return self._told.attempt

    @property
    def holder(self) -> str:
        return self._told.holder

    @property
    def fence(self) -> int:
        """The number of this delivery: a later one of any message has a higher one."""
        return self._told.fence

    @property
    def receipt(self) -> str:
        """The proof of this delivery as text, for a later process: see `resume`."""
        return self._told.receipt

    @property
    def lost(self) -> bool:
        """Whether the lease has ended meanwhile, as far as this end knows: then stop, another may have the message."""
        if self._settled:
            return False
        return self._held.is_lost(self._face._caller.world.clock.monotonic_ns())

    @property
    def settled(self) -> bool:
        """Whether it was acked, nacked, deferred or rejected by this handle."""
        return self._settled

    def _end(self) -> None:
        """This handle is through with the message."""
        self._settled = True
        self._held.ended = True


def payload_at(client: Client, told: messages.Said) -> Payload:
    """A body by its place."""
    path = path_of("topics", told.topic, "partitions", told.partition, "payload", offset=told.offset)
    return Payload(client.beside, path, told.size)


def payload_by_id(client: Client, queue: str, group: str, told: messages.Said) -> Payload:
    """A body by the id of its message, which may be a dead letter, or still be delayed."""
    return Payload(client.beside, path_of("queues", queue, "messages", told.id, "payload", group=group), told.size)


def _moment(ms: int) -> datetime | None:
    return to_datetime(ms * 1_000_000) if ms else None
