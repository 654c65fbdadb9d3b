"""Faces of a server, or of the process that owns a folder: they are asked for what a command would look up itself."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from holdfast.broker.layout import DEFAULT_GROUP, check_name, topic_for
from holdfast.client.address import Address
from holdfast.client.sharing import socket_of
from holdfast.embedded.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.environ import environment
from holdfast.env.sockets import absolute, answers_at
from holdfast.errors import Forbidden, InvalidRequest
from holdfast.storage.opening import require_own

if TYPE_CHECKING:
    import holdfast
    from holdfast.client.broker import RemoteBroker

_Answer = TypeVar("_Answer")


def is_remote(face: object) -> bool:
    """Whether somebody else has the messages, and is asked for them."""
    return not hasattr(face, "_engine")


def has_owner(folder: str) -> bool:
    """Whether a process owns the folder and lets others in."""
    path, world = _path(folder), real_world()
    if world.disk.exists(path):
        require_own(world, path, trusted=read_settings(world, environment()).broker.trust_folder)
    return answers_at(socket_of(path))


def _path(folder: str) -> str:
    return absolute(folder.rstrip("/") or "/")


def owner_at(folder: str) -> RemoteBroker | None:
    """The topics of a folder by way of the process that owns it, if it listens."""
    path = _path(folder)
    if not answers_at(socket_of(path)):
        return None
    from holdfast.client.broker import RemoteBroker
    from holdfast.client.client import Client

    client = Client(real_world(), Address(text=folder, socket=socket_of(path)), for_tasks=False)
    client.default_topic = topic_for(path)
    return RemoteBroker(client, None)


def remote_view(broker: Any, topic: str, group: str | None, *, make: bool) -> holdfast.Queue[bytes]:
    """A group in queue mode; made where there is none only if that is said."""
    from holdfast.cli.opened import no_group
    from holdfast.client.broker_face import topic_settings
    from holdfast.client.group import RemoteQueue

    name = check_name(group or DEFAULT_GROUP, "group")
    settings: dict[str, Any] = {}
    with suppress(Forbidden):  # one who may only consume is told no more of a topic
        info = broker.describe_topic(topic)
        settings = info.settings
        if name in info.stream_groups:
            raise InvalidRequest(
                f"the group {name} reads {topic} in stream mode; use `holdfast consume`, or choose another name"
            )
        if name not in info.groups:
            if not make or (group is None and info.groups):
                raise no_group(topic, name, info.groups, group)
            broker.group(topic, name)
    queue: RemoteQueue[bytes] = RemoteQueue(broker._client, topic, name, None, topic_settings(settings))
    return cast("holdfast.Queue[bytes]", queue)


def asked(face: Any, kind: type[_Answer], *path: str | int, method: str = "GET", **query: Any) -> _Answer:
    """The answer of a route that no face has a method for."""
    from holdfast.client.http import Ask, path_of
    from holdfast.client.ways import run

    answer: _Answer = run(face._caller.call(Ask(method=method, path=path_of(*path, **query), answers=kind)))
    return answer
