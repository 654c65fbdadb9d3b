"""`python -m bench.spark.service SOCKET`: has the JVM, and does the jobs that come through the socket.

One after the other, and in the main thread: in others Spark does not know which session is the active one, and finds
no source that was registered with it.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from bench.child import one_line
from bench.spark.host import JobFailed
from bench.spark.jobs import JOBS, Lab

_MOST_WORDS = 300


def main(address: str) -> None:
    """Serve until told to end. Spark is started by the first job, so that whoever starts this need not wait for it."""
    lab = Lab(Path(address).parent)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    try:
        with Listener(address, "AF_UNIX") as listener:
            while True:
                _serve(lab, listener.accept())
    finally:
        lab.close()


def _serve(lab: Lab, connection: Connection) -> None:
    # Somebody only looked whether this listens, or is gone before the answer comes.
    with connection, suppress(EOFError, BrokenPipeError):
        job, given = connection.recv()
        connection.send(_done(lab, connection, job, given))


def _done(lab: Lab, connection: Connection, job: str, given: dict[str, Any]) -> Any:
    try:
        return JOBS[job](lab, connection=connection, **given)
    except Exception as problem:
        return JobFailed(one_line(problem)[:_MOST_WORDS])


if __name__ == "__main__":
    main(sys.argv[1])
