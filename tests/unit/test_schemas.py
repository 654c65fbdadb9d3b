"""Schemas of the three types: what they accept, how they may change, and what could take forever."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import time
from typing import Any

import fastavro
import pytest
from google.protobuf import descriptor_pb2

from holdfast.errors import InvalidSchema, SchemaMismatch
from holdfast.schemas import Schema, SchemaDecoder, compile_schema, split_header, with_header
from holdfast.schemas.registry import incompatibilities
from holdfast.schemas.source import CompiledSchema, Kind
from holdfast.schemas.wire import split_indexes, with_indexes


def made(kind: Kind, schema: Any) -> CompiledSchema:
    return compile_schema(Schema(kind, schema if isinstance(schema, str) else json.dumps(schema)))


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def proto(text: str) -> str:
    return f'syntax = "proto3"; {text}'


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def opened(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A, B = field("a", "int"), field("b", "string")
ENUM = {"type": "enum", "name": "E", "symbols": ["X", "Y"]}
INT, TEXT = {"type": "integer"}, {"type": "string"}

# A schema, an earlier one, and a part of what is said against reading the earlier one's values; "" if nothing is.
RULES: list[tuple[Kind, Any, Any, str]] = [
    ("AVRO", record(A), record(A, B), ""),
    ("AVRO", record(A, B), record(A), "field b has no default"),
    ("AVRO", record(A, field("b", "string", default="")), record(A), ""),
    ("AVRO", record(field("c", "int", aliases=["a"])), record(A), ""),
    ("AVRO", record(field("a", "long")), record(A), ""),
    ("AVRO", record(A), record(field("a", "long")), "field a: long cannot be read as int"),
    ("AVRO", record(field("a", "bytes")), record(field("a", "string")), ""),
    ("AVRO", record(field("a", ["null", "int"])), record(A), ""),
    ("AVRO", record(A), record(field("a", ["null", "int"])), "field a: the branch null of the union cannot be read"),
    ("AVRO", record(field("a", ["null", "long"])), record(field("a", ["int", "null"])), ""),
    ("AVRO", record(A, name="S"), record(A), "the record is called S, and was called R"),
    ("AVRO", record(A, name="S", aliases=["R"]), record(A), ""),
    ("AVRO", record(A, namespace="n"), record(A), ""),
    ("AVRO", {**ENUM, "symbols": ["X"]}, ENUM, "the enum E has no default and lacks Y"),
    ("AVRO", {**ENUM, "symbols": ["X"], "default": "X"}, ENUM, ""),
    ("AVRO", {**ENUM, "symbols": ["X", "Y", "Z"]}, ENUM, ""),
    ("AVRO", {"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8}, "has 4 bytes"),
    ("AVRO", {"type": "array", "items": "long"}, {"type": "array", "items": "int"}, ""),
    ("AVRO", {"type": "map", "values": "int"}, {"type": "map", "values": "string"}, "string cannot be read as int"),
    ("AVRO", record(field("n", ["null", "R"])), record(field("n", ["null", "R"])), ""),
    ("AVRO", record(field("n", ["null", "R"]), B), record(field("n", ["null", "R"])), "field b has no default"),
    ("JSON", closed(a=INT, b=TEXT), closed(a=INT), ""),
    ("JSON", {**closed(a=INT, b=TEXT), "required": ["b"]}, closed(a=INT), "field b was added as required"),
    ("JSON", {**closed(a=INT, b={**TEXT, "default": ""}), "required": ["b"]}, closed(a=INT), ""),
    ("JSON", closed(a=INT), closed(a=INT, b=TEXT), "field b was removed"),
    ("JSON", opened(a=INT), opened(a=INT, b=TEXT), ""),
    ("JSON", opened(a=INT, b=TEXT), opened(a=INT), "field b was added where any property was allowed"),
    ("JSON", opened(a=INT, b={}), opened(a=INT), ""),
    ("JSON", {**closed(), "additionalProperties": TEXT}, closed(b=TEXT), ""),
    ("JSON", {**closed(), "additionalProperties": TEXT}, closed(b=INT), "field b: the type integer"),
    ("JSON", {**closed(b=TEXT), "additionalProperties": TEXT}, {**closed(), "additionalProperties": TEXT}, ""),
    ("JSON", closed(a=INT), opened(a=INT), "other properties are not allowed any more"),
    ("JSON", opened(a=INT), closed(a=INT), ""),
    ("JSON", {**opened(a=INT), "required": ["a"]}, opened(a=INT), "field a is required now"),
    ("JSON", opened(a=INT), {**opened(a=INT), "required": ["a"]}, ""),
    ("JSON", {"type": "number"}, INT, ""),
    ("JSON", INT, {"type": "number"}, "the type number is not allowed any more"),
    ("JSON", {"type": ["string", "null"]}, TEXT, ""),
    ("JSON", TEXT, {"type": ["string", "null"]}, "the type null is not allowed any more"),
    ("JSON", {"enum": ["a", "b"]}, {"enum": ["a"]}, ""),
    ("JSON", {"enum": ["a"]}, {"enum": ["a", "b"]}, "'b' is not among its values any more"),
    ("JSON", {**TEXT, "maxLength": 5}, {**TEXT, "maxLength": 9}, "maxLength is 5 now, and was 9"),
    ("JSON", {**TEXT, "maxLength": 9}, {**TEXT, "maxLength": 5}, ""),
    ("JSON", {**INT, "minimum": 1}, INT, "minimum is 1 now, and had no limit"),
    ("JSON", {**INT, "multipleOf": 2}, {**INT, "multipleOf": 4}, ""),
    ("JSON", {**INT, "multipleOf": 4}, {**INT, "multipleOf": 2}, "multipleOf is 4 now"),
    ("JSON", {**TEXT, "pattern": "^a"}, TEXT, "pattern is '^a' now"),
    ("JSON", {"oneOf": [INT, TEXT]}, {"oneOf": [INT]}, ""),
    ("JSON", {"oneOf": [INT]}, {"oneOf": [INT, TEXT]}, "no branch of the oneOf accepts what was accepted"),
    ("JSON", {"anyOf": [INT, TEXT]}, INT, ""),
    ("JSON", {"anyOf": [INT, TEXT]}, {"type": "boolean"}, "no branch of the anyOf"),
    ("JSON", {"allOf": [INT]}, {"allOf": [INT, {"minimum": 1}]}, ""),
    ("JSON", {"allOf": [INT, {"minimum": 1}]}, {"allOf": [INT]}, "minimum is 1 now"),
    ("JSON", {"type": "array", "items": {"type": "number"}}, {"type": "array", "items": INT}, ""),
    ("JSON", {"type": "array", "items": INT}, {"type": "array"}, "other items are limited now"),
    ("JSON", {"prefixItems": [INT], "items": False}, {"prefixItems": [INT, TEXT], "items": False}, "item [1] was"),
    ("JSON", True, INT, ""),
    ("JSON", False, INT, "nothing is allowed any more"),
    ("JSON", {"$ref": "#/$defs/a", "$defs": {"a": INT}}, INT, ""),
    ("JSON", {"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, INT, "the type integer is not allowed any more"),
    ("JSON", closed(n={"$ref": "#"}), closed(n={"$ref": "#"}), ""),
    ("PROTOBUF", proto("message A { int32 a = 1; }"), proto("message A { int32 a = 1; string b = 2; }"), ""),
    ("PROTOBUF", proto("message A { int64 a = 1; }"), proto("message A { int32 a = 1; }"), ""),
    ("PROTOBUF", proto("message A { string a = 1; }"), proto("message A { bytes a = 1; }"), ""),
    ("PROTOBUF", proto("message A { sint32 a = 1; }"), proto("message A { int32 a = 1; }"),
        "field A.a (1) is of the type sint32, and was int32"),
    ("PROTOBUF", proto("message A { int32 other = 1; }"), proto("message A { int32 a = 1; }"), ""),
    ("PROTOBUF", proto("message B { int32 a = 1; }"), proto("message A { int32 a = 1; }"), "message A was removed"),
    ("PROTOBUF", proto("package p; message A {}"), proto("message A {}"), "the package is p, and was none"),
    ("PROTOBUF", proto("message A { repeated int32 a = 1; }"), proto("message A { int32 a = 1; }"), "became repeated"),
    ("PROTOBUF", proto("message A { repeated string a = 1; }"), proto("message A { string a = 1; }"), ""),
    ("PROTOBUF", proto("message A { oneof x { int32 a = 1; int32 c = 3; } }"),
        proto("message A { int32 a = 1; }"), ""),
    ("PROTOBUF", proto("message A { oneof x { int32 a = 1; int32 b = 2; } }"),
        proto("message A { int32 a = 1; int32 b = 2; }"), "oneof A.x: a, b could be set along with"),
    ("PROTOBUF", proto("message A { oneof x { int32 a = 1; } }"),
        proto("message A { oneof x { int32 a = 1; int32 b = 2; } }"), "field A.b (2) was removed from the oneof x"),
    ("PROTOBUF", 'syntax = "proto2"; message A { required int32 a = 1; }', 'syntax = "proto2"; message A {}',
        "field A.a (1) was added as required"),
    ("PROTOBUF", proto("message A { map<string, int64> a = 1; }"),
        proto("message A { map<string, int32> a = 1; }"), ""),
    ("PROTOBUF", proto("message A { message N {} N a = 1; }"),
        proto("message A { message M {} M a = 1; message N {} }"), "message A.M was removed"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "new", "old", "problem"), RULES)
def test_a_schema_reads_what_an_earlier_one_wrote(kind: Kind, new: Any, old: Any, problem: str):
    found = incompatibilities(made(kind, new), made(kind, old), "BACKWARD")
    assert any(problem in each for each in found) if problem else found == []
    ahead = incompatibilities(made(kind, old), made(kind, new), "FORWARD")
    assert len(ahead) == len(found), "forward is backward from the other side"


ENDLESS: list[tuple[Kind, Any, str]] = [
    ("AVRO", {"type": "array", "items": "null"}, "an array of values without bytes"),
    ("AVRO", record(field("a", {"type": "array", "items": record(name="Empty")})), "an array of values without bytes"),
    ("AVRO", record(field("n", "R")), "contains itself"),
    ("AVRO", record(*[field(f"f{i}", "null") for i in range(2_000)]), "fields without bytes"),
    ("AVRO", record(field("a", "Missing")), "there is no type Missing"),
    ("AVRO", "{", "is not JSON"),
    ("JSON", {"$ref": "#"}, "refers to itself"),
    ("JSON", {"$ref": "#/$defs/n39", "$defs": {
        "n0": INT, **{f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i - 1}"}] * 2} for i in range(1, 40)}}}, "multiply"),
    ("JSON", {"pattern": "(?=a)b"}, "regex"),
    ("JSON", {"pattern": "((a{100}){100}){100}"}, "regex"),
    ("JSON", {"$ref": "http://127.0.0.1:9/schema"}, "nothing is fetched"),
    ("JSON", {"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    ("JSON", {"type": "nothing"}, "is not a JSON Schema"),
    ("JSON", "[" * 100 + "]" * 100, "nested deeper"),
    ("JSON", "[" * 100_000, "is not JSON"),
    ("PROTOBUF", proto("message A { B b = 1; }"), "couldn't resolve name 'B"),
    ("PROTOBUF", proto("message A {" * 100 + "}" * 100), "nested deeper"),
    ("PROTOBUF", proto("message A { int32 a = 1; int32 b = 1; }"), "duplicate field number"),
    ("PROTOBUF", proto('import "other.proto"; message A {}'), "not among its references"),
    ("PROTOBUF", proto("message A { int32 a = 1"), "line 1: 'the end' where ';' is needed"),
    ("PROTOBUF", "", "is empty"),
    ("PROTOBUF", proto("option (x) = {" + "{" * 5_000), "ends too early"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "schema", "why"), ENDLESS)
def test_a_schema_that_is_none_or_could_take_forever_is_refused(kind: Kind, schema: Any, why: str):
    with pytest.raises(InvalidSchema) as caught:
        made(kind, schema)
    assert why in str(caught.value)


LINKED = record(field("n", ["null", "R"]))
EITHER = {"anyOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]}
NAMED = {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/e"}}}, {"properties": {"a": {"$ref": "#/$defs/e"}}}]}
HOSTILE: list[tuple[Kind, Any, bytes, str]] = [
    ("AVRO", LINKED, b"\2" * 1_000_000, "nested deeper"),
    ("AVRO", "bytes", b"\xfe\xff\xff\xff\xff\xff\x7f" + b"a", "does not match"),
    ("AVRO", {"type": "array", "items": "int"}, b"\x80\x80\x80\x80\x80\x80\x80\x40", "does not match"),
    ("AVRO", "int", b"\2\2", "1 bytes are left"),
    ("JSON", True, b"[" * 900 + b"]" * 900, "nested deeper than 64"),
    ("JSON", True, b"[" * 1_000_000, "does not match"),
    ("JSON", EITHER, b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper"),
    (
        "JSON",
        {"items": {"$ref": "#/$defs/e"}, "$defs": {"e": NAMED}},
        b"[" + b",".join([b'{"a":' * 15 + b"1" + b"}" * 15] * 1_000) + b"]",
        "steps",
    ),
    ("JSON", {"items": {"pattern": "a"}}, b'["' + b"a" * 2_000_000 + b'"]', "patterns"),
    ("PROTOBUF", proto("message A { A a = 1; }"), b"\0" + b"\x0a\x7f" * 1_000, "does not match"),
    ("PROTOBUF", proto("message A {}"), b"\2\x10", "has no message 8"),
    ("PROTOBUF", proto("message A {}"), b"", "ends before it says"),
]


@pytest.mark.parametrize(("kind", "schema", "value", "why"), HOSTILE)
def test_a_hostile_value_is_refused_soon(kind: Kind, schema: Any, value: bytes, why: str):
    compiled = made(kind, schema)
    began = time.process_time()
    with pytest.raises(SchemaMismatch) as caught:
        compiled.check(value)
    assert why in str(caught.value)
    assert time.process_time() - began < 10  # without the bounds it would be days, or the end of the process


def test_a_tree_is_no_hostile_value():
    tree = made("JSON", {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}, "type": "object"})
    value: dict[str, Any] = {}
    for _ in range(12):
        value = {"left": value, "right": value}
    assert tree.decode(json.dumps(value).encode()) == value


def test_a_linked_list_of_avro_is_read():
    linked = made("AVRO", LINKED)
    buffer, value = io.BytesIO(), {"n": {"n": {"n": None}}}
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(json.loads(linked.schema.text)), value)
    assert linked.decode(buffer.getvalue()) == value


def test_schemas_use_others_by_name():
    part = Schema("AVRO", json.dumps(record(A, name="Part")))
    whole = compile_schema(Schema("AVRO", json.dumps(record(field("p", "Part"))), (("Part", part),)))
    assert whole.decode(b"\6") == {"p": {"a": 3}}
    size = Schema("JSON", json.dumps(INT))
    assert compile_schema(Schema("JSON", '{"items": {"$ref": "size.json"}}', (("size.json", size),))).decode(b"[1]")
    shared = Schema("PROTOBUF", proto("package s; message Part { int32 size = 1; }"))
    text = proto('import "part.proto"; message Whole { s.Part part = 1; }')
    found = compile_schema(Schema("PROTOBUF", text, (("part.proto", shared),))).decode(b"\0\x0a\2\x08\3")
    assert found == {"part": {"size": 3}}


def test_a_decoder_reads_values_by_their_ids_and_can_be_sent_its_schemas():
    schemas = {7: Schema("JSON", "true"), 8: Schema("AVRO", '"int"')}
    decoder = SchemaDecoder(lambda number: pickle.loads(pickle.dumps(schemas[number])))
    assert decoder.decode(with_header(7, b'{"a": 1}')) == {"a": 1}
    assert decoder.decode(with_header(8, b"\2")) == 1
    for value in (b"", b"\0\0\0\0", b'{"a": 1}'):
        with pytest.raises(SchemaMismatch, match="does not name its schema"):
            decoder.decode(value)


@pytest.mark.parametrize("path", [(0,), (1,), (0, 0), (2, 300, 1)])
def test_the_path_of_a_message_is_written_and_read(path: tuple[int, ...]):
    assert split_indexes(with_indexes(path, b"rest")) == (path, b"rest")
    assert split_header(with_header(1 << 31, b"x")) == (1 << 31, b"x")


def test_the_canonical_form_does_not_depend_on_spaces_and_order():
    assert (
        made("JSON", '{"type":"object","title":"a"}').canonical
        == made("JSON", '{ "title": "a", "type":"object"}').canonical
    )
    assert (
        made("PROTOBUF", proto("message A { int32 a=1; }")).canonical
        == made("PROTOBUF", proto("\n// a comment\nmessage A {\n  int32 a = 1;\n}\n")).canonical
    )


PROTOS = [
    proto('package a.b; option java_package = "x"; message M { optional int32 a = 1; repeated string b = 2; }'),
    proto('message M { map<string, N> m = 1; message N { bool y = 1; } reserved 5 to 9, 12; reserved "z"; }'),
    proto("enum E { option allow_alias = true; Z = 0; ONE = 1; UN = 1; NEG = -1; } message M { E e = 0x10; }"),
    proto(
        "message M { oneof x { int32 a = 1; string b = 2; } optional bool c = 3; } service S { rpc A(M) returns (M); }"
    ),
    proto(
        'message M { repeated int32 a = 1 [packed = false, deprecated = true]; int32 some_name = 2 [json_name = "n"]; }'
    ),
    """syntax = "proto2"; message M { required int32 a = 1; optional string s = 2 [default = "q\\n\\x41"];
    extensions 100 to max; } extend M { optional int32 more = 100; }""",
    proto(
        'import "google/protobuf/timestamp.proto"; message message { google.protobuf.Timestamp at = 1; '
        "string option = 2; }"
    ),
]


@pytest.mark.parametrize("text", PROTOS)
def test_protobuf_text_means_what_protoc_says(text: str, tmp_path: Any):
    protoc = pytest.importorskip("grpc_tools.protoc")
    import grpc_tools

    (tmp_path / "schema.proto").write_text(text, "utf-8")
    out = tmp_path / "out"
    known = f"{next(iter(grpc_tools.__path__))}/_proto"
    assert protoc.main(["protoc", f"-I{tmp_path}", f"-I{known}", f"--descriptor_set_out={out}", "schema.proto"]) == 0
    (expected,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    found = descriptor_pb2.FileDescriptorProto.FromString(
        base64.b64decode(compile_schema(Schema("PROTOBUF", text)).canonical)
    )
    for file in (expected, found):
        file.ClearField("options")
        file.ClearField("service")
        for message in file.message_type:
            message.ClearField("reserved_range")
            message.ClearField("reserved_name")
    expected, found = (re.sub(r' *json_name: ".*"\n', "", str(file)) for file in (expected, found))
    assert found == expected
