"""The short ways of the calls that come most often: they tell what the long ones tell."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.http_gear import Serving, serving

QUEUE = "/v1/queues/orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, whole=True) as found:
        assert found.request("PUT", QUEUE, {}).status == 200
        yield found


@pytest.mark.parametrize("options", [{}, {"priority": 3}, {"ttl": 60}, {"key": "a"}, {"correlation_id": "c"}])
def test_a_message_is_told_alike_to_who_takes_it_and_to_who_looks(server: Serving, options: dict[str, Any]) -> None:
    server.post(f"{QUEUE}/enqueue", b"body", query=options)
    (taken,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
    looked = server.get(f"{QUEUE}/messages/{taken['id']}").body
    # What is only of the one who has it, or only of the one who looks, aside.
    lease = {"receipt", "fence", "attempt", "holder", "lease_ms", "lease_until_ms", "phase", "attempts", "state"}
    assert {name: value for name, value in taken.items() if name not in lease} == {
        name: value for name, value in looked.items() if name not in lease
    }
    assert taken["receipt"]
    assert "receipt" not in looked
    assert taken["correlation_id"] == options.get("correlation_id", taken["id"])


def test_a_producers_batch_is_timed_as_a_put_once(server: Serving) -> None:
    producer = server.post("/v1/producers", {}).body
    query = {"producer": producer["id"], "epoch": producer.get("epoch", 0), "sequence": 0}
    path = "/v1/topics/orders/partitions/0/append"
    for duplicate in (False, True):
        answer = server.post(path, {"messages": [{"text": "a"}, {"text": "b"}]}, query=query)
        assert answer.body.get("duplicate", False) is duplicate
        assert _timed_puts(server) == 1


def _timed_puts(server: Serving) -> float:
    return sum(sample.value for sample in _samples(server) if sample.name == "holdfast_put_seconds_count")


def _samples(server: Serving) -> list[Any]:
    content = server.get("/metrics").body
    text = content.decode() if isinstance(content, bytes) else str(content)
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize(
    "path", [f"{QUEUE}/batch", "/v1/topics/orders/messages", "/v1/topics/orders/partitions/0/append"]
)
def test_bodies_alone_are_stored_as_messages_with_nothing_else_are(server: Serving, path: str) -> None:
    producer = server.post("/v1/producers", {}).body
    binary = bytes(range(256))
    sequence = 0
    for batch in (
        {"bodies": [base64.b64encode(body).decode() for body in (binary, b"")]},
        {"messages": [{"body": base64.b64encode(body).decode()} for body in (binary, b"")]},
    ):
        query = {"producer": producer["id"], "epoch": producer.get("epoch", 0), "sequence": sequence}
        assert server.post(path, batch, query=query if "append" in path else ()).status == 201
        sequence += 2
    taken = server.post(f"{QUEUE}/dequeue", {"count": 10}).body["messages"]
    assert [base64.b64decode(message.get("body", "")) for message in taken] == [binary, b""] * 2
    own = {"id", "offset", "receipt", "fence", "timestamp_ns", "correlation_id"}
    shared = [{name: value for name, value in message.items() if name not in own} for message in taken]
    assert shared[:2] == shared[2:]
    assert _published(server) == (4, 512)


def test_bodies_and_messages_together_are_refused_and_so_is_a_batch_of_nothing(server: Serving) -> None:
    both = server.post(f"{QUEUE}/batch", {"messages": [{"text": "a"}], "bodies": ["Yg=="]})
    assert (both.status, both.code) == (400, "invalid_request")
    assert "not both" in both.body["error"]["message"]
    assert server.post(f"{QUEUE}/batch", {"messages": [], "bodies": []}).status == 400
    assert server.post(f"{QUEUE}/dequeue", {}).body == {"messages": []}


@pytest.mark.parametrize("batch", [{"bodies": ["YQ=="]}, {"messages": [{"text": "a"}]}])
def test_what_a_producer_appends_has_the_callers_trace(server: Serving, batch: dict[str, Any]) -> None:
    producer = server.post("/v1/producers", {}).body
    query = {"producer": producer["id"], "epoch": producer.get("epoch", 0), "sequence": 0}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    path = "/v1/topics/orders/partitions/0/append"
    assert server.post(path, batch, query=query, headers={"traceparent": trace}).status == 201
    (taken,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
    assert {"name": "traceparent", "value": trace} in taken["headers"]


def _published(server: Serving) -> tuple[float, float]:
    totals = {"holdfast_published_total": 0.0, "holdfast_published_bytes_total": 0.0}
    for sample in _samples(server):
        if sample.name in totals:
            totals[sample.name] += sample.value
    return tuple(totals.values())  # type: ignore[return-value]
