"""The queue for tasks: put and get, with a folder and nothing else. It is a topic with one group."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Generic

from holdfast.api.aio.group import AsyncGroup
from holdfast.api.contents import Body
from holdfast.api.drafts import (
    AsyncStream,
    HeadersLike,
    NewMessage,
    Seconds,
    Stored,
    StreamRequest,
    Text,
    check_size_hint,
    message_of,
    stream_options,
)
from holdfast.model import CodecName, Durability

_NO_OPTIONS = (None,) * 8


class AsyncQueue(AsyncGroup[Body], Generic[Body]):
    """A durable queue, for the tasks of any event loop."""

    async def put(
        self, body: Body, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        durability: Durability | None = None, codec: CodecName | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message; returns when it is as durable as asked."""
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        if type(body) is bytes and options == _NO_OPTIONS and type(priority) is int and not priority:
            plain: Any = body
            stored = await self._port.put_plain(plain, durability)
            if stored is not None:
                return stored
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self._port.put([message], durability, codec))[0]

    async def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        return await self._port.put(messages, durability, codec)

    async def put_stream(
        self, stream: AsyncStream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message, without holding it in memory.

        `options` are those of `put`: key, headers, priority, delay, at, ttl, dedup_id, correlation_id. What is too
        large is refused at once where `size_hint` says how many bytes will come.
        """
        self._port.check_open()
        check_size_hint(size_hint)
        message = stream_options(options)
        return await self._port.upload(
            StreamRequest(stream=stream, message=message, size_hint=size_hint, durability=durability)
        )

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = AsyncGroup.receive
    get_nowait = AsyncGroup.receive_nowait
    get_many = AsyncGroup.receive_many

    async def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return await self._port.qsize()

    async def empty(self) -> bool:
        """Whether none is ready now."""
        return await self.qsize() == 0

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await self._port.sync()

    async def close(self) -> None:
        """Sync and let go of what was opened for it; messages in hand come back. Closing twice is fine.

        A queue of a broker is only a view: it is let go of, and the broker goes on.
        """
        await self._port.close()
