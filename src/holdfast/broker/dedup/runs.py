"""A run: dedup ids on disk, sorted, written once and never changed.

    at   size   field
    0    8      magic             "HFDEDUP" and the version, 2
    8    8      sequence          the number in the file's name; the highest one is the truth
    16   8      count             records
    24   8      newest_ms         the latest time in it
    32   8      partitions        so many of the topic's are covered
    40   24     0                 unused
    64   4      kept_count        other runs that belong to the index together with this one
    68   4      tail_crc          CRC32C of the tail
    72   1      bucket_bits       so many leading bits of a digest are the number of its bucket
    73   3      0                 unused
    76   4      header_crc        CRC32C of bytes 0..75
    80   32*n   records           16 bytes of digest, 8 of time (ms), 8 of reference; both big endian.
                                  A reference: 16 bits of partition, 47 of offset or delayed id, 1: which of these
    ..   4*(b+1)  buckets         the tail begins: number of the first record of each bucket, and n
    ..   4*c    block_crcs        CRC32C of each block of 128 records
    ..   n      first_marks       last byte of each digest
    ..   n      second_marks      the byte before it
    ..   8*k    kept              sequences of those other runs
    ..   32*p   covered           of each partition: epoch and offset in its log, then in its delayed intake

All numbers but those in records are little endian. Big endian makes the order of records as bytes the
order by digest, then by time. The tail stays in memory, less than 3 bytes an id. Digests are spread
evenly, so a bucket has about 16 to 64 of them, and the marks of those rule out all but one in a thousand of
the ids that are not there. Records stay on disk; a block is held to its checksum whenever it is read.

Version 1 was written when each partition had an index of its own: `covered` of that one stood at 32, none in the
tail, and references had no partition. Such a run can be read, and is merged into one of the topic (`Run.partition`)
as soon as there is room for that.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from struct import Struct
from sys import byteorder
from typing import Final

import msgspec

from holdfast.broker.folder.layout import names_in
from holdfast.checksum import crc32c
from holdfast.env import Disk, File, World
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.model import LogPosition
from holdfast.storage.files import durable_replace, join, opened_folder, read_file, write_fully

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

# What is merged at a time: the memory that a merge of any size takes is a few MB.
_PART_RECORDS: Final = 16_384
_BEHIND_ALL: Final = b"\xff" * RECORD_BYTES


class Covered(msgspec.Struct, frozen=True, gc=False):
    """Where to begin in both logs of a partition to find the ids that no run holds: all of those below are in runs."""

    partition: LogPosition = LogPosition(0, 0)
    intake: LogPosition = LogPosition(0, 0)


class RunFacts(msgspec.Struct, frozen=True, gc=False):
    """What a run says about itself."""

    sequence: int
    newest_ms: int
    covered: tuple[Covered, ...]  # of the partitions, by their numbers
    kept: tuple[int, ...]


def run_name(sequence: int) -> str:
    return f"{sequence:020d}.ids"


def prefix_of(digest: bytes) -> int:
    """The leading bits of a digest, of which some are the number of its bucket."""
    prefix: int = _PREFIX.unpack_from(digest)[0]
    return prefix


def reference_of(row: bytes) -> int:
    return int.from_bytes(row[-8:], "big")


class DedupRun:
    """One run, mapped: only its tail is in memory."""

    __slots__ = (
        "_block_crcs",
        "_buckets",
        "_first_marks",
        "_records",
        "_second_marks",
        "_shift",
        "count",
        "facts",
        "partition",
        "path",
    )

    def __init__(
        self, path: str, facts: RunFacts, count: int, bucket_bits: int, records: memoryview, tail: bytes
    ) -> None:
        self.path = path
        self.facts = facts
        self.partition = 0  # what its references are of; those of version 1 do not say it themselves
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
        """Time and reference of the digest, 16 bytes as they are stored, or None; `prefix_of` it comes along."""
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
        """All records in order, a block at a time; CorruptData where one is not what was written."""
        for number in range(len(self._block_crcs)):
            rows = [row for (row,) in _RECORD.iter_unpack(self._block(number))]
            yield [_of_partition(row, self.partition) for row in rows] if self.partition else rows

    def has_reference(self, wanted: Callable[[int], bool]) -> bool:
        """Whether the answer is True for any reference."""
        blocks = map(self._block, range(len(self._block_crcs)))
        return any(wanted(reference) for data in blocks for (reference,) in _REFERENCE.iter_unpack(data))

    def check(self) -> None:
        """Read it all; CorruptData where a block is not what was written, or the parts do not agree."""
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
    """Records of several runs and of memory in one order: the newest of each id, nothing expired or lost."""

    def __init__(
        self, runs: Sequence[DedupRun], rows: list[bytes], *, after_ms: int, lost: Callable[[int], bool] | None = None
    ) -> None:
        self._cursors = [_Cursor(run) for run in runs]
        self._rows = rows  # sorted
        self._lost = lost
        self._first_time = max(0, after_ms + 1).to_bytes(8, "big")
        self.at_most = sum(run.count for run in runs) + len(rows)

    def parts(self) -> Iterator[list[bytes]]:
        """The records, some thousand at a time; digests are spread evenly, so the parts are about equal."""
        taken, count = 0, self.at_most // _PART_RECORDS + 1
        for number in range(1, count + 1):
            limit = _BEHIND_ALL if number == count else (number * 2**128 // count).to_bytes(DIGEST_BYTES, "big")
            end = bisect_left(self._rows, limit)
            rows = self._rows[taken:end]
            taken = end
            for cursor in self._cursors:
                rows += cursor.take_below(limit)
            if self._lost is not None:
                rows = [row for row in rows if not self._lost(reference_of(row))]
            rows.sort()
            # Of equal digests the last has the highest time, and a dict keeps the first one's place.
            newest = {row[:DIGEST_BYTES]: row for row in rows if row[16:24] >= self._first_time}
            yield list(newest.values())


class _Cursor:
    """A place in a run that is read from its start to its end, each block once."""

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
    """Writes a run into a temporary file, synced and then renamed: after a crash it is whole or not there."""

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
        """Answers when the run would survive a power cut."""
        temporary, path = join(self._folder, TEMPORARY), join(self._folder, run_name(facts.sequence))
        if self._disk.exists(temporary):
            self._disk.remove(temporary)  # of a save that failed; what it wrote is not to be trusted
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
    """The run with this number, or CorruptData; reads all of it but the records."""
    path = join(folder, run_name(sequence))
    if not disk.exists(path):
        raise damaged(path, "the file is missing")
    file = disk.open(path)
    try:
        header = file.read(0, HEADER_BYTES)
        if not header.startswith((_MAGIC, _MAGIC_1)):
            if header.startswith(_MAGIC_PREFIX):
                raise UnknownFormat(f"{path} has a format that this release cannot read; use the one that wrote it")
            raise damaged(path, "it does not begin as a run does")
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
    """Note which run is the last, once it is in place: without that, nobody would miss it."""
    content = _NEWEST.pack(_NEWEST_MAGIC, sequence)
    durable_replace(disk, folder, NEWEST, content + _CRC.pack(crc32c(content)))


def newest_noted(disk: Disk, folder: str) -> int:
    """The number of the last run as far as noted, 0 where nothing is; CorruptData where the note is damaged."""
    content = read_file(disk, join(folder, NEWEST))
    if content is None:
        return 0
    if len(content) != _NEWEST.size + _CRC.size or crc32c(content[: _NEWEST.size]) != _CRC.unpack(content[-4:])[0]:
        raise CorruptData(f"{join(folder, NEWEST)} does not match its checksum; the next save of dedup ids renews it")
    sequence: int = _NEWEST.unpack_from(content)[1]
    return sequence


def damaged(path: str, what: str) -> CorruptData:
    """The error for a run that is not what was written."""
    return CorruptData(
        f"{path} is damaged: {what}. It remembers dedup ids, and without it a repeated message would be taken for a "
        "new one; nothing was changed. Restore the file from a backup; or, where that risk is smaller than standing "
        "still, move the folder that holds it away: ids are then known again only as far as the logs still hold them"
    )


def _covered_bytes(covered: Covered) -> bytes:
    log, intake = covered.partition, covered.intake
    return _COVERED.pack(log.epoch, log.offset, intake.epoch, intake.offset)


def _of_partition(row: bytes, partition: int) -> bytes:
    """The record with a reference that says which partition it is of."""
    return row[:-8] + partition.to_bytes(2, "big") + row[-6:]


def _blocks(count: int) -> int:
    return -(-count // BLOCK_RECORDS)


def _marks(data: bytes) -> tuple[bytes, bytes]:
    """The last byte of each digest, and the one before it."""
    return data[15::RECORD_BYTES], data[14::RECORD_BYTES]


def _little_endian(kind: str, data: bytes) -> array[int]:
    numbers = array(kind, data)
    if byteorder == "big":
        numbers.byteswap()
    return numbers


# Are the dedup ids on disk what was written? Looks at every byte, and changes nothing.


_RUN: Final = re.compile(r"(\d{20})\.ids")


def damaged_dedup(world: World, folder: str) -> list[str]:
    """What is wrong with the dedup ids in a folder, in words."""
    note = damaged_note(world, folder)
    return [*([] if note is None else [note]), *damaged_runs(world, folder)]


def damaged_note(world: World, folder: str) -> str | None:
    """What is wrong with the note that says which run is the last. It costs no id, as long as there is any run."""
    try:
        newest_noted(world.disk, folder)
    except CorruptData as error:
        return str(error)
    return None


def renew_note(world: World, folder: str) -> None:
    """Note which run is the last, of those that are there."""
    note_newest(world.disk, folder, _numbers(world, folder)[-1])


def damaged_runs(world: World, folder: str) -> list[str]:
    """What is wrong with the runs: the last one and those that it names must be whole. Where one was, one must be."""
    numbers, noted = _numbers(world, folder), 1
    with suppress(CorruptData):
        noted = newest_noted(world.disk, folder)
    if noted > (numbers[-1] if numbers else 0):
        return [str(damaged(join(folder, run_name(noted)), "the file is missing"))]
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


def _numbers(world: World, folder: str) -> list[int]:
    return sorted(int(match[1]) for name in names_in(world, folder) if (match := _RUN.fullmatch(name)))
