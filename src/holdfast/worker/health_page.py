"""A small page for those who look after processes: GET /healthz says 200 or 503, and why, as JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.worker.health import WorkerHealth

_HOST: Final = "127.0.0.1"


class HealthPage:
    """The page, on a port of this machine only, in threads of its own: whatever the handlers do, it answers."""

    def __init__(self, health: Callable[[], WorkerHealth], port: int) -> None:
        class Handler(_Handler):
            answer = staticmethod(health)

        if type(port) is not int or not 0 <= port <= 65_535:
            raise InvalidRequest(f"health_port={port!r} cannot be used: give a port, or 0 for any that is free")
        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise InvalidRequest(
                f"the health page cannot listen on {_HOST}:{port}: {error.strerror or error}; choose another port"
            ) from None
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="holdfast-worker-health", daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    answer: Callable[[], WorkerHealth]
    timeout = 5  # for those who connect and say nothing
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/healthz":
            self._send(404, b'{"error": {"code": "not_found", "message": "there is only /healthz here"}}')
            return
        health = self.answer()
        self._send(200 if health.ok else 503, msgspec.json.encode(health))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """A line for each look would bury the others."""
