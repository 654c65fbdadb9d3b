"""The queue for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from os import PathLike
from typing import Any, Generic, Protocol, TypeVar

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Observer
from holdfast.embedded.aio_group import AsyncGroup
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text, message_of
from holdfast.embedded.face import open_face
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Publisher, Stored
from holdfast.embedded.streaming import AsyncStream, Upload, stream_options
from holdfast.env import World
from holdfast.model import CodecName, Durability
from holdfast.settings import QueueSettings


class Openable(Protocol):
    """What takes a while to open, and must be closed."""

    _engine: BrokerEngine

    async def close(self) -> None: ...


_Face = TypeVar("_Face", bound=Openable)


class AsyncQueue(AsyncGroup[Body], Generic[Body]):
    """A durable queue in a folder, for the tasks of any event loop."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, body_type: Any) -> None:
        super().__init__(engine, group, body_type)
        self._publisher = Publisher(group.topic, self._bodies, engine.world.clock)
        self._mono_ns = engine.world.clock.monotonic_ns
        self._alone = True  # whether the folder is let go with it

    async def put(
        self,
        body: Body,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> Stored:
        """Store a message; returns when it is as durable as asked."""
        began_ns = self._mono_ns()
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        publisher = self._publisher
        if publisher.is_plain(body, options, priority):
            number = publisher.turn()
            appended = await publisher.log(number).append_one_async(body, durability)  # type: ignore[arg-type]
            return publisher.plain_stored(number, body, appended, began_ns)
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self.put_many([message], durability=durability, codec=codec))[0]

    async def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        began_ns = self._mono_ns()
        publisher = self._publisher
        if publisher.all_plain(messages, codec):
            number = publisher.turn()
            appended = await publisher.log(number).append_async(messages, durability=durability)  # type: ignore[arg-type]
            return publisher.plain_many(number, messages, appended, began_ns)
        self._check_open()
        parts = publisher.publish(messages, durability, codec)
        await publisher.wait_async(parts)
        return publisher.stored(parts, began_ns)

    async def put_stream(
        self, stream: AsyncStream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what an (async) iterator of bytes or a binary file gives as one message, without holding it in memory.

        `options` are those of `put`, but `codec`; `Queue.put_stream` says more.
        """
        self._check_open()
        upload = Upload(self._engine.world, self._publisher, stream_options(options), None, size_hint)
        return await upload.run_async(stream, durability)

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = AsyncGroup.receive
    get_nowait = AsyncGroup.receive_nowait
    get_many = AsyncGroup.receive_many

    async def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return self._qsize()

    async def empty(self) -> bool:
        """Whether none is ready now."""
        return await self.qsize() == 0

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await self._aside(self._engine.sync)

    async def close(self) -> None:
        """Sync and let go of the folder; messages in hand come back at the next opening. Closing twice is fine.

        A queue of a broker is only a view: it is let go of, and the broker goes on.
        """
        if self._alone:
            await self._aside(self._engine.close)
        else:
            await super().close()


class Opening(Generic[_Face]):
    """A queue or a broker that is being opened: `await` it, or enter it with `async with`."""

    def __init__(self, open_it: Callable[[], _Face]) -> None:
        self._open = open_it
        self._face: _Face | None = None

    def __await__(self) -> Generator[Any, None, _Face]:
        return self._opened().__await__()

    async def __aenter__(self) -> _Face:
        self._face = await self._opened()
        return self._face

    async def _opened(self) -> _Face:
        """A thread cannot be cancelled: what it opens for nobody is closed again, or its folder would stay locked."""
        opened: Future[_Face] = Future()
        try:
            return await asyncio.to_thread(self._open_into, opened)
        except asyncio.CancelledError:
            opened.add_done_callback(lambda done: done.result()._engine.close())
            raise

    def _open_into(self, opened: Future[_Face]) -> _Face:
        face = self._open()
        opened.set_result(face)
        return face

    async def __aexit__(self, *exc: object) -> None:
        if self._face is not None:
            await self._face.close()


def open(  # noqa: A001  the same name as in the module for threads
    folder: str | PathLike[str],
    *,
    create: bool = True,
    topic: str | None = None,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
    **changes: Any,
) -> Opening[AsyncQueue[Any]]:
    """Open the queue in a folder; `holdfast.open` says what the arguments mean."""
    return Opening(
        partial(
            open_face,
            AsyncQueue,
            folder,
            create=create,
            topic=topic,
            durability=durability,
            body_type=body_type,
            settings=settings,
            observer=observer,
            world=world,
            trust_folder=trust_folder,
            changes=changes,
        )
    )
