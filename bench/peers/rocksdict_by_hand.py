"""RocksDB used as a log, through rocksdict: integer keys in order, each put in the write-ahead log."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bench.peers.base import KILL, Peer


def message_key(number: int) -> bytes:
    """Big-endian, so that keys are in order of their numbers."""
    return b"m" + number.to_bytes(8, "big")


class RocksdictLog(Peer):
    """rocksdict's default: the write-ahead log is written with each put and not synced."""

    name = "rocksdict"
    survives = KILL
    note = "RocksDB's write-ahead log, not synced"
    needs = ("rocksdict",)

    def open(self, folder: Path) -> None:
        from rocksdict import Options, Rdict

        self.db: Any = Rdict(str(folder / "rocks"), Options(raw_mode=True))
        # Counting on is one call into C, which threads cannot interrupt.
        self.numbers = itertools.count(self._end())

    def _end(self) -> int:
        found = self.db.iter()
        found.seek_for_prev(message_key(2**64 - 1))
        return int.from_bytes(found.key()[1:], "big") + 1 if found.valid() and found.key()[:1] == b"m" else 0

    def put(self, body: bytes) -> None:
        self.db[message_key(next(self.numbers))] = body

    def put_many(self, bodies: list[bytes]) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for body in bodies:
            batch.put(message_key(next(self.numbers)), body)
        self.db.write(batch)

    def read_all(self) -> int:
        return sum(1 for _ in self.db.values(from_key=message_key(0)))

    def close(self) -> None:
        self.db.close()
