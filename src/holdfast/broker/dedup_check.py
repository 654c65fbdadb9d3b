"""Are the dedup ids on disk what was written? Looks at every byte, and changes nothing."""

from __future__ import annotations

import re
from typing import Final

from holdfast.broker.dedup_runs import damaged, newest_noted, open_run, run_name
from holdfast.broker.layout import names_in
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.storage.files import join

_RUN: Final = re.compile(r"(\d{20})\.ids")


def damaged_dedup(world: World, folder: str) -> list[str]:
    """What is wrong with the runs in a folder, in words: the last one and those that it names must be whole."""
    numbers = sorted(int(match[1]) for name in names_in(world, folder) if (match := _RUN.fullmatch(name)))
    wrong: list[str] = []
    try:
        noted = newest_noted(world.disk, folder)
    except CorruptData as error:
        noted, wrong = 0, [str(error)]
    if noted > (numbers[-1] if numbers else 0):
        return [str(damaged(join(folder, run_name(noted)), "the file is missing"))]
    if not numbers:
        return wrong
    try:
        last = open_run(world.disk, folder, numbers[-1])
        last.check()
    except (CorruptData, OSError) as error:
        return [*wrong, str(error)]
    for number in last.facts.kept:
        try:
            open_run(world.disk, folder, number).check()
        except (CorruptData, OSError) as error:
            wrong.append(str(error))
    return wrong
