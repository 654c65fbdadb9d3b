"""`holdfast serve` as a process of its own: begun, looked at, told to go, killed, begun again."""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.integration.http_gear import Caller

COMMAND = [sys.executable, "-c", "import sys; from holdfast.cli.main import main; sys.exit(main())"]
PATIENCE_S = 60  # only what hangs takes so long


class ServerProcess(Caller):
    """A server in a process. Its port stays the same from one life to the next."""

    def __init__(self, folder: Path, *arguments: str, descriptors: int | None = None) -> None:
        super().__init__("")
        self.folder = folder
        self.arguments = arguments
        self.descriptors = descriptors
        self.port = 0
        self.said = ""
        self.log = folder.parent / f"{folder.name}.log"
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the server was never started"
        return self._process

    def start(self) -> None:
        """Returns as soon as it says where it listens."""
        command = [*_limited(self.descriptors), *COMMAND, "serve", str(self.folder), "--port", str(self.port)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self.arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=plain_environment()
            )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        assert " at http://" in self.said, f"the server did not start: {self.log.read_text()}"
        self.url = self.said.rpartition(" at ")[2].strip().split(",")[0]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """kill -9."""
        self._running.kill()
        self._running.wait()
        self._close()

    def tell_to_go(self) -> None:
        """SIGTERM."""
        self._running.send_signal(signal.SIGTERM)

    def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        """How it ended."""
        code = self._running.wait(timeout_s)
        self._close()
        return code

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def memory_bytes(self, *, most: bool = False) -> int:
        """What it takes now, or took at most."""
        name = "VmHWM" if most else "VmRSS"
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def cpu_s(self) -> float:
        """How long it has computed so far."""
        facts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


def _limited(descriptors: int | None) -> list[str]:
    """What stands before a command that may not have more files open than so many."""
    return [] if descriptors is None else ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors)]


def plain_environment() -> dict[str, str]:
    """The environment without settings that somebody may have there for himself.

    Python keeps what it has compiled, as it does for a package that is installed: compiling all modules anew takes
    longer than the rest of a start.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept | {"PYTHONPYCACHEPREFIX": _compiled()}


@cache
def _compiled() -> str:
    """A folder for this run of the tests."""
    folder = tempfile.mkdtemp(prefix="holdfast-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def server_process(folder: Path, *arguments: str, descriptors: int | None = None) -> Iterator[ServerProcess]:
    """A server that runs, and is gone at the end."""
    server = ServerProcess(folder, *arguments, descriptors=descriptors)
    try:
        server.start()
        yield server
    finally:
        server.end()


def refused_start(*arguments: str, descriptors: int | None = None) -> tuple[int, str]:
    """The exit code of a server that must not start, and all that it says."""
    done = subprocess.run(
        [*_limited(descriptors), *COMMAND, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=plain_environment(),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def until(condition: object, what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that is seen only by looking."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


def many_files(count: int) -> None:
    """Let this process have so many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def say(text: str) -> None:
    """A figure for whoever runs the tests with -s."""
    sys.stdout.write(f"\n{text}\n")
