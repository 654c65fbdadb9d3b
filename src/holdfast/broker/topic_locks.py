"""Topics in use: a lock for each, so that opening one holds up no other, and a hold while one is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.broker.folder.layout import DEAD_SUFFIX, check_readable_name
from holdfast.broker.partition import Partition
from holdfast.broker.topic import Topic

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


# Topics that are used for a moment, and stay open meanwhile.


class Using:
    """Somebody who uses a topic: around every call, and so no generator."""

    __slots__ = ("__weakref__", "_hold", "_name", "_topic")

    def __init__(self, hold: Callable[[str, object], Topic], name: str) -> None:
        self._hold = hold
        self._name = name

    def __enter__(self) -> Topic:
        self._topic = topic = self._hold(self._name, self)
        return topic

    def __exit__(self, *exc: object) -> None:
        self._topic.holders.discard(self)


class ReadableTopic:
    """The partitions of a topic, or of its dead letters, which are read like those of any other."""

    def __init__(self, topic: Topic, *, dead: bool) -> None:
        self.topic = topic
        self.dead = dead

    def partition(self, number: object) -> Partition:
        """One of them, by its number; of dead letters it is made when first needed, as when the first one dies."""
        if self.dead:
            return self.topic.dead_partition(self.topic.number(number)).target
        return self.topic.partition(number)

    def partitions(self) -> list[Partition]:
        """All of them."""
        return [self.partition(number) for number in range(len(self.topic.partitions))]


@contextmanager
def reading(using: Callable[[str], Using], name: str) -> Iterator[ReadableTopic]:
    """A topic to read, or (`jobs.dlq`) the dead letters of one, which stays open meanwhile."""
    dead = check_readable_name(name).endswith(DEAD_SUFFIX)
    with using(name.removesuffix(DEAD_SUFFIX)) as topic:
        yield ReadableTopic(topic, dead=dead)
