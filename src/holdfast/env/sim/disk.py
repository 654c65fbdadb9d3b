"""A disk in memory that loses what real disks may lose, for tests that cut the power, and faults on demand.

`contents` says what a power cut may leave of a file's bytes and of names; a `FaultPlan` says which calls fail. Here
they are put behind the calls of `Disk`.
"""

from __future__ import annotations

import errno
import errno as errors
import os
import random
import struct
from collections import defaultdict
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import cast

from holdfast.env.disk import NOTE_BYTES, RAN_OUT, BytesLike, File, FolderLock, FolderLocked, OpenFolder, WritableMap
from holdfast.env.sim.contents import Fate, Folder, Inode, NameTree, os_error


@dataclass(slots=True)
class _Fault:
    """One fault to come; `seen` counts the calls that it applied to."""

    nth: int
    errno: int
    sticky: bool
    calls: frozenset[str] | None
    short: bool = False
    seen: int = 0


class FaultPlan:
    """What goes wrong on a disk. Calls count from 1, starting with the first after the fault was armed."""

    __slots__ = ("_faults", "armed", "fired")

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self.armed = False  # checked before every call, so that a disk without faults costs next to nothing
        self.fired: list[str] = []  # the calls that failed, in order

    def fail(self, nth: int, errno: int, *, sticky: bool, calls: frozenset[str] | None = None) -> None:
        """Have the nth call (of those named) raise OSError(errno); if sticky, all such calls after it, too."""
        self._arm(_Fault(nth, errno, sticky, calls))

    def short_write(self, nth: int, *, sticky: bool) -> None:
        """Have the nth write take about half of its bytes; if sticky, the disk is full and later ones raise ENOSPC."""
        self._arm(_Fault(nth, errors.ENOSPC, sticky, frozenset({"write"}), short=True))

    def clear(self) -> None:
        """Remove all faults; `fired` is kept."""
        self._faults.clear()
        self.armed = False

    def strike(self, call: str) -> bool:
        """Raise the fault that applies to this call; returns whether it is a write to be cut short."""
        for fault in self._faults:
            if fault.calls is not None and call not in fault.calls:
                continue
            if call == "exists" and fault.errno not in RAN_OUT:
                continue  # the real disk answers any other error with "no", which is not a fault to test
            fault.seen += 1
            if fault.seen == fault.nth or (fault.sticky and fault.seen > fault.nth):
                self.fired.append(call)
                if fault.short and fault.seen == fault.nth:
                    return True
                raise OSError(fault.errno, f"{os.strerror(fault.errno)} (ordered for call {call})")
        return False

    def _arm(self, fault: _Fault) -> None:
        if fault.nth < 1:
            raise ValueError("calls count from 1")
        self._faults.append(fault)
        self.armed = True


_PLENTY_BYTES = 1 << 50


class SimulatedLock:
    """A held lock of the simulated disk."""

    def __init__(self, inode: Inode) -> None:
        self._inode: Inode | None = inode

    def release(self) -> None:
        if self._inode is not None:
            self._inode.locked = False
            self._inode = None


class SimulatedOpenFolder:
    """An open folder of the simulated disk; syncs the names that it has at that time."""

    def __init__(self, disk: SimulatedDisk, folder: str) -> None:
        self._disk = disk
        self._folder = folder

    def sync(self) -> None:
        self._disk.sync_names(self._folder)

    def close(self) -> None:
        """Do nothing: nothing is kept open here."""


class SimulatedDisk:
    """A `Disk` in memory: counts calls, fails on demand, and returns what a power cut or a kill leaves."""

    def __init__(self, *, maps: bool = True, capacity_bytes: int | None = None, block_bytes: int = 1) -> None:
        self.faults = FaultPlan()
        self.calls: dict[str, int] = defaultdict(int)
        self.on_call: Callable[[str], None] | None = None  # called after each change has taken effect
        self.maps = maps
        self._capacity_bytes = capacity_bytes
        self._block_bytes = block_bytes  # a file takes whole blocks of the capacity
        self._tree = NameTree()
        self._mount_id = 1

    def can_map(self, folder: str) -> bool:
        return self.maps

    def kind(self, folder: str) -> str:
        return "simulated"

    def mount_id(self, folder: str) -> int:
        return self._mount_id

    def names(self, folder: str) -> list[str]:
        self.reach("names")
        return sorted(self._tree.folder(folder).names)

    def exists(self, path: str) -> bool:
        self.reach("exists")
        return self._has(path)

    def _has(self, path: str) -> bool:
        try:
            self._tree.node(path)
        except OSError:
            return False
        return True

    def make_folder(self, path: str) -> None:
        self.reach("make_folder")
        highest, above, current = "", "", ""
        made = False
        for name in path.split("/"):
            highest, above, current = above, current, f"{current}/{name}"
            if self._has(current):
                if not isinstance(self._tree.node(current), Folder):
                    raise os_error(errno.EEXIST, path)
                continue
            if not made:
                self.sync_folder(highest)  # the last existing one may not have been synced
            made = True
            self._tree.link(self._tree.folder(above), name, Folder())
            self.done("make_folder")
            self.sync_folder(above)  # the real disk does so for each folder that it creates
        if not made:
            self.sync_folder(above)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        self.reach("open")
        if create and not self._has(path):
            self._create(path)
            self.done("open")
        return SimulatedFile(self, self._tree.inode(path), write=write)

    def rename(self, old: str, new: str) -> None:
        self.reach("rename")
        self._tree.rename(old, new)
        self.done("rename")

    def remove(self, path: str) -> None:
        self.reach("remove")
        self._tree.inode(path)
        self._tree.link(*self._tree.place(path), None)
        self.done("remove")

    def is_folder(self, path: str) -> bool:
        return self._has(path) and isinstance(self._tree.node(path), Folder)

    def remove_folder(self, path: str) -> None:
        self.reach("remove_folder")
        if self._tree.folder(path).names:
            raise os_error(errno.ENOTEMPTY, path)
        self._tree.link(*self._tree.place(path), None)
        self.done("remove_folder")

    def open_folder(self, folder: str) -> OpenFolder:
        self.reach("open_folder")
        self._tree.folder(folder)
        return SimulatedOpenFolder(self, folder)

    def sync_folder(self, folder: str) -> None:
        self.open_folder(folder).sync()

    def sync_names(self, folder: str) -> None:
        """Implements `OpenFolder.sync`."""
        self.reach("sync_folder")
        self._tree.sync(self._tree.folder(folder))
        self.done("sync_folder")

    def free_bytes(self, folder: str) -> int:
        self.reach("free_bytes")
        self._tree.folder(folder)
        room = self.room_bytes()
        return _PLENTY_BYTES if room is None else room

    def lock(self, path: str, note: bytes) -> FolderLock:
        self.reach("lock")
        inode = self._tree.inode(path) if self._has(path) else self._create(path)
        if inode.locked:
            raise FolderLocked(bytes(inode.content[:NOTE_BYTES]).rstrip())
        inode.locked = True
        room = self.room_bytes()
        if (
            room is None or self.taken_bytes(inode.allocated) + room >= NOTE_BYTES
        ):  # the note is for people: without room, no note
            inode.write(0, note.ljust(NOTE_BYTES))
        self.done("lock")
        return SimulatedLock(inode)

    def exposure(self, folder: str, *, above: bool = False) -> str | None:
        return None  # it has no users

    def cut(self, rng: random.Random) -> SimulatedDisk:
        """Simulate a power cut: return a new disk with what may be left. This one is not affected."""
        chance = rng.random()
        fate = Fate.LOST if chance < 0.1 else Fate.KEPT if chance < 0.2 else Fate.MIXED
        successor = self._successor(self._tree.after_cut(rng, fate))
        successor._mount_id = self._mount_id + 1  # noqa: SLF001  one of its own kind
        return successor

    def remount(self, rng: random.Random) -> SimulatedDisk:
        """Simulate a failed disk that is mounted again: what was not synced may be lost, without a reboot."""
        return self.cut(rng)

    def kill(self) -> SimulatedDisk:
        """Simulate kill -9: return a new disk with the same contents, unsynced changes still unsynced, and no locks."""
        return self._successor(self._tree.copy())

    def flip(self, path: str, position: int, mask: int = 0xFF) -> None:
        """Simulate media damage: change a byte, durable and cached."""
        self._tree.inode(path).damage(position, mask)

    def cut_file(self, path: str, length: int) -> None:
        """Simulate media damage: lose the end of a file, durable and cached."""
        self._tree.inode(path).shorten(length)

    def contents(self, path: str) -> bytes:
        """Return what the running machine reads."""
        return self._tree.inode(path).frozen()

    def durable(self, path: str) -> bytes | None:
        """Return what is left after a power cut that keeps nothing unsynced; None if the file is lost."""
        inode = self._tree.durable_inode(path)
        return None if inode is None else inode.durable()

    def reach(self, call: str) -> bool:
        """Count a call and raise its fault, if any; returns whether it is a write to be cut short."""
        self.calls[call] += 1
        return self.faults.armed and self.faults.strike(call)

    def store(self, call: str) -> None:
        """Count a store into memory, which cannot fail, and report that it took effect."""
        self.calls[call] += 1
        self.done(call)

    def done(self, call: str) -> None:
        """Report that a call took effect."""
        if self.on_call is not None:
            self.on_call(call)

    def room_bytes(self) -> int | None:
        """Return the bytes left; None without a limit. A removed file frees its room at once."""
        if self._capacity_bytes is None:
            return None
        return max(0, self._capacity_bytes - self._tree.allocated_bytes(self._block_bytes))

    def taken_bytes(self, length: int) -> int:
        """Return how much of the capacity a file takes that has blocks for this many bytes."""
        return -(-length // self._block_bytes) * self._block_bytes

    def _create(self, path: str) -> Inode:
        inode = Inode()
        self._tree.link(*self._tree.place(path), inode)
        return inode

    def _successor(self, tree: NameTree) -> SimulatedDisk:
        """Return the disk after a restart: no counts, no faults, no hook."""
        disk = SimulatedDisk(maps=self.maps, capacity_bytes=self._capacity_bytes, block_bytes=self._block_bytes)
        disk._tree = tree
        disk._mount_id = self._mount_id
        return disk


MAX_PARTS = 1024  # IOV_MAX on Linux: a write of more parts fails

_WORD = struct.Struct("<Q")
WORD_BYTES = _WORD.size
assert WORD_BYTES == 8


class SimulatedFile:
    """A file in memory that follows the rules of `File`."""

    __slots__ = ("_disk", "_inode", "_open", "_write")

    def __init__(self, disk: SimulatedDisk, inode: Inode, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._write = write
        self._open = True

    def size(self) -> int:
        self._check_open()
        return len(self._inode.content)

    def read(self, position: int, length: int) -> bytes:
        self._check_open()
        self._disk.reach("read")
        return bytes(self._inode.content[position : position + length])

    def view(self, position: int, length: int) -> memoryview:
        self._check_open()
        self._disk.reach("view")
        content = self._inode.content
        if isinstance(content, bytes):
            return memoryview(content)[position : position + length]
        # A buffer with a view cannot grow, so the view gets a copy.
        return memoryview(bytes(memoryview(content)[position : position + length]))

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        self._check_writable(errno.EBADF)
        if len(parts) > MAX_PARTS:
            raise os_error(errno.EINVAL)
        short = self._disk.reach("write")
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        if short:
            data = data[: len(data) // 2]
        if position + len(data) > self._inode.allocated:
            data = data[: self._fitting(position, len(data))]
        self._inode.write(position, data)
        self._disk.done("write")
        return len(data)

    def reserve(self, length: int) -> None:
        self._check_writable(errno.EBADF)
        if length <= 0:
            raise os_error(errno.EINVAL)
        self._disk.reach("reserve")
        inode = self._inode
        room, taken_bytes = self._disk.room_bytes(), self._disk.taken_bytes
        if room is not None and taken_bytes(length) - taken_bytes(inode.allocated) > room:
            raise os_error(errno.ENOSPC)
        inode.resize(max(length, len(inode.content)))
        inode.allocated = max(inode.allocated, length)
        self._disk.done("reserve")

    def release(self, position: int) -> None:
        self._check_writable(errno.EBADF)
        self._disk.reach("release")
        inode = self._inode
        if any(inode.content[position:]):
            raise AssertionError("blocks given back that hold something")
        inode.allocated = min(inode.allocated, position)
        self._disk.done("release")

    def map(self, length: int) -> WritableMap:
        self._check_open()
        self._disk.reach("map")
        self._check_mappable(length)
        return SimulatedMap(self._disk, self._inode, length, write=self._write)

    def words(self, count: int) -> MutableSequence[int]:
        self._check_open()
        self._disk.reach("words")
        self._check_mappable(count * WORD_BYTES)
        words = SimulatedWords(self._disk, self._inode, count, write=self._write)
        return cast("MutableSequence[int]", words)

    def truncate(self, length: int) -> None:
        self._check_writable(errno.EINVAL)
        self._disk.reach("truncate")
        self._inode.resize(length)
        self._disk.done("truncate")

    def sync(self) -> None:
        self._check_open()
        try:
            self._disk.reach("sync")
        except OSError:
            self._inode.doom()
            raise
        self._inode.settle()
        self._disk.done("sync")

    def close(self) -> None:
        self._check_open()
        self._open = False  # even if it fails: the kernel has released it by then
        self._disk.reach("close")

    def _check_open(self) -> None:
        if not self._open:
            raise os_error(errno.EBADF)

    def _check_writable(self, code: int) -> None:
        self._check_open()
        if not self._write:
            raise os_error(code)

    def _check_mappable(self, length: int) -> None:
        if length > len(self._inode.content):
            raise ValueError("mmap length is greater than file size")
        if self._write and length > self._inode.allocated:
            raise AssertionError("mapped for storing without blocks behind it: a full disk would be SIGBUS")

    def _fitting(self, position: int, length: int) -> int:
        """Return how many bytes fit on the disk: first fewer, then an error when there is no room at all."""
        room = self._disk.room_bytes()
        if room is None:
            return length
        fitting = self._disk.taken_bytes(self._inode.allocated) + room - position
        if fitting <= 0 < length:
            raise os_error(errno.ENOSPC)
        return min(length, fitting)


class SimulatedMap:
    """A file's bytes as memory: a store is an unsynced write that cannot fail and is never short."""

    __slots__ = ("_disk", "_inode", "_length", "_write")

    def __init__(self, disk: SimulatedDisk, inode: Inode, length: int, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._length = length
        self._write = write

    def __setitem__(self, key: slice, value: BytesLike) -> None:
        start = 0 if key.start is None else key.start
        stop = self._length if key.stop is None else key.stop
        _check_store(self._disk, self._inode, start, stop, write=self._write)
        if stop > self._length or stop - start != len(value):
            raise IndexError("mmap slice assignment is wrong size")
        self._inode.write(start, bytes(value))
        self._disk.store("map_store")


class SimulatedWords:
    """64-bit words at the start of a file; a word lies within a sector, so a power cut cannot tear it."""

    __slots__ = ("_count", "_disk", "_inode", "_write")

    def __init__(self, disk: SimulatedDisk, inode: Inode, count: int, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._count = count
        self._write = write

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        value: int = _WORD.unpack_from(self._inode.content, self._position(index))[0]
        return value

    def __setitem__(self, index: int, value: int) -> None:
        start = self._position(index)
        _check_store(self._disk, self._inode, start, start + WORD_BYTES, write=self._write)
        if not 0 <= value < 1 << 64:
            raise ValueError("not a 64-bit word")
        self._inode.write(start, _WORD.pack(value))
        self._disk.store("word_store")

    def _position(self, index: int) -> int:
        if not -self._count <= index < self._count:
            raise IndexError("no such word")
        return (index % self._count) * WORD_BYTES


def _check_store(disk: SimulatedDisk, inode: Inode, start: int, stop: int, *, write: bool) -> None:
    if not write:
        raise TypeError("a map of a file that was opened for reading cannot be stored into")
    if not disk.maps:
        raise AssertionError("a store into a map where it may need new blocks: a full disk would be SIGBUS")
    if not 0 <= start <= stop <= min(len(inode.content), inode.allocated):
        raise AssertionError(f"a store at {start}..{stop}, outside of what is reserved: SIGBUS")
