"""The sink of a folder in a store: tasks put what they stage beside the chain, and the owner of the folder commits it.

    staged/WRITE/BATCH/NAME/00000003     the 4th piece of a staged file

The driver becomes the owner for as long as a commit takes. If a process of this machine owns the folder and shares it,
that one commits. In both cases the files are copied into the owner's staging area first, which is part of the chain: a
commit that is interrupted is finished by the next owner, on whatever machine that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Final

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.stored import cache_folder, snapshot
from holdfast.client.calling import Caller
from holdfast.client.network import ThreadNetwork
from holdfast.client.opening import Address
from holdfast.client.shared_folder import socket_of
from holdfast.client.spark_commits import is_shared
from holdfast.env import World, real_world
from holdfast.env.chain.engines import (
    Store,
    StorePlace,
    StoreRefused,
    StoreUnreachable,
    open_store,
    parse_place,
    store_advice,
)
from holdfast.env.disk import BytesLike, write_fully
from holdfast.errors import Busy, Conflict, Unavailable
from holdfast.settings import BrokerSettings
from holdfast.spark.commits import STAGED_NAME, CommitRequest, StagedFile, Staging, commit, staged_since_ms
from holdfast.spark.incoming import Target, Targets
from holdfast.spark.places import ServerAccess, ServerPlace
from holdfast.storage.files import join, translated

_PIECE_BYTES: Final = 8 << 20
_LOOK_AGAIN_S: Final = 0.1
_LEFT_MS: Final = 7 * 24 * 3_600_000
_SNAPSHOTS: Final = "writers"


class StoredTopics(msgspec.Struct, frozen=True):
    """A folder in a store to write to, and the topics that it has, as the driver found them."""

    url: str
    topics: dict[str, Target]

    def __repr__(self) -> str:
        return f"StoredTopics({parse_place(self.url).shown!r})"


def stored_topics(url: str, settings: BrokerSettings, topic: str | None) -> StoredTopics:
    """What the tasks need to know of a folder in a store: one topic, or all of them."""
    folder = snapshot(url, settings, real_world(), stream=_SNAPSHOTS).folder
    there = Targets(real_world(), folder, settings, None)
    names = [name for name in there.names() if topic in (None, name)]
    return StoredTopics(url, {name: there.find(name) for name in names})


class StoredTargets(Targets):
    """The topics of a folder in a store, as the driver found them."""

    def __init__(self, stored: StoredTopics, settings: BrokerSettings, new_partitions: int | None) -> None:
        super().__init__(real_world(), parse_place(stored.url).shown, settings, new_partitions)
        self._known = dict(stored.topics)

    def names(self) -> list[str]:
        return sorted(self._known)


class ObjectStage:
    """Staged files as objects in a store, for `FrameFiles`. A path is `WRITE/BATCH/NAME`."""

    def __init__(self, url: str) -> None:
        self._place = parse_place(url)
        self._store, self._root = open_store(self._place)

    def make_folder(self, path: str) -> None:
        """Nothing: objects need none."""

    def sync_folder(self, path: str) -> None:
        """Nothing: an object is there once it is created."""

    def open(self, path: str, *, write: bool, create: bool) -> _StagedObject:
        return _StagedObject(self._place, self._store, f"{self._root}staged/{path}")

    def remove(self, path: str) -> None:
        with suppress(Unavailable), _answering(self._place):  # they expire anyway
            for key in list(self._store.keys(f"{self._root}staged/{path}/")):
                self._store.remove(key)

    def pieces(self, path: str) -> Iterator[bytes]:
        """The content of a staged file. It ends early if pieces are missing."""
        for number in range(1 << 30):
            with _answering(self._place):
                content = self._store.read(_piece(f"{self._root}staged/{path}", number))
            if content is None:
                return
            yield content

    def tidy(self, write_id: str, batch: int, now_ms: int) -> None:
        """Remove what this write staged up to this batch, and what others left more than a week ago."""
        start = f"{self._root}staged/"
        with suppress(Unavailable), _answering(self._place):
            for key in list(self._store.keys(start)):
                write, number, name, *_ = [*key.removeprefix(start).split("/"), "", "", ""]
                if STAGED_NAME.fullmatch(name) is None or not number.isdigit():
                    continue
                if (write == write_id and int(number) <= batch) or staged_since_ms(name) < now_ms - _LEFT_MS:
                    self._store.remove(key)

    def close(self) -> None:
        self._store.close()


class _StagedObject:
    def __init__(self, place: StorePlace, store: Store, key: str) -> None:
        self._place, self._store, self._key = place, store, key
        self._pending = bytearray()
        self._number = 0

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        size = 0
        for part in parts:
            self._pending += part
            size += len(part)
        while len(self._pending) >= _PIECE_BYTES:
            self._put(_PIECE_BYTES)
        return size

    def sync(self) -> None:
        if self._pending:
            self._put(len(self._pending))

    def close(self) -> None:
        """Nothing: an object is open only while it is created."""

    def _put(self, size: int) -> None:
        with _answering(self._place):
            self._store.create(_piece(self._key, self._number), bytes(memoryview(self._pending)[:size]))
        del self._pending[:size]
        self._number += 1


def _piece(key: str, number: int) -> str:
    return f"{key}/{number:08}"


@contextmanager
def _answering(place: StorePlace) -> Iterator[None]:
    try:
        yield
    except (StoreRefused, StoreUnreachable) as error:
        raise Unavailable(
            f"rows cannot be staged in {place.shown}: {error}{store_advice(place)}. Nothing was written; write again"
        ) from error


def commit_stored(url: str, settings: BrokerSettings, write: CommitRequest, wait_ms: int, world: World) -> None:
    """Have the owner bring the rows of a batch into the log: this process, or the one that owns the folder here."""
    copy = cache_folder(parse_place(url), settings)
    with closing(ObjectStage(url)) as staged:
        while True:
            with _owning(url, copy, settings, wait_ms, world) as engine:
                if engine is not None:
                    _bring(engine, staged, write)
                    commit(engine, write)
                    break
            try:
                _commit_there(copy, staged, write, world)
                break
            except Unavailable:
                if not write.kept or is_shared(copy):
                    raise  # otherwise the owner has gone: perhaps the folder is free now
        staged.tidy(write.write_id, write.batch, world.clock.now_ns() // 1_000_000)


@contextmanager
def _owning(url: str, copy: str, settings: BrokerSettings, wait_ms: int, world: World) -> Iterator[BrokerEngine | None]:
    """Own the folder; None if a process of this machine owns and shares it. Raises Busy after `wait_ms`."""
    deadline_ns = world.clock.monotonic_ns() + wait_ms * 1_000_000
    engine: BrokerEngine | None = None
    while engine is None:
        left_ms = max(deadline_ns - world.clock.monotonic_ns(), 0) // 1_000_000
        patient = msgspec.structs.replace(settings, store_wait_ms=left_ms)
        try:
            engine = BrokerEngine.open(url, create=False, settings=patient, world=world)
        except Busy as error:
            if is_shared(copy):
                yield None
                return
            if world.clock.monotonic_ns() >= deadline_ns:
                owner = str(error).partition("; ")[0]
                raise Busy(
                    f"{owner}: Spark writes to {parse_place(url).shown} while nobody owns it, or through its owner. "
                    'Give the option "path" the address of its server (`holdfast serve`), or write again when the '
                    'owner has ended (option "ownerTimeout"); nothing is lost or duplicated'
                ) from None
            world.clock.wait(threading.Event(), _LOOK_AGAIN_S)
    with closing(engine):
        yield engine


def _bring(engine: BrokerEngine, staged: ObjectStage, write: CommitRequest) -> None:
    """Copy the staged files into the owner's staging area, unless the batch is committed already."""
    staging, disk = Staging(engine.world, engine.folder), engine.world.disk
    if staging.done(write.write_id).batch >= write.batch or staging.manifest(write.write_id, write.batch) is not None:
        return
    folder = staging.batch_folder(write.write_id, write.batch)
    with translated(folder):
        disk.make_folder(folder)
        for file in write.files:
            with closing(disk.open(join(folder, file.name), write=True, create=True)) as copied:
                _copy(staged, write, file, lambda at, piece, to=copied: write_fully(to, at, [piece]))  # type: ignore[misc]
                copied.sync()
        disk.sync_folder(folder)


def _commit_there(copy: str, staged: ObjectStage, write: CommitRequest, world: World) -> None:
    """The same by the owner, which is another process of this machine."""
    with ExitStack() as closes:
        caller = Caller(world, ThreadNetwork(world.clock), Address(text=copy, socket=socket_of(copy)))
        closes.callback(caller.close)
        owner = ServerPlace(ServerAccess(copy), caller)
        with suppress(Conflict):  # an earlier call has committed them
            for file in write.files:
                path = f"{write.write_id}/{write.batch}/{file.name}"
                size = _copy(staged, write, file, lambda at, piece, to=path: owner.upload(to, at, piece))  # type: ignore[misc]
                owner.upload(path, size, b"", sync=True)
        owner.commit(write)


def _copy(staged: ObjectStage, write: CommitRequest, file: StagedFile, put: Callable[[int, bytes], Any]) -> int:
    """Copy a staged file piece by piece, and return its size. The commit checks it."""
    at = 0
    for piece in staged.pieces(f"{write.write_id}/{write.batch}/{file.name}"):
        put(at, piece)
        at += len(piece)
    return at
