"""Large bodies over HTTP: they go through the server piece by piece, both ways."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import holdfast
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import server_process

QUEUE = "/v1/queues/big"
MIB = 1 << 20
PIECE = bytes(range(256)) * 4096  # 1 MiB


def pieces(count: int) -> Iterator[bytes]:
    for i in range(count):
        yield i.to_bytes(8, "big") + PIECE[8:]


def digest(count: int) -> str:
    found = hashlib.sha256()
    for piece in pieces(count):
        found.update(piece)
    return found.hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, max_request_bytes=200 * MIB) as found:
        found.request("PUT", QUEUE, {"settings": {"max_message_bytes": 150 * MIB, "backoff_ms": 0}})
        yield found


def upload(connection: HTTPConnection, path: str, count: int, **headers: str) -> dict[str, object]:
    connection.request("POST", path, pieces(count), {"content-length": str(count * MIB), **headers})
    with connection.getresponse() as response:
        assert response.status == 201, response.read()
        found: dict[str, object] = json.loads(response.read())
        return found


def download(connection: HTTPConnection, method: str, path: str) -> tuple[dict[str, str], str]:
    connection.request(method, path, headers={"accept": "application/octet-stream"})
    with connection.getresponse() as response:
        assert response.status == 200, response.read()
        found = hashlib.sha256()
        while piece := response.read(MIB):
            found.update(piece)
        return {name.lower(): value for name, value in response.getheaders()}, found.hexdigest()


def test_a_large_body_comes_out_as_it_went_in_by_every_way(server: Serving):
    connection = server.connection()
    upload(connection, f"{QUEUE}/enqueue?key=k", 20)
    headers, found = download(connection, "POST", f"{QUEUE}/dequeue")
    assert found == digest(20)
    message = json.loads(headers["holdfast-message"])
    assert (message["size"], message["key"]) == (20 * MIB, "k")
    receipt = headers["holdfast-receipt"]
    for path in (
        f"{QUEUE}/payload?receipt={receipt.replace('@', '%40')}",
        f"{QUEUE}/messages/big-0-0/payload",
        "/v1/topics/big/partitions/0/payload?offset=0",
    ):
        assert download(connection, "GET", path)[1] == digest(20), path
    connection.close()
    (listed,) = server.get(f"{QUEUE}/messages", query={"phase": "leased"}).body["messages"]
    assert (listed["size"], listed["omitted"], "body" in listed) == (20 * MIB, True, False)
    server.post(f"{QUEUE}/reject", {"receipts": [receipt]})
    connection = server.connection()
    assert download(connection, "GET", f"{QUEUE}/messages/big.dlq-0-0/payload")[1] == digest(20)
    connection.close()


def test_a_large_form_is_stored_as_it_comes(server: Serving):
    connection = server.connection()
    start = (
        b'--b\r\ncontent-disposition: form-data; name="options"\r\n\r\n{"key": "k"}'
        b'\r\n--b\r\ncontent-disposition: form-data; name="payload"\r\n\r\n'
    )
    body = start + b"".join(pieces(5)) + b"\r\n--b--\r\n"
    connection.request("POST", f"{QUEUE}/enqueue", body, {"content-type": "multipart/form-data; boundary=b"})
    with connection.getresponse() as response:
        assert response.status == 201
        response.read()
    assert download(connection, "POST", f"{QUEUE}/dequeue")[1] == digest(5)
    connection.close()


@pytest.mark.parametrize("body", [b"--b\r\n", b'--b\r\ncontent-disposition: form-data; name="payload"\r\n\r\nabc'])
def test_a_form_that_ends_too_early_stores_nothing(server: Serving, body: bytes):
    answer = server.post(f"{QUEUE}/enqueue", body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0


def test_a_message_beyond_the_queues_limit_is_refused(server: Serving):
    connection = server.connection()
    connection.request("POST", f"{QUEUE}/enqueue", pieces(160), {"content-length": str(160 * MIB)})
    try:
        with connection.getresponse() as response:
            assert response.status == 413
    except ConnectionError:
        pass  # it was sent away while it still sent
    connection.close()
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0


def test_a_client_that_goes_away_while_it_sends_leaves_nothing(server: Serving, tmp_path: Path):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as gone:
        gone.sendall(b"POST %s/enqueue HTTP/1.1\r\nhost: localhost\r\n" % QUEUE.encode())
        gone.sendall(b"content-length: %d\r\n\r\n" % (100 * MIB))
        for piece in pieces(30):
            gone.sendall(piece)
    deadline = time.monotonic() + 30
    while server.server.http.connections or list(tmp_path.rglob("spool-*")):
        assert time.monotonic() < deadline, "the rest of it stays"
        time.sleep(0.02)
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0


def test_a_client_that_goes_away_while_it_receives_gives_the_message_back(server: Serving):
    connection = server.connection()
    upload(connection, f"{QUEUE}/enqueue", 50)
    connection.close()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as gone:
        gone.sendall(
            b"POST %s/dequeue HTTP/1.1\r\nhost: localhost\r\naccept: application/octet-stream\r\n"
            b"content-length: 0\r\n\r\n" % QUEUE.encode()
        )
        assert gone.recv(1000)
    deadline = time.monotonic() + 30
    while not server.get(f"{QUEUE}/stats").body["ready"]:
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.02)
    (again,) = server.post(f"{QUEUE}/dequeue").body["messages"]
    assert again["attempt"] == 1


@contextmanager
def process(folder: Path, settings: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "holdfast", "serve", str(folder), "--port", "0", "--config", str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://[^ ,]+", running.stdout.readline())
            assert found is not None
            yield running, found[0].strip()
        finally:
            running.terminate()


def anonymous_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.slow
def test_the_server_holds_no_large_body_in_memory(tmp_path: Path):
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[server]\nmax_request_bytes = {400 * MIB}\n[storage]\nmax_message_bytes = {400 * MIB}\n")
    with process(tmp_path / "data", settings) as (running, url):
        connection = HTTPConnection(str(urlsplit(url).netloc), timeout=120)
        upload(connection, f"{QUEUE}/enqueue?create=true", 2)
        download(connection, "POST", f"{QUEUE}/dequeue")
        before = anonymous_kib(running.pid)
        upload(connection, f"{QUEUE}/enqueue", 300)
        _, found = download(connection, "POST", f"{QUEUE}/dequeue")
        assert found == digest(300)
        assert anonymous_kib(running.pid) - before < 50_000
        connection.close()


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The most memory of its own that a process had meanwhile, in KiB, above what it has now."""
    before, most, over = anonymous_kib(pid), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], anonymous_kib(pid) - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield most
    finally:
        over.set()
        watching.join()


@pytest.mark.slow
def test_one_who_looks_at_many_messages_does_not_make_the_server_hold_all_of_them(tmp_path: Path):
    """Each is small enough to be held, and 300 of them are not."""
    with server_process(tmp_path / "data") as server, holdfast.connect(server.url) as broker:
        broker.create_topic("big")
        queue = broker.queue("big")
        for number in range(30):
            queue.put_many([bytes([number]) * 900_000] * 10)
        member = broker.consumer(["big"], group="readers", start="earliest")
        for look in (
            lambda: queue.peek(300),
            lambda: queue.messages(limit=300),
            lambda: broker.read("big", limit=300),
            lambda: member.poll(5, max_records=300),
        ):
            with watched(server.pid) as most:
                found = list(look())
            assert most[0] < 150_000, f"{most[0]} KiB"
            assert 10 <= len(found) <= 300
            assert [message.offset for message in found] == list(range(len(found)))
            del found
        offset = 0
        while some := list(broker.read("big", offset=offset, limit=300)):
            assert [message.offset for message in some] == list(range(offset, offset + len(some)))
            offset += len(some)
        assert offset == 300
        member.close()
