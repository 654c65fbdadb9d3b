"""Owning a data folder for as long as one command takes, and the topic and group that the command is about."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import holdfast
from holdfast.broker.broker import BrokerEngine
from holdfast.broker.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    TOPICS,
    check_name,
    check_topic_name,
    parse_receipt,
    partition_folder,
    topic_for,
    topic_of_id,
    topics,
)
from holdfast.broker.topic import Topic
from holdfast.cli.options import WAIT
from holdfast.embedded.settings_file import read_settings
from holdfast.embedded.times import parse_duration
from holdfast.env import real_world
from holdfast.env.environ import environment
from holdfast.errors import Busy, HoldfastError, InvalidRequest, NotAQueue, UnknownGroup, UnknownTopic
from holdfast.settings import BrokerSettings
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

_LOOK_EVERY_S: Final = 0.02
_MOST_NAMES: Final = 20


@contextmanager
def owned(folder: str, *, wait: str | float = WAIT, create: bool = False, keep: bool = True) -> Iterator[BrokerEngine]:
    """The data folder, with threads that look after it. Another short command may have it first; we wait a little."""
    wait_s = parse_duration(wait, "--wait") if isinstance(wait, str) else wait
    settings = read_settings(real_world(), environment()).broker
    engine = _engine(folder, wait_s, settings, create=create)
    try:
        if keep:
            engine.keep()
        yield engine
    finally:
        engine.close()


def _engine(folder: str, wait_s: float, settings: BrokerSettings, *, create: bool) -> BrokerEngine:
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return BrokerEngine.open(folder, create=create, settings=settings)
        except Busy:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_LOOK_EVERY_S)


@contextmanager
def opened(
    folder: str,
    *,
    topic: str | None = None,
    group: str | None = None,
    wait: str | float = WAIT,
    make: bool = False,
) -> Iterator[holdfast.Queue[bytes]]:
    """A group of a topic, with everything done that is due by now; made where there is none only if that is said."""
    name = chosen_topic(folder, topic)
    with owned(folder, wait=wait) as engine:
        yield view(engine, name, group, make=make)


@contextmanager
def opened_broker(folder: str, *, wait: str | float = WAIT, create: bool = False) -> Iterator[holdfast.Broker]:
    """The topics of a data folder."""
    if not create:
        topics_of(folder)
    with owned(folder, wait=wait, create=create) as engine:
        yield holdfast.Broker(engine, None)


def view(engine: BrokerEngine, topic: str, group: str | None, *, make: bool = False) -> holdfast.Queue[bytes]:
    """A group in queue mode as a queue, with everything done that is due by now."""
    name = check_name(group or DEFAULT_GROUP, "group")
    opened_topic = engine.open_topic(topic)
    engine.streams.check_free(name, opened_topic)
    # Among other groups nobody means one that is not named: it would keep all messages, and nobody would take them.
    may_make = make and (group is not None or not opened_topic.groups)
    if name not in opened_topic.groups and not may_make:
        raise UnknownGroup(f"{topic} has no group {name}; {_groups_there(opened_topic, group)}")
    queue: holdfast.Queue[bytes] = holdfast.Queue(engine, opened_topic.group(name), None)
    engine.tick()
    return queue


def _groups_there(topic: Topic, wanted: str | None) -> str:
    if topic.groups:
        return f"say which with --group: {some_of(sorted(topic.groups))}"
    word = "" if wanted is None else f" --group {wanted}"
    return f"it has none in queue mode yet: `holdfast get{word}` makes it"


class Views:
    """The queues that the ids or receipts of one call belong to: they say of which topic they are."""

    def __init__(self, engine: BrokerEngine, topic: str | None, group: str | None) -> None:
        self._engine = engine
        self._topic = topic
        self._group = group
        self._known: dict[tuple[str, str | None], holdfast.Queue[bytes]] = {}

    def of_id(self, message_id: str) -> holdfast.Queue[bytes]:
        """The queue of a message or a dead letter."""
        return self._view(topic_named(self._engine.folder, self._topic, message_id), self._group)

    def of_receipt(self, receipt: str) -> holdfast.Queue[bytes]:
        """The queue of a delivery: of the group that was said, or else of the one that has the message."""
        topic = topic_named(self._engine.folder, self._topic, receipt.partition("@")[0])
        return self._view(topic, self._group or self._holding(topic, receipt))

    def _holding(self, name: str, receipt: str) -> str | None:
        """The group whose delivery the receipt proves; None where that is nobody's any more."""
        topic = self._engine.open_topic(name)
        holding: list[str] = []
        with suppress(HoldfastError):  # what is wrong with it will be said
            number, parsed = parse_receipt(receipt, name)
            holding = sorted(group.name for group in topic.groups.values() if group.holds(number, parsed))
        if len(holding) > 1:
            raise InvalidRequest(
                f"{receipt} may be of {len(holding)} groups; say which with --group: {some_of(holding)}"
            )
        if holding:
            return holding[0]
        return None if DEFAULT_GROUP in topic.groups else next(iter(sorted(topic.groups)), None)

    def _view(self, topic: str, group: str | None) -> holdfast.Queue[bytes]:
        if (topic, group) not in self._known:
            self._known[topic, group] = view(self._engine, topic, group)
        return self._known[topic, group]


def is_queue(folder: str) -> bool:
    """Whether the folder holds a queue, or topics."""
    world = real_world()
    try:
        return bool(topics(world, folder)) or (world.disk.exists(join(folder, TOPICS)) and not is_log(world, folder))
    except OSError:
        return False


def topics_of(folder: str) -> list[str]:
    """The topics of a data folder; NotAQueue where it is none."""
    world = real_world()
    found = topics(world, folder)
    if found or is_queue(folder):
        return found
    if not world.disk.exists(folder):
        raise NotAQueue(f"there is no folder {folder}; `holdfast put` makes a queue, `holdfast topic create` a topic")
    if is_log(world, folder):
        raise NotAQueue(f"{folder} holds a log and no queue; look into it with `holdfast log`")
    raise NotAQueue(f"{folder} holds no queue; name the folder that `holdfast put` made, the one with {TOPICS}/ in it")


def chosen_topic(folder: str, wanted: str | None, *, create: bool = False) -> str:
    """The topic that a command is about: the one that was said, or the only one there is."""
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


def broker_with(engine: BrokerEngine, topic: str) -> holdfast.Broker:
    """The topics of the folder; this one is made, as a queue, where it is not there."""
    if topic not in engine.topics():
        new_queue(engine, topic)
    return holdfast.Broker(engine, None)


def new_queue(engine: BrokerEngine, name: str, changes: dict[str, Any] | None = None) -> None:
    """Make a topic with the one group that a queue has."""
    engine.create_topic(name, None, changes)
    engine.open_topic(name).group(DEFAULT_GROUP)
