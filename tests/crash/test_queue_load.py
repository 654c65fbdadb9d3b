"""Producers and consumers in a process that is killed with -9 and started again, every few seconds: nothing is lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import pytest

import holdfast
from holdfast import Queue
from tests.crash.queue_process import or_die
from tests.crash.writer_process import Journal, Note, started

pytestmark = [pytest.mark.serial, pytest.mark.timeout(3 * 3600)]

KEYS = 64
THREADS = 4  # producers, and as many consumers
TASKS = 32
AT_ONCE = 5  # what a consumer takes at most
BACKLOG = 2_000  # producers wait for consumers when so many messages are under way
MOST_NOTES = 1_000_000  # in one life


class Did(IntEnum):
    """What a note tells of the message with number `first` within the key `writer`."""

    PUTTING = 1
    PUT = 2
    TAKEN = 3  # `count`: its attempt, `offset`: its fencing number
    ACKING = 4
    ACKED = 5


@dataclass
class Line:
    """The messages of one key, in order."""

    next: int = 0
    maybe: set[int] = field(default_factory=set)  # perhaps there: the put, or the ack, was not answered
    waiting: set[int] = field(default_factory=set)  # there, and not acked
    seen: set[int] = field(default_factory=set)  # those of them that were handed out
    free: set[int] = field(default_factory=set)  # those of them that may come again: they were held at a kill
    last_first: tuple[int, int] = (0, -1)  # fencing number and number of the latest first delivery


@dataclass
class Ledger:
    """What every process did, and whether it may be so."""

    lines: list[Line] = field(default_factory=lambda: [Line() for _ in range(KEYS)])
    unnoted: int = 0  # so many may have been handed out at kills, without a note
    again: int = 0
    held_at_kills: int = 0
    acked: int = 0

    def learn(self, notes: Iterable[Note], *, consumers: int) -> None:
        """Go through one life, and its end."""
        firsts: list[tuple[int, int, int]] = []
        held: dict[tuple[int, int], Did] = {}
        for what, key, count, number, fence in notes:
            line = self.lines[key]
            if what == Did.PUTTING:
                line.maybe.add(number)
                line.next = number + 1
            elif what == Did.PUT:
                self._arrived(line, number)
            elif what == Did.TAKEN:
                self._arrived(line, number)
                self._take(line, key, number, count)
                held[key, number] = Did.TAKEN
                if count == 1:
                    firsts.append((fence, key, number))
            elif what == Did.ACKING:
                held[key, number] = Did.ACKING
            elif what == Did.ACKED:
                del held[key, number]
                line.waiting.remove(number)
                line.seen.remove(number)
                self.acked += 1
        self._check_order(firsts)
        for (key, number), did in held.items():
            line = self.lines[key]
            line.free.add(number)
            if did == Did.ACKING:
                line.waiting.remove(number)
                line.maybe.add(number)
        self.held_at_kills += len(held)
        self.unnoted += consumers * AT_ONCE

    def _arrived(self, line: Line, number: int) -> None:
        if number in line.maybe:
            line.maybe.remove(number)
            line.waiting.add(number)

    def _take(self, line: Line, key: int, number: int, attempt: int) -> None:
        assert number in line.waiting, f"key {key}: {number} was acked or never put, and is handed out"
        if number in line.seen:
            assert number in line.free, f"key {key}: {number} is handed out again, and nobody held it at a kill"
            line.free.remove(number)
            self.again += 1
            assert attempt > 1, f"key {key}: {number} is handed out again, and counts as new"
        elif attempt > 1:
            self.unnoted -= attempt - 1
            assert self.unnoted >= 0, f"key {key}: {number} comes with attempt {attempt}, and was never handed out"
        line.seen.add(number)

    def _check_order(self, firsts: list[tuple[int, int, int]]) -> None:
        """First deliveries within a key, in the order in which they were handed out."""
        for fence, key, number in sorted(firsts, key=lambda first: first[0]):
            line = self.lines[key]
            last_fence, last = line.last_first
            assert fence >= last_fence, "a fencing number fell"
            assert number > last, f"key {key}: {number} was handed out for the first time after {last}"
            line.last_first = fence, number

    def check_nothing_left(self) -> None:
        lost = {key: line.waiting for key, line in enumerate(self.lines) if line.waiting}
        assert not lost, f"acknowledged and lost: {lost}"


class Numbered:
    """Makes numbered messages, and notes them."""

    def __init__(self, journal: Journal, numbers: list[int]) -> None:
        self.journal = journal
        self.numbers = numbers

    def putting(self, key: int) -> bytes:
        number = self.numbers[key]
        self.numbers[key] += 1
        self.journal.note(Note(Did.PUTTING, key, 0, number))
        return b"%d " % number + bytes(number % 100)

    def put(self, key: int, body: bytes) -> None:
        self.journal.note(Note(Did.PUT, key, 0, int(body.split(b" ")[0])))


def note_all(journal: Journal, did: Did, messages: Iterable[Any]) -> None:
    for message in messages:
        number = int(message.raw.split(b" ")[0])
        journal.note(Note(did, int(message.key), message.attempt, number, message.fence))


def load_settings() -> dict[str, Any]:
    """Segments, snapshots and retention often enough that kills hit them."""
    return {
        "segment_bytes": 256 * 1024,
        "snapshot_events": 5_000,
        "retention_ms": 1_000,
        "retention_check_ms": 300,
        "max_attempts": None,
        "min_free_bytes": 0,
        "lease_ms": 600_000,
    }


def in_threads(journal: Journal, folder: str, seed: int, numbers: list[int]) -> None:
    """Four producers with sixteen keys each, four consumers."""
    numbered = Numbered(journal, numbers)
    q = holdfast.open(folder, durability="os", **load_settings())
    room = threading.Semaphore(BACKLOG)

    def produce(producer: int) -> None:
        rng = random.Random(seed + producer)
        while True:
            key = producer + THREADS * rng.randrange(KEYS // THREADS)
            room.acquire()
            body = numbered.putting(key)
            q.put(body, key=str(key))
            numbered.put(key, body)

    def consume(consumer: int) -> None:
        rng = random.Random(seed - consumer)
        while True:
            messages = q.get_many(rng.choice([1, AT_ONCE]))
            note_all(journal, Did.TAKEN, messages)
            note_all(journal, Did.ACKING, messages)
            if len(messages) == 1:
                messages[0].ack()
            else:
                q.ack_many(messages)
            note_all(journal, Did.ACKED, messages)
            room.release(len(messages))

    workers = [(run, number) for number in range(THREADS) for run in (produce, consume)]
    threads = [threading.Thread(target=or_die, args=(run, number), daemon=True) for run, number in workers]
    for thread in threads:
        thread.start()
    threads[0].join()


def in_tasks(journal: Journal, folder: str, seed: int, numbers: list[int]) -> None:
    """Thirty-two producers with two keys each, thirty-two consumers."""
    numbered = Numbered(journal, numbers)

    async def produce(q: Any, room: asyncio.Semaphore, producer: int) -> None:
        rng = random.Random(seed + producer)
        while True:
            key = producer + TASKS * rng.randrange(KEYS // TASKS)
            await room.acquire()
            body = numbered.putting(key)
            await q.put(body, key=str(key))
            numbered.put(key, body)

    async def consume(q: Any, room: asyncio.Semaphore, consumer: int) -> None:
        rng = random.Random(seed - consumer)
        while True:
            messages = await q.get_many(rng.choice([1, AT_ONCE]))
            note_all(journal, Did.TAKEN, messages)
            await asyncio.sleep(0)
            note_all(journal, Did.ACKING, messages)
            await q.ack_many(messages)
            note_all(journal, Did.ACKED, messages)
            for _ in messages:
                room.release()

    async def work() -> None:
        room = asyncio.Semaphore(BACKLOG)
        async with holdfast.aio.open(folder, durability="fsync", **load_settings()) as q:
            await asyncio.gather(*(run(q, room, n) for n in range(TASKS) for run in (produce, consume)))

    asyncio.run(work())


@pytest.mark.parametrize(("run", "consumers"), [(in_threads, THREADS), (in_tasks, TASKS)], ids=["threads", "tasks"])
def test_nothing_is_lost_under_load_in_a_process_that_is_killed_every_few_seconds(run, consumers, tmp_path, scale):
    seconds = scale(30, 30 * 60)
    folder, rng, ledger = str(tmp_path / "queue"), random.Random(run.__name__), Ledger()
    worked_s = 0.0
    while worked_s < seconds:
        life_s = rng.uniform(3, 5)
        ledger.learn(notes_of_a_life(run, folder, rng, ledger, life_s), consumers=consumers)
        worked_s += life_s
    with holdfast.open(folder, durability="os", **load_settings()) as q:
        ledger.learn(drained(q), consumers=0)
        assert q.stats().ready == q.stats().leased == q.stats().delayed == q.stats().dead == 0
    ledger.check_nothing_left()
    assert ledger.again <= ledger.held_at_kills
    assert ledger.acked > 100 * seconds, f"only {ledger.acked} messages in {seconds} s: this was no load"


def notes_of_a_life(
    run: Callable[..., None], folder: str, rng: random.Random, ledger: Ledger, life_s: float
) -> list[Note]:
    """What a process noted until it was killed."""
    journal = Journal(MOST_NOTES)
    numbers = [line.next for line in ledger.lines]
    with started(or_die, run, journal, folder, rng.getrandbits(32), numbers) as process:
        process.join(life_s)
        process.kill()
        process.join()
    assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
    return journal.notes()


def drained(q: Queue[bytes]) -> list[Note]:
    """Take and ack everything that is left."""
    journal = Journal(MOST_NOTES)
    while messages := q.get_many(100, timeout=0):
        note_all(journal, Did.TAKEN, messages)
        q.ack_many(messages)
        note_all(journal, Did.ACKED, messages)
    return journal.notes()
