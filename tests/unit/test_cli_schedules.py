"""`holdfast schedule`: what it does, prints and ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    run("topic", "create", tmp_path / "data", "jobs")
    return tmp_path / "data"


def test_a_schedule_is_added_listed_shown_run_and_deleted(run: Run, folder: Path):
    zone = ("--cron", "0 3 * * *", "--timezone", "Europe/Berlin")
    done = run(
        "schedule", "add", folder, "report", "daily", *zone, "--header", "a=b", "--priority", "3", "--jitter", "5m"
    )
    assert done.out.startswith("report is due next at ")
    assert "while a server or a program has the folder open" in done.err
    assert "0 3 * * * Europe/Berlin" in run("schedule", "ls", folder).out
    run("schedule", "add", folder, "poll", "go", "--every", "1h", "--key", "k")
    names = [each["name"] for each in run("schedule", "ls", folder, "--json").lines]
    assert names == ["poll", "report"]
    shown = run("schedule", "show", folder, "report", "--json").document
    assert (shown["body"], shown["headers"], shown["priority"], shown["jitter_seconds"]) == (
        "daily",
        {"a": "b"},
        3,
        300,
    )
    assert (shown["cron"], shown["timezone"], shown["every_seconds"], shown["at"]) == (zone[1], zone[3], None, None)
    assert run("schedule", "run", folder, "report").out == "jobs-0-0\n"
    assert "by hand" in run("schedule", "show", folder, "report").out
    with holdfast.open_broker(folder) as broker:
        assert [message.body for message in broker.read("jobs")] == [b"daily"]
    assert run("schedule", "rm", folder, "report").out == "report is deleted\n"
    gone = run("schedule", "rm", folder, "report", "--json")
    assert (gone.code, gone.document) == (3, {"name": "report", "deleted": False})
    assert run("schedule", "show", folder, "report").code == 3


def test_the_next_times_are_in_the_zone_of_the_schedule(run: Run, folder: Path):
    run("schedule", "add", folder, "report", "x", "--cron", "0 12 1 7 *", "--timezone", "America/New_York")
    lines = run("schedule", "next", folder, "report", "--count", "2").out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("-07-01 12:00:00-04:00") for line in lines)
    (due, *_) = run("schedule", "next", folder, "report", "--json").lines
    assert due["due"].endswith("-07-01T16:00:00.000000Z")


def test_a_schedule_is_paused_and_resumed(run: Run, folder: Path):
    run("schedule", "add", folder, "poll", "x", "--every", "1h")
    assert run("schedule", "pause", folder, "poll").out == "poll is paused\n"
    assert run("schedule", "ls", folder, "--json").lines[0]["next_due"] is None
    assert run("schedule", "resume", folder, "poll", "--json").document["paused"] is False


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--cron", "61 * * * *"], "bad minute"),
        (["--cron", "0 3 * * *", "--timezone", "Mars/Olympus"], "IANA"),
        (["--cron", "0 3 * * *", "--every", "5s"], "choose one"),
        ([], "choose one"),
        (["--due", "2020-01-01"], "has passed"),
        (["--every", "soon"], "--every"),
        (["--every", "10ms"], "every"),
        (["--every", "5s", "--topic", "nowhere"], "no topic nowhere"),
        (["--every", "5s", "--header", "x"], "name=value"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, folder: Path, options: list[str], why: str):
    done = run("schedule", "add", folder, "job", "x", *options)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert len(done.err.splitlines()) == 1
    assert run("schedule", "ls", folder).err.startswith("no schedules")


def test_a_name_that_is_not_there_is_told(run: Run, folder: Path):
    for verb in ("pause", "resume", "run", "next"):
        done = run("schedule", verb, folder, "job", "--json")
        assert (done.code, done.error["code"]) == (2, "not_found")


def test_documents_and_schedules_are_apart(run: Run, folder: Path):
    run("schedule", "add", folder, "job", "x", "--every", "1h")
    run("state", "put", folder, "cursor", "1")
    assert [each["name"] for each in run("state", "ls", folder, "--json").lines] == ["cursor"]
    assert run("state", "get", folder, "schedule:job").code == 2
    assert run("check", folder).code == 0
