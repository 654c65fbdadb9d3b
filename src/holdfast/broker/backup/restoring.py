"""Restoring a folder: from a backup, or from a chain as of any number that is still there; and trying whether it works.

What is restored is not a folder until all of it is there: files are written into the folder `restoring` inside it, and
moved up at the end, `topics` last, by which a data folder is recognized. So what was interrupted is never opened, and
the next attempt starts over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from typing import Final

import msgspec

from holdfast.broker.backup.archive import PIECE_BYTES, Archive, BackupList
from holdfast.broker.backup.taking import Progress, Source, SourceFile, captured
from holdfast.broker.check import FolderReport, check_folder
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import OWNER_SOCKET, RESERVE, TOPICS
from holdfast.broker.folder.stored import follow_into, own_stored
from holdfast.env import World, real_world
from holdfast.env.chain.engines import StorePlace, StoreRefused, StoreUnreachable, open_store
from holdfast.env.disk import write_fully
from holdfast.errors import DiskFull, HoldfastError, InvalidRequest, Unavailable
from holdfast.model import count_of
from holdfast.settings import BrokerSettings
from holdfast.storage.files import FULL_DISK, LOCK, join, remove_tree, take_lock, translated

_RESTORING: Final = "restoring"
_OUR_OWN: Final = frozenset({LOCK, OWNER_SOCKET, RESERVE})  # what opening an empty folder leaves


class ArchivedSource:
    """A backup as a source of files."""

    def __init__(self, archive: Archive, listed: BackupList) -> None:
        self.time_ns = listed.time_ns
        self.folders = listed.folders
        self.files = [SourceFile(file.path, file.size) for file in listed.files]
        self._listed = listed.files
        self._is_encrypted = listed.is_encrypted
        self._archive = archive

    def read(self, index: int, position: int, length: int) -> bytes:
        file = self._listed[index]
        if not file.pieces:
            return file.content[position : position + length]
        return self._archive.get(file.pieces[position // PIECE_BYTES], length, is_encrypted=self._is_encrypted)


@contextmanager
def chain_source(
    world: World, place: StorePlace, number: int | None, until_ns: int | None
) -> Iterator[tuple[Source, int]]:
    """Give a folder in a store as of a number or a time, without its owner; and the number."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        copy = f"{scratch}/{place.name}"
        store, root = open_store(place)
        with closing(store):
            reached = follow_into(place, store, root, world, copy, number=number, until_ns=until_ns)
        with captured(world, copy) as found:
            found.time_ns = reached.time_ns
            yield found, reached.number


def restore_folder(source: Source, world: World, folder: str, progress: Progress | None = None) -> None:
    """Write the source into a folder, which must be empty, or what an interrupted attempt has left."""
    total = sum(file.size for file in source.files)
    with translated(folder):
        _require_empty(world, folder)
        world.disk.make_folder(folder)
        lock = take_lock(world, folder)
        try:
            _write(source, world, folder, total, progress)
        finally:
            lock.release()


def restore_store(
    source: Source, world: World, place: StorePlace, settings: BrokerSettings, progress: Progress | None = None
) -> None:
    """Write the source into a place in a store, which must be empty, or what an interrupted attempt has left."""
    total = sum(file.size for file in source.files)
    require_empty_store(place)
    store, root = open_store(place)
    with closing(store):
        store.create(f"{root}{_RESTORING}", b"")
        folder, stored, owner, give_up = own_stored(place.url, settings, world)
        try:
            owner.keep()
            with translated(place.shown):
                _write(source, stored, folder, total, progress)
        finally:
            give_up()
        store.remove(f"{root}{_RESTORING}")


def require_empty_store(place: StorePlace) -> None:
    """Raise InvalidRequest if anything is in the place but what an interrupted attempt has left."""
    store, root = open_store(place)
    with closing(store):
        try:
            parts = ("backup/", "chain/", "checkpoint/")
            taken = next((part for part in parts if next(store.keys(f"{root}{part}"), None) is not None), None)
            begun = store.read(f"{root}{_RESTORING}") is not None
        except StoreRefused as error:
            raise InvalidRequest(f"{place.shown} cannot be used: {error}. Check its URL and credentials") from error
        except StoreUnreachable as error:
            raise Unavailable(f"{place.shown} cannot be reached: {error}. Try again later") from error
    if taken == "backup/" or (taken is not None and not begun):
        raise InvalidRequest(f"{place.shown} is not empty ({taken}): nothing was restored. Choose another place")


def require_empty_folder(world: World, folder: str) -> None:
    """Raise InvalidRequest unless the folder is new, empty, or left by an attempt that was interrupted."""
    with translated(folder):
        _require_empty(world, folder)


def _require_empty(world: World, folder: str) -> None:
    if not world.disk.exists(folder):
        return
    names = [name for name in world.disk.names(folder) if name not in _OUR_OWN]
    if names and (TOPICS in names or _RESTORING not in names):
        raise InvalidRequest(
            f"{folder} is not empty ({', '.join(names[:3])}): nothing was restored. Choose another one"
        )


def _write(source: Source, world: World, folder: str, total: int, progress: Progress | None) -> None:
    disk = world.disk
    for name in disk.names(folder):
        if name not in _OUR_OWN:
            remove_tree(disk, join(folder, name))
    free = disk.free_bytes(folder)
    if free < total:
        raise DiskFull(
            f"{folder} has room for {free:,} bytes, and {total:,} are needed: nothing was restored. Free some "
            "space, or choose another folder"
        )
    inside = join(folder, _RESTORING)
    try:
        disk.make_folder(inside)
        for each in source.folders:
            disk.make_folder(join(inside, each))
        done = 0
        for i, file in enumerate(source.files):
            _write_file(source, world, i, join(inside, file.path))
            done += file.size
            if progress is not None:
                progress(done, total)
        for each in [*source.folders, ""]:
            disk.sync_folder(join(inside, each).rstrip("/"))
        for name in sorted(disk.names(inside), key=lambda name: name == TOPICS):
            disk.rename(join(inside, name), join(folder, name))
        disk.remove_folder(inside)
        disk.sync_folder(folder)
    except BaseException as error:
        with suppress(OSError):  # it would take the last room
            remove_tree(disk, inside)
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise DiskFull(
                f"the disk of {folder} is full: nothing was restored. Free some space, or choose another"
            ) from error
        raise


def _write_file(source: Source, world: World, i: int, path: str) -> None:
    file = source.files[i]
    with closing(world.disk.open(path, write=True, create=True)) as opened:
        for position in range(0, file.size, PIECE_BYTES):
            content = source.read(i, position, min(PIECE_BYTES, file.size - position))
            if content:
                write_fully(opened, position, [content])
        opened.truncate(file.size)
        opened.sync()


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What a drill has found: how many messages there are, and all that is wrong."""

    number: int
    time: datetime
    source: str
    files: int
    bytes: int
    messages: int
    damage: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


def verify_backup(archive: Archive, listed: BackupList, progress: Progress | None = None) -> Verified:
    """Restore a backup into a temporary folder, check every message there, and open every topic."""
    messages, damage = 0, list[str]()
    world = real_world()
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        folder = f"{scratch}/restored"
        try:
            restore_folder(ArchivedSource(archive, listed), world, folder, progress)
            damage = _damage_in(check_folder(folder, world), folder)
            _open_all(world, folder)
            # Once more: what was not published yet when the backup was taken is part of the log only now.
            report = check_folder(folder, world)
            messages = sum(part.log.counts.messages for part in report.parts if part.part.kind == "messages")
            damage += [each for each in _damage_in(report, folder) if each not in damage]
        except HoldfastError as error:
            damage.append(str(error).replace(f"{folder}/", ""))
    return Verified(
        number=listed.number, time=listed.time, source=listed.source, files=len(listed.files),
        bytes=listed.total_bytes, messages=messages, damage=tuple(damage),
    )  # fmt: skip


def _damage_in(report: FolderReport, folder: str) -> list[str]:
    """Return all that a check found wrong, in words."""
    found = [f"missing: {each}" for each in report.missing] + list(report.wrong)
    for part in report.parts:
        found += [f"{part.part.name}: {each}" for each in part.wrong]
        found += [
            f"{part.part.name}, {finding.file}: {finding.what} ({finding.cost})"
            for finding in part.log.findings
            if finding.severity == "damage"
        ]
        if part.log.hidden_findings:
            found.append(f"{part.part.name}: {count_of(part.log.hidden_findings, 'more finding')}")
    return [each.replace(f"{folder}/", "") for each in found]


def _open_all(world: World, folder: str) -> None:
    engine = BrokerEngine.open(folder, create=False, settings=BrokerSettings(trust_folder=True), world=world)
    try:
        for topic in engine.topics():
            engine.topic(topic)
    finally:
        engine.close()
