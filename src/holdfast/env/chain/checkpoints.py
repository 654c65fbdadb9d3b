"""Checkpoints: all files of a folder as of a number in its chain, so that opening need not read the chain from 0.

A checkpoint is one object that lists the files. Small ones are in it; each larger one is an object of its own that goes
by the digest of its bytes, so a sealed segment is stored once, however many checkpoints list it. A very large one is
stored in pieces: no store takes objects of any size, and nobody should need memory for all of it. The chain before a
checkpoint may be removed once the checkpoint is old enough (`clean_up`).
"""

from __future__ import annotations

import hashlib
import posixpath
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.env.chain.chain import Position
from holdfast.env.chain.disk import INLINE_BYTES, Capture, ChainDisk
from holdfast.env.chain.engines import Store
from holdfast.env.chain.format import BadObject, NewerObject, check_path
from holdfast.env.disk import BytesLike, Disk, write_fully
from holdfast.env.process import get_logger
from holdfast.env.threads import DaemonThreads
from holdfast.env.tier import Stub, TieredDisk

logger = get_logger(__name__)

_MAGIC: Final = b"HFCP"
_VERSION: Final = 1
_VERSION_WITH_PIECES: Final = 2
_HEAD_BYTES: Final = 9  # magic, version, checksum
KEPT_NS: Final = 3600 * 1_000_000_000  # an owner that was stopped for so long does not count what it creates
_AT_ONCE: Final = 8
_LOG: Final = ".log"
PIECE_BYTES: Final = 64 * 1024 * 1024
WHOLE_LOG_BYTES: Final = 512 * 1024 * 1024  # segments up to this size have one object, because they may be tiered
_HELD_BYTES: Final = 256 * 1024 * 1024  # of contents that are on their way, unless a single one is larger


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a checkpoint: its bytes, or the digests that name the objects that hold them, in order."""

    path: str
    size: int
    content: bytes = b""
    digest: str = ""  # of all of it, or those of its pieces with spaces in between

    @property
    def digests(self) -> list[str]:
        return self.digest.split()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A folder as of `at`: with all objects before that number applied, and no other."""

    at: Position
    time_ns: int
    owner: bytes  # as in the FENCE of the epoch, which may have been cleaned up
    folders: list[str]
    files: list[StoredFile]


def checkpoint_key(root: str, number: int) -> str:
    return f"{root}checkpoint/{number:020}"


def content_key(root: str, digest: str) -> str:
    return f"{root}content/{digest}"


def _pieces(path: str, size: int) -> list[tuple[int, int]]:
    """Return the positions and lengths in which the content of a file is stored."""
    if size <= (WHOLE_LOG_BYTES if path.endswith(_LOG) else PIECE_BYTES):
        return [(0, size)]
    return [(position, min(PIECE_BYTES, size - position)) for position in range(0, size, PIECE_BYTES)]


class _Room:
    """Bounds what threads hold at the same time. What alone is beyond the bound has to be the only one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._most)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


class Interrupted(Exception):
    """The checkpoint is not wanted any more: the folder is being closed."""


def write_checkpoint(disk: ChainDisk, now_ns: int, is_over: Callable[[], bool] = lambda: False) -> Checkpoint:
    """Store the folder as it is now. Writing to it goes on meanwhile; raises OSError if this is no longer the owner.

    Raises Interrupted between two files once `is_over`.
    """
    chain, room = disk.chain, _Room(_HELD_BYTES)

    def check() -> None:
        if is_over():
            raise Interrupted
        chain.check()

    with disk.capturing() as (capture, number), DaemonThreads(_AT_ONCE, "holdfast-checkpoint") as pool:
        files = list(pool.map(lambda path: _stored(disk, capture, path, room, check), capture.sizes))
    at = Position(number=number, epoch=chain.epoch, window=chain.window, writer=chain.writer)
    found = Checkpoint(at=at, time_ns=now_ns, owner=chain.note, folders=capture.folders, files=files)
    # Whoever has made the same one before us made it of the same chain.
    chain.store.create(checkpoint_key(chain.root, number), encode_checkpoint(found))
    return found


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    payload = msgspec.msgpack.encode(checkpoint)
    has_pieces = any(len(file.digests) > 1 for file in checkpoint.files)
    version = _VERSION_WITH_PIECES if has_pieces else _VERSION
    return _MAGIC + bytes([version]) + crc32c(payload).to_bytes(4, "little") + payload


def _stored(disk: ChainDisk, capture: Capture, path: str, room: _Room, check: Callable[[], None]) -> StoredFile:
    size, digest = capture.sizes[path], capture.digests.get(path, "")
    if digest:
        check()
        return StoredFile(path, size, digest=digest)
    digests = []
    for position, length in _pieces(path, size):
        with room.take(length):
            check()
            content = capture.read(path, position, length)
            if size <= INLINE_BYTES:
                capture.done(path)
                return StoredFile(path, size, content=content)
            digests.append(hashlib.sha256(content).hexdigest())
            disk.chain.store.create(content_key(disk.chain.root, digests[-1]), content)
            del content
    capture.done(path)
    digest = " ".join(digests)
    disk.keep_digest(path, digest)
    return StoredFile(path, size, digest=digest)


def checkpoints(store: Store, root: str) -> list[int]:
    """Return the numbers of all checkpoints, newest first."""
    prefix = f"{root}checkpoint/"
    names = (key.removeprefix(prefix) for key in store.keys(prefix))
    return sorted((int(name) for name in names if name.isdecimal() and name.isascii()), reverse=True)


def read_checkpoint(store: Store, root: str, number: int) -> Checkpoint:
    content = store.read(checkpoint_key(root, number))
    if content is None or content[:4] != _MAGIC or len(content) < _HEAD_BYTES:
        raise BadObject(f"checkpoint {number} is missing or not a checkpoint")
    if content[4] not in (_VERSION, _VERSION_WITH_PIECES):
        raise NewerObject(f"checkpoint {number} has format {content[4]}, and this release reads {_VERSION_WITH_PIECES}")
    payload = memoryview(content)[_HEAD_BYTES:]
    if crc32c(payload) != int.from_bytes(content[5:_HEAD_BYTES], "little"):
        raise BadObject(f"checkpoint {number} is damaged: its checksum does not match")
    try:
        found = msgspec.msgpack.decode(payload, type=Checkpoint)
    except msgspec.DecodeError as error:
        raise BadObject(f"checkpoint {number} is not in the format of this release: {error}") from error
    for path in [*found.folders, *(file.path for file in found.files)]:
        check_path(path)
    for file in found.files:
        if file.digest and len(file.digests) not in (1, len(_pieces(file.path, file.size))):
            raise BadObject(f"checkpoint {number} does not name all pieces of {file.path}")
    return found


class LeftInStore(msgspec.Struct, frozen=True):
    """How logs that are in the store stay there until they are read: by which URL, and which cache they go to."""

    tier: TieredDisk
    url: str
    cache: str

    def place(self, path: str, wanted: StoredFile) -> bool:
        """Create the file without its content; returns False if it has to be fetched."""
        if not path.endswith(_LOG) or len(wanted.digests) > 1:
            return False
        cache = posixpath.relpath(self.cache, posixpath.dirname(path))
        key = content_key("", wanted.digest)
        self.tier.place_stub(path, Stub(place=self.url, key=key, size=wanted.size, sha256=wanted.digest, cache=cache))
        return True


def _parts(file: StoredFile) -> list[tuple[int, int]]:
    """Return which parts of a file its digests are of."""
    return [(0, file.size)] if len(file.digests) == 1 else _pieces(file.path, file.size)


class Copy:
    """A local copy of the folder: takes a checkpoint, then the chain behind it. See `format.Changes`."""

    def __init__(self, store: Store, root: str, local: Disk, folder: str, leave: LeftInStore | None = None) -> None:
        self._leave = leave
        self._store = store
        self._root = root
        self._local = local
        self._folder = folder
        self.digests: dict[str, str] = {}  # of large files that are as a checkpoint had them

    def clear(self, *, keep: frozenset[str] = frozenset()) -> None:
        """Empty the copy, except for the files in `keep`."""
        if self._local.is_folder(self._folder):
            self._clear("", keep)
        else:
            self._local.make_folder(self._folder)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Make the copy what the checkpoint says. Files that have the right bytes, from an earlier run, are kept."""
        large = {file.path: file for file in checkpoint.files if file.digest}
        found = frozenset(path for path, file in large.items() if self._holds(file))
        self.clear(keep=found)
        for folder in checkpoint.folders:
            self.make(folder)
        for file in checkpoint.files:
            if not file.digest:
                self._place(file.path, file.content)
        missing, room = [file for path, file in large.items() if path not in found], _Room(_HELD_BYTES)
        with DaemonThreads(_AT_ONCE, "holdfast-restore") as pool:
            for _ in pool.map(lambda file: self._fetch(file, room), missing):
                pass
        self.digests = {path: file.digest for path, file in large.items()}

    def make(self, path: str) -> None:
        self._local.make_folder(self._at(path))

    def create(self, path: str) -> None:
        self._local.open(self._at(path), write=True, create=True).close()

    def write(self, path: str, position: int, content: BytesLike) -> None:
        self.digests.pop(path, None)
        file = self._local.open(self._at(path), write=True)
        try:
            write_fully(file, position, [content])
        finally:
            file.close()

    def write_large(self, path: str, position: int, length: int, digest: bytes, key: str) -> None:
        if not key.startswith("large/"):
            raise BadObject(f"a record names {key!r}, which is no large write")
        check_path(key)
        content = self._store.read(f"{self._root}{key}")
        if content is None or len(content) != length or hashlib.sha256(content).digest() != digest:
            raise BadObject(f"{key}, which holds {length} bytes of {path}, is missing or damaged")
        self.write(path, position, content)

    def truncate(self, path: str, length: int) -> None:
        self.digests.pop(path, None)
        file = self._local.open(self._at(path), write=True)
        try:
            file.truncate(length)
        finally:
            file.close()

    def rename(self, old: str, new: str) -> None:
        self._local.rename(self._at(old), self._at(new))
        for path in [path for path in self.digests if path == new or f"{path}/".startswith((f"{old}/", f"{new}/"))]:
            del self.digests[path]

    def remove(self, path: str) -> None:
        self.digests.pop(path, None)
        self._local.remove(self._at(path))

    def remove_folder(self, path: str) -> None:
        self._local.remove_folder(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def _holds(self, wanted: StoredFile) -> bool:
        path = self._at(wanted.path)
        if isinstance(self._local, TieredDisk) and self._local.has(path, wanted.digest):
            return True
        if not self._local.exists(path) or self._local.is_folder(path):
            return False
        file = self._local.open(path)
        try:
            if file.size() != wanted.size:
                return False
            parts = (file.view(position, length) for position, length in _parts(wanted))
            return [hashlib.sha256(part).hexdigest() for part in parts] == wanted.digests
        finally:
            file.close()

    def _fetch(self, wanted: StoredFile, room: _Room) -> None:
        if self._leave is not None and self._leave.place(self._at(wanted.path), wanted):
            return
        with closing(self._local.open(self._at(wanted.path), write=True, create=True)) as file:
            for (position, length), digest in zip(_parts(wanted), wanted.digests, strict=True):
                with room.take(length):
                    content = self._store.read(content_key(self._root, digest))
                    if content is None or hashlib.sha256(content).hexdigest() != digest:
                        raise BadObject(f"the content of {wanted.path} is missing from the store, or damaged")
                    write_fully(file, position, [content])
                    del content

    def _place(self, path: str, content: bytes) -> None:
        file = self._local.open(self._at(path), write=True, create=True)
        try:
            write_fully(file, 0, [content])
        finally:
            file.close()

    def _clear(self, inside: str, keep: frozenset[str]) -> bool:
        """Remove what is in a folder of the copy; returns whether it is empty then."""
        folder = self._at(inside) if inside else self._folder
        empty = True
        for name in self._local.names(folder):
            path = f"{inside}/{name}" if inside else name
            if self._local.is_folder(self._at(path)):
                if self._clear(path, keep):
                    self._local.remove_folder(self._at(path))
                else:
                    empty = False
            elif path in keep:
                empty = False
            else:
                self._local.remove(self._at(path))
        return empty


class Listed(msgspec.Struct, frozen=True):
    """What cleaning up has to know of a checkpoint. They never change, so each is read once."""

    number: int
    time_ns: int
    digests: frozenset[str]


def clean_up(
    store: Store, root: str, now_ns: int, confirm: Callable[[], None], known: dict[int, Listed] | None = None,
    *, recheck: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Remove what no opening needs any more; returns how many objects went.

    The newest checkpoint older than `KEPT_NS` is kept, with all that follows it; what is before it goes. Contents go
    when no kept checkpoint lists them. Only the owner calls this, and not while it writes a checkpoint. `confirm`
    raises if this is no longer the owner: contents are listed first, so those of the next owner's first checkpoint,
    which cannot be read here yet, are not among them. `recheck` does the same before each removal, for a process that
    is stopped in the middle: its successor may have found a content there, and listed it, instead of storing it again.
    `known` is what an earlier call has read.
    """
    known = {} if known is None else known
    contents = list(store.keys(f"{root}content/"))
    found = [_listed(store, root, number, known) for number in checkpoints(store, root)]
    old = [each for each in found if each.time_ns <= now_ns - KEPT_NS]
    if not old:
        return 0
    kept = [each for each in found if each.number >= old[0].number]
    gone = [key for part in ("chain", "standby") for key in _before(store, f"{root}{part}/", old[0].number)]
    if len(old) > 1:  # a large write may be named a little before the object that refers to it
        gone += _before(store, f"{root}large/", old[1].number)
    used = frozenset().union(*(each.digests for each in kept))
    gone += [checkpoint_key(root, each.number) for each in found if each not in kept]
    gone += [key for key in contents if key.rpartition("/")[2] not in used]
    if gone:
        confirm()
    for key in gone:
        recheck()
        store.remove(key)
    for each in [each for each in known.values() if each not in kept]:
        del known[each.number]
    if gone:
        logger.info("store cleaned up", extra={"store": store.name, "objects": len(gone)})
    return len(gone)


def _listed(store: Store, root: str, number: int, known: dict[int, Listed]) -> Listed:
    found = known.get(number)
    if found is None:
        each = read_checkpoint(store, root, number)
        digests = frozenset(digest for file in each.files for digest in file.digests)
        found = known[number] = Listed(number, each.time_ns, digests)
    return found


def _before(store: Store, prefix: str, number: int) -> Iterator[str]:
    limit = f"{prefix}{number:020}"
    for key in store.keys(prefix):
        if key >= limit:
            return
        yield key
