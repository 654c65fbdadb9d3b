"""A folder that several processes use: the first owns it, the others come to it by its socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.engine import folder_path
from holdfast.broker.folder.layout import topic_for
from holdfast.client.sharing import share, socket_of
from holdfast.env import real_world
from holdfast.env.sockets import absolute, answers_at
from holdfast.errors import Busy
from holdfast.settings import BrokerSettings

if TYPE_CHECKING:
    from holdfast.client.client import Client

_PATIENCE_NS: Final = 500_000_000  # an owner that shares its folder can be reached by then; one that does not, never
_PAUSE_S: Final = 0.01


def open_shared(
    folder: Any, open_here: Callable[[], Any], settings: BrokerSettings | None, *, for_tasks: bool
) -> tuple[Any, Client | None]:
    """The folder, opened: a port of its owner, if that is us; or else a client of whoever owns it."""
    until_ns = 0
    while True:
        try:
            port = open_here()
        except Busy as busy:
            load_client()  # before the owner, which may be a thread of this process, begins to load its server
            clock = real_world().clock
            path = absolute(folder_path(folder))
            if answers_at(socket_of(path)):
                return None, client_of_owner(path, settings, for_tasks=for_tasks)
            until_ns = until_ns or clock.monotonic_ns() + _PATIENCE_NS
            if clock.monotonic_ns() > until_ns:
                busy.add_note("its owner does not share it: it was opened with share=False, or by a command")
                raise
            clock.wait(threading.Event(), _PAUSE_S)
        else:
            share(port.engine)
            return port, None


def load_client() -> None:
    """What a client is made of; an owner has no use for it."""
    import holdfast.client.successors
    import holdfast.remote.aio.broker
    import holdfast.remote.sync.broker  # noqa: F401


def client_of_owner(folder: str, settings: BrokerSettings | None, *, for_tasks: bool) -> Client:
    """A client of whoever owns the folder, which takes over where there is nobody any more."""
    from holdfast.client.address import Address
    from holdfast.client.client import Client
    from holdfast.client.successors import leave, successor_of

    if real_world().disk.exposure(folder) is not None:
        # Somebody trusts it by name, or we would not be here; and does so when we have to take over, too.
        settings = msgspec.structs.replace(settings or BrokerSettings(), trust_folder=True)
    address = Address(text=folder, socket=socket_of(folder))
    client = Client(real_world(), address, for_tasks=for_tasks)
    client.default_topic = topic_for(folder)
    successor = successor_of(folder, settings)
    client.inherit(successor.take_over, lambda: leave(successor))
    return client
