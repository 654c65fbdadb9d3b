"""Topics that are used for a moment, and stay open meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.broker.layout import DEAD_SUFFIX, check_readable_name
from holdfast.broker.partition import Partition
from holdfast.broker.topic import Topic


class Using:
    """Somebody who uses a topic: around every call, and so no generator."""

    __slots__ = ("__weakref__", "_hold", "_name", "_topic")

    def __init__(self, hold: Callable[[str, object], Topic], name: str) -> None:
        self._hold = hold
        self._name = name

    def __enter__(self) -> Topic:
        self._topic = topic = self._hold(self._name, self)
        return topic

    def __exit__(self, *exc: object) -> None:
        self._topic.holders.discard(self)


class Readable:
    """The partitions of a topic, or of its dead letters, which are read like those of any other."""

    def __init__(self, topic: Topic, *, dead: bool) -> None:
        self.topic = topic
        self.dead = dead

    def partition(self, number: object) -> Partition:
        """One of them, by its number; of dead letters it is made when first needed, as when the first one dies."""
        own = self.topic.partition(number)
        return self.topic.dead_partition(self.topic.partitions.index(own)).target if self.dead else own

    def partitions(self) -> list[Partition]:
        """All of them."""
        return [self.partition(number) for number in range(len(self.topic.partitions))]


@contextmanager
def reading(using: Callable[[str], Using], name: str) -> Iterator[Readable]:
    """A topic to read, or (`jobs.dlq`) the dead letters of one, which stays open meanwhile."""
    dead = check_readable_name(name).endswith(DEAD_SUFFIX)
    with using(name.removesuffix(DEAD_SUFFIX)) as topic:
        yield Readable(topic, dead=dead)
