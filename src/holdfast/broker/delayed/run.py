"""A run: an immutable file of delayed messages, sorted by (due time, id), in blocks of a few hundred.

    part      what it is
    block     a control frame with one value (the due times, then the ids, as int64), and behind it a data frame
              with the messages themselves; repeated
    footer    a journal frame with two values: the table of blocks (due time of the first message and position
              of the block, as int64 pairs) and the bitmap of all ids
    trailer   32 bytes, see below

    at   size  field of the trailer
    0    8     magic             "HFDRUN" and the version as two digits, "01"
    8    8     footer_position
    16   8     footer_bytes
    24   4     run_id            the log id of the frames: a random number of this run
    28   4     check             CRC32C of bytes 0..27

Frames are those of a log, each with its checksums, with offsets that count all values in the file. Footer and
trailer are caches: where they are spoiled, walking over the blocks makes them anew.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from struct import Struct
from typing import Final, TypeAlias

from pyroaring import BitMap64

from holdfast.checksum import crc32c
from holdfast.codec.frame import HEADER_BYTES, Frame, FrameHeader, Kind, frame_bytes, read_frame, read_header
from holdfast.env.disk import Disk, File
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.large import LARGE_BYTES
from holdfast.model import Record
from holdfast.storage.files import join
from holdfast.storage.shortage import ran_out, shortage
from holdfast.storage.walk import Wanted, first_log_id, walk

logger = logging.getLogger(__name__)

TRAILER_MAGIC: Final = b"HFDRUN01"
TRAILER_CHECKED: Final = Struct("<8sQQI")
_TRAILER: Final = Struct("<8sQQII")
TRAILER_BYTES: Final = _TRAILER.size
assert TRAILER_BYTES == 32  # keeps the table above and the code in step

# Lengths in frames have 32 bits; who reads a run is its owner, who wrote it.
_MOST_RAW_BYTES: Final = 2**32 - 1

NEVER_MS: Final = 2**63

# Where a message waits: its due time and id, the run (None: the intake), and its place there.
Entry: TypeAlias = "tuple[int, int, Run | None, int, int]"


class Run:
    """The read side of a run. Only ids and the table of blocks stay in memory, no message does."""

    __slots__ = (
        "_at",
        "_cached",
        "_disk",
        "_head",
        "_positions",
        "first_dues_ms",
        "ids",
        "keep_file",
        "name",
        "path",
        "run_id",
        "spoiled",
    )

    def __init__(self, disk: Disk, folder: str, name: str, run_id: int, table: array[int], ids: BitMap64) -> None:
        self._disk = disk
        self.name = name
        self.path = join(folder, name)
        self.run_id = run_id
        self.ids = ids
        self.first_dues_ms = table[::2]
        self._positions = table[1::2]
        self._head, self._at = 0, 0  # block and place of the first message that may be live
        self._cached: tuple[int, array[int], array[int]] | None = None
        self.spoiled: dict[int, str] = {}  # blocks that cannot be read, and why
        self.keep_file = False  # damaged: a person may want to look at it

    @property
    def messages(self) -> int:
        return len(self.ids)

    def not_before_ms(self) -> int:
        """No live message is due before this time."""
        return self.first_dues_ms[self._head] if self._head < len(self.first_dues_ms) else NEVER_MS

    def first(self, gone: BitMap64) -> tuple[int, int] | None:
        """The first message that is not gone."""
        while self._head < len(self.first_dues_ms):
            dues_ms, ids = self._index(self._head)
            at = self._at
            while at < len(ids) and ids[at] in gone:
                at += 1
            self._at = at
            if at < len(ids):
                return dues_ms[at], ids[at]
            self._head, self._at = self._head + 1, 0
        return None

    def entries(
        self, gone: BitMap64, *, after: tuple[int, int] | None = None, until_ms: int | None = None
    ) -> Iterator[Entry]:
        """What is not gone, in order, behind a place and due by a time."""
        start = self._head
        if after is not None:
            start = max(start, bisect_left(self.first_dues_ms, after[0]) - 1)
        for block in range(start, len(self.first_dues_ms)):
            if until_ms is not None and self.first_dues_ms[block] > until_ms:
                return
            dues_ms, ids = self._index(block)
            for i in range(self._at if block == self._head else 0, len(ids)):
                due_at_ms, message_id = dues_ms[i], ids[i]
                if until_ms is not None and due_at_ms > until_ms:
                    return
                if message_id not in gone and (after is None or (due_at_ms, message_id) > after):
                    yield due_at_ms, message_id, self, block, i

    def find(self, message_id: int) -> Entry | None:
        """Where the message is; None where its block cannot be read."""
        for block in range(len(self.first_dues_ms)):
            dues_ms, ids = self._index(block)
            if message_id in ids:
                i = ids.index(message_id)
                return dues_ms[i], message_id, self, block, i
        return None

    def records(self, block: int) -> list[Record]:
        """The messages of a block, with their ids as offsets; CorruptData where it cannot be read."""
        try:
            with self._opened() as file:
                index = self._frame(file, self._positions[block])
                return _with_ids(block_index(index)[1], self._frame(file, index.header.end))
        except CorruptData as error:
            self._spoil(block, error)
            raise

    def blocks(self) -> Iterator[list[Record]]:
        """The messages, block by block, without those that are damaged; the file may lose its name meanwhile."""
        file = self._disk.open(self.path)
        try:
            for block, position in enumerate(self._positions):
                try:
                    index = self._frame(file, position)
                    yield _with_ids(block_index(index)[1], self._frame(file, index.header.end))
                except CorruptData as error:
                    self._spoil(block, error)
        finally:
            file.close()

    def _index(self, block: int) -> tuple[array[int], array[int]]:
        """Due times and ids of a block; nothing where it is spoiled."""
        if self._cached is not None and self._cached[0] == block:
            return self._cached[1:]
        if block in self.spoiled:
            return array("q"), array("q")
        try:
            with self._opened() as file:
                dues_ms, ids = block_index(self._frame(file, self._positions[block]))
        except CorruptData as error:
            self._spoil(block, error)
            return array("q"), array("q")
        self._cached = (block, dues_ms, ids)
        return dues_ms, ids

    def _frame(self, file: File, position: int) -> Frame:
        header_bytes = memoryview(file.read(position, HEADER_BYTES))
        header = read_header(header_bytes, 0, position)
        if header.log_id != self.run_id:
            raise CorruptData(f"the frame at position {position} is of another file")
        length = frame_bytes(header.body_bytes)
        large = length > LARGE_BYTES
        content = file.view(position, length) if large else memoryview(file.read(position, length))
        return read_frame(content, 0, position, max_raw_bytes=_MOST_RAW_BYTES)

    @contextmanager
    def _opened(self) -> Iterator[File]:
        """The file, for a moment. A part that the disk does not give must not hold up all the others."""
        try:
            file = self._disk.open(self.path)
            try:
                yield file
            finally:
                file.close()
        except OSError as error:
            if ran_out(error):  # its messages are as they were: read them when there is one again
                raise shortage(f"cannot read {self.path}", error, "Nothing was changed") from error
            raise CorruptData(f"cannot be read: {error.strerror or error}") from error

    def _spoil(self, block: int, error: CorruptData) -> None:
        if self._cached is not None and self._cached[0] == block:
            self._cached = None
        self.spoiled[block] = str(error)
        logger.error(
            "delayed messages cannot be read; their file is kept",
            extra={"file": self.path, "due_from_ms": self.first_dues_ms[block], "why": str(error)},
        )


def block_index(frame: Frame) -> tuple[array[int], array[int]]:
    """Due times and ids from the first frame of a block."""
    both = array("q", frame.values()[0])
    return both[: len(both) // 2], both[len(both) // 2 :]


def _with_ids(ids: array[int], frame: Frame) -> list[Record]:
    """The messages of the second frame of a block: as `Frame.records`, but their offsets are the ids."""
    columns = frame.columns()
    if frame.count != len(ids):
        raise CorruptData(f"a block has {len(ids)} ids for {frame.count} messages")
    return list(
        map(
            Record,
            ids,
            columns.times_ns() or repeat(frame.header.max_time_ns),
            frame.stored_values(),
            columns.keys() or repeat(None),
            columns.headers() or repeat(()),
            columns.priorities() or repeat(0),
            columns.expires_at_ms() or repeat(0),
            columns.due_at_ms() or repeat(0),
            columns.flags() or repeat(0),
        )
    )


def open_run(disk: Disk, folder: str, name: str, run_id: int | None = None) -> Run:
    """The run in a file, by its footer, or by its blocks where the footer is spoiled."""
    file = disk.open(join(folder, name))
    try:
        try:
            return _by_footer(disk, folder, name, file)
        except UnknownFormat:
            raise
        except CorruptData as error:
            logger.warning("footer made anew", extra={"file": join(folder, name), "why": str(error)})
            return _by_blocks(disk, folder, name, file.view(0, file.size()), run_id)
    finally:
        file.close()


def _by_footer(disk: Disk, folder: str, name: str, file: File) -> Run:
    size = file.size()
    trailer = file.read(max(0, size - TRAILER_BYTES), TRAILER_BYTES)
    if len(trailer) < TRAILER_BYTES:
        raise CorruptData("the file ends before its trailer")
    magic, position, length, run_id, check = _TRAILER.unpack(trailer)
    if crc32c(trailer[:-4]) != check or magic != TRAILER_MAGIC:
        raise CorruptData("the trailer does not match its checksum")
    frame = read_frame(memoryview(file.read(position, length)), 0, position, max_raw_bytes=_MOST_RAW_BYTES)
    if frame.header.log_id != run_id or frame.header.kind != Kind.JOURNAL:
        raise CorruptData("the footer is of another file")
    table, ids = frame.values()
    return Run(disk, folder, name, run_id, array("q", table), BitMap64.deserialize(ids))


def _by_blocks(disk: Disk, folder: str, name: str, data: memoryview, run_id: int | None) -> Run:
    run_id = run_id if run_id is not None else first_log_id(data)
    if run_id is None:
        raise CorruptData(f"{join(folder, name)} holds nothing that can be read")
    table, ids = array("q"), BitMap64()
    for found in walk(data, Wanted(run_id, 0)):
        if isinstance(found, FrameHeader) and found.kind == Kind.CONTROL:
            dues_ms, of_block = block_index(
                read_frame(data, found.position, found.position, max_raw_bytes=_MOST_RAW_BYTES)
            )
            table.extend((dues_ms[0], found.position))
            ids.update(of_block.tolist())
    if not table:
        raise CorruptData(f"{join(folder, name)} holds nothing that can be read")
    return Run(disk, folder, name, run_id, table, ids)
