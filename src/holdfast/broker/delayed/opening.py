"""Opening the store: what the manifest names is loaded, what it does not name is removed.

Where the manifest itself is spoiled, nothing is removed: every run is taken in, a message that is both in a run
and in the intake counts once, and the caller has to look for releases in the whole of the partition's log.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Final

from holdfast.broker.delayed.manifest import NAME, Manifest, RunEntry, load_manifest, save_manifest
from holdfast.broker.delayed.run import Run, open_run
from holdfast.env import World
from holdfast.env.disk import Disk
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.storage.files import join

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
