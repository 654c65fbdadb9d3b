"""A folder with a day's life in it, for those who look at it in the console."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.integration.http_gear import Serving


def order(server: Serving, number: int, **options: object) -> str:
    """One message in the queue `orders`."""
    body = {"order": number, "total": 12.5 * number, "customer": {"id": f"c-{number % 7}", "name": "Grüße"}}
    message = {"json": body, "key": f"c-{number % 7}", "headers": [{"name": "tenant", "value": "acme"}], **options}
    answer = server.post("/v1/queues/orders/batch", {"messages": [message]})
    assert answer.status == 201, answer.body
    return str(answer.body["stored"][0]["id"])


def taken(server: Serving, count: int = 1, *, queue: str = "orders", owner: str = "worker-1") -> list[str]:
    """The receipts of messages that somebody works on now."""
    answer = server.post(f"/v1/queues/{queue}/dequeue", {"count": count, "owner": owner, "lease": 600})
    return [message["receipt"] for message in answer.body["messages"]]


def failed(server: Serving, errors: list[str], *, queue: str = "orders") -> None:
    """Take a message for each error, and say that the work failed of it."""
    for error in errors:
        (receipt,) = taken(server, queue=queue)
        assert server.post(f"/v1/queues/{queue}/nack", {"receipts": [receipt], "error": error}).status == 200


def live_a_day(server: Serving) -> None:
    """Messages in every phase, in several queues."""
    settings = {"max_attempts": 1, "trace_sample": 1.0}
    assert server.request("PUT", "/v1/queues/orders", {"settings": settings}).status == 200
    for i in range(40):
        order(server, i)
    failed(server, [f"PaymentDeclined: card 4{i} of customer 'c-{i}' was declined" for i in range(6)])
    failed(server, ["TimeoutError: no answer from the shop within 30 s"] * 3)
    assert server.post("/v1/queues/orders/ack", {"receipts": taken(server, 8)}).status == 200
    taken(server, 3, owner="worker-eu-1")
    taken(server, 2, owner="worker-eu-2")
    for i in range(3):
        order(server, 100 + i, delay=3_600 * (i + 1))
    for name in ("mails", "thumbnails", "webhooks"):
        assert server.request("PUT", f"/v1/queues/{name}", {}).status == 200
    server.post("/v1/queues/mails/enqueue", b"\x89PNG\r\n\x1a\n\x00\x00 no text at all \xff")
    server.post("/v1/queues/thumbnails/enqueue", b"plain text, and enough of it")
    reset = {"topic": "orders", "to": "earliest", "dry_run": True}
    assert server.post("/v1/groups/default/reset", reset).status == 200
    assert server.post("/v1/locks/nightly-report/acquire", {"owner": "cron-1", "lease": 600}).status == 200
    schedule = {"topic": "webhooks", "text": "export", "cron": "0 3 * * *", "timezone": "Europe/Berlin"}
    assert server.request("PUT", "/v1/schedules/nightly-export", schedule).status == 200
    assert server.request("PUT", "/v1/state/last-export", {"value": {"until": "2026-01-01", "rows": 1200}}).status < 300


RUNS = 30


def run_pipelines(lake: Path) -> None:
    """The notes of pipelines that ran every ten minutes: one lands, one refines and fails at times, one proves."""
    now_ms = time.time_ns() // 1_000_000
    for name, kind in (("orders-land", "land"), ("orders-silver", "refine"), ("orders-proof", "reconcile")):
        runs: list[dict[str, Any]] = []
        for number in range(RUNS):
            rows = 20_000 + 9_000 * (number % 7)
            run = {"at_ms": now_ms - (RUNS - number) * 600_000, "ok": True, "seconds": 4.0 + number % 5, "batches": 2}
            run |= {"rows_in": rows, "rows_out": rows - 40 * (number % 3), "lag": 1_000 * (number % 4)}
            if kind == "refine":
                run |= {"quarantined": 40 * (number % 3), "expectations": {"has_id": 12, "late": number % 6}}
                if number % 11 == 10:
                    run |= {"ok": False, "error": "orders-silver: there is no column amount in the rows of its source"}
            runs.append(run)
        if kind == "reconcile":
            runs[-1]["ok"] = False
        checkpoint = lake / "_checkpoints" / name
        checkpoint.mkdir(parents=True)
        checkpoint.joinpath("spec.json").write_text(json.dumps({"kind": kind}), "utf-8")
        checkpoint.joinpath("runs.json").write_text(json.dumps(runs), "utf-8")
