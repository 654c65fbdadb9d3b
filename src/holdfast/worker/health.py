"""How a worker is, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import msgspec

from holdfast.errors import InvalidRequest


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `worker.health()` answers. Counts are since the start."""

    status: str  # "starting", "running", "silent", "draining" or "stopped"
    seconds_since_last_receive: float  # of the queue that has not answered for the longest time, empty or not
    silent_seconds: float  # the same, but only as long as there was a free slot to ask with
    running: int
    handled: int
    failed: int  # the handler raised
    rejected: int  # the handler raised Reject
    retried: int  # the handler raised Retry
    timed_out: int  # the handler ran for longer than its time limit
    lost: int  # the lease was gone when the handler ended
    unsettled: int  # the handler ended, but the queue could not be told: the message comes again
    given_back: int  # taken, and not begun before the end
    cut_off: int  # still running at the end of the drain
    restarts: int  # receiving failed, and was tried again
    hook_errors: int

    @property
    def ok(self) -> bool:
        """Whether the worker does what it is there for."""
        return self.status in {"starting", "running", "draining"}


class Counts:
    """What was counted; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


# A small page for those who look after processes: GET /healthz says 200 or 503, and why, as JSON.


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
