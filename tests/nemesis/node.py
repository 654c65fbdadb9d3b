"""`holdfast` with what only a test may have: a wall clock that jumps, and mistakes that checks must find.

    python -m tests.nemesis.node serve --cluster ...

The environment says what: `NEMESIS_CLOCK` names a file with the nanoseconds by which the wall clock is wrong, and
`NEMESIS_PLANTED` a mistake of `PLANTED`. The product knows nothing of either.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

CLOCK = "NEMESIS_CLOCK"
MISTAKE = "NEMESIS_PLANTED"
OFFSET = struct.Struct("<q")


def set_clock(path: str, seconds: float) -> None:
    """Let the clock that a file stands for be wrong by so much."""
    with open(path, "r+b" if os.path.exists(path) else "wb") as file:  # in place: it is mapped
        file.write(OFFSET.pack(round(seconds * 1e9)))


def shift_clock(path: str) -> None:
    """Make the wall clock of this process that of a file, which may change at any time."""
    from holdfast.env.world import SystemClock

    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), OFFSET.size, prot=mmap.PROT_READ)
    unpack, now_ns = OFFSET.unpack_from, time.time_ns

    def shifted_ns() -> int:
        return now_ns() + int(unpack(shared)[0])

    SystemClock.now_ns = staticmethod(shifted_ns)  # type: ignore[method-assign]


def ignore_condition() -> None:
    """A store that overwrites what is there, as some do that only look like S3; and nobody tries it before."""
    from holdfast.env.chain import ownership, services

    def careless(create: Callable[[Any, str, bytes], bool]) -> Callable[[Any, str, bytes], bool]:
        def overwrite(self: Any, key: str, content: bytes) -> bool:
            while not create(self, key, content):
                self.remove(key)
            return True

        return overwrite

    for kind in (services.ObjectStoreEngine, services.PostgresStore):
        kind.create = careless(kind.create)  # type: ignore[method-assign]
    ownership.probe = lambda *_: None


def skip_lease_check() -> None:
    """Owners that never ask whether they still are, and others that now and then do not wait for them to be silent."""
    from holdfast.env.chain.chain import Chain
    from holdfast.server.cluster.shards import ShardSlot

    may_take, rng = ShardSlot.may_take, random.Random()

    def impatient(self: ShardSlot, *, closed: bool, free: bool) -> bool:
        return may_take(self, closed=closed, free=free or rng.random() < 0.03)

    Chain.is_current = lambda self: True  # type: ignore[method-assign]
    ShardSlot.may_take = impatient  # type: ignore[method-assign]


def skip_fence() -> None:
    """A document that is written whether or not the lock that guards it is held."""
    from holdfast import locking

    allow = locking._allow
    locking._allow = lambda table, name, expected, proof, now: allow(table, name, expected, None, now)


PLANTED = {"condition": ignore_condition, "lease": skip_lease_check, "fence": skip_fence}


def main() -> int:
    from holdfast.cli.main import main as command

    if os.environ.get(CLOCK):
        shift_clock(os.environ[CLOCK])
    if os.environ.get(MISTAKE):
        PLANTED[os.environ[MISTAKE]]()
    return command()


if __name__ == "__main__":
    sys.exit(main())
