"""Messages that are moved from one log to another, a bearable number of bytes at a time.

What is written at once must fit into one segment, and those who write beside it wait that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

PORTION_BYTES: Final = 16 << 20

_Item = TypeVar("_Item")


def portions(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most_bytes: int = PORTION_BYTES
) -> Iterator[Sequence[_Item]]:
    """The items in their order, in parts of at most so many bytes, or of one that is larger; no more is held."""
    part: list[_Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if part and total + size > most_bytes:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part
