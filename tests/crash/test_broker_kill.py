"""kill -9 of a broker with three topics of three partitions under load: what it answered counts for every group."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast import Broker
from holdfast.broker.messages import REDRIVEN_FROM, is_for, mark
from holdfast.env import real_world
from tests.crash.broker_process import (
    NUMBERS,
    PARTITIONS,
    QUEUES,
    STREAM,
    TOPICS,
    Did,
    kill_broker,
    live,
    topic_and_group,
)
from tests.crash.broker_promises import records_of, view_of
from tests.crash.queue_process import ANSWERED, BEGUN
from tests.crash.queue_promises import number_of
from tests.crash.writer_process import Journal, Note, started

pytestmark = pytest.mark.serial

PATIENCE_S = 120
KILLS_IN_A_FOLDER = 4
MOST_NOTES = 2_500


@dataclass
class GroupPromises:
    """What one group has of one topic."""

    ended: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    unsure: dict[int, Did] = field(default_factory=dict)  # number -> what was begun with it, and not answered


@dataclass
class Promises:
    """What must be there, and what may be, by the notes of all the processes that owned the folder."""

    published: dict[str, set[int]] = field(default_factory=lambda: {topic: set() for topic in TOPICS})
    publishing: dict[str, set[int]] = field(default_factory=lambda: {topic: set() for topic in TOPICS})
    groups: dict[tuple[str, str], GroupPromises] = field(
        default_factory=lambda: {(topic, group): GroupPromises() for topic in TOPICS for group in QUEUES}
    )
    read: set[tuple[str, int, int]] = field(default_factory=set)  # topic, partition, offset
    committed: Counter[tuple[str, int]] = field(default_factory=Counter)
    committing: Counter[tuple[str, int]] = field(default_factory=Counter)

    def learn(self, notes: Iterable[Note]) -> None:
        for note in notes:
            did, number = Did(note.what), note.first
            if did == Did.PUBLISH:
                topic, _ = topic_and_group(note.offset)
                if note.writer == BEGUN:
                    self.publishing[topic].add(number)
                else:
                    self.publishing[topic].remove(number)
                    self.published[topic].add(number)
            elif did == Did.READ:
                self.read.add((TOPICS[note.offset], note.count, number))
            elif did == Did.COMMIT:
                place = TOPICS[note.offset], note.count
                line = self.committing if note.writer == BEGUN else self.committed
                line[place] = max(line[place], number)
            elif did != Did.OPENED:
                self._learn_settled(self.groups[topic_and_group(note.offset)], did, note)

    def _learn_settled(self, group: GroupPromises, did: Did, note: Note) -> None:
        number = note.first
        if did == Did.TAKEN:
            assert number not in group.ended, f"{number} was done, and came back"
            assert number not in group.dead, f"{number} was a dead letter, and came back"
        elif note.writer == BEGUN:
            group.unsure[number] = did
            if did == Did.REDRIVE:
                group.dead.discard(number)
        else:
            del group.unsure[number]
            if note.writer == ANSWERED and did == Did.ACK:
                group.ended.add(number)
            elif note.writer == ANSWERED and did == Did.REJECT:
                group.dead.add(number)

    def check(self, broker: Broker) -> None:
        """Hold what is there against what was promised; from now on all of it is promised."""
        for topic in TOPICS:
            logs = records_of(broker, topic)
            assert len(logs) == PARTITIONS
            self._check_log(topic, logs)
            for group in QUEUES:
                self._check_group(topic, group, broker)
            self._check_stream(topic, logs, broker)

    def _check_log(self, topic: str, logs: list[list[Any]]) -> None:
        found: Counter[int] = Counter()
        for records in logs:
            numbers = [number_of(record.value) for record in records if mark(record, REDRIVEN_FROM) is None]
            found.update(numbers)
            for each in {number // NUMBERS for number in numbers}:
                line = [number for number in numbers if number // NUMBERS == each]
                assert line == sorted(line), f"messages of one producer are out of order in {topic}: {line}"
        assert max(found.values(), default=1) == 1, f"{[n for n, count in found.items() if count > 1]} are there twice"
        lost = self.published[topic] - set(found)
        assert not lost, f"{sorted(lost)[:5]} of {topic} were acknowledged, and are lost"
        strange = set(found) - self.published[topic] - self.publishing[topic]
        assert not strange, f"nobody published {sorted(strange)[:5]} to {topic}"
        self.published[topic] = set(found)
        self.publishing[topic] = set()

    def _check_group(self, topic: str, name: str, broker: Broker) -> None:
        group, view = self.groups[topic, name], view_of(broker, topic, name)
        where = f"{name} on {topic}"
        for number, count in view.all.items():
            assert count == 1, f"{number} is there {count} times for {where}"
        acking = {number for number, did in group.unsure.items() if did == Did.ACK}
        lost = self.published[topic] - group.ended - acking - set(view.all)
        assert not lost, f"{sorted(lost)[:5]} are lost for {where}"
        back = group.ended & set(view.all)
        assert not back, f"{sorted(back)[:5]} were done for {where}, and are back"
        gone = group.dead - set(view.dead)
        assert not gone, f"{sorted(gone)[:5]} were dead letters of {where}, and are not"
        group.ended = self.published[topic] - set(view.all)
        group.dead = set(view.dead)
        group.unsure.clear()

    def _check_stream(self, topic: str, logs: list[list[Any]], broker: Broker) -> None:
        if STREAM not in broker._port.engine.streams.names():
            assert not self.committed
            return
        for number, records in enumerate(logs):
            with broker._port.engine.using(topic) as opened:
                at = broker._port.engine.streams.group(STREAM).committed(opened, number) or 0
            place = topic, number
            least, most = self.committed[place], max(self.committed[place], self.committing[place])
            # What was redriven for others is passed over by the consumer itself.
            while most < at and not all(is_for(r, STREAM.encode()) for r in records if r.offset == most):
                most += 1
            assert least <= at <= most, f"{STREAM} goes on at {at} in {place}, not at {least} to {most}"
            skipped = [
                record.offset
                for record in records
                if record.offset < at and is_for(record, STREAM.encode()) and (*place, record.offset) not in self.read
            ]
            assert not skipped, f"{STREAM} never got {skipped[:5]} of {place}"
            self.committed[place] = self.committing[place] = at


def test_what_a_broker_answered_counts_when_its_owner_is_killed(tmp_path, scale):
    rng = random.Random("broker")
    for folder in range(scale(2, 300)):
        seed = rng.getrandbits(32)
        try:
            kill_again_and_again(str(tmp_path / f"broker{folder}"), seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def kill_again_and_again(folder: str, seed: int) -> None:
    rng, promises = random.Random(seed), Promises()
    for life in range(KILLS_IN_A_FOLDER):
        promises.learn(killed(rng, rng.randint(0, MOST_NOTES), folder, rng.getrandbits(32), life))
        with kill_broker(folder, world=real_world()) as broker:
            if set(broker.topics()) == set(TOPICS) and all_groups(broker):
                promises.check(broker)
            else:
                assert not any(promises.published.values())
    check_drained(folder, promises)


def all_groups(broker: Broker) -> bool:
    return all(broker.describe_topic(topic).groups == sorted(QUEUES) for topic in TOPICS)


def killed(rng: random.Random, wanted: int, folder: str, seed: int, life: int) -> list[Note]:
    """The notes of a process that was killed at a random moment."""
    journal, deadline = Journal(200_000), time.monotonic() + PATIENCE_S
    with started(live, journal, folder, seed, life) as process:
        while len(journal) < wanted and process.is_alive():
            assert time.monotonic() < deadline, f"{len(journal)} notes of {wanted}: the process hangs"
            time.sleep(0.0005)
        time.sleep(rng.random() ** 2 * 0.02)  # not for anything to happen: the moment is random
        process.kill()
        process.join()
    assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
    return journal.notes()


def check_drained(folder: str, promises: Promises) -> None:
    """Everything that is left comes to each group, each message once, and the stream goes on where it was."""
    with kill_broker(folder) as broker:
        if not all(topic in broker.topics() for topic in TOPICS):
            return
        for topic in TOPICS:
            for name in QUEUES:
                group, delivered = broker.group(topic, name), Counter()
                expected = promises.published[topic] - promises.groups[topic, name].ended
                expected -= promises.groups[topic, name].dead
                while len(delivered) < len(expected):
                    messages = group.receive_many(500, timeout=PATIENCE_S)
                    assert messages, f"{sorted(expected - set(delivered))[:5]} of {topic} did not come to {name}"
                    delivered.update(number_of(message.raw) for message in messages)
                    group.ack_many(messages)
                assert delivered == Counter(expected)
        with broker.consumer(TOPICS, group=STREAM) as consumer:
            got: Counter[tuple[str, int, int]] = Counter()
            while some := consumer.poll(0):
                got.update((message.topic, message.partition, message.offset) for message in some)
        rest = Counter(
            (topic, number, record.offset)
            for topic in TOPICS
            for number, records in enumerate(records_of(broker, topic))
            for record in records
            if record.offset >= promises.committed[topic, number] and is_for(record, STREAM.encode())
        )
        assert got == rest
    with kill_broker(folder) as broker:
        for topic in TOPICS:
            for name in QUEUES:
                assert broker.group(topic, name).receive_many(10, timeout=0) == []


def test_the_promises_notice_what_a_broken_broker_would_do(tmp_path):
    """The judge is judged: each kind of loss is seen."""
    folder = str(tmp_path / "broker")
    with kill_broker(folder, world=real_world()) as broker:
        for topic in TOPICS:
            broker.create_topic(topic)
            for group in QUEUES:
                broker.group(topic, group)
        broker.publish_many("orders", [b"0 ", b"1 "], partition=0)
        broker.group("orders", "billing").receive(timeout=0).reject("never")
        consumer = broker.consumer(TOPICS, group=STREAM)
        assert len(consumer.poll(0)) == 2
        consumer.commit()

    def verdict(*notes: Note) -> str:
        promises = Promises()
        with kill_broker(folder, world=real_world()) as broker, pytest.raises(AssertionError) as caught:
            promises.learn(notes)
            promises.check(broker)
        return str(caught.value)

    def both(did: Did, number: int, count: int = 0, place: int = 0) -> list[Note]:
        return [Note(did, how, count, number, place) for how in (BEGUN, ANSWERED)]

    published = [*both(Did.PUBLISH, 0), *both(Did.PUBLISH, 1)]
    read = [Note(Did.READ, ANSWERED, 0, 0, 0), Note(Did.READ, ANSWERED, 0, 1, 0)]
    assert "nobody published" in verdict()
    assert "were acknowledged, and are lost" in verdict(*published, *both(Did.PUBLISH, 2))
    assert "were done for billing on orders, and are back" in verdict(*published, *both(Did.ACK, 1))
    assert "were dead letters of billing on orders, and are not" in verdict(*published, *both(Did.REJECT, 1))
    assert "came back" in verdict(*published, *both(Did.ACK, 1), Note(Did.TAKEN, ANSWERED, 1, 1, 0))
    assert "goes on at 2 in ('orders', 0), not at 0 to 0" in verdict(*published)
    assert "never got [1]" in verdict(*published, *read[:1], *both(Did.COMMIT, 2))
    with kill_broker(folder, world=real_world()) as broker:
        broker.publish("orders", b"1 ", partition=1)
    assert "[1] are there twice" in verdict(*published, *read, *both(Did.COMMIT, 2))
