"""`holdfast pause` and `holdfast resume`, and where else the command line shows a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put_many([b"one", b"two"])
    return tmp_path / "jobs"


def test_pause_and_resume_say_what_was_done_and_what_was_so_already(run, jobs):
    first = run("pause", jobs, "--reason", "the printer burns")
    assert first.code == 0
    assert "jobs, group default, is paused since " in first.err + first.out
    assert "the printer burns; 0 in flight" in first.err + first.out
    again = run("pause", jobs)
    assert again.code == 0
    assert "was already paused since" in again.err + again.out
    nothing = run("get", jobs, "--json")
    assert nothing.code != 0
    assert nothing.out == ""
    assert "jobs is paused since " in nothing.err
    assert "the printer burns; `holdfast resume` ends it" in nothing.err
    resumed = run("resume", jobs)
    assert "jobs, group default, is resumed; 2 ready" in resumed.err + resumed.out
    again = run("resume", jobs)
    assert (again.code, "was not paused" in again.err + again.out) == (0, True)
    assert run("get", jobs).code == 0


def test_as_json(run, jobs):
    found = run("pause", jobs, "--reason", "x", "--json").document
    assert (found["queue"], found["group"], found["changed"]) == ("jobs", "default", True)
    assert found["paused"]["reason"] == "x"
    assert run("pause", jobs, "--json").document == {**found, "changed": False}
    assert run("resume", jobs, "--json").document == {**found, "paused": None}


def test_a_group_and_what_is_not_there(run, jobs):
    with holdfast.open_broker(jobs) as broker:
        broker.group("jobs", "mail")
        with broker.consumer("jobs", group="counting") as consumer:
            consumer.poll(timeout=0)
            consumer.commit()
    assert run("pause", jobs, "--group", "mail").code == 0
    assert run("get", jobs, "--json").code == 0
    assert run("get", jobs, "--group", "mail").code != 0
    unknown = run("pause", jobs, "--group", "nobody", "--json")
    assert (unknown.code, unknown.error["code"]) == (2, "unknown_group")
    assert "mail" in unknown.error["message"]
    assert run("pause", jobs, "--topic", "nothing", "--json").error["code"] == "unknown_topic"
    stream = run("pause", jobs, "--group", "counting", "--json")
    assert stream.code == 2
    assert "stream mode" in stream.error["message"]


def test_stats_top_and_the_lists_show_it(run, jobs):
    assert "paused" not in run("stats", jobs).out
    run("pause", jobs, "--reason", "tonight")
    assert "tonight; `holdfast resume` ends it" in " ".join(run("stats", jobs).out.split())
    assert run("stats", jobs, "--json").document["paused"]["reason"] == "tonight"
    assert "default (paused)" in run("top", jobs, "--once").out
    assert run("top", jobs, "--once", "--json").document["topics"][0]["groups"][0]["paused"] is True
    assert "default 2 (paused)" in run("topic", "ls", jobs).out
    assert "queue, paused" in run("group", "ls", jobs).out
    assert "paused since" in run("group", "show", jobs, "default").out
    assert run("group", "ls", jobs, "--json").lines[0]["paused"]["reason"] == "tonight"
