"""A queue or a broker that was opened before a fork, in the child: from its first use on, a client of the owner.

A forked child has the parent's objects and not its files, its lock or its threads. What it can have is what any
second process has: a connection by the owner's socket. So a face gets another port, with the program's own body type
and promises. That is left to the first use: most children never use it, and a client takes a while to load. What the
parent has in hand stays the parent's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from holdfast.env.sockets import absolute
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.broker import LocalBroker
from holdfast.local.group import LocalGroup

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.client.client import Client

_becoming = threading.RLock()  # a finalizer may be the next to use another one, in the same thread


class ForkedPort:
    """The port of a group or a broker that the parent has: a client of it, made when it is first used."""

    def __init__(self, parents: LocalGroup | LocalBroker) -> None:
        """In a child after a fork. Takes no lock, and loads nothing."""
        self._parents = parents  # kept: what ends with it is the parent's to end
        self._path = absolute(parents.place)  # the child may go to another folder before it uses it
        self._made: Any = None

    def after_fork(self) -> Any:
        """In a child of the child: the thread that was at it, if any, is not here."""
        global _becoming  # noqa: PLW0603  a lock cannot be taken from a thread that is gone
        _becoming = threading.RLock()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made or self._remote(), name)

    def _remote(self) -> Any:
        """The first use, of which there may be several at once: a server of many threads forks before it has them."""
        with _becoming:
            if self._made is None:
                self._made = _port_of(self._parents, self._path)
            return self._made


def _port_of(parents: LocalGroup | LocalBroker, path: str) -> Any:
    for_tasks = isinstance(parents, (AsyncLocalGroupPort, AsyncLocalBrokerPort))
    client = _client_of(parents.engine, path, for_tasks=for_tasks)
    if isinstance(parents, LocalGroup):
        return _group_port(parents, client, for_tasks=for_tasks)
    from holdfast.remote.aio.broker import AsyncRemoteBrokerPort
    from holdfast.remote.sync.broker import RemoteBrokerPort

    kind = AsyncRemoteBrokerPort if for_tasks else RemoteBrokerPort
    return kind(client, parents.body_type, parents.settings.topic.durability)


def _group_port(parents: LocalGroup, client: Client, *, for_tasks: bool) -> Any:
    from holdfast.remote.aio.group import AsyncRemoteGroupPort
    from holdfast.remote.sync.group import RemoteGroupPort

    kind, settings = AsyncRemoteGroupPort if for_tasks else RemoteGroupPort, parents.settings
    return kind(
        client,
        parents.topic,
        parents.group,
        parents.bodies,
        settings,
        durability=settings.durability,
        ack_durability=settings.ack_durability,
        alone=parents.alone,
        closed=parents.view_closed,
    )


def _client_of(engine: BrokerEngine, path: str, *, for_tasks: bool) -> Client:
    """The one that all faces of the folder share here, as they shared the engine."""
    from holdfast.client.shared import client_of_owner

    client: Client | None = engine.client_in_child
    if client is None:
        client = client_of_owner(path, engine.settings, for_tasks=for_tasks)
        if engine.closed_before_fork:
            client.close()
        engine.client_in_child = client
    return client
