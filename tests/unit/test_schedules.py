"""Schedules of a data folder, for threads and for tasks."""

from __future__ import annotations

import errno
import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast import InvalidRequest, MessageTooLarge, NotFound, UnknownTopic
from holdfast.broker import schedules as engine_schedules
from holdfast.broker.messages import DEDUP_ID, mark
from holdfast.broker.schedules import stored_schedules
from holdfast.storage.keeper import Keeper
from tests.unit.brokers import FOLDER, Place
from tests.unit.workers import eventually

NOON = 1_764_590_400  # 2025-12-01 12:00 UTC, a Monday


class Clocked(Place):
    """A place at noon, with a topic."""

    def __init__(self, *, tasks: bool = False) -> None:
        super().__init__(tasks=tasks)
        self.clock.step_wall(seconds=NOON - self.clock.now_ns() / 1e9)
        self.broker.create_topic("jobs")

    @property
    def schedules(self) -> Any:
        return self.broker.schedules

    def fired_ids(self, topic: str = "jobs") -> list[str]:
        """The dedup ids of the messages in a topic."""
        with self.engine.using(topic) as found:
            records = [each for part in found.partitions for each in part.log.records(part.log.start)]
        return [mark(record, DEDUP_ID).decode() for record in records]

    def run(self, *, seconds: float, step: float = 1) -> None:
        """Let time pass, looking at each step."""
        for _ in range(round(seconds / step)):
            self.after(seconds=step)


@pytest.fixture(params=["threads", "tasks"])
def place(request):
    place = Clocked(tasks=request.param == "tasks")
    yield place
    place.close()


@pytest.fixture
def alone():
    place = Clocked()
    yield place
    place.close()


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# Faces


def test_a_schedule_publishes_its_message_when_it_is_due(place):
    made = place.broker.schedules.put(
        "nightly", "jobs", b"go", cron="0 3 * * *", timezone="Europe/Berlin", key="k", headers={"a": "1"}, priority=4
    )
    assert made.next_due == at("2025-12-02T02:00:00")
    assert (made.cron, made.timezone, made.every, made.at, made.misfire) == (
        "0 3 * * *",
        "Europe/Berlin",
        None,
        None,
        "run_once",
    )
    place.after(seconds=14 * 3600 - 1)
    assert place.broker.read("jobs") == []
    place.after(seconds=1)
    (message,) = place.broker.read("jobs")
    assert (message.body, message.key, dict(message.headers), message.priority) == (b"go", "k", {"a": "1"}, 4)
    found = place.broker.schedules.get("nightly")
    assert found.next_due == at("2025-12-03T02:00:00")
    (firing,) = found.firings
    assert (firing.due, firing.at, firing.missed, firing.by_hand) == (made.next_due, made.next_due, 0, False)
    assert firing.message_id == message.id
    assert (found.fired, found.missed) == (1, 0)


def test_schedules_are_listed_paused_resumed_and_deleted(place):
    schedules = place.broker.schedules
    for name in ("b", "a"):
        schedules.put(name, "jobs", b"go", every=60)
    assert [each.name for each in schedules.list()] == ["a", "b"]
    assert schedules.pause("a").paused
    assert schedules.pause("a").next_due is None
    assert schedules.delete("b") is True
    assert schedules.delete("b") is False
    place.after(seconds=300)
    assert place.broker.read("jobs") == []
    resumed = schedules.resume("a")
    assert (resumed.paused, resumed.missed, resumed.next_due) == (False, 0, at("2025-12-01T12:06:00"))
    place.after(seconds=60)
    assert len(place.broker.read("jobs")) == 1
    assert schedules.get("b") is None
    for call in (schedules.pause, schedules.resume, schedules.run_now, schedules.next):
        with pytest.raises(NotFound, match="no schedule b"):
            call("b")


def test_a_schedule_runs_now_besides_its_dues(place):
    schedules = place.broker.schedules
    schedules.put("job", "jobs", b"go", every=60)
    place.after(seconds=10)
    firing = schedules.run_now("job")
    assert firing.by_hand
    assert firing.message_id == "jobs-0-0"
    found = schedules.get("job")
    assert (found.fired, found.next_due, found.firings) == (1, at("2025-12-01T12:01:00"), [firing])
    schedules.pause("job")
    place.after(seconds=1)
    assert schedules.run_now("job").message_id == "jobs-0-1"


def test_the_next_times_are_told(place):
    schedules = place.broker.schedules
    schedules.put("job", "jobs", b"go", cron="0 0 1 * *")
    assert schedules.next("job", 3) == [at("2026-01-01"), at("2026-02-01"), at("2026-03-01")]
    assert len(schedules.next("job")) == 5
    schedules.put("once", "jobs", b"go", at=at("2026-01-01"))
    assert schedules.next("once") == [at("2026-01-01")]
    for count in (0, 1001, 1.5, True):
        with pytest.raises(InvalidRequest, match="count"):
            schedules.next("job", count)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "none of them"),
        ({"cron": "0 3 * * *", "every": 5}, "cron and every are given"),
        ({"cron": "0 3 * *"}, "five fields"),
        ({"cron": 7}, "give a text"),
        ({"cron": "0 3 * * *", "timezone": "Mars/Olympus"}, "IANA name"),
        ({"cron": "0 3 * * *", "timezone": None}, "IANA name"),
        ({"every": 5, "timezone": "Europe/Berlin"}, "only a cron expression"),
        ({"every": 0.5}, "every=0.5"),
        ({"every": "30s"}, "every='30s'"),
        ({"at": datetime(2026, 1, 1)}, "no time zone"),
        ({"at": at("2025-12-01T11:59:59")}, "has passed"),
        ({"at": at("1960-01-01")}, "has passed"),
        ({"at": datetime.max.replace(tzinfo=UTC), "jitter": 1}, "year 9999"),
        ({"every": 5, "misfire": "later"}, "misfire='later'"),
        ({"every": 5, "jitter": -1}, "jitter=-1"),
        ({"every": 5, "jitter": 100_000}, "jitter=100000"),
        ({"every": 5, "priority": 10}, "priority=10"),
        ({"every": 5, "key": b"k"}, "is text"),
        ({"every": 5, "headers": {"a": b"b"}}, "dict of texts"),
        ({"every": 5, "headers": {"holdfast.x": "b"}}, "reserved"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(place, options, why):
    with pytest.raises(InvalidRequest, match=why):
        place.broker.schedules.put("job", "jobs", b"go", **options)
    assert place.broker.schedules.list() == []


def test_topics_bodies_and_names_that_cannot_be_used_are_refused(place):
    put = place.broker.schedules.put
    with pytest.raises(UnknownTopic, match="nowhere"):
        put("job", "nowhere", b"go", every=5)
    with pytest.raises(holdfast.BadBody):
        put("job", "jobs", {"a": 1}, every=5)
    with pytest.raises(MessageTooLarge, match="65537 bytes"):
        put("job", "jobs", bytes(64 * 1024 + 1), every=5)
    for name in ("", "a b", "a/b", "schedule:a", None):
        with pytest.raises(InvalidRequest, match="schedule"):
            put(name, "jobs", b"go", every=5)
    assert place.broker.schedules.list() == []


# Once


def test_the_same_schedule_put_again_goes_on_undisturbed(place):
    schedules = place.broker.schedules
    made = schedules.put("job", "jobs", b"go", every=60)
    place.after(seconds=90)
    again = schedules.put("job", "jobs", b"go", every=60)
    assert (again.created_at, again.fired, again.next_due) == (made.created_at, 1, at("2025-12-01T12:02:00"))
    once = schedules.put("once", "jobs", b"go", at=at("2025-12-01T12:02:00"))
    place.after(seconds=90)
    assert schedules.put("once", "jobs", b"go", at=once.at).fired == 1


def test_a_changed_schedule_keeps_its_history_and_its_pause(place):
    schedules = place.broker.schedules
    made = schedules.put("job", "jobs", b"go", every=60)
    place.after(seconds=60)
    schedules.pause("job")
    changed = schedules.put("job", "jobs", b"go faster", every=10)
    assert (changed.body, changed.every, changed.fired, changed.paused) == (b"go faster", 10, 1, True)
    assert changed.created_at == made.created_at
    assert changed.changed_at > made.changed_at
    assert schedules.resume("job").next_due == at("2025-12-01T12:01:10")


def test_another_message_does_not_put_off_the_next_due(alone):
    schedules = alone.schedules
    made = schedules.put("job", "jobs", b"one", every=60)
    alone.clock.advance(seconds=50)
    assert schedules.put("job", "jobs", b"two", every=60).next_due == made.next_due
    alone.clock.advance(seconds=20)  # it is due, and nothing has fired it yet
    assert schedules.put("job", "jobs", b"three", every=60).next_due == made.next_due
    alone.after()
    assert alone.fired_ids() == ["job@2025-12-01T12:01:00Z"]
    assert [message.body for message in alone.broker.read("jobs")] == [b"three"]
    assert schedules.get("job").next_due == at("2025-12-01T12:02:00")


def test_another_topic_is_not_sent_what_the_first_one_has(alone, monkeypatch):
    alone.broker.create_topic("others")
    alone.schedules.put("job", "jobs", b"go", every=60)
    locks = alone.engine.locks()
    monkeypatch.setattr(locks, "change", lambda *_, **__: (_ for _ in ()).throw(holdfast.DiskFull("no room")))
    alone.after(seconds=60)
    monkeypatch.undo()
    alone.schedules.put("job", "others", b"go", every=60)
    alone.run(seconds=50)
    assert (len(alone.fired_ids()), alone.fired_ids("others")) == (1, [])


def test_two_runs_in_the_same_moment_are_two_messages(alone):
    alone.schedules.put("job", "jobs", b"go", every=60)
    first, second = alone.schedules.run_now("job"), alone.schedules.run_now("job")
    assert first.message_id != second.message_id
    assert len(alone.broker.read("jobs")) == 2


def test_every_due_fires_once_over_restarts(alone):
    alone.schedules.put("job", "jobs", b"go", every=10)
    for restart in (None, alone.reopen, alone.kill, alone.kill, None):
        if restart is not None:
            restart()
        alone.run(seconds=30)
    moments = [at("2025-12-01T12:00:00") + timedelta(seconds=10 * i) for i in range(1, 16)]
    assert alone.fired_ids() == [f"job@{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in moments]
    assert alone.schedules.get("job").fired == 15


def test_a_due_that_was_fired_but_not_noted_is_not_fired_again_however_late(alone, monkeypatch):
    alone.schedules.put("job", "jobs", b"go", every=3600)
    monkeypatch.setattr(engine_schedules.FolderSchedules, "_write", lambda *_: None)
    alone.after(seconds=3600)
    assert alone.fired_ids() == ["job@2025-12-01T13:00:00Z"]
    monkeypatch.undo()
    alone.kill()
    alone.clock.advance(seconds=40 * 86_400)  # far beyond the deduplication window
    alone.broker.schedules.put("other", "jobs", b"go", every=3600)
    alone.engine.tick()
    assert alone.fired_ids() == ["job@2025-12-01T13:00:00Z", "job@2026-01-10T13:00:00Z"]


def test_a_restart_catches_up_by_the_policy(alone):
    for misfire in ("run_once", "skip", "all"):
        alone.schedules.put(misfire, "jobs", b"go", every=3600, misfire=misfire)
    alone.broker.close()
    alone.clock.advance(seconds=5 * 3600 + 1800)
    alone.broker = alone.open()
    alone.engine.tick()
    found = {each.name: each for each in alone.schedules.list()}
    assert {name: (each.fired, each.missed) for name, each in found.items()} == {
        "all": (5, 0),
        "run_once": (1, 4),
        "skip": (0, 5),
    }
    missed = found["run_once"].firings[1]
    assert (missed.missed, missed.due, missed.message_id) == (4, at("2025-12-01T16:00:00"), "")
    assert all(each.next_due == at("2025-12-01T18:00:00") for each in found.values())
    assert alone.engine.schedules().missed.value == 9
    assert alone.engine.schedules().fired.value == 6


def test_a_message_goes_to_the_partition_of_its_key_and_others_to_any(alone):
    alone.broker.create_topic("wide", partitions=4)
    alone.schedules.put("keyed", "wide", b"go", every=10, key="customer-7")
    alone.schedules.put("free", "wide", b"go", every=10)
    alone.run(seconds=100, step=10)
    home = alone.broker.publish("wide", b"x", key="customer-7").partition
    keyed = [m for n in range(4) for m in alone.broker.read("wide", partition=n) if m.key == "customer-7"]
    assert len(keyed) == 11
    assert {message.partition for message in keyed} == {home}
    free = [m.partition for n in range(4) for m in alone.broker.read("wide", partition=n) if m.key is None]
    assert len(free) == 10
    assert len(set(free)) > 1


# Clocks


def test_a_clock_set_forward_counts_as_an_outage(alone):
    alone.schedules.put("job", "jobs", b"go", every=600)
    alone.clock.step_wall(seconds=3600)
    alone.engine.tick()
    found = alone.schedules.get("job")
    assert (found.fired, found.missed) == (1, 5)


def test_a_clock_set_back_fires_nothing_twice_and_does_not_fall_silent(alone):
    alone.schedules.put("job", "jobs", b"go", every=600)
    alone.run(seconds=1800, step=600)
    alone.clock.step_wall(seconds=-1800)
    alone.engine.tick()
    assert alone.schedules.get("job").next_due == at("2025-12-01T12:10:00")
    alone.run(seconds=3600, step=600)
    minutes = ["12:10", "12:20", "12:30", "12:40", "12:50", "13:00"]
    assert alone.fired_ids() == [f"job@2025-12-01T{minute}:00Z" for minute in minutes]


def test_a_clock_that_was_a_year_ahead_does_not_silence_a_schedule_for_a_year(alone):
    alone.schedules.put("job", "jobs", b"go", cron="0 * * * *")
    alone.clock.step_wall(seconds=365 * 86_400)
    alone.engine.tick()
    assert alone.schedules.get("job").next_due.year == 2026
    alone.clock.step_wall(seconds=-365 * 86_400)
    alone.reopen()
    alone.run(seconds=7200, step=1800)
    assert alone.fired_ids()[1:] == ["job@2025-12-01T13:00:00Z", "job@2025-12-01T14:00:00Z"]


def test_a_one_time_schedule_is_not_fired_again_by_a_clock_set_back(alone):
    alone.schedules.put("once", "jobs", b"go", at=at("2025-12-01T12:30:00"))
    alone.after(seconds=1800)
    assert alone.schedules.get("once").next_due is None
    alone.clock.step_wall(seconds=-3600)
    alone.run(seconds=7200, step=600)
    assert alone.fired_ids() == ["once@2025-12-01T12:30:00Z"]


def test_daylight_saving_changes_in_a_running_folder(alone):
    alone.clock.step_wall(seconds=at("2026-03-27T12:00:00").timestamp() - alone.clock.now_ns() / 1e9)
    alone.schedules.put("berlin", "jobs", b"go", cron="30 2 * * *", timezone="Europe/Berlin")
    alone.run(seconds=4 * 86_400, step=900)
    spring = alone.fired_ids()
    alone.schedules.pause("berlin")
    alone.clock.step_wall(seconds=at("2026-10-23T12:00:00").timestamp() - alone.clock.now_ns() / 1e9)
    alone.schedules.resume("berlin")
    alone.run(seconds=4 * 86_400, step=900)
    autumn = [each for each in alone.fired_ids() if each not in spring]
    assert spring + autumn == [
        "berlin@2026-03-28T01:30:00Z",
        "berlin@2026-03-29T01:00:00Z",  # 03:00, right after the gap
        "berlin@2026-03-30T00:30:00Z",
        "berlin@2026-03-31T00:30:00Z",
        "berlin@2026-10-24T00:30:00Z",
        "berlin@2026-10-25T00:30:00Z",  # the first 02:30, not the second
        "berlin@2026-10-26T01:30:00Z",
        "berlin@2026-10-27T01:30:00Z",
    ]


def test_jitter_moves_the_firing_and_not_the_due(alone):
    alone.schedules.put("job", "jobs", b"go", every=3600, jitter=600)
    alone.run(seconds=3 * 3600 + 700, step=1)
    found = alone.schedules.get("job")
    late = [(firing.at - firing.due).total_seconds() for firing in found.firings]
    assert len(late) == 3
    assert all(0 <= each <= 601 for each in late)
    assert len(set(late)) == 3
    assert alone.fired_ids() == [f"job@2025-12-01T{13 + i}:00:00Z" for i in range(3)]
    assert alone.engine.schedules().lateness_seconds.snapshot().max < 2


# Many


def test_schedules_that_are_due_together_share_a_sync(alone):
    for number in range(250):
        alone.schedules.put(f"job-{number}", "jobs", b"go", every=60)
    before = alone.disk.calls["sync"]
    alone.after(seconds=60)
    assert len(alone.fired_ids()) == len(set(alone.fired_ids())) == 250
    assert alone.disk.calls["sync"] - before < 25


def test_a_tick_that_takes_long_to_see_what_is_due_lets_callers_go(alone, monkeypatch):
    for number in range(20):
        alone.schedules.put(f"job-{number}", "jobs", b"go", every=60)
    schedules, some = alone.engine.schedules(), []
    plan, fire = engine_schedules.plan, schedules._fire_some

    def slow(*given: Any) -> Any:
        alone.clock.advance(seconds=0.02)
        return plan(*given)

    monkeypatch.setattr(engine_schedules, "plan", slow)
    monkeypatch.setattr(schedules, "_fire_some", lambda names: (some.append(len(names)), fire(names)))
    alone.after(seconds=60)
    assert len(some) > 5
    assert len(alone.fired_ids()) == 20


def test_what_many_schedules_missed_is_one_line_in_the_log(alone, caplog):
    for number in range(5):
        alone.schedules.put(f"job-{number}", "jobs", b"go", every=60)
    with caplog.at_level(logging.WARNING):
        alone.after(seconds=600)
    (line,) = [each for each in caplog.records if each.message == "firings missed"]
    assert (line.schedule, line.other_schedules, line.count) == ("job-0", 4, 45)


def test_a_caller_need_not_wait_until_all_schedules_have_fired(alone, monkeypatch):
    for number in range(300):
        alone.schedules.put(f"job-{number}", "jobs", b"go", every=60)
    schedules, done = alone.engine.schedules(), []
    asking = threading.Thread(target=schedules.get, args=("job-1",))
    fire, loaded = schedules._fire_some, schedules._loaded

    def fire_some(names: Any) -> None:
        if not done:
            asking.start()
            eventually(schedules._turn.locked)
        fire(names)
        done.append("some fired")

    def look() -> Any:
        if threading.current_thread() is asking:
            done.append("asked")
        return loaded()

    monkeypatch.setattr(schedules, "_fire_some", fire_some)
    monkeypatch.setattr(schedules, "_loaded", look)
    alone.after(seconds=60)
    asking.join()
    assert done[:3] == ["some fired", "asked", "some fired"]


# What goes wrong


def test_a_schedule_whose_topic_is_gone_says_so_and_fires_again_once_it_is_back(alone, caplog):
    alone.schedules.put("job", "jobs", b"go", every=60)
    alone.broker.delete_topic("jobs")
    with caplog.at_level(logging.WARNING):
        alone.run(seconds=180, step=5)
    assert "no topic jobs" in alone.schedules.get("job").error
    assert len([each for each in caplog.records if each.message == "a schedule could not fire"]) == 1
    assert "no topic jobs" in stored_schedules(alone.world, FOLDER)["job"].error
    alone.broker.create_topic("jobs")
    alone.run(seconds=20, step=5)
    found = alone.schedules.get("job")
    assert (found.fired, found.missed, found.error) == (1, 2, "")


def test_a_full_disk_delays_firings_and_loses_none(alone):
    alone.schedules.put("job", "jobs", b"go", every=60, misfire="all")
    alone.disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=frozenset({"reserve", "write", "create"}))
    alone.run(seconds=120, step=5)
    alone.disk.faults.clear()
    if alone.fired_ids() == [] or alone.schedules.get("job").fired < 2:
        alone.kill()
    alone.run(seconds=30, step=5)
    assert alone.fired_ids() == ["job@2025-12-01T12:01:00Z", "job@2025-12-01T12:02:00Z"]


def test_documents_that_leave_no_room_do_not_stop_schedules(alone, monkeypatch):
    alone.schedules.put("job", "jobs", b"go", every=60)
    monkeypatch.setattr("holdfast.broker.locks._MOST_BYTES", alone.engine.locks().table.document_bytes)
    with pytest.raises(InvalidRequest, match="room"):
        alone.broker.documents.update("mine", 1)
    alone.run(seconds=180, step=60)
    assert (alone.schedules.get("job").fired, alone.schedules.get("job").error) == (3, "")
    with pytest.raises(InvalidRequest, match="schedule job was not written"):
        alone.schedules.put("job", "jobs", b"go" * 1000, every=60)


def test_an_error_that_cannot_be_stored_is_shown_all_the_same(alone, monkeypatch):
    alone.schedules.put("job", "jobs", b"go", every=60)
    locks = alone.engine.locks()
    monkeypatch.setattr(locks, "change", lambda *_, **__: (_ for _ in ()).throw(holdfast.DiskFull("no room")))
    alone.after(seconds=60)
    assert alone.schedules.get("job").error == "no room"
    monkeypatch.undo()
    alone.run(seconds=20)
    found = alone.schedules.get("job")
    assert (found.error, found.fired, len(alone.fired_ids())) == ("", 1, 1)


def test_a_schedule_that_is_changed_is_tried_again_at_once(alone):
    alone.broker.create_topic("gone")
    alone.schedules.put("job", "gone", b"go", every=2)
    alone.broker.delete_topic("gone")
    alone.after(seconds=2)
    assert alone.schedules.get("job").error
    assert alone.schedules.put("job", "jobs", b"go", every=2).error == ""
    alone.after(seconds=2)
    assert len(alone.fired_ids()) == 1


def test_a_schedule_that_could_not_be_deleted_is_still_there(alone, monkeypatch):
    alone.schedules.put("job", "jobs", b"go", every=60)
    locks = alone.engine.locks()
    monkeypatch.setattr(locks, "change", lambda *_, **__: (_ for _ in ()).throw(holdfast.DiskFull("no room")))
    with pytest.raises(holdfast.DiskFull):
        alone.schedules.delete("job")
    monkeypatch.undo()
    assert alone.schedules.get("job") is not None
    assert alone.schedules.delete("job")
    alone.kill()
    assert alone.schedules.get("job") is None


def test_there_is_a_limit_to_their_number(alone, monkeypatch):
    monkeypatch.setattr(engine_schedules, "MOST_SCHEDULES", 2)
    for name in ("a", "b"):
        alone.schedules.put(name, "jobs", b"go", every=60)
    with pytest.raises(InvalidRequest, match="2 already"):
        alone.schedules.put("c", "jobs", b"go", every=60)
    alone.schedules.put("a", "jobs", b"go", every=61)


# Where they are


def test_schedules_are_no_documents_of_users(place):
    place.broker.schedules.put("job", "jobs", b"go", every=60)
    place.broker.documents.update("mine", 1)
    assert place.broker.documents.list() == ["mine"]
    with pytest.raises(InvalidRequest):
        place.broker.documents.get("schedule:job")


def test_schedules_can_be_read_beside_their_owner_and_after_it(alone):
    alone.schedules.put("job", "jobs", b"go", every=60)
    alone.after(seconds=60)
    assert stored_schedules(alone.world, FOLDER)["job"].fired == 1
    alone.broker.close()
    assert stored_schedules(alone.world, FOLDER)["job"].fired == 1
    alone.broker = alone.open()


def test_a_folder_without_schedules_is_not_touched(alone):
    alone.run(seconds=600, step=60)
    assert not any("locks" in path for path in alone.files())


def test_an_open_folder_fires_by_itself_though_its_first_tick_came_at_once(tmp_path, monkeypatch):
    start = Keeper.start

    def ticked(keeper: Keeper[Any]) -> None:
        keeper._tick()
        start(keeper)

    monkeypatch.setattr(Keeper, "start", ticked)
    with holdfast.open_broker(tmp_path / "data", share=False) as broker:
        broker.create_topic("jobs")
        broker.schedules.put("job", "jobs", b"go", every=1)
        deadline = time.monotonic() + 30
        while not broker.read("jobs"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
