"""`python -m bench.celery`: tasks of Celery that do nothing, on Holdfast and on what else it runs on without a cluster.

Each sample is one broker. A worker that has nothing to do is watched, then given one task after the other; then tasks
are sent while no worker runs, and Celery's own worker program runs them. Nothing is pinned to a core: a sample is two
programs, or three where the broker is a server, and the machine is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.goals import Figures, Goal, Sample, run
from bench.harness import missing_modules
from bench.operations.latency import quantile
from bench.programs import Program, missing_programs
from bench.queues.redis_stream import RedisStream, RedisStreamSynced
from bench.server.ours import HoldfastServer

_COUNT = 2_000
_MOST_S = 5.0  # how long tasks are sent at most, to a broker that is slow
_IDLE_S = 3.0
_SLOW = (80, 0.04)  # tasks for a worker that has nothing to do, and the pause before the next
_PATIENCE_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Broker(NamedTuple):
    """A broker while it runs: Celery's settings for it, and its server's process."""

    settings: dict[str, Any]
    pid: int | None = None


Start = Callable[[Path], Any]


@contextmanager
def _folder(durability: str, folder: Path) -> Iterator[Broker]:
    yield Broker({"broker_url": f"holdfast://{folder}/data", **_options(durability=durability)})


@contextmanager
def _server(durability: str, folder: Path) -> Iterator[Broker]:
    side = HoldfastServer(100)
    side.open(folder)
    try:
        assert side.server is not None
        settings = {"broker_url": f"holdfast+{side.url}", **_options(durability=durability)}
        yield Broker(settings, side.server.process.pid)
    finally:
        side.close()


@contextmanager
def _redis(kind: type[RedisStream], folder: Path) -> Iterator[Broker]:
    peer = kind(100)
    peer.open(folder)
    try:
        port = peer.client.connection_pool.connection_kwargs["port"]
        yield Broker({"broker_url": f"redis://127.0.0.1:{port}/0"}, peer.server.process.pid)
    finally:
        peer.close()


@contextmanager
def _filesystem(folder: Path) -> Iterator[Broker]:
    for name in ("in", "control"):
        (folder / name).mkdir()
    place, control = str(folder / "in"), str(folder / "control")
    options = _options(data_folder_in=place, data_folder_out=place, control_folder=control)
    yield Broker({"broker_url": "filesystem://", **options})


@contextmanager
def _sqlalchemy(folder: Path) -> Iterator[Broker]:
    yield Broker({"broker_url": f"sqla+sqlite:///{folder}/queue.sqlite3"})


def _options(**options: Any) -> dict[str, Any]:
    return {"broker_transport_options": options}


class _Site:
    """The programs of one sample, with its broker."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self._folder = folder
        self._broker = broker
        self._notes = folder / "notes"
        self._environment = os.environ | {"BENCH_CELERY": json.dumps(broker.settings), "BENCH_NOTES": str(self._notes)}

    def send(self, how: str, count: int, seconds: float) -> list[int]:
        command = [sys.executable, "-m", "bench.celery_tasks", how, str(count), str(seconds)]
        done = subprocess.run(command, env=self._environment, check=True, stdout=subprocess.PIPE)
        return list(json.loads(done.stdout))

    @contextmanager
    def worker(self, *pool: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "celery", "-A", "bench.celery_tasks", "worker", "-l", "WARNING", "-P", *pool]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with (self._folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *quiet], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def noted(self, what: str, count: int = 1) -> list[list[str]]:
        """The notes that begin so, when there are as many."""
        ends = time.monotonic() + _PATIENCE_S
        while True:
            lines = self._notes.read_text().splitlines() if self._notes.exists() else []
            found = [line.split() for line in lines if line.startswith(what)]
            if len(found) >= count:
                return found
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(found)} of {count} tasks ran: {(self._folder / 'worker.log').read_text()}")
            time.sleep(0.02)

    def forget(self) -> None:
        self._notes.unlink()

    def cpu_s(self, worker: subprocess.Popen[bytes]) -> float:
        """What the worker with its children and the server have used."""
        pids = [worker.pid, *_children(worker.pid)]
        return sum(map(_cpu_s, pids if self._broker.pid is None else [*pids, self._broker.pid]))


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _cpu_s(pid: int) -> float:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _sample(name: str, start: Start, folder: Path) -> Figures:
    found: Figures = {}
    with start(folder) as broker:
        site = _Site(folder, broker)
        try:
            found |= _waiting(f"{name}: ", site)
            found |= _working(f"{name}: ", site, "solo", enqueue=True)
            found |= _working(f"{name}: ", site, "prefork", "-c", "2")
        except (LookupError, TimeoutError, subprocess.CalledProcessError) as error:  # measure the others
            print(f"{name}: {error}", file=sys.stderr)
    return found


def _waiting(name: str, site: _Site) -> Figures:
    """A worker that waits, and how soon it runs a task."""
    count, pause_s = _SLOW
    site.send("slowly", 0, 0)  # before the worker, because two that create a queue at once fail with SQLAlchemy
    with site.worker("solo") as worker:
        site.noted("first")
        time.sleep(1)
        before, began = site.cpu_s(worker), time.monotonic()
        time.sleep(_IDLE_S)
        idle = (site.cpu_s(worker) - before) / (time.monotonic() - began)
        site.forget()
        site.send("slowly", count, pause_s)
        late_ms = sorted((int(ran) - int(sent)) / 1e6 for _, sent, _, ran in site.noted("sent", count))
    site.forget()
    return {
        f"{name}idle, CPU in a second": 1000 * idle,
        f"{name}from delay to run, p50": quantile(late_ms, 0.5),
        f"{name}from delay to run, p99": quantile(late_ms, 0.99),
    }


def _working(name: str, site: _Site, *pool: str, enqueue: bool = False) -> Figures:
    """Tasks that wait for a worker."""
    took = sorted(site.send("all", _COUNT, _MOST_S))
    found = {}
    if enqueue:
        found = {f"{name}delay, p50": quantile(took, 0.5) / 1000, f"{name}delay, p99": quantile(took, 0.99) / 1000}
    with site.worker(*pool) as worker:
        (_, before_first, first_ns), *_ = site.noted("first")
        before = site.cpu_s(worker)
        (_, before_last, last_ns), *_ = site.noted("last")
        used_s = site.cpu_s(worker) - before
    ran = len(took)
    if pool[0] == "solo":  # the other pool has several processes, and each counts its own
        ran = int(before_last) - int(before_first)
        if not 0.99 * len(took) <= ran <= len(took):  # the filesystem transport mixes those of one millisecond
            raise LookupError(f"{len(took)} tasks were sent, and {ran} ran before the last")
    site.forget()
    return found | {
        f"{name}tasks, {pool[0]}": ran * 1e9 / (int(last_ns) - int(first_ns)),
        f"{name}tasks, {pool[0]}, CPU": used_s * 1e6 / ran,
    }


class Kind(NamedTuple):
    """A broker to measure, and what it needs."""

    start: Start
    needs: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()


KINDS = {
    "folder": Kind(partial(_folder, "fsync")),
    "folder, os": Kind(partial(_folder, "os")),
    "server": Kind(partial(_server, "fsync")),
    "server, os": Kind(partial(_server, "os")),
    "Redis, everysec": Kind(partial(_redis, RedisStream), RedisStream.needs, RedisStream.programs),
    "Redis, always": Kind(partial(_redis, RedisStreamSynced), RedisStream.needs, RedisStream.programs),
    "filesystem": Kind(_filesystem),
    "sqlalchemy, SQLite": Kind(_sqlalchemy, ("sqlalchemy",)),
}
MISSING = {name: [*missing_programs(kind.programs), *missing_modules(kind.needs)] for name, kind in KINDS.items()}
SAMPLES: dict[str, Sample] = {
    name: partial(_sample, name, kind.start) for name, kind in KINDS.items() if not MISSING[name]
}
GOALS = {
    f"{name}: {figure}": goal
    for name in KINDS
    for figure, goal in {
        "delay, p50": Goal(None),
        "delay, p99": Goal(None),
        "tasks, solo, CPU": Goal(None),
        "tasks, prefork, CPU": Goal(None),
        "from delay to run, p50": Goal(None, "ms"),
        "from delay to run, p99": Goal(None, "ms"),
        "idle, CPU in a second": Goal(5 if name.startswith(("folder", "server")) else None, "ms"),
    }.items()
}


def main() -> None:
    """Measure tasks of Celery that do nothing, on Holdfast and on other brokers."""
    about = "Measure tasks of Celery that do nothing, on Holdfast and on other brokers."
    run("bench.celery", about, SAMPLES, GOALS, MISSING)


if __name__ == "__main__":
    main()
