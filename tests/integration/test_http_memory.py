"""What callers can make a server hold in memory: no more than their share, and nothing when they are gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.faults_gear import head_of, raw, status_of
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
