"""What callers and the server may use: memory for bodies, groups and partitions, file descriptors."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.topic import Topic
from holdfast.errors import BadSettings, InvalidRequest, TooManyWaiters
from holdfast.server.http.admission import ConnectionLimits
from holdfast.storage.segment import DESCRIPTORS_EACH, USUAL_MOST

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
