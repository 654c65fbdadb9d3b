"""`holdfast schema`: what it does, prints and ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.commands import Done, Run, runner

OLD = json.dumps({"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]})
BAD = OLD.replace("long", "string")
WIDER = json.dumps({"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"},
    {"name": "note", "type": "string", "default": ""}]})  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def ended(done: Done, code: int) -> Done:
    assert done.code == code, done
    return done


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def test_a_schema_is_registered_listed_shown_and_deleted(run: Run, tmp_path: Path):
    data, old = tmp_path / "data", file(tmp_path, "r.avsc", OLD)
    assert run("schema", "register", data, "r-value", old).out == "r-value version 1 has the id 1\n"
    run("schema", "register", data, "r-value", file(tmp_path, "w.avsc", WIDER))
    (listed,) = run("schema", "ls", data, "--json").lines
    assert (listed["subject"], listed["id"], listed["versions"], listed["level"]) == ("r-value", 2, [1, 2], "BACKWARD")
    assert run("schema", "show", data, "r-value", "--number", "1").out.strip() == OLD
    assert run("schema", "compat", data, "--subject", "r-value", "--set", "full").out == "FULL\n"
    assert run("schema", "compat", data, "--subject", "r-value", "--set", "default").out == "BACKWARD\n"
    assert run("schema", "rm", data, "r-value", "--number", "2").out == "deleted r-value, version 2\n"
    assert run("schema", "rm", data, "r-value").out == "deleted r-value, version 1\n"
    assert ended(run("schema", "show", data, "r-value"), 3).out == ""
    assert run("schema", "rm", data, "r-value", "--permanent").out == "removed r-value, version 1, 2\n"
    assert ended(run("schema", "rm", data, "r-value"), 3).out == ""


def test_a_check_names_the_field_and_ends_with_one(run: Run, tmp_path: Path):
    data, bad, wider = tmp_path / "data", file(tmp_path, "bad.avsc", BAD), file(tmp_path, "wider.avsc", WIDER)
    run("schema", "register", data, "r-value", file(tmp_path, "r.avsc", OLD))
    against = ("--registry", data, "--subject", "r-value")
    assert "version 1: field id: long cannot be read as string" in ended(run("schema", "check", bad, *against), 1).out
    assert run("schema", "check", wider, *against).out == ""
    assert ended(run("schema", "check", bad, *against, "--json"), 1).document["compatible"] is False
    older = tmp_path / "older"
    file(older, "2.avsc", OLD)
    file(older, "10.avsc", BAD)
    assert (
        "10.avsc: field id: string cannot be read as long"
        in ended(run("schema", "check", wider, "--older", older), 1).out
    )
    assert run("schema", "check", bad, "--older", older).out == ""
    found = ended(run("schema", "check", bad, "--older", older, "--level", "backward_transitive"), 1).out
    assert "2.avsc: field id: long cannot be read as string" in found
    assert run("schema", "check", bad).err.strip().endswith("is valid")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "missing.avsc"), "cannot be read"),
        (("check", "r.txt"), "give --type"),
        (("check", "r.txt", "--type", "xml"), "give one of AVRO, JSON, PROTOBUF"),
        (("check", "none.avsc"), "is not JSON"),
        (("check", "r.avsc", "--older", "nowhere"), "is not a folder"),
        (("check", "r.avsc", "--older", "empty"), "has no AVRO schemas"),
        (("check", "r.avsc", "--level", "full"), "--level is for --older"),
        (("check", "r.avsc", "--reference", "a=b:1"), "--reference needs --registry"),
        (("register", "data", "s", "r.avsc", "--reference", "a"), "write NAME=SUBJECT:VERSION"),
        (("compat", "data", "--set", "sideways"), "give one of NONE"),
    ],
)
def test_wrong_arguments_say_what_to_give(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
):
    monkeypatch.chdir(tmp_path)
    for name, text in (("r.avsc", OLD), ("r.txt", OLD), ("none.avsc", "{")):
        file(tmp_path, name, text)
    (tmp_path / "empty").mkdir()
    run("schema", "register", "data", "s", "r.avsc")
    assert said in ended(run("schema", *arguments), 2).err
