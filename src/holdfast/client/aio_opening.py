"""`open`, `open_broker` and `connect` for tasks: `await` what they answer, or enter it with `async with`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from holdfast.api.aio.group import port_of
from holdfast.api.aio.queue import AsyncQueue
from holdfast.client.address import is_address, parse_address, refuse_almost
from holdfast.client.opening import QueueOpening, given, refuse_local, refuse_remote, shared
from holdfast.client.shared import engine_of
from holdfast.embedded.aio_broker import AsyncBroker
from holdfast.embedded.broker_face import open_broker_face
from holdfast.local.opening import async_queue_here, open_face

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.broker.metrics import Observer
    from holdfast.client.client import Client
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.settings import BrokerSettings, QueueSettings

_Face = TypeVar("_Face")


class Opening(Generic[_Face]):
    """A queue or a broker that is being opened: `await` it, or enter it with `async with`."""

    def __init__(self, open_it: Callable[[], Any], finish: Callable[[Any], Awaitable[_Face]]) -> None:
        self._open = open_it
        self._finish = finish
        self._face: _Face | None = None

    def __await__(self) -> Generator[Any, None, _Face]:
        return self._opened().__await__()

    async def __aenter__(self) -> _Face:
        self._face = await self._opened()
        return self._face

    async def _opened(self) -> _Face:
        """A thread cannot be cancelled: what it opens for nobody is closed again, or its folder would stay locked."""
        opened: Future[Any] = Future()
        try:
            found = await asyncio.to_thread(self._open_into, opened)
        except asyncio.CancelledError:
            opened.add_done_callback(lambda done: _let_go(done.result()))
            raise
        return await self._finish(found)

    def _open_into(self, opened: Future[Any]) -> Any:
        found = self._open()
        opened.set_result(found)
        return found

    async def __aexit__(self, *exc: object) -> None:
        face: Any = self._face
        if face is not None:
            await face.close()


def _let_go(found: Any) -> None:
    engine = engine_of(found)
    (found if engine is None else engine).close()


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
    share: bool = True,
    trust_folder: bool | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
    **changes: Any,
) -> Opening[AsyncQueue[Any]]:
    """Open the queue in a folder, or behind a server; `holdfast.open` says what the arguments mean."""
    opening = QueueOpening(create, topic, durability, body_type, settings, changes)
    if is_address(folder):
        refuse_local(observer=observer, world=world, trust_folder=trust_folder)
        name = parse_address(folder).queue
        return Opening(
            partial(_client, folder, given(token=token, tls=tls, timeout=timeout)), partial(_queue, opening, name)
        )
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)
    open_here = partial(
        open_face,
        async_queue_here,
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
    return Opening(
        partial(shared, share, world, folder, open_here, _there, None, for_tasks=True), partial(_queue, opening, None)
    )


async def _queue(opening: QueueOpening, name: str | None, found: Any) -> AsyncQueue[Any]:
    """The queue, where it is another's: that takes calls, which are for tasks."""
    if isinstance(found, AsyncQueue):
        return found
    from holdfast.client.aio_broker import AsyncRemoteBroker

    try:
        queue = await AsyncRemoteBroker(found, None).queue(opening.topic or name, **opening.options)
    except BaseException:
        await found.close_async()
        raise
    opening.promise(port_of(queue))
    return queue


def open_broker(
    folder: str | PathLike[str] | None = None,
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    share: bool = True,
    trust_folder: bool | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
) -> Opening[AsyncBroker]:
    """Use the topics in a data folder, or a server's; `holdfast.open_broker` says what the arguments mean."""
    finish = partial(_broker, body_type, durability)
    if is_address(folder):
        refuse_local(
            observer=observer, world=world, settings=settings, settings_file=settings_file, trust_folder=trust_folder
        )
        return Opening(partial(_client, folder, given(token=token, tls=tls, timeout=timeout)), finish)
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)
    open_here = partial(
        open_broker_face,
        AsyncBroker,
        folder,
        create=create,
        durability=durability,
        body_type=body_type,
        settings=settings,
        settings_file=settings_file,
        observer=observer,
        world=world,
        trust_folder=trust_folder,
    )
    return Opening(partial(shared, share, world, folder, open_here, _there, settings, for_tasks=True), finish)


async def _broker(body_type: Any, durability: Durability | None, found: Any) -> AsyncBroker:
    if isinstance(found, AsyncBroker):
        return found
    from holdfast.client.aio_broker import AsyncRemoteBroker

    return cast("AsyncBroker", AsyncRemoteBroker(found, body_type, durability))


def connect(
    url: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
    body_type: Any = None,
    durability: Durability | None = None,
) -> Opening[AsyncBroker]:
    """The broker behind a server; `holdfast.connect` says what the arguments mean."""
    arguments = given(token=token, tls=tls, timeout=timeout)
    return Opening(partial(_client, url, arguments), partial(_broker, body_type, durability))


def _client(url: Any, options: dict[str, Any]) -> Client:
    from holdfast.client.connecting import client_of

    return client_of(str(url), for_tasks=True, **options)


def _there(client: Client, _: str | None) -> Client:
    return client
