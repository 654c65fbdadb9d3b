"""Dead letters by the kind of their error, and what a redrive or a purge answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.api.listed import DeadLetter
from holdfast.errors import InvalidRequest

# Errors that differ in numbers, addresses and quoted values only are one kind of error.
_DETAILS: Final = re.compile(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"|\d+")


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same reason and the same kind of error."""

    reason: str
    error: str
    count: int
    first: datetime
    last: datetime
    example: str


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """What a redrive or a purge found and did."""

    matched: int
    done: int
    ids: list[str]


def grouped(letters: Iterable[DeadLetter[Any]]) -> list[DeadGroup]:
    """Letters by reason and kind of error, the most frequent first."""
    kinds = DeadKinds()
    for letter in letters:
        kinds.add(letter)
    return kinds.groups()


class DeadKinds:
    """Groups of letters, in the making."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], DeadGroup] = {}

    def add(self, letter: DeadLetter[Any]) -> None:
        kind, dead_at = (letter.reason, fingerprint(letter.error)), letter.dead_at
        before = self._found.get(kind)
        self._found[kind] = DeadGroup(
            reason=kind[0],
            error=kind[1],
            count=1 if before is None else before.count + 1,
            first=dead_at if before is None else min(before.first, dead_at),
            last=dead_at if before is None else max(before.last, dead_at),
            example=letter.id,
        )

    def groups(self) -> list[DeadGroup]:
        """The most frequent first."""
        return sorted(self._found.values(), key=lambda group: (-group.count, group.error))


def fingerprint(error: str) -> str:
    """An error's first line without its details."""
    return _DETAILS.sub("…", error.partition("\n")[0])[:200]


def no_letter(letter_id: str) -> InvalidRequest:
    """The error for an id that leads to nothing."""
    return InvalidRequest(f"there is no dead letter {letter_id}; it may have been redriven or purged")
