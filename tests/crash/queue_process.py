"""Processes that own a queue until they are killed, and how they tell their killer what they did.

A process notes what it is about to do, message by message, and again when the call has answered, in memory
that outlives it. A call in flight when the process dies has its first notes and not its last.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import holdfast
from holdfast import LeaseLost, NewMessage, Queue
from tests.crash.queue_promises import number_of
from tests.crash.writer_process import Journal, Note

LEASE_MS = 60_000
MAX_ATTEMPTS = 4


def kill_queue(folder: str, **changes: Any) -> Queue[bytes]:
    """Tiny segments, snapshots, syncs and retries within milliseconds: everything happens all the time."""
    usual = {
        "segment_bytes": 4096,
        "frame_bytes": 1024,
        "index_bytes": 512,
        "min_free_bytes": 0,
        "sync_interval_ms": 3,
        "lease_ms": LEASE_MS,
        "max_attempts": MAX_ATTEMPTS,
        "backoff_ms": 1,
        "backoff_max_ms": 2,
        "snapshot_events": 100,
        "retention_check_ms": 5,
    }
    return holdfast.open(folder, **usual | changes)


class Did(IntEnum):
    """What a note is about. `first` is the number of a message."""

    PUT = 1  # `count` messages from number `first` on, as one batch
    GET = 2  # up to `count` messages
    TAKEN = 3  # `count`: its attempt, `offset`: its fencing number
    ACK = 4
    NACK = 5
    DEFER = 6
    REJECT = 7
    REDRIVE = 8
    PURGE = 9
    CANCEL = 10
    OTHER = 11  # a call that says nothing of any one message


BEGUN, ANSWERED, REFUSED = range(3)


def dedup_id(number: int) -> str | None:
    """Some messages have one, and whoever knows the number knows it."""
    return None if number % 7 else f"once-{number}"


class Life:
    """One process with one queue: what it does next is drawn from its seed, until it is killed."""

    def __init__(self, journal: Journal, folder: str, seed: int, first: int) -> None:
        self._journal = journal
        self._rng = random.Random(seed)
        self._next = first
        self._held: dict[int, Any] = {}
        self._ids: dict[int, str] = {}
        self._q = kill_queue(folder, durability=self._rng.choice(["os", "fsync", "interval"]))
        self._note(Did.OTHER, ANSWERED)

    def run(self, weights: dict[str, float]) -> None:
        steps = [getattr(self, name) for name in weights]
        while True:
            self._rng.choices(steps, list(weights.values()))[0]()

    def _note(self, did: Did, how: int, number: int = 0, count: int = 0, extra: int = 0) -> None:
        self._journal.note(Note(did, how, count, number, extra))

    def _note_all(self, did: Did, how: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._note(did, how, number)

    # Publishing

    def put(self) -> None:
        message = self._message()
        self._put([message], lambda how: [self._q.put(message.body, **_options(message), durability=how)])

    def put_many(self) -> None:
        messages = [self._message() for _ in range(self._rng.randint(2, 6))]
        self._put(messages, lambda how: self._q.put_many(messages, durability=how))

    def put_delayed(self) -> None:
        message = self._message(delay=self._rng.choice([0.001, 0.01, 0.05]))
        self._put([message], lambda how: [self._q.put(message.body, **_options(message), durability=how)])

    def _message(self, **options: Any) -> NewMessage:
        rng, number = self._rng, self._next
        self._next += 1
        choices = {
            "key": lambda: f"k{rng.randint(0, 2)}",
            "priority": lambda: rng.randint(1, 9),
            "delay": lambda: rng.choice([0.001, 0.02, 600]),
        }
        drawn = {name: draw() for name, draw in choices.items() if rng.random() < 0.15}
        body = b"%d " % number + bytes(rng.choice([0, 20, 300, 900]))
        return NewMessage(body=body, dedup_id=dedup_id(number), **drawn | options)

    def _put(self, messages: list[NewMessage], call: Any) -> None:
        first, count = number_of(messages[0].body), len(messages)
        self._note(Did.PUT, BEGUN, first, count)
        stored = call(self._rng.choice([None, "os", "fsync", "interval"]))
        self._note(Did.PUT, ANSWERED, first, count)
        for number, one in enumerate(stored, first):
            assert not one.duplicate
            self._ids[number] = one.id

    # Consuming

    def get(self) -> None:
        count = self._rng.choice([1, 1, 5])
        lease = self._rng.choice([None, None, None, 0.02])
        self._note(Did.GET, BEGUN, count=count)
        for message in self._q.get_many(count, timeout=0, lease=lease):
            number = number_of(message.raw)
            self._note(Did.TAKEN, ANSWERED, number, message.attempt, message.fence)
            self._held[number] = message
            self._ids.pop(number, None)
        self._note(Did.GET, ANSWERED, count=count)

    def ack(self) -> None:
        how = self._rng.choice([None, None, "fsync"])
        self._settle(Did.ACK, lambda message: message.ack(durability=how))

    def ack_many(self) -> None:
        numbers = self._some(5)
        messages = [self._held.pop(number) for number in numbers]
        self._note_all(Did.ACK, BEGUN, numbers)
        lost: Sequence[int] = ()
        try:
            self._q.ack_many(messages)
        except LeaseLost as late:
            lost = late.offsets
        for number, message in zip(numbers, messages, strict=True):
            self._note(Did.ACK, REFUSED if message.offset in lost else ANSWERED, number)

    def nack(self) -> None:
        self._settle(Did.NACK, lambda message: message.nack(delay=self._rng.choice([None, 0]), error="no"))

    def defer(self) -> None:
        self._settle(Did.DEFER, lambda message: message.defer())

    def reject(self) -> None:
        self._settle(Did.REJECT, lambda message: message.reject("never"))

    def _settle(self, did: Did, call: Any) -> None:
        for number in self._some(1):
            message = self._held.pop(number)
            self._note(did, BEGUN, number)
            try:
                call(message)
            except LeaseLost:
                self._note(did, REFUSED, number)
            else:
                self._note(did, ANSWERED, number)

    def _some(self, most: int) -> list[int]:
        return self._rng.sample(sorted(self._held), min(most, len(self._held)))

    # Operating

    def redrive(self) -> None:
        self._with_letters(Did.REDRIVE, self._q.dead.redrive)

    def purge(self) -> None:
        self._with_letters(Did.PURGE, self._q.dead.purge)

    def _with_letters(self, did: Did, call: Any) -> None:
        letters = self._q.dead.list(limit=self._rng.choice([1, 1, 5]))
        numbers = [number_of(letter.raw) for letter in letters]
        self._note_all(did, BEGUN, numbers)
        assert call([letter.id for letter in letters]).done == len(letters)
        self._note_all(did, ANSWERED, numbers)

    def cancel(self) -> None:
        if self._ids:
            number = self._rng.choice(list(self._ids))
            self._note(Did.CANCEL, BEGUN, number)
            done = self._q.cancel(self._ids.pop(number))
            self._note(Did.CANCEL, ANSWERED if done else REFUSED, number)

    def compact(self) -> None:
        self._q.compact()
        self._note(Did.OTHER, ANSWERED)

    def snapshot(self) -> None:
        self._q._port.deliveries[0].save()
        self._note(Did.OTHER, ANSWERED)

    def release(self) -> None:
        """What is due goes into the log, in this thread or in the keeper's, whichever comes first."""
        time.sleep(0.001)
        self._q._port.engine.tick()
        self._note(Did.OTHER, ANSWERED)


def or_die(run: Callable[..., None], *arguments: object) -> None:
    """An error in any thread ends the process, so that the test sees it."""
    try:
        run(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _options(message: NewMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "body"}


COMMON: dict[str, float] = {
    "put": 4, "put_many": 2, "get": 5, "ack": 4, "ack_many": 1, "nack": 1, "defer": 0.5, "reject": 0.5,
    "redrive": 0.3, "purge": 0.1, "cancel": 0.3, "compact": 0.1, "snapshot": 0.1, "release": 0.1,
}  # fmt: skip

# What a process does most of all: there it will be killed.
WORKLOADS: dict[str, dict[str, float]] = {
    "put": {"put": 40},
    "put_many": {"put_many": 30},
    "get": {"put_many": 15, "get": 60, "ack_many": 15},
    "ack": {"put_many": 15, "get": 20, "ack": 60, "ack_many": 10},
    "nack": {"put_many": 3, "get": 30, "nack": 60},
    "dead-letter move": {"put_many": 8, "get": 20, "reject": 60, "compact": 0},
    "delayed release": {"put_delayed": 40, "release": 30, "get": 20, "ack_many": 8},
    "redrive": {"put_many": 4, "get": 20, "reject": 40, "redrive": 40},
    "snapshot": {"snapshot": 30},
    "compact": {"ack_many": 10, "compact": 30},
}


def live(journal: Journal, folder: str, seed: int, first: int, workload: str) -> None:
    """A process's whole life."""
    Life(journal, folder, seed, first).run(COMMON | WORKLOADS[workload])


def only_open(journal: Journal, folder: str) -> None:
    """Opens and closes, over and over: the kill comes in the middle of recovery, or of closing."""
    while True:
        kill_queue(folder).close()
        journal.note(Note(Did.OTHER, ANSWERED))
