"""Owning a data folder for as long as one command takes, and the topic and group that the command is about."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, cast

import holdfast
from holdfast.broker.broker import BrokerEngine
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    DEFAULT_TOPIC,
    TOPICS,
    check_name,
    check_topic_name,
    partition_folder,
    topic_for,
    topic_of_id,
    topics,
)
from holdfast.cli.options import WAIT
from holdfast.cli.places import connected, queue_of
from holdfast.cli.remote import is_remote, owner_at, remote_view
from holdfast.client.address import is_address
from holdfast.embedded.settings_file import read_settings
from holdfast.embedded.times import parse_duration
from holdfast.env import real_world
from holdfast.env.environ import environment
from holdfast.errors import Busy, HoldfastError, InvalidRequest, NotAQueue, UnknownGroup, UnknownTopic
from holdfast.storage.files import join
from holdfast.storage.opening import is_log, translated

if TYPE_CHECKING:
    from holdfast.client.broker import RemoteBroker

_LOOK_EVERY_S: Final = 0.02
_MOST_NAMES: Final = 20


@contextmanager
def owned(folder: str, *, wait: str | float = WAIT, create: bool = False, keep: bool = True) -> Iterator[BrokerEngine]:
    """The data folder, with threads that look after it; for what cannot be done by way of another owner."""
    engine = _engine_or_socket(folder, _seconds(wait), create=create, by_socket=False)
    assert isinstance(engine, BrokerEngine)
    try:
        if keep:
            engine.keep()
        yield engine
    finally:
        engine.close()


@contextmanager
def opened_broker(place: str, *, wait: str | float = WAIT, create: bool = False) -> Iterator[holdfast.Broker]:
    """The topics of a data folder, ours for as long as that takes; those of its owner, by its socket; or a server's.

    Another short command may have the folder; we wait a little.
    """
    if is_address(place):
        remote = connected(place, _seconds(wait))
        try:
            yield remote
        finally:
            remote.close()
        return
    if not create:
        topics_of(place)
    found = _engine_or_socket(place, _seconds(wait), create=create)
    try:
        if isinstance(found, BrokerEngine):
            found.keep()
            yield holdfast.Broker(found, None)
        else:
            yield cast("holdfast.Broker", found)
    finally:
        found.close()


def _seconds(wait: str | float) -> float:
    return parse_duration(wait, "--wait") if isinstance(wait, str) else wait


def _engine_or_socket(
    folder: str, wait_s: float, *, create: bool, by_socket: bool = True
) -> BrokerEngine | RemoteBroker:
    settings = read_settings(real_world(), environment()).broker
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return BrokerEngine.open(folder, create=create, settings=settings)
        except Busy:
            owner = owner_at(folder) if by_socket else None
            if owner is not None:
                return owner
            if time.monotonic() >= give_up:
                raise
            time.sleep(_LOOK_EVERY_S)


def trusts_folders() -> bool:
    """Whether other users who may write to a folder are trusted: --trust-folder, or the settings."""
    return read_settings(real_world(), environment()).broker.trust_folder


@contextmanager
def opened(
    place: str,
    *,
    topic: str | None = None,
    group: str | None = None,
    wait: str | float = WAIT,
    make: bool = False,
) -> Iterator[holdfast.Queue[bytes]]:
    """A group of a topic, with everything done that is due by now; made where there is none only if that is said."""
    if not is_address(place):
        topic = chosen_topic(place, topic)  # a mistake, before anybody is asked
    with opened_broker(place, wait=wait) as broker:
        name = chosen_by(broker, place, topic)
        yield view(broker, name, group, make=make)


def chosen_by(broker: holdfast.Broker, place: str, topic: str | None) -> str:
    """The topic that a command is about: the one that was said, that of the place, or the only one there is."""
    topic = topic or queue_of(place)
    if topic is not None:
        return check_topic_name(topic)
    found = broker.topics()
    if len(found) > 1:
        raise InvalidRequest(f"{place} has {len(found)} topics; say which with --topic: {some_of(found)}")
    if not found:
        raise NotAQueue(f"{place} has no topic yet; make one with `holdfast topic create {place} NAME`")
    return found[0]


def view(broker: holdfast.Broker, topic: str, group: str | None, *, make: bool = False) -> holdfast.Queue[bytes]:
    """A group in queue mode as a queue, with everything done that is due by now."""
    if is_remote(broker):
        return remote_view(broker, topic, group, make=make)
    engine = broker._engine
    name = check_name(group or DEFAULT_GROUP, "group")
    opened_topic = engine.open_topic(topic)
    engine.streams.check_free(name, opened_topic)
    # Among other groups nobody means one that is not named: it would keep all messages, and nobody would take them.
    may_make = make and (group is not None or not opened_topic.groups)
    if name not in opened_topic.groups and not may_make:
        raise no_group(topic, name, sorted(opened_topic.groups), group)
    queue: holdfast.Queue[bytes] = holdfast.Queue(engine, opened_topic.group(name), None)
    engine.tick()
    return queue


def no_group(topic: str, name: str, there: Sequence[str], wanted: str | None) -> UnknownGroup:
    """What to say of a group in queue mode that is not there."""
    if there:
        return UnknownGroup(f"{topic} has no group {name}; say which with --group: {some_of(there)}")
    word = "" if wanted is None else f" --group {wanted}"
    return UnknownGroup(f"{topic} has no group {name}; it has none in queue mode yet: `holdfast get{word}` makes it")


def is_queue(folder: str) -> bool:
    """Whether the folder holds a queue, or topics."""
    world = real_world()
    try:
        return bool(topics(world, folder)) or (world.disk.exists(join(folder, TOPICS)) and not is_log(world, folder))
    except OSError:
        return False


def topics_of(folder: str) -> list[str]:
    """The topics of a data folder; NotAQueue where it is none. Those of a server it is asked for."""
    if is_address(folder):
        with opened_broker(folder) as broker:
            return broker.topics()
    world = real_world()
    with translated(folder):
        found = topics(world, folder)
        there = world.disk.exists(folder)
    if found or is_queue(folder):
        return found
    if not there:
        raise NotAQueue(f"there is no folder {folder}; `holdfast put` makes a queue, `holdfast topic create` a topic")
    if is_log(world, folder):
        raise NotAQueue(f"{folder} holds a log and no queue; look into it with `holdfast log`")
    raise NotAQueue(f"{folder} holds no queue; name the folder that `holdfast put` made, the one with {TOPICS}/ in it")


def chosen_topic(folder: str, wanted: str | None, *, create: bool = False) -> str:
    """The topic that a command is about: the one that was said, or the only one there is."""
    wanted = wanted or queue_of(folder)
    if is_address(folder):
        if wanted is not None:
            return check_topic_name(wanted)
        with opened_broker(folder) as broker:
            if create and not broker.topics():
                return DEFAULT_TOPIC
            return chosen_by(broker, folder, None)
    if create and not is_queue(folder):
        return topic_for(folder) if wanted is None else check_topic_name(wanted)
    found = topics_of(folder)
    if wanted is not None:
        if check_topic_name(wanted) not in found and not create:
            raise unknown_topic(folder, wanted, found)
        return wanted
    if not found:
        if create:
            return topic_for(folder)
        raise NotAQueue(f"{folder} has no topic yet; make one with `holdfast topic create {folder} NAME`")
    if len(found) > 1:
        raise InvalidRequest(f"{folder} has {len(found)} topics; say which with --topic: {some_of(found)}")
    return found[0]


def topic_named(folder: str, wanted: str | None, message_id: str) -> str:
    """The same, for a command that is told an id: it names the topic, too."""
    if is_address(folder):
        if wanted is None:
            return topic_of_id(message_id).removesuffix(DEAD_SUFFIX)
        return check_topic_name(wanted)
    found = topics_of(folder)
    if wanted is None and len(found) > 1:
        with suppress(HoldfastError):
            name = topic_of_id(message_id).removesuffix(DEAD_SUFFIX)
            if name in found:
                return name
    return chosen_topic(folder, wanted)


def unknown_topic(folder: str, name: str, found: Sequence[str]) -> UnknownTopic:
    """What to say of a topic that is not there."""
    there = f"there are {some_of(found)}" if found else "there is none yet"
    return UnknownTopic(
        f"there is no topic {name} in {folder}; {there}. Make it with `holdfast topic create {folder} {name}`"
    )


def some_of(names: Sequence[str]) -> str:
    """The names in one line, or the first of them."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def topic_of(folder: str) -> str:
    """A topic of the folder; NotAQueue where there is none."""
    return next(iter(topics_of(folder)), "")


def log_of(folder: str, topic: str | None = None, partition: int = 0) -> str:
    """Where the messages of a topic's partition lie, for those who only read."""
    return join(partition_folder(folder, chosen_topic(folder, topic), partition), "log")
