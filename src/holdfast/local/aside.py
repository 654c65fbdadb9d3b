"""Work that may wait for the disk, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
