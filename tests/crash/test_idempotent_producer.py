"""kill -9 at random moments while a named producer sends: sent again from the start, each message is stored once."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from holdfast import NewMessage
from holdfast.api.sync.producer import Producer
from holdfast.broker.engine import BrokerEngine
from holdfast.local.publisher import LocalProducerPort
from holdfast.settings import ProducerSettings
from tests.crash.writer_process import Journal, Note, started

PATIENCE_S = 120
MESSAGES = 1_200
ACKED, BEGUN = 1, 2

SMALL = {"segment_bytes": 4096, "frame_bytes": 1024, "index_bytes": 512, "min_free_bytes": 0, "sync_interval_ms": 3}


def open_engine(folder: str) -> BrokerEngine:
    engine = BrokerEngine.open(folder)
    for topic, partitions in (("plain", 3), ("keyed", 2)):
        if topic not in engine.topics():
            engine.create_topic(topic, None, {"partitions": partitions, **SMALL})
    return engine


def body_of(number: int) -> bytes:
    return b"%d " % number + bytes(number % 97)


def produce(journal: Journal, folder: str, seed: int, acks: str) -> None:
    """Send the same messages in the same order, in batches that differ from life to life."""
    rng = random.Random(seed)
    engine = open_engine(folder)
    engine.keep()
    settings = ProducerSettings(
        acks=acks,
        linger_ms=rng.choice([0, 1, 3]),
        batch_messages=rng.choice([1, 3, 20, 100]),
        batch_bytes=rng.choice([100, 2_000, 64_000]),
        buffer_bytes=rng.choice([2_000, 100_000]),
    )
    producer = Producer(LocalProducerPort(engine), settings, name="loader", resume=True)
    journal.note(Note(BEGUN))

    def note(number: int, sent) -> None:
        if sent.exception(0) is None:
            journal.note(Note(ACKED, first=number))

    number = 0
    while number < MESSAGES:
        # Which messages there are depends on their numbers alone; how they are handed over does not matter.
        if number % 5 == 0:
            count = min(rng.randint(1, 30) * 5, MESSAGES - number)
            for i in range(number, number + count):
                send(producer, i).add_done_callback(lambda sent, i=i: note(i, sent))
            number += count
    producer.flush()
    while True:
        time.sleep(1)  # all is stored: the kill comes anyway


def send(producer: Producer, number: int):
    body = body_of(number)
    if number % 3 == 0:
        return producer.send("keyed", body, key=b"%d" % (number % 50))
    if number % 50 == 1:
        return producer.send_many("plain", [NewMessage(body=body, delay=0.001)])[0]
    return producer.send("plain", body)


@pytest.mark.parametrize("acks", ["leader", "all"])
def test_a_producer_that_is_killed_and_resumes_stores_each_message_once(tmp_path, acks, scale):
    rng = random.Random(acks)
    for run in range(scale(1, 200)):
        folder, seed = str(tmp_path / f"data{run}"), rng.getrandbits(32)
        try:
            kill_until_all_is_stored(folder, acks, random.Random(seed), kills=scale(5, 30))
        except BaseException as error:
            error.add_note(f"acks={acks}, seed {seed}")
            raise


def kill_until_all_is_stored(folder: str, acks: str, rng: random.Random, *, kills: int) -> None:
    acked: set[int] = set()
    for life in range(kills + 1):
        last = life == kills
        wanted = MESSAGES if last else rng.randint(0, MESSAGES * (life + 1) // (kills + 1))
        journal = Journal()
        deadline = time.monotonic() + PATIENCE_S
        with started(produce, journal, folder, rng.getrandbits(32), acks) as process:
            while len(journal) < wanted + 1 and process.is_alive():
                assert time.monotonic() < deadline, f"{len(journal)} notes of {wanted}: the process hangs"
                time.sleep(0.0005)
            time.sleep(rng.random() ** 2 * 0.008)  # not for anything to happen: the moment is random
            process.kill()
            process.join()
        assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
        acked |= {note.first for note in journal.notes() if note.what == ACKED}
        check(folder, acked, complete=last)
    assert acked == set(range(MESSAGES))


def check(folder: str, acked: set[int], *, complete: bool) -> None:
    """What was acknowledged is there, everything is there at most once, and what one partition has is in order."""
    engine = open_engine(folder)
    try:
        for name in engine.topics():
            engine.topic(name)
        time.sleep(0.002)  # the delayed ones are due now
        engine.tick()
        found: Counter[int] = Counter()
        for name in ("plain", "keyed"):
            for partition in engine.topic(name).partitions:
                records = list(partition.log.records(partition.log.start))
                numbers = [int(record.value.split(b" ")[0]) for record in records]
                assert all(record.value == body_of(n) for record, n in zip(records, numbers, strict=True))
                in_time = [n for n in numbers if n % 3 == 0 or n % 50 != 1]
                assert in_time == sorted(in_time), f"{name}: messages are out of order"
                found.update(numbers)
    finally:
        engine.close()
    assert not [number for number, count in found.items() if count > 1], "stored twice"
    missing = acked - set(found)
    assert not missing, f"{sorted(missing)[:5]} were acknowledged, and are lost"
    if complete:
        assert set(found) == set(range(MESSAGES))


def test_the_check_notices_what_a_broken_producer_would_do(tmp_path):
    """The judge is judged: a message stored twice, lost or out of order is seen."""

    def stored(folder: str, *numbers: int) -> str:
        engine = open_engine(folder)
        with Producer(LocalProducerPort(engine), ProducerSettings(acks="leader")) as producer:
            for number in numbers:
                producer.send("keyed", body_of(number), partition=0)
        engine.close()
        return folder

    check(stored(str(tmp_path / "good"), 0, 3, 6), {0, 3}, complete=False)
    with pytest.raises(AssertionError, match="stored twice"):
        check(stored(str(tmp_path / "twice"), 0, 3, 3), {0}, complete=False)
    with pytest.raises(AssertionError, match=r"\[6\] were acknowledged, and are lost"):
        check(stored(str(tmp_path / "lost"), 0, 3), {0, 6}, complete=False)
    with pytest.raises(AssertionError, match="out of order"):
        check(stored(str(tmp_path / "order"), 3, 0), {0}, complete=False)
