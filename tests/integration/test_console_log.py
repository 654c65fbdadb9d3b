"""The log page: the messages of a topic at their offsets, with or without a group that reads them as a queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.console_day import order, taken
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import Text, page


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.request("PUT", "/v1/queues/orders", {}).status == 200
        yield found


def links(found: Text) -> set[str]:
    return {str(attributes.get("href")) for tag, attributes in found.tags if tag == "a"}


def test_the_log_has_messages_that_are_done_and_leads_to_their_pages(server: Serving):
    order(server, 1)
    assert server.post("/v1/queues/orders/ack", {"receipts": taken(server)}).status == 200
    found = page(server, "/ui/queues/orders/log")
    assert "Offsets 0 to 0 are in the log." in found.text
    assert '"order": 1' in found.text
    assert "tenant acme" in found.text
    assert "/ui/queues/orders/messages/orders-0-0" in links(found)
    assert b'"order":1' in server.get("/v1/topics/orders/partitions/0/payload?offset=0").body


def test_a_topic_that_is_only_a_stream_can_be_looked_at(server: Serving):
    assert server.post("/v1/topics", {"name": "events"}).status == 201
    assert "The log of this partition is empty." in page(server, "/ui/queues/events/log").text
    assert server.post("/v1/topics/events/messages", {"messages": [{"text": "hello"}]}).status == 201
    assert "See its log" in page(server, "/ui/queues/events").text
    found = page(server, "/ui/queues/events/log")
    assert "events-0-0" in found.text
    assert "hello" in found.text
    assert not any("/messages/events-0-0" in link for link in links(found))


def test_the_log_is_turned_page_by_page_from_its_end_to_its_start(server: Serving):
    bodies = [{"json": {"number": number}} for number in range(120)]
    assert server.post("/v1/queues/orders/batch", {"messages": bodies}).status == 201
    newest = page(server, "/ui/queues/orders/log")
    assert ("orders-0-69 " in newest.text, "orders-0-70 " in newest.text, "orders-0-119 " in newest.text) == (
        False,
        True,
        True,
    )
    assert "/ui/queues/orders/log?offset=20" in links(newest)
    oldest = page(server, "/ui/queues/orders/log", query={"offset": "0"})
    assert ("orders-0-0 " in oldest.text, "orders-0-50 " in oldest.text) == (True, False)
    assert {"/ui/queues/orders/log?offset=50", "/ui/queues/orders/log?"} <= links(oldest)
    assert "Older" not in oldest.text
    assert "There are no messages here yet." in page(server, "/ui/queues/orders/log", query={"offset": "999999"}).text


def test_the_log_begins_at_a_time(server: Serving):
    order(server, 1)
    assert "orders-0-0 " in page(server, "/ui/queues/orders/log", query={"time": "2020-01-01T10:30"}).text
    later = page(server, "/ui/queues/orders/log", query={"time": "2999-01-01"}).text
    assert "There are no messages here yet." in later
    wrong = page(server, "/ui/queues/orders/log", query={"time": "yesterday"}, status=400)
    assert "write it like 2026-11-17T10:30, in UTC." in wrong.text
    assert "has no partition 7" in page(server, "/ui/queues/orders/log", query={"partition": "7"}, status=400).text


def test_a_long_body_is_cut_in_the_log(server: Serving):
    server.post("/v1/queues/orders/enqueue", b"x" * 10_000)
    found = page(server, "/ui/queues/orders/log")
    assert "This is the beginning of 9.8 KiB." in found.text
    assert "x" * 5_000 not in found.text


def test_only_those_who_may_read_a_topic_see_its_log(tmp_path: Path):
    from tests.integration.test_http_revoked import OPS, write_tokens

    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, OPS, {"name": "eve", "role": ["read"], "topics": ["mails"]})
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        for name in ("orders", "mails"):
            assert server.request("PUT", f"/v1/queues/{name}", {}, token="ops").status == 200
        assert server.get("/ui/queues/mails/log", token="eve").status == 200
        assert server.get("/ui/queues/orders/log", token="eve").status in (403, 404)
