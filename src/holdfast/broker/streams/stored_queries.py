"""Queries that read a folder in a store without its owner: their notes are objects beside the chain.

    query/00000000000000000007-GROUP@TOKEN.json     the 7th note of this query: its newest counts

Objects are only ever created, so each renewal is another one. The last two stay: whoever has just listed the newest
can still read it after the next renewal. The owner removes those of queries that died.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from holdfast.env import Clock
from holdfast.env.chain.chain import Chain
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable

_FRESH_NS: Final = 1_000_000_000
_KEPT: Final = 2


def _prefix(root: str) -> str:
    return f"{root}query/"


class StoredNote:
    """The query's side: puts its notes into the store."""

    def __init__(self, store: Store, root: str, file: str) -> None:
        self._store, self._prefix, self._file = store, _prefix(root), file
        self._number = 0
        self._keys: list[str] = []

    def put(self, content: bytes) -> None:
        """Put a newer note in place; raises OSError."""
        self._number += 1
        key = f"{self._prefix}{self._number:020}-{self._file}"
        try:
            self._store.create(key, content)
            self._keys.append(key)
            self._keep(_KEPT)
        except (StoreUnreachable, StoreRefused) as error:
            raise OSError(str(error)) from error

    def remove(self) -> None:
        """Remove all notes; raises OSError."""
        try:
            self._keep(0)
        except (StoreUnreachable, StoreRefused) as error:
            raise OSError(str(error)) from error

    def _keep(self, count: int) -> None:
        while len(self._keys) > count:
            self._store.remove(self._keys.pop(0))


class StoredQueries:
    """The owner's side: the newest note of each query, looked up at most once a second. Safe to use from any thread."""

    def __init__(self, chain: Chain, clock: Clock) -> None:
        self._store, self._prefix, self._clock = chain.store, _prefix(chain.root), clock
        self._lock = threading.Lock()
        self._looked_ns: int | None = None
        self._keys: dict[str, list[str]] = {}
        self._notes: dict[str, tuple[str, bytes]] = {}

    def notes(self) -> Mapping[str, bytes]:
        """Return the newest note of each query, by its file; the last ones known if the store does not answer."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            if self._looked_ns is None or now_ns - self._looked_ns >= _FRESH_NS:
                self._looked_ns = now_ns
                with suppress(StoreUnreachable, StoreRefused):
                    self._look()
            return {file: content for file, (_, content) in self._notes.items()}

    def remove(self, file: str) -> None:
        """Remove what is known of a query. If it still runs, its next note counts again."""
        with self._lock:
            self._notes.pop(file, None)
            with suppress(StoreUnreachable, StoreRefused):  # then they are found again, and removed again
                for key in self._keys.pop(file, ()):
                    self._store.remove(key)

    def _look(self) -> None:
        keys: dict[str, list[str]] = {}
        for key in self._store.keys(self._prefix):
            digits, _, file = key.removeprefix(self._prefix).partition("-")
            if digits.isdecimal() and file:
                keys.setdefault(file, []).append(key)
        notes = {}
        for file, of_file in keys.items():
            known = self._notes.get(file)
            if known is None or known[0] != of_file[-1]:
                content = self._store.read(of_file[-1])
                known = known if content is None else (of_file[-1], content)  # None: renewed twice just now
            if known is not None:
                notes[file] = known
        self._keys, self._notes = keys, notes
