"""Large bodies that are still at the server: they are fetched when somebody wants them, piece by piece."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from holdfast.client.calling import Caller, Connection, Cut
from holdfast.client.http import BROKEN, Answer, Ask, request_bytes
from holdfast.client.strangers import told
from holdfast.client.ways import run
from holdfast.errors import Unavailable
from holdfast.large import CHUNK_BYTES


class Payload:
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
        return cast("BinaryIO", io.BufferedReader(_Reading(self._pieces()), CHUNK_BYTES))

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
        except Cut as cut:
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
        self._connection: Connection | None = None

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
                raise Cut(told(self._caller.address, error, fresh=connection.fresh)) from error
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

    async def _more(self, connection: Connection) -> Answer | None:
        try:
            content = await connection.wire.receive(self._caller.timeout_s)
            if not content:
                raise EOFError("the server closed the connection before it had answered")
            return connection.reader.feed(content)
        except (OSError, EOFError, BROKEN) as error:
            raise Cut(told(self._caller.address, error, fresh=connection.fresh)) from error

    def end(self) -> None:
        """Nobody reads on: what still comes would be taken for the answer to another call."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.wire.close()


class _Reading(io.RawIOBase):
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
