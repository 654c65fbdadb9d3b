"""The bytes of one simulated file: what the page cache shows, and what a power cut may leave of it.

An inode holds one buffer, the content that the running machine sees, and for each page written since the
last sync the durable version of that page and the writes on top of it, in order. So a sync only forgets,
and a cut puts back the durable version of each such page and some of its writes.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import TypeAlias

PAGE_BYTES = 4096
SECTOR_BYTES = 512

_PAGE_BITS = 12
assert 1 << _PAGE_BITS == PAGE_BYTES

# Where a write begins within its page, and its bytes.
Extent: TypeAlias = tuple[int, bytes]
Page: TypeAlias = bytes | bytearray


class Fate(Enum):
    """What a power cut does to everything unsynced."""

    LOST = "lost"
    KEPT = "kept"
    MIXED = "mixed"


class Inode:
    """The bytes of one file, durable and cached."""

    def __init__(self, content: bytes = b"") -> None:
        self.content: bytes | bytearray = content  # bytes while it may be shared, bytearray once written
        self.dirty: dict[int, tuple[Page, list[Extent]]] = {}  # page -> durable version, unsynced writes
        self.doomed: dict[int, Page] = {}  # page -> durable version, where a failed sync dropped the writes
        self.synced = len(content)  # the durable length
        self.lengths: list[int] = []  # every length since
        self.doomed_lengths: list[int] = []  # those that a failed sync dropped
        self.peak = len(content)  # the greatest length that a cut may bring back
        self.allocated = len(content)  # bytes that have blocks: a map may store there
        self.locked = False

    def write(self, position: int, data: bytes) -> None:
        """Change the cached bytes, growing the file where they reach past its end."""
        if not data:
            return
        end = position + len(data)
        if end > len(self.content):
            self.resize(end)
        content = self._thaw()
        self._record(position, data)
        content[position:end] = data
        self.allocated = max(self.allocated, end)

    def resize(self, length: int) -> None:
        """Cut, or grow with zeros."""
        content = self._thaw()
        old = len(content)
        if length < old:
            for page in range(length >> _PAGE_BITS, (old + PAGE_BYTES - 1) >> _PAGE_BITS):
                self._writes(page)
            del content[length:]
            self.allocated = min(self.allocated, length)
        elif length > old:
            content.extend(bytes(length - old))
            if self.peak > old:  # cut before and not synced: the old bytes may still be on the disk
                self._record(old, bytes(min(length, self.peak) - old))
            self.peak = max(self.peak, length)
        if length != old:
            self.lengths.append(length)

    def settle(self) -> None:
        """A sync that worked: what is pending is durable, what an earlier failure dropped is not."""
        length = len(self.content)
        if not self.doomed_lengths or self.lengths or self._reaches_past(self.synced):
            self.synced = length
            self.doomed_lengths = []
        if self.doomed:
            self._settle_doomed()
        self.lengths = []
        self.dirty = {}
        self.peak = max(length, self.synced, *self.doomed_lengths)

    def doom(self) -> None:
        """A sync that failed, as on Linux: still cached, but clean, so that no later sync writes it."""
        for page, (durable, _) in self.dirty.items():
            self.doomed.setdefault(page, durable)
        self.doomed_lengths += self.lengths
        self.dirty = {}
        self.lengths = []

    def frozen(self) -> bytes:
        """The cached content, to be shared."""
        if not isinstance(self.content, bytes):
            self.content = bytes(self.content)
        return self.content

    def durable(self) -> bytes:
        """What is there for sure after a power cut."""
        if not self._is_unsynced():
            return self.frozen()
        content = self._padded()
        for page, (durable, _) in self.dirty.items():
            _put_page(content, page, durable)
        for page, durable in self.doomed.items():
            _put_page(content, page, durable)
        del content[self.synced :]
        return bytes(content)

    def after_cut(self, rng: random.Random, fate: Fate) -> Inode:
        """What a power cut may leave of it."""
        if not self._is_unsynced():
            return Inode(self.frozen())
        if fate is Fate.MIXED:
            # One file may be lost whole while its neighbour is written back whole.
            fate = (Fate.LOST, Fate.KEPT, Fate.MIXED, Fate.MIXED)[rng.getrandbits(2)]
        if fate is Fate.LOST:
            return Inode(self.durable())
        if fate is Fate.KEPT:
            return Inode(self.frozen())
        return Inode(self._mixed(rng))

    def copy(self) -> Inode:
        """The same in a cache of its own, unlocked."""
        other = Inode(self.frozen())
        other.dirty = {page: (durable, writes.copy()) for page, (durable, writes) in self.dirty.items()}
        other.doomed = self.doomed.copy()
        other.synced = self.synced
        other.lengths = self.lengths.copy()
        other.doomed_lengths = self.doomed_lengths.copy()
        other.peak = self.peak
        other.allocated = self.allocated
        return other

    def damage(self, position: int, mask: int) -> None:
        """Spoil a byte in every version of it."""
        page, at = position >> _PAGE_BITS, position & (PAGE_BYTES - 1)
        content = self._thaw()
        content[position] ^= mask
        if page in self.dirty:
            durable, writes = self.dirty[page]
            spoiled = [(start, _flipped(data, at - start, mask)) for start, data in writes]
            self.dirty[page] = (_flipped(durable, at, mask), spoiled)
        if page in self.doomed:
            self.doomed[page] = _flipped(self.doomed[page], at, mask)

    def shorten(self, length: int) -> None:
        """Take the end away from every version of it."""
        del self._thaw()[length:]
        pages = (length + PAGE_BYTES - 1) >> _PAGE_BITS
        self.doomed = {page: _head(old, page, length) for page, old in self.doomed.items() if page < pages}
        self.dirty = {
            page: (_head(old, page, length), [(at, _head(data, page, length - at)) for at, data in writes])
            for page, (old, writes) in self.dirty.items()
            if page < pages
        }
        self.lengths = [min(length, each) for each in self.lengths]
        self.doomed_lengths = [min(length, each) for each in self.doomed_lengths]
        self.synced, self.peak = min(length, self.synced), min(length, self.peak)
        self.allocated = min(length, self.allocated)

    def _thaw(self) -> bytearray:
        if not isinstance(self.content, bytearray):
            self.content = bytearray(self.content)
        return self.content

    def _is_unsynced(self) -> bool:
        return bool(self.dirty or self.lengths or self.doomed or self.doomed_lengths)

    def _writes(self, page: int) -> list[Extent]:
        """The unsynced writes of a page; on first use its durable version is put aside."""
        entry = self.dirty.get(page)
        if entry is None:
            base = page << _PAGE_BITS
            entry = self.dirty[page] = (self.content[base : base + PAGE_BYTES], [])
        return entry[1]

    def _record(self, position: int, data: bytes) -> None:
        """Note an unsynced write, in pieces that each lie within a page."""
        page, at = position >> _PAGE_BITS, position & (PAGE_BYTES - 1)
        if at + len(data) <= PAGE_BYTES:
            self._writes(page).append((at, data))
            return
        done = 0
        while done < len(data):
            piece = data[done : done + PAGE_BYTES - at]
            self._writes(page).append((at, piece))
            done += len(piece)
            page, at = page + 1, 0

    def _reaches_past(self, length: int) -> bool:
        return any(
            (page << _PAGE_BITS) + at + len(data) > length
            for page, (_, writes) in self.dirty.items()
            for at, data in writes
        )

    def _settle_doomed(self) -> None:
        """Put what was written since a failed sync on top of the durable pages, and no more than that."""
        padded = self._padded()
        left: dict[int, Page] = {}
        for page, durable in self.doomed.items():
            if page in self.dirty:
                durable = _rewritten(durable, self.dirty[page][1])
            if self.synced == len(self.content):
                durable = _head(durable, page, self.synced)
            base = page << _PAGE_BITS
            if _whole(durable) != padded[base : base + PAGE_BYTES]:
                left[page] = durable  # else it was written again, and nothing is left to lose
        self.doomed = left

    def _padded(self) -> bytearray:
        """A copy with whole pages as far as any length that a cut may choose."""
        content = bytearray(self.content)
        end = (self.peak + PAGE_BYTES - 1) & -PAGE_BYTES
        content.extend(bytes(end - len(content)))
        return content

    def _mixed(self, rng: random.Random) -> bytes:
        """Each page on its own: the durable version and the first few writes on it, the last maybe torn."""
        content = self._padded()
        for page, durable in self.doomed.items():
            if page not in self.dirty and rng.random() < 0.5:
                _put_page(content, page, durable)
        for page, (durable, writes) in self.dirty.items():
            if page in self.doomed and rng.random() < 0.5:
                durable = self.doomed[page]
            _put_page(content, page, durable)
            _apply_some(content, page << _PAGE_BITS, writes, rng)
        lengths = [self.synced, *self.doomed_lengths, *self.lengths]
        del content[lengths[int(rng.random() * len(lengths))] :]
        return bytes(content)


def _apply_some(content: bytearray, base: int, writes: list[Extent], rng: random.Random) -> None:
    count = int(rng.random() * (len(writes) + 1))
    if count == 0:
        return
    for at, data in writes[: count - 1]:
        content[base + at : base + at + len(data)] = data
    at, data = writes[count - 1]
    if rng.random() < 0.5:
        content[base + at : base + at + len(data)] = data
        return
    start = 0
    while start < len(data):  # sector by sector, each old or new
        stop = min(len(data), ((at + start) // SECTOR_BYTES + 1) * SECTOR_BYTES - at)
        if rng.random() < 0.5:
            content[base + at + start : base + at + stop] = data[start:stop]
        start = stop


def _whole(page: Page) -> Page:
    return page if len(page) == PAGE_BYTES else page.ljust(PAGE_BYTES, b"\0")


def _put_page(content: bytearray, page: int, version: Page) -> None:
    base = page << _PAGE_BITS
    content[base : base + PAGE_BYTES] = _whole(version)


def _rewritten(version: Page, writes: list[Extent]) -> bytes:
    page = bytearray(_whole(version))
    for at, data in writes:
        page[at : at + len(data)] = data
    return bytes(page)


def _flipped(data: Page, at: int, mask: int) -> bytes:
    if not 0 <= at < len(data):
        return bytes(data)
    spoiled = bytearray(data)
    spoiled[at] ^= mask
    return bytes(spoiled)


def _head(data: Page, page: int, length: int) -> bytes:
    """What is left of bytes that begin with the page when the file ends at the length."""
    return bytes(data[: max(0, length - (page << _PAGE_BITS))])
