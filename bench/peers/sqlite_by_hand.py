"""What many people write themselves: one SQLite table in WAL mode."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import ClassVar

from bench.peers.base import KILL, POWER_CUT, Peer

_INSERT = "INSERT INTO queue (body) VALUES (?)"


class SqliteNormal(Peer):
    """Autocommit for each put, one transaction for put_many.

    Threads share one connection behind a lock. With a connection for each of 64 threads, SQLite's busy
    handler sleeps most of the time: 31 synced puts a second in a short run, against hundreds this way.
    """

    name = "SQLite WAL, NORMAL"
    survives = KILL
    note = "synchronous=NORMAL: a power cut takes the latest commits, the database stays sound"
    synchronous: ClassVar[str] = "NORMAL"

    def open(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.connection = sqlite3.connect(folder / "queue.db", isolation_level=None, check_same_thread=False)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute(f"PRAGMA synchronous={self.synchronous}")
        self.connection.execute("CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, body BLOB)")

    def put(self, body: bytes) -> None:
        with self.lock:
            self.connection.execute(_INSERT, (body,))

    def put_many(self, bodies: list[bytes]) -> None:
        with self.lock:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany(_INSERT, [(body,) for body in bodies])
            self.connection.execute("COMMIT")

    def read_all(self) -> int:
        rows = self.connection.execute("SELECT body FROM queue ORDER BY id")
        return sum(1 for _ in rows)

    def end(self) -> int:
        """How many messages there are: what an opening must know."""
        (newest,) = self.connection.execute("SELECT max(id) FROM queue").fetchone()
        return int(newest or 0)

    def close(self) -> None:
        self.connection.close()


class SqliteFull(SqliteNormal):
    """The same, synced at each commit."""

    name = "SQLite WAL, FULL"
    survives = POWER_CUT
    note = "synchronous=FULL: each commit syncs the write-ahead log"
    synchronous = "FULL"
