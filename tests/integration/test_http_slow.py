"""Very many connections: slow ones are cut off while others are served, and idle ones cost next to nothing."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.integration.faults_gear import head_of, raw, request_of
from tests.integration.process_gear import ServerProcess, many_files, say, server_process, until

pytestmark = [pytest.mark.serial, pytest.mark.slow]

QUEUE = "/v1/queues/orders"
MB = 1_000_000
SLOW, IDLE = 500, 1_000
CUT_OFF_S = 15.0
_PAUSE_S = 0.01
PATIENCE = 3  # so much longer may it take where others compute beside us


class Drip:
    """A connection that says a byte now and then."""

    def __init__(self, connection: socket.socket, begun: bytes, then: bytes) -> None:
        connection.sendall(begun)
        connection.setblocking(False)
        self.connection = connection
        self.then = then
        self.began = time.monotonic()
        self.ended: float | None = None

    def drop(self) -> None:
        try:
            if self.then:
                self.connection.send(self.then)
            while self.connection.recv(65536):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self.ended = time.monotonic() - self.began


def drips(server: ServerProcess, stack: ExitStack) -> list[Drip]:
    """Some that drip their headers, some their body, some in chunks, and some that say nothing at all."""
    kinds = [
        (b"GET /hea", b"l"),
        (head_of("POST", f"{QUEUE}/enqueue", "content-length: 5000"), b"x"),
        (head_of("POST", f"{QUEUE}/enqueue", "content-length: 500000"), b"x"),
        (head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked"), b"1\r\nx\r\n"),
        (b"", b""),
    ]
    return [Drip(stack.enter_context(raw(server.url)), *kinds[i % len(kinds)]) for i in range(SLOW)]


def latencies(server: ServerProcess, going_on: Callable[[], bool], turn: Callable[[], object]) -> list[float]:
    """How long single publishes of somebody else take."""
    connection = http.client.HTTPConnection(str(urlsplit(server.url).netloc), timeout=60)
    found = []
    while going_on():
        began = time.perf_counter()
        connection.request("POST", f"{QUEUE}/enqueue?durability=os", b"x" * 100)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 201
        found.append(time.perf_counter() - began)
        turn()
    connection.close()
    return found


def undisturbed(server: ServerProcess) -> list[float]:
    """The same for some seconds with nobody else there."""
    until_then = time.monotonic() + 4
    return latencies(server, lambda: time.monotonic() < until_then, lambda: time.sleep(_PAUSE_S))


def p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def test_five_hundred_slow_connections_are_cut_off_while_others_are_served(tmp_path: Path):
    many_files(4 * SLOW)
    with server_process(tmp_path / "data") as server, ExitStack() as stack:
        server.request("PUT", QUEUE)
        normal = undisturbed(server)
        slow = drips(server, stack)
        at = 0

        def turn() -> None:
            """Between two calls of others, some of the slow ones say their byte: each about once a second."""
            nonlocal at
            for drip in slow[at : at + 5]:
                if drip.ended is None:
                    drip.drop()
            at = (at + 5) % SLOW
            time.sleep(_PAUSE_S)

        deadline = time.monotonic() + CUT_OFF_S * PATIENCE
        beside = latencies(
            server, lambda: any(drip.ended is None for drip in slow) and time.monotonic() < deadline, turn
        )
        left = [drip for drip in slow if drip.ended is None]
        assert not left, f"{len(left)} slow connections are still there"
        normal += undisturbed(server)
        assert server.get(f"{QUEUE}/stats").body["ready"] == len(normal) + len(beside), "half a message was stored"
        until(lambda: server.get("/v1/admin/status").body["connections"] == 1, "all are gone")
    longest = max(drip.ended or 0 for drip in slow)
    say(
        f"{SLOW} slow connections: the last was cut off after {longest:.1f} s; p99 of others "
        f"{p99(beside) * 1000:.2f} ms, without them {p99(normal) * 1000:.2f} ms "
        f"(p50 {statistics.median(beside) * 1000:.2f} and {statistics.median(normal) * 1000:.2f} ms)"
    )
    assert longest < CUT_OFF_S * PATIENCE
    assert statistics.median(beside) < 5 * statistics.median(normal) + 0.02
    assert p99(beside) < 5 * p99(normal) + 0.1


def test_a_thousand_idle_long_polls_cost_little_memory_and_next_to_no_work(tmp_path: Path):
    many_files(4 * IDLE)
    config = tmp_path / "holdfast.toml"
    config.write_text(f"[server]\nmax_waiters = {2 * IDLE}\n")
    ask = request_of("POST", f"{QUEUE}/dequeue", json.dumps({"wait": 250, "lease": 600}).encode())
    with server_process(tmp_path / "data", "--config", str(config)) as server, ExitStack() as stack:
        server.request("PUT", QUEUE)
        server.get("/v1/admin/status")
        memory = server.memory_bytes()
        waiting = [stack.enter_context(raw(server.url)) for _ in range(IDLE)]
        for connection in waiting:
            connection.sendall(ask)
        until(lambda: server.get("/v1/admin/status").body["waiters"] == IDLE, "all wait")
        grown = server.memory_bytes() - memory
        seconds, cpu = 5.0, server.cpu_s()
        time.sleep(seconds)  # nothing happens, and how much that costs is the question
        worked = server.cpu_s() - cpu
        say(
            f"{IDLE} idle long polls: {grown / MB:.1f} MB, {worked / seconds:.1%} of a processor "
            f"({grown / IDLE / 1000:.1f} kB each)"
        )
        lines = b'{"text": "x"}\n' * IDLE
        stored = server.post(f"{QUEUE}/batch", lines, headers={"content-type": "application/x-ndjson"})
        assert stored.status == 201
        offsets = Counter(answered(waiting))
        assert offsets == Counter(range(IDLE)), "each of them has one message, and none has another's"
        assert server.get(f"{QUEUE}/stats").body["leased"] == IDLE
    assert grown < 100 * MB
    assert worked < 0.25 * seconds


def answered(waiting: list[socket.socket]) -> list[int]:
    """The offset that each of them was answered with."""
    found: list[int] = []
    parts: dict[socket.socket, bytes] = dict.fromkeys(waiting, b"")
    with selectors.DefaultSelector() as selector:
        for connection in waiting:
            selector.register(connection, selectors.EVENT_READ)
        deadline = time.monotonic() + 60
        while len(found) < len(waiting):
            assert time.monotonic() < deadline, f"only {len(found)} were answered"
            for key, _ in selector.select(1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                parts[connection] += connection.recv(65536)
                if parts[connection].endswith(b"]}"):
                    selector.unregister(connection)
                    (message,) = json.loads(parts[connection].partition(b"\r\n\r\n")[2])["messages"]
                    found.append(message["offset"])
    return found
