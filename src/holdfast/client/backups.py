"""`backup`, `restore`, `backups` and `verify`: of a folder that nobody owns, of one that a process owns, or in a store.

Only the owner can say what its folder was at one moment (see `env/standstill`), so it is asked through its socket, by
calls that nobody else uses: capture, read a piece, let go. What reads and stores the pieces is the process that takes
the backup, with its own keys for the store, and its own processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from os import PathLike
from typing import Final, TypeAlias

import msgspec

from holdfast.api.drafts import Seconds, duration_ms
from holdfast.broker.backup.archive import Archive, BackupKey, BackupList, WrongKey
from holdfast.broker.backup.restoring import (
    ArchivedSource,
    Verified,
    chain_source,
    require_empty_folder,
    require_empty_store,
    restore_folder,
    restore_store,
    verify_backup,
)
from holdfast.broker.backup.taking import (
    CapturedSource,
    Progress,
    Source,
    SourceFile,
    capture_owned,
    locked_source,
    require_apart,
    stored_source,
    take,
)
from holdfast.broker.folder.layout import folder_path, is_store, store_of
from holdfast.broker.folder.stored import is_chain
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import ThreadNetwork, run
from holdfast.client.opening import Address, is_address
from holdfast.client.shared_folder import socket_of
from holdfast.env import World, real_world
from holdfast.env.chain.engines import parse_place
from holdfast.env.sockets import absolute, answers_at
from holdfast.env.standstill import FolderCapture
from holdfast.errors import Busy, CorruptData, HoldfastError, InvalidRequest, NotFound, Unavailable
from holdfast.local.opening import store_settings
from holdfast.server.routing import Routes
from holdfast.server.service import Call
from holdfast.storage.files import read_file

Place: TypeAlias = str | PathLike[str]
Moment: TypeAlias = int | datetime | None

_PATIENCE_S: Final = 60.0  # the folder comes to rest, and is listed, within that
_NS: Final = 1_000_000_000

routes = Routes("captures")


class CaptureRequest(msgspec.Struct):
    """What of a capture is wanted: bytes of a file, or, without a length, nothing more."""

    id: str
    index: int = 0
    position: int = 0
    length: int = 0


class CaptureAnswer(msgspec.Struct):
    """A folder at one moment, as its owner noted it."""

    id: str
    time_ns: int
    folders: list[str]
    files: list[SourceFile]


class CapturedPiece(msgspec.Struct):
    """Bytes of a captured file, without the zeros at their end."""

    content: bytes = b""


@routes.add("POST", "/v1/captures", action="admin", answers=CaptureAnswer, hidden=True)
async def capture_folder(call: Call) -> CaptureAnswer:
    """Note all files of the folder as they are now."""
    world, folder = call.service.engine.world, call.service.engine.folder
    taken = await asyncio.to_thread(capture_owned, world, folder)
    taken.id = world.ids.random_bytes(8).hex()
    source = CapturedSource(taken)
    return CaptureAnswer(id=taken.id, time_ns=taken.time_ns, folders=source.folders, files=source.files)


@routes.add("POST", "/v1/captures/read", action="admin", body=CaptureRequest, answers=CapturedPiece, hidden=True)
async def read_captured(call: Call) -> CapturedPiece:
    """Return bytes of a file as it was captured."""
    world, wanted = call.service.engine.world, call.body
    taken = _capture(world, wanted.id)
    taken.used_ns = world.clock.monotonic_ns()
    try:
        content = await asyncio.to_thread(taken.read, wanted.index, wanted.position, wanted.length)
    except FileNotFoundError as error:
        raise Unavailable(f"{error}; take another backup") from error
    except OSError as error:
        path = taken.files[wanted.index].path
        raise CorruptData(f"{path} cannot be read: {error.strerror or error}. Run `holdfast check`") from error
    return CapturedPiece(content)


@routes.add("POST", "/v1/captures/drop", action="admin", body=CaptureRequest, answers=CapturedPiece, hidden=True)
async def drop_captured(call: Call) -> CapturedPiece:
    """Forget a capture."""
    world = call.service.engine.world
    world.still.drop(_capture(world, call.body.id))
    return CapturedPiece()


def _capture(world: World, wanted: str) -> FolderCapture:
    found = next((each for each in world.still.captures if each.id == wanted), None)
    if found is None:
        raise NotFound("the owner of the folder has forgotten this backup, which was idle for too long; take another")
    return found


class OwnedSource:
    """A folder that another process owns, or a part of this one: its files as the owner captured them."""

    def __init__(self, world: World, folder: str) -> None:
        address = Address(text=folder, socket=socket_of(absolute(folder)))
        self._caller = Caller(world, ThreadNetwork(world.clock), address)
        ask = Ask(method="POST", path=path_of("captures"), answers=CaptureAnswer, again=False, wait_s=_PATIENCE_S)
        found: CaptureAnswer = run(self._caller.call(ask))
        self._id = found.id
        self.time_ns, self.folders, self.files = found.time_ns, found.folders, found.files

    def read(self, index: int, position: int, length: int) -> bytes:
        return self._ask("read", CaptureRequest(self._id, index, position, length)).content

    def close(self) -> None:
        with suppress(HoldfastError):  # the owner forgets it by itself
            self._ask("drop", CaptureRequest(self._id))
        self._caller.close()

    def _ask(self, what: str, body: CaptureRequest) -> CapturedPiece:
        ask = Ask(method="POST", path=path_of("captures", what), body=packed(body), answers=CapturedPiece)
        found: CapturedPiece = run(self._caller.call(ask))
        return found


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A backup. `new_bytes` is what it added to the place; `removed` is how many older ones were removed.

    `problem` says why older backups could not be removed, or why this one cannot be read: it is damaged, or encrypted
    with a key that was not given.
    """

    number: int
    time: datetime
    source: str
    files: int
    bytes: int
    new_bytes: int
    removed: int = 0
    problem: str = ""
    encrypted: bool = False


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What was restored, or would be."""

    number: int
    time: datetime
    source: str
    destination: str
    files: int
    bytes: int


def backup(
    source: Place,
    destination: Place,
    *,
    keep: int | None = None,
    keep_for: Seconds | None = None,
    key_file: Place | None = None,
    progress: Progress | None = None,
) -> Backup:
    """Back up a data folder, as of one moment, while it is in use.

        holdfast.backup("jobs", "s3://backups/jobs", keep=30)

    Sealed segments are stored once, however many backups list them.

    Args:
        source: The folder, or its URL if it lives in a store.
        destination: Where backups are: s3://, az://, gs://, postgresql://, or a folder.
        keep: Keep this many backups of this folder, the newest; remove the others.
        keep_for: Remove backups of this folder older than this, in seconds. With `keep`, what either keeps is kept.
        key_file: Encrypt the backup with the key in this file; by default `backup_key_file` of the settings, if set.
        progress: Called with the number of bytes done, and the total.

    Returns:
        The backup.

    Raises:
        NotAQueue: There is no queue in the folder.
        Busy: Another process owns the folder and does not share it.
        Unavailable: The store cannot be reached. The next backup reuses what was stored.
        CorruptData: A file cannot be read; the error names it. No backup is listed.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise InvalidRequest(f"keep={keep!r} cannot be used: give the number of backups to keep, at least 1")
    keep_ns = None if keep_for is None else duration_ms(keep_for, "keep_for", minimum_ms=1) * 1_000_000
    world, place = real_world(), folder_path(source, "the source")
    target = _place(destination, "the destination")
    require_apart(place, target)
    with _opened_source(world, place) as (found, name):
        archive = Archive(target, world, _key(world, key_file))
        try:
            taken = take(archive, found, name, world, keep=keep, keep_ns=keep_ns, progress=progress)
        finally:
            archive.close()
    return _described(taken.backup, removed=taken.removed, problem=taken.problem)


def backups(destination: Place, *, key_file: Place | None = None) -> list[Backup]:
    """Return all backups in a place, oldest first. One that cannot be read has a `problem`.

    Args:
        destination: Where the backups are.
        key_file: The file with the key, if backups are encrypted; by default `backup_key_file` of the settings.

    Returns:
        The backups.

    Raises:
        InvalidRequest: The place or the key file cannot be used.
        Unavailable: The store cannot be reached.
    """
    world = real_world()
    archive = Archive(_place(destination, "the place"), world, _key(world, key_file))
    try:
        return [_listed(archive, number) for number in archive.numbers()]
    finally:
        archive.close()


def verify(
    destination: Place, *, at: Moment = None, key_file: Place | None = None, progress: Progress | None = None
) -> Verified:
    """Restore a backup into a temporary folder, check every message there, and open it.

    Args:
        destination: Where the backups are.
        at: The number of a backup, or a time: the newest one before it. By default the newest.
        key_file: The file with the key, if the backup is encrypted; by default `backup_key_file` of the settings.
        progress: Called with the number of bytes restored, and of all.

    Returns:
        What was found; `ok` is False if something is wrong, and `damage` says what.

    Raises:
        NotFound: There is no such backup.
        InvalidRequest: The backup is encrypted with another key.
        Unavailable: The store cannot be reached.
    """
    world = real_world()
    archive = Archive(_place(destination, "the place"), world, _key(world, key_file))
    try:
        return verify_backup(archive, archive.chosen(*_moment(at)), progress)
    finally:
        archive.close()


def restore(
    source: Place,
    destination: Place,
    *,
    at: Moment = None,
    dry_run: bool = False,
    key_file: Place | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Restore a data folder from a backup, or from the store it lives in, as it was at a given time.

        holdfast.restore("s3://backups/jobs", "jobs-restored")

    Args:
        source: Where the backups are; or the URL of a folder in a store.
        destination: A new or empty folder, or an empty place in a store.
        at: The number of a backup; the number of an object of the chain, to restore everything before it; or a time.
            By default the newest.
        dry_run: Only say what would be restored.
        key_file: The file with the key, if the backup is encrypted; by default `backup_key_file` of the settings.
        progress: Called with the number of bytes done, and the total.

    Returns:
        What was restored.

    Raises:
        InvalidRequest: The destination is not empty, or the backup is encrypted with another key.
        NotFound: There is no such backup, or the chain does not go back so far.
        CorruptData: The backup is damaged; the error says where.
        DiskFull: There is not enough room on the disk. Nothing is left behind.
    """
    world = real_world()
    target = _place(destination, "the destination")
    settings = store_settings(None) if is_store(target) else None
    with _restorable(world, _place(source, "the source"), at, key_file) as (found, number, name):
        if settings is None:
            require_empty_folder(world, target)
        else:
            require_empty_store(parse_place(target))
        if not dry_run and settings is None:
            restore_folder(found, world, target, progress)
        elif not dry_run and settings is not None:
            restore_store(found, world, parse_place(target), settings, progress)
        return Restored(
            number=number, time=_time(found.time_ns), source=name,
            destination=parse_place(target).shown if is_store(target) else target,
            files=len(found.files), bytes=sum(file.size for file in found.files),
        )  # fmt: skip


@contextmanager
def _opened_source(world: World, place: str) -> Iterator[tuple[Source, str]]:
    """Give the folder at one moment, and its name in backups."""
    if is_address(place):
        raise InvalidRequest(f"{place} is a server: back up its data folder, on its machine, or the store it lives in")
    stored = place if is_store(place) else store_of(world, absolute(place))
    if stored is not None:
        where = parse_place(stored)
        with stored_source(world, where, store_settings(None)) as found:
            yield found, where.shown
        return
    folder = absolute(place)
    name = f"{world.ids.process_note()['host']}:{folder}"
    if answers_at(socket_of(folder)):
        owned = OwnedSource(world, folder)
        try:
            yield owned, name
        finally:
            owned.close()
        return
    try:
        with locked_source(world, folder) as found:
            yield found, name
    except Busy as busy:
        busy.add_note("its owner does not share it: it was opened with share=False, or by a command")
        raise


@contextmanager
def _restorable(world: World, place: str, at: Moment, key_file: Place | None) -> Iterator[tuple[Source, int, str]]:
    number, until_ns = _moment(at)
    if is_store(place) and is_chain(parse_place(place)):
        where = parse_place(place)
        if key_file is not None:
            raise InvalidRequest(f"{where.shown} is a data folder, and not encrypted: leave out the key")
        with chain_source(world, where, number, until_ns) as (found, reached):
            yield found, reached, where.shown
        return
    archive = Archive(place, world, _key(world, key_file))
    try:
        listed = archive.chosen(number, until_ns)
        yield ArchivedSource(archive, listed), listed.number, listed.source
    finally:
        archive.close()


def _place(place: Place, what: str) -> str:
    text = folder_path(place, what)
    if is_address(text):
        raise InvalidRequest(
            f"{what} cannot be a server: give a folder, or a place in a store such as s3://bucket/name"
        )
    return text if is_store(text) else absolute(text)


def _key(world: World, key_file: Place | None) -> BackupKey | None:
    """Return the key of encrypted backups: from the file that is given, or else from that of the settings."""
    path = store_settings(None).backup_key_file if key_file is None else folder_path(key_file, "the key file")
    if path is None:
        return None
    try:
        text = read_file(world.disk, absolute(path))
    except OSError as error:
        raise InvalidRequest(
            f"the key file {path} cannot be read: {error.strerror or error}. Check its permissions"
        ) from error
    if text is None:
        raise InvalidRequest(f"there is no key file {path}; `openssl rand -hex 32` creates one")
    return BackupKey.parse(text, path, world)


def _moment(at: Moment) -> tuple[int | None, int | None]:
    """Return a number, or a time in nanoseconds."""
    if at is None or (type(at) is int and at >= 0):
        return at, None
    if isinstance(at, datetime):
        return None, (at.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    raise InvalidRequest(f"at={at!r} cannot be used: give a number, or a datetime")


def _time(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns // 1000 / 1_000_000, UTC)


def _described(listed: BackupList, *, removed: int = 0, problem: str = "") -> Backup:
    return Backup(
        number=listed.number, time=listed.time, source=listed.source, files=len(listed.files),
        bytes=listed.total_bytes, new_bytes=listed.new_bytes, removed=removed, problem=problem,
        encrypted=listed.is_encrypted,
    )  # fmt: skip


def _listed(archive: Archive, number: int) -> Backup:
    try:
        return _described(archive.read(number))
    except (CorruptData, WrongKey) as error:
        return Backup(
            number=number, time=_time(0), source="", files=0, bytes=0, new_bytes=0, problem=str(error),
            encrypted=isinstance(error, WrongKey),
        )  # fmt: skip
