"""How commands wait beside whoever owns a folder: as the settings say, or as suits a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.cli.reading import FolderLogs as Reading
from holdfast.cli.reading import follow_settings
from holdfast.env import real_world
from holdfast.errors import BadSettings
from holdfast.storage import FollowSettings
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    return runner(capsys, monkeypatch)


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    folder = str(tmp_path / "jobs")
    with holdfast.open(folder) as queue:
        queue.put(b"first")
    return folder


def test_a_command_that_is_told_nothing_looks_as_often_as_people_like(run: Run):
    assert follow_settings(real_world()) == FollowSettings(poll_interval_ms=250, poll_jitter_ms=50)


def test_what_the_settings_say_of_following_is_followed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "holdfast.toml"
    file.write_text("[server]\npoll_interval = '3s'\nsafety_poll_ms = 0\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    monkeypatch.setenv("HOLDFAST_SERVER_WATCH", "false")
    followed = follow_settings(real_world())
    # The interval is the one of the struct, too, and still the one that was said.
    assert followed == FollowSettings(watch=False, poll_interval_ms=3_000, poll_jitter_ms=50, safety_poll_ms=0)


def test_who_waits_beside_an_owner_does_so_as_the_settings_say(run: Run, jobs: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_SERVER_WATCH", "false")
    monkeypatch.setenv("HOLDFAST_SERVER_POLL_INTERVAL_MS", "1")
    monkeypatch.setenv("HOLDFAST_SERVER_POLL_JITTER_MS", "0")
    reading = Reading(jobs, "jobs")
    reading.wait(reading.ends(), 0.5)
    assert not reading._arrivals.watching
    assert reading._arrivals.looks > 5


def test_a_mistake_in_the_settings_is_told_to_who_only_reads(run: Run, jobs: str, monkeypatch: pytest.MonkeyPatch):
    assert run("tail", jobs).code == 0
    monkeypatch.setenv("HOLDFAST_SERVER_POLL_INTERVAL_MS", "soon")
    with pytest.raises(BadSettings, match="HOLDFAST_SERVER_POLL_INTERVAL_MS"):
        Reading(jobs, "jobs")
    assert "HOLDFAST_SERVER_POLL_INTERVAL_MS" in run("tail", jobs).err
