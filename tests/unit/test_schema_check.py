"""Messages that are checked against the schema of their topic when they are published."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidRequest, SchemaMismatch
from holdfast.schemas import with_header

ORDER = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]})
GOOD, BAD = b'{"id": 7}', b'{"id": "seven"}'


@pytest.fixture
def broker(tmp_path: Path) -> Any:
    with holdfast.open_broker(tmp_path / "data") as opened:
        yield opened


def topic(broker: Any, **settings: Any) -> None:
    broker.create_topic("orders", **settings)
    assert broker.schemas.register("orders-value", ORDER, kind="JSON").id == 1


# Every way to publish one body.
WAYS: dict[str, Callable[[Any, bytes], object]] = {
    "publish": lambda broker, body: broker.publish("orders", body),
    "with a key": lambda broker, body: broker.publish("orders", body, key="k"),
    "delayed": lambda broker, body: broker.publish("orders", body, delay=60),
    "without waiting": lambda broker, body: broker.publish("orders", body, durability="os"),
    "many": lambda broker, body: broker.publish_many("orders", [with_header(1, GOOD), body]),
    "stream": lambda broker, body: broker.publish_stream("orders", io.BytesIO(body)),
    "queue": lambda broker, body: broker.queue("orders").put(body),
    "producer": lambda broker, body: sent(broker, body=body),
}


def sent(broker: Any, body: bytes) -> None:
    with broker.producer() as producer:
        producer.send("orders", body).result(30)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_that_does_not_match_is_refused_whichever_way_it_comes(broker: Any, way: str):
    topic(broker, schema_check="reject")
    WAYS[way](broker, with_header(1, GOOD))
    stored = broker.describe_topic("orders").partitions[0].end
    for wrong in (with_header(1, BAD), with_header(2, GOOD), GOOD, b""):
        with pytest.raises(SchemaMismatch, match="orders"):
            WAYS[way](broker, wrong)
    assert broker.describe_topic("orders").partitions[0].end == stored


def test_plain_json_is_checked_against_the_newest_schema_if_the_topic_takes_it(broker: Any):
    topic(broker, schema_check="reject", schema_plain=True)
    broker.publish("orders", GOOD)
    broker.publish("orders", with_header(1, GOOD))
    with pytest.raises(SchemaMismatch, match='field id: "seven" is not of type "integer"'):
        broker.publish("orders", BAD)


def test_a_topic_that_only_warns_takes_everything_and_logs_it(broker: Any, caplog: pytest.LogCaptureFixture):
    topic(broker, schema_check="warn")
    with caplog.at_level(logging.WARNING, "holdfast"):
        broker.publish("orders", BAD)
    assert [message.body for message in broker.read("orders")] == [BAD]
    assert "does not match its schema" in caplog.text


def test_a_check_begins_and_ends_with_the_setting(broker: Any):
    topic(broker)
    queue = broker.queue("orders")
    queue.put(BAD)
    broker.alter_topic("orders", schema_check="reject")
    with pytest.raises(SchemaMismatch):
        queue.put(BAD)
    broker.alter_topic("orders", schema_check="off")
    queue.put(BAD)


def test_a_new_version_counts_at_once_and_a_deleted_one_no_more(broker: Any):
    topic(broker, schema_check="reject")
    with pytest.raises(SchemaMismatch):
        broker.publish("orders", with_header(2, b"{}"))
    assert broker.schemas.register("orders-value", '{"type": "object"}', kind="JSON").id == 2
    broker.publish("orders", with_header(2, b"{}"))
    broker.schemas.delete("orders-value", 2)
    with pytest.raises(SchemaMismatch):
        broker.publish("orders", with_header(2, b"{}"))


def test_a_topic_without_a_schema_refuses_all(broker: Any):
    broker.create_topic("orders", schema_check="reject")
    with pytest.raises(SchemaMismatch, match="no subject orders-value"):
        broker.publish("orders", with_header(1, GOOD))


def test_a_deletion_by_key_is_no_value(broker: Any):
    topic(broker, schema_check="reject", cleanup="compact")
    broker.publish("orders", None, key="k")


def test_nothing_but_the_registry_writes_to_its_topic(broker: Any):
    broker.schemas.register("orders-value", ORDER, kind="JSON")
    with pytest.raises(InvalidRequest, match="where the registry keeps its schemas"):
        broker.publish("_schemas", b"{}", key="{}")
    with pytest.raises(InvalidRequest, match="where the registry keeps its schemas"):
        broker.delete_topic("_schemas")
    with pytest.raises(InvalidRequest, match="where the registry keeps its schemas"):
        broker.alter_topic("_schemas", cleanup="delete")
