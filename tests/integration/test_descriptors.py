"""A server that may not open more files: it says so at the start, refuses a call at worst, and goes on."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.faults_gear import raw
from tests.integration.process_gear import ServerProcess, many_files, refused_start, server_process, until

pytestmark = pytest.mark.slow

BODY = bytes(6_000)  # no two of them fit into one segment
FEW = 1_024


class KeptConnection:
    """Calls on one connection, which is there before everything runs out; on another where it was closed at rest."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection: http.client.HTTPConnection = server.connection()
        self._connection.connect()

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        try:
            self._connection.request(method, path, body)
            answer = self._connection.getresponse()
        except (ConnectionError, http.client.HTTPException):
            self._connection.close()
            self._connection.request(method, path, body)
            answer = self._connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None

    def publish(self, count: int) -> tuple[int, list[dict[str, Any]]]:
        """How many messages were taken, each into a segment of its own, and the errors of the others."""
        answers = [self.call("POST", "/v1/queues/orders/enqueue", BODY) for _ in range(count)]
        errors = [body["error"] for status, body in answers if status != 201]
        return count - len(errors), errors

    def close(self) -> None:
        self._connection.close()


@contextmanager
def small_server(folder: Path, *arguments: str, **more: Any) -> Iterator[tuple[ServerProcess, KeptConnection]]:
    """A server with a queue of small segments."""
    with server_process(folder, *arguments, **more) as server:
        small = {"name": "orders", "settings": {"segment_bytes": 8_192, "min_free_bytes": 0}}
        assert server.post("/v1/topics", small).status == 201
        with closing(KeptConnection(server)) as kept:
            yield server, kept


def check_refusals(errors: list[dict[str, Any]]) -> None:
    for error in errors:
        assert (error["code"], error["retryable"]) == ("unavailable", True)
        assert "LimitNOFILE" in error["message"]


def stored(server: ServerProcess) -> int:
    partitions = server.get("/v1/topics/orders").body["partitions"]
    return sum(each["end"] - each["start"] for each in partitions)


def test_idle_connections_without_a_token_never_stop_a_topic(tmp_path: Path):
    many_files(3 * FEW)
    with small_server(tmp_path / "data", descriptors=FEW) as (server, kept), ExitStack() as idle:
        taken, errors = kept.publish(3)
        assert (taken, errors) == (3, [])
        for _ in range(1_100):
            idle.enter_context(raw(server.url))
        more, errors = kept.publish(20)
        check_refusals(errors)
        idle.close()
        until(lambda: kept.call("GET", "/readyz")[0] == 200, "it is ready")
        last, errors = kept.publish(5)
        assert (last, errors) == (5, [])
        assert stored(server) == taken + more + last
        assert "Traceback" not in server.log.read_text()


def test_a_server_without_a_descriptor_refuses_calls_and_goes_on_when_there_are_some_again(tmp_path: Path):
    with small_server(tmp_path / "data") as (server, kept):
        kept.publish(3)
        with no_more_files(server):
            taken, errors = kept.publish(5)
            assert (taken, len(errors)) == (0, 5)
            check_refusals(errors)
            assert kept.call("GET", "/healthz")[0] == 200
            assert kept.call("GET", "/readyz")[0] == 200
        taken, errors = kept.publish(5)
        assert (taken, errors) == (5, [])
        assert kept.call("GET", "/readyz")[0] == 200
        assert stored(server) == 8
        server.kill()
        server.start()
        assert stored(server) == 8


def test_a_server_that_cannot_accept_neither_spins_nor_fills_its_log(tmp_path: Path):
    with small_server(tmp_path / "data") as (server, kept), ExitStack() as waiting:
        kept.call("GET", "/healthz")
        with no_more_files(server):
            before_s, before_bytes = server.cpu_s(), server.log.stat().st_size
            address = ("127.0.0.1", server.port)
            callers = [waiting.enter_context(socket.create_connection(address, timeout=1)) for _ in range(20)]
            for caller in callers:
                caller.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            for caller in callers[:2]:
                with pytest.raises((TimeoutError, ConnectionError)):  # sent away, or left to wait
                    assert caller.recv(100) == b""
                    raise ConnectionError
            assert kept.call("GET", "/healthz")[0] == 200
            assert server.cpu_s() - before_s < 1.0
            assert server.log.stat().st_size - before_bytes < 10_000
            assert "Traceback" not in server.log.read_text()
        waiting.close()
        assert server.get("/healthz").status == 200


@contextmanager
def no_more_files(server: ServerProcess) -> Iterator[None]:
    """Whatever the server opens meanwhile is one too many."""
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    numbers = [int(name) for name in os.listdir(f"/proc/{server.pid}/fd")]
    free = min(set(range(max(numbers) + 2)) - set(numbers))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_do_not_fit_are_lowered_and_the_server_says_so(tmp_path: Path):
    with server_process(tmp_path / "data", descriptors=FEW) as server:
        status = server.get("/v1/admin/status").body
        assert status["max_descriptors"] == FEW
        assert 64 <= status["max_connections"] < FEW
        assert 0 < status["descriptors"] < FEW
        settings = {each["name"]: each for each in server.get("/v1/settings").body["settings"]}
        shown = settings["server.max_connections"]
        assert (shown["value"], shown["kind"]) == (status["max_connections"], "limit")
        assert shown["origin"] == "default, lowered to fit 1,024 file descriptors"
        assert settings["broker.open_files"]["value"] < 600
        assert server.log.read_text().count("limits lowered") == 1


def test_connections_that_were_set_and_do_not_fit_are_refused_with_what_to_set(tmp_path: Path):
    config = tmp_path / "holdfast.toml"
    config.write_text("[server]\nmax_connections = 5000\n")
    code, said = refused_start(str(tmp_path / "data"), "--port", "0", "--config", str(config), descriptors=FEW)
    assert code == 2
    assert said.startswith("error: this process may have 1,024 files open, which is too few: 5,000 connections")
    assert "LimitNOFILE=" in said
    assert said.count("\n") == 1
    with server_process(tmp_path / "data", "--config", str(config), descriptors=16_384) as server:
        assert server.get("/v1/admin/status").body["max_connections"] == 5_000


def test_the_soft_limit_is_raised_before_anything_is_lowered(tmp_path: Path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_384:
        pytest.skip("this machine allows no more files")
    server = ServerProcess(tmp_path / "data")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    here = len(os.listdir("/proc/self/fd"))  # this process has to live with the limit, too, until the server runs
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 256, hard))
    try:
        server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        status = server.get("/v1/admin/status").body
        assert (status["max_connections"], status["max_descriptors"]) == (10_000, hard)
    finally:
        server.end()
