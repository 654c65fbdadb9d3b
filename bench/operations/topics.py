"""Topics: publishing by a producer, polling a stream, receiving and acking in a group; a thousand at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.child import Sample
from bench.harness import OURS, Case, Operation, Timed
from bench.operations.puts import repeated
from bench.operations.takes import opened_queue, queue_case, timed_takes
from bench.peers.base import KILL
from bench.queues import Queue
from bench.queues.lmdb_by_hand import LmdbQueue
from bench.queues.nats_jetstream import NatsJetStream
from bench.queues.redis_stream import RedisStream
from bench.queues.sqlite_by_hand import SqliteClaimed
from bench.scale import Scale

MANY = 1_000

PUBLISH = Operation(
    f"publish by producer ({MANY:,})",
    f"{MANY:,} messages a call, one caller; each waits until all of its call are in the page cache.",
)
POLL = Operation(
    "stream poll (500)",
    "One consumer of a group in stream mode reads what is there, 500 messages a call, and commits every 5 s.",
)
RECEIVE_ACK = Operation(
    f"group: receive + ack many ({MANY:,})",
    f"{MANY:,} messages a call, leased and acked by one consumer of a group; the publishing is not timed.",
    promise="ack",
)

_PEERS: tuple[type[Queue], ...] = (LmdbQueue, SqliteClaimed, RedisStream, NatsJetStream)
_NOTE = 'durability="os": in the page cache when the call returns'
_POLLED = 50 * MANY


class Variant(NamedTuple):
    """One way to use a topic."""

    name: str
    partitions: int
    single: bool = False
    idempotent: bool = True


_VARIANTS = (
    Variant(OURS, 1),
    Variant(f"{OURS}, 3 partitions", 3),
    Variant(f"{OURS}, not idempotent", 1, idempotent=False),
    Variant(f"{OURS}, one by one", 1, single=True),
)


def cases(scale: Scale) -> list[Case]:
    """Ours in its variants, and what others do with as many messages at a time."""
    publish = [_ours(PUBLISH, each.name, partial(_publish, each, scale)) for each in _VARIANTS]
    publish += [queue_case(PUBLISH, peer, partial(_put_many, peer, scale)) for peer in _PEERS]
    poll = [_ours(POLL, each.name, partial(_poll, each, scale)) for each in _VARIANTS[:2]]
    poll.append(queue_case(POLL, RedisStream, partial(_xread, scale), name="Redis stream, XREAD"))
    takes = [_ours(RECEIVE_ACK, each.name, partial(_receive, each, scale)) for each in _VARIANTS[:2]]
    takes += [queue_case(RECEIVE_ACK, peer, partial(_take_many, peer, scale)) for peer in _PEERS]
    return publish + poll + takes


def _ours(operation: Operation, name: str, prepare: Callable[[Path], Any]) -> Case:
    return Case(operation, name, prepare, KILL, _NOTE, ("holdfast.local",))


@contextmanager
def _broker(variant: Variant, folder: Path) -> Iterator[Any]:
    import holdfast

    with holdfast.open_broker(folder / "data", durability="os") as broker:
        broker.create_topic("orders", partitions=variant.partitions)
        yield broker


@contextmanager
def _publish(variant: Variant, scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies(MANY)
    with _broker(variant, folder) as broker:
        options = {"acks": "leader", "batch_messages": MANY, "idempotent": variant.idempotent}
        with broker.producer(linger_ms=0 if not variant.single else 5, **options) as producer:

            def all_at_once() -> None:
                producer.send_many("orders", bodies).result()

            def one_by_one() -> None:
                send = producer.send
                for body in bodies:
                    sent = send("orders", body)
                producer.flush()
                sent.result()

            yield repeated(one_by_one if variant.single else all_at_once, scale, MANY)


@contextmanager
def _put_many(peer: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies(MANY)
    with opened_queue(peer, scale, folder) as queue:
        yield repeated(lambda: queue.put_many(bodies), scale, MANY)


@contextmanager
def _poll(variant: Variant, scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies(MANY)
    with _broker(variant, folder) as broker:
        for i in range(_POLLED // MANY):
            broker.publish_many("orders", bodies, partition=i % variant.partitions)
        with broker.consumer("orders", group="analytics") as consumer:
            consumer.poll(0)

            def run_pass() -> Sample:
                """The clock does not run while the consumer is taken back to the start."""
                messages, seconds, cpu_s = 0, 0.0, 0.0
                while seconds < scale.seconds:
                    for place in consumer.assignment():
                        consumer.seek(*place, 0)
                    cpu_started, started = time.process_time(), time.perf_counter()
                    left = _POLLED
                    while left > 0:
                        left -= len(consumer.poll(0))
                    seconds += time.perf_counter() - started
                    cpu_s += time.process_time() - cpu_started
                    messages += _POLLED
                return Sample(messages, seconds, cpu_s)

            yield run_pass


@contextmanager
def _xread(scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(RedisStream, scale, folder) as queue:
        for _ in range(_POLLED // MANY):
            queue.put_many(scale.bodies(MANY))
        client: Any = queue.client  # type: ignore[attr-defined]

        def run_pass() -> None:
            last, left = b"0", _POLLED
            while left > 0:
                found = client.xread({"queue": last}, count=500)
                rows = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
                last, left = rows[-1][0], left - len(rows)

        yield repeated(run_pass, scale, _POLLED)


class _GroupOfTopic:
    """What `timed_takes` wants of a queue, done by a group of a topic."""

    def __init__(self, broker: Any, partitions: int) -> None:
        self._broker = broker
        self._partitions = partitions
        self._turn = 0
        self._group = broker.group("orders", "billing")

    def put_many(self, bodies: list[bytes]) -> None:
        self._turn = (self._turn + 1) % self._partitions
        self._broker.publish_many("orders", bodies * (MANY // len(bodies)), partition=self._turn)

    def take_many(self, count: int) -> None:
        self._group.ack_many(self._group.receive_many(count, timeout=0))


@contextmanager
def _receive(variant: Variant, scale: Scale, folder: Path) -> Iterator[Timed]:
    with _broker(variant, folder) as broker:
        taker: Any = _GroupOfTopic(broker, variant.partitions)
        yield timed_takes(taker, taker.take_many, scale, waiting=scale.waiting, at_once=MANY)


@contextmanager
def _take_many(peer: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(peer, scale, folder) as queue:
        yield timed_takes(queue, queue.take_many, scale, waiting=scale.waiting, at_once=MANY)
