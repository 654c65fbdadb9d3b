"""Blocking work for tasks on threads, off the event loop, and a pool of threads that works until the process ends.

The pools of the standard library stop as soon as the main thread has returned: from then on `submit` raises, although
other threads may go on for hours, and although what runs at exit is still to come. An owner of a folder cannot stop
there. It serves other processes until it has let go of the folder, and an orderly end needs threads for the last
syncs. So these threads are daemons that Python does not wait for, and whoever needs their work done waits for it.
(Python 3.12 starts no thread any more by then; one that runs already is enough.)
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from holdfast.env.world import Wanted

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
_Work = tuple["Future[Any]", Callable[[], Any]]
_Queue = queue.SimpleQueue[_Work | None]


class DaemonThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor, because a loop takes nothing else as its default, with threads and a queue of its own."""

    def __init__(self, threads: int | None = None, name: str = "holdfast") -> None:
        super().__init__(threads, name)
        self._most: int = self._max_workers
        self._name = name
        self._lock = threading.Lock()
        self._queue: _Queue = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._unfinished = 0  # work submitted and not done yet, so a thread more is needed only if all are busy
        self._ended = False
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Call `fn` on a thread; raises RuntimeError after `shutdown`, or if no thread can be started."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._unfinished >= len(self._started) < self._most:
                self._start(first=not self._started)
            self._unfinished += 1
            self._queue.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  as the base
        """Accept no more work, and wait for what was submitted, or cancel what has not begun."""
        cancelled = []
        with self._lock:
            self._ended = True
            while cancel_futures and not self._queue.empty():
                given = self._queue.get()
                if given is not None:
                    self._unfinished -= 1
                    cancelled.append(given[0])
            self._queue.put(None)
        for future in cancelled:  # outside the lock: it calls back
            future.cancel()
        if wait:
            for thread in self._started:
                if thread is not threading.current_thread():
                    thread.join()

    def _start(self, *, first: bool) -> None:
        thread = threading.Thread(
            target=_serve,
            args=(self._queue, weakref.ref(self)),
            name=f"{self._name}_{len(self._started)}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            if first:  # nobody would ever do the work
                raise
            return  # those that run do it, later
        self._started.append(thread)

    def finished_one(self) -> None:
        """A thread is free again."""
        with self._lock:
            self._unfinished -= 1


def _serve(work: _Queue, pool: weakref.ref[DaemonThreads]) -> None:
    """Work until the pool has ended. Keeps no reference to it meanwhile, so that a forgotten pool ends, too."""
    while (given := work.get()) is not None:
        _do(given, pool)
        del given  # while this thread waits, it would keep what the work holds
    work.put(None)  # for the next thread


def _do(given: _Work, pool: weakref.ref[DaemonThreads]) -> None:
    future, call = given
    result = error = None
    wanted = future.set_running_or_notify_cancel()
    if wanted:
        try:
            result = call()
        except BaseException as raised:
            error = raised
    owner = pool()
    if owner is not None:
        owner.finished_one()  # first: whoever waits for the result may submit the next work at once
    del owner, call, given
    try:
        if wanted and error is None:
            future.set_result(result)
        elif wanted:
            future.set_exception(error)
    finally:
        del error  # its traceback holds this frame


async def aside(work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Run the work on a thread and return its result. It always runs to its end: a cancelled task waits for it."""
    done = asyncio.ensure_future(asyncio.to_thread(work, *given, **options))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.gather(done, return_exceptions=True)  # whatever the result
        raise


async def aside_while_wanted(work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Run work on a thread that may stop early: if the task is cancelled, it ends at its next checkpoint."""
    wanted = Wanted()
    try:
        return await asyncio.to_thread(wanted.run, partial(work, *given, **options))
    finally:
        wanted.abandoned = True  # no effect if it has finished


async def opened_aside(open_it: Callable[[], _Result], close: Callable[[_Result], object]) -> _Result:
    """Open something on a thread and return it.

    A thread cannot be cancelled: if the task is, what the thread opens is closed again, or a folder would stay locked.
    """
    opened: Future[_Result] = Future()

    def open_into() -> _Result:
        found = open_it()
        opened.set_result(found)
        return found

    try:
        return await asyncio.to_thread(open_into)
    except asyncio.CancelledError:
        opened.add_done_callback(lambda done: close(done.result()))
        raise
