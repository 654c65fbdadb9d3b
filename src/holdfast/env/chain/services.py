"""Stores that are services: S3 and what speaks it, Azure and Google through obstore, PostgreSQL through psycopg."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from holdfast.env.chain.engines import StoreRefused, StoreUnreachable
from holdfast.env.chain.keys import makers_variables, secret_of, store_options, store_settings
from holdfast.settings import HIDDEN

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from psycopg import Connection

# A create that is repeated by the library would say "exists" of its own first attempt: we repeat it, and compare bytes.
_NO_RETRIES: Final[dict[str, Any]] = {"max_retries": 0}
_TIMEOUT_S: Final = 8
_BULK_TIMEOUT_S: Final = 600  # for files and large messages, which nobody counts on within the lease
_BULK: Final = ("content", "large", "tier")
# S3 says so of two calls at the same time, and of neither whether it took effect; the library says that it exists.
_CONFLICTS: Final = ("<Code>ConditionalRequestConflict<", "<Code>OperationAborted<")
_ENDPOINTS: Final = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)


class ObjectStoreEngine:
    """A bucket or container, opened as our own settings say, and else as its maker's variables do."""

    def __init__(self, url: str, name: str) -> None:
        import obstore.store

        self.name = name
        given = store_options(urlsplit(url).scheme)
        client = given.client
        if any(endpoint.startswith("http://") for endpoint in _endpoints()):
            client["allow_http"] = True  # whoever names such an endpoint means it

        def opened(timeout_s: int) -> ObjectStore:
            return obstore.store.from_url(  # type: ignore[call-overload,no-any-return,unused-ignore]
                url,
                config=given.options,
                client_options={"timeout": f"{timeout_s}s", **client},
                retry_config=_NO_RETRIES,
                **({} if given.credentials is None else {"credential_provider": given.credentials}),
            )

        try:
            self._store, self._for_bulk = opened(_TIMEOUT_S), opened(_BULK_TIMEOUT_S)
        except Exception as error:
            raise StoreRefused(f"{name}: {_plain(error)}") from error

    def create(self, key: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._translated():
            try:
                obstore.put(self._for(key), key, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                if any(code in str(error) for code in _CONFLICTS):
                    raise StoreUnreachable(f"{self.name}: {_plain(error)}") from error
                return False
        return True

    def read(self, key: str) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        with self._translated():
            try:
                return bytes(obstore.get(self._for(key), key).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        import obstore

        with self._translated():
            pages = obstore.list(self._store, prefix or None, offset=after or None)
            # Azure lists from the offset on, S3 what comes after it.
            found = sorted(each["path"] for page in pages for each in page if each["path"] > after)
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

    def _for(self, key: str) -> ObjectStore:
        return self._for_bulk if _is_bulk(key) else self._store

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
        except (
            PermissionDeniedError,
            UnauthenticatedError,
            UnknownConfigurationKeyError,
            NotFoundError,
            FileNotFoundError,  # no such bucket
        ) as error:
            raise StoreRefused(f"{self.name}: {_plain(error)}") from error
        except (BaseError, OSError) as error:
            # Of a list, the library does not tell a refusal from no answer; asking again would not help.
            kind = StoreRefused if _REFUSED.search(str(error)) else StoreUnreachable
            raise kind(f"{self.name}: {_plain(error)}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise StoreRefused(f"{self.name}: the client gave up: {_first_line(error)}") from error


def _is_bulk(key: str) -> bool:
    """Whether the object may be so large that sending it takes long: 64 MiB at 8 MB/s take 8 s."""
    return key.rpartition("/")[0].rpartition("/")[2] in _BULK


def _endpoints() -> list[str]:
    """Return the endpoints that the environment names. The library panics at a bad one, and does not say which."""
    known = makers_variables(secrets=False)
    found = {name: known.get(name, "") for name in _ENDPOINTS}
    for name, endpoint in found.items():
        try:
            parts = urlsplit(endpoint)
            is_good = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in endpoint and parts.port != 0
            )
        except ValueError:
            is_good = False
        if endpoint and not is_good:
            raise StoreRefused(f"{name}={endpoint} is not an address: give one such as https://host:9000")
    return list(found.values())


_PERFORMED: Final = re.compile(r"Error performing (?P<verb>\w+) (?P<url>[^\s?]+)\S* in \S+ - (?P<what>.*)", re.DOTALL)
_REFUSED: Final = re.compile(r"non-2xx status code: 40[134]\b")
_ANSWERED: Final = re.compile(
    r"Server returned non-2xx status code: (?P<status>[^:]+)(?:.*<Code>(?P<code>\w+)</Code>)?"
    r"(?:.*<Message>(?P<said>[^<]+)</Message>)?",
    re.DOTALL,
)


def _plain(error: Exception) -> str:
    """Return what the library says in fewer words: which call failed, and what the server said."""
    found = _PERFORMED.search(str(error))
    if found is None:
        return _first_line(error)
    call, what = f"{found['verb']} {found['url']}", found["what"].strip()
    answer = _ANSWERED.match(what)
    if answer is not None:
        parts = (answer[name] for name in ("status", "code", "said"))
        return f"{call} was answered with {', '.join(part.strip() for part in parts if part)}"[:300]
    if "timed out" in what:
        return f"{call} was not answered in time"
    if what.startswith("HTTP error"):
        return f"{call} failed: no server could be reached there"
    return f"{call}: {what.splitlines()[0]}"[:300]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


_TABLE: Final = "holdfast_objects"
_PAGE: Final = 10_000
_MARGIN_S: Final = 1  # the server's own limit comes first, if it works
_CONNECTIONS: Final = 16  # of a process, whatever it opens there: a server has a hundred for everyone
_BULK_CONNECTIONS: Final = 4  # of those, for what takes long: nobody who shows that he lives may wait for that


class _Connections:
    """The connections of this process to one database: as many as there are calls at once, kept for the next.

    All stores in that database share them, such as the shards of a cluster.
    """

    def __init__(self) -> None:
        self.turns = threading.BoundedSemaphore(_CONNECTIONS)
        self.bulk_turns = threading.BoundedSemaphore(_BULK_CONNECTIONS)
        self.users = 0
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def take(self) -> Any:
        """Return one that nobody uses, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, connection: Any) -> None:
        with self._lock:
            if self.users:
                self._idle.append(connection)
                return
        connection.close()

    def leave(self) -> None:
        """One store fewer uses them; after the last one they are closed."""
        with self._lock:
            self.users -= 1
            idle: list[Any] = []
            if not self.users:
                idle, self._idle = self._idle, idle
        for connection in idle:
            connection.close()


_shared: Final[dict[tuple[int, str], _Connections]] = {}  # by process, since a child must not use its parent's, and URL
_sharing: Final = threading.Lock()


def _connections(url: str) -> _Connections:
    with _sharing:
        found = _shared.setdefault((os.getpid(), url), _Connections())
        found.users += 1
        return found


class PostgresStore:
    """One row for each object."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._url = url
        self._password: str | None = None
        self._shared = _connections(url)
        self._is_closed = False
        try:
            with self._connection() as connection:
                connection.execute(
                    f'CREATE TABLE IF NOT EXISTS {_TABLE} (key text COLLATE "C" PRIMARY KEY, content bytea NOT NULL)'
                )
        except BaseException:
            self.close()
            raise

    def create(self, key: str, content: bytes) -> bool:
        with self._connection(key) as connection:
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
        with self._connection(key) as connection:
            row = connection.execute(f"SELECT content FROM {_TABLE} WHERE key = %s", (key,), binary=True).fetchone()
        return None if row is None else bytes(row[0])

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        while True:
            with self._connection() as connection:
                rows = connection.execute(
                    f"SELECT key FROM {_TABLE} WHERE key > %s AND key < %s AND starts_with(key, %s) "
                    f"ORDER BY key LIMIT {_PAGE}",
                    (max(after, prefix[:-1]), f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}", prefix),
                ).fetchall()
            for (key,) in rows:
                yield key
                after = key
            if len(rows) < _PAGE:
                return

    def copies(self) -> str:
        """What the server says of its own replication, which decides how many copies a commit has."""
        with self._connection() as connection:
            row = connection.execute(
                "SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), "
                "(SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))"
            ).fetchone()
        commit, names, standbys = row or ("", "", 0)
        if not names:
            return "one copy: it is PostgreSQL without synchronous standbys"
        return f"what PostgreSQL commits to {names} (synchronous_commit={commit}; synchronous standbys now: {standbys})"

    def remove(self, key: str) -> None:
        with self._connection() as connection:
            connection.execute(f"DELETE FROM {_TABLE} WHERE key = %s", (key,))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._shared.leave()

    @contextmanager
    def _connection(self, key: str = "") -> Iterator[Connection[Any]]:
        """Return a connection that nobody else uses; each statement is a transaction. A failed one is closed.

        The server ends a statement that takes too long, but it does not end a commit that waits for a standby, nor
        anything if it hangs itself. So there is a limit here, too: what takes longer is not known.
        """
        import psycopg

        is_bulk = _is_bulk(key)
        limit_s = _BULK_TIMEOUT_S if is_bulk else _TIMEOUT_S
        with self._shared.bulk_turns if is_bulk else nullcontext(), self._shared.turns, ExitStack() as closing:
            try:
                connection = self._shared.take() or _bounded_connection().connect(
                    self._url,
                    **self._keys(),
                    autocommit=True,
                    connect_timeout=_TIMEOUT_S,
                    options=f"-c statement_timeout={_TIMEOUT_S}s -c synchronous_commit=on",
                    keepalives_idle=5,
                    tcp_user_timeout=_TIMEOUT_S * 1000,
                )
                closing.callback(connection.close)
                connection.until_s = time.monotonic() + limit_s + _MARGIN_S
                if limit_s != _TIMEOUT_S:
                    connection.execute(f"SET statement_timeout = '{limit_s}s'")
                yield connection
                if limit_s != _TIMEOUT_S:
                    connection.execute(f"SET statement_timeout = '{_TIMEOUT_S}s'")
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as error:
                raise StoreUnreachable(f"{self.name}: {self._said(error)}") from None
            except psycopg.Error as error:
                raise StoreRefused(f"{self.name}: {self._said(error)}") from None
            closing.pop_all()
            self._shared.give_back(connection)

    def _keys(self) -> dict[str, Any]:
        """Return what our settings add for a new connection; what the URL says wins."""
        parts, settings = urlsplit(self._url), store_settings()
        found: dict[str, Any] = {}
        if not parts.password and "password" not in dict(parse_qsl(parts.query)):
            self._password = secret_of(settings, "postgres_password")
            found["password"] = self._password
        if settings.ca_file is not None and "sslrootcert" not in dict(parse_qsl(parts.query)):
            found["sslrootcert"] = settings.ca_file
        return {name: value for name, value in found.items() if value is not None}

    def _said(self, error: Exception) -> str:
        """Return what went wrong, without the password, which is part of some messages about a bad URL."""
        said = _first_line(error)
        for password in (urlsplit(self._url).password, self._password):
            said = said.replace(password, HIDDEN) if password else said
        return said


@cache
def _bounded_connection() -> Any:
    """Return psycopg's connection with a limit for what waits for the server, `until_s` by the monotonic clock."""
    import psycopg

    class BoundedConnection(psycopg.Connection[Any]):
        until_s = math.inf

        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            return super().wait(_until(gen, self), *args, **kwargs)

    def _until(gen: Any, connection: BoundedConnection) -> Generator[Any, Any, Any]:
        """Do what the generator does, which is resumed now and then while it waits."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > connection.until_s:
                    raise psycopg.OperationalError("the server did not answer in time")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value

    return BoundedConnection
