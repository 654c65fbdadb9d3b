"""This process: the variables it was started with, its descriptors, and how it forks, is told to end, and ends."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, Protocol
from weakref import WeakSet, ref


def environment() -> Mapping[str, str]:
    """As they are now; later changes do not show."""
    return dict(os.environ)


def set_variable(name: str, value: str) -> None:
    """For this process and those that it starts."""
    os.environ[name] = value


# File descriptors of this process: how many it may have, and how many it has.


# Where the system names no limit, one that nobody reaches.
_UNLIMITED: Final = 1 << 30


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """As many as the system lets this process ask for; answers how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def open_descriptors() -> int:
    """How many this process has open now."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one of this look


# A fork copies every object, but a file has one writer: in the child, what the parent owns is closed.
#
# Without this a child would write into the parent's files from a state of its own, and messages that both
# acknowledged would lie on top of each other.


class Owner(Protocol):
    """Something that owns files."""

    def disown(self) -> None:
        """The owner is another process now. Locks may be held by threads that do not exist here: take none."""


_owners: WeakSet[Owner] = WeakSet()


def close_in_children(owner: Owner) -> None:
    """Let every child that is forked from now on find the object closed."""
    _owners.add(owner)


def refuse_to_pickle(opened: object) -> NoReturn:
    """Say what to do instead, where a program hands something that it has opened to a process that is spawned."""
    raise TypeError(
        f"{opened!r} cannot be pickled: it has files or connections, which belong to one process. Give the other "
        "process the path or the address, and open it there"
    )


def _disown_all() -> None:
    for owner in list(_owners):
        owner.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


# What must be ended in order before the interpreter goes: it ends its threads without asking them.


class Ending(Protocol):
    """Something with work in hand."""

    def end(self) -> None:
        """Finish now; called when the program ends in order, by whatever way but a kill."""


_endings: WeakSet[Ending] = WeakSet()


def end_at_exit(ending: Ending) -> None:
    """See to it that `end` is called, unless nobody has the object any more by then."""
    _endings.add(ending)


def _end_all() -> None:
    for ending in list(_endings):
        ending.end()


atexit.register(_end_all)


# Being told to end.


ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def first_signal(tell: Callable[[int], object]) -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT is told of, and from then on one ends the process as if nobody listened.

    `tell` is called at any point of the main thread: it must take no lock. In another thread signals cannot be
    heard, and nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, _frame: Any) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        tell(number)

    before = {each: signal.signal(each, heard) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# How many files may be open at a time, and who is to close some so that others can open theirs.


_AGAIN_MS: Final = 100


class Opener(Protocol):
    """Somebody with files open who can do without them until it needs them again."""

    def used(self) -> bool:
        """Whether it was used since it was last asked."""

    def rest(self, *, wait: bool) -> bool:
        """Close its files for now; False where they are needed. Without `wait` it never waits for anybody.

        It says itself that it `gave` them, before it can have opened them again.
        """


class OpenFiles:
    """Counts descriptors. Where they are too many, those who were not used for longest close theirs.

    Safe to use from any thread, with whatever locks held: nobody is waited for. Who was used since the last look is
    passed over once. Whoever is just at work keeps its files, so that there may be more for a moment.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most  # None: there is no limit, and nobody is counted
        self.count = 0
        self.on_too_many: Callable[[], None] = lambda: None  # somebody should call `rest_idle` who can wait
        self._told = False
        self._lock = threading.Lock()
        self._openers: OrderedDict[int, tuple[ref[Opener], int]] = OrderedDict()

    @property
    def too_many(self) -> bool:
        return self.most is not None and self.count > self.most

    def took(self, opener: Opener, descriptors: int) -> None:
        """It has so many open now."""
        if self.most is None:
            return
        with self._lock:
            self._drop(id(opener))
            self._openers[id(opener)] = (ref(opener), descriptors)
            self.count += descriptors
        if self.count > self.most:
            self.rest_idle(but=opener)
            if self.too_many and not self._told:
                self._told = True
                self.on_too_many()
        else:
            self._told = False

    def gave(self, opener: Opener) -> None:
        """It has none open any more."""
        with self._lock:
            self._drop(id(opener))

    def tick(self) -> int | None:
        """Have files closed where there are too many, also of those for whom one must wait; in how many ms again."""
        if not self.too_many:
            self._told = False
            if not self.too_many:  # otherwise somebody came in between, who took us for told
                return None
        self.rest_idle(wait=True)
        return _AGAIN_MS

    def rest_idle(self, *, but: Opener | None = None, wait: bool = False) -> None:
        """Have files closed until there are few enough, or all that are left are in use."""
        for _ in range(2 * len(self._openers)):
            opener = self._next()
            if opener is None:
                return
            if opener is not but and not opener.used():
                opener.rest(wait=wait)

    def _next(self) -> Opener | None:
        """The one that was longest not looked at; None where there are few enough."""
        with self._lock:
            while self.too_many and self._openers:
                key, (known, _) = next(iter(self._openers.items()))
                opener = known()
                if opener is not None:
                    self._openers.move_to_end(key)
                    return opener
                self._drop(key)  # it was dropped without being closed
        return None

    def _drop(self, key: int) -> None:
        known = self._openers.pop(key, None)
        if known is not None:
            self.count -= known[1]
