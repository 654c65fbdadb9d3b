"""Where a group goes on in each partition, and what that does to its messages: said before it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console

from holdfast.broker.group import QueueGroup
from holdfast.broker.positions import Reset
from holdfast.broker.station import Station
from holdfast.cli.tables import show_table, table
from holdfast.cli.text import safe
from holdfast.storage.finding import count_of


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one partition: `again` were handled and come again, `passed_over` were not and never come."""

    topic: str
    partition: int
    before: int | None
    after: int
    again: int
    passed_over: int


def moves_of(group: QueueGroup | None, resets: Iterable[Reset]) -> list[Move]:
    """The moves of a group in queue mode, which knows of each message, or of one in stream mode (None)."""
    found = []
    for reset in resets:
        if group is None:
            before = reset.after if reset.before is None else reset.before
            again, passed = max(before - reset.after, 0), max(reset.after - before, 0)
        else:
            again, passed = _effect(group.station(reset.partition), reset.after)
        found.append(
            Move(
                topic=reset.topic,
                partition=reset.partition,
                before=reset.before,
                after=reset.after,
                again=again,
                passed_over=passed,
            )
        )
    return found


def _effect(station: Station, target: int) -> tuple[int, int]:
    """How many handled messages come again, and how many that are not handled are passed over.

    What somebody works on stays there either way.
    """
    group, end = station.delivery.group, station.partition.log.end
    again = max(min(group.floor, end) - target, 0) + group.done.range_cardinality(max(target, group.floor), end)
    if target <= group.floor:
        return again, 0
    held = sum(offset < target for held in (group.leases, group.burials) for offset in held)
    done = group.done.range_cardinality(group.floor, target)
    return again, target - group.floor - done - held


def show_moves(console: Console, moves: Sequence[Move]) -> None:
    """For people: one sentence for one partition, and a table before the sum of several."""
    again, passed = sum(move.again for move in moves), sum(move.passed_over for move in moves)
    where = f"offset {moves[0].after}" if len(moves) == 1 else "these offsets"
    if len(moves) > 1:
        shown = table("topic", "partition>", "from>", "to>", "again>", "passed over>")
        for move in moves:
            before = "new" if move.before is None else f"{move.before:,}"
            numbers = (before, *(f"{number:,}" for number in (move.after, move.again, move.passed_over)))
            shown.add_row(safe(move.topic), str(move.partition), *numbers)
        show_table(console, shown)
    console.print(
        f"going on with {where}: {count_of(again, 'handled message')} will come again, "
        f"{count_of(passed, 'message')} will be passed over",
        soft_wrap=True,
    )
