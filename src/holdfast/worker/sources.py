"""What a worker was asked for, checked, and the queues it takes from, for threads or for tasks."""

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

from holdfast.api.bodies import type_of
from holdfast.api.drafts import Seconds
from holdfast.api.ports import port_of
from holdfast.api.times import duration_ms
from holdfast.env import Ids, World
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


class WorkerQueue:
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


class QueueOrigin:
    """Where a queue comes from."""

    given = False  # whether it was open when we got it: then it is not ours to close, or to open again

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, bridge: Bridge) -> WorkerQueue:
        """The open queue; called again when it has closed."""
        raise NotImplementedError

    def close(self, bridge: Bridge) -> None:
        """Let go of what was opened."""


class Given(QueueOrigin):
    """A queue that was open when we got it."""

    given = True

    def __init__(self, face: Any) -> None:
        super().__init__(str(getattr(face, "name", face)))
        self._face = face

    def open(self, bridge: Bridge) -> WorkerQueue:
        return WorkerQueue(self._face, bridge)


class OpenedQueue(QueueOrigin):
    """A queue that we open: a folder, or the URL of a queue."""

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


class NamedQueue(QueueOrigin):
    """A queue by its name, in a data folder or at a server."""

    def __init__(self, name: str, data: Data, group: str, body_type: Any) -> None:
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
    """The queues that a worker was given: open faces, folders, URLs, or names of queues `at` a place."""
    wanted = list(queue) if isinstance(queue, (list, tuple)) else [queue]
    if not wanted:
        raise InvalidRequest("the list of queues is empty: give at least one")
    opener = _Opener(body_type, for_tasks=for_tasks)
    if at is not None:
        place = _path(at, "at")
        data = Data(lambda: opener.broker(place))
        found: list[QueueOrigin] = [
            NamedQueue(_path(name, "queue"), data, group or _DEFAULT_GROUP, body_type) for name in wanted
        ]
    elif group is not None:
        raise InvalidRequest(f"group={group!r} is for queues by name: say where they are with at=...")
    else:
        found = [_origin(each, opener) for each in wanted]
    names = [origin.name for origin in found if not origin.given]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"a queue is named twice: {', '.join(names)}")
    return found


def _origin(queue: object, opener: _Opener) -> QueueOrigin:
    if hasattr(queue, "receive_many"):
        return Given(queue)
    path = _path(queue, "queue")
    return OpenedQueue(path, lambda kept: opener.queue(path, kept), as_kept=not opener.typed)


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


# What a worker was asked for, checked.


# How long to wait before something that failed is tried again.


_FIRST_S: Final = 0.1
_MOST_S: Final = 30.0


class Backoff:
    """Twice as long each time, up to a limit; up to a half of it by chance, so that many do not come back at once."""

    def __init__(self, ids: Ids, most_s: float = _MOST_S) -> None:
        self._ids = ids
        self._most_s = most_s
        self._tries = 0

    def next_s(self) -> float:
        """How long to wait this time."""
        full_s = min(math.ldexp(_FIRST_S, min(self._tries, 20)), self._most_s)
        self._tries += 1
        return full_s * (1 - self._ids.random_u32() / 2**33)

    def reset(self) -> None:
        """It went well."""
        self._tries = 0


# How many handlers may run at once, shared by the queues of a worker.


class Slots:
    """Each lane has one slot of its own, so that a busy queue cannot keep the others waiting; the rest is shared."""

    def __init__(self, total: int, lanes: Iterable[Hashable]) -> None:
        self.total = total
        self._used = dict.fromkeys(lanes, 0)
        self._changed = threading.Condition()
        self._closed = False

    def take(self, lane: Hashable, most: int) -> int:
        """Hold up to so many slots; waits for the first one. None where nothing is taken any more."""
        with self._changed:
            while not self._closed:
                count = min(most, self._free(lane))
                if count:
                    self._used[lane] += count
                    return count
                self._changed.wait()
            return 0

    def give(self, lane: Hashable, count: int = 1) -> None:
        """They are free again."""
        with self._changed:
            self._used[lane] -= count
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody takes one from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _free(self, lane: Hashable) -> int:
        shared = self.total - sum(max(used, 1) for used in self._used.values())
        return shared if self._used[lane] else shared + 1


_MOST_AT_ONCE: Final = 10_000


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a worker."""

    handler: Callable[[Any], Any]
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
    """Whether the handler is to be awaited; InvalidRequest where it is no handler at all."""
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
    """How many handlers may run at once: at least one for each queue, which it waits with."""
    if type(value) is not int or not 1 <= value <= _MOST_AT_ONCE:
        raise InvalidRequest(f"concurrency={value!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
    if value < queues:
        raise InvalidRequest(f"concurrency={value} is too little for {queues} queues: each needs a handler of its own")
    return value


def checked_hook(hook: object, name: str) -> Any:
    if hook is not None and not callable(hook):
        raise InvalidRequest(f"{name}={hook!r} cannot be used: give a function")
    return hook


def seconds(value: Seconds, name: str, *, minimum_ms: int = 0) -> float:
    return duration_ms(value, name, minimum_ms=minimum_ms) / 1000


def optional_seconds(value: Seconds | None, name: str) -> float | None:
    return None if value is None else seconds(value, name, minimum_ms=1)
