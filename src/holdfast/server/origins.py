"""Web pages of other sites: a browser sends their requests, too, and with them what it knows of the user.

A page could reach a server on its visitor's own machine, which asks nobody for a token, or use the token that the
visitor typed into the console. Browsers say which page a request is from; programs say nothing, and are not concerned.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from holdfast.errors import Forbidden

_KEPT: Final = 64  # a server goes by few names, and every call says one


@lru_cache(maxsize=_KEPT)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    name = host.lower().removesuffix(".").strip("[]")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_origin(origin: str, host: str) -> None:
    """A request from a page must be from a page of this very server."""
    if origin and _place(origin) != _place(f"//{host}"):
        raise Forbidden(
            f"a page of {origin!r} sent this call to {host!r}: only pages of this server may; "
            "a proxy in between must leave the Host header as it is"
        )


def check_host(host: str, own_host: str) -> None:
    """A name that a stranger lets point to this machine makes the stranger's page one of this server."""
    name = (_place(f"//{host}") or ("", None))[0]
    if host and not is_loopback(name) and name != own_host.lower():
        raise Forbidden(
            f"this server asks nobody for a token, so it answers only as localhost or {own_host}, not as {host!r}; "
            "to use another name, give it a tokens file"
        )


@lru_cache(maxsize=_KEPT)
def _place(url: str) -> tuple[str, int | None] | None:
    """Host and port; a port that goes without saying does not count."""
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        return None
    if not found.hostname:
        return None
    return found.hostname, None if port in (80, 443) else port
