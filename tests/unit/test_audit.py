"""The audit log: on disk before an act is done, whole after a crash, and without secrets."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.env import ManualClock, World, real_world
from holdfast.env.ids import SeededIds
from holdfast.env.simdisk import SimulatedDisk
from holdfast.errors import BadSettings, DiskFull, Unavailable
from holdfast.server.audit import BEGUN, DONE, Act, Audit, open_audit
from holdfast.settings import ServerSettings

PATH = "/data/audit.jsonl"


class Place:
    """A simulated machine with an audit log."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        if disk is None:
            disk = SimulatedDisk()
            disk.make_folder("/data")
        self.disk = disk
        self.clock = ManualClock(1_800_000_000_000_000_000)
        self.world = World(clock=self.clock, disk=disk, ids=SeededIds())

    def audit(self, **limits: int) -> Audit:
        return Audit(self.world, PATH, **limits)

    def lines(self, path: str = PATH) -> list[Any]:
        return [json.loads(line) for line in self.disk.contents(path).splitlines()]


def begin(audit: Audit, target: str = "orders", **facts: Any) -> Act:
    words = {"principal": "ops", "peer": "10.0.0.9", "action": "admin", "route": "DELETE /v1/topics/{topic}"}
    return audit.begin(**(words | {"target": target} | facts))


def record(audit: Audit, target: str = "orders", **facts: Any) -> None:
    audit.end(begin(audit, target), **facts)


def test_an_act_is_two_lines_and_reads_back_as_one():
    place = Place()
    audit = place.audit()
    act = begin(audit, parameters={"force": True}, correlation_id="c1")
    place.clock.advance(seconds=2)
    audit.end(act, count=3)
    first, second = place.lines()
    assert first == {
        "time": "2027-01-15T08:00:00Z",
        "id": act.id,
        "principal": "ops",
        "peer": "10.0.0.9",
        "action": "admin",
        "route": "DELETE /v1/topics/{topic}",
        "target": "orders",
        "parameters": {"force": True},
        "correlation_id": "c1",
        "outcome": "begun",
        "count": None,
    }
    assert second == first | {"time": "2027-01-15T08:00:02Z", "outcome": "done", "count": 3}
    assert audit.last(10) == [msgspec.convert(second, Act)]


def test_the_last_acts_come_newest_first_each_as_it_ended():
    audit = Place().audit()
    record(audit, "a")
    running = begin(audit, "b")
    record(audit, "c", outcome="unknown_topic")
    assert [(act.target, act.outcome) for act in audit.last(10)] == [
        ("c", "unknown_topic"),
        ("b", BEGUN),
        ("a", DONE),
    ]
    audit.end(running, count=1)
    assert [act.target for act in audit.last(2)] == ["b", "c"]
    assert [act.outcome for act in audit.last(10)] == [DONE, "unknown_topic", DONE]
    assert audit.last(0) == []
    assert Place().audit().last(5) == []


def test_what_was_refused_is_recorded_too():
    audit = Place().audit()
    audit.record(principal="shop", peer="local", action="admin", route="POST /x", outcome="forbidden")
    assert [(act.principal, act.outcome) for act in audit.last(1)] == [("shop", "forbidden")]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_a_power_cut_leaves_an_act_that_was_begun_is_there(seed: int):
    place = Place()
    audit = place.audit()
    record(audit, "a")
    begin(audit, "b")
    after = Place(place.disk.cut(random.Random(seed)))
    assert [(act.target, act.outcome) for act in after.audit().last(10)] == [("b", BEGUN), ("a", DONE)]


def test_an_act_that_cannot_be_written_down_is_refused():
    for call in ("open", "write", "sync"):
        for code, kind in ((errno.ENOSPC, DiskFull), (errno.EIO, Unavailable)):
            place = Place()
            audit = place.audit()
            place.disk.faults.fail(1, code, sticky=True, calls=frozenset({call}))
            with pytest.raises(kind, match=f"nothing was done: DELETE .* cannot be written to the audit log {PATH}"):
                begin(audit)
            assert place.disk.faults.fired
            place.disk.faults.clear()
            record(audit, "later")
            assert audit.last(1)[0].target == "later"


def test_an_outcome_that_cannot_be_written_down_is_logged(caplog: pytest.LogCaptureFixture):
    place = Place()
    audit = place.audit()
    act = begin(audit)
    place.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    audit.end(act, count=7)
    (logged,) = caplog.records
    assert (logged.levelname, logged.act, logged.count) == ("ERROR", act.id, 7)
    record(audit, "later")
    assert [act.target for act in audit.last(10)] == ["later", "orders"]


def test_a_line_that_was_cut_short_spoils_no_other():
    place = Place()
    record(place.audit(), "a")
    file = place.disk.open(PATH, write=True)
    file.write(file.size(), [b'{"time": "2027'])
    audit = place.audit()
    record(audit, "b")
    assert [act.target for act in audit.last(10)] == ["b", "a"]


def test_a_long_log_is_put_aside_and_the_oldest_dropped():
    place = Place()
    audit = place.audit(most_bytes=4096, files=2)
    for number in range(100):
        record(audit, f"t{number}")
    assert place.disk.names("/data") == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(len(place.disk.contents(f"/data/{name}")) <= 4096 for name in place.disk.names("/data"))
    found = [int(act.target[1:]) for act in audit.last(1000)]
    assert found == list(range(99, 99 - len(found), -1))
    assert len(found) > 10
    again = place.audit(most_bytes=4096, files=2)
    record(again, "t100")
    assert [act.target for act in again.last(2)] == ["t100", "t99"]


def test_an_act_larger_than_the_file_may_be_is_written_all_the_same():
    audit = Place().audit(most_bytes=10, files=1)
    record(audit, "a")
    record(audit, "b")
    assert [act.target for act in audit.last(1)] == ["b"]


def test_no_secret_and_no_body_is_written_down():
    audit = Place().audit()
    parameters = {
        "token": "hunter2",
        "nested": {"Authorization": "hunter2", "list": [{"password": "hunter2"}]},
        "body": b"hunter2",
        "text": "x" * 10_000,
        "number": 5,
        "none": None,
    }
    act = begin(audit, parameters=parameters)
    assert "hunter2" not in json.dumps(msgspec.to_builtins(act))
    assert act.parameters["body"] == "(7 bytes)"
    assert len(act.parameters["text"]) == 500
    assert (act.parameters["number"], act.parameters["none"]) == (5, None)
    assert begin(audit, parameters={str(number): "x" * 400 for number in range(1000)}).parameters.keys() == {
        "left_out_bytes"
    }


def test_a_served_folder_with_nothing_but_an_audit_log_can_be_opened_again(tmp_path: Path):
    world, folder = real_world(), str(tmp_path / "data")
    for _ in range(2):
        with holdfast.open_broker(folder):
            audit = open_audit(world, folder, ServerSettings())
            record(audit, "a")
            audit.close()
    assert len(audit.last(10)) == 2
    elsewhere = ServerSettings(audit_file=str(tmp_path / "audit"), audit_bytes=4096, audit_files=1)
    with holdfast.open_broker(folder):
        record(open_audit(world, folder, elsewhere), "b")
    assert (tmp_path / "audit").read_text().count('"b"') == 2


def test_a_log_that_can_never_be_written_stops_the_server_at_its_start():
    place = Place()
    place.audit().prepare()
    with pytest.raises(BadSettings, match=r"the audit log /nowhere/audit\.jsonl cannot be written"):
        Audit(place.world, "/nowhere/audit.jsonl").prepare()
