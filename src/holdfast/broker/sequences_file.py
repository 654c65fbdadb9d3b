"""The snapshot of what producers have written to a partition: the file `producers` beside its log.

    at   size  field
    0    8     magic    "HFPRODS" and the version, 1
    8    n     body     MessagePack: log id, epoch and offset of the log up to where this holds, entries
    ..   4     check    CRC32C of all bytes before it

An entry is a row: producer id, epoch, next sequence, messages behind it that are known to be stored, time
of the last write in ms, runs. A run is a row as well: first sequence, count, first offset.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeAlias

import msgspec

from holdfast.checksum import crc32c
from holdfast.env.disk import Disk
from holdfast.errors import ChecksumMismatch, CorruptData, UnknownFormat
from holdfast.model import LogPosition
from holdfast.storage.files import durable_replace, join, read_file

NAME: Final = "producers"
_MAGIC_PREFIX: Final = b"HFPRODS"
_MAGIC: Final = _MAGIC_PREFIX + b"\x01"
_CHECK: Final = Struct("<I")
_NUMBERS: Final = 2**32

Run: TypeAlias = tuple[int, int, int]  # first sequence, count, first offset
_Row: TypeAlias = tuple[int, int, int, int, int, list[Run]]


class Entry:
    """What one producer has written: its epoch, the sequence that comes next, and where the last messages are.

    `runs` are messages that follow each other both in sequence and in offset, the oldest run first.
    """

    __slots__ = ("epoch", "last_ms", "next_sequence", "runs", "written")

    def __init__(self, epoch: int, next_sequence: int, written: int, last_ms: int = 0) -> None:
        self.epoch = epoch
        self.next_sequence = next_sequence
        self.written = written
        self.last_ms = last_ms
        self.runs: list[Run] = []

    @property
    def last_offset(self) -> int:
        """Offset of the last message known; -1 before the first."""
        if not self.runs:
            return -1
        _, count, offset = self.runs[-1]
        return offset + count - 1

    def add(self, first: int, count: int, offset: int, *, most_runs: int, most_behind: int) -> None:
        """Messages were written; those that went on at once make the last run longer."""
        runs = self.runs
        joined = False
        if runs:
            last_first, last_count, last_offset = runs[-1]
            joined = last_offset + last_count == offset and (last_first + last_count) % _NUMBERS == first
            if joined:
                runs[-1] = (last_first, last_count + count, last_offset)
        if not joined:
            runs.append((first, count, offset))
        if len(runs) > most_runs:
            del runs[0]
        # Those too far behind could be taken for newer ones, now that numbers begin anew.
        while (over := sum([run[1] for run in runs]) - most_behind) > 0:
            oldest, oldest_count, oldest_offset = runs.pop(0)
            if oldest_count > over:
                runs.insert(0, ((oldest + over) % _NUMBERS, oldest_count - over, oldest_offset + over))
        self.next_sequence = (first + count) % _NUMBERS
        self.written = min(self.written + count, most_behind)

    def copy(self) -> Entry:
        """The same, which does not change any more."""
        entry = Entry(self.epoch, self.next_sequence, self.written, self.last_ms)
        entry.runs = list(self.runs)
        return entry


class Snapshot(msgspec.Struct, frozen=True):
    """All producers of a partition, as its log has them up to a position."""

    log_id: int
    position: LogPosition
    entries: dict[int, Entry]


class _Body(msgspec.Struct, frozen=True, array_like=True):
    log_id: int
    epoch: int
    offset: int
    rows: list[_Row]


def save_snapshot(disk: Disk, folder: str, snapshot: Snapshot) -> None:
    """Put it in the place of the last one, durably."""
    rows: list[_Row] = [
        (producer, entry.epoch, entry.next_sequence, entry.written, entry.last_ms, entry.runs)
        for producer, entry in snapshot.entries.items()
    ]
    body = _Body(snapshot.log_id, snapshot.position.epoch, snapshot.position.offset, rows)
    content = _MAGIC + msgspec.msgpack.encode(body)
    durable_replace(disk, folder, NAME, content + _CHECK.pack(crc32c(content)))


def load_snapshot(disk: Disk, folder: str, log_id: int) -> Snapshot | None:
    """None where there is none of this log; CorruptData where its bytes are not what was written."""
    path = join(folder, NAME)
    content = read_file(disk, path)
    if content is None:
        return None
    if len(content) < len(_MAGIC) + _CHECK.size or _CHECK.unpack(content[-_CHECK.size :])[0] != crc32c(
        content[: -_CHECK.size]
    ):
        raise ChecksumMismatch(f"{path} does not match its checksum")
    if content[: len(_MAGIC)] != _MAGIC:
        raise UnknownFormat(f"{path} is no list of producers that this release can read")
    try:
        body = msgspec.msgpack.decode(content[len(_MAGIC) : -_CHECK.size], type=_Body)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path} cannot be read: {error}") from error
    if body.log_id != log_id:
        return None
    entries = {}
    for producer, epoch, next_sequence, written, last_ms, runs in body.rows:
        entries[producer] = entry = Entry(epoch, next_sequence, written, last_ms)
        entry.runs = runs
    return Snapshot(body.log_id, LogPosition(body.epoch, body.offset), entries)
