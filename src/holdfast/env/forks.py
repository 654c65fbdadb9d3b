"""A fork copies every object, but a file has one writer: in the child, what the parent owns is closed.

Without this a child would write into the parent's files from a state of its own, and messages that both
acknowledged would lie on top of each other.
"""

from __future__ import annotations

import os
from typing import NoReturn, Protocol
from weakref import WeakSet


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
