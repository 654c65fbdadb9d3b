"""A paused group: what goes on and what does not, in simulated time; races; what its note holds."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import Empty, UnknownGroup
from holdfast.broker.folder.contents import GroupNotes
from holdfast.broker.inspect.status import FolderStatus
from tests.unit.commands import runner
from tests.unit.queues import FOLDER, Place

GROUP_NOTE = f"{FOLDER}/topics/jobs/groups/default.json"


def empty(queue: holdfast.Queue[Any]) -> bool:
    try:
        queue.get(timeout=0)
    except Empty:
        return True
    return False


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_a_pause_survives_the_end_of_the_process(place, ending):
    place.q.put(b"x")
    place.q.pause(reason="for the night")
    paused = place.q.stats().paused
    queue = place.reopen() if ending == "close" else place.kill()
    assert queue.stats().paused == paused
    assert paused.reason == "for the night"
    assert empty(queue)
    queue.resume()
    queue = place.reopen() if ending == "close" else place.kill()
    assert queue.stats().paused is None
    assert queue.get(timeout=0).body == b"x"


def test_leases_and_delays_end_meanwhile_and_the_messages_wait_for_the_resume(place):
    place.q.put(b"leased")
    message = place.q.get(lease=10)
    place.q.put(b"delayed", delay=5)
    place.q.pause()
    place.after(seconds=20)
    assert message.lost
    place.after(seconds=20)  # the backoff of the first
    stats = place.q.stats()
    assert (stats.ready, stats.leased, stats.delayed) == (2, 0, 0)
    assert empty(place.q)
    place.q.resume()
    assert {each.body for each in place.q.get_many(5, timeout=0)} == {b"leased", b"delayed"}


def test_what_is_in_flight_can_be_settled_in_every_way(place):
    place.q.put_many([b"ack", b"nack", b"defer", b"reject", b"extend"])
    taken = {each.body: each for each in place.q.get_many(5, lease=10)}
    place.q.pause()
    taken[b"ack"].ack()
    taken[b"nack"].nack(error="no")
    taken[b"defer"].defer()
    taken[b"reject"].reject("never")
    taken[b"extend"].extend(60)
    taken[b"extend"].state.save({"at": 1})
    place.after(seconds=30)
    assert not taken[b"extend"].lost
    stats = place.q.stats()
    assert (stats.ready, stats.leased, stats.dead) == (2, 1, 1)
    assert empty(place.q)
    place.q.resume()
    assert len(place.q.get_many(5, timeout=0)) == 2


@pytest.mark.parametrize("settings", [{}, {"key_order": True}, {"trace_sample": 1.0}, {"priority_choice": "fair"}])
def test_every_way_of_choosing_honours_it(settings):
    queue = Place(**settings).q
    queue.put_many([holdfast.NewMessage(b"%d" % i, key=str(i), priority=i) for i in range(5)])
    first = queue.get(timeout=0)
    queue.pause()
    assert empty(queue)
    assert queue.get_many(5, timeout=0) == []
    first.ack()
    assert empty(queue)
    queue.resume()
    assert len(queue.get_many(5, timeout=0)) == 4


def test_settings_that_change_and_partitions_that_come_leave_it_paused(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        group = broker.group("orders", "mail")
        group.pause()
        broker.alter_topic("orders", max_attempts=3)
        broker.add_partitions("orders", 2)
        assert broker.group("orders", "mail", max_attempts=9).settings.max_attempts == 9
        for number in range(3):
            broker.publish("orders", b"x", partition=number)
        assert group.receive_many(9, timeout=0) == []
        assert group.stats().paused is not None
        group.resume()
        assert len(group.receive_many(9, timeout=5)) == 3
    with holdfast.open_broker(tmp_path) as broker:
        assert broker.group("orders", "mail").settings.max_attempts == 9


def test_threads_that_take_all_the_time_get_nothing_between_pause_and_resume(tmp_path):
    with holdfast.open(tmp_path, ack_durability="os") as queue:
        queue.put_many([b"x"] * 20_000, durability="os")
        delivered = queue._port.queue_group.metrics.delivered
        over = threading.Event()

        def consume() -> None:
            while not over.is_set():
                try:
                    queue.get(timeout=0.005).ack()
                except Empty:
                    continue

        threads = [threading.Thread(target=consume) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                queue.pause()
                taken = delivered.value
                over.wait(0.005)
                assert delivered.value == taken
                queue.resume()
        finally:
            over.set()
            for thread in threads:
                thread.join(60)


def test_a_group_that_was_deleted_cannot_be_paused_and_leaves_nothing_behind(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        group = broker.group("orders", "mail")
        broker.delete_group("mail", "orders")
        with pytest.raises(UnknownGroup, match="deleted"):
            group.pause()
        assert [info.name for info in broker.groups("orders")] == []
    with pytest.raises(UnknownGroup), holdfast.open_broker(tmp_path) as broker:
        broker.delete_group("mail", "orders")


def test_the_note_of_a_group_that_was_never_paused_is_as_before(place):
    assert not place.disk.exists(GROUP_NOTE)
    place.q.pause(reason="x")
    world = place.world
    assert GroupNotes(world, f"{FOLDER}/topics/jobs").read("default").paused.reason == "x"
    place.q.resume()
    assert msgspec.json.encode(GroupNotes(world, f"{FOLDER}/topics/jobs").read("default")) == b"{}"


def test_it_is_seen_without_owning_the_folder(place):
    place.q.pause(reason="why")
    (group,) = FolderStatus(place.world, FOLDER).groups("jobs")
    assert group.paused.reason == "why"
    assert group.document["paused"]["reason"] == "why"


def test_a_repair_that_goes_on_without_the_note_says_that_the_pause_ends(tmp_path, capsys, monkeypatch):
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put(b"a")
        queue.pause(reason="x")
    note = tmp_path / "jobs" / "topics" / "jobs" / "groups" / "default.json"
    note.write_text(note.read_text().replace('"x"', '"y"'))
    done = runner(capsys, monkeypatch)("repair", tmp_path / "jobs", "--dry-run")
    assert "no longer paused" in " ".join(done.out.split())
