"""Something that takes a while to open, for tasks: it can be awaited, and can stand in `async with`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from holdfast.broker.engine import BrokerEngine


class Openable(Protocol):
    """What takes a while to open, and must be closed."""

    _engine: BrokerEngine

    async def close(self) -> None: ...


_Face = TypeVar("_Face", bound=Openable)


class Opening(Generic[_Face]):
    """A broker that is being opened: `await` it, or enter it with `async with`."""

    def __init__(self, open_it: Callable[[], _Face]) -> None:
        self._open = open_it
        self._face: _Face | None = None

    def __await__(self) -> Generator[Any, None, _Face]:
        return self._opened().__await__()

    async def __aenter__(self) -> _Face:
        self._face = await self._opened()
        return self._face

    async def _opened(self) -> _Face:
        """A thread cannot be cancelled: what it opens for nobody is closed again, or its folder would stay locked."""
        opened: Future[_Face] = Future()
        try:
            return await asyncio.to_thread(self._open_into, opened)
        except asyncio.CancelledError:
            opened.add_done_callback(lambda done: done.result()._engine.close())
            raise

    def _open_into(self, opened: Future[_Face]) -> _Face:
        face = self._open()
        opened.set_result(face)
        return face

    async def __aexit__(self, *exc: object) -> None:
        if self._face is not None:
            await self._face.close()
