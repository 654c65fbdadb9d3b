"""Where a group goes on in each partition, and what that does to its messages: said before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Console

import holdfast
from holdfast.api.ports import port_of
from holdfast.api.times import parse_instant
from holdfast.broker.group import Compacted
from holdfast.broker.streams.positions import ResetEffect
from holdfast.cli.opening import Views, chosen_topic, opened_broker, view
from holdfast.cli.options import WAIT, AsJson, DryRun, Group, PartitionNumber, QueueFolder, Topic, Wait, Yes
from holdfast.cli.output import NOT_DONE, OK, command, confirmed, print_error, print_json, print_json_line, stdout
from holdfast.cli.text import safe, show_table, size, table
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, OffsetOutOfRange
from holdfast.storage.checks.finding import count_of


def show_moves(console: Console, moves: Sequence[ResetEffect]) -> None:
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


# `holdfast cancel`, `seek`, `purge`, `compact`, `apply-retention`: what an operator does to a queue.


@command
def cancel_command(
    folder: QueueFolder,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="What `put` printed.")],
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Take back messages that nobody works on: ready or delayed ones."""
    code = OK
    with opened_broker(folder, wait=wait) as broker:
        views = Views(broker, folder, topic, group)
        for message_id in ids:
            try:
                if not views.of_id(message_id).cancel(message_id):
                    raise InvalidRequest(
                        f"{message_id} cannot be cancelled: somebody works on it, or it is done, dead or cancelled"
                    )
            except HoldfastError as error:
                print_error(error.code, str(error), as_json=as_json)
                code = NOT_DONE
                continue
            if as_json:
                print_json_line({"done": "cancelled", "id": message_id})
            else:
                stdout().print(f"cancelled {safe(message_id)}", soft_wrap=True)
    return code


@command
def seek_command(
    folder: QueueFolder,
    to: Annotated[str | None, typer.Argument(metavar="start|end", help="Where to go on.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="Go on with this message.")] = None,
    when: Annotated[
        str | None, typer.Option("--time", metavar="ISO", help="Go on with the first message of this time, or -1h.")
    ] = None,
    topic: Topic = None,
    group: Group = None,
    partition: PartitionNumber = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Go on elsewhere: all before is passed over, all behind comes again. The one way that done messages come back."""
    if sum(given is not None for given in (to, offset, when)) != 1 or to not in (None, "start", "end"):
        raise InvalidRequest("seek goes to one place: start, end, --offset N or --time ISO")
    name = chosen_topic(folder, topic)
    with opened_broker(folder, wait=wait) as broker:
        queue = view(broker, name, group)
        moves = moves_of(broker, queue.group, queue.name, _place(to, offset, when), partition)
        if offset is not None and len(moves) > 1:
            raise InvalidRequest(f"{queue.name} has {len(moves)} partitions, each with offsets: give --partition N")
        if offset is not None and moves[0].after != offset:
            kept = broker.describe_topic(queue.name).partitions[moves[0].partition]
            raise OffsetOutOfRange(
                f"cannot go to offset {offset}: {kept.start} to {kept.end} are kept",
                offset=offset,
                start=kept.start,
                end=kept.end,
            )
        if not as_json:
            show_moves(stdout(), moves)
        if not dry_run:
            if not confirmed("Go there?", "seek", yes=yes, as_json=as_json):
                return NOT_DONE
            for move in moves:
                queue.seek(offset=move.after, partition=move.partition)
    if as_json:
        again, passed = sum(move.again for move in moves), sum(move.passed_over for move in moves)
        print_json(
            {
                "offset": moves[0].after if len(moves) == 1 else None,
                "again": again,
                "passed_over": passed,
                "changed": not dry_run,
                "partitions": msgspec.to_builtins(moves),
            }
        )
    return OK


def _place(to: str | None, offset: int | None, when: str | None) -> str | int | datetime:
    if to is not None:
        return "earliest" if to == "start" else "latest"
    if when is not None:
        now_ms = real_world().clock.now_ns() // 1_000_000
        return parse_instant(when, now_ms, "--time")
    assert offset is not None
    return offset


def moves_of(
    broker: holdfast.Broker, group: str, topic: str, to: str | int | datetime, partition: int | None
) -> list[ResetEffect]:
    """Where a group would go on in each partition, and what that would do to its messages."""
    resets = broker.reset_offsets(group, topic, to=to, partition=partition, dry_run=True)
    effects: list[ResetEffect] = port_of(broker).effects(group, resets)
    return effects


@command
def purge_command(
    folder: QueueFolder,
    topic: Topic = None,
    group: Group = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Drop every message that is not in flight, including delayed ones unless other groups read the topic."""
    name = chosen_topic(folder, topic)
    with opened_broker(folder, wait=wait) as broker:
        queue = view(broker, name, group)
        stats, purged = queue.stats(), 0
        if not as_json:
            waiting = f"{count_of(stats.ready, 'message')} ready, {count_of(stats.delayed, 'message')} delayed"
            stdout().print(f"{waiting}, {stats.leased:,} in hand in {safe(queue.name)}", soft_wrap=True)
        if not dry_run:
            if not confirmed("Drop all that are not in flight?", "purge", yes=yes, as_json=as_json):
                return NOT_DONE
            purged = queue.purge()
    if as_json:
        print_json({"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "purged": purged})
    elif not dry_run:
        stdout().print(f"{count_of(purged, 'message')} dropped for good")
    return OK


@command
def compact_command(folder: QueueFolder, topic: Topic = None, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Let go of all messages that are done, whatever retention says; they cannot be replayed any more."""
    name = chosen_topic(folder, topic)
    with opened_broker(folder, wait=wait) as broker:
        freed: Compacted = port_of(broker).compact_groups(name)
    if as_json:
        print_json(msgspec.to_builtins(freed))
    else:
        total = freed.bytes + freed.journal_bytes
        stdout().print(
            f"{size(total)} freed: {count_of(freed.segments, 'segment')} of messages ({size(freed.bytes)}), "
            f"{size(freed.journal_bytes)} of journal",
            soft_wrap=True,
        )
    return OK


@command
def apply_retention_command(
    folder: QueueFolder, topic: Topic = None, wait: Wait = WAIT, as_json: AsJson = False
) -> int:
    """Apply the retention settings now, to one topic or to all, instead of waiting for the regular upkeep."""
    with opened_broker(folder, wait=wait) as broker:
        names = sorted(broker.topics()) if topic is None else [topic]
        gone = {name: broker.apply_retention(name) for name in names}
    if as_json:
        print_json({"topics": [{"topic": name, **msgspec.to_builtins(each)} for name, each in gone.items()]})
        return OK
    for name, each in gone.items():
        stdout().print(
            f"{safe(name)}: {count_of(each.messages, 'message')} and {count_of(each.dead_letters, 'dead letter')} "
            f"dropped, {size(each.bytes)} freed",
            soft_wrap=True,
        )
    return OK
