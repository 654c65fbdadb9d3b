"""Searches over HTTP: bounded, to be continued, in turn, and gone with their caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.server.turns import Scan
from tests.integration.http_gear import Serving, serving

MANY = 1_000
LIMIT = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("scans")
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("jobs", max_attempts=1)
        broker.publish_many("jobs", [b"%d" % number for number in range(MANY)])
        broker.group("jobs", "default")
        broker.create_topic("graves", max_attempts=1)
        broker.publish_many("graves", [b"%d" % number for number in range(MANY)])
        group = broker.group("graves", "default")
        for message in group.receive_many(MANY, timeout=0):
            message.reject(f"odd {int(message.body)}" if int(message.body) % 2 else "even")
    with serving(folder, whole=True, scan_messages=LIMIT, scan_workers=1) as running:
        yield running


def test_a_search_stops_at_the_limit_and_says_where_to_go_on(server: Serving) -> None:
    after: dict[str, Any] = {}
    found, calls = [], 0
    while True:
        query = {"where": 'body == "950" or body == "951"', **after}
        page = server.get("/v1/queues/jobs/messages", query=query).body
        calls += 1
        assert page["scanned"] <= LIMIT
        found += page["messages"]
        if not page.get("next"):
            break
        after = {"after": page["next"]}
    assert [each["offset"] for each in found] == [950, 951]
    assert calls == MANY // LIMIT


def test_dead_letters_are_searched_page_by_page_too(server: Serving) -> None:
    first = server.get("/v1/queues/graves/dead", query={"where": 'error ~ "^odd 9.7$"'}).body
    assert first["letters"] == []
    assert first["scanned"] == LIMIT
    assert first["next"]
    with holdfast.connect(server.url) as broker:
        found = broker.group("graves", "default").dead.list(where='error ~ "^odd 9.7$"')
    assert [letter.error for letter in found] == [f"odd {n}" for n in range(907, 1_000, 10)]


def test_the_client_follows_the_continuation_through_pages_without_messages(server: Serving) -> None:
    with holdfast.connect(server.url) as broker:
        group = broker.group("jobs", "default")
        assert [m.offset for m in group.messages(where="offset >= 998")] == [998, 999]
        assert [m.offset for m in group.messages(where="offset >= 990", limit=3)] == [990, 991, 992]
        assert len(list(group.messages())) == MANY


def test_groups_redrive_and_purge_look_at_everything_in_pieces(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    run = Scan.run

    def counted(self: Scan, *arguments: Any) -> Any:
        try:
            return run(self, *arguments)
        finally:
            most.append(self.looked)

    monkeypatch.setattr(Scan, "run", counted)
    groups = server.get("/v1/queues/graves/dead/groups").body["groups"]
    assert {each["error"]: each["count"] for each in groups} == {"even": MANY // 2, "odd …": MANY // 2}
    assert ([looked for looked in most if looked], max(most)) == ([LIMIT] * (MANY // LIMIT), LIMIT)
    answer = server.post("/v1/queues/graves/dead/redrive", {"where": 'error == "even"', "dry_run": True}).body
    assert (answer["matched"], answer["done"]) == (MANY // 2, 0)
    answer = server.post("/v1/queues/graves/dead/purge", {"where": 'error == "even" and offset >= 900'}).body
    assert answer["matched"] == answer["done"] == 50
    answer = server.post("/v1/queues/graves/dead/redrive", {"where": 'error == "even" and offset >= 800'}).body
    assert answer["matched"] == answer["done"] == 50
    assert max(most) == LIMIT


def test_whoever_may_read_may_search_by_a_regular_expression_and_nobody_can_make_it_run_for_ever(
    server: Serving,
) -> None:
    answer = server.get("/v1/queues/jobs/messages", query={"where": 'body ~ "(([0-9]+)+)+x$"'})
    assert answer.status == 200
    refused = server.get("/v1/queues/jobs/messages", query={"where": r'body ~ "(a)\1"'})
    assert refused.status == 400
    assert "back-references" in refused.body["error"]["message"]


def test_the_console_says_that_it_has_not_looked_at_everything_and_goes_on(server: Serving) -> None:
    page = server.get("/ui/queues/jobs", query={"where": "offset == 150"}, headers={"accept": "text/html"})
    text = page.body.decode()
    assert "100 messages were searched" in text
    assert "Search further" in text
    further = text.split("after=", 1)[1].split('"', 1)[0]
    text = server.get("/ui/queues/jobs", query={"where": "offset == 150", "after": further}).body.decode()
    assert "jobs-0-150" in text


def _until(done: Any) -> None:
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_while_searches_run_and_wait_other_calls_are_answered_and_too_many_are_refused(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()
    run = Scan.run

    def stuck(self: Scan, *arguments: Any) -> Any:
        held.set()
        while not go.wait(0.002):
            self.step()
        return run(self, *arguments)

    monkeypatch.setattr(Scan, "run", stuck)
    scans = server.server.service.scans
    connections = []
    try:
        for number in range(40):
            connection = server.connection()
            connection.request("GET", "/v1/queues/jobs/messages")
            connections.append(connection)
            if number == 0:
                assert held.wait(30)
        _until(lambda: scans.waiting + scans.refused == 39)
        assert scans.refused == 7
        assert server.get("/v1/queues/jobs/stats").body["ready"] == MANY
        assert server.get("/v1/topics").status == 200
        assert server.get("/healthz").status == 200
        refused = server.get("/v1/queues/jobs/messages")
        assert (refused.status, refused.code) == (429, "too_many_waiters")
        assert "retry-after" in refused.headers
        for connection in connections:  # the callers go: so do their searches, the one that runs included
            connection.close()
        _until(lambda: scans.running == 0 and scans.waiting == 0)
    finally:
        go.set()
        for connection in connections:
            connection.close()
