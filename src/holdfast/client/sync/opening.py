# Generated from aio/opening.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""`open` and `open_broker` for threads: a folder, whoever owns it, or a server; one becomes the other by another text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from holdfast.api.ports import port_of
from holdfast.api.sync.broker import Broker
from holdfast.api.sync.group import Queue
from holdfast.client.address import queue_named
from holdfast.client.opening import Opened, QueueOpening, opener
from holdfast.local.opening import open_broker_port, open_queue_port
from holdfast.local.sync.broker import LocalBrokerPort
from holdfast.local.sync.group import LocalGroupPort

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.broker.metrics import Observer
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.settings import BrokerSettings, QueueSettings

_FOR_TASKS: Final = False


def open_queue(
    folder: str | PathLike[str], *, create: bool = True, topic: str | None = None,
    durability: Durability | None = None, body_type: Any = None, settings: QueueSettings | None = None,
    observer: Observer | None = None, world: World | None = None, share: bool = True,
    trust_folder: bool | None = None, token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None, timeout: Seconds | None = None, **changes: Any,
) -> Queue[Any]:  # fmt: skip
    """Open the queue in a folder, which is made where there is none (unless create=False); or one behind a server.

    `topic` says which one where the folder has several. `changes` are settings by name, such as max_attempts=3;
    they are kept with the queue. `body_type` is bytes, str, dict or any type that msgspec knows.

    The first process that opens a folder owns it, and others use it through that one; with share=False the folder
    is for this one alone, and Busy tells that somebody else has it. A folder that other users of the machine may write
    to is refused, unless you trust them with every message: trust_folder=True. For an address, such as
    http://host:port/queue, `token`, `tls` and `timeout` are those of `connect`.
    """
    opening = QueueOpening(create, topic, durability, body_type, settings, changes)
    for_folders: dict[str, Any] = {"observer": observer, "trust_folder": trust_folder}
    asked: dict[str, Any] = {"create": create, "topic": topic, "durability": durability}
    asked |= {"body_type": body_type, "settings": settings}
    opened = opener(
        folder,
        partial(open_queue_port, LocalGroupPort, folder, changes, world=world, **asked, **for_folders),
        share=share,
        world=world,
        for_folders=for_folders,
        for_servers={"token": token, "tls": tls, "timeout": timeout},
        for_tasks=_FOR_TASKS,
    )
    return _open_queue(opened, opening, queue_named(folder))


def _open_queue(opened: Callable[[], Opened], opening: QueueOpening, name: str | None) -> Queue[Any]:
    port, client = opened()
    if client is None:
        return Queue(port)
    from holdfast.remote.sync.broker import RemoteBrokerPort

    try:
        queue = Broker(RemoteBrokerPort(client)).queue(opening.topic or name, **opening.options)
    except BaseException:
        client.close()
        raise
    opening.promise(port_of(queue))
    return queue


def open_broker(
    folder: str | PathLike[str] | None = None, *, create: bool = True, durability: Durability | None = None,
    body_type: Any = None, settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None, observer: Observer | None = None,
    world: World | None = None, share: bool = True, trust_folder: bool | None = None, token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None, timeout: Seconds | None = None,
) -> Broker:  # fmt: skip
    """Use the topics in a data folder, which is made where there is none (unless create=False); or a server's.

    `settings_file` is a TOML file; where none is given, the one that HOLDFAST_CONFIG names. Its data_dir is used
    where no folder is given. `durability` is what topics promise by default.

    The first process that opens a folder owns it, and others use it through that one; with share=False the folder
    is for this one alone, and Busy tells that somebody else has it. A folder that other users of the machine may write
    to is refused, unless you trust them with every message: trust_folder=True. For an address, `token`, `tls` and
    `timeout` are those of `connect`.
    """
    for_folders: dict[str, Any] = {"observer": observer, "trust_folder": trust_folder}
    for_folders |= {"settings": settings, "settings_file": settings_file}
    asked: dict[str, Any] = {"create": create, "durability": durability, "body_type": body_type}
    opened = opener(
        folder,
        partial(open_broker_port, LocalBrokerPort, folder, world=world, **asked, **for_folders),
        share=share,
        world=world,
        settings=settings,
        for_folders=for_folders,
        for_servers={"token": token, "tls": tls, "timeout": timeout},
        for_tasks=_FOR_TASKS,
    )
    return _open_broker(opened, body_type, durability)


def _open_broker(opened: Callable[[], Opened], body_type: Any, durability: Durability | None) -> Broker:
    port, client = opened()
    if client is None:
        return Broker(port)
    from holdfast.remote.sync.broker import RemoteBrokerPort

    return Broker(RemoteBrokerPort(client, body_type, durability))
