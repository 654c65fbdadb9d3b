"""`holdfast workers`: lists those that report themselves, and tells them to drain, stop or resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Worker
from holdfast.worker import worker as worker_module
from tests.unit.commands import Run, runner
from tests.unit.workers import PATIENCE_S, eventually


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(worker_module, "REPORT_S", 0.02)
    return runner(capsys, monkeypatch)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process owns: the command asks it by its socket."""
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put(b"one")
        yield tmp_path / "jobs"


def worker_on(jobs: Path, **options: Any) -> Worker:
    return Worker(lambda message: None, queue=str(jobs), poll=0.05, name="mailer", **options)


def test_workers_are_listed_drained_resumed_and_stopped(run, jobs):
    assert (run("workers", jobs).code, run("workers", jobs, "--json").lines) == (0, [])
    with worker_on(jobs, concurrency=4) as worker:
        eventually(lambda: [w["handled"] for w in run("workers", jobs, "--json").lines] == [1])
        shown = run("workers", jobs).out
        assert "mailer" in shown
        assert "running" in shown
        assert "0/4" in shown
        told = run("workers", jobs, "drain", "mailer", "--json").document
        assert (told["order"], len(told["workers"]["mailer"])) == ("drain", 1)
        eventually(lambda: worker.health().status == "drained")
        done = run("workers", jobs, "resume", "mailer")
        assert "mailer will resume when it next reports (1 worker)" in done.err + done.out
        eventually(lambda: worker.health().status == "running")
        assert run("workers", jobs, "stop", told["workers"]["mailer"][0]).code == 0
        assert worker.wait(PATIENCE_S) == 0
    assert run("workers", jobs, "--json").lines[0]["state"] == "stopped"


def test_what_cannot_be_told_is_refused(run, jobs):
    nobody = run("workers", jobs, "drain", "nobody", "--json")
    assert (nobody.code, nobody.error["code"]) == (2, "not_found")
    for words in (("dance", "mailer"), ("drain",)):
        refused = run("workers", jobs, *words, "--json")
        assert (refused.code, refused.error["code"]) == (2, "invalid_request")


def test_at_names_the_place_instead_of_the_first_argument(run, jobs):
    assert run("workers", "--at", jobs, "--json").lines == []
    assert run("workers", "--at", jobs, "drain", "nobody", "--json").error["code"] == "not_found"
