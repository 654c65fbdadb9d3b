"""`python -m bench.attacks`: a server, a caller of team b, and one attacker after another.

The caller of team b enqueues, dequeues and acks one message at a time, at a calm pace, while a probe asks for
/healthz. The first row is measured with no attacker; then each attack runs for a few seconds in its own process.
On an otherwise idle machine two things must hold in every row: the caller's p99 stays under ten times its quiet value,
and /healthz answers within 250 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.attacks.shapes import SHAPES, Shape, raise_files, run
from bench.attacks.wire import Connection, Place, call

_TOKENS = {
    "a-producer": ("producer", "a.*"),
    "a-consumer": ("consumer", "a.*"),
    "a-admin": ("admin", "a.*"),
    "b-admin": ("admin", "b.*"),
    "root": ("admin", "*"),
}
_VICTIM, _HEALTH, _ATTACKER = "127.0.0.1", "127.0.0.3", "127.0.0.2"
_PAUSE_S = 0.01
_HELD_P99, _HELD_HEALTH_S = 10, 0.25


class Seen(NamedTuple):
    """Latencies of the caller and of /healthz, in seconds, and how many rounds failed."""

    p50: float
    p99: float
    worst: float
    health: float
    refused: int
    calls: int


def main() -> None:
    """Attack a server in every known way, and show what another caller notices."""
    parser = argparse.ArgumentParser(prog="python -m bench.attacks", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="how long each attack runs")
    parser.add_argument("--only", default="", help="only attacks whose name matches this pattern")
    parser.add_argument("--files", type=int, default=0, help="the server's limit on open files; 0 leaves it as it is")
    given = parser.parse_args()
    seconds, files = given.seconds, given.files
    raise_files()
    console = Console(width=130)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder, _server(Path(folder), files) as (port, tokens):
        asyncio.run(_prepare(port, tokens["root"]))
        shapes = [each for each in SHAPES if re.search(given.only, each.name)]
        _show(console, asyncio.run(_all(port, tokens, shapes, seconds, console)))


@contextlib.contextmanager
def _server(folder: Path, files: int):  # type: ignore[no-untyped-def]
    made = {name: _token(folder, name, *of) for name, of in _TOKENS.items()}
    command = [sys.executable, "-m", "holdfast", "serve", str(folder / "data"), "--port", "0"]
    command += ["--tokens", str(folder / "tokens.toml")]
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=limit)  # noqa: PLW1509
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield int(said.split(" at http://")[1].split()[0].rpartition(":")[2].strip(",")), made
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        sys.stderr.write((folder / "log").read_text()[-2000:])


def _token(folder: Path, name: str, role: str, topics: str) -> str:
    command = [sys.executable, "-m", "holdfast", "token", "new", name, "--role", role, "--topics", topics]
    made = subprocess.run(
        [*command, "--file", str(folder / "tokens.toml")], capture_output=True, text=True, check=True
    ).stdout
    return made.split()[0]


async def _prepare(port: int, root: str) -> None:
    place = Place(port, root)
    for name in ("a.jobs", "a.empty", "a.many", "a.letters", "a.grows", "b.jobs"):
        assert (await call(place, "PUT", f"/v1/queues/{name}", {})).status == 200
    await call(place, "PUT", "/v1/queues/a.expired", {"settings": {"expired_to_dead": True}})
    lines = b'{"body":"eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}\n' * 10_000
    for _ in range(15):
        await call(place, "POST", "/v1/queues/a.many/batch", lines, content_type="application/x-ndjson")
    expired = b'{"body":"eHh4","ttl":0.001}\n' * 10_000
    for _ in range(2):
        answer = await call(place, "POST", "/v1/queues/a.expired/batch", expired, content_type="application/x-ndjson")
        assert answer.status == 201, answer
    await call(place, "POST", "/v1/queues/a.letters/enqueue", b"a" * 28 + b"!")


async def _all(port: int, tokens: dict[str, str], shapes: list[Shape], seconds: float, console: Console):  # type: ignore[no-untyped-def]
    found: list[tuple[str, str, Seen]] = [("nobody", "", await _look(port, tokens["b-admin"], seconds))]
    for shape in shapes:
        console.print(f"[dim]{shape.name} ({shape.role})[/dim]")
        token = tokens.get(f"a-{shape.role}")
        attacker = multiprocessing.get_context("spawn").Process(
            target=run, args=(shape.name, Place(port, token, _ATTACKER)), daemon=True
        )
        attacker.start()
        await asyncio.sleep(1)
        try:
            found.append((shape.name, shape.role, await _look(port, tokens["b-admin"], seconds)))
        finally:
            attacker.kill()
            attacker.join()
        await asyncio.sleep(1)
    return found


async def _look(port: int, token: str, seconds: float) -> Seen:
    """Measure one caller and the health probe for a while."""
    until = time.perf_counter() + seconds
    took: list[float] = []
    health: list[float] = []
    refused = 0

    async def work() -> None:
        nonlocal refused
        connection: Connection | None = None
        while time.perf_counter() < until:
            began = time.perf_counter()
            try:
                connection = connection or await Connection.open(Place(port, token, _VICTIM))
                put = await connection.call("POST", "/v1/queues/b.jobs/enqueue", b"x")
                got = await connection.call("POST", "/v1/queues/b.jobs/dequeue", {"wait": 1})
                receipts = [each["receipt"] for each in got.value["messages"]]
                done = await connection.call("POST", "/v1/queues/b.jobs/ack", {"receipts": receipts})
                refused += (put.status, got.status, done.status) != (201, 200, 200)
            except (OSError, EOFError, KeyError):
                refused += 1
                connection = None
            took.append(time.perf_counter() - began)
            await asyncio.sleep(_PAUSE_S)

    async def watch() -> None:
        while time.perf_counter() < until:
            began = time.perf_counter()
            with contextlib.suppress(OSError, EOFError):
                await call(Place(port, None, _HEALTH), "GET", "/healthz")
            health.append(time.perf_counter() - began)
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(work(), watch())
    took.sort()
    return Seen(took[len(took) // 2], took[int(len(took) * 0.99)], took[-1], max(health, default=0), refused, len(took))


def _show(console: Console, found: list[tuple[str, str, Seen]]) -> None:
    table = Table("attack", "token", "p50", "p99", "x quiet", "worst", "/healthz worst", "refused", "held")
    quiet = found[0][2]
    for name, role, seen in found:
        ratio = seen.p99 / quiet.p99
        held = ratio < _HELD_P99 and seen.health < _HELD_HEALTH_S and not seen.refused
        table.add_row(
            name,
            role,
            *(f"{value * 1000:.1f} ms" for value in (seen.p50, seen.p99)),
            f"{ratio:.1f}",
            *(f"{value * 1000:.0f} ms" for value in (seen.worst, seen.health)),
            f"{seen.refused} of {seen.calls}",
            "yes" if held else "NO",
        )
    console.print(table)


if __name__ == "__main__":
    main()
