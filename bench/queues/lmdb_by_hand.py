"""LMDB used as a queue: a message moves from one table to another when it is leased, and is deleted by the ack."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import KILL, POWER_CUT
from bench.queues.base import Polled, Taken

_MAP_BYTES = 8 << 30
_LEASE_S = 30


class LmdbQueue(Polled):
    """One write transaction for each call. Leases that run out would need a sweep, which is not written here."""

    name = "LMDB, nosync"
    survives = KILL
    ack_survives = KILL
    note = "sync=False: a power cut can spoil the whole database; polls"
    needs = ("lmdb",)
    depth = 1_000_000
    sync: ClassVar[bool] = False

    def open(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(str(folder), map_size=_MAP_BYTES, max_dbs=2, sync=self.sync, metasync=self.sync)
        self.ready, self.leased = self.env.open_db(b"ready"), self.env.open_db(b"leased")
        self.next = max(self._end(self.ready), self._end(self.leased))

    def _end(self, table: Any) -> int:
        with self.env.begin() as transaction, transaction.cursor(table) as cursor:
            return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0

    def put(self, body: bytes) -> None:
        self.put_many([body])

    def put_many(self, bodies: list[bytes]) -> None:
        # The write transaction is LMDB's own lock, so that `next` is safe inside it.
        with self.env.begin(write=True, db=self.ready) as transaction:
            for body in bodies:
                transaction.put(self.next.to_bytes(8, "big"), body, append=True)
                self.next += 1

    def try_get(self) -> Taken | None:
        found = self._lease(1)
        return found[0] if found else None

    def ack(self, receipt: Any) -> None:
        with self.env.begin(write=True, db=self.leased) as transaction:
            transaction.delete(receipt)

    def take_many(self, count: int) -> None:
        found = self._lease(count)
        if len(found) != count:
            raise LookupError("fewer messages than were put")
        with self.env.begin(write=True, db=self.leased) as transaction:
            for taken in found:
                transaction.delete(taken.receipt)

    def _lease(self, count: int) -> list[Taken]:
        until = int((time.time() + _LEASE_S) * 1000).to_bytes(8, "big")
        found: list[Taken] = []
        with self.env.begin(write=True) as transaction, transaction.cursor(self.ready) as cursor:
            while len(found) < count and cursor.first():
                key, body = cursor.item()
                transaction.put(key, until + body, db=self.leased)
                cursor.delete()
                found.append(Taken(body, key))
        return found

    def close(self) -> None:
        self.env.close()


class LmdbQueueSynced(LmdbQueue):
    """Synced at each commit, LMDB's default."""

    name = "LMDB, sync"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "put, get and ack each sync; polls"
    sync = True
