"""The tour of Holdfast's log: kill its writer, damage its file, fill its disk, and count what is left.

    python examples/log_tour.py
    python examples/log_tour.py --dir /mnt    on another disk
    python examples/log_tour.py --kills 20    longer

Everything happens in a temporary folder that is removed at the end. The exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from holdfast import __version__
from holdfast.env import RealDisk
from holdfast.errors import DamagedRange, DiskFull, OffsetOutOfRange
from holdfast.model import Durability
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader, open_log
from holdfast.storage.checks.check import check
from holdfast.storage.checks.repair import repair

SEGMENT_BYTES = 256 * 1024
# One writer after the other: how durable each append is, and how many messages it takes.
WRITERS: list[tuple[Durability, int]] = [("os", 1), ("fsync", 1), ("interval", 1), ("os", 100), ("fsync", 100)]
# A writer is killed after so many messages, or, where each waits for the disk, after a while.
MOST_MESSAGES = 6_000
WRITE_SECONDS = {"fsync": 0.4, "interval": 10, "os": 10}
SPEED_SECONDS = 0.5
TASKS = 64


def message(number: int) -> bytes:
    """The message that belongs at this offset: its number, and a tail whose length depends on it."""
    return b"message %d " % number + bytes([97 + number % 26]) * (number * 7919 % 200)


@dataclass
class Count:
    """What reading a log gave: messages in their place and unchanged, and all that is not so."""

    good: int = 0
    missing: int = 0
    wrong: int = 0


def count(log: Log | LogReader) -> Count:
    """Read everything from start to end and hold each message against what belongs there."""
    seen, expected = Count(), log.start
    for record in log.records(expected, on_damage="skip"):
        seen.missing += max(record.offset - expected, 0)
        right = record.offset >= expected and record.value == message(record.offset)
        seen.good, seen.wrong = seen.good + right, seen.wrong + (not right)
        expected = max(expected, record.offset + 1)
    seen.missing += log.end - expected
    return seen


@dataclass
class Tour:
    """Where the tour takes place, and what it has found so far."""

    console: Console
    folder: str
    verdicts: list[tuple[str, str, bool]] = field(default_factory=list)
    acknowledged: int = 0
    lost: int = 0

    def step(self, title: str) -> None:
        self.console.print(f"\n[bold]{title}[/bold]")

    def say(self, text: str) -> None:
        self.console.print(Padding(Text(text), (0, 0, 0, 2)))

    def judge(self, event: str, seen: str, *, ok: bool) -> None:
        self.verdicts.append((event, seen, ok))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar where somebody is looking."""
        bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)


def settings(durability: Durability = "os") -> LogSettings:
    return LogSettings(durability=durability, segment_bytes=SEGMENT_BYTES)


def write_for_ever(folder: str, durability: Durability, batch: int) -> None:
    """What the writer process does: append, and note each append that has returned."""
    with open_log(folder, settings(durability)) as log:
        while True:
            first = log.written_end
            if batch == 1:
                appended = log.append_one(message(first))
            else:
                appended = log.append([message(number) for number in range(first, first + batch)])
            os.write(1, appended.next_offset.to_bytes(8, "little"))


def kill_midway(folder: str, durability: Durability, batch: int) -> list[int]:
    """Let a writer work for a while and kill it with -9; answers with the ends that it noted."""
    most = MOST_MESSAGES // batch
    command = [sys.executable, __file__, "--writer", folder, durability, str(batch)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert writer.stdout is not None
    try:
        noted = writer.stdout.read(8)  # it is at work
        deadline = time.monotonic() + WRITE_SECONDS[durability]
        while time.monotonic() < deadline and len(noted) < 8 * most and (part := writer.stdout.read(1 << 16)):
            noted += part
        time.sleep(random.uniform(0, 0.01))  # it works on, so that the kill may hit any point of an append
    finally:
        writer.kill()
        rest = writer.stdout.read()  # what it noted until then
        writer.stdout.close()
        code = writer.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended by itself with {code}; its error stands above")
    noted += rest
    return [int.from_bytes(noted[at : at + 8], "little") for at in range(0, len(noted) // 8 * 8, 8)]


def kills(tour: Tour, times: int) -> None:
    """Kill a writer again and again; open, count, go on."""
    tour.step(f"1. A writer is killed with -9 in the middle of its work, {times} times")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("durability")
    for title in ("a call", "acknowledged", "more", "lost", "wrong", "epoch", "opened in"):
        table.add_column(title, justify="right")
    total = Count()
    with tour.progress("killing", times) as advance:
        for number in range(times):
            durability, batch = WRITERS[number % len(WRITERS)]
            before = LogReader(tour.folder).end if number else 0
            noted = kill_midway(tour.folder, durability, batch)
            start = time.perf_counter()
            with open_log(tour.folder, settings()) as log:
                opened_ms = (time.perf_counter() - start) * 1000
                seen, end, epoch = count(log), log.end, log.epoch
            lost = seen.missing + max(noted[-1] - end, 0)
            steady = noted == list(range(before + batch, noted[-1] + 1, batch))
            wrong = seen.wrong + (not steady)
            total.missing, total.wrong = total.missing + lost, total.wrong + wrong
            tour.acknowledged += noted[-1] - before
            figures = (noted[-1] - before, max(end - noted[-1], 0), lost, wrong, epoch)
            table.add_row(durability, str(batch), *(f"{figure:,}" for figure in figures), f"{opened_ms:.0f} ms")
            advance()
    tour.console.print(table)
    tour.say(
        "a call: messages in each append; more: written when the kill came, not yet acknowledged; "
        "epoch: rises with each opening that finds a log not closed in order"
    )
    tour.lost += total.missing
    tour.judge(
        f"kill -9, {times} times",
        f"{tour.acknowledged:,} acknowledged, {total.missing:,} lost, {total.wrong:,} changed, doubled or out of order",
        ok=not total.missing and not total.wrong,
    )


def damage(tour: Tour) -> None:
    """Flip one bit of an old message; everything else must stay readable."""
    tour.step("2. One bit of an old segment flips")
    reader = LogReader(tour.folder)
    old = reader.segments()[1]
    header = next(reader.read((old.base_offset + old.next_offset) // 2)).header
    path = Path(tour.folder) / f"{old.base_offset:020d}.log"
    place = header.position + header.end >> 1
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    tour.say(f"flipped a bit of byte {place} of {path.name}")

    report = check(tour.folder)
    found = next((finding for finding in report.findings if finding.severity == "damage"), None)
    named = found is not None and (found.file, found.first_offset) == (path.name, header.base_offset)
    if found is not None:
        tour.say(f"check: {found.file}, position {found.position}: {found.cost}")
    try:
        for _ in LogReader(tour.folder).records(report.start):
            pass
        says_where = False
    except DamagedRange as error:
        says_where = (error.first_offset, error.next_offset) == (header.base_offset, header.next_offset)
        tour.say(f"a reader is told: offset {error.first_offset} is damaged, read on from {error.next_offset}")
    seen = count(LogReader(tour.folder))
    tour.say(f"all others are read: {seen.good:,} good, {seen.missing} missing")
    exact = seen == Count(good=report.end - report.start - header.count, missing=header.count)
    tour.judge("a flipped bit", f"found and named; {seen.good:,} others unharmed", ok=named and says_where and exact)

    result = repair(tour.folder)
    for step in result.plan.steps:
        tour.say(f"repair: {step.what}")
    after = result.after
    gap = next((finding for finding in after.findings if finding.code == "gap"), None)
    same = count(LogReader(tour.folder)) == seen
    with open_log(tour.folder, settings()) as log:
        log.append_one(message(log.written_end))
        on = count(log).good == seen.good + 1
    tour.say(f"check: whole again; marked as lost: {after.lost_messages}; the original is kept in a backup")
    mended = after.ok and gap is not None and gap.first_offset == header.base_offset
    tour.judge("repair", "a gap stands in its place; appending goes on", ok=mended and same and on)


def full_disk(tour: Tour) -> None:
    """Ask for more free space than any disk has: appending is refused, and nothing else is."""
    tour.step("3. The disk has no room left")
    tour.say("the log is told to leave 1 EiB free (min_free_bytes): more than there is")
    before = LogReader(tour.folder).end
    strict = LogSettings(durability="os", segment_bytes=SEGMENT_BYTES, min_free_bytes=2**60)
    with open_log(tour.folder, strict) as log:
        try:
            log.append_one(message(before))
            refused = False
        except DiskFull as error:
            refused = error.retryable
            tour.say(f"append: {type(error).__name__}, retryable; {str(error).partition(': ')[2].partition('.')[0]}")
        readable = count(log).good
        unchanged = log.written_end == before
    with open_log(tour.folder, settings()) as log:
        log.append_one(message(before))
        goes_on = log.end == before + 1
    tour.say(f"reading went on ({readable:,} messages), and with room again appending does")
    tour.judge(
        "no room on the disk", "refused, nothing kept of it; reading goes on", ok=refused and unchanged and goes_on
    )


def old_segments(tour: Tour) -> None:
    """Retention takes whole old segments, but none that somebody still needs."""
    tour.step("4. Retention frees old segments")
    keep = LogSettings(durability="os", segment_bytes=SEGMENT_BYTES, retention_segments=2, retention_check_ms=3_600_000)
    # Log.open has no keeper thread, so retention runs when we say so.
    with Log.open(tour.folder, keep) as log:
        segments = log.segments()
        needed = segments[len(segments) // 2].base_offset
        log.pin("a slow reader", needed)
        pinned = log.retain()
        held = log.start == needed
        tour.say(f"{len(segments)} segments, keep 2, a reader is at offset {needed:,}: {pinned.segments} freed")
        log.unpin("a slow reader")
        freed = log.retain()
        tour.say(f"the reader is done: {freed.segments} more freed; the log begins at offset {log.start:,}")
        try:
            next(log.records(0))
            refused = False
        except OffsetOutOfRange as error:
            refused = error.start == log.start
        seen = count(log)
        right = held and refused and len(log.segments()) == 2 and not seen.missing and not seen.wrong
    freed_bytes = pinned.bytes + freed.bytes
    tour.judge("retention", f"{freed_bytes / 2**20:.1f} MiB freed, a pinned segment stayed until unpinned", ok=right)


def rate(call: Callable[[], object], each: int = 1) -> float:
    """Messages a second, for a call that takes `each` of them."""
    start = time.perf_counter()
    calls = 0
    while (seconds := time.perf_counter() - start) < SPEED_SECONDS:
        for _ in range(10):
            call()
        calls += 10
    return calls * each / seconds


async def task_rate(log: Log, body: bytes) -> float:
    async def write(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await log.append_one_async(body)
            done += 1
        return done

    start = time.perf_counter()
    done = await asyncio.gather(*(write(start + SPEED_SECONDS) for _ in range(TASKS)))
    return sum(done) / (time.perf_counter() - start)


def speed(tour: Tour) -> None:
    """How fast appending was in this run."""
    tour.step("5. Speed in this run, 100-byte messages, one process")
    body = bytes(range(100))
    bodies = [body] * 100
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("durability")
    table.add_column("called by")
    table.add_column("messages/s", justify="right")
    with tour.progress("measuring", 4) as advance, open_log(f"{tour.folder}-speed") as log:
        runs: list[tuple[Durability, str, Callable[[], float]]] = [
            ("os", "one caller, one message a call", lambda: rate(lambda: log.append_one(body, "os"))),
            ("os", "one caller, 100 a call", lambda: rate(lambda: log.append(bodies, durability="os"), 100)),
            ("fsync", "one caller, one message a call", lambda: rate(lambda: log.append_one(body))),
            ("fsync", f"{TASKS} tasks, one message a call", lambda: asyncio.run(task_rate(log, body))),
        ]
        for durability, caller, measure in runs:
            table.add_row(durability, caller, f"{measure():,.0f}")
            advance()
    tour.console.print(table)
    tour.say("a few tenths of a second each, on a machine that may be busy; `make bench` measures with care")


def summary(tour: Tour) -> int:
    """What was seen, and the exit code."""
    tour.console.print()
    table = Table(title="What happened, and what was left", title_justify="left", title_style="bold")
    table.add_column("event", no_wrap=True)
    table.add_column("seen")
    table.add_column("verdict", no_wrap=True)
    for event, seen, ok in tour.verdicts:
        table.add_row(event, seen, "[green]ok[/green]" if ok else "[bold red]FAILED[/bold red]")
    tour.console.print(table)
    good = all(ok for _, _, ok in tour.verdicts)
    verdict = f"{tour.acknowledged:,} messages acknowledged before a kill, {tour.lost:,} lost."
    tour.console.print(verdict if good else f"{verdict} Something is wrong: see above.", style="" if good else "red")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="The tour of Holdfast's log.")
    parser.add_argument("--dir", help="where to make the temporary folder")
    parser.add_argument("--kills", type=int, default=len(WRITERS), help="how often to kill the writer (%(default)s)")
    parser.add_argument("--writer", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.writer:
        folder, durability, batch = arguments.writer
        write_for_ever(folder, durability, int(batch))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", dir=arguments.dir) as temporary:
        console = Console(highlight=False)
        tour = Tour(console, f"{temporary}/log")
        console.print(
            f"Holdfast {__version__}. Data in {temporary} ({RealDisk().kind(temporary)}), removed at the end."
        )
        kills(tour, max(arguments.kills, 1))
        damage(tour)
        full_disk(tour)
        old_segments(tour)
        speed(tour)
        code = summary(tour)
    console.print(f"{time.monotonic() - start:.0f} seconds.")
    return code


if __name__ == "__main__":
    sys.exit(main())
