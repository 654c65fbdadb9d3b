"""What a face stands on: its port, which acts on an engine in this process or on a server."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

from holdfast.env import close_in_children, refuse_to_pickle

# For the rest of the package: it is none of the users' business.
port_of: Callable[[Any], Any] = attrgetter("_port")


class Face:
    """What brokers, groups and queues have in common."""

    def __init__(self, port: Any) -> None:
        self._port = port
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the parent goes on with its port."""
        self._port = self._port.after_fork()

    @property
    def folder(self) -> str:
        """Where it is: the data folder, or the address of the server."""
        place: str = self._port.place
        return place

    @property
    def closed(self) -> bool:
        closed: bool = self._port.closed
        return closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)
