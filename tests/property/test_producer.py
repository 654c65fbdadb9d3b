"""Any messages in any batches, lost answers, full disks, kills, resumed sending: each is stored once, in order."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast import NewMessage
from holdfast.api.drafts import Bodies
from holdfast.api.sync.producer import Producer
from holdfast.broker.engine import BrokerEngine
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull, Unavailable
from holdfast.local.publisher import LocalProducerPort, Publisher
from holdfast.producing.rounds import ThreadRounds
from holdfast.settings import ProducerSettings

without_thread = partial(ThreadRounds, thread=False)  # whoever waits does its work: time does not run by itself

FOLDER = "/data"
PARTITIONS = 3


class Place:
    def __init__(self, partitions: int = PARTITIONS, topics: str = "a") -> None:
        self.disk, self.clock, self.ids = SimulatedDisk(), ManualClock(), SeededIds(1)
        self.open()
        for topic in topics:
            self.engine.create_topic(topic, None, {"partitions": partitions, "min_free_bytes": 0})

    def open(self) -> None:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        self.engine = BrokerEngine.open(FOLDER, world=world)

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.open()

    def records(self, topic: str, partition: int) -> list[Any]:
        log = self.engine.topic(topic).partitions[partition].log
        log.sync()
        return list(log.records(0))


# How a message is routed: by a key, in turn, or by hand.
routes = st.one_of(st.none(), st.sampled_from(["k1", "k2", "ö"]), st.binary(max_size=3), st.integers(0, PARTITIONS - 1))


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Any], list[dict[str, Any]]]:
    messages = draw(st.lists(routes, min_size=1, max_size=40))
    life = st.fixed_dictionaries(
        {
            "upto": st.integers(0, len(messages)),
            "steps": st.lists(st.sampled_from(["round", "wait", "flush", "nothing"]), min_size=1, max_size=6),
            "chunk": st.integers(1, 10),
            "batch_messages": st.integers(1, 8),
            "faults": st.dictionaries(st.integers(0, 20), st.sampled_from(["full", "lost"]), max_size=4),
            "acks": st.sampled_from(["leader", "all"]),
        }
    )
    return messages, draw(st.lists(life, min_size=1, max_size=3))


@given(lives())
def test_whatever_happens_each_message_is_stored_once_and_in_order(plan):
    messages, several = plan
    place = Place()
    for life in several:
        live(place, messages[: life["upto"]], life)
        place.kill()
    producer = live(place, messages, several[-1])
    producer.close()
    stored = [[int(record.value) for record in place.records("a", i)] for i in range(PARTITIONS)]
    assert sorted(number for numbers in stored for number in numbers) == list(range(len(messages)))
    assert all(numbers == sorted(numbers) for numbers in stored)


def live(place: Place, messages: list[Any], life: dict[str, Any]) -> Producer:
    """Send the messages in order; the answers that come must be right."""
    settings = ProducerSettings(
        batch_messages=life["batch_messages"], acks=life["acks"], retries=None, linger_ms=5, retry_backoff_ms=1
    )
    producer = Producer(LocalProducerPort(place.engine), settings, name="loader", resume=True, rounds=without_thread)
    producer._core.accumulator.most_messages = life["batch_messages"]  # so that lanes have several parcels
    break_now_and_then(place, life["faults"])
    sent = []
    for first in range(0, len(messages), life["chunk"]):
        for number in range(first, min(first + life["chunk"], len(messages))):
            sent.append(send(producer, number, messages[number]))
        step = life["steps"][first % len(life["steps"])]
        if step == "round":
            producer._rounds.round()
        elif step == "wait":
            place.clock.advance(ms=5)
            producer._rounds.round()
        elif step == "flush":
            producer.flush()
    for number, each in enumerate(sent):
        if each.done():
            stored = each.result(0)
            if stored.offset is not None:
                assert place.records("a", stored.partition)[stored.offset].value == b"%d" % number
    return producer


def send(producer: Producer, number: int, route: Any) -> Any:
    body = b"%d" % number
    if isinstance(route, int):
        return producer.send("a", body, partition=route)
    if route is None and number % 4 == 0:
        return producer.send_many("a", [body])[0]
    return producer.send("a", body, key=route, headers={"n": body} if number % 7 == 0 else None)


def break_now_and_then(place: Place, faults: dict[int, str]) -> None:
    """Some writes find no room, and of some the answer is lost though they succeeded."""
    calls = iter(range(1_000_000))
    for partition in place.engine.topic("a").partitions:

        def append(*arguments: Any, real: Any = partition.append, **options: Any) -> Any:
            fault = faults.get(next(calls))
            if fault == "full":
                raise DiskFull("no room")
            answer = real(*arguments, **options)
            if fault == "lost":
                raise Unavailable("the answer was lost")
            return answer

        partition.append = append


new_messages = st.builds(
    NewMessage,
    body=st.binary(max_size=20),
    key=st.one_of(st.none(), st.text(max_size=3).filter(lambda text: text.isprintable()), st.binary(max_size=3)),
    headers=st.one_of(st.none(), st.dictionaries(st.sampled_from(["x", "y"]), st.one_of(st.just("t"), st.just(b"b")))),
    priority=st.sampled_from([0, 0, 0, 9]),
    ttl=st.sampled_from([None, None, 5]),
    correlation_id=st.sampled_from([None, None, "c"]),
)


@given(st.lists(st.one_of(new_messages, st.binary(max_size=20)), max_size=20), st.booleans())
def test_what_a_producer_stores_is_what_a_plain_publish_stores(messages, at_once):
    place = Place(1, "ab")
    with Producer(LocalProducerPort(place.engine), rounds=without_thread) as producer:
        if at_once:
            producer.send_many("a", messages)
        for message in [] if at_once else messages:
            options = {"body": message} if isinstance(message, bytes) else {f: getattr(message, f) for f in FIELDS}
            producer.send("a", **options)
    publisher = Publisher(place.engine.topic("b"), Bodies(None), place.clock)
    for part in publisher.publish(messages, None, None):
        part.partition.wait(part.publication)
    assert plainly(place.records("a", 0)) == plainly(place.records("b", 0))


FIELDS = ("body", "key", "headers", "priority", "ttl", "correlation_id")


def plainly(records: list[Any]) -> list[tuple[Any, ...]]:
    return [(r.offset, r.value, r.key, r.headers, r.priority, r.expires_at_ms, r.flags) for r in records]
