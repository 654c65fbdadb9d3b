"""What a queue costs in a store, beside one in a local folder: `python -m bench.stores`.

Each sample starts a store of its own (SeaweedFS with its fsync switched on, PostgreSQL, a folder, memory) and measures
its bare create in the same moment, because the ratio to that is what the chain adds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import holdfast
import holdfast.aio
from bench.goals import Figures, Goal, run
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.stored import open_store, parse_place
from holdfast.env.disk import Disk
from holdfast.settings import BrokerSettings, TopicSettings
from tests.integration.store_servers import postgres, postgres_program, seaweedfs

_CALLS = 300
_TASKS = 64
_SECONDS = 3.0
_BATCH = 1000  # messages of 1 KiB
_BATCHES = 150
_THREADS = 4
_LEASE_MS = 3000
_COLD_BYTES = 1024**3
_TURNS = 3  # of what is measured in turn with its floor, because a busy machine changes within a minute

_CACHE = "HOLDFAST_BROKER_STORE_CACHE_DIR"
_LEASE = "HOLDFAST_BROKER_STORE_LEASE_MS"
_WAIT = "HOLDFAST_BROKER_STORE_WAIT_MS"

Place = tuple[str, dict[str, str]]
_PLACES: dict[str, Callable[[Path], Any]] = {
    "local folder": lambda folder: nullcontext((f"{folder}/local", {})),
    "memory": lambda folder: nullcontext((f"memory://{folder.name}", {})),
    "folder store": lambda folder: nullcontext((f"file://{folder}/store/jobs", {})),
    "postgres": postgres,
    "seaweedfs": seaweedfs,
}
if postgres_program("initdb") is None:
    del _PLACES["postgres"]


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _sample(kind: str) -> Callable[[Path], Figures]:
    def measure(folder: Path) -> Figures:
        folder = folder.resolve()
        with _PLACES[kind](folder) as (url, environ), _environment(**environ, **{_CACHE: str(folder / "cache")}):
            found = _single(kind, url)
            found[f"{kind}: fsync put, {_TASKS} tasks"] = asyncio.run(_tasks(f"{url}-tasks"))
            found |= _batches(kind, f"{url}-batches")
            if kind != "local folder":
                found[f"{kind}: bare creates of 1 MiB"] = _bare_bytes(f"{url}-bytes")
            return found

    return measure


def _single(kind: str, url: str) -> Figures:
    body = os.urandom(100)
    with holdfast.open(f"{url}-one") as queue:

        def put(_: int) -> None:
            queue.put(body, durability="fsync")

        if kind == "local folder":
            return {f"{kind}: fsync put, 1 caller, p50": _p50_ms([put])[0]}
        store, root = open_store(parse_place(f"{url}-bare"))
        with closing(store):
            took, bare = _p50_ms([put, lambda i: store.create(f"{root}chain/{i:020}", os.urandom(300))])
    return {
        f"{kind}: fsync put, 1 caller, p50": took,
        f"{kind}: bare create, p50": bare,
        f"{kind}: put over create": took / bare,
    }


def _p50_ms(calls: list[Callable[[int], object]]) -> list[float]:
    took: list[list[float]] = [[] for _ in calls]
    for i in range(_CALLS):
        for call, each in zip(calls, took, strict=True):
            each.append(_seconds(call, i))
    return [statistics.median(each) * 1000 for each in took]


def _seconds(call: Callable[..., object], *given: object) -> float:
    began = time.perf_counter()
    call(*given)
    return time.perf_counter() - began


async def _tasks(url: str) -> float:
    async with holdfast.aio.open(url) as queue:
        done, until = 0, time.perf_counter() + _SECONDS

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < until:
                await queue.put(b"x" * 100, durability="fsync")
                done += 1

        await asyncio.gather(*(work() for _ in range(_TASKS)))
        return done / _SECONDS


def _batches(kind: str, url: str) -> Figures:
    """Store 1 KiB messages in batches, from a few threads; for a chain, also what it adds to the bytes."""
    bodies = [os.urandom(1024) for _ in range(_BATCH)]
    with holdfast.open(url) as queue:

        def work(_: int) -> None:
            for _ in range(_BATCHES // _THREADS):
                queue.put_many(bodies, durability="fsync")

        took = _in_threads(work)
        written = _BATCHES // _THREADS * _THREADS * _BATCH * 1024
        found = {f"{kind}: 1 KiB in batches": written / took / 1e6}
        chain = queue._port.engine.store  # type: ignore[attr-defined]
        if chain is not None:
            found[f"{kind}: chain over messages"] = (chain.bytes_sent / written - 1) * 100
            found[f"{kind}: objects while batches come in"] = chain.committed / took
    return found


def _in_threads(work: Callable[[int], None]) -> float:
    """Run it in several threads at once, each with its number; returns the seconds until all are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _bare_bytes(url: str) -> float:
    """What the store takes without us, from as many threads: the floor of batches."""
    store, root = open_store(parse_place(url))
    content, each = os.urandom(1024 * 1024), _BATCHES // _THREADS

    def work(number: int) -> None:
        for i in range(each):
            store.create(f"{root}content/{number}-{i}", content)

    took = _in_threads(work)
    store.close()
    return each * _THREADS * len(content) / took / 1e6


def _linger(folder: Path) -> Figures:
    """How many objects are made while 64 tasks sync without a pause: the linger bounds them."""
    with _environment(**{_CACHE: str(folder / "cache")}):

        async def main() -> float:
            async with holdfast.aio.open(f"memory://{folder.name}-linger") as queue:
                chain = queue._port.engine.store  # type: ignore[attr-defined]
                before, until = chain.committed, time.perf_counter() + _SECONDS

                async def work() -> None:
                    while time.perf_counter() < until:
                        await queue.put(b"x", durability="fsync")

                await asyncio.gather(*(work() for _ in range(_TASKS)))
                return float(chain.committed - before) / _SECONDS

        return {"memory: objects while 64 tasks sync": asyncio.run(main())}


_OWNER = """
import sys, time, holdfast
queue = holdfast.open(sys.argv[1])
for _ in range(200):
    queue.put(bytes(1000), durability="fsync")
print("open", flush=True)
time.sleep(600)
"""
_STANDBY = """
import sys, time, holdfast
print("waiting", flush=True)
queue = holdfast.open(sys.argv[1])
print(time.monotonic(), flush=True)
"""


def _take_over(folder: Path) -> Figures:
    """How long it takes until another machine is the owner: after a kill, and after a silence."""
    return {
        "folder store: take-over, owner killed": _taken_over(folder / "killed", signal.SIGKILL),
        "folder store: take-over, silent owner, beyond its lease": (
            _taken_over(folder / "silent", signal.SIGSTOP) - _LEASE_MS / 1000
        ),
    }


def _taken_over(folder: Path, how: signal.Signals) -> float:
    folder.mkdir()
    url = f"file://{folder.resolve()}/store/jobs"

    def started(program: str, name: str) -> subprocess.Popen[str]:
        environ = os.environ | {_CACHE: f"{folder}/{name}", _LEASE: str(_LEASE_MS), _WAIT: "60000"}
        return subprocess.Popen([sys.executable, "-c", program, url], env=environ, stdout=subprocess.PIPE, text=True)

    with started(_OWNER, "owner") as owner:
        try:
            _line(owner)
            with started(_STANDBY, "standby") as standby:
                try:
                    _line(standby)
                    time.sleep(2)  # it follows the chain by now
                    began = time.monotonic()
                    owner.send_signal(how)
                    if how == signal.SIGKILL:
                        owner.wait()
                    return float(_line(standby)) - began
                finally:
                    standby.kill()
        finally:
            owner.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _cold_open(folder: Path) -> Figures:
    """Open a queue of 1 GiB from a store on a machine that has nothing of it, beside reading the same objects."""
    url, body = f"file://{folder.resolve()}/store/jobs", os.urandom(1024 * 1024)
    with _environment(**{_CACHE: str(folder / "first")}), holdfast.open(url) as queue:
        for _ in range(_COLD_BYTES // len(body)):
            queue.put(body, durability="os")
        queue.sync()
        from holdfast.env.chain.checkpoints import write_checkpoint

        write_checkpoint(queue._port.engine.world.disk, 0)  # type: ignore[attr-defined]
    shutil.rmtree(folder / "first")
    store, root = open_store(parse_place(url))
    here = folder / "here"

    def download() -> None:
        for i, key in enumerate(store.keys(f"{root}content/")):
            (here / str(i)).write_bytes(store.read(key) or b"")

    def open_it() -> None:
        with _environment(**{_CACHE: str(here)}), holdfast.open(url):
            pass

    found: dict[Callable[[], None], list[float]] = {download: [], open_it: []}
    for _ in range(_TURNS):
        for work, seconds in found.items():
            here.mkdir()
            os.sync()  # or it would wait for what was written before it
            seconds.append(_seconds(work))
            shutil.rmtree(here)
    store.close()
    downloaded, took = (min(seconds) for seconds in found.values())
    return {
        "folder store: cold open of 1 GiB": took,
        "folder store: downloading its objects one by one": downloaded,
        "folder store: cold open over download": took / downloaded,
    }


_TIERS = ("folder store", *(kind for kind in ("postgres", "seaweedfs") if kind in _PLACES))
_SEGMENTS = 6


def _tiered(kind: str) -> Callable[[Path], Figures]:
    """Read every byte of segments that are only in the store, beside reading their objects without us."""

    def measure(folder: Path) -> Figures:
        with _PLACES[kind](folder.resolve()) as (url, environ), _environment(**environ):
            topic = TopicSettings(segment_bytes=16 << 20, min_free_bytes=0, tier_after_bytes=0, durability="os")
            settings = BrokerSettings(tier=f"{url}-tier", topic=topic)
            engine = BrokerEngine.open(folder / "tiered", settings=settings)
            engine.create_topic("jobs")
            log = engine.open_topic("jobs").partitions[0].log
            while len(log.segments()) <= _SEGMENTS:
                log.append([os.urandom(64 * 1024)] * 16)
            engine.tiering.tick()
            paths = sorted(path.removesuffix(".stub") for path in map(str, Path(log.folder).glob("*.log.stub")))
            assert len(paths) == _SEGMENTS
            store, root = open_store(parse_place(f"{url}-tier"))
            keys, disk, cache = list(store.keys(f"{root}tier/")), engine.world.disk, folder / "tiered" / "tier"
            size = sum(_read(disk, path) for path in paths)  # once without counting: connections are made
            cold, bare = [], []
            for _ in range(_TURNS):
                bare.append(_seconds(lambda: [store.read(key) for key in keys]))
                for cached in cache.glob("*-*"):
                    cached.unlink()
                cold.append(_seconds(lambda: [_read(disk, path) for path in paths]))
            engine.close()
            store.close()
        took, read = min(cold), min(bare)
        return {
            f"{kind}: cold read of tiered segments": size / took / 1e6,
            f"{kind}: bare reads of their objects": size / read / 1e6,
            f"{kind}: cold read over bare reads": took / read,
        }

    return measure


def _read(disk: Disk, path: str) -> int:
    with closing(disk.open(path)) as file:
        return len(file.read(0, file.size()))


_SAMPLES = {
    **{kind: _sample(kind) for kind in _PLACES},
    "linger": _linger,
    "take-over": _take_over,
    "cold open": _cold_open,
    **{f"tiered {kind}": _tiered(kind) for kind in _TIERS},
}
_GOALS = {
    **{f"{kind}: fsync put, 1 caller, p50": Goal(None, "ms") for kind in _PLACES},
    **{f"{kind}: bare create, p50": Goal(None, "ms") for kind in _PLACES},
    **{f"{kind}: put over create": Goal(1.5 if kind != "memory" else None, "×") for kind in _PLACES},
    **{f"{kind}: fsync put, {_TASKS} tasks": Goal(None, "/s") for kind in _PLACES},
    f"postgres: fsync put, {_TASKS} tasks": Goal(8000, "/s"),
    f"seaweedfs: fsync put, {_TASKS} tasks": Goal(8000, "/s"),
    **{f"{kind}: 1 KiB in batches": Goal(None, "MB/s") for kind in _PLACES},
    "seaweedfs: 1 KiB in batches": Goal(50, "MB/s"),
    **{f"{kind}: bare creates of 1 MiB": Goal(None, "MB/s") for kind in _PLACES},
    **{f"{kind}: chain over messages": Goal(10, "%") for kind in _PLACES},
    **{f"{kind}: objects while batches come in": Goal(None, "/s") for kind in _PLACES},
    "memory: objects while 64 tasks sync": Goal(None, "/s"),
    "folder store: take-over, owner killed": Goal(1, "s"),
    "folder store: take-over, silent owner, beyond its lease": Goal(1, "s"),
    "folder store: cold open of 1 GiB": Goal(None, "s"),
    "folder store: downloading its objects one by one": Goal(None, "s"),
    "folder store: cold open over download": Goal(None, "×"),
    **{f"{kind}: cold read of tiered segments": Goal(None, "MB/s") for kind in _TIERS},
    **{f"{kind}: bare reads of their objects": Goal(None, "MB/s") for kind in _TIERS},
    **{f"{kind}: cold read over bare reads": Goal(1.25, "×") for kind in _TIERS},  # 80 % of its speed
}


if __name__ == "__main__":
    _MISSING = {} if "postgres" in _PLACES else {"postgres": ["PostgreSQL"]}
    run("bench.stores", "Queues in a store, beside a local folder.", _SAMPLES, _GOALS, _MISSING)
