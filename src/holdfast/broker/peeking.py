"""A look at the messages that would be handed out next, of one group in one partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.broker.lookahead import give_way, look_ahead
from holdfast.delivery.events import Phase
from holdfast.model import Record, extra_bytes

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery

_AT_A_TIME: Final = 64


def peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record]:
    """Nothing changes but that expired ones are passed over. `most_bytes`: behind so many no more are loaded."""
    while True:
        with delivery.lock:
            records = _peek(delivery, count, most_bytes)
        if records is not None:
            return records
        give_way()


def _peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record] | None:
    """The same under the lock; None where something was passed over, so that others are the next by now."""
    now = delivery._moment()
    records: list[Record] = []
    size = 0
    whole = True
    for offsets in _parts(delivery._supply.choose(count, now, look=True).offsets):
        if not whole:  # what was passed over may have taken some of these with it
            offsets = [offset for offset in offsets if delivery.group.phase(offset) is Phase.READY]
        loaded = delivery._load(offsets, now)
        if len(loaded) < len(offsets):
            whole = False
            if not loaded and not look_ahead(delivery, now):
                break
        records += loaded
        size += sum([len(record.value) + extra_bytes(record) for record in loaded])
        if most_bytes is not None and size > most_bytes:
            break
    return records if whole else None


def _parts(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(offsets), _AT_A_TIME):
        yield offsets[start : start + _AT_A_TIME]
