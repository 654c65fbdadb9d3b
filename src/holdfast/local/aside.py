"""Work that may wait for the disk, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from holdfast.env.checkpoints import Wanted

_Given = ParamSpec("_Given")
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
