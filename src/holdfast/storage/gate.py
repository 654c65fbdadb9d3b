"""Group commit: one sync serves every caller who waits for it, threads and tasks alike."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import DiskFailed

_Waiting = tuple[int, asyncio.AbstractEventLoop, "asyncio.Future[None]"]
_Settled = tuple["asyncio.Future[None]", str | None]


class SyncGate:
    """Callers wait here until their end is durable; one of them does the sync for all.

    `sync` makes everything written so far durable and answers its end. It raises DiskFailed at most
    once: after that the gate stays shut and every waiter gets that error.
    """

    def __init__(self, sync: Callable[[], int], synced_end: int) -> None:
        self._sync = sync
        self._turn = threading.Condition()
        self._syncing = False
        self._waiting_tasks: list[_Waiting] = []
        self._pool: ThreadPoolExecutor | None = None
        self.synced_end = synced_end
        self.failure: DiskFailed | None = None

    def wait(self, end: int) -> None:
        """Block the thread until all below `end` is durable."""
        while True:
            with self._turn:
                while self._syncing and self.synced_end < end:
                    self._turn.wait()
                if self.synced_end >= end:
                    return
                self._raise_failure()
                self._syncing = True
            self._lead()

    async def wait_async(self, end: int) -> None:
        """Suspend the task until all below `end` is durable; the loop is never blocked."""
        loop = asyncio.get_running_loop()
        with self._turn:
            if self.synced_end >= end:
                return
            self._raise_failure()
            done = loop.create_future()
            self._waiting_tasks.append((end, loop, done))
            if not self._syncing:
                self._lead_from_pool()
        await done

    def close(self) -> None:
        """Let the helper thread go, if there ever was one."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _lead_from_pool(self) -> None:
        self._syncing = True
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sync")
        self._pool.submit(self._lead)

    def _lead(self) -> None:
        """Sync once; whoever came in the meantime is served by the next sync."""
        synced_end = self.synced_end
        try:
            synced_end = self._sync()
        except DiskFailed as failure:
            self.failure = failure
        except Exception as error:  # whatever it was, nobody may be told that the bytes are safe
            self.failure = DiskFailed(f"a sync did not finish: {error!r}; open the log anew")
            raise
        finally:
            self._finish(synced_end)

    def _finish(self, synced_end: int) -> None:
        with self._turn:
            self.synced_end = max(self.synced_end, synced_end)
            self._syncing = False
            self._release_tasks()
            if self._waiting_tasks:
                self._lead_from_pool()
            self._turn.notify_all()

    def _release_tasks(self) -> None:
        ready: defaultdict[asyncio.AbstractEventLoop, list[_Settled]] = defaultdict(list)
        later: list[_Waiting] = []
        for waiting in self._waiting_tasks:
            end, loop, done = waiting
            if end <= self.synced_end:
                ready[loop].append((done, None))
            elif self.failure is not None:
                ready[loop].append((done, str(self.failure)))
            else:
                later.append(waiting)
        self._waiting_tasks = later
        for loop, settled in ready.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, settled)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise DiskFailed(str(self.failure))  # a new one for each caller: a traceback belongs to one thread


def _settle(settled: list[_Settled]) -> None:
    """One call into the loop wakes every task that a sync has served."""
    for done, failure in settled:
        if done.done():
            continue
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(DiskFailed(failure))
