"""HTTP itself, byte by byte over real sockets: what a client may do to a connection, and what it may not."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zstandard

from tests.integration.http_gear import Serving, serving

_WAIT_S = 30


@contextmanager
def raw(server: Serving) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=_WAIT_S) as connection:
        yield connection


def answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """So many answers that say their length."""
    found, data = [], b""
    while len(found) < count:
        while b"\r\n\r\n" in data:
            head, _, rest = data.partition(b"\r\n\r\n")
            status = int(head[9:12])
            sizes = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            size = sizes[0] if sizes else 0
            if len(rest) < size:
                break
            found.append((status, rest[:size]))
            data = rest[size:]
        if len(found) < count:
            more = connection.recv(65536)
            if not more:
                break
            data += more
    return found


def ended(connection: socket.socket) -> bool:
    """Whether the server closes the connection, in any way."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(
        tmp_path,
        header_timeout_ms=300,
        body_timeout_ms=300,
        idle_timeout_ms=600,
        max_header_bytes=4096,
        max_request_bytes=1_000_000,
    ) as found:
        assert found.request("PUT", "/v1/queues/orders").status == 200
        yield found


def test_requests_that_are_sent_at_once_are_answered_in_their_order(server: Serving):
    one = b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n%02d"
    with raw(server) as connection:
        connection.sendall(b"".join(one % i for i in range(30)))
        found = answers(connection, 30)
    assert [json.loads(body)["offset"] for _, body in found] == list(range(30))


def test_a_request_may_come_byte_by_byte(server: Serving):
    request = b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc"
    with raw(server) as connection:
        for i in range(len(request)):
            connection.sendall(request[i : i + 1])
        ((status, body),) = answers(connection, 1)
    assert status == 201
    assert server.get("/v1/queues/orders/peek").body["messages"][0]["body"] == "YWJj"
    assert json.loads(body)["offset"] == 0


def test_a_body_in_chunks_is_taken_whole(server: Serving):
    with raw(server) as connection:
        connection.sendall(
            b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        ((status, _),) = answers(connection, 1)
    assert status == 201
    assert server.get("/v1/queues/orders/peek").body["messages"][0]["body"] == "YWJjZGU="


def test_a_connection_goes_on_after_a_large_body(server: Serving):
    one = b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n"
    with raw(server) as connection:
        for i in range(5):
            connection.sendall(one + bytes([i]) * 900_000)
            assert answers(connection, 1)[0][0] == 201


def test_what_is_no_http_is_refused_and_the_connection_ends(server: Serving):
    with raw(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        ((status, body),) = answers(connection, 1)
        assert status == 400
        assert json.loads(body)["error"]["code"] == "invalid_request"
        assert ended(connection)


def test_two_lengths_are_refused(server: Serving):
    with raw(server) as connection:
        connection.sendall(
            b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd"
        )
        assert answers(connection, 1)[0][0] == 400
    assert server.get("/v1/queues/orders/stats").body["ready"] == 0


@pytest.mark.parametrize("filler", [b"x-a: " + b"a" * 100 + b"\r\n", b"x-a: " + b"a" * 10_000])
def test_headers_beyond_the_limit_are_refused(server: Serving, filler: bytes):
    with raw(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + filler * (8192 // len(filler) + 1))
        assert answers(connection, 1)[0][0] == 431
        assert ended(connection)


def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_is_sent(server: Serving):
    with raw(server) as connection:
        connection.sendall(
            b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n"
        )
        ((status, body),) = answers(connection, 1)
    assert status == 413
    assert "1000000" in json.loads(body)["error"]["message"]


def test_a_body_in_chunks_that_grows_too_large_is_refused_on_the_way(server: Serving):
    with raw(server) as connection:
        connection.sendall(
            b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"

        def send() -> None:
            try:
                for _ in range(1600):  # 100 MB
                    connection.sendall(piece)
            except OSError:
                pass

        sending = threading.Thread(target=send)
        sending.start()
        found = answers(connection, 1)
        sending.join(_WAIT_S)
    assert [status for status, _ in found] == [413]
    assert server.get("/v1/queues/orders/stats").body["ready"] == 0


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_that_unpacks_beyond_the_limit_is_refused(server: Serving, encoding: str):
    bomb = b"\0" * 50_000_000
    packed = gzip.compress(bomb) if encoding == "gzip" else zstandard.compress(bomb)
    assert len(packed) < 1_000_000
    answer = server.post("/v1/queues/orders/enqueue", packed, headers={"content-encoding": encoding})
    assert (answer.status, answer.code) == (413, "message_too_large")
    assert server.get("/v1/queues/orders/stats").body["ready"] == 0


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_compressed_body_is_stored_unpacked(server: Serving, encoding: str):
    content = b"abc" * 10_000
    packed = gzip.compress(content) if encoding == "gzip" else zstandard.compress(content)
    assert server.post("/v1/queues/orders/enqueue", packed, headers={"content-encoding": encoding}).status == 201
    assert server.get("/v1/queues/orders/peek").body["messages"][0]["size"] == 30_000


def test_an_unknown_content_encoding_and_a_broken_one_are_the_callers_mistake(server: Serving):
    assert server.post("/v1/queues/orders/enqueue", b"x", headers={"content-encoding": "br"}).status == 415
    assert server.post("/v1/queues/orders/enqueue", b"x", headers={"content-encoding": "gzip"}).status == 400
    assert server.post("/v1/queues/orders/enqueue", b"x", headers={"content-encoding": "zstd"}).status == 400
    assert server.get("/v1/queues/orders/stats").body["ready"] == 0


def test_a_client_that_waits_for_leave_to_send_is_given_it(server: Serving):
    with raw(server) as connection:
        connection.sendall(
            b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 3\r\nexpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"abc")
        assert answers(connection, 1)[0][0] == 201


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /healthz HTT",
        b"POST /v1/queues/orders/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc",
    ],
)
def test_a_client_that_does_not_go_on_is_cut_off(server: Serving, begun: bytes):
    with raw(server) as connection:
        connection.sendall(begun)
        found = answers(connection, 1)
        assert [status for status, _ in found] == ([408] if begun else [])
        assert ended(connection)
    assert server.get("/healthz").status == 200


def test_a_client_that_drips_its_headers_is_cut_off_all_the_same(server: Serving):
    with raw(server) as connection:
        began = time.monotonic()
        try:
            for _ in range(1000):
                connection.sendall(b"G")
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - began < 15


def test_a_connection_that_rests_is_closed_after_a_while(server: Serving):
    with raw(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answers(connection, 1)[0][0] == 200
        assert ended(connection)


def test_head_is_answered_like_get_without_a_body(server: Serving):
    answer = server.request("HEAD", "/healthz")
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "18", b"")


def test_a_method_that_is_not_possible_says_which_ones_are(server: Serving):
    answer = server.request("DELETE", "/healthz")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_an_address_that_is_not_there_says_so(server: Serving):
    for path in ("/", "/v1", "/v1/queues/", "/v1/queues//ack", "/nix", "/v1/queues/orders/ack/more"):
        assert server.get(path).status == 404, path


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "%2e%2e", ".hidden", "a%00b", "a%2Fb", "%ff", "a b"])
def test_no_name_becomes_a_path(server: Serving, tmp_path: Path, name: str):
    before = sorted(path.name for path in tmp_path.iterdir())
    answer = server.request("PUT", f"/v1/queues/{name.replace(' ', '%20')}")
    assert answer.status in (400, 404)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_correlation_id_comes_back_or_is_made(server: Serving):
    assert server.get("/healthz", headers={"x-correlation-id": "mine-1"}).headers["x-correlation-id"] == "mine-1"
    made = server.get("/healthz", headers={"x-correlation-id": "a\tb"}).headers["x-correlation-id"]
    assert made != "a\tb"
    assert made


def test_the_trace_goes_on_in_the_answer(server: Serving):
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = server.get("/healthz", headers={"traceparent": given}).headers["traceparent"]
    assert answer.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")
    assert answer != given
    assert "traceparent" not in server.get("/healthz", headers={"traceparent": "nonsense"}).headers


def test_more_connections_than_allowed_are_told_to_come_back(tmp_path: Path):
    poll = b"POST /v1/queues/orders/dequeue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n"
    with serving(tmp_path, max_connections=2) as few:
        assert few.request("PUT", "/v1/queues/orders").status == 200
        with raw(few) as first, raw(few) as second:
            for connection in (first, second):  # at work: those that rest would make room
                connection.sendall(poll + b'{"wait": 60}')
            deadline = time.monotonic() + _WAIT_S
            while few.server.service.waits.waiting < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with raw(few) as third:
                third.sendall(poll + b'{"wait": 60}')
                assert answers(third, 1)[0][0] == 503
                assert ended(third)


def test_a_reader_that_stops_reading_is_cut_off(tmp_path: Path):
    with serving(tmp_path, write_timeout_ms=300) as found:
        found.request("PUT", "/v1/queues/orders")
        for _ in range(20):
            found.post("/v1/queues/orders/enqueue", b"x" * 1_000_000)
        with raw(found) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /v1/queues/orders/messages HTTP/1.1\r\nhost: localhost\r\n\r\n")
            deadline = time.monotonic() + _WAIT_S
            while found.server.http.connections and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not found.server.http.connections
