"""`holdfast group`: how far the groups of a data folder are, and how to let one go on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from rich.table import Table

import holdfast
from holdfast.api.times import to_datetime
from holdfast.broker.folder.layout import QUERIES, check_name
from holdfast.broker.group import QueueGroup
from holdfast.broker.inspect.status import GroupStanding
from holdfast.broker.streams.queries import list_queries, remove_queries
from holdfast.cli.look.topics import standing_of
from holdfast.cli.look.trace import time_text
from holdfast.cli.opening import chosen_topic, engine_of, is_remote, opened_broker, some_of, topics_of
from holdfast.cli.operate.queue import moves_of, show_moves
from holdfast.cli.options import WAIT, AsJson, DataFolder, DryRun, PartitionNumber, Topic, Wait, Yes
from holdfast.cli.output import NOT_DONE, OK, Section, command, confirmed, print_json, stderr, stdout
from holdfast.cli.reading import time_of
from holdfast.cli.text import safe, show_table, table
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import InvalidRequest, UnknownGroup
from holdfast.storage.checks.finding import count_of

app = Section("Groups: how far they are, and how to let one go on elsewhere.")

Name: TypeAlias = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]


@app.command("ls")
@command
def ls_command(folder: DataFolder, topic: Topic = None, as_json: AsJson = False) -> int:
    """List the groups and how far behind they are, in messages and in time. Needs no lock."""
    topics_of(folder)
    found = standing_of(folder).groups(None if topic is None else chosen_topic(folder, topic))
    queries = [] if is_address(folder) else list_queries(real_world(), folder)
    unreadable = [query for query in queries if query.wrong]
    if as_json:
        wrong = [{"file": f"{QUERIES}/{query.file}", "wrong": query.wrong} for query in unreadable]
        print_json({"folder": folder, "groups": [group.document for group in found], "unreadable": wrong})
    elif not found:
        stderr().print(f"no groups {'in' if topic is None else f'on {safe(topic)} in'} {safe(folder)}", soft_wrap=True)
    else:
        show_table(stdout(), groups_table(found))
        _tell_of_damage(folder, found)
    for query in () if as_json else unreadable:
        place = f"{safe(folder)}/{QUERIES}/{safe(query.file)}"
        stderr().print(f"unreadable: {place}: {safe(query.wrong)}; no old message goes meanwhile", soft_wrap=True)
    return OK


def groups_table(groups: Sequence[GroupStanding]) -> Table:
    """Groups for people."""
    statics = any(group.static_members for group in groups)
    queries = any(group.query for group in groups)
    more = [*(["renewed>", "time-out>"] if queries else []), *(["static members"] if statics else [])]
    shown = table("group", "topic", "mode", "behind>", "oldest>", "in hand>", *more, wide="static members")
    for group in groups:
        shown.add_row(
            safe(group.name),
            safe(group.topic),
            group.mode,
            f"{group.lag:,}",
            _age(group.lag_seconds),
            f"{group.leased:,}" if group.mode == "queue" else "",
            *(_renewed(group) if queries else []),
            *([", ".join(map(safe, group.static_members))] if statics else []),
        )
    return shown


def _renewed(group: GroupStanding) -> tuple[str, str]:
    """When a query last said that it runs, and for how long that counts."""
    if group.query is None:
        return "", ""
    stale = " (stale)" if group.query.stale else ""
    return f"{_time(group.query.renewed_seconds)} ago{stale}", _time(group.query.timeout_seconds)


def _time(seconds: float) -> str:
    return time_text(round(seconds * 1e9))


def _age(seconds: float) -> str:
    return _time(seconds) if seconds else ""


@app.command("show")
@command
def show_command(folder: DataFolder, name: Name, topic: Topic = None, as_json: AsJson = False) -> int:
    """Show how far one group is in each partition. Needs no lock."""
    found = _groups(folder, name, topic)
    if as_json:
        print_json({"name": name, "topics": [group.document for group in found]})
        return OK
    console = stdout()
    for number, group in enumerate(found):
        if number:
            console.print()
        console.print(_sentence(group), soft_wrap=True)
        show_table(console, _lags_table(group))
    _tell_of_damage(folder, found)
    return OK


def _tell_of_damage(folder: str, groups: Sequence[GroupStanding]) -> None:
    """What is wrong with each group, once: one in stream mode may stand there with every topic."""
    for name, wrong in dict.fromkeys((group.name, wrong) for group in groups for wrong in group.wrong):
        what = f"{safe(name)}: {safe(wrong)}; see `holdfast check {safe(folder)}`"
        stderr().print(f"damaged: group {what}", soft_wrap=True)


def _sentence(group: GroupStanding) -> str:
    members = f"; static members: {', '.join(map(safe, group.static_members))}" if group.static_members else ""
    age = f", the oldest from {_age(group.lag_seconds)} ago" if group.lag_seconds else ""
    behind = f"{count_of(group.lag, 'message')} behind{age}"
    query = ""
    if group.query is not None:
        renewed, timeout = _renewed(group)
        query = f"; renewed {renewed} by {safe(group.query.holder)}, time-out {timeout}"
    return f"{safe(group.name)} on {safe(group.topic)}, {group.mode} mode: {behind}{members}{query}"


def _lags_table(group: GroupStanding) -> Table:
    queue = group.mode == "queue"
    shown = table(
        "partition>",
        {"queue": "settled up to>", "stream": "committed>", "query": "needed from>"}[group.mode],
        "end>",
        "behind>",
        "oldest>",
        *(("in hand>", "waiting>") if queue else ()),
    )
    for lag in group.partitions:
        numbers = (lag.partition, lag.offset, lag.end, lag.lag)
        held = (f"{lag.leased:,}", f"{lag.waiting:,}") if queue else ()
        shown.add_row(*(f"{number:,}" for number in numbers), _age(lag.lag_seconds), *held)
    return shown


def _groups(folder: str, name: str, topic: str | None) -> list[GroupStanding]:
    """The group on each of its topics, or on the one that was said."""
    check_name(name, "group")
    topics_of(folder)
    everyone = standing_of(folder).groups(None if topic is None else chosen_topic(folder, topic))
    found = [group for group in everyone if group.name == name]
    if not found:
        names = sorted({group.name for group in everyone})
        where = f"in {folder}" if topic is None else f"on {topic} in {folder}"
        there = f"there are {some_of(names)}" if names else "there is none yet"
        raise UnknownGroup(f"there is no group {name} {where}; {there}")
    return found


def _one_group(folder: str, name: str, topic: str | None) -> GroupStanding:
    """The only group of this name, queries aside: they have their positions elsewhere."""
    found = _groups(folder, name, topic)
    groups = [group for group in found if group.mode != "query"]
    if len(groups) > 1:
        topics = some_of([group.topic for group in groups])
        raise InvalidRequest(f"{name} is on {len(groups)} topics; say which with --topic: {topics}")
    if not groups:
        raise InvalidRequest(
            f"{name} is a query that reads {found[0].topic} from another process, and keeps its positions itself: let "
            "it begin elsewhere by its own options"
        )
    return groups[0]


@app.command("reset")
@command
def reset_command(
    folder: DataFolder,
    name: Name,
    to: Annotated[
        str, typer.Option("--to", metavar="WHERE", help="earliest, latest, an offset, or a time such as -1h.")
    ],
    topic: Topic = None,
    partition: PartitionNumber = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Let a group go on elsewhere: what lies before is passed over, what lies behind comes (again)."""
    target = _target(to)
    group = _one_group(folder, name, topic)
    with opened_broker(folder, wait=wait) as broker:
        resets = broker.reset_offsets(name, group.topic, to=target, partition=partition, dry_run=True)
        moves = moves_of(_queue_group(broker, group), resets)
        if not as_json:
            show_moves(stdout(), moves)
        if not dry_run:
            if not confirmed("Go there?", "group reset", yes=yes, as_json=as_json):
                return NOT_DONE
            for move in moves:  # what was shown, whatever has come since
                broker.reset_offsets(name, group.topic, to=move.after, partition=move.partition)
    if as_json:
        found: dict[str, Any] = {"group": name, "topic": group.topic, "mode": group.mode, "changed": not dry_run}
        print_json({**found, "partitions": msgspec.to_builtins(moves)})
    return OK


def _queue_group(broker: holdfast.Broker, group: GroupStanding) -> QueueGroup | None:
    """The group in queue mode, if we own its folder: it knows of each message."""
    if is_remote(broker):
        return None
    with engine_of(broker).using(group.topic) as topic:
        return topic.groups.get(group.name)


def _target(to: str) -> str | int | datetime:
    words = {"start": "earliest", "earliest": "earliest", "end": "latest", "latest": "latest"}
    if to in words:
        return words[to]
    if to.isascii() and to.isdigit():
        return int(to)
    return to_datetime(time_of(to, "--to"))


@app.command("delete")
@command
def delete_command(
    folder: DataFolder,
    name: Name,
    topic: Topic = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Forget a group and how far it came; the messages stay for the others. In stream mode on all its topics.

    A query of another process loses only its hold on old messages; if it still runs, it takes it again.
    """
    found = _groups(folder, name, topic)
    if any(group.mode == "queue" for group in found):
        found = [_one_group(folder, name, topic)]
    found = [group for group in found if group.mode != "query"] or found
    if not as_json:
        for group in found:
            stdout().print(f"{_sentence(group)}. It {'would' if dry_run else 'will'} be forgotten", soft_wrap=True)
    if not dry_run:
        if not confirmed("Delete it?", "group delete", yes=yes, as_json=as_json):
            return NOT_DONE
        _delete(folder, found[0], wait)
        if not as_json:
            stdout().print(f"deleted {safe(name)}", soft_wrap=True)
    if as_json:
        print_json({"group": name, "topics": [group.document for group in found], "deleted": not dry_run})
    return OK


def _delete(folder: str, group: GroupStanding, wait: str) -> None:
    if group.mode == "query" and not is_address(folder):
        remove_queries(real_world(), folder, group.name)  # needs no owner, and there may be one
        return
    with opened_broker(folder, wait=wait) as broker:
        broker.delete_group(group.name, group.topic if group.mode == "queue" else None)
