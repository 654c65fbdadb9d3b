"""`holdfast stats`: how many messages stand where."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from holdfast.api.ports import port_of
from holdfast.api.times import parse_duration, to_datetime
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.cli.look.messages import moment, seconds_text
from holdfast.cli.look.topics import standing_of
from holdfast.cli.opening import opened, topics_of
from holdfast.cli.operate.topic import topics_document, topics_table
from holdfast.cli.options import WAIT, AsJson, Group, QueueFolder, Topic, Wait
from holdfast.cli.output import OK, command, print_json, print_json_line, stdout
from holdfast.cli.places import queue_of
from holdfast.cli.progress import screen
from holdfast.cli.text import safe, show_table, size
from holdfast.env import real_world
from holdfast.errors import InvalidRequest, Unavailable
from holdfast.storage.checks.finding import count_of


@command
def stats_command(
    folder: QueueFolder,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often to look, with --watch.")] = "2s",
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Count the messages that are ready, leased, delayed and dead, and tell what they take.

    Of a folder with several topics it tells what each holds, and how far behind its groups are.
    """
    looking = _Looking(folder, topic, group, wait)
    if not watch:
        found, shown = looking.look()
        if as_json:
            print_json(found)
        else:
            show_table(stdout(), shown)
        return OK
    every_s = parse_duration(every, "--every")
    if every_s < 0.1:
        raise InvalidRequest(f"--every {every} is too often; give 100ms or more")
    _watch(looking, every_s, as_json=as_json)
    return OK


class _Looking:
    """One look after the other at a queue, or at many topics."""

    def __init__(self, folder: str, topic: str | None, group: str | None, wait: str) -> None:
        self._folder = folder
        self._topic = topic
        self._group = group
        self._wait = wait

    def look(self) -> tuple[dict[str, Any], Table]:
        """What there is, for scripts and for people."""
        if (
            self._topic is None
            and self._group is None
            and len(topics_of(self._folder)) > 1
            and not queue_of(self._folder)
        ):
            topics = list(standing_of(self._folder).topics())
            return topics_document(self._folder, topics), topics_table(topics)
        with opened(self._folder, topic=self._topic, group=self._group, wait=self._wait) as queue:
            oldest_ns = port_of(queue).oldest_ready_ns()
            stats = queue.stats()  # behind the look, which may come across damage
            found: dict[str, Any] = {**msgspec.to_builtins(stats), "folder": queue.folder}
        for own in ("metrics", "waiters", "durability"):
            del found[own]  # of this short opening, which nobody asked about
        found |= moment("oldest_ready", None if oldest_ns is None else to_datetime(oldest_ns))
        return found, _table(found)


def _watch(looking: _Looking, every_s: float, *, as_json: bool) -> None:
    """Between two looks the folder belongs to whoever wants it; while somebody has it, it says so."""
    looking.look()  # what is wrong now is an error; what comes later is shown
    console = stdout()
    with screen(console, painted=not as_json) as live:
        while True:
            try:
                found, shown = looking.look()
                if as_json:
                    print_json_line(found)
                else:
                    live.update(shown, refresh=True)
            except Unavailable as busy:
                if as_json:
                    print_json_line({"busy": str(busy)})
                else:
                    live.update(Text(safe(str(busy))), refresh=True)
            console.file.flush()
            time.sleep(every_s)


def _table(found: dict[str, Any]) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    of_group = "" if found["group"] == DEFAULT_GROUP else f", group {safe(found['group'])}"
    facts.add_row("queue", f"{safe(found['name'])} in {safe(found['folder'])}{of_group}")
    for phase in ("ready", "leased", "delayed", "dead"):
        facts.add_row(phase, f"{found[phase]:,}")
    if found["damaged"]:
        facts.add_row("damaged", f"{found['damaged']:,}, which nobody can read: see `holdfast check`")
    if found["oldest_ready_ms"] is not None:
        when = to_datetime(found["oldest_ready_ms"] * 1_000_000)
        facts.add_row("oldest ready", f"{seconds_text(when)} UTC ({_age(found['oldest_ready_ms'])} old)")
    start, end = found["start"], found["end"]
    if found["partitions"] > 1:  # the offsets are sums, which say nothing
        facts.add_row("partitions", f"{found['partitions']:,}, with {count_of(end - start, 'message')} kept")
    else:
        kept = f"{start} to {end - 1} are kept; all before {found['floor']} are settled" if end > start else "none yet"
        facts.add_row("offsets", kept)
    facts.add_row("disk", f"{size(found['bytes'])} in {count_of(found['segments'], 'segment')}")
    return facts


def _age(ms: int) -> str:
    now_ms = real_world().clock.now_ns() // 1_000_000
    return str(timedelta(seconds=max(0, now_ms - ms) // 1000))
