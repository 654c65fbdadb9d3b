"""Which partition a message goes to: by its key's hash, in turn, or as the caller says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Final

from holdfast.errors import UnknownTopic

_SEED: Final = 0


@cache
def murmur3() -> Callable[[bytes, int], int]:
    """Murmur3 with 32 bits, as an unsigned number; loaded with the first key."""
    import mmh3

    return mmh3.mmh3_32_uintdigest


def partition_for(key: bytes, partitions: int) -> int:
    """The partition of a key: the same for ever, as long as the topic has so many."""
    return murmur3()(key, _SEED) % partitions


def partitions_for(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The same for many keys."""
    murmur = murmur3()
    return [murmur(key, _SEED) % partitions for key in keys]


def check_partition(partition: object, topic: str, partitions: int) -> int:
    """A partition that was chosen by hand, if the topic has it."""
    if type(partition) is int and 0 <= partition < partitions:
        return partition
    last = f"its partitions are 0 to {partitions - 1}" if partitions > 1 else "its only partition is 0"
    raise UnknownTopic(f"topic {topic} has no partition {partition!r}: {last}")


class RoundRobin:
    """Turns for messages without a key: `stick` of them to one partition, as many to the next, and so on.

    Who gets which turn depends on the count alone, never on time: the same messages in the same order go to
    the same partitions again. Those `without` which there are others have no turns.
    """

    def __init__(self, stick: int = 1, *, start: int = 0) -> None:
        self._stick = stick
        self._partition = start
        self._left = stick

    def take(self, partitions: int, without: Collection[int] = ()) -> int:
        """The partition of the next message."""
        # With names of its own: threads that take turns at once may get the same one, never one that is not there.
        partition, left = self._partition, self._left
        if not left:
            partition, left = partition + 1, self._stick
        if partition >= partitions:
            partition = 0
        while partition in without:
            partition, left = (partition + 1) % partitions, self._stick
        self._partition, self._left = partition, left - 1
        return partition

    def give_back(self, count: int, partitions: int, without: Collection[int] = ()) -> None:
        """Take back the last turns."""
        while count > 0:
            used = min(max(self._stick - self._left, 0), count)
            self._left += used
            count -= used
            if count:
                self._partition, self._left = (self._partition - 1) % partitions, 0
                while self._partition in without:
                    self._partition = (self._partition - 1) % partitions

    def spread(self, count: int, partitions: int, without: Collection[int] = ()) -> Iterator[tuple[int, int, int]]:
        """The next `count` messages as runs: (partition, first, behind the last)."""
        first = 0
        while first < count:
            partition = self.take(partitions, without)
            end = min(count, first + 1 + self._left)
            self._left = max(self._left - (end - first - 1), 0)
            yield partition, first, end
            first = end
