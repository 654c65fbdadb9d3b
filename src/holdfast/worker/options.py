"""What a worker was asked for, checked."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.api.drafts import Seconds
from holdfast.api.times import duration_ms
from holdfast.env import Ids, World
from holdfast.errors import InvalidRequest
from holdfast.worker.sources import Origin

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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a worker."""

    handler: Callable[[Any], Any]
    is_async: bool
    origins: list[Origin]
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
