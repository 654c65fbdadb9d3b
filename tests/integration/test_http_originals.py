"""What went wrong in the servers that came before, each as a test; that every metric moves is told elsewhere."""

from __future__ import annotations

import base64
import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.tokens import digest_of
from tests.integration.faults_gear import FaultyDisk, faulty_world
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import say, until

QUEUE = "/v1/queues/orders"
MEMBERS = "/v1/groups/readers/members"
EVERY_BYTE = bytes(range(256)) + b"\xed\xa0\x80\xff\xfe\x00"  # no text in any encoding

# All that a stranger may see: whether the server lives, and how its API and its pages are made.
PUBLIC = {"/healthz", "/readyz", "/openapi.json", "/docs", "/ui/static/{file}"}


def test_values_are_bytes_and_no_text_that_mangles_them(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        text = base64.b64encode(EVERY_BYTE).decode()
        sent = {"body": text, "key_data": text, "headers": [{"name": "raw", "data": text}]}
        assert server.post(f"{QUEUE}/batch", {"messages": [sent]}).status == 201
        assert server.post(f"{QUEUE}/enqueue", EVERY_BYTE).status == 201
        (read, _) = server.get("/v1/topics/orders/partitions/0/messages").body["messages"]
        member = server.post(MEMBERS, {"topics": ["orders"]}).body["member"]
        (polled, _) = server.post(f"{MEMBERS}/{member}/poll", {"poll": 1, "wait": 10}).body["messages"]
        (taken,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
        for message in (read, polled, taken):
            assert message["body"] == text
            assert message["key_data"] == text
            assert message["headers"] == [{"name": "raw", "data": text}]
        raw = server.post(f"{QUEUE}/dequeue", {}, headers={"accept": "application/octet-stream"})
        assert raw.body == EVERY_BYTE


@pytest.mark.slow
@pytest.mark.serial
def test_a_poll_is_woken_and_does_not_sleep_in_steps(tmp_path: Path):
    rounds, step_s = 30, 0.1
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        member = server.post(MEMBERS, {"topics": ["orders"]}).body["member"]
        late_s = [_woken_after(server, f"{MEMBERS}/{member}/poll", i + 1) for i in range(rounds)]
    say(f"a poll of a group ends {sorted(late_s)[rounds // 2] * 1000:.1f} ms after what it waited for was stored")
    # Somebody who sleeps in steps would be so quick once in five times.
    assert sum(each < step_s / 5 for each in late_s) > rounds / 2, late_s


def _woken_after(server: Serving, path: str, number: int) -> float:
    ended: list[float] = []

    def poll() -> None:
        answer = server.post(path, {"poll": number, "wait": 30})
        ended.append(time.perf_counter())
        assert len(answer.body["messages"]) == 1

    polling = threading.Thread(target=poll)
    polling.start()
    until(lambda: server.server.service.waits.waiting == 1, "it waits")
    server.post(f"{QUEUE}/enqueue", b"x", query={"durability": "os"})
    stored = time.perf_counter()
    polling.join(30)
    return ended[0] - stored


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", f"{QUEUE}/dequeue", {"lease": 600}),
        ("GET", f"{QUEUE}/peek", None),
        ("GET", "/v1/topics/orders/partitions/0/messages", None),
    ],
)
def test_a_storage_error_is_not_an_empty_queue(tmp_path: Path, method: str, path: str, body: Any):
    disk = FaultyDisk()
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        server.post(f"{QUEUE}/enqueue", b"x")
    with serving(tmp_path / "data", world=faulty_world(disk)) as server:
        assert server.get(f"{QUEUE}/stats").body["ready"] == 1
        disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"read"}))
        failed = server.request(method, path, body)
        assert disk.faults.fired == ["read"]
        assert failed.status == 503, failed
        assert failed.body["error"]["retryable"]
        again = server.request(method, path, body)
        assert again.status == 200
        assert len(again.body["messages"]) == 1, "the error was passing, and the message is there at once"


def test_a_storage_error_is_not_an_empty_poll(tmp_path: Path):
    disk = FaultyDisk()
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        server.post(f"{QUEUE}/enqueue", b"x")
    with serving(tmp_path / "data", world=faulty_world(disk)) as server:
        member = server.post(MEMBERS, {"topics": ["orders"]}).body["member"]
        disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"read"}))
        failed = server.post(f"{MEMBERS}/{member}/poll", {"poll": 1, "wait": 0})
        assert disk.faults.fired == ["read"]
        assert failed.status == 503, failed
        again = server.post(f"{MEMBERS}/{member}/poll", {"poll": 1, "wait": 10})
        assert len(again.body["messages"]) == 1


def test_behind_every_face_there_is_somebody_who_asks_who_calls(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    entry = {"name": "ops", "sha256": digest_of("secret"), "role": "admin"}
    tokens.write_text(json.dumps({"tokens": [entry]}))
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        routes = server.server.app.router.routes
        assert len(routes) > 80, "pages, metrics and audit log are among them"
        for route in routes:
            path = route.pattern.replace("{", "").replace("}", "")
            for token in (None, "wrong"):
                answer = server.request(route.method, path, token=token)
                if route.pattern in PUBLIC:
                    assert answer.status != 401, f"{route.method} {path}"
                else:
                    assert answer.status == 401, f"{route.method} {path}"


@pytest.mark.parametrize(
    "path",
    ["/debug", "/debug/pprof", "/debug/pprof/", "/debug/vars", "/profile", "/pprof", "/admin", "/.env", "/console"],
)
def test_nothing_of_the_servers_inside_is_shown_even_to_its_administrator(tmp_path: Path, path: str):
    with serving(tmp_path / "data", whole=True) as server:
        assert server.get(path).status == 404
