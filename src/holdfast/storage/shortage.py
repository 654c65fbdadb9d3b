"""What a call may run out of before any byte is at stake: descriptors, memory, maps.

That is no failure of the disk. The call is refused, what it had begun is taken back, and the next one may succeed; only
a write or a sync of data that fails ends a log, because nobody can know what it has left. To keep the two apart,
whatever a sync will need is opened before there is anything to sync.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.env import World
from holdfast.env.disk import RAN_OUT
from holdfast.errors import Unavailable
from holdfast.storage.files import FULL_DISK

_Answer = TypeVar("_Answer")

_WHAT_TO_DO: Final = {
    errno.EMFILE: "this process has no file descriptor left. Close connections, groups or queues, or raise the limit "
    "(`ulimit -n`, LimitNOFILE= in a unit file)",
    errno.ENFILE: "this machine has no file descriptor left. Close files in other programs, or raise fs.file-max",
    errno.ENOMEM: "there is no memory left, or no room for another map. Free some, or raise the limit of memory or "
    "vm.max_map_count",
}


def with_space(world: World, urgent_bytes: int, attempt: Callable[[], _Answer]) -> _Answer:
    """Do what must be possible on a full disk, too: where it is not, have some space made, and try once more."""
    try:
        return attempt()
    except OSError as error:
        if error.errno not in FULL_DISK or not world.make_space(urgent_bytes, urgent_bytes=urgent_bytes):
            raise
    return attempt()


def ran_out(error: OSError) -> bool:
    """Whether something was missing that may be there again at the next try."""
    return error.errno in RAN_OUT


def shortage(what: str, error: OSError, state: str) -> Unavailable:
    """The error for one call: what could not be done, why, what is with the rest, what to do."""
    return Unavailable(f"{what}: {advice(error)}. {state}; try again")


def advice(error: OSError) -> str:
    """What ran out, and what to do about it; of any other error what the system calls it."""
    return _WHAT_TO_DO.get(error.errno or 0) or error.strerror or str(error)


def room(free: int, needed: int, min_free_bytes: int) -> str:
    """Why there is too little on the disk, with the setting that is mostly the cause."""
    kept = f", {min_free_bytes:,} must stay free (min_free_bytes)" if min_free_bytes else ""
    return f"{free:,} bytes are free, {needed:,} are needed{kept}"
