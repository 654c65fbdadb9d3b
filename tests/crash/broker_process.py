"""A process that owns a broker under load until it is killed, and how it tells its killer what it did.

Producers, workers in queue mode and consumers in stream mode each have a thread. A thread notes what it is about to
do, message by message, and again when the call has answered, in memory that outlives the process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import holdfast
from holdfast import Broker, BrokerSettings, LeaseLost, NewMessage, TopicSettings
from holdfast.settings import ConsumerSettings
from tests.crash.queue_process import ANSWERED, BEGUN, REFUSED, or_die
from tests.crash.queue_promises import number_of
from tests.crash.writer_process import Journal, Note

TOPICS = ("orders", "mails", "clicks")
PARTITIONS = 3
QUEUES = ("billing", "audit")
STREAM = "readers"
NUMBERS = 1 << 24  # so many for each line of messages of each life: those of one line keep their order
MAX_ATTEMPTS = 4


def kill_broker(folder: str, **options: Any) -> Broker:
    """Tiny segments, snapshots, syncs and retries within milliseconds: everything happens all the time."""
    topic = TopicSettings(
        partitions=PARTITIONS,
        segment_bytes=4096,
        frame_bytes=1024,
        index_bytes=512,
        min_free_bytes=0,
        sync_interval_ms=3,
        lease_ms=60_000,
        max_attempts=MAX_ATTEMPTS,
        backoff_ms=1,
        backoff_max_ms=2,
        snapshot_events=100,
        retention_check_ms=5,
    )
    settings = BrokerSettings(topic=topic, consumer=ConsumerSettings(auto_commit=False), open_partitions=6)
    return holdfast.open_broker(folder, settings=settings, **options)


class Did(IntEnum):
    """What a note is about. `first` is the number of a message, `offset` the topic and, where it counts, the group."""

    PUBLISH = 1
    TAKEN = 2
    ACK = 3
    NACK = 4
    REJECT = 5
    REDRIVE = 6
    READ = 7  # `first`: the offset, `count`: the partition
    COMMIT = 8  # the same: everything below is handled
    OPENED = 9


def place_of(topic: str, group: str = QUEUES[0]) -> int:
    return TOPICS.index(topic) * len(QUEUES) + QUEUES.index(group)


def topic_and_group(place: int) -> tuple[str, str]:
    return TOPICS[place // len(QUEUES)], QUEUES[place % len(QUEUES)]


class Load:
    """All that goes on in one life of the process."""

    def __init__(self, journal: Journal, folder: str, seed: int, life: int) -> None:
        self._journal = journal
        self._seed = seed
        self._life = life
        self._broker = kill_broker(folder, durability=random.Random(seed).choice(["os", "fsync"]))
        for topic in TOPICS:
            self._broker.create_topic(topic, exist_ok=True)
            for group in QUEUES:
                self._broker.group(topic, group)
        self._note(Did.OPENED, ANSWERED)

    def threads(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """What each thread is to do."""
        found: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (self.produce, (number, acks)) for number, acks in enumerate(("all", "leader"))
        ]
        found += [(self.work, (topic, group)) for topic in TOPICS for group in QUEUES]
        found += [(self.read, (number,)) for number in range(2)]
        return found

    def _note(self, did: Did, how: int, number: int = 0, count: int = 0, place: int = 0) -> None:
        self._journal.note(Note(did, how, count, number, place))

    def produce(self, producer_number: int, acks: str) -> None:
        """Send without end; an answer that says stored is noted."""
        rng = random.Random(f"{self._seed} {producer_number}")
        producer = self._broker.producer(
            acks=acks, linger_ms=rng.choice([0, 1, 3]), batch_messages=rng.choice([1, 5, 50])
        )
        first = (self._life * 4 + producer_number * 2) * NUMBERS
        numbers = {False: first, True: first + NUMBERS}  # by the producer, and around it
        while True:
            sent = []
            for _ in range(rng.randint(1, 20)):
                topic, around = rng.choice(TOPICS), rng.random() < 0.1
                number = numbers[around]
                numbers[around] += 1
                body = b"%d " % number + bytes(rng.choice([0, 20, 300]))
                key = f"k{rng.randint(0, 20)}" if rng.random() < 0.5 else None
                self._note(Did.PUBLISH, BEGUN, number, place=place_of(topic))
                if around:
                    stored = self._broker.publish_many(topic, [NewMessage(body=body, key=key)])
                    assert len(stored) == 1
                    self._note(Did.PUBLISH, ANSWERED, number, place=place_of(topic))
                else:
                    sent.append((number, topic, producer.send(topic, body, key=key)))
            for each, topic, future in sent:
                future.result(60)
                self._note(Did.PUBLISH, ANSWERED, each, place=place_of(topic))

    def work(self, topic: str, name: str) -> None:
        """Take messages, and settle them in all ways."""
        rng, place = random.Random(f"{self._seed} {topic} {name}"), place_of(topic, name)
        group = self._broker.group(topic, name)
        while True:
            for message in group.receive_many(rng.choice([1, 5, 20]), timeout=1):
                number = number_of(message.raw)
                self._note(Did.TAKEN, ANSWERED, number, message.attempt, place)
                did = rng.choices([Did.ACK, Did.NACK, Did.REJECT, None], [6, 2, 1, 1])[0]
                if did is not None:
                    self._note(did, BEGUN, number, 0, place)
                    self._note(did, ANSWERED if settled(message, did) else REFUSED, number, 0, place)
            if rng.random() < 0.1:
                letters = group.dead.list(limit=5)
                numbers = [number_of(letter.raw) for letter in letters]
                for number in numbers:
                    self._note(Did.REDRIVE, BEGUN, number, 0, place)
                assert group.dead.redrive([letter.id for letter in letters]).done == len(letters)
                for number in numbers:
                    self._note(Did.REDRIVE, ANSWERED, number, 0, place)

    def read(self, reader: int) -> None:
        """Read all topics as one of two members, and commit now and then."""
        rng = random.Random(f"{self._seed} reader {reader}")
        consumer = self._broker.consumer(TOPICS, group=STREAM)
        while True:
            for message in consumer.poll(0.05, max_records=rng.choice([1, 20])):
                self._note(Did.READ, ANSWERED, message.offset, message.partition, TOPICS.index(message.topic))
            if rng.random() < 0.3:
                ours = {place: consumer.position(*place) for place in consumer.assignment()}
                for (topic, partition), offset in ours.items():
                    self._note(Did.COMMIT, BEGUN, offset, partition, TOPICS.index(topic))
                try:
                    consumer.commit(offsets=ours)
                except holdfast.Fenced:
                    continue  # another member has them now
                for (topic, partition), offset in ours.items():
                    self._note(Did.COMMIT, ANSWERED, offset, partition, TOPICS.index(topic))
            if rng.random() < 0.02:
                consumer.close()
                consumer = self._broker.consumer(TOPICS, group=STREAM)


def settled(message: Any, did: Did) -> bool:
    try:
        if did == Did.ACK:
            message.ack()
        elif did == Did.NACK:
            message.nack(delay=0, error="no")
        else:
            message.reject("never")
    except LeaseLost:
        return False
    return True


def live(journal: Journal, folder: str, seed: int, life: int) -> None:
    """A process's whole life."""
    load = Load(journal, folder, seed, life)
    threads = [threading.Thread(target=or_die, args=(run, *arguments)) for run, arguments in load.threads()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
