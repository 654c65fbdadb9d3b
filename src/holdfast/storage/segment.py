"""One file of the log: a sealed segment never changes, the active one grows at its end.

Sealed segments that are open for reading cost two descriptors, a map and an index each. Mapped pages that were read
count as memory of the process, in `ps` and against `ulimit -v`, although the kernel may take them back at any time. So
`KEPT_OPEN` limits their number and bytes for all logs of the process, and closes the least recently used. A reader that
is using one at that moment keeps it alive; the next one opens it again.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final

from holdfast.codec.frame import FrameHeader
from holdfast.env import close_in_children
from holdfast.env.disk import BytesLike, Disk, File, WritableMap, write_fully
from holdfast.env.process import get_logger, logging
from holdfast.env.tier import TieredFile
from holdfast.errors import Unavailable
from holdfast.storage.files import (
    FULL_DISK,
    index_name,
    join,
    ran_out,
    read_file,
    segment_name,
    shortage,
    taking_no_room,
    write_zeros,
)
from holdfast.storage.frames import FrameRules, SegmentIndex, parse_index, walk

DESCRIPTORS_EACH: Final = 2
USUAL_MOST: Final = 128
MOST_BYTES: Final = 256 << 20


class KeptOpen:
    """The segments that are open for reading, least recently used first. Every method may be called from any thread."""

    def __init__(self, most: int = USUAL_MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        # Weak references: a reader that nobody holds any more must not keep its files open.
        self._segments: OrderedDict[int, weakref.ref[Segment]] = OrderedDict()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()
        close_in_children(self)

    def disown(self) -> None:
        """After a fork, in the child: a thread that does not exist here may hold the lock, so make a new one."""
        self._lock = threading.Lock()
        self._segments = OrderedDict()

    def touch(self, segment: Segment) -> Segment:
        """Note that the segment is in use."""
        if segment.is_active:
            return segment
        name = id(segment)
        left: list[Segment] = []
        with self._lock:
            while self._gone:
                self._forget(self._gone.popleft())
            known = self._segments.pop(name, None)
            if known is None:
                # The callback of a weak reference may run at any moment, even while this lock is held: it takes none.
                gone = self._gone
                known = weakref.ref(segment, lambda _: gone.append(name))
            if not segment.held_bytes:
                left = self._make_room()
            self._segments[name] = known
        for each in left:
            each.close_files()
        return segment

    def close_others(self, segment: Segment) -> None:
        """Close all others: this one needs the memory."""
        with self._lock:
            known = self._segments.pop(id(segment), None)
            left, self._segments = self._segments, OrderedDict()
            if known is not None:
                self._segments[id(segment)] = known
        for other in left.values():
            if (each := other()) is not None:
                each.close_files()

    def _make_room(self) -> list[Segment]:
        """Remove and return those to be closed before another is opened, oldest first. The caller holds the lock.

        How much the new one will take is not known yet; it is assumed to be the size of the largest that is open.
        """
        sizes = {key: 0 if (each := known()) is None else each.held_bytes for key, known in self._segments.items()}
        total = sum(sizes.values()) + max(sizes.values(), default=0)
        left = []
        while self._segments and (len(self._segments) >= self.most or total > self.most_bytes):
            key, known = self._segments.popitem(last=False)
            total -= sizes[key]
            each = known()
            if each is not None:
                left.append(each)
        return left

    def _forget(self, name: int) -> None:
        known = self._segments.get(name)
        if known is not None and known() is None:  # otherwise another segment has this id by now
            del self._segments[name]


KEPT_OPEN: Final = KeptOpen()


logger = get_logger(__name__)

# Reservations grow from small to large, so that a thousand quiet logs do not take up a whole disk.
_FIRST_RESERVE: Final = 64 * 1024
_BLOCK: Final = 4 * 1024
MOST_RESERVE: Final = 16 * 1024 * 1024
# From this size on, one system call is faster than storing into a map whose pages must be faulted in first.
_LARGE_WRITE: Final = 16 * 1024
# Pages are filled with zeros ahead of the stores: one large write costs a fraction of the page faults that storing into
# each page for the first time would cost, and syncing a page that was written before is faster.
_FIRST_FILL: Final = 16 * 1024
_MOST_FILL: Final = 256 * 1024

_ALL: Final = 2**63  # past every offset


class Segment:
    """The read side: find a position, read a frame. File and index are opened when first needed."""

    is_active = False

    def __init__(self, disk: Disk, folder: str, base_offset: int, *, log_id: int, index_bytes: int) -> None:
        self._disk = disk
        self.folder = folder
        self.base_offset = base_offset
        self.path = join(folder, segment_name(base_offset))
        self.log_id = log_id
        self._index_bytes = index_bytes
        self._file: File | None = None
        self._index: SegmentIndex | None = None
        self.latest: tuple[int, int] | None = None  # the latest time in it, up to an offset: (offset, time)
        self._proven: tuple[File, SegmentIndex] | None = None  # an index that is known to match that file
        # Its bytes up to an offset, if they could not be mapped: (file, offset, bytes).
        self._copy: tuple[File, int, memoryview] | None = None
        self.held_bytes = 0  # of this segment in memory, mapped or copied
        self.rewrites = 0  # how often another file took its place

    @property
    def file(self) -> File:
        file = self._file  # read once: another thread may clear it
        if file is None:
            file = self._file = self._disk.open(self.path)
        return file

    @property
    def is_closed(self) -> bool:
        """Whether its file is closed at the moment."""
        return self._file is None

    def index_to(self, next_offset: int) -> SegmentIndex:
        """Return the index up to an offset that may be read: from its file, extended by frames it does not know yet.

        Use it for facts about the whole segment. Its positions are valid only in the bytes returned by `opened`.
        """
        index = self._index  # read once, like the file
        if index is None:
            index = self._index = self.load_index()
        if index is None or index.next_offset < next_offset:
            return self.opened(next_offset)[2]
        return index

    def opened(self, next_offset: int) -> tuple[File, memoryview, SegmentIndex]:
        """Return the file, all its bytes and their index, which belong together even if the file is replaced now."""
        with self._reading():
            file = self.file
            data = self._bytes_of(file, next_offset)
        proven = self._proven
        if proven is None or proven[0] is not file:
            self._proven = proven = (file, self._index_of(data))
        index = self._index = proven[1]
        if index.next_offset < next_offset:
            wanted = FrameRules(self.log_id, index.next_offset)
            for found in walk(data, wanted, position=index.end, bodies=False):
                if isinstance(found, FrameHeader):
                    index.add_header(found)
                if index.next_offset >= next_offset:
                    break
        return file, data, index

    def _index_of(self, data: memoryview) -> SegmentIndex:
        """Return the index in memory or on disk if it matches these bytes; otherwise an empty one."""
        index = self._index
        if index is not None and index.fits(data):
            return index
        index = self.load_index()
        if index is not None and index.fits(data):
            return index
        return SegmentIndex(self.base_offset, self._index_bytes)

    @property
    def index_path(self) -> str:
        return join(self.folder, index_name(self.base_offset))

    def size(self) -> int:
        """Return the size of its file. Does not keep the file open."""
        return self.measured()[0]

    def measured(self) -> tuple[int, bool]:
        """Return the size of its file, and whether only a store has it. Does not keep the file open."""
        with self._reading():
            file = self._file
            if file is not None:
                return file.size(), isinstance(file, TieredFile)
            with closing(self._disk.open(self.path)) as file:
                return file.size(), isinstance(file, TieredFile)

    def data(self) -> memoryview:
        """Return all its bytes."""
        with self._reading():
            data = self._bytes_of(self.file, _ALL)
            self._copy = None  # the file may grow
            return data

    def _bytes_of(self, file: File, next_offset: int) -> memoryview:
        """Return all bytes of the file: mapped, or read into memory if there is no room for a map.

        A copy is kept until somebody wants to read further: unlike a map, it does not grow with the file.
        """
        copy = self._copy
        if copy is not None and copy[0] is file and copy[1] >= next_offset:
            return copy[2]
        size = file.size()
        data = _mapped(file, size)
        if data is None:
            KEPT_OPEN.close_others(self)
            data = _mapped(file, size)
        if data is None:
            data = _read(file, size)
            self._copy = file, next_offset, data
        self.held_bytes = size
        return data

    def load_index(self) -> SegmentIndex | None:
        try:
            content = read_file(self._disk, self.index_path)
        except OSError as error:
            logger.warning("index not read", extra={"segment": self.path, "error": str(error)})
            return None
        return None if content is None else parse_index(content, self.log_id, self.base_offset, self._index_bytes)

    def use_index(self, index: SegmentIndex) -> None:
        self._index = index

    def use_new_file(self, index: SegmentIndex) -> None:
        """Switch to the file that has replaced the old one, with this index. Readers of the old file keep it alive."""
        # The old file first: an index is only ever used with the file it was made for.
        self.close_files()
        self._index = index
        self.latest = None
        self.rewrites += 1

    def save_index(self) -> None:
        """Write the index next to the segment. It is a cache: a failure costs time later, nothing else."""
        index = self._index
        if index is None:
            return
        temporary = self.index_path + ".tmp"
        try:
            with (
                taking_no_room(self._disk, temporary),
                closing(self._disk.open(temporary, write=True, create=True)) as file,
            ):
                file.truncate(0)
                write_fully(file, 0, [index.encode(self.log_id)])
            self._disk.rename(temporary, self.index_path)
        except OSError as error:
            # On a full disk others say what is wrong; this could be said for every segment.
            level = logging.INFO if error.errno in FULL_DISK else logging.WARNING
            logger.log(level, "index not written", extra={"segment": self.path, "error": str(error)})

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise  # trimmed: the reader must look again which segments exist
        except OSError as error:
            if ran_out(error):
                raise shortage(f"cannot read {self.path}", error, "Nothing was changed") from error
            raise Unavailable(
                f"cannot read {self.path}: {error.strerror or error}. Nothing was changed; check the disk, then try "
                "again"
            ) from error

    def close_files(self) -> None:
        """Close file and index until they are needed again; readers using them at the moment keep them alive."""
        self._file = None
        self._index = None
        self._proven = None
        self._copy = None
        self.held_bytes = 0


class ActiveSegment(Segment):
    """The write side: the last segment, owned by one process."""

    is_active = True

    def __init__(
        self,
        disk: Disk,
        folder: str,
        base_offset: int,
        *,
        log_id: int,
        index_bytes: int,
        file: File,
        index: SegmentIndex,
        limit_bytes: int,
        mapped: bool,
        created_ns: int,
    ) -> None:
        super().__init__(disk, folder, base_offset, log_id=log_id, index_bytes=index_bytes)
        self._file = file
        self._index = self.index = index
        self._limit_bytes = limit_bytes
        self.mapped = mapped
        self.map: WritableMap | None = None
        self._dirty_from: int | None = None
        self._size = file.size()
        self.created_ns = created_ns
        self.position = index.end
        self.next_offset = index.next_offset
        self.reserved = 0  # even if the file is longer: in a copied file the blocks may be missing
        self.filled = 0

    def index_to(self, next_offset: int) -> SegmentIndex:
        """Return the index after bringing its end up to date, which appending single messages does not do."""
        self.index.end, self.index.next_offset = self.position, self.next_offset
        return self.index

    @property
    def file(self) -> File:
        """The file; while the log rests, a new one for this reader alone."""
        return self._file or self._disk.open(self.path)

    def reopen(self) -> None:
        """Open the file again for writing. What was reserved still is, unless the file got shorter."""
        file = self._disk.open(self.path, write=True)
        if file.size() < self.reserved:
            self.reserved = self.filled = 0
        self.map = file.map(self.reserved) if self.reserved else None
        self._file = file

    def opened(self, next_offset: int) -> tuple[File, memoryview, SegmentIndex]:
        """Return the file, its bytes, and the index that grows with them."""
        with self._reading():
            file = self.file
            return file, self._bytes_of(file, next_offset), self.index_to(next_offset)

    def save_index(self) -> None:
        self.index_to(self.next_offset)
        super().save_index()

    def close_files(self) -> None:
        """Do nothing: its file stays open while it is written to."""

    def release(self) -> None:
        """Close the file when the log is closed or rests; readers using it at the moment keep it alive."""
        self.map = None
        self._file = None
        self._copy = None

    def shortage(self, length: int) -> int:
        """Return how many bytes must be reserved before `length` more can be stored; usually 0."""
        if not self.mapped:
            return length
        need = self.position + length
        return 0 if need <= self.reserved else self._next_reserve(need) - self.reserved

    def least_shortage(self, length: int) -> int:
        """Like `shortage`, for a disk on which little is left."""
        if not self.mapped:
            return length
        return max(0, blocks(self.position + length) - self.reserved)

    def make_room(self, length: int, *, tight: bool = False) -> None:
        """Make sure that `length` more bytes can be stored; raises OSError, and changes nothing, if the disk is full.

        `tight` reserves no more than needed, because little is left.
        """
        self._scrub()  # or a torn frame could be found after the next ones, and look like damage
        need = self.position + length
        if not self.mapped:
            return
        if need > self.reserved:
            reserve = blocks(need) if tight else self._next_reserve(need)
            self.file.reserve(reserve)
            self.map = self.file.map(reserve)
            self.reserved = reserve
        if need > self.filled and length < _LARGE_WRITE:
            self._fill(need)

    def give_tail(self) -> int:
        """Give back the blocks reserved for messages to come, and return their size; the file keeps its length."""
        end = blocks(self.position)
        size = max(self.reserved, self._size) - end
        if not self.mapped or self._dirty_from is not None or size <= 0:
            return 0
        self.map = None
        self.reserved, self.filled, self._size = min(self.reserved, end), min(self.filled, end), end
        self.file.release(end)
        if self.reserved:
            self.map = self.file.map(self.reserved)
        return size

    def store(self, parts: Sequence[BytesLike], length: int) -> None:
        """Append bytes after the last frame, all of them or, with an OSError, none. `make_room` was called before."""
        position = self.position
        if self.map is not None and length < _LARGE_WRITE:
            at = position
            for part in parts:
                self.map[at : at + len(part)] = part
                at += len(part)
        else:
            try:
                write_fully(self.file, position, parts)
            except OSError:
                self._dirty_from = position
                raise
        self.position = position + length

    def sealed(self) -> Segment:
        """Return the same file as a read-only segment; saves its index."""
        self.save_index()
        segment = Segment(self._disk, self.folder, self.base_offset, log_id=self.log_id, index_bytes=self._index_bytes)
        segment._file, segment._index = self._file, self._index  # noqa: SLF001  one of its own kind
        return segment

    def forget(self, position: int) -> None:
        """Take back everything stored from the position on: a batch that was not completed."""
        self._dirty_from = position
        self.position = position

    def _next_reserve(self, need: int) -> int:
        step = min(max(self.reserved, _FIRST_RESERVE), MOST_RESERVE)
        return max(need, self._size, min(self.reserved + step, self._limit_bytes))

    def _fill(self, need: int) -> None:
        start = max(self.filled, self.position)
        step = min(max(self.position, _FIRST_FILL), _MOST_FILL)
        end = min(max(need, start + step), self.reserved)
        write_zeros(self.file, start, end)
        self.filled = end

    def _scrub(self) -> None:
        """Zero what a failed write left behind, before anything is written in its place."""
        if self._dirty_from is None:
            return
        write_zeros(self.file, self._dirty_from, self.file.size())
        self._dirty_from = None


def drop_segment(disk: Disk, folder: str, base_offset: int) -> None:
    """Remove the file of a segment that was not begun to the end, if it exists and can be removed."""
    with suppress(OSError):
        disk.remove(join(folder, segment_name(base_offset)))


def blocks(length: int) -> int:
    """Return the length of the whole blocks that this many bytes take."""
    return -(-length // _BLOCK) * _BLOCK


def _mapped(file: File, size: int) -> memoryview | None:
    """Return its bytes without a copy; None if there is no room for a map."""
    try:
        return file.view(0, size)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None


def _read(file: File, size: int) -> memoryview:
    try:
        return memoryview(file.read(0, size))
    except MemoryError as error:
        raise OSError(errno.ENOMEM, "no memory for its bytes") from error
