"""The commands and running queries: shown as groups, deleted beside a living owner, noted by check and doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.folder.contents import Catalog
from holdfast.broker.streams.queries import NOT_READ, QueryLease
from holdfast.env import real_world
from holdfast.spark.commits import CommitManifest, Staging
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A topic of two partitions with ten messages, and one without."""
    with holdfast.open_broker(tmp_path / "data", durability="os") as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("mails")
        for n in range(10):
            broker.publish("orders", b"%d" % n, partition=n % 2)
        broker.group("mails", "billing")
    return tmp_path / "data"


@pytest.fixture
def lease(data: Path) -> Iterator[QueryLease]:
    """A query that has read most of the orders."""
    lease = QueryLease.start(real_world(), str(data), "report", ttl_ms=300_000)
    lease.hold({"orders": (Catalog(real_world(), str(data)).facts("orders").id, {0: 4, 1: 5})})
    yield lease
    lease.end()


def stale(lease: QueryLease) -> Path:
    """Let the file be as old as one of a machine that was started anew long ago."""
    path = Path(lease.folder) / lease.file
    written = json.loads(path.read_bytes())
    path.write_text(json.dumps({**written, "boot_id": 7, "renewed_at_ms": written["renewed_at_ms"] - 660_000}))
    return path


def test_partitions_that_a_query_leaves_alone_are_not_shown_as_its_lag(run, data, lease):
    lease.hold({"orders": (Catalog(real_world(), str(data)).facts("orders").id, {0: 4, 1: NOT_READ})})
    (group,) = run("group", "show", data, "report", "--json").document["topics"]
    assert [partition["partition"] for partition in group["partitions"]] == [0]
    assert group["lag"] == 1


def test_a_query_is_listed_with_its_lag_and_when_it_was_renewed(run, data, lease):
    head, *rows = run("group", "ls", data).out.splitlines()
    assert head.split() == ["group", "topic", "mode", "behind", "oldest", "in", "flight", "renewed", "timeout"]
    assert [row.split()[:4] for row in rows] == [["billing", "mails", "queue", "0"], ["report", "orders", "query", "1"]]
    assert rows[1].split()[-3:] == ["ago", "5.0", "min"]
    groups = run("group", "ls", data, "--json").lines
    assert [group["query"] is None for group in groups] == [True, False]
    query = groups[1]["query"]
    assert (query["kind"], query["timeout_seconds"], query["stale"]) == ("spark", 300.0, False)
    assert 0 <= query["renewed_seconds"] < 300


def test_a_folder_without_queries_is_listed_as_before(run, data):
    assert "renewed" not in run("group", "ls", data).out


def test_a_query_is_shown_by_partition(run, data, lease):
    sentence, head, *rows = run("group", "show", data, "report").out.splitlines()
    assert sentence.startswith("report on orders, query mode: 1 message behind, the oldest from ")
    assert f" ago by {lease._note().host}:{lease._note().pid}, timeout 5.0 min" in sentence
    assert head.split() == ["partition", "needed", "from", "end", "behind", "oldest"]
    assert [row.split()[:4] for row in rows] == [["0", "4", "5", "1"], ["1", "5", "5", "0"]]
    document = run("group", "show", data, "report", "--json").document
    assert document["topics"][0]["lag"] == 1


def test_a_stale_query_says_so_in_the_list_and_in_doctor(run, data, lease):
    stale(lease)
    assert "11.0 min ago (stale)" in run("group", "ls", data).out
    warnings = run("doctor", data, "--seconds", 0.1, "--json").document["warnings"]
    (warning_text,) = [warning["message"] for warning in warnings if warning["code"] == "stale_query"]
    assert warning_text.startswith("the query report was last renewed 66")
    assert run("check", data).code == 0


def test_an_unreadable_file_is_told_of_by_group_ls_check_and_doctor(run, data):
    (data / "queries").mkdir()
    (data / "queries" / "report@0000000a.json").write_bytes(b"{")
    listed = run("group", "ls", data)
    assert listed.code == 0
    assert listed.err.startswith("unreadable: ")
    assert "queries/report@0000000a.json" in listed.err
    assert "queries/report@0000000a.json" in run("group", "ls", data, "--json").err
    checked = run("check", data, "--json")
    assert checked.code == 0
    assert [note for note in checked.document["notes"] if "report@0000000a.json" in note]
    warnings = run("doctor", data, "--seconds", 0.1, "--json").document["warnings"]
    assert "unreadable_query" in [warning["code"] for warning in warnings]


def test_folders_of_queries_and_staging_are_ours(run, data, lease):
    (data / "staging" / "write" / "3").mkdir(parents=True)
    checked = run("check", data, "--json").document
    assert (checked["ok"], checked["notes"], checked["missing"]) == (True, [], [])
    holdfast.open_broker(data, create=False).close()
    assert run("repair", data, "--yes").code == 0
    assert (Path(lease.folder) / lease.file).exists()


def test_doctor_tells_of_a_write_that_was_stopped_on_its_way(run, data):
    staging = Staging(real_world(), str(data))
    Path(staging.batch_folder("copy", 3)).mkdir(parents=True)
    staging.note_manifest(CommitManifest(write_id="copy", batch=3, kept=True, lanes=(), files=()))
    warnings = run("doctor", data, "--seconds", 0.1, "--json").document["warnings"]
    (warning_text,) = [warning["message"] for warning in warnings if warning["code"] == "unfinished_write"]
    assert warning_text.startswith("batch 3 of the write copy is committed")
    Path(staging.batch_folder("copy", 3), "manifest.json").write_bytes(b"{")
    warnings = run("doctor", data, "--seconds", 0.1, "--json").document["warnings"]
    assert "unfinished_write" in [warning["code"] for warning in warnings]


def test_deleting_a_query_removes_its_file_beside_a_living_owner_and_it_may_come_back(run, data, lease):
    with holdfast.open_broker(data):
        shown = run("group", "delete", data, "report", "--dry-run")
        assert shown.out.endswith("It would be deleted\n")
        assert len(list((data / "queries").iterdir())) == 1
        done = run("group", "delete", data, "report", "--yes")
        assert (done.code, done.out.splitlines()[-1]) == (0, "deleted report")
        assert list((data / "queries").iterdir()) == []
        assert run("group", "delete", data, "report", "--yes").code == 2
    lease.renew()
    assert len(list((data / "queries").iterdir())) == 1


def test_of_a_group_and_a_query_of_one_name_the_group_is_deleted(run, data, lease):
    with holdfast.open_broker(data) as broker:
        broker.group("orders", "report")
    assert run("group", "delete", data, "report", "--yes").code == 0
    assert [group["mode"] for group in run("group", "show", data, "report", "--json").document["topics"]] == ["query"]


def test_a_query_cannot_be_reset(run, data, lease):
    done = run("group", "reset", data, "report", "--to", "earliest", "--yes")
    assert done.code == 2
    assert "stores its own positions" in done.err
