"""LMDB used as a log: integer keys in order, one write transaction for each put."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from bench.peers.base import KILL, POWER_CUT, Peer

_MAP_BYTES = 8 << 30


class LmdbSync(Peer):
    """Synced at each commit, LMDB's default."""

    name = "LMDB, sync"
    survives = POWER_CUT
    note = "each commit syncs"
    needs = ("lmdb",)
    sync: ClassVar[bool] = True

    def open(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(str(folder), map_size=_MAP_BYTES, sync=self.sync, metasync=self.sync)
        self.next = self._end()

    def _end(self) -> int:
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0

    def put(self, body: bytes) -> None:
        self.put_many([body])

    def put_many(self, bodies: list[bytes]) -> None:
        # The write transaction is LMDB's own lock, so that `next` is safe inside it.
        with self.env.begin(write=True) as transaction:
            for body in bodies:
                transaction.put(self.next.to_bytes(8, "big"), body, append=True)
                self.next += 1

    def read_all(self) -> int:
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            return sum(1 for _ in cursor.iternext(keys=False))

    def close(self) -> None:
        self.env.close()


class LmdbNoSync(LmdbSync):
    """sync=False: the kernel writes when it likes."""

    name = "LMDB, nosync"
    survives = KILL
    note = "sync=False: a power cut can spoil the whole database, not only the latest puts"
    sync = False
