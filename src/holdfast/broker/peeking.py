"""A look at the messages that would be handed out next, of one group in one partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery

_AT_A_TIME: Final = 64


def peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record]:
    """Nothing changes but that expired ones are passed over. `most_bytes`: behind so many no more are loaded."""
    with delivery.lock:
        now = delivery._moment()
        while True:
            records: list[Record] = []
            size = 0
            for offsets in _parts(delivery._supply.choose(count, now, look=True).offsets):
                loaded = delivery._load(offsets, now)
                if len(loaded) < len(offsets):
                    break  # something was passed over: others are the next by now
                records += loaded
                size += sum([len(record.value) for record in loaded])
                if most_bytes is not None and size > most_bytes:
                    return records
            else:
                return records


def _parts(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(offsets), _AT_A_TIME):
        yield offsets[start : start + _AT_A_TIME]
