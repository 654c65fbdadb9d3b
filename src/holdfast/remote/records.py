"""Messages from a server, decoded into the same records that a broker stores, so that both share their accessors."""

from __future__ import annotations

import io
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final, cast

import msgspec

from holdfast.api.contents import Contents
from holdfast.api.drafts import (
    PIECE_BYTES,
    AsyncStream,
    Bodies,
    PublishRequest,
    Stored,
    StreamRequest,
    check_size_hint,
    instant_ns,
    no_stream,
)
from holdfast.api.listing import DeadLetter, Listed, SearchedQueue, SearchHit, SearchPage, Waiting
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
from holdfast.client.calling import (
    BROKEN,
    Answer,
    AnswerLost,
    Ask,
    Caller,
    PooledConnection,
    Unsent,
    path_of,
    request_bytes,
)
from holdfast.client.network import run
from holdfast.errors import InvalidRequest, Unavailable
from holdfast.large import CHUNK_BYTES
from holdfast.model import Durability, Record
from holdfast.protocol import messages
from holdfast.protocol import messages as wire
from holdfast.protocol.media import MULTIPART, RAW
from holdfast.remote.client import Client
from holdfast.remote.publisher import RemotePublisher, check_options

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
        """Read the whole body into memory."""
        if self._whole is None:
            self._whole = b"".join(self._pieces())
        return self._whole

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Iterate over pieces of `size` bytes; the last may be shorter."""
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
        """Return a file to read it from start to end."""
        return cast("BinaryIO", io.BufferedReader(_BodyReader(self._pieces()), CHUNK_BYTES))

    def _pieces(self) -> Iterator[bytes]:
        """Whatever comes; Unavailable where it ends before it is complete."""
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
                f"the connection to {self._caller.address.text} broke after {came:,} of a body's {self._size:,} "
                f"bytes: {cut}. Read it again from the start"
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
        connection = await self._caller.connection(timeout_s, careful=False, path=self._ask.path)
        self._connection = connection
        done = False
        try:
            try:
                content = self._caller.addressed(request_bytes(self._ask, self._caller.common), connection)
                await connection.wire.send(content, timeout_s)
            except OSError as error:
                raise self._caller.cut_off(connection, error) from error
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
                raise EOFError("the server closed the connection without responding")
            return connection.reader.feed(content)
        except (OSError, EOFError, BROKEN) as error:
            raise self._caller.cut_off(connection, error) from error

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
        """Close the connection, too."""
        self._left = memoryview(b"")
        self._pieces.close()  # type: ignore[attr-defined]  # it is a generator
        super().close()


class NamedPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a message is kept, as its server says: which is also what the message is called."""

    topic: str
    number: int
    id: str

    def id_of(self, record: Record) -> str:
        """The message's id."""
        return self.id


def place_of(message: messages.Said) -> NamedPlace:
    """Return where the message is stored."""
    return NamedPlace(message.topic, message.partition, message.id)


def record_from(message: messages.Said, payload: RemoteBody | None) -> Record:
    """Return the message as a broker stores it; `payload` is its body if that was not included."""
    offset: Any = message.offset
    value: Any = message.body if payload is None else payload
    marked = message.correlation_id not in ("", message.id)
    keyed = message.key is not None or message.key_data is not None
    if not (marked or keyed or message.headers or message.original_id or message.tombstone):  # as most are
        times = message.priority, message.expires_at_ms, message.due_at_ms
        return Record(offset, message.timestamp_ns, value, None, (), *times)
    headers, flags = _headers(message)
    if message.key is not None:
        flags |= TEXT_KEY
    if message.tombstone:
        flags |= TOMBSTONE
    if marked:
        headers.append((CORRELATION_ID, message.correlation_id.encode()))
    if message.original_id:
        flags |= MOVED
        headers.append((ORIGINAL, encode_original(Original(message.original_id, 0, 0))))
    key = message.key_data if message.key is None else message.key.encode()
    return Record(
        offset,
        message.timestamp_ns,
        value,
        key,
        tuple(headers),
        message.priority,
        message.expires_at_ms,
        message.due_at_ms,
        flags,
    )


def _headers(message: messages.Said) -> tuple[list[tuple[str, bytes]], int]:
    """Return the headers as they are stored, and the flag that says that some are text."""
    stored: list[tuple[str, bytes]] = []
    as_bytes: list[int] = []
    for i, each in enumerate(message.headers):
        if each.data is not None:
            as_bytes.append(i)
        stored.append((each.name, (each.value or "").encode() if each.data is None else each.data))
    if len(as_bytes) == len(stored):
        return stored, 0
    if as_bytes:
        stored.append((BYTES_HEADERS, b",".join(b"%d" % i for i in as_bytes)))
    return stored, TEXT_HEADERS


def contents_from(client: Client, bodies: Bodies, message: messages.Said) -> Contents[Any]:
    """Return a message that was read or peeked at."""
    payload = None
    if message.omitted:
        path = path_of("topics", message.topic, "partitions", message.partition, "payload", offset=message.offset)
        payload = RemoteBody(client.beside, path, message.size)
    return Contents(place_of(message), bodies, record_from(message, payload))


def path_by_id(queue: str, group: str, message_id: str) -> str:
    """Return where the body of a message is; it may be a dead letter or delayed."""
    return path_of("queues", queue, "messages", message_id, "payload", group=group)


def listed_from(client: Client, bodies: Bodies, queue: str, group: str, message: messages.Listed) -> Listed[Any]:
    """Return a listed message with its phase."""
    payload = RemoteBody(client.beside, path_by_id(queue, group, message.id), message.size) if message.omitted else None
    record, home = record_from(message, payload), place_of(message)
    if isinstance(message, messages.Letter):
        return DeadLetter(home, bodies, record, _note(message, group))
    if message.offset is None:
        number = parse_message_id(message.id, message.topic).delayed_id
        return Waiting(home, bodies, msgspec.structs.replace(record, offset=number), message.due_ms)
    return Listed(
        home,
        bodies,
        record,
        message.phase,
        due_ms=message.due_ms,
        attempts=message.attempts,
        holder=message.holder,
        error=message.error,
        until_ms=message.lease_until_ms,
    )


class FoundLetter(Listed[Any]):
    """A dead letter that a search found: the server tells less of it than of one that is looked up by its id."""

    __slots__ = ("_reason",)

    def __init__(self, bodies: Bodies, record: Record, message: messages.Listed) -> None:
        facts: dict[str, Any] = {"attempts": message.attempts, "holder": message.holder, "error": message.error}
        super().__init__(place_of(message), bodies, record, "dead", due_ms=message.due_ms, **facts)
        self._reason = message.reason

    @property
    def reason(self) -> str:
        return self._reason


def search_page_from(client: Client, bodies: Bodies, answer: messages.SearchAnswer) -> SearchPage:
    """Return what a search found and looked at."""
    found = []
    for each in answer.messages:
        if each.phase == "dead":
            payload = RemoteBody(client.beside, path_by_id(each.topic, each.group, each.id), each.size)
            message: Listed[Any] = FoundLetter(bodies, record_from(each, payload), each)
        else:
            message = listed_from(client, bodies, each.topic, each.group, each)
        found.append(SearchHit(message, each.group))
    return SearchPage(
        messages=found,
        next=answer.next,
        scanned=answer.scanned,
        scanned_in_all=answer.scanned_in_all,
        queues=[SearchedQueue(**msgspec.structs.asdict(each)) for each in answer.queues],
        left=answer.left,
        left_out=answer.left_out,
        not_queues=answer.not_queues,
        where=answer.where,
    )


def _note(message: messages.Letter, group: str) -> DeadNote:
    first = Original(
        message.original_id, message.original_offset, instant_ns(message.original_timestamp, "original_timestamp")
    )
    return DeadNote(
        id=message.original_id,
        topic=message.topic,
        partition=message.partition,
        group=group,
        offset=message.original_offset,
        timestamp_ns=first.timestamp_ns,
        reason=message.reason,
        error=message.error,
        attempts=message.attempts,
        first_ms=_ms(message.first_delivery),
        last_ms=_ms(message.last_delivery),
        dead_at_ms=_ms(message.dead_at),
        holder=message.holder,
        priority=message.priority,
        failures=tuple(message.failures),
        state=None if message.state is None else msgspec.json.encode(message.state),
        original=first,
        expires_at_ms=message.expires_at_ms,
        due_at_ms=message.due_at_ms,
    )


def _ms(time: datetime | None) -> int:
    return 0 if time is None else instant_ns(time, "time") // 1_000_000


# Messages that come as a stream, through a server: a small one goes as any other, a large one as it is read.


_GATHERED_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 3
_MOST_IN_PATH: Final = 4_000
_LAST_WORDS_S: Final = 1.0  # so long a server that hung up may have had something to say
_BYTES: Final = Bodies(bytes)


async def publish_stream(
    publishing: RemotePublisher, topic: str, request: StreamRequest, usual: Durability | None
) -> Stored:
    """Store one message whose body is read from the stream, with the default durability if none is given."""
    message, partition, durability = request.message, request.partition, request.durability or usual
    check_size_hint(request.size_hint)
    check_options(durability, None)
    reading = StreamReader(publishing.caller, request.stream)
    if await reading.gather(_GATHERED_BYTES):
        whole = msgspec.structs.replace(message, body=b"".join(reading.gathered))
        (stored,) = await publishing.publish(topic, PublishRequest([whole], partition, durability), _BYTES)
        return stored
    ((sent,), _) = publishing.messages([message], _BYTES, "publish_stream")
    sent.body = None
    ours = reading.can_rewind and sent.dedup_id is None and sent.dedup_data is None
    if ours:  # it may be sent more than once, and is stored once
        sent.dedup_id = publishing.new_id()
    in_path = _query(sent)
    form = None if in_path is not None else msgspec.json.encode(sent)
    path = path_of("queues", topic, "enqueue", partition=partition, durability=durability, **(in_path or {}))
    answer = await _sent(publishing.caller, path, form, reading)
    return Stored(
        answer.topic,
        answer.offset,
        answer.delayed_id,
        answer.duplicate and not ours,
        answer.durability,
        answer.partition,
    )


def _query(message: wire.NewMessage) -> dict[str, Any] | None:
    """Return the options of a message as a query; None if they need a form, which older owners cannot read."""
    if message.key_data is not None or message.dedup_data is not None:
        return None
    headers = [(each.name, each.value) for each in wire.headers_of(message)]
    if any(value is None or ":" in name for name, value in headers) or len(message.key or "") > _MOST_IN_PATH:
        return None
    if sum(len(name) + len(value or "") for name, value in headers) > _MOST_IN_PATH:
        return None
    return {
        "key": message.key,
        "header": [f"{name}:{value}" for name, value in headers],
        "priority": message.priority or None,
        "delay": message.delay,
        "at": None if message.at is None else message.at.isoformat(),
        "ttl": message.ttl,
        "dedup_id": message.dedup_id,
        "correlation_id": message.correlation_id,
    }


async def _sent(caller: Caller, path: str, options: bytes | None, reading: StreamReader) -> wire.Stored:
    upload = StreamUpload(caller, path, options, reading)
    for attempt in range(_ATTEMPTS):
        upload.begun = False
        try:
            return await upload.run()
        except Unavailable as error:
            if not upload.begun:
                raise
            if not reading.can_rewind:
                error.add_note("the stream cannot be read again, and was not sent again")
                raise
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


class StreamReader:
    """A stream of any kind, read piece by piece; and once more, if it is a file that can go back."""

    def __init__(self, caller: Caller, stream: AsyncStream) -> None:
        self._aside = caller.ways.aside
        self._stream: Any = stream
        self._read = getattr(stream, "read", None)
        self.gathered: list[bytes] = []
        self._used = False
        self._start: int | None = None
        if self._read is not None:
            seekable = getattr(stream, "seekable", None)
            self._start = stream.tell() if seekable is not None and seekable() else None  # type: ignore[union-attr]
        elif not isinstance(stream, AsyncIterable):
            if isinstance(stream, (bytes, bytearray, memoryview, str)) or not isinstance(stream, Iterable):
                raise no_stream(stream)
            self._stream = iter(stream)
        self._source = self._pieces()

    @property
    def can_rewind(self) -> bool:
        return self._start is not None

    async def gather(self, most_bytes: int) -> bool:
        """Read ahead; returns True if that was all."""
        size = 0
        async for piece in self._source:
            self.gathered.append(piece)
            size += len(piece)
            if size > most_bytes:
                return False
        return True

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the whole stream from its start."""
        if self._used:
            await self._aside(lambda: self._stream.seek(self._start))
            self.gathered = []
            self._source = self._pieces()
        self._used = True
        while self.gathered:
            yield self.gathered.pop(0)
        async for piece in self._source:
            yield piece

    async def _pieces(self) -> AsyncIterator[bytes]:
        if isinstance(self._stream, AsyncIterable):
            async for piece in self._stream:
                for part in _parts(piece):
                    yield part
            return
        ended = object()
        while True:
            piece = await self._aside(lambda: self._read(PIECE_BYTES) if self._read else next(self._stream, ended))
            if piece is ended or (self._read and not piece):
                return
            for part in _parts(piece):
                yield part


def _parts(piece: object) -> Iterable[bytes]:
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"a stream must yield bytes, not {type(piece).__name__}; nothing was stored")
    for at in range(0, len(piece), _GATHERED_BYTES):
        yield bytes(piece[at : at + _GATHERED_BYTES])


class StreamUpload:
    """One message on its way: its body, or a form of options and body. It begins when the server says that it may."""

    def __init__(self, caller: Caller, path: str, options: bytes | None, reading: StreamReader) -> None:
        self._caller = caller
        self._reading = reading
        self._ask = Ask(method="POST", path=path, again=False)
        self._before = self._behind = b""
        media = RAW
        if options is not None:
            boundary = "".join(f"{caller.world.ids.random_u32():08x}" for _ in range(4))
            media = f"{MULTIPART}; boundary={boundary}"
            part = f'--{boundary}\r\ncontent-disposition: form-data; name="%s"\r\n\r\n'
            self._before = (part % "options").encode() + options + b"\r\n" + (part % "payload").encode()
            self._behind = f"\r\n--{boundary}--\r\n".encode()
        self._head = (
            f"POST {path} HTTP/1.1\r\n".encode("latin-1")
            + caller.common
            + f"content-type: {media}\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n".encode()
        )
        self.begun = False

    async def run(self) -> wire.Stored:
        """Send it. As long as nothing of the stream was sent, it is retried like any call."""
        answer = await self._caller.answered(self._ask, self._attempt)
        stored: wire.Stored = self._caller.value_of(answer, wire.Stored)
        return stored

    async def _attempt(self, timeout_s: float) -> Answer:
        connection = await self._caller.connection(timeout_s, careful=True, path=self._ask.path)
        done = False
        try:
            answer = await self._invited(connection, timeout_s)
            if answer is None:
                self.begun = True
                answer = await self._send(connection)
            done = True
        finally:
            if not done:
                connection.wire.close()
        self._caller.give_back(connection, answer)
        return answer

    async def _invited(self, connection: PooledConnection, timeout_s: float) -> Answer | None:
        """Wait until the server wants the rest, or has refused it without reading a byte."""
        try:
            await connection.wire.send(self._caller.addressed(self._head, connection), timeout_s)
            answer = None
            while answer is None and not connection.reader.continued:
                content = await connection.wire.receive(timeout_s)
                if not content:
                    raise EOFError("the server closed the connection without responding")
                answer = connection.reader.feed(content)
        except (OSError, EOFError, BROKEN) as error:
            raise Unsent(str(self._caller.cut_off(connection, error))) from error
        return answer

    async def _send(self, connection: PooledConnection) -> Answer:
        failed = await self._passed(connection, self._before)
        # An error of the stream itself is the caller's, whatever it is: it is not to be taken for one of ours.
        async for piece in self._reading.pieces():
            if failed is not None or connection.wire.ended():
                break  # the server has said something, which can only be that it does not want it
            failed = await self._passed(connection, piece)
        else:
            failed = failed or await self._passed(connection, self._behind, b"0\r\n\r\n")
        try:
            return await self._caller.answer_of(connection, self._caller.timeout_s if failed is None else _LAST_WORDS_S)
        except (OSError, EOFError, BROKEN) as error:
            raise self._caller.cut_off(connection, failed or error) from error

    async def _passed(self, connection: PooledConnection, content: bytes, behind: bytes = b"") -> OSError | None:
        chunk = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
        try:
            if chunk or behind:
                await connection.wire.send(chunk + behind, self._caller.timeout_s)
        except OSError as error:
            return error
        return None
