"""A proxy that does to connections what networks do: cuts them at any byte, holds them up, swallows what they say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Passes bytes on to a server, but for the faults that are set; each holds for one connection, the next one."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.cut_request_at: int | None = None
        self.cut_answer_at: int | None = None
        self.swallow = False  # for all connections, while it is set
        self.swallow_answers = False  # the same, but the server hears all
        self.cut_answers_once = b""  # the answer to the first request that begins so is lost
        self.hold_after_cut: Callable[[], object] = lambda: None  # and this is waited for before its caller learns it
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            request_at, self.cut_request_at = self.cut_request_at, None
            answer_at, self.cut_answer_at = self.cut_answer_at, None
            try:
                server = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            losing = threading.Event()
            for source, sink, at in ((client, server, request_at), (server, client, answer_at)):
                answers = source is server
                threading.Thread(target=self._pass_on, args=(source, sink, at, answers, losing), daemon=True).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, cut_at: int | None, answers: bool, losing: threading.Event
    ) -> None:
        passed = 0
        with suppress(OSError):
            while content := source.recv(65536):
                if not answers and self.cut_answers_once and content.startswith(self.cut_answers_once):
                    self.cut_answers_once = b""
                    losing.set()
                if answers and losing.is_set():
                    self.hold_after_cut()
                    break
                if self.swallow or (answers and self.swallow_answers):
                    continue
                if cut_at is not None and passed + len(content) >= cut_at:
                    sink.sendall(content[: cut_at - passed])
                    break
                sink.sendall(content)
                passed += len(content)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut_all(self) -> None:
        """Cut every connection now."""
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut_all()
        for each in self._open:
            each.close()


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    proxy = Proxy((host, int(port)))
    try:
        yield proxy
    finally:
        proxy.close()
