"""Clients of every kind, each a process that works until it is told to end, and records what it did and was told.

    python -m tests.nemesis.clients KIND NAME URLS FOLDER SEED

A kind is a function in `KINDS`. It is called again and again with a broker, makes a few calls, and records them; the
checks of its history are in `checks`. To add one, add it in both.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import HoldfastError
from tests.nemesis.history import Event, Recorder, Result

PATIENCE_S = 8.0
HASTY_S = 0.7  # of those that only look: each call that begins while a node is stopped is one that it may answer late
LEASE_S = 4.0
LOCK_LEASE_S = 3.0
TOPICS = 3  # of each kind, so that several shards have some
PARTITIONS = 2
KEYS = 3
PAUSE_S = 0.02


class Client:
    """What all kinds need: a broker, a history, chance, and the wish to go on."""

    def __init__(self, name: str, urls: list[str], folder: Path, seed: int, patience_s: float = PATIENCE_S) -> None:
        self.name = name
        self.rng = random.Random(f"{seed}/{name}")
        self.record = Recorder(folder, name)
        self.broker = holdfast.connect(urls, timeout=patience_s)
        self.ending = threading.Event()
        self.count = 0

    def next(self) -> str:
        """A text that nobody else has."""
        self.count += 1
        return f"{self.name}:{self.count}"

    def pause(self, seconds: float = PAUSE_S) -> None:
        self.ending.wait(seconds * (0.5 + self.rng.random()))

    def run(self, turn: Callable[[Client], None]) -> None:
        while not self.ending.is_set():
            turn(self)
            self.pause()
        with suppress(HoldfastError):
            self.broker.close()
        self.record.close()


def topic_of(kind: str, number: int) -> str:
    return f"nemesis-{kind}-{number}"


# Queues, with leases and acks


def put(me: Client) -> None:
    topic, body = topic_of("queue", me.rng.randrange(TOPICS)), me.next()
    with me.record.call("put", topic, body=body) as call:
        me.broker.publish(topic, body.encode(), durability="fsync")
        call.out = {}


def take(me: Client) -> None:
    """Receive a message, sometimes hold it for a while, and settle it; sometimes pin its lease in the store before."""
    topic = topic_of("queue", me.rng.randrange(TOPICS))
    message: Any = None
    with me.record.call("get", topic, lease=LEASE_S) as call:
        message = _queue(me, topic).get(timeout=0.5, lease=LEASE_S)
        call.out = {"body": message.body.decode(), "fence": message.fence, "attempt": message.attempt}
    if message is None:
        return
    body = message.body.decode()
    if me.rng.random() < 0.3:
        with me.record.call("pin", topic, body=body, fence=message.fence):
            message.state.save({"by": me.name}, durability="fsync")
    if me.rng.random() < 0.2:
        me.pause(0.6)
    if me.rng.random() < 0.1:
        with me.record.call("nack", topic, body=body, fence=message.fence):
            message.nack(delay=0.1)
    else:
        with me.record.call("ack", topic, body=body, fence=message.fence):
            message.ack(durability="fsync")
    message._settled = True


def _queue(me: Client, topic: str) -> Any:
    queues = me.__dict__.setdefault("queues", {})
    if topic not in queues:
        queues[topic] = me.broker.queue(topic)
    return queues[topic]


# Streams, with committed offsets


def stream(me: Client) -> None:
    """Publish the next messages of a key of one's own, one after the other."""
    topic, key = topic_of("stream", me.rng.randrange(TOPICS)), f"{me.name}-{me.rng.randrange(KEYS)}"
    body = me.next()
    with me.record.call("publish", topic, of=key, body=body, number=me.count) as call:
        stored = me.broker.publish(topic, body.encode(), key=key, durability="fsync")
        call.out = {"partition": stored.partition, "offset": stored.offset}


def consume(me: Client) -> None:
    """Join, poll and commit for a while, and leave."""
    topic = topic_of("stream", me.rng.randrange(TOPICS))
    session = me.next()
    try:
        with me.broker.consumer(topic, group="nemesis", auto_commit=False, session_ms=6_000, heartbeat_ms=1_000) as it:
            for _ in range(20):
                if me.ending.is_set() or not _polled(me, topic, session, it):
                    return
                me.pause()
    except HoldfastError:
        me.pause(0.1)


def _polled(me: Client, topic: str, session: str, consumer: Any) -> bool:
    messages: list[Any] = []
    with me.record.call("poll", topic, session=session) as call:
        messages = consumer.poll(timeout=0.5, max_records=20)
        call.out = [[each.partition, each.offset, each.body.decode()] for each in messages]
    if not call.ok:
        return False
    if messages:
        offsets: dict[tuple[str, int], int] = {}
        for each in messages:
            offsets[topic, each.partition] = max(offsets.get((topic, each.partition), 0), each.offset + 1)
        given = {str(partition): offset for (_, partition), offset in offsets.items()}
        with me.record.call("commit", topic, session=session, offsets=given) as call:
            consumer.commit(offsets=offsets, durability="fsync")
        return call.ok
    return True


def read(me: Client) -> None:
    """Read a partition from where this client has come to: what was there must stay there."""
    topic, partition = topic_of("stream", me.rng.randrange(TOPICS)), me.rng.randrange(PARTITIONS)
    places = me.__dict__.setdefault("places", {})
    offset = places.get((topic, partition), 0)
    with me.record.call("read", topic, partition=partition, offset=offset) as call:
        found = me.broker.read(topic, partition=partition, offset=offset, limit=50)
        call.out = [[each.offset, each.body.decode()] for each in found]
    if call.ok and call.out:
        places[topic, partition] = max(call.out[-1][0] - me.rng.randrange(10), 0)


# Idempotent producers


def produce(me: Client) -> None:
    """Send a few messages in order by a producer with a name, which now and then begins anew."""
    topic = topic_of("produced", me.rng.randrange(TOPICS))
    producer = me.__dict__.get("producer")
    if producer is None or me.rng.random() < 0.02:
        producer = me.__dict__["producer"] = me.broker.producer(
            name=me.name.partition(".")[0], retries=None, linger_ms=1
        )
    sent: list[tuple[str, Event, Any]] = []
    for _ in range(me.rng.randrange(1, 4)):
        event = Event(me.name, "send", topic, {"body": me.next(), "number": me.count}, began=time.monotonic())
        number = me.record.begin(event)
        with _told(me, event):
            sent.append((number, event, producer.send(topic, event.given["body"].encode(), key=me.name)))
    for number, event, answer in sent:
        with _told(me, event):
            stored = answer.result(30)
            event.out, event.result = {"partition": stored.partition, "offset": stored.offset}, Result.OK
        event.ended = time.monotonic()
        me.record.end(number, event)


@contextmanager
def _told(me: Client, event: Event) -> Iterator[None]:
    """After an error, what became of the message is not known, and the producer begins anew."""
    try:
        yield
    except HoldfastError as error:
        event.error = error.code
        me.__dict__["producer"] = None


# Locks with fencing numbers, and the documents that they guard


def lock(me: Client) -> None:
    """Acquire a lock, write the document that it guards as long as the lock lasts, and release it."""
    name = f"nemesis-lock-{me.rng.randrange(KEYS)}"
    held: Any = None
    with me.record.call("acquire", name, lease=LOCK_LEASE_S) as call:
        held = me.broker.locks.acquire(name, owner=me.name, lease=LOCK_LEASE_S, wait=2)
        call.out = {"fence": held.fence}
    if held is None:
        return
    for _ in range(me.rng.randrange(1, 5)):
        value = me.next()
        with me.record.call("update", name, value=value, fence=held.fence) as call:
            call.out = {"version": me.broker.documents.update(name, value, lock=held).version}
        if call.result is Result.FAIL:
            return
        if me.rng.random() < 0.3:
            with me.record.call("keepalive", name, fence=held.fence, lease=LOCK_LEASE_S):
                me.broker.locks.keepalive(held)
        me.pause(LOCK_LEASE_S if me.rng.random() < 0.1 else 0.1)
    with me.record.call("release", name, fence=held.fence):
        me.broker.locks.release(held)


def look(me: Client) -> None:
    """Read a document."""
    name = me.rng.choice([f"nemesis-lock-{me.rng.randrange(KEYS)}", f"nemesis-document-{me.rng.randrange(KEYS)}"])
    with me.record.call("get", name) as call:
        found = me.broker.documents.get(name)
        call.out = {"value": None, "version": 0} if found is None else {"value": found.value, "version": found.version}


def swap(me: Client) -> None:
    """Read a document and replace it if it is still the same; sometimes by a guess that may be wrong."""
    name = f"nemesis-document-{me.rng.randrange(KEYS)}"
    version = None
    with me.record.call("get", name) as call:
        found = me.broker.documents.get(name)
        version = 0 if found is None else found.version
        call.out = {"value": None, "version": 0} if found is None else {"value": found.value, "version": version}
    if version is None:
        return
    me.pause()
    value = me.next()
    with me.record.call("update", name, value=value, version=version) as call:
        call.out = {"version": me.broker.documents.update(name, value, version=version).version}


KINDS: dict[str, Callable[[Client], None]] = {
    each.__name__: each for each in (put, take, stream, consume, read, produce, lock, look, swap)
}


def main() -> None:
    kind, name, urls, folder, seed = sys.argv[1:]
    patience_s = HASTY_S if kind in ("look", "read") else PATIENCE_S
    me = Client(name, urls.split(","), Path(folder), int(seed), patience_s)
    faulthandler.enable()  # whoever waits for the end in vain sends SIGABRT
    # From a thread, because the interrupted one may hold the lock of the event.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=me.ending.set).start())
    me.run(KINDS[kind])


if __name__ == "__main__":
    main()
