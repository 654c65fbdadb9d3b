# async only: a call for threads returns what it opened
"""What takes a while to open, for tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
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
