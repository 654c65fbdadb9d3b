"""What the one core needs of the world: connections and pauses. Threads and tasks each have theirs.

The core is written once, as coroutines. A task awaits them; for a thread they run to their end without ever being
suspended, since what they await there blocks instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from holdfast.client.address import Address
from holdfast.env import Clock
from holdfast.env.sockets import check_listener, connect_tcp, connect_unix, has_ended, short_name

if TYPE_CHECKING:
    import ssl

_Result = TypeVar("_Result")

_RECEIVE_BYTES: Final = 256 * 1024


class Transport(Protocol):
    """One connection."""

    async def send(self, content: bytes, timeout_s: float) -> None:
        """Hand all of it to the system; OSError (TimeoutError among them) where that fails."""

    async def receive(self, timeout_s: float) -> bytes:
        """What came; nothing at the end."""

    def is_ours(self) -> bool:
        """Whether the caller can use it at all: a connection of one event loop is of no use in another."""

    def ended(self) -> bool:
        """Whether it is of no use any more, as far as one can know without asking."""

    def close(self) -> None:
        """Let go of it; at once, and without a word."""

    def forget(self) -> None:
        """The same in a child after a fork: the parent goes on with it."""


class Network(Protocol):
    """How to connect and how to pause."""

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport: ...

    async def pause(self, seconds: float) -> None: ...

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        """Do something that may wait for the disk."""


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that is never suspended: the way of threads."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    coroutine.close()
    raise AssertionError("a call for threads waited as a task does")


class ThreadTransport:
    """A connection whose calls block."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def send(self, content: bytes, timeout_s: float) -> None:
        self._limit(timeout_s)
        self._connection.sendall(content)

    async def receive(self, timeout_s: float) -> bytes:
        self._limit(timeout_s)
        content: bytes = self._connection.recv(_RECEIVE_BYTES)
        return content

    def _limit(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:  # a system call each time
            self._connection.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def is_ours(self) -> bool:
        return True

    def ended(self) -> bool:
        return has_ended(self._connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()

    forget = close


class ThreadNetwork:
    """Connections and pauses for threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport:
        if address.socket is not None:
            return ThreadTransport(connect_unix(address.socket, timeout_s), timeout_s)
        return ThreadTransport(connect_tcp(address.host, address.port, timeout_s, tls), timeout_s)

    async def pause(self, seconds: float) -> None:
        self._clock.wait(threading.Event(), seconds)

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        return work()


class TaskTransport(asyncio.Protocol):
    """A connection for the tasks of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._content = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        self._content += content
        self._wake(self._waiting)

    def connection_lost(self, error: Exception | None) -> None:
        self._over = True
        self._error = error
        self._wake(self._waiting)
        self._wake(self._writable)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        self._wake(self._writable)
        self._writable = None

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def send(self, content: bytes, timeout_s: float) -> None:
        if self._over or self._transport.is_closing():
            raise self._error or ConnectionResetError("the connection is closed")
        self._transport.write(content)
        if self._writable is not None:
            async with asyncio.timeout(timeout_s):
                await self._writable

    async def receive(self, timeout_s: float) -> bytes:
        if not self._content and not self._over:
            self._waiting = waiting = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake, waiting)
            try:
                await waiting
            finally:
                timer.cancel()
                self._waiting = None
        if not self._content and not self._over:
            raise TimeoutError("no answer came in time")
        if not self._content and self._error is not None:
            raise self._error
        content = bytes(self._content)
        self._content.clear()
        return content

    def is_ours(self) -> bool:
        return self._loop is _loop()

    def ended(self) -> bool:
        return self._over or bool(self._content)

    def close(self) -> None:
        if self._loop is _loop():
            self._abort()
        elif not self._loop.is_closed():  # called by a thread, or a finalizer in one
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        if not self._over:  # a transport that has said so is let go of by its loop, and cannot be aborted any more
            self._transport.abort()

    def forget(self) -> None:
        """Nothing: to take it from the loop would take it from the parent's, too."""


def _loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class TaskNetwork:
    """Connections and pauses for tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if address.socket is not None:
                with short_name(address.socket) as name:
                    transport, wire = await loop.create_unix_connection(TaskTransport, name)
                try:
                    check_listener(transport.get_extra_info("socket").fileno(), address.socket)
                except BaseException:
                    transport.abort()
                    raise
            else:
                _, wire = await loop.create_connection(TaskTransport, address.host, address.port, ssl=tls)
        return wire

    async def pause(self, seconds: float) -> None:
        await self._clock.wait_async(asyncio.Event(), seconds)

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.to_thread(work)
