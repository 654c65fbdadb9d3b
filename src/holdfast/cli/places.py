"""Where a command works: in a folder, or at a server, and how it gets in there."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli import profiles
from holdfast.client import trust
from holdfast.client.address import Address, is_address, parse_address
from holdfast.client.strangers import distrust, has_hung_up, strictness
from holdfast.env.environ import environment, set_variable
from holdfast.env.sockets import connect_tcp, connect_unix
from holdfast.errors import InvalidRequest, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from holdfast.embedded.broker import Broker

# What stands for the usual place among the arguments.
USUAL: Final = "@"
URL: Final = "HOLDFAST_URL"
TOKEN: Final = "HOLDFAST_TOKEN"
EXPORTED_PLACE: Final = "HOLDFAST_QUEUE"

_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.05


# Of the places that came from a profile: a command is told only where it works.
_entries: Final[dict[str, profiles.Profile]] = {}


def place_of(name: str) -> str:
    """The place of a profile."""
    profile = profiles.read().named(name)
    _entries[profile.place] = profile
    return profile.place


def usual_place() -> str | None:
    """Where a command works that is not told: HOLDFAST_URL, or the profile in use."""
    named = os.environ.get(URL)
    if named:
        return named
    use = profiles.read().use
    return None if use is None else place_of(use)


def said_or_usual(place: str) -> str:
    """The place that was said; `@` is the usual one."""
    if place != USUAL:
        return place
    found = usual_place()
    if found is None:
        raise InvalidRequest(
            f"{USUAL} stands for the usual place, and there is none: set {URL}, or choose a profile with "
            "`holdfast profile use NAME`"
        )
    return found


def queue_of(place: str) -> str | None:
    """The queue that a place stands for besides: by its address, or by its profile."""
    named = parse_address(place).queue if is_address(place) else None
    return named or _entry(place).queue


def _entry(place: str) -> profiles.Profile:
    return _entries.get(place) or profiles.Profile(place=place)


def enter(place: str) -> None:
    """Let all of this process into a place, as its profile says: for what connects by itself."""
    entry = _entry(place)
    said = {TOKEN: entry.token, trust.CA: entry.tls_ca, trust.CERTIFICATE: entry.tls_cert, trust.KEY: entry.tls_key}
    if entry.tls_cert is not None:
        said[trust.KEY] = entry.tls_key or ""  # never that of another certificate
    for name, value in said.items():
        if value is not None:
            set_variable(name, value)


def connected(place: str, wait_s: float) -> Broker:
    """The broker behind an address, which answers."""
    from holdfast.client.connecting import connect

    entry, tls = _entry(place), None
    if place.startswith("https:"):
        tls = trust.context_from(entry.tls_ca, entry.tls_cert, entry.tls_key, environment())
    broker = connect(place, token=entry.token, tls=tls)
    try:
        _reach(parse_address(place), tls, wait_s)
    except BaseException:
        broker.close()
        raise
    return broker


def _reach(address: Address, tls: Any, wait_s: float) -> None:
    """Knock: a call would be tried again for much longer than people at a terminal wait."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return _knock(address, tls)
        except (OSError, EOFError) as error:
            why = distrust(error)
            if why:  # it is the same each time
                raise _not_trusted(address, why, strictness(error)) from None
            if time.monotonic() >= give_up:
                raise _unreachable(address, error) from None
        time.sleep(_PAUSE_S)


def _knock(address: Address, tls: Any) -> None:
    """Ask for a word: who is not wanted, or speaks otherwise, may be let in and be shown out before any."""
    if address.socket is not None:
        connect_unix(address.socket, _CONNECT_S).close()
        return
    with connect_tcp(address.host, address.port, _CONNECT_S, tls) as connection:
        connection.sendall(f"GET /healthz HTTP/1.1\r\nhost: {address.authority}\r\nconnection: close\r\n\r\n".encode())
        with suppress(TimeoutError):  # it is there, and may only be slow
            if not connection.recv(1):
                raise EOFError("it hung up before it had said a word")


def _not_trusted(address: Address, why: str, remedy: str) -> Unauthenticated:
    if remedy:
        advice = remedy
    elif "mismatch" in why:
        advice = "Use a name that its certificate has"
    else:
        advice = (
            "Name the file of certificates to trust with `holdfast profile add NAME URL --tls-ca FILE`, or in "
            f"{trust.CA}, unless this is not your server"
        )
    return Unauthenticated(f"the server at {address.text} has not proved who it is: {why}. Nothing was sent. {advice}")


def _unreachable(address: Address, error: Exception) -> Unavailable:
    why = str(getattr(error, "strerror", None) or error)
    hung_up = has_hung_up(error)
    if hung_up and address.secure:
        advice = (
            "So do servers that ask for a client's certificate, and get none that they trust: name one with "
            f"`holdfast profile add NAME URL --tls-cert FILE --tls-key FILE`, or in {trust.CERTIFICATE}"
        )
    elif hung_up:
        advice = "See whether it speaks TLS at this port: then its address begins with https://"
    elif "SSL" in why:
        advice = "See whether it speaks TLS at this port: an address without it begins with http://"
    else:
        advice = "See whether it runs (`holdfast serve DIR` says where it listens), and whether the address is right"
    return Unavailable(f"no server can be reached at {address.text}: {why}. {advice}")
