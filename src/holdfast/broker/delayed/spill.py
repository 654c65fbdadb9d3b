"""From the intake to runs: messages in order of arrival become files in order of due time.

A file ends where a bucket of time ends: an hour for what is near, a day, thirty days for what is far. So a
file is done with, and removed, soon after its last message was due. Small neighbours share a file, so that
years of sparse delays do not make thousands of files.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.broker.delayed.run import TRAILER_CHECKED, TRAILER_MAGIC, Run
from holdfast.broker.delayed.timers import DAY_MS, HOUR_MS, MONTH_MS
from holdfast.checksum import crc32c
from holdfast.codec.encode import PLAIN, Body, Packing, Place, encode_batch, header_for
from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.env.disk import File
from holdfast.large import LargeValue
from holdfast.model import Batch, Record
from holdfast.storage.files import join, write_fully

_BLOCK_MESSAGES: Final = 256
_BLOCK_BYTES: Final = 64 * 1024
_FILE_BYTES: Final = 1 << 30  # positions in frames have 32 bits
_UNCUT: Final = 1 << 62
# What a decoded message takes in memory besides its own bytes, about.
_MESSAGE_BYTES: Final = 400


class SpillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a spill needs to know."""

    folder: str
    number: int  # of the first file
    now_ms: int
    least_messages: int  # a file with fewer goes on into the next bucket
    packing: Packing = PLAIN
    memory_bytes: int = 16 << 20


def bucket_of(due_at_ms: int, now_ms: int) -> int:
    """Where the bucket of this due time begins."""
    distance_ms = due_at_ms - now_ms
    width_ms = HOUR_MS if distance_ms < 2 * DAY_MS else DAY_MS if distance_ms < 2 * MONTH_MS else MONTH_MS
    return due_at_ms - due_at_ms % width_ms


def in_due_order(
    frames: Callable[[], Iterator[Frame]], wanted: Callable[[int], bool], memory_bytes: int
) -> Iterator[Record]:
    """The wanted messages, sorted by (due, id). `frames` is read several times rather than held in memory."""
    keys, raw_bytes = [], 0
    for frame in frames():
        found = [(due, i) for i, due in enumerate(_dues_ms(frame), frame.base_offset) if wanted(i)]
        keys += found
        if not frame.is_large:  # what stays in its file takes no memory
            raw_bytes += frame.header.raw_bytes * len(found) // frame.count
    keys.sort()
    if not keys:
        return
    step = max(1, memory_bytes // (raw_bytes // len(keys) + _MESSAGE_BYTES))
    # No list of what is wanted is kept: bounds tell, and they are small.
    bounds = [(keys[i], keys[min(i + step, len(keys)) - 1]) for i in range(0, len(keys), step)]
    del keys
    for first, last in bounds:
        part = []
        for frame in frames():
            chosen = {
                i
                for i, due in enumerate(_dues_ms(frame), frame.base_offset)
                if first[0] <= due <= last[0] and first <= (due, i) <= last and wanted(i)
            }
            if chosen:
                part += [record for record in frame.records() if record.offset in chosen]
        part.sort(key=lambda record: (record.due_at_ms, record.offset))
        yield from part


def write_runs(world: World, records: Iterator[Record], plan: SpillPlan) -> list[Run]:
    """Write sorted messages into as many runs as buckets of time and size ask for; all are durable then."""
    runs: list[Run] = []
    writer: _RunWriter | None = None
    bucket, temporary = 0, join(plan.folder, "spill.tmp")
    try:
        for record in records:
            here = bucket_of(record.due_at_ms, plan.now_ms)
            if writer is not None and (
                (here != bucket and writer.messages >= plan.least_messages) or writer.position > _FILE_BYTES
            ):
                runs.append(writer.finish())
                writer = None
            if writer is None:
                writer = _RunWriter(world, temporary, plan, plan.number + len(runs), record.due_at_ms)
            bucket = here
            writer.add(record)
        if writer is not None:
            runs.append(writer.finish())
            writer = None
        if runs:
            world.disk.sync_folder(plan.folder)
    except BaseException:
        if writer is not None:
            writer.file.close()
        for path in [temporary, *(run.path for run in runs)]:
            with contextlib.suppress(OSError):
                world.disk.remove(path)
        raise
    return runs


class _RunWriter:
    """Writes one run under a temporary name, block by block."""

    def __init__(self, world: World, temporary: str, plan: SpillPlan, number: int, first_due_ms: int) -> None:
        self._world = world
        self._temporary = temporary
        self._folder = plan.folder
        self._name = f"{bucket_of(first_due_ms, plan.now_ms):020d}-{number:010d}.run"
        self._packing = plan.packing
        self._run_id = world.ids.random_u32()
        self._offset = 0
        self._block: list[Record] = []
        self._block_bytes = 0
        self._table = array("q")
        self._ids = BitMap64()
        self.messages = 0
        self.position = 0
        self.file: File = world.disk.open(temporary, write=True, create=True)
        self.file.truncate(0)

    def add(self, record: Record) -> None:
        if self._block and isinstance(record.value, LargeValue):  # it gets a block of its own
            self._end_block()
        self._block.append(record)
        self._block_bytes += len(record.value)
        self.messages += 1
        if len(self._block) >= _BLOCK_MESSAGES or self._block_bytes >= _BLOCK_BYTES:
            self._end_block()

    def finish(self) -> Run:
        """Put the file in its place; its name is durable after the folder's next sync."""
        if self._block:
            self._end_block()
        self._ids.run_optimize()
        footer_position = self.position
        self._write(_body(Batch(values=[self._table.tobytes(), self._ids.serialize()]), Kind.JOURNAL))
        trailer = TRAILER_CHECKED.pack(TRAILER_MAGIC, footer_position, self.position - footer_position, self._run_id)
        write_fully(self.file, self.position, [trailer, crc32c(trailer).to_bytes(4, "little")])
        self.file.sync()
        self.file.close()
        self._world.disk.rename(self._temporary, join(self._folder, self._name))
        return Run(self._world.disk, self._folder, self._name, self._run_id, self._table, self._ids)

    def _end_block(self) -> None:
        records, self._block, self._block_bytes = self._block, [], 0
        ids = array("q", [record.offset for record in records])
        dues_ms = array("q", [record.due_at_ms for record in records])
        self._table.extend((dues_ms[0], self.position))
        self._ids.update(ids.tolist())
        self._write(_body(Batch(values=[dues_ms.tobytes() + ids.tobytes()]), Kind.CONTROL))
        self._write(_body(_as_batch(records), Kind.DATA, self._packing))

    def _write(self, body: Body) -> None:
        place = Place(self._run_id, 0, self.position, self._offset, 0)
        write_fully(self.file, self.position, [header_for(body, place, batch_remaining=0), *body.parts])
        self.position += body.frame_bytes
        self._offset += body.count


def _body(batch: Batch, kind: Kind, packing: Packing = PLAIN) -> Body:
    return encode_batch(batch, 0, packing=packing, cap_bytes=_UNCUT, kind=kind)[0]


def _as_batch(records: Sequence[Record]) -> Batch:
    """Messages as columns; a column that none of them uses is left out."""
    return Batch(
        values=[r.value for r in records],
        times_ns=[r.timestamp_ns for r in records],
        keys=[r.key for r in records] if any(r.key is not None for r in records) else None,
        headers=[r.headers for r in records] if any(r.headers for r in records) else None,
        priorities=[r.priority for r in records] if any(r.priority for r in records) else None,
        expires_at_ms=[r.expires_at_ms for r in records] if any(r.expires_at_ms for r in records) else None,
        due_at_ms=[r.due_at_ms for r in records],
        flags=[r.flags for r in records] if any(r.flags for r in records) else None,
    )


def _dues_ms(frame: Frame) -> Sequence[int]:
    return frame.columns().due_at_ms() or [0] * frame.count
