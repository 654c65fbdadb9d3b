"""What a worker was asked for, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.embedded.drafts import Seconds
from holdfast.embedded.times import duration_ms
from holdfast.env import World
from holdfast.errors import InvalidRequest
from holdfast.worker.sources import Origin

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
