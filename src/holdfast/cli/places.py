"""Where a command works: in a folder, or at a server, and how it gets in there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.cli import profiles
from holdfast.client.address import Address, is_address, parse_address
from holdfast.env.environ import set_variable
from holdfast.env.sockets import connect_tcp, connect_unix
from holdfast.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from holdfast.client.broker import RemoteBroker

# What stands for the usual place among the arguments.
USUAL: Final = "@"
URL: Final = "HOLDFAST_URL"
TOKEN: Final = "HOLDFAST_TOKEN"
EXPORTED_PLACE: Final = "HOLDFAST_QUEUE"

_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.05


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile says besides the place."""

    token: str | None = None
    tls_ca: str | None = None
    queue: str | None = None


# Of the places that came from a profile: a command is told only where it works.
_entries: Final[dict[str, Entry]] = {}


def place_of(name: str) -> str:
    """The place of a profile."""
    profile = profiles.read().named(name)
    _entries[profile.place] = Entry(token=profile.token, tls_ca=profile.tls_ca, queue=profile.queue)
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
    return named or _entries.get(place, Entry()).queue


def enter(place: str) -> None:
    """Let all of this process into a place, as its profile says: for what connects by itself."""
    entry = _entries.get(place, Entry())
    if entry.token is not None:
        set_variable(TOKEN, entry.token)
    if entry.tls_ca is not None:
        set_variable("SSL_CERT_FILE", entry.tls_ca)


def connected(place: str, wait_s: float) -> RemoteBroker:
    """The broker behind an address, which answers."""
    from holdfast.client.connecting import connect

    entry = _entries.get(place, Entry())
    secure = place.startswith("https:")
    broker = connect(place, token=entry.token, tls=entry.tls_ca if secure else None)
    try:
        _reach(parse_address(place), broker._caller._tls, wait_s)
    except BaseException:
        broker.close()
        raise
    return broker


def _reach(address: Address, tls: Any, wait_s: float) -> None:
    """Knock: a call would be tried again for much longer than people at a terminal wait."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            if address.socket is not None:
                connect_unix(address.socket, _CONNECT_S).close()
            else:
                connect_tcp(address.host, address.port, _CONNECT_S, tls).close()
            return
        except OSError as error:
            if time.monotonic() >= give_up:
                raise _unreachable(address, error) from None
        time.sleep(_PAUSE_S)


def _unreachable(address: Address, error: OSError) -> Unavailable:
    why = str(error.strerror or error)
    if "CERTIFICATE" in why:
        advice = "Name the file of certificates to trust with `holdfast profile add --tls-ca FILE`"
    elif "SSL" in why:
        advice = "See whether it speaks TLS at this port: an address without it begins with http://"
    else:
        advice = "See whether it runs (`holdfast serve DIR` says where it listens), and whether the address is right"
    return Unavailable(f"no server can be reached at {address.text}: {why}. {advice}")
