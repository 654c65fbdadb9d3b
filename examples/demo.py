"""A queue at work: producers, workers, kill -9 in the middle of it, dead letters, and an account that must balance.

    make demo                       or: python examples/demo.py
    make demo ARGS='--dir /mnt'     on another disk
    make demo ARGS='--kills 10'     more often

One process owns a folder, so producers and workers are threads of it. This process watches: it notes what the
owner says, kills it with -9, starts it again, and counts. The exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import holdfast

ORDERS = 20_000
PRODUCERS = WORKERS = 4
BATCH = 25
SETTINGS = {"max_attempts": 3, "backoff_ms": 100, "body_type": dict}

# What the owner says, 8 bytes at a time: what happened, a small number, a large number.
NOTE = Struct("<cxHI")
OPENED, PUT, REPEATED, HANDLED, ACKED, EARLY = b"O", b"P", b"R", b"H", b"A", b"E"


def tell(what: bytes, small: int, large: int) -> None:
    os.write(1, NOTE.pack(what, min(small, 65_535), large))


# The owner


def order(number: int) -> holdfast.NewMessage:
    """Some orders are urgent, some are for later, and some can never be handled, or not yet."""
    fate = {7: "no customer", 57: "no bank"}.get(number % 100, "")
    delay = random.uniform(0.5, 3) if number % 20 == 0 else None
    return holdfast.NewMessage(
        body={"order": number, "fate": fate, "not_before": time.time() + (delay or 0)},
        key=f"customer-{number % 1000}",
        priority=number % 9 + 1 if number % 10 == 3 else 0,
        delay=delay,
        dedup_id=f"order-{number}",  # a put that was killed before its answer is put again, and stored once
    )


def produce(queue: holdfast.Queue, producer: int, first_batch: int) -> None:
    numbers = range(producer, ORDERS, PRODUCERS)
    for batch in range(first_batch, -(-len(numbers) // BATCH)):
        stored = queue.put_many([order(number) for number in numbers[batch * BATCH : (batch + 1) * BATCH]])
        tell(PUT, producer, batch)
        repeated = sum(one.duplicate for one in stored)
        if repeated:
            tell(REPEATED, 0, repeated)


def handle(body: dict) -> None:
    if body["fate"] == "no customer":
        raise LookupError(f"order {body['order']} names a customer that does not exist")
    if body["fate"] == "no bank":
        raise ConnectionError(f"the bank did not answer for order {body['order']}")


def work(queue: holdfast.Queue) -> None:
    for message in queue:
        number = message.body["order"]
        with suppress(LookupError, ConnectionError), message:  # an error nacks the message, and is kept with it
            if time.time() < message.body["not_before"]:
                tell(EARLY, 0, number)
            handle(message.body)
            tell(HANDLED, message.attempt, number)
            message.ack()
            tell(ACKED, 0, number)


def own(folder: str, first_batches: list[int]) -> None:
    """Open the queue, let all of them work, and close it when nothing is left to do."""
    began = time.perf_counter()
    queue = holdfast.open(folder, **SETTINGS)
    tell(OPENED, 0, round((time.perf_counter() - began) * 1e6))
    producers = [threading.Thread(target=produce, args=(queue, *each)) for each in enumerate(first_batches)]
    workers = [threading.Thread(target=work, args=(queue,)) for _ in range(WORKERS)]
    for thread in producers + workers:
        thread.start()
    for thread in producers:
        thread.join()
    while (stats := queue.stats()).ready or stats.leased or stats.delayed:
        time.sleep(0.02)
    queue.close()  # ends the workers' loops
    for thread in workers:
        thread.join()


# The account


@dataclass
class Account:
    """What the owners said, from outside of them."""

    next_batches: list[int] = field(default_factory=lambda: [0] * PRODUCERS)
    acknowledged: set[int] = field(default_factory=set)
    handled: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    after_ack: int = 0
    redelivered: int = 0
    early: int = 0
    repeated: int = 0
    opened_ms: list[float] = field(default_factory=list)

    def take(self, notes: bytes) -> None:
        for what, small, large in NOTE.iter_unpack(notes):
            if what == PUT:
                self.acknowledged.update(range(small, ORDERS, PRODUCERS)[large * BATCH : (large + 1) * BATCH])
                self.next_batches[small] = large + 1
            elif what == HANDLED:
                self.after_ack += large in self.acked
                self.handled[large] += 1
                self.redelivered += small > 1
            elif what == ACKED:
                self.acked.add(large)
            elif what == OPENED:
                self.opened_ms.append(large / 1000)
            else:
                self.early += what == EARLY
                self.repeated += large if what == REPEATED else 0


def watch(folder: str, account: Account, kill_at: int | None, shown: Progress) -> int:
    """Run an owner, to its end or until so many orders were handled; answers with its exit code."""
    command = [sys.executable, __file__, "--own", folder, *map(str, account.next_batches)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert owner.stdout is not None
    try:
        notes = b""
        while part := owner.stdout.read(1 << 16):
            notes += part
            whole = len(notes) // NOTE.size * NOTE.size
            account.take(notes[:whole])
            notes = notes[whole:]
            shown.update(shown.task_ids[0], completed=len(account.handled))
            if kill_at is not None and len(account.handled) >= kill_at:
                time.sleep(random.uniform(0, 0.01))  # it works on: the kill may hit any point
                owner.kill()
                kill_at = None
        return owner.wait()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def size_of(folder: str) -> str:
    return f"{sum(path.stat().st_blocks * 512 for path in Path(folder).rglob('*') if path.is_file()) / 2**20:.1f} MiB"


def run_owners(console: Console, folder: str, account: Account, kills: int) -> bool:
    """Kill the owner again and again, then let the last one finish. Whether each ended as it should."""
    console.print(f"\n[bold]1. {PRODUCERS} producers, {WORKERS} workers, kill -9 {kills} times[/bold]")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("owner", "opened in", "puts acknowledged", "handled", "ended"):
        table.add_column(title, justify="left" if title == "ended" else "right")
    bar = Progress(
        TextColumn("handled"), BarColumn(), TextColumn("{task.completed} of {task.total}"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    right = True
    with bar:
        bar.add_task("handled", total=ORDERS)
        for number in range(1, kills + 2):
            last = number > kills
            code = watch(folder, account, None if last else ORDERS * number // (kills + 1), bar)
            right = right and code == (0 if last else -signal.SIGKILL)
            figures = (len(account.acknowledged), len(account.handled))
            ended = {0: "by itself, all done", -signal.SIGKILL: "[red]kill -9[/red]"}.get(code, f"with code {code}")
            table.add_row(str(number), f"{account.opened_ms[-1]:.0f} ms", *(f"{n:,}" for n in figures), ended)
    console.print(table)
    return right


def dead_letters(console: Console, folder: str, account: Account) -> set[int]:
    """List what could not be handled, redrive the half that can be by now; answers with the numbers that stay dead."""
    console.print("\n[bold]2. What could not be handled is among the dead letters[/bold]")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("letters", "reason", "error (first line)"):
        table.add_column(title, justify="right" if title == "letters" else "left")
    with holdfast.open(folder, create=False, body_type=dict) as queue:
        for group in queue.dead.groups():
            table.add_row(str(group.count), group.reason, group.error)
        console.print(table)
        letter = queue.dead.list(limit=1)[0]
        console.print(f"  each keeps every error, as {letter.id} (was {letter.original_id}):")
        for failure in letter.failures:
            console.print(f"    {failure.why}, {failure.error.splitlines()[0] if failure.error else 'killed'}")
        redriven = queue.dead.redrive(where='json.fate == "no bank"')
        console.print(f"  the bank is back: {redriven.done} redriven")
        while messages := queue.get_many(100, timeout=0):
            for message in messages:
                account.handled[message.body["order"]] += 1
            queue.ack_many(messages)
        dead = {letter.body["order"] for letter in queue.dead.list()}
        before = size_of(folder)
        queue.compact()
        console.print(f"  folder: {before}; after compact: {size_of(folder)}")
    return dead


def summary(console: Console, account: Account, dead: set[int], *, right: bool) -> int:
    """The account, and the exit code."""
    lost = len(account.acknowledged - set(account.handled) - dead)
    both = len(dead & set(account.handled))
    twice = sum(account.handled.values()) - len(account.handled)
    rows = [
        ("puts acknowledged", len(account.acknowledged), "each was on disk", ORDERS),
        ("handled", len(account.handled), "at least once", None),
        ("dead letters left", len(dead), "with every error", None),
        ("lost", lost, "not handled, not dead", 0),
        ("both handled and dead", both, "", 0),
        ("delivered again after its ack", account.after_ack, "acks survive a kill", 0),
        ("delivered early", account.early, f"of {ORDERS // 20:,} delayed", 0),
        ("redelivered after a kill", account.redelivered, "it was in hand", None),
        ("  of these: handled twice", twice, "killed before the ack", None),
        ("put again, found as duplicates", account.repeated, "killed before the answer", None),
    ]
    table = Table(title="The account", title_justify="left", title_style="bold")
    for title in ("what", "messages", "because", "verdict"):
        table.add_column(title, justify="right" if title == "messages" else "left", no_wrap=title != "because")
    for what, count, because, wanted in rows:
        good = wanted is None or count == wanted
        right = right and good
        verdict = "" if wanted is None else "[green]ok[/green]" if good else "[bold red]WRONG[/bold red]"
        table.add_row(what, f"{count:,}", because, verdict)
    console.print()
    console.print(table)
    figures = f"{len(account.acknowledged):,} puts acknowledged, {len(account.handled):,} handled"
    console.print(f"{figures}, {len(dead):,} dead letters, {lost:,} lost.", soft_wrap=True)
    recovered = ", ".join(f"{ms:.0f} ms" for ms in account.opened_ms[1:])
    console.print(f"Recovery after kill -9: {recovered or 'none'}.")
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="A queue at work, and what kill -9 does to it.")
    parser.add_argument("--dir", help="where to make the temporary folder")
    parser.add_argument("--kills", type=int, default=2, help="how often to kill the owner (%(default)s)")
    parser.add_argument("--own", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        own(arguments.own[0], [int(batch) for batch in arguments.own[1:]])
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`
    start = time.monotonic()
    console, account = Console(highlight=False), Account()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", dir=arguments.dir) as temporary:
        console.print(f"Holdfast {holdfast.__version__}. The queue is in {temporary}, removed at the end.")
        right = run_owners(console, f"{temporary}/orders", account, max(arguments.kills, 0))
        dead = dead_letters(console, f"{temporary}/orders", account)
        code = summary(console, account, dead, right=right)
    console.print(f"{time.monotonic() - start:.0f} seconds.")
    return code


if __name__ == "__main__":
    sys.exit(main())
