"""What callers and the server may use: memory for bodies, groups and partitions, file descriptors."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from typing import Final, Protocol

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.topic import Topic
from holdfast.errors import BadSettings, InvalidRequest, TooManyWaiters
from holdfast.storage.segment import DESCRIPTORS_EACH, USUAL_MOST

# Which connections there may be: in all, from one address, and in reserve.
#
# Before the first request nobody knows who a client is, only where it comes from. So:
#
# - One address may have its share of the connections, and no more.
# - A connection that rests is worth less than a new one. Where there is no room, the connections that rest longest are
#   closed: those of the new one's own address, if that has used up its share, or else of the address that has the most
#   of those that rest. To rest is to have no whole request head with us: clients that keep a connection for later, and
#   clients that send a request byte by byte, or nothing at all.
# - Where all others are at work, a few connections more are held in reserve. They are answered one request each, and
#   only where it is about the server's health, or an admin's. Everybody else there is told to come back.
#
# Connections that rest are looked for only when there is no room, and some of them are closed at a time: a look at all
# costs as much as it takes to accept some dozens.


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


BODIES_EACH: Final = 4  # of the largest size, of one caller at a time
ANSWERS_EACH: Final = 8  # of the largest size, of one caller at a time
MOST_WAITING: Final = 256  # bodies of one caller for which there is no room yet


class Room:
    """How many bytes each caller has in memory, and who waits for some."""

    def __init__(self, each_bytes: int) -> None:
        self.each_bytes = each_bytes
        self._used: dict[str, int] = {}
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def used(self, caller: str) -> int:
        """How many bytes of a caller there is room for by now."""
        return self._used.get(caller, 0)

    def waiting(self, caller: str) -> int:
        """How many bodies of a caller there is no room for yet."""
        return len(self._lines.get(caller, ()))

    async def take(self, caller: str, size: int) -> int:
        """Wait for room, in line; answers with what to give back."""
        size = min(size, self.each_bytes)
        if caller not in self._lines and self.used(caller) + size <= self.each_bytes:
            self._used[caller] = self.used(caller) + size
            return size
        if self.waiting(caller) >= MOST_WAITING:
            raise TooManyWaiters(
                f"large requests of {caller} fill {self.each_bytes} bytes of memory, and {MOST_WAITING} more wait, "
                "which is the limit for one caller; nothing was done. Try again in a second, with fewer at a time"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(caller, size)  # it was its turn at this moment
            else:
                self._leave(caller, turn)
            raise
        return size

    def try_take(self, caller: str, size: int, *, always: bool = False) -> int | None:
        """The same without a wait: None where there is no room, unless it must be there `always`."""
        size = min(size, self.each_bytes)
        if not always and self.used(caller) + size > self.each_bytes:
            return None
        self._used[caller] = self.used(caller) + size
        return size

    def give_back(self, caller: str, size: int) -> None:
        """The body is in nobody's memory any more: the next ones in line may have come to their turn."""
        self._used[caller] -= size
        self._admit(caller)
        if not self._used[caller]:
            del self._used[caller]

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Somebody in line is gone; those behind may fit where it did not."""
        line = self._lines[caller]
        left = deque(each for each in line if each[0] is not turn)
        if left:
            self._lines[caller] = left
            self._admit(caller)
        else:
            del self._lines[caller]

    def _admit(self, caller: str) -> None:
        line = self._lines.get(caller)
        while line:
            turn, size = line[0]
            if turn.done():
                line.popleft()  # its client is gone
                continue
            if self.used(caller) + size > self.each_bytes:
                return
            line.popleft()
            self._used[caller] = self.used(caller) + size
            turn.set_result(None)
        self._lines.pop(caller, None)


# What callers may make: so many groups and partitions a topic. In one's own process there are no such limits.


def check_new_group(engine: BrokerEngine, topic: Topic, name: str, most: int) -> None:
    """Refuse one more group on a topic that has as many as it may, in both modes together."""
    if name in topic.groups:
        return
    streams = engine.streams.on(topic)
    if any(group.name == name for group in streams):
        return
    count = len(topic.groups) + len(streams)
    if count >= most:
        raise InvalidRequest(
            f"the group {name} was not made: {topic.name} has {count} groups, and callers may make {most} "
            "(max_groups). Use one that is there, delete those that nobody needs, or raise max_groups"
        )


def check_new_member(engine: BrokerEngine, topics: list[str], name: str, most: int) -> None:
    """The same for a group in stream mode, on all that it is to read."""
    for each in topics:
        with engine.using(each) as topic:
            check_new_group(engine, topic, name, most)


def check_partitions(wanted: object, known: int, most: int) -> None:
    """Refuse more partitions than callers may ask for; what a topic has it keeps."""
    if type(wanted) is int and wanted > max(most, known):
        raise BadSettings(
            f"partitions={wanted} cannot be used: callers may ask for up to {most} (max_partitions). Ask for fewer, "
            "or raise max_partitions; nothing was changed"
        )


# What a server may open: one sum, made at the start, which its limit of file descriptors must cover.
#
#     limit  =  the process itself                        OWN
#            +  connections for health checks and admins  RESERVE
#            +  connections on their way to a refusal     REFUSED
#            +  connections of the owner's socket         an eighth of the limit
#            +  sealed segments that are read             a sixteenth of the limit, at most 256
#            +  connections                               max_connections, one each
#            +  the files of logs                         open_files
#
# A log takes five: its lock, its state and the map of it, its last segment and the map of it. Partitions, groups'
# journals, delayed messages and dead letters are logs; beyond `open_files`, those used longest ago close theirs.
#
# What the operator has set is kept or refused. What nobody has set is lowered until it fits: the files of logs to no
# more than half of what is left, then the connections to the rest.


# Standard streams, the loop, listening sockets, the audit log, locks, traces, groups of streams; and what logs take for
# a moment: a scan, a snapshot, a log that waits for its sync before it can close its files.
OWN: Final = 128
RESERVE: Final = ConnectionLimits().reserve
REFUSED: Final = 64  # accepted, and closed in the same breath

LEAST_CONNECTIONS: Final = 64
LEAST_FILES: Final = 100


class Budget(msgspec.Struct, frozen=True):
    """How many connections and files of logs fit into a limit of descriptors."""

    descriptors: int
    connections: int
    open_files: int


def owner_connections(descriptors: int) -> int:
    """How many programs on the same machine may come by the owner's socket at the same time."""
    return max(descriptors // 8, 16)


def read_segments(descriptors: int) -> int:
    """How many sealed segments may be open for reading, of all logs together."""
    return min(max(descriptors // 16 // DESCRIPTORS_EACH, 8), USUAL_MOST)


def _apart(descriptors: int) -> int:
    """What is not shared by connections and logs."""
    return OWN + RESERVE + REFUSED + owner_connections(descriptors) + read_segments(descriptors) * DESCRIPTORS_EACH


def budget(
    descriptors: int,
    *,
    connections: int,
    open_files: int,
    connections_set: bool = False,
    open_files_set: bool = False,
) -> Budget:
    """What fits; BadSettings where what was set does not, or too little is left of what was not."""
    left = descriptors - _apart(descriptors)
    least_connections = connections if connections_set else min(connections, LEAST_CONNECTIONS)
    least_files = open_files if open_files_set else min(open_files, LEAST_FILES)
    if least_connections + least_files > left:
        raise BadSettings(
            f"this process may have {descriptors:,} files open, which is too few: {least_connections:,} connections "
            f"and {least_files:,} files of logs need {needed(least_connections, least_files):,}. Raise "
            "the limit (`ulimit -n`; LimitNOFILE= in a unit file; --ulimit nofile= of a container), or lower "
            "max_connections in [server] or open_files in [broker]"
        )
    for_files = left - least_connections if connections_set else max(left // 2, left - connections)
    open_files = min(open_files, max(for_files, least_files))
    return Budget(descriptors, min(connections, left - open_files), open_files)


def needed(connections: int, open_files: int) -> int:
    """The lowest limit of descriptors that so many fit into."""
    wanted = connections + open_files
    least = wanted
    while least - _apart(least) < wanted:
        least += max((wanted + _apart(least) - least) // 2, 1)
    return least
