"""Many offsets in few numbers: (start, stop, start, stop, ...), each run without its stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Runs: TypeAlias = tuple[int, ...]


def run(offset: int) -> Runs:
    """The run of a single offset."""
    return (offset, offset + 1)


def runs_of(offsets: Iterable[int]) -> Runs:
    """The runs of offsets in any order, each at most once."""
    if isinstance(offsets, range) and offsets.step == 1:
        return (offsets.start, offsets.stop) if offsets else ()
    in_order = sorted(offsets)
    if in_order and in_order[-1] - in_order[0] == len(in_order) - 1:
        return (in_order[0], in_order[-1] + 1)
    runs: list[int] = []
    for offset in in_order:
        if runs and runs[-1] == offset:
            runs[-1] = offset + 1
        else:
            runs += (offset, offset + 1)
    return tuple(runs)


def pairs(runs: Runs) -> Iterator[tuple[int, int]]:
    """Each run as (start, stop)."""
    return zip(runs[::2], runs[1::2], strict=True)


def each(runs: Runs) -> Iterator[int]:
    """Each offset, in order."""
    for start, stop in pairs(runs):
        yield from range(start, stop)


def size(runs: Runs) -> int:
    """How many offsets there are."""
    return sum(runs[1::2]) - sum(runs[::2])
