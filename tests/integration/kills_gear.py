"""Clients of a server that is killed again and again: what they did, and whether it may be so."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import holdfast
from holdfast import Fenced, LeaseLost

EVENTS, JOBS = "events", "jobs"  # a topic for a group in stream mode; a queue with leases
PARTITIONS = 4
KEYS = 8  # of each producer
LEASE_S = 8.0
AT_ONCE = 10
ABANDON_EVERY = 25  # turns of a worker: it then takes a job and does nothing with it, as one that died
BACKLOG = 2_000  # producers wait for consumers when so many messages are under way
CALL_S = 120.0  # no call is given up before


@dataclass
class Kill:
    """One death of the server, and how it came back."""

    at: float
    started_at: float = 0.0
    listening_at: float = 0.0


@dataclass
class Delivery:
    """A job in the hands of a client. Times are those of the machine's monotonic clock."""

    number: tuple[str, int]
    offset: int
    fence: int
    attempt: int
    asked_at: float
    got_at: float
    ended_at: float = 0.0
    acked: bool = False
    abandoned: bool = False


@dataclass
class Read:
    """An event that a member of the group was given."""

    partition: int
    offset: int
    number: tuple[str, int]
    asked_at: float


@dataclass
class Commit:
    """What was committed, for sure, at that time."""

    at: float
    offsets: dict[int, int]


@dataclass
class Notes:
    """What all clients did."""

    kills: list[Kill] = field(default_factory=list)
    sent: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {EVENTS: [], JOBS: []})
    answered_at: list[float] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def seconds_until_served(self) -> list[float]:
        """For each start after a kill: until the first message was stored for somebody."""
        served = sorted(self.answered_at)
        return [next((at - kill.started_at for at in served if at > kill.started_at), 1e9) for kill in self.kills]


class Clients:
    """Four producers and four members of a stream; four producers and four workers of a queue."""

    def __init__(self, url: str, each: int = 4) -> None:
        self.url = url
        self.notes = Notes()
        self._no_more_sending = threading.Event()
        self._stop = threading.Event()
        kinds: list[Callable[[int], None]] = [self._send_events, self._put_jobs, self._read_events, self._work_on_jobs]
        self._threads = [
            [threading.Thread(target=self._run, args=(kind, i), daemon=True) for i in range(each)] for kind in kinds
        ]
        self._handled = {EVENTS: set[tuple[str, int]](), JOBS: set[tuple[str, int]]()}

    def start(self) -> None:
        for threads in self._threads:
            for thread in threads:
                thread.start()

    def finish(self) -> None:
        """Send no more, let all be handled that was sent, stop."""
        self._no_more_sending.set()
        for thread in [*self._threads[0], *self._threads[1]]:
            thread.join(2 * CALL_S)
            assert not thread.is_alive(), "a producer hangs"
        deadline = time.monotonic() + CALL_S
        while not self.notes.errors and any(self._behind(topic) for topic in (EVENTS, JOBS)):
            assert time.monotonic() < deadline, f"lost: {[self._lost(topic)[:20] for topic in (EVENTS, JOBS)]}"
            time.sleep(0.1)
        self.stop()

    def stop(self) -> None:
        self._no_more_sending.set()
        self._stop.set()
        for thread in [*self._threads[2], *self._threads[3]]:
            thread.join(2 * CALL_S)

    def _behind(self, topic: str) -> int:
        return len(self.notes.sent[topic]) - len(self._handled[topic])

    def _lost(self, topic: str) -> list[tuple[str, int]]:
        return sorted(set(self.notes.sent[topic]) - self._handled[topic])

    def _run(self, kind: Callable[[int], None], number: int) -> None:
        try:
            kind(number)
        except BaseException as error:
            self.notes.errors.append(error)
            self._no_more_sending.set()
            self._stop.set()

    def _sending(self, topic: str) -> bool:
        while self._behind(topic) > BACKLOG and not self._no_more_sending.is_set():
            self._no_more_sending.wait(0.01)
        return not self._no_more_sending.is_set()

    def _note_sent(self, topic: str, numbers: Iterable[tuple[str, int]]) -> None:
        self.notes.sent[topic].extend(numbers)
        self.notes.answered_at.append(time.monotonic())

    def _send_events(self, producer: int) -> None:
        counts: defaultdict[str, int] = defaultdict(int)
        with (
            holdfast.connect(self.url, timeout=CALL_S) as broker,
            broker.producer(name=f"producer-{producer}", retries=None, linger_ms=1) as sender,
        ):
            turn = 0
            while self._sending(EVENTS):
                numbers, answers = [], []
                for _ in range(AT_ONCE):
                    turn += 1
                    key = f"{producer}.{turn % KEYS}"
                    numbers.append((key, counts[key]))
                    counts[key] += 1
                    answers.append(sender.send(EVENTS, body_of(numbers[-1]), key=key))
                for answer in answers:
                    stored = answer.result(CALL_S)
                    assert stored is not None
                self._note_sent(EVENTS, numbers)

    def _put_jobs(self, producer: int) -> None:
        counts: defaultdict[str, int] = defaultdict(int)
        with holdfast.open(self.url, topic=JOBS, timeout=CALL_S) as queue:
            turn = 0
            while self._sending(JOBS):
                numbers = []
                for _ in range(AT_ONCE if turn % 3 == 0 else 1):
                    turn += 1
                    key = f"{producer}.{turn % KEYS}"
                    numbers.append((key, counts[key]))
                    counts[key] += 1
                queue.put_many([holdfast.NewMessage(body=body_of(each), key=each[0]) for each in numbers])
                self._note_sent(JOBS, numbers)

    def _read_events(self, _: int) -> None:
        with (
            holdfast.connect(self.url, timeout=CALL_S) as broker,
            broker.consumer(EVENTS, group="readers", auto_commit=False, session_ms=10_000) as consumer,
        ):
            while not self._stop.is_set():
                asked_at = time.monotonic()
                found = consumer.poll(0.5, max_records=100)
                for event in found:
                    number = number_of(event.body)
                    self.notes.reads.append(Read(event.partition, event.offset, number, asked_at))
                    self._handled[EVENTS].add(number)
                if not found:
                    continue
                try:
                    consumer.commit(found)
                except Fenced:
                    continue  # another has these partitions by now, and the messages come again
                ends = {event.partition: event.offset + 1 for event in found}
                self.notes.commits.append(Commit(time.monotonic(), ends))

    def _work_on_jobs(self, worker: int) -> None:
        with holdfast.open(self.url, topic=JOBS, timeout=CALL_S) as queue:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                abandon = turn % ABANDON_EVERY == 0 and not self._no_more_sending.is_set()
                count = AT_ONCE if turn % 2 and not abandon else 1
                asked_at = time.monotonic()
                messages = queue.get_many(count, timeout=0.5, lease=LEASE_S, detached=abandon)
                got_at = time.monotonic()
                held = [_delivery(message, asked_at, got_at) for message in messages]
                self.notes.deliveries.extend(held)
                if abandon:
                    for delivery in held:
                        delivery.abandoned = True
                    continue
                lost = _acked(queue, messages)
                for message, delivery in zip(messages, held, strict=True):
                    delivery.ended_at = time.monotonic()
                    delivery.acked = message.receipt not in lost
                    self._handled[JOBS].add(delivery.number)


def _acked(queue: Any, messages: list[Any]) -> set[str]:
    """Ack them; answers with those of which nobody can say whether that counted."""
    if not messages:
        return set()
    try:
        queue.ack_many(messages)
    except LeaseLost as error:
        return set(error.receipts) or {message.receipt for message in messages}
    return set()


def _delivery(message: Any, asked_at: float, got_at: float) -> Delivery:
    number = number_of(message.body)
    return Delivery(number, message.offset, message.fence, message.attempt, asked_at, got_at)


def body_of(number: tuple[str, int]) -> bytes:
    """A message that says which one it is, and is long enough to be cut."""
    key, count = number
    return f"{key} {count} ".encode() + b"\xff" * (count % 300)


def number_of(body: bytes) -> tuple[str, int]:
    key, count, rest = body.split(b" ", 2)
    assert rest == b"\xff" * (int(count) % 300), "a body was cut or mixed up"
    return key.decode(), int(count)
