"""What a store has to do, and the two that need nothing else: one in memory, one in a folder.

One promise carries everything above it: of all who create the same key, exactly one succeeds, and from then on everyone
reads its bytes. Nothing is ever overwritten. A store that ignores the condition would lose messages silently, so
`probe` tries it before a store is used for the first time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final, Protocol

from holdfast.env.disk import RAN_OUT, LakeDisk, RealDisk, write_fully


class StoreUnreachable(Exception):
    """The store gave no answer. Whether the call took effect is not known."""


class StoreRefused(Exception):
    """The store answered, and will not do it: no such bucket, no permission, a broken promise."""


class Store(Protocol):
    """Objects by key; keys are text with `/`. All calls may raise StoreUnreachable and StoreRefused."""

    @property
    def name(self) -> str:
        """Where it is, for people; without secrets."""

    def create(self, key: str, content: bytes) -> bool:
        """Store the object durably unless the key exists; returns whether it was stored. Never overwrites."""

    def read(self, key: str) -> bytes | None:
        """Return the object; None if there is none."""

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        """Return the keys that start with `prefix` and come after `after`, in order."""

    def remove(self, key: str) -> None:
        """Remove the object, if it is there."""

    def close(self) -> None:
        """Let go of connections; the next call would make new ones."""


class MemoryStore:
    """A store in this process: for tests and trials. It ends with the process."""

    def __init__(self, name: str = "memory://") -> None:
        self.name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, key: str, content: bytes) -> bool:
        with self._lock:
            return self._objects.setdefault(key, content) is content

    def read(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        return iter(found)

    def remove(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """Do nothing: it is there for as long as the process."""


class FolderStore:
    """A store in a folder, perhaps one that several machines mount. An object is there when its name is synced."""

    def __init__(self, folder: str) -> None:
        self.name = f"file://{folder}"
        self._folder = folder
        self._disk = LakeDisk()
        self._made: set[str] = set()

    def create(self, key: str, content: bytes) -> bool:
        path = self._path(key)
        self._make(os.path.dirname(path))
        # A hard link fails if the name exists, and gives a name only to complete content.
        draft = f"{path}.{os.urandom(8).hex()}.new"  # another machine may write here, too
        with _translated(self.name), contextlib.ExitStack() as cleaning:
            with contextlib.closing(self._disk.open(draft, write=True, create=True)) as file:
                cleaning.callback(self._disk.remove, draft)
                write_fully(file, 0, [content])
                file.sync()
            try:
                self._disk.link(draft, path)
                made = True
            except FileExistsError:
                made = False  # perhaps ours, of an attempt that failed before its name was synced
            self._disk.sync_folder(os.path.dirname(path))
        return made

    def read(self, key: str) -> bytes | None:
        with _translated(self.name):
            try:
                with open(self._path(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        top = prefix.rpartition("/")[0]
        with _translated(self.name):
            names = self._disk.files_below(self._path(top) if top else self._folder)
        found = (f"{top}/{name}" if top else name for name in names if not name.endswith(".new"))
        return iter([key for key in found if key.startswith(prefix) and key > after])

    def remove(self, key: str) -> None:
        with _translated(self.name), contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._path(key))

    def close(self) -> None:
        """Do nothing: nothing is kept open here."""

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _make(self, folder: str) -> None:
        if folder in self._made:
            return
        with _translated(self.name):
            RealDisk.make_folder(self._disk, folder)  # for its user alone, unlike tables
        self._made.add(folder)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in RAN_OUT:
            raise StoreUnreachable(f"{name}: {error}") from error
        raise StoreRefused(f"{name}: {error}") from error


# How many race for how many keys. A store that checks first and writes later lets two of them win sooner or later.
_RACERS: Final = 8
_RACES: Final = 20


def probe(store: Store, root: str, label: str) -> None:
    """Try whether the store keeps its one promise; raises StoreRefused, naming what it did instead.

    `label` is fresh for each probe: what is tried here must not meet what an earlier probe left.
    """
    folder = f"{root}probe/{label}/"
    first, other = f"{folder}first", b"another content"
    content = label.encode()
    if not store.create(first, content):
        raise StoreRefused(f"{store.name} says that an object exists which nobody has made ({first})")
    if store.create(first, other):
        raise StoreRefused(_ignores(store, "it stored a second object under the same key"))
    if store.read(first) != content:
        raise StoreRefused(_ignores(store, "it returned other bytes than were stored first"))
    if first not in store.keys(folder):
        raise StoreRefused(f"{store.name} does not list an object that was just made: it cannot hold a queue")
    _race(store, [f"{folder}race-{race:02}" for race in range(_RACES)])
    for key in store.keys(folder):
        store.remove(key)


def _race(store: Store, keys: list[str]) -> None:
    """Let several create each key, all at the same time: one of them wins, and its bytes are there."""
    won: dict[str, list[bytes]] = {key: [] for key in keys}
    failures: list[Exception] = []
    start = threading.Barrier(_RACERS * len(keys))

    def run(key: str, content: bytes) -> None:
        start.wait()
        try:
            if store.create(key, content):
                won[key].append(content)
        except (StoreUnreachable, StoreRefused) as error:
            failures.append(error)

    racers = [
        threading.Thread(target=run, args=(key, f"racer {i}".encode()), daemon=True)
        for key in keys
        for i in range(_RACERS)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    for key, winners in won.items():
        if len(winners) > 1 or (winners and store.read(key) != winners[0]) or not (winners or failures):
            what = f"of {_RACERS} who made the same object at once, {len(winners)} were told yes"
            raise StoreRefused(_ignores(store, what))
    if failures:
        raise failures[0]


def _ignores(store: Store, what: str) -> str:
    return (
        f"{store.name} cannot hold a queue: it ignores the condition that an object must not exist yet ({what}). "
        "Two owners would overwrite each other's messages. Use a store with conditional writes, such as S3 itself"
    )
