"""Who uses something that is for one task or thread at a time."""

from __future__ import annotations

import asyncio
import threading


class AsyncUser:
    """The task that makes this."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def is_elsewhere(self) -> bool:
        """Whether it is another than the one that asks, and still runs."""
        task = self._task
        return task is not None and task is not asyncio.current_task() and not task.done()


class User:
    """The thread that makes this."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def is_elsewhere(self) -> bool:
        """Whether it is another than the one that asks, and still runs."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()
