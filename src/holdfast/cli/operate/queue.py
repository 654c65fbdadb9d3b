"""Where a group goes on in each partition, and what that does to its messages: said before it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Console

import holdfast
from holdfast.api.ports import port_of
from holdfast.api.times import parse_instant
from holdfast.broker.delivery import Delivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import Compacted, QueueGroup
from holdfast.broker.streams.offsets import Reset
from holdfast.broker.topic import Topic as OpenTopic
from holdfast.cli.opening import Views, chosen_by, chosen_topic, engine_of, is_remote, opened_broker, view
from holdfast.cli.options import WAIT, AsJson, DryRun, Group, PartitionNumber, QueueFolder, Topic, Wait, Yes
from holdfast.cli.output import NOT_DONE, OK, command, confirmed, print_error, print_json, print_json_line, stdout
from holdfast.cli.text import safe, show_table, size, table
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, OffsetOutOfRange
from holdfast.storage.checks.finding import count_of


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
            again, passed = _effect(group.delivery(reset.partition), reset.after)
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


def _effect(delivery: Delivery, target: int) -> tuple[int, int]:
    """How many handled messages come again, and how many that are not handled are passed over.

    What somebody works on stays there either way.
    """
    group, end = delivery.group, delivery.partition.log.end
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
    name = topic if is_address(folder) else chosen_topic(folder, topic)
    with opened_broker(folder, wait=wait) as broker:
        queue = view(broker, chosen_by(broker, folder, name), group)
        moves = _moves(broker, queue, _place(to, offset, when), partition)
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


def _moves(
    broker: holdfast.Broker, queue: holdfast.Queue[bytes], to: str | int | datetime, partition: int | None
) -> list[Move]:
    resets = broker.reset_offsets(queue.group, queue.name, to=to, partition=partition, dry_run=True)
    return moves_of(None if is_remote(queue) else port_of(queue).queue_group, resets)


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
    name = topic if is_address(folder) else chosen_topic(folder, topic)
    with opened_broker(folder, wait=wait) as broker:
        queue = view(broker, chosen_by(broker, folder, name), group)
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
        freed = _asked_to_compact(broker, name) if is_remote(broker) else _compacted(engine_of(broker), name)
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


def _asked_to_compact(broker: holdfast.Broker, name: str) -> Compacted:
    groups = broker.describe_topic(name).groups
    freed = [view(broker, name, group).compact() for group in groups]
    return Compacted(
        segments=sum(each.segments for each in freed),
        bytes=sum(each.bytes for each in freed),
        journal_bytes=sum(each.journal_bytes for each in freed),
    )


def _compacted(engine: BrokerEngine, name: str) -> Compacted:
    with engine.using(name) as topic:
        engine.tick()
        return _compact(topic, streams=bool(engine.streams.on(topic)))


def _compact(topic: OpenTopic, *, streams: bool) -> Compacted:
    """What every group is through with; of a topic without any group nothing is."""
    segments = freed_bytes = 0
    if topic.groups:
        segments, freed_bytes = topic.trim()
    elif streams:
        topic.duplicates.save()
        for partition in topic.partitions:
            partition.save()
            partition.log.roll()
            trimmed = partition.log.trim(partition.log.end)  # what the groups have not read is pinned
            segments, freed_bytes = segments + trimmed.segments, freed_bytes + trimmed.bytes
    journal_bytes = sum(delivery.compact() for group in topic.groups.values() for delivery in group.deliveries)
    return Compacted(segments=segments, bytes=freed_bytes, journal_bytes=journal_bytes + topic.compact_dead())
