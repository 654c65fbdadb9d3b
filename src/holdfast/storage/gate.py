"""Group commit: one sync serves every caller that waits for it, threads and tasks alike.

A sync covers everything written before it began. A caller that arrives while one is running cannot know whether that
sync covers its bytes, so it waits for the next one; all callers that arrive during one sync share the next. There are
no timers and no batching delay: under load the syncs themselves form the batches.

A waiting thread whose turn it is runs the sync itself (it *leads*). Tasks cannot block, so a helper thread leads for
them. Whoever leads must call `_finish`, whatever happens, or all others would wait forever.

After one failed sync nothing more is promised: the kernel may have dropped the dirty pages and report success the next
time. So a failure is final, and every caller from then on gets it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from holdfast.env.process import asyncio
from holdfast.errors import Closed, DiskFailed, HoldfastError, Unavailable

if TYPE_CHECKING:
    from holdfast.env.threads import DaemonThreads

_Waiting: TypeAlias = "tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]"
_Settled: TypeAlias = "tuple[asyncio.Future[None], HoldfastError | None]"

# A sync covers everything written before it began, so truncation is the only reason for not being covered.
_TRUNCATED = "the message was truncated away before it was synced; it is not in the log"
_CLOSED = "the log was closed before the message was synced"


class SyncGate:
    """Callers wait here until their bytes are durable; one of them syncs for all.

    `sync` makes everything written so far durable and returns the offset it reached. When it raises DiskFailed,
    the gate stays shut and every waiter gets that error.
    """

    def __init__(self, sync: Callable[[], int], synced_end: int) -> None:
        self._sync = sync
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._syncing = False
        self._reached, self._served = synced_end, 0  # of the sync under way: its end, and how many tasks it serves
        self._waiting_tasks: list[_Waiting] = []
        self._starting: set[asyncio.AbstractEventLoop] = set()
        self._pool: DaemonThreads | None = None
        self.synced_end = synced_end
        self.failure: DiskFailed | None = None
        self._closed = False

    def wait(self, end: int) -> None:
        """Block the thread until everything below `end` is durable; raises DiskFailed, Closed or Unavailable."""
        while True:
            leads = False
            try:  # around everything: a thread interrupted on the way must not leave the gate shut
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
                    except BaseException:  # a signal at this very moment: once more
                        self._finish()
                        raise
            if self.synced_end < end and self.failure is None:
                raise Unavailable(_TRUNCATED)

    async def wait_async(self, end: int) -> None:
        """Suspend the task until everything below `end` is durable; never blocks the loop."""
        done = self.promise(end)
        if done is not None:
            await done

    def promise(self, end: int) -> asyncio.Future[None] | None:
        """Return a future that is done when everything below `end` is durable; None if it already is."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.synced_end >= end:
                return None
            self._refuse()
            done = loop.create_future()
            self._waiting_tasks.append((end, loop, done))
            if not self._syncing and loop not in self._starting:
                # Start after the tasks that are ready now have run: they may append, too, and share this sync.
                self._starting.add(loop)
                loop.call_soon(self._start, loop)
        return done

    def close(self) -> None:
        """Stop the helper thread, if there is one. Callers still waiting for another sync get Closed."""
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
            from holdfast.env.threads import DaemonThreads  # loads what few programs need

            self._pool = DaemonThreads(1, "holdfast-sync")
        try:
            self._pool.submit(self._lead)
        except RuntimeError:  # no thread can be started: a loop that waits is held up rather than kept waiting forever
            self._lead_from_a_loop()

    def _lead_from_a_loop(self) -> None:
        for _, loop, _ in self._waiting_tasks:
            with contextlib.suppress(RuntimeError):  # this one is closed: its tasks are gone
                loop.call_soon_threadsafe(self._lead)
                return
        self._waiting_tasks.clear()
        self._syncing = False

    def _lead(self) -> None:
        try:
            self._sync_once()
        finally:
            self._finish()

    def _begin(self) -> None:
        """Become the leader. The caller holds the lock, and calls `_finish` whatever happens."""
        self._reached, self._served = self.synced_end, 0
        self._syncing = True

    def _sync_once(self) -> None:
        """Sync once. Tasks that arrive meanwhile are not served: their bytes may have been written after it began."""
        served = len(self._waiting_tasks)
        try:
            self._reached, self._served = self._sync(), served
        except DiskFailed as failure:
            self.failure = DiskFailed(str(failure))  # a copy without traceback: its frames may hold files open
        except Exception as error:  # whatever it was: nobody may be told that the bytes are safe
            self.failure = DiskFailed(f"a sync did not finish: {error!r}; open the log again")
            raise

    def _finish(self) -> None:
        # In one step with waking the others: whoever comes in between would start a sync that is not needed.
        with self._turn:
            self.synced_end = self._reached
            self._syncing = False
            self._release_tasks(self._served)
            if self._waiting_tasks and not self._closed:
                self._lead_from_pool()
            self._turn.notify_all()

    def _release_tasks(self, waiting: int) -> None:
        """Wake the tasks that the sync served, and those that no sync ever will. The caller holds the lock."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: its tasks are gone
                loop.call_soon_threadsafe(_settle, settled)

    def _refuse(self) -> None:
        if self.failure is not None:
            raise DiskFailed(str(self.failure))  # a new one for each caller: a traceback belongs to one thread
        if self._closed:
            raise Closed(_CLOSED)


def _settle(settled: list[_Settled]) -> None:
    """Complete the futures of all served tasks of one loop, in a single call into that loop."""
    for done, failure in settled:
        if done.done():
            continue
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)
