"""How a program comes to a server: `connect`, and the arguments that it understands."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from holdfast.api.drafts import Seconds
from holdfast.api.sync.broker import Broker
from holdfast.api.times import duration_ms
from holdfast.client.address import parse_address
from holdfast.client.tls import context_of
from holdfast.env import World, real_world
from holdfast.env.process import environment
from holdfast.errors import InvalidRequest
from holdfast.model import Durability
from holdfast.remote.client import Client
from holdfast.remote.sync.broker import RemoteBrokerPort

if TYPE_CHECKING:
    import ssl

TOKEN: Final = "HOLDFAST_TOKEN"
TIMEOUT_S: Final = 30.0


def connect(
    url: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | str | PathLike[str] | None = None,
    timeout: Seconds = TIMEOUT_S,
    body_type: Any = None,
    durability: Durability | None = None,
) -> Broker:
    """The broker behind a server: http://host:port, https://host:port or unix:/path.

    `token` says who you are; where none is given, HOLDFAST_TOKEN. `tls` is a file of certificates to trust, or a
    context with one of your own; HOLDFAST_TLS_CA and HOLDFAST_TLS_CERT say the same. A call is tried again, where that
    is safe, for `timeout` in all.
    """
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
    """A client of the server at the address. Nothing is sent yet."""
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
