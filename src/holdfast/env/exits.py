"""What must be ended in order before the interpreter goes: it ends its threads without asking them."""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakSet


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
