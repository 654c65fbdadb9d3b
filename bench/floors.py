"""What the calls of `bench.hot` cannot do without, as loops that do nothing else.

Each step here has the guarantees of the call that it stands for, and none of its rules: one lock, one clock, a frame
with its checksums in a mapped file, the words that readers and recovery watch, and the objects that the caller gets.
There are no limits, settings, other groups, waiting consumers, metrics or rolling files. So a figure of a call minus
its floor is what the queue itself costs, and a goal below the floor is out of reach in this language on this machine.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Final

from holdfast.api.drafts import Stored
from holdfast.api.sync.message import Message
from holdfast.broker.leases import Delivered
from holdfast.checksum import crc32c
from holdfast.delivery.group import Lease
from holdfast.model import Record

_BODY: Final = os.urandom(100)
_MANY: Final = 100
_ROOM: Final = 16 << 20
_SHORT: Final = Struct("<8sIHHQq100s")
_SHORT_HEAD: Final = Struct("<8sIHHQq")
_LONG: Final = Struct("<8sI20sQqQ24sI")
_ENDS: Final = Struct("<ii")
_CHECK: Final = Struct("<I")
_PREFIX, _SAME, _ORIGIN = b"HOLDFAST", bytes(20), bytes(24)
_HEADERS: Final = (b"\x02kind\x0ecorrelation_id", b"test", b"c-17")


class Floors:
    """A mapped file, its end, and what is leased."""

    def __init__(self, folder: Path) -> None:
        with (folder / "floor").open("w+b") as file:
            file.truncate(_ROOM)
            self.map = mmap.mmap(file.fileno(), _ROOM)
        self.words = memoryview(mmap.mmap(-1, 1 << 16)).cast("Q")
        self.lock = threading.Lock()
        self.at = self.read_at = self.offset = self.cursor = 0
        self.leases: dict[int, Lease] = {}
        self.steps: dict[str, tuple[Callable[[], object], int]] = {
            "put": (self.put, 1),
            "put with key, headers, correlation id": (self.put_with_columns, 1),
            "get + ack": (self.take, 1),
            "get_many + ack_many(100), a message": (self.take_many, _MANY),
        }

    def put(self) -> Stored:
        """A short frame."""
        with self.lock:
            now_ns, at, offset = time.time_ns(), self.at, self.offset
            checked = _SHORT.pack(_PREFIX, at, 100, 1, offset, now_ns, _BODY)
            stop = at + len(checked) + 4
            self.map[at:stop] = checked + _CHECK.pack(crc32c(checked))
            self.at = stop if stop < _ROOM - 4096 else 0
            self.offset = self.words[0] = offset + 1
            return Stored("jobs", offset, None, False, "os", 0)

    def put_with_columns(self) -> Stored:
        """A long frame: two checksums, a key, and two headers that are text."""
        key, names = b"k1", _HEADERS[0]
        first, second = b"test", b"c-17"
        ends = _ENDS.pack(0, 100) + _ENDS.pack(0, len(key)) + _ENDS.pack(0, len(first) + len(second))
        body = b"".join((ends, key, names, first, second, _BODY))
        with self.lock:
            now_ns, at, offset = time.time_ns(), self.at, self.offset
            checked = _LONG.pack(_PREFIX, at, _SAME, offset, now_ns, offset, _ORIGIN, crc32c(body))
            frame = checked + _CHECK.pack(crc32c(checked)) + body
            stop = at + len(frame)
            self.map[at:stop] = frame
            self.at = stop if stop < _ROOM - 4096 else 0
            self.offset = self.words[0] = offset + 1
            return Stored("jobs", offset, None, False, "os", 0)

    def take(self) -> None:
        """Read and check one short frame, lease it with a word; ack it with another."""
        with self.lock:
            now_ns, until_ms, at, offset = time.time_ns(), time.monotonic_ns() // 1_000_000, self.read_at, self.cursor
            frame = self.map[at : at + _SHORT.size]
            _, _, length, epoch, _, time_ns = _SHORT_HEAD.unpack_from(frame)
            crc32c(frame)
            record = Record(offset, time_ns, frame[_SHORT_HEAD.size : _SHORT_HEAD.size + length], epoch=epoch)
            lease = Lease(offset, 1, 30_000, until_ms, now_ns // 1_000_000, "bench")
            self.leases[offset] = lease
            self.words[1] = offset
            self.cursor = offset + 1
            message = Message(self, Delivered(record, lease, 1, self))  # type: ignore[arg-type]
        with self.lock:
            now_ns = time.time_ns()
            if self.leases.get(offset) is lease:
                self.words[2] = offset
                del self.leases[offset]
        message._settled = True

    def take_many(self) -> None:
        """The same for as many messages in one frame, with one lease and two frames for the journal."""
        with self.lock:
            now_ns, start = time.time_ns(), self.cursor
            lease = Lease(start, 1, 30_000, time.monotonic_ns() // 1_000_000, now_ns // 1_000_000, "bench")
            block = self.map[0 : _MANY * 100]
            crc32c(block)
            records = [Record(start + i, now_ns, block[i * 100 : i * 100 + 100]) for i in range(_MANY)]
            offsets = range(start, start + _MANY)
            self.leases.update(dict.fromkeys(offsets, lease))
            self.cursor = start + _MANY
            self._journal(now_ns)
            messages = [Message(self, Delivered(record, lease, 1, self)) for record in records]  # type: ignore[arg-type]
        with self.lock:
            taken = [message._taken.record.offset for message in messages]
            if [*map(self.leases.get, taken)] == [lease] * _MANY:
                self._journal(time.time_ns())
                for offset in taken:
                    del self.leases[offset]
        for message in messages:
            message._settled = True

    def _journal(self, now_ns: int) -> None:
        """An event about a run of messages: one frame."""
        checked = _LONG.pack(_PREFIX, self.at, _SAME, self.offset, now_ns, 0, _ORIGIN, crc32c(_BODY[:32]))
        self.map[0 : len(checked) + 36] = checked + _CHECK.pack(crc32c(checked)) + _BODY[:32]
