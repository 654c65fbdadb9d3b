"""The process that has the JVM, as the harness and its samples see it. Nothing here imports Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import bench
from bench.child import Sample
from bench.queues.server import Server
from bench.scale import Scale

_ROOT = Path(bench.__file__).parents[1]


class JobFailed(Exception):
    """Spark could not do what it was asked."""


class SparkHost:
    """Started once, before the first sample that needs it; samples are forked later, and know where it listens."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self._address = ""

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        """Until the block ends; its data is in the folder, and can be removed then."""
        place = (folder / "spark").resolve()
        place.mkdir(parents=True)
        self._address = str(place / "socket")
        command = [sys.executable, "-m", "bench.spark.service", self._address]
        # The package of this tree, not another that is installed.
        env = {
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
            # Modules are compiled once, as pip does when it installs them.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(place / "bytecode"),
        }
        server = Server(command, place, lambda: self._connect().close(), env=env)
        try:
            yield
        finally:
            server.stop()

    def ask(self, job: str, **given: Any) -> Any:
        """What a job of `bench.spark.jobs` answers."""
        with self._connect() as connection:
            connection.send((job, {"scale": self.scale, **given}))
            return _answer(connection)

    def measure(self, job: str, **given: Any) -> Sample:
        """A job that answers with its sample."""
        answer = self.ask(job, **given)
        assert isinstance(answer, Sample), f"{job} answered {answer!r}"
        return answer

    @contextmanager
    def meanwhile(self, job: str, **given: Any) -> Iterator[None]:
        """Have a job run beside the block; it begins in earnest before the block does, and ends with it."""
        with self._connect() as connection:
            connection.send((job, {"scale": self.scale, **given}))
            assert _answer(connection) == "running"
            try:
                yield
            finally:
                connection.send("enough")
                _answer(connection)

    def _connect(self) -> Connection:
        return Client(self._address, "AF_UNIX")


def _answer(connection: Connection) -> Any:
    answer = connection.recv()
    if isinstance(answer, JobFailed):
        raise answer
    return answer
