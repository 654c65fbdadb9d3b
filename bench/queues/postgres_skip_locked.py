"""A PostgreSQL table: taken with FOR UPDATE SKIP LOCKED, deleted by the ack in the same transaction."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import Any

from bench.peers.base import POWER_CUT
from bench.programs import Program
from bench.queues.base import Polled, Taken
from bench.queues.server import Server, free_port

_SERVER = Program("postgres", "postgresql")
_INITDB = Program("initdb", "postgresql")

_CREATE = "CREATE TABLE IF NOT EXISTS queue (id bigserial PRIMARY KEY, body bytea NOT NULL)"
_INSERT = "INSERT INTO queue (body) VALUES (%s)"
_TAKE = "SELECT id, body FROM queue ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
_DELETE = "DELETE FROM queue WHERE id = %s"
_DELETE_MANY = "DELETE FROM queue WHERE id = ANY(%s)"


class PostgresSkipLocked(Polled):
    """The lock on the row is the lease: it lasts as long as the transaction, and goes with its client."""

    name = "PostgreSQL SKIP LOCKED"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "a server, over the loopback; put and ack each sync, get and ack are one transaction; polls"
    needs = ("psycopg",)
    programs = (_SERVER, _INITDB)

    def open(self, folder: Path) -> None:
        user = _unprivileged_user()
        data = folder.resolve() / "data"
        if not data.exists():
            _make_cluster(data, user)
        self.port = free_port()
        command = [
            str(_SERVER.path()), "-D", str(data), "-h", "127.0.0.1", "-p", str(self.port),
            "-c", "unix_socket_directories=", "-c", "logging_collector=off",
        ]  # fmt: skip
        self.server: Server | None = Server(command, folder, self._connect, user=user)
        self.connection = self._connect()
        self.connection.execute(_CREATE)
        self.connection.commit()

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(host="127.0.0.1", port=self.port, user="bench", dbname="postgres")

    def other_side(self) -> PostgresSkipLocked:
        side = PostgresSkipLocked(self.body_bytes)
        side.port, side.server, side.connection = self.port, None, self._connect()
        return side

    def put(self, body: bytes) -> None:
        self.connection.execute(_INSERT, (body,))
        self.connection.commit()

    def put_many(self, bodies: list[bytes]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany(_INSERT, [(body,) for body in bodies])
        self.connection.commit()

    def try_get(self) -> Taken | None:
        row = self.connection.execute(_TAKE, (1,)).fetchone()
        if row is None:
            self.connection.rollback()
            return None
        return Taken(row[1], row[0])

    def ack(self, receipt: Any) -> None:
        self.connection.execute(_DELETE, (receipt,))
        self.connection.commit()

    def take_many(self, count: int) -> None:
        rows = self.connection.execute(_TAKE, (count,)).fetchall()
        if len(rows) != count:
            raise LookupError("fewer messages than were put")
        self.connection.execute(_DELETE_MANY, ([number for number, _ in rows],))
        self.connection.commit()

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.stop(signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        if self.server is not None:
            self.server.stop(signal.SIGINT)  # a fast shutdown: it does not wait for clients


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root; the package brings a user."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _make_cluster(data: Path, user: str | None) -> None:
    data.mkdir()
    if user is not None:
        _let_reach(data, user)
    command = [
        str(_INITDB.path()), "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync",
    ]  # fmt: skip
    group = None if user is None else pwd.getpwnam(user).pw_gid
    extra: list[int] | None = None if user is None else []
    done = subprocess.run(
        command, cwd=data, user=user, group=group, extra_groups=extra, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"initdb: {(done.stderr or done.stdout).strip()[-300:]}")


def _let_reach(data: Path, user: str) -> None:
    """The temporary folders above are ours alone; the server's user must pass through them, no more."""
    os.chown(data, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    for folder in data.parents[:2]:
        folder.chmod(folder.stat().st_mode | 0o011)
