"""What callers and the server may use: memory for bodies, groups and partitions, file descriptors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from typing import Final, Protocol

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.topic import Topic
from holdfast.env.process import asyncio
from holdfast.errors import BadSettings, InvalidRequest, TooManyWaiters
from holdfast.settings import ServerSettings
from holdfast.storage.segment import DESCRIPTORS_EACH, USUAL_MOST

# Connections: the limit in all, the limit for one address, and the reserve.
#
# Before the first request only a client's address is known. So:
#
# - Each address may have a limited share of the connections.
# - A new connection takes precedence over an idle one. When there is no room, the connections that have been idle
#   longest are closed: those of the new client's address if it has used up its share, otherwise those of the address
#   with the most idle connections. A connection is idle while no complete request head has arrived on it. That covers
#   kept-alive connections, clients that send a request byte by byte, and clients that send nothing.
# - If all connections are busy, a few more are accepted in reserve. Each of these gets one request answered, and only
#   a health check or an admin's call. All others get an error that asks them to retry.
#
# The search for idle connections runs only when there is no room, and closes several at once: one pass over all
# connections costs as much as accepting a few dozen.


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Size limits and timeouts of a connection. They apply before the caller is known."""

    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    header_s: float = 10.0  # from a request's first byte, or from the start of the connection, to its last header
    body_grace_s: float = 10.0  # the time a body of any size may take,
    body_bytes_per_s: int = 16 * 1024  # plus one second for each this many bytes received
    idle_s: float = 75.0  # between two requests
    write_s: float = 30.0  # how long a client may leave an answer unread
    connections: int = 10_000
    connections_per_address: int | None = None  # None: three quarters of all, so that other addresses find room
    reserve: int = 32  # connections beyond `connections`, for health checks and admins

    @property
    def per_address(self) -> int:
        """The number of connections that one address may have."""
        if self.connections_per_address is not None:
            return self.connections_per_address
        return self.connections - self.connections // 4


_OF_THESE: Final = 64  # one in this many idle connections is closed at a time


def limits_of(settings: ServerSettings) -> ConnectionLimits:
    """The limits of a connection."""
    return ConnectionLimits(
        header_bytes=settings.max_header_bytes,
        body_bytes=settings.max_request_bytes,
        header_s=settings.header_timeout_ms / 1000,
        body_grace_s=settings.body_timeout_ms / 1000,
        body_bytes_per_s=settings.min_body_bytes_per_s,
        idle_s=settings.idle_timeout_ms / 1000,
        write_s=settings.write_timeout_ms / 1000,
        connections=settings.max_connections - grpc_connections(settings),
        connections_per_address=settings.max_connections_per_address,
    )


def grpc_connections(settings: ServerSettings) -> int:
    """How many of the connections are for gRPC, which counts its own."""
    return 0 if settings.grpc_port is None else settings.max_connections // 4


class Admitted(Enum):
    """How a connection was admitted."""

    FULLY = "fully"
    IN_RESERVE = "in reserve"
    NOT = "not"  # also after it has left


class AdmittedConnection(Protocol):
    """What admission needs to know of a connection."""

    admitted: Admitted

    @property
    def address(self) -> str: ...

    @property
    def rests_since(self) -> float | None:
        """When the connection became idle, by the loop's clock; None while a request is being answered."""

    def shed(self) -> None:
        """Close the connection to make room."""


_SINCE: Final = attrgetter("rests_since")


class ConnectionAdmission:
    """Counts the connections of a server and decides whether to accept new ones."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self._in_reserve: set[AdmittedConnection] = set()
        self._total = 0

    def admit(self, client: AdmittedConnection, others: Iterable[AdmittedConnection]) -> None:
        """Set `client.admitted`; closes idle connections among `others` if there is no room."""
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
        """Free the place of a connection that is closed or about to be."""
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
        """Close the longest idle connections of the address; if None, of the address with the most idle ones."""
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


BODIES_EACH: Final = 4  # bodies of the largest size that one caller may have in memory
ANSWERS_EACH: Final = 8  # answers of the largest size that one caller may have in memory
MOST_WAITING: Final = 256  # bodies of one caller that may wait for room


class Room:
    """Limits the bytes that each caller has in memory. Bodies without room wait, each caller's in order."""

    def __init__(self, each_bytes: int) -> None:
        self.each_bytes = each_bytes
        self._used: dict[str, int] = {}
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def used(self, caller: str) -> int:
        """The number of bytes that a caller has in memory."""
        return self._used.get(caller, 0)

    def waiting(self, caller: str) -> int:
        """The number of a caller's bodies that wait for room."""
        return len(self._lines.get(caller, ()))

    async def take(self, caller: str, size: int) -> int:
        """Wait for room. Returns the size to pass to `give_back`. Raises TooManyWaiters if too many wait already."""
        size = min(size, self.each_bytes)
        if caller not in self._lines and self.used(caller) + size <= self.each_bytes:
            self._used[caller] = self.used(caller) + size
            return size
        if self.waiting(caller) >= MOST_WAITING:
            raise TooManyWaiters(
                f"large requests of {caller} fill {self.each_bytes} bytes of memory, and {MOST_WAITING} more are "
                "waiting, which is the limit for one caller; nothing was done. Try again in a second, with fewer at a "
                "time"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(caller, size)  # cancelled just after it got its room
            else:
                self._leave(caller, turn)
            raise
        return size

    def try_take(self, caller: str, size: int, *, always: bool = False) -> int | None:
        """Take room without waiting; None if there is none. With `always`, exceed the limit instead."""
        size = min(size, self.each_bytes)
        if not always and self.used(caller) + size > self.each_bytes:
            return None
        self._used[caller] = self.used(caller) + size
        return size

    def give_back(self, caller: str, size: int) -> None:
        """Release room, and give it to those who wait for it."""
        self._used[caller] -= size
        self._admit(caller)
        if not self._used[caller]:
            del self._used[caller]

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Remove a waiter. Smaller ones behind it may fit now."""
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
                line.popleft()  # the client disconnected
                continue
            if self.used(caller) + size > self.each_bytes:
                return
            line.popleft()
            self._used[caller] = self.used(caller) + size
            turn.set_result(None)
        self._lines.pop(caller, None)


# Groups and partitions that callers may create on a topic. An embedded broker has no such limits.


def check_new_group(engine: BrokerEngine, topic: Topic, name: str, most: int) -> None:
    """Raise InvalidRequest if the group is new and its topic already has `most` groups, of both modes together."""
    if name in topic.groups:
        return
    streams = engine.streams.on(topic)
    if any(group.name == name for group in streams):
        return
    count = len(topic.groups) + len(streams)
    if count >= most:
        raise InvalidRequest(
            f"the group {name} was not created: {topic.name} has {count} groups, and callers may create {most} "
            "(max_groups). Use one that is there, delete those that nobody needs, or raise max_groups"
        )


def check_new_member(engine: BrokerEngine, topics: list[str], name: str, most: int) -> None:
    """Check the limit on groups for a stream group, on every topic that it reads."""
    for each in topics:
        with engine.using(each) as topic:
            check_new_group(engine, topic, name, most)


def check_partitions(wanted: object, known: int, most: int) -> None:
    """Raise BadSettings for more partitions than callers may ask for. A topic keeps those it has."""
    if type(wanted) is int and wanted > max(most, known):
        raise BadSettings(
            f"partitions={wanted} cannot be used: callers may ask for up to {most} (max_partitions). Ask for fewer, "
            "or raise max_partitions; nothing was changed"
        )


# File descriptors: computed once, at the start. The process's limit must cover this sum:
#
#     limit  =  the process itself                        OWN
#            +  connections for health checks and admins  RESERVE
#            +  connections that are being refused        REFUSED
#            +  connections of the owner's socket         an eighth of the limit
#            +  sealed segments open for reading          a sixteenth of the limit, at most 256
#            +  connections                               max_connections, one each
#            +  the files of logs                         open_files
#
# A log takes five: its lock, its state and the state's map, its last segment and that segment's map. Partitions,
# groups' journals, delayed messages and dead letters are logs. Beyond `open_files`, the least recently used logs close
# their files.
#
# A value that the operator has set is used as it is or refused. Defaults are lowered until they fit: the files of logs
# get half of what is left, or more if the connections need less, and the connections get the rest.

# Standard streams, the loop, listening sockets, the audit log, locks, traces, stream groups; and what logs open
# briefly: a scan, a snapshot, a log that waits for its sync before it can close its files.
OWN: Final = 128
RESERVE: Final = ConnectionLimits().reserve
REFUSED: Final = 64  # accepted and closed at once

LEAST_CONNECTIONS: Final = 64
LEAST_FILES: Final = 100


class Budget(msgspec.Struct, frozen=True):
    """The connections and log files that fit into a limit of file descriptors."""

    descriptors: int
    connections: int
    open_files: int


def owner_connections(descriptors: int) -> int:
    """The number of connections that the owner's socket may have."""
    return max(descriptors // 8, 16)


def read_segments(descriptors: int) -> int:
    """The number of sealed segments that may be open for reading, of all logs together."""
    return min(max(descriptors // 16 // DESCRIPTORS_EACH, 8), USUAL_MOST)


def _apart(descriptors: int) -> int:
    """The descriptors that are left for neither connections nor logs."""
    return OWN + RESERVE + REFUSED + owner_connections(descriptors) + read_segments(descriptors) * DESCRIPTORS_EACH


def budget(
    descriptors: int,
    *,
    connections: int,
    open_files: int,
    connections_set: bool = False,
    open_files_set: bool = False,
) -> Budget:
    """Divide the descriptors. Raises BadSettings if the values set, or the least useful defaults, do not fit."""
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
    """The lowest limit of descriptors that these numbers fit into."""
    wanted = connections + open_files
    least = wanted
    while least - _apart(least) < wanted:
        least += max((wanted + _apart(least) - least) // 2, 1)
    return least
