"""The queue for threads: every name of its face, on the simulated world."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import queue
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import BadBody, Conflict, Empty, LeaseLost, NewMessage, OffsetOutOfRange, Stored
from holdfast.api.arguments import MessageOutcome
from holdfast.settings import TopicSettings
from tests.unit.queues import FOLDER, Place, bodies


@pytest.fixture
def place() -> Place:
    return Place()


# Putting


def test_put_answers_with_id_offset_and_what_it_survives(place):
    first, second = place.q.put(b"a"), place.q.put(b"b", key="k")
    assert (first.id, first.offset, first.duplicate, first.durability) == ("jobs-0-0", 0, False, "fsync")
    assert (second.id, second.offset) == ("jobs-0-1", 1)
    assert place.q.put(b"c", durability="os").durability == "os"
    assert place.q.put_many([b"d"], durability="interval")[0].durability == "interval"
    later = place.q.put(b"e", delay=1)
    assert (later.id, later.offset, later.durability) == ("jobs-0-d0", None, "fsync")


def test_everything_that_is_put_comes_out(place):
    stored = place.q.put(
        b"resize 42",
        key="user-7",
        headers={"kind": "img"},
        priority=7,
        ttl=3600,
        dedup_id="img-42",
        correlation_id="c-1",
    )
    (seen,) = place.q.peek()
    m = place.q.get(timeout=0)
    for found in (seen, m):
        assert (found.id, found.offset, found.body, found.raw) == (stored.id, 0, b"resize 42", b"resize 42")
        assert (found.key, dict(found.headers), found.priority) == ("user-7", {"kind": "img"}, 7)
        assert (found.correlation_id, found.timestamp_ns) == ("c-1", place.clock.now_ns())
        assert found.timestamp == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        assert found.expires_at == found.timestamp + timedelta(hours=1)
        assert found.due_at is None
    assert m.attempt == 1
    m.ack()


def test_all_options_together_also_when_delayed(place):
    stored = place.q.put(
        b"x", key=b"k", headers=[("h", b"1"), ("h", b"2")], priority=3, delay=2.5, ttl=10, dedup_id="d",
        correlation_id="c", durability="os", codec="zstd",
    )  # fmt: skip
    due = datetime(2023, 11, 14, 22, 13, 22, 500_000, tzinfo=UTC)
    place.after(ms=2_500)
    m = place.q.get(timeout=0)
    assert (m.id, m.offset, m.key, m.headers.pairs) == (stored.id, 0, b"k", (("h", b"1"), ("h", b"2")))
    assert (m.priority, m.correlation_id, m.due_at) == (3, "c", due)
    assert m.expires_at == due + timedelta(seconds=10)
    assert m.timestamp == due


def test_a_message_without_a_correlation_id_has_its_own(place):
    stored, later = place.q.put(b"x"), place.q.put(b"y", delay=1)
    place.after(seconds=1)
    assert [m.correlation_id for m in place.q.get_many(2)] == [stored.id, later.id]


@pytest.mark.parametrize(
    ("key", "headers"),
    [("text", {"a": "1"}), (b"bytes", {"a": b"1"}), ("", {"a": ""}), (b"\xff", {"a": b"\xff"}), ("é", {"é": "é"})],
)
@pytest.mark.parametrize("delay", [None, 1])
def test_keys_and_headers_come_back_as_they_were_given(place, key, headers, delay):
    place.q.put(b"x", key=key, headers=headers, delay=delay)
    place.after(seconds=1)
    for q in (place.q, place.kill()):
        (m,) = q.peek()
        assert (m.key, dict(m.headers)) == (key, headers)
    place.q.get(timeout=0).reject()
    (letter,) = place.q.dead.list()
    assert (letter.key, dict(letter.headers)) == (key, headers)
    place.q.dead.redrive()
    m = place.q.get(timeout=0)
    assert (m.key, dict(m.headers)) == (key, headers)


def test_headers_of_mixed_kinds_come_back_as_they_were_given(place):
    place.q.put(b"x", headers=[("text", "a"), ("bytes", b"b")])
    assert place.q.peek()[0].headers.pairs == (("text", "a"), ("bytes", b"b"))


def test_a_header_may_repeat(place):
    place.q.put(b"x", headers=[("a", "1"), ("b", "2"), ("a", "3")])
    headers = place.q.get(timeout=0).headers
    assert (headers["a"], headers.all("a"), list(headers), len(headers)) == ("1", ["1", "3"], ["a", "b"], 2)
    assert headers.get("c") is None


def test_put_many_takes_bodies_and_messages_and_keeps_their_order(place):
    stored = place.q.put_many(iter([b"a", NewMessage(body=b"b", key="k"), b"c"]))
    assert [each.offset for each in stored] == [0, 1, 2]
    assert bodies(place.q) == [b"a", b"b", b"c"]


def test_put_many_with_a_delay_in_it_is_still_one_write(place):
    stored = place.q.put_many([b"a", NewMessage(body=b"later", delay=5), NewMessage(body=b"b", priority=9)])
    assert len({each.id for each in stored}) == 3
    assert bodies(place.q) == [b"b", b"a"]
    place.after(seconds=5)
    assert bodies(place.q) == [b"later"]


def test_a_time_that_has_passed_is_now(place):
    place.q.put(b"x", at=datetime(2020, 1, 1, tzinfo=UTC))
    place.q.put(b"y", delay=0)
    place.q.put(b"z", delay=timedelta(0))
    assert bodies(place.q) == [b"x", b"y", b"z"]


def test_a_time_in_another_zone_is_the_same_moment(place):
    zone = timezone(timedelta(hours=5))
    place.q.put(b"x", at=datetime(2023, 11, 15, 3, 13, 30, tzinfo=zone))
    place.after(ms=9_999)
    assert bodies(place.q) == []
    place.after(ms=1)
    assert bodies(place.q) == [b"x"]


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd", "lz4"])
def test_a_codec_changes_the_size_and_nothing_else(codec):
    place = Place(codec=codec)
    body = b"again and again " * 1_000
    place.q.put(body)
    place.q.put(body, codec="gzip", key="k")
    assert [m.body for m in place.kill().peek(2)] == [body, body]


# Getting


def test_get_waits_as_long_as_it_may(place):
    before_ns = place.clock.monotonic_ns()
    with pytest.raises(Empty) as caught:
        place.q.get(timeout=12.5)
    assert isinstance(caught.value, queue.Empty)
    assert place.clock.monotonic_ns() - before_ns == 12_500_000_000
    assert place.q.get_many(5, timeout=timedelta(seconds=1)) == []
    assert place.clock.monotonic_ns() - before_ns == 13_500_000_000
    with pytest.raises(Empty):
        place.q.get_nowait()
    assert place.q.get_many(5, timeout=0) == []
    assert place.clock.monotonic_ns() - before_ns == 13_500_000_000
    assert place.q.stats().waiters == 0


def test_get_many_answers_with_what_is_there(place):
    place.q.put_many([b"a", b"b", b"c"])
    first = place.q.get_many(2)
    assert [m.body for m in first] == [b"a", b"b"]
    assert [m.body for m in place.q.get_many(5)] == [b"c"]


def test_plain_messages_come_in_the_order_of_arrival(place):
    for n in range(50):
        place.q.put(b"%d" % n) if n % 3 else place.q.put_many([b"%d" % n])
    taken = [place.q.get(timeout=0) for _ in range(20)] + place.q.get_many(30)
    assert [m.body for m in taken] == [b"%d" % n for n in range(50)]


def test_a_message_knows_its_delivery(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0, holder="ann")
    assert (m.attempt, m.holder, m.lost, m.settled) == (1, "ann", False, False)
    m.nack(delay=0)
    again = place.q.get(timeout=0)
    assert (again.attempt, again.holder) == (2, "simulation:1")
    assert again.fence > m.fence
    assert repr(again) == "<Message jobs-0-0: b'x'>"


# The context manager


def test_success_acks(place):
    place.q.put(b"x")
    with place.q.get(timeout=0) as m:
        assert m.body == b"x"
    assert (m.settled, place.q.stats().floor) == (True, 1)


def test_an_exception_nacks_with_the_error_and_goes_on(place):
    place.q.put(b"x")
    with pytest.raises(ValueError, match="boom"), place.q.get(timeout=0):
        raise ValueError("boom")
    assert place.q.stats().delayed == 1
    place.after(ms=100)
    m = place.q.get(timeout=0)
    assert m.attempt == 2
    assert next(place.q.messages("leased")).error.startswith("ValueError: boom\n\nTraceback")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_an_interruption_gives_back_without_counting(place, kind):
    place.q.put(b"x")
    with pytest.raises(kind), place.q.get(timeout=0):
        raise kind
    m = place.q.get(timeout=0)
    assert m.attempt == 1


def test_what_was_settled_inside_is_not_settled_again(place):
    place.q.put_many([b"a", b"b", b"c"])
    with place.q.get(timeout=0) as a:
        a.nack(delay=0, error="mine")
    with pytest.raises(RuntimeError), place.q.get(timeout=0) as a:
        a.reject("mine")
        raise RuntimeError
    with place.q.get(timeout=0) as b:
        b.defer(delay=5)
    assert (place.q.stats().dead, place.q.stats().delayed, place.q.stats().ready) == (1, 1, 1)


def test_a_lease_that_ended_meanwhile_is_told_on_success_and_noted_on_failure(place):
    place.q.put_many([b"a", b"b"])
    with pytest.raises(LeaseLost), place.q.get(timeout=0, lease=1):
        place.after(seconds=1)
    with pytest.raises(ValueError, match="boom") as caught, place.q.get(timeout=0, lease=1):
        place.after(seconds=1)
        raise ValueError("boom")
    assert any("could not be returned" in note for note in caught.value.__notes__)


# Nack, backoff, attempts


def test_backoff_grows_and_is_bounded():
    place = Place(max_attempts=None)
    place.q.put(b"x")
    for wait_ms in (100, 200, 400, 800, 1_000, 1_000):
        place.q.get(timeout=0).nack()
        place.after(ms=wait_ms - 1)
        assert place.q.stats().ready == 0
        place.after(ms=1)
        assert place.q.stats().ready == 1


def test_jitter_spreads_within_its_bounds():
    place = Place(backoff_ms=1_000, backoff_jitter_percent=20)
    place.q.put_many([b"%d" % n for n in range(200)])
    for m in place.q.get_many(200):
        m.nack()
    now_ms = place.clock.now_ns() // 1_000_000
    waits = [due_ms - now_ms for due_ms in place.q._port.deliveries[0].group.waiting.values()]
    assert all(800 <= wait_ms <= 1_000 for wait_ms in waits)
    assert len(set(waits)) > 50
    assert min(waits) < 820
    assert max(waits) > 980


def test_a_nack_may_choose_its_own_delay(place):
    place.q.put(b"x")
    place.q.get(timeout=0).nack(delay=timedelta(minutes=2))
    place.after(ms=119_999)
    assert place.q.stats().delayed == 1
    place.after(ms=1)
    assert place.q.get(timeout=0).attempt == 2


def test_after_the_last_attempt_a_message_dies():
    place = Place(max_attempts=2)
    place.q.put(b"x")
    place.q.get(timeout=0).nack(delay=0)
    place.q.get(timeout=0).nack(delay=100)
    assert (place.q.stats().dead, place.q.stats().ready, place.q.stats().delayed) == (1, 0, 0)


def test_deferring_counts_nothing():
    place = Place(max_attempts=1)
    place.q.put(b"x")
    for _ in range(5):
        place.q.get(timeout=0).defer()
    place.q.get(timeout=0).defer(delay=2)
    place.after(ms=1_999)
    assert place.q.stats().delayed == 1
    place.after(ms=1)
    assert place.q.get(timeout=0).attempt == 1
    assert place.q.stats().dead == 0


def test_ack_many_and_nack_many(place):
    place.q.put_many([b"%d" % n for n in range(6)])
    taken = place.q.get_many(6)
    place.q.ack_many(taken[:3])
    place.q.nack_many(taken[3:], delay=5, error="busy")
    assert all(m.settled for m in taken)
    assert (place.q.stats().floor, place.q.stats().delayed) == (3, 3)
    assert [m.error for m in place.q.messages("delayed")] == ["busy"] * 3
    place.q.ack_many([])
    place.q.nack_many([])


def test_ack_many_acks_what_is_still_held_and_names_the_rest(place):
    place.q.put_many([b"%d" % n for n in range(3)])
    (early,) = place.q.get_many(1, lease=1)
    others = place.q.get_many(2)
    place.after(seconds=1)
    with pytest.raises(LeaseLost) as caught:
        place.q.ack_many([early, *others])
    assert caught.value.offsets == (0,)
    assert place.q.stats().delayed == 1
    place.after(ms=100)
    assert bodies(place.q) == [b"0"]


@pytest.mark.parametrize("verb", ["ack", "reject"])
def test_that_a_message_is_done_is_told_only_once_that_is_on_disk(place, verb):
    """A client that got no answer repeats its call, and takes the refusal for success."""
    place.q.put_many([b"a", b"b"])
    first, second = (message.receipt for message in place.q.get_many(2))
    port, outcome = place.q._port, MessageOutcome(verb)
    port.settle([first], outcome, "os")
    (delivery,) = port.queue_group.deliveries
    log = delivery.journal.log
    assert log.synced_end < log.written_end
    with pytest.raises(LeaseLost):
        port.settle([first], outcome, "fsync")
    assert log.synced_end == log.written_end
    port.settle([second], outcome, "os")
    with pytest.raises(LeaseLost):
        port.settle([second], outcome, "os")
    assert log.synced_end < log.written_end


def test_a_conflict_is_told_only_once_it_is_on_disk(place):
    """The same for a state: the client compares it with what it sent."""
    place.q.put(b"a")
    message = place.q.get()
    message.state.save({"step": 1}, durability="os")
    (delivery,) = place.q._port.queue_group.deliveries
    assert delivery.journal.log.synced_end < delivery.journal.log.written_end
    message.state.version = 0
    with pytest.raises(Conflict):
        message.state.save({"step": 1}, durability="fsync")
    assert delivery.journal.log.synced_end == delivery.journal.log.written_end


# Leases


def test_a_lease_that_ends_gives_the_message_back_and_counts(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=2)
    place.after(ms=1_999)
    assert not m.lost
    place.after(ms=1)
    assert m.lost
    place.after(ms=100)
    assert place.q.get(timeout=0).attempt == 2
    gc.collect()


def test_the_default_lease_is_a_setting():
    place = Place(lease_ms=500)
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    place.after(ms=499)
    assert not m.lost
    place.after(ms=1)
    assert m.lost


def test_extending_gives_time_from_now_on(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=2)
    place.after(ms=1_500)
    m.extend(10)
    place.after(ms=9_999)
    assert not m.lost
    m.extend()
    place.after(ms=29_999)
    assert not m.lost
    place.after(ms=1)
    assert m.lost
    with pytest.raises(LeaseLost):
        m.extend(5)


def test_lease_lost_says_who_has_it_since_when_and_why(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=1, holder="ann")
    place.after(seconds=1)
    ended_ms = place.clock.now_ns() // 1_000_000
    with pytest.raises(LeaseLost, match=r"message 0 is no longer yours: lease ended") as caught:
        m.ack()
    assert (caught.value.offsets, caught.value.since_ms) == ((0,), ended_ms)
    assert "lease ended" in caught.value.why
    assert m.settled
    place.after(seconds=1)
    now = place.q.get(timeout=0, holder="bob")
    for call in (m.ack, m.nack, m.defer, m.reject, m.extend, lambda: m.state.save(1)):
        with pytest.raises(LeaseLost, match=r"bob has had it since .* \(attempt 2\)") as caught:
            call()
        assert (caught.value.holder, caught.value.since_ms) == ("bob", ended_ms + 1_000)
        assert caught.value.why
        assert not now.lost
    now.ack()
    with pytest.raises(LeaseLost, match="done"):
        m.nack()


def test_acking_twice_is_told(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    m.ack()
    assert not m.lost
    with pytest.raises(LeaseLost, match="done"):
        m.ack()


def test_renewing_keeps_the_lease_while_the_message_is_in_hand(place):
    place.q.put_many([b"a", b"b"])
    held, other = place.q.get(timeout=0, lease=3, renew=True), place.q.get(timeout=0, lease=3)
    for _ in range(100):
        place.after(seconds=1)
        assert not held.lost
    assert other.lost
    held.ack()
    assert place.q._port.deliveries[0].renewals._lease_ms == {} or place.q._port.engine.tick() is not None
    assert place.q._port.deliveries[0].renewals._lease_ms == {}


@pytest.mark.parametrize("way", ["nack", "defer", "reject", "drop", "ack"])
def test_renewing_stops_with_the_message(place, way):
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=3, renew=True)
    if way == "drop":
        del m
        gc.collect()
    else:
        getattr(m, way)()
    place.tick()
    assert place.q._port.deliveries[0].renewals._lease_ms == {}


def test_renewing_says_when_it_must_be_looked_at_again(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=3, renew=True)
    for _ in range(50):
        due_ms = place.q._port.engine.tick()
        assert due_ms is not None
        assert due_ms <= 1_001
        place.clock.advance(ms=due_ms)
    place.tick()
    assert not m.lost


def test_get_many_renews_each(place):
    place.q.put_many([b"a", b"b", b"c"])
    taken = place.q.get_many(3, lease=3, renew=True)
    for _ in range(10):
        place.after(seconds=1)
    assert not any(m.lost for m in taken)


def test_a_message_dropped_unhandled_comes_back(place):
    place.q.put_many([b"a", b"b"])
    place.q.get(timeout=0)
    gc.collect()
    place.tick()
    assert place.q.stats().delayed == 1  # for as long as after a nack
    place.after(seconds=1)
    assert [(m.body, m.attempt) for m in place.q.get_many(2)] == [(b"a", 2), (b"b", 1)]


def test_a_message_dropped_unhandled_comes_back_after_a_chosen_delay():
    place = Place(dropped_delay_ms=5_000)
    place.q.put(b"x")
    place.q.get(timeout=0)
    gc.collect()
    place.tick()
    place.after(ms=4_999)
    assert place.q.stats().delayed == 1
    place.after(ms=1)
    assert place.q.get(timeout=0).attempt == 2


def test_a_detached_lease_outlives_handle_and_process(place):
    place.q.put(b"x")
    receipt = place.q.get(timeout=0, lease=60, detached=True).receipt
    gc.collect()
    place.tick()
    assert place.q.stats().leased == 1
    place.kill()
    assert place.q.stats().leased == 1
    m = place.q.resume(receipt)
    assert (m.body, m.attempt) == (b"x", 1)
    m.ack()
    assert place.q.stats().floor == 1


def test_a_detached_lease_ends_in_its_time(place):
    place.q.put(b"x")
    receipt = place.q.get(timeout=0, lease=60, detached=True).receipt
    place.reopen()
    place.after(seconds=59)
    assert place.q.stats().leased == 1
    place.after(seconds=1)
    assert place.q.stats().leased == 0
    with pytest.raises(LeaseLost):
        place.q.resume(receipt)


def test_a_receipt_is_good_in_the_same_process(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    again = place.q.resume(m.receipt)
    assert (again.id, again.fence, again.attempt) == (m.id, m.fence, 1)
    again.ack()
    assert m.lost


# State


def test_a_state_that_is_too_large_is_refused(place):
    place.q.put(b"x")
    m = place.q.get()
    m.state.save("x" * (1024 * 1024 - 2))
    with pytest.raises(holdfast.MessageTooLarge, match="1048577 bytes"):
        m.state.save("x" * (1024 * 1024 - 1))
    assert (len(m.state.load()), m.state.version) == (1024 * 1024 - 2, 1)


def test_a_state_goes_from_one_holder_to_the_next_until_the_ack(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    assert m.state.load() is None
    m.state.save({"step": 1})
    m.nack(delay=0)
    m = place.q.get(timeout=0)
    assert m.state.load() == {"step": 1}
    m.state.save({"step": 2}, durability="fsync")
    assert m.state.load() == {"step": 2}
    place.kill()
    m = place.q.get(timeout=0)
    assert m.state.load() == {"step": 2}
    m.state.save(None)
    assert m.state.load() is None
    m.state.save([3])
    m.ack()
    place.q.seek("start")
    assert place.q.get(timeout=0).state.load() is None


def test_a_state_is_saved_only_over_what_was_loaded(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    other = place.q.resume(m.receipt)
    m.state.load()
    other.state.load()
    m.state.save(1)
    with pytest.raises(Conflict, match="load it again"):
        other.state.save(2)
    assert other.state.load() == 1
    other.state.save(2)
    with pytest.raises(Conflict):
        m.state.save(3)
    m.ack()


# Peek, cancel, seek, messages


def test_peek_shows_what_comes_next_and_takes_nothing(place):
    place.q.put_many([NewMessage(body=b"%d" % n, priority=n) for n in range(5)])
    with place.unchanged():
        assert [m.body for m in place.q.peek(3)] == [b"4", b"3", b"2"]
        assert [m.body for m in place.q.peek()] == [b"4"]
    assert bodies(place.q) == [b"4", b"3", b"2", b"1", b"0"]
    assert place.q.peek(5) == []


def test_cancel_takes_back_what_nobody_works_on(place):
    ready, delayed, leased = place.q.put(b"ready"), place.q.put(b"delayed", delay=5), place.q.put(b"x", priority=9)
    m = place.q.get(timeout=0)
    assert m.id == leased.id
    assert not place.q.cancel(leased.id)
    assert place.q.cancel(ready.id)
    assert place.q.cancel(delayed.id)
    assert not place.q.cancel(ready.id)
    assert not place.q.cancel(delayed.id)
    m.nack(delay=5)
    assert place.q.cancel(leased.id)
    place.kill()
    place.after(seconds=10)
    assert bodies(place.q) == []
    assert place.q.stats().floor == 2


def test_a_message_that_was_delayed_can_still_be_cancelled_when_it_is_ready(place):
    stored = place.q.put(b"x", delay=5)
    place.after(seconds=5)
    assert place.q.peek()[0].id == stored.id
    assert place.q.cancel(stored.id)
    assert bodies(place.q) == []


def test_seek_goes_to_an_offset_with_leases_around(place):
    place.q.put_many([b"%d" % n for n in range(6)])
    taken = place.q.get_many(4)
    taken[0].ack()
    taken[1].ack()
    assert place.q.seek(offset=1) == 1
    assert [m.body for m in place.q.peek(9)] == [b"1", b"4", b"5"]
    assert not taken[2].lost
    taken[2].ack()
    taken[3].nack(delay=0)
    assert [m.body for m in place.q.peek(9)] == [b"1", b"3", b"4", b"5"]
    assert place.q.seek(offset=5) == 5
    assert [m.body for m in place.kill().peek(9)] == [b"5"]
    assert place.q.stats().floor == 5


def test_seek_goes_to_start_end_and_a_time(place):
    for n in range(5):
        place.q.put(b"%d" % n)
        place.clock.advance(seconds=1)
    assert place.q.seek("end") == 5
    assert bodies(place.q) == []
    assert place.q.seek("start") == 0
    assert len(bodies(place.q)) == 5
    moment = datetime(2023, 11, 14, 22, 13, 22, tzinfo=UTC)
    assert place.q.seek(time=moment) == 2
    assert bodies(place.q) == [b"2", b"3", b"4"]
    assert place.q.seek(time=moment + timedelta(seconds=1.5)) == 4
    assert place.q.seek(time=moment - timedelta(days=1)) == 0
    assert place.q.seek(time=moment + timedelta(days=1)) == 5


def test_seek_keeps_priorities(place):
    for n in range(6):
        place.q.put(b"%d" % n, priority=n % 3)
    assert len(bodies(place.q)) == 6
    place.q.seek("start")
    assert bodies(place.q) == [b"2", b"5", b"1", b"4", b"0", b"3"]


def test_seek_before_what_is_kept_is_refused_and_says_what_is(place):
    place = Place(segment_bytes=4_096, frame_bytes=1_024)
    for n in range(30):
        place.q.put(b"%d" % n + bytes(500))
    bodies(place.q)
    place.q.compact()
    start = place.q.stats().start
    assert start > 0
    with pytest.raises(OffsetOutOfRange) as caught:
        place.q.seek(offset=0)
    assert caught.value.start == start
    assert place.q.seek("start") == start


def test_messages_of_each_phase_are_listed(place):
    place.q.put_many([NewMessage(body=b"%d" % n, key=f"k{n}") for n in range(5)])
    leased, nacked, rejected = place.q.get_many(3, holder="ann")
    nacked.nack(delay=5, error="why")
    rejected.reject("bad")
    later = place.q.put(b"later", delay=60)
    assert [m.body for m in place.q.messages("ready")] == [b"3", b"4"]
    (listed,) = place.q.messages("leased")
    assert (listed.id, listed.holder, listed.phase, listed.attempts) == (leased.id, "ann", "leased", 0)
    back, delayed = place.q.messages("delayed")
    assert (back.body, back.error, back.attempts) == (b"1", "why", 1)
    assert (delayed.id, delayed.body, delayed.phase) == (later.id, b"later", "delayed")
    assert delayed.due_at == delayed.timestamp + timedelta(seconds=60)
    assert [(m.body, m.reason) for m in place.q.messages("dead")] == [(b"2", "REJECTED")]


def test_messages_are_chosen_by_function_or_expression(place):
    place.q.put_many([NewMessage(body=b'{"n": %d}' % n, key=f"k{n % 2}", headers={"h": str(n)}) for n in range(6)])
    assert [m.offset for m in place.q.messages(where=lambda m: m.key == "k1")] == [1, 3, 5]
    assert [m.offset for m in place.q.messages(where='key == "k1" and json.n > 1')] == [3, 5]
    assert [m.offset for m in place.q.messages(where='header.h in ["2", "5"]')] == [2, 5]
    assert [m.offset for m in place.q.messages(limit=2)] == [0, 1]
    assert [m.offset for m in place.q.messages(where="json.n >= 3", limit=2)] == [3, 4]
    assert list(place.q.messages(limit=0)) == []


# Typed bodies


class Order(msgspec.Struct):
    """A body of a type."""

    number: int
    lines: list[str] = []


@pytest.mark.parametrize(
    ("body_type", "body"),
    [(Order, Order(7, ["a"])), (dict, {"a": [1, None]}), (str, "grüß"), (bytes, b"x"), (list[int], [1, 2]), (int, 5)],
    ids=repr,
)
def test_bodies_of_a_type_come_back_as_they_were(place, body_type, body):
    place.reopen(body_type=body_type)
    place.q.put(body)
    place.q.put(body, delay=1, key="k")
    place.after(seconds=1)
    assert [m.body for m in place.q.get_many(2)] == [body, body]


def test_a_body_that_does_not_fit_is_told_when_it_is_read_and_can_be_rejected(place):
    place.q.put(b"\xff no json")
    place.reopen(body_type=Order)
    with pytest.raises(BadBody, match="raw"), place.q.get(timeout=0) as m:
        _ = m.body
    assert m.raw == b"\xff no json"
    place.after(ms=100)
    place.q.get(timeout=0).reject("no order")
    (letter,) = place.q.dead.list(where='body ~ "no json"')
    assert letter.raw == b"\xff no json"
    place.reopen(body_type=str)
    with pytest.raises(BadBody):
        _ = place.q.dead.list()[0].body


# Priorities


def test_the_most_urgent_comes_first_and_equals_in_order(place):
    for priority, body in ((0, b"a"), (9, b"b"), (4, b"c"), (9, b"d"), (0, b"e")):
        place.q.put(body, priority=priority)
    assert bodies(place.q) == [b"b", b"d", b"c", b"a", b"e"]


def test_what_has_waited_long_enough_is_promoted():
    place = Place(promote_after_ms=60_000)
    place.q.put(b"old")
    place.clock.advance(seconds=59)
    place.q.put(b"urgent", priority=9)
    assert place.q.peek()[0].body == b"urgent"
    place.clock.advance(seconds=1)
    place.q.put(b"most urgent", priority=9)
    place.clock.advance(ms=1)
    assert bodies(place.q) == [b"old", b"urgent", b"most urgent"]


def test_nothing_is_promoted_where_that_is_switched_off():
    place = Place(promote_after_ms=None)
    place.q.put(b"old")
    place.clock.advance(seconds=10**6)
    place.q.put(b"urgent", priority=1)
    assert bodies(place.q) == [b"urgent", b"old"]


def test_fair_choice_shares_the_turns_by_weight():
    place = Place(priority_choice="fair", priority_weights=(1, 3, 1, 1, 1, 1, 1, 1, 1, 1))
    place.q.put_many([NewMessage(body=b"%d" % n, priority=n % 2) for n in range(80)])
    first = [m.priority for m in place.q.get_many(40)]
    assert first.count(1) == 30
    assert first.count(0) == 10


def test_peek_costs_nobody_a_fair_turn():
    place = Place(priority_choice="fair")
    place.q.put_many([NewMessage(body=b"%d" % n, priority=n % 3) for n in range(60)])
    expected = [m.body for m in place.q.peek(20)]
    for count in (1, 3, 7):
        place.q.peek(count)
    assert [m.body for m in place.q.get_many(20)] == expected


def test_priorities_delays_retries_restarts_and_segments_together():
    place = Place(segment_bytes=4_096, frame_bytes=1_024, max_attempts=None)
    expected: dict[bytes, int] = {}
    for n in range(120):
        body = b"%d " % n + bytes(150)
        expected[body] = 0
        place.q.put(body, priority=n % 10, delay=(n % 4) * 2 or None)
    rounds = 0
    while place.q.stats().ready or place.q.stats().delayed or place.q.stats().leased:
        rounds += 1
        assert rounds < 200
        for m in place.q.get_many(7, timeout=0):
            if (m.offset + m.attempt) % 3 == 0:
                m.nack()
            else:
                m.ack(durability="fsync")
                expected[m.body] += 1
        place.after(ms=300)
        if rounds % 10 == 0:
            place.kill() if rounds % 20 else place.reopen()
    assert set(expected.values()) == {1}
    assert place.q.stats().floor == place.q.stats().end == 120


# Time to live


def test_what_has_lived_too_long_is_passed_over(place):
    place.q.put(b"short", ttl=5)
    place.q.put(b"long", ttl=50)
    place.q.put(b"ever")
    place.clock.advance(ms=4_999)
    assert len(place.q.peek(9)) == 3
    place.clock.advance(ms=1)
    assert [m.body for m in place.q.peek(9)] == [b"long", b"ever"]
    place.clock.advance(seconds=50)
    assert bodies(place.q) == [b"ever"]
    assert place.q.stats().metrics.expired == 2
    assert place.q.stats().floor == 3


def test_the_time_to_live_begins_when_a_message_can_be_taken(place):
    place.q.put(b"x", delay=100, ttl=5)
    place.after(seconds=100)
    place.clock.advance(ms=4_999)
    assert [m.body for m in place.q.peek()] == [b"x"]
    place.clock.advance(ms=1)
    assert place.q.peek() == []


def test_a_queue_may_have_a_time_to_live_of_its_own():
    place = Place(ttl_ms=5_000)
    place.q.put(b"a")
    place.q.put(b"b", ttl=100)
    place.clock.advance(seconds=5)
    assert bodies(place.q) == [b"b"]


def test_what_is_in_hand_does_not_expire(place):
    place.q.put(b"x", ttl=5)
    m = place.q.get(timeout=0, lease=60)
    place.after(seconds=10)
    m.nack(delay=0)
    with pytest.raises(Empty):
        place.q.get_nowait()
    assert place.q.stats().floor == 1


# Dedup


def test_a_duplicate_within_the_window_is_not_stored():
    place = Place(dedup_window_ms=60_000)
    first = place.q.put(b"a", dedup_id="x")
    place.clock.advance(ms=59_999)
    again = place.q.put(b"b", dedup_id=b"x")
    assert (again.duplicate, again.id, again.offset) == (True, first.id, 0)
    place.clock.advance(ms=1)
    assert not place.q.put(b"c", dedup_id="x").duplicate
    assert bodies(place.q) == [b"a", b"c"]


def test_a_duplicate_is_one_after_the_first_was_handled_and_after_a_restart():
    place = Place()
    place.q.put(b"a", dedup_id="x")
    bodies(place.q)
    place.q.compact()
    for again in (place.reopen, place.kill, place.reopen):
        assert again().put(b"b", dedup_id="x").duplicate
    assert bodies(place.q) == []


def test_dedup_and_delay_together():
    place = Place()
    first = place.q.put(b"a", dedup_id="x", delay=10)
    now = place.q.put(b"b", dedup_id="x")
    assert (now.duplicate, now.id) == (True, first.id)
    place.after(seconds=10)
    place.kill()
    assert place.q.put(b"c", dedup_id="x", delay=5).duplicate
    assert bodies(place.q) == [b"a"]


def test_duplicates_inside_one_call_are_found(place):
    stored = place.q.put_many(
        [
            NewMessage(body=b"a", dedup_id="x"),
            b"b",
            NewMessage(body=b"c", dedup_id="x"),
            NewMessage(body=b"d", dedup_id="y"),
        ]
    )
    assert [each.duplicate for each in stored] == [False, False, True, False]
    assert [each.offset for each in stored] == [0, 1, 0, 2]
    assert place.q.put_many([NewMessage(body=b"e", dedup_id="x"), NewMessage(body=b"f", dedup_id="y")])[1].offset == 2
    assert bodies(place.q) == [b"a", b"b", b"d"]


# Settings


def test_settings_are_kept_in_the_folder(place):
    place.q.close()
    place.q = place.open(max_attempts=2, lease_ms=5_000, priority_weights=(1,) * 10)
    for again in (place.reopen, place.kill):
        q = again()
        assert (q.settings.max_attempts, q.settings.lease_ms, q.settings.backoff_ms) == (2, 5_000, 100)
        assert q.settings.priority_weights == (1,) * 10
    assert place.reopen(max_attempts=5).settings.lease_ms == 5_000
    place.reopen(settings=holdfast.QueueSettings())
    assert place.reopen().settings == TopicSettings()


def test_a_queue_is_named_after_its_folder(place):
    assert (place.q.name, place.q.folder, repr(place.q)) == ("jobs", FOLDER, "<Queue jobs in /data/jobs>")
    assert holdfast.open("/data/.hidden/", world=place.world).name == "queue"
    assert holdfast.open("/data/dead.dlq", world=place.world).name == "queue"


# Stats and metrics


def test_every_counter_is_fed():
    place = Place(max_attempts=3)
    q = place.q
    q.put(b"abc", dedup_id="d")
    q.put(b"ignored", dedup_id="d")
    q.put_many([b"n", b"f", b"r", b"e", b"c", NewMessage(body=b"t", ttl=1)])
    q.put(b"l", delay=1)
    m, n, f, r, e = q.get_many(5, lease=5)
    m.ack()
    n.nack(delay=0)
    f.defer(delay=0)
    r.reject()
    q.cancel("jobs-0-5")
    place.after(seconds=5)
    with pytest.raises(LeaseLost):
        e.ack()
    place.after(seconds=1)
    again = q.get_many(9, timeout=0)
    q.ack_many(again)
    q.dead.redrive()
    metrics = q.stats().metrics
    assert (metrics.published, metrics.published_bytes) == (8, 10)
    assert (metrics.delivered, metrics.acked) == (5 + len(again), 1 + len(again))
    assert (metrics.nacked, metrics.deferred, metrics.rejected) == (1, 1, 1)
    assert (metrics.expired_leases, metrics.lost_leases, metrics.returned) == (1, 1, 3)
    assert (metrics.buried, metrics.redriven) == (1, 1)
    assert (metrics.expired, metrics.cancelled, metrics.duplicates, metrics.released) == (1, 1, 1, 1)
    assert metrics.put_seconds.count == 4
    assert metrics.wait_seconds.count == metrics.delivered
    assert metrics.handle_seconds.count == metrics.acked
    assert metrics.lateness_seconds.count == 1
    assert metrics.lateness_seconds.max == 4.0


def test_a_lease_that_ends_with_the_last_attempt_is_counted_as_well():
    place = Place(max_attempts=1)
    place.q.put(b"x")
    m = place.q.get(timeout=0, lease=1)
    place.after(seconds=1)
    assert m.lost
    metrics = place.q.stats().metrics
    assert (metrics.expired_leases, metrics.returned, metrics.buried) == (1, 0, 1)


def test_times_are_measured():
    place = Place()
    place.q.put(b"x")
    place.clock.advance(seconds=2)
    m = place.q.get(timeout=0)
    place.clock.advance(seconds=3)
    m.ack()
    metrics = place.q.stats().metrics
    assert (metrics.wait_seconds.max, metrics.handle_seconds.max) == (2.0, 3.0)
    assert metrics.put_seconds.count == 1


def test_the_stats_say_where_messages_stand(place):
    place.q.put_many([b"%d" % n for n in range(6)])
    taken = place.q.get_many(4)
    taken[0].ack()
    taken[1].nack(delay=5)
    taken[2].reject()
    place.q.put(b"later", delay=5)
    for stats in (place.q.stats(),):
        assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (2, 1, 2, 1)
        assert (stats.start, stats.end, stats.floor, stats.name, stats.folder) == (0, 6, 1, "jobs", FOLDER)
        assert (stats.segments, stats.waiters, stats.durability) == (1, 0, "fsync")
        assert stats.bytes > 0


def test_an_observer_hears_of_everything():
    heard: list[tuple[str, Any]] = []

    class Listener:
        def count(self, name: str, n: int) -> None:
            heard.append((name, n))

        def observe(self, name: str, seconds: float) -> None:
            heard.append((name, seconds))

    place = Place(observer=Listener())
    place.q.put_many([b"a", b"b"])
    place.q.get(timeout=0).ack()
    assert ("published", 2) in heard
    assert {"delivered", "acked", "wait_seconds", "handle_seconds", "put_seconds"} <= {name for name, _ in heard}
    heard.clear()
    place.q.observe(None)
    place.q.put(b"c")
    assert heard == []


# Retention and compaction


def test_compact_frees_what_is_done_and_says_how_much():
    place = Place(segment_bytes=4_096, frame_bytes=1_024)
    for n in range(40):
        place.q.put(b"%d" % n + bytes(500))
    assert place.q.compact().segments == 0
    before = place.q.stats()
    for m in place.q.get_many(30):
        m.ack()
    freed = place.q.compact()
    after = place.q.stats()
    assert freed.segments == before.segments - after.segments
    assert freed.bytes > 10_000
    assert after.start > 20
    assert [m.offset for m in place.kill().peek(100)] == list(range(30, 40))
    bodies(place.q)
    place.q.compact()
    assert place.q.stats().start == 40
    place.q.put(b"goes on")
    assert bodies(place.reopen()) == [b"goes on"]


def test_compact_frees_the_journal():
    place = Place()
    for n in range(2_000):
        place.q.put(b"%d" % n, durability="os")
        place.q.get(timeout=0).ack(durability="interval")  # not a note
    journal = place.q._port.deliveries[0].journal.log
    before = sum(segment.bytes for segment in journal.segments())
    freed = place.q.compact().journal_bytes
    assert freed > 100_000
    assert sum(segment.bytes for segment in journal.segments()) < before
    place.q.put(b"x")
    assert bodies(place.kill()) == [b"x"]


def test_compact_is_not_held_back_by_delays_and_dedup():
    place = Place(segment_bytes=4_096, frame_bytes=1_024)
    for n in range(30):
        place.q.put(b"%d" % n + bytes(500), dedup_id=str(n), delay=1 if n % 2 else None)
    place.after(seconds=1)
    assert len(bodies(place.q)) == 30
    place.q.compact()
    assert place.q.stats().start == 30
    place.kill()
    place.after(seconds=1)
    assert place.q.stats().ready == 0
    assert place.q.put(b"again", dedup_id="3").duplicate


def test_retention_never_takes_what_a_slow_consumer_needs():
    place = Place(segment_bytes=4_096, frame_bytes=1_024, retention_ms=1_000, retention_check_ms=1_000)
    for n in range(40):
        place.q.put(b"%d" % n + bytes(500))
    for m in place.q.get_many(10):
        m.ack()
    place.q.sync()
    for _ in range(10):
        place.after(seconds=10)
    stats = place.q.stats()
    assert 0 < stats.start <= 10
    assert stats.ready == 30
    assert [m.offset for m in place.q.peek(100)] == list(range(10, 40))


# Threads that wait


def test_iteration_wakes_on_arrival_and_costs_nothing_while_it_waits(tmp_path):
    with holdfast.open(tmp_path / "jobs", durability="os", min_free_bytes=0) as q:
        seen: queue.Queue[tuple[bytes, float]] = queue.Queue()
        used: list[float] = []

        def consume() -> None:
            began = time.thread_time()
            for m in q:
                with m:
                    seen.put((m.body, time.monotonic()))
            used.append(time.thread_time() - began)

        thread = threading.Thread(target=consume)
        thread.start()
        process_began = time.process_time()
        while q.stats().waiters == 0:
            time.sleep(0.001)
        time.sleep(0.3)
        assert time.process_time() - process_began < 0.25
        late = []
        for n in range(20):
            put_at = time.monotonic()
            q.put(b"%d" % n)
            body, at = seen.get(timeout=5)
            assert body == b"%d" % n
            late.append(at - put_at)
        q.close()
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert sorted(late)[10] < 0.05
    assert used[0] < 0.25


def test_closing_ends_iteration_and_tells_those_who_wait(tmp_path):
    q = holdfast.open(tmp_path / "jobs", min_free_bytes=0)
    ended: queue.Queue[object] = queue.Queue()

    def iterate() -> None:
        ended.put([m.body for m in q])

    def wait() -> None:
        try:
            q.get()
        except holdfast.Closed as error:
            ended.put(error)

    threads = [threading.Thread(target=target) for target in (iterate, wait)]
    for thread in threads:
        thread.start()
    while q.stats().waiters < 2:
        time.sleep(0.001)
    q.close()
    answers = [ended.get(timeout=5), ended.get(timeout=5)]
    for thread in threads:
        thread.join(timeout=5)
    assert [] in answers
    assert any(isinstance(answer, holdfast.Closed) for answer in answers)


@pytest.mark.parametrize("settings", [{"codec": "zstd"}, {}])
def test_headers_that_can_be_read_only_once_are_kept_whichever_way_a_message_takes(tmp_path, settings):
    with holdfast.open(tmp_path / "jobs", durability="os", **settings) as queue:
        for body in (b"x", bytes(2_000_000)):
            queue.put(body, headers=iter([("kind", "test")]))
            queue.put(body, headers=iter([("kind", "test")]), dedup_id=f"{len(body)}")
            queue.put_many([NewMessage(body, headers=iter([("kind", "test")]))])
        messages = queue.get_many(6, timeout=0)
        assert [dict(message.headers) for message in messages] == [{"kind": "test"}] * 6
        queue.ack_many(messages)


SPECIAL = [
    {"delay": 3600}, {"delay": 3600, "key": "k"}, {"delay": 0}, {"dedup_id": "a"}, {"dedup_id": "a"},
    {"dedup_id": b"b", "delay": 3600}, {"dedup_id": "b"}, {"dedup_id": "c", "priority": 7, "ttl": 60},
    {"at": datetime(2000, 1, 1, tzinfo=UTC)}, {"at": datetime(2100, 1, 1, tzinfo=UTC)},
]  # fmt: skip


def test_a_put_that_waits_for_nothing_stores_delayed_and_deduplicated_messages_as_any_other_does(tmp_path, monkeypatch):
    with (
        holdfast.open(tmp_path / "now", durability="os") as now,
        holdfast.open(tmp_path / "plain", durability="os") as plain,
    ):
        for queue in (now, plain):
            queue.put(b"first", delay=3600)  # opens the store of delayed messages
        monkeypatch.setattr(plain._port, "put_now", lambda *_: None)
        long_way, put = [], now._port.put
        monkeypatch.setattr(now._port, "put", lambda *args: long_way.append(args) or put(*args))
        for options in SPECIAL:
            one, other = now.put(b"x", **options), plain.put(b"x", **options)
            assert msgspec.structs.replace(one, topic="") == msgspec.structs.replace(other, topic=""), options
            assert len(long_way) == one.duplicate, options  # what is stored never takes it
            long_way.clear()
        assert published(now) == published(plain)


@pytest.mark.parametrize("count", [1, 2, 100, 300])
def test_what_put_many_returns_behaves_as_a_list_of_what_put_returns(tmp_path, count):
    with holdfast.open(tmp_path / "jobs", durability="os") as queue:
        queue.put(b"before")
        stored = queue.put_many([b"x"] * count)
        expected = [Stored("jobs", offset, None, False, "os") for offset in range(1, count + 1)]
        assert stored == expected
        assert expected == stored
        assert stored != expected[1:]
        assert stored != tuple(expected)
        assert list(stored) == expected
        assert list(reversed(stored)) == expected[::-1]
        assert (len(stored), bool(stored), repr(stored)) == (count, True, repr(expected))
        assert (stored[0], stored[-1], stored[1:]) == (expected[0], expected[-1], expected[1:])
        assert expected[-1] in stored
        assert stored.index(expected[-1]) == count - 1
        assert stored + expected == expected + stored == [*expected, *expected]
        assert pickle.loads(pickle.dumps(stored)) == copy.copy(stored) == expected
        with pytest.raises(IndexError):
            stored[count]
        with pytest.raises(TypeError, match="unhashable"):
            hash(stored)


def published(queue):
    """What tells of how messages were published: the counts, and what is ready."""
    stats = queue.stats()
    ready = [(message.body, message.key, message.priority) for message in queue.peek(10)]
    return stats.ready, stats.delayed, queue._port.queue_group.metrics.duplicates.value, ready


def test_a_message_due_within_a_second_takes_the_way_that_may_wait(tmp_path, monkeypatch):
    with holdfast.open(tmp_path / "jobs", durability="os") as queue:
        queue.put(b"first", delay=3600)
        long_way = []
        put = queue._port.put
        monkeypatch.setattr(queue._port, "put", lambda *args: long_way.append(1) or put(*args))
        queue.put(b"soon", delay=0.01)
        assert long_way == [1]
        queue.get(timeout=10).ack()
