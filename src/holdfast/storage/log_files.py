"""The files that an open log holds, and how it does without them while it is idle.

A resting log holds no descriptors: not for its last segment, its state or the folder's lock. (Sealed segments that are
being read are counted by `kept_open`.) In memory it stays open and its owner sees no difference: the next write opens
the files again, and readers open what they read. Everything is synced before it rests, so a crash finds it as it would
find a log that is open and idle.

While the lock is released, another process could take the folder, but only if a person brings it about: the owner still
holds the lock of the whole data folder. The state file shows it, and then the log accepts no more writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakSet

from holdfast.env import FolderLock, World
from holdfast.env.process import get_logger
from holdfast.errors import HoldfastError
from holdfast.storage.files import lock_note, take_lock, translated
from holdfast.storage.state import Identity, LogState
from holdfast.storage.view import Follower, LogView
from holdfast.storage.writer import Writer

logger = get_logger(__name__)

# The lock, and the state file and active segment, each with a map that has a descriptor of its own.
DESCRIPTORS: Final = 5


class LogFiles:
    """Opens and closes the files of one log. Takes the place of the folder's lock: `release` gives it up."""

    def __init__(
        self, world: World, folder: str, lock: FolderLock, writer: Writer, view: LogView, sync: Callable[[], None]
    ) -> None:
        self._world = world
        self._folder = folder
        self._lock: FolderLock | None = lock
        self._writer = writer
        self._view = view
        self._sync = sync
        self._left: tuple[int, Identity | None] = (0, None)  # what the state file said when the log went to rest
        self._note = b""  # of the lock: writing a new one each time would take as long as opening the files
        self._mark = (0, 0)
        self._followers: WeakSet[Follower] = WeakSet()
        self._following = threading.Lock()  # guards the set: it must not change while another thread iterates
        writer.wake = self.wake
        view.on_open = self._count
        self._count()

    def follower(self, view: LogView) -> Follower:
        """Return a reader that unmaps its files when the log goes to rest."""
        follower = Follower(view)
        with self._following:
            self._followers.add(follower)
        return follower

    def wake(self) -> None:
        """Open the files again. The caller holds the writer's lock."""
        writer = self._writer
        with translated(self._folder):
            self._note = self._note or lock_note(self._world)
            lock = take_lock(self._world, self._folder, note=self._note)
            try:
                state = LogState.open(self._world.disk, self._folder, write=True, mapped=writer.state.mapped)
                # Every owner raises the sequence, so an unchanged one means that nobody else has written here.
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
        """Whether anything was written or looked up since the last call."""
        mark = (self._writer.end, self._view.opened)
        used, self._mark = mark != self._mark, mark
        return used

    def rest(self, *, wait: bool) -> bool:
        """Close all files until they are needed; returns False if something is not synced or the log is in use."""
        writer = self._writer
        if wait and writer.failure is None:
            with suppress(HoldfastError):  # the log's next user gets the error
                if writer.end != writer.synced_end:
                    self._sync()
                writer.sync_names()  # a roll by age leaves the folder open and unsynced until the next message
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
            # Under the lock: once others can wake the log, its new files would be taken for the ones just closed.
            self._world.open_files.gave(self)
        finally:
            writer.lock.release()
        self.forget()
        return True

    def release(self) -> None:
        """Give up the folder's lock: the log is closed."""
        self._world.open_files.gave(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        self.forget()

    def forget(self) -> None:
        """Have followers look again at what they have mapped or read ahead."""
        for follower in self._all_followers():
            follower.unmap()

    def _all_followers(self) -> list[Follower]:
        with self._following:
            return list(self._followers)

    def _count(self) -> None:
        own = 1 if self._writer.resting else DESCRIPTORS  # 1: this is called just before a reader maps a file
        maps = {follower.mapped for follower in self._all_followers()} - {0}
        descriptors = own + len(maps)
        self._mark = (self._writer.end, self._view.opened)
        self._world.open_files.took(self, descriptors)
