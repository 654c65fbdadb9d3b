"""A data folder as somebody sees it who does not own it: topics, partitions, a reader for each."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.broker.folder.contents import Catalog, settings_for
from holdfast.broker.folder.layout import TOPICS, partition_folder, topic_folder
from holdfast.delivery.where import Expression
from holdfast.env import World, real_world
from holdfast.errors import NotAQueue, UnknownTopic
from holdfast.spark.source.options import Subscription
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log, translated


class DataFolder:
    """Reads only, and takes no lock; readers are kept, and see what has come since when they are asked."""

    def __init__(self, path: str, world: World | None = None) -> None:
        self.path = path.rstrip("/") or "/"
        self.world = world or real_world()
        self._catalog = Catalog(self.world, self.path)
        self._readers: dict[tuple[str, int], LogReader] = {}
        disk = self.world.disk
        with translated(self.path):
            if not disk.exists(self.path):
                raise NotAQueue(f'there is no folder {self.path}: option "path" names the data folder to read')
            if not disk.exists(join(self.path, TOPICS)):
                raise NotAQueue(
                    f'{self.path} holds no topics: option "path" names the folder that open_broker was given'
                )

    def topics(self, subscription: Subscription) -> list[str]:
        """Those that the subscription means; one that is named must be there."""
        names = self._catalog.names()
        if subscription.pattern is not None:
            pattern = Expression(subscription.pattern)
            return [name for name in names if pattern.matches(name)]
        for name in subscription.names:
            if name not in names and name not in self._catalog:
                there = f"there are {', '.join(names[:10])}" if names else "there is none yet"
                raise UnknownTopic(f"there is no topic {name} in {self.path}; {there}")
        return list(subscription.names)

    def topic_id(self, topic: str) -> int:
        """Which topic of this name it is."""
        return self._catalog.facts(topic).id

    def partition_count(self, topic: str) -> int:
        """How many partitions it has by now."""
        return self._catalog.facts(topic).partitions

    def partitions(self, subscription: Subscription) -> Iterator[tuple[str, int]]:
        """Topic and number of each partition that is to be read."""
        for topic in self.topics(subscription):
            count = self.partition_count(topic)
            wanted = subscription.partitions
            for number in wanted[topic] if wanted is not None else range(count):
                if not 0 <= number < count:
                    raise UnknownTopic(f"topic {topic} in {self.path} has no partition {number}: it has {count}")
                yield topic, number

    def reader(self, topic: str, partition: int) -> LogReader | None:
        """The partition's log; None while nothing was ever written there."""
        known = self._readers.get((topic, partition))
        if known is not None:
            return known
        folder = join(partition_folder(self.path, topic, partition), "log")
        if not is_log(self.world, folder):
            return None
        settings = settings_for(self.world, topic_folder(self.path, topic), None, {})
        reader = self._readers[topic, partition] = LogReader(folder, settings, self.world)
        return reader
