"""The command line at a server that is not Holdfast's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from tests.unit.commands import Run, runner

PAGE = b"<!DOCTYPE html><html><body><h1>Welcome to somebody else</h1></body></html>"


class Foreign(BaseHTTPRequestHandler):
    """Answers everything with a page."""

    status = 404
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(self.status)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Quiet(HTTPServer):
    """A server that says nothing of callers who hang up early."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with Quiet(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.mark.parametrize("words", [("topic", "ls"), ("put",)], ids=["look", "put"])
def test_a_page_of_a_foreign_server_is_explained_and_not_printed(run: Run, address: str, words: tuple[str, ...]):
    done = run(*words, address, *(["x"] if words == ("put",) else []))
    assert done.code == 2
    assert "is not a Holdfast server" in done.err
    assert "404 with text/html" in done.err
    assert address in done.err
    assert "<" not in done.err


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_without_its_server_is_waited_for_no_longer_than_asked(
    run: Run, address: str, monkeypatch, status: int
):
    monkeypatch.setattr(Foreign, "status", status)
    monkeypatch.setattr(Foreign, "paths", [])
    done = run("put", address, "x", "--wait", "0")
    assert done.code == 2
    assert f"or a proxy in front of it has a problem: it responded with {status}." in done.err
    assert set(Foreign.paths) == {"/healthz"}  # the call itself, which is repeated for longer, was never sent
