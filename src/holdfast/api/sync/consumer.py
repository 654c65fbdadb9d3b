# Generated from aio/consumer.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A consumer: a member of a group in stream mode, whose members share the partitions of topics out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, Self

from holdfast.api.consumers import (
    ConsumedPartition,
    MemberRequest,
    SeekTarget,
    StreamMessage,
    User,
    check_count,
    check_offsets,
    chosen_partitions,
    member_request,
    owned_partition,
)
from holdfast.api.contents import Body, home_of
from holdfast.api.drafts import Seconds, duration_ms, instant_ns
from holdfast.api.sync.ports import ConsumerPort, tell
from holdfast.broker.streams.offsets import PartitionLag
from holdfast.errors import Closed, Fenced, InvalidRequest
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability
from holdfast.settings import ConsumerSettings


class Consumer(Generic[Body]):
    """Reads the partitions that its group gives it. For one thread at a time: give each a consumer of its own.

    What `poll` returned counts as handled with the next `poll`; in a loop over the consumer, with the next message.
    """

    def __init__(self, port: ConsumerPort) -> None:
        self._port = port
        self._ahead: deque[StreamMessage[Body]] = deque()  # read by an iteration, and not handed out yet
        self._returned: set[TopicPartition] = set()  # the partitions of what will not be handed out after all
        self._out: ConsumedPartition | None = None  # where the message comes from that an iteration handed out last
        self._user: User | None = None  # who polled last
        self._polling = self._leaving = False

    @classmethod
    def open(
        cls,
        member: Callable[[MemberRequest], ConsumerPort],
        topics: str | Iterable[str],
        group: str,
        **options: Any,
    ) -> Self:
        """Join the group, which is made where there is none."""
        port = member(member_request(topics, group, **options))
        consumer = cls(port)
        port.join()
        return consumer

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that the consumer reads."""
        return self._port.request.topics

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._port.request.group

    @property
    def instance_id(self) -> str:
        """The name that keeps a static member's place; empty for one that is not static."""
        return self._port.request.instance_id

    @property
    def settings(self) -> ConsumerSettings:
        return self._port.settings

    @property
    def closed(self) -> bool:
        return self._port.closed

    @property
    def member_id(self) -> str | None:
        """The name under which the group knows this consumer; another one after each time that it joins."""
        return self._port.member_id

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._port.partitions)} partitions"
        return f"<{type(self).__name__} of {self.group} on {', '.join(self.topics)} ({state})>"

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are ours now, as (topic, partition)."""
        return sorted(self._port.partitions)

    def position(self, topic: str, partition: int) -> int:
        """The offset of the next message that we will get there."""
        self._port.check_open()
        return owned_partition(self._port.partitions, topic, partition).given

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get nothing from there until `resume`; it stays ours."""
        for each in self._chosen(topic, partition):
            each.paused = True
        self._give_back()

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get messages from there again."""
        for each in self._chosen(topic, partition):
            each.paused = False

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return sorted(place for place, each in self._port.partitions.items() if each.paused)

    def poll(self, timeout: Seconds | None = None, max_records: int | None = None) -> list[StreamMessage[Body]]:
        """What is there, up to `max_records`, from all our partitions; waits for at least one, [] after the time."""
        found = self._poll(max_records, timeout)
        self._port.hand_out(found)  # last: whoever is cancelled before has got nothing
        return found

    def __iter__(self) -> Iterator[StreamMessage[Body]]:
        """Every message as it comes, until the consumer is closed."""
        port = self._port
        while True:
            try:
                if port.needs_attention() and port.attend():
                    self._give_back()
                message = self._pull()
                if message is None:
                    self._ahead.extend(self._poll(None, None))
                    continue
            except Closed:
                if self.closed:
                    return
                raise
            yield message

    def commit(
        self,
        messages: Iterable[StreamMessage[Body]] | None = None,
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Note that all we got is handled; or only these messages and all before them; or these offsets.

        Fenced if a partition is not ours any more: then somebody else goes on from the commit before.
        """
        self._port.check_open()
        if messages is not None and offsets is not None:
            raise InvalidRequest("messages and offsets are both given: choose one of them")
        if messages is not None:
            offsets = self._behind(messages)
        elif offsets is None:
            given = {place: (each, max(each.given, each.start)) for place, each in self._port.partitions.items()}
            offsets = {place: offset for place, (each, offset) in given.items() if offset != each.kept}
        self._port.commit(check_offsets(offsets), durability)

    def committed(self, topic: str, partition: int) -> int | None:
        """The offset at which the group goes on after a restart, None before it began there."""
        return self._port.committed(topic, partition)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at the offset."""
        if type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
        self._port.check_open()
        owned_partition(self._port.partitions, topic, partition)
        self._seek(SeekTarget(topic=topic, partition=partition, offset=offset))

    def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the oldest messages kept: of one partition, of a topic, or of all that are ours."""
        self._seek(SeekTarget(topic=topic, partition=partition, to="start"))

    def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with what comes from now on: of one partition, of a topic, or of all that are ours."""
        self._seek(SeekTarget(topic=topic, partition=partition, to="end"))

    def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the first message of this time or later."""
        instant_ns(time, "time")
        self._seek(SeekTarget(topic=topic, partition=partition, time=time))

    def lag(self) -> list[PartitionLag]:
        """How far behind we are in each partition that is ours, in messages and seconds."""
        self._port.check_open()
        return self._port.lag()

    def close(self) -> None:
        """Commit (with auto_commit), leave the group. A static member keeps its place until its session ends.

        Called by another thread than the one that polls, it does not commit what that one has in hand.
        """
        self._close(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def _poll(self, max_records: int | None, timeout: Seconds | None) -> list[StreamMessage[Body]]:
        port = self._port
        port.check_open()
        count = check_count(port.settings.max_records if max_records is None else max_records)
        timeout_ms = None if timeout is None else duration_ms(timeout, "timeout")
        if self._polling:
            raise InvalidRequest("this consumer is polling already: give each thread or task a consumer of its own")
        self._user = User()
        self._give_back()
        self._polling = True
        try:
            found = port.poll(count, timeout_ms, self._returned)
        finally:
            self._polling = False
        self._returned.clear()
        return found

    def _pull(self) -> StreamMessage[Body] | None:
        """The next message of an iteration, None where more must be read first. The one before it is handled."""
        while self._ahead:
            message = self._ahead.popleft()
            home = home_of(message)
            partition = self._port.partitions.get((home.topic, home.number))
            if partition is None or partition.home is not home:
                continue  # it is another's, or was meanwhile
            if self._out is not None:
                self._out.handled = self._out.given
            self._out = partition
            partition.given = message.offset + 1
            return message
        return None

    def _give_back(self) -> None:
        """What was read by an iteration and not handed out is to be read again."""
        if self._ahead:
            self._returned.update((each.topic, each.partition) for each in self._ahead)
            self._ahead.clear()

    def _chosen(self, topic: str | None, partition: int | None) -> list[ConsumedPartition]:
        self._port.check_open()
        return chosen_partitions(self._port.partitions, self.topics, topic, partition)

    def _seek(self, where: SeekTarget) -> None:
        self._chosen(where.topic, where.partition)
        self._give_back()
        self._port.seek(where, self._returned)
        self._returned.clear()

    def _behind(self, messages: object) -> dict[TopicPartition, int]:
        """Where each partition goes on behind the last of these messages."""
        offsets: dict[TopicPartition, int] = {}
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"commit takes messages, not {type(messages).__name__}")
        for message in messages:
            if not isinstance(message, StreamMessage):
                raise InvalidRequest(f"{message!r} is no message of a consumer")
            place = message.topic, message.partition
            partition = self._port.partitions.get(place)
            if partition is None or partition.home is not home_of(message):
                raise Fenced(
                    f"{message.id} came when partition {place[1]} of {place[0]} was this consumer's, which it was not "
                    "all the time since: others may have handled it. Nothing was committed; poll, and go on from there"
                )
            offsets[place] = max(message.offset + 1, partition.start, offsets.get(place, 0))
        return offsets

    def _close(self, *, failed: bool) -> None:
        port = self._port
        if port.left or self._leaving:
            return
        elsewhere = self._user is not None and self._user.is_elsewhere()
        self._leaving = True
        try:
            if port.partitions and not port.closed:
                tell(port.request.on_revoked, self.assignment())  # which may still commit
        finally:
            if not failed and not elsewhere:
                for each in port.partitions.values():
                    each.handled = each.given
            port.leave()
