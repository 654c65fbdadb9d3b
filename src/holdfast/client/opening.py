"""What `open`, `open_broker` and `connect` share: whether a place is a folder or a server, and how it is opened.

People write the address of a server as http://host:port, https://host:port or unix:/path, with a queue behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from holdfast.broker.folder.layout import is_store
from holdfast.errors import InvalidRequest
from holdfast.later import pattern, urllib_parse
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

_PORTS: Final = {"http": 80, "https": 443}
# What was surely meant for a server: another scheme, or host:port without one.
_ALMOST: Final = pattern(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z0-9.-]+:\d{1,5}(/|$)")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a server; `queue` is the queue that the text named after it."""

    text: str
    host: str = ""
    port: int = 0
    secure: bool = False
    socket: str | None = None
    queue: str | None = None
    others: tuple[Address, ...] = ()  # of the same service, to be called when this one cannot be reached

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.socket is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"


def is_address(place: object) -> bool:
    """Return whether the text is the address of a server, not a folder."""
    return isinstance(place, str) and place.startswith(("http://", "https://", "unix:"))


def queue_named(place: object) -> str | None:
    """Return the queue that an address names; None for a folder."""
    return parse_address(place).queue if is_address(place) else None


def refuse_almost(place: object) -> None:
    """Refuse what is almost an address, so that it does not become a folder of that name."""
    if not isinstance(place, str) or ":" not in place or is_address(place) or is_store(place):
        return
    if _ALMOST.match(place):
        raise InvalidRequest(
            f"{place!r} is not an address: give http://host:port, https://host:port, unix:/path or the place of a "
            f"store such as s3://bucket/name; if it is a folder, write ./{place}"
        )


def parse_address(text: object) -> Address:
    """Parse an address; or several of the nodes of one cluster, with commas between them."""
    if not isinstance(text, str) or not is_address(text):
        raise InvalidRequest(f"{text!r} is not an address: give http://host:port, https://host:port or unix:/path")
    if text.startswith("unix:") or "," not in text:
        return _parse_one(text)
    first, *others = (_parse_one(part.strip()) for part in text.split(","))
    for each in others:
        if each.secure != first.secure or each.socket is not None:
            raise InvalidRequest(f"{text!r} cannot be used: all nodes of a cluster have http:// or all have https://")
    queues = {each.queue for each in (first, *others) if each.queue is not None}
    if len(queues) > 1:
        raise InvalidRequest(f"{text!r} cannot be used: it names several queues, {' and '.join(sorted(queues))}")
    return msgspec.structs.replace(first, others=tuple(others), queue=next(iter(queues), None))


def _parse_one(text: str) -> Address:
    if not is_address(text):
        raise InvalidRequest(f"{text!r} is not an address: give http://host:port, https://host:port or unix:/path")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/"):
            raise InvalidRequest(f"{text!r} is not an address: a socket has an absolute path, like unix:/run/holdfast")
        return Address(text=text, socket=path)
    try:
        parts = urllib_parse.urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not an address: {error}") from None
    if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
        raise InvalidRequest(f"{text!r} is not an address: give http://host:port, and pass the token separately")
    queue = urllib_parse.unquote(parts.path.strip("/")).removeprefix("v1/queues/")
    if "/" in queue:
        raise InvalidRequest(f"{text!r} is not the address of a queue: give http://host:port/queue")
    return Address(
        text=text.rstrip("/") if not queue else text[: text.index("/", text.index("//") + 2)],
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        secure=parts.scheme == "https",
        queue=queue or None,
    )


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
    url: str | Sequence[str], *, token: str | None = None, tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds = TIMEOUT_S, body_type: Any = None, durability: Durability | None = None,
) -> Broker:  # fmt: skip
    """Connect to the broker of a server. Nothing is sent before the first call.

        with holdfast.connect("http://127.0.0.1:7700") as broker:
            broker.publish("orders", b"1 book")

    Args:
        url: http://host:port, https://host:port or unix:/path; for a cluster, the addresses of several nodes, as a list
            or with commas between them. If one cannot be reached, the next one is called.
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

    client = client_of(joined(url), for_tasks=False, token=token, tls=tls, timeout=timeout)
    return Broker(RemoteBrokerPort(client, body_type, durability))


def joined(url: object) -> str:
    """Return the addresses of several nodes as one text."""
    if isinstance(url, (list, tuple)) and url and all(isinstance(each, str) for each in url):
        return ",".join(url)
    return url  # type: ignore[return-value]  # anything else is looked at where it is parsed


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
        raise InvalidRequest(f"{url} is not a secure address, so tls=... has no effect: use https://")
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
        from holdfast.settings import check_settings

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
