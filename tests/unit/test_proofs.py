"""Receipts and lease ids: good for one lease of one group or lock, and made up by nobody."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import holdfast
from holdfast import HoldfastError, InvalidRequest, LeaseLost
from holdfast.broker.folder.layout import parse_receipt
from holdfast.broker.leases import Prover, run_receipt
from tests.unit.brokers import FOLDER, Place

KEY_FILE = f"{FOLDER}/receipts.key"
MARK = 1 << 39
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_@.+/="


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(tasks=request.param)
    yield place
    place.close()


@pytest.fixture
def alone() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def orders(place: Place, group: str = "default", count: int = 1) -> Any:
    """A group of a topic with some messages, which is made where there is none."""
    if "orders" not in place.broker.topics():
        place.broker.create_topic("orders")
        for number in range(count):
            place.broker.publish("orders", b"%d" % number)
    return place.broker.group("orders", group)


def test_the_token_of_a_run_makes_the_receipts_of_its_messages_and_is_proven_as_a_whole():
    prover = Prover(b"k" * 32, "orders", 7, mark=MARK)
    fence, at_ms = MARK | 5, 1_789_000_000_123
    token = prover.run("orders-0-", fence, at_ms)
    proven = prover.read_run("orders-0-", token)
    assert proven is not None
    assert (proven.fence, proven.is_of(at_ms)) == (fence, True)
    for offset in (0, 9, 10, 2**40):
        name, _, end = run_receipt(token, "orders-0-", offset).partition("@")
        assert name == f"orders-0-{offset}"
        assert prover.read(name, end) == proven
        assert prover.read(f"orders-0-{offset + 1}", end) is None
        assert prover.read(f"orders-1-{offset}", end) is None


def test_no_token_of_a_run_is_taken_with_a_bit_changed_or_for_another_partition_or_scope():
    prover, other = (Prover(b"k" * 32, "orders", number, mark=MARK) for number in (7, 8))
    token = prover.run("orders-0-", MARK | 5, 1_789_000_000_123)
    assert prover.read_run("orders-1-", token) is None
    assert other.read_run("orders-0-", token) is None
    assert prover.read_run("orders-0-", token[:-1]) is None
    for bit in range(len(token) * 8):
        spoiled = bytearray(token)
        spoiled[bit // 8] ^= 1 << bit % 8
        assert prover.read_run("orders-0-", bytes(spoiled)) is None
        name, _, end = run_receipt(bytes(spoiled), "orders-0-", 3).partition("@")
        assert prover.read(name, end) is None


def test_a_receipt_that_was_written_as_lease_ids_are_still_proves_its_lease(alone):
    group = orders(alone)
    message = group.receive(timeout=0, detached=True)
    (delivery,) = group._port.queue_group.deliveries
    lease = delivery.group.leases[0]
    earlier = delivery.receipts._prover.text("orders-0-0", lease.fence, lease.at_ms)
    assert earlier != message.receipt
    group.resume(earlier).ack()
    with pytest.raises(LeaseLost, match="it is done"):
        message.ack()


# Groups and topics


def test_a_receipt_of_one_group_settles_no_message_of_another(place):
    mine, theirs = orders(place), orders(place, "audit")
    message, other = mine.receive(timeout=0), theirs.receive(timeout=0)
    assert (message.id, message.fence) == (other.id, other.fence)
    assert message.receipt != other.receipt
    with pytest.raises(LeaseLost, match="it belongs to another group"):
        mine.resume(other.receipt)
    assert not message.lost
    mine.resume(message.receipt).ack()
    theirs.resume(other.receipt).ack()


def test_a_receipt_of_a_deleted_topic_settles_no_message_of_the_next_one_of_its_name(place):
    before = orders(place).receive(timeout=0, detached=True)
    stale, fence = before.receipt, before.fence
    place.broker.delete_topic("orders")
    group = orders(place)
    message = group.receive(timeout=0, detached=True)
    assert (message.id, message.fence) == (before.id, fence)
    with pytest.raises(LeaseLost, match="to an earlier topic"):
        group.resume(stale)
    group.resume(message.receipt).ack()


def test_a_receipt_of_a_deleted_group_settles_no_message_of_the_next_one_of_its_name(place):
    before = orders(place, "audit").receive(timeout=0, detached=True)
    stale, fence = before.receipt, before.fence
    place.broker.delete_group("audit", "orders")
    place.clock.advance(ms=1)
    group = orders(place, "audit")
    message = group.receive(timeout=0, detached=True)
    assert (message.id, message.fence) == (before.id, fence)
    with pytest.raises(LeaseLost, match="group of this name"):
        group.resume(stale)
    group.resume(message.receipt).ack()


def test_a_receipt_is_good_after_a_restart_and_a_kill_and_a_longer_lease(place):
    message = orders(place).receive(timeout=0, detached=True)
    receipt = message.receipt
    message.extend(500)
    for reopen in (place.reopen, place.kill):
        reopen()
        assert orders(place).resume(receipt).receipt == receipt
    orders(place).resume(receipt).ack()
    with pytest.raises(LeaseLost, match="it is done"):
        orders(place).resume(receipt)


def test_a_late_holder_is_told_who_has_the_message_and_a_stranger_is_not(place):
    group = orders(place)
    message = group.receive(timeout=0, detached=True)
    late = message.receipt
    message.defer()
    again = group.receive(timeout=0, holder="bob")
    with pytest.raises(LeaseLost, match="bob has had it"):
        group.resume(late)
    place_, _, token = again.receipt.partition("@")
    with pytest.raises(LeaseLost) as refused:
        group.resume(f"{place_}@{token[:-1]}{'A' if token[-1] != 'A' else 'B'}")
    assert "bob" not in str(refused.value)
    assert refused.value.holder == ""


# What nobody can make up


def test_the_numbers_that_everybody_may_see_are_no_receipt(place):
    group = orders(place)
    message = group.receive(timeout=0)
    for text in (f"{message.id}@{message.fence:x}", f"{message.offset}@{message.fence:x}", f"{message.id}@{'A' * 32}"):
        with pytest.raises(LeaseLost):
            group.resume(text)
    assert not message.lost


changes = st.tuples(st.integers(0, 100), st.sampled_from(CHARACTERS))


@given(fence=st.integers(0, 2**63), at_ms=st.integers(0, 2**45), offset=st.integers(0, 10**17), change=changes)
def test_a_receipt_with_any_character_changed_proves_nothing(fence, at_ms, offset, change):
    prover = Prover(b"k" * 32, "receipt", 7, "default", mark=MARK)
    name = f"orders-3-{offset}"
    text = prover.text(name, fence, at_ms)
    proven = prover.read(name, text.partition("@")[2])
    assert proven is not None
    assert proven.fence == fence
    assert proven.is_of(at_ms)
    at, character = change
    at %= len(text)
    assume(text[at] != character)
    other_name, found, token = (text[:at] + character + text[at + 1 :]).partition("@")
    if found and len(token) == 32 and not set(token) & set("@.+/="):  # others are not even taken for receipts
        assert prover.read(other_name, token) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "ab"])), min_size=2, max_size=2, unique=True))
def test_no_scope_reads_what_another_wrote(scopes):
    one, other = (Prover(b"k" * 32, number, name, mark=MARK) for number, name in scopes)
    token = one.text("orders-0-1", 5, 6).partition("@")[2]
    assert one.read("orders-0-1", token) is not None
    assert other.read("orders-0-1", token) is None


def test_receipts_are_short(alone):
    assert len(orders(alone).receive(timeout=0).receipt) == len("orders-0-0@") + 32


@given(st.data())
def test_any_flipped_character_of_a_receipt_or_a_lease_id_is_refused_by_the_engine(data):
    place = Place()
    message = orders(place).receive(timeout=0)
    lock = place.broker.locks.acquire("report")
    calls: list[tuple[str, Callable[[str], Any]]] = [
        (message.receipt, orders(place).resume),
        (lock.lease_id, place.broker.locks.release),
        (lock.lease_id, place.broker.locks.keepalive),
        (lock.lease_id, lambda text: place.broker.documents.update("plan", 1, lock=text)),
    ]
    text, call = data.draw(st.sampled_from(calls))
    at = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.sampled_from(CHARACTERS))
    assume(character != text[at])
    with pytest.raises((LeaseLost, InvalidRequest)):
        call(text[:at] + character + text[at + 1 :])
    assert not message.lost
    assert place.broker.locks.describe("report").held
    assert place.broker.documents.list() == []
    place.close()


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as given": str,
    "without the topic": lambda text: text.removeprefix("orders-0-"),
    "a zero before the offset": lambda text: text.replace("orders-0-1", "orders-0-01"),
    "a zero before the partition": lambda text: text.replace("orders-0-", "orders-00-"),
    "a sign before the offset": lambda text: text.replace("orders-0-1", "orders-0-+1"),
    "digits of another script": lambda text: text.replace("orders-0-1", "orders-0-١"),
    "another topic": lambda text: text.replace("orders", "others"),
    "another message": lambda text: text.replace("orders-0-1", "orders-0-2"),
    "no message": lambda text: text.replace("orders-0-1", "orders-0-9"),
    "another partition": lambda text: text.replace("orders-0-", "orders-7-"),
    "another end": lambda text: text[:-1] + ("A" if text[-1] != "A" else "B"),
    "the old form": lambda text: text.partition("@")[0] + "@1",
    "no token": lambda text: text.partition("@")[0],
}


@pytest.mark.parametrize("lease", ["held", "settled", "leased again"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_receipt_proves_the_same_whether_it_is_compared_or_parsed(alone, spelling, lease):
    group = orders(alone, count=4)
    messages = group.receive_many(3, timeout=0)
    text = SPELLINGS[spelling](messages[1].receipt)
    if lease == "settled":
        messages[1].ack()
    elif lease == "leased again":
        messages[1].nack(delay=0)
        assert group.receive(timeout=0).id == messages[1].id
    queue_group = group._port.queue_group
    compared = queue_group._current(text)
    assert (compared is not None) == (spelling == "as given" and lease == "held")

    def parsed() -> Any:
        given = parse_receipt(text, "orders")
        delivery = queue_group.delivery(given.partition)
        return delivery, delivery.receipts.proof(given)

    try:
        expected = parsed()
    except HoldfastError as error:
        with pytest.raises(type(error)):
            queue_group.proof(text)
    else:
        assert queue_group.proof(text) == expected
        assert compared in (None, expected)


def test_the_receipts_that_are_kept_are_few_and_of_no_use_without_their_lease(alone):
    group = orders(alone, count=600)
    messages = group.receive_many(600, timeout=0)
    texts = [message.receipt for message in messages]
    receipts = group._port.queue_group.deliveries[0].receipts
    assert 0 < len(receipts._given) + len(receipts._given_earlier) <= 256
    last = len(texts) - 1
    kept = receipts._given[last]
    assert receipts.current(texts[last], last) is not None
    assert receipts.current(texts[0], 0) is not None  # not kept any more, and the same
    messages[last].nack(delay=0)
    again = group.receive(timeout=0)
    receipts._given[last] = kept  # as if the new text had not been asked for
    assert receipts.current(texts[last], last) is None
    assert receipts.current(again.receipt, last) is not None


def test_the_last_hundred_receipts_are_compared_without_being_written_again(alone, monkeypatch):
    group = orders(alone, count=300)
    group.receive_many(300, timeout=0)
    delivery = group._port.queue_group.deliveries[0]
    receipts, leases, texts = delivery.receipts, delivery.group.leases, []
    for offset in range(300):
        texts.append(receipts.text(offset, leases[offset]))
        with monkeypatch.context() as patch:
            patch.setattr(Prover, "text", None)
            assert all(receipts.current(texts[i], i) is not None for i in range(max(offset - 99, 0), offset + 1))


# The key


def test_the_key_is_made_when_it_is_first_needed_and_kept(alone):
    group = orders(alone)
    message = group.receive(timeout=0)
    message.ack()
    assert not alone.disk.exists(KEY_FILE)
    alone.broker.publish("orders", b"more")
    assert group.receive(timeout=0).receipt
    key = alone.disk.contents(KEY_FILE)
    assert len(key) == 44
    alone.reopen()
    assert orders(alone).receive(timeout=0).receipt
    assert alone.disk.contents(KEY_FILE) == key


def test_nobody_else_can_read_the_key(tmp_path: Path):
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put(b"x")
        assert queue.get().receipt
    assert stat.S_IMODE((tmp_path / "jobs" / "receipts.key").stat().st_mode) == 0o600


def test_another_folder_has_another_key(tmp_path: Path):
    for name in ("a", "b"):
        with holdfast.open_broker(tmp_path / name) as broker:
            broker.locks.acquire("report")
    assert (tmp_path / "a/receipts.key").read_bytes() != (tmp_path / "b/receipts.key").read_bytes()


def test_a_copy_of_the_folder_takes_the_receipts_of_the_original(tmp_path: Path):
    with holdfast.open(tmp_path / "jobs", topic="jobs") as queue:
        queue.put(b"x")
        receipt = queue.get(detached=True).receipt
    (tmp_path / "jobs").rename(tmp_path / "restored")
    with holdfast.open(tmp_path / "restored") as queue:
        queue.resume(receipt).ack()


@pytest.mark.parametrize("damage", ["lost", "short", "spoiled", "empty"])
def test_without_the_key_receipts_are_refused_and_messages_come_back_when_the_lease_ends(alone, damage, caplog):
    group = orders(alone)
    receipt = group.receive(timeout=0, lease=50, detached=True).receipt
    lock = alone.broker.locks.acquire("report", lease=50)
    alone.broker.close()
    content = alone.disk.contents(KEY_FILE)
    alone.disk.remove(KEY_FILE)
    if damage != "lost":
        file = alone.disk.open(KEY_FILE, write=True, create=True)
        damaged = {"short": content[:-1], "spoiled": content[:20] + b"\0" + content[21:], "empty": b""}
        file.write(0, [damaged[damage]])
        file.close()
    with caplog.at_level(logging.ERROR):
        alone.broker = alone.open()
        with pytest.raises(LeaseLost, match="returns when its lease ends"):
            orders(alone).resume(receipt)
        with pytest.raises(LeaseLost, match="was not issued here"):
            alone.broker.locks.release(lock)
    assert ("the key that signs receipts is damaged" in caplog.text) == (damage != "lost")
    assert alone.broker.locks.describe("report").held
    alone.after(seconds=60)
    alone.after(seconds=1)  # and its backoff
    message = orders(alone).receive(timeout=0)
    orders(alone).resume(message.receipt).ack()
    alone.broker.locks.release(alone.broker.locks.acquire("report", wait=0).lease_id)


# Locks


def test_a_lease_id_is_told_to_the_holder_alone(place):
    lock = place.broker.locks.acquire("report", owner="ann")
    token = lock.lease_id.partition("@")[2]
    assert len(token) == 32
    assert token not in repr(place.broker.locks.list())
    assert token not in repr(place.broker.locks.describe("report"))
    assert place.broker.locks.keepalive(lock).lease_id == lock.lease_id


def test_the_name_and_the_fence_of_a_lock_are_no_lease_id(place):
    lock = place.broker.locks.acquire("report")
    text = f"report@{lock.fence:x}"
    for call in (
        lambda: place.broker.locks.release(text),
        lambda: place.broker.locks.keepalive(text),
        lambda: place.broker.documents.update("plan", 1, lock=text),
        lambda: place.broker.documents.remove("plan", lock=text),
    ):
        with pytest.raises(LeaseLost, match="was not issued here"):
            call()
    assert place.broker.locks.describe("report").held


def test_a_lease_id_of_one_lock_is_none_of_another(place):
    one, two = place.broker.locks.acquire("one"), place.broker.locks.acquire("two")
    with pytest.raises(LeaseLost):
        place.broker.locks.release("two@" + one.lease_id.partition("@")[2])
    place.broker.locks.release(two.lease_id)


def test_a_receipt_is_no_lease_id(alone):
    message = orders(alone).receive(timeout=0)
    lock = alone.broker.locks.acquire(message.id)
    with pytest.raises(LeaseLost):
        alone.broker.locks.release(message.receipt)
    with pytest.raises(LeaseLost):
        orders(alone).resume(lock.lease_id)


def test_every_fence_of_today_has_its_mark_however_many_there_were(alone):
    table = alone.engine.locks().table
    table.fence = (table.fence | (1 << 24) - 1) - 1  # as after many millions
    fences = [alone.broker.locks.acquire(name).fence for name in "abc"]
    assert fences == sorted(fences)
    assert all(fence & (1 << 23) for fence in fences)
    group = orders(alone, count=3)
    delivery = group._port.deliveries[0].group
    delivery.fence |= (1 << 40) - 2
    fences = [message.fence for message in (group.receive(timeout=0), *group.receive_many(2, timeout=0))]
    assert fences == sorted(fences)
    assert all(fence & MARK for fence in fences)


def test_a_lock_can_be_taken_from_its_holder(place):
    lock = place.broker.locks.acquire("report", owner="stuck")
    assert place.broker.locks.force_release("report") is True
    assert place.broker.locks.force_release("report") is False
    with pytest.raises(LeaseLost, match="it was released"):
        place.broker.locks.keepalive(lock)
    assert place.broker.locks.acquire("report", owner="next", wait=0).fence > lock.fence
