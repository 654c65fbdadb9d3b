"""Random histories of a broker on a simulated disk, to be cut anywhere: topics and groups come and go under load."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from holdfast import Broker, LeaseLost, NewMessage, UnknownTopic
from holdfast.env import ManualClock, SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from tests.crash.broker_promises import (
    MAX_ATTEMPTS,
    STREAM,
    GroupPromises,
    Promises,
    TopicPromises,
    check_promises,
    records_of,
    small_broker,
    view_of,
)
from tests.crash.queue_promises import number_of

TOPICS = ("orders", "mails", "clicks")
GROUPS = ("billing", "audit")

# How often each thing is done.
WEIGHTS: dict[str, float] = {
    "create_topic": 3, "delete_topic": 0.7, "add_partitions": 0.7, "alter_topic": 1, "make_group": 3,
    "delete_group": 0.5, "publish": 6, "publish_many": 4, "receive": 7, "ack": 4, "nack": 2, "reject": 2, "redrive": 1,
    "reset_queue": 0.3, "join": 2, "poll": 4, "commit": 3, "leave": 1, "reset_stream": 0.5, "delete_stream": 0.3,
    "compact": 0.4, "sync": 1, "wait": 3, "reopen": 0.6, "kill": 0.6, "power_cut": 0.4,
}  # fmt: skip


class BrokerHistory:
    """One random life of a broker; `on_cut_point` is called after every change of the disk."""

    def __init__(
        self, seed: int, *, durability: str, maps: bool = True, on_cut_point: Any = None, disk: Any = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.durability = durability
        self.disk = disk or SimulatedDisk(maps=maps)
        self.ids = SeededIds(seed)
        self.clock = ManualClock()
        self.clock.advance(seconds=5_000)
        self.promises = Promises()
        self.held: list[tuple[TopicPromises, GroupPromises, Any]] = []
        self.consumer: Any = None
        self._on_cut_point = on_cut_point
        self.steps: list[str] = []
        self.verdict: Exception | None = None
        self._hook()
        self.broker = self.open()

    def open(self) -> Broker:
        return small_broker(self.disk, self.clock, self.ids, durability=self.durability)

    def run(self, steps: int, *, without: str | None = None) -> None:
        weights = {name: weight for name, weight in WEIGHTS.items() if name != without}
        self.step("create_topic")
        for _ in range(steps):
            self.step(self.rng.choices(list(weights), list(weights.values()))[0])
        self.step("close")

    def step(self, name: str) -> None:
        self.steps.append(name)
        self.do(getattr(self, name))

    def do(self, call: Callable[[], object]) -> None:
        """One thing to do. What a look behind a cut has found is raised here, not where the broker would hide it."""
        try:
            call()
        finally:
            if self.verdict is not None:
                raise self.verdict

    # Topics

    def there(self) -> list[str]:
        return [name for name, topic in self.promises.topics.items() if topic.there == {True}]

    def some_topic(self) -> tuple[str, TopicPromises] | tuple[None, None]:
        names = self.there()
        if not names:
            return None, None
        name = self.rng.choice(names)
        return name, self.promises.topics[name]

    def create_topic(self, name: str | None = None, partitions: int | None = None) -> None:
        missing = [
            each for each in TOPICS if each not in self.promises.topics or self.promises.topics[each].there == {False}
        ]
        if not missing or name not in (None, *missing):
            return
        name = name or self.rng.choice(missing)
        partitions, attempts = partitions or self.rng.randint(1, 3), self.rng.choice([MAX_ATTEMPTS, 4])
        promises = self.promises.topics[name] = TopicPromises({True, False}, {partitions}, {attempts})
        promises.id = self.broker.create_topic(name, partitions=partitions, max_attempts=attempts).id
        promises.there = {True}

    def delete_topic(self) -> None:
        name, promises = self.some_topic()
        if promises is None:
            return
        promises.there = {True, False}
        self.held = [each for each in self.held if each[0] is not promises]
        self.broker.delete_topic(name)
        promises.there = {False}

    def add_partitions(self) -> None:
        name, promises = self.some_topic()
        if promises is None or max(promises.partitions) >= 4:
            return
        count = len(self.broker.describe_topic(str(name)).partitions)
        promises.partitions = promises.partitions | {count, count + 1}
        assert len(self.broker.add_partitions(name, 1).partitions) == count + 1
        promises.partitions = {count + 1}

    def alter_topic(self) -> None:
        name, promises = self.some_topic()
        if promises is None:
            return
        wanted = self.rng.choice([2, 4, 5, 6])
        promises.max_attempts = promises.max_attempts | {wanted}
        self.broker.alter_topic(name, max_attempts=wanted)
        promises.max_attempts = {wanted}

    # Publishing

    def publish(self) -> None:
        name, promises = self.some_topic()
        if promises is not None:
            message = self.new_message()
            self._publish(name, promises, [message], self.rng.choice([None, 0]))

    def publish_many(self) -> None:
        """To several partitions at once."""
        name, promises = self.some_topic()
        if promises is not None:
            self._publish(name, promises, [self.new_message() for _ in range(self.rng.randint(2, 6))], None)

    def new_message(self) -> NewMessage:
        n = self.promises.next
        self.promises.next += 1
        key = f"k{self.rng.randint(0, 9)}" if self.rng.random() < 0.7 else None
        return NewMessage(body=b"%d " % n + bytes(self.rng.choice([0, 0, 30, 300, 900])), key=key)

    def _publish(self, name: Any, promises: TopicPromises, messages: list[NewMessage], partition: int | None) -> None:
        numbers = {number_of(message.body) for message in messages}
        for group in promises.groups.values():
            group.owed |= numbers
        if partition is not None:
            promises.batches.append(numbers)
        how = self.rng.choice([None, None, "fsync", "os"])
        stored = self.broker.publish_many(name, messages, partition=partition, durability=how)
        promises.published |= numbers
        if all(each.durability == "fsync" for each in stored):
            promises.durable |= numbers

    # Groups in queue mode

    def make_group(self, start: str | None = None, attempts: int | None = None) -> None:
        name, promises = self.some_topic()
        missing = [] if promises is None else [each for each in GROUPS if each not in promises.groups]
        if promises is None or not missing:
            return
        group, start = self.rng.choice(missing), start or self.rng.choice(["earliest", "latest"])
        attempts = attempts or self.rng.choice([None, None, 2])
        made = promises.groups[group] = GroupPromises({True, False}, {attempts})
        if start == "earliest":
            made.owed = {
                number_of(record.value) for records in records_of(self.broker, str(name)) for record in records
            }
        self.broker.group(str(name), group, start=start, **({} if attempts is None else {"max_attempts": attempts}))
        made.there = {True}

    def some_group(self) -> tuple[str, TopicPromises, str, GroupPromises] | None:
        found = [
            (name, self.promises.topics[name], group, promises)
            for name in self.there()
            for group, promises in self.promises.topics[name].groups.items()
        ]
        return self.rng.choice(found) if found else None

    def delete_group(self) -> None:
        if chosen := self.some_group():
            name, topic, group, promises = chosen
            promises.there = {True, False}
            self.held = [each for each in self.held if each[1] is not promises]
            self.broker.delete_group(group, name)
            del topic.groups[group]

    def receive(self, count: int | None = None) -> None:
        if chosen := self.some_group():
            name, topic, group, promises = chosen
            for message in self.broker.group(name, group).receive_many(count or self.rng.randint(1, 4), timeout=0):
                n = number_of(message.raw)
                assert n in promises.owed, f"{n} is not for {group}"
                assert n not in promises.ended or n in promises.replayed, f"{n} was done, and came back"
                self.held.append((topic, promises, message))

    def ack(self) -> None:
        durability = self.rng.choice([None, None, "fsync"])

        def ack(promises: GroupPromises, message: Any) -> None:
            promises.ending.add(number_of(message.raw))
            message.ack(durability=durability)

        settled = self._settle(ack)
        if settled is not None:
            promises, n = settled
            promises.ended.add(n)
            if durability == "fsync" and n not in promises.replayed:
                promises.done.add(n)

    def nack(self) -> None:
        self._settle(lambda _, message: message.nack(delay=self.rng.choice([None, 0, 3]), error="no"))

    def reject(self) -> None:
        settled = self._settle(lambda _, message: message.reject("never"))
        if settled is not None and settled[1] not in settled[0].replayed:
            settled[0].buried.add(settled[1])

    def _settle(self, call: Any) -> tuple[GroupPromises, int] | None:
        if not self.held:
            return None
        _, promises, message = self.held.pop(self.rng.randrange(len(self.held)))
        try:
            call(promises, message)
        except LeaseLost:
            return None
        return promises, number_of(message.raw)

    def redrive(self) -> None:
        if chosen := self.some_group():
            name, _, group, promises = chosen
            dead = self.broker.group(name, group).dead
            letters = dead.list()
            some = self.rng.sample(letters, min(len(letters), 2))
            numbers = {number_of(letter.raw) for letter in some}
            promises.buried -= numbers
            promises.dead -= numbers
            assert dead.redrive([letter.id for letter in some]).done == len(some)

    def reset_queue(self) -> None:
        if chosen := self.some_group():
            name, _, group, promises = chosen
            to = self.rng.choice(["earliest", "latest"])
            view = view_of(self.broker, name, group)
            if to == "earliest":
                kept = {number_of(record.value) for part in records_of(self.broker, name) for record in part}
                promises.ending |= (
                    kept - promises.owed
                )  # what was there before it began may come, once the call has answered
                promises.owed |= kept
                promises.replay(kept)
            else:
                promises.ending |= set(view.live)
            self.broker.reset_offsets(group, name, to=to)
            if to == "earliest":
                promises.ending -= kept

    def compact(self) -> None:
        if chosen := self.some_group():
            name, topic, group, _ = chosen
            topic.trimmed = True
            self.broker.group(name, group).compact()

    # A group in stream mode

    def join(self) -> None:
        if self.consumer is None and self.there():
            self.promises.stream = self.promises.stream | {True}
            for name in self.there():
                topic = self.promises.topics[name]
                for number in range(max(topic.partitions)):
                    start = self.broker.describe_topic(name).partitions[number].start
                    topic.committed.setdefault(number, [])
                    if not topic.committed[number]:
                        self._committing({(name, number): start})
            self.consumer = self.broker.consumer(self.there(), group=STREAM)
            self.promises.stream = {True}
            self._committed({place: self.consumer.committed(*place) for place in self.promises.committing})
            self.promises.commits_synced()

    def poll(self) -> None:
        if self.consumer is not None:
            for _ in range(self.rng.randint(1, 3)):
                self.consumer.poll(0, max_records=self.rng.randint(1, 10))

    def commit(self) -> None:
        if self.consumer is None:
            return
        durability = self.rng.choice([None, "fsync"])
        ids = {name: self.promises.topics[name].id for name in self.there()}
        offsets = {  # it may still have partitions of a topic that is gone, and not know
            place: feed.given
            for place, feed in self.consumer._port.partitions.items()
            if feed.topic.id == ids.get(place[0])
        }
        self._committing(offsets)
        try:
            self.consumer.commit(durability=durability)
        except UnknownTopic:  # then nothing is: it will hear of that with the next poll
            assert len(offsets) < len(self.consumer.assignment())
            self.promises.committing = {}
            return
        self._committed(offsets)
        if durability == "fsync":
            self.promises.commits_synced()

    def _committing(self, offsets: dict[tuple[str, int], int]) -> None:
        for place, offset in offsets.items():
            self.promises.committing.setdefault(place, set()).add(offset)

    def _committed(self, offsets: dict[tuple[str, int], int]) -> None:
        for (name, number), offset in offsets.items():
            self.promises.topics[name].committed.setdefault(number, []).append(offset)
        self.promises.committing = {}

    def leave(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None

    def reset_stream(self) -> None:
        name, topic = self.some_topic()
        if topic is None or self.promises.stream != {True}:
            return
        self.leave()
        to = self.rng.choice(["earliest", "latest", 3])
        plan = self.broker.reset_offsets(STREAM, str(name), to=to, dry_run=True)
        offsets = {(str(name), reset.partition): reset.after for reset in plan}
        self._committing(offsets)
        self.broker.reset_offsets(STREAM, str(name), to=to)
        self._committed(offsets)
        self.promises.commits_synced()

    def delete_stream(self) -> None:
        if self.promises.stream == {True}:
            self.leave()
            self.promises.stream = {True, False}
            self.broker.delete_group(STREAM)
            self.promises.stream = {False}
            for topic in self.promises.topics.values():
                topic.committed.clear()

    # Time and restarts

    def sync(self) -> None:
        self.broker.sync()
        self.promises.sync()

    def wait(self) -> None:
        self.clock.advance(ms=self.rng.choice([1, 200, 1_100, 6_000, 30_000]))
        self.broker._port.engine.tick()

    def reopen(self) -> None:
        self.close()
        self.promises.sync()
        self._restart()

    def close(self) -> None:
        self.leave()
        self.broker.close()

    def kill(self) -> None:
        """kill -9: what the kernel had is all there."""
        self.disk = self.disk.kill()
        self._hook()
        self._restart()
        check_promises(self, self.broker, killed=True)

    def power_cut(self) -> None:
        """Go on with what a cut leaves."""
        self.disk = self.disk.cut(self.rng)
        self._hook()
        self.ids.reboot()
        self.clock = ManualClock(self.clock.now_ns())
        self._restart()
        check_promises(self, self.broker)
        self._learn()

    def _restart(self) -> None:
        self.held.clear()
        self.consumer = None
        self.broker = self.open()

    def _learn(self) -> None:
        """What is there now will stay; what is not is gone for ever."""
        for name in self.there():
            topic = self.promises.topics[name]
            stored = {number_of(record.value) for part in records_of(self.broker, name) for record in part}
            topic.published, topic.durable = set(stored), set(stored)
            for group, promises in topic.groups.items():
                view = view_of(self.broker, name, group)
                promises.ended = promises.owed - set(view.all) - promises.replayed
                promises.ending -= set(view.all)
                promises.buried = set(view.dead) - promises.replayed
                promises.done, promises.dead = set(promises.ended), set(promises.buried)
                promises.owed &= stored | set(view.all)
            if self.promises.stream == {True}:
                group = self.broker._port.engine.streams.group(STREAM)
                with self.broker._port.engine.using(name) as opened:
                    for number in topic.committed:
                        offset = group.committed(opened, number)
                        topic.committed[number] = [] if offset is None else [offset]

    def cut_with(self, on_cut_point: Any) -> None:
        """From now on."""
        self._on_cut_point = on_cut_point
        self._hook()

    def _hook(self) -> None:
        if self._on_cut_point is not None:
            self.disk.on_call = self._cut_point

    def _cut_point(self, call: str) -> None:
        try:
            if self.verdict is None:
                self._on_cut_point(self, call)
        except Exception as error:
            error.add_note(f"after: {', '.join(self.steps)}; inside a call of {call}")
            self.verdict = error
