"""What goes wrong around a server: clients that vanish, a full disk, a failed one, a clock that is set."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from holdfast.server.tokens import digest_of
from holdfast.settings import BrokerSettings, TopicSettings
from tests.integration.faults_gear import (
    FaultyDisk,
    MovedClock,
    faulty_world,
    head_of,
    raw,
    request_of,
    status_of,
    vanish,
)
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import say, server_process, until

QUEUE = "/v1/queues/orders"
MB = 1_000_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", drain_ms=5_000) as found:
        assert found.request("PUT", QUEUE).status == 200
        yield found


def nobody_is_there(server: Serving) -> None:
    """All who vanished are forgotten, with all that was theirs."""
    service = server.server.service
    until(lambda: not server.server.http.connections, "a connection of somebody who vanished is closed")
    until(lambda: service.waits.waiting == 0 and len(service.windows) == 0, "places of those who vanished are free")


def taken_by_others(server: Serving, count: int) -> list[int]:
    """Take and ack so many messages, each of them once."""
    offsets: list[int] = []
    while len(offsets) < count:
        messages = server.post(f"{QUEUE}/dequeue", {"wait": 20, "count": 100, "lease": 600}).body["messages"]
        assert messages, f"{count - len(offsets)} messages do not come back"
        offsets += [message["offset"] for message in messages]
        server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"] for message in messages]})
    return sorted(offsets)


def test_clients_that_vanish_while_they_wait_take_nothing_with_them(server: Serving):
    rng = random.Random(1)
    ask = request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60, "lease": 1}')
    published = 0
    for _ in range(15):
        waiting = []
        for _ in range(6):
            with raw(server.url) as connection:
                waiting.append(connection.dup())
            waiting[-1].sendall(ask)
        rng.shuffle(waiting)
        for connection in waiting:
            if rng.random() < 0.5:
                server.post(f"{QUEUE}/enqueue", b"x")
                published += 1
            vanish(connection)
    nobody_is_there(server)
    assert taken_by_others(server, published) == list(range(published))


def test_what_is_published_after_a_waiter_has_vanished_is_for_the_next_one_at_once(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60, "lease": 600}'))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        vanish(connection)
    nobody_is_there(server)
    server.post(f"{QUEUE}/enqueue", b"x")
    (message,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
    assert message["attempt"] == 1


def test_clients_that_vanish_in_the_middle_of_a_stream_take_nothing_with_them(server: Serving):
    for _ in range(60):
        server.post(f"{QUEUE}/enqueue", b"x" * 2000)
    for size in (1, 100, 3000, 20_000):
        with raw(server.url) as connection:
            connection.sendall(request_of("POST", f"{QUEUE}/subscribe", b'{"prefetch": 10, "lease": 1}'))
            while size > 0:
                size -= len(connection.recv(size))
            vanish(connection)
    nobody_is_there(server)
    assert taken_by_others(server, 60) == list(range(60))


def test_what_a_stream_may_not_send_any_more_is_ready_for_others_at_once(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    entries = [{"name": name, "sha256": digest_of(name), "role": "admin"} for name in ("ops", "leaver")]
    tokens.write_text(json.dumps({"tokens": entries}))
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        server.request("PUT", QUEUE, token="ops")
        stream = server.connection()
        body = json.dumps({"lease": 600, "heartbeat": 60})
        stream.request("POST", f"{QUEUE}/subscribe", body, {"authorization": "Bearer leaver"})
        answer = stream.getresponse()
        assert answer.readline() == b"{}\n"
        tokens.write_text(json.dumps({"tokens": entries[:1]}))
        until(lambda: server.get(f"{QUEUE}/stats", token="leaver").status == 401, "the token is taken back")
        server.post(f"{QUEUE}/enqueue", b"x", token="ops")
        assert json.loads(answer.readline())["error"]["code"] == "unauthenticated"
        until(lambda: server.get(f"{QUEUE}/stats", token="ops").body["ready"] == 1, "it is ready again")
        stream.close()


@pytest.mark.parametrize("size", [1000, 300_000, 3 * MB])
@pytest.mark.parametrize("way", ["raw", "chunked", "form", "batch"])
def test_an_upload_whose_client_vanishes_stores_nothing(server: Serving, tmp_path: Path, way: str, size: int):
    server.post(f"{QUEUE}/enqueue", b"first")
    names = sorted(str(path) for path in tmp_path.rglob("*"))
    body = b"x" * size
    if way == "chunked":
        content = b"%x\r\n" % size + body + b"\r\n0\r\n\r\n"
        head = head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked")
    else:
        kind = "application/octet-stream"
        content, path = body, f"{QUEUE}/enqueue"
        if way == "form":
            kind = "multipart/form-data; boundary=edge"
            part = b'content-disposition: form-data; name="payload"\r\n\r\n'
            content = b"--edge\r\n" + part + body + b"\r\n--edge--\r\n"
        elif way == "batch":
            kind, path = "application/x-ndjson", f"{QUEUE}/batch"
            content = b'{"text": "%b"}\n' % (b"x" * 100) * (size // 112)
        head = head_of("POST", path, f"content-length: {len(content)}", f"content-type: {kind}")
    for share in (0.0, 0.5, 1.0):
        with raw(server.url) as connection:
            connection.sendall(head + content[: int((len(content) - 2) * share)])
            vanish(connection)
    nobody_is_there(server)
    assert server.get(f"{QUEUE}/stats").body["ready"] == 1
    assert sorted(str(path) for path in tmp_path.rglob("*")) == names, "something half stored is left"


@pytest.mark.parametrize(
    ("size", "count", "accept"),
    [(10 * MB, 1, "application/octet-stream"), (MB // 2, 40, "application/json"), (MB // 2, 40, "application/msgpack")],
)
def test_a_download_whose_client_vanishes_is_ready_for_the_next_one_at_once(
    server: Serving, size: int, count: int, accept: str
):
    for _ in range(count):
        assert server.post(f"{QUEUE}/enqueue", os.urandom(size)).status == 201
    with raw(server.url) as connection:
        ask = json.dumps({"lease": 600, "count": count}).encode()
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", ask, f"accept: {accept}"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        vanish(connection)
    nobody_is_there(server)
    until(lambda: server.get(f"{QUEUE}/stats").body["ready"] == count, "all is ready again")
    messages = server.post(f"{QUEUE}/dequeue", {"count": count}).body["messages"]
    assert [message["attempt"] for message in messages] == [1] * count


@pytest.mark.slow
@pytest.mark.serial
def test_no_body_makes_the_server_take_much_more_memory_than_its_limit(tmp_path: Path):
    config = tmp_path / "holdfast.toml"
    config.write_text("[server]\nmax_request_bytes = 1_000_000\n")
    with server_process(tmp_path / "data", "--config", str(config)) as server:
        server.request("PUT", QUEUE)
        server.post(f"{QUEUE}/enqueue", b"x" * 900_000)
        before = server.memory_bytes(most=True)
        with raw(server.url) as connection:
            connection.sendall(head_of("POST", f"{QUEUE}/enqueue", f"content-length: {100 * MB}"))
            _send_until_refused(connection, b"x" * 100_000)
            assert status_of(connection) == 413
        with raw(server.url) as connection:
            connection.sendall(head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked"))
            _send_until_refused(connection, b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
            assert status_of(connection) in (413, 0)  # it may be gone before it has said so to one who goes on sending
        after_bodies = server.memory_bytes(most=True)
        zeros = b"\0" * (300 * MB)
        for encoding, packed in (("gzip", gzip.compress(zeros, 1)), ("zstd", zstandard.compress(zeros))):
            for path, kind in ((f"{QUEUE}/enqueue", "application/octet-stream"), (f"{QUEUE}/ack", "application/json")):
                headers = {"content-encoding": encoding, "content-type": kind}
                answer = server.post(path, packed[: MB - 1], headers=headers)
                assert answer.status in (400, 413), (encoding, path)
        after_bombs = server.memory_bytes(most=True)
        assert server.get(f"{QUEUE}/stats").body["ready"] == 1
    say(
        f"100 MB bodies against a limit of 1 MB: {(after_bodies - before) / MB:.1f} MB more at most; "
        f"bodies that unpack to 300 MB: {(after_bombs - after_bodies) / MB:.1f} MB more"
    )
    assert after_bodies - before < 20 * MB
    assert after_bombs - after_bodies < 100 * MB


def _send_until_refused(connection: object, piece: bytes) -> None:
    try:
        for _ in range(1000):
            connection.sendall(piece)  # type: ignore[attr-defined]
    except OSError:
        return


SMALL = TopicSettings(segment_bytes=256 * 1024, min_free_bytes=1024)


def test_a_full_disk_refuses_messages_and_nothing_else(tmp_path: Path):
    disk = FaultyDisk()
    with serving(tmp_path / "data", world=faulty_world(disk), broker=BrokerSettings(topic=SMALL)) as server:
        server.request("PUT", QUEUE)
        for _ in range(20):
            assert server.post(f"{QUEUE}/enqueue", b"x" * 50_000).status == 201
        disk.full = True
        stored, answer = _published_until_refused(server)
        assert (answer.status, answer.code) == (507, "disk_full")
        assert answer.body["error"]["retryable"]
        assert int(answer.headers["retry-after"]) >= 1
        assert server.post("/v1/topics/orders/messages", {"messages": [{"text": "x" * 50_000}]}).status == 507
        assert server.get("/readyz").status == 200, "it still serves all who take and look"
        assert server.get(f"{QUEUE}/peek").status == 200
        messages = server.post(f"{QUEUE}/dequeue", {"count": 10}).body["messages"]
        receipts = [message["receipt"] for message in messages]
        assert server.post(f"{QUEUE}/ack", {"receipts": receipts[:8]}).body == {"settled": 8}
        assert server.post(f"{QUEUE}/nack", {"receipts": receipts[8:], "delay": 0}).status == 200
        assert server.get(f"{QUEUE}/stats").body["ready"] == 20 + stored - 8
        disk.full = False
        assert server.post(f"{QUEUE}/enqueue", b"x" * 50_000).status == 201


def _published_until_refused(server: Serving):
    for stored in range(1000):
        answer = server.post(f"{QUEUE}/enqueue", b"x" * 50_000)
        if answer.status != 201:
            return stored, answer
    raise AssertionError("the disk is never full")


@pytest.mark.slow
def test_a_disk_that_is_really_full_is_survived(tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small disk")
    config = tmp_path / "holdfast.toml"
    config.write_text('[storage]\nsegment = "1MiB"\nmin_free_bytes = 2_000_000\n')
    try:
        with server_process(small / "data", "--config", str(config)) as server:
            server.request("PUT", QUEUE)
            stored, answer = _published_until_refused(server)
            assert (answer.status, answer.code) == (507, "disk_full")
            assert stored > 100
            while messages := server.post(f"{QUEUE}/dequeue", {"count": 50}).body["messages"]:
                receipts = [message["receipt"] for message in messages]
                assert server.post(f"{QUEUE}/ack", {"receipts": receipts}).status == 200
            filler = small / "filler"
            with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)  # somebody else takes the rest: now not a byte is left
            assert server.post(f"{QUEUE}/enqueue", b"x" * 50_000).status == 507
            assert server.get(f"{QUEUE}/stats").status == 200
            assert server.get("/healthz").status == 200
            filler.unlink(missing_ok=True)
            assert server.post(f"{QUEUE}/compact", b"").status == 200
            until(lambda: server.post(f"{QUEUE}/enqueue", b"x" * 50_000).status == 201, "there is room again")
            server.tell_to_go()
            assert server.exit_code() == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_was_not_synced_is_never_acknowledged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    disk, folder = FaultyDisk(), tmp_path / "data"
    with serving(folder, world=faulty_world(disk)) as server:
        server.request("PUT", QUEUE)
        server.request("PUT", "/v1/queues/other")
        assert server.post(f"{QUEUE}/enqueue", b"safe").status == 201
        assert server.get("/readyz").status == 200
        disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
        failed = server.post(f"{QUEUE}/enqueue", b"not safe")
        assert (failed.status, failed.code) == (503, "disk_failed")
        again = server.post(f"{QUEUE}/enqueue", b"not safe either")
        assert (again.status, again.code) == (503, "disk_failed")
        assert any(record.levelname == "ERROR" and record.message == "log stopped" for record in caplog.records)
        ready = server.get("/readyz")
        assert (ready.status, ready.code) == (503, "unavailable")
        assert "orders" in ready.body["error"]["message"]
        assert server.get("/healthz").status == 200
        assert server.get(f"{QUEUE}/peek").body["messages"][0]["body"] == "c2FmZQ=="
        assert server.post("/v1/queues/other/enqueue", b"x").status == 201, "other queues go on"
    with serving(folder) as server:
        assert server.get("/readyz").status == 200
        assert server.post(f"{QUEUE}/enqueue", b"on it goes").status == 201
        assert server.get(f"{QUEUE}/peek").body["messages"][0]["body"] == "c2FmZQ=="


HOUR_S = 3600


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def moved(tmp_path: Path, clock: MovedClock) -> Iterator[Serving]:
    """A server whose clock is moved."""
    with serving(tmp_path / "data", world=faulty_world(clock=clock)) as found:
        found.request("PUT", QUEUE)
        yield found


def look(server: Serving) -> None:
    """What the server does once a minute: look at everything, for the clock may have been set."""
    server.server.port.engine.tick()


def test_a_clock_set_forward_releases_what_is_delayed_and_ends_no_lease(moved: Serving, clock: MovedClock):
    moved.post(f"{QUEUE}/enqueue", b"held")
    (held,) = moved.post(f"{QUEUE}/dequeue", {"lease": 60}).body["messages"]
    moved.post(f"{QUEUE}/enqueue", b"later", query={"delay": HOUR_S - 60})
    found: list[object] = []

    def wait() -> None:
        found.extend(moved.post(f"{QUEUE}/dequeue", {"wait": 30, "lease": 60}).body["messages"])

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: moved.server.service.waits.waiting == 1, "it waits")
    assert not found
    clock.moved_s = HOUR_S
    look(moved)
    waiting.join(30)
    assert [message["body"] for message in found] == ["bGF0ZXI="]
    assert moved.get(f"{QUEUE}/stats").body["leased"] == 2
    assert moved.post(f"{QUEUE}/ack", {"receipts": [held["receipt"]]}).body == {"settled": 1}
    assert moved.get("/readyz").status == 200


def test_a_clock_set_back_keeps_what_is_delayed_and_prolongs_no_lease(moved: Serving, clock: MovedClock):
    moved.post(f"{QUEUE}/enqueue", b"held")
    (held,) = moved.post(f"{QUEUE}/dequeue", {"lease": 1}).body["messages"]
    moved.post(f"{QUEUE}/enqueue", b"later", query={"delay": 1})
    clock.moved_s = -HOUR_S
    (again,) = moved.post(f"{QUEUE}/dequeue", {"wait": 20, "lease": 60}).body["messages"]
    assert (again["body"], again["attempt"]) == (held["body"], 2), "its lease ended in time, the delay did not"
    assert moved.post(f"{QUEUE}/dequeue", {"wait": 1}).body["messages"] == []
    assert moved.get(f"{QUEUE}/stats").body["delayed"] == 1
    clock.moved_s = 0
    look(moved)
    (later,) = moved.post(f"{QUEUE}/dequeue", {"wait": 20}).body["messages"]
    assert later["body"] == "bGF0ZXI="
