"""A run is a file of sorted dedup ids on disk, written once and never changed. This module reads, writes and checks it.

    at   size   field
    0    8      magic             "HFDEDUP" and the version, 2
    8    8      sequence          the number in the file's name; the run with the highest one is authoritative
    16   8      count             records
    24   8      newest_ms         the latest time in it
    32   8      partitions        number of partitions covered
    40   24     0                 unused
    64   4      kept_count        other runs that belong to the index together with this one
    68   4      tail_crc          CRC32C of the tail
    72   1      bucket_bits       number of leading bits of a digest that select its bucket
    73   3      0                 unused
    76   4      header_crc        CRC32C of bytes 0..75
    80   32*n   records           16 bytes of digest, 8 of time (ms), 8 of reference; both big endian.
                                  A reference: 16 bits of partition, 47 of offset or delayed id, 1 to tell which
    ..   4*(b+1)  buckets         the tail begins: number of the first record of each bucket, and n
    ..   4*c    block_crcs        CRC32C of each block of 128 records
    ..   n      first_marks       last byte of each digest
    ..   n      second_marks      the byte before it
    ..   8*k    kept              sequences of those other runs
    ..   32*p   covered           for each partition: epoch and offset in its log, then in its delayed intake

All numbers are little endian except those in records: big endian makes the byte order of records the order by digest,
then by time. The tail stays in memory, at less than 3 bytes per id. Digests are evenly distributed, so a bucket has
about 16 to 64 of them, and their marks rule out all but one in a thousand of the ids that are not in the run. Records
stay on disk; the checksum of a block is verified whenever it is read.

Version 1 was written when each partition had its own index: it has the partition's `covered` at 32 and none in the
tail, and its references have no partition. Such a run can still be read, and is merged into one of the topic
(`DedupRun.partition`) as soon as the disk has room.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from struct import Struct
from sys import byteorder
from typing import Final

import msgspec

from holdfast.broker.folder.layout import names_in
from holdfast.checksum import crc32c
from holdfast.env import Disk, File, World
from holdfast.env.disk import write_fully
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.later import pattern
from holdfast.model import LogPosition
from holdfast.storage.files import durable_replace, join, opened_folder, read_file

DIGEST_BYTES: Final = 16
RECORD_BYTES: Final = 32
BLOCK_RECORDS: Final = 128
BLOCK_BYTES: Final = BLOCK_RECORDS * RECORD_BYTES
_BUCKET_RECORDS: Final = 32
_PREFIX_BITS: Final = 32
TEMPORARY: Final = "run.tmp"
NEWEST: Final = "newest"  # magic, the number of the last run, CRC32C of both
_NEWEST: Final = Struct("<8sQ")
_NEWEST_MAGIC: Final = b"HFDDLAST"

_MAGIC_PREFIX: Final = b"HFDEDUP"
_MAGIC_1: Final = _MAGIC_PREFIX + b"\x01"
_MAGIC: Final = _MAGIC_PREFIX + b"\x02"
_HEADER: Final = Struct("<8sQQQQQQQIIB3xI")
_COVERED: Final = Struct("<QQQQ")
_CRC: Final = Struct("<I")
_PREFIX: Final = Struct(">I")
_REFERENCE: Final = Struct(f">{RECORD_BYTES - 8}xQ")
_RECORD: Final = Struct(f"{RECORD_BYTES}s")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 80  # keeps the table above and the code in step

# Records merged at a time, so that a merge of any size takes only a few MB of memory.
_PART_RECORDS: Final = 16_384
_BEHIND_ALL: Final = b"\xff" * RECORD_BYTES


class Covered(msgspec.Struct, frozen=True, gc=False):
    """Positions in both logs of a partition. All ids below them are in runs; the others must be read from the logs."""

    partition: LogPosition = LogPosition(0, 0)
    intake: LogPosition = LogPosition(0, 0)


class RunFacts(msgspec.Struct, frozen=True, gc=False):
    """The header of a run."""

    sequence: int
    newest_ms: int
    covered: tuple[Covered, ...]  # by partition number
    kept: tuple[int, ...]


def run_name(sequence: int) -> str:
    return f"{sequence:020d}.ids"


def prefix_of(digest: bytes) -> int:
    """Return the leading bits of a digest, some of which select its bucket."""
    prefix: int = _PREFIX.unpack_from(digest)[0]
    return prefix


def reference_of(row: bytes) -> int:
    return int.from_bytes(row[-8:], "big")


class DedupRun:
    """A run, mapped into memory: only its tail is loaded."""

    def __init__(
        self, path: str, facts: RunFacts, count: int, bucket_bits: int, records: memoryview, tail: bytes
    ) -> None:
        self.path = path
        self.facts = facts
        self.partition = 0  # the partition of a version 1 run, whose references do not carry it
        self.count = count
        self._records = records
        self._shift = _PREFIX_BITS - bucket_bits
        crcs_at = 4 * (2**bucket_bits + 1)
        marks_at = crcs_at + 4 * _blocks(count)
        self._buckets = _little_endian("I", tail[:crcs_at])
        self._block_crcs = _little_endian("I", tail[crcs_at:marks_at])
        self._first_marks = tail[marks_at : marks_at + count]
        self._second_marks = tail[marks_at + count : marks_at + 2 * count]

    def find(self, digest: bytes, prefix: int) -> bytes | None:
        """Return time and reference of the digest as stored, 16 bytes, or None. `prefix` is `prefix_of(digest)`."""
        bucket = prefix >> self._shift
        end = self._buckets[bucket + 1]
        mark = digest[15]
        at = self._first_marks.find(mark, self._buckets[bucket], end)
        while at >= 0:
            if self._second_marks[at] == digest[14]:
                start = at % BLOCK_RECORDS * RECORD_BYTES
                record = self._block(at // BLOCK_RECORDS)[start : start + RECORD_BYTES]
                if record.startswith(digest):
                    return (_of_partition(record, self.partition) if self.partition else record)[DIGEST_BYTES:]
            at = self._first_marks.find(mark, at + 1, end)
        return None

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield all records in order, a block at a time; raises CorruptData if a block is not what was written."""
        for number in range(len(self._block_crcs)):
            rows = [row for (row,) in _RECORD.iter_unpack(self._block(number))]
            yield [_of_partition(row, self.partition) for row in rows] if self.partition else rows

    def check(self) -> None:
        """Read everything; raises CorruptData if a block is not what was written or the parts are inconsistent."""
        last, at = b"", 0
        for number, rows in enumerate(self.blocks()):
            digests = [last, *(row[:DIGEST_BYTES] for row in rows)]
            ordered = all(one < two for one, two in pairwise(digests))
            end = at + len(rows)
            marked = (self._first_marks[at:end], self._second_marks[at:end]) == _marks(b"".join(rows))
            if not (
                ordered and marked and all(self._in_bucket(digest, at + n) for n, digest in enumerate(digests[1:]))
            ):
                raise damaged(self.path, f"block {number} does not fit in its place")
            last, at = digests[-1], end

    def _in_bucket(self, digest: bytes, at: int) -> bool:
        bucket = prefix_of(digest) >> self._shift
        return self._buckets[bucket] <= at < self._buckets[bucket + 1]

    def _block(self, number: int) -> bytes:
        at = number * BLOCK_BYTES
        data = self._records[at : at + BLOCK_BYTES].tobytes()
        if crc32c(data) != self._block_crcs[number]:
            raise damaged(self.path, f"the block at position {HEADER_BYTES + at} does not match its checksum")
        return data


class Merge:
    """Merges the records of several runs and of memory: the newest of each id, without expired ones."""

    def __init__(self, runs: Sequence[DedupRun], rows: list[bytes], *, after_ms: int) -> None:
        self._cursors = [_Cursor(run) for run in runs]
        self._rows = rows  # sorted
        self._first_time = max(0, after_ms + 1).to_bytes(8, "big")
        self.at_most = sum(run.count for run in runs) + len(rows)

    def parts(self) -> Iterator[list[bytes]]:
        """Yield the records, some thousand at a time; digests are evenly distributed, so the parts are about equal."""
        taken, count = 0, self.at_most // _PART_RECORDS + 1
        for number in range(1, count + 1):
            limit = _BEHIND_ALL if number == count else (number * 2**128 // count).to_bytes(DIGEST_BYTES, "big")
            end = bisect_left(self._rows, limit)
            rows = self._rows[taken:end]
            taken = end
            for cursor in self._cursors:
                rows += cursor.take_below(limit)
            rows.sort()
            # Among equal digests the last has the latest time, and the dict keeps the position of the first.
            newest = {row[:DIGEST_BYTES]: row for row in rows if row[16:24] >= self._first_time}
            yield list(newest.values())


class _Cursor:
    """A position in a run that is read from start to end, each block once."""

    def __init__(self, run: DedupRun) -> None:
        self._blocks = run.blocks()
        self._rows: list[bytes] = []

    def take_below(self, limit: bytes) -> list[bytes]:
        while not self._rows or self._rows[-1] < limit:
            block = next(self._blocks, None)
            if block is None:
                break
            self._rows += block
        cut = bisect_left(self._rows, limit)
        taken, self._rows = self._rows[:cut], self._rows[cut:]
        return taken


class RunWriter:
    """Writes a run to a temporary file, syncs and renames it: after a crash the run is whole or absent."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._count = 0
        self._rest = b""
        self._position = HEADER_BYTES
        self._bucket_bits = 0
        self._buckets = array("I")
        self._block_crcs = array("I")
        self._marks: tuple[list[bytes], list[bytes]] = ([], [])

    def write(self, facts: RunFacts, merge: Merge) -> DedupRun:
        """Return the run once it would survive a power cut."""
        temporary, path = join(self._folder, TEMPORARY), join(self._folder, run_name(facts.sequence))
        if self._disk.exists(temporary):
            self._disk.remove(temporary)  # left by a save that failed; its contents cannot be trusted
        self._bucket_bits = min(_PREFIX_BITS, (merge.at_most // _BUCKET_RECORDS).bit_length())
        with opened_folder(self._disk, self._folder) as folder:
            file = self._disk.open(temporary, write=True, create=True)
            try:
                for rows in merge.parts():
                    self._add(file, rows)
                self._add_blocks(file, self._rest)
                self._finish(file, facts)
                file.sync()
            finally:
                file.close()
            self._disk.rename(temporary, path)
            folder.sync()
        return open_run(self._disk, self._folder, facts.sequence)

    def _add(self, file: File, rows: list[bytes]) -> None:
        if not rows:
            return
        shift = _PREFIX_BITS - self._bucket_bits
        for bucket in range(len(self._buckets), (prefix_of(rows[-1]) >> shift) + 1):
            self._buckets.append(self._count + bisect_left(rows, (bucket << shift).to_bytes(4, "big")))
        self._count += len(rows)
        data = self._rest + b"".join(rows)
        whole = len(data) - len(data) % BLOCK_BYTES
        self._rest = data[whole:]
        self._add_blocks(file, data[:whole])

    def _add_blocks(self, file: File, data: bytes) -> None:
        if not data:
            return
        for at in range(0, len(data), BLOCK_BYTES):
            self._block_crcs.append(crc32c(data[at : at + BLOCK_BYTES]))
        for column, marks in zip(self._marks, _marks(data), strict=True):
            column.append(marks)
        write_fully(file, self._position, [data])
        self._position += len(data)

    def _finish(self, file: File, facts: RunFacts) -> None:
        self._buckets.extend([self._count] * (2**self._bucket_bits + 1 - len(self._buckets)))
        numbers = [_little_endian("I", column.tobytes()).tobytes() for column in (self._buckets, self._block_crcs)]
        kept = [sequence.to_bytes(8, "little") for sequence in facts.kept]
        covered = [_covered_bytes(each) for each in facts.covered]
        tail = b"".join([*numbers, *self._marks[0], *self._marks[1], *kept, *covered])
        header = _HEADER.pack(
            _MAGIC,
            facts.sequence,
            self._count,
            facts.newest_ms,
            len(facts.covered),
            0,
            0,
            0,
            len(facts.kept),
            crc32c(tail),
            self._bucket_bits,
            0,
        )[: -_CRC.size]
        write_fully(file, self._position, [tail])
        write_fully(file, 0, [header, _CRC.pack(crc32c(header))])


def open_run(disk: Disk, folder: str, sequence: int) -> DedupRun:
    """Open the run with this number; raises CorruptData if it is damaged. Reads everything but the records."""
    path = join(folder, run_name(sequence))
    if not disk.exists(path):
        raise damaged(path, "the file is missing")
    file = disk.open(path)
    try:
        header = file.read(0, HEADER_BYTES)
        if not header.startswith((_MAGIC, _MAGIC_1)):
            if header.startswith(_MAGIC_PREFIX):
                raise UnknownFormat(f"{path} has a format that this release cannot read; use the one that wrote it")
            raise damaged(path, "it does not begin with a run's header")
        if len(header) < HEADER_BYTES or crc32c(header[: -_CRC.size]) != _CRC.unpack(header[-_CRC.size :])[0]:
            raise damaged(path, "its header does not match its checksum")
        magic, found, count, newest_ms, *words, kept_count, tail_crc, bucket_bits, _ = _HEADER.unpack(header)
        if found != sequence:
            raise damaged(path, f"it is a copy of number {found}")
        records_bytes = count * RECORD_BYTES
        marks_end = 4 * (2**bucket_bits + 1 + _blocks(count)) + 2 * count
        kept_end = marks_end + 8 * kept_count
        tail_bytes = kept_end + (_COVERED.size * words[0] if magic == _MAGIC else 0)
        tail = file.read(HEADER_BYTES + records_bytes, tail_bytes)
        if crc32c(tail) != tail_crc or file.size() != HEADER_BYTES + records_bytes + tail_bytes:
            raise damaged(path, "its tail does not match its checksum")
        kept = tuple(_little_endian("Q", tail[marks_end:kept_end]))
        positions = _COVERED.iter_unpack(tail[kept_end:]) if magic == _MAGIC else [words]
        covered = tuple(Covered(LogPosition(*each[:2]), LogPosition(*each[2:])) for each in positions)
        records = file.view(HEADER_BYTES, records_bytes)
        return DedupRun(path, RunFacts(sequence, newest_ms, covered, kept), count, bucket_bits, records, tail)
    finally:
        file.close()


def note_newest(disk: Disk, folder: str, sequence: int) -> None:
    """Note which run is the last, once it is in place; otherwise its loss would go unnoticed."""
    content = _NEWEST.pack(_NEWEST_MAGIC, sequence)
    durable_replace(disk, folder, NEWEST, content + _CRC.pack(crc32c(content)))


def newest_noted(disk: Disk, folder: str) -> int:
    """Return the noted number of the last run, 0 if there is no note; raises CorruptData if the note is damaged."""
    content = read_file(disk, join(folder, NEWEST))
    if content is None:
        return 0
    if len(content) != _NEWEST.size + _CRC.size or crc32c(content[: _NEWEST.size]) != _CRC.unpack(content[-4:])[0]:
        raise CorruptData(f"{join(folder, NEWEST)} does not match its checksum; the next save of dedup ids renews it")
    sequence: int = _NEWEST.unpack_from(content)[1]
    return sequence


def damaged(path: str, what: str) -> CorruptData:
    """Return the error for a run that is not what was written."""
    return CorruptData(
        f"{path} is damaged: {what}. It stores dedup ids; without it, a repeated message would be stored again. "
        "Nothing was changed. Restore the file from a backup; or, if you can accept that risk, move its folder away: "
        "then only the ids that the logs still hold are known"
    )


def _covered_bytes(covered: Covered) -> bytes:
    log, intake = covered.partition, covered.intake
    return _COVERED.pack(log.epoch, log.offset, intake.epoch, intake.offset)


def _of_partition(row: bytes, partition: int) -> bytes:
    """Return the record with the partition added to its reference."""
    return row[:-8] + partition.to_bytes(2, "big") + row[-6:]


def _blocks(count: int) -> int:
    return -(-count // BLOCK_RECORDS)


def _marks(data: bytes) -> tuple[bytes, bytes]:
    """Return the last byte of each digest, and the byte before it."""
    return data[15::RECORD_BYTES], data[14::RECORD_BYTES]


def _little_endian(kind: str, data: bytes) -> array[int]:
    numbers = array(kind, data)
    if byteorder == "big":
        numbers.byteswap()
    return numbers


# Checking dedup ids on disk: reads every byte, and changes nothing except in `renew_note`.


_RUN: Final = pattern(r"(\d{20})\.ids")


def damaged_dedup(world: World, folder: str) -> list[str]:
    """Describe what is wrong with the dedup ids in a folder."""
    note = damaged_note(world, folder)
    return [*([] if note is None else [note]), *damaged_runs(world, folder)]


def damaged_note(world: World, folder: str) -> str | None:
    """Describe what is wrong with the note of the last run. A damaged note loses no id as long as a run exists."""
    try:
        newest_noted(world.disk, folder)
    except CorruptData as error:
        return str(error)
    return None


def renew_note(world: World, folder: str) -> None:
    """Write the note of the last run again, from the runs that exist."""
    note_newest(world.disk, folder, _numbers(world, folder)[-1])


def damaged_runs(world: World, folder: str) -> list[str]:
    """Describe what is wrong with the runs: the last one and those that it names must exist and be intact."""
    numbers = expected_runs(world, folder)
    if not numbers:
        return []
    wrong: list[str] = []
    try:
        last = open_run(world.disk, folder, numbers[-1])
        last.check()
    except (CorruptData, OSError) as error:
        return [str(error)]
    for number in last.facts.kept:
        try:
            open_run(world.disk, folder, number).check()
        except (CorruptData, OSError) as error:
            wrong.append(str(error))
    return wrong


def expected_runs(world: World, folder: str) -> list[int]:
    """Return the numbers of the runs in a folder, ascending, and of the noted last run even if it is missing."""
    numbers = _numbers(world, folder)
    noted = 1  # a note implies a run; if there are runs, `damaged_note` reports the damaged note
    with suppress(CorruptData):
        noted = newest_noted(world.disk, folder)
    return [*numbers, noted] if noted > max(numbers, default=0) else numbers


def _numbers(world: World, folder: str) -> list[int]:
    return sorted(int(match[1]) for name in names_in(world, folder) if (match := _RUN.fullmatch(name)))
