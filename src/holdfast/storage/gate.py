"""Group commit: one sync serves every caller who waits for it, threads and tasks alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import Closed, DiskFailed, HoldfastError, Unavailable

_Waiting = tuple[int, asyncio.AbstractEventLoop, "asyncio.Future[None]"]
_Settled = tuple["asyncio.Future[None]", HoldfastError | None]

# A sync covers everything written before it began, so this is the only way not to be covered.
_TRUNCATED = "the message was truncated away before it was synced; it is not in the log"
_CLOSED = "the log was closed before the message was synced"


class SyncGate:
    """Callers wait here until their end is durable; one of them does the sync for all.

    `sync` makes everything written so far durable and answers its end. It raises DiskFailed at most
    once: after that the gate stays shut and every waiter gets that error.
    """

    def __init__(self, sync: Callable[[], int], synced_end: int) -> None:
        self._sync = sync
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._syncing = False
        self._reached, self._served = synced_end, 0  # by the sync under way: its end, and how many tasks it serves
        self._waiting_tasks: list[_Waiting] = []
        self._starting: set[asyncio.AbstractEventLoop] = set()
        self._pool: ThreadPoolExecutor | None = None
        self.synced_end = synced_end
        self.failure: DiskFailed | None = None
        self._closed = False

    def wait(self, end: int) -> None:
        """Block the thread until all below `end` is durable."""
        while True:
            leads = False
            try:  # around all of it: whoever is interrupted on the way must not leave the gate shut
                with self._turn:
                    while self._syncing and self.synced_end < end:
                        self._turn.wait()
                    if self.synced_end >= end:
                        return
                    self._refuse()
                    self._begin()
                    leads = True
                self._sync_once()
            finally:
                if leads:
                    try:
                        self._finish()
                    except BaseException:  # a signal, just now: once more
                        self._finish()
                        raise
            if self.synced_end < end and self.failure is None:
                raise Unavailable(_TRUNCATED)

    async def wait_async(self, end: int) -> None:
        """Suspend the task until all below `end` is durable; the loop is never blocked."""
        done = self.promise(end)
        if done is not None:
            await done

    def promise(self, end: int) -> asyncio.Future[None] | None:
        """What a task may wait for until all below `end` is durable; None where it is already."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.synced_end >= end:
                return None
            self._refuse()
            done = loop.create_future()
            self._waiting_tasks.append((end, loop, done))
            if not self._syncing and loop not in self._starting:
                # After the tasks that are ready now have had their turn: one sync is to serve them all.
                self._starting.add(loop)
                loop.call_soon(self._start, loop)
        return done

    def close(self) -> None:
        """Let the helper thread go, if there ever was one; who still waits for another sync is sent away."""
        with self._turn:
            self._closed = True
            while self._syncing:
                self._turn.wait()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._turn:
            self._starting.discard(loop)
            if self._closed:
                self._release_tasks(0)
            elif self._waiting_tasks and not self._syncing:
                self._lead_from_pool()

    def _lead_from_pool(self) -> None:
        self._begin()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sync")
        self._pool.submit(self._lead)

    def _lead(self) -> None:
        try:
            self._sync_once()
        finally:
            self._finish()

    def _begin(self) -> None:
        """Be the one who syncs. The caller holds the lock, and calls `_finish` whatever happens."""
        self._reached, self._served = self.synced_end, 0
        self._syncing = True

    def _sync_once(self) -> None:
        """Sync; whoever came in the meantime is served by the next sync."""
        served = len(self._waiting_tasks)
        try:
            self._reached, self._served = self._sync(), served
        except DiskFailed as failure:
            self.failure = DiskFailed(str(failure))  # without its frames, which may hold files
        except Exception as error:  # whatever it was, nobody may be told that the bytes are safe
            self.failure = DiskFailed(f"a sync did not finish: {error!r}; open the log anew")
            raise

    def _finish(self) -> None:
        with self._turn:
            self.synced_end = self._reached
            self._syncing = False
            self._release_tasks(self._served)
            if self._waiting_tasks and not self._closed:
                self._lead_from_pool()
            self._turn.notify_all()

    def _release_tasks(self, waiting: int) -> None:
        """Wake the tasks that the sync has served, and those that no sync ever will."""
        ready: defaultdict[asyncio.AbstractEventLoop, list[_Settled]] = defaultdict(list)
        later: list[_Waiting] = []
        for i, (end, loop, done) in enumerate(self._waiting_tasks):
            if end <= self.synced_end:
                ready[loop].append((done, None))
            elif self.failure is not None:
                ready[loop].append((done, DiskFailed(str(self.failure))))
            elif i < waiting:
                ready[loop].append((done, Unavailable(_TRUNCATED)))
            elif self._closed:
                ready[loop].append((done, Closed(_CLOSED)))
            else:
                later.append((end, loop, done))
        self._waiting_tasks = later
        for loop, settled in ready.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_settle, settled)

    def _refuse(self) -> None:
        if self.failure is not None:
            raise DiskFailed(str(self.failure))  # a new one for each caller: a traceback belongs to one thread
        if self._closed:
            raise Closed(_CLOSED)


def _settle(settled: list[_Settled]) -> None:
    """One call into the loop wakes every task that a sync has served."""
    for done, failure in settled:
        if done.done():
            continue
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)
