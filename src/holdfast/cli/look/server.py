"""`holdfast status`, `waiters`, `audit`: what a server says of itself."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from holdfast.cli.look.messages import moment, seconds_text
from holdfast.cli.opening import asked, opened_broker, topics_of
from holdfast.cli.options import WAIT, AsJson, DataFolder, Wait
from holdfast.cli.output import OK, command, print_json, print_json_line, stderr, stdout
from holdfast.cli.text import safe, show_table, size, table
from holdfast.client.address import is_address
from holdfast.config.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.process import environment
from holdfast.storage.files import join

Most: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="At most so many.")]


def _asked(place: str, wait: str, kind: Any, *path: str, **query: Any) -> Any:
    with opened_broker(place, wait=wait) as broker:
        return asked(broker, kind, *path, **query)


@command
def status_command(folder: DataFolder, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """How a server does: since when, on which folder, with how many callers and how much room on its disk."""
    from holdfast.protocol.admin import Status

    status: Status = _asked(folder, wait, Status, "admin", "status")
    if as_json:
        found = {name: getattr(status, name) for name in status.__struct_fields__ if name != "started_at"}
        print_json({**found, **moment("started_at", status.started_at)})
        return OK
    shown = table("", "")
    shown.show_header = False
    for title, text in (
        ("server", f"{safe(folder)}, version {safe(status.version)}{', going' if status.leaving else ''}"),
        ("folder", f"{safe(status.folder)}, {size(status.disk_free_bytes)} free"),
        ("since", f"{seconds_text(status.started_at)} UTC"),
        ("topics", f"{status.topics:,}"),
        ("connections", _of_at_most(status.connections, status.max_connections)),
        ("descriptors", _of_at_most(status.descriptors, status.max_descriptors)),
        ("waiting", _of_at_most(status.waiters, status.max_waiters)),
        ("streams", f"{status.streams:,}"),
        ("members", f"{status.members:,}"),
    ):
        shown.add_row(title, text)
    if status.tokens_problem:
        shown.add_row("tokens", f"the file cannot be used, the last one holds: {safe(status.tokens_problem)}")
    show_table(stdout(), shown)
    return OK


def _of_at_most(count: int, most: int) -> str:
    return f"{count:,} of at most {most:,}" if most else f"{count:,}"  # a server of an older release says no limit


@command
def waiters_command(folder: DataFolder, limit: Most = 100, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Who waits for messages at a server, by topic and group; the longest lines first."""
    from holdfast.protocol.admin import WaitersTold

    found: WaitersTold = _asked(folder, wait, WaitersTold, "admin", "waiters", limit=limit)
    if as_json:
        lines = [{name: getattr(line, name) for name in line.__struct_fields__} for line in found.lines]
        print_json({"waiting": found.waiting, "max_waiters": found.max_waiters, "lines": lines})
    elif not found.lines:
        stderr().print("nobody waits for messages")
    else:
        shown = table("topic", "group", "waiting>", "streams>")
        for line in found.lines:
            shown.add_row(safe(line.topic), safe(line.group), f"{line.waiters:,}", f"{line.streams:,}")
        show_table(stdout(), shown)
    return OK


@command
def audit_command(folder: DataFolder, limit: Most = 20, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Who did what to which topic, and what became of it; the newest last. For administrators.

    Calls that were refused come behind: they are kept apart, so that they cannot push out what was done.
    """
    acts, refused = ([*reversed(newest)] for newest in _acts(folder, limit, wait))
    if as_json:
        for act in (*acts, *refused):
            print_json_line(msgspec.to_builtins(act))
        return OK
    if not acts:
        stderr().print("nothing was done by an administrator yet")
    else:
        _show(acts)
    if refused:
        stdout().print("\nrefused:")
        _show(refused)
    return OK


def _acts(place: str, limit: int, wait: str) -> tuple[list[Any], list[Any]]:
    """Acts and refusals, the newest first: told by a server, or read from the files that one of the folder writes."""
    if is_address(place):
        from holdfast.server.api.admin import Acts

        told: Acts = _asked(place, wait, Acts, "admin", "audit", limit=limit)
        return told.acts, told.refused
    from holdfast.server.audit import FILE, Audit

    topics_of(place)
    settings = read_settings(real_world(), environment()).server
    audit = Audit(real_world(), settings.audit_file or join(place, FILE))
    return audit.last(limit), audit.refusals.last(limit)


def _show(acts: list[Any]) -> None:
    shown = table("time (UTC)", "who", "what", "target", "outcome")
    for act in acts:
        shown.add_row(seconds_text(act.time), safe(act.principal), safe(act.route), safe(act.target), safe(act.outcome))
    show_table(stdout(), shown)
