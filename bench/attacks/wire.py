"""A minimal HTTP/1.1 client that can send what no decent client would, from a chosen source address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where to call, as whom, and from which address: all of 127.0.0.0/8 is this machine."""

    port: int
    token: str | None = None
    source: str = "127.0.0.1"


class Answer(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection that is kept alive."""

    def __init__(self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.place = place
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, place: Place) -> Connection:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", place.port, local_addr=(place.source, 0), limit=1 << 20
        )
        return cls(place, reader, writer)

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
        if self.place.token is not None:
            lines.append(f"authorization: Bearer {self.place.token}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        """A request, without waiting for its answer."""
        said = {name.replace("_", "-"): value for name, value in headers.items()} | {"content-length": str(len(body))}
        self.writer.write(self.head(method, path, said) + body)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """The next answer, which has a length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        return Answer(status, await self.reader.readexactly(length))

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("content_type", "application/json")
        await self.send(method, path, body or b"", **headers)
        return await self.answer()

    def close(self) -> None:
        self.writer.transport.abort()


async def call(place: Place, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One call on a connection of its own."""
    connection = await Connection.open(place)
    try:
        return await connection.call(method, path, body, **headers)
    finally:
        connection.close()
