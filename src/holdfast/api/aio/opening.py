# async only: a thread does the work itself
"""Blocking work for tasks: it runs on a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from holdfast.env.world import Wanted

_Given = ParamSpec("_Given")
_Opened = TypeVar("_Opened", bound=AbstractAsyncContextManager[Any])


class AsyncOpening(Coroutine[Any, Any, _Opened], Generic[_Opened]):
    """Something to open: `await` it, or enter it with `async with`.

    It is also a coroutine, so that `asyncio.create_task`, `gather` and the like accept it. Nothing is opened until you
    await it, so there is no warning if you never do.
    """

    def __init__(
        self, open_it: Callable[_Given, Awaitable[_Opened]], *given: _Given.args, **options: _Given.kwargs
    ) -> None:
        self._open = partial(open_it, *given, **options)
        self._opened: _Opened | None = None
        self._steps: Generator[Any, Any, _Opened] | None = None  # of the task that runs it

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._open().__await__()

    def send(self, value: Any) -> Any:
        """Run the next step (part of the coroutine protocol)."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error at the current step (part of the coroutine protocol)."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Stop running it (part of the coroutine protocol)."""
        if self._steps is not None:
            self._steps.close()

    async def __aenter__(self) -> _Opened:
        self._opened = opened = await self._open()
        await opened.__aenter__()
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)


_Result = TypeVar("_Result")


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
