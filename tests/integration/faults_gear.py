"""A world that goes wrong to order behind a server: its disk, its clock; and clients that vanish."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from holdfast.env import RealDisk, SystemClock, SystemIds, World
from holdfast.env.disk import BytesLike, File
from holdfast.env.sim.disk import FaultPlan

WAIT_S = 30


class FaultyFile:
    """A real file whose calls fail to order."""

    def __init__(self, file: File, faults: FaultPlan) -> None:
        self._file = file
        self._faults = faults

    def read(self, position: int, length: int) -> bytes:
        self._faults.strike("read")
        return self._file.read(position, length)

    def view(self, position: int, length: int) -> memoryview:
        self._faults.strike("read")
        return self._file.view(position, length)

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        self._faults.strike("write")
        return self._file.write(position, parts)

    def sync(self) -> None:
        self._faults.strike("sync")
        self._file.sync()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class FaultyDisk(RealDisk):
    """The real disk, but for what is ordered: calls that fail, and no room."""

    def __init__(self) -> None:
        self.faults = FaultPlan()
        self.full = False

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        return cast(File, FaultyFile(super().open(path, write=write, create=create), self.faults))

    def free_bytes(self, folder: str) -> int:
        return 0 if self.full else super().free_bytes(folder)


class MovedClock(SystemClock):
    """The real clock, but somebody has set the wall clock."""

    def __init__(self) -> None:
        self.moved_s = 0

    def now_ns(self) -> int:  # type: ignore[override]
        return SystemClock.now_ns() + self.moved_s * 1_000_000_000


def faulty_world(disk: RealDisk | None = None, clock: SystemClock | None = None) -> World:
    return World(clock=clock or SystemClock(), disk=disk or RealDisk(), ids=SystemIds())


@contextmanager
def raw(url: str) -> Iterator[socket.socket]:
    """A bare connection."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as connection:
        yield connection


def vanish(connection: socket.socket) -> None:
    """Be gone without a word, as a process that is killed or a machine that is switched off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def head_of(method: str, path: str, *headers: str) -> bytes:
    """The first lines of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def request_of(method: str, path: str, body: bytes, *headers: str) -> bytes:
    """A whole request."""
    return head_of(method, path, f"content-length: {len(body)}", *headers) + body


def status_of(connection: socket.socket) -> int:
    """The status of the next answer; 0 where the connection ends without one."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return 0
            data += more
    except ConnectionError:
        return 0
    return int(data[9:12])
