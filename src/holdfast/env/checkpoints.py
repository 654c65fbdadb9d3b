"""Long loops let others in: they pass a checkpoint with every step, and whoever runs them decides what happens there.

Reading a log, message by message, may take minutes, and so may making a topic, partition by partition, on a thread
beside others that have a call to answer. Who starts such a loop may hang something into its thread's checkpoints: a
pause, or an end. Elsewhere they cost next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")

_local = threading.local()


def checkpoint() -> None:
    """A long loop is about to take its next step."""
    hook: Callable[[], None] | None = getattr(_local, "hook", None)
    if hook is not None:
        hook()


@contextmanager
def checkpoints(hook: Callable[[], None]) -> Iterator[None]:
    """Call the hook at every checkpoint of this thread; what it raises ends the loop."""
    _local.hook = hook
    try:
        yield
    finally:
        del _local.hook


class Abandoned(BaseException):
    """Nobody waits for this any more. No error that anybody should catch, but to clean up."""


class Wanted:
    """Whether somebody waits for what is done on a thread; as soon as nobody does, it ends at its next checkpoint."""

    def __init__(self) -> None:
        self.abandoned = False

    def step(self) -> None:
        """Some more work is about to be done."""
        if self.abandoned:
            raise Abandoned

    def run(self, work: Callable[[], _Result]) -> _Result:
        with checkpoints(self.step):
            self.step()
            return work()
