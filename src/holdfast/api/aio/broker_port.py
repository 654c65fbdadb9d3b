"""What stands behind a broker: an engine in this process, the owner's socket, or a server. Arguments come checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from holdfast.api.aio.consumer_port import AsyncConsumerPort
from holdfast.api.aio.group_port import AsyncGroupPort
from holdfast.api.aio.locks_port import AsyncLocksPort
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.bodies import Bodies
from holdfast.api.consumer_arguments import MemberRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.streams import AsyncStream
from holdfast.api.topics import GroupInfo, TopicInfo
from holdfast.api.traces import Question
from holdfast.broker.streams.offsets import Reset, To
from holdfast.broker.tracing.log import TraceStats, TraceStep
from holdfast.model import CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage


class AsyncBrokerPort(Protocol):
    """The topics of a data folder, wherever it is. It opens the ports of groups, consumers and locks."""

    body_type: Any  # what bodies are where nothing else is said

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def settings(self) -> BrokerSettings:
        """Those in force, as far as they are known here."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""

    def after_fork(self) -> AsyncBrokerPort:
        """The port that a child uses instead."""

    async def queue(
        self,
        name: str | None,
        body_type: Any,
        settings: QueueSettings | None,
        changes: Mapping[str, Any],
        *,
        create: bool,
    ) -> AsyncGroupPort:
        """The default group of a topic, both made where there is none."""

    async def group(
        self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]
    ) -> AsyncGroupPort:
        """A group in queue mode, made where there is none."""

    async def member(self, request: MemberRequest) -> AsyncConsumerPort:
        """A member of a group in stream mode, which has not joined yet."""

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> AsyncProducer:
        """A producer; it is closed with the port."""

    def locks(self) -> AsyncLocksPort:
        """The locks and documents."""

    async def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Make a topic."""

    async def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic more partitions."""

    async def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""

    async def topics(self) -> list[str]:
        """The names of all topics."""

    async def delete_topic(self, name: str) -> None:
        """Take a topic away."""

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message."""

    async def apply_retention(self, name: str) -> Retained:
        """Drop what the topic's retention settings let go."""

    async def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""

    async def publish(
        self,
        topic: str,
        messages: Iterable[Any],
        partition: int | None,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""

    async def upload(
        self,
        topic: str,
        stream: AsyncStream,
        options: NewMessage,
        size_hint: int | None,
        partition: int | None,
        durability: Durability | None,
    ) -> Stored:
        """Store all that the stream gives as one message."""

    async def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on."""

    async def groups(self, topic: str | None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""

    async def delete_group(self, name: str, topic: str | None) -> None:
        """Forget a group: on one topic in queue mode, or one in stream mode as a whole."""

    async def reset_offsets(
        self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        """Let a group go on from elsewhere, or say what that would be."""

    async def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message."""

    async def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """The steps that fit: the first ones, or the last."""

    async def trace_stats(self, question: Question) -> TraceStats:
        """The steps that fit, in numbers."""

    async def sync(self) -> None:
        """Return when everything said so far is on disk."""

    async def close(self) -> None:
        """Let producers send what they have, and let go."""
