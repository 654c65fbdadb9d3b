"""A consumer for threads: a member of a group in stream mode, which shares the partitions of topics out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, Self

from holdfast.api.contents import Body
from holdfast.api.drafts import Seconds
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.streams.positions import PartitionLag
from holdfast.broker.waiters import ThreadWaiter
from holdfast.embedded.consuming import Consuming
from holdfast.embedded.feeds import StreamMessage
from holdfast.errors import Closed
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability


class Consumer(Consuming[Body], Generic[Body]):
    """Reads the partitions that its group gives it. For one thread at a time: give each a consumer of its own.

    What `poll` answered counts as handled with the next `poll`; in a loop over the consumer, with the next message.
    """

    _user: threading.Thread | None = None  # who polled last

    @classmethod
    def open(cls, engine: BrokerEngine, topics: str | Iterable[str], group: str, **options: Any) -> Self:
        """Join the group, which is made where there is none."""
        consumer = cls._open(engine, topics, group, **options)
        consumer._follow()
        return consumer

    def poll(self, timeout: Seconds | None = None, max_records: int | None = None) -> list[StreamMessage[Body]]:
        """What is there, up to `max_records`, from all our partitions; waits for at least one, [] after the time."""
        count, until_ns = self._begin_poll(max_records, timeout)
        self._user = threading.current_thread()
        found = self._next(count, until_ns)
        self._hand_out()
        passed = self._passed()
        if passed:
            self._keep_passed(passed)
        return found

    def __iter__(self) -> Iterator[StreamMessage[Body]]:
        """Every message as it comes, until the consumer is closed."""
        while True:
            try:
                if self._must_commit:
                    self._auto_commit(self._feeds)
                message = self._pull()
                if message is None:
                    count, until_ns = self._begin_poll(None, None)
                    self._user = threading.current_thread()
                    self._ahead.extend(self._next(count, until_ns))
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
        appended = self._write(self._chosen_offsets(messages, offsets), durability)
        if appended is not None:
            self._group.offsets.wait(appended)

    def committed(self, topic: str, partition: int) -> int | None:
        """The offset at which the group goes on after a restart, None before it began there."""
        return self._committed(topic, partition)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at the offset."""
        self._seek(topic, partition, offset=offset)

    def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the oldest messages kept: of one partition, of a topic, or of all that are ours."""
        self._seek(topic, partition, to="start")

    def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with what comes from now on: of one partition, of a topic, or of all that are ours."""
        self._seek(topic, partition, to="end")

    def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the first message of this time or later."""
        self._seek(topic, partition, time=time)

    def lag(self) -> list[PartitionLag]:
        """How far behind we are in each partition that is ours, in messages and seconds."""
        return self._lag()

    def close(self) -> None:
        """Commit (with auto_commit), leave the group. A static member keeps its place until its session ends.

        Called by another thread than the one that polls, it does not commit what that one has in hand.
        """
        self._close(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, *, failed: bool) -> None:
        if self._closed or self._leaving:
            return
        user = self._user
        elsewhere = user is not None and user is not threading.current_thread() and user.is_alive()
        self._leaving = True
        try:
            if self._feeds and self._on_revoked is not None and not self._engine.closed:
                self._on_revoked(self.assignment())  # which may still commit
        finally:
            self._closed = True
            self._line.wake_all()
            self._leave(failed=failed or elsewhere)

    def _follow(self) -> None:
        """Do what the group says: give back, take over, join again."""
        for told, places in self._steps():
            told(places)

    def _next(self, count: int, until_ns: int | None) -> list[StreamMessage[Body]]:
        """Messages that are there, or come in time; [] otherwise."""
        waiter = ThreadWaiter(self._clock)
        self._polling = True
        try:
            while True:
                if self._must_commit:
                    self._auto_commit(self._feeds)
                if self._must_follow:
                    self._follow()
                with self._line.in_line(waiter):
                    found = self._fetch(count)  # what came before we stood in line would wake nobody
                    if found or self._is_over(until_ns):
                        return found
                    if not self._must_follow:
                        waiter.wait(self._wait_s(until_ns))
                self._check_open()
        finally:
            self._polling = False
            self._polled_ms = self._now_ms()
