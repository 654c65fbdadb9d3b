"""What `open`, `open_broker` and `connect` share: whether a place is a folder or a server, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from holdfast.broker.folder.contents import check_settings
from holdfast.client.address import is_address, parse_address, refuse_almost
from holdfast.errors import InvalidRequest
from holdfast.settings import TopicSettings

if TYPE_CHECKING:
    import ssl

    from holdfast.api.drafts import Seconds
    from holdfast.api.sync.broker import Broker
    from holdfast.env import World
    from holdfast.model import Durability
    from holdfast.remote.client import Client
    from holdfast.remote.group import RemoteGroup
    from holdfast.settings import BrokerSettings, QueueSettings

Opened: TypeAlias = "tuple[Any, Client | None]"  # a port if this process owns the folder, otherwise a client

TOKEN: Final = "HOLDFAST_TOKEN"
TIMEOUT_S: Final = 30.0
# Each program chooses these for itself, no matter who owns the folder; all other settings are stored with the queue.
_PROMISES: Final = ("durability", "ack_durability")
_USUAL: Final = TopicSettings()


def opener(
    place: Any,
    open_here: Callable[[], Any],
    *,
    share: bool,
    world: World | None,
    settings: BrokerSettings | None = None,
    for_folders: dict[str, Any],
    for_servers: dict[str, Any],
    for_tasks: bool,
) -> Callable[[], Opened]:
    """Return a function that opens the folder or connects to the server. Refuses arguments that do not apply."""
    if is_address(place):
        refuse_local(world=world, **for_folders)
        return partial(reach, str(place), given(**for_servers), for_tasks=for_tasks)
    refuse_almost(place)
    refuse_remote(**for_servers)
    if not isinstance(share, bool):
        raise InvalidRequest(f"share={share!r} cannot be used: give True or False")
    if not share or world is not None:  # a folder in a simulated world has no other processes
        return lambda: (open_here(), None)
    from holdfast.client.shared_folder import open_shared

    return partial(open_shared, place, open_here, settings, for_tasks=for_tasks)


def reach(url: str, options: dict[str, Any], *, for_tasks: bool) -> Opened:
    """Return a client of the server at this address."""
    return None, client_of(url, for_tasks=for_tasks, **options)


def close_opened(opened: Opened) -> None:
    """Close what was opened after its caller was cancelled."""
    port, client = opened
    (port.engine if client is None else client).close()


def connect(
    url: str, *, token: str | None = None, tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds = TIMEOUT_S, body_type: Any = None, durability: Durability | None = None,
) -> Broker:  # fmt: skip
    """Connect to the broker of a server. Nothing is sent before the first call.

        with holdfast.connect("http://127.0.0.1:7700") as broker:
            broker.publish("orders", b"1 book")

    Args:
        url: http://host:port, https://host:port or unix:/path.
        token: Your access token; by default the environment variable HOLDFAST_TOKEN.
        tls: A file of certificates to trust, or an ssl.SSLContext; by default as HOLDFAST_TLS_CA and HOLDFAST_TLS_CERT
            say.
        timeout: How long one call may take in total. Failed calls are retried within this time if that is safe.
        body_type: bytes (the default), str, dict or any type that msgspec supports.
        durability: "fsync", "interval" or "os", for publishing calls that do not choose one.

    Returns:
        The broker.

    Raises:
        InvalidRequest: The address, the token or `tls` cannot be used.
    """
    from holdfast.api.sync.broker import Broker
    from holdfast.remote.sync.broker import RemoteBrokerPort

    client = client_of(url, for_tasks=False, token=token, tls=tls, timeout=timeout)
    return Broker(RemoteBrokerPort(client, body_type, durability))


def client_of(
    url: str,
    *,
    for_tasks: bool,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds = TIMEOUT_S,
    world: World | None = None,
) -> Client:
    """Return a client of the server at this address. Nothing is sent yet."""
    from holdfast.api.drafts import duration_ms
    from holdfast.client.network import context_of
    from holdfast.env import real_world
    from holdfast.env.process import environment
    from holdfast.remote.client import Client

    address = parse_address(url)
    timeout_s = duration_ms(timeout, "timeout", minimum_ms=1) / 1000
    if token is None:
        token = environment().get(TOKEN) or None
    if not str(token or "").isascii() or not str(token or "").isprintable():
        raise InvalidRequest("the token cannot be used: give the text that `holdfast token new` printed")
    context = context_of(tls, environment()) if address.secure else None
    if tls is not None and not address.secure:
        raise InvalidRequest(f"{url} is not a secure address, so tls=... says nothing: use https://")
    return Client(world or real_world(), address, for_tasks=for_tasks, token=token, tls=context, timeout_s=timeout_s)


class QueueOpening:
    """The arguments of `open`, for a queue that is on a server or in a folder that another process owns."""

    def __init__(
        self,
        create: bool,  # noqa: FBT001  passed on as given
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
        """Split off the durability of this program's own calls, checked, from the settings stored with the queue."""
        given = {} if settings is None else {name: getattr(settings, name, None) for name in _PROMISES}
        given |= {name: changes[name] for name in _PROMISES if name in changes}
        if durability is not None:
            given["durability"] = durability
        check_settings(settings, given)
        return given, {name: value for name, value in changes.items() if name not in _PROMISES}

    def promise(self, port: RemoteGroup) -> None:
        """Apply the durability that this program asked for. The queue owns its client and closes it."""
        port.promise(self._promises.get("durability"), self._promises.get("ack_durability"))


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_local(**arguments: Any) -> None:
    """Refuse arguments that apply only to a folder."""
    for name in given(**arguments):
        raise InvalidRequest(
            f"{name}=... applies to folders only: leave it out, and set it where the server is started"
        )


def refuse_remote(**arguments: Any) -> None:
    """Refuse arguments that apply only to a server."""
    for name in given(**arguments):
        raise InvalidRequest(f"{name}=... is for a server: give its address, such as http://host:port, not a folder")
