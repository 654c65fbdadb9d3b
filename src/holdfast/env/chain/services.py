"""Stores that are services: S3 and what speaks it, Azure and Google through obstore, PostgreSQL through psycopg."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from holdfast.env.chain.engines import StoreRefused, StoreUnreachable
from holdfast.env.process import environment

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from psycopg import Connection

# A create that is repeated by the library would say "exists" of its own first attempt: we repeat it, and compare bytes.
_NO_RETRIES: Final[dict[str, Any]] = {"max_retries": 0}
_TIMEOUT: Final = "8s"
_ENDPOINTS: Final = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
)


class ObjectStoreEngine:
    """A bucket or container. Its settings come from the environment, as the makers of each store name them."""

    def __init__(self, url: str, name: str) -> None:
        import obstore.store

        self.name = name
        options: dict[str, Any] = {"timeout": _TIMEOUT}
        if any(environment().get(name, "").startswith("http://") for name in _ENDPOINTS):
            options["allow_http"] = True  # whoever names such an endpoint means it
        try:
            self._store: ObjectStore = obstore.store.from_url(
                url,
                client_options=options,
                retry_config=_NO_RETRIES,  # type: ignore[call-overload,unused-ignore]
            )
        except Exception as error:
            raise StoreRefused(f"{name} cannot be used: {_first_line(error)}") from error

    def create(self, key: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._translated():
            try:
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def read(self, key: str) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        with self._translated():
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        import obstore

        with self._translated():
            pages = obstore.list(self._store, prefix or None, offset=after or None)
            found = sorted(each["path"] for page in pages for each in page)
        return iter(found)

    def remove(self, key: str) -> None:
        import obstore
        from obstore.exceptions import NotFoundError

        with self._translated():
            try:
                obstore.delete(self._store, key)
            except (NotFoundError, FileNotFoundError):
                return

    def close(self) -> None:
        """Do nothing: its connections end with it."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from obstore.exceptions import (
            BaseError,
            NotFoundError,
            PermissionDeniedError,
            UnauthenticatedError,
            UnknownConfigurationKeyError,
        )

        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError, UnknownConfigurationKeyError, NotFoundError) as error:
            raise StoreRefused(f"{self.name}: {_first_line(error)}") from error
        except (BaseError, OSError) as error:
            raise StoreUnreachable(f"{self.name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


_TABLE: Final = "holdfast_objects"
_PAGE: Final = 10_000
_TIMEOUT_MS: Final = 8_000
_CONNECTIONS: Final = 16  # others wait for their turn: a server has a hundred for everyone


class PostgresStore:
    """One row for each object. As many connections as there are calls at once; they are kept for the next."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._url = url
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_CONNECTIONS)
        self._idle: list[Connection[Any]] = []
        with self._connection() as connection:
            connection.execute(
                f'CREATE TABLE IF NOT EXISTS {_TABLE} (key text COLLATE "C" PRIMARY KEY, content bytea NOT NULL)'
            )

    def create(self, key: str, content: bytes) -> bool:
        with self._connection() as connection:
            made = connection.execute(
                f"INSERT INTO {_TABLE} (key, content) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                (key, content),
                binary=True,
            )
            if made.rowcount == 1:
                return True
            # The row that was there may be one of ours, committed without an answer. A standby that replicates
            # synchronously may not have it yet, and reading does not wait for that: a write does, and comes after it.
            connection.execute(
                f"INSERT INTO {_TABLE} (key, content) VALUES ('confirmed', now()::text::bytea) "
                "ON CONFLICT (key) DO UPDATE SET content = excluded.content"
            )
            return False

    def read(self, key: str) -> bytes | None:
        with self._connection() as connection:
            row = connection.execute(f"SELECT content FROM {_TABLE} WHERE key = %s", (key,), binary=True).fetchone()
        return None if row is None else bytes(row[0])

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        while True:
            with self._connection() as connection:
                rows = connection.execute(
                    f"SELECT key FROM {_TABLE} WHERE key > %s AND starts_with(key, %s) ORDER BY key LIMIT {_PAGE}",
                    (max(after, prefix[:-1]), prefix),
                ).fetchall()
            for (key,) in rows:
                yield key
                after = key
            if len(rows) < _PAGE:
                return

    def remove(self, key: str) -> None:
        with self._connection() as connection:
            connection.execute(f"DELETE FROM {_TABLE} WHERE key = %s", (key,))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[Connection[Any]]:
        """Return a connection that nobody else uses; each statement is a transaction. A failed one is closed."""
        import psycopg

        with self._turns, ExitStack() as closing:
            try:
                connection = self._idle_one() or psycopg.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=_TIMEOUT_MS // 1000,
                    options=f"-c statement_timeout={_TIMEOUT_MS} -c synchronous_commit=on",
                    keepalives_idle=5,
                    tcp_user_timeout=_TIMEOUT_MS,
                )
                closing.callback(connection.close)
                yield connection
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as error:
                raise StoreUnreachable(f"{self.name}: {self._said(error)}") from None
            except psycopg.Error as error:
                raise StoreRefused(f"{self.name}: {self._said(error)}") from None
            closing.pop_all()
            with self._lock:
                self._idle.append(connection)

    def _said(self, error: Exception) -> str:
        """Return what went wrong, without the password, which is part of some messages about a bad URL."""
        password = urlsplit(self._url).password
        said = _first_line(error)
        return said.replace(password, "***") if password else said

    def _idle_one(self) -> Connection[Any] | None:
        with self._lock:
            return self._idle.pop() if self._idle else None
