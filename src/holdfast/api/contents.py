"""The fields of a stored message: one set of accessors for messages in flight, peeked ones and dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime
from io import BytesIO
from operator import attrgetter
from typing import Any, BinaryIO, Final, Generic, Protocol, TypeVar

from holdfast.api.drafts import Bodies, moment_at, to_datetime
from holdfast.broker.messages import (
    BYTES_HEADERS,
    CORRELATION_ID,
    TEXT_HEADERS,
    TEXT_KEY,
    TOMBSTONE,
    id_of,
    mark,
    original_of,
    users_headers,
)
from holdfast.env.process import asyncio
from holdfast.errors import InvalidRequest
from holdfast.large import CHUNK_BYTES, LargeValue
from holdfast.model import Record

# A body in pieces, for threads and for tasks.


_MOST_BYTES: Final = 64 << 20


class InPieces(Protocol):
    """A value that is not held in memory: in a file, or on a server."""

    def chunks(self, size: int) -> Iterator[bytes]:
        """Iterate over its bytes in pieces of this size."""


class Chunks:
    """The pieces of a value, all of the same size except the last, for `for` and `async for`.

    If the value is damaged, ChecksumMismatch is raised instead of the last piece.
    """

    def __init__(self, value: bytes | InPieces, size: int) -> None:
        if type(size) is not int or not 1 <= size <= _MOST_BYTES:
            raise InvalidRequest(f"size={size!r} cannot be used: give a number of bytes from 1 to {_MOST_BYTES}")
        self._value = value
        self._size = size

    def __iter__(self) -> Iterator[bytes]:
        value, size = self._value, self._size
        if not isinstance(value, bytes):
            return value.chunks(size)
        return (value[at : at + size] for at in range(0, len(value), size))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = iter(self)
        if isinstance(self._value, bytes):
            for chunk in chunks:
                yield chunk
        else:  # each read may block: it comes from the disk, or from a server
            while (part := await asyncio.to_thread(next, chunks, None)) is not None:
                yield part


Body = TypeVar("Body")


class Headers(Mapping[str, Any]):
    """The headers of a message, by name. For a repeated name this is the first value; `all` returns every one."""

    def __init__(self, pairs: tuple[tuple[str, Any], ...]) -> None:
        self.pairs = pairs

    def __getitem__(self, name: str) -> Any:
        for known, value in self.pairs:
            if known == name:
                return value
        raise KeyError(name)

    def all(self, name: str) -> list[Any]:
        """Return every value of this name, in order."""
        return [value for known, value in self.pairs if known == name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self.pairs))

    def __len__(self) -> int:
        return len({name for name, _ in self.pairs})

    def __repr__(self) -> str:
        return f"Headers({self.pairs!r})"


class Home(Protocol):
    """Where a message is stored: a partition of a topic."""

    @property
    def topic(self) -> str:
        """The topic's name."""

    @property
    def number(self) -> int:
        """The partition's number."""

    def id_of(self, record: Record) -> str:
        """The message's id."""


class PartitionHome:
    """A partition as the home of messages that are not in flight."""

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number

    def id_of(self, record: Record) -> str:
        """The message's id."""
        return id_of(self.topic, self.number, record)


class Taken(Protocol):
    """A message that a port has handed out, and the facts of its delivery."""

    @property
    def home(self) -> Any:
        """Where it is stored: a Home."""

    @property
    def record(self) -> Record:
        """The message as it is stored."""

    @property
    def attempt(self) -> int:
        """The number of this delivery, 1 for the first."""

    @property
    def holder(self) -> str:
        """The name of the consumer that has it."""

    @property
    def fence(self) -> int:
        """The fencing number of this delivery."""


class MessageFields(Generic[Body]):
    """The fields of a stored message."""

    __slots__ = ()

    _home: Home
    _bodies: Bodies
    _record: Record

    @property
    def id(self) -> str:
        """The id of the message, such as orders-0-17."""
        return self._home.id_of(self._record)

    @property
    def original_id(self) -> str:
        """The id under which it was first published. It differs from `id` if the message was redriven since."""
        original = original_of(self._record)
        return self.id if original is None else original.id

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self._home.topic

    @property
    def partition(self) -> int:
        """The number of its partition."""
        return self._home.number

    @property
    def offset(self) -> int:
        """Its offset in the partition."""
        return self._record.offset

    @property
    def raw(self) -> bytes:
        """The body as the bytes that were stored. A large body is read from disk each time: see `open`."""
        value = self._record.value
        return value if isinstance(value, bytes) else bytes(value)

    @property
    def size(self) -> int:
        """The size of the body in bytes. A large body is not read for this."""
        return len(self._record.value)

    def open(self) -> BinaryIO:
        """Open the body as a binary file, so that a large one is not held in memory.

        Returns:
            A file to read from start to end.

        Raises:
            ChecksumMismatch: Instead of the last bytes, if the body is damaged.
        """
        value = self._record.value
        return BytesIO(value) if isinstance(value, bytes) else value.open()

    def chunks(self, size: int = CHUNK_BYTES) -> Chunks:
        """Return the body in pieces.

        Args:
            size: The bytes of a piece; the last one may be shorter.

        Returns:
            The pieces, for `for` and for `async for`.

        Raises:
            ChecksumMismatch: Instead of the last piece, if the body is damaged.
        """
        return Chunks(self._record.value, size)

    @property
    def body(self) -> Body:
        """The body, in the type that the queue was opened with. Raises BadBody if it does not fit that type.

        None for a tombstone, which deletes its key.
        """
        if self._record.flags & TOMBSTONE:
            return None  # type: ignore[return-value]
        body: Body = self._bodies.decode(self.raw)
        return body

    @property
    def key(self) -> str | bytes | None:
        """The key as it was given, or None."""
        key = self._record.key
        return key.decode() if key is not None and self._record.flags & TEXT_KEY else key

    @property
    def headers(self) -> Headers:
        """The headers as they were given."""
        pairs = users_headers(self._record.headers)
        if not self._record.flags & TEXT_HEADERS:
            return Headers(pairs)
        noted = mark(self._record, BYTES_HEADERS)
        as_bytes = set() if noted is None else set(map(int, noted.split(b",")))
        return Headers(
            tuple((name, value if i in as_bytes else value.decode()) for i, (name, value) in enumerate(pairs))
        )

    @property
    def priority(self) -> int:
        """The priority, 0 to 9; 9 is the most urgent."""
        return self._record.priority

    @property
    def correlation_id(self) -> str:
        """The correlation id that was given, or else the message's id."""
        given = mark(self._record, CORRELATION_ID) if self._record.headers else None
        return self.id if given is None else given.decode()

    @property
    def timestamp(self) -> datetime:
        """When it was published; for a delayed message, when it became due."""
        return to_datetime(self._record.timestamp_ns)

    @property
    def timestamp_ns(self) -> int:
        """The timestamp in nanoseconds since 1970."""
        return self._record.timestamp_ns

    @property
    def expires_at(self) -> datetime | None:
        """When it expires, or None."""
        return moment_at(self._record.expires_at_ms)

    @property
    def due_at(self) -> datetime | None:
        """The time it was delayed to, or None."""
        return moment_at(self._record.due_at_ms)

    def __repr__(self) -> str:
        value: Any = self._record.value
        if not isinstance(value, bytes | LargeValue):  # it is on a server, and is not fetched for this
            return f"<{type(self).__name__} {self.id}: {len(value):,} bytes>"
        start = value[:40] if isinstance(value, bytes) else value.first(40)
        return f"<{type(self).__name__} {self.id}: {start!r}{'…' if len(value) > 40 else ''}>"


class Contents(MessageFields[Body]):
    """A stored message that is not leased, as `peek` and `read` return it."""

    __slots__ = ("_bodies", "_home", "_record")

    def __init__(self, home: Home, bodies: Bodies, record: Record) -> None:
        self._home = home
        self._bodies = bodies
        self._record = record


# For the rest of the package: a message's record and its home, which are not part of the public API.
record_of: Callable[[MessageFields[Any]], Record] = attrgetter("_record")
home_of: Callable[[MessageFields[Any]], Any] = attrgetter("_home")
