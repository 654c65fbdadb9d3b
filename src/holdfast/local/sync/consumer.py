# Generated from aio/consumer.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A member of a stream group in this process. The event loop never waits for the disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Self

from holdfast.api.consumers import MemberRequest, SeekTarget, StreamMessage
from holdfast.api.sync.ports import tell
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.streams.offsets import PartitionLag
from holdfast.broker.waiters import ThreadWaiter
from holdfast.local.member import StreamMember, member_of
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability


class LocalConsumerPort(StreamMember):
    """A member of a stream group in this process."""

    @classmethod
    def open(cls, engine: BrokerEngine, request: MemberRequest) -> Self:
        """A member that has not joined yet; the group is made where there is none."""
        group, settings = member_of(engine, request)
        return cls(engine, group, request, settings)

    def join(self) -> None:
        self._follow()

    def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition] = ()
    ) -> list[StreamMessage[Any]]:
        self._begin_poll()
        until_ns = None if timeout_ms is None else self._clock.monotonic_ns() + timeout_ms * 1_000_000
        found = self._next(count, until_ns)
        passed = self._passed()
        if passed:
            self._keep_passed(passed)
        return found

    def attend(self) -> bool:
        if self._must_commit:
            self._auto_commit(self.partitions)
        return self._must_follow

    def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> None:
        appended = self._write(offsets, durability)
        if appended is not None:
            self.stream_group.offsets.wait(appended)

    def committed(self, topic: str, partition: int) -> int | None:
        return self._committed(topic, partition)

    def seek(self, where: SeekTarget, returned: Collection[TopicPartition] = ()) -> None:
        self._move(self._positions(where))

    def lag(self) -> list[PartitionLag]:
        return self._lag()

    def leave(self, *, for_good: bool = False) -> None:
        """Commit what is handled and leave; a static member keeps its place, unless it goes for good."""
        self.left = True
        self._line.wake_all()
        self._leave(for_good=for_good)

    def _follow(self) -> None:
        """Do what the group says: give back, take over, join again."""
        steps = self._steps()
        while (step := next(steps, None)) is not None:
            tell(*step)

    def _next(self, count: int, until_ns: int | None) -> list[StreamMessage[Any]]:
        """Messages that are there, or come in time; [] otherwise."""
        waiter = ThreadWaiter(self._clock)
        self._polling = True
        try:
            while True:
                if self._must_commit:
                    self._auto_commit(self.partitions)
                if self._must_follow:
                    self._follow()
                with self._line.in_line(waiter):
                    found = self._fetch(count)  # what came before we stood in line would wake nobody
                    if found or self._is_over(until_ns):
                        return found
                    if not self._must_follow:
                        waiter.wait(self._wait_s(until_ns))
                self.check_open()
        finally:
            self._polling = False
            self._polled_ms = self._now_ms()
