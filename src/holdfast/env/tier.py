"""Files whose content is in a store: a stub beside them says where, and whoever reads them fetches them.

A sealed segment never changes, so it may leave the disk. Its content is stored as an object, a *stub* takes its place
(`<name>.stub`), and the file is removed. Above this disk nobody notices: the name is listed, the file has its length,
and with the first byte that is read the whole content is fetched into a cache of bounded size.

What must hold: at every moment the content is in the file or in the store, and a file that is there counts.

    file   stub
    yes    -      like any other file
    yes    yes    it is about to move, or a crash came in between: the file counts
    -      yes    the store has it

Out: the object is created and read back, the stub is synced under another name, renamed, and the folder synced; only
then the file is removed. In, because somebody is about to write: the file is written, synced and renamed, the folder
is synced, and only then the stub is removed. Whoever moves a file sees to it that nobody replaces or removes it
meanwhile. Objects are not removed here: whoever owns the folder removes those that no stub names any more.

If the object is damaged, readers get it as it is. The checksums of frames tell exactly which messages are affected, as
in a file; what is intact can be read.
"""

from __future__ import annotations

import errno
import os
import posixpath
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from holdfast.checksum import crc32c
from holdfast.env.disk import BytesLike, Disk, File, WritableMap, write_fully
from holdfast.env.process import close_in_children, get_logger
from holdfast.errors import HoldfastError
from holdfast.later import hashlib

if TYPE_CHECKING:
    from holdfast.env.chain.engines import Store

logger = get_logger(__name__)

STUB: Final = ".stub"
_MOVABLE: Final = ".log"
_PART: Final = ".tmp"
_LIMIT: Final = "limit"
USUAL_CACHE_BYTES: Final = 1024 * 1024 * 1024

StoreOpener: TypeAlias = "Callable[[str], tuple[Store, str]]"


class Stub(msgspec.Struct, frozen=True, kw_only=True):
    """Where the content of a file is, what it must be, and the folder of the cache, seen from the file's folder."""

    place: str
    key: str
    size: int
    sha256: str
    cache: str
    crc: int | None = None  # None if only the digest is known
    version: int = 1

    @property
    def cached_name(self) -> str:
        """The name in the cache. It tells the size, so that the cache can be weighed by listing it."""
        return f"{self.sha256}-{self.size}"

    def encode(self) -> bytes:
        content = msgspec.json.encode(self)
        return b"%08x %s\n" % (crc32c(content), content)

    @staticmethod
    def parse(content: bytes) -> Stub:
        """Return the stub; raises ValueError if it is damaged."""
        crc, _, rest = content.rstrip(b"\n").partition(b" ")
        if not crc or int(crc, 16) != crc32c(rest):
            raise ValueError("its checksum does not match")
        found = msgspec.json.decode(rest, type=Stub)
        if found.version != 1:
            raise ValueError(f"it was written by a newer release (format {found.version})")
        return found

    def matches(self, content: BytesLike) -> bool:
        """Whether this is the content."""
        if self.crc is None:
            return hashlib.sha256(content).hexdigest() == self.sha256
        return len(content) == self.size and crc32c(content) == self.crc


def open_url(url: str) -> tuple[Store, str]:
    """Return the store of a URL, and the start of all keys in it."""
    from holdfast.env.chain.engines import open_store, parse_place

    return open_store(parse_place(url))


class _ReadOnly:
    """What cannot be done to a file that is in a store."""

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        _refuse()

    def reserve(self, length: int) -> None:
        _refuse()

    def release(self, position: int) -> None:
        _refuse()

    def map(self, length: int) -> WritableMap:
        _refuse()

    def words(self, count: int) -> MutableSequence[int]:
        _refuse()

    def truncate(self, length: int) -> None:
        _refuse()

    def sync(self) -> None:
        """Do nothing: the store has it."""


def _refuse() -> NoReturn:
    raise OSError(errno.EBADF, "it is open for reading only")


class TieredFile(_ReadOnly):
    """A file whose content is in a store, open for reading. It is fetched with the first byte that is read."""

    def __init__(self, fetch: Callable[[], File], stub: Stub) -> None:
        self._fetch = fetch
        self._stub = stub
        self._file: File | None = None

    @property
    def stamp(self) -> tuple[int, ...]:
        """The same stamp means the same bytes: a backup that has them need not fetch them."""
        return (self._stub.size, int(self._stub.sha256[:15], 16))

    def size(self) -> int:
        return self._stub.size

    def read(self, position: int, length: int) -> bytes:
        return self._fetched().read(position, length)

    def view(self, position: int, length: int) -> memoryview:
        return self._fetched().view(position, length)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _fetched(self) -> File:
        file = self._file  # read once: threads share it
        if file is None:
            file = self._file = self._fetch()
        return file


class HeldContent(_ReadOnly):
    """Fetched content that is not in the cache: it is damaged, or the cache cannot be written to."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)

    def size(self) -> int:
        return len(self._content)

    def read(self, position: int, length: int) -> bytes:
        return bytes(self.view(position, length))

    def view(self, position: int, length: int) -> memoryview:
        return self._content[position : position + length]

    def close(self) -> None:
        """Do nothing: it ends with its last view."""


class TieredDisk:
    """A `Disk` on which files may be in a store. It may have other disks below and above it."""

    def __init__(self, disk: Disk, open_place: StoreOpener = open_url, *, read_ahead: bool = False) -> None:
        self._read_ahead = read_ahead
        self._disk = disk
        self._open_place = open_place
        self.removed = 0  # stubs that are gone: there may be objects that nobody needs any more
        self.fetched = 0  # files
        self.fetched_bytes = 0
        self.disown()
        close_in_children(self)

        self.can_map, self.kind, self.mount_id, self.free_bytes = (
            disk.can_map,
            disk.kind,
            disk.mount_id,
            disk.free_bytes,
        )
        self.is_folder, self.make_folder, self.remove_folder = disk.is_folder, disk.make_folder, disk.remove_folder
        self.open_folder, self.sync_folder = disk.open_folder, disk.sync_folder
        self.lock, self.exposure = disk.lock, disk.exposure

    def disown(self) -> None:
        """After a fork, in the child: connections are the parent's, and a thread that is not here may hold a lock."""
        self._guard = threading.Lock()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._stores: dict[str, tuple[Store, str]] = {}
        self._used: dict[str, int] = {}  # files in caches that were checked here -> when they were last opened
        self._uses = 0
        self._last: dict[str, str] = {}  # the file that was fetched last, of each folder

    def names(self, folder: str) -> list[str]:
        names = self._disk.names(folder)
        if not any(name.endswith(STUB) for name in names):
            return names
        return sorted({name.removesuffix(STUB) for name in names})

    def exists(self, path: str) -> bool:
        return self._disk.exists(path) or (path.endswith(_MOVABLE) and self._disk.exists(path + STUB))

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        if not path.endswith(_MOVABLE):
            return self._disk.open(path, write=write, create=create)
        with suppress(FileNotFoundError):
            return self._disk.open(path, write=write)
        stub = self.stub(path)
        if stub is None:
            return self._disk.open(path, write=write, create=create)  # it has just been moved in, or there is none
        if write:
            self._move_in(path, stub)
            return self._disk.open(path, write=True)
        fetch = self._fetched_in_order if self._read_ahead else self._fetched
        return TieredFile(lambda: fetch(path, stub), stub)

    def rename(self, old: str, new: str) -> None:
        if old.endswith(_MOVABLE) and not self._disk.exists(old):
            stub = self.stub(old)
            if stub is not None:
                self._move_in(old, stub)
        self._disk.rename(old, new)
        if new.endswith(_MOVABLE) and self._disk.exists(new + STUB):
            # Durable before the stub goes: a power cut must not take both.
            self._disk.sync_folder(posixpath.dirname(new))
            self._remove_stub(new)

    def remove(self, path: str) -> None:
        tiered = path.endswith(_MOVABLE) and self._disk.exists(path + STUB)
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            if not tiered:
                raise
        if tiered:
            self._remove_stub(path)

    # Moving out: see the head of this module.

    def stub(self, path: str) -> Stub | None:
        """Return the stub of a file; None if it has none. Raises OSError if it is damaged."""
        try:
            file = self._disk.open(path + STUB)
        except FileNotFoundError:
            return None
        try:
            return Stub.parse(file.read(0, file.size()))
        except (ValueError, msgspec.DecodeError) as error:
            damaged = f"its stub {path}{STUB}, which says where its content is, is damaged: {error}"
            raise OSError(errno.EIO, damaged) from error
        finally:
            file.close()

    def stubs(self, folder: str) -> dict[str, Stub]:
        """Return the stubs in a folder, by the names of their files."""
        names = [name.removesuffix(STUB) for name in self._disk.names(folder) if name.endswith(STUB)]
        found = ((name, self.stub(f"{folder}/{name}")) for name in names)
        return {name: stub for name, stub in found if stub is not None}

    def store(self, path: str, *, place: str, key: str, cache: str, is_there: bool = False) -> Stub:
        """Store the content of a file unless it `is_there`, read it back, and prepare the stub.

        A key is used for one attempt only: it may be that a removal of the key is on its way. Raises OSError if the
        store does not take it, or has something else.
        """
        with closing(self._disk.open(path)) as file:
            content = file.read(0, file.size())
        stub = Stub(
            place=place, key=key, size=len(content), crc=crc32c(content), sha256=hashlib.sha256(content).hexdigest(),
            cache=posixpath.relpath(cache, posixpath.dirname(path)),
        )  # fmt: skip
        with self._asking(place) as (store, root):
            if not is_there:
                store.create(root + key, content)
            if store.read(root + key) != content:
                raise OSError(errno.EIO, f"{store.name} returns other bytes for {key} than were stored there")
        with closing(self._disk.open(path + STUB + _PART, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [stub.encode()])
            file.sync()
        return stub

    def put_stub(self, path: str) -> None:
        """Put the prepared stub in place. The caller syncs the folder, and keeps others from the file."""
        self._disk.rename(path + STUB + _PART, path + STUB)

    def forget_stub(self, path: str) -> None:
        """Remove a prepared stub: the file is not to be moved after all."""
        with suppress(FileNotFoundError):
            self._disk.remove(path + STUB + _PART)

    def drop(self, path: str) -> None:
        """Remove a file whose stub is in place and synced. The caller keeps others from the file."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def place_stub(self, path: str, stub: Stub) -> None:
        """Create a file that is in the store already. Nothing is synced: for copies that may be lost."""
        with closing(self._disk.open(path + STUB, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [stub.encode()])
        self.drop(path)

    def has(self, path: str, digest: str) -> bool:
        """Whether only a store has the file, and it is the content with this digest."""
        if not path.endswith(_MOVABLE) or self._disk.exists(path):
            return False
        try:
            stub = self.stub(path)
        except OSError:
            return False
        return stub is not None and stub.sha256 == digest

    def objects(self, place: str, prefix: str) -> list[str]:
        """Return the keys in a store that start with the prefix. Raises OSError."""
        with self._asking(place) as (store, root):
            # By whole folders: some stores take no other prefix.
            folder = f"{root}{prefix.rpartition('/')[0]}/"
            return [key.removeprefix(root) for key in store.keys(folder) if key.startswith(root + prefix)]

    def let_go(self) -> None:
        """Close the connections to stores; the next call makes new ones."""
        for store, _ in list(self._stores.values()):
            store.close()

    def remove_object(self, place: str, key: str) -> None:
        """Remove an object that no stub names. Raises OSError."""
        with self._asking(place) as (store, root):
            store.remove(root + key)

    def limit_cache(self, cache: str, most_bytes: int) -> None:
        """Limit a cache, for every process that uses it."""
        self._disk.make_folder(cache)
        with closing(self._disk.open(f"{cache}/{_LIMIT}", write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [b"%d\n" % most_bytes])

    def _remove_stub(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._disk.remove(path + STUB)
        self.removed += 1

    def _move_in(self, path: str, stub: Stub) -> None:
        """Bring a file back, because somebody is about to change it."""
        with closing(self._fetched(path, stub)) as file:
            content = file.view(0, stub.size)
        part = f"{path}.in{_PART}"
        with closing(self._disk.open(part, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [content])
            file.sync()
        self._disk.rename(part, path)
        self._disk.sync_folder(posixpath.dirname(path))
        self._remove_stub(path)

    # Fetching

    def _fetched(self, path: str, stub: Stub) -> File:
        cache = posixpath.normpath(posixpath.join(posixpath.dirname(path), stub.cache))
        name = f"{cache}/{stub.cached_name}"
        with self._turn(name):
            return self._cached(name, stub) or self._fetch(path, cache, name, stub)

    def _fetched_in_order(self, path: str, stub: Stub) -> File:
        """Fetch a file; if the one before it was fetched last, whoever reads will soon want the next one as well."""
        folder, own = posixpath.split(path)
        names = sorted(name.removesuffix(STUB) for name in self._disk.names(folder) if name.endswith(STUB))
        at = bisect_left(names, own)
        follows = at > 0 and self._last.get(folder) == names[at - 1]
        self._last[folder] = own
        if follows and names[at + 1 :] and stub.size * 2 <= self._most_bytes(posixpath.join(folder, stub.cache)):
            threading.Thread(target=self._fetch_ahead, args=(f"{folder}/{names[at + 1]}",), daemon=True).start()
        return self._fetched(path, stub)

    def _fetch_ahead(self, path: str) -> None:
        with suppress(OSError):  # whoever reads it gets the error
            stub = self.stub(path)
            if stub is not None:
                self._fetched(path, stub).close()

    def _turn(self, name: str) -> threading.Lock:
        """Return the lock of a file in a cache: one thread at a time fetches it, and the others find it there."""
        with self._guard:
            turn = self._turns.get(name)
            if turn is None:
                turn = self._turns[name] = threading.Lock()
            return turn

    def _cached(self, name: str, stub: Stub) -> File | None:
        """Return the file in the cache. What this process has not checked yet may have been cut short by a crash."""
        try:
            file = self._disk.open(name)
        except OSError:
            return None
        if name not in self._used and not stub.matches(file.view(0, file.size())):
            file.close()
            return None
        self._note_use(name)
        return file

    def _note_use(self, name: str) -> None:
        with self._guard:
            self._uses += 1
            self._used[name] = self._uses

    def _fetch(self, path: str, cache: str, name: str, stub: Stub) -> File:
        content = self._read(path, stub)
        intact = stub.matches(content)
        if not intact:
            content = self._read(path, stub)  # it may have been damaged on its way
            intact = stub.matches(content)
        self.fetched += 1
        self.fetched_bytes += len(content)
        if not intact:
            logger.warning("an object is damaged", extra={"key": stub.key, "file": path, "bytes": len(content)})
            return HeldContent(content)
        try:
            self._keep(cache, name, content)
            file = self._disk.open(name)
        except OSError as error:  # no room, no permission: then without
            logger.info("not cached", extra={"file": path, "error": str(error)})
            return HeldContent(content)
        self._note_use(name)
        return file

    def _read(self, path: str, stub: Stub) -> bytes:
        with self._asking(stub.place) as (store, root):
            content = store.read(root + stub.key)
            if content is None and not self._disk.exists(path + STUB):
                raise FileNotFoundError(errno.ENOENT, "it has just been removed", path)
            if content is None:
                raise OSError(errno.EIO, f"its content is missing from {store.name} ({stub.key})")
        return content

    @contextmanager
    def _asking(self, place: str) -> Iterator[tuple[Store, str]]:
        """Give the store of a place. What it does not do is an OSError, as if a disk did not do it."""
        from holdfast.env.chain.engines import StoreRefused, StoreUnreachable

        try:
            found = self._stores.get(place)
            if found is None:
                with self._guard:
                    found = self._stores.get(place)
                    if found is None:
                        found = self._stores[place] = self._open_place(place)
            yield found
        except (StoreUnreachable, StoreRefused, HoldfastError) as error:
            # Not EIO: nothing is damaged, and `check` must not say so.
            raise OSError(errno.EREMOTEIO, f"the store that has its content did not return it ({error})") from error

    def _keep(self, cache: str, name: str, content: bytes) -> None:
        """Put content into the cache, in one step for those who look there. It is not synced: see `_cached`."""
        self._make_room(cache, len(content))
        part = f"{name}.{os.getpid()}{_PART}"
        with closing(self._disk.open(part, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [content])
        self._disk.rename(part, name)

    def _make_room(self, cache: str, need: int) -> None:
        """Remove what was not used for the longest time. Whoever reads it at the moment keeps it alive."""
        if not self._disk.is_folder(cache):
            self._disk.make_folder(cache)
        sizes = {name: size for name in self._disk.names(cache) if (size := _size_in(name)) is not None}
        left = self._most_bytes(cache) - need - sum(sizes.values())
        for name in sorted(sizes, key=lambda each: self._used.get(f"{cache}/{each}", 0)):
            if left >= 0:
                break
            with suppress(OSError):
                self._disk.remove(f"{cache}/{name}")
                left += sizes[name]
            with self._guard:
                self._used.pop(f"{cache}/{name}", None)
        if left < 0:
            raise OSError(errno.ENOSPC, "it does not fit into the cache")

    def _most_bytes(self, cache: str) -> int:
        try:
            with closing(self._disk.open(f"{cache}/{_LIMIT}")) as file:
                return int(file.read(0, file.size()))
        except (OSError, ValueError):
            return USUAL_CACHE_BYTES


def _size_in(name: str) -> int | None:
    """Return the size that the name of a file in a cache tells."""
    size = name.partition("-")[2].partition(".")[0]
    return int(size) if size.isdecimal() else None
