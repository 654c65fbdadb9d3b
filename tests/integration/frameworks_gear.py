"""Programs of task frameworks in a folder of their own: they send tasks, run workers, and write down what ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import holdfast
from tests.integration.process_gear import plain_environment

PATIENCE_S = 120  # only what hangs takes so long

NOTE = '''
import os
import time


def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open(os.environ["NOTES"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def sleep_until(name):
    """What a task does that takes as long as the test wants."""
    while not os.path.exists(os.path.join(os.environ["GATES"], name)):
        time.sleep(0.05)
'''


class Site:
    """A folder with a program, its notes, and the place that it uses."""

    def __init__(self, folder: Path, place: str, url: str, files: Mapping[str, str], worker: list[str]) -> None:
        self.folder = folder
        self.place = place
        self.url = url
        self.notes_file = folder / "notes"
        self.environment = plain_environment() | {
            "PLACE": place,
            "NOTES": str(self.notes_file),
            "GATES": str(folder),
            "PYTHONPATH": str(folder),
        }
        self._worker = worker
        for name, text in {"notes_kept.py": NOTE, **files}.items():
            (folder / name).write_text(text)

    def broker(self) -> holdfast.Broker:
        return holdfast.open_broker(self.url)

    def notes(self) -> list[list[str]]:
        return [line.split() for line in self.notes_file.read_text().splitlines()] if self.notes_file.exists() else []

    def open_gate(self, name: str) -> None:
        """Let the task with this name go on."""
        (self.folder / name).touch()

    def run(self, code: str, *arguments: str, **environment: str) -> str:
        """Run a program that uses the app, as users would; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", f"from program import *\n{code}", *arguments],
            env=self.environment | environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def begin(self, code: str, *arguments: str) -> subprocess.Popen[bytes]:
        """The same, without waiting for it."""
        with (self.folder / "sender.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", f"from program import *\n{code}", *arguments],
                env=self.environment, cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a worker, the framework's own program."""
        with (self.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *self._worker, *arguments],
                env=self.environment | environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @contextmanager
    def worker(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start(*arguments, **environment)
        try:
            yield process
        finally:
            kill(process)

    def log(self) -> str:
        return (self.folder / "worker.log").read_text()


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a worker and all its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"this did not happen: {what}"
        time.sleep(0.05)
    return found
