"""What many people write themselves: a table in WAL mode, claimed with UPDATE … RETURNING, deleted by the ack."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import KILL, POWER_CUT
from bench.queues.base import Polled, Taken

_LEASE_S = 30

_CREATE = "CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, body BLOB, free_at REAL NOT NULL DEFAULT 0)"
_INSERT = "INSERT INTO queue (body) VALUES (?)"
# The rows that are leased lie in front, and are few: no index beats walking past them.
_CLAIM = """
    UPDATE queue SET free_at = ?
    WHERE id IN (SELECT id FROM queue WHERE free_at <= ? ORDER BY id LIMIT ?)
    RETURNING id, body
"""
_DELETE = "DELETE FROM queue WHERE id = ?"


class SqliteClaimed(Polled):
    """Autocommit for each call; one connection behind a lock for all threads."""

    name = "SQLite WAL, NORMAL"
    survives = KILL
    ack_survives = KILL
    note = "synchronous=NORMAL: a power cut takes the latest commits, the database stays sound; polls"
    depth = 1_000_000
    synchronous: ClassVar[str] = "NORMAL"

    def open(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.connection = sqlite3.connect(folder / "queue.db", isolation_level=None, check_same_thread=False)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute(f"PRAGMA synchronous={self.synchronous}")
        self.connection.execute(_CREATE)

    def put(self, body: bytes) -> None:
        with self.lock:
            self.connection.execute(_INSERT, (body,))

    def put_many(self, bodies: list[bytes]) -> None:
        self._together(_INSERT, [(body,) for body in bodies])

    def try_get(self) -> Taken | None:
        found = self._claim(1)
        return Taken(found[0][1], found[0][0]) if found else None

    def ack(self, receipt: Any) -> None:
        with self.lock:
            self.connection.execute(_DELETE, (receipt,))

    def take_many(self, count: int) -> None:
        found = self._claim(count)
        if len(found) != count:
            raise LookupError("fewer messages than were put")
        self._together(_DELETE, [(number,) for number, _ in found])

    def _claim(self, count: int) -> list[tuple[int, bytes]]:
        now = time.time()
        with self.lock:
            return self.connection.execute(_CLAIM, (now + _LEASE_S, now, count)).fetchall()

    def _together(self, statement: str, rows: list[tuple[Any]]) -> None:
        with self.lock:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany(statement, rows)
            self.connection.execute("COMMIT")

    def close(self) -> None:
        self.connection.close()


class SqliteClaimedSynced(SqliteClaimed):
    """The same, synced at each commit: three syncs in the life of a message."""

    name = "SQLite WAL, FULL"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "synchronous=FULL: put, get and ack each sync; polls"
    synchronous = "FULL"
