"""Schedules over HTTP, and of a server from Python: every route, real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.protocol.topics import Act, words_of
from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Serving, serving

JOB = "/v1/schedules/job"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.post("/v1/topics", {"name": "jobs"}).status == 201
        yield found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def bodies(server: Serving, topic: str = "jobs") -> list[bytes]:
    with holdfast.connect(server.url) as broker:
        return [message.body for message in broker.read(topic)]


def test_a_schedule_is_put_shown_paused_resumed_run_and_deleted(server: Serving):
    wanted = {
        "topic": "jobs",
        "json": {"a": 1},
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "headers": {"h": "1"},
    }
    made = server.request("PUT", JOB, wanted)
    assert made.status == 200
    assert (made.body["name"], made.body["cron"], made.body["headers"]) == ("job", "0 3 * * *", {"h": "1"})
    assert server.get(JOB).body == made.body
    assert server.get("/v1/schedules").body == {"schedules": [made.body]}
    assert len(server.get(f"{JOB}/next", query={"count": "3"}).body["times"]) == 3
    assert server.post(f"{JOB}/pause").body["paused"] is True
    assert server.post(f"{JOB}/resume").body["next_due"] == made.body["next_due"]
    run = server.post(f"{JOB}/run")
    assert (run.status, run.body["message_id"], run.body["by_hand"]) == (200, "jobs-0-0", True)
    assert bodies(server) == [b'{"a":1}']
    assert server.request("DELETE", JOB).body == {"deleted": True}
    assert server.request("DELETE", JOB).body == {"deleted": False}
    assert server.get(JOB).status == 404


@pytest.mark.parametrize(
    ("wanted", "status", "code"),
    [
        ({"topic": "jobs", "text": "x"}, 400, "invalid_request"),
        ({"topic": "jobs", "every": 5}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "body": "eA==", "every": 5}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "every": 5, "cron": "* * * * *"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "cron": "61 * * * *"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "cron": "* * * * *", "timezone": "Mars/Olympus"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "at": "2020-01-01T00:00:00Z"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "at": "2030-01-01T00:00:00"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "every": 0.1}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "every": 5, "misfire": "later"}, 400, "invalid_request"),
        ({"topic": "jobs", "text": "x", "every": 5, "more": 1}, 400, "invalid_request"),
        ({"topic": "nowhere", "text": "x", "every": 5}, 404, "unknown_topic"),
        ({"topic": "jobs", "text": "x" * 70_000, "every": 5}, 413, "message_too_large"),
    ],
)
def test_what_cannot_be_used_is_refused(server: Serving, wanted: dict[str, object], status: int, code: str):
    answer = server.request("PUT", JOB, wanted)
    assert (answer.status, answer.code) == (status, code)
    assert server.get("/v1/schedules").body == {"schedules": []}


def test_what_is_not_there_is_told(server: Serving):
    for path in (f"{JOB}/pause", f"{JOB}/resume", f"{JOB}/run"):
        assert (server.post(path).status, server.post(path).code) == (404, "not_found")
    assert server.get(f"{JOB}/next").status == 404
    assert server.get("/v1/schedules/a%20b").status in (400, 404)


def test_a_server_fires_and_its_clients_see_it(server: Serving):
    with holdfast.connect(server.url, body_type=str) as broker:
        made = broker.schedules.put("job", "jobs", "tick", every=1, key="k", headers={"h": "1"}, priority=3, jitter=0.2)
        assert (made.body, made.key, made.headers, made.priority, made.every) == (b"tick", "k", {"h": "1"}, 3, 1)
        again = broker.schedules.put(
            "job", "jobs", "tick", every=1, key="k", headers={"h": "1"}, priority=3, jitter=0.2
        )
        assert again.created_at == made.created_at
        until(lambda: (broker.schedules.get("job").fired or 0) >= 2)
        broker.schedules.pause("job")
        found = broker.schedules.get("job")
        messages = broker.read("jobs")
        assert [message.id for message in reversed(messages)] == [firing.message_id for firing in found.firings]
        assert messages[0].body == "tick"
        assert messages[0].key == "k"
        assert broker.schedules.run_now("job").by_hand
        assert broker.schedules.next("job", 2)[1] - broker.schedules.next("job", 2)[0] == timedelta(seconds=1)
        assert [each.name for each in broker.schedules.list()] == ["job"]
        assert broker.schedules.resume("job").next_due is not None
        assert broker.schedules.delete("job") is True
        assert broker.schedules.get("job") is None
        with pytest.raises(holdfast.NotFound):
            broker.schedules.pause("job")
        once = broker.schedules.put("once", "jobs", "x", at=datetime.now(UTC) + timedelta(days=1))
        assert once.at == once.next_due
    text = server.get("/metrics").body.decode()
    assert "holdfast_schedules_fired_total 3.0" in text or "holdfast_schedules_fired_total 4.0" in text


def test_tasks_use_the_schedules_of_a_server(server: Serving):
    async def work() -> None:
        async with holdfast.aio.connect(server.url) as broker:
            await broker.schedules.put("job", "jobs", b"x", cron="@daily", timezone="America/New_York")
            assert (await broker.schedules.run_now("job")).message_id == "jobs-0-0"
            assert [each.name for each in await broker.schedules.list()] == ["job"]
            assert len(await broker.schedules.next("job")) == 5
            assert await broker.schedules.delete("job")

    asyncio.run(work())


def test_changes_are_in_the_audit_log(server: Serving):
    server.request("PUT", JOB, {"topic": "jobs", "text": "x", "every": 3600})
    server.post(f"{JOB}/run")
    server.request("DELETE", JOB)
    acts = [(act["route"], act["target"]) for act in server.get("/v1/admin/audit").body["acts"]]
    words = [words_of(msgspec.convert(act, Act)) for act in server.get("/v1/admin/audit").body["acts"]]
    assert {"created or changed the schedule job", "ran the schedule job now", "deleted the schedule job"} <= set(words)
    assert ("DELETE /v1/schedules/{schedule}", "job") in acts
    assert ("PUT /v1/schedules/{schedule}", "job") in acts
    assert ("POST /v1/schedules/{schedule}/run", "job") in acts


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Serving]:
    entries = [
        {"name": "boss", "role": "admin"},
        {"name": "a", "role": ["publish", "read"], "topics": ["a.*"]},
        {"name": "b", "role": ["publish", "read"], "topics": ["b.*"]},
        {"name": "reader", "role": "reader"},
    ]
    path = tmp_path / "tokens.json"
    path.touch(mode=0o600)
    path.write_bytes(
        msgspec.json.encode({"tokens": [{**each, "sha256": digest_of(str(each["name"]))} for each in entries]})
    )
    with serving(tmp_path / "data", whole=True, tokens_file=str(path)) as found:
        for topic in ("a.jobs", "b.jobs"):
            assert found.post("/v1/topics", {"name": topic}, token="boss").status == 201
        yield found


def test_a_token_schedules_only_for_its_topics_and_under_its_names(guarded: Serving):
    def put(token: str, name: str, topic: str) -> int:
        return guarded.request(
            "PUT", f"/v1/schedules/{name}", {"topic": topic, "text": "x", "every": 60}, token=token
        ).status

    assert put("a", "a.job", "a.jobs") == 200
    assert put("a", "a.job", "b.jobs") == 403
    assert put("a", "b.job", "a.jobs") == 403
    assert put("reader", "a.job", "a.jobs") == 403
    assert put("boss", "a.of-the-boss", "b.jobs") == 200
    assert put("a", "a.of-the-boss", "a.jobs") == 403  # it publishes elsewhere: not theirs to change
    for verb in ("pause", "resume", "run"):
        assert guarded.post(f"/v1/schedules/a.of-the-boss/{verb}", token="a").status == 403
        assert guarded.post(f"/v1/schedules/a.job/{verb}", token="b").status == 403
        assert guarded.post(f"/v1/schedules/a.job/{verb}", token="a").status == 200
    assert guarded.request("DELETE", "/v1/schedules/a.of-the-boss", token="a").status == 403
    refused = guarded.post("/v1/schedules/a.of-the-boss/run", token="a").body["error"]["message"]
    assert "b.jobs" not in refused
    assert "schedule a.of-the-boss" in refused
    assert guarded.get("/v1/schedules/a.of-the-boss", token="a").status == 403
    names = {
        token: [each["name"] for each in guarded.get("/v1/schedules", token=token).body["schedules"]]
        for token in ("a", "b", "boss", "reader")
    }
    assert names == {"a": ["a.job"], "b": [], "boss": ["a.job", "a.of-the-boss"], "reader": ["a.job", "a.of-the-boss"]}
    page = guarded.get("/ui/schedules", token="a").body.decode()
    assert "a.job" in page
    assert "of-the-boss" not in page
    assert "Run now" not in guarded.get("/ui/schedules", token="reader").body.decode()
