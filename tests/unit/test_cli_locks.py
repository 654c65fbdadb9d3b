"""`holdfast lock` and `holdfast state`: what they do, print and end with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import holdfast
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("HOLDFAST_LEASE_ID", raising=False)
    return runner(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_a_lock_is_taken_shown_kept_alive_and_released(run: Run, folder: Path):
    lock = run("lock", "acquire", folder, "report", "--owner", "ann", "--lease", "1m", "--json").document
    assert (lock["owner"], lock["lease_seconds"]) == ("ann", 60)
    assert lock["expires_ms"] - lock["acquired_ms"] == 60_000
    shown = run("lock", "show", folder, "report", "--json").document
    assert (shown["held"], shown["fence"], "lease_id" in shown) == (True, lock["fence"], False)
    assert "held by ann" in run("lock", "show", folder, "report").out
    assert "report" in run("lock", "ls", folder).out
    assert (
        run("lock", "keepalive", folder, lock["lease_id"], "--lease", "2m", "--json").document["lease_seconds"] == 120
    )
    assert run("lock", "release", folder, lock["lease_id"]).out == f"released {lock['lease_id']}\n"
    assert run("lock", "show", folder, "report").out == "report is free\n"
    assert run("lock", "ls", folder, "--json").lines == []
    assert run("lock", "ls", folder).err.startswith("no locks are held")


def test_a_lock_that_somebody_has_ends_with_3_and_says_who(run: Run, folder: Path):
    run("lock", "acquire", folder, "report", "--owner", "ann")
    for options in ([], ["--timeout", "150ms"]):
        done = run("lock", "acquire", folder, "report", *options)
        assert (done.code, done.out) == (3, "")
        assert "held by ann" in done.err
    done = run("lock", "acquire", folder, "report", "--if-not-exists", "--json")
    assert (done.code, done.error["code"]) == (2, "conflict")


def test_waiting_for_a_lock_ends_when_its_lease_does(run: Run, folder: Path):
    run("lock", "acquire", folder, "report", "--lease", "300ms")
    assert run("lock", "acquire", folder, "report", "--timeout", "30s", "--owner", "bob").code == 0
    assert "bob" in run("lock", "show", folder, "report").out


def test_a_lease_is_found_in_the_environment(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    done = run("lock", "release", folder, "--json")
    assert (done.code, done.error["code"]) == (2, "invalid_request")
    lines = run("lock", "acquire", folder, "report", "--export").out.splitlines()
    values = dict(shlex.split(line)[1].split("=", 1) for line in lines)
    assert values["HOLDFAST_LOCK"] == "report"
    monkeypatch.setenv("HOLDFAST_LEASE_ID", values["HOLDFAST_LEASE_ID"])
    assert run("lock", "keepalive", folder).code == 0
    assert run("lock", "release", folder, "--json").document == {"released": values["HOLDFAST_LEASE_ID"]}
    done = run("lock", "release", folder, "--json")
    assert (done.code, done.error["code"]) == (2, "lease_lost")


def test_nothing_is_exported_where_nothing_was_taken(run: Run, folder: Path):
    run("lock", "acquire", folder, "report")
    done = run("lock", "acquire", folder, "report", "--export")
    assert done.out == "unset HOLDFAST_LOCK HOLDFAST_LEASE_ID HOLDFAST_FENCE\n(exit 3)\n"
    done = run("lock", "acquire", folder, "no/name", "--export")
    assert (done.code, done.out.splitlines()[-1]) == (2, "(exit 2)")


def test_a_document_is_put_got_and_removed(run: Run, folder: Path):
    assert run("state", "put", folder, "plan", '{"a": 1}', "--json").document["version"] == 1
    assert json.loads(run("state", "get", folder, "plan").out) == {"a": 1}
    assert run("state", "put", folder, "plan", "--version", 1, stdin=b'"from stdin"').code == 0
    found = run("state", "get", folder, "plan", "--json").document
    assert (found["value"], found["version"]) == ("from stdin", 2)
    done = run("state", "put", folder, "plan", "3", "--version", 1, "--json")
    assert (done.code, done.error["code"]) == (2, "conflict")
    assert "plan" in run("state", "ls", folder).out
    assert [each["name"] for each in run("state", "ls", folder, "--json").lines] == ["plan"]
    assert run("state", "rm", folder, "plan", "--version", 2).code == 0
    assert run("state", "rm", folder, "plan").code == 3
    assert run("state", "get", folder, "plan").code == 3
    assert run("state", "ls", folder).err.startswith("no documents")


def test_a_document_can_demand_a_lease(run: Run, folder: Path):
    lease_id = run("lock", "acquire", folder, "report", "--json").document["lease_id"]
    assert run("state", "put", folder, "plan", "1", "--lease-id", lease_id).code == 0
    run("lock", "release", folder, lease_id)
    done = run("state", "rm", folder, "plan", "--lease-id", lease_id, "--json")
    assert (done.code, done.error["code"]) == (2, "lease_lost")


def test_what_is_no_json_is_refused_and_nothing_is_made(run: Run, folder: Path):
    done = run("state", "put", folder, "plan", "no json")
    assert done.code == 2
    assert "needs its quotes" in done.err
    assert not folder.exists()


def test_whoever_looks_needs_no_lock_of_the_folder(run: Run, folder: Path):
    with holdfast.open_broker(folder) as broker:
        lock = broker.locks.acquire("report", owner="ann")
        broker.documents.update("plan", [1])
        assert run("lock", "show", folder, "report", "--json").document["fence"] == lock.fence
        assert run("lock", "ls", folder).code == 0
        assert json.loads(run("state", "get", folder, "plan").out) == [1]
        assert run("state", "ls", folder).code == 0


def test_check_looks_at_the_locks_too(run: Run, folder: Path):
    run("lock", "acquire", folder, "report")
    run("state", "put", folder, "plan", "1")
    (report,) = run("check", folder, "--json").document["logs"]
    assert (report["kind"], report["name"], report["ok"]) == ("locks", "locks", True)
    assert report["state"] == {"held": 1, "documents": 1, "schedules": 0, "transactions": 0, "wrong": []}
    (segment,) = (folder / "locks").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"report")] ^= 0xFF
    segment.write_bytes(content)
    done = run("check", folder)
    assert done.code == 1
    assert "some locks may no longer be held" in done.out


@pytest.mark.parametrize("group", ["lock", "state"])
def test_without_a_command_the_help_is_shown(run: Run, group: str):
    done = run(group)
    assert done.code == 2
    assert "acquire" in done.out or "put" in done.out
