"""Faces of groups and queues behind a server."""

from __future__ import annotations

from typing import Any

from holdfast.api.aio.group import AsyncGroup
from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.bodies import Bodies
from holdfast.api.sync.group import Group
from holdfast.api.sync.queue import Queue
from holdfast.client.client import Client
from holdfast.remote.aio.group import AsyncRemoteGroupPort
from holdfast.remote.sync.group import RemoteGroupPort
from holdfast.settings import TopicSettings


def group_there(
    client: Client, topic: str, group: str, body_type: Any, settings: TopicSettings, **options: Any
) -> Group[Any]:
    """A group for threads."""
    return Group(RemoteGroupPort(client, topic, group, Bodies(body_type), settings, **options))


def queue_there(
    client: Client, topic: str, group: str, body_type: Any, settings: TopicSettings, **options: Any
) -> Queue[Any]:
    """A queue for threads."""
    return Queue(RemoteGroupPort(client, topic, group, Bodies(body_type), settings, **options))


def async_group_there(
    client: Client, topic: str, group: str, body_type: Any, settings: TopicSettings, **options: Any
) -> AsyncGroup[Any]:
    """A group for tasks."""
    return AsyncGroup(AsyncRemoteGroupPort(client, topic, group, Bodies(body_type), settings, **options))


def async_queue_there(
    client: Client, topic: str, group: str, body_type: Any, settings: TopicSettings, **options: Any
) -> AsyncQueue[Any]:
    """A queue for tasks."""
    return AsyncQueue(AsyncRemoteGroupPort(client, topic, group, Bodies(body_type), settings, **options))
