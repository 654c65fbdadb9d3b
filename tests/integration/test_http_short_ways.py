"""The short ways of the calls that come most often: they tell what the long ones tell."""

from __future__ import annotations

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
    assert taken["receipt"] == looked["receipt"]
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
    content = server.get("/metrics").body
    text = content.decode() if isinstance(content, bytes) else str(content)
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "holdfast_put_seconds_count"
    )
