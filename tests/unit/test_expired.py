"""Messages whose time to live is over are passed over many at a time, in whatever order a group takes its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyroaring import BitMap64

import holdfast
import holdfast.aio
from holdfast.broker.delivery import Delivery
from holdfast.broker.journal import Journal
from holdfast.broker.partition import Partition
from holdfast.delivery import choose
from holdfast.delivery.events import Event
from holdfast.delivery.keys import KeyGate
from holdfast.model import Appended
from holdfast.storage.view import Follower
from tests.unit.queues import FOLDER, Place

MANY = 3_000
_ORDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strict": {},
    "fair": {"priority_choice": "fair"},
    "promoted": {"promote_after_ms": 1},
    "one key": {"key_order": True},
    "limited": {"key_group_concurrency": 1},
}


class Work:
    """What is done to find a message, counted."""

    commits = 0
    read = 0
    holds = 0
    events = 0
    batches = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()

    def count(kind: type, name: str, what: str) -> None:
        plain: Callable[..., Any] = getattr(kind, name)

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            setattr(counted, what, getattr(counted, what) + 1)
            return plain(self, *arguments, **options)

        monkeypatch.setattr(kind, name, method)

    count(Delivery, "commit_events", "commits")
    count(Follower, "record", "read")
    count(Delivery, "_receive", "holds")
    count(Partition, "append_moved", "batches")
    append = Journal.append

    def appended(self: Journal, events: Sequence[Event], *arguments: Any) -> Appended:
        counted.events += len(events)
        return append(self, events, *arguments)

    monkeypatch.setattr(Journal, "append", appended)
    return counted


def _put(q: holdfast.Queue[Any], order: str, count: int = MANY) -> None:
    how: dict[str, Any] = {}
    if order in ("strict", "fair", "promoted"):
        how["priority"] = 5
    if order in ("one key", "limited"):
        how["key"] = "k"
    for number in range(count):
        q.put(b"%d" % number, ttl=1, **how)
    q.put(b"last", **how)


@pytest.fixture(params=[False, True], ids=["dropped", "buried"])
def to_dead(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("order", _ORDERS)
def test_one_get_passes_over_many_expired_messages_in_few_commits(order: str, to_dead: bool, work: Work) -> None:
    place = Place(expired_to_dead=to_dead, **_ORDERS[order])
    _put(place.q, order)
    place.clock.advance(seconds=10)
    work.commits = work.read = work.holds = 0
    assert place.q.get(timeout=0).body == b"last"
    assert work.commits < MANY / 50
    assert work.read < 4 * MANY
    assert place.q.stats().metrics.expired == MANY


@pytest.mark.parametrize("order", ["one key", "limited"])
def test_a_run_of_expired_messages_of_one_key_is_passed_over_before_it_is_looked_through(
    order: str, to_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = 0
    plain = KeyGate.feed

    def feed(self: KeyGate, *arguments: Any) -> None:
        nonlocal fed
        fed += 1
        plain(self, *arguments)

    monkeypatch.setattr(KeyGate, "feed", feed)
    place = Place(expired_to_dead=to_dead, **_ORDERS[order])
    for _ in range(MANY // 100):
        place.q.put_many([holdfast.NewMessage(body=b"x", key="k", ttl=1)] * 100)
    place.q.put(b"last", key="k")
    place.clock.advance(seconds=10)
    assert place.q.get(timeout=0).body == b"last"
    assert fed < MANY / 10
    assert place.q.stats().metrics.expired == MANY


@pytest.mark.parametrize("order", _ORDERS)
def test_no_message_is_held_by_the_lock_for_the_whole_run(order: str, to_dead: bool, work: Work) -> None:
    place = Place(expired_to_dead=to_dead, **_ORDERS[order])
    _put(place.q, order, 9_000)
    place.clock.advance(seconds=10)
    work.holds = 0
    assert place.q.get(timeout=0).body == b"last"
    assert work.holds > 1  # others had their turn in between


def test_behind_a_message_in_hand_the_run_of_expired_ones_is_not_walked_again(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(expired_to_dead=True)
    place.q.put(b"first")
    _put(place.q, "plain")
    held = place.q.get(timeout=0)
    looks = 0
    plain = choose._first_absent

    def counted(bitmap: BitMap64, start: int, end: int) -> int:
        nonlocal looks
        looks += 1
        return plain(bitmap, start, end)

    monkeypatch.setattr(choose, "_first_absent", counted)
    place.clock.advance(seconds=10)
    assert place.q.get(timeout=0).body == b"last"
    assert looks < MANY / 10
    held.ack()


@pytest.mark.parametrize(("taken", "end", "first"), [
    ([], 10, 3), ([3], 10, 4), ([3, 4, 6], 10, 5), (range(3, 10), 10, 10), (range(3, 900), 1000, 900),
    (range(3), 10, 3), ([4], 10, 3), (range(3, 2000), 1000, 1000),
])  # fmt: skip
def test_the_first_offset_that_is_not_in_a_bitmap(taken: Any, end: int, first: int) -> None:
    assert choose._first_absent(BitMap64(taken), 3, end) == first


def test_expired_messages_between_good_ones_are_passed_over_and_no_good_one_is_missed() -> None:
    place = Place(expired_to_dead=True)
    for number in range(300):
        place.q.put(b"%d" % number, ttl=1 if number % 7 else None, priority=number % 3)
    place.clock.advance(seconds=10)
    found = []
    while True:
        try:
            message = place.q.get(timeout=0)
        except holdfast.Empty:
            break
        found.append(int(message.body))
        message.ack()
    assert found == sorted((n for n in range(0, 300, 7)), key=lambda n: (-(n % 3), n))
    place.tick()
    assert len(place.q.dead.list()) == 300 - len(found)


def test_all_that_was_buried_at_once_becomes_dead_letters_also_after_a_kill() -> None:
    place = Place(expired_to_dead=True)
    _put(place.q, "plain")
    place.clock.advance(seconds=10)
    place.q.get(timeout=0).ack()
    place.kill()
    assert len(place.q.dead.list()) == MANY
    assert place.q.stats().ready == 0


@pytest.mark.parametrize("order", _ORDERS)
def test_a_run_of_buried_messages_is_few_events_in_the_journal_and_few_appends_of_letters(
    order: str, work: Work
) -> None:
    place = Place(expired_to_dead=True, **_ORDERS[order])
    _put(place.q, order)
    place.clock.advance(seconds=10)
    work.events = 0
    assert place.q.get(timeout=0).body == b"last"
    place.tick()
    assert place.q.stats().dead == MANY
    assert work.events < MANY / 50
    assert work.batches <= MANY / 500


def test_a_message_that_failed_before_it_expired_is_buried_with_its_history() -> None:
    place = Place(expired_to_dead=True)
    for body in (b"untried", b"tried", b"untried"):
        place.q.put(body, ttl=60, priority=int(body == b"tried"))
    place.q.get(timeout=0).nack(error="no luck", delay=0)
    place.clock.advance(seconds=100)
    with pytest.raises(holdfast.Empty):
        place.q.get(timeout=0)
    place.kill()
    assert sorted((letter.body, letter.attempts, letter.reason) for letter in place.q.dead.list()) == [
        (b"tried", 1, "EXPIRED"),
        (b"untried", 0, "EXPIRED"),
        (b"untried", 0, "EXPIRED"),
    ]


def test_messages_that_were_redriven_for_another_group_are_passed_over_many_at_a_time(work: Work) -> None:
    place = Place()
    place.q.close()
    with holdfast.open_broker(FOLDER, world=place.world) as broker:
        broker.create_topic("t", max_attempts=1, min_free_bytes=0)
        one, other = broker.group("t", "one"), broker.group("t", "other")
        broker.publish_many("t", [b"x"] * MANY)
        while taken := one.receive_many(1_000, timeout=0):
            for message in taken:
                message.reject("no")
        other.ack_many(other.receive_many(MANY, timeout=0))
        assert one.dead.redrive().done == MANY
        broker.publish("t", b"last")
        work.commits = 0
        assert other.receive(timeout=0).body == b"last"
        assert work.commits < MANY / 50


def test_peek_passes_over_expired_messages_without_keeping_the_lock(to_dead: bool, work: Work) -> None:
    place = Place(expired_to_dead=to_dead)
    _put(place.q, "plain")
    place.clock.advance(seconds=10)
    work.commits = 0
    assert [m.body for m in place.q.peek(5)] == [b"last"]
    assert work.commits < MANY / 20


def test_a_task_gives_the_others_their_turn_while_it_passes_over_expired_messages(to_dead: bool) -> None:
    place = Place(expired_to_dead=to_dead)
    _put(place.q, "plain", 9_000)
    place.q.close()
    place.clock.advance(seconds=10)

    async def story() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with holdfast.aio.open(FOLDER, world=place.world) as q:
            beside = asyncio.create_task(other())
            message = await q.get(timeout=0)
            beside.cancel()
            assert message.body == b"last"
            await message.ack()
        return turns

    assert asyncio.run(story()) > 0
