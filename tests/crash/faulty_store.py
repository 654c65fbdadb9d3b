"""A store that behaves as badly as stores may: no answers, late effects, effects without an answer. By its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from holdfast.env.chain.engines import MemoryStore, StoreUnreachable


class FaultyStore:
    """A view of a store through a bad network. Each owner has its own, and all have the same objects."""

    def __init__(self, objects: MemoryStore, seed: int, *, faults: float = 0.2) -> None:
        self.name = objects.name
        self.faults = faults
        self.is_cut = False  # no call gets through
        self.ignores_condition = False  # as some stores do that only look like S3
        self._objects = objects
        self._random = random.Random(seed)
        self._late: list[tuple[str, bytes]] = []  # creates that arrive after their caller was told that nobody answers

    def create(self, key: str, content: bytes) -> bool:
        self._arrive()
        fault = self._random.random() / self.faults if self.faults else 1.0
        if self.is_cut or fault < 0.4:
            raise StoreUnreachable("no answer")
        if fault < 0.6:
            self._late.append((key, content))
            raise StoreUnreachable("no answer")
        if self.ignores_condition:
            self._objects.remove(key)
        made = self._objects.create(key, content)
        if fault < 1.0:
            raise StoreUnreachable("no answer, and yet it was done")
        return made

    def read(self, key: str) -> bytes | None:
        self._may_fail()
        return self._objects.read(key)

    def keys(self, prefix: str, after: str = "") -> Iterator[str]:
        self._may_fail()
        return self._objects.keys(prefix, after)

    def remove(self, key: str) -> None:
        self._may_fail()
        self._objects.remove(key)

    def close(self) -> None:
        self._objects.close()

    def _may_fail(self) -> None:
        self._arrive()
        if self.is_cut or self._random.random() < self.faults / 2:
            raise StoreUnreachable("no answer")

    def _arrive(self) -> None:
        """Let some of the late creates take effect."""
        while self._late and self._random.random() < 0.5:
            self._objects.create(*self._late.pop(self._random.randrange(len(self._late))))
