"""Queues and groups in which keys decide who is next, through the real faces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.broker.delivery import Delivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.leases import Delivered
from holdfast.broker.waiters import ThreadWaiter
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import BadSettings, Empty
from holdfast.model import Batch
from holdfast.settings import TopicSettings
from holdfast.testing import QueueKit
from tests.unit.queues import PLAIN, Place

ORDER = {"key_order": True, "body_type": str}


def put(q: holdfast.Queue[Any], *bodies: str) -> None:
    """Each with the key that stands before its number; "-" has none."""
    q.put_many([holdfast.NewMessage(body=body, key=None if body[0] == "-" else body.rstrip("0123456789"))
                for body in bodies])  # fmt: skip


def texts(messages: Iterable[Any]) -> list[str]:
    return [message.body for message in messages]


_in_hand: list[Any] = []


@pytest.fixture(autouse=True)
def hands() -> Iterator[None]:
    """Messages that a test has taken stay in its hands: nobody drops them before it ends."""
    yield
    _in_hand.clear()


def take(q: holdfast.Queue[Any], count: int = 100) -> dict[str, Any]:
    """What is there now, by body."""
    taken = q.get_many(count, timeout=0)
    _in_hand.extend(taken)
    return {message.body: message for message in taken}


def test_messages_of_a_key_come_one_at_a_time_in_order():
    q = Place(**ORDER).q
    put(q, "a1", "a2", "b1", "-1", "a3", "-2")
    taken = take(q)
    assert list(taken) == ["a1", "b1", "-1", "-2"]
    with pytest.raises(Empty):
        q.get_nowait()
    taken["a1"].ack()
    assert q.get_nowait().body == "a2"


def test_a_nacked_message_keeps_the_others_of_its_key_back():
    place = Place(**ORDER)
    q = place.q
    put(q, "a1", "a2", "b1")
    take(q)["a1"].nack(delay=5)
    assert take(q) == {}
    place.after(seconds=4)
    assert take(q) == {}
    place.after(seconds=1)
    taken = take(q)
    assert list(taken) == ["a1"]
    assert taken["a1"].attempt == 2
    taken["a1"].ack()
    assert list(take(q)) == ["a2"]


def test_a_deferred_message_goes_first_again():
    q = Place(**ORDER).q
    put(q, "a1", "a2")
    take(q)["a1"].defer()
    assert list(take(q)) == ["a1"]


def test_an_ended_lease_keeps_the_others_of_its_key_back():
    place = Place(**ORDER, lease_ms=1_000)
    q = place.q
    put(q, "a1", "a2")
    kept = take(q)
    place.after(seconds=1)
    assert take(q) == {}
    place.after(ms=100)
    assert list(take(q)) == ["a1"]
    with pytest.raises(holdfast.LeaseLost):
        kept["a1"].ack()


def test_a_message_that_was_dropped_comes_back_before_the_next_of_its_key():
    place = Place(**ORDER, dropped_delay_ms=0)
    put(place.q, "a1", "a2")
    take(place.q)
    _in_hand.clear()
    place.tick()
    assert list(take(place.q)) == ["a1"]


def test_a_dead_letter_lets_the_next_of_its_key_go():
    place = Place(**ORDER, max_attempts=2)
    q = place.q
    put(q, "a1", "a2", "a3")
    take(q)["a1"].reject("never")
    second = take(q)["a2"]
    second.nack()
    place.after(seconds=1)
    take(q)["a2"].nack()
    assert texts(q.messages("dead")) == ["a1", "a2"]
    assert list(take(q)) == ["a3"]


def test_a_redriven_message_goes_behind_the_others_of_its_key():
    q = Place(**ORDER).q
    put(q, "a1", "a2")
    take(q)["a1"].reject("never")
    assert q.dead.redrive()
    taken = take(q)
    assert list(taken) == ["a2"]
    taken["a2"].ack()
    assert list(take(q)) == ["a1"]


@pytest.mark.parametrize("how", ["reopen", "kill"])
def test_the_order_holds_across_a_restart(how: str):
    place = Place(**ORDER)
    put(place.q, "a1", "a2", "b1", "b2", "c1", "c2")
    taken = take(place.q)
    taken["a1"].ack()
    taken["b1"].nack(delay=5)
    q = place.reopen(body_type=str) if how == "reopen" else place.kill(body_type=str)
    assert list(take(q)) == ["a2", "c1"]
    place.after(seconds=5)
    assert list(take(q)) == ["b1"]


def test_a_detached_lease_keeps_its_key_busy_across_a_restart():
    place = Place(**ORDER)
    put(place.q, "a1", "a2", "b1")
    receipt = place.q.get(timeout=0, detached=True, lease=60).receipt
    q = place.kill(body_type=str)
    assert list(take(q)) == ["b1"]
    q.resume(receipt).ack()
    assert list(take(q)) == ["a2"]


def test_a_cancelled_or_expired_message_lets_the_next_of_its_key_go():
    place = Place(**ORDER)
    q = place.q
    ids = [stored.id for stored in q.put_many([holdfast.NewMessage(body=f"a{n}", key="a") for n in range(3)])]
    q.put("b0", key="b", ttl=1)
    put(q, "b1")
    assert q.cancel(ids[0])
    place.after(seconds=2)
    assert list(take(q)) == ["a1", "b1"]


def test_peek_shows_what_would_come_and_takes_nothing():
    place = Place(**ORDER, key_group_rate=1.0, key_group_burst=5)
    put(place.q, "a1", "a2", "b1")
    with place.unchanged():
        assert texts(place.q.peek(10)) == ["a1", "b1"]
    assert list(take(place.q)) == ["a1", "b1"]
    assert place.q.peek(10) == []


def test_a_seek_back_keeps_the_order():
    q = Place(**ORDER).q
    put(q, "a1", "a2")
    take(q)["a1"].ack()
    take(q)["a2"].ack()
    q.seek("start")
    taken = take(q)
    assert list(taken) == ["a1"]
    taken["a1"].ack()
    assert list(take(q)) == ["a2"]


def test_the_order_can_be_asked_for_later_and_given_up():
    place = Place(body_type=str)
    put(place.q, "a1", "a2", "a3")
    first = take(place.q, 2)
    assert list(first) == ["a1", "a2"]
    receipts = [message.receipt for message in first.values()]
    q = place.kill(body_type=str, key_order=True)
    assert list(take(q)) == ["a1"]
    q = place.kill(body_type=str, key_order=False)
    assert list(take(q)) == ["a1", "a2", "a3"]
    with pytest.raises(holdfast.LeaseLost):
        q.resume(receipts[0])


def test_priorities_do_not_count_where_keys_decide():
    q = Place(**ORDER).q
    q.put("a1", key="a")
    q.put("a2", key="a", priority=9)
    q.put("b1", key="b", priority=9)
    assert list(take(q)) == ["a1", "b1"]


def test_a_window_of_messages_is_looked_at():
    q = Place(**ORDER, key_lookahead=3).q
    put(q, "a1", "a2", "a3", "b1")
    taken = take(q)
    assert list(taken) == ["a1"]
    taken["a1"].ack()
    assert list(take(q)) == ["a2", "b1"]


def test_the_dead_letters_themselves_have_no_order():
    place = Place(**ORDER, max_attempts=1)
    put(place.q, "a1", "a2")
    for body in ("a1", "a2"):
        take(place.q)[body].nack()
    assert len(texts(place.q.messages("dead"))) == 2
    assert place.q.dead.redrive()
    assert list(take(place.q)) == ["a1"]


def test_a_key_group_is_limited_in_how_many_are_handled_at_once():
    q = Place(body_type=str, key_group_concurrency=2).q
    put(q, "a1", "a2", "a3", "b1", "-1", "-2", "-3")
    taken = take(q)
    assert list(taken) == ["a1", "a2", "b1", "-1", "-2", "-3"]
    taken["a2"].ack()
    assert list(take(q)) == ["a3"]


def test_a_key_group_is_limited_in_how_fast_it_goes():
    place = Place(body_type=str, key_group_rate=2.0, key_group_burst=3, lease_ms=100_000)
    put(place.q, *[f"a{n}" for n in range(9)], "b0")
    assert list(take(place.q)) == ["a0", "a1", "a2", "b0"]
    place.after(ms=499)
    assert take(place.q) == {}
    place.after(ms=1)
    assert list(take(place.q)) == ["a3"]
    place.after(seconds=60)
    assert list(take(place.q)) == ["a4", "a5", "a6"]


def test_restarts_give_no_new_bursts():
    place = Place(body_type=str, key_group_rate=0.01, key_group_burst=3)
    put(place.q, *[f"a{n}" for n in range(9)])
    place.q.ack_many(list(take(place.q).values()))
    for expected in ("a3", "a4"):
        q = place.kill(body_type=str)
        taken = take(q)
        assert list(taken) == [expected]
        taken[expected].ack(durability="fsync")


def test_key_groups_share_fairly():
    q = Place(body_type=str, key_group_fair=True, key_group_separator=":").q
    put(q, *[f"big:{n}" for n in range(20)], "small:1", "tiny:1", "small:2")
    assert texts(q.get_many(6, timeout=0)) == ["big:0", "small:1", "tiny:1", "big:1", "small:2", "big:2"]


def shared(**settings: Any) -> tuple[BrokerEngine, QueueGroup]:
    """A topic with three partitions, and a group on it."""
    engine = BrokerEngine.open("/data", world=World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1)))
    engine.create_topic("orders", TopicSettings(partitions=3, min_free_bytes=0, **settings))
    return engine, engine.topic("orders").group("billing")


def append(group: QueueGroup, number: int, *keys: str) -> None:
    batch = Batch(values=[key.encode() for key in keys], keys=[key.encode() for key in keys])
    group.topic.partitions[number].log.append(batch)


def receive(group: QueueGroup, count: int = 100) -> list[tuple[Delivery, Delivered]]:
    found = group.receive(count, lease_ms=100_000, holder="ann", detached=False)
    return [(delivery, delivered) for delivery, taken in found for delivered in taken]


def keys_of(taken: Iterable[tuple[Delivery, Delivered]]) -> list[str]:
    return sorted((delivered.record.key or b"").decode() for _, delivered in taken)


def test_a_limit_counts_over_all_partitions():
    engine, group = shared(key_group_separator=":", key_group_concurrency=2)
    append(group, 0, "x:1", "x:2", "y:1")
    append(group, 1, "x:3")
    append(group, 2, "x:4", "z:1")
    taken = receive(group)
    assert [key[0] for key in keys_of(taken)] == ["x", "x", "y", "z"]
    assert receive(group) == []
    delivery, delivered = next(pair for pair in taken if pair[1].record.key[:1] == b"x")
    delivery.wait(delivery.ack([delivered.receipt]))
    assert [key[0] for key in keys_of(receive(group))] == ["x"]
    engine.close()


def test_a_rate_counts_over_all_partitions():
    engine, group = shared(key_group_rate=1.0, key_group_burst=2)
    for number in range(3):
        append(group, number, "x", "x")
    assert len(receive(group)) == 2
    assert group.due_ms() == 1_000
    engine.world.clock.advance(seconds=1)
    assert len(receive(group)) == 1
    engine.close()


def test_an_ack_in_one_partition_wakes_whoever_waits_for_another():
    engine, group = shared(key_group_separator=":", key_group_concurrency=1)
    append(group, 0, "x:1")
    [(delivery, delivered)] = receive(group)
    append(group, 1, "x:2")
    assert receive(group) == []
    waiter = ThreadWaiter(engine.world.clock)
    with group.waiters.in_line(waiter):
        delivery.wait(delivery.ack([delivered.receipt]))
        assert waiter.woken
    assert keys_of(receive(group)) == ["x:2"]
    engine.close()


@pytest.mark.parametrize("count", [1, 2])
def test_two_partitions_never_both_give_the_last_that_a_limit_allows(monkeypatch: pytest.MonkeyPatch, count: int):
    engine, group = shared(key_group_separator=":", key_group_concurrency=1)
    append(group, 0, "x:1")
    append(group, 1, "x:2")
    first, second = group.deliveries[0], group.deliveries[1]
    load, choose, others = first.supply.load, first.supply.keyed.choose_one, []

    def meanwhile() -> None:
        others.extend(second.receive(1, lease_ms=1_000, holder="bob"))

    thread = threading.Thread(target=meanwhile)

    def slowly(call: Callable[..., Any], *what: Any) -> Any:
        """Between the choice and the lease the other partition is asked, and has to wait."""
        found = call(*what)
        thread.start()
        thread.join(0.1)
        return found

    monkeypatch.setattr(first.supply, "load", partial(slowly, load))  # the general path
    monkeypatch.setattr(first.supply.keyed, "choose_one", partial(slowly, choose))  # that of one message
    taken = first.receive(count, lease_ms=1_000, holder="ann")
    thread.join()
    assert (len(taken), others) == (1, [])
    engine.close()


def test_a_seek_in_one_partition_frees_no_limit():
    engine, group = shared(key_group_separator=":", key_group_concurrency=1)
    append(group, 0, "x:1")
    append(group, 1, "x:2")
    [(delivery, _)] = receive(group)
    delivery.seek(0)
    assert receive(group) == []
    engine.close()


def test_whoever_waits_is_woken_for_what_lay_behind_the_window():
    engine, group = shared(key_order=True, key_lookahead=1)
    append(group, 0, "a", "b")
    [(delivery, delivered)] = receive(group)
    waiter = ThreadWaiter(engine.world.clock)
    with group.waiters.in_line(waiter):
        delivery.wait(delivery.ack([delivered.receipt]))
        assert waiter.woken
    assert keys_of(receive(group)) == ["b"]
    engine.close()


def test_a_policy_can_be_changed_while_the_group_is_at_work():
    engine, group = shared()
    append(group, 0, "a", "a", "a", "b")
    first = receive(group, 2)
    assert keys_of(first) == ["a", "a"]
    group.topic.group("billing", changes={"key_order": True})
    assert keys_of(receive(group)) == ["b"]
    delivery = first[0][0]
    delivery.ack_one(first[0][1].receipt.offset, first[0][1].receipt.fence)
    assert receive(group) == []
    delivery.ack_one(first[1][1].receipt.offset, first[1][1].receipt.fence)
    assert keys_of(receive(group)) == ["a"]
    append(group, 0, "a", "a")
    assert receive(group) == []
    group.topic.group("billing", changes={"key_order": False})
    assert keys_of(receive(group)) == ["a", "a"]
    engine.close()


def test_a_group_keeps_the_order_of_each_key_over_all_partitions_and_restarts():
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))
    broker = holdfast.open_broker("/data", world=world, body_type=int)
    broker.create_topic("orders", partitions=3, min_free_bytes=0)
    broker.group("orders", "billing", key_order=True)
    broker.publish_many("orders", [holdfast.NewMessage(body=n, key=f"key {n % 5}") for n in range(40)])
    seen: list[list[int]] = [[] for _ in range(5)]
    for turn in range(200):
        workers = broker.group("orders", "billing")
        taken = workers.receive_many(4, timeout=0)
        assert len({message.key for message in taken}) == len(taken)
        for message in taken:
            if message.body % 7 == 0 and message.attempt == 1:
                message.nack(delay=0)
            else:
                seen[message.body % 5].append(message.body)
                message.ack()
        if turn == 3:
            broker.close()
            broker = holdfast.open_broker("/data", world=world, body_type=int)
    assert seen == [list(range(key, 40, 5)) for key in range(5)]
    broker.close()


def test_one_group_has_an_order_and_another_has_none():
    engine, group = shared()
    ordered = group.topic.group("ordered", changes={"key_order": True})
    append(group, 0, "a", "a", "a")
    assert len(receive(group)) == 3
    assert len(receive(ordered)) == 1
    engine.close()


def test_somebody_looks_again_when_the_rate_allows_more():
    place = Place(body_type=str, key_group_rate=1.0)
    delivery = place.q._port.deliveries[0]
    put(place.q, "a1", "a2")
    place.tick()
    take(place.q)
    assert delivery._due_mono_ms - delivery.mono_ms() == 1_000


def test_somebody_looks_again_for_a_message_that_came_too_early():
    place = Place(body_type=str, key_group_rate=1.0)
    delivery = place.q._port.deliveries[0]
    put(place.q, "a1")
    take(place.q)
    place.after(ms=100)
    put(place.q, "a2")
    assert take(place.q) == {}
    assert delivery._due_mono_ms - delivery.mono_ms() == 900


@pytest.mark.parametrize("durability", [None, "fsync"])
def test_an_interrupted_call_leaves_no_key_busy(monkeypatch: pytest.MonkeyPatch, durability: Any):
    place = Place(**ORDER)
    put(place.q, "a1", "a2")
    message = take(place.q)["a1"]

    def interrupted(_events: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("note", "ack_one"):  # the general path, and that of one message
            patch.setattr(place.q._port.deliveries[0].supply.keyed, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            message.ack(durability=durability)
    assert list(take(place.q)) == ["a2"]


def test_whoever_waits_is_woken_when_the_rate_allows_more():
    with QueueKit(body_type=str, key_group_rate=2.0) as kit:
        put(kit.queue, "a1", "a2", "a3")
        began = kit.clock.monotonic_ns()
        for expected in ("a1", "a2", "a3"):
            message = kit.queue.get(timeout=10)
            assert message.body == expected
            message.ack()
        assert kit.clock.monotonic_ns() - began == 1_000_000_000


def test_whoever_waits_is_woken_when_a_retry_of_the_key_is_due():
    with QueueKit(**ORDER, **PLAIN) as kit:
        put(kit.queue, "a1", "a2")
        kit.queue.get(timeout=0).nack(delay=3)
        assert kit.queue.get(timeout=10).body == "a1"


def test_a_waiting_thread_is_woken_by_the_ack_that_frees_the_key(tmp_path: Any):
    with holdfast.open(tmp_path, durability="os", **ORDER) as q:
        put(q, "a1", "a2", "a3")
        first = q.get(timeout=0)
        got: list[str] = []

        def work() -> None:
            message = q.get(timeout=30)
            got.append(message.body)
            message.ack()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        while q.stats().waiters < 2:
            pass
        first.ack()
        for thread in threads:
            thread.join(30)
        assert got == ["a2", "a3"]


def test_a_waiting_thread_is_woken_when_time_allows_more(tmp_path: Any):
    with holdfast.open(tmp_path, durability="os", body_type=str, key_group_rate=50.0) as q:
        put(q, *[f"a{n}" for n in range(5)])
        assert [q.get(timeout=30).body for _ in range(5)] == [f"a{n}" for n in range(5)]


def test_tasks_follow_the_same_order():
    async def story(kit: QueueKit) -> list[str]:
        q, seen = kit.aio(), []

        async def work() -> None:
            for _ in range(3):
                message = await q.get(timeout=10)
                seen.append(message.body)
                await asyncio.sleep(0)
                await message.ack()

        await asyncio.gather(work(), work())
        return seen

    with QueueKit(**ORDER) as kit:
        put(kit.queue, "a1", "a2", "b1", "a3", "b2", "b3")
        seen = asyncio.run(story(kit))
    assert [body for body in seen if body[0] == "a"] == ["a1", "a2", "a3"]
    assert [body for body in seen if body[0] == "b"] == ["b1", "b2", "b3"]


def test_many_threads_never_hold_two_messages_of_a_key(tmp_path: Any):
    keys, count = 7, 350
    with holdfast.open(tmp_path, durability="os", key_order=True, body_type=int) as q:
        q.put_many([holdfast.NewMessage(body=number, key=str(number % keys)) for number in range(count)])
        delivery = q._port.deliveries[0]
        lock, order, wrong = threading.Lock(), [[] for _ in range(keys)], []

        def work() -> None:
            while sum(map(len, order)) < count:
                for message in q.get_many(3, timeout=0.2):
                    with delivery.lock:
                        held = sorted(offset % keys for offset in delivery.group.leases)
                    if len(held) != len(set(held)):
                        wrong.append(held)
                    if message.body % 5 == 0 and message.attempt == 1:
                        message.nack(delay=0)
                        continue
                    with lock:
                        order[message.body % keys].append(message.body)
                    message.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert order == [list(range(key, count, keys)) for key in range(keys)]


def test_the_test_kit_moves_time_on_to_what_keys_keep_back():
    with QueueKit(**ORDER, **PLAIN, key_group_rate=1.0) as kit:
        put(kit.queue, "a1", "a2", "a3")
        seen: list[str] = []

        def handle(message: Any) -> None:
            seen.append(message.body)
            if seen == ["a1"]:
                raise ValueError

        assert kit.drain(handle, advance=True).handled == 3
        assert seen == ["a1", "a1", "a2", "a3"]


@pytest.mark.parametrize(
    "changes",
    [
        {"key_group_concurrency": 0},
        {"key_group_rate": 0},
        {"key_group_rate": -1.0},
        {"key_group_burst": 0},
        {"key_group_separator": ""},
        {"key_lookahead": 0},
        {"key_order": "yes"},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]):
    with pytest.raises(BadSettings):
        Place(**changes)
