# async only: a call for threads returns what it opened
"""What takes a while to open, for tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

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
