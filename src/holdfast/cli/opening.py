"""Owning a data folder for as long as one command takes, and the topic and group that the command is about."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import holdfast
from holdfast.api.bodies import Bodies
from holdfast.api.ports import port_of
from holdfast.api.times import parse_duration
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import (
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
from holdfast.client.address import Address, is_address
from holdfast.client.shared_folder import socket_of
from holdfast.config.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.process import environment
from holdfast.env.sockets import absolute, answers_at
from holdfast.errors import Busy, Forbidden, HoldfastError, InvalidRequest, NotAQueue, UnknownGroup, UnknownTopic
from holdfast.local.sync.broker import LocalBrokerPort
from holdfast.local.sync.opening import queue_here
from holdfast.settings import TopicSettings
from holdfast.storage.files import join
from holdfast.storage.opening import is_log, require_own, translated

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
            yield holdfast.Broker(LocalBrokerPort(found))
        else:
            yield found
    finally:
        found.close()


def _seconds(wait: str | float) -> float:
    return parse_duration(wait, "--wait") if isinstance(wait, str) else wait


def _engine_or_socket(
    folder: str, wait_s: float, *, create: bool, by_socket: bool = True
) -> BrokerEngine | holdfast.Broker:
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
    engine = engine_of(broker)
    name = check_name(group or DEFAULT_GROUP, "group")
    opened_topic = engine.open_topic(topic)
    engine.streams.check_free(name, opened_topic)
    # Among other groups nobody means one that is not named: it would keep all messages, and nobody would take them.
    may_make = make and (group is not None or not opened_topic.groups)
    if name not in opened_topic.groups and not may_make:
        raise no_group(topic, name, sorted(opened_topic.groups), group)
    queue: holdfast.Queue[bytes] = queue_here(engine, opened_topic.group(name), None)
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


# Faces of a server, or of the process that owns a folder: they are asked for what a command would look up itself.


_Answer = TypeVar("_Answer")


def is_remote(face: object) -> bool:
    """Whether somebody else has the messages, and is asked for them."""
    return getattr(port_of(face), "engine", None) is None


def engine_of(broker: holdfast.Broker) -> BrokerEngine:
    """The engine of a broker that is not remote."""
    engine: BrokerEngine = port_of(broker).engine
    return engine


def has_owner(folder: str) -> bool:
    """Whether a process owns the folder and lets others in."""
    path, world = _path(folder), real_world()
    if world.disk.exists(path):
        require_own(world, path, trusted=read_settings(world, environment()).broker.trust_folder)
    return answers_at(socket_of(path))


def _path(folder: str) -> str:
    return absolute(folder.rstrip("/") or "/")


def owner_at(folder: str) -> holdfast.Broker | None:
    """The topics of a folder by way of the process that owns it, if it listens."""
    path = _path(folder)
    if not answers_at(socket_of(path)):
        return None
    from holdfast.remote.client import Client
    from holdfast.remote.sync.broker import RemoteBrokerPort

    client = Client(real_world(), Address(text=folder, socket=socket_of(path)), for_tasks=False)
    client.default_topic = topic_for(path)
    return holdfast.Broker(RemoteBrokerPort(client))


def remote_view(broker: Any, topic: str, group: str | None, *, make: bool) -> holdfast.Queue[bytes]:
    """A group in queue mode; made where there is none only if that is said."""
    from holdfast.remote.broker import topic_settings
    from holdfast.remote.sync.group import RemoteGroupPort

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
    port = RemoteGroupPort(port_of(broker).client, topic, name, Bodies(None), topic_settings(settings))
    return holdfast.Queue(port)


def asked(face: Any, kind: type[_Answer], *path: str | int, method: str = "GET", **query: Any) -> _Answer:
    """The answer of a route that no face has a method for."""
    from holdfast.client.http import Ask, path_of
    from holdfast.client.network import run

    caller = port_of(face).client.caller
    answer: _Answer = run(caller.call(Ask(method=method, path=path_of(*path, **query), answers=kind)))
    return answer


# Queues that a command makes, and the settings that they follow, wherever they are.


def see_to_queue(broker: holdfast.Broker, name: str, changes: Mapping[str, Any] | None = None, *, create: bool) -> bool:
    """Make the queue where there is none; answers whether it did."""
    if not is_remote(broker):
        if name in engine_of(broker).topics():
            return False
        engine_of(broker).create_topic(name, None, None if changes is None else dict(changes))
        engine_of(broker).open_topic(name).group(DEFAULT_GROUP)
        return True
    try:
        broker.describe_topic(name)
    except UnknownTopic:
        if not create:
            raise
        broker.queue(name, **(changes or {}))
        return True
    except Forbidden:
        pass  # one who may only publish is not told
    return False


def settings_of(broker: holdfast.Broker, topic: str) -> TopicSettings:
    """What a topic follows."""
    if is_remote(broker):
        from holdfast.remote.broker import topic_settings

        return topic_settings(broker.describe_topic(topic).settings)
    with engine_of(broker).using(topic) as opened:
        return opened.settings


# The queues that the ids or receipts of one call belong to: they say of which topic they are.


class Views:
    """Queues of one place, each opened when it is needed."""

    def __init__(self, broker: holdfast.Broker, place: str, topic: str | None, group: str | None) -> None:
        self._broker = broker
        self._place = place
        self._topic = topic
        self._group = group
        self._known: dict[tuple[str, str | None], holdfast.Queue[bytes]] = {}

    def of_id(self, message_id: str) -> holdfast.Queue[bytes]:
        """The queue of a message or a dead letter."""
        return self._view(topic_named(self._place, self._topic, message_id), self._group)

    def of_receipt(self, receipt: str) -> holdfast.Queue[bytes]:
        """The queue of a delivery: of the group that was said, or else of the one that has the message."""
        topic = topic_named(self._place, self._topic, receipt.partition("@")[0])
        return self._view(topic, self._group or self._holding(topic, receipt))

    def _holding(self, topic: str, receipt: str) -> str | None:
        """The group whose delivery the receipt proves; None where that is nobody's any more."""
        groups, holding = self._asked(topic, receipt) if is_remote(self._broker) else self._found(topic, receipt)
        if len(holding) > 1:
            raise InvalidRequest(
                f"{receipt} may be of {len(holding)} groups; say which with --group: {some_of(holding)}"
            )
        if holding:
            return holding[0]
        return None if DEFAULT_GROUP in groups else next(iter(groups), None)

    def _found(self, name: str, receipt: str) -> tuple[list[str], list[str]]:
        topic = engine_of(self._broker).open_topic(name)
        holding: list[str] = []
        with suppress(HoldfastError):  # what is wrong with it will be said
            holding = sorted(group.name for group in topic.groups.values() if group.holds(receipt))
        return sorted(topic.groups), holding

    def _asked(self, topic: str, receipt: str) -> tuple[list[str], list[str]]:
        groups: list[str] = []
        with suppress(Forbidden):  # one who may only consume is not told which there are
            groups = self._broker.describe_topic(topic).groups
        if len(groups) < 2:
            return groups, []
        holding = []
        for group in groups:
            with suppress(HoldfastError):
                message: Any = self._view(topic, group).resume(receipt)
                holding.append(group)
                del message
        return groups, holding

    def _view(self, topic: str, group: str | None) -> holdfast.Queue[bytes]:
        if (topic, group) not in self._known:
            self._known[topic, group] = view(self._broker, topic, group)
        return self._known[topic, group]
