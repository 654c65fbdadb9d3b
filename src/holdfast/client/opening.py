"""`open` and `open_broker`: a folder, whoever owns it, or a server; growing from one to the other changes a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.ports import port_of
from holdfast.api.sync.broker import Broker
from holdfast.api.sync.queue import Queue
from holdfast.broker.folder.contents import check_settings
from holdfast.client.address import is_address, parse_address, refuse_almost
from holdfast.client.shared import open_shared
from holdfast.errors import InvalidRequest
from holdfast.local.opening import open_broker_port, open_queue_port
from holdfast.local.sync.broker import LocalBrokerPort
from holdfast.local.sync.group import LocalGroupPort
from holdfast.settings import TopicSettings

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.broker.metrics import Observer
    from holdfast.client.client import Client
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.remote.group import RemoteGroup
    from holdfast.settings import BrokerSettings, QueueSettings

# Each program chooses these for itself, whoever owns the folder; all else is kept with the queue.
_PROMISES: Final = ("durability", "ack_durability")
_USUAL: Final = TopicSettings()


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
    share: bool = True,
    trust_folder: bool | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds | None = None,
    **changes: Any,
) -> Queue[Any]:
    """Open the queue in a folder, which is made where there is none (unless create=False); or one behind a server.

    `topic` says which one where the folder has several. `changes` are settings by name, such as max_attempts=3;
    they are kept with the queue. `body_type` is bytes, str, dict or any type that msgspec knows.

    The first process that opens a folder owns it, and others use it through that one; with share=False the folder
    is for this one alone, and Busy tells that somebody else has it. A folder that other users of the machine may write
    to is refused, unless you trust them with every message: trust_folder=True. For an address, such as
    http://host:port/queue, `token`, `tls` and `timeout` are those of `connect`.
    """
    opening = QueueOpening(create, topic, durability, body_type, settings, changes)
    if is_address(folder):
        from holdfast.client.connecting import client_of

        refuse_local(observer=observer, world=world, trust_folder=trust_folder)
        client = client_of(str(folder), for_tasks=False, **given(token=token, tls=tls, timeout=timeout))
        return opening.remote(client, parse_address(folder).queue)
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)

    open_here = partial(
        open_queue_port,
        LocalGroupPort,
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
    port, owner = shared(share, world, folder, open_here, None, for_tasks=False)
    return Queue(port) if owner is None else opening.remote(owner, None)


class QueueOpening:
    """What was asked of a queue, for one that is not here."""

    def __init__(
        self,
        create: bool,  # noqa: FBT001  as it was given
        topic: str | None,
        durability: Durability | None,
        body_type: Any,
        settings: QueueSettings | None,
        changes: dict[str, Any],
    ) -> None:
        self.topic = topic
        self._promises, changes = self._split(durability, settings, changes)
        if settings is not None:
            settings = msgspec.structs.replace(settings, **{name: getattr(_USUAL, name) for name in _PROMISES})
        self.options = {"create": create, "body_type": body_type, "settings": settings, **changes}

    def _split(
        self, durability: Durability | None, settings: QueueSettings | None, changes: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this program wants its own calls to survive, checked; and the settings that are the queue's."""
        given = {} if settings is None else {name: getattr(settings, name, None) for name in _PROMISES}
        given |= {name: changes[name] for name in _PROMISES if name in changes}
        if durability is not None:
            given["durability"] = durability
        check_settings(settings, given)
        return given, {name: value for name, value in changes.items() if name not in _PROMISES}

    def promise(self, port: RemoteGroup) -> None:
        """The queue is the program's only one here: it is closed with its client, and keeps the program's promises."""
        port.promise(self._promises.get("durability"), self._promises.get("ack_durability"))

    def remote(self, client: Client, name: str | None) -> Queue[Any]:
        """The queue behind the client's server, which is this queue's own."""
        from holdfast.remote.sync.broker import RemoteBrokerPort

        try:
            queue = Broker(RemoteBrokerPort(client)).queue(self.topic or name, **self.options)
        except BaseException:
            client.close()
            raise
        self.promise(port_of(queue))
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
) -> Broker:
    """Use the topics in a data folder, which is made where there is none (unless create=False); or a server's.

    `settings_file` is a TOML file; where none is given, the one that HOLDFAST_CONFIG names. Its data_dir is used
    where no folder is given. `durability` is what topics promise by default.

    The first process that opens a folder owns it, and others use it through that one; with share=False the folder
    is for this one alone, and Busy tells that somebody else has it. A folder that other users of the machine may write
    to is refused, unless you trust them with every message: trust_folder=True. For an address, `token`, `tls` and
    `timeout` are those of `connect`.
    """
    if is_address(folder):
        from holdfast.client.connecting import connect

        refuse_local(
            observer=observer, world=world, settings=settings, settings_file=settings_file, trust_folder=trust_folder
        )
        options = given(token=token, tls=tls, timeout=timeout)
        return connect(str(folder), **options, body_type=body_type, durability=durability)
    refuse_almost(folder)
    refuse_remote(token=token, tls=tls, timeout=timeout)

    open_here = partial(
        open_broker_port,
        LocalBrokerPort,
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
    port, client = shared(share, world, folder, open_here, settings, for_tasks=False)
    if client is None:
        return Broker(port)
    from holdfast.remote.sync.broker import RemoteBrokerPort

    return Broker(RemoteBrokerPort(client, body_type, durability))


def shared(
    share: bool,  # noqa: FBT001  as it was given
    world: World | None,
    folder: Any,
    open_here: Callable[[], Any],
    settings: BrokerSettings | None,
    *,
    for_tasks: bool,
) -> tuple[Any, Client | None]:
    """The folder, opened: a port where it is ours, a client where it is another's. A world of its own is not shared."""
    if not isinstance(share, bool):
        raise InvalidRequest(f"share={share!r} cannot be used: give True or False")
    if not share or world is not None:
        return open_here(), None
    return open_shared(folder, open_here, settings, for_tasks=for_tasks)


def given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_local(**arguments: Any) -> None:
    """Refuse what only the owner of a folder can be told."""
    for name in given(**arguments):
        raise InvalidRequest(f"{name}=... is for a folder: a server has its own, and was told when it was started")


def refuse_remote(**arguments: Any) -> None:
    """Refuse what only a connection can be told."""
    for name in given(**arguments):
        raise InvalidRequest(f"{name}=... is for a server: give its address, such as http://host:port, not a folder")
