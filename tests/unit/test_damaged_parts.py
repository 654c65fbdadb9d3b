"""One spoiled part of a data folder stops alone: the rest goes on, and a repair gets it going again."""

from __future__ import annotations

import errno
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder, plan_folder_repair, repair_folder
from holdfast.broker.folder.contents import GroupNote
from holdfast.errors import Busy, CorruptData, DiskFull, InvalidRequest, UnknownGroup
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


def test_the_last_file_of_dedup_ids_is_missed_when_it_is_gone(data):
    (run_file,) = (data / "topics/orders/dedup").glob("*.ids")
    run_file.unlink()
    assert any(f"{run_file} is damaged: the file is missing" in what for what in check_folder(data).wrong)
    with holdfast.open_broker(data) as broker, pytest.raises(CorruptData, match="the file is missing"):
        broker.publish("orders", b"again", dedup_id="x")


@pytest.mark.parametrize("damaged", [b"", b"spoiled"])
def test_a_repair_renews_the_note_of_the_last_file_of_dedup_ids_and_keeps_them_all(data, damaged):
    note = data / "topics/orders/dedup/newest"
    before = note.read_bytes()
    note.write_bytes(damaged)
    assert "newest" in "".join(check_folder(data).wrong)
    repaired = repair_folder(data)
    assert [(step.action, step.part, step.cost) for step in repaired.steps] == [
        ("renew", "topics/orders/dedup", "nothing")
    ]
    assert repaired.after.ok
    assert note.read_bytes() == before


def test_dedup_ids_of_which_only_a_spoiled_note_is_left_are_not_taken_for_none(data):
    for path in (data / "topics/orders/dedup").iterdir():
        path.write_bytes(b"spoiled") if path.name == "newest" else path.unlink()
    assert "is missing" in "".join(check_folder(data).wrong)
    with holdfast.open_broker(data) as broker, pytest.raises(CorruptData, match="is missing"):
        broker.publish("orders", b"once", dedup_id="x")
    assert repair_folder(data).after.ok


def test_dedup_ids_from_before_their_last_file_was_noted_are_known(data):
    (data / "topics/orders/dedup/newest").unlink()
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        assert broker.publish("orders", b"again", dedup_id="x").duplicate
        broker.publish("orders", b"another", dedup_id="y")
    assert (data / "topics/orders/dedup/newest").exists()


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
    with pytest.raises(InvalidRequest, match="is not a part of"):
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


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("producers", lambda broker: broker.producer(name="loader")),
        ("locks", lambda broker: broker.locks.list()),
        ("groups/analytics", lambda broker: broker.consumer("orders", group="analytics")),
    ],
)
def test_what_is_gone_from_the_folder_is_named_and_stops_alone_until_it_is_given_up(data, name, use):
    with holdfast.open_broker(data) as broker, broker.producer(name="loader") as producer:
        producer.send("orders", b"sent")
    path = data / name
    path.unlink() if path.is_file() else shutil.rmtree(path)
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        with pytest.raises(CorruptData, match=f"{name} is missing"):
            use(broker)
    assert [what.split()[0] for what in check_folder(data).missing] == [name]
    assert repair_folder(data).after.ok
    with holdfast.open_broker(data) as broker:
        use(broker)
    assert check_folder(data).ok


def test_the_facts_of_a_topic_come_back_from_its_list(data):
    with holdfast.open_broker(data) as broker:
        broker.add_partitions("orders", 3)
        before = broker.describe_topic("orders")
    (data / "topics/orders/topic.json").unlink()
    assert any("topic.json is missing" in what for what in check_folder(data).wrong)
    with holdfast.open_broker(data) as broker:
        assert broker.describe_topic("orders") == before
    assert check_folder(data).ok


def test_a_folder_of_an_older_release_opens_and_gets_its_lists(data):
    for path in [*data.rglob("contents"), *data.rglob("newest")]:
        path.unlink()
    for path in [*data.rglob("topic.json"), *data.rglob("settings.json"), *data.rglob("groups/*.json")]:
        content = path.read_bytes()
        path.write_bytes(b"{" + content.partition(b'",')[2])  # as it was before there were checksums
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        assert len(broker.read("orders")) == 7
    for name in ("contents", "topics/orders/contents"):
        assert (data / name).exists()
    assert (data / "topics/orders/topic.json").read_bytes().startswith(b'{"check":"')
    shutil.rmtree(data / "topics/orders/0/groups/audit")
    assert not check_folder(data).ok


def test_a_delayed_store_that_is_gone_stops_delayed_messages_of_its_partition_alone(data):
    with holdfast.open_broker(data) as broker:
        broker.add_partitions("other", 2)
        first, second = (broker.publish("other", b"later", partition=number, delay=3600) for number in range(2))
    path = data / "topics/other/0/delayed"
    shutil.move(path, data.parent / "kept")
    for _ in range(2):  # whoever opens it does not make it anew
        with holdfast.open_broker(data) as broker:
            queue = broker.queue("other")
            for number in range(2):
                broker.publish("other", b"now", partition=number)
                queue.get(timeout=0).ack()
            assert broker.publish("other", b"later", partition=1, delay=3600).partition == 1
            assert queue.cancel(broker.publish("other", b"later", partition=1, delay=3600).id)
            for refused in (
                lambda broker=broker: broker.publish("other", b"later", partition=0, delay=3600),
                lambda queue=queue: queue.cancel(first.id),
                lambda queue=queue: queue.history(first.id),
                lambda queue=queue: list(queue.messages("delayed")),
            ):
                with pytest.raises(CorruptData, match=r"delayed is missing.*--part topics/other/0/delayed"):
                    refused()
            log = broker._port.engine.topic("other").partitions[0].log
            assert log.pins["delayed"] == log.start  # or a store that comes back would release messages again
        assert not path.exists()
    shutil.move(data.parent / "kept", path)
    with holdfast.open_broker(data) as broker:
        assert [broker.queue("other").cancel(each.id) for each in (first, second)] == [True, True]


def test_messages_with_dedup_ids_are_refused_while_delayed_ones_are_gone_that_may_have_had_them(data):
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"later", delay=3600, dedup_id="y")
    shutil.rmtree(data / "topics/orders/0/delayed")
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        with pytest.raises(CorruptData, match="delayed is missing"):
            broker.publish("orders", b"again", dedup_id="y")
    assert repair_folder(data, part="topics/orders/0/delayed").after.ok
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"later", delay=3600, dedup_id="z")


def test_a_delayed_store_whose_only_segment_is_gone_is_named_and_mended(data):
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"later", delay=3600)
    intake = data / "topics/orders/0/delayed/intake"
    for segment in intake.glob("*.log"):
        segment.unlink()
    (report,) = (part for part in check_folder(data).parts if part.part.kind == "delayed")
    assert "segments_missing" in [finding.code for finding in report.log.findings]
    assert not report.ok
    assert repair_folder(data).after.ok
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"later", delay=3600)
    assert check_folder(data).ok


@pytest.mark.parametrize("name", ["log", "delayed", "dedup", "producers", "a.json"])
def test_a_group_with_the_name_of_another_part_is_missed_as_a_group(tmp_path, name):
    folder = tmp_path / "data"
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders")
        broker.publish("orders", b"1")
        broker.group("orders", name).receive().ack()
    shutil.rmtree(folder / "topics/orders/0/groups" / name)
    (missing,) = check_folder(folder).missing
    assert "which messages were handled is not known" in missing
    with holdfast.open_broker(folder) as broker:
        broker.publish("orders", b"goes on")
        with pytest.raises(CorruptData, match="which messages were handled is not known"):
            broker.group("orders", name)
        broker.delete_group(name, "orders")
        assert broker.group("orders", name).receive().raw == b"1"
    assert check_folder(folder).ok


@pytest.mark.parametrize("killed", [False, True])
def test_a_group_can_be_deleted_though_the_list_of_parts_is_damaged(data, killed):
    contents = data / "topics/orders/contents"
    with holdfast.open_broker(data) as broker:
        topic = broker._port.engine.topic("orders")
        contents.write_bytes(b"spoiled")
        if killed:  # just behind the note that it is to go
            topic._notes.write("billing", GroupNote(deleted=True))
        else:
            broker.delete_group("billing", "orders")
        topic.list_parts = lambda: None  # at its end
    contents.write_bytes(b"spoiled")
    with holdfast.open_broker(data) as broker:
        assert broker._port.engine.topic("orders").groups.keys() == {"audit"}
    assert check_folder(data).ok


@pytest.mark.parametrize(("name", "topic"), [("billing", "orders"), ("analytics", None)])
def test_a_list_that_is_made_while_a_group_goes_does_not_name_it(data, monkeypatch, name, topic):
    with holdfast.open_broker(data) as broker:
        engine, others = broker._port.engine, []
        engine.topic("orders")

        def list_meanwhile(disk, path, *rest, call):
            if path.endswith(f"groups/{name}"):
                listing = (engine if topic is None else engine.topic(topic)).list_parts
                others.append(threading.Thread(target=listing))
                others[-1].start()
                others[-1].join(timeout=0.5)
            return call(path, *rest)

        disk = engine.world.disk
        for what in ("rename", "remove_folder"):
            call = getattr(disk, what)
            monkeypatch.setattr(disk, what, partial(list_meanwhile, disk, call=call), raising=True)
        broker.delete_group(name, topic)
        assert others
        for other in others:
            other.join()
    assert check_folder(data).missing == ()


def test_a_stream_group_that_cannot_be_taken_off_the_list_goes_on(data, monkeypatch):
    with holdfast.open_broker(data) as broker:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as full:
            full.setattr("holdfast.broker.folder.contents.durable_replace", fail)
            with pytest.raises(DiskFull):
                broker.delete_group("analytics")
        with broker.consumer("orders", group="analytics") as consumer:
            assert consumer.committed("orders", 0) is not None
        broker.delete_group("analytics")
    assert check_folder(data).ok


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_a_topic_whose_settings_are_spoiled_is_refused_alone_until_a_repair(run, data, how):
    with holdfast.open_broker(data) as broker:
        broker.alter_topic("orders", max_attempts=3)
    path = data / "topics/orders/settings.json"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink() if how == "gone" else path.write_bytes(content)
    with holdfast.open_broker(data) as broker:
        broker.publish("other", b"goes on")
        # With the defaults it might let messages go that it was told to keep.
        with pytest.raises(CorruptData, match=r"settings\.json.*holdfast repair"):
            broker.publish("orders", b"refused")
    assert "settings.json" in run("check", data).out
    done = run("repair", data, "--part", "topics/orders/settings.json", "--yes")
    assert done.code == 0, done.err
    assert "default settings" in done.out
    assert check_folder(data).ok
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"goes on")
        assert len(broker.read("orders")) == 8
