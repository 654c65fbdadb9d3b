"""Messages that come as a stream, through a server: a small one goes as any other, a large one as it is read."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, Final

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import (
    PIECE_BYTES,
    AsyncStream,
    PublishRequest,
    Stored,
    StreamRequest,
    check_size_hint,
    no_stream,
)
from holdfast.client.calling import AnswerLost, Caller, PooledConnection, Unsent
from holdfast.client.http import BROKEN, Answer, Ask, path_of
from holdfast.client.tls import told
from holdfast.errors import InvalidRequest, Unavailable
from holdfast.model import Durability
from holdfast.protocol import messages as wire
from holdfast.protocol.media import MULTIPART, RAW
from holdfast.remote.publisher import RemotePublisher, check_options

_GATHERED_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 3
_MOST_IN_PATH: Final = 4_000
_LAST_WORDS_S: Final = 1.0  # so long a server that hung up may have had something to say
_BYTES: Final = Bodies(bytes)


async def publish_stream(
    publishing: RemotePublisher, topic: str, request: StreamRequest, usual: Durability | None
) -> Stored:
    """Store all that the stream gives as one message, with the usual durability where no other is asked for."""
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
    """The options of a message as a query; None where they need a form, which not every owner of a folder can read."""
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
        """Read ahead; True where that was all."""
        size = 0
        async for piece in self._source:
            self.gathered.append(piece)
            size += len(piece)
            if size > most_bytes:
                return False
        return True

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of the stream, from its start."""
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
        raise InvalidRequest(f"a stream gives bytes, not {type(piece).__name__}; nothing was stored")
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
        """Send it. While nothing of the stream was sent, it is tried again as any call is."""
        answer = await self._caller.answered(self._ask, self._attempt)
        stored: wire.Stored = self._caller.value_of(answer, wire.Stored)
        return stored

    async def _attempt(self, timeout_s: float) -> Answer:
        connection = await self._caller.connection(timeout_s, careful=True)
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
        """Wait until the server wants the rest; or has refused it, without having read a byte."""
        try:
            await connection.wire.send(self._head, timeout_s)
            answer = None
            while answer is None and not connection.reader.continued:
                content = await connection.wire.receive(timeout_s)
                if not content:
                    raise EOFError("the server closed the connection before it had answered")
                answer = connection.reader.feed(content)
        except (OSError, EOFError, BROKEN) as error:
            raise Unsent(told(self._caller.address, error, fresh=connection.fresh)) from error
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
            raise AnswerLost(told(self._caller.address, failed or error, fresh=False)) from error

    async def _passed(self, connection: PooledConnection, content: bytes, behind: bytes = b"") -> OSError | None:
        chunk = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
        try:
            if chunk or behind:
                await connection.wire.send(chunk + behind, self._caller.timeout_s)
        except OSError as error:
            return error
        return None
