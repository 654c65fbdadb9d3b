# async only: a thread does it itself
"""What takes a while, for tasks: it is done on a thread, off the event loop."""

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
    """Something that is being opened: `await` it, or enter it with `async with`.

    It is a coroutine, too, for `asyncio.create_task` and others that take nothing else. Nothing is done before it is
    asked for, so one that nobody awaits has opened nothing, and no warning tells of it.
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
        """The next step, for the task that runs it."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """The same, where what it waits for has failed, or the task is cancelled."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Nobody runs it any more."""
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
    """What the work returns, done on a thread. It is never left half done: a task that is cancelled waits for it."""
    done = asyncio.ensure_future(asyncio.to_thread(work, *given, **options))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.gather(done, return_exceptions=True)  # whatever came of it
        raise


async def aside_while_wanted(work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """The same for what may be left half done: where the task is cancelled, it ends at its next checkpoint."""
    wanted = Wanted()
    try:
        return await asyncio.to_thread(wanted.run, partial(work, *given, **options))
    finally:
        wanted.abandoned = True  # has no effect where it is over


async def opened_aside(open_it: Callable[[], _Result], let_go: Callable[[_Result], object]) -> _Result:
    """What is opened on a thread, which cannot be cancelled: what it opens for nobody is let go of again, or a folder
    would stay locked.
    """
    opened: Future[_Result] = Future()

    def open_into() -> _Result:
        found = open_it()
        opened.set_result(found)
        return found

    try:
        return await asyncio.to_thread(open_into)
    except asyncio.CancelledError:
        opened.add_done_callback(lambda done: let_go(done.result()))
        raise
