"""The command line at a server that is not Holdfast's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.unit.commands import Run, runner

PAGE = b"<!DOCTYPE html><html><body><h1>Welcome to somebody else</h1></body></html>"


class Foreign(BaseHTTPRequestHandler):
    """Answers everything with a page."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Foreign) as server:
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
