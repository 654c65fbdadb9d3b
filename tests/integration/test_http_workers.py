"""Workers over HTTP: rights, limits of a report, the audit log, and the console's page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Answer, Serving, serving
from tests.integration.test_console import page

TOKENS = {
    "boss": {"role": "admin"},
    "worker-a": {"role": "consumer", "topics": ["orders"]},
    "worker-b": {"role": "consumer", "topics": ["orders", "mails"]},
    "mail-admin": {"role": "admin", "topics": ["mails"]},
    "reader": {"role": "reader"},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    path = tmp_path / "tokens.json"
    path.touch(mode=0o600)
    entries = [{"name": name, "sha256": digest_of(name), **facts} for name, facts in TOKENS.items()]
    path.write_text(json.dumps({"tokens": entries}))
    with serving(tmp_path / "data", whole=True, tokens_file=str(path)) as found:
        for queue in ("orders", "mails"):
            assert found.request("PUT", f"/v1/queues/{queue}", {}, token="boss").status == 200
        yield found


def report(server: Serving, token: str, queue: str = "orders", **facts: Any) -> Answer:
    given = {"id": "w1", "name": "mailer", **facts}
    return server.request("POST", f"/v1/queues/{queue}/workers", given, token=token)


def listed(server: Serving, token: str) -> list[tuple[str, int]]:
    found = server.request("GET", "/v1/workers", token=token)
    assert found.status == 200
    return sorted((info["name"], info["handled"]) for info in found.body["workers"])


def test_a_caller_reports_on_its_queues_only_and_sees_those_of_its_topics(server: Serving):
    assert report(server, "worker-a", handled=1).body == {}
    assert report(server, "worker-a", queue="mails").status == 403
    assert report(server, "reader").status == 403
    assert report(server, "worker-b", queue="mails", name="post", handled=2).status == 200
    assert listed(server, "boss") == listed(server, "reader") == [("mailer", 1), ("post", 2)]
    assert listed(server, "worker-a") == [("mailer", 1)]
    assert server.request("GET", "/v1/workers").status == 401


def test_only_admins_of_all_topics_of_a_worker_may_tell_it_anything(server: Serving):
    report(server, "worker-a")
    for token in ("worker-a", "worker-b", "reader", "mail-admin"):
        for verb in ("drain", "stop", "resume"):
            assert server.request("POST", f"/v1/workers/mailer/{verb}", token=token).status == 403, (token, verb)
    assert report(server, "worker-a").body == {}
    assert server.request("POST", "/v1/workers/mailer/drain", token="boss").body == {"ids": ["w1"]}
    assert report(server, "worker-a").body == {"order": "drain"}
    nobody = server.request("POST", "/v1/workers/nobody/stop", token="boss")
    assert (nobody.status, nobody.code) == (404, "not_found")
    acts = server.request("GET", "/v1/admin/audit", token="boss").body["acts"]
    assert ("POST /v1/workers/{worker}/drain", "mailer") in [(act["route"], act["target"]) for act in acts]
    assert "told the worker mailer to drain" in page(server, "/ui/audit", token="boss").text


def test_a_report_by_the_id_of_another_caller_changes_nothing_of_that_one(server: Serving):
    report(server, "worker-a", handled=1)
    report(server, "worker-b", handled=7, status="stopped")
    found = server.request("GET", "/v1/workers", token="boss").body["workers"]
    assert sorted((info["handled"], info["state"]) for info in found) == [(1, "running"), (7, "stopped")]


@pytest.mark.parametrize(
    "facts",
    [
        {"id": "x" * 65},
        {"name": ""},
        {"name": "x" * 201},
        {"status": "dancing"},
        {"running": [{"id": "orders-0-1", "seconds": 1}] * 21},
        {"running": [{"id": "x" * 301, "seconds": 1}]},
        {"handled": -1},
        {"started_ms": 2**53},  # no date
        {"running": [{"id": "orders-0-1", "seconds": 1e308}]},
    ],
)
def test_a_report_that_is_too_large_or_makes_no_sense_is_refused(server: Serving, facts: dict[str, Any]):
    refused = report(server, "worker-a", **facts)
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert listed(server, "boss") == []


def test_the_page_shows_workers_with_buttons_for_those_who_may(server: Serving):
    running = [{"id": "orders-0-7", "seconds": 90}]
    report(server, "worker-a", name="<b>mailer</b>", host="h1", pid=12, running=running, running_count=1, concurrency=4)
    shown = page(server, "/ui/workers", token="boss")
    assert "<b>mailer</b>" in shown.text
    assert "h1, process 12" in shown.text
    assert "orders-0-7" in shown.text
    assert "1 of 4" in shown.text
    urls = [facts.get("data-url") for tag, facts in shown.tags if tag == "button"]
    assert {"/v1/workers/w1/drain", "/v1/workers/w1/stop"} <= set(urls)
    shown = page(server, "/ui/workers", token="reader")
    assert "<b>mailer</b>" in shown.text
    assert not [tag for tag, facts in shown.tags if "/v1/workers" in str(facts.get("data-url"))]
