"""Pausing over HTTP: the two calls, long polls that wait through a pause, the audit log, and the console's pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import page

QUEUE = "/v1/queues/orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True, max_wait_ms=20_000) as found:
        assert found.request("PUT", QUEUE, {}).status == 200
        yield found


def test_both_calls_say_what_is_and_whether_they_changed_it(server: Serving):
    first = server.post(f"{QUEUE}/pause", {"reason": "tonight"})
    assert (first.status, first.body["changed"], first.body["paused"]["reason"]) == (200, True, "tonight")
    again = server.post(f"{QUEUE}/pause", {"reason": "other"}).body
    assert again == {"changed": False, "paused": first.body["paused"]}
    assert server.get(f"{QUEUE}/stats").body["paused"] == first.body["paused"]
    (group,) = server.get("/v1/groups").body["groups"]
    assert group["paused"] == first.body["paused"]
    assert server.post(f"{QUEUE}/resume").body == {"changed": True, "paused": None}
    assert server.post(f"{QUEUE}/resume").body == {"changed": False, "paused": None}
    assert server.get(f"{QUEUE}/stats").body.get("paused") is None


def test_what_is_not_there_or_not_understood_is_an_error_and_changes_nothing(server: Serving):
    server.post("/v1/groups/counting/members", {"topics": ["orders"]})
    for path, body, status, code in (
        ("/v1/queues/nowhere/pause", {}, 404, "unknown_topic"),
        (f"{QUEUE}/pause", {"group": "nobody"}, 404, "unknown_group"),
        (f"{QUEUE}/pause", {"group": "counting"}, 404, "unknown_group"),  # one in stream mode
        (f"{QUEUE}/pause", {"reason": "x" * 501}, 400, "invalid_request"),
        (f"{QUEUE}/pause", {"why": "x"}, 400, "invalid_request"),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.code) == (status, code), answer
    refused = server.post(f"{QUEUE}/pause", {"group": "counting"}).body["error"]["message"]
    assert "queue mode" in refused
    assert server.get(f"{QUEUE}/stats").body.get("paused") is None


def test_the_group_may_be_named_in_the_query_or_in_the_body(server: Serving):
    for group in ("mail", "other"):
        assert server.request("PUT", f"/v1/topics/orders/groups/{group}", {}).status < 300
    server.post(f"{QUEUE}/enqueue", b"x")

    def ready() -> dict[str, int]:
        groups = server.get("/v1/groups").body["groups"]
        return {each["name"]: each["lag"] for each in groups}

    def paused() -> set[str]:
        return {each["name"] for each in server.get("/v1/groups").body["groups"] if each.get("paused")}

    for act, then in (("pause", {"mail"}), ("resume", set())):
        assert server.post(f"{QUEUE}/{act}", {"group": "mail"}).body["changed"] is True
        assert paused() == then
        assert server.post(f"{QUEUE}/{act}", {}, query={"group": "mail"}).body["changed"] is False
        assert server.post(f"{QUEUE}/{act}", {"group": "mail"}, query={"group": "mail"}).body["changed"] is False
    assert server.post(f"{QUEUE}/purge", {"group": "mail"}).body == {"purged": 1}
    assert ready() == {"default": 1, "mail": 0, "other": 1}
    assert server.post(f"{QUEUE}/purge", {}, query={"group": "other"}).body == {"purged": 1}
    assert ready() == {"default": 1, "mail": 0, "other": 0}


@pytest.mark.parametrize("act", ["pause", "resume", "purge"])
def test_two_different_groups_or_an_unknown_field_are_refused(server: Serving, act: str):
    assert server.request("PUT", "/v1/topics/orders/groups/mail", {}).status < 300
    server.post(f"{QUEUE}/enqueue", b"x")
    conflict = server.post(f"{QUEUE}/{act}", {"group": "default"}, query={"group": "mail"})
    assert (conflict.status, conflict.code) == (400, "invalid_request")
    assert "mail" in conflict.body["error"]["message"]
    for body, query in (({"groups": "mail"}, {}), ({}, {"groups": "mail"})):
        assert server.post(f"{QUEUE}/{act}", body, query=query).status == 400
    assert server.post(f"{QUEUE}/{act}", {"group": "nobody"}).code == "unknown_group"
    assert {each["lag"] for each in server.get("/v1/groups").body["groups"]} == {1}


def test_a_long_poll_waits_through_a_pause_and_gets_its_message_at_resume(server: Serving):
    server.post(f"{QUEUE}/pause", {})
    got: list[Any] = []
    poll = threading.Thread(target=lambda: got.append(server.post(f"{QUEUE}/dequeue", {"wait": 20}).body))
    poll.start()
    server.post(f"{QUEUE}/enqueue", b"x")
    deadline = time.monotonic() + 30
    while not server.get(f"{QUEUE}/stats").body["waiters"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert got == []
    server.post(f"{QUEUE}/resume")
    poll.join(30)
    assert [message["id"] for message in got[0]["messages"]] == ["orders-0-0"]


def test_it_is_in_the_audit_log(server: Serving):
    server.post(f"{QUEUE}/pause", {"reason": "tonight"})
    server.post(f"{QUEUE}/resume")
    acts = [entry["route"] for entry in server.get("/v1/admin/audit").body["acts"]]
    assert {f"POST /v1/queues/{{queue}}/{verb}" for verb in ("pause", "resume")} <= set(acts)


@pytest.mark.parametrize("path", ["/ui", "/ui/queues/orders", "/ui/groups", "/ui/groups/default"])
def test_the_console_shows_a_badge_with_the_reason(server: Serving, path: str):
    assert ("span", {"class": "badge bad"}) not in [(tag, facts) for tag, facts in page(server, path).tags]
    server.post(f"{QUEUE}/pause", {"reason": "<b>tonight</b>"})
    shown = page(server, path)
    badges = [facts.get("title") or "" for tag, facts in shown.tags if tag == "span" and "badge bad" in str(facts)]
    assert len(badges) == 1
    assert badges[0].endswith(": <b>tonight</b>")
    assert "paused" in shown.text
