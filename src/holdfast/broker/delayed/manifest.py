"""The manifest: which runs there are, up to where the intake was spilled, and which ids are gone.

at   size  field
0    8     magic    "HFDELAY" and the version, 1
8    n     body     MessagePack of `Manifest`
..   4     check    CRC32C of all bytes before it
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from struct import Struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from pyroaring import BitMap64

from holdfast.broker.delayed.run import Run, open_run
from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.env.disk import Disk
from holdfast.errors import ChecksumMismatch, CorruptData, UnknownFormat
from holdfast.settings import check_fields
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


# Opening the store: what the manifest names is loaded, what it does not name is removed.
#
# Where the manifest itself is spoiled, nothing is removed: every run is taken in, a message that is both in a run
# and in the intake counts once, and the caller has to look for releases in the whole of the partition's log.


logger = logging.getLogger(__name__)

_RUN: Final = re.compile(r"\d{20}-(\d{10})\.run")


@dataclass
class Loaded:
    """What was found in the folder."""

    manifest: Manifest
    runs: list[Run] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


def load(world: World, folder: str, *, intake_is_new: bool) -> Loaded:
    """Manifest and runs. The caller owns the folder."""
    disk = world.disk
    # The last owner may have died before the name of its last manifest was durable: what is removed because of
    # that manifest must not be missed after a power cut that brings the one before it back.
    disk.sync_folder(folder)
    names = disk.names(folder)
    run_names = [name for name in names if _RUN.fullmatch(name)]
    loaded = Loaded(Manifest())
    try:
        manifest = load_manifest(disk, folder)
        spoiled = "" if manifest or (intake_is_new and not run_names) else f"{join(folder, NAME)} is missing"
    except UnknownFormat:
        raise
    except CorruptData as error:
        manifest, spoiled = None, str(error)
        _set_aside(disk, folder, NAME)
    if spoiled:
        _note(loaded, folder, f"{spoiled}; made anew from {len(run_names)} files. Cancellations may be lost")
        number = max((int(match[1]) for name in run_names if (match := _RUN.fullmatch(name))), default=-1) + 1
        manifest = Manifest(next_number=number, runs=[RunEntry(name, 0, 0) for name in run_names])
    else:
        named = {entry.name for entry in manifest.runs} if manifest else set()
        for name in names:
            if name.endswith(".tmp") or (_RUN.fullmatch(name) and name not in named):
                disk.remove(join(folder, name))
    if manifest is None:
        manifest = Manifest()
        save_manifest(disk, folder, manifest)
    loaded.manifest = manifest
    for entry in manifest.runs:
        _load_run(disk, folder, entry, loaded)
    return loaded


def _load_run(disk: Disk, folder: str, entry: RunEntry, loaded: Loaded) -> None:
    try:
        run = open_run(disk, folder, entry.name, entry.run_id or None)
    except UnknownFormat:
        raise
    except FileNotFoundError:
        _note(loaded, folder, f"{join(folder, entry.name)} is missing: {entry.messages} delayed messages are lost")
        return
    except CorruptData as error:
        _note(loaded, folder, f"{error}: {entry.messages} delayed messages are lost; the file is kept")
        _set_aside(disk, folder, entry.name)
        return
    if run.messages < entry.messages:
        lost = entry.messages - run.messages
        _note(loaded, folder, f"{run.path} is damaged: {lost} of its {entry.messages} delayed messages are lost")
        run.keep_file = True
    loaded.runs.append(run)


def _set_aside(disk: Disk, folder: str, name: str) -> None:
    """Out of the way and not thrown away: a person may want to look at it."""
    disk.rename(join(folder, name), join(folder, name + ".damaged"))
    disk.sync_folder(folder)


def _note(loaded: Loaded, folder: str, what: str) -> None:
    loaded.damage.append(what)
    logger.error("damage among the delayed messages", extra={"folder": folder, "what": what})


# What may be set of the store of delayed messages.


class DelaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much waits in memory, and how often the state is saved."""

    spill_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 50_000
    save_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 5_000

    def __post_init__(self) -> None:
        check_fields(self)
