"""What a server says of messages, as the records that a broker keeps: one set of accessors serves both."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, BinaryIO, cast

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Contents
from holdfast.api.listing import DeadLetter, Listed, Waiting
from holdfast.api.times import instant_ns
from holdfast.broker.folder.layout import parse_message_id
from holdfast.broker.messages import (
    BYTES_HEADERS,
    CORRELATION_ID,
    MOVED,
    ORIGINAL,
    TEXT_HEADERS,
    TEXT_KEY,
    TOMBSTONE,
    DeadNote,
    Original,
    encode_original,
)
from holdfast.client.calling import AnswerLost, Caller, PooledConnection
from holdfast.client.http import BROKEN, Answer, Ask, path_of, request_bytes
from holdfast.client.network import run
from holdfast.client.tls import told
from holdfast.errors import Unavailable
from holdfast.large import CHUNK_BYTES
from holdfast.model import Record
from holdfast.protocol import messages, queues
from holdfast.remote.client import Client

# Large bodies that are still at the server: they are fetched when somebody wants them, piece by piece.


class RemoteBody:
    """A body behind a server, read by the blocking calls of `caller`. Each reading asks the server anew, at the path
    of that moment; what was read as a whole is kept.
    """

    def __init__(self, caller: Caller, path: str | Callable[[], str], size: int) -> None:
        self._caller = caller
        self._path = path
        self._size = size
        self._whole: bytes | None = None

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        """All of it, in memory."""
        if self._whole is None:
            self._whole = b"".join(self._pieces())
        return self._whole

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Pieces of `size` bytes each, but the last."""
        gathered = bytearray()
        for piece in self._pieces():
            gathered += piece
            whole = len(gathered) // size * size
            for at in range(0, whole, size):
                yield bytes(gathered[at : at + size])
            del gathered[:whole]
        if gathered:
            yield bytes(gathered)

    def open(self) -> BinaryIO:
        """A file to read it from, front to back."""
        return cast("BinaryIO", io.BufferedReader(_BodyReader(self._pieces()), CHUNK_BYTES))

    def _pieces(self) -> Iterator[bytes]:
        """Whatever comes; Unavailable where it ends too early."""
        if self._whole is not None:
            yield self._whole
            return
        fetching = _Fetching(self._caller, self._path if isinstance(self._path, str) else self._path())
        came = 0
        try:
            for piece in fetching.pieces():
                came += len(piece)
                yield piece
        except AnswerLost as cut:
            raise Unavailable(
                f"a body of {self._size:,} bytes broke off after {came:,} of them on its way from "
                f"{self._caller.address.text}: {cut}. Read it again from the start"
            ) from None
        finally:
            fetching.end()


class _Fetching:
    """One answer that is read as it comes. Until its head is there it is asked for again, as any call is."""

    def __init__(self, caller: Caller, path: str) -> None:
        self._caller = caller
        self._ask = Ask(method="GET", path=path)
        self._connection: PooledConnection | None = None

    def pieces(self) -> Iterator[bytes]:
        answer = run(self._caller.answered(self._ask, self._attempt))
        while self._connection is not None:
            yield from self._connection.reader.taken()
            whole = run(self._more(self._connection))
            if whole is not None:
                answer, connection, self._connection = whole, self._connection, None
                self._caller.give_back(connection, whole)
        if answer.body:
            yield answer.body

    async def _attempt(self, timeout_s: float) -> Answer:
        """The head of the answer, or the whole of a short one: a refusal, as a rule."""
        connection = await self._caller.connection(timeout_s, careful=False)
        self._connection = connection
        done = False
        try:
            try:
                await connection.wire.send(request_bytes(self._ask, self._caller.common), timeout_s)
            except OSError as error:
                raise AnswerLost(told(self._caller.address, error, fresh=connection.fresh)) from error
            answer: Answer | None = None
            while answer is None and not 200 <= connection.reader.status < 300:
                answer = await self._more(connection)
            done = True
        finally:
            if not done:
                self.end()
        if answer is None:
            answer = Answer()
            answer.status = connection.reader.status
        else:
            self._connection = None
            self._caller.give_back(connection, answer)
        return answer

    async def _more(self, connection: PooledConnection) -> Answer | None:
        try:
            content = await connection.wire.receive(self._caller.timeout_s)
            if not content:
                raise EOFError("the server closed the connection before it had answered")
            return connection.reader.feed(content)
        except (OSError, EOFError, BROKEN) as error:
            raise AnswerLost(told(self._caller.address, error, fresh=connection.fresh)) from error

    def end(self) -> None:
        """Nobody reads on: what still comes would be taken for the answer to another call."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.wire.close()


class _BodyReader(io.RawIOBase):
    """Pieces as a file without a buffer."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        some, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)

    def close(self) -> None:
        """Let go of the connection, too."""
        self._left = memoryview(b"")
        self._pieces.close()  # type: ignore[attr-defined]  # it is a generator
        super().close()


class ToldPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a message is kept, as its server says: which is also what the message is called."""

    topic: str
    number: int
    id: str

    def id_of(self, record: Record) -> str:
        """The message's id."""
        return self.id


def place_of(told: messages.Said) -> ToldPlace:
    """Where the message is kept."""
    return ToldPlace(told.topic, told.partition, told.id)


def record_told(told: messages.Said, payload: RemoteBody | None) -> Record:
    """The message as a broker keeps it; `payload` is its body where that did not come along."""
    offset: Any = told.offset
    value: Any = told.body if payload is None else payload
    marked = told.correlation_id not in ("", told.id)
    keyed = told.key is not None or told.key_data is not None
    if not (marked or keyed or told.headers or told.original_id or told.tombstone):  # as most are
        times = told.priority, told.expires_at_ms, told.due_at_ms
        return Record(offset, told.timestamp_ns, value, None, (), *times)
    headers, flags = _headers(told)
    if told.key is not None:
        flags |= TEXT_KEY
    if told.tombstone:
        flags |= TOMBSTONE
    if marked:
        headers.append((CORRELATION_ID, told.correlation_id.encode()))
    if told.original_id:
        flags |= MOVED
        headers.append((ORIGINAL, encode_original(Original(told.original_id, 0, 0))))
    key = told.key_data if told.key is None else told.key.encode()
    return Record(
        offset,
        told.timestamp_ns,
        value,
        key,
        tuple(headers),
        told.priority,
        told.expires_at_ms,
        told.due_at_ms,
        flags,
    )


def _headers(told: messages.Said) -> tuple[list[tuple[str, bytes]], int]:
    """The headers as they are stored, and the flag that says that some are text."""
    stored: list[tuple[str, bytes]] = []
    as_bytes: list[int] = []
    for i, each in enumerate(told.headers):
        if each.data is not None:
            as_bytes.append(i)
        stored.append((each.name, (each.value or "").encode() if each.data is None else each.data))
    if len(as_bytes) == len(stored):
        return stored, 0
    if as_bytes:
        stored.append((BYTES_HEADERS, b",".join(b"%d" % i for i in as_bytes)))
    return stored, TEXT_HEADERS


def contents_told(client: Client, bodies: Bodies, told: messages.Said) -> Contents[Any]:
    """A message that was read or peeked at."""
    payload = None
    if told.omitted:
        path = path_of("topics", told.topic, "partitions", told.partition, "payload", offset=told.offset)
        payload = RemoteBody(client.beside, path, told.size)
    return Contents(place_of(told), bodies, record_told(told, payload))


def path_by_id(queue: str, group: str, message_id: str) -> str:
    """Where the body of a message is, which may be a dead letter, or still be delayed."""
    return path_of("queues", queue, "messages", message_id, "payload", group=group)


def listed_told(client: Client, bodies: Bodies, queue: str, group: str, told: queues.Listed) -> Listed[Any]:
    """A message that was looked at, and where it stands."""
    payload = RemoteBody(client.beside, path_by_id(queue, group, told.id), told.size) if told.omitted else None
    record, home = record_told(told, payload), place_of(told)
    if isinstance(told, queues.Letter):
        return DeadLetter(home, bodies, record, _note(told, group))
    if told.offset is None:
        number = parse_message_id(told.id, told.topic).delayed_id
        return Waiting(home, bodies, msgspec.structs.replace(record, offset=number), told.due_ms)
    return Listed(
        home,
        bodies,
        record,
        told.phase,
        due_ms=told.due_ms,
        attempts=told.attempts,
        holder=told.holder,
        error=told.error,
        until_ms=told.lease_until_ms,
    )


def _note(told: queues.Letter, group: str) -> DeadNote:
    first = Original(told.original_id, told.original_offset, instant_ns(told.original_timestamp, "original_timestamp"))
    return DeadNote(
        id=told.original_id,
        topic=told.topic,
        partition=told.partition,
        group=group,
        offset=told.original_offset,
        timestamp_ns=first.timestamp_ns,
        reason=told.reason,
        error=told.error,
        attempts=told.attempts,
        first_ms=_ms(told.first_delivery),
        last_ms=_ms(told.last_delivery),
        dead_at_ms=_ms(told.dead_at),
        holder=told.holder,
        priority=told.priority,
        failures=tuple(told.failures),
        state=None if told.state is None else msgspec.json.encode(told.state),
        original=first,
        expires_at_ms=told.expires_at_ms,
        due_at_ms=told.due_at_ms,
    )


def _ms(time: datetime | None) -> int:
    return 0 if time is None else instant_ns(time, "time") // 1_000_000
