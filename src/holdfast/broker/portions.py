"""Messages that are moved from one log to another, a bearable number of bytes at a time.

What is written at once must fit into one segment, and those who write beside it wait that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

PORTION_BYTES: Final = 16 << 20

_Item = TypeVar("_Item")


def portions(
    items: Sequence[_Item], size_of: Callable[[_Item], int], most_bytes: int = PORTION_BYTES
) -> Iterator[Sequence[_Item]]:
    """The items in their order, in parts of at most so many bytes, or of one that is larger."""
    start, total = 0, 0
    for i, item in enumerate(items):
        size = size_of(item)
        if i > start and total + size > most_bytes:
            yield items[start:i]
            start, total = i, 0
        total += size
    if start < len(items):
        yield items[start:]
