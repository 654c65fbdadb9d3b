"""What only a cluster can do, for tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.api.arguments import check_shard
from holdfast.broker.folder.layout import check_topic_name

if TYPE_CHECKING:
    from holdfast.api.aio.ports import AsyncBrokerPort
    from holdfast.api.topics import TopicInfo


class AsyncCluster:
    """A cluster as its clients see it."""

    def __init__(self, port: AsyncBrokerPort) -> None:
        self._port = port

    async def move_topic(
        self, name: str, shard: int, *, progress: Callable[[int, int], None] | None = None
    ) -> TopicInfo:
        """Move a topic to another shard, with all that belongs to it.

        It stays in use meanwhile: for a moment, calls are refused in a way that clients retry. If this is interrupted,
        the topic is in one shard or in the other; call it again to continue.

        Args:
            name: The topic.
            shard: The number of the shard.
            progress: Called with the bytes copied so far, and those to copy as far as known.

        Returns:
            The topic's partitions, groups and settings.

        Raises:
            UnknownTopic: The topic does not exist.
            InvalidRequest: There is no such shard, or no cluster.
        """
        check_shard(shard, needed=True)
        return await self._port.move_topic(check_topic_name(name), shard, progress)
