"""An open file of the simulated disk, and the two ways to store into it as memory."""

from __future__ import annotations

import errno
import struct
from collections.abc import MutableSequence, Sequence
from typing import Protocol, cast

from holdfast.env.disk import BytesLike, WritableMap
from holdfast.env.sim.inode import Inode
from holdfast.env.sim.names import os_error

MAX_PARTS = 1024  # IOV_MAX of Linux: more parts in one write are refused

_WORD = struct.Struct("<Q")
WORD_BYTES = _WORD.size
assert WORD_BYTES == 8


class Device(Protocol):
    """What a file asks of the disk that it lies on."""

    maps: bool  # whether stores into a map cannot fail here

    def reach(self, call: str) -> bool:
        """Count a call, which may raise a fault; answers whether it is a write to be cut short."""

    def store(self, call: str) -> None:
        """Count a store into memory, which cannot fail, and tell that it took effect."""

    def done(self, call: str) -> None:
        """Tell that a call took effect."""

    def room_bytes(self) -> int | None:
        """Bytes left; None where there is no limit."""


class SimulatedFile:
    """A file in memory that keeps to the rules of `File`."""

    __slots__ = ("_device", "_inode", "_open", "_write")

    def __init__(self, device: Device, inode: Inode, *, write: bool) -> None:
        self._device = device
        self._inode = inode
        self._write = write
        self._open = True

    def size(self) -> int:
        self._check_open()
        return len(self._inode.content)

    def read(self, position: int, length: int) -> bytes:
        self._check_open()
        self._device.reach("read")
        return bytes(self._inode.content[position : position + length])

    def view(self, position: int, length: int) -> memoryview:
        self._check_open()
        self._device.reach("view")
        content = self._inode.content
        if isinstance(content, bytes):
            return memoryview(content)[position : position + length]
        # A buffer that is viewed cannot grow, so the view gets its own.
        return memoryview(bytes(memoryview(content)[position : position + length]))

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        self._check_writable(errno.EBADF)
        if len(parts) > MAX_PARTS:
            raise os_error(errno.EINVAL)
        short = self._device.reach("write")
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        if short:
            data = data[: len(data) // 2]
        if position + len(data) > self._inode.allocated:
            data = data[: self._fitting(position, len(data))]
        self._inode.write(position, data)
        self._device.done("write")
        return len(data)

    def reserve(self, length: int) -> None:
        self._check_writable(errno.EBADF)
        if length <= 0:
            raise os_error(errno.EINVAL)
        self._device.reach("reserve")
        inode = self._inode
        room = self._device.room_bytes()
        if room is not None and length - inode.allocated > room:
            raise os_error(errno.ENOSPC)
        inode.resize(max(length, len(inode.content)))
        inode.allocated = max(inode.allocated, length)
        self._device.done("reserve")

    def map(self, length: int) -> WritableMap:
        self._check_open()
        self._device.reach("map")
        self._check_mappable(length)
        return SimulatedMap(self._device, self._inode, length, write=self._write)

    def words(self, count: int) -> MutableSequence[int]:
        self._check_open()
        self._device.reach("words")
        self._check_mappable(count * WORD_BYTES)
        words = SimulatedWords(self._device, self._inode, count, write=self._write)
        return cast("MutableSequence[int]", words)

    def truncate(self, length: int) -> None:
        self._check_writable(errno.EINVAL)
        self._device.reach("truncate")
        self._inode.resize(length)
        self._device.done("truncate")

    def sync(self) -> None:
        self._check_open()
        try:
            self._device.reach("sync")
        except OSError:
            self._inode.doom()
            raise
        self._inode.settle()
        self._device.done("sync")

    def close(self) -> None:
        self._check_open()
        self._open = False  # also when it fails: the kernel has let go of it by then
        self._device.reach("close")

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
        """How many bytes the disk has room for: fewer first, an error when it is none."""
        room = self._device.room_bytes()
        if room is None:
            return length
        fitting = self._inode.allocated + room - position
        if fitting <= 0 < length:
            raise os_error(errno.ENOSPC)
        return min(length, fitting)


class SimulatedMap:
    """A file's bytes as memory: a store is an unsynced write that cannot fail and is never short."""

    __slots__ = ("_device", "_inode", "_length", "_write")

    def __init__(self, device: Device, inode: Inode, length: int, *, write: bool) -> None:
        self._device = device
        self._inode = inode
        self._length = length
        self._write = write

    def __setitem__(self, key: slice, value: BytesLike) -> None:
        start = 0 if key.start is None else key.start
        stop = self._length if key.stop is None else key.stop
        _check_store(self._device, self._inode, start, stop, write=self._write)
        if stop > self._length or stop - start != len(value):
            raise IndexError("mmap slice assignment is wrong size")
        self._inode.write(start, bytes(value))
        self._device.store("map_store")


class SimulatedWords:
    """64-bit words at the start of a file; a word lies within a sector, so no cut tears it."""

    __slots__ = ("_count", "_device", "_inode", "_write")

    def __init__(self, device: Device, inode: Inode, count: int, *, write: bool) -> None:
        self._device = device
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
        _check_store(self._device, self._inode, start, start + WORD_BYTES, write=self._write)
        if not 0 <= value < 1 << 64:
            raise ValueError("not a 64-bit word")
        self._inode.write(start, _WORD.pack(value))
        self._device.store("word_store")

    def _position(self, index: int) -> int:
        if not -self._count <= index < self._count:
            raise IndexError("no such word")
        return (index % self._count) * WORD_BYTES


def _check_store(device: Device, inode: Inode, start: int, stop: int, *, write: bool) -> None:
    if not write:
        raise TypeError("a map of a file that was opened for reading cannot be stored into")
    if not device.maps:
        raise AssertionError("a store into a map where it may need new blocks: a full disk would be SIGBUS")
    if not 0 <= start <= stop <= min(len(inode.content), inode.allocated):
        raise AssertionError(f"a store at {start}..{stop}, outside of what is reserved: SIGBUS")
