"""`holdfast topic` and `holdfast group`: create, list, change and delete topics and the groups that read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec

import holdfast
from holdfast.api import port_of
from holdfast.api.drafts import to_datetime
from holdfast.broker.folder.layout import QUERIES, check_name, check_topic_name
from holdfast.broker.inspect import GroupStanding, TopicStanding
from holdfast.broker.streams.queries import list_queries, remove_queries
from holdfast.cli import opening, output
from holdfast.cli.look.trace import time_text
from holdfast.cli.operate.queue import moves_of, pause_text, show_moves
from holdfast.cli.operate.settings import changes_of, show_settings
from holdfast.cli.parsing import Section, argument, option
from holdfast.cli.reading import standing_of, time_of
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import BadSettings, InvalidRequest, TopicExists, UnknownGroup
from holdfast.model import count_of
from holdfast.storage.compaction import KeysCompacted

group_app = Section("Consumer groups: their lag, and their position.")

GroupName: TypeAlias = Annotated[str, argument("GROUP", "The name of the group.")]


@group_app.command("ls")
def group_ls_command(folder: opening.DataFolder, topic: opening.Topic = None, as_json: opening.AsJson = False) -> int:
    """List the groups and their lag, in messages and in time. Needs no lock.

    Examples:
        holdfast group ls ./data
    """
    opening.topics_of(folder)
    found = standing_of(folder).groups(None if topic is None else opening.chosen_topic(folder, topic))
    queries = [] if is_address(folder) else list_queries(real_world(), folder)
    unreadable = [query for query in queries if query.wrong]
    if as_json:
        output.print_each(group.document for group in found)
    elif not found:
        output.note(f"no groups {'in' if topic is None else f'on {output.safe(topic)} in'} {output.safe(folder)}")
    else:
        output.stdout().print(groups_table(found))
        _tell_of_damage(folder, found)
    for query in unreadable:
        place = f"{output.safe(folder)}/{QUERIES}/{output.safe(query.file)}"
        output.note(f"unreadable: {place}: {output.safe(query.wrong)}; old messages are kept in the meantime")
    return output.OK


def groups_table(groups: Sequence[GroupStanding]) -> output.Table:
    """Return a table of groups."""
    statics = any(group.static_members for group in groups)
    queries = any(group.query for group in groups)
    more = [*(["renewed>", "timeout>"] if queries else []), *(["static members"] if statics else [])]
    shown = output.table("group", "topic", "mode", "behind>", "oldest>", "in flight>", *more, wide="static members")
    for group in groups:
        shown.add_row(
            output.safe(group.name),
            output.safe(group.topic),
            f"{group.mode}, paused" if group.paused else group.mode,
            f"{group.lag:,}",
            _age(group.lag_seconds),
            f"{group.leased:,}" if group.mode == "queue" else "",
            *(_renewed(group) if queries else []),
            *([", ".join(map(output.safe, group.static_members))] if statics else []),
        )
    return shown


def _renewed(group: GroupStanding) -> tuple[str, str]:
    """Return when a query was last renewed, and its timeout."""
    if group.query is None:
        return "", ""
    stale = " (stale)" if group.query.stale else ""
    return f"{_time(group.query.renewed_seconds)} ago{stale}", _time(group.query.timeout_seconds)


def _time(seconds: float) -> str:
    return time_text(round(seconds * 1e9))


def _age(seconds: float) -> str:
    return _time(seconds) if seconds else ""


@group_app.command("show")
def group_show_command(
    folder: opening.DataFolder, name: GroupName, topic: opening.Topic = None, as_json: opening.AsJson = False
) -> int:
    """Show the position of one group in each partition. Needs no lock.

    Examples:
        holdfast group show ./data billing
    """
    found = _groups(folder, name, topic)
    if as_json:
        output.print_json({"name": name, "topics": [group.document for group in found]})
        return output.OK
    console = output.stdout()
    for number, group in enumerate(found):
        if number:
            console.print()
        console.print(_sentence(group))
        console.print(_lags_table(group))
    _tell_of_damage(folder, found)
    return output.OK


def _tell_of_damage(folder: str, groups: Sequence[GroupStanding]) -> None:
    """Print each problem of a group once: a group in stream mode is listed for each of its topics."""
    for name, wrong in dict.fromkeys((group.name, wrong) for group in groups for wrong in group.wrong):
        what = f"{output.safe(name)}: {output.safe(wrong)}; see `holdfast check {output.safe(folder)}`"
        output.note(f"damaged: group {what}")


def _sentence(group: GroupStanding) -> str:
    members = f"; static members: {', '.join(map(output.safe, group.static_members))}" if group.static_members else ""
    age = f", the oldest from {_age(group.lag_seconds)} ago" if group.lag_seconds else ""
    behind = f"{count_of(group.lag, 'message')} behind{age}"
    query = ""
    if group.query is not None:
        renewed, timeout = _renewed(group)
        query = f"; renewed {renewed} by {output.safe(group.query.holder)}, timeout {timeout}"
    paused = "" if group.paused is None else f"; paused {pause_text(group.paused)}"
    return (
        f"{output.safe(group.name)} on {output.safe(group.topic)}, {group.mode} mode: {behind}{members}{query}{paused}"
    )


def _lags_table(group: GroupStanding) -> output.Table:
    queue = group.mode == "queue"
    shown = output.table(
        "partition>",
        {"queue": "settled up to>", "stream": "committed>", "query": "needed from>"}[group.mode],
        "end>",
        "behind>",
        "oldest>",
        *(("in flight>", "waiting>") if queue else ()),
    )
    for lag in group.partitions:
        numbers = (lag.partition, lag.offset, lag.end, lag.lag)
        held = (f"{lag.leased:,}", f"{lag.waiting:,}") if queue else ()
        shown.add_row(*(f"{number:,}" for number in numbers), _age(lag.lag_seconds), *held)
    return shown


def _groups(folder: str, name: str, topic: str | None) -> list[GroupStanding]:
    """Return the group on each of its topics, or on one of them."""
    check_name(name, "group")
    opening.topics_of(folder)
    everyone = standing_of(folder).groups(None if topic is None else opening.chosen_topic(folder, topic))
    found = [group for group in everyone if group.name == name]
    if not found:
        names = sorted({group.name for group in everyone})
        where = f"in {folder}" if topic is None else f"on {topic} in {folder}"
        there = f"known groups: {opening.some_of(names)}" if names else "there is none yet"
        raise UnknownGroup(f"there is no group {name} {where}; {there}")
    return found


def _one_group(folder: str, name: str, topic: str | None) -> GroupStanding:
    """Return the only group of this name. Queries do not count: they keep their positions elsewhere."""
    found = _groups(folder, name, topic)
    groups = [group for group in found if group.mode != "query"]
    if len(groups) > 1:
        topics = opening.some_of([group.topic for group in groups])
        raise InvalidRequest(f"{name} is on {len(groups)} topics; choose one with --topic: {topics}")
    if not groups:
        raise InvalidRequest(
            f"{name} is a query that reads {found[0].topic} from another process and stores its own positions: use "
            "that query's options to start it elsewhere"
        )
    return groups[0]


@group_app.command("reset")
def group_reset_command(
    folder: opening.DataFolder,
    name: GroupName,
    to: Annotated[str, option("--to WHERE", "The new position: earliest, latest, an offset, or a time such as -1h.")],
    topic: opening.Topic = None,
    partition: opening.PartitionNumber = None,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Move a group's position. Earlier messages are skipped; later ones are delivered, again if necessary.

    Examples:
        holdfast group reset ./data billing --to earliest --dry-run
        holdfast group reset ./data billing --to -1h --topic orders --yes
    """
    target = _target(to)
    group = _one_group(folder, name, topic)
    with opening.opened_broker(folder, wait=wait) as broker:
        moves = moves_of(broker, name, group.topic, target, partition)
        if not as_json:
            show_moves(output.stdout(), moves)
        if not dry_run:
            if not output.confirmed("Go there?", "group reset", yes=yes, as_json=as_json):
                return output.NOT_DONE
            for move in moves:  # exactly the positions that were shown
                broker.reset_offsets(name, group.topic, to=move.after, partition=move.partition)
    if as_json:
        found: dict[str, Any] = {"group": name, "topic": group.topic, "mode": group.mode, "changed": not dry_run}
        output.print_json({**found, "partitions": msgspec.to_builtins(moves)})
    return output.OK


def _target(to: str) -> str | int | datetime:
    words = {"start": "earliest", "earliest": "earliest", "end": "latest", "latest": "latest"}
    if to in words:
        return words[to]
    if to.isascii() and to.isdigit() and len(to) <= 18:
        return int(to)
    return to_datetime(time_of(to, "--to"))


@group_app.command("delete")
def group_delete_command(
    folder: opening.DataFolder,
    name: GroupName,
    topic: opening.Topic = None,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Delete a group and its position. The messages stay for other groups.

    A group in stream mode is deleted on all its topics.

    For a query in another process, this only releases the old messages that are kept for it; a running query
    claims them again.

    Examples:
        holdfast group delete ./data statistics --yes
    """
    found = _groups(folder, name, topic)
    if any(group.mode == "queue" for group in found):
        found = [_one_group(folder, name, topic)]
    found = [group for group in found if group.mode != "query"] or found
    if not as_json:
        for group in found:
            output.say(f"{_sentence(group)}. It {'would' if dry_run else 'will'} be deleted")
    if not dry_run:
        if not output.confirmed("Delete it?", "group delete", yes=yes, as_json=as_json):
            return output.NOT_DONE
        _delete(folder, found[0], wait)
        if not as_json:
            output.say(f"deleted {output.safe(name)}")
    if as_json:
        output.print_json({"group": name, "topics": [group.document for group in found], "deleted": not dry_run})
    return output.OK


def _delete(folder: str, group: GroupStanding, wait: str) -> None:
    if group.mode == "query" and not is_address(folder):
        remove_queries(real_world(), folder, group.name)  # works whether or not a process owns the folder
        return
    with opening.opened_broker(folder, wait=wait) as broker:
        broker.delete_group(group.name, group.topic if group.mode == "queue" else None)


topic_app = Section("Topics: create, inspect, change and delete them.")

TopicName: TypeAlias = Annotated[str, argument("TOPIC", "The name of the topic.", complete=opening.topic_names)]
_Changes: TypeAlias = Annotated[
    list[str] | None, argument("NAME=VALUE", "Settings, such as retention_ms=7d or cleanup=compact.")
]


@topic_app.command("create")
def topic_create_command(
    folder: opening.DataFolder,
    name: TopicName,
    changes: _Changes = None,
    partitions: Annotated[int | None, option("--partitions N", "The number of partitions.", least=1)] = None,
    exist_ok: Annotated[bool, option("--exist-ok", "Do not fail if the topic exists.")] = False,
    shard: Annotated[
        int | None, option("--shard N", "The shard of a cluster to put it into; by default, its name decides.", least=0)
    ] = None,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Create a topic, and the data folder if there is none.

    Examples:
        holdfast topic create ./data orders
        holdfast topic create ./data clicks --partitions 8 retention_ms=7d
        holdfast topic create http://10.0.0.5:7700 clicks --shard 3
    """
    check_topic_name(name)
    wanted = changes_of(changes or [])
    if partitions is not None:
        if "partitions" in wanted:
            raise BadSettings("--partitions and partitions=... both say how many; give one of them")
        wanted["partitions"] = partitions
    made = True
    with opening.opened_broker(folder, wait=wait, create=True) as broker:
        try:
            broker.create_topic(name, shard=shard, **wanted)
        except TopicExists:
            if not exist_ok:
                raise
            made = False
        count = len(broker.describe_topic(name).partitions)
    if as_json:
        output.print_json({"topic": name, "made": made, "partitions": count})
    else:
        output.say(f"{'created' if made else 'already exists:'} {name}, {count_of(count, 'partition')}")
    return output.OK


@topic_app.command("ls")
def topic_ls_command(folder: opening.DataFolder, as_json: opening.AsJson = False) -> int:
    """List the topics, their messages, and the lag of their groups. Needs no lock.

    Examples:
        holdfast topic ls ./data
        holdfast topic ls http://127.0.0.1:7700 --json
    """
    opening.topics_of(folder)
    found = list(standing_of(folder).topics())
    if as_json:
        output.print_each(map(_document, found))
    elif not found:
        output.note(f"no topics in {output.safe(folder)}")
    else:
        output.stdout().print(topics_table(found))
    return output.OK


def topics_document(folder: str, found: list[TopicStanding]) -> dict[str, Any]:
    """Return the JSON document of topics."""
    return {"folder": folder, "topics": [_document(topic) for topic in found]}


def _document(topic: TopicStanding) -> dict[str, Any]:
    return {
        "name": topic.name,
        "id": topic.id,
        "created_ms": topic.created_ms or None,
        "messages": topic.messages,
        "dead": topic.dead,
        "bytes": topic.bytes,
        "settings": msgspec.to_builtins(topic.settings),
        "partitions": msgspec.to_builtins(topic.partitions),
        "groups": [group.document for group in topic.groups],
    }


def topics_table(found: list[TopicStanding]) -> output.Table:
    """Return a table of topics."""
    shown = output.table(
        "topic",
        "partitions>",
        "messages>",
        "dead>",
        "disk>",
        "groups (messages behind)",
        wide="groups (messages behind)",
    )
    for topic in found:
        groups = ", ".join(
            f"{output.safe(group.name)} {group.lag:,}{' (paused)' if group.paused else ''}" for group in topic.groups
        )
        shown.add_row(
            output.safe(topic.name),
            f"{len(topic.partitions):,}",
            f"{topic.messages:,}",
            f"{topic.dead:,}",
            output.size(topic.bytes),
            groups or "none",
        )
    return shown


@topic_app.command("show")
def topic_show_command(folder: opening.DataFolder, name: TopicName, as_json: opening.AsJson = False) -> int:
    """Show the partitions, groups and settings of one topic. Needs no lock.

    Examples:
        holdfast topic show ./data orders
    """
    topic = _standing(folder, name)
    shard = _shard_of(folder, name)
    if as_json:
        output.print_json({**_document(topic), **({} if shard is None else {"shard": shard})})
        return output.OK
    console = output.stdout()
    facts = output.facts_table()
    facts.add_row("topic", output.safe(topic.name))
    if shard is not None:
        facts.add_row("shard", str(shard))
    facts.add_row(
        "made", f"{output.short_time(topic.created_ms * 1_000_000)} UTC" if topic.created_ms else "by an early release"
    )
    facts.add_row("messages", f"{topic.messages:,} ({output.size(topic.bytes)})")
    if topic.tiered_bytes:
        facts.add_row("only in the store", output.size(topic.tiered_bytes))
    facts.add_row("dead letters", f"{topic.dead:,}")
    console.print(facts)
    console.print()
    console.print(_partitions_table(topic))
    for each in topic.partitions:
        if each.problem:
            console.print(f"partition {each.number} is stopped: {output.safe(each.problem)}")
    console.print()
    if topic.groups:
        console.print(groups_table(topic.groups))
    else:
        console.print("no groups")
    if topic.settings:
        console.print()
        show_settings(topic.settings)
    return output.OK


def _shard_of(folder: str, name: str) -> int | None:
    """Return the shard of a topic; None if the server is not a node of a cluster."""
    if not is_address(folder):
        return None
    with opening.opened_broker(folder) as broker:
        return broker.describe_topic(name).shard


def _standing(folder: str, name: str) -> TopicStanding:
    if is_address(folder):
        return standing_of(folder).topic(check_topic_name(name))
    found = opening.topics_of(folder)
    if check_topic_name(name) not in found:
        raise opening.unknown_topic(folder, name, found)
    return standing_of(folder).topic(name)


def _partitions_table(topic: TopicStanding) -> output.Table:
    stored = ("store>",) if topic.tiered_bytes else ()
    shown = output.table("partition>", "first>", "next>", "messages>", "disk>", *stored, "segments>")
    for each in topic.partitions:
        numbers = (each.start, each.end, each.end - each.start)
        sizes = (each.bytes - each.tiered_bytes, each.tiered_bytes)[: 1 + len(stored)]
        shown.add_row(str(each.number), *(f"{n:,}" for n in numbers), *map(output.size, sizes), f"{each.segments:,}")
    return shown


@topic_app.command("alter")
def topic_alter_command(
    folder: opening.DataFolder,
    name: TopicName,
    changes: Annotated[list[str], argument("NAME=VALUE", "A setting, such as max_attempts=3 or max_attempts=default.")],
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Change settings of a topic. They take effect at once, and are kept with the topic.

    Examples:
        holdfast topic alter ./data orders max_attempts=3 lease_ms=5m
        holdfast topic alter ./data orders max_attempts=default
    """
    wanted = changes_of(changes)
    if "partitions" in wanted:
        raise BadSettings(f"partitions are added with `holdfast topic partitions {folder} {name} --add N`")
    _standing(folder, name)
    with opening.opened_broker(folder, wait=wait) as broker:
        broker.alter_topic(name, **wanted)
        settings = msgspec.structs.asdict(opening.settings_of(broker, name))
    now = {setting: settings[setting] for setting in wanted}
    if as_json:
        output.print_json({"topic": name, "settings": msgspec.to_builtins(now)})
    else:
        show_settings(now)
    return output.OK


@topic_app.command("partitions")
def topic_partitions_command(
    folder: opening.DataFolder,
    name: TopicName,
    add: Annotated[int | None, option("--add N", "Add this many partitions.", least=1)] = None,
    yes: opening.Yes = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Show the partitions of a topic, or add some. Partitions are never removed.

    Examples:
        holdfast topic partitions ./data orders
        holdfast topic partitions ./data orders --add 4
    """
    topic = _standing(folder, name)
    if add is not None:
        if not as_json:
            output.say(
                f"{output.safe(name)} will have {count_of(len(topic.partitions) + add, 'partition')}; this cannot be "
                "undone. Most keys will go to other partitions than before, so stored messages of a key may be handled "
                "at the same time as newer ones"
            )
        if not output.confirmed("Add them?", "topic partitions", yes=yes, as_json=as_json, looks=False):
            return output.NOT_DONE
        with opening.opened_broker(folder, wait=wait) as broker:
            broker.add_partitions(name, add)
        topic = _standing(folder, name)
    if as_json:
        output.print_json({"topic": name, "partitions": msgspec.to_builtins(topic.partitions)})
    else:
        output.stdout().print(_partitions_table(topic))
    return output.OK


@topic_app.command("move")
def topic_move_command(
    folder: opening.DataFolder,
    name: TopicName,
    to: Annotated[int, option("--to SHARD", "The number of the shard.", least=0)],
    as_json: opening.AsJson = False,
) -> int:
    """Move a topic of a cluster to another shard, with all that belongs to it, while it is in use.

    Most of it is copied in advance; then its calls wait until the rest has followed. If the command is interrupted,
    the topic is in one shard or in the other, and the next call continues.

    Examples:
        holdfast topic move http://10.0.0.5:7700 orders --to 3
    """
    check_topic_name(name)
    with opening.opened_broker(folder) as broker, output.progress("move", "bytes", shown=not as_json) as show:
        shard = broker.cluster.move_topic(name, to, progress=show).shard
    if as_json:
        output.print_json({"topic": name, "shard": shard})
    else:
        output.say(f"{output.safe(name)} is in shard {shard}")
    return output.OK


@topic_app.command("delete")
def topic_delete_command(
    folder: opening.DataFolder,
    name: TopicName,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Delete a topic with all its messages, groups and dead letters. This cannot be undone.

    Examples:
        holdfast topic delete ./data orders --dry-run
        holdfast topic delete ./data orders --yes
    """
    topic = _standing(folder, name)
    behind = sum(group.lag for group in topic.groups)
    found = {
        "topic": name,
        "messages": topic.messages,
        "dead": topic.dead,
        "groups": [group.name for group in topic.groups],
        "unhandled": behind,
        "deleted": False,
    }
    if not as_json:
        output.say(_loss(topic, behind, "would" if dry_run else "will"))
    if not dry_run:
        if not output.confirmed("Delete it?", "topic delete", yes=yes, as_json=as_json):
            return output.NOT_DONE
        with opening.opened_broker(folder, wait=wait) as broker:
            broker.delete_topic(name)
        found["deleted"] = True
        if not as_json:
            output.say(f"deleted {output.safe(name)}")
    if as_json:
        output.print_json(found)
    return output.OK


def _loss(topic: TopicStanding, behind: int, will: str) -> str:
    groups = count_of(len(topic.groups), "group")
    names = f" ({', '.join(output.safe(group.name) for group in topic.groups)})" if topic.groups else ""
    left = f"; {count_of(behind, 'message')} not handled yet" if behind else ""
    messages, letters = count_of(topic.messages, "message"), count_of(topic.dead, "dead letter")
    return f"{output.safe(topic.name)} {will} be deleted for good, with {messages}, {letters} and {groups}{names}{left}"


@topic_app.command("compact")
def topic_compact_command(
    folder: opening.DataFolder, name: TopicName, wait: opening.Wait = opening.WAIT, as_json: opening.AsJson = False
) -> int:
    """Keep only the last message of each key, now. With cleanup=compact this also happens automatically.

    Offsets never change.

    Examples:
        holdfast topic compact ./data prices
    """
    _standing(folder, name)
    # Without the upkeep threads: they compact as well, and their work would not be counted.
    with opening.opened_broker(folder, wait=wait, keep=False) as broker:
        done = _compacted(broker, name, as_json=as_json)
    if as_json:
        output.print_json({"topic": name, **msgspec.to_builtins(done)})
        return output.OK
    output.say(
        f"{count_of(done.removed_messages, 'message')} removed, because their keys have newer ones; "
        f"{output.size(done.freed_bytes)} freed, {count_of(done.segments, 'segment')} rewritten"
    )
    return output.OK


def _compacted(broker: holdfast.Broker, name: str, *, as_json: bool) -> KeysCompacted:
    if port_of(broker).shared:
        return broker.compact_topic(name)
    with opening.engine_of(broker).using(name) as topic:
        if topic.settings.cleanup == "delete":
            raise InvalidRequest(
                f"{name} is not compacted by key; its messages are removed by retention (cleanup=delete). Change that "
                f"with `holdfast topic alter {broker.folder} {name} cleanup=compact`; to remove handled messages, use "
                f"`holdfast compact {broker.folder} --topic {name}`"
            )
        opening.engine_of(broker).tick()
        with output.progress("compacting", shown=not as_json) as advance:
            return topic.compact_keys(advance, roll=True)
