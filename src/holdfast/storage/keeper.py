"""The keeper: a thread that ticks a log or a queue when something is due, and sleeps otherwise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from os import PathLike, fspath
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from holdfast.env import real_world
from holdfast.env.process import get_logger
from holdfast.errors import Closed
from holdfast.settings import LogSettings
from holdfast.storage.files import is_log, require_own, translated
from holdfast.storage.log import Log

logger = get_logger(__name__)

_AFTER_ERROR_MS = 1_000
_OVER = -1.0


class Kept(Protocol):
    """What a keeper ticks."""

    folder: str
    on_attention: Callable[[], None]
    before_close: Callable[[], None]

    def tick(self) -> int | None:
        """Do what is due; returns the milliseconds until more is due, or None."""


def soonest(*due_ms: int | None) -> int | None:
    """Return the smallest of several `tick` results."""
    return min((ms for ms in due_ms if ms is not None), default=None)


_Kept = TypeVar("_Kept", bound=Kept)


def _tick(kept: Kept) -> int | None:
    return kept.tick()


class Keeper(Generic[_Kept]):
    """Ticks one log or queue until it is stopped or the log or queue is gone."""

    def __init__(
        self, kept: _Kept, *, at_most_ms: int | None = None, tick: Callable[[_Kept], int | None] = _tick
    ) -> None:
        self._at_most_ms = at_most_ms
        self._tick_it = tick
        # Not an Event: a finalizer may call this at any point of any thread, even while that thread holds the
        # Event's lock.
        self._wake: SimpleQueue[None] = SimpleQueue()
        # A weak reference: what nobody else holds must be collected, although a thread ticks it.
        self._kept = weakref.ref(kept, lambda _: self._wake.put(None))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
        wake = self._wake.put
        kept.on_attention = lambda: wake(None)
        kept.before_close = self.stop

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopping = True
        self._wake.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            while not self._wake.empty():
                self._wake.get()
            due_ms = self._tick()
            if due_ms == _OVER:
                return
            if self._at_most_ms is not None:
                due_ms = self._at_most_ms if due_ms is None else min(due_ms, self._at_most_ms)
            with suppress(Empty):
                self._wake.get(timeout=None if due_ms is None else due_ms / 1000)

    def _tick(self) -> float | None:
        kept = self._kept()
        if kept is None or self._stopping:
            return _OVER
        try:
            return self._tick_it(kept)
        except Closed:
            return _OVER
        except Exception as error:  # keep ticking whatever it was: without its keeper a queue would silently stop
            logger.warning("a tick failed", extra={"folder": kept.folder, "error": str(error)}, exc_info=True)
            return _AFTER_ERROR_MS


def open_log(
    folder: str | PathLike[str],
    settings: LogSettings | None = None,
    *,
    create: bool = True,
    trust_folder: bool = False,
) -> Log:
    """Open the log in the folder and start a keeper for it: the usual way to open a log in a program.

    Raises InvalidRequest for a folder that other users may write to, unless you trust them: trust_folder=True.
    """
    folder, world = fspath(folder), real_world()
    with translated(folder):
        if create and not is_log(world, folder):
            world.disk.make_folder(folder)
        if world.disk.exists(folder):
            require_own(world, folder, trusted=trust_folder)
    log = Log.open(folder, settings, world, create=create)
    Keeper(log).start()
    return log
