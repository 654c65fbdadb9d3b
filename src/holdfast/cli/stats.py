"""`holdfast stats`: how many messages stand where."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.messages import moment, seconds_text
from holdfast.cli.opened import opened
from holdfast.cli.options import WAIT, AsJson, QueueFolder, Wait
from holdfast.cli.output import OK, command, print_json, print_json_line, stdout
from holdfast.cli.text import safe, size
from holdfast.embedded.times import parse_duration, to_datetime
from holdfast.env import real_world
from holdfast.errors import Busy, InvalidRequest
from holdfast.storage.finding import count_of


@command
def stats_command(
    folder: QueueFolder,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often to look, with --watch.")] = "2s",
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Count the messages that are ready, leased, delayed and dead, and tell what they take."""
    if not watch:
        found = _look(folder, wait)
        if as_json:
            print_json(found)
        else:
            stdout().print(_table(found))
        return OK
    every_s = parse_duration(every, "--every")
    if every_s < 0.1:
        raise InvalidRequest(f"--every {every} is too often; give 100ms or more")
    _watch(folder, every_s, wait, as_json=as_json)
    return OK


def _look(folder: str, wait: str) -> dict[str, Any]:
    with opened(folder, wait=wait) as queue:
        stats = queue.stats()
        oldest = next(queue.messages("ready", limit=1), None)
        found: dict[str, Any] = msgspec.to_builtins(stats)
    for own in ("metrics", "waiters", "durability"):
        del found[own]  # of this short opening, which nobody asked about
    return {**found, **moment("oldest_ready", None if oldest is None else oldest.timestamp)}


def _watch(folder: str, every_s: float, wait: str, *, as_json: bool) -> None:
    """Between two looks the folder belongs to whoever wants it; while somebody has it, it says so."""
    _look(folder, wait)  # what is wrong now is an error; what comes later is shown
    console = stdout()
    with Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else _Plain() as live:
        while True:
            try:
                found = _look(folder, wait)
                if as_json:
                    print_json_line(found)
                else:
                    live.update(_table(found), refresh=True)
            except Busy as busy:
                if as_json:
                    print_json_line({"busy": str(busy)})
                else:
                    live.update(Text(safe(str(busy))), refresh=True)
            console.file.flush()
            time.sleep(every_s)


class _Plain:
    """Live, where there is no screen to paint on: one table behind the other."""

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, table: RenderableType, *, refresh: bool) -> None:
        stdout().print(table)


def _table(found: dict[str, Any]) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("queue", f"{safe(found['name'])} in {safe(found['folder'])}")
    for phase in ("ready", "leased", "delayed", "dead"):
        facts.add_row(phase, f"{found[phase]:,}")
    if found["oldest_ready_ms"] is not None:
        when = to_datetime(found["oldest_ready_ms"] * 1_000_000)
        facts.add_row("oldest ready", f"{seconds_text(when)} UTC ({_age(found['oldest_ready_ms'])} old)")
    start, end = found["start"], found["end"]
    kept = f"{start} to {end - 1} are kept; all before {found['floor']} are settled" if end > start else "none yet"
    facts.add_row("offsets", kept)
    facts.add_row("disk", f"{size(found['bytes'])} in {count_of(found['segments'], 'segment')}")
    return facts


def _age(ms: int) -> str:
    now_ms = real_world().clock.now_ns() // 1_000_000
    return str(timedelta(seconds=max(0, now_ms - ms) // 1000))
