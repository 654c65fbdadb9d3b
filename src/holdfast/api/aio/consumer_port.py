"""What stands behind a consumer: a member of a group in this process, or one that a server keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Protocol

from holdfast.api.consumer_arguments import Listener, MemberRequest, SeekTarget
from holdfast.api.consumer_values import ConsumedPartition, StreamMessage
from holdfast.broker.streams.offsets import PartitionLag
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability
from holdfast.settings import ConsumerSettings


class AsyncConsumerPort(Protocol):
    """One member of a group in stream mode. Arguments come checked, and calls one at a time.

    `returned` are partitions of which messages were polled and not handed out: those come again.
    """

    request: MemberRequest
    settings: ConsumerSettings

    @property
    def partitions(self) -> Mapping[TopicPartition, ConsumedPartition]:
        """The partitions that are the member's now."""

    @property
    def member_id(self) -> str | None:
        """The member's name in the group, if it has joined."""

    @property
    def left(self) -> bool:
        """Whether it has left the group for good."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more: it has left, or what stands behind it is closed."""

    def check_open(self) -> None:
        """Raise Closed where it can be used no more."""

    async def join(self) -> None:
        """Join the group, and take over what it gives."""

    async def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition]
    ) -> list[StreamMessage[Any]]:
        """Up to `count` messages; waits for at least one, [] after the time. All handed out before is handled now."""

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """What was polled reaches the user."""

    def needs_attention(self) -> bool:
        """Between two messages of an iteration: note that the consumer lives, and whether to call `attend`."""

    async def attend(self) -> bool:
        """Commit where that is due; answers whether what was read ahead must not be handed out any more."""

    async def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None) -> None:
        """Commit all of these, or none."""

    async def committed(self, topic: str, partition: int) -> int | None:
        """The offset that the group has committed there."""

    async def seek(self, where: SeekTarget, returned: Collection[TopicPartition]) -> None:
        """Read on elsewhere."""

    async def lag(self) -> list[PartitionLag]:
        """How far behind the member is in each of its partitions."""

    async def leave(self) -> None:
        """Commit what is handled (with auto_commit), and leave; a static member stays one until its session ends."""


async def tell(listener: Listener | None, places: list[TopicPartition]) -> None:
    """Tell the user what was assigned or revoked."""
    if listener is not None:
        answer = listener(places)  # sync: listener(places)
        if isawaitable(answer):  # async only: a thread is told by a plain function
            await answer
