"""The floor: what Python and the kernel take when nothing is framed, checked, indexed or locked."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from bench.peers.base import KILL, POWER_CUT, Peer

_MAP_BYTES = 512 << 20
_CHUNK_MESSAGES = 10_000

# One write of 10 MB into the page cache takes up to seven times as long, byte for byte, as ten of 1 MiB.
_WRITE_BYTES = 1 << 20


class RawLog(Peer):
    """A bare os.write loop; it can read back only because all bodies are of one length."""

    name = "raw write"
    survives = KILL
    note = "a floor, not a queue: no frames, no checksums, no recovery"

    def open(self, folder: Path) -> None:
        self.fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def put(self, body: bytes) -> None:
        os.write(self.fd, body)

    def put_each(self, bodies: Sequence[bytes]) -> None:
        fd, write = self.fd, os.write
        for body in bodies:
            write(fd, body)

    def put_many(self, bodies: list[bytes]) -> None:
        self.put(b"".join(bodies))

    def put_buffer(self, data: memoryview) -> None:
        """Bytes that lie together already, such as an Arrow array's."""
        for start in range(0, len(data), _WRITE_BYTES):
            os.write(self.fd, data[start : start + _WRITE_BYTES])

    def read_all(self) -> int:
        size = self.body_bytes
        count = position = 0
        while chunk := os.pread(self.fd, size * _CHUNK_MESSAGES, position):
            bodies = [chunk[at : at + size] for at in range(0, len(chunk), size)]
            count += len(bodies)
            position += len(chunk)
        return count

    def close(self) -> None:
        os.close(self.fd)


class RawLogSynced(RawLog):
    """The same with a sync for each call; several threads share what the file system can merge."""

    name = "raw write + fdatasync"
    survives = POWER_CUT

    def put(self, body: bytes) -> None:
        super().put(body)
        os.fdatasync(self.fd)

    put_each = Peer.put_each


class RawMap(Peer):
    """Stores into a mapped file of fixed size: no system call for a put."""

    name = "raw mmap store"
    survives = KILL
    note = "a floor, not a queue: stores into a preallocated map, wrapping around at 512 MiB"
    threads = False
    scans = False

    def open(self, folder: Path) -> None:
        self.fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o644)
        os.posix_fallocate(self.fd, 0, _MAP_BYTES)
        self.map = mmap.mmap(self.fd, _MAP_BYTES)
        self.position = 0

    def put(self, body: bytes) -> None:
        self.put_each([body])

    def put_each(self, bodies: Sequence[bytes]) -> None:
        target, start = self.map, self.position
        for body in bodies:
            end = start + len(body)
            target[start:end] = body
            start = end
        self.position = start if start < _MAP_BYTES // 2 else 0

    def put_many(self, bodies: list[bytes]) -> None:
        self.put_each([b"".join(bodies)])

    def read_all(self) -> int:
        size, count = self.body_bytes, 0
        while any(self.map[count * size : (count + 1) * size]):  # zeros: nothing was stored here yet
            count += 1
        return count

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)
