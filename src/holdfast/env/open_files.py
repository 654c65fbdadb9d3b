"""How many files may be open at a time, and who is to close some so that others can open theirs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

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
