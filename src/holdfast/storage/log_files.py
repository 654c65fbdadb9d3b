"""The files that an open log has, and how it does without them while nobody uses it.

A log that rests has no descriptor: neither of its last segment nor of its state, nor the folder's lock. (Sealed
segments that are read are counted in `kept_open`.) In memory it is open, and its owner sees no difference: the next
write opens them again, and whoever reads opens what it reads. All it wrote is synced before, so that a crash finds it
as it would find a log that is open and idle.

Somebody else could own the folder meanwhile, which only a person can bring about: its owner has the lock of the whole
data folder. The state file tells, and then the log takes no more writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakSet

from holdfast.env import FolderLock, World
from holdfast.errors import HoldfastError
from holdfast.storage.opening import take_lock, translated
from holdfast.storage.state import Identity, LogState
from holdfast.storage.view import Follower, LogView
from holdfast.storage.writer import Writer

logger = logging.getLogger(__name__)

# The lock; the state and the active segment, each with its map, which has a descriptor of its own.
DESCRIPTORS: Final = 5


class LogFiles:
    """Opens and closes the files of one log. It stands for the folder's lock: `release` ends it."""

    def __init__(
        self, world: World, folder: str, lock: FolderLock, writer: Writer, view: LogView, sync: Callable[[], None]
    ) -> None:
        self._world = world
        self._folder = folder
        self._lock: FolderLock | None = lock
        self._writer = writer
        self._view = view
        self._sync = sync
        self._left: tuple[int, Identity | None] = (0, None)  # what the state said when the log went to rest
        self._mark = (0, 0)
        self._followers: WeakSet[Follower] = WeakSet()
        self._following = threading.Lock()  # around that set: whoever goes through it must not meet another who adds
        writer.wake = self.wake
        view.on_open = self._count
        self._count()

    def follower(self, view: LogView) -> Follower:
        """A reader that lets go of what it has mapped when the log goes to rest."""
        follower = Follower(view)
        with self._following:
            self._followers.add(follower)
        return follower

    def wake(self) -> None:
        """Open the files again. The caller holds the writer's lock."""
        writer = self._writer
        with translated(self._folder):
            lock = take_lock(self._world, self._folder)
            try:
                state = LogState.open(self._world.disk, self._folder, write=True)
                if state is None or (state.sequence, state.identity) != self._left:
                    if state is not None:
                        state.close()
                    raise writer.fail(
                        "somebody else has owned the log",
                        OSError("its state is not as it was left while its files were closed"),
                    )
                try:
                    writer.reopen(state)
                except BaseException:
                    state.close()
                    raise
            except BaseException:
                lock.release()
                raise
        self._lock = lock
        self._count()

    def used(self) -> bool:
        """Whether something was written or looked up since the last time that this was asked."""
        mark = (self._writer.end, self._view.opened)
        used, self._mark = mark != self._mark, mark
        return used

    def rest(self, *, wait: bool) -> bool:
        """Close all files until they are needed; False where something is not synced, or somebody is at work."""
        writer = self._writer
        if wait and writer.failure is None:
            with suppress(HoldfastError):  # whoever uses it is told
                if writer.end != writer.synced_end:
                    self._sync()
                writer.sync_names()  # a roll by age leaves them, and with them an open folder, to the next message
        if not writer.lock.acquire(blocking=False):
            return False
        try:
            if not writer.resting:
                if not writer.may_rest():
                    return False
                self._left = writer.state.sequence, writer.state.identity
                writer.rest()
                lock, self._lock = self._lock, None
                if lock is not None:
                    lock.release()
            # Before anybody can wake it, or its new files would be taken for those that are closed now.
            self._world.open_files.gave(self)
        finally:
            writer.lock.release()
        self._let_followers_go()
        return True

    def release(self) -> None:
        """The log is closed."""
        self._world.open_files.gave(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        self._let_followers_go()

    def _let_followers_go(self) -> None:
        for follower in self._all_followers():
            follower.let_go()

    def _all_followers(self) -> list[Follower]:
        with self._following:
            return list(self._followers)

    def _count(self) -> None:
        own = 1 if self._writer.resting else DESCRIPTORS  # 1: whoever is about to read maps something
        maps = {follower.mapped for follower in self._all_followers()} - {0}
        descriptors = own + len(maps)
        self._mark = (self._writer.end, self._view.opened)
        self._world.open_files.took(self, descriptors)
