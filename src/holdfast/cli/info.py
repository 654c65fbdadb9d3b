"""What there is to know about a log without reading its messages."""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from holdfast.cli.owner import Owner, owner_of
from holdfast.cli.text import iso_time, safe, short_time, size
from holdfast.env import World, real_world
from holdfast.errors import HoldfastError
from holdfast.storage import LogReader
from holdfast.storage.finding import count_of
from holdfast.storage.index import NO_TIME
from holdfast.storage.retention import SegmentFacts
from holdfast.storage.state import State

_MOST_ROWS: Final = 24


def info_of(folder: str) -> dict[str, Any]:
    """The facts as a JSON document."""
    world = real_world()
    reader = LogReader(folder, world=world)
    identity = reader.identity
    start, end = reader.start, reader.end
    segments = [_segment(reader, facts) for facts in reader.segments()]
    first_times = [segment["first_time_ns"] for segment in segments if segment["first_time_ns"] is not None]
    last_times = [segment["last_time_ns"] for segment in segments if segment["last_time_ns"] is not None]
    owner = owner_of(folder)
    used, allocated = _disk_use(folder)
    oldest, newest = min(first_times, default=None), max(last_times, default=None)
    return {
        "folder": folder,
        "log_id": f"{reader.log_id:08x}",
        "epoch": reader.epochs.last if identity is None else identity.epoch,
        "start": start,
        "end": end,
        "synced_end": _synced_end(world, folder),
        "messages": end - start,
        "oldest_time_ns": oldest,
        "oldest_time": iso_time(oldest),
        "newest_time_ns": newest,
        "newest_time": iso_time(newest),
        "closed": identity is not None and identity.clean_end is not None,
        "owner": None if owner is None else msgspec.to_builtins(owner),
        "file_system": world.disk.kind(folder),
        "bytes": used,
        "allocated_bytes": allocated,
        "free_bytes": world.disk.free_bytes(folder),
        "segments": segments,
    }


def _synced_end(world: World, folder: str) -> int | None:
    state = State.open(world.disk, folder, write=False)
    if state is None:
        return None
    try:
        return state.synced_end
    finally:
        state.close()


def _segment(reader: LogReader, facts: SegmentFacts) -> dict[str, Any]:
    first_ns = _first_time_ns(reader, facts)
    last_ns = None if facts.max_time_ns == NO_TIME else facts.max_time_ns
    return {
        "base_offset": facts.base_offset,
        "next_offset": facts.next_offset,
        "bytes": facts.bytes,
        "first_time_ns": first_ns,
        "first_time": iso_time(first_ns),
        "last_time_ns": last_ns,
        "last_time": iso_time(last_ns),
    }


def _first_time_ns(reader: LogReader, facts: SegmentFacts) -> int | None:
    """The time of a segment's first message; None where it is damaged or trimmed meanwhile."""
    if facts.next_offset <= facts.base_offset:
        return None
    try:
        frame = next(reader.read(facts.base_offset), None)
        if frame is None:
            return None
        times = frame.columns().times_ns()
        return times[0] if times else frame.header.max_time_ns
    except HoldfastError:
        return None


def _disk_use(folder: str) -> tuple[int, int]:
    """Bytes of all files below the folder, as long as they are and as many as the disk holds for them."""
    used = allocated = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.stat(os.path.join(place, name), follow_symlinks=False)
            except OSError:
                continue
            used += facts.st_size
            allocated += facts.st_blocks * 512
    return used, allocated


def show_info(console: Console, info: dict[str, Any]) -> None:
    """The same for people."""
    console.print(safe(info["folder"]), soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("log", f"{info['log_id']}, epoch {info['epoch']}")
    facts.add_row("messages", _messages(info))
    if info["synced_end"] is not None:
        facts.add_row("ends", f"readable {info['end']}, synced {info['synced_end']}")
    facts.add_row("times (UTC)", f"{short_time(info['oldest_time_ns'])} to {short_time(info['newest_time_ns'])}")
    _add_owner(facts, info)
    facts.add_row(
        "disk", f"{size(info['allocated_bytes'])} used, {size(info['free_bytes'])} free ({info['file_system']})"
    )
    console.print(facts)
    _show_segments(console, info["segments"])


def _messages(info: dict[str, Any]) -> str:
    if not info["messages"]:
        return f"none; the next one gets offset {info['end']}"
    return f"{info['messages']:,} (offsets {info['start']} to {info['end'] - 1})"


def _add_owner(facts: Table, info: dict[str, Any]) -> None:
    owner = None if info["owner"] is None else msgspec.convert(info["owner"], Owner)
    if owner is not None and owner.alive:
        facts.add_row("owner", safe(str(owner)))
        return
    facts.add_row("owner", "none; it was closed in order" if info["closed"] else "none to be seen from here")
    if owner is not None:
        facts.add_row("last owner", safe(str(owner)))


def _show_segments(console: Console, segments: list[dict[str, Any]]) -> None:
    if not segments:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for name in ("segment", "next offset", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first message (UTC)", no_wrap=True)
    table.add_column("last message (UTC)", no_wrap=True)
    hidden = len(segments) - _MOST_ROWS if len(segments) > _MOST_ROWS + 1 else 0
    for number, segment in enumerate(segments):
        if hidden and number == _MOST_ROWS // 2:
            table.add_row("…", "", f"{hidden:,} more", "", "")
        if hidden and _MOST_ROWS // 2 <= number < _MOST_ROWS // 2 + hidden:
            continue
        table.add_row(
            str(segment["base_offset"]),
            str(segment["next_offset"]),
            size(segment["bytes"]),
            short_time(segment["first_time_ns"]),
            short_time(segment["last_time_ns"]),
        )
    console.print()
    console.print(table)
    if hidden:
        console.print(f"{count_of(len(segments), 'segment')} in all; --json lists them all")
