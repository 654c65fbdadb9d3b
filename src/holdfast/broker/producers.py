"""Producers that have a name: an id for each, and an epoch that rises whenever one begins anew.

The newest one of a name is the only one that may write: it fences all before it. The file `producers` in the
data folder keeps them:

    at   size  field
    0    8     magic    "HFNAMES" and the version, 1
    8    n     body     MessagePack: name -> [id, epoch, the epoch from which its sequences count]
    ..   4     check    CRC32C of all bytes before it
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from struct import Struct
from typing import Final

import msgspec

from holdfast.broker.folder.layout import check_name
from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.errors import ChecksumMismatch, CorruptData, Fenced, InvalidRequest, UnknownFormat
from holdfast.storage.files import durable_replace, join, read_file
from holdfast.storage.opening import open_error

NAME: Final = "producers"
MOST_NAMES: Final = 10_000
_MAGIC: Final = b"HFNAMES\x01"
_CHECK: Final = Struct("<I")


class ProducerId(msgspec.Struct, frozen=True, array_like=True):
    """Who a producer is. `since` is the epoch in which its sequences began at 0: its own, or that of one it resumes."""

    id: int
    epoch: int
    since: int = 0


class Producers:
    """The named producers of a data folder. Safe to use from any thread."""

    def __init__(self, world: World, root: str, names: dict[str, ProducerId]) -> None:
        self._world = world
        self._root = root
        self._lock = threading.Lock()
        self.on_first: Callable[[], None] = lambda: None  # told when the file was made
        self._names = names
        self._epochs = {producer.id: producer.epoch for producer in names.values()}
        self._by_id = {producer.id: name for name, producer in names.items()}

    @staticmethod
    def open(world: World, root: str) -> Producers:
        """Those that the folder knows; none where there is no file yet."""
        path = join(root, NAME)
        try:
            content = read_file(world.disk, path)
        except OSError as error:
            raise open_error(path, error) from error
        return Producers(world, root, {} if content is None else _decode(path, content))

    def init(self, name: str | None = None, *, resume: bool = False) -> ProducerId:
        """Be the newest producer of the name, durably, before anybody can know; without a name: a new one.

        One that resumes counts its messages from where the last one that did not had begun.
        """
        if name is None:
            return ProducerId(self._random_id(), 0)
        check_name(name, "producer")
        with self._lock:
            last = self._names.get(name)
            if last is None:
                producer = ProducerId(self._random_id(), 0)
                if len(self._names) >= MOST_NAMES:
                    raise InvalidRequest(
                        f"{self._root} knows {MOST_NAMES} named producers already; use fewer names, or leave the name "
                        "out where a producer need not go on after a restart"
                    )
            else:
                producer = ProducerId(last.id, last.epoch + 1, last.since if resume else last.epoch + 1)
            self._keep({**self._names, name: producer})
            return producer

    def forget(self, name: str) -> bool:
        """Let a name go: one that begins with it later is somebody else. False where it is not known."""
        with self._lock:
            if name not in self._names:
                return False
            self._keep({other: producer for other, producer in self._names.items() if other != name})
            return True

    def names(self) -> dict[str, ProducerId]:
        return dict(self._names)

    def name_of(self, producer_id: int) -> str | None:
        """The name of a producer, if it has one."""
        return self._by_id.get(producer_id)

    def check(self, producer_id: int, epoch: int) -> None:
        """Raise Fenced where a newer producer of the same name has begun."""
        newest = self._epochs.get(producer_id, epoch)
        if newest != epoch:
            raise Fenced(
                f"producer {producer_id} with epoch {epoch} is fenced: epoch {newest} of the same name has begun. "
                "What was not yet stored was dropped; only the newest producer of a name may go on"
            )

    def _keep(self, names: dict[str, ProducerId]) -> None:
        content = _MAGIC + msgspec.msgpack.encode(names)
        try:
            durable_replace(self._world.disk, self._root, NAME, content + _CHECK.pack(crc32c(content)))
        except OSError as error:
            raise open_error(join(self._root, NAME), error) from error
        if not self._names:
            self.on_first()
        self._names = names
        self._epochs = {producer.id: producer.epoch for producer in names.values()}
        self._by_id = {producer.id: name for name, producer in names.items()}

    def _random_id(self) -> int:
        high, low = self._world.ids.random_u32(), self._world.ids.random_u32()
        return (high << 32 | low) & (2**63 - 1)


def _decode(path: str, content: bytes) -> dict[str, ProducerId]:
    if len(content) < len(_MAGIC) + _CHECK.size or _CHECK.unpack(content[-_CHECK.size :])[0] != crc32c(
        content[: -_CHECK.size]
    ):
        raise ChecksumMismatch(
            f"{path} does not match its checksum: the named producers cannot be known. Move it away to begin without; "
            "then a producer that resumes may store again what is there already"
        )
    if content[: len(_MAGIC)] != _MAGIC:
        raise UnknownFormat(f"{path} is no list of named producers that this release can read; upgrade to read it")
    try:
        return msgspec.msgpack.decode(content[len(_MAGIC) : -_CHECK.size], type=dict[str, ProducerId])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path} cannot be read: {error}") from error
