"""One file of the log. A sealed segment never changes; the active one grows at its end."""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from holdfast.codec.frame import FrameHeader
from holdfast.env import close_in_children
from holdfast.env.disk import BytesLike, Disk, File, WritableMap
from holdfast.errors import Unavailable
from holdfast.storage.files import index_name, join, read_file, segment_name, write_fully, write_zeros
from holdfast.storage.frames import FrameRules, SegmentIndex, parse_index, walk
from holdfast.storage.opening import ran_out, shortage

# Which sealed segments are open for reading: so many, and so many bytes, for all logs of this process together.
#
# Each costs two file descriptors, a map and its index. What is mapped and was read counts as memory of the process, in
# `ps` and against `ulimit -v`, though the kernel may take it back at any time. Beyond a bound the one that was not used
# for longest is let go; whoever reads it at that moment goes on, and the next one opens it again.


DESCRIPTORS_EACH: Final = 2
USUAL_MOST: Final = 128
MOST_BYTES: Final = 256 << 20


class KeptOpen:
    """The segments that are open, the one that was used last at the end. Safe to use from any thread."""

    def __init__(self, most: int = USUAL_MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        # Weakly: a reader that nobody holds any more must not keep its files.
        self._segments: OrderedDict[int, weakref.ref[Segment]] = OrderedDict()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the lock may be held by a thread that this process does not have."""
        self._lock = threading.Lock()
        self._segments = OrderedDict()

    def touch(self, segment: Segment) -> Segment:
        """Remember that it is in use."""
        if segment.is_active:
            return segment
        name = id(segment)
        left: list[Segment] = []
        with self._lock:
            while self._gone:
                self._forget(self._gone.popleft())
            known = self._segments.pop(name, None)
            if known is None:
                # What is called at the end of a segment may be called at any moment: it takes no lock.
                gone = self._gone
                known = weakref.ref(segment, lambda _: gone.append(name))
            if not segment.held_bytes:
                left = self._make_room()
            self._segments[name] = known
        for each in left:
            each.let_go()
        return segment

    def let_go_but(self, segment: Segment) -> None:
        """Let go of all others: this one needs the memory."""
        with self._lock:
            known = self._segments.pop(id(segment), None)
            left, self._segments = self._segments, OrderedDict()
            if known is not None:
                self._segments[id(segment)] = known
        for other in left.values():
            if (each := other()) is not None:
                each.let_go()

    def _make_room(self) -> list[Segment]:
        """Take out those that must go before another is opened, the oldest first. The caller holds the lock.

        How much that one will take is not known before: as much as the largest of those that are open.
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
        if known is not None and known() is None:  # otherwise another one has its name by now
            del self._segments[name]


KEPT_OPEN: Final = KeptOpen()


logger = logging.getLogger(__name__)

# Reserved blocks grow from small to large, so that a thousand quiet logs do not hold a disk between them.
_FIRST_RESERVE: Final = 64 * 1024
TIGHT_RESERVE: Final = 16 * 1024
MOST_RESERVE: Final = 16 * 1024 * 1024
# From here on one system call beats a store into a map that must fault its pages in first.
_LARGE_WRITE: Final = 16 * 1024
# Pages are filled with zeros ahead of the stores: one write of many pages costs a fraction of the faults that
# storing into each for the first time would, and syncing a page that has been written before is faster.
_FIRST_FILL: Final = 16 * 1024
_MOST_FILL: Final = 256 * 1024

_ALL: Final = 2**63  # behind every offset


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
        self.latest: tuple[int, int] | None = None  # up to an offset: the latest time in it
        self._proven: tuple[File, SegmentIndex] | None = None  # an index that is known to be of that file
        # Its bytes up to an offset, where they could not be mapped.
        self._copy: tuple[File, int, memoryview] | None = None
        self.held_bytes = 0  # of it in memory, mapped or copied

    @property
    def file(self) -> File:
        file = self._file  # taken once: another thread may let go of it
        if file is None:
            file = self._file = self._disk.open(self.path)
        return file

    @property
    def is_closed(self) -> bool:
        """Whether it has no file at this moment."""
        return self._file is None

    def index_to(self, next_offset: int) -> SegmentIndex:
        """The index as far as an offset that may be read: from its file, and from the frames that it does not know.

        For what it says of the segment as a whole. Positions are good only in the bytes that `opened` gives.
        """
        index = self._index  # taken once, like the file
        if index is None:
            index = self._index = self.load_index()
        if index is None or index.next_offset < next_offset:
            return self.opened(next_offset)[2]
        return index

    def opened(self, next_offset: int) -> tuple[File, memoryview, SegmentIndex]:
        """The file, all its bytes and their index: of one file, though another may take its place at any moment."""
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
        """The index that we have, or the one beside the segment, if it is of these bytes; else an empty one."""
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
        """Bytes on disk. A file that is not open is not kept open for this."""
        with self._reading():
            file = self._file
            if file is not None:
                return file.size()
            file = self._disk.open(self.path)
            try:
                return file.size()
            finally:
                file.close()

    def data(self) -> memoryview:
        """All its bytes."""
        with self._reading():
            data = self._bytes_of(self.file, _ALL)
            self._copy = None  # it may grow
            return data

    def _bytes_of(self, file: File, next_offset: int) -> memoryview:
        """All bytes of the file: mapped, or read where there is no room for a map.

        What was read is kept for as long as nobody wants to see further: unlike a map, it does not grow with the file.
        """
        copy = self._copy
        if copy is not None and copy[0] is file and copy[1] >= next_offset:
            return copy[2]
        size = file.size()
        data = _mapped(file, size)
        if data is None:
            KEPT_OPEN.let_go_but(self)
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
        """Another file has taken its place, with this index; who reads the old one goes on with that."""
        self.let_go()
        self._index = index
        self.latest = None

    def save_index(self) -> None:
        """Write the index beside the segment. It is a cache: a failure costs time later, nothing else."""
        index = self._index
        if index is None:
            return
        temporary = self.index_path + ".tmp"
        try:
            file = self._disk.open(temporary, write=True, create=True)
            try:
                file.truncate(0)
                write_fully(file, 0, [index.encode(self.log_id)])
            finally:
                file.close()
            self._disk.rename(temporary, self.index_path)
        except OSError as error:
            logger.warning("index not written", extra={"segment": self.path, "error": str(error)})

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise  # trimmed away: who reads must look again which segments there are
        except OSError as error:
            if ran_out(error):
                raise shortage(f"cannot read {self.path}", error, "Nothing was changed") from error
            raise Unavailable(
                f"cannot read {self.path}: {error.strerror or error}. Nothing was changed; look at the disk, try again"
            ) from error

    def let_go(self) -> None:
        """Forget file and index until they are needed again; who reads at this moment keeps them alive."""
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
        self.reserved = 0  # though the file be longer: a copied file may have lost its blocks
        self.filled = 0

    def index_to(self, next_offset: int) -> SegmentIndex:
        """The index, brought up to the last frame: single messages do not keep its end up to date."""
        self.index.end, self.index.next_offset = self.position, self.next_offset
        return self.index

    @property
    def file(self) -> File:
        """The file; while the log rests, one for whoever reads at this moment."""
        return self._file or self._disk.open(self.path)

    def reopen(self) -> None:
        """The log is used again. What was reserved still is."""
        file = self._disk.open(self.path, write=True)
        if file.size() < self.reserved:
            self.reserved = self.filled = 0
        self.map = file.map(self.reserved) if self.reserved else None
        self._file = file

    def opened(self, next_offset: int) -> tuple[File, memoryview, SegmentIndex]:
        """The file, its bytes, and the index that grows with them."""
        with self._reading():
            file = self.file
            return file, self._bytes_of(file, next_offset), self.index_to(next_offset)

    def save_index(self) -> None:
        self.index_to(self.next_offset)
        super().save_index()

    def let_go(self) -> None:
        """Never while it is written to."""

    def release(self) -> None:
        """The log is closed, or rests: forget the file; who reads at this moment keeps it alive."""
        self.map = None
        self._file = None
        self._copy = None

    def shortage(self, length: int) -> int:
        """How many bytes must be reserved before `length` more can be stored; usually 0."""
        if not self.mapped:
            return length
        need = self.position + length
        return 0 if need <= self.reserved else self._next_reserve(need) - self.reserved

    def make_room(self, length: int, *, tight: bool = False) -> None:
        """Make sure that `length` more bytes can be stored; OSError where the disk has no room, and nothing changes.

        `tight`: reserve no more than it takes, for little is left.
        """
        self._scrub()
        need = self.position + length
        if not self.mapped:
            return
        if need > self.reserved:
            reserve = -(-need // TIGHT_RESERVE) * TIGHT_RESERVE if tight else self._next_reserve(need)
            self.file.reserve(reserve)
            self.map = self.file.map(reserve)
            self.reserved = reserve
        if need > self.filled and length < _LARGE_WRITE:
            self._fill(need)

    def store(self, parts: Sequence[BytesLike], length: int) -> None:
        """Put bytes behind the last frame. Room was made. All of them, or an OSError and none of them."""
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
        """The same file as a segment that only gets read; its index goes beside it."""
        self.save_index()
        segment = Segment(self._disk, self.folder, self.base_offset, log_id=self.log_id, index_bytes=self._index_bytes)
        segment._file, segment._index = self._file, self._index  # noqa: SLF001  one of its own kind
        return segment

    def forget(self, position: int) -> None:
        """Take back what was stored from the position on: a batch that did not become whole."""
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


def _mapped(file: File, size: int) -> memoryview | None:
    """Its bytes without a copy; None where there is no room for a map."""
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
