"""One spoiled part of a data folder stops alone: the rest goes on, and a repair gets it going again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder, plan_folder_repair, repair_folder
from holdfast.errors import Busy, CorruptData, InvalidRequest, UnknownGroup
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Topics with groups of both modes, dedup ids, a dead letter, a lock."""
    folder = tmp_path / "data"
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders")
        broker.create_topic("other")
        for n in range(6):
            broker.publish("orders", b"%d" % n)
        for name in ("billing", "audit"):
            for message in broker.group("orders", name).receive_many(2):
                message.ack()
        broker.group("orders", "audit").receive().reject("no")
        for name in ("analytics", "reports"):
            with broker.consumer("orders", group=name, auto_commit=False) as consumer:
                consumer.poll(timeout=5)
                consumer.commit()
        broker.publish("orders", b"once", dedup_id="x")
        broker.locks.acquire("nightly", owner="a", lease=60, wait=0)
    return folder


def lose_events(journal: Path) -> None:
    """Take both snapshots away; the journal no longer begins with its first event."""
    for segment in journal.glob("*.log"):
        segment.rename(journal / f"{7:020d}.log")
    for name in ("snapshot", "snapshot.before", "state"):
        (journal / name).unlink(missing_ok=True)
    for index in journal.glob("*.idx"):
        index.unlink()


def test_a_stream_group_whose_journal_is_lost_stops_alone_and_can_be_deleted(data):
    lose_events(data / "groups/analytics")
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        with broker.consumer("orders", group="reports") as consumer:
            assert [record.raw for record in consumer.poll(timeout=5)][-1] == b"goes on"
        with pytest.raises(CorruptData, match="holdfast group delete"):
            broker.consumer("orders", group="analytics")
        broker.delete_group("analytics")
        with broker.consumer("orders", group="analytics") as consumer:
            assert len(consumer.poll(timeout=5)) == 8
    assert check_folder(data).ok


def test_a_queue_group_whose_journal_is_lost_stops_alone_and_can_be_deleted(data):
    lose_events(data / "topics/orders/0/groups/billing")
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        assert broker.group("orders", "audit").receive().raw == b"3"
        assert len(broker.read("orders")) == 8
        with pytest.raises(CorruptData, match="groups/billing"):
            broker.group("orders", "billing")
        broker.delete_group("billing", "orders")
        assert broker.group("orders", "billing").receive().raw == b"0"
    assert check_folder(data).ok


def test_a_group_whose_journal_is_missing_stops_alone_and_is_named_until_somebody_acts(data):
    shutil.rmtree(data / "topics/orders/0/groups/billing")
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        with pytest.raises(CorruptData, match="groups/billing is missing"):
            broker.group("orders", "billing")
    assert any("groups/billing is missing" in what for what in check_folder(data).missing)
    repair_folder(data)
    with holdfast.open_broker(data) as broker:
        assert broker.group("orders", "billing").receive().raw == b"0"
    assert check_folder(data).ok


def test_damaged_dedup_ids_stop_only_messages_that_have_one(data):
    (run_file,) = (data / "topics/orders/dedup").glob("*.ids")
    content = bytearray(run_file.read_bytes())
    content[90] ^= 1
    run_file.write_bytes(content)
    assert any("dedup" in what for what in check_folder(data).wrong)
    content[5] ^= 1
    run_file.write_bytes(content)
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        with pytest.raises(CorruptData, match="dedup ids"):
            broker.publish("orders", b"again", dedup_id="x")
    repair_folder(data)
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"again", dedup_id="x")


@pytest.mark.parametrize(
    "name", ["groups/analytics", "topics/orders/0/groups/billing", "locks", "topics/orders.dlq/0/groups/default"]
)
def test_after_a_repair_a_journal_is_whole_again(run, data, name):
    lose_events(data / name)
    assert run("check", data).code == 1
    done = run("repair", data, "--part", name, "--yes")
    assert done.code == 0, done.err
    assert "cost: " in done.out
    assert run("check", data).code == 0
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        broker.locks.acquire("other", owner="a", lease=60, wait=0)
        broker.group("orders", "billing").receive()
        broker.group("orders", "audit").receive()
        with broker.consumer("orders", group="analytics") as consumer:
            assert consumer.poll(timeout=5)
    assert run("check", data).code == 0


@pytest.mark.parametrize("name", ["groups/analytics", "topics/orders/0/groups/billing", "locks"])
def test_after_a_repair_of_damaged_events_a_check_is_green(data, name):
    segment = min((data / name).glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[90] ^= 1
    segment.write_bytes(content)
    for snapshot in (data / name).glob("snapshot*"):
        snapshot.unlink()
    assert not check_folder(data).ok
    result = repair_folder(data)
    assert result.after.ok, [(part.wrong, part.log.findings) for part in result.after.parts if not part.ok]
    assert plan_folder_repair(data).empty


def test_a_repair_of_one_part_leaves_the_others(data):
    shutil.rmtree(data / "topics/orders/0/groups/billing")
    lose_events(data / "groups/analytics")
    with pytest.raises(InvalidRequest, match="no part of"):
        repair_folder(data, part="topics/nowhere")
    done = repair_folder(data, part="groups/analytics")
    assert [step.part for step in done.steps] == ["groups/analytics"]
    assert [what.split()[0] for what in done.after.missing] == ["topics/orders/0/groups/billing"]


def test_nobody_may_own_the_folder_during_a_repair(data):
    with holdfast.open_broker(data), pytest.raises(Busy):
        repair_folder(data)


def test_a_deleted_group_is_not_missed(data):
    with holdfast.open_broker(data) as broker:
        broker.delete_group("billing", "orders")
        with pytest.raises(UnknownGroup):
            broker.delete_group("billing", "orders")
    assert check_folder(data).ok
