"""The arguments of a worker, checked, and the queues it receives from."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from importlib import import_module
from os import PathLike, fspath
from typing import Any, Final, Literal

import msgspec

from holdfast.api import port_of
from holdfast.api.drafts import Seconds, duration_ms, type_of
from holdfast.env import Ids, World
from holdfast.errors import InvalidRequest

_PATIENCE_S: Final = 1.0


class Bridge:
    """Lets the worker's threads await coroutines in an event loop: its own, or the one `run_async` runs in."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._own = loop is None
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; the worker's own is started on first use."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-worker-loop", daemon=True)
                self._thread.start()
            return self._loop

    def wait(self, answer: Any) -> Any:
        """Return a call's result, awaiting it if it is awaitable. Must not be called in the loop's own thread."""
        if not inspect.isawaitable(answer):
            return answer
        return asyncio.run_coroutine_threadsafe(_awaited(answer), self.loop).result()

    def end(self) -> None:
        """Stop the loop if it is our own. If a handler blocks it, leave it behind: its thread is a daemon."""
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
    # The loop's executor is not shut down: a thread that hangs there would keep the process alive.


class Reject(Exception):
    """Raise this in a handler to send the message straight to the dead letters: it can never be handled."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)


class Retry(Exception):
    """Raise this in a handler to retry after `delay`, or after the queue's backoff. It counts as an attempt."""

    def __init__(self, reason: object = "", *, delay: Seconds | None = None) -> None:
        super().__init__(reason)
        if delay is not None:
            duration_ms(delay, "delay")  # raises here, where the mistake is, and not when the message is nacked
        self.delay = delay


class Settlement(msgspec.Struct, frozen=True):
    """How to settle a message."""

    verb: Literal["ack", "nack", "defer", "reject"]
    error: Any = None
    delay: Seconds | None = None

    def on(self, message: Any) -> Any:
        """Settle the message; for an async message, returns an awaitable."""
        if self.verb == "nack":
            return message.nack(delay=self.delay, error=self.error)
        if self.verb == "reject":
            return message.reject(self.error)
        return message.ack() if self.verb == "ack" else message.defer()


ACK: Final = Settlement("ack")
DEFER: Final = Settlement("defer")


def settlement_after(error: BaseException | None) -> Settlement:
    """Return how to settle a message whose handler ended with this error, or None."""
    if error is None:
        return ACK
    if isinstance(error, Reject):
        return Settlement("reject", _reason(error))
    if isinstance(error, Retry):
        return Settlement("nack", _reason(error), error.delay)
    return Settlement("nack", error)


def _reason(error: BaseException) -> object:
    """The exception that led to Reject or Retry says more than their own text."""
    return error.__cause__ or str(error)


_DEFAULT_GROUP: Final = "default"


class WorkerQueue:
    """An open queue, usable from a worker's threads and from async handlers."""

    def __init__(self, face: Any, bridge: Bridge) -> None:
        self.face = face
        self._bridge = bridge
        self._for_tasks = inspect.iscoroutinefunction(face.receive_many)

    @property
    def closed(self) -> bool:
        return bool(self.face.closed)

    def take(self, count: int, *, timeout_s: float, lease: Seconds | None, holder: str | None) -> list[Any]:
        """Receive up to `count` messages; their leases are renewed until they are settled. For threads."""
        answer = self.face.receive_many(count, timeout=timeout_s, lease=lease, holder=holder, renew=True)
        taken: list[Any] = self._bridge.wait(answer)
        return taken

    def settle(self, message: Any, settlement: Settlement) -> None:
        """Settle a message. For threads."""
        self._bridge.wait(settlement.on(message))

    async def settle_async(self, message: Any, settlement: Settlement) -> None:
        """Async version of `settle`; never blocks the loop on disk."""
        if self._for_tasks:
            await settlement.on(message)
        else:
            await asyncio.to_thread(settlement.on, message)


class QueueOrigin:
    """Where a queue comes from: it opens the queue, and closes what it opened."""

    borrowed = False  # whether the queue was already open: then we neither close nor reopen it

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, bridge: Bridge) -> WorkerQueue:
        """Open the queue, or open it again after it was closed."""
        raise NotImplementedError

    def close(self, bridge: Bridge) -> None:
        """Close what `open` opened."""


class BorrowedQueue(QueueOrigin):
    """A queue that the caller had already opened."""

    borrowed = True

    def __init__(self, face: Any) -> None:
        super().__init__(str(getattr(face, "name", face)))
        self._face = face

    def open(self, bridge: Bridge) -> WorkerQueue:
        return WorkerQueue(self._face, bridge)


class OpenedQueue(QueueOrigin):
    """A queue that the worker opens, from a folder or a queue's URL."""

    def __init__(self, name: str, open_it: Callable[[Any], Any], *, as_kept: bool) -> None:
        super().__init__(name)
        self._open = open_it
        self._as_kept = as_kept
        self._face: Any = None

    def open(self, bridge: Bridge) -> WorkerQueue:
        self._face = bridge.wait(self._open(None))
        kept = type_of(port_of(self._face).kept_bodies)
        if kept is not None and self._as_kept:
            self.close(bridge)
            self._face = bridge.wait(self._open(kept))
        return WorkerQueue(self._face, bridge)

    def close(self, bridge: Bridge) -> None:
        if self._face is not None:
            bridge.wait(self._face.close())


class SharedBroker:
    """A data folder or a server shared by several queues of a worker; opened once."""

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


class NamedQueue(QueueOrigin):
    """A queue given by name, in a data folder or on a server."""

    def __init__(self, name: str, data: SharedBroker, group: str, body_type: Any) -> None:
        super().__init__(name)
        self._data = data
        self._group = group
        self._body_type = body_type

    def open(self, bridge: Bridge) -> WorkerQueue:
        broker = self._data.broker(bridge)
        face = bridge.wait(broker.group(self.name, self._group, body_type=self._body_type))
        kept = type_of(port_of(face).kept_bodies)
        if self._body_type is None and kept is not None:
            face = bridge.wait(broker.group(self.name, self._group, body_type=kept))
        return WorkerQueue(face, bridge)

    def close(self, bridge: Bridge) -> None:
        self._data.close(bridge)


def origins_of(queue: object, *, at: object, group: str | None, body_type: Any, for_tasks: bool) -> list[QueueOrigin]:
    """Resolve the `queue` argument: open queues, folders, URLs, or names of queues at the place `at`."""
    wanted = list(queue) if isinstance(queue, (list, tuple)) else [queue]
    if not wanted:
        raise InvalidRequest("the list of queues is empty: name at least one")
    opener = _Opener(body_type, for_tasks=for_tasks)
    if at is not None:
        place = _path(at, "at")
        data = SharedBroker(lambda: opener.broker(place))
        found: list[QueueOrigin] = [
            NamedQueue(_path(name, "queue"), data, group or _DEFAULT_GROUP, body_type) for name in wanted
        ]
    elif group is not None:
        raise InvalidRequest(f"group={group!r} is for queues by name: give their place with at=...")
    else:
        found = [_origin(each, opener) for each in wanted]
    names = [origin.name for origin in found if not origin.borrowed]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"a queue is named twice: {', '.join(names)}. Name each queue once")
    return found


def _origin(queue: object, opener: _Opener) -> QueueOrigin:
    if hasattr(queue, "receive_many"):
        return BorrowedQueue(queue)
    path = _path(queue, "queue")
    return OpenedQueue(path, lambda kept: opener.queue(path, kept), as_kept=not opener.typed)


def _path(value: object, name: str) -> str:
    if isinstance(value, (str, PathLike)):
        path = fspath(value)
        if isinstance(path, str) and path:
            return path
    raise InvalidRequest(f"{name}={value!r} cannot be used: give an open queue, a folder, a URL, or a list of them")


class _Opener:
    """Opens folders and URLs with the sync or the async API, whichever the handler needs."""

    def __init__(self, body_type: Any, *, for_tasks: bool) -> None:
        self.typed = body_type is not None
        self._options = {"body_type": body_type} if self.typed else {}
        self._package = "holdfast.aio" if for_tasks else "holdfast"

    def queue(self, place: str, kept: Any = None) -> Any:
        options = self._options if kept is None else {"body_type": kept}
        return import_module(self._package).open(place, **options)

    def broker(self, place: str) -> Any:
        return import_module(self._package).open_broker(place, create=False, **self._options)


_FIRST_S: Final = 0.1
_MAX_S: Final = 30.0


class Backoff:
    """Exponential backoff with a limit. Up to half of each pause is random, so that many workers spread out."""

    def __init__(self, ids: Ids, max_s: float = _MAX_S) -> None:
        self._ids = ids
        self._most_s = max_s
        self._tries = 0

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        full_s = min(math.ldexp(_FIRST_S, min(self._tries, 20)), self._most_s)
        self._tries += 1
        return full_s * (1 - self._ids.random_u32() / 2**33)

    def reset(self) -> None:
        """Start over after a success."""
        self._tries = 0


class Slots:
    """Limits how many handlers run at once. Each lane has a slot of its own, so a busy queue cannot starve others."""

    def __init__(self, total: int, lanes: Iterable[Hashable]) -> None:
        self.total = total
        self._used = dict.fromkeys(lanes, 0)
        self._changed = threading.Condition()
        self._closed = False
        self.held = False  # whether lanes get no slots for now

    def take(self, lane: Hashable, most: int) -> int:
        """Wait for a free slot, then take up to `most`; returns how many, 0 after `close`."""
        with self._changed:
            while not self._closed:
                count = 0 if self.held else min(most, self._free(lane))
                if count:
                    self._used[lane] += count
                    return count
                self._changed.wait()
            return 0

    def give(self, lane: Hashable, count: int = 1) -> None:
        """Return slots that are no longer used."""
        with self._changed:
            self._used[lane] -= count
            self._changed.notify_all()

    def hold(self, *, held: bool) -> None:
        """Give no slots for now, or give them again."""
        with self._changed:
            self.held = held
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting lanes; `take` returns 0 from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _free(self, lane: Hashable) -> int:
        # One slot stays reserved for each lane that uses none at the moment.
        shared = self.total - sum(max(used, 1) for used in self._used.values())
        return shared if self._used[lane] else shared + 1


_MAX_CONCURRENCY: Final = 10_000


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked arguments of a worker."""

    handler: Callable[[Any], Any]
    name: str | None
    is_async: bool
    origins: list[QueueOrigin]
    concurrency: int
    lease: Seconds | None
    time_limit_ms: int | None
    drain_s: float
    poll_s: float
    silence_s: float
    exit_after_silence_s: float | None
    on_start: Callable[[], Any] | None
    on_stop: Callable[[], Any] | None
    on_error: Callable[[BaseException, Any], Any] | None
    world: World


def is_async(handler: object) -> bool:
    """Whether the handler is async; raises InvalidRequest if it cannot be a handler."""
    if not callable(handler):
        raise InvalidRequest(f"handler={handler!r} cannot be used: give a function that takes a message")
    inner: Any = handler
    while isinstance(inner, partial):
        inner = inner.func
    if inspect.isclass(inner):
        raise InvalidRequest(f"the handler is the class {inner.__name__}: give a function, or an object of the class")
    call = inner if inspect.isroutine(inner) else type(inner).__call__
    return inspect.iscoroutinefunction(call)


def checked_concurrency(value: object, queues: int) -> int:
    """Return the number of handlers that may run at once; at least one per queue."""
    if type(value) is not int or not 1 <= value <= _MAX_CONCURRENCY:
        raise InvalidRequest(f"concurrency={value!r} cannot be used: give a whole number from 1 to {_MAX_CONCURRENCY}")
    if value < queues:
        raise InvalidRequest(
            f"concurrency={value} is too low for {queues} queues, which need a handler each: give at least {queues}"
        )
    return value


def checked_name(name: object) -> str | None:
    """Return the name of a worker: a short text that can be shown."""
    if name is None or (isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()):
        return name
    raise InvalidRequest(f"name={name!r} cannot be used: give a text of up to 200 characters")


def checked_hook(hook: object, name: str) -> Any:
    if hook is not None and not callable(hook):
        raise InvalidRequest(f"{name}={hook!r} cannot be used: give a function")
    return hook


def seconds(value: Seconds, name: str, *, minimum_ms: int = 0) -> float:
    return duration_ms(value, name, minimum_ms=minimum_ms) / 1000


def optional_seconds(value: Seconds | None, name: str) -> float | None:
    return None if value is None else seconds(value, name, minimum_ms=1)
