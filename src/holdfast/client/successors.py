"""Who comes after the owner of a folder: the first of those that used it by its socket, and found nobody there."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from holdfast.client.sharing import share
from holdfast.env import close_in_children, real_world
from holdfast.errors import Busy, HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.settings import BrokerSettings

logger = logging.getLogger(__name__)


class Successor:
    """This process, as one that may have to own a folder. All clients of the folder in it share one."""

    def __init__(self, folder: str, settings: BrokerSettings | None) -> None:
        self.folder = folder
        self.users = 0
        self._settings = settings
        self._lock = threading.Lock()
        self._engine: BrokerEngine | None = None
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the parent owns the folder, if one of the two does."""
        self._lock = threading.Lock()
        self._engine = None

    def take_over(self) -> None:
        """Own the folder and let others in, if nobody else does. They, and we, come by the socket as before."""
        if not self._lock.acquire(blocking=False):
            return  # somebody is about to
        try:
            if self.users and (self._engine is None or self._engine.closed):
                self._engine = self._own()
        finally:
            self._lock.release()

    def _own(self) -> BrokerEngine | None:
        from holdfast.broker.engine import BrokerEngine

        try:
            # There may be nothing in it yet; but a folder that somebody removed is not made anew.
            there = real_world().disk.is_folder(self.folder)
            engine = BrokerEngine.open(self.folder, create=there, settings=self._settings)
        except Busy:
            return None  # another was faster
        except (HoldfastError, OSError) as error:
            logger.warning("folder without an owner", extra={"folder": self.folder, "why": str(error)})
            return None
        logger.info("took over as owner", extra={"folder": self.folder})
        engine.keep()
        share(engine)
        return engine

    def let_go(self) -> None:
        """The last one here is through with the folder: another process may own it."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


_successors: Final[dict[str, Successor]] = {}
_lock = threading.Lock()


def successor_of(folder: str, settings: BrokerSettings | None = None) -> Successor:
    """This process's own for the folder; one more uses it from now on."""
    with _lock:
        found = _successors.get(folder)
        if found is None:
            found = _successors[folder] = Successor(folder, settings)
        found.users += 1
        return found


def leave(successor: Successor) -> None:
    """One less uses it; the last one lets go of the folder."""
    with _lock:
        successor.users -= 1
        last = successor.users == 0
        if last:
            _successors.pop(successor.folder, None)
    if last:
        successor.let_go()
