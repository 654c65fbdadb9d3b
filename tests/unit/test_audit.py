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
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.world import SeededIds
from holdfast.errors import BadSettings, DiskFull, Unavailable
from holdfast.server.audit import BEGUN, DONE, LINES, Act, Audit, open_audit, refused_path
from holdfast.settings import ServerSettings

PATH = "/data/audit.jsonl"
REFUSED = "/data/audit-refused.jsonl"


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


def refuse(audit: Audit, principal: str = "shop", **facts: Any) -> bool:
    words = {"principal": principal, "peer": "10.0.0.9", "action": "admin", "route": "POST /x", "target": "orders"}
    if not audit.refusals.admit(principal):
        return False
    audit.refusals.write(outcome="forbidden", **(words | facts))
    return True


def test_what_was_refused_is_one_line_in_a_file_of_its_own_and_not_synced():
    place = Place()
    audit = place.audit()
    record(audit, "a")
    place.disk.faults.fail(1, errno.EIO, sticky=True, calls=frozenset({"sync"}))
    assert refuse(audit)
    (line,) = place.lines(REFUSED)
    assert (line["principal"], line["outcome"], line["target"]) == ("shop", "forbidden", "orders")
    assert [act.principal for act in audit.refusals.last(10)] == ["shop"]
    assert [act.target for act in audit.last(10)] == ["a"]


def test_refusals_never_put_acts_aside():
    place = Place()
    audit = place.audit(most_bytes=4096, files=2)
    for number in range(3):
        record(audit, f"t{number}")
    for number in range(500):
        refuse(audit, f"caller-{number}")
    assert [act.target for act in audit.last(10)] == ["t2", "t1", "t0"]
    names = place.disk.names("/data")
    assert names == ["audit-refused.jsonl", "audit-refused.jsonl.1", "audit.jsonl"]
    assert all(len(place.disk.contents(f"/data/{name}")) <= 4096 for name in names)


def test_of_each_caller_some_refusals_a_minute_are_written_and_the_rest_is_counted():
    place = Place()
    audit = place.audit()
    assert [refuse(audit) for _ in range(LINES + 1_234)].count(True) == LINES
    assert refuse(audit, "somebody else")
    assert len(place.lines(REFUSED)) == LINES + 1
    assert audit.refusals.tell_rest() is True  # the minute is not over
    place.clock.advance(seconds=60)
    assert audit.refusals.tell_rest() is False
    rest = audit.refusals.last(1)[0]
    assert (rest.principal, rest.count, rest.route) == ("shop", 1_234, "and 1,234 more refused calls")
    assert refuse(audit)  # a new minute
    assert [refuse(audit) for _ in range(LINES)].count(False) == 1
    audit.close()
    assert [(act.principal, act.count) for act in place.audit().refusals.last(1)] == [("shop", 1)]


def test_the_rest_is_told_though_the_calls_go_on():
    place = Place()
    audit = place.audit()
    for _ in range(3):
        for _ in range(LINES + 5):
            refuse(audit)
        place.clock.advance(seconds=60)
    assert [act.count for act in audit.refusals.last(1_000) if act.count] == [5, 5, 5]


@pytest.mark.parametrize("text", ["x" * 100_000, "\x01" * 100_000, "\U0001f600" * 100_000, '"\\' * 100_000])
def test_a_refusal_is_short_whatever_the_caller_put_into_it(text: str):
    place = Place()
    audit = place.audit()
    facts = dict.fromkeys(("principal", "peer", "target", "correlation_id"), text)
    refuse(audit, **facts, parameters={f"{number}{text}": text for number in range(100)})
    (line,) = place.disk.contents(REFUSED).splitlines()
    assert len(line) < 2_048
    assert audit.refusals.last(1)[0].outcome == "forbidden"


def test_callers_without_number_take_a_bounded_room():
    place = Place()
    refusals = place.audit().refusals
    for number in range(20_000):
        refusals.admit(f"caller-{number}")
    assert len(refusals._windows) <= 10_001


def test_a_refusal_that_cannot_be_written_down_is_logged(caplog: pytest.LogCaptureFixture):
    place = Place()
    audit = place.audit()
    place.disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=frozenset({"write"}))
    refuse(audit)
    (logged,) = caplog.records
    assert "a refusal cannot be written" in logged.message


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/data/audit.jsonl", "/data/audit-refused.jsonl"),
        ("/var/log.d/acts", "/var/log.d/acts-refused"),
        ("acts.log", "acts-refused.log"),
        ("/x/.acts", "/x/.acts-refused"),
    ],
)
def test_refusals_stand_beside_the_acts(path: str, refused: str):
    assert refused_path(path) == refused


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
            with pytest.raises(kind, match=f"nothing was done: DELETE .* cannot be recorded in the audit log {PATH}"):
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
