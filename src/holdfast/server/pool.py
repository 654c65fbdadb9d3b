"""Threads for what takes long to compute: the event loop, and with it every other caller, has its turn meanwhile.

They are few, and its own: whoever waits for the disk on a thread waits for none of these. What runs here gives up the
interpreter every few milliseconds, as long as no single call of it takes long; so whatever is decoded is counted first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from holdfast.server.turns import FairThreads

_THREADS: Final = 2
_THREADS_EACH: Final = 1  # so that one is left for others, and each caller's work goes by turns

_Result = TypeVar("_Result")


class Job:
    """One piece of work, and whether anybody still waits for it."""

    __slots__ = ("unwanted",)

    def __init__(self) -> None:
        self.unwanted = False

    def check(self) -> None:
        """To be called now and then by what takes long: it ends here when the caller is gone."""
        if self.unwanted:
            raise Unwanted


class Unwanted(Exception):
    """Nobody waits for it any more."""


class Pool:
    """Runs work beside the event loop, two at a time and of two callers; what else there is waits in line."""

    def __init__(self) -> None:
        self._threads = FairThreads(_THREADS_EACH, _THREADS, "holdfast-bodies")
        self.waiting = 0  # how many wait for what they gave it

    async def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """What the work answers; its first argument is a Job."""
        job = Job()
        self.waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, job, *arguments)
        try:
            return await running
        except asyncio.CancelledError:
            job.unwanted = True
            raise
        finally:
            self.waiting -= 1
            del running  # its error keeps this frame, and with it what the work was given

    def close(self) -> None:
        """Take no more work; what has begun comes to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
