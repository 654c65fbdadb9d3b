"""Bulk writes whose commit was cut short, as their manifests tell of them: see `holdfast.spark.commits`.

Whoever goes on with one looks in the log for what it had written. So that stays, until the commit is finished or
nobody has come for a week.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec

from holdfast.broker.layout import STAGING, names_in
from holdfast.env import World
from holdfast.storage.files import join, read_file

HELD_MS: Final = 7 * 24 * 3_600_000
MANIFEST: Final = "manifest.json"
DONE: Final = "done.json"


class _Lane(msgspec.Struct, frozen=True):
    topic: str
    partition: int


class _Start(msgspec.Struct, frozen=True):
    lane: _Lane
    topic_id: int
    log_end: int


class _Manifest(msgspec.Struct, frozen=True):
    """The part of it that counts here."""

    lanes: tuple[_Start, ...]
    noted_at_ms: int = 0


class _Done(msgspec.Struct, frozen=True):
    batch: int = -1


Found = TypeVar("Found", _Manifest, _Done)

_decode_manifest = msgspec.json.Decoder(_Manifest).decode
_decode_done = msgspec.json.Decoder(_Done).decode


def staged_floor(world: World, root: str, topic: str, topic_id: int, partition: int) -> int | None:
    """From which offset of a partition on a commit that was cut short may have written; None where there is none."""
    wanted = (topic, topic_id, partition)
    try:
        found = [
            start.log_end
            for manifest in _unfinished(world, join(root, STAGING))
            for start in manifest.lanes
            if (start.lane.topic, start.topic_id, start.lane.partition) == wanted
        ]
    except OSError:
        return 0  # there may be one
    return min(found, default=None)


def _unfinished(world: World, root: str) -> Iterator[_Manifest]:
    since_ms = world.clock.now_ns() // 1_000_000 - HELD_MS
    for write in staged_names(world, root):
        folder = join(root, write)
        batches = [int(name) for name in staged_names(world, folder) if name.isdigit()]
        done = _read(world, join(folder, DONE), _decode_done) if batches else None
        for batch in batches:
            if done is None or batch > done.batch:
                manifest = _read(world, f"{folder}/{batch}/{MANIFEST}", _decode_manifest)
                if manifest is not None and manifest.noted_at_ms > since_ms:
                    yield manifest


def staged_names(world: World, folder: str) -> list[str]:
    """What a folder of the staging area holds; others may take it away at any time, or put a file there."""
    try:
        return names_in(world, folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(world: World, path: str, decode: Callable[[bytes], Found]) -> Found | None:
    try:
        content = read_file(world.disk, path)
        return None if content is None else decode(content)
    except (FileNotFoundError, msgspec.MsgspecError):  # finished just now, or never to be finished by anybody
        return None
