"""The contents of a simulated disk, bytes and names: what is durable, and what a power cut may leave of the rest.

A file's unsynced writes are kept page by page, in order. A power cut may lose all of them, keep all of them, or leave
each page with the first few of its writes, the last one perhaps torn at a sector. A failed sync behaves as on Linux:
the pages stay in the cache but count as clean, so that no later sync writes them.

A change of names is pending until its folder is synced. A power cut keeps either the first few pending changes, as a
journal does, or some of them, where a change is kept only together with the earlier changes of the same names that it
builds on. Syncing a file does not make its name durable.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TypeAlias

PAGE_BYTES = 4096
SECTOR_BYTES = 512

_PAGE_BITS = 12
assert 1 << _PAGE_BITS == PAGE_BYTES

# A write within one page: where it begins in the page, and its bytes.
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
        self.doomed_lengths: list[int] = []  # lengths that a failed sync dropped
        self.peak = len(content)  # the greatest length that a power cut may bring back
        self.allocated = len(content)  # bytes that have blocks, so that a map may store there
        self.locked = False

    def write(self, position: int, data: bytes) -> None:
        """Change the cached bytes, and extend the file if they reach past its end."""
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
        """Cut, or extend with zeros."""
        content = self._thaw()
        old = len(content)
        if length < old:
            for page in range(length >> _PAGE_BITS, (old + PAGE_BYTES - 1) >> _PAGE_BITS):
                self._writes(page)
            del content[length:]
            self.allocated = min(self.allocated, length)
        elif length > old:
            content.extend(bytes(length - old))
            if self.peak > old:  # cut earlier and not synced: the old bytes may still be on the disk
                self._record(old, bytes(min(length, self.peak) - old))
            self.peak = max(self.peak, length)
        if length != old:
            self.lengths.append(length)

    def settle(self) -> None:
        """A successful sync: what is pending becomes durable, but not what an earlier failure dropped."""
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
        """A failed sync, as on Linux: pages stay cached but count as clean, so that no later sync writes them."""
        for page, (durable, _) in self.dirty.items():
            self.doomed.setdefault(page, durable)
        self.doomed_lengths += self.lengths
        self.dirty = {}
        self.lengths = []

    def frozen(self) -> bytes:
        """Return the cached content, which may be shared."""
        if not isinstance(self.content, bytes):
            self.content = bytes(self.content)
        return self.content

    def durable(self) -> bytes:
        """Return what is certain to be there after a power cut."""
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
        """Return what a power cut may leave of it."""
        left = Inode(self._after_cut(rng, fate))
        # A hole stays one, except where an older version of the file had something.
        left.allocated = max(min(self.allocated, len(left.content)), len(left.content.rstrip(b"\0")))
        return left

    def _after_cut(self, rng: random.Random, fate: Fate) -> bytes:
        if not self._is_unsynced():
            return self.frozen()
        if fate is Fate.MIXED:
            # One file may be lost completely while its neighbour is written back completely.
            fate = (Fate.LOST, Fate.KEPT, Fate.MIXED, Fate.MIXED)[rng.getrandbits(2)]
        if fate is Fate.LOST:
            return self.durable()
        if fate is Fate.KEPT:
            return self.frozen()
        return self._mixed(rng)

    def copy(self) -> Inode:
        """Return the same with a cache of its own, unlocked."""
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
        """Change a byte in every version of it."""
        page, at = position >> _PAGE_BITS, position & (PAGE_BYTES - 1)
        content = self._thaw()
        content[position] ^= mask
        if page in self.dirty:
            durable, writes = self.dirty[page]
            flipped = [(start, _flipped(data, at - start, mask)) for start, data in writes]
            self.dirty[page] = (_flipped(durable, at, mask), flipped)
        if page in self.doomed:
            self.doomed[page] = _flipped(self.doomed[page], at, mask)

    def shorten(self, length: int) -> None:
        """Cut off the end of every version of it."""
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
        """Return the unsynced writes of a page; on first use, saves its durable version."""
        entry = self.dirty.get(page)
        if entry is None:
            base = page << _PAGE_BITS
            entry = self.dirty[page] = (self.content[base : base + PAGE_BYTES], [])
        return entry[1]

    def _record(self, position: int, data: bytes) -> None:
        """Record an unsynced write, in pieces that each lie within a page."""
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
        """Apply what was written since a failed sync to the durable pages, and nothing else."""
        padded = self._padded()
        left: dict[int, Page] = {}
        for page, durable in self.doomed.items():
            if page in self.dirty:
                durable = _rewritten(durable, self.dirty[page][1])
            if self.synced == len(self.content):
                durable = _head(durable, page, self.synced)
            base = page << _PAGE_BITS
            if _whole(durable) != padded[base : base + PAGE_BYTES]:
                left[page] = durable  # otherwise it was written again, and nothing can be lost any more
        self.doomed = left

    def _padded(self) -> bytearray:
        """Return a copy with whole pages up to any length that a power cut may choose."""
        content = bytearray(self.content)
        end = (self.peak + PAGE_BYTES - 1) & -PAGE_BYTES
        content.extend(bytes(end - len(content)))
        return content

    def _mixed(self, rng: random.Random) -> bytes:
        """Return a mix, page by page: the durable version with the first few writes, the last one perhaps torn."""
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
    flipped = bytearray(data)
    flipped[at] ^= mask
    return bytes(flipped)


def _head(data: Page, page: int, length: int) -> bytes:
    """Return what is left of bytes that begin with the page if the file ends at the length."""
    return bytes(data[: max(0, length - (page << _PAGE_BITS))])


class Folder:
    """Names, as the running machine sees them and as they are on disk."""

    __slots__ = ("changed_by", "durable", "names", "placed_by")

    def __init__(self, names: dict[str, Node] | None = None) -> None:
        self.names: dict[str, Node] = {} if names is None else names
        self.durable: dict[str, Node] = self.names.copy()
        self.changed_by: dict[str, Change] = {}  # the last pending change of each name
        self.placed_by: Change | None = None  # the change that gave the folder its own name


Node: TypeAlias = Folder | Inode
Link: TypeAlias = tuple[Folder, str, Node | None]  # in this folder, under this name: this node, or none


class Change:
    """A change of names that a power cut keeps completely or not at all: create, rename, remove or mkdir."""

    __slots__ = ("links", "needs")

    def __init__(self, links: tuple[Link, ...], needs: tuple[Change, ...]) -> None:
        self.links = links
        self.needs = needs


class NameTree:
    """Folders within folders, and the changes that no sync has made durable yet."""

    def __init__(self, root: Folder | None = None) -> None:
        self._root = Folder() if root is None else root
        self._changes: list[Change] = []

    def node(self, path: str) -> Node:
        """Return the node at this path."""
        node: Node | None = self._root
        for name in path.split("/"):
            if name and name != ".":
                node = _folder(node, path).names.get(name)
                if node is None:
                    raise os_error(errno.ENOENT, path)
        assert node is not None
        return node

    def folder(self, path: str) -> Folder:
        """Return the folder at this path."""
        return _folder(self.node(path), path)

    def inode(self, path: str) -> Inode:
        """Return the file at this path."""
        node = self.node(path)
        if isinstance(node, Folder):
            raise os_error(errno.EISDIR, path)
        return node

    def place(self, path: str) -> tuple[Folder, str]:
        """Return the folder that holds or would hold this path, and the name in it."""
        above, _, name = path.rstrip("/").rpartition("/")
        return self.folder(above), name

    def durable_inode(self, path: str) -> Inode | None:
        """Return the file at this path if all pending changes are lost."""
        node: Node | None = self._root
        for name in path.split("/"):
            if name and name != ".":
                node = node.durable.get(name) if isinstance(node, Folder) else None
        return node if isinstance(node, Inode) else None

    def link(self, folder: Folder, name: str, node: Node | None) -> None:
        """Give a name to a new node, or remove the name."""
        change = self._change((folder, name, node))
        if isinstance(node, Folder):
            node.placed_by = change

    def rename(self, old: str, new: str) -> None:
        """Move a name, replacing what has the new one."""
        (source, old_name), (target, new_name) = self.place(old), self.place(new)
        node, replaced = source.names.get(old_name), target.names.get(new_name)
        if node is None:
            raise os_error(errno.ENOENT, old)
        if node is replaced:
            return
        _check_replacing(node, replaced, new)
        way = list(self._way(new))
        if node in way:
            raise os_error(errno.EINVAL, new)  # a folder cannot be moved into itself
        # The node must not end up in a folder that is itself lost: it would be gone under both names.
        needs = () if source is target else (folder.placed_by for folder in way)
        change = self._change((source, old_name, None), (target, new_name, node), needs=needs)
        if isinstance(node, Folder):
            node.placed_by = change

    def sync(self, folder: Folder) -> None:
        """Make the names of a folder durable, with everything they build on."""
        of_folder = {change for change in self._changes if any(link[0] is folder for link in change.links)}
        if not of_folder:
            return
        kept = _with_needs(self._changes, of_folder)
        for change in kept:
            for place, name, node in change.links:
                _assign(place.durable, name, node)
                if place.changed_by.get(name) is change:
                    del place.changed_by[name]
            change.needs = ()  # otherwise every change would keep all earlier ones alive
        durable = set(kept)
        self._changes = [change for change in self._changes if change not in durable]

    def after_cut(self, rng: random.Random, fate: Fate) -> NameTree:
        """Return what a power cut may leave, names and files."""
        left: dict[Folder, dict[str, Node]] = {}
        for change in _survivors(self._changes, rng, fate):
            for folder, name, node in change.links:
                if folder not in left:
                    left[folder] = folder.durable.copy()
                _assign(left[folder], name, node)
        return NameTree(_after_cut(self._root, left, rng, fate))

    def copy(self) -> NameTree:
        """Return the same with nodes of its own."""
        copies = _Copies(self._changes)
        tree = NameTree(copies.folder(self._root))
        tree._changes = copies.changes()
        return tree

    def allocated_bytes(self, block_bytes: int = 1) -> int:
        """Return the total size of all files that have a name, each in whole blocks."""
        return sum(-(-length // block_bytes) * block_bytes for length in _allocated(self._root))

    def _change(self, *links: Link, needs: Iterable[Change | None] = ()) -> Change:
        earlier = [folder.changed_by.get(name) for folder, name, _ in links]
        change = Change(links, tuple(each for each in (*earlier, *needs) if each is not None))
        for folder, name, node in links:
            _assign(folder.names, name, node)
            folder.changed_by[name] = change
        self._changes.append(change)
        return change

    def _way(self, path: str) -> Iterator[Folder]:
        """Yield the folders above a path, from the root down."""
        above, folder = path.rstrip("/").rpartition("/")[0], self._root
        yield folder
        for name in above.split("/"):
            if name and name != ".":
                folder = _folder(folder.names.get(name), path)
                yield folder


class _Copies:
    """Copies of nodes and changes, related to each other like the originals."""

    def __init__(self, changes: list[Change]) -> None:
        self._nodes: dict[Node, Node] = {}
        self._changes = {change: Change((), ()) for change in changes}

    def folder(self, folder: Folder) -> Folder:
        copy = self._nodes.get(folder)
        if copy is None:
            copy = self._nodes[folder] = Folder()  # known before its names are, since they may lead back to it
            copy.names = {name: self._node(node) for name, node in folder.names.items()}
            copy.durable = {name: self._node(node) for name, node in folder.durable.items()}
            copy.changed_by = {name: self._changes[change] for name, change in folder.changed_by.items()}
            copy.placed_by = self._changes.get(folder.placed_by) if folder.placed_by else None
        assert isinstance(copy, Folder)
        return copy

    def changes(self) -> list[Change]:
        for change, copy in self._changes.items():
            copy.needs = tuple(self._changes[each] for each in change.needs if each in self._changes)
            copy.links = tuple(
                (self.folder(folder), name, None if node is None else self._node(node))
                for folder, name, node in change.links
            )
        return list(self._changes.values())

    def _node(self, node: Node) -> Node:
        if isinstance(node, Folder):
            return self.folder(node)
        copy = self._nodes.get(node)
        if copy is None:
            copy = self._nodes[node] = node.copy()
        return copy


def _survivors(changes: list[Change], rng: random.Random, fate: Fate) -> list[Change]:
    """Return the pending changes that a power cut keeps, in order."""
    if not changes or fate is Fate.LOST:
        return []
    mode = rng.getrandbits(2)
    if fate is Fate.KEPT or mode == 0:
        return changes
    if mode == 1:
        return []
    if mode == 2:
        return changes[: int(rng.random() * (len(changes) + 1))]
    return _with_needs(changes, {change for change in changes if rng.random() < 0.5})


def _with_needs(changes: list[Change], chosen: set[Change]) -> list[Change]:
    """Return the chosen changes and everything they build on, in order."""
    kept = []
    for change in reversed(changes):  # what a change needs comes before it
        if change in chosen:
            kept.append(change)
            chosen.update(change.needs)
    kept.reverse()
    return kept


def _after_cut(folder: Folder, left: dict[Folder, dict[str, Node]], rng: random.Random, fate: Fate) -> Folder:
    names: dict[str, Node] = {}
    for name, node in left.get(folder, folder.durable).items():
        if isinstance(node, Folder):
            names[name] = _after_cut(node, left, rng, fate)
        else:
            names[name] = node.after_cut(rng, fate)
    return Folder(names)


def _assign(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _allocated(folder: Folder) -> Iterator[int]:
    for node in folder.names.values():
        if isinstance(node, Folder):
            yield from _allocated(node)
        else:
            yield node.allocated


def _check_replacing(node: Node, replaced: Node | None, path: str) -> None:
    if isinstance(replaced, Folder):
        if not isinstance(node, Folder):
            raise os_error(errno.EISDIR, path)
        if replaced.names:
            raise os_error(errno.ENOTEMPTY, path)
    elif replaced is not None and isinstance(node, Folder):
        raise os_error(errno.ENOTDIR, path)


def _folder(node: Node | None, path: str) -> Folder:
    if node is None:
        raise os_error(errno.ENOENT, path)
    if not isinstance(node, Folder):
        raise os_error(errno.ENOTDIR, path)
    return node


def os_error(code: int, path: str | None = None) -> OSError:
    """Build the error that the operating system would raise."""
    return OSError(code, os.strerror(code), path) if path else OSError(code, os.strerror(code))
