"""`holdfast ui`: the console of a folder that nobody owns, and of one that somebody does."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import holdfast
from tests.integration.http_gear import serving

COMMAND = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "ui"]

pytestmark = pytest.mark.slow


@contextmanager
def console(folder: Path | str, *options: str) -> Iterator[str]:
    """The command, running; ends in order."""
    command = [*COMMAND, str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        line = running.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/ui", line)
        try:
            assert found is not None, line + running.stderr.read()
            yield found[0].removesuffix("/ui")
        finally:
            running.send_signal(signal.SIGTERM)
            _, errors = running.communicate(timeout=30)
        assert (running.returncode, "Traceback" in errors) == (0, False), errors


def asked(
    url: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=30)
    try:
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_folder_that_nobody_owns_is_shown_and_others_are_let_in(tmp_path: Path):
    with holdfast.open(tmp_path / "orders") as queue:
        queue.put(b"first")
    with console(tmp_path / "orders") as url:
        status, content = asked(url, "GET", "/ui/queues/orders")
        assert (status, b"orders-0-0" in content) == (200, True)
        with holdfast.open(tmp_path / "orders") as beside:
            beside.put(b"second")
        assert b"orders-0-1" in asked(url, "GET", "/ui/queues/orders")[1]
    with holdfast.open(tmp_path / "orders") as queue:
        assert [message.raw for message in queue.peek(9)] == [b"first", b"second"]


def test_a_folder_that_somebody_owns_is_shown_through_its_owner(tmp_path: Path):
    with holdfast.open(tmp_path / "orders") as queue:
        queue.put(b"first")
        with console(tmp_path / "orders") as url:
            status, content = asked(url, "GET", "/ui/queues/orders")
            assert (status, b"orders-0-0" in content) == (200, True)
            assert asked(url, "GET", "/ui/static/console.js")[0] == 200
            assert asked(url, "HEAD", "/ui") == (200, b"")
            status, _ = asked(url, "POST", "/v1/queues/orders/batch", {"messages": [{"text": "second"}]})
            assert status == 201
            connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=30)
            connection.request("GET", "/v1/queues/orders/watch")
            events = connection.getresponse()
            assert events.readline() == b"event: stats\n"
            queue.put(b"third")
            assert any(events.readline() == b"event: message\n" for _ in range(20))
            connection.close()
            for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                status, content = asked(url, "POST", "/v1/queues/orders/dead/purge", {}, headers)
                assert (status, b"forbidden" in content) == (403, True)
        assert [queue.get().raw for _ in range(3)] == [b"first", b"second", b"third"]


def test_a_console_that_only_shows_refuses_to_change(tmp_path: Path):
    with holdfast.open(tmp_path / "orders") as queue:
        queue.put(b"first")
        with console(tmp_path / "orders", "--read-only") as url:
            for path in ("/ui", "/ui/queues/orders", "/ui/groups"):
                status, content = asked(url, "GET", path)
                assert (status, b"read-only" in content, b"data-act" in content) == (200, True, False)
            assert asked(url, "POST", "/v1/queues/orders/batch", {"messages": [{"text": "x"}]})[0] == 403
        assert queue.stats().ready == 1
    with console(tmp_path / "orders", "--read-only") as url:
        assert b"read-only" in asked(url, "GET", "/ui")[1]
        with holdfast.open(tmp_path / "orders") as beside:  # for programs it is no different
            beside.put(b"second")
        assert asked(url, "POST", "/v1/queues/orders/batch", {"messages": [{"text": "x"}]})[0] == 403


def test_a_folder_without_a_queue_is_not_made_one(tmp_path: Path):
    done = subprocess.run([*COMMAND, str(tmp_path / "nothing")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "there is no folder" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "nothing").exists()


def test_the_url_of_a_server_or_of_a_queue_on_it_leads_to_its_console(tmp_path: Path):
    def said(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    with serving(tmp_path / "data", whole=True) as server:
        assert server.request("PUT", "/v1/queues/orders", {}).status == 200
        for place, address in (
            (server.url, "/ui"),
            (f"{server.url}/", "/ui"),
            (f"{server.url}/orders", "/ui/queues/orders"),
        ):
            assert said(place) == (0, f"Console of {place}: {server.url}{address}\n", "")
            assert asked(server.url, "GET", address)[0] == 200
        code, _, errors = said(server.url, "--read-only")
        assert (code, "for folders" in errors) == (2, True), errors
    with serving(tmp_path / "other") as server:
        code, _, errors = said(server.url)
        assert (code, "has no console" in errors) == (2, True), errors


def test_a_console_behind_a_socket_is_shown_at_a_port(tmp_path: Path):
    with serving(tmp_path / "data", whole=True, socket=str(tmp_path / "socket")) as server:
        assert server.request("PUT", "/v1/queues/orders", {}).status == 200
        with console(f"unix:{tmp_path}/socket") as url:
            assert asked(url, "GET", "/ui/queues/orders")[0] == 200
