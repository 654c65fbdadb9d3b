"""Any order of calls, members that come, go and fail, restarts, kills and power cuts: groups do what the model does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import holdfast
from holdfast import Fenced, LeaseLost
from holdfast.delivery.image import check
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.membership.members import check as check_members
from holdfast.settings import BrokerSettings, ConsumerSettings, TopicSettings
from tests.property.broker_model import DELAYED, LEASED, READY, Model, Place, QueueGroupModel, StreamGroupModel

LEASE_MS = 10_000
MAX_POLL_MS = 20_000
QUEUES = ("billing", "audit")
STREAMS = ("readers", "auto")  # by hand, and by themselves
SMALL = TopicSettings(
    segment_bytes=4096,
    frame_bytes=1024,
    index_bytes=512,
    min_free_bytes=0,
    lease_ms=LEASE_MS,
    max_attempts=3,
    retention_ms=None,
    snapshot_events=100,
)
CONSUMERS = ConsumerSettings(session_ms=9_000, heartbeat_ms=3_000, rebalance_ms=15_000, max_poll_ms=MAX_POLL_MS)

picks = st.integers(min_value=0, max_value=2**20)


class Reader:
    """A consumer, and where it stands in each partition that it thinks is its own."""

    def __init__(self, machine: BrokerMachine, group: str, assignor: str, rebalance: str) -> None:
        self.group = group
        self.model: StreamGroupModel = machine.model.streams[group]
        self.machine = machine
        self.at: dict[Place, int] = {}
        self.lost = False  # it was put out of the group, and may not know
        self.polled_ms = machine.model.mono_ms
        self.consumer = machine.broker.consumer(
            ["orders", "mails"],
            group=group,
            auto_commit=group == "auto",
            assignor=assignor,
            rebalance=rebalance,
            on_assigned=self.assigned,
            on_revoked=self.revoked,
        )

    @property
    def evicted(self) -> bool:
        return self.consumer.member_id not in self.consumer._port.stream_group.members.members

    def assigned(self, places: list[Place]) -> None:
        for place in places:
            committed = self.machine.committed(self.group, place)
            if self.group == "auto":  # when it commits is its own affair: never what was not handed out, never back
                furthest = max((offset + 1 for at, offset in self.model.delivered if at == place), default=0)
                skipped = list(self.machine.model.visible(place, furthest, self.group))
                assert self.model.committed.get(place, 0) <= committed
                assert not skipped or committed <= skipped[0], "more was committed than was handed out"
                self.model.committed[place] = committed
            assert committed == self.model.committed.get(place, 0), f"{self.group} goes on elsewhere in {place}"
            self.at[place] = committed

    def revoked(self, places: list[Place]) -> None:
        for place in places:
            at = self.at.pop(place)
            if self.group == "readers" and not self.lost and at != self.model.committed.get(place, 0):
                self.machine.may_come_again(self.model, [place])  # what it did not commit

    def poll(self, most: int) -> int:
        """Get messages: in each partition exactly the next ones."""
        self.polled_ms = self.machine.model.mono_ms
        messages = self.consumer.poll(0, max_records=most)
        self.lost = False
        assert sorted(self.at) == self.consumer.assignment()
        for message in messages:
            place, model = (message.topic, message.partition), self.machine.model
            expected = next(model.visible(place, self.at[place], self.group))
            assert message.offset == expected, f"{self.group} got {message.offset} of {place}, not {expected}"
            assert message.raw == model.logs[place][expected].body
            self.model.delivered[place, expected] += 1
            assert self.model.delivered[place, expected] == 1, f"{self.group} got {expected} of {place} once more"
            self.at[place] = expected + 1
        if not messages:
            left = {p: at for p, at in self.at.items() if any(self.machine.model.visible(p, at, self.group))}
            assert not left, f"{left} were not served"
        return len(messages)

    def commit(self) -> None:
        """A commit counts, or, of one who was put out of the group, is refused and changes nothing."""
        before = {place: self.machine.committed(self.group, place) for place in self.at}
        positions = {place: self.consumer.position(*place) for place in self.at}
        if self.evicted and any(positions[place] != before[place] for place in self.at):
            with pytest.raises(Fenced):
                self.consumer.commit(offsets=positions)
            assert {place: self.machine.committed(self.group, place) for place in self.at} == before
        elif not self.evicted:
            self.consumer.commit()
            for place, position in positions.items():
                skipped = list(self.machine.model.visible(place, self.at[place], self.group))
                assert not skipped or position <= skipped[0]
                self.model.committed[place] = position

    def close(self) -> None:
        evicted = self.evicted
        self.consumer.close()
        if self.group == "auto" and not evicted:
            for place in self.machine.model.logs:
                self.model.committed[place] = max(
                    self.model.committed.get(place, 0), self.machine.committed(self.group, place)
                )


class BrokerMachine(RuleBasedStateMachine):
    """The public face of a broker on a simulated disk, beside the model."""

    @initialize(
        durability=st.sampled_from(["os", "fsync"]),
        maps=st.booleans(),
        latest=st.booleans(),
        assignor=st.sampled_from(["sticky", "range", "round_robin"]),
        rebalance=st.sampled_from(["cooperative", "eager"]),
    )
    def begin(self, durability: str, maps: bool, latest: bool, assignor: str, rebalance: str) -> None:
        self.durability, self.assignor, self.rebalance = durability, assignor, rebalance
        self.disk = SimulatedDisk(maps=maps)
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.hands: list[tuple[QueueGroupModel, Place, Any]] = []
        self.readers: list[Reader] = []
        self.sent = 0
        self.model = Model(self.clock, SMALL)
        self.model.streams = {name: StreamGroupModel(name) for name in STREAMS}
        self.open()
        for topic, partitions in (("orders", 2), ("mails", 1)):
            self.broker.create_topic(topic, partitions=partitions)
            for number in range(partitions):
                self.model.add_partition((topic, number))
        self.latest = latest

    def open(self) -> None:
        self.hands.clear()
        self.readers.clear()
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        base = BrokerSettings(topic=SMALL, consumer=CONSUMERS, open_partitions=2)
        self.broker = holdfast.open_broker("/data", world=world, durability=self.durability, settings=base)

    def committed(self, group: str, place: Place) -> int:
        with self.broker._port.engine.using(place[0]) as topic:
            return self.broker._port.engine.streams.group(group).committed(topic, place[1]) or 0

    def may_come_again(self, group: StreamGroupModel, places: Iterable[Place]) -> None:
        """Somebody who read there has failed: what was handed out and not committed comes once more."""
        for place, offset in list(group.delivered):
            if place in places and offset >= self.committed(group.name, place):
                del group.delivered[place, offset]

    # Topics

    @rule(count=st.integers(1, 4), topic=st.sampled_from(["orders", "orders", "mails"]), pick=picks)
    def publish(self, count: int, topic: str, pick: int) -> None:
        partitions = sum(place[0] == topic for place in self.model.logs)
        bodies = [b"%d " % (self.sent + i) + bytes([0, 0, 300][pick % 3]) for i in range(count)]
        self.sent += count
        number = pick % (partitions + 1)
        partition = number if number < partitions else None
        for stored, body in zip(self.broker.publish_many(topic, bodies, partition=partition), bodies, strict=True):
            place = topic, stored.partition
            assert stored.offset == self.model.append(place, body)

    @rule()
    def add_partition(self) -> None:
        number = sum(place[0] == "orders" for place in self.model.logs)
        if number < 4:
            self.broker.add_partitions("orders", 1)
            self.model.add_partition(("orders", number))

    @rule(attempts=st.sampled_from([2, 3, 5]))
    def alter_topic(self, attempts: int) -> None:
        self.broker.alter_topic("orders", max_attempts=attempts)
        self.model.policy = TopicSettings(max_attempts=attempts)

    # Queue mode

    @rule(pick=picks)
    def make_group(self, pick: int) -> None:
        name = QUEUES[pick % 2]
        if name not in self.model.queues:
            latest, attempts = self.latest and pick % 3 == 0, 2 if pick % 5 == 0 else None
            options = {} if attempts is None else {"max_attempts": attempts}
            self.broker.group("orders", name, start="latest" if latest else "earliest", **options)
            self.model.add_group(name, "orders", latest=latest, max_attempts=attempts)

    @precondition(lambda self: self.model.queues)
    @rule(pick=picks)
    def delete_group(self, pick: int) -> None:
        if pick % 4 == 0:
            name = sorted(self.model.queues)[pick % len(self.model.queues)]
            self.broker.delete_group(name, "orders")
            gone = self.model.queues.pop(name)
            self.hands = [hand for hand in self.hands if hand[0] is not gone]

    def queue(self, pick: int) -> QueueGroupModel:
        return self.model.queues[sorted(self.model.queues)[pick % len(self.model.queues)]]

    @precondition(lambda self: self.model.queues)
    @rule(pick=picks, count=st.integers(1, 6))
    def receive(self, pick: int, count: int) -> None:
        """From each partition the oldest that are ready; as many as asked for, if there are so many."""
        group = self.queue(pick)
        messages = self.broker.group("orders", group.name).receive_many(count, timeout=0)
        assert len(messages) == min(count, len(group.in_phase(READY)))
        got: dict[int, list[int]] = {}
        for message in messages:
            got.setdefault(message.partition, []).append(message.offset)
        for number, offsets in got.items():
            ready = sorted(offset for at, offset in group.in_phase(READY) if at == number)
            assert offsets == ready[: len(offsets)], f"{group.name} got {offsets} of partition {number}, not {ready}"
        for message in messages:
            place = "orders", message.partition
            slot = group.slots[place][message.offset]
            assert message.raw == self.model.logs[place][message.offset].body
            assert message.attempt == slot.attempts + 1
            assert message.fence > group.fences.get(place[1], 0), "a fencing number came again"
            slot.phase, slot.fence, slot.until_ms = LEASED, message.fence, self.model.mono_ms + LEASE_MS
            self.hands.append((group, place, message))
        group.fences |= {message.partition: message.fence for message in messages}

    def settle(
        self, pick: int, call: Callable[[Any], Any], effect: Callable[[QueueGroupModel, Place, int], Any]
    ) -> None:
        """What is held is settled; a stale receipt changes nothing."""
        group, place, message = self.hands[pick % len(self.hands)]
        slot = group.slots[place][message.offset]
        if slot.phase is LEASED and slot.fence == message.fence:
            call(message)
            effect(group, place, message.offset)
        else:
            with pytest.raises(LeaseLost):
                call(message)

    @precondition(lambda self: self.hands)
    @rule(pick=picks)
    def ack(self, pick: int) -> None:
        self.settle(pick, lambda message: message.ack(), self.model.end)

    @precondition(lambda self: self.hands)
    @rule(pick=picks, delay=st.sampled_from([None, 0, 3]))
    def nack(self, pick: int, delay: int | None) -> None:
        delay_ms = None if delay is None else delay * 1000
        self.settle(
            pick,
            lambda message: message.nack(delay=delay, error="no"),
            lambda group, place, offset: self.model.give_back(group, place, offset, delay_ms, counted=True),
        )

    @precondition(lambda self: self.hands)
    @rule(pick=picks)
    def reject(self, pick: int) -> None:
        self.settle(pick, lambda message: message.reject("never"), self.model.bury)

    @precondition(lambda self: self.model.queues)
    @rule(pick=picks)
    def redrive(self, pick: int) -> None:
        """Dead letters come back, and to their own group only."""
        group = self.queue(pick)
        dead = self.broker.group("orders", group.name).dead
        chosen = dead.list()[: 1 + pick % 3]
        assert dead.redrive([letter.id for letter in chosen]).done == len(chosen)
        for letter in sorted(chosen, key=lambda letter: (letter.original_offset, letter.offset)):
            group.letters.remove((letter.partition, letter.original_offset))
            self.model.append(("orders", letter.partition), letter.raw, group.name)

    # Stream mode

    @precondition(lambda self: len(self.readers) < 5)
    @rule(pick=picks)
    def join(self, pick: int) -> None:
        self.readers.append(Reader(self, STREAMS[pick % 2], self.assignor, self.rebalance))

    @precondition(lambda self: self.readers)
    @rule(pick=picks, most=st.integers(1, 8))
    def poll(self, pick: int, most: int) -> None:
        self.readers[pick % len(self.readers)].poll(most)

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        reader = self.readers[pick % len(self.readers)]
        if reader.group == "readers":
            reader.commit()

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def commit_late(self, pick: int) -> None:
        """One does nothing for long while the others work: it is put out, and its commit is refused."""
        late = self.readers[pick % len(self.readers)]
        for _ in range(10):
            self.pass_time(3_000)
            for reader in self.readers:
                if reader is not late:
                    reader.poll(4)
        assert late.evicted
        if late.group == "readers":
            late.commit()

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        self.readers.pop(pick % len(self.readers)).close()

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        """A consumer is dropped without a word; the group notices."""
        reader = self.readers.pop(pick % len(self.readers))
        if not reader.evicted:
            self.may_come_again(reader.model, reader.at)
        del reader.consumer  # its callbacks are the reader's

    @rule()
    def reset(self) -> None:
        """Back to the beginning, where nobody reads."""
        if "readers" in self.broker._port.engine.streams.names() and not any(
            r.group == "readers" for r in self.readers
        ):
            group = self.broker._port.engine.streams.group("readers")
            if not group.members.members:
                for moved in self.broker.reset_offsets("readers", "orders", to="earliest"):
                    assert moved.before in (
                        None,
                        self.model.streams["readers"].committed.get(("orders", moved.partition), 0),
                    )
                    self.model.streams["readers"].committed["orders", moved.partition] = 0
                self.may_come_again(self.model.streams["readers"], [p for p in self.model.logs if p[0] == "orders"])

    @rule()
    def drain(self) -> None:
        """All members at work in turn: everything has come."""
        for name, group in self.model.streams.items():
            mine = [reader for reader in self.readers if reader.group == name]
            if not mine:
                continue
            for _ in range(3 + len(mine)):
                self.pass_time(20_000)  # whoever has failed is put out by now
                while sum([reader.poll(10) for reader in mine]):
                    pass
            for place, entries in self.model.logs.items():
                for offset, entry in enumerate(entries):
                    count = group.delivered[place, offset]
                    wanted = entry.only_for is None
                    assert count == wanted, f"{name} got {offset} of {place} {count} times"

    # Time and restarts

    @rule(ms=st.sampled_from([1, 1_100, 6_000, 11_000, 31_000]))
    def wait(self, ms: int) -> None:
        self.pass_time(ms)

    def pass_time(self, ms: int) -> None:
        """In steps shorter than a session, as a keeper does: whoever polls in time is heard of."""
        while ms > 0:
            self.clock.advance(ms=min(ms, 3_000))
            ms -= 3_000
            before = [reader for reader in self.readers if not reader.evicted]
            self.broker._port.engine.tick()
            for name in ("orders", "mails"):
                with self.broker._port.engine.using(name) as topic:
                    topic.tick()
                    assert not topic.logged_error, f"upkeep failed: {topic.logged_error}"
            self.model.tick()
            for reader in before:
                if reader.evicted:
                    reader.lost = True
                    self.may_come_again(reader.model, reader.at)
                    idle_ms = self.model.mono_ms - reader.polled_ms
                    assert idle_ms >= min(MAX_POLL_MS, CONSUMERS.rebalance_ms), "put out, though it was at work"

    @rule()
    def reopen(self) -> None:
        self.broker.close()
        self.restart(killed=False)

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.restart(killed=True)

    @rule(seed=picks)
    def power_cut(self, seed: int) -> None:
        """After a sync a power cut is no more than a kill."""
        for name in self.broker.topics():
            self.broker.describe_topic(name)  # opens it: what an owner before wrote is synced by that
        self.broker.sync()
        self.disk = self.disk.cut(random.Random(seed))
        self.ids.reboot()
        self.clock = self.model.clock = ManualClock(self.clock.now_ns())
        self.restart(killed=True)

    def restart(self, *, killed: bool) -> None:
        working = [(reader.model, list(reader.at)) for reader in self.readers if not reader.evicted]
        self.model.restart(killed=killed)
        self.open()
        for group, places in working:
            self.may_come_again(group, places)

    # What must hold after every step

    @invariant()
    def each_group_in_queue_mode_is_what_the_model_says(self) -> None:
        assert self.broker.describe_topic("orders").groups == sorted(self.model.queues)
        for name, group in self.model.queues.items():
            face = self.broker.group("orders", name)
            for phase in (READY, LEASED, DELAYED):
                found = {(m.partition, m.offset) for m in face.messages(phase.value)}
                assert found == group.in_phase(phase), f"{name}: {phase.value}"
            letters = sorted((letter.partition, letter.original_offset) for letter in face.dead.list())
            assert letters == sorted(group.letters)
            assert face.stats().dead == len(letters)
            for delivery in face._port.deliveries:
                assert check(delivery.group) == []

    @invariant()
    def no_partition_has_two_owners(self) -> None:
        for name in STREAMS:
            owners = [
                place for reader in self.readers if reader.group == name and not reader.evicted for place in reader.at
            ]
            assert len(owners) == len(set(owners)), f"{name}: {sorted(owners)}"
            if name in self.broker._port.engine.streams.names():
                assert check_members(self.broker._port.engine.streams.group(name).members) == []


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=settings.default.max_examples // 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_long_histories(seed, scale):
    """The same rules, at random and many of them: what Hypothesis, which likes short histories, seldom reaches."""
    rng = Random(seed)
    for _ in range(scale(2, 300)):
        machine = BrokerMachine()
        machine.begin(
            rng.choice(["os", "fsync"]),
            rng.random() < 0.5,
            rng.random() < 0.5,
            rng.choice(["sticky", "range", "round_robin"]),
            rng.choice(["cooperative", "eager"]),
        )
        steps: list[str] = []
        try:
            for _ in range(scale(120, 300)):
                name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
                if possible(machine, name):
                    steps.append(name)
                    getattr(machine, name)(**ARGUMENTS.get(name, lambda rng: {"pick": rng.randrange(999)})(rng))
                machine.each_group_in_queue_mode_is_what_the_model_says()
                machine.no_partition_has_two_owners()
            machine.drain()
        except BaseException as error:
            error.add_note(f"seed {seed}, after {', '.join(steps)}")
            raise


def possible(machine: BrokerMachine, name: str) -> bool:
    if name in ("ack", "nack", "reject"):
        return bool(machine.hands)
    if name in ("poll", "commit", "commit_late", "leave", "fail"):
        return bool(machine.readers)
    if name in ("receive", "redrive", "delete_group"):
        return bool(machine.model.queues)
    return name != "join" or len(machine.readers) < 5


WEIGHTS = {
    "publish": 8, "add_partition": 0.5, "alter_topic": 0.5, "make_group": 2, "delete_group": 1, "receive": 6, "ack": 5,
    "nack": 3, "reject": 3, "redrive": 2, "join": 3, "poll": 10, "commit": 4, "commit_late": 0.7, "leave": 1,
    "fail": 0.6, "reset": 0.5, "drain": 1, "wait": 4, "reopen": 0.7, "kill": 0.7, "power_cut": 0.5,
}  # fmt: skip
ARGUMENTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "publish": lambda rng: {
        "count": rng.randint(1, 4),
        "topic": rng.choice(["orders", "orders", "mails"]),
        "pick": rng.randrange(999),
    },
    "add_partition": lambda rng: {},
    "alter_topic": lambda rng: {"attempts": rng.choice([2, 3, 5])},
    "receive": lambda rng: {"pick": rng.randrange(999), "count": rng.randint(1, 6)},
    "nack": lambda rng: {"pick": rng.randrange(999), "delay": rng.choice([None, 0, 3])},
    "poll": lambda rng: {"pick": rng.randrange(999), "most": rng.randint(1, 8)},
    "reset": lambda rng: {},
    "drain": lambda rng: {},
    "wait": lambda rng: {"ms": rng.choice([1, 1_100, 6_000, 11_000, 31_000])},
    "reopen": lambda rng: {},
    "kill": lambda rng: {},
    "power_cut": lambda rng: {"seed": rng.randrange(999)},
}
