# async only: a thread does it itself
"""What takes a while, for tasks: it is done on a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Opened = TypeVar("_Opened", bound=AbstractAsyncContextManager[Any])


class AsyncOpening(Generic[_Opened]):
    """Something that is being opened: `await` it, or enter it with `async with`."""

    def __init__(
        self, open_it: Callable[_Given, Awaitable[_Opened]], *given: _Given.args, **options: _Given.kwargs
    ) -> None:
        self._open = partial(open_it, *given, **options)
        self._opened: _Opened | None = None

    def __await__(self) -> Generator[Any, None, _Opened]:
        return self._open().__await__()

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
