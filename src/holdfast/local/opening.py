"""The queue in a folder, opened here: its engine, its topic, and a face on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, TypeVar

from holdfast.api.aio.group import AsyncGroup
from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.arguments import switch
from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.sync.group import Group
from holdfast.api.sync.queue import Queue
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.folder.policy import check_settings
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Observer
from holdfast.broker.topic import Topic
from holdfast.env import World
from holdfast.env.process import environment
from holdfast.errors import DiskFull
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.sync.group import LocalGroupPort
from holdfast.model import Durability
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.opening import TRUST

_Face = TypeVar("_Face")


def group_here(engine: BrokerEngine, group: QueueGroup, body_type: Any) -> Group[Any]:
    """A group for threads on an engine in this process."""
    return Group(LocalGroupPort(engine, group, Bodies(body_type)))


def queue_here(engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False) -> Queue[Any]:
    """A queue for threads on an engine in this process, which is closed with it where it is `alone` there."""
    return Queue(LocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def async_group_here(engine: BrokerEngine, group: QueueGroup, body_type: Any) -> AsyncGroup[Any]:
    """A group for tasks on an engine in this process."""
    return AsyncGroup(AsyncLocalGroupPort(engine, group, Bodies(body_type)))


def async_queue_here(
    engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False
) -> AsyncQueue[Any]:
    """A queue for tasks on an engine in this process, which is closed with it where it is `alone` there."""
    return AsyncQueue(AsyncLocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def open_queue(
    folder: str | PathLike[str],
    *,
    create: bool = True,
    topic: str | None = None,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
    **changes: Any,
) -> Queue[Any]:
    """Open the queue in a folder, which is made where there is none (unless create=False).

    `topic` says which one where the folder has several. `changes` are settings by name, such as max_attempts=3;
    they are kept with the queue. `body_type` is bytes, str, dict or any type that msgspec knows.
    """
    return open_face(
        queue_here,
        folder,
        create=create,
        topic=topic,
        durability=durability,
        body_type=body_type,
        settings=settings,
        observer=observer,
        world=world,
        trust_folder=trust_folder,
        changes=changes,
    )


def open_face(
    kind: Callable[..., _Face],
    folder: str | PathLike[str],
    *,
    create: bool,
    topic: str | None,
    durability: Durability | None,
    body_type: Any,
    settings: QueueSettings | None,
    observer: Observer | None,
    world: World | None,
    trust_folder: bool | None,
    changes: Mapping[str, Any],
) -> _Face:
    """A face of the queue in a folder, with a thread that looks after it where time runs by itself."""
    Bodies(body_type)  # refused before anything is made
    switch(create, "create")
    if durability is not None:
        changes = {**changes, "durability": durability}
    check_settings(settings, changes)
    trusting = BrokerSettings(trust_folder=trusts(trust_folder, world))
    engine = BrokerEngine.open(folder, create=create, settings=trusting, observer=observer, world=world)
    try:
        opened = engine.queue_topic(topic, settings, changes, create=create)
        keep_bodies(engine, opened, body_type)
        group = opened.group(DEFAULT_GROUP)
        if world is None:
            engine.keep()
        return kind(engine, group, body_type, alone=True)
    except BaseException:
        engine.close()
        raise


def keep_bodies(engine: BrokerEngine, topic: Topic, body_type: Any) -> None:
    """Note what the bodies of a queue are, for workers; where there is no room for that, it is as good without."""
    kind = kind_of(body_type)
    if kind is not None and topic.settings.bodies is None:
        with suppress(OSError, DiskFull):
            engine.alter_topic(topic.name, {"bodies": kind})


def trusts(given: bool | None, world: World | None) -> bool:  # noqa: FBT001  as it was given
    """Whether other users who may write to the folder are trusted: as was said here, or else in the environment."""
    if given is not None:
        return switch(given, "trust_folder")
    said = environment().get(TRUST) if world is None else None
    if said is None:
        return False
    from holdfast.config.settings_file import load_settings

    return load_settings(None, {TRUST: said}).broker.trust_folder
