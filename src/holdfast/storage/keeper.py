"""A thread that gives a log its ticks: interval syncs, rolls by age, retention. It sleeps when nothing is due."""

from __future__ import annotations

import logging
import threading
import weakref
from os import PathLike

from holdfast.errors import Closed, HoldfastError
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

_AFTER_ERROR_MS = 1_000
_OVER = -1.0


class Keeper:
    """Ticks one log until it is stopped or the log ends."""

    def __init__(self, log: Log) -> None:
        self._wake = threading.Event()
        # Weakly: a log that nobody holds any more must end, though a thread looks after it.
        self._log = weakref.ref(log, lambda _: self._wake.set())
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
        log.on_attention = self._wake.set
        log.before_close = self.stop

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; returns when it has."""
        self._stopping = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            due_ms = self._tick()
            if due_ms == _OVER:
                return
            self._wake.wait(None if due_ms is None else due_ms / 1000)

    def _tick(self) -> float | None:
        log = self._log()
        if log is None or self._stopping:
            return _OVER
        try:
            return log.tick()
        except Closed:
            return _OVER
        except HoldfastError as error:
            logger.warning("a tick failed", extra={"folder": log.folder, "error": str(error)})
            return _AFTER_ERROR_MS


def open_log(folder: str | PathLike[str], settings: LogSettings | None = None, *, create: bool = True) -> Log:
    """Own the log in the folder, with a keeper: the way to open one in a program."""
    log = Log.open(folder, settings, create=create)
    Keeper(log).start()
    return log
