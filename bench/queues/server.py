"""Servers of our own: on a free port of the loopback, with their data in the sample's folder, gone with the sample."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class ServerFailed(Exception):
    """It did not start; its last words are in the message."""


class Server:
    """A running server; `stop` ends it, and the kernel does so if the process that started it is killed."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        ready: Callable[[], object],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.words = folder / "server.log"
        with self.words.open("ab") as words:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=folder,
                env=None if env is None else {**os.environ, **env},
                user=user,
                group=None if user is None else pwd.getpwnam(user).pw_gid,
                extra_groups=None if user is None else [],
                preexec_fn=begin_server,  # noqa: PLW1509 - no other thread runs yet
            )
        try:
            self._wait(ready)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _wait(self, ready: Callable[[], object]) -> None:
        ends = time.monotonic() + _START_SECONDS
        while True:
            try:
                ready()
                return
            except Exception as problem:
                if self.process.poll() is not None or time.monotonic() > ends:
                    raise ServerFailed(f"{problem}; {self._last_words()}") from problem
            time.sleep(0.02)

    def _last_words(self) -> str:
        lines = self.words.read_text(errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines[-4:] if line.strip())[:300]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait; one that does not listen is killed."""
        self.process.send_signal(how)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Looked up before any fork: between fork and exec only little may be done.
_prctl = ctypes.CDLL(None).prctl if hasattr(ctypes.CDLL(None), "prctl") else None


def begin_server() -> None:
    """In a child that is a server: it ends with its sample, also with one that is killed, and has its own core."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if _server_core is not None:
        os.sched_setaffinity(0, {_server_core})


# Where servers run from now on; None: wherever the system likes.
_server_core: int | None = None


def keep_apart() -> bool:
    """From now on a core for servers alone, and another for this process; False where there is but one.

    For a process that takes one sample and ends.
    """
    global _server_core  # noqa: PLW0603 - what follows a fork is nobody else's
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return False
    _server_core = cores[0]
    os.sched_setaffinity(0, {cores[1]})
    return True


@contextmanager
def beside_server() -> Iterator[None]:
    """Meanwhile, this process runs on the core where `keep_apart` puts servers."""
    before = os.sched_getaffinity(0) if _server_core is not None else set()
    if _server_core is not None:
        os.sched_setaffinity(0, {_server_core})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


@contextmanager
def on_server_core() -> Iterator[None]:
    """What is started meanwhile runs where `keep_apart` puts servers, for one that serves several samples."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(before) > 1:
        os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        if len(before) > 1:
            os.sched_setaffinity(0, before)
