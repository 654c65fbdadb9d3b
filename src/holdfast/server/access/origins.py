"""Web pages of other sites: a browser sends their requests, too, and with them what it knows of the user.

A page could reach a server on its visitor's own machine, which asks nobody for a token, or use the token that the
visitor typed into the console. Browsers say which page a request is from; programs say nothing, and are not concerned.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from typing import Final, Protocol

from holdfast.errors import Forbidden
from holdfast.server.http.head import parse_host

KEPT_HOSTS: Final = 64  # a server goes by few names, and every call says one
_SCHEMES: Final = ("http://", "https://")
_OWN_SITE: Final = frozenset({"same-origin", "none"})  # none: the user asked for it, by hand or by a bookmark


class Fetched(Protocol):
    """What of a request says how a page asked for it."""

    method: str

    def header(self, name: str) -> str: ...


@lru_cache(maxsize=KEPT_HOSTS)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    name = plain_name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def plain_name(host: str) -> str:
    """A name or an address as it is compared."""
    return host.lower().removesuffix(".").strip("[]")


def check_origin(origin: str, host: str) -> None:
    """A request from a page must be from a page of this very server; `null` is a page of nobody knows whom."""
    if not origin:
        return
    place = _origin_place(origin)
    if place is None or place != _host_place(host):
        raise Forbidden(
            f"a page of {origin!r} sent this call to {host!r}: only pages of this server may; "
            "a proxy in between must leave the Host header as it is"
        )


def check_host(host: str, names: Collection[str]) -> None:
    """A name that a stranger lets point to this machine makes the stranger's page one of this server."""
    if not host:
        return
    found = parse_host(host)
    name = "" if found is None else plain_name(found[0])
    if not is_loopback(name) and name not in names:
        known = ", ".join(("localhost", *sorted(names)))
        raise Forbidden(
            f"this server answers only as {known}, not as {host!r}. Call it by one of these, or add the name to "
            "allowed_hosts in [server] (--allowed-host)"
        )


def check_fetch(request: Fetched, *, page: bool) -> None:
    """What a page of another site asks for is refused, even to look; but a link may lead to a page of ours.

    Another port of this machine is another site here, too: whatever runs there is not this server.
    """
    if request.header("sec-fetch-site") in _OWN_SITE:
        return
    navigates = request.header("sec-fetch-mode") == "navigate" and request.header("sec-fetch-dest") == "document"
    if page and navigates and request.method in ("GET", "HEAD"):
        return
    raise Forbidden("a page of another site asked for this: only pages of this server may")


@lru_cache(maxsize=KEPT_HOSTS)
def _origin_place(origin: str) -> tuple[str, int | None] | None:
    scheme = next((each for each in _SCHEMES if origin.lower().startswith(each)), None)
    return None if scheme is None else _host_place(origin[len(scheme) :])


def _host_place(host: str) -> tuple[str, int | None] | None:
    """Host and port; a port that goes without saying does not count."""
    found = parse_host(host)
    if found is None:
        return None
    name, port = found
    return name, None if port in (80, 443) else port
