"""Dead letters over a real socket: seen, grouped, put back with progress, dropped."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.http_gear import Serving, serving

ERRORS = ("no card 17", "no card 99", "timeout")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    """With three dead letters, two of which died of the same."""
    with serving(tmp_path / "data") as found:
        found.request("PUT", "/v1/queues/orders", {"settings": {"max_attempts": 1}})
        for i, error in enumerate(ERRORS):
            found.post("/v1/queues/orders/enqueue", b"order %d" % i, query={"priority": 5})
            message = found.post("/v1/queues/orders/dequeue", {"owner": "worker-1"}).body["messages"][0]
            receipt = message["receipt"]
            if i == 0:
                state = {"receipt": receipt, "version": 0, "value": {"step": 2}}
                assert found.request("PUT", "/v1/queues/orders/state", state).status == 200
            assert found.post("/v1/queues/orders/nack", {"receipts": [receipt], "error": error}).status == 200
        yield found


def test_dead_letters_are_listed_with_what_went_wrong(server: Serving) -> None:
    letters = server.get("/v1/queues/orders/dead").body["letters"]
    assert [letter["error"] for letter in letters] == list(ERRORS)
    assert {letter["reason"] for letter in letters} == {"MAX_ATTEMPTS"}
    some = server.get("/v1/queues/orders/dead", query={"where": "error ~ 'card'", "limit": 1, "bodies": "false"})
    assert [(each["error"], each["omitted"]) for each in some.body["letters"]] == [("no card 17", True)]


def test_a_dead_letter_says_all_that_is_known_of_it(server: Serving) -> None:
    first = server.get("/v1/queues/orders/dead").body["letters"][0]
    letter = server.get(f"/v1/queues/orders/dead/{first['id']}").body
    assert base64.b64decode(letter["body"]) == b"order 0"
    assert (letter["original_id"], letter["original_offset"]) == ("orders-0-0", 0)
    assert [(each["holder"], each["error"]) for each in letter["failures"]] == [("worker-1", "no card 17")]
    assert (letter["state"], letter["priority"], letter["attempts"]) == ({"step": 2}, 5, 1)
    missing = server.get("/v1/queues/orders/dead/orders.dead-0-77")
    assert (missing.status, missing.code) == (404, "not_found")


def test_a_dead_letter_has_the_times_of_its_message_wherever_it_is_found(server: Serving) -> None:
    server.post("/v1/queues/orders/enqueue", b"order 3", query={"ttl": 600})
    receipt = server.post("/v1/queues/orders/dequeue", {}).body["messages"][0]["receipt"]
    server.post("/v1/queues/orders/nack", {"receipts": [receipt], "error": "late"})
    letter = server.get("/v1/queues/orders/dead").body["letters"][3]
    by_id = server.get(f"/v1/queues/orders/messages/{letter['id']}").body
    assert letter["expires_at_ms"] > 0
    assert (by_id["expires_at_ms"], by_id["phase"]) == (letter["expires_at_ms"], "dead")


def test_dead_letters_are_grouped_by_kind_of_error(server: Serving) -> None:
    groups = server.get("/v1/queues/orders/dead/groups").body["groups"]
    assert [(group["error"], group["count"]) for group in groups] == [("no card …", 2), ("timeout", 1)]


def test_a_dry_run_says_what_would_come_back(server: Serving) -> None:
    dry = server.post("/v1/queues/orders/dead/redrive", {"where": "error ~ 'card'", "dry_run": True}).body
    assert (dry["matched"], dry["done"], len(dry["ids"])) == (2, 0, 2)
    assert server.get("/v1/queues/orders/stats").body["dead"] == 3


def test_dead_letters_come_back_by_id_by_condition_and_all(server: Serving) -> None:
    first = server.get("/v1/queues/orders/dead").body["letters"][0]["id"]
    assert server.post("/v1/queues/orders/dead/redrive", {"ids": [first]}).body["done"] == 1
    assert server.post("/v1/queues/orders/dead/redrive", {"where": "error ~ 'card'", "limit": 5}).body["done"] == 1
    assert server.post("/v1/queues/orders/dead/redrive").body["done"] == 1
    stats = server.get("/v1/queues/orders/stats").body
    assert (stats["ready"], stats["dead"]) == (3, 0)


def test_a_redrive_tells_how_far_it_is(server: Serving) -> None:
    answer = server.post("/v1/queues/orders/dead/redrive", {"rate": 20}, headers={"accept": "application/x-ndjson"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in lines if not line.get("ended", True)][:1] == [0]
    assert sorted({line["done"] for line in lines}) == [0, 2, 3]
    assert (lines[-1]["matched"], lines[-1]["done"], len(lines[-1]["ids"])) == (3, 3, 3)


def test_dead_letters_are_dropped_for_good(server: Serving) -> None:
    dry = server.post("/v1/queues/orders/dead/purge", {"dry_run": True}).body
    assert (dry["matched"], dry["done"]) == (3, 0)
    assert server.post("/v1/queues/orders/dead/purge", {"limit": 2}).body["done"] == 2
    assert len(server.get("/v1/queues/orders/dead").body["letters"]) == 1


def test_ids_and_a_condition_together_are_refused(server: Serving) -> None:
    both = server.post("/v1/queues/orders/dead/redrive", {"ids": ["orders.dead-0-0"], "where": "attempts > 0"})
    assert (both.status, both.code) == (400, "invalid_request")
    bad = server.get("/v1/queues/orders/dead", query={"where": "((("})
    assert (bad.status, bad.code) == (400, "invalid_request")
