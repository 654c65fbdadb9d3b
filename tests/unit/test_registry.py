"""The registry of schemas in a folder: for threads, for tasks, beside another process, and as it was stored before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import Conflict, IncompatibleSchema, InvalidRequest, InvalidSchema, SchemaNotFound
from holdfast.schemas import Reference
from holdfast.schemas.registry import RegistryRecord, RegistryState, incompatibilities

GOLDEN = Path(__file__).parent.parent / "golden" / "schemas-v1.jsonl"
A = {"name": "a", "type": "int"}
B = {"name": "b", "type": "string"}
B_FREE = {**B, "default": ""}


def record(*fields: Any) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": fields})


@pytest.fixture
def broker(tmp_path: Path) -> Any:
    with holdfast.open_broker(tmp_path / "data") as opened:
        yield opened


def test_schemas_stay_when_the_folder_is_opened_again(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data") as broker:
        broker.schemas.register("r-value", record(A))
        broker.schemas.register("r-value", record(A, B_FREE))
        broker.schemas.set_level("FULL", "r-value")
        broker.schemas.delete("r-value", 2)
    with holdfast.open_broker(tmp_path / "data") as broker:
        assert broker.schemas.subjects() == ["r-value"]
        assert broker.schemas.versions("r-value") == [1]
        assert broker.schemas.versions("r-value", deleted=True) == [1, 2]
        assert broker.schemas.level("r-value") == "FULL"
        assert broker.schemas.level() == "BACKWARD"
        broker.compact_topic("_schemas")
        assert broker.schemas.by_id(2).text == record(A, B_FREE)


def test_tasks_have_the_same_registry(tmp_path: Path):
    async def story() -> None:
        async with await holdfast.aio.open_broker(tmp_path / "data") as broker:
            made = await broker.schemas.register("r-value", record(A))
            assert await broker.schemas.find("r-value", record(A)) == made
            assert (await broker.schemas.schema(made.id)).text == record(A)
            with pytest.raises(IncompatibleSchema):
                await broker.schemas.register("r-value", record(A, B))

    asyncio.run(story())


@pytest.mark.parametrize(
    ("level", "allowed"),
    [
        ("NONE", {"added", "added free", "removed"}),
        ("BACKWARD", {"added free", "removed"}),
        ("FORWARD", {"added", "added free"}),
        ("FULL", {"added free"}),
    ],
)
def test_a_level_says_what_a_new_version_may_change(broker: Any, level: Any, allowed: set[str]):
    broker.schemas.register("r-value", record(A, {"name": "c", "type": "int"}))
    broker.schemas.set_level(level)
    c = {"name": "c", "type": "int"}
    changes = {"added": record(A, c, B), "added free": record(A, c, B_FREE), "removed": record(A)}
    for name, text in changes.items():
        assert (broker.schemas.problems("r-value", text) == []) == (name in allowed), name


def test_a_transitive_level_looks_at_all_versions(broker: Any):
    broker.schemas.register("r-value", record(A, B))
    broker.schemas.register("r-value", record(A))
    again = record(A, {"name": "b", "type": "int", "default": 0})
    assert broker.schemas.problems("r-value", again) == []
    broker.schemas.set_level("BACKWARD_TRANSITIVE", "r-value")
    assert broker.schemas.problems("r-value", again) == ["version 1: field b: string cannot be read as int"]
    with pytest.raises(IncompatibleSchema, match="version 1 of r-value") as caught:
        broker.schemas.register("r-value", again)
    assert caught.value.problems == ("field b: string cannot be read as int",)
    assert broker.schemas.versions("r-value") == [1, 2]


def test_an_id_is_for_one_schema_and_never_given_again(broker: Any):
    schemas = broker.schemas
    assert schemas.register("r-value", record(A)).id == 1
    assert schemas.register("copy-value", record(A)).id == 1
    assert schemas.register("r-value", record(A, B_FREE)).id == 2
    schemas.delete("r-value")
    assert schemas.by_id(2).deleted
    with pytest.raises(SchemaNotFound):
        schemas.get("r-value")
    schemas.delete("r-value", permanent=True)
    assert schemas.by_id(1).subject == "copy-value"
    with pytest.raises(SchemaNotFound):
        schemas.by_id(2)
    assert schemas.register("r-value", record(A, B_FREE)).id == 3


def test_what_others_refer_to_is_kept(broker: Any):
    schemas = broker.schemas
    schemas.register("part", record(A))
    whole = json.dumps({"type": "record", "name": "W", "fields": [{"name": "r", "type": "R"}]})
    with pytest.raises(InvalidSchema, match="there is no type R"):
        schemas.register("whole", whole)
    with pytest.raises(InvalidSchema, match="version 2 of part, which is not there"):
        schemas.register("whole", whole, references=[Reference("R", "part", 2)])
    made = schemas.register("whole", whole, references=[Reference("R", "part", 1)])
    assert schemas.schema(made.id).uses[0][1].text == record(A)
    with pytest.raises(Conflict, match="used by whole"):
        schemas.delete("part")
    schemas.delete("whole")
    schemas.delete("part")
    with pytest.raises(Conflict, match="used by whole"):
        schemas.delete("part", permanent=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda schemas: schemas.register("", record(A)),
        lambda schemas: schemas.register("a\nb", record(A)),
        lambda schemas: schemas.register("r", record(A).encode()),
        lambda schemas: schemas.register("r", record(A), kind="XML"),
        lambda schemas: schemas.register("r", record(A), references="R"),
        lambda schemas: schemas.register("r", record(A), references=["R"]),
        lambda schemas: schemas.get("r", 0),
        lambda schemas: schemas.get("r", "newest"),
        lambda schemas: schemas.by_id("1"),
        lambda schemas: schemas.set_level("UPWARD"),
        lambda schemas: schemas.delete("r", permanent="yes"),
    ],
)
def test_what_cannot_be_meant_is_refused(broker: Any, call: Any):
    with pytest.raises(InvalidRequest):
        call(broker.schemas)
    assert broker.topics() == []


def test_another_type_is_compatible_with_nothing():
    from holdfast.schemas import Schema, compile_schema

    one, other = compile_schema(Schema("JSON", "true")), compile_schema(Schema("AVRO", '"int"'))
    assert incompatibilities(one, other, "BACKWARD") == ["the schema is of the type JSON, and was AVRO"]
    assert incompatibilities(one, other, "NONE") == []


def test_records_as_they_were_stored_first_are_still_read():
    state = RegistryState()
    for line in GOLDEN.read_text("utf-8").splitlines():
        key, value = json.loads(line)
        state.apply(RegistryRecord(json.dumps(key).encode(), None if value is None else json.dumps(value).encode()))
    assert state.skipped == 1  # NOOP, which Confluent's registry writes
    assert state.names() == ["orders-value", "part"]
    assert [(each.version, each.id, each.kind) for each in state.versions("orders-value")] == [
        (1, 1, "AVRO"),
        (2, 3, "JSON"),
    ]
    assert state.versions("orders-value")[1].references == (Reference("part.json", "part", 1),)
    assert [each.subject for each in state.users_of("part", 1)] == ["orders-value"]
    assert (state.level("orders-value"), state.level("other")) == ("FULL", "NONE")
    made, _ = state.registering("new", "AVRO", '"int"', (), "digest")
    assert made.id == 8
