"""The audit page: acts in words, without those that changed nothing, and filtered."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.console_day import failed, order
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import page

QUEUE = "/v1/queues/payments"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.request("PUT", QUEUE, {"settings": {"max_attempts": 1}}).status == 200
        yield found


def test_acts_are_told_in_words(server: Serving):
    server.post(f"{QUEUE}/batch", {"messages": [{"text": "x"}] * 3})
    failed(server, ["error"] * 3, queue="payments")
    server.post(f"{QUEUE}/dead/redrive", {"dry_run": True})
    server.post(f"{QUEUE}/dead/redrive", {"limit": 2})
    server.post(f"{QUEUE}/dead/purge", {})
    server.request("POST", f"{QUEUE}/purge")
    text = page(server, "/ui/audit").text
    for words in (
        "local created or changed the queue payments",
        "local redrove 2 messages of payments",
        "local purged 1 message of the dead letters of payments",
        "local purged 2 messages of payments",
    ):
        assert words in text
    assert "1 routine call" in text
    assert "checked what would happen" not in text
    every = page(server, "/ui/audit", query={"routine": "true"}).text
    assert "checked what would happen: redrive 3 messages of payments" in every


def test_what_failed_is_not_told_as_done(server: Serving):
    assert server.request("PUT", "/v1/queues/no%20name", {}).status == 400
    assert server.post(f"{QUEUE}/dead/redrive", {"to": "nowhere"}).status == 404
    text = page(server, "/ui/audit").text
    assert "local tried to create or change the queue no name invalid_request" in text
    assert "local tried to redrive some messages of payments into nowhere unknown_topic" in text


def test_a_worker_is_named_as_people_know_it(server: Serving):
    server.post(f"{QUEUE}/workers", {"id": "5ff4454", "name": "mailer", "host": "h1", "concurrency": 4})
    assert server.post("/v1/workers/5ff4454/drain").status == 200
    assert "local told the worker mailer to drain" in page(server, "/ui/audit").text


def test_workers_that_start_are_left_out(server: Serving):
    for _ in range(5):
        assert server.request("PUT", QUEUE, {}).status == 200
    text = page(server, "/ui/audit").text
    assert text.count("created or changed the queue payments") == 1
    assert "5 routine calls" in text
    every = page(server, "/ui/audit", query={"routine": "true"}).text
    assert every.count("created or changed the queue payments") == 6


def test_acts_are_filtered_by_who_what_and_to_what(server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    order(server, 1, delay=3_600)
    server.request("DELETE", "/v1/queues/orders/messages/orders-0-d0")
    text = page(server, "/ui/audit", query={"text": "LOCAL cancelled"}).text
    assert "cancelled orders-0-d0" in text
    assert "payments" not in text
    assert "No action matches the filter" in page(server, "/ui/audit", query={"text": "nobody"}).text


def test_the_link_to_earlier_acts_leads_there(server: Serving):
    server.post(f"{QUEUE}/pause", {})
    found = server.get("/ui/audit", query={"limit": 1}).body.decode()
    (link,) = re.findall(r'href="(/ui/audit\?[^"]*limit=10000[^"]*)"', found)
    further = server.get(html.unescape(link))
    assert (further.status, b"changed the queue payments" in further.body) == (200, True)
