"""What callers may make: so many groups and partitions a topic. In one's own process there are no such limits."""

from __future__ import annotations

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.topic import Topic
from holdfast.errors import BadSettings, InvalidRequest


def check_new_group(engine: BrokerEngine, topic: Topic, name: str, most: int) -> None:
    """Refuse one more group on a topic that has as many as it may, in both modes together."""
    if name in topic.groups:
        return
    streams = engine.streams.on(topic)
    if any(group.name == name for group in streams):
        return
    count = len(topic.groups) + len(streams)
    if count >= most:
        raise InvalidRequest(
            f"the group {name} was not made: {topic.name} has {count} groups, and callers may make {most} "
            "(max_groups). Use one that is there, delete those that nobody needs, or raise max_groups"
        )


def check_new_member(engine: BrokerEngine, topics: list[str], name: str, most: int) -> None:
    """The same for a group in stream mode, on all that it is to read."""
    for each in topics:
        with engine.using(each) as topic:
            check_new_group(engine, topic, name, most)


def check_partitions(wanted: object, known: int, most: int) -> None:
    """Refuse more partitions than callers may ask for; what a topic has it keeps."""
    if type(wanted) is int and wanted > max(most, known):
        raise BadSettings(
            f"partitions={wanted} cannot be used: callers may ask for up to {most} (max_partitions). Ask for fewer, "
            "or raise max_partitions; nothing was changed"
        )
