"""Tokens that are taken back, changed or expire while a call of theirs is under way: the call ends, without effect."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Serving, serving

QUEUE = "/v1/queues/orders"
_LONG_S = 60


def write_tokens(path: Path, *entries: dict[str, Any]) -> None:
    """Replaced as a whole: half a file is none."""
    fresh = path.with_suffix(".new.json")
    fresh.touch(mode=0o600)
    listed = [{"role": "admin", "sha256": digest_of(each["name"]), **each} for each in entries]
    fresh.write_bytes(msgspec.json.encode({"tokens": listed}))
    fresh.rename(path)


OPS = {"name": "ops"}
WORKER = {"name": "worker", "role": ["consume", "read", "publish", "lock"], "create_groups": True}


class Guarded:
    """A server whose tokens can be changed."""

    def __init__(self, server: Serving, path: Path) -> None:
        self.server = server
        self.path = path

    def take_back(self) -> None:
        """From now on only the operator is known."""
        write_tokens(self.path, OPS)

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPConnection:
        """A call of the worker that is under way."""
        connection = self.server.connection()
        content = None if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer worker", "content-type": "application/json"}
        connection.request(method, path, content, headers)
        return connection

    def wait_for_waiter(self) -> None:
        until(lambda: self.server.server.service.waits.waiting == 1)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    path = tmp_path / "tokens.json"
    write_tokens(path, OPS, WORKER)
    with serving(tmp_path / "data", tokens_file=str(path)) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        yield Guarded(server, path)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _LONG_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def refused(connection: http.client.HTTPConnection) -> dict[str, Any]:
    """What the caller was told, long before its wait would have been over."""
    began = time.monotonic()
    with connection.getresponse() as answer:
        refusal = json.loads(answer.read())
    connection.close()
    assert answer.status == 401, refusal
    assert time.monotonic() - began < _LONG_S / 2
    return dict(refusal["error"])


WAITS: list[tuple[str, str, Any]] = [
    ("POST", f"{QUEUE}/dequeue", {"wait": _LONG_S}),
    ("POST", f"{QUEUE}/dequeueWithState", {"wait": _LONG_S}),
    ("GET", f"/v1/topics/orders/partitions/0/messages?offset=0&wait={_LONG_S}", None),
    ("POST", "/v1/locks/door/acquire", {"wait": _LONG_S, "lease": 30, "owner": "me"}),
]


@pytest.mark.parametrize(("method", "path", "body"), WAITS, ids=[path.partition("?")[0] for _, path, _ in WAITS])
def test_a_call_that_waits_ends_when_its_token_is_taken_back(guarded: Guarded, method: str, path: str, body: Any):
    held = guarded.server.post("/v1/locks/door/acquire", {"lease": 300, "owner": "other"}, token="ops")
    assert held.status == 200
    waiting = guarded.ask(method, path, body)
    guarded.wait_for_waiter()
    guarded.take_back()
    assert refused(waiting)["code"] == "unauthenticated"
    assert guarded.server.server.service.waits.waiting == 0


def test_the_poll_of_a_member_ends_when_its_token_is_taken_back(guarded: Guarded):
    joined = guarded.server.post("/v1/groups/g/members", {"topics": ["orders"]}, token="worker")
    assert joined.status == 201
    waiting = guarded.ask("POST", f"/v1/groups/g/members/{joined.body['member']}/poll", {"poll": 1, "wait": _LONG_S})
    guarded.wait_for_waiter()
    guarded.take_back()
    assert refused(waiting)["code"] == "unauthenticated"


def test_a_message_that_comes_after_its_token_was_taken_back_stays_ready_and_untouched(guarded: Guarded):
    waiting = guarded.ask("POST", f"{QUEUE}/dequeue", {"wait": _LONG_S})
    guarded.wait_for_waiter()
    # The server learns of it with the very call that brings the message: nobody has looked at the tokens before.
    freeze_looks(guarded)
    guarded.take_back()
    allow_looks(guarded)
    assert guarded.server.post(f"{QUEUE}/enqueue", b"secret", token="ops").status == 201
    assert "changed or revoked" in refused(waiting)["message"]
    until(lambda: guarded.server.get(f"{QUEUE}/stats", token="ops").body["ready"] == 1)
    (message,) = guarded.server.post(f"{QUEUE}/dequeue", {}, token="ops").body["messages"]
    assert message["attempt"] == 1


def freeze_looks(guarded: Guarded) -> None:
    guarded.server.run(_set_looked(guarded, 10**30))


def allow_looks(guarded: Guarded) -> None:
    guarded.server.run(_set_looked(guarded, 0))


async def _set_looked(guarded: Guarded, looked_ns: int) -> None:
    tokens: Any = guarded.server.server.access._tokens
    tokens._looked_ns = looked_ns


def test_a_lock_that_comes_free_after_its_token_was_taken_back_is_free_for_others(guarded: Guarded):
    held = guarded.server.post("/v1/locks/door/acquire", {"lease": 300, "owner": "other"}, token="ops").body
    waiting = guarded.ask("POST", "/v1/locks/door/acquire", {"wait": _LONG_S, "lease": 300, "owner": "me"})
    guarded.wait_for_waiter()
    freeze_looks(guarded)
    guarded.take_back()
    allow_looks(guarded)
    gave = guarded.server.post("/v1/locks/door/release", {"lease_id": held["lease_id"]}, token="ops")
    assert gave.status == 204
    refused(waiting)
    until(lambda: not guarded.server.get("/v1/locks/door", token="ops").body["held"])


def test_messages_that_a_member_did_not_get_come_to_the_next_one(guarded: Guarded):
    settings = {"topics": ["orders"]}
    joined = guarded.server.post("/v1/groups/g/members", settings, token="worker").body
    waiting = guarded.ask("POST", f"/v1/groups/g/members/{joined['member']}/poll", {"poll": 1, "wait": _LONG_S})
    guarded.wait_for_waiter()
    freeze_looks(guarded)
    guarded.take_back()
    allow_looks(guarded)
    assert guarded.server.post(f"{QUEUE}/enqueue", b"secret", token="ops").status == 201
    refused(waiting)
    again = guarded.server.post(
        f"/v1/groups/g/members/{joined['member']}/poll", {"poll": 1, "wait": _LONG_S}, token="ops"
    )
    assert [message["offset"] for message in again.body["messages"]] == [0]


def test_a_call_that_waits_ends_when_its_token_expires(guarded: Guarded):
    soon = (datetime.now(UTC) + timedelta(seconds=3)).isoformat()
    write_tokens(guarded.path, OPS, {**WORKER, "expires": soon})
    until(lambda: guarded.server.server.access.identify("Bearer worker").entry.expires is not None)
    waiting = guarded.ask("POST", f"{QUEUE}/dequeue", {"wait": _LONG_S})
    assert "expired at" in refused(waiting)["message"]


def test_a_token_that_may_do_more_or_for_longer_goes_on_waiting(guarded: Guarded):
    waiting = guarded.ask("POST", f"{QUEUE}/dequeue", {"wait": _LONG_S})
    guarded.wait_for_waiter()
    later = (datetime.now(UTC) + timedelta(days=3)).isoformat()
    write_tokens(guarded.path, OPS, {**WORKER, "role": "admin", "expires": later})
    until(lambda: guarded.server.post("/v1/admin/sync", token="worker").status == 204)
    assert guarded.server.server.service.waits.waiting == 1
    assert guarded.server.post(f"{QUEUE}/enqueue", b"x", token="ops").status == 201
    with waiting.getresponse() as answer:
        assert len(json.loads(answer.read())["messages"]) == 1
    waiting.close()


def test_a_token_whose_rights_shrank_waits_no_longer(guarded: Guarded):
    waiting = guarded.ask("POST", f"{QUEUE}/dequeue", {"wait": _LONG_S})
    guarded.wait_for_waiter()
    write_tokens(guarded.path, OPS, {**WORKER, "topics": ["others.*"]})
    assert "changed" in refused(waiting)["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", f"{QUEUE}/subscribe", {"heartbeat": 30}), ("GET", f"{QUEUE}/watch?stats=0", None)],
    ids=["subscribe", "watch"],
)
def test_a_stream_ends_with_a_word_when_its_token_is_taken_back(guarded: Guarded, method: str, path: str, body: Any):
    stream = guarded.ask(method, path, body)
    with stream.getresponse() as answer:
        assert answer.status == 200
        guarded.wait_for_waiter()
        guarded.take_back()
        began = time.monotonic()
        assert b"unauthenticated" in answer.read()
        assert time.monotonic() - began < 15  # neither the next heartbeat nor the next stats
    stream.close()
    until(lambda: guarded.server.server.service.waits.waiting == 0)


@contextmanager
def upload(guarded: Guarded, path: str, media: str, size: int) -> Iterator[socket.socket]:
    address = urlsplit(guarded.server.url)
    with socket.create_connection((address.hostname, address.port), timeout=_LONG_S) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer worker\r\n"
            f"content-type: {media}\r\ncontent-length: {size}\r\n\r\n".encode()
        )
        yield client


@pytest.mark.parametrize(
    ("path", "media", "content"),
    [
        (f"{QUEUE}/enqueue", "application/octet-stream", b"x" * 200_000),
        (f"{QUEUE}/batch", "application/x-ndjson", b'{"text": "x"}\n' * 10_000),
    ],
    ids=["enqueue", "batch"],
)
def test_an_upload_that_outlives_its_token_has_no_effect(guarded: Guarded, path: str, media: str, content: bytes):
    with upload(guarded, path, media, len(content)) as client:
        client.sendall(content[:70_000])
        until(lambda: len(guarded.server.server.http.connections) == 1)
        freeze_looks(guarded)
        guarded.take_back()
        allow_looks(guarded)
        client.sendall(content[70_000:])
        assert client.recv(12) == b"HTTP/1.1 401"
    assert guarded.server.get(f"{QUEUE}/stats", token="ops").body["ready"] == 0


def test_a_slow_redrive_stops_when_its_token_is_taken_back(guarded: Guarded):
    server = guarded.server
    for _ in range(5):
        server.post(f"{QUEUE}/enqueue", b"x", token="ops")
    taken = server.post(f"{QUEUE}/dequeue", {"count": 5}, token="ops").body["messages"]
    server.post(f"{QUEUE}/reject", {"receipts": [each["receipt"] for each in taken]}, token="ops")
    write_tokens(guarded.path, OPS, {**WORKER, "role": "admin"})
    until(lambda: server.post("/v1/admin/sync", token="worker").status == 204)
    redrive = guarded.ask("POST", f"{QUEUE}/dead/redrive", {"rate": 0.05})  # one each 20 s
    until(lambda: server.get(f"{QUEUE}/stats", token="ops").body["ready"] == 1)
    guarded.take_back()
    refused(redrive)
    assert server.get(f"{QUEUE}/stats", token="ops").body["ready"] == 1
