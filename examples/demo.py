"""A broker at work: producers, workers, a stream, kill -9, tables on Spark, and an account that must balance.

    make demo                       or: python examples/demo.py
    make demo ARGS='--dir /mnt'     on another disk
    make demo ARGS='--kills 10'     more often
    make demo ARGS=--no-spark       without the tables

One process owns a folder, so all of them are threads of it. Producers send orders and returns to two topics; the
workers of the group "billing" handle them, in queue mode; a consumer of the group "statistics" counts them, in stream
mode. This process watches: it notes what the owner says, kills it with -9, starts it again, and counts. Then Spark
makes tables of it all (demo_spark.py). The exit code is 1 if anything was lost.
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from struct import Struct

import demo_spark
from demo_spark import new_table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import holdfast

TOPICS = {"orders": 3, "returns": 1}  # with so many partitions
MESSAGES = 20_000
PRODUCERS = 4
WORKERS = 2  # for each topic
BATCH = 50
SETTINGS = {"max_attempts": 3, "backoff_ms": 100}
OPENS, OPEN_FOR = datetime(2026, 11, 16, 8, tzinfo=UTC), timedelta(hours=8)  # the shop
REPORT = Path(__file__).resolve().parents[1] / "build" / "demo-report.html"

# What the owner says, 8 bytes at a time: what happened, a small number, a large number.
NOTE = Struct("<cxHI")
OPENED, SENT, KNOWN, HANDLED, ACKED, EARLY, COUNTED = b"O", b"S", b"K", b"H", b"A", b"E", b"C"


def tell(what: bytes, small: int, *large: int) -> None:
    os.write(1, b"".join(NOTE.pack(what, min(small, 65_535), number) for number in large))


# The owner


def topic_of(number: int) -> str:
    return "returns" if number % 3 == 0 else "orders"


def send(producer: holdfast.Producer, number: int) -> object:
    """Some messages are urgent, some are for later, and some can never be handled, or not yet."""
    delay = random.uniform(0.5, 3) if number % 20 == 0 else None
    body = {
        "number": number,
        "customer": None if number % 100 == 7 else f"customer-{number % 1000}",
        "amount": "gratis" if number % 500 == 13 else number % 90 + 10.5,
        "bank": "south" if number % 100 == 57 else "north",
        "at": OPENS + OPEN_FOR * number / MESSAGES,
        "not_before": time.time() + (delay or 0),
    }
    priority = number % 9 + 1 if number % 10 == 3 else 0
    return producer.send(topic_of(number), body, key=f"customer-{number % 1000}", priority=priority, delay=delay)


def produce(broker: holdfast.Broker, producer_number: int) -> None:
    """Send all from the first one on, whatever was stored before a kill: what is there already is not stored again."""
    numbers = range(producer_number, MESSAGES, PRODUCERS)
    with broker.producer(name=f"till-{producer_number}", resume=True) as producer:
        for batch in range(-(-len(numbers) // BATCH)):
            sent = [send(producer, number) for number in numbers[batch * BATCH : (batch + 1) * BATCH]]
            producer.flush()
            known = sum(one.result().duplicate for one in sent)
            tell(SENT, producer_number, batch)
            if known:
                tell(KNOWN, 0, known)


def handle(body: dict) -> None:
    if body["customer"] is None:
        raise LookupError(f"number {body['number']} has no customer")
    if body["bank"] == "south":
        raise ConnectionError(f"the bank did not answer for number {body['number']}")


def work(billing: holdfast.Group) -> None:
    for message in billing:
        number = message.body["number"]
        with suppress(LookupError, ConnectionError), message:  # an error nacks the message, and is kept with it
            if time.time() < message.body["not_before"]:
                tell(EARLY, 0, number)
            handle(message.body)
            tell(HANDLED, message.attempt, number)
            message.ack()
            tell(ACKED, 0, number)


def count(broker: holdfast.Broker, ended: threading.Event) -> None:
    """Read everything as a stream, and commit what was told."""
    with broker.consumer(list(TOPICS), group="statistics", auto_commit=False) as consumer:
        while not ended.is_set():
            messages = consumer.poll(timeout=0.1)
            tell(COUNTED, 0, *[message.body["number"] for message in messages])
            consumer.commit()


def own(folder: str) -> None:
    """Open the folder, let all of them work, and close it when nothing is left to do."""
    began = time.perf_counter()
    broker = holdfast.open_broker(folder, body_type=dict)
    for name, partitions in TOPICS.items():
        broker.create_topic(name, partitions=partitions, exist_ok=True, **SETTINGS)
    billing = [broker.group(name, "billing") for name in TOPICS]
    tell(OPENED, 0, round((time.perf_counter() - began) * 1e6))
    ended = threading.Event()
    producers = [threading.Thread(target=produce, args=(broker, number)) for number in range(PRODUCERS)]
    others = [threading.Thread(target=work, args=(group,)) for group in billing * WORKERS]
    others.append(threading.Thread(target=count, args=(broker, ended)))
    for thread in producers + others:
        thread.start()
    for thread in producers:
        thread.join()
    while any(group.lag for group in broker.groups()):
        time.sleep(0.1)
    ended.set()
    others.pop().join()
    broker.close()  # ends the workers' loops
    for thread in others:
        thread.join()


# The account


@dataclass
class Account:
    """What the owners said, from outside of them."""

    acknowledged: set[int] = field(default_factory=set)
    handled: Counter[int] = field(default_factory=Counter)
    counted: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    after_ack: int = 0
    redelivered: int = 0
    early: int = 0
    known: int = 0
    opened_ms: list[float] = field(default_factory=list)

    def take(self, notes: bytes) -> None:
        for what, small, large in NOTE.iter_unpack(notes):
            if what == SENT:
                self.acknowledged.update(range(small, MESSAGES, PRODUCERS)[large * BATCH : (large + 1) * BATCH])
            elif what == HANDLED:
                self.after_ack += large in self.acked
                self.handled[large] += 1
                self.redelivered += small > 1
            elif what == COUNTED:
                self.counted[large] += 1
            elif what == ACKED:
                self.acked.add(large)
            elif what == OPENED:
                self.opened_ms.append(large / 1000)
            else:
                self.early += what == EARLY
                self.known += large if what == KNOWN else 0


def watch(folder: str, account: Account, kill_at: int | None, shown: Progress) -> int:
    """Run an owner, to its end or until so many messages were handled; answers with its exit code."""
    owner = subprocess.Popen([sys.executable, __file__, "--own", folder], stdout=subprocess.PIPE, bufsize=0)
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
    workers = WORKERS * len(TOPICS)
    console.print(f"\n[bold]1. {PRODUCERS} producers, {workers} workers, 1 stream, kill -9 {kills} times[/bold]")
    table = new_table("owner", "opened in", "sent", "handled", "counted", "ended")
    bar = Progress(
        TextColumn("handled"), BarColumn(), TextColumn("{task.completed} of {task.total}"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    right = True
    with bar:
        bar.add_task("handled", total=MESSAGES)
        for number in range(1, kills + 2):
            last = number > kills
            code = watch(folder, account, None if last else MESSAGES * number // (kills + 1), bar)
            right = right and code == (0 if last else -signal.SIGKILL)
            figures = (len(account.acknowledged), len(account.handled), len(account.counted))
            ended = {0: "by itself, all done", -signal.SIGKILL: "[red]kill -9[/red]"}.get(code, f"with code {code}")
            table.add_row(str(number), f"{account.opened_ms[-1]:.0f} ms", *(f"{n:,}" for n in figures), ended)
    console.print(table)
    return right


def dead_letters(console: Console, folder: str, account: Account) -> tuple[set[int], int]:
    """List what could not be handled, redrive the half that can be by now.

    Answers with the numbers that stay dead, and how many of those redriven came to the stream again.
    """
    console.print("\n[bold]2. What could not be handled is among the dead letters of billing[/bold]")
    table = new_table("letters", "topic", "reason", "error")
    with holdfast.open_broker(folder, create=False, body_type=dict) as broker:
        billing = [broker.group(name, "billing") for name in TOPICS]
        for group in billing:
            for kind in group.dead.groups():
                table.add_row(str(kind.count), group.name, kind.reason, kind.error)
        console.print(table)
        letter = billing[0].dead.list(limit=1)[0]
        console.print(f"  each keeps every error, as {letter.id} (was {letter.original_id}):")
        for failure in letter.failures:
            console.print(f"    {failure.why}, {failure.error.splitlines()[0] if failure.error else 'killed'}")
        redriven = [group.dead.redrive(where='json.bank == "south"').done for group in billing]
        console.print(f"  the bank is back: {sum(redriven)} redriven, for billing alone")
        for group in billing:
            while messages := group.receive_many(100, timeout=0):
                account.handled.update(message.body["number"] for message in messages)
                group.ack_many(messages)
        with broker.consumer(list(TOPICS), group="statistics") as consumer:
            again = len(consumer.poll(timeout=0.2))
        dead = {letter.body["number"] for group in billing for letter in group.dead.list()}
    return dead, again


def tables(console: Console, temporary: str, report: Path) -> list[demo_spark.Figure]:
    """Land, refine, aggregate, look into the dead letters, prove it; then the queue may let go of what is handled."""
    console.print("\n[bold]3. Spark makes tables of it, and proves that they hold every message[/bold]")
    figures = demo_spark.to_tables(console, Path(temporary), report, MESSAGES)
    folder = f"{temporary}/shop"
    before = size_of(folder)
    with holdfast.open_broker(folder, create=False) as broker:
        for name in TOPICS:
            broker.group(name, "billing").compact()
    console.print(f"  What is handled may leave the queue: its folder has {before}, after compact {size_of(folder)}")
    return figures


def summary(
    console: Console, account: Account, dead: set[int], again: int, more: list[demo_spark.Figure], *, right: bool
) -> int:
    """The account, and the exit code."""
    lost = len(account.acknowledged - set(account.handled) - dead)
    both = len(dead & set(account.handled))
    rows = [
        ("sent and acknowledged", len(account.acknowledged), "each was on disk", MESSAGES),
        ("handled by billing", len(account.handled), "at least once", None),
        ("dead letters left", len(dead), "with every error", None),
        ("lost", lost, "not handled, not dead", 0),
        ("both handled and dead", both, "", 0),
        ("delivered again after its ack", account.after_ack, "acks survive a kill", 0),
        ("delivered early", account.early, f"of {MESSAGES // 20:,} delayed", 0),
        ("counted by the stream", len(account.counted), "it saw every message", MESSAGES),
        ("redriven, and counted again", again, "they are for billing", 0),
        ("redelivered after a kill", account.redelivered, "it was in hand", None),
        ("  of these: handled twice", account.handled.total() - len(account.handled), "killed before the ack", None),
        ("counted again after a kill", account.counted.total() - len(account.counted), "before the commit", None),
        ("sent again, known already", account.known, "stored once", None),
        *more,
    ]
    table = Table(title="The account", title_justify="left", title_style="bold")
    for title in ("what", "messages", "because", "verdict"):
        table.add_column(title, justify="right" if title == "messages" else "left", no_wrap=title != "because")
    for what, count_, because, wanted in rows:
        good = wanted is None or count_ == wanted
        right = right and good
        verdict = "" if wanted is None else "[green]ok[/green]" if good else "[bold red]WRONG[/bold red]"
        table.add_row(what, f"{count_:,}", because, verdict)
    console.print()
    console.print(table)
    figures = f"{len(account.acknowledged):,} messages acknowledged, {len(account.handled):,} handled"
    figures += f", {len(dead):,} dead letters, {len(account.counted):,} counted by the stream"
    console.print(f"{figures}, {lost:,} lost.", soft_wrap=True)
    recovered = ", ".join(f"{ms:.0f} ms" for ms in account.opened_ms[1:])
    console.print(f"Recovery after kill -9: {recovered or 'none'}.")
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="A broker at work, and what kill -9 does to it.")
    parser.add_argument("--dir", help="where to make the temporary folder")
    parser.add_argument("--kills", type=int, default=2, help="how often to kill the owner (%(default)s)")
    parser.add_argument("--no-spark", action="store_true", help="end before the tables")
    parser.add_argument("--report", type=Path, default=REPORT, help="where to keep the report (build/demo-report.html)")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        own(arguments.own)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`
    start = time.monotonic()
    console, account = Console(highlight=False), Account()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", dir=arguments.dir) as temporary:
        console.print(
            f"Holdfast {holdfast.__version__}. The topics are in {temporary}, removed at the end.", soft_wrap=True
        )
        right = run_owners(console, f"{temporary}/shop", account, max(arguments.kills, 0))
        dead, again = dead_letters(console, f"{temporary}/shop", account)
        more: list[demo_spark.Figure] = []
        if demo_spark.installed() and not arguments.no_spark:
            more = tables(console, temporary, arguments.report)
        elif not arguments.no_spark:
            console.print("\nThere is no Spark here: `pip install 'holdfast[spark]'` adds the tables.")
        code = summary(console, account, dead, again, more, right=right)
    console.print(f"{time.monotonic() - start:.0f} seconds.")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
