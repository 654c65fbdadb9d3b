"""A partition whose log is gone, or cannot be opened, stops alone: the others go on, and a repair gets it going."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.broker.messages import partition_for
from holdfast.errors import CorruptData
from tests.unit.commands import Run, runner

LOST = r"orders/1/log is missing: its messages are lost.*--part topics/orders/1/log"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A topic of three partitions with two messages each; a group is through with the first of each."""
    folder = tmp_path / "data"
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders", partitions=3)
        for number in range(3):
            broker.publish_many("orders", [b"%d-%d" % (number, n) for n in range(2)], partition=number)
        group = broker.group("orders", "billing")
        for message in group.receive_many(3):
            message.ack()
        with broker.consumer("orders", group="reports", auto_commit=False) as consumer:
            seen = 0
            while seen < 6:
                seen += len(consumer.poll(timeout=5))
            consumer.commit()
    return folder


def key_for(number: int) -> bytes:
    return next(key for n in range(100) if partition_for(key := b"key-%d" % n, 3) == number)


def lose(data: Path, what: str = "log") -> Path:
    kept = data.parent / "kept"
    shutil.move(data / "topics/orders/1" / what, kept)
    return kept


def test_the_other_partitions_publish_deliver_and_read_on(data):
    lose(data)
    for _ in range(2):  # whoever opens it does not make it anew
        with holdfast.open_broker(data) as broker:
            assert {broker.publish("orders", b"new").partition for _ in range(6)} == {0, 2}
            assert {broker.publish_many("orders", [b"new"])[0].partition for _ in range(6)} == {0, 2}
            assert broker.publish("orders", b"new", key=key_for(2)).partition == 2
            assert broker.publish("orders", b"new", partition=0, delay=3600).partition == 0
            taken = broker.group("orders", "billing").receive_many(100)
            assert {message.partition for message in taken} == {0, 2}
            for message in taken:
                message.ack()
            assert broker.read("orders", partition=2)
            assert broker.group("orders", "new").receive(timeout=0) is not None
            assert broker.group("orders", "billing").stats().partitions == 3
        assert not (data / "topics/orders/1/log").exists()


def test_whoever_wants_the_lost_partition_is_told_what_is_lost_and_what_to_do(data):
    with holdfast.open_broker(data) as broker:
        taken = next(message for message in broker.group("orders", "other").receive_many(6) if message.partition == 1)
    lose(data)
    with holdfast.open_broker(data) as broker:
        group = broker.group("orders", "other")
        for refused in (
            lambda: broker.publish("orders", b"new", partition=1),
            lambda: broker.publish("orders", b"new", key=key_for(1)),
            lambda: broker.publish("orders", b"new", key=key_for(1), delay=3600),
            lambda: broker.publish_many("orders", [b"new"], partition=1),
            lambda: broker.publish_many("orders", [holdfast.NewMessage(b"new", key=key_for(n)) for n in range(3)]),
            lambda: broker.read("orders", partition=1),
            lambda: group.cancel(taken.id),
            lambda: group.history(taken.id),
            lambda: broker.reset_offsets("billing", "orders", to="earliest", partition=1),
            lambda: broker.reset_offsets("reports", "orders", to="earliest", partition=1),
        ):
            with pytest.raises(CorruptData, match=LOST):
                refused()
        kept = broker.describe_topic("orders").partitions
        assert [bool(each.problem) for each in kept] == [False, True, False]
        assert sum(each.end for each in kept) == 4  # of the call for three partitions nothing was stored


def test_producers_pass_over_it_and_fail_only_what_must_go_there(data):
    lose(data)
    with holdfast.open_broker(data) as broker, broker.producer() as producer:
        many = producer.send_many("orders", [b"%d" % n for n in range(5000)])
        assert {stored.partition for stored in many.result(30)} == {0, 2}
        bad = producer.send("orders", b"new", key=key_for(1))
        good = producer.send("orders", b"new", key=key_for(0))
        with pytest.raises(CorruptData, match=LOST):
            bad.result(30)
        assert good.result(30).partition == 0


def test_streams_read_on_and_keep_their_place_for_the_partition_that_is_lost(data):
    kept = lose(data)
    with holdfast.open_broker(data) as broker:
        broker.publish_many("orders", [b"more"], partition=0)
        with broker.consumer("orders", group="reports") as consumer:
            assert [record.raw for record in consumer.poll(timeout=5)] == [b"more"]
            assert consumer.committed("orders", 1) == 2
        broker.reset_offsets("reports", "orders", to="earliest")
    shutil.move(kept, data / "topics/orders/1/log")
    with holdfast.open_broker(data) as broker:
        found = []
        with broker.consumer("orders", group="reports") as consumer:
            while len(found) < 5:
                found += [record.raw for record in consumer.poll(timeout=5)]
            assert consumer.poll(timeout=0) == []
        assert sorted(found) == [b"0-0", b"0-1", b"2-0", b"2-1", b"more"]


def test_a_log_that_comes_back_finds_everything_as_it_was(data):
    kept = lose(data)
    with holdfast.open_broker(data) as broker:
        broker.group("orders", "billing").receive_many(100)
    shutil.move(kept, data / "topics/orders/1/log")
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        (message,) = [each for each in broker.group("orders", "billing").receive_many(100) if each.partition == 1]
        assert message.raw == b"1-1"


@pytest.mark.parametrize("what", ["log", ""])
def test_a_repair_gets_it_going_again_and_says_what_that_costs(run, data, what):
    lose(data, what)
    checked = run("check", data)
    assert checked.code == 1
    assert "topics/orders/1/log is missing" in checked.out
    part = ("--part", "topics/orders/1/log") if what else ()
    done = run("repair", data, *part, "--yes")
    assert done.code == 0, done.err
    assert "cost: its messages are lost" in done.out
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        assert broker.publish("orders", b"goes on", partition=1).partition == 1
        found = [each.raw for each in broker.group("orders", "billing").receive_many(100) if each.partition == 1]
        assert found == [b"goes on"]


def test_a_log_that_cannot_be_opened_stops_alone_as_well(data):
    state = data / "topics/orders/1/log/state"
    state.rename(data.parent / "state")
    state.symlink_to(data.parent / "state")
    with holdfast.open_broker(data) as broker:
        assert {broker.publish("orders", b"new").partition for _ in range(4)} == {0, 2}
        with pytest.raises(CorruptData, match=r"orders/1/log.* is a symbolic link.* The other partitions continue"):
            broker.publish("orders", b"new", partition=1)


def test_dead_letters_of_a_lost_partition_are_kept_and_wait_for_it(data):
    with holdfast.open_broker(data) as broker:
        for message in broker.group("orders", "billing").receive_many(3):
            message.reject("no")
    kept = lose(data)
    with holdfast.open_broker(data) as broker:
        letters = broker.group("orders", "billing").dead
        assert len(letters.list()) == 3
        (lost,) = [letter for letter in letters.list() if letter.partition == 1]
        with pytest.raises(CorruptData, match=LOST):
            letters.redrive(ids=[lost.id])
        assert len(letters.list()) == 3
        with pytest.raises(CorruptData, match=f"left in place: 1, .*redriven: 2.*{LOST}"):
            letters.redrive()
        assert [letter.id for letter in letters.list()] == [lost.id]
    shutil.move(kept, data / "topics/orders/1/log")
    with holdfast.open_broker(data) as broker:
        letters = broker.group("orders", "billing").dead
        assert letters.redrive().done == 1


def test_messages_with_dedup_ids_are_refused_while_the_first_one_may_be_lost(data):
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"once", partition=1, dedup_id="x")
    lose(data)
    with holdfast.open_broker(data) as broker, pytest.raises(CorruptData, match=LOST):
        broker.publish("orders", b"again", partition=0, dedup_id="x")
