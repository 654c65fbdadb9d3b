"""What takes long for one topic, on threads of its own: opening it, making a group, more partitions, deleting it.

The loop's own threads are few, and all else needs them. So tasks take turns for a topic before they get a thread:
however many want one that is just being opened, one thread works on it, and none waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from holdfast.env.world import Wanted

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_MOST_THREADS: Final = 32  # topics on which tasks may be at work at the same time


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class TopicThread:
    """Where what takes long for one topic is done."""

    __slots__ = ("_threads", "_topic")

    def __init__(self, threads: TopicThreads, topic: str) -> None:
        self._threads = threads
        self._topic = topic

    async def aside(self, work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
        """What the work returns, done when it is the topic's turn."""
        return await self._threads.run(self._topic, partial(work, *given, **options))


class TopicThreads:
    """Runs calls on threads, for each topic one at a time. For the tasks of one event loop at a time."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._pool: ThreadPoolExecutor | None = None

    def at(self, topic: str) -> TopicThread:
        """The topic's own."""
        return TopicThread(self, topic)

    async def run(self, topic: str, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call it when it is the topic's turn; where the task is cancelled, it ends at its next checkpoint."""
        wanted = Wanted()
        turn = self._turns.get(topic)
        if turn is None:
            turn = self._turns[topic] = _Turn()
        turn.users += 1
        try:
            await turn.lock.acquire()
            try:
                begun = self._submit(copy_context().run, wanted.run, partial(call, *arguments))
            except BaseException:
                turn.lock.release()
                raise
        except BaseException:
            self._leave(topic, turn)
            raise
        loop = asyncio.get_running_loop()
        begun.add_done_callback(lambda _: _tell(loop, self._done, topic, turn))
        try:
            return await asyncio.wrap_future(begun)
        finally:
            wanted.abandoned = True  # has no effect where it is over

    def close(self) -> None:
        """Let the threads go, each when it is through."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def _submit(self, call: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="holdfast-topics")
        return self._pool.submit(call, *arguments)

    def _done(self, topic: str, turn: _Turn) -> None:
        turn.lock.release()
        self._leave(topic, turn)

    def _leave(self, topic: str, turn: _Turn) -> None:
        turn.users -= 1
        if not turn.users and self._turns.get(topic) is turn:
            del self._turns[topic]


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(call, *arguments)
