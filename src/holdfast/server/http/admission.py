"""Which connections there may be: in all, from one address, and in reserve.

Before the first request nobody knows who a client is, only where it comes from. So:

- One address may have its share of the connections, and no more.
- A connection that rests is worth less than a new one. Where there is no room, the connections that rest longest are
  closed: those of the new one's own address, if that has used up its share, or else of the address that has the most
  of those that rest. To rest is to have no whole request head with us: clients that keep a connection for later, and
  clients that send a request byte by byte, or nothing at all.
- Where all others are at work, a few connections more are held in reserve. They are answered one request each, and
  only where it is about the server's health, or an admin's. Everybody else there is told to come back.

Connections that rest are looked for only when there is no room, and some of them are closed at a time: a look at all
costs as much as it takes to accept some dozens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from typing import Final, Protocol

import msgspec

# What one client may ask of a connection, before anybody knows who it is.


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times that a connection is held to."""

    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    header_s: float = 10.0  # from the first byte of a request, or the connection's beginning, to its last header
    body_grace_s: float = 10.0  # a body may take so long,
    body_bytes_per_s: int = 16 * 1024  # and a second more for each so many bytes of it
    idle_s: float = 75.0  # between two requests
    write_s: float = 30.0  # without reading what it is sent
    connections: int = 10_000
    connections_per_address: int | None = None  # None: three quarters of all, so that others find room
    reserve: int = 32  # more connections than that, for health checks and admins

    @property
    def per_address(self) -> int:
        """How many connections one address may have."""
        if self.connections_per_address is not None:
            return self.connections_per_address
        return self.connections - self.connections // 4


_OF_THESE: Final = 64  # one of so many that rest is closed at a time


class Admitted(Enum):
    """What becomes of a new connection."""

    FULLY = "fully"
    IN_RESERVE = "in reserve"
    NOT = "not"  # or not any more


class AdmittedConnection(Protocol):
    """A connection, as far as it matters here."""

    admitted: Admitted

    @property
    def address(self) -> str: ...

    @property
    def rests_since(self) -> float | None:
        """Since when it has no whole request with us; None while one is at work."""

    def shed(self) -> None:
        """Close it, to make room."""


_SINCE: Final = attrgetter("rests_since")


class ConnectionAdmission:
    """Counts the connections of a server, and decides about new ones."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self._in_reserve: set[AdmittedConnection] = set()
        self._total = 0

    def admit(self, client: AdmittedConnection, others: Iterable[AdmittedConnection]) -> None:
        """Decide what becomes of a client that is new among the others."""
        address = client.address
        if self._is_full(address):
            crowded = self._by_address[address] >= self._limits.per_address
            self._make_room(address if crowded else None, others)
            if self._is_full(address):
                self._reserve(client)
                return
        self._by_address[address] += 1
        self._total += 1
        client.admitted = Admitted.FULLY

    def leave(self, client: AdmittedConnection) -> None:
        """A client is gone, or is to go: its place is free."""
        admitted, client.admitted = client.admitted, Admitted.NOT
        if admitted is Admitted.IN_RESERVE:
            self._in_reserve.discard(client)
        elif admitted is Admitted.FULLY:
            self._total -= 1
            self._by_address[client.address] -= 1
            if not self._by_address[client.address]:
                del self._by_address[client.address]

    def _is_full(self, address: str) -> bool:
        limits = self._limits
        return self._total >= limits.connections or self._by_address[address] >= limits.per_address

    def _make_room(self, address: str | None, others: Iterable[AdmittedConnection]) -> None:
        """Close those that rest longest: of the address, or else of the one that has the most of them."""
        resting: dict[str, list[AdmittedConnection]] = {}
        for client in others:
            concerned = client.admitted is Admitted.FULLY and (address is None or client.address == address)
            if concerned and client.rests_since is not None:
                resting.setdefault(client.address, []).append(client)
        if resting:
            most: list[AdmittedConnection] = max(resting.values(), key=len)
            for client in sorted(most, key=_SINCE)[: len(most) // _OF_THESE + 1]:
                self._shed(client)

    def _reserve(self, client: AdmittedConnection) -> None:
        if len(self._in_reserve) >= self._limits.reserve:
            resting = [each for each in self._in_reserve if each.rests_since is not None]
            if not resting:
                return
            self._shed(min(resting, key=_SINCE))
        client.admitted = Admitted.IN_RESERVE
        self._in_reserve.add(client)

    def _shed(self, client: AdmittedConnection) -> None:
        self.leave(client)
        client.shed()
