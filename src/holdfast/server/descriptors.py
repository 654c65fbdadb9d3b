"""What a server may open: one sum, made at the start, which its limit of file descriptors must cover.

    limit  =  the process itself                        OWN
           +  connections for health checks and admins  RESERVE
           +  connections on their way to a refusal     REFUSED
           +  connections of the owner's socket         an eighth of the limit
           +  sealed segments that are read             a sixteenth of the limit, at most 512
           +  connections                               max_connections, one each
           +  open partitions                           open_partitions, PER_PARTITION each

A log takes five: its lock, its state and the map of it, its last segment and the map of it. A partition in use has its
own log and the journal of each group that works on it; a third one is for delays, or for a second group. Dead letters
and further groups take more, while most partitions take less.

What the operator has set is kept or refused. What nobody has set is lowered until it fits: the partitions to no more
than half of what is left, then the connections to the rest.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.errors import BadSettings
from holdfast.server.http.limits import Limits
from holdfast.storage.kept_open import DESCRIPTORS_EACH, USUAL_MOST

OWN: Final = 64  # standard streams, the loop, listening sockets, the audit log, locks, traces, groups of streams
RESERVE: Final = Limits().reserve
REFUSED: Final = 64  # accepted, and closed in the same breath
PER_LOG: Final = 5
PER_PARTITION: Final = 3 * PER_LOG

LEAST_CONNECTIONS: Final = 64
LEAST_PARTITIONS: Final = 8


class Budget(msgspec.Struct, frozen=True):
    """How many connections and open partitions fit into a limit of descriptors."""

    descriptors: int
    connections: int
    open_partitions: int


def owner_connections(descriptors: int) -> int:
    """How many programs on the same machine may come by the owner's socket at the same time."""
    return max(descriptors // 8, 16)


def read_segments(descriptors: int) -> int:
    """How many sealed segments may be open for reading, of all logs together."""
    return min(max(descriptors // 16 // DESCRIPTORS_EACH, 8), USUAL_MOST)


def _apart(descriptors: int) -> int:
    """What is not shared by connections and partitions."""
    return OWN + RESERVE + REFUSED + owner_connections(descriptors) + read_segments(descriptors) * DESCRIPTORS_EACH


def budget(
    descriptors: int,
    *,
    connections: int,
    open_partitions: int,
    connections_set: bool = False,
    open_partitions_set: bool = False,
) -> Budget:
    """What fits; BadSettings where what was set does not, or too little is left of what was not."""
    left = descriptors - _apart(descriptors)
    least_connections = connections if connections_set else min(connections, LEAST_CONNECTIONS)
    least_partitions = open_partitions if open_partitions_set else min(open_partitions, LEAST_PARTITIONS)
    if least_connections + least_partitions * PER_PARTITION > left:
        raise BadSettings(
            f"this process may have {descriptors:,} files open, which is too few: {least_connections:,} connections "
            f"and {least_partitions:,} open partitions need {needed(least_connections, least_partitions):,}. Raise "
            "the limit (`ulimit -n`; LimitNOFILE= in a unit file; --ulimit nofile= of a container), or lower "
            "max_connections in [server] or open_partitions in [broker]"
        )
    for_partitions = left - least_connections if connections_set else max(left // 2, left - connections)
    open_partitions = min(open_partitions, max(for_partitions // PER_PARTITION, least_partitions))
    return Budget(descriptors, min(connections, left - open_partitions * PER_PARTITION), open_partitions)


def needed(connections: int, open_partitions: int) -> int:
    """The lowest limit of descriptors that so many fit into."""
    wanted = connections + open_partitions * PER_PARTITION
    least = wanted
    while least - _apart(least) < wanted:
        least += max((wanted + _apart(least) - least) // 2, 1)
    return least
