"""The manifest: which runs there are, up to where the intake was spilled, and which ids are gone.

at   size  field
0    8     magic    "HFDELAY" and the version, 1
8    n     body     MessagePack of `Manifest`
..   4     check    CRC32C of all bytes before it
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.checksum import crc32c
from holdfast.env.disk import Disk
from holdfast.errors import ChecksumMismatch, CorruptData, UnknownFormat
from holdfast.storage.files import durable_replace, join, read_file

NAME: Final = "manifest"
_MAGIC_PREFIX: Final = b"HFDELAY"
_MAGIC: Final = _MAGIC_PREFIX + b"\x01"
_CHECK: Final = Struct("<I")


class RunEntry(msgspec.Struct, frozen=True):
    """A run, as the manifest knows it."""

    name: str
    run_id: int
    messages: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the store at one moment; `gone` is a serialized bitmap."""

    accounted: int = 0
    spilled_below: int = 0
    next_number: int = 0
    runs: list[RunEntry] = []
    gone: bytes = b""

    def gone_ids(self) -> BitMap64:
        return BitMap64.deserialize(self.gone) if self.gone else BitMap64()


def save_manifest(disk: Disk, folder: str, manifest: Manifest) -> None:
    content = _MAGIC + msgspec.msgpack.encode(manifest)
    durable_replace(disk, folder, NAME, content + _CHECK.pack(crc32c(content)))


def load_manifest(disk: Disk, folder: str) -> Manifest | None:
    """None where there is none; CorruptData where its bytes are not what was written."""
    content = read_file(disk, join(folder, NAME))
    if content is None:
        return None
    whole = len(content) >= len(_MAGIC) + _CHECK.size
    if not whole or _CHECK.unpack(content[-_CHECK.size :])[0] != crc32c(content[: -_CHECK.size]):
        raise ChecksumMismatch(f"{join(folder, NAME)} does not match its checksum")
    if content[: len(_MAGIC)] != _MAGIC:
        if content.startswith(_MAGIC_PREFIX):
            raise UnknownFormat(f"{join(folder, NAME)} was written by a newer release; upgrade to read it")
        raise CorruptData(f"{join(folder, NAME)} is no manifest of delayed messages")
    try:
        return msgspec.msgpack.decode(content[len(_MAGIC) : -_CHECK.size], type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{join(folder, NAME)} cannot be read: {error}") from error
