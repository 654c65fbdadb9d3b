"""From the threads of a worker to an event loop: its own, or the one that `run_async` was called in."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any, Final

_PATIENCE_S: Final = 1.0


class Bridge:
    """An event loop, and how threads have something awaited there."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._own = loop is None
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; one of our own is made when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-worker-loop", daemon=True)
                self._thread.start()
            return self._loop

    def wait(self, answer: Any) -> Any:
        """The answer of a call that may be for tasks; not to be called on the loop's own thread."""
        if not inspect.isawaitable(answer):
            return answer
        return asyncio.run_coroutine_threadsafe(_awaited(answer), self.loop).result()

    def end(self) -> None:
        """Stop a loop of our own; one that a handler blocks is left behind."""
        loop, thread = self._loop, self._thread
        if not self._own or loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(_end_tasks(), loop)
        ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        thread.join(_PATIENCE_S)
        if not thread.is_alive():
            loop.close()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    # Threads of the loop that hang would keep the process: those that are idle end with it.
