"""`holdfast log`: what a log holds, in summary and message by message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from holdfast.broker.check.folder import parts_of
from holdfast.broker.folder.contents import Catalog
from holdfast.broker.messages import check_partition
from holdfast.cli import output
from holdfast.cli.opening import AsJson, Folder, Topic, chosen_topic, is_queue, log_of
from holdfast.cli.parsing import Section, option
from holdfast.cli.reading import check_has_log
from holdfast.codec.frame import Frame, Kind
from holdfast.env import World, real_world
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, InvalidRequest, MessageTooLarge
from holdfast.model import Record, count_of
from holdfast.storage import LogReader
from holdfast.storage.checks.finding import offsets
from holdfast.storage.files import LOCK
from holdfast.storage.frames import NO_TIME
from holdfast.storage.retention import SegmentFacts
from holdfast.storage.state import LogState

# Finding the owner of a log without touching its lock.
#
# Trying the lock, even for a moment, could turn away an owner that is just starting. The kernel lists the locks that
# are held; the note in the lock file says who wrote it last.


_LOCKS: Final = Path("/proc/locks")
_NOTE_BYTES: Final = 512


class LockOwner(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the owner. `alive` is None if it cannot be determined from here."""

    alive: bool | None
    pid: int | None = None
    host: str | None = None
    command: str | None = None
    since: str | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that left no readable note"
        return f"process {self.pid} on {self.host} ({self.command}), since {self.since}"


def owner_of(folder: str, locks: Path = _LOCKS) -> LockOwner | None:
    """Return the owner of the folder, or the last one; None if it was never owned."""
    path = os.path.join(folder, LOCK)
    try:
        inode = os.stat(path).st_ino
        note = _note(Path(path).read_bytes()[:_NOTE_BYTES])
    except OSError:
        return None
    try:
        held = _is_locked(locks.read_text(encoding="ascii", errors="replace"), inode)
    except OSError:
        held = None
    return msgspec.structs.replace(note, alive=held)


def _note(content: bytes) -> LockOwner:
    try:
        facts = json.loads(content)
        return LockOwner(
            alive=None,
            pid=int(facts["pid"]),
            host=str(facts["host"]),
            command=str(facts["command"]),
            since=str(facts["since"]),
        )
    except (ValueError, KeyError, TypeError):
        return LockOwner(alive=None)


def _is_locked(locks: str, inode: int) -> bool | None:
    """Whether a process holds the lock; None if none is listed, since one in another container would not be."""
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5].endswith(f":{inode}"):
            return True
    return None


# The facts about a log that are known without reading its messages.


_MOST_ROWS: Final = 24


def info_of(folder: str) -> dict[str, Any]:
    """Return the facts as a JSON document."""
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
        "oldest_time": output.iso_time(oldest),
        "newest_time_ns": newest,
        "newest_time": output.iso_time(newest),
        "closed": identity is not None and identity.clean_end is not None,
        "owner": None if owner is None else msgspec.to_builtins(owner),
        "file_system": world.disk.kind(folder),
        "bytes": used,
        "allocated_bytes": allocated,
        "free_bytes": world.disk.free_bytes(folder),
        "segments": segments,
    }


def _synced_end(world: World, folder: str) -> int | None:
    state = LogState.open(world.disk, folder, write=False)
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
        "first_time": output.iso_time(first_ns),
        "last_time_ns": last_ns,
        "last_time": output.iso_time(last_ns),
    }


def _first_time_ns(reader: LogReader, facts: SegmentFacts) -> int | None:
    """Return the time of a segment's first message; None if it is damaged or has just been trimmed."""
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
    """Return the total length of all files below the folder, and the bytes that they take on disk."""
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


def show_info(console: output.Console, info: dict[str, Any]) -> None:
    """Print the facts as text."""
    console.print(output.safe(info["folder"]))
    facts = output.facts_table()
    facts.add_row("log", f"{info['log_id']}, epoch {info['epoch']}")
    facts.add_row("messages", _messages(info))
    if info["synced_end"] is not None:
        facts.add_row("ends", f"readable {info['end']}, synced {info['synced_end']}")
    facts.add_row(
        "times (UTC)", f"{output.short_time(info['oldest_time_ns'])} to {output.short_time(info['newest_time_ns'])}"
    )
    _add_owner(facts, info)
    facts.add_row(
        "disk",
        f"{output.size(info['allocated_bytes'])} used, {output.size(info['free_bytes'])} free ({info['file_system']})",
    )
    console.print(facts)
    _show_segments(console, info["segments"])


def _messages(info: dict[str, Any]) -> str:
    if not info["messages"]:
        return f"none; the next one gets offset {info['end']}"
    return f"{info['messages']:,} (offsets {info['start']} to {info['end'] - 1})"


def _add_owner(facts: output.Table, info: dict[str, Any]) -> None:
    owner = None if info["owner"] is None else msgspec.convert(info["owner"], LockOwner)
    if owner is not None and owner.alive:
        facts.add_row("owner", output.safe(str(owner)))
        return
    facts.add_row("owner", "none; it was closed cleanly" if info["closed"] else "none visible from here")
    if owner is not None:
        facts.add_row("last owner", output.safe(str(owner)))


def _show_segments(console: output.Console, segments: list[dict[str, Any]]) -> None:
    if not segments:
        return
    numbers = (output.Column(name, right=True) for name in ("segment", "next offset", "bytes"))
    table = output.Table(
        *numbers, output.Column("first message (UTC)"), output.Column("last message (UTC)"), ruled=True
    )
    hidden = len(segments) - _MOST_ROWS if len(segments) > _MOST_ROWS + 1 else 0
    for number, segment in enumerate(segments):
        if hidden and number == _MOST_ROWS // 2:
            table.add_row("…", "", f"{hidden:,} more", "", "")
        if hidden and _MOST_ROWS // 2 <= number < _MOST_ROWS // 2 + hidden:
            continue
        table.add_row(
            str(segment["base_offset"]),
            str(segment["next_offset"]),
            output.size(segment["bytes"]),
            output.short_time(segment["first_time_ns"]),
            output.short_time(segment["last_time_ns"]),
        )
    console.print()
    console.print(table)
    if hidden:
        console.print(f"{count_of(len(segments), 'segment')} in total; --json lists them all")


# Printing messages, page by page for people and line by line for scripts; damaged ones are skipped.


_PAGE_ROWS: Final = 100
_SPACE: Final = 2
_OFFSET_CELLS: Final = 6
_TIME_CELLS: Final = 19
_KEY_CELLS: Final = 9
_HEADER_CELLS: Final = 12
_SIZE_CELLS: Final = 6
_VALUE_CELLS: Final = 16


_Column: TypeAlias = tuple[str, int, Literal["left", "right"]]


class Dump:
    """One pass over a log's messages."""

    def __init__(self, reader: LogReader, *, as_json: bool) -> None:
        self._reader = reader
        self._as_json = as_json
        self._console = output.stdout()
        self._page: list[tuple[Kind, Record]] = []
        self._shown: tuple[bool, bool] | None = None
        self._whole = True

    def run(self, start: int, limit: int | None) -> bool:
        """Print up to `limit` messages; return whether none of them was damaged."""
        for kind, record in islice(self._records(start), limit):
            if self._as_json:
                output.print_json(_document(kind, record))
                continue
            self._page.append((kind, record))
            if len(self._page) == _PAGE_ROWS:
                self._show_page()
        self._show_page()
        return self._whole

    def _records(self, offset: int) -> Iterator[tuple[Kind, Record]]:
        # Stop at the current end: a dump must finish even while messages are appended.
        end = self._reader.end
        while True:
            try:
                for frame in self._reader.read(offset):
                    if frame.base_offset >= end:
                        return
                    yield from self._of_frame(frame, offset)
                    offset = frame.next_offset
                return
            except DamagedRange as damage:
                self._say(damage.first_offset, damage.next_offset, str(damage.__context__ or damage))
                offset = damage.next_offset

    def _of_frame(self, frame: Frame, offset: int) -> Iterator[tuple[Kind, Record]]:
        try:
            records = list(frame.records())
        except (CorruptData, MessageTooLarge) as error:
            self._say(max(offset, frame.base_offset), frame.next_offset, str(error))
            return
        kind = Kind(frame.header.kind)
        for record in records:
            if record.offset >= offset:
                yield kind, record

    def _say(self, first: int, next_offset: int, reason: str) -> None:
        self._whole = False
        self._show_page()
        if self._as_json:
            document = {"first_offset": first, "next_offset": next_offset, "reason": reason}
            output.print_json({"damaged": {**document, "messages": next_offset - first}})
        lost = f"{count_of(next_offset - first, 'message')} ({offsets(first, next_offset)})"
        output.note(f"damaged: {lost}: {output.safe(reason)}")

    def _show_page(self) -> None:
        if not self._page:
            return
        keys = any(record.key is not None for _, record in self._page)
        headers = any(record.headers for _, record in self._page)
        first = self._shown != (keys, headers)
        self._shown = (keys, headers)
        self._console.print(_table(self._console, self._page, keys=keys, headers=headers, titles=first))
        self._page.clear()


def _table(
    console: output.Console, page: list[tuple[Kind, Record]], *, keys: bool, headers: bool, titles: bool
) -> output.Table:
    """Return a table with columns of fixed width, so that the pages of a long dump line up; the value gets the rest."""
    columns: list[_Column] = [
        ("offset", max(_OFFSET_CELLS, len(str(page[-1][1].offset))), "right"),
        ("time (UTC)", _TIME_CELLS, "left"),
    ]
    if keys:
        columns.append(("key", _KEY_CELLS, "left"))
    if headers:
        columns.append(("headers", _HEADER_CELLS, "left"))
    columns.append(("bytes", _SIZE_CELLS, "right"))
    taken = sum(cells + _SPACE for _, cells, _ in columns)
    value_cells = max(_VALUE_CELLS, console.width - taken)
    columns.append(("value", value_cells, "left"))
    table = output.Table(
        *(output.Column(title, justify == "right", cells=cells) for title, cells, justify in columns), titles=titles
    )
    for kind, record in page:
        row = [str(record.offset), output.short_time(record.timestamp_ns)]
        if keys:
            row.append("" if record.key is None else output.preview(record.key, _KEY_CELLS))
        if headers:
            row.append(_headers(record))
        value = output.preview(bytes(record.value), value_cells)
        row += [f"{len(record.value):,}", value if kind == Kind.DATA else f"({kind.name.lower()}) {value}"]
        table.add_row(*row)
    return table


def _headers(record: Record) -> str:
    return ", ".join(f"{output.safe(name)}={output.preview(value, _HEADER_CELLS)}" for name, value in record.headers)


def _document(kind: Kind, record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ns": record.timestamp_ns,
        "time": output.iso_time(record.timestamp_ns),
        "kind": kind.name.lower(),
        "epoch": record.epoch,
        **output.as_json("key", record.key),
        "headers": [{"name": name, **output.as_json("value", value)} for name, value in record.headers],
        "priority": record.priority,
        "expires_at_ms": record.expires_at_ms,
        "due_at_ms": record.due_at_ms,
        "flags": record.flags,
        "bytes": len(record.value),
        **output.as_json("value", bytes(record.value)),
    }


app = Section("Look inside a log.")


@app.command("info")
def info_command(folder: Folder, as_json: AsJson = False) -> int:
    """Show a log's offsets, times, segments, owner and disk space. For a queue, shows each of its logs.

    Examples:
        holdfast log info jobs
    """
    if not is_queue(folder):
        info = info_of(folder)
        if as_json:
            output.print_json(info)
        else:
            show_info(output.stdout(), info)
        return output.OK
    infos = [{"name": part.name, **info_of(part.folder)} for part in parts_of(real_world(), folder)]
    if as_json:
        output.print_json({"folder": folder, "logs": infos})
        return output.OK
    console = output.stdout()
    for number, info in enumerate(infos):
        if number:
            console.print()
        show_info(console, info)
    return output.OK


@app.command("dump")
def dump_command(
    folder: Folder,
    offset: Annotated[int | None, option("--offset", "Begin at this offset instead of the start.", least=0)] = None,
    limit: Annotated[int | None, option("--limit", "At most this many messages.", least=0)] = None,
    from_time: Annotated[
        str | None,
        option("--from-time ISO", "Begin with the first message at or after this time (UTC)."),
    ] = None,
    topic: Topic = None,
    partition: Annotated[int, option("--partition N", "The partition of the topic.", least=0)] = 0,
    as_json: AsJson = False,
) -> int:
    """Print the messages of a log. The log is the folder itself, or a partition of a queue.

    Damaged messages are reported and skipped; the exit code is then 1.

    Examples:
        holdfast log dump jobs --offset 100 --limit 10
        holdfast log dump jobs --from-time 2026-01-31T12:00:00 --json
    """
    if offset is not None and from_time is not None:
        raise InvalidRequest("--offset and --from-time both say where to begin; give one of them")
    reader = LogReader(_log(folder, topic, partition) if is_queue(folder) else folder)
    dump = Dump(reader, as_json=as_json)
    start = _start(reader, offset, from_time)
    whole = dump.run(start, limit)
    return output.OK if whole else output.DAMAGED


def _log(folder: str, topic: str | None, partition: int) -> str:
    name = chosen_topic(folder, topic)
    check_partition(partition, name, Catalog(real_world(), folder).facts(name).partitions)
    log = log_of(folder, name, partition)
    check_has_log(folder, name, log)
    return log


def _start(reader: LogReader, offset: int | None, from_time: str | None) -> int:
    if from_time is None:
        return reader.start if offset is None else offset
    try:
        return reader.find_time(output.time_ns_of(from_time))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"--from-time {from_time!r} is not a time; write it like 2026-01-31T12:00:00Z (or without Z: UTC)"
        ) from None
