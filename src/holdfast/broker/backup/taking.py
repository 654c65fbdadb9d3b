"""Taking a backup: of a folder that nobody owns, of a folder in a store, or of what its owner has captured."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, TypeAlias

import msgspec

from holdfast.broker.backup.archive import (
    INLINE_BYTES,
    PIECE_BYTES,
    Archive,
    ArchivedFile,
    BackupList,
    WrongKey,
    kept_numbers,
)
from holdfast.broker.folder.layout import OWNER_SOCKET, RESERVE, TIER, TOPICS
from holdfast.broker.folder.stored import cache_folder, follow_into
from holdfast.broker.scratch import SCRATCH
from holdfast.env import World
from holdfast.env.chain.engines import StorePlace, open_store
from holdfast.env.standstill import FolderCapture
from holdfast.env.threads import DaemonThreads
from holdfast.errors import Busy, CorruptData, InvalidRequest, NotAQueue, Unavailable
from holdfast.settings import BrokerSettings
from holdfast.storage.files import LOCK, STATE, join, take_lock, translated

Progress: TypeAlias = Callable[[int, int], None]
_AT_ONCE: Final = 8


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """A file to copy. A stamp is given where the same stamp means the same bytes."""

    path: str
    size: int
    stamp: tuple[int, ...] = ()


class Source(Protocol):
    """A folder at one moment."""

    @property
    def time_ns(self) -> int: ...
    @property
    def folders(self) -> Sequence[str]: ...
    @property
    def files(self) -> Sequence[SourceFile]: ...

    def read(self, index: int, position: int, length: int) -> bytes:
        """Return bytes of a file; what is missing at their end are zeros."""


class CapturedSource:
    """A source in this process: its capture."""

    def __init__(self, capture: FolderCapture) -> None:
        self.time_ns = capture.time_ns
        self.folders = capture.folders
        self.files = [SourceFile(file.path, file.size, file.stamp if file.is_settled else ()) for file in capture.files]
        self.read = capture.read


def is_skipped(path: str) -> bool:
    """Whether a file means something to one process on one machine only, or was never completed."""
    name = posixpath.basename(path)
    return name == LOCK or name.endswith(".tmp") or path in (OWNER_SOCKET, RESERVE) or path.startswith(f"{TIER}/")


def is_in_place(path: str) -> bool:
    """Whether a file is written in place, and so has to be read before anything changes again."""
    return posixpath.basename(path) in (STATE, SCRATCH)


def capture_owned(world: World, folder: str) -> FolderCapture:
    """FolderCapture a folder that this process owns. Raises Busy if it does not come to rest."""
    try:
        return world.still.capture(world.disk, folder, world.clock, is_skipped=is_skipped, is_in_place=is_in_place)
    except TimeoutError as error:
        raise Busy(f"{folder} could not be captured: {error}; a log may be opening. Try again later") from error


@contextmanager
def captured(world: World, folder: str) -> Iterator[CapturedSource]:
    """Give a folder that this process owns, as of now."""
    capture = capture_owned(world, folder)
    try:
        yield CapturedSource(capture)
    finally:
        world.still.drop(capture)


@contextmanager
def locked_source(world: World, folder: str) -> Iterator[Source]:
    """Give a folder that nobody owns, and own it meanwhile. Raises Busy."""
    with translated(folder):
        if not world.disk.exists(join(folder, TOPICS)):
            raise NotAQueue(f"{folder} holds no queue: there is nothing to back up")
        lock = take_lock(world, folder)
        try:
            with captured(world, folder) as found:
                yield found
        finally:
            lock.release()


@contextmanager
def stored_source(world: World, place: StorePlace, settings: BrokerSettings) -> Iterator[Source]:
    """Give a folder in a store as its chain has it now; its owner, wherever it is, does not notice.

    The copy beside the cache is kept, so that the next backup fetches only what is new.
    """
    copy = f"{posixpath.dirname(cache_folder(place, settings))}-backup/{place.name}"
    world.disk.make_folder(posixpath.dirname(copy))
    lock = take_lock(world, posixpath.dirname(copy))
    try:
        store, root = open_store(place)
        try:
            follow_into(place, store, root, world, copy)
        finally:
            store.close()
        if not world.disk.exists(join(copy, TOPICS)):
            raise NotAQueue(f"{place.shown} holds no queue: there is nothing to back up")
        with captured(world, copy) as found:
            yield found
    finally:
        lock.release()


class TakenBackup(msgspec.Struct, frozen=True, kw_only=True):
    """A backup that was taken, how many went because of retention, and why some could not."""

    backup: BackupList
    removed: int = 0
    problem: str = ""


def take(
    archive: Archive,
    source: Source,
    name: str,
    world: World,
    *,
    keep: int | None = None,
    keep_ns: int | None = None,
    progress: Progress | None = None,
) -> TakenBackup:
    """Store a backup of the source; `name` says what it is of. Then remove those that are not to be kept."""
    archive.require_apart()
    archive.require_key()
    with archive.at_work() as check_time:
        known, before = archive.contents(), _newest(archive, name)
        files, new_bytes = _Copying(archive, source, before, known, progress).run()
        check_time()
        made = archive.add(
            BackupList(
                number=0,
                time_ns=source.time_ns,
                source=name,
                folders=list(source.folders),
                files=files,
                new_bytes=new_bytes,
            )
        )
        if not made.digests <= archive.contents():
            raise Unavailable(
                f"backup {made.number} in {archive.shown} is not complete: another process removed what it needs. "
                "Take another one"
            )
        since_ns = None if keep_ns is None else world.clock.now_ns() - keep_ns
        try:
            removed, _ = archive.keep_only(lambda found: kept_numbers(found, name, keep, since_ns))
        except (CorruptData, WrongKey) as error:
            return TakenBackup(backup=made, problem=f"no older backup was removed: {error}")
        return TakenBackup(backup=made, removed=removed)


def _newest(archive: Archive, name: str) -> Mapping[str, ArchivedFile]:
    """Return the files of the newest backup of the same folder that can be read, and is encrypted if this one is."""
    for number in reversed(archive.numbers()):
        try:
            found = archive.read(number)
        except (CorruptData, WrongKey):
            continue
        if found.source == name and found.is_encrypted == archive.is_encrypting:
            return {file.path: file for file in found.files}
    return {}


class _Copying:
    """Stores the files of a source, several pieces at a time."""

    def __init__(
        self,
        archive: Archive,
        source: Source,
        before: Mapping[str, ArchivedFile],
        known: set[bytes],
        progress: Progress | None,
    ) -> None:
        self._archive = archive
        self._source = source
        self._before = before
        self._known = known
        self._progress = progress or (lambda done, total: None)
        self._total = sum(file.size for file in source.files)
        self._lock = threading.Lock()
        self._done = self._new = 0
        self._failed = threading.Event()

    def run(self) -> tuple[list[ArchivedFile], int]:
        pieces: list[tuple[int, int]] = []  # what has to be read: files by number, and positions in them
        for i, file in enumerate(self._source.files):
            if self._unchanged(file) is not None:
                self._note(file.size, 0)
            else:
                pieces += [(i, position) for position in range(0, max(file.size, 1), PIECE_BYTES)]
        with DaemonThreads(_AT_ONCE, "holdfast-backup") as pool:
            stored = dict(zip(pieces, pool.map(self._store, pieces), strict=True))
        return [self._archived(i, file, stored) for i, file in enumerate(self._source.files)], self._new

    def _unchanged(self, file: SourceFile) -> ArchivedFile | None:
        """Return the file as the last backup has it, if it is the same and all of it is there."""
        found = self._before.get(file.path)
        if found is None or not file.stamp or found.stamp != file.stamp:
            return None
        return found if all(digest in self._known for digest in found.pieces if digest) else None

    def _archived(self, i: int, file: SourceFile, stored: Mapping[tuple[int, int], bytes]) -> ArchivedFile:
        found = self._unchanged(file) if (i, 0) not in stored else None
        if found is not None:
            return found
        if file.size <= INLINE_BYTES:
            return ArchivedFile(file.path, file.size, content=stored[i, 0], stamp=file.stamp)
        digests = [stored[i, position] for position in range(0, file.size, PIECE_BYTES)]
        return ArchivedFile(file.path, file.size, pieces=digests, stamp=file.stamp)

    def _store(self, piece: tuple[int, int]) -> bytes:
        """Store a piece; returns its digest, or its bytes if the file is small."""
        if self._failed.is_set():
            return b""
        i, position = piece
        file = self._source.files[i]
        length = min(PIECE_BYTES, file.size - position)
        try:
            content = self._source.read(i, position, length)
            new = 0
            if file.size > INLINE_BYTES:
                content, new = self._archive.put(content, self._known)
        except OSError as error:
            self._failed.set()
            raise _unread(file.path, error) from error
        except BaseException:
            self._failed.set()
            raise
        self._note(length, new)
        return content

    def _note(self, length: int, new: int) -> None:
        with self._lock:
            self._done += length
            self._new += new
        self._progress(self._done, self._total)


def _unread(path: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        return Unavailable(f"{path} was removed before it could be copied; nothing is listed. Take another backup")
    return CorruptData(
        f"{path} cannot be read: {error.strerror or error}; nothing is listed. Check the disk, and run `holdfast check`"
    )


def require_apart(folder: str, destination: str) -> None:
    """Refuse a backup into the folder itself."""
    if "://" not in destination and f"{posixpath.abspath(destination)}/".startswith(f"{posixpath.abspath(folder)}/"):
        raise InvalidRequest(f"{destination} is inside {folder}: choose another place for its backups")
