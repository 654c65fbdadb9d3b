"""What callers can make a server hold in memory: no more than their share, and nothing when they are gone."""

from __future__ import annotations

import gc
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.faults_gear import head_of, raw, request_of, status_of
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until
from tests.integration.test_http_revoked import write_tokens

QUEUE = "/v1/queues/orders"
BODY_BYTES = 4 * 1024 * 1024
ONE, OTHER = {"name": "one"}, {"name": "other"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    path = tmp_path / "tokens.json"
    write_tokens(path, ONE, OTHER)
    with serving(tmp_path / "data", tokens_file=str(path), max_request_bytes=BODY_BYTES) as found:
        assert found.request("PUT", QUEUE, {}, token="one").status == 200
        yield found


def unfinished(connection: socket.socket, sent: int = BODY_BYTES - 1) -> None:
    """A request whose last byte does not come."""
    headers = ("authorization: Bearer one", f"content-length: {BODY_BYTES}", "content-type: application/json")
    connection.sendall(head_of("POST", f"{QUEUE}/batch", *headers) + b" " * sent)


def test_bodies_of_one_token_that_never_end_fill_its_own_room_and_no_more(server: Serving):
    room = server.server.service.room
    with ExitStack() as stack:
        held = [stack.enter_context(raw(server.url)) for _ in range(4)]
        for connection in held:
            unfinished(connection)
        until(lambda: room.used("one") == 4 * BODY_BYTES, "four of them are read")
        fifth = stack.enter_context(raw(server.url))
        unfinished(fifth, sent=100_000)
        until(lambda: room.waiting("one") == 1, "one more waits")
        assert server.post(f"{QUEUE}/batch", {"bodies": ["eA=="]}, token="one").status == 201, "small ones need none"
        large = b'{"messages":[{"text":"%b"}]}' % (b"x" * 1_000_000)
        assert server.post(f"{QUEUE}/batch", large, token="other").status == 201, "others have room of their own"
        held[0].sendall(b" ")  # nothing but spaces
        assert status_of(held[0]) == 400
        until(lambda: room.waiting("one") == 0, "it is read, too")
    until(lambda: room.used("one") == 0, "they are gone")


@contextmanager
def counted() -> Iterator[None]:
    """Nobody looks for cycles: what is not let go of stays, and is counted."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def _held() -> int:
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.serial
def test_a_body_is_let_go_of_when_its_sender_is_gone(server: Serving):
    room = server.server.service.room
    with counted():
        for _ in range(4):
            with raw(server.url) as connection:
                unfinished(connection)
                until(lambda: room.used("one") and _held() > BODY_BYTES // 2, "it is read")
            until(lambda: not room.used("one"), "the call is over")
        until(lambda: _held() < BODY_BYTES, "nothing of them is held")


@pytest.mark.serial
@pytest.mark.parametrize("path", [f"{QUEUE}/batch", f"{QUEUE}/ack"])
def test_a_body_is_let_go_of_when_it_is_refused(server: Serving, path: str):
    with counted():
        for _ in range(4):
            with raw(server.url) as connection:
                connection.sendall(
                    request_of(
                        "POST", path, b"x" * BODY_BYTES, "authorization: Bearer one", "content-type: application/json"
                    )
                )
                assert status_of(connection) == 400
        until(lambda: _held() < BODY_BYTES, "nothing of them is held")


@pytest.mark.serial
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/topics/orders/partitions/0/messages?limit=100", b""),
        ("GET", f"{QUEUE}/messages?limit=100&bodies=true", b""),
        ("GET", f"{QUEUE}/peek?count=100", b""),
        ("POST", f"{QUEUE}/dequeue", b'{"count": 100}'),
    ],
)
def test_an_answer_is_let_go_of_when_nobody_reads_it(server: Serving, method: str, path: str, body: bytes):
    for _ in range(16):
        assert server.post(f"{QUEUE}/enqueue", b"x" * 1_000_000, token="one").status == 201
    connections = server.server.http.connections
    with counted():
        for _ in range(3):
            with raw(server.url) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                connection.sendall(request_of(method, path, body, "authorization: Bearer one"))
                until(lambda: any(each._writable is not None for each in list(connections)), "it is not read")
            until(lambda: not any(each.busy for each in list(connections)), "it is over")
        until(lambda: _held() < 12_000_000, "nothing of it is held")
    until(lambda: server.get(f"{QUEUE}/stats", token="one").body["ready"] == 16, "all are there")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", f"{QUEUE}/peek?count=4", b""), ("POST", f"{QUEUE}/dequeue", b'{"count": 4}')],
)
def test_answers_that_one_token_does_not_read_fill_its_own_room_and_no_more(
    server: Serving, method: str, path: str, body: bytes
):
    for _ in range(32):
        assert server.post(f"{QUEUE}/enqueue", b"x" * 1_000_000, token="one").status == 201
    answers, connections = server.server.service.answers, server.server.http.connections
    answers.each_bytes = 12_000_000  # for two of these

    def unread() -> int:
        return sum(each._writable is not None for each in list(connections))

    with ExitStack() as stack:
        for count in (1, 2):
            connection = stack.enter_context(raw(server.url))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.sendall(request_of(method, path, body, "authorization: Bearer one"))
            until(lambda count=count: unread() == count, "it is not read")
        refused = server.request(method, path, body or None, token="one")
        assert (refused.status, refused.body["error"]["code"]) == (429, "too_many_waiters")
        assert "has not read yet" in refused.body["error"]["message"]
        assert server.get(f"{QUEUE}/stats", token="one").status == 200, "small answers need no room"
        assert server.request(method, path, body or None, token="other").status == 200
        held = server.get(f"{QUEUE}/stats", token="one").body
        assert held["leased"] == (12 if method == "POST" else 0), "what was not told is not held"
    until(lambda: answers.used("one") == 0, "those who left need no room")
    assert server.request(method, path, body or None, token="one").status == 200
