"""A queue or a broker that was opened before a fork, in the child: from its first use on, a client of the owner.

A forked child has the parent's objects and not its files, its lock or its threads. What it can have is what any
second process has: a connection by the owner's socket. A queue or a group gets another port, with the program's own
body type and promises. A broker becomes the remote face of the same broker, in place. Both are left to the first use:
most children never use it, and a client takes a while to load. What the parent has in hand stays the parent's.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from holdfast.env.sockets import absolute
from holdfast.errors import Closed
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.group import LocalGroup

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.client.client import Client

# What becomes of which broker.
_REMOTE: Final = {
    "Broker": ("broker", "RemoteBroker"),
    "AsyncBroker": ("aio_broker", "AsyncRemoteBroker"),
}
_becoming = threading.RLock()  # a finalizer may be the next to use another one, in the same thread
_SPECIAL: Final = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__repr__")


def stand_in(opened: Any) -> Any:
    """In a child after a fork: what a group's port, or a broker, is from its first use on. Takes no lock."""
    if isinstance(opened, LocalGroup):
        return ForkedGroupPort(opened)
    _stand_in_for_broker(opened)
    return None


class ForkedGroupPort:
    """The port of a group that the parent has: a client of it, made when it is first used."""

    def __init__(self, parents: LocalGroup) -> None:
        self._parents = parents  # kept: what ends with it is the parent's to end
        self._path = absolute(parents.place)  # the child may go to another folder before it uses it
        self._made: Any = None

    def after_fork(self) -> Any:
        """In a child of the child: the thread that was at it, if any, is not here."""
        _free()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made or self._remote(), name)

    def _remote(self) -> Any:
        """The first use, of which there may be several at once: a server of many threads forks before it has them."""
        with _becoming:
            if self._made is None:
                self._made = _port_of(self._parents, self._path)
            return self._made


def _port_of(parents: LocalGroup, path: str) -> Any:
    from holdfast.remote.aio.group import AsyncRemoteGroupPort
    from holdfast.remote.sync.group import RemoteGroupPort

    for_tasks = isinstance(parents, AsyncLocalGroupPort)
    kind = AsyncRemoteGroupPort if for_tasks else RemoteGroupPort
    client = _client_of(parents.engine, path, for_tasks=for_tasks)
    settings = parents.settings
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


def _stand_in_for_broker(face: Any) -> None:
    """Let the face be another from its first use on. Takes no lock, and loads nothing."""
    kind = type(face)
    if kind.__name__ in _REMOTE:  # others are the server's own
        before = dict(face.__dict__)
        path = absolute(before["_engine"].folder)  # the child may go to another folder before it uses it
        face.__dict__.clear()
        face.__dict__.update(_kind=kind, _before=before, _path=path)
        face.__class__ = _ForkedBroker


def _look_up(self: Any, name: str) -> Any:
    if name == "__class__":
        return object.__getattribute__(self, "__dict__").get("_kind", type(self))  # it is what it was, to whoever asks
    if name == "disown":  # in a child of the child: nothing has changed
        return _free
    _become_remote(self)
    return getattr(self, name)


class _ForkedBroker:
    """A broker that was not used yet in the child."""

    __getattribute__ = _look_up


def _special(name: str) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        _become_remote(self)
        return getattr(type(self), name)(self, *arguments)

    return method


for _name in _SPECIAL:  # looked up in the class, and not by way of `__getattribute__`
    setattr(_ForkedBroker, _name, _special(_name))


def _free() -> None:
    """In a child of the child: the thread that was at it, if any, is not here."""
    global _becoming  # noqa: PLW0603  a lock cannot be taken from a thread that is gone
    _becoming = threading.RLock()


def _become_remote(face: Any) -> None:
    """The first use, of which there may be several at once: a server of many threads forks before it has them."""
    with _becoming:
        state = object.__getattribute__(face, "__dict__")
        if "_kind" in state:  # or it is one by now: who enters a `with` has looked up both of its methods
            _exchange(face, state)


def _exchange(face: Any, state: dict[str, Any]) -> None:
    kind, before = state["_kind"].__name__, state["_before"]
    engine, remote = before["_engine"], _remote_kind(kind)
    client = _client_of(engine, state["_path"], for_tasks=kind.startswith("Async"))
    found: Any = remote(client, before["_bodies_type"], engine.settings.topic.durability)
    state.clear()
    state.update(found.__dict__, _parents=engine)  # kept: what ends with it is the parent's to end
    face.__class__ = remote


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


_kinds: Final[dict[str, Any]] = {}


def _remote_kind(name: str) -> Any:
    """The remote kind, which also has an answer for methods that were taken from it as it was."""
    if name not in _kinds:
        module, remote = _REMOTE[name]
        found = getattr(import_module(f"holdfast.client.{module}"), remote)
        answers = {"__module__": found.__module__, "__getattr__": _bound_before, "disown": _stay}
        _kinds[name] = type(remote, (found,), answers)
    return _kinds[name]


class BoundBeforeFork(Closed, AttributeError):
    """A method that was taken from its object before a fork: it knows the object only as it was."""


def _bound_before(_self: Any, name: str) -> Any:
    raise BoundBeforeFork(
        f"{name} is not here: a method of this object, such as `broker.publish`, was looked up before a fork, and is "
        "of no use in the child. Hand over the object, and look its methods up there"
    )


def _stay(_self: Any) -> None:
    """In a child of the child: its client sees to it."""
