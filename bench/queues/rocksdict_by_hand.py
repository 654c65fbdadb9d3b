"""RocksDB used as a queue, through rocksdict: a get writes a lease beside the message, an ack deletes both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.peers.base import KILL
from bench.peers.rocksdict_by_hand import RocksdictLog, message_key
from bench.queues.base import Polled, Taken

_LEASE_S = 30


class RocksdictQueue(Polled, RocksdictLog):
    """Which message is next is known in memory only. Nothing ends a lease: that would need a sweep, as with LMDB."""

    ack_survives = KILL
    note = "write-ahead log, not synced; polls"
    depth = 1_000_000

    def open(self, folder: Path) -> None:
        super().open(folder)
        self.head = self._first_ready()

    def _first_ready(self) -> int:
        for key in self.db.keys(from_key=message_key(0)):
            if key[:1] == b"m" and self.db.get(b"l" + key[1:]) is None:
                return int.from_bytes(key[1:], "big")
        return self._end()

    def try_get(self) -> Taken | None:
        key = message_key(self.head)
        body = self.db.get(key)
        if body is None:
            return None
        self.db[b"l" + key[1:]] = _until()
        self.head += 1
        return Taken(body, key)

    def ack(self, receipt: Any) -> None:
        self._delete([receipt])

    def take_many(self, count: int) -> None:
        from rocksdict import WriteBatch

        keys = [message_key(number) for number in range(self.head, self.head + count)]
        if None in self.db.get(keys):
            raise LookupError("fewer messages than were put")
        until, leases = _until(), WriteBatch(raw_mode=True)
        for key in keys:
            leases.put(b"l" + key[1:], until)
        self.db.write(leases)
        self.head += count
        self._delete(keys)

    def _delete(self, keys: list[bytes]) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key in keys:
            batch.delete(key)
            batch.delete(b"l" + key[1:])
        self.db.write(batch)


def _until() -> bytes:
    return int((time.time() + _LEASE_S) * 1000).to_bytes(8, "big")
