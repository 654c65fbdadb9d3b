"""The brokers that are open in an event loop: one for each place, for all that use it there."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.env.process import asyncio
from holdfast.integrations.places import Tls, place_of


class Opened:
    """A broker, and how many use it."""

    def __init__(self, opening: Any) -> None:
        self.task = asyncio.ensure_future(opening)
        self.users = 0

    @property
    def usable(self) -> bool:
        """Whether it is open, or is being opened in this event loop."""
        if not self.task.done():
            return self.task.get_loop() is asyncio.get_running_loop()
        return not (self.task.cancelled() or self.task.exception() or self.task.result().closed)


_opened: dict[tuple[int, str, str | None], Opened] = {}


class AsyncPlace:
    """A place as one user sees it: opened when it is first used, closed when its last user has closed it."""

    def __init__(self, url: str, tls: Tls = None) -> None:
        self._place, self._token = place_of(url)
        self._tls = tls
        self._key: tuple[int, str, str | None] | None = None

    async def broker(self) -> holdfast.aio.AsyncBroker:
        """The open broker of this event loop."""
        key = (id(asyncio.get_running_loop()), self._place, self._token)
        opened = _opened.get(key)
        if opened is None or not opened.usable:
            opening = holdfast.aio.open_broker(self._place, token=self._token, tls=self._tls)
            opened = _opened[key] = Opened(opening)
            self._key = None
        if self._key != key:
            self._key = key
            opened.users += 1
        broker: holdfast.aio.AsyncBroker = await asyncio.shield(opened.task)
        return broker

    async def close(self) -> None:
        """Close the broker, unless others use it."""
        key, self._key = self._key, None
        opened = _opened.get(key) if key else None
        if opened is None or key is None:
            return
        opened.users -= 1
        if opened.users <= 0:
            del _opened[key]
            await (await opened.task).close()
