"""What a server may open: one sum, made at the start, which its limit of file descriptors must cover.

    limit  =  the process itself                        OWN
           +  connections for health checks and admins  RESERVE
           +  connections on their way to a refusal     REFUSED
           +  connections of the owner's socket         an eighth of the limit
           +  sealed segments that are read             a sixteenth of the limit, at most 256
           +  connections                               max_connections, one each
           +  the files of logs                         open_files

A log takes five: its lock, its state and the map of it, its last segment and the map of it. Partitions, groups'
journals, delayed messages and dead letters are logs; beyond `open_files`, those used longest ago close theirs.

What the operator has set is kept or refused. What nobody has set is lowered until it fits: the files of logs to no more
than half of what is left, then the connections to the rest.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.errors import BadSettings
from holdfast.server.http.limits import Limits
from holdfast.storage.kept_open import DESCRIPTORS_EACH, USUAL_MOST

# Standard streams, the loop, listening sockets, the audit log, locks, traces, groups of streams; and what logs take for
# a moment: a scan, a snapshot, a log that waits for its sync before it can close its files.
OWN: Final = 128
RESERVE: Final = Limits().reserve
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
