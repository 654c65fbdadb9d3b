"""Where a client's calls go: to an address that it was given, or straight to the node that owns what they are about.

Any node of a cluster answers any call. One that passes a call on says in its answer which node owns the shard
(`OWNER`). A client remembers that by the name of the topic, the lock or the document, and calls the owner directly from
then on. It never computes where something lives. If that changes, the last owner passes the call on and names the next.

What is remembered is only a shortcut. If the owner cannot be reached from here (the addresses that nodes advertise may
be known only behind a load balancer), breaks the connection or takes long, it is forgotten, and the call goes to the
addresses that were given. One that could not be reached, or took long, is left alone for a while, each time for longer.
Calls that could not be repeated, and those that let the server wait for long, never take the shortcut: a node notices
sooner than a client that an owner has been replaced.

A call carries the token, so not every address that a server names is called: only one with the same scheme as the
address that was given, and never one on this machine unless that one was on this machine, or the other way round: who
calls through a tunnel has not agreed to send the token across the network, and who calls another machine does not mean
what listens on a port of this one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from holdfast.client.opening import Address, parse_address
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.client.calling import PooledConnection
    from holdfast.env import Clock

STRAIGHT_CONNECT_S: Final = 1.0  # to an address that may be out of reach from here
STRAIGHT_S: Final = 2.0  # for an answer, besides what the server may wait: then another node is asked
STRAIGHT_WAIT_S: Final = 2.0  # one call lets the server wait no longer, so that an owner that is stopped is noticed
_BYTES_PER_S: Final = 1_000_000  # a large body has more time
_MOST_PLACES: Final = 10_000
_MOST_NODES: Final = 1_000
_MOST_TEXT: Final = 300
_FIRST_PAUSE_NS: Final = 1_000_000_000
_MOST_PAUSE_NS: Final = 600_000_000_000
_BY_NAME: Final = ("/v1/queues/", "/v1/topics/", "/v1/locks/", "/v1/state/")
_BY_MEMBER: Final = "/v1/groups/"


class Endpoint:
    """An address, the Host header for it, and the idle connections to it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.host = b"host: %b\r\n" % address.authority.encode("latin-1")
        self.idle: deque[PooledConnection] = deque()
        self.failures = 0  # to go straight there, one after the other
        self.not_before_ns = 0

    def drop_idle(self) -> None:
        """Close the idle connections."""
        while self.idle:
            try:
                self.idle.pop().wire.close()
            except IndexError:
                return


class Owners:
    """Which node owns what, as far as this client was told. Safe to use from any thread or task."""

    def __init__(self, clock: Clock, given: tuple[Address, ...]) -> None:
        self._clock = clock
        self._first = given[0]
        self.given = [Endpoint(address) for address in given]
        self._nodes = {_key(each.address): each for each in self.given}
        self.places: dict[str, Endpoint] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(list(self._nodes.values()) + self.given)

    def of(self, path: str) -> Endpoint | None:
        """The owner of what a call with this path is about, if it is known."""
        return self.places.get(place_of(path))

    def learn(self, path: str, url: str) -> None:
        """Take note of what an answer said."""
        place = place_of(path)
        address = owner_address(url, self._first) if place else None
        if address is None:
            return
        key = _key(address)
        node = self._nodes.get(key)
        if node is None:
            if len(self._nodes) >= _MOST_NODES:
                return
            node = self._nodes.setdefault(key, Endpoint(address))
        if self._clock.monotonic_ns() < node.not_before_ns:
            return
        if len(self.places) >= _MOST_PLACES:
            self.places.clear()
        self.places[place] = node

    def forget(self, node: Endpoint) -> None:
        """A connection to the node broke: ask the given addresses where its topics are now."""
        if self.places:
            self.places = {place: each for place, each in list(self.places.items()) if each is not node}
        node.drop_idle()

    def failed(self, node: Endpoint) -> None:
        """The node could not be reached, or did not answer in time: leave it alone for a while."""
        pause_ns = min(_FIRST_PAUSE_NS << min(node.failures, 16), _MOST_PAUSE_NS)
        node.failures += 1
        node.not_before_ns = self._clock.monotonic_ns() + pause_ns
        self.forget(node)


def straight_s(wait_s: float, size: int) -> float:
    """How long the owner may take for one attempt with a body of this size."""
    return wait_s + STRAIGHT_S + size / _BYTES_PER_S


def place_of(path: str) -> str:
    """The part of a path that says where its call belongs; empty if that does not follow from the path."""
    if path.startswith(_BY_NAME):
        start = path.index("/", 4) + 1
    elif path.startswith(_BY_MEMBER):
        start = path.find("/members/", len(_BY_MEMBER)) + 9
        if start < len(_BY_MEMBER):
            return ""
    else:
        return ""
    end = path.find("/", start)
    if end < 0:
        end = path.find("?", start)
    return path if end < 0 else path[:end]


def owner_address(text: str, given: Address) -> Address | None:
    """The address of an owner as a server names it; None for one to which the token must not go."""
    if given.socket is not None or len(text) > _MOST_TEXT or "," in text:
        return None
    try:
        found = parse_address(text)
    except InvalidRequest:
        return None
    if found.socket is not None or found.queue is not None or found.secure != given.secure:
        return None
    return found if _is_here(found.host) == _is_here(given.host) else None


def _is_here(host: str) -> bool:
    from ipaddress import ip_address

    try:
        found = ip_address(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost")
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback or found.is_unspecified


def _key(address: Address) -> tuple[str, int, str | None]:
    return address.host, address.port, address.socket
