"""The page of a message: every attempt, why it ran again, where it went, and what can be done with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.server.console.messages import without_own_frames
from tests.integration.console_day import failed, order, taken
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import Text, page

QUEUE = "/v1/queues/orders"
TRACEBACK = """ValueError: there is no card 4711

Traceback (most recent call last):
  File "/srv/venv/lib/python3.11/site-packages/holdfast/worker/run.py", line 210, in _handle
    result = handler(message)
             ^^^^^^^^^^^^^^^^
  File "/srv/shop/payments.py", line 12, in charge
    raise ValueError("there is no card 4711")
ValueError: there is no card 4711"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        settings = {"max_attempts": 3, "backoff_ms": 0}
        assert found.request("PUT", QUEUE, {"settings": settings}).status == 200
        yield found


def shown(server: Serving, message: str) -> Text:
    return page(server, f"/ui/queues/orders/messages/{message}")


def test_our_own_frames_are_left_out_of_a_traceback():
    found = without_own_frames(TRACEBACK)
    assert "holdfast" not in found
    assert "^^^^" not in found
    assert found.count("ValueError: there is no card 4711") == 2
    assert 'File "/srv/shop/payments.py", line 12, in charge\n    raise ValueError' in found
    assert without_own_frames("no traceback") == "no traceback"


def test_attempts_are_told_with_worker_outcome_and_each_error_once(server: Serving):
    order(server, 1)
    for _ in range(3):
        failed(server, [TRACEBACK])
    found = shown(server, "orders.dlq-0-0")
    assert "Attempts 3" in found.text
    assert found.text.count("failed, retried") == 2
    assert found.text.count("failed, moved to the dead letters") == 1
    assert found.text.count('File "/srv/shop/payments.py"') == 1
    assert found.text.count("same error as in row 1") == 2
    assert "holdfast/worker" not in found.text
    assert found.text.count("worker-1") >= 3


def test_a_dead_message_has_one_page_whatever_it_is_called(server: Serving):
    order(server, 1)
    for i in range(3):
        failed(server, [f"TimeoutError: {i} s"])
    for name in ("orders-0-0", "orders.dlq-0-0"):
        found = shown(server, name)
        assert "Last error TimeoutError: 2 s" in found.text
        assert "Redrive…" in found.text
        assert "Attempts 3 " in found.text
        links = {attributes.get("href") for tag, attributes in found.tags if tag == "a"}
        assert not {link for link in links if link and link.startswith("/ui/queues/orders/messages/orders-0-0?")}


def test_the_attempt_that_is_running_counts(server: Serving):
    order(server, 1)
    failed(server, ["TimeoutError: 1 s"])
    taken(server, owner="worker-b")
    text = shown(server, "orders-0-0").text
    assert "Attempts 2 Held by worker-b" in text
    assert text.index("failed, retried") < text.index("running")


def test_a_message_that_ran_twice_says_why(server: Serving):
    order(server, 1)
    taken(server, owner="worker-a")
    assert server.post(f"{QUEUE}/messages/orders-0-0/takeBack").body == {"changed": True}
    (receipt,) = taken(server, owner="worker-b")
    assert server.post(f"{QUEUE}/ack", {"receipts": [receipt]}).status == 200
    text = shown(server, "orders-0-0").text
    assert "worker-a" in text
    assert "lease taken back by an administrator" in text
    assert "worker-b" in text


def test_links_lead_through_death_and_redrive_in_both_directions(server: Serving):
    order(server, 1)
    for _ in range(3):
        failed(server, ["error"])
    for message in ("orders-0-0", "orders.dlq-0-0"):
        assert "Ids of this message, in order: orders-0-0 → orders.dlq-0-0 " in shown(server, message).text
    assert server.post(f"{QUEUE}/dead/redrive", {}).body["done"] == 1
    for message, other in (
        ("orders-0-0", "orders-0-1"),
        ("orders-0-1", "orders-0-0"),
        ("orders.dlq-0-0", "orders-0-1"),
    ):
        found = shown(server, message)
        assert "Ids of this message, in order: orders-0-0 → orders-0-1 " in found.text
        links = {attributes.get("href") for tag, attributes in found.tags if tag == "a"}
        assert f"/ui/queues/orders/messages/{other}?" in links


def test_a_lease_is_taken_back_whoever_holds_it(server: Serving):
    order(server, 1)
    assert server.post(f"{QUEUE}/messages/orders-0-0/takeBack").body == {"changed": False}
    (lost,) = taken(server)
    assert "Take back" in shown(server, "orders-0-0").text
    assert server.post(f"{QUEUE}/messages/orders-0-0/takeBack").body == {"changed": True}
    assert server.post(f"{QUEUE}/ack", {"receipts": [lost]}).code == "lease_lost"
    answer = server.post(f"{QUEUE}/dequeue", {"count": 1}).body["messages"]
    assert [(message["id"], message.get("attempt", 1)) for message in answer] == [("orders-0-0", 1)]
    assert server.post(f"{QUEUE}/messages/orders-0-7/takeBack").status == 400


def test_a_delayed_message_runs_now(server: Serving):
    assert order(server, 1, delay=3_600) == "orders-0-d0"
    order(server, 2, delay=3_600)
    assert "Run now" in shown(server, "orders-0-d0").text
    assert server.post(f"{QUEUE}/messages/orders-0-d0/runNow").body == {"changed": True}
    assert server.post(f"{QUEUE}/messages/orders-0-d0/runNow").body == {"changed": False}
    (message,) = server.post(f"{QUEUE}/dequeue", {"count": 5}).body["messages"]
    assert message["id"] == "orders-0-d0"
    assert server.get(f"{QUEUE}/stats").body["delayed"] == 1


def test_a_message_that_waits_for_its_retry_runs_now(tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", QUEUE, {"settings": {"backoff_ms": 3_600_000}})
        order(server, 1)
        failed(server, ["error"])
        assert server.post(f"{QUEUE}/dequeue", {}).body["messages"] == []
        assert server.post(f"{QUEUE}/messages/orders-0-0/runNow").body == {"changed": True}
        (message,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
        assert (message["id"], message["attempt"]) == ("orders-0-0", 2)


def test_a_message_that_was_run_now_stays_so_after_a_restart(tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", QUEUE, {"settings": {"backoff_ms": 3_600_000}})
        order(server, 1)
        failed(server, ["error"])
        order(server, 2, delay=3_600)
        for message in ("orders-0-0", "orders-0-d0"):
            assert server.post(f"{QUEUE}/messages/{message}/runNow").body == {"changed": True}
    with serving(tmp_path / "data", whole=True) as server:
        stats = server.get(f"{QUEUE}/stats").body
        assert (stats["ready"], stats.get("delayed", 0)) == (2, 0)


def test_the_form_starts_with_a_copy_of_a_message(server: Serving):
    message = {"text": "\n<b>bold</b>", "key": "c-1", "headers": [{"name": "tenant", "value": "acme"}], "priority": 3}
    odd = {"text": "\u202egnp", "key": "\u202egnp"}
    assert server.post(f"{QUEUE}/batch", {"messages": [message, odd]}).status == 201
    server.post(f"{QUEUE}/enqueue", b"\xff\x00")
    server.post(f"{QUEUE}/enqueue", b"x" * 100_000)

    def form(wanted: str) -> str:
        answer = server.get("/ui/queues/orders/send", query={"copy_of": wanted}, headers={"accept": "text/html"})
        assert answer.status == 200
        return str(answer.body.decode())

    first = form("orders-0-0")
    assert ">\n\n&lt;b&gt;bold&lt;/b&gt;</textarea>" in first  # a browser leaves the first end of line out
    assert 'name="key" autocomplete="off" value="c-1"' in first
    assert "<option selected>3</option>" in first
    assert ">\ntenant: acme</textarea>" in first
    for wanted, why in (("1", "not text"), ("2", "not text"), ("3", "too long to edit")):
        text = form(f"orders-0-{wanted}")
        assert f"Its body is {why}" in text
        assert 'name="key" autocomplete="off" value=""' in text
    assert server.get("/ui/queues/orders/send", query={"copy_of": "orders-0-99"}).status == 404
