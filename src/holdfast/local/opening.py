"""Opening a folder in this process: its engine, and a port of the requested kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.drafts import Bodies
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP, folder_path, is_store, store_of
from holdfast.broker.metrics import Observer
from holdfast.env import World, real_world
from holdfast.env.process import environment
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.local.broker import LocalBroker, keep_bodies
from holdfast.local.group import LocalGroup
from holdfast.model import Durability
from holdfast.settings import BrokerSettings, QueueSettings, check_settings
from holdfast.storage.files import TRUST

_Port = TypeVar("_Port")


def open_queue_port(
    kind: Callable[..., _Port],
    folder: str | PathLike[str],
    changes: Mapping[str, Any],
    *,
    create: bool = True,
    topic: str | None = None,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
) -> _Port:
    """Return a port on the queue in a folder, with an upkeep thread unless time is simulated."""
    bodies = Bodies(body_type)  # a bad type is refused before anything is created
    switch(create, "create")
    if durability is not None:
        changes = {**changes, "durability": durability}
    check_settings(settings, changes)
    usual = store_settings(None) if world is None and _is_stored(folder) else BrokerSettings()
    trusting = msgspec.structs.replace(usual, trust_folder=trusts(trust_folder, world))
    engine = BrokerEngine.open(folder, create=create, settings=trusting, observer=observer, world=world)
    try:
        opened = engine.queue_topic(topic, settings, changes, create=create)
        keep_bodies(engine, opened, body_type)
        group = opened.group(DEFAULT_GROUP)
        if world is None:
            engine.keep()
        return kind(engine, group, bodies, alone=True)
    except BaseException:
        engine.close()
        raise


def trusts(given: bool | None, world: World | None) -> bool:  # noqa: FBT001  as it was given
    """Return whether other users who may write to the folder are trusted: by argument, or else by the environment."""
    if given is not None:
        return switch(given, "trust_folder")
    said = environment().get(TRUST) if world is None else None
    if said is None:
        return False
    from holdfast.config.settings_file import load_settings

    return load_settings(None, {TRUST: said}).broker.trust_folder


def _is_stored(folder: object) -> bool:
    """Whether this is a folder in a store, or the local copy of one, which stands for it."""
    if is_store(folder):
        return True
    try:
        return store_of(real_world(), folder_path(folder)) is not None
    except OSError:
        return False  # whoever opens it finds out why


def store_settings(settings: BrokerSettings | None) -> BrokerSettings:
    """Return the settings of a folder in a store: as given, or else as the settings file and the environment say."""
    if settings is not None:
        return settings
    from holdfast.config.settings_file import read_settings

    return read_settings(real_world(), environment()).broker


def open_broker_port(
    kind: Callable[..., _Port],
    folder: str | PathLike[str] | None,
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
) -> _Port:
    """Return a port on the topics of a data folder, with an upkeep thread unless time is simulated."""
    Bodies(body_type)  # a bad type is refused before anything is created
    switch(create, "create")
    if settings is not None and settings_file is not None:
        raise InvalidRequest("give settings or settings_file, not both")
    if settings is None:
        from holdfast.config.settings_file import read_settings

        path = None if settings_file is None else folder_path(settings_file, "the settings file")
        effective = read_settings(world or real_world(), environment() if world is None else {}, path)
        settings, folder = effective.broker, folder if folder is not None else effective.data_dir
    if folder is None:
        raise InvalidRequest("give the data folder, or a settings file that names it: data_dir in [broker]")
    if not isinstance(settings, BrokerSettings):
        raise BadSettings(f"settings must be BrokerSettings, not {type(settings).__name__}")
    if durability is not None:
        topic = msgspec.structs.replace(settings.topic, durability=durability)
        settings = msgspec.structs.replace(settings, topic=topic)
    if trust_folder is not None:
        settings = msgspec.structs.replace(settings, trust_folder=switch(trust_folder, "trust_folder"))
    engine = BrokerEngine.open(folder, create=create, settings=settings, observer=observer, world=world)
    try:
        if world is None:
            engine.keep()
        return kind(engine, body_type, with_threads=world is None)
    except BaseException:
        engine.close()
        raise


def close_engine(port: LocalBroker | LocalGroup) -> None:
    """Close a folder whose opener was cancelled."""
    port.engine.close()
