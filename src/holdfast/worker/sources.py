"""The queues of a worker, whatever face they have: embedded or remote, for threads or for tasks.

A face is known by its methods only: `receive_many`, `closed`, and the verbs of its messages. One that the worker opens
hands out bodies as the queue says that they are (`bodies`), unless the worker was told.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from os import PathLike, fspath
from typing import Any, Final, Literal

import msgspec

from holdfast.api.bodies import type_of
from holdfast.api.drafts import Seconds
from holdfast.api.ports import port_of
from holdfast.api.times import duration_ms
from holdfast.errors import InvalidRequest

# From the threads of a worker to an event loop: its own, or the one that `run_async` was called in.


_PATIENCE_S: Final = 1.0


class Bridge:
    """An event loop, and how threads have something awaited there."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._own = loop is None
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; one of our own is made when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-worker-loop", daemon=True)
                self._thread.start()
            return self._loop

    def wait(self, answer: Any) -> Any:
        """The answer of a call that may be for tasks; not to be called on the loop's own thread."""
        if not inspect.isawaitable(answer):
            return answer
        return asyncio.run_coroutine_threadsafe(_awaited(answer), self.loop).result()

    def end(self) -> None:
        """Stop a loop of our own; one that a handler blocks is left behind."""
        loop, thread = self._loop, self._thread
        if not self._own or loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(_end_tasks(), loop)
        ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        thread.join(_PATIENCE_S)
        if not thread.is_alive():
            loop.close()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    # Threads of the loop that hang would keep the process: those that are idle end with it.


# How a handler can end, and what is done with its message then.


class Reject(Exception):
    """Raise it in a handler: the message can never be handled, and goes straight to the dead letters."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)


class Retry(Exception):
    """Raise it in a handler: try again after `delay`, or after the queue's backoff. It counts as an attempt."""

    def __init__(self, reason: object = "", *, delay: Seconds | None = None) -> None:
        super().__init__(reason)
        if delay is not None:
            duration_ms(delay, "delay")  # refused where it is written
        self.delay = delay


class Settlement(msgspec.Struct, frozen=True):
    """The last thing to do with a message."""

    verb: Literal["ack", "nack", "defer", "reject"]
    error: Any = None
    delay: Seconds | None = None

    def on(self, message: Any) -> Any:
        """Do it; a message of a face for tasks answers with something to be awaited."""
        if self.verb == "nack":
            return message.nack(delay=self.delay, error=self.error)
        if self.verb == "reject":
            return message.reject(self.error)
        return message.ack() if self.verb == "ack" else message.defer()


ACK: Final = Settlement("ack")
DEFER: Final = Settlement("defer")


def settlement_after(error: BaseException | None) -> Settlement:
    """What to do with a message whose handler ended so."""
    if error is None:
        return ACK
    if isinstance(error, Reject):
        return Settlement("reject", _reason(error))
    if isinstance(error, Retry):
        return Settlement("nack", _reason(error), error.delay)
    return Settlement("nack", error)


def is_wish(error: BaseException | None) -> bool:
    """Whether the handler asked for what happens, so that nobody needs to be told of an error."""
    return isinstance(error, (Reject, Retry))


def _reason(error: BaseException) -> object:
    """What led to the wish says more than the wish."""
    return error.__cause__ or str(error)


_DEFAULT_GROUP: Final = "default"


class Source:
    """An open queue, as the threads of a worker and the tasks of its handlers see it."""

    def __init__(self, face: Any, bridge: Bridge) -> None:
        self.face = face
        self._bridge = bridge
        self._for_tasks = inspect.iscoroutinefunction(face.receive_many)

    @property
    def closed(self) -> bool:
        return bool(self.face.closed)

    def take(self, count: int, *, timeout_s: float, lease: Seconds | None) -> list[Any]:
        """Messages, whose leases renew themselves for as long as they are in hand; for threads."""
        answer = self.face.receive_many(count, timeout=timeout_s, lease=lease, renew=True)
        taken: list[Any] = self._bridge.wait(answer)
        return taken

    def settle(self, message: Any, settlement: Settlement) -> None:
        """The last thing with a message; for threads."""
        self._bridge.wait(settlement.on(message))

    async def settle_async(self, message: Any, settlement: Settlement) -> None:
        """The same for tasks: the loop never waits for a disk."""
        if self._for_tasks:
            await settlement.on(message)
        else:
            await asyncio.to_thread(settlement.on, message)


class Origin:
    """Where a queue comes from."""

    given = False  # whether it was open when we got it: then it is not ours to close, or to open again

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, bridge: Bridge) -> Source:
        """The open queue; called again when it has closed."""
        raise NotImplementedError

    def close(self, bridge: Bridge) -> None:
        """Let go of what was opened."""


class Given(Origin):
    """A queue that was open when we got it."""

    given = True

    def __init__(self, face: Any) -> None:
        super().__init__(str(getattr(face, "name", face)))
        self._face = face

    def open(self, bridge: Bridge) -> Source:
        return Source(self._face, bridge)


class Opened(Origin):
    """A queue that we open: a folder, or the URL of a queue."""

    def __init__(self, name: str, open_it: Callable[[Any], Any], *, as_kept: bool) -> None:
        super().__init__(name)
        self._open = open_it
        self._as_kept = as_kept
        self._face: Any = None

    def open(self, bridge: Bridge) -> Source:
        self._face = bridge.wait(self._open(None))
        kept = type_of(port_of(self._face).kept_bodies)
        if kept is not None and self._as_kept:
            self.close(bridge)
            self._face = bridge.wait(self._open(kept))
        return Source(self._face, bridge)

    def close(self, bridge: Bridge) -> None:
        if self._face is not None:
            bridge.wait(self._face.close())


class Data:
    """A data folder or a server that several queues of a worker lie in: opened once for all of them."""

    def __init__(self, open_it: Callable[[], Any]) -> None:
        self._open = open_it
        self._lock = threading.Lock()
        self._broker: Any = None

    def broker(self, bridge: Bridge) -> Any:
        with self._lock:
            if self._broker is None or self._broker.closed:
                self._broker = bridge.wait(self._open())
            return self._broker

    def close(self, bridge: Bridge) -> None:
        with self._lock:
            if self._broker is not None:
                bridge.wait(self._broker.close())


class Named(Origin):
    """A queue by its name, in a data folder or at a server."""

    def __init__(self, name: str, data: Data, group: str, body_type: Any) -> None:
        super().__init__(name)
        self._data = data
        self._group = group
        self._body_type = body_type

    def open(self, bridge: Bridge) -> Source:
        broker = self._data.broker(bridge)
        face = bridge.wait(broker.group(self.name, self._group, body_type=self._body_type))
        kept = type_of(port_of(face).kept_bodies)
        if self._body_type is None and kept is not None:
            face = bridge.wait(broker.group(self.name, self._group, body_type=kept))
        return Source(face, bridge)

    def close(self, bridge: Bridge) -> None:
        self._data.close(bridge)


def origins_of(queue: object, *, at: object, group: str | None, body_type: Any, for_tasks: bool) -> list[Origin]:
    """The queues that a worker was given: open faces, folders, URLs, or names of queues `at` a place."""
    wanted = list(queue) if isinstance(queue, (list, tuple)) else [queue]
    if not wanted:
        raise InvalidRequest("the list of queues is empty: give at least one")
    opener = _Opener(body_type, for_tasks=for_tasks)
    if at is not None:
        place = _path(at, "at")
        data = Data(lambda: opener.broker(place))
        found: list[Origin] = [Named(_path(name, "queue"), data, group or _DEFAULT_GROUP, body_type) for name in wanted]
    elif group is not None:
        raise InvalidRequest(f"group={group!r} is for queues by name: say where they are with at=...")
    else:
        found = [_origin(each, opener) for each in wanted]
    names = [origin.name for origin in found if not origin.given]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"a queue is named twice: {', '.join(names)}")
    return found


def _origin(queue: object, opener: _Opener) -> Origin:
    if hasattr(queue, "receive_many"):
        return Given(queue)
    path = _path(queue, "queue")
    return Opened(path, lambda kept: opener.queue(path, kept), as_kept=not opener.typed)


def _path(value: object, name: str) -> str:
    if isinstance(value, (str, PathLike)):
        path = fspath(value)
        if isinstance(path, str) and path:
            return path
    raise InvalidRequest(f"{name}={value!r} cannot be used: give an open queue, a folder, a URL, or a list of them")


class _Opener:
    """Opens folders and URLs with the face that suits the handler."""

    def __init__(self, body_type: Any, *, for_tasks: bool) -> None:
        self.typed = body_type is not None
        self._options = {"body_type": body_type} if self.typed else {}
        self._package = "holdfast.aio" if for_tasks else "holdfast"

    def queue(self, place: str, kept: Any = None) -> Any:
        options = self._options if kept is None else {"body_type": kept}
        return import_module(self._package).open(place, **options)

    def broker(self, place: str) -> Any:
        return import_module(self._package).open_broker(place, create=False, **self._options)
