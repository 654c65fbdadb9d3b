"""`holdfast doctor` and `holdfast bench`: measure a disk, and the queues on it or on a server."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, Final

import msgspec

import holdfast
from holdfast.broker.folder.layout import QUERIES, short_reserve, topics
from holdfast.broker.streams.queries import list_queries
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, Wait, opened_broker
from holdfast.cli.parsing import argument, option
from holdfast.cli.places import PLACE
from holdfast.client.opening import is_address, parse_address
from holdfast.env import World, real_world
from holdfast.env.disk import write_fully
from holdfast.errors import HoldfastError, NotALog
from holdfast.model import Durability
from holdfast.settings import LogSettings
from holdfast.storage.files import is_log, join

_BLOCK: Final = bytes(range(256)) * 16
_STEP_BYTES: Final = 4 * 1024 * 1024
_MOST_BYTES: Final = 64 * 1024 * 1024
_SLOW_US: Final = 50_000

_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "fuse.glusterfs", "afs", "lustre", "beegfs"}
)


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes to make 4 KiB durable."""

    samples: int
    p50_us: float
    p99_us: float
    max_us: float


class Warn(msgspec.Struct, frozen=True, kw_only=True):
    """Something to consider before trusting this folder."""

    code: str
    message: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a folder."""

    folder: str
    holds_log: bool
    holds_queue: bool
    file_system: str
    maps: bool
    free_bytes: int
    min_free_bytes: int
    sync: Sync | None
    puts_per_second: int | None
    advice: tuple[str, ...]
    warnings: tuple[Warn, ...]


def doctor_command(
    folder: Annotated[str, argument("DIR", "Any folder, with or without a queue.")],
    seconds: Annotated[float, option("--seconds", "How long to measure.", least=0.1, most=600)] = 2.0,
    as_json: AsJson = False,
) -> int:
    """Measure the disk under a folder, and warn about risks. Writes a temporary file there and removes it.

    Examples:
        holdfast doctor ./data
        holdfast doctor ./data --seconds 10
    """
    diagnosis = diagnose(real_world(), folder, seconds=seconds)
    if as_json:
        output.print_json(msgspec.to_builtins(diagnosis))
    else:
        show(output.stdout(), diagnosis)
    return output.OK


def diagnose(world: World, folder: str, *, seconds: float, settings: LogSettings | None = None) -> Diagnosis:
    """Examine and measure a folder."""
    settings = settings or LogSettings()
    disk = world.disk
    if not disk.exists(folder):
        raise NotALog(f"there is no folder {folder}; create it first, or name the one that will hold it")
    free = disk.free_bytes(folder)
    kind = disk.kind(folder)
    sync = None
    if free > settings.min_free_bytes:
        with measuring_file(world, folder) as path:
            sync = measure(world, path, seconds=seconds, most_bytes=min(_MOST_BYTES, free - settings.min_free_bytes))
    return Diagnosis(
        folder=folder,
        holds_log=is_log(world, folder),
        holds_queue=bool(topics(world, folder)),
        file_system=kind,
        maps=disk.can_map(folder),
        free_bytes=free,
        min_free_bytes=settings.min_free_bytes,
        sync=sync,
        puts_per_second=None if sync is None else round(1e6 / max(sync.p50_us, 0.1)),
        advice=() if sync is None else _advice(sync),
        warnings=(
            *_warnings(kind, free, settings.min_free_bytes, sync),
            *_reserve_warnings(world, folder),
            *_user_warnings(world, folder),
            *_query_warnings(world, folder),
            *_write_warnings(world, folder),
        ),
    )


@contextmanager
def measuring_file(world: World, folder: str) -> Iterator[str]:
    """Yield the name of a file that is removed afterwards, also after Ctrl-C or SIGTERM.

    If even that fails, opening the log removes the file, because its name ends in `.tmp`.
    """
    path = join(folder, f"doctor-{os.getpid()}.tmp")
    with _ending_in_order():
        try:
            yield path
        finally:
            with suppress(FileNotFoundError):
                world.disk.remove(path)


def measure(world: World, path: str, *, seconds: float, most_bytes: int) -> Sync:
    """Write and sync 4 KiB at a time into reserved blocks, one after the other, as the log does."""
    clock = world.clock
    file = world.disk.open(path, write=True, create=True)
    taken_us: list[float] = []
    try:
        stop_ns = clock.monotonic_ns() + round(seconds * 1e9)
        position = reserved = 0
        while position + len(_BLOCK) <= most_bytes:
            if position + len(_BLOCK) > reserved:
                reserved = min(reserved + _STEP_BYTES, most_bytes)
                file.reserve(reserved)
                file.sync()
            start_ns = clock.monotonic_ns()
            write_fully(file, position, [_BLOCK])
            file.sync()
            end_ns = clock.monotonic_ns()
            taken_us.append((end_ns - start_ns) / 1000)
            position += len(_BLOCK)
            if end_ns >= stop_ns:
                break
    finally:
        file.close()
    taken_us.sort()
    last = len(taken_us) - 1
    return Sync(
        samples=len(taken_us),
        p50_us=taken_us[last // 2],
        p99_us=taken_us[last * 99 // 100],
        max_us=taken_us[last],
    )


def _advice(sync: Sync) -> tuple[str, ...]:
    rate = 1e6 / max(sync.p50_us, 0.1)
    return (
        f"durability fsync, one caller at a time: about {_rounded(rate)} puts per second, one sync each",
        f"many callers at once share a sync: 64 at a time, up to {_rounded(rate * 64)} per second if the CPU can",
        "batches share one, too: a batch of 100 costs one sync",
        "durability os or interval does not wait for the disk, and survives kill -9 but not a power cut",
    )


def _warnings(kind: str, free: int, min_free: int, sync: Sync | None) -> Iterator[Warn]:
    if kind in _MEMORY:
        yield Warn(code="memory", message=f"{kind} lives in memory: nothing here survives a restart of the machine")
    if kind in _NETWORK:
        message = f"{kind} is a network file system: locks and maps may not hold between machines; use a local disk"
        yield Warn(code="network", message=message)
    if kind == "overlay":
        message = "overlay is usually the inside of a container: it is lost with the container unless this is a volume"
        yield Warn(code="container", message=message)
    if free < min_free:
        message = f"{output.size(free)} are free, below min_free_bytes ({output.size(min_free)}): appending is refused"
        yield Warn(code="little_space", message=message)
    if sync is not None and sync.p99_us > _SLOW_US:
        message = (
            f"one sync in a hundred takes {output.duration(sync.p99_us)} or more: callers of fsync will wait that long"
        )
        yield Warn(code="slow_sync", message=message)
    if sync is not None and sync.p50_us < 20 and kind not in _MEMORY:
        message = (
            f"a sync takes {output.duration(sync.p50_us)}: too fast for a disk; it may only reach a cache that forgets"
        )
        yield Warn(code="fast_sync", message=message)


def _reserve_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn if the folder lives on what it keeps for a full disk."""
    used = short_reserve(world, folder)
    if used is not None:
        yield Warn(code="reserve_used", message=used)


def _user_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn about other users who could tamper with this folder."""
    why = world.disk.exposure(folder)
    if why is not None:
        yield Warn(code="other_users", message=f"{why}: it is refused unless you trust them (--trust-folder)")
        return
    why = world.disk.exposure(folder, above=True)
    if why is not None:
        yield Warn(code="other_users", message=f"{why}, and put another folder in its place: remove that permission")


def _query_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn about queries that keep old messages although they may have ended."""
    for query in list_queries(world, folder):
        place = f"{QUERIES}/{query.file}"
        if query.wrong:
            message = f"{place} cannot be read ({query.wrong}): no old message is removed while it is there"
            yield Warn(code="unreadable_query", message=message)
        elif query.stale:
            ago = output.duration((query.renewed_ms_ago or 0) * 1000)
            message = (
                f"the query {query.group} was last renewed {ago} ago; the next owner of the folder removes {place}"
            )
            yield Warn(code="stale_query", message=message)


def _write_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn about rows of a Spark job that were committed but did not all reach the log."""
    from holdfast.spark.commits import Staging

    try:
        for manifest in Staging(world, folder).pending():
            what = f"batch {manifest.batch} of the write {manifest.write_id}"
            message = f"{what} is committed, but may not be completely in the log: the next write finishes it"
            yield Warn(code="unfinished_write", message=message)
    except HoldfastError as error:
        yield Warn(code="unfinished_write", message=str(error))


def show(console: output.Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis as text."""
    console.print(output.safe(diagnosis.folder))
    facts = output.facts_table()
    facts.add_row(
        "holds", "a queue" if diagnosis.holds_queue else "a log" if diagnosis.holds_log else "no queue or log"
    )
    facts.add_row("file system", diagnosis.file_system)
    facts.add_row("stores", "through a map" if diagnosis.maps else "with a system call each (no safe map here)")
    free, floor = output.size(diagnosis.free_bytes), output.size(diagnosis.min_free_bytes)
    facts.add_row("free", f"{free} (appending stops below {floor})")
    if diagnosis.sync is not None:
        sync = diagnosis.sync
        median, p99, worst = map(output.duration, (sync.p50_us, sync.p99_us, sync.max_us))
        facts.add_row("write + sync", f"{median} median, {p99} p99, {worst} worst ({sync.samples:,} times 4 KiB)")
    console.print(facts)
    for line in diagnosis.advice:
        console.print(_item("-", "", line))
    for warning in diagnosis.warnings:
        console.print(_item("warning", "bold yellow", warning.message))
    if not diagnosis.warnings:
        console.print("no warnings")


def _item(mark: str, style: str, text: str) -> output.Table:
    item = output.Table(output.Column(""), output.Column("", wide=True), titles=False, gap=1)
    item.add_row(output.Text(mark, style), text)
    return item


def _rounded(number: float) -> str:
    """Round to two digits, which is all that such a measurement is worth."""
    digits = max(0, len(str(round(number))) - 2)
    return f"{round(number, -digits):,.0f}"


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Make SIGTERM raise, so that every `finally` runs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # signals can only be set in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# `holdfast bench`: messages through a queue that exists only for this.


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of call, made again and again: how many messages went through, and how long each call took."""

    operation: str
    durability: str
    batch: int
    messages: int
    seconds: float
    per_second: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float


_DURABILITIES: Final[tuple[Durability, ...]] = ("os", "fsync")
_OPERATIONS: Final = ("put", "get", "ack")
_BENCH: Final = "holdfast-bench-"


def bench_command(
    folder: Annotated[str | None, argument(PLACE, "A folder or a server; a temporary folder by default.")] = None,
    seconds: Annotated[float, option("--seconds", "How long to measure each row.", least=0.05, most=600)] = 1.0,
    batch: Annotated[int, option("--batch", "Messages per batch.", least=2, most=1_000)] = 100,
    body_bytes: Annotated[int, option("--size", "The size of a body in bytes.", least=0, most=1_000_000)] = 256,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Measure how fast this machine, folder or server is.

    Puts, gets and acks messages one at a time and in batches, with durability os and fsync, from one thread. It uses a
    temporary folder or topic, which it removes afterwards; existing queues are not touched.

    Examples:
        holdfast bench
        holdfast bench ./data --seconds 5
        holdfast bench http://127.0.0.1:7700 --size 4096 --json
    """
    world = real_world()
    with _ending_in_order(), _bench_place(folder) as place:
        bench = Bench(world, seconds=seconds, batch=batch, body=bytes(body_bytes))
        with (
            opened_broker(place, wait=wait, create=True) as broker,
            output.progress("measuring", shown=not as_json) as told,
        ):
            measured = bench.run(broker, told)
    if as_json:
        for each in measured:
            output.print_json({"place": folder, "body_bytes": body_bytes, **msgspec.to_builtins(each)})
        return output.OK
    where = folder or f"a temporary folder in {tempfile.gettempdir()} ({world.disk.kind(tempfile.gettempdir())})"
    output.say(f"{output.safe(where)}: bodies of {output.size(body_bytes)}, one thread")
    output.stdout().print(bench_table(measured))
    return output.OK


@contextmanager
def _bench_place(place: str | None) -> Iterator[str]:
    """Yield a data folder that is removed afterwards, or the address of a server."""
    if place is not None and is_address(place):
        address = parse_address(place)
        yield place if address.queue is None else place.removesuffix(f"/{address.queue}")
        return
    if place is not None and not os.path.isdir(place):
        raise NotALog(f"there is no folder {place}; create it first, or name the one that will hold it")
    with tempfile.TemporaryDirectory(prefix=_BENCH, dir=place) as made:
        yield made


class Bench:
    """Sends messages through queues of its own, and measures each call."""

    def __init__(self, world: World, *, seconds: float, batch: int, body: bytes) -> None:
        self._clock = world.clock
        self._name = f"{_BENCH}{os.getpid()}-{world.clock.now_ns() % 1_000_000_000}"
        self._seconds = seconds
        self._batch = batch
        self._body = body

    def run(self, broker: holdfast.Broker, told: Callable[[int, int], None]) -> list[Measured]:
        """Measure every kind of call; tells how many kinds are done."""
        found: list[Measured] = []
        total = len(_DURABILITIES) * 2 * len(_OPERATIONS)
        for durability in _DURABILITIES:
            for batch in (1, self._batch):
                name = f"{self._name}-{durability}-{batch}"
                queue = broker.queue(name, lease_ms=3_600_000)
                try:
                    for each in self._measure(queue, durability, batch):
                        found.append(each)
                        told(len(found), total)
                finally:
                    broker.delete_topic(name)
        return found

    def _measure(self, queue: holdfast.Queue[Any], durability: Durability, batch: int) -> Iterator[Measured]:
        """Put for some time, then get and ack as many."""
        bodies = [self._body] * batch
        put: Callable[[], object] = functools.partial(queue.put_many, bodies, durability=durability)
        if batch == 1:
            put = functools.partial(queue.put, self._body, durability=durability)
        taken_us = self._timed(put, until_s=self._seconds)
        calls = len(taken_us)
        yield _measured("put", durability, batch, taken_us)
        taken: deque[list[Any]] = deque()
        yield _measured("get", durability, batch, self._timed(lambda: taken.append(_taken(queue, batch)), calls=calls))

        def ack() -> None:
            queue.ack_many(taken.popleft(), durability=durability)

        yield _measured("ack", durability, batch, self._timed(ack, calls=calls))

    def _timed(self, call: Callable[[], object], *, until_s: float = 0.0, calls: int = 0) -> list[float]:
        """Call for some time, or so often; return how long each call took, in microseconds."""
        now_ns = self._clock.monotonic_ns
        taken_us: list[float] = []
        stop_ns = now_ns() + round(until_s * 1e9)
        while len(taken_us) < calls or (not calls and (not taken_us or now_ns() < stop_ns)):
            begin_ns = now_ns()
            call()
            taken_us.append((now_ns() - begin_ns) / 1000)
        return taken_us


def _taken(queue: holdfast.Queue[Any], batch: int) -> list[Any]:
    return [queue.receive_nowait()] if batch == 1 else queue.receive_many(batch, timeout=0)


def _measured(operation: str, durability: str, batch: int, taken_us: list[float]) -> Measured:
    seconds = sum(taken_us) / 1e6
    ordered = sorted(taken_us)
    p50, p95, p99 = (ordered[(len(ordered) - 1) * percent // 100] for percent in (50, 95, 99))
    messages = len(taken_us) * batch
    return Measured(
        operation=operation,
        durability=durability,
        batch=batch,
        messages=messages,
        seconds=round(seconds, 3),
        per_second=round(messages / max(seconds, 1e-9), 1),
        p50_us=round(p50, 1),
        p95_us=round(p95, 1),
        p99_us=round(p99, 1),
        max_us=round(ordered[-1], 1),
    )


def bench_table(measured: list[Measured]) -> output.Table:
    """Return a table with a row for each kind of call."""
    shown = output.table("call", "durability", "batch>", "messages/s>", "median>", "p95>", "p99>", "max>")
    for each in measured:
        times = (each.p50_us, each.p95_us, each.p99_us, each.max_us)
        rate = f"{each.per_second:,.0f}"
        shown.add_row(each.operation, each.durability, f"{each.batch:,}", rate, *map(output.duration, times))
    return shown
