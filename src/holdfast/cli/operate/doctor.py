"""`holdfast doctor`: measure what to expect of the disk under a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.broker.folder.layout import QUERIES, topics
from holdfast.broker.streams.queries import list_queries
from holdfast.cli.opening import AsJson
from holdfast.cli.output import OK, command, duration, facts_table, print_json, safe, size, stdout
from holdfast.cli.places import argument, option
from holdfast.env import World, real_world
from holdfast.errors import HoldfastError, NotALog
from holdfast.settings import LogSettings
from holdfast.storage.files import is_log, join, write_fully

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


@command
def doctor_command(
    folder: Annotated[str, argument("DIR", "Any folder, with or without a queue.")],
    seconds: Annotated[float, option("--seconds", "How long to measure.", min=0.1, max=600)] = 2.0,
    as_json: AsJson = False,
) -> int:
    """Measure what the disk under a folder can do, and warn of what could hurt.

    Writes one temporary file there and removes it again.
    """
    diagnosis = diagnose(real_world(), folder, seconds=seconds)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        show(stdout(), diagnosis)
    return OK


def diagnose(world: World, folder: str, *, seconds: float, settings: LogSettings | None = None) -> Diagnosis:
    """Examine and measure a folder."""
    settings = settings or LogSettings()
    disk = world.disk
    if not disk.exists(folder):
        raise NotALog(f"there is no folder {folder}; make it first, or name the one that will hold it")
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
        f"durability fsync, one caller at a time: about {_rounded(rate)} puts a second, one sync each",
        f"many callers at once share a sync: 64 waiting at a time, up to {_rounded(rate * 64)} a second if the CPU can",
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
        message = "overlay is usually the inside of a container: it goes with the container unless this is a volume"
        yield Warn(code="container", message=message)
    if free < min_free:
        message = f"{size(free)} are free, below min_free_bytes ({size(min_free)}): appending is refused"
        yield Warn(code="little_space", message=message)
    if sync is not None and sync.p99_us > _SLOW_US:
        message = f"one sync in a hundred takes {duration(sync.p99_us)} or more: callers of fsync will wait that long"
        yield Warn(code="slow_sync", message=message)
    if sync is not None and sync.p50_us < 20 and kind not in _MEMORY:
        message = f"a sync takes {duration(sync.p50_us)}: too fast for a disk; it may only reach a cache that forgets"
        yield Warn(code="fast_sync", message=message)


def _user_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn about other users who could tamper with this folder."""
    why = world.disk.exposure(folder)
    if why is not None:
        yield Warn(code="other_users", message=f"{why}: it is refused unless you trust them (--trust-folder)")
        return
    why = world.disk.exposure(folder, above=True)
    if why is not None:
        yield Warn(code="other_users", message=f"{why}, and put another folder in its place: take the right away there")


def _query_warnings(world: World, folder: str) -> Iterator[Warn]:
    """Warn about queries that keep old messages although they may have ended."""
    for query in list_queries(world, folder):
        place = f"{QUERIES}/{query.file}"
        if query.wrong:
            message = f"{place} cannot be read ({query.wrong}): no old message is removed while it is there"
            yield Warn(code="unreadable_query", message=message)
        elif query.stale:
            ago = duration((query.renewed_ms_ago or 0) * 1000)
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
            message = f"{what} is committed, and not known to be wholly in the log: the next write finishes it"
            yield Warn(code="unfinished_write", message=message)
    except HoldfastError as error:
        yield Warn(code="unfinished_write", message=str(error))


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis as text."""
    console.print(safe(diagnosis.folder), soft_wrap=True)
    facts = facts_table()
    facts.add_row(
        "holds", "a queue" if diagnosis.holds_queue else "a log" if diagnosis.holds_log else "no queue, no log"
    )
    facts.add_row("file system", diagnosis.file_system)
    facts.add_row("stores", "through a map" if diagnosis.maps else "with a system call each (no safe map here)")
    free, floor = size(diagnosis.free_bytes), size(diagnosis.min_free_bytes)
    facts.add_row("free", f"{free} (appending stops below {floor})")
    if diagnosis.sync is not None:
        sync = diagnosis.sync
        facts.add_row(
            "write + sync",
            f"{duration(sync.p50_us)} median, {duration(sync.p99_us)} p99, {duration(sync.max_us)} worst "
            f"({sync.samples:,} times 4 KiB)",
        )
    console.print(facts)
    for line in diagnosis.advice:
        console.print(_item("-", "", line))
    for warning in diagnosis.warnings:
        console.print(_item("warning", "bold yellow", warning.message))
    if not diagnosis.warnings:
        console.print("no warnings")


def _item(mark: str, style: str, text: str) -> Table:
    item = Table.grid(padding=(0, 1))
    item.add_row(Text(mark, style=style), Text(text))
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
