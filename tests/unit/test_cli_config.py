"""`holdfast config show`: every setting in force, and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.broker.folder.contents import Catalog
from holdfast.config import KNOBS
from holdfast.env import real_world
from holdfast.settings import TopicSettings
from tests.unit.commands import Done, Run, ended, everything


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)

    def call(*arguments: object) -> Done:
        return ended(capsys, ("config", "show", *arguments))

    return call


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "holdfast.toml"
    path.write_text('[broker]\ndata_dir = "data"\n[queue]\nlease = "1m"\n[topics.orders]\nmax_attempts = 3\n')
    return path


def make_topic(folder: Path, name: str, **changes: object) -> None:
    settings = TopicSettings(**changes)  # type: ignore[arg-type]
    Catalog(real_world(), str(folder)).create(name, settings, TopicSettings())


def rows(done: Done) -> dict[str, list[str]]:
    """Value and origin of each row of the table."""
    assert done.code == 0, done.err
    lines = [line.split(maxsplit=1) for line in done.out.splitlines() if "." in line.split(" ")[0]]
    return {name: [part.strip() for part in rest.split("   ") if part.strip()] for name, rest in lines}


def test_without_a_file_every_setting_has_its_default(run: Run):
    done = run()
    assert done.out.startswith("settings file: none (name one with --config, or with HOLDFAST_CONFIG)\n")
    found = rows(done)
    assert list(found) == list(KNOBS)
    assert {row[-1] for row in found.values()} == {"default"}
    assert found["storage.segment_bytes"] == ["67,108,864 (64MiB)", "default"]
    assert found["storage.retention_ms"] == ["604,800,000 (7d)", "default"]
    assert found["queue.priority_weights"][0] == "1, 2, 3, 4, 6, 8, 12, 16, 24, 32"
    assert found["queue.ttl_ms"] == ["none", "default"]
    assert found["broker.id"] == ['""', "default"]


def test_each_value_is_told_with_where_it_comes_from(
    run: Run, settings_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_topic(tmp_path / "data", "events", partitions=4, cleanup="compact")
    make_topic(tmp_path / "data", "orders", max_attempts=9, ttl_ms=90_000)
    monkeypatch.setenv("HOLDFAST_PRODUCER_LINGER", "1s500ms")
    before = everything(tmp_path)
    found = rows(run("--config", settings_file))
    assert found["queue.lease_ms"] == ["60,000 (1m)", f"{settings_file}, line 4"]
    assert found["producer.linger_ms"] == ["1,500 (1s500ms)", "HOLDFAST_PRODUCER_LINGER"]
    assert {name: row for name, row in found.items() if name.startswith("topics.")} == {
        "topics.events.partitions": ["4", "topics/events/topic.json"],
        "topics.events.cleanup": ["compact", "topics/events/settings.json"],
        "topics.orders.partitions": ["1", "topics/orders/topic.json"],
        "topics.orders.max_attempts": ["3", f"{settings_file}, line 6"],
        "topics.orders.ttl_ms": ["90,000 (1m30s)", "topics/orders/settings.json"],
    }
    assert everything(tmp_path) == before


def test_the_file_may_be_named_by_a_variable(run: Run, settings_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings_file))
    done = run("--json")
    document = done.document
    assert (document["file"], document["data_dir"]) == (str(settings_file), str(settings_file.parent / "data"))
    assert list(document["settings"]) == list(KNOBS)
    assert document["settings"]["queue.lease_ms"] == {
        "value": 60_000,
        "from": "file",
        "where": str(settings_file),
        "line": 4,
    }
    assert document["settings"]["queue.max_attempts"] == {"value": 5, "from": "default", "where": None, "line": None}
    assert document["topics"] == {
        "orders": {"max_attempts": {"value": 3, "from": "file", "where": str(settings_file), "line": 6}}
    }


def test_a_folder_may_be_named_whatever_the_file_says(run: Run, settings_file: Path, tmp_path: Path):
    make_topic(tmp_path / "data", "events")
    make_topic(tmp_path / "other", "clicks", partitions=3)
    assert list(run("--config", settings_file, "--json").document["topics"]) == ["events", "orders"]
    document = run(tmp_path / "other", "--config", settings_file, "--json").document
    assert list(document["topics"]) == ["clicks", "orders"]
    assert document["topics"]["clicks"]["partitions"]["value"] == 3


def test_the_partitions_that_there_are_go_before_the_file(run: Run, tmp_path: Path):
    make_topic(tmp_path / "data", "events", partitions=4)
    path = tmp_path / "holdfast.toml"
    path.write_text("[topics.events]\npartitions = 9\n[topics.new]\npartitions = 2\n")
    topics = run(tmp_path / "data", "--config", path, "--json").document["topics"]
    assert {name: topic["partitions"]["value"] for name, topic in topics.items()} == {"events": 4, "new": 2}


def test_every_mistake_has_its_line_and_nothing_is_shown(run: Run, tmp_path: Path):
    path = tmp_path / "holdfast.toml"
    path.write_text('[queue]\nleese = 1\nmax_attempts = "\\u001b[31m"\n')
    done = run("--config", path)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "error: 2 settings cannot be used:",
        f"- {path}, line 2: [queue] leese: there is no such setting; did you mean lease_ms?",
        (
            f"- {path}, line 3: [queue] max_attempts: '\\x1b[31m' cannot be used: "
            "give a whole number, 1 or more, or -1 for none"
        ),
    ]
    done = run("--config", path, "--json")
    assert (done.code, done.out, done.error["code"]) == (2, "", "bad_settings")
    assert done.error["message"].count("\n- ") == 2


def test_files_and_folders_that_are_not_there_are_told(run: Run, tmp_path: Path):
    done = run("--config", tmp_path / "none.toml")
    assert (done.code, done.err) == (
        2,
        f"error: there is no settings file {tmp_path}/none.toml; create it, or name another\n",
    )
    done = run(tmp_path / "none")
    assert done.code == 2
    assert done.err.startswith(f"error: there is no folder {tmp_path}/none;")


def test_what_a_topic_keeps_is_looked_at_too(run: Run, tmp_path: Path):
    make_topic(tmp_path, "orders", max_attempts=9)
    (tmp_path / "topics/orders/settings.json").write_text('{"max_attempts": 0}')
    done = run(tmp_path)
    assert done.code == 2
    assert "topics/orders/settings.json cannot be used: max_attempts=0" in done.err
