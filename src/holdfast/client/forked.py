"""A queue or a broker that was opened before a fork, in the child: from its first use on, a client of the owner.

A forked child has the parent's objects and not its files, its lock or its threads. What it can have is what any
second process has: a connection by the owner's socket. So the object that the program holds becomes the remote face of
the same queue, in place, with the program's own body type and promises. That is left to its first use: most children
never use it, and a client takes a while to load. What the parent has in hand stays the parent's.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic

from holdfast.embedded.message import Body
from holdfast.env.sockets import absolute
from holdfast.errors import Closed

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.client.client import Client

# What becomes of which.
_REMOTE: Final = {
    "Queue": ("group", "RemoteQueue"),
    "Group": ("group", "RemoteGroup"),
    "AsyncQueue": ("aio_group", "AsyncRemoteQueue"),
    "AsyncGroup": ("aio_group", "AsyncRemoteGroup"),
    "Broker": ("broker", "RemoteBroker"),
    "AsyncBroker": ("aio_broker", "AsyncRemoteBroker"),
}
_becoming = threading.RLock()  # a finalizer may be the next to use another one, in the same thread
_SPECIAL: Final = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__aiter__", "__repr__")


def stand_in(face: Any) -> None:
    """In a child after a fork: let the face be another from its first use on. Takes no lock, and loads nothing."""
    kind = type(face)
    if kind.__name__ in _REMOTE:  # others are the server's own
        before = dict(face.__dict__)
        path = absolute(before["_engine"].folder)  # the child may go to another folder before it uses it
        face.__dict__.clear()
        face.__dict__.update(_kind=kind, _before=before, _path=path)
        face.__class__ = _ForkedGroup if "_group" in before else _ForkedBroker


def _look_up(self: Any, name: str) -> Any:
    if name == "__class__":
        return object.__getattribute__(self, "__dict__").get("_kind", type(self))  # it is what it was, to whoever asks
    if name == "disown":  # in a child of the child: nothing has changed
        return _free
    _become_remote(self)
    return getattr(self, name)


# Python lets an object change its class among those that begin alike: groups are generic, brokers are not.
class _ForkedGroup(Generic[Body]):
    """A queue or a group that was not used yet in the child."""

    __getattribute__ = _look_up


class _ForkedBroker:
    """A broker that was not used yet in the child."""

    __getattribute__ = _look_up


def _special(name: str) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        _become_remote(self)
        return getattr(type(self), name)(self, *arguments)

    return method


for _name in _SPECIAL:  # looked up in the class, and not by way of `__getattribute__`
    setattr(_ForkedGroup, _name, _special(_name))
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
    found: Any
    if "_group" in before:
        opened = before["_group"]
        found = remote(client, opened.topic.name, opened.name, None, opened.settings)
        found._bodies = before["_bodies"]
        found._closed, found._alone = before["_closed"], before.get("_alone", False)
        found._durability, found._ack_durability = opened.settings.durability, opened.settings.ack_durability
    else:
        found = remote(client, before["_bodies_type"], engine.settings.topic.durability)
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
    """The remote kind, which also has an answer for the messages that the parent took."""
    if name not in _kinds:
        module, remote = _REMOTE[name]
        found = getattr(import_module(f"holdfast.client.{module}"), remote)
        of_parent = {
            each: value for each, value in vars(_FromParent).items() if each == "__getattr__" or each[:2] != "__"
        }
        _kinds[name] = type(remote, (found,), {"__module__": found.__module__, **of_parent})
        _kinds[name]._in_child = _kinds[name]
    return _kinds[name]


class BoundBeforeFork(Closed, AttributeError):
    """A method that was taken from its object before a fork: it knows the object only as it was."""


class _FromParent:
    """What is added to a remote kind: what messages from before the fork ask of their queue.

    They are the parent's, to settle and to give back.
    """

    _in_child: Any

    def __getattr__(self, name: str) -> Any:
        raise BoundBeforeFork(
            f"{name} is not here: a method of this object, such as `queue.put`, was looked up before a fork, and is of "
            "no use in the child. Hand over the object, and look its methods up there"
        )

    _ended = True  # so they are lost to the child

    def disown(self) -> None:
        """In a child of the child: its client sees to it."""

    def _let_go(self, *arguments: Any) -> None:
        if len(arguments) == 1:  # one of our own
            self._remote()._let_go(*arguments)

    def _ack_one(self, *_: Any) -> Any:
        raise Closed(
            "this message was taken before a fork, by the parent, which still has it: let the parent settle it, and "
            "take messages in this process yourself"
        )

    _ack_all = _ack_one

    def _nack(self, handles: Any, *arguments: Any) -> Any:
        return self._remote()._nack(handles, *arguments) if type(handles) is list else self._ack_one()

    def _defer(self, handle: Any, *arguments: Any) -> Any:
        return self._remote()._defer(handle, *arguments) if hasattr(handle, "_held") else self._ack_one()

    def _reject(self, handle: Any, *arguments: Any) -> Any:
        return self._remote()._reject(handle, *arguments) if hasattr(handle, "_held") else self._ack_one()

    def _extend(self, handle: Any, *arguments: Any) -> Any:
        return self._remote()._extend(handle, *arguments) if hasattr(handle, "_held") else self._ack_one()

    def _remote(self) -> Any:
        """The same object, as the remote face that it is."""
        kind: Any = self._in_child
        return super(kind, self)
