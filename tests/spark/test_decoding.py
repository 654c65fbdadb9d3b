"""Avro, Protobuf and JSON Schema values as columns, with schemas given by hand and from the registry."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import holdfast
from holdfast.errors import InvalidRequest, InvalidSchema, SchemaNotFound
from holdfast.schemas.decoding import compile_schema
from holdfast.schemas.source import Schema
from holdfast.schemas.wire import with_header, with_indexes
from holdfast.spark import from_avro, from_json_schema, from_protobuf
from tests.integration.http_gear import serving

ITEM = {"type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]}
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "sizes", "type": {"type": "map", "values": "double"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
        {"name": "item", "type": ITEM},
        {"name": "gift", "type": ["null", "Item"]},
        {"name": "count", "type": ["int", "long"]},
    ],
}
VALUE: dict[str, Any] = {
    "id": 7,
    "customer": None,
    "at": datetime(2026, 5, 1, 12, 30, tzinfo=UTC),
    "day": date(2026, 5, 1),
    "price": Decimal("12.50"),
    "tags": ["a", "b"],
    "sizes": {"x": 1.5},
    "kind": "OLD",
    "item": {"sku": "s1"},
    "gift": {"sku": "s2"},
    "count": 5_000_000_000,
}
PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Mail { string to = 1; }
message Order {
  int64 id = 1;
  optional string customer = 2;
  google.protobuf.Timestamp at = 3;
  repeated string tags = 4;
  map<string, double> sizes = 5;
  uint64 big = 6;
  enum Kind { NEW = 0; OLD = 1; }
  Kind kind = 7;
  Mail mail = 8;
}
"""
JSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        "flags": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "open": {},
        "parent": {"$ref": "#"},
    },
    "required": ["id"],
    "$defs": {"tag": {"type": ["string", "null"]}},
}


def avro(value: Any, schema: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def frame(spark: SparkSession, *values: bytes | None) -> DataFrame:
    return spark.createDataFrame([(value,) for value in values], "value binary")


def test_avro_becomes_columns_of_its_own_types(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(ORDER))
    decoded = frame(spark, avro(VALUE, ORDER), None).select(from_avro("value", file).alias("order"))
    assert decoded.select("order.*").dtypes == [
        ("id", "bigint"), ("customer", "string"), ("at", "timestamp"), ("day", "date"), ("price", "decimal(9,2)"),
        ("tags", "array<string>"), ("sizes", "map<string,double>"), ("kind", "string"), ("item", "struct<sku:string>"),
        ("gift", "struct<sku:string>"), ("count", "bigint"),
    ]  # fmt: skip
    whole, nothing = decoded.selectExpr("order", "unix_millis(order.at) AS ms").collect()
    assert nothing.order is None
    assert whole.ms == VALUE["at"].timestamp() * 1000
    found = whole.order.asDict(recursive=True)
    assert {**found, "at": VALUE["at"]} == VALUE


def test_protobuf_becomes_columns(spark: SparkSession) -> None:
    compiled: Any = compile_schema(Schema("PROTOBUF", PROTO))
    order = compiled._class_at((1,))(id=3, tags=["q"], big=2**64 - 1, kind=1, sizes={"x": 2.0}, mail={"to": "anna"})
    order.at.FromDatetime(datetime(2026, 5, 1, 12, 30))
    content = order.SerializeToString()
    plain = frame(spark, content).select(from_protobuf("value", PROTO, message="Order").alias("o"))
    [row] = plain.selectExpr("o.*", "unix_seconds(o.at) AS seconds").collect()
    assert (row.id, row.customer, row.tags, row.sizes, row.big, row.kind, row.mail.to) == (
        3, None, ["q"], {"x": 2.0}, Decimal(2**64 - 1), "OLD", "anna",
    )  # fmt: skip
    assert row.seconds == datetime(2026, 5, 1, 12, 30, tzinfo=UTC).timestamp()
    framed = frame(spark, with_header(9, with_indexes((1,), content)))
    assert framed.select(from_protobuf("value", PROTO, message="shop.Order", framed=True).id).first()[0] == 3


def test_json_is_checked_and_what_its_schema_leaves_open_stays_json(spark: SparkSession) -> None:
    text = b'{"id": 1, "price": 2, "tags": ["x", null], "flags": {"a": true}, "open": {"z": [1]}, "parent": {"id": 0}}'
    schema = json.dumps(JSON)
    good = frame(spark, text).select(from_json_schema("value", schema).alias("o")).select("o.*")
    [row] = good.collect()
    assert (row.id, row.price, row.tags, row.flags, row.open) == (1, 2.0, ["x", None], {"a": True}, '{"z":[1]}')
    assert row.parent.id == 0
    bad = frame(spark, b'{"id": "one"}', b'{"id": 99999999999999999999}', b"{", text)
    found = bad.select(from_json_schema("value", schema, mode="PERMISSIVE").alias("o")).collect()
    assert [None if row.o is None else row.o.id for row in found] == [None, None, None, 1]
    with pytest.raises(PySparkException, match="does not match its schema"):
        frame(spark, b'{"id": "one"}').select(from_json_schema("value", schema)).collect()


def test_what_no_column_can_have_is_refused_at_once() -> None:
    tree = {"type": "record", "name": "Tree", "fields": [{"name": "left", "type": ["null", "Tree"]}]}
    either = {"type": "record", "name": "R", "fields": [{"name": "x", "type": ["int", "string"]}]}
    with pytest.raises(InvalidRequest, match="Tree contains itself"):
        from_avro("value", json.dumps(tree))
    with pytest.raises(InvalidRequest, match="one of several types"):
        from_avro("value", json.dumps(either))
    with pytest.raises(InvalidSchema, match=r"no message Bill: it has shop\.Mail, shop\.Order"):
        from_protobuf("value", PROTO, message="Bill")
    with pytest.raises(InvalidSchema):
        from_avro("value", '{"type": "record"}')
    with pytest.raises(InvalidRequest, match="give a schema, or a subject"):
        from_avro("value")
    with pytest.raises(InvalidRequest, match="belong together"):
        from_avro("value", subject="orders-value")
    with pytest.raises(InvalidRequest, match="mode 'DROPMALFORMED'"):
        from_avro("value", json.dumps(ITEM), mode="DROPMALFORMED")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose topic has values of two versions of a schema."""
    old = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    note = {"name": "note", "type": ["null", "string"], "default": None}
    new = {**old, "fields": [*old["fields"], note]}
    with serving(tmp_path_factory.mktemp("served") / "shop") as server:
        with holdfast.connect(server.url) as broker:
            ids = [broker.schemas.register("orders-value", json.dumps(each)).id for each in (old, new)]
            broker.create_topic("orders")
            broker.publish("orders", with_header(ids[0], avro({"id": 1}, old)))
            broker.publish("orders", with_header(ids[1], avro({"id": 2, "note": "new"}, new)))
        yield server.url


def test_each_value_is_read_with_the_version_of_the_subject_that_it_names(spark: SparkSession, shop: str) -> None:
    with holdfast.connect(shop) as broker:
        values = [bytes(message.body) for message in broker.read("orders")]
    order = from_avro("value", subject="orders-value", path=shop).alias("order")
    rows = frame(spark, *values).select(order).select("order.*").collect()
    assert [(row.id, row.note) for row in rows] == [(1, None), (2, "new")]
    strange = frame(spark, with_header(4_000, b"\0"))
    with pytest.raises(PySparkException, match="names the schema 4000"):
        strange.select(order).collect()
    with pytest.raises(SchemaNotFound):
        from_avro("value", subject="mails-value", path=shop)
    with pytest.raises(InvalidRequest, match="type AVRO, not JSON"):
        from_json_schema("value", subject="orders-value", path=shop)
