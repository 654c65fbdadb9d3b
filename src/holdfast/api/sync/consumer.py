# Generated from aio/consumer.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The consumer: a member of a group in stream mode, whose members divide the partitions of topics among themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self

from holdfast.api import check_port
from holdfast.api.contents import Body, home_of
from holdfast.api.drafts import Seconds, duration_ms, instant_ns
from holdfast.api.sync.ports import ConsumerPort, tell
from holdfast.api.topics import (
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
from holdfast.errors import Closed, Fenced, InvalidRequest
from holdfast.membership import TopicPartition
from holdfast.model import Durability
from holdfast.settings import ConsumerSettings

if TYPE_CHECKING:
    from holdfast.broker.streams import PartitionLag


class Consumer(Generic[Body]):
    """Reads the partitions that its group assigns to it. For one thread at a time: give each thread its own consumer.

    The next `poll` marks what the last one returned as handled; in a loop over the consumer, the next message does.
    With auto_commit, what is handled is committed.

        with broker.consumer("orders", group="statistics") as consumer:
            for message in consumer:
                print(message.partition, message.offset, message.body)
    """

    def __init__(self, port: ConsumerPort) -> None:
        check_port(self, port)
        self._port = port
        self._ahead: deque[StreamMessage[Body]] = deque()  # read by an iteration, not yet returned to the user
        self._returned: set[TopicPartition] = set()  # partitions with messages that were read but will not be returned
        self._out: ConsumedPartition | None = None  # partition of the message that an iteration returned last
        self._user: User | None = None  # the last to poll
        self._polling = self._leaving = False

    @classmethod
    def open(
        cls,
        member: Callable[[MemberRequest], ConsumerPort],
        topics: str | Iterable[str],
        group: str,
        **options: Any,
    ) -> Self:
        """Join the group, which is created if needed."""
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
        """The name under which a static member keeps its partitions; empty if it is not static."""
        return self._port.request.instance_id

    @property
    def settings(self) -> ConsumerSettings:
        """The settings of this consumer."""
        return self._port.settings

    @property
    def closed(self) -> bool:
        """Whether the consumer is closed."""
        return self._port.closed

    @property
    def member_id(self) -> str | None:
        """The id of this consumer in the group. It changes whenever the consumer joins again."""
        return self._port.member_id

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._port.partitions)} partitions"
        return f"<{type(self).__name__} of {self.group} on {', '.join(self.topics)} ({state})>"

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are assigned to this consumer now.

        Returns:
            Pairs of topic and partition, in order.
        """
        return sorted(self._port.partitions)

    def position(self, topic: str, partition: int) -> int:
        """Return the offset of the next message from a partition.

        Args:
            topic: The topic.
            partition: The partition.

        Returns:
            The offset.

        Raises:
            InvalidRequest: The partition is not assigned to this consumer.
        """
        self._port.check_open()
        return owned_partition(self._port.partitions, topic, partition).given

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Stop reading until `resume`. The partitions stay assigned.

        Args:
            topic: The topic; all of them by default.
            partition: The partition; all of them by default.

        Raises:
            InvalidRequest: The partition is not assigned to this consumer.
        """
        for each in self._chosen(topic, partition):
            each.paused = True
        self._give_back()

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """Read paused partitions again.

        Args:
            topic: The topic; all of them by default.
            partition: The partition; all of them by default.

        Raises:
            InvalidRequest: The partition is not assigned to this consumer.
        """
        for each in self._chosen(topic, partition):
            each.paused = False

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions.

        Returns:
            Pairs of topic and partition, in order.
        """
        return sorted(place for place, each in self._port.partitions.items() if each.paused)

    def poll(self, timeout: Seconds | None = None, max_records: int | None = None) -> list[StreamMessage[Body]]:
        """Read messages from all assigned partitions; those returned before are now handled. Waits for at least one.

        Args:
            timeout: How long to wait, in seconds or as a timedelta; without a limit by default.
            max_records: The maximum number; by default the consumer's setting.

        Returns:
            The messages, or [] if none arrived within `timeout`.

        Raises:
            Closed: The consumer is closed.
            InvalidRequest: Another call polls this consumer at the same time.
        """
        found = self._poll(max_records, timeout)
        self._port.hand_out(found)  # last: a caller that is cancelled before this line got nothing
        return found

    def __iter__(self) -> Iterator[StreamMessage[Body]]:
        """Iterate over the messages as they arrive, until the consumer is closed."""
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
        """Commit the group's position: everything returned so far, unless you say otherwise.

        Args:
            messages: Commit only these messages and all before them.
            offsets: Commit these: (topic, partition) and the offset at which the group is to continue.
            durability: "fsync" returns when the commit is on disk; by default it is within a second.

        Raises:
            Fenced: A partition is no longer assigned to this consumer. Nothing is committed, and its new owner
                continues from the previous commit.
            InvalidRequest: Both `messages` and `offsets` are given.
        """
        self._port.check_open()
        if messages is not None and offsets is not None:
            raise InvalidRequest("messages and offsets cannot both be given: pass one of them")
        if messages is not None:
            offsets = self._behind(messages)
        elif offsets is None:
            given = {place: (each, max(each.given, each.start)) for place, each in self._port.partitions.items()}
            offsets = {place: offset for place, (each, offset) in given.items() if offset != each.kept}
        self._port.commit(check_offsets(offsets), durability)

    def committed(self, topic: str, partition: int) -> int | None:
        """Return where the group continues after a restart.

        Args:
            topic: The topic.
            partition: The partition.

        Returns:
            The offset, or None before the group's first commit.

        Raises:
            UnknownTopic: There is no such topic or partition.
        """
        return self._port.committed(topic, partition)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue one partition at this offset.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The offset of the next message.

        Raises:
            OffsetOutOfRange: The offset is not stored.
            InvalidRequest: The partition is not assigned to this consumer.
        """
        if type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is not an offset; give a whole number")
        self._port.check_open()
        owned_partition(self._port.partitions, topic, partition)
        self._seek(SeekTarget(topic=topic, partition=partition, offset=offset))

    def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Continue with the oldest stored messages.

        Args:
            topic: The topic; all of them by default.
            partition: The partition; all that are assigned by default.

        Raises:
            InvalidRequest: The partition is not assigned to this consumer.
        """
        self._seek(SeekTarget(topic=topic, partition=partition, to="start"))

    def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Skip to messages published from now on.

        Args:
            topic: The topic; all of them by default.
            partition: The partition; all that are assigned by default.

        Raises:
            InvalidRequest: The partition is not assigned to this consumer.
        """
        self._seek(SeekTarget(topic=topic, partition=partition, to="end"))

    def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Continue with the first message published at this time or later.

        Args:
            time: An aware datetime.
            topic: The topic; all of them by default.
            partition: The partition; all that are assigned by default.

        Raises:
            InvalidRequest: The time has no time zone, or the partition is not assigned to this consumer.
        """
        instant_ns(time, "time")
        self._seek(SeekTarget(topic=topic, partition=partition, time=time))

    def lag(self) -> list[PartitionLag]:
        """Say how far this consumer is behind.

        Returns:
            For each assigned partition, the distance to its end in messages and in seconds.

        Raises:
            Closed: The consumer is closed.
        """
        self._port.check_open()
        return self._port.lag()

    def close(self) -> None:
        """Commit (with auto_commit) and leave the group. A static member keeps its partitions until its session ends.

        If a thread other than the polling one calls this, messages that the polling thread is still working on are not
        committed.
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
            raise InvalidRequest("another call is already polling this consumer: use one consumer per thread or task")
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
        """Return the next message of an iteration and mark the previous one handled; None if more must be read."""
        while self._ahead:
            message = self._ahead.popleft()
            home = home_of(message)
            partition = self._port.partitions.get((home.topic, home.number))
            if partition is None or partition.home is not home:
                continue  # another consumer has the partition, or had it in between
            if self._out is not None:
                self._out.handled = self._out.given
            self._out = partition
            partition.given = message.offset + 1
            return message
        return None

    def _give_back(self) -> None:
        """Arrange for messages that an iteration read but did not return to be read again."""
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
        """Return, for each partition, the offset after the last of these messages."""
        offsets: dict[TopicPartition, int] = {}
        if not isinstance(messages, Iterable):
            raise InvalidRequest(
                f"commit takes a list of messages, not {type(messages).__name__}: pass what `poll` returned"
            )
        for message in messages:
            if not isinstance(message, StreamMessage):
                raise InvalidRequest(f"{message!r} is not a message of a consumer: pass messages that `poll` returned")
            place = message.topic, message.partition
            partition = self._port.partitions.get(place)
            if partition is None or partition.home is not home_of(message):
                raise Fenced(
                    f"{message.id} was received before this consumer lost partition {place[1]} of {place[0]}: another "
                    "consumer may have handled it since. Nothing was committed: call `poll` and continue "
                    "from there"
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
