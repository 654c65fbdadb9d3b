"""What a store has to do, the two that need nothing else (in memory, in a folder), and which URLs are stores.

One promise carries everything above it: of all who create the same key, exactly one succeeds, and from then on everyone
reads its bytes. Nothing is ever overwritten. A store that ignores the condition would lose messages silently, so
`probe` tries it before a store is used for the first time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Final, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from holdfast.env.disk import RAN_OUT, LakeDisk, RealDisk, write_fully
from holdfast.errors import DiskFailed, InvalidRequest, NotInstalled


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


def copies_in(store: Store) -> str:
    """How many copies a store keeps, as far as it can be known: its replication is its own."""
    told: Callable[[], str] | None = getattr(store, "copies", None)
    return "as many copies as the service keeps, which it does not tell" if told is None else told()


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

    def copies(self) -> str:
        return "one copy, unless the file system keeps more"

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
_TRIES: Final = 4


def probe(store: Store, root: str, label: str) -> None:
    """Try whether the store keeps its one promise; raises StoreRefused, naming what it did instead.

    `label` is fresh for each probe: what is tried here must not meet what an earlier probe left.
    """
    folder = f"{root}probe/{label}/"
    first, other = f"{folder}first", b"another content"
    content = label.encode()
    if not store.create(first, content):
        raise StoreRefused(f"{store.name} says that an object exists that nobody has created ({first})")
    if store.create(first, other):
        raise StoreRefused(_ignores(store, "it stored a second object under the same key"))
    if store.read(first) != content:
        raise StoreRefused(_ignores(store, "it returned other bytes than were stored first"))
    if first not in store.keys(folder):
        raise StoreRefused(f"{store.name} does not list an object that was just created: it cannot hold a queue")
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
            if _creates(store, key, content):
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
            what = f"of {_RACERS} writers that created the same object at once, {len(winners)} succeeded"
            raise StoreRefused(_ignores(store, what))
    if failures:
        raise failures[0]


def _creates(store: Store, key: str, content: bytes) -> bool:
    """Create an object, again where that is not known to have worked: S3 says "conflict" to some of those who race."""
    for _ in range(_TRIES):
        try:
            return store.create(key, content)
        except StoreUnreachable:
            if store.read(key) == content:
                return True
    return store.create(key, content)


def _ignores(store: Store, what: str) -> str:
    return (
        f"{store.name} cannot hold a queue: it ignores the condition that an object must not exist yet ({what}). "
        "Two owners would overwrite each other's messages. Use a store with conditional writes, such as S3 itself"
    )


# Which places are stores, and how they are opened.

_MOST_NAME_BYTES: Final = 200  # a name in a folder may have 255, and some get a suffix
_memories: Final[dict[str, MemoryStore]] = {}


class StorePlace(msgspec.Struct, frozen=True):
    """A place in a store: its URL, which may hold a password, the same for people, and the name of the folder there."""

    url: str
    shown: str
    name: str

    def __repr__(self) -> str:
        return f"StorePlace({self.shown!r})"


def parse_place(url: str) -> StorePlace:
    """Parse the URL of a folder in a store; raises InvalidRequest."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"{url.partition('://')[0]}://... is not a place in a store: {error}") from None
    user, _, host = parts.netloc.rpartition("@")
    shown = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    path = unquote(parts.path).strip("/")
    names = path.split("/") if path else []
    name = names[-1] if names else host
    wrong = f"{shown!r} is not a place in a store: "
    # The name is that of a folder in the cache, which is emptied: it must not be one that leads elsewhere.
    if (
        any(each in ("", ".", "..") for each in [*names, name])
        or "\0" in path
        or bool(host) == (parts.scheme == "file")
    ):
        raise InvalidRequest(wrong + _EXAMPLES[parts.scheme])
    if len(name.encode()) > _MOST_NAME_BYTES:
        raise InvalidRequest(f"{wrong}its name has more than {_MOST_NAME_BYTES} bytes")
    if parts.scheme != "postgresql" and (user or parts.query or parts.fragment):
        raise InvalidRequest(f"{wrong}keys and options are not part of it, they come from the environment")
    return StorePlace(url=url.rstrip("/"), shown=shown, name=name)


def open_store(place: StorePlace) -> tuple[Store, str]:
    """Return the store, and the start of all keys in it. Raises NotInstalled, or InvalidRequest."""
    scheme = place.url.partition("://")[0]
    try:
        return _ENGINES[scheme](place)
    except StoreRefused as error:
        raise InvalidRequest(cannot_open(place, error)) from error
    except StoreUnreachable as error:
        raise DiskFailed(cannot_open(place, error)) from error


def cannot_open(place: StorePlace, error: Exception) -> str:
    """Return why a place cannot be opened, and what to look at."""
    why = str(error).removeprefix(f"{place.shown}: ")
    return f"{place.shown} cannot be opened: {why}{store_advice(place)}"


def store_advice(place: StorePlace) -> str:
    """Return what to look at if a store does not answer as it should."""
    needed = _KEYS.get(place.url.partition("://")[0])
    return (
        ""
        if needed is None
        else f". Check that [store] in the settings file, or the environment, has what it needs: {needed}"
    )


def _memory(place: StorePlace) -> tuple[Store, str]:
    return _memories.setdefault(place.shown, MemoryStore(place.shown)), ""


def _folder(place: StorePlace) -> tuple[Store, str]:
    return FolderStore(os.path.abspath(unquote(urlsplit(place.url).path))), ""


def _object_store(place: StorePlace) -> tuple[Store, str]:
    _require("obstore", "stores", place)
    from holdfast.env.chain.services import ObjectStoreEngine

    return ObjectStoreEngine(place.url, place.shown), ""


def _postgres(place: StorePlace) -> tuple[Store, str]:
    _require("psycopg", "postgres", place)
    from holdfast.env.chain.services import PostgresStore

    parts = urlsplit(place.url)
    database, _, root = parts.path.strip("/").partition("/")
    if not database or not root:
        raise InvalidRequest(f"{place.shown} is not a place in a store: {_EXAMPLES['postgresql']}")
    url = urlunsplit(("postgresql", parts.netloc, f"/{database}", parts.query, ""))
    return PostgresStore(url, place.shown), f"{unquote(root)}/"


def _require(package: str, extra: str, place: StorePlace) -> None:
    if find_spec(package) is None:
        raise NotInstalled(f"{place.shown} needs the package {package}: pip install 'holdfast[{extra}]'")


_Opener: TypeAlias = Callable[[StorePlace], tuple[Store, str]]
_ENGINES: Final[dict[str, _Opener]] = {
    "s3": _object_store,
    "az": _object_store,
    "gs": _object_store,
    "postgresql": _postgres,
    "file": _folder,
    "memory": _memory,
}
_KEYS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL unless it is Amazon's",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, and AZURE_ENDPOINT unless it is Microsoft's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, and GOOGLE_BASE_URL unless it is Google's",
}
_EXAMPLES: Final = {
    "s3": "give s3://bucket/name",
    "az": "give az://container/name",
    "gs": "give gs://bucket/name",
    "postgresql": "give postgresql://host/database/name",
    "file": "give file:///folder/name",
    "memory": "give memory://name",
}
