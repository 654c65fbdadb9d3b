"""Those who run handlers: threads for plain functions, tasks for async ones. Both begin what they are given at once."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Protocol

from holdfast.worker.bridge import Bridge
from holdfast.worker.runs import Run


class Crew(Protocol):
    """Who runs handlers."""

    def start(self, run: Run) -> None:
        """Run the handler soon."""

    def stop(self, run: Run) -> None:
        """Stop the handler, if it can be stopped."""

    def end(self) -> None:
        """Nothing more comes."""


class Threads:
    """As many threads as were ever needed at once. They do not keep the process alive: a handler may hang for ever."""

    def __init__(self, work: Callable[[Run], None], through: Callable[[Run], None]) -> None:
        self._work = work
        self._through = through
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0
        self._given: SimpleQueue[Run | None] = SimpleQueue()

    def start(self, run: Run) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._count += 1
                threading.Thread(target=self._live, name=f"holdfast-handler-{self._count}", daemon=True).start()
        self._given.put(run)

    def stop(self, run: Run) -> None:
        """A thread cannot be stopped: it is left behind, and ends with its handler."""

    def end(self) -> None:
        for _ in range(self._count):
            self._given.put(None)

    def _live(self) -> None:
        while (run := self._given.get()) is not None:
            self._work(run)
            if run.abandoned:
                return  # another one is in its place
            with self._lock:
                self._idle += 1  # first: whoever takes the free slot finds this thread
            self._through(run)
            del run  # not while waiting for the next one: the message may have to be dropped


class Tasks:
    """A task for each handler that runs."""

    def __init__(self, work: Callable[[Run], Awaitable[None]], through: Callable[[Run], None], bridge: Bridge) -> None:
        self._work = work
        self._through = through
        self._bridge = bridge

    def start(self, run: Run) -> None:
        self._bridge.loop.call_soon_threadsafe(self._begin, run)

    def stop(self, run: Run) -> None:
        self._bridge.loop.call_soon_threadsafe(self._cancel, run)

    def end(self) -> None:
        """There is nobody who waits."""

    def _begin(self, run: Run) -> None:
        run.task = self._bridge.loop.create_task(self._live(run))

    def _cancel(self, run: Run) -> None:
        # On the loop: between the handler's end and its claim nothing else happens there.
        if run.task is not None and (not run.claimed or run.abandoned):
            run.task.cancel()

    async def _live(self, run: Run) -> None:
        await self._work(run)
        self._through(run)
