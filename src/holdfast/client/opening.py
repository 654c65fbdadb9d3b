"""`open` and `open_broker`: a folder, whoever owns it, or a server; growing from one to the other changes a text."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from holdfast.client.address import is_address, parse_address
from holdfast.embedded.broker import open_broker as open_broker_here
from holdfast.embedded.queue import open_queue as open_queue_here
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    import ssl

    from holdfast.broker.metrics import Observer
    from holdfast.embedded.drafts import Seconds
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.settings import BrokerSettings, QueueSettings


def open_queue(
    folder: str | PathLike[str],
    *,
    create: bool = True,
    topic: str | None = None,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
    **changes: Any,
) -> Any:
    """Open the queue in a folder, which is made where there is none (unless create=False); or one behind a server.

    `topic` says which one where the folder has several. `changes` are settings by name, such as max_attempts=3;
    they are kept with the queue. `body_type` is bytes, str, dict or any type that msgspec knows. For an address,
    such as http://host:port/queue, `token`, `tls` and `timeout` are those of `connect`.
    """
    if is_address(folder):
        from holdfast.client.connecting import connect

        _refuse_local(observer=observer, world=world)
        address = parse_address(folder)
        broker = connect(str(folder), **_given(token=token, tls=tls, timeout=timeout), durability=durability)
        name = topic if topic is not None else address.queue
        queue = broker.queue(name, create=create, body_type=body_type, settings=settings, **changes)
        queue._alone, queue._durability = True, durability
        return queue
    _refuse_remote(token=token, tls=tls, timeout=timeout)
    return open_queue_here(
        folder,
        create=create,
        topic=topic,
        durability=durability,
        body_type=body_type,
        settings=settings,
        observer=observer,
        world=world,
        **changes,
    )


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
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
) -> Any:
    """Own the topics in a data folder, which is made where there is none (unless create=False); or use a server's.

    `settings_file` is a TOML file; where none is given, the one that HOLDFAST_CONFIG names. Its data_dir is used
    where no folder is given. `durability` is what topics promise by default. For an address, `token`, `tls` and
    `timeout` are those of `connect`.
    """
    if is_address(folder):
        from holdfast.client.connecting import connect

        _refuse_local(observer=observer, world=world, settings=settings, settings_file=settings_file)
        given = _given(token=token, tls=tls, timeout=timeout)
        return connect(str(folder), **given, body_type=body_type, durability=durability)
    _refuse_remote(token=token, tls=tls, timeout=timeout)
    return open_broker_here(
        folder,
        create=create,
        durability=durability,
        body_type=body_type,
        settings=settings,
        settings_file=settings_file,
        observer=observer,
        world=world,
    )


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _refuse_local(**arguments: Any) -> None:
    for name in _given(**arguments):
        raise InvalidRequest(f"{name}=... is for a folder: a server has its own, and was told when it was started")


def _refuse_remote(**arguments: Any) -> None:
    for name in _given(**arguments):
        raise InvalidRequest(f"{name}=... is for a server: give its address, such as http://host:port, not a folder")
