"""This process: its environment, descriptors and signals, what happens when it forks or exits, what it loads late.

`asyncio`, `ctypes`, `futures`, `logging` and `signal` are here as modules that are loaded on first use; see
`holdfast.later`. `get_logger` is `logging.getLogger`, except in a process that runs one command: there, logging is
loaded for the first thing that is logged. Other processes load it at once: a warning must not need a file when none
can be opened.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol
from weakref import WeakSet, ref

from holdfast.later import Later, module, runs_one_command

if TYPE_CHECKING:
    import asyncio as asyncio  # noqa: PLC0414  for others to import, here and below
    import ctypes as ctypes  # noqa: PLC0414
    import logging as logging  # noqa: PLC0414
    import signal as signal  # noqa: PLC0414
    from concurrent import futures as futures  # noqa: PLC0414
    from logging import Logger
else:
    asyncio = module("asyncio")
    ctypes = module("ctypes")
    futures = module("concurrent.futures")
    logging = module("logging")
    signal = module("signal")


def get_logger(name: str) -> Logger:
    """Return the logger of this name, or what stands for it in a process that runs one command."""
    stands: Any = Later(lambda: logging.getLogger(name)) if runs_one_command() else logging.getLogger(name)
    found: Logger = stands
    return found


def environment() -> Mapping[str, str]:
    """Return a copy of the environment variables."""
    return dict(os.environ)


def set_variable(name: str, value: str | None) -> None:
    """Set a variable for this process and those it starts, or remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@cache
def skip_modules_in_collections() -> None:
    """Take what is loaded now out of all later garbage collections, once for a process.

    Spark's workers collect all garbage after every task. With Arrow, numpy and Spark loaded that takes 40 ms.
    """
    gc.freeze()


# Stands for "no limit"; a number that nobody reaches.
_UNLIMITED: Final = 1 << 30


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs here; one of another user counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_space() -> str:
    """Return what the process ids of this container are counted in; empty if the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the limit as far as the system allows; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


# How long to pause between looks at a lock: at first just to give up the interpreter, then also the processor, which
# the lock's holder may need. After about a tenth of a second the thread gets in line: others may always be quicker.
_PAUSES_S: Final = (0.0, 0.0, *[20e-6 * 2**n for n in range(6)], *[1e-3] * 100)


def stand_back(lock: threading.Lock) -> None:
    """Wait until a lock is free, without getting in line for it.

    A lock that is released belongs to a waiting thread at once, but to use it that thread needs the interpreter, too.
    Meanwhile the one that runs needs the lock for its next message and must wait in turn: once there is such a line,
    every message costs two switches of threads, ten times as much as the message. So where a lock is taken for every
    message, call this first if it is locked.
    """
    for pause_s in _PAUSES_S:
        let_others_run(pause_s)
        if not lock.locked():
            return


def let_others_run(pause_s: float) -> None:
    """Give up the interpreter for a moment, to any thread that waits for it."""
    time.sleep(pause_s)


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one for listing them


# A fork copies every object, but a file must have only one writer, so what the parent owns is closed in the child.
# Otherwise a child would write to the parent's files from a state of its own, and messages that both acknowledged would
# overwrite each other.
class Owner(Protocol):
    """Something that owns files."""

    def disown(self) -> None:
        """Give up ownership in the child. Must take no locks: threads that do not exist here may hold them."""


_owners: WeakSet[Owner] = WeakSet()


def close_in_children(owner: Owner) -> None:
    """Have the object's `disown` called in every child forked from now on."""
    _owners.add(owner)


def refuse_to_pickle(opened: object) -> NoReturn:
    """Raise a TypeError that says what to do instead of passing an open object to a spawned process."""
    raise TypeError(
        f"{opened!r} cannot be pickled: it has files or connections, which belong to one process. Give the other "
        "process the path or the address, and open it there"
    )


def _disown_all() -> None:
    for owner in list(_owners):
        owner.disown()


# A module that one thread is importing while another forks stays locked in the child for ever: the thread that would
# unlock it is not there. So a thread of ours that loads modules by itself does it here, and a fork waits for it.
_imports = threading.RLock()  # an import may fork by itself


def no_fork() -> AbstractContextManager[object]:
    """Return a context in which this thread may import modules: no other thread forks meanwhile."""
    return _imports


def _renew_imports() -> None:
    global _imports  # noqa: PLW0603  the parent's lock is the parent's
    _imports = threading.RLock()


# Threads of other libraries import, too, and cannot be asked to wait. What the child will need of their modules is
# therefore loaded before the fork, which waits for whoever is loading the same.
_loads: set[Callable[[], None]] = set()


def load_before_fork(load: Callable[[], None]) -> None:
    """Have this called before every fork from now on. It imports modules, so only the first time takes long."""
    _loads.add(load)


def _wait_for_imports() -> None:
    _imports.acquire()
    for load in list(_loads):
        load()


def _allow_imports() -> None:
    _imports.release()


if hasattr(os, "register_at_fork"):
    if not runs_one_command():
        importlib.import_module("logging")
    os.register_at_fork(after_in_child=_disown_all)
    # Registered after those of logging, and so called before: they take a lock that an import needs.
    os.register_at_fork(before=_wait_for_imports, after_in_parent=_allow_imports, after_in_child=_renew_imports)


class Ending(Protocol):
    """Something with work in progress, to be ended before the interpreter kills its threads."""

    def end(self) -> None:
        """Finish now; called when the program exits by any way except a kill."""


_endings: WeakSet[Ending] = WeakSet()


def end_at_exit(ending: Ending) -> None:
    """Have `end` called at exit, if the object still exists then."""
    _endings.add(ending)


def _end_all() -> None:
    for ending in list(_endings):
        ending.end()


atexit.register(_end_all)


@contextmanager
def first_signal(tell: Callable[[int], object]) -> Iterator[None]:
    """Inside the block, the first SIGTERM or SIGINT calls `tell`; a second one ends the process as it would by default.

    `tell` may be called at any point of the main thread, so it must take no lock. Outside the main thread signals
    cannot be handled, and nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ending = (signal.SIGTERM, signal.SIGINT)

    def heard(number: int, _frame: Any) -> None:
        # Before `tell`, so that a second signal ends the process even if the shutdown hangs.
        for each in ending:
            signal.signal(each, signal.SIG_DFL)
        tell(number)

    before = {each: signal.signal(each, heard) for each in ending}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_AGAIN_MS: Final = 100
_LOOKS: Final = 4  # openers that one who must not wait looks at: those that wait for a sync would be looked at in vain
_LEAST_ABOVE: Final = 50


class Opener(Protocol):
    """Something that has files open and can do without them for a while."""

    def used(self) -> bool:
        """Whether it was used since the last call."""

    def rest(self, *, wait: bool) -> bool:
        """Close its files for now; returns False if they are in use. Without `wait`, it never blocks.

        It calls `gave` itself, before it could have opened them again.
        """


class OpenFiles:
    """Counts open descriptors. When there are too many, the least recently used openers close theirs.

    May be called from any thread and with any locks held, since it never waits, except for `make_room`. Openers used
    since the last look are spared once, and those at work keep their files, so the limit may be exceeded for a moment,
    but hardly by more than a third: from there on, whoever is about to open files makes room first.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most  # None: no limit, and nothing is counted
        self._full = 0 if most is None else most + max(most // 3, _LEAST_ABOVE)
        self.count = 0
        self.on_too_many: Callable[[], None] = lambda: None  # asks a thread that can wait to call `tick`
        self._reported = False
        self._lock = threading.Lock()
        self._openers: OrderedDict[int, tuple[ref[Opener], int]] = OrderedDict()

    @property
    def too_many(self) -> bool:
        return self.most is not None and self.count > self.most

    @property
    def is_full(self) -> bool:
        """Whether whoever opens more files should call `make_room` first."""
        return self.most is not None and self.count >= self._full

    def took(self, opener: Opener, descriptors: int) -> None:
        """Record how many descriptors the opener has now; closes others if that is too many."""
        if self.most is None:
            return
        with self._lock:
            self._drop(id(opener))
            self._openers[id(opener)] = (ref(opener), descriptors)
            self.count += descriptors
        if self.count > self.most:
            self.rest_idle(but=opener)
            if self.too_many and not self._reported:
                self._reported = True
                self.on_too_many()
        else:
            self._reported = False

    def gave(self, opener: Opener) -> None:
        """Record that the opener has no descriptors any more."""
        with self._lock:
            self._drop(id(opener))

    def tick(self) -> int | None:
        """Close files if there are too many, waiting where necessary; returns the ms until the next look, or None."""
        if not self.too_many:
            self._reported = False
            if not self.too_many:  # otherwise an opener came in between, and did not report because of the flag
                return None
        self.rest_idle(wait=True)
        return _AGAIN_MS

    def make_room(self) -> None:
        """Close files of others until it is no longer full, if need be after a sync. The caller holds no log's lock."""
        for _ in range(2 * len(self._openers)):
            opener = self._next() if self.is_full else None
            if opener is None:
                return
            if not opener.used():
                opener.rest(wait=True)

    def rest_idle(self, *, but: Opener | None = None, wait: bool = False) -> None:
        """Close files until there are few enough, or all that remain are in use; without `wait`, look at a few only."""
        every = 2 * len(self._openers)
        for _ in range(every if wait else min(every, _LOOKS)):
            opener = self._next()
            if opener is None:
                return
            if opener is not but and not opener.used():
                opener.rest(wait=wait)

    def _next(self) -> Opener | None:
        """Return the opener that was not looked at for longest; None if there are few enough."""
        with self._lock:
            while self.too_many and self._openers:
                key, (known, _) = next(iter(self._openers.items()))
                opener = known()
                if opener is not None:
                    self._openers.move_to_end(key)
                    return opener
                self._drop(key)  # it was garbage collected without being closed
        return None

    def _drop(self, key: int) -> None:
        known = self._openers.pop(key, None)
        if known is not None:
            self.count -= known[1]
