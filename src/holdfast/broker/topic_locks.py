"""A lock for each topic, by its name: opening, growing or deleting one topic holds up no other.

The order of locks, from the outside in: that of a stream group, that of one topic's name, the engine's, which guards
its map and is held for moments only, those inside the topic. Whoever has the lock of one name never waits for that of
another: what is to be done to another topic on the way is done if its lock is free, and otherwise left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# What is opened in the same way, and is no topic: no topic can have such a name.
PRODUCERS: Final = ".producers"
LOCKS: Final = ".locks"


class _NameLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0


class TopicLocks:
    """The locks of the names in use; one that nobody has or waits for takes no room."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._locks: dict[str, _NameLock] = {}
        self._threads: dict[int, int] = {}  # who has or waits for one of them, and how many times

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Have the name for oneself; the same thread may have it several times."""
        entry = self._enter(name)
        try:
            with entry.lock:
                yield
        finally:
            self._leave(name, entry)

    @contextmanager
    def if_free(self, name: str) -> Iterator[bool]:
        """The same without a wait: False where somebody else has it."""
        entry = self._enter(name)
        try:
            ours = entry.lock.acquire(blocking=False)
            try:
                yield ours
            finally:
                if ours:
                    entry.lock.release()
        finally:
            self._leave(name, entry)

    def wait_until_free(self) -> None:
        """Return when no other thread has one of them, or waits for one."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._threads.keys() - {own})

    def _enter(self, name: str) -> _NameLock:
        thread = threading.get_ident()
        with self._changed:
            entry = self._locks.get(name)
            if entry is None:
                entry = self._locks[name] = _NameLock()
            entry.users += 1
            self._threads[thread] = self._threads.get(thread, 0) + 1
        return entry

    def _leave(self, name: str, entry: _NameLock) -> None:
        thread = threading.get_ident()
        with self._changed:
            entry.users -= 1
            if not entry.users:
                del self._locks[name]
            self._threads[thread] -= 1
            if not self._threads[thread]:
                del self._threads[thread]
                self._changed.notify_all()
