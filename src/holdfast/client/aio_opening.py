"""`open`, `open_broker` and `connect` for tasks: `await` what they answer, or enter it with `async with`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.aio.opening import AsyncOpening, opened_aside
from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.ports import port_of
from holdfast.client.address import is_address, parse_address, refuse_almost
from holdfast.client.opening import QueueOpening, given, refuse_local, refuse_remote, shared
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.opening import close_engine, open_broker_port, open_queue_port

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.broker.metrics import Observer
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.remote.client import Client
    from holdfast.settings import BrokerSettings, QueueSettings

_Opened: TypeAlias = "Callable[[], tuple[Any, Client | None]]"  # a port where a folder is ours, or else a client


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
) -> AsyncOpening[AsyncQueue[Any]]:
    """Open the queue in a folder, or behind a server; `holdfast.open` says what the arguments mean."""
    opening = QueueOpening(create, topic, durability, body_type, settings, changes)
    if is_address(folder):
        refuse_local(observer=observer, world=world, trust_folder=trust_folder)
        connected = partial(_connected, folder, given(token=token, tls=tls, timeout=timeout))
        return AsyncOpening(_open_queue, connected, opening, parse_address(folder).queue)
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)
    open_here = partial(
        open_queue_port,
        AsyncLocalGroupPort,
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
    opened = partial(shared, share, world, folder, open_here, None, for_tasks=True)
    return AsyncOpening(_open_queue, opened, opening, None)


async def _open_queue(opened: _Opened, opening: QueueOpening, name: str | None) -> AsyncQueue[Any]:
    port, client = await opened_aside(opened, _let_go)
    if client is None:
        return AsyncQueue(port)
    from holdfast.remote.aio.broker import AsyncRemoteBrokerPort

    try:
        queue = await AsyncBroker(AsyncRemoteBrokerPort(client)).queue(opening.topic or name, **opening.options)
    except BaseException:
        await client.close_async()
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
) -> AsyncOpening[AsyncBroker]:
    """Use the topics in a data folder, or a server's; `holdfast.open_broker` says what the arguments mean."""
    if is_address(folder):
        refuse_local(
            observer=observer, world=world, settings=settings, settings_file=settings_file, trust_folder=trust_folder
        )
        return connect(
            str(folder), **given(token=token, tls=tls, timeout=timeout), body_type=body_type, durability=durability
        )
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)
    open_here = partial(
        open_broker_port,
        AsyncLocalBrokerPort,
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
    opened = partial(shared, share, world, folder, open_here, settings, for_tasks=True)
    return AsyncOpening(_open_broker, opened, body_type, durability)


async def _open_broker(opened: _Opened, body_type: Any, durability: Durability | None) -> AsyncBroker:
    port, client = await opened_aside(opened, _let_go)
    if client is None:
        return AsyncBroker(port)
    from holdfast.remote.aio.broker import AsyncRemoteBrokerPort

    return AsyncBroker(AsyncRemoteBrokerPort(client, body_type, durability))


def connect(
    url: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
    body_type: Any = None,
    durability: Durability | None = None,
) -> AsyncOpening[AsyncBroker]:
    """The broker behind a server; `holdfast.connect` says what the arguments mean."""
    connected = partial(_connected, url, given(token=token, tls=tls, timeout=timeout))
    return AsyncOpening(_open_broker, connected, body_type, durability)


def _connected(url: Any, options: dict[str, Any]) -> tuple[None, Client]:
    from holdfast.client.connecting import client_of

    return None, client_of(str(url), for_tasks=True, **options)


def _let_go(found: tuple[Any, Client | None]) -> None:
    """What was opened is of no use any more."""
    port, client = found
    if client is None:
        close_engine(port)
    else:
        client.close()
