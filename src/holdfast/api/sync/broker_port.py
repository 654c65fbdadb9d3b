# Generated from aio/broker_port.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What stands behind a broker: an engine in this process, the owner's socket, or a server. Arguments come checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from holdfast.api.bodies import Bodies
from holdfast.api.consumer_arguments import MemberRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.streams import Stream
from holdfast.api.sync.consumer_port import ConsumerPort
from holdfast.api.sync.group_port import GroupPort
from holdfast.api.sync.locks_port import LocksPort
from holdfast.api.sync.producer import Producer
from holdfast.api.topics import GroupInfo, TopicInfo
from holdfast.api.traces import Question
from holdfast.broker.streams.offsets import Reset, To
from holdfast.broker.tracing.log import TraceStats, TraceStep
from holdfast.model import CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage


class BrokerPort(Protocol):
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

    def after_fork(self) -> BrokerPort:
        """The port that a child uses instead."""

    def queue(
        self,
        name: str | None,
        body_type: Any,
        settings: QueueSettings | None,
        changes: Mapping[str, Any],
        *,
        create: bool,
    ) -> GroupPort:
        """The default group of a topic, both made where there is none."""

    def group(self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]) -> GroupPort:
        """A group in queue mode, made where there is none."""

    def member(self, request: MemberRequest) -> ConsumerPort:
        """A member of a group in stream mode, which has not joined yet."""

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> Producer:
        """A producer; it is closed with the port."""

    def locks(self) -> LocksPort:
        """The locks and documents."""

    def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Make a topic."""

    def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic more partitions."""

    def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""

    def topics(self) -> list[str]:
        """The names of all topics."""

    def delete_topic(self, name: str) -> None:
        """Take a topic away."""

    def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message."""

    def apply_retention(self, name: str) -> Retained:
        """Drop what the topic's retention settings let go."""

    def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""

    def publish(
        self,
        topic: str,
        messages: Iterable[Any],
        partition: int | None,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""

    def upload(
        self,
        topic: str,
        stream: Stream,
        options: NewMessage,
        size_hint: int | None,
        partition: int | None,
        durability: Durability | None,
    ) -> Stored:
        """Store all that the stream gives as one message."""

    def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on."""

    def groups(self, topic: str | None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""

    def delete_group(self, name: str, topic: str | None) -> None:
        """Forget a group: on one topic in queue mode, or one in stream mode as a whole."""

    def reset_offsets(self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool) -> list[Reset]:
        """Let a group go on from elsewhere, or say what that would be."""

    def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message."""

    def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """The steps that fit: the first ones, or the last."""

    def trace_stats(self, question: Question) -> TraceStats:
        """The steps that fit, in numbers."""

    def sync(self) -> None:
        """Return when everything said so far is on disk."""

    def close(self) -> None:
        """Let producers send what they have, and let go."""
