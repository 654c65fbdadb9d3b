"""How many Python functions are called to put, get and ack one small message: for threads, for tasks, over HTTP.

`python tools/calls.py` prints a table; `--json` prints it as JSON. Counts are those of `sys.setprofile`: functions
written in Python, ours and those of other packages, in every thread of the process; not what is written in C. They do
not depend on the speed of the machine, so a change that adds or saves work on a hot path shows at once.

Each is the most frequent count of many repetitions in steady state: ticks of a clock, a new segment or a journal that
is rewritten come in few of them. Messages are stored with durability `os`, and each call finds what it asks for, so
nobody waits. `get` could wait (no timeout; over HTTP 5 seconds), `get at once` could not (a timeout of 0): they go
different ways. Over HTTP it is the server that is counted, as `holdfast serve` runs it, with a plain client (HTTP/1.1,
JSON, one connection) in a thread of its own that is not. Compare counts of one version of Python only: from 3.12 on, a
comprehension is no call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import mode
from types import FrameType
from typing import Any

WARM = 200
REPETITIONS = 300
QUEUE = "jobs"
BODY = b"resize image 1"
STARTED_S = 30
VERBS = ("put", "get", "ack", "get at once")

Counts = dict[str, int]


class Counter:
    """Counts the calls in every thread that was started, or that called `start`, after it was made."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: dict[str, list[int]] = defaultdict(list)
        threading.setprofile(self._seen)

    def _seen(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.calls += 1

    def start(self) -> None:
        """Count in this thread, too."""
        sys.setprofile(self._seen)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def usual(self) -> Counts:
        """The most frequent count of each verb."""
        return {name: mode(counts) for name, counts in self.seen.items()}


def threads(folder: Path) -> Counts:
    """The calls of a queue for threads."""
    import holdfast

    counter = Counter()
    with holdfast.open(folder, durability="os") as queue:

        def counted(name: str, call: Callable[[], Any]) -> Any:
            counter.calls = 0
            counter.start()
            result = call()
            sys.setprofile(None)
            counter.seen[name].append(counter.calls - 1)  # the lambda is ours
            return result

        for _ in range(WARM):
            queue.put(BODY)
            queue.get(timeout=0).ack()
        for _ in range(REPETITIONS):
            counted("put", lambda: queue.put(BODY))
            message = counted("get", lambda: queue.get())  # noqa: PLW0108  as the others are
            counted("ack", lambda: message.ack())  # noqa: B023, PLW0108  called at once
            queue.put(BODY)
            counted("get at once", lambda: queue.get(timeout=0)).ack()
    counter.stop()
    return counter.usual()


async def tasks(folder: Path) -> Counts:
    """The calls of a queue for tasks."""
    from holdfast import aio

    counter = Counter()
    async with aio.open(folder, durability="os") as queue:

        async def counted(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
            counter.calls = 0
            counter.start()
            result = await call()
            sys.setprofile(None)
            counter.seen[name].append(counter.calls - 1)
            return result

        for _ in range(WARM):
            await queue.put(BODY)
            await (await queue.get(timeout=0)).ack()
        for _ in range(REPETITIONS):
            await counted("put", lambda: queue.put(BODY))
            message = await counted("get", lambda: queue.get())  # noqa: PLW0108
            await counted("ack", lambda: message.ack())  # noqa: B023, PLW0108
            await queue.put(BODY)
            await (await counted("get at once", lambda: queue.get(timeout=0))).ack()
    counter.stop()
    return counter.usual()


class Client(threading.Thread):
    """Calls the server that runs in the main thread, then has it stopped."""

    def __init__(self) -> None:
        super().__init__(name="client")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()
        self.begin = threading.Event()
        self.ended = threading.Event()
        self.counter: Counter | None = None
        self.problem: BaseException | None = None

    def run(self) -> None:
        sys.setprofile(None)
        self.begin.wait()
        try:
            with self._connected() as connection:
                self._measure(connection)
        except BaseException as problem:
            self.problem = problem
        finally:
            if not self.ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    def _connected(self) -> socket.socket:
        until = time.monotonic() + STARTED_S
        while True:
            try:
                return socket.create_connection(self.address, STARTED_S)
            except ConnectionRefusedError:
                if time.monotonic() > until or self.ended.wait(0.05):
                    raise

    def _measure(self, connection: socket.socket) -> None:
        self._call(connection, "PUT", "", {})
        for number in range(WARM + REPETITIONS):
            self._counted(connection, "put", "/enqueue?durability=os", BODY, measured=number >= WARM)
            name, wait = (("get", 5), ("get at once", 0))[number % 2]
            taken = self._counted(connection, name, "/dequeue", {"wait": wait}, measured=number >= WARM)
            receipts = [message["receipt"] for message in taken["messages"]]
            self._counted(connection, "ack", "/ack", {"receipts": receipts}, measured=number >= WARM)

    def _counted(self, connection: socket.socket, name: str, path: str, body: Any, *, measured: bool) -> Any:
        """One call. What the server does after its answer belongs to it: wait until it is at rest."""
        counter = self.counter
        assert counter is not None
        counter.calls = 0
        answer = self._call(connection, "POST", path, body)
        if measured:
            before = -1
            while counter.calls != before:
                before = counter.calls
                time.sleep(0.002)
            counter.seen[name].append(before)
        return answer

    def _call(self, connection: socket.socket, method: str, path: str, body: Any) -> Any:
        content, kind = (body, "octet-stream") if isinstance(body, bytes) else (json.dumps(body).encode(), "json")
        head = (
            f"{method} /v1/queues/{QUEUE}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/{kind}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more(connection)
        head_text, _, rest = received.partition(b"\r\n\r\n")
        status, *fields = head_text.decode().split("\r\n")
        length = next(int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:"))
        while len(rest) < length:
            rest += self._more(connection)
        if status.split()[1] not in {"200", "201"}:
            raise RuntimeError(f"{path}: {status}: {rest.decode()}")
        return json.loads(rest)

    @staticmethod
    def _more(connection: socket.socket) -> bytes:
        part = connection.recv(65536)
        if not part:
            raise ConnectionResetError("the server closed the connection")
        return part


def http(folder: Path) -> Counts:
    """The calls of a server, which runs in this thread until the client has it stopped."""
    from holdfast.cli.main import main as command

    client = Client()
    client.start()
    client.counter = counter = Counter()
    counter.start()
    client.begin.set()
    try:
        said = io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            command(["serve", str(folder), "--host", "127.0.0.1", "--port", str(client.address[1])])
    finally:
        counter.stop()
        client.ended.set()
        client.join()
    if client.problem is not None:
        raise client.problem
    return counter.usual()


def measured() -> dict[str, Counts]:
    """Every count, by who calls and what."""
    found: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory() as place:
        found["threads"] = threads(Path(place) / "threads")
        found["tasks"] = asyncio.run(tasks(Path(place) / "tasks"))
        found["HTTP"] = http(Path(place) / "http")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    given = parser.parse_args()
    counts = measured()
    if given.json:
        sys.stdout.write(json.dumps(counts, indent=2) + "\n")
        return
    rows = ["".join(["Python calls", *(f"{verb:>14}" for verb in VERBS)])]
    rows += ["".join([f"{who:<12}", *(f"{each[verb]:>14}" for verb in VERBS)]) for who, each in counts.items()]
    sys.stdout.write("".join(f"{row}\n" for row in rows))


if __name__ == "__main__":
    main()
