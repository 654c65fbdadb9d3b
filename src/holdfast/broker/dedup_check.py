"""Are the dedup ids on disk what was written? Looks at every byte, and changes nothing."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from holdfast.broker.dedup_runs import damaged, newest_noted, note_newest, open_run, run_name
from holdfast.broker.layout import names_in
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.storage.files import join

_RUN: Final = re.compile(r"(\d{20})\.ids")


def damaged_dedup(world: World, folder: str) -> list[str]:
    """What is wrong with the dedup ids in a folder, in words."""
    note = damaged_note(world, folder)
    return [*([] if note is None else [note]), *damaged_runs(world, folder)]


def damaged_note(world: World, folder: str) -> str | None:
    """What is wrong with the note that says which run is the last. It costs no id, as long as there is any run."""
    try:
        newest_noted(world.disk, folder)
    except CorruptData as error:
        return str(error)
    return None


def renew_note(world: World, folder: str) -> None:
    """Note which run is the last, of those that are there."""
    note_newest(world.disk, folder, _numbers(world, folder)[-1])


def damaged_runs(world: World, folder: str) -> list[str]:
    """What is wrong with the runs: the last one and those that it names must be whole. Where one was, one must be."""
    numbers, noted = _numbers(world, folder), 1
    with suppress(CorruptData):
        noted = newest_noted(world.disk, folder)
    if noted > (numbers[-1] if numbers else 0):
        return [str(damaged(join(folder, run_name(noted)), "the file is missing"))]
    if not numbers:
        return []
    wrong: list[str] = []
    try:
        last = open_run(world.disk, folder, numbers[-1])
        last.check()
    except (CorruptData, OSError) as error:
        return [str(error)]
    for number in last.facts.kept:
        try:
            open_run(world.disk, folder, number).check()
        except (CorruptData, OSError) as error:
            wrong.append(str(error))
    return wrong


def _numbers(world: World, folder: str) -> list[int]:
    return sorted(int(match[1]) for name in names_in(world, folder) if (match := _RUN.fullmatch(name)))
