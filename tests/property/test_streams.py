"""Publish, poll, commit, rebalance, hang, grow, kill and cut the power in any order: a stream skips nothing.

While nobody fails each message comes once for a group; after a failure some come again, and none is left out.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.api.sync.consumer import Consumer
from holdfast.membership.members import check
from tests.unit.streams import Streams

MOST_CONSUMERS = 3
MOST_PARTITIONS = 4

picks = st.integers(0, MOST_CONSUMERS - 1)


class StreamMachine(RuleBasedStateMachine):
    @initialize(
        partitions=st.integers(1, 3),
        assignor=st.sampled_from(["range", "round_robin", "sticky"]),
        rebalance=st.sampled_from(["cooperative", "eager"]),
    )
    def begin(self, partitions, assignor, rebalance):
        self.streams = Streams(partitions)
        self.options = {"assignor": assignor, "rebalance": rebalance}
        self.published = [0] * partitions
        self.delivered: Counter[tuple[int, int]] = Counter()
        self.consumers: list[Consumer[Any]] = []
        self.read: dict[tuple[int, int], int] = {}  # by consumer and partition: the next offset that it must get
        self.failed = False
        self.made = 0

    @rule(partition=st.integers(0, MOST_PARTITIONS - 1), count=st.integers(1, 5))
    def publish(self, partition, count):
        partition %= len(self.published)
        first = self.published[partition]
        self.streams.put(*[f"{partition}:{first + i}" for i in range(count)], partition=partition, durability="fsync")
        self.published[partition] += count

    @precondition(lambda self: len(self.consumers) < MOST_CONSUMERS)
    @rule(auto=st.booleans(), static=st.booleans())
    def join(self, auto, static):
        self.made += 1
        number = self.made

        def forget(places: list[tuple[str, int]]) -> None:
            for _, partition in places:
                self.read.pop((number, partition), None)

        consumer = self.streams.consumer(
            auto_commit=auto, on_revoked=forget, instance_id=f"i{number}" if static else None, **self.options
        )
        consumer.number = number  # type: ignore[attr-defined]
        self.consumers.append(consumer)
        self.failed |= not auto

    @precondition(lambda self: self.consumers)
    @rule(pick=picks, most=st.integers(1, 4))
    def poll(self, pick, most):
        self._poll(self.consumers[pick % len(self.consumers)], most)

    def _poll(self, consumer: Consumer[Any], most: int) -> int:
        messages = consumer.poll(0, max_records=most)
        for message in messages:
            assert message.raw.decode() == f"{message.partition}:{message.offset}"
            place = consumer.number, message.partition  # type: ignore[attr-defined]
            assert message.offset == self.read.get(place, message.offset), "out of order"
            self.read[place] = message.offset + 1
            self.delivered[message.partition, message.offset] += 1
        return len(messages)

    @precondition(lambda self: self.consumers)
    @rule(pick=picks)
    def commit(self, pick):
        consumer = self.consumers[pick % len(self.consumers)]
        if consumer.member_id in self.streams.group().members.members and not consumer._port._must_follow:
            consumer.commit()

    @precondition(lambda self: self.consumers)
    @rule(pick=picks)
    def close(self, pick):
        consumer = self.consumers.pop(pick % len(self.consumers))
        consumer.close()

    @precondition(lambda self: self.consumers)
    @rule(pick=picks)
    def hang(self, pick):
        """A consumer neither polls nor shows life any more, until its session is over."""
        consumer = self.consumers.pop(pick % len(self.consumers))
        consumer._port.disown()
        self.failed = True
        for _ in range(11):
            self.streams.after(seconds=3)
            for other in self.consumers:
                self._poll(other, 1)
        assert consumer.member_id not in self.streams.group().members.members

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds):
        self.streams.after(seconds=seconds)

    @precondition(lambda self: len(self.published) < MOST_PARTITIONS)
    @rule()
    def grow(self):
        self.published.append(0)
        self.streams.engine.alter_topic("orders", {"partitions": len(self.published)})

    @rule(cut=st.none() | st.integers(0, 2**20))
    def crash(self, cut):
        """kill -9, or the power goes."""
        if cut is not None:
            self.streams.disk = self.streams.disk.cut(Random(cut))
        self.streams.kill()
        self._forget_all()

    def _forget_all(self) -> None:
        for consumer in self.consumers:
            consumer._port.disown()
        self.consumers, self.read = [], {}
        self.failed = True

    @invariant()
    def nothing_below_a_commit_was_left_out(self):
        if not hasattr(self, "streams") or "analytics" not in self.streams.engine.streams.names():
            return
        group = self.streams.group()
        assert check(group.members) == []
        for entry in group.offsets.entries():
            assert all(self.delivered[entry.partition, offset] for offset in range(entry.offset))
        if not self.failed:
            assert all(count == 1 for count in self.delivered.values())

    def teardown(self):
        """All comes in the end, whoever is left or comes then."""
        if not hasattr(self, "streams"):
            return
        if not self.consumers:
            self.streams.after(seconds=31)  # static members may come back until then
            self.join(True, False)
        self.streams.after(seconds=3)
        quiet = 0
        while quiet < 12:
            got = sum(self._poll(consumer, 100) for consumer in self.consumers)
            quiet = 0 if got else quiet + 1
            for consumer in self.consumers:
                consumer.commit()
            self.streams.after(seconds=3)
        assert set(self.delivered) == {(p, o) for p, count in enumerate(self.published) for o in range(count)}
        if not self.failed:
            assert all(count == 1 for count in self.delivered.values())


TestStreams = StreamMachine.TestCase
TestStreams.settings = settings(max_examples=settings.default.max_examples // 3)
