"""What users hold: faces for tasks (`aio`) and threads (`sync`), and the arguments and values that both share."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

from holdfast.env import close_in_children, refuse_to_pickle

# For the rest of the package: the port is not part of the public API.
port_of: Callable[[Any], Any] = attrgetter("_port")


class Face:
    """What brokers, groups and queues have in common."""

    def __init__(self, port: Any) -> None:
        self._port = port
        close_in_children(self)

    def disown(self) -> None:
        """Switch to a port of its own in a child after a fork; the parent keeps using the old one."""
        self._port = self._port.after_fork()

    @property
    def folder(self) -> str:
        """The data folder, or the address of the server."""
        place: str = self._port.place
        return place

    @property
    def closed(self) -> bool:
        """Whether it is closed, so that every call raises Closed."""
        closed: bool = self._port.closed
        return closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)
