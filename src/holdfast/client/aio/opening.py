"""`open`, `open_broker` and `connect` for tasks: the same call opens a folder (shared or not) or a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from holdfast.api import AsyncOpening, port_of
from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.aio.group import AsyncQueue
from holdfast.client.opening import Opened, QueueOpening, close_opened, given, joined, opener, queue_named, reach
from holdfast.env.threads import opened_aside
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.opening import open_broker_port, open_queue_port

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.broker.metrics import Observer
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.settings import BrokerSettings, QueueSettings

_FOR_TASKS: Final = True  # sync: _FOR_TASKS: Final = False


def open_queue(
    folder: str | PathLike[str], *, create: bool = True, topic: str | None = None,
    durability: Durability | None = None, body_type: Any = None, settings: QueueSettings | None = None,
    observer: Observer | None = None, world: World | None = None, share: bool = True,
    trust_folder: bool | None = None, token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None, timeout: Seconds | None = None, **changes: Any,
) -> AsyncOpening[AsyncQueue[Any]]:  # fmt: skip
    """Open the queue in a folder, or on a server if you pass a URL such as http://host:port/queue.

        async with holdfast.aio.open("jobs", max_attempts=3) as queue:
            await queue.put(b"resize 1")

    Args:
        folder: The folder, or the URL.
        create: Create the folder if it does not exist.
        topic: Which queue, if the folder has several.
        durability: What a put survives unless it says otherwise: "fsync" (the default), "interval" or "os".
        body_type: bytes (the default), str, dict or any type that msgspec supports.
        settings: The queue's settings as an object.
        observer: Receives every count and duration, for your own metrics.
        world: A clock and a disk for tests; see holdfast.testing.
        share: Let other processes use the folder: the first one owns it, and others connect through that one.
        trust_folder: True accepts a folder that other users of the machine may write to.
        token: For a server; see `connect`.
        tls: For a server; see `connect`.
        timeout: For a server; see `connect`.
        **changes: The queue's settings by name, such as max_attempts=3. They are stored with it.

    Returns:
        The queue.

    Raises:
        NotAQueue: The folder has no queue, and `create` is False.
        Busy: With share=False, or if the owner does not share: another process has the folder.
        BadSettings: A setting is unknown or outside its limits.
    """
    opening = QueueOpening(create, topic, durability, body_type, settings, changes)
    for_folders: dict[str, Any] = {"observer": observer, "trust_folder": trust_folder}
    asked: dict[str, Any] = {"create": create, "topic": topic, "durability": durability}
    asked |= {"body_type": body_type, "settings": settings}
    opened = opener(
        folder,
        partial(open_queue_port, AsyncLocalGroupPort, folder, changes, world=world, **asked, **for_folders),
        share=share,
        world=world,
        for_folders=for_folders,
        for_servers={"token": token, "tls": tls, "timeout": timeout},
        for_tasks=_FOR_TASKS,
    )
    return AsyncOpening(_open_queue, opened, opening, queue_named(folder))


async def _open_queue(opened: Callable[[], Opened], opening: QueueOpening, name: str | None) -> AsyncQueue[Any]:
    port, client = await opened_aside(opened, close_opened)  # sync: port, client = opened()
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
    folder: str | PathLike[str] | None = None, *, create: bool = True, durability: Durability | None = None,
    body_type: Any = None, settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None, observer: Observer | None = None,
    world: World | None = None, share: bool = True, trust_folder: bool | None = None, token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None, timeout: Seconds | None = None,
) -> AsyncOpening[AsyncBroker]:  # fmt: skip
    """Open the broker of a data folder, with all its topics, or of a server if you pass a URL.

        async with holdfast.aio.open_broker("shop") as broker:
            await broker.create_topic("orders", partitions=4)

    Args:
        folder: The folder, or the URL; by default the `data_dir` of the settings file.
        create: Create the folder if it does not exist.
        durability: What publishing survives unless a call says otherwise: "fsync" (the default), "interval" or "os".
        body_type: bytes (the default), str, dict or any type that msgspec supports.
        settings: The broker's settings as an object.
        settings_file: A TOML file of settings; by default the one that the environment variable HOLDFAST_CONFIG names.
        observer: Receives every count and duration, for your own metrics.
        world: A clock and a disk for tests; see holdfast.testing.
        share: Let other processes use the folder: the first one owns it, and others connect through that one.
        trust_folder: True accepts a folder that other users of the machine may write to.
        token: For a server; see `connect`.
        tls: For a server; see `connect`.
        timeout: For a server; see `connect`.

    Returns:
        The broker.

    Raises:
        Busy: With share=False, or if the owner does not share: another process has the folder.
        BadSettings: A setting is unknown or outside its limits.
    """
    for_folders: dict[str, Any] = {"observer": observer, "trust_folder": trust_folder}
    for_folders |= {"settings": settings, "settings_file": settings_file}
    asked: dict[str, Any] = {"create": create, "durability": durability, "body_type": body_type}
    opened = opener(
        folder,
        partial(open_broker_port, AsyncLocalBrokerPort, folder, world=world, **asked, **for_folders),
        share=share,
        world=world,
        settings=settings,
        for_folders=for_folders,
        for_servers={"token": token, "tls": tls, "timeout": timeout},
        for_tasks=_FOR_TASKS,
    )
    return AsyncOpening(_open_broker, opened, body_type, durability)


async def _open_broker(opened: Callable[[], Opened], body_type: Any, durability: Durability | None) -> AsyncBroker:
    port, client = await opened_aside(opened, close_opened)  # sync: port, client = opened()
    if client is None:
        return AsyncBroker(port)
    from holdfast.remote.aio.broker import AsyncRemoteBrokerPort

    return AsyncBroker(AsyncRemoteBrokerPort(client, body_type, durability))


# async only: that for threads has another default
def connect(
    url: str | Sequence[str], *, token: str | None = None, tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None, body_type: Any = None, durability: Durability | None = None,
) -> AsyncOpening[AsyncBroker]:  # fmt: skip
    """Connect to the broker of a server. Nothing is sent before the first call.

        async with holdfast.aio.connect("http://127.0.0.1:7700") as broker:
            await broker.publish("orders", b"1 book")

    Args:
        url: http://host:port, https://host:port or unix:/path; for a cluster, the addresses of several nodes, as a list
            or with commas between them. If one cannot be reached, the next one is called.
        token: Your access token; by default the environment variable HOLDFAST_TOKEN.
        tls: A file of certificates to trust, or an ssl.SSLContext; by default as HOLDFAST_TLS_CA and HOLDFAST_TLS_CERT
            say.
        timeout: How long one call may take in total; 30 seconds by default. Failed calls are retried within this time
            if that is safe.
        body_type: bytes (the default), str, dict or any type that msgspec supports.
        durability: "fsync", "interval" or "os", for publishing calls that do not choose one.

    Returns:
        The broker.

    Raises:
        InvalidRequest: The address, the token or `tls` cannot be used.
    """
    options = given(token=token, tls=tls, timeout=timeout)
    return AsyncOpening(_open_broker, partial(reach, joined(url), options, for_tasks=_FOR_TASKS), body_type, durability)
