"""`holdfast topic`: make topics, look at them, change them, take them away."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from rich.table import Table

from holdfast.broker.folder.layout import check_topic_name
from holdfast.broker.inspect.status import TopicStanding
from holdfast.cli.completion import topic_names
from holdfast.cli.look.topics import standing_of
from holdfast.cli.opening import has_owner, opened_broker, owned, settings_of, topics_of, unknown_topic
from holdfast.cli.operate.group import groups_table
from holdfast.cli.operate.settings import changes_of, show_settings
from holdfast.cli.options import WAIT, AsJson, DataFolder, DryRun, Wait, Yes
from holdfast.cli.output import NOT_DONE, OK, Section, command, confirmed, print_json, stderr, stdout
from holdfast.cli.progress import share
from holdfast.cli.text import safe, short_time, show_table, size, table
from holdfast.client.address import is_address
from holdfast.errors import BadSettings, InvalidRequest, TopicExists
from holdfast.storage.checks.finding import count_of
from holdfast.storage.compaction import KeysCompacted

app = Section("Topics: make them, look at them, change them, take them away.")

Name: TypeAlias = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.", autocompletion=topic_names)]
_Changes: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Settings, such as retention_ms=7d cleanup=compact.")
]


@app.command("create")
@command
def create_command(
    folder: DataFolder,
    name: Name,
    changes: _Changes = None,
    partitions: Annotated[int | None, typer.Option("--partitions", metavar="N", min=1, help="How many.")] = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="A topic that is there already is no error.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Make a topic; the data folder, too, where there is none."""
    check_topic_name(name)
    wanted = changes_of(changes or [])
    if partitions is not None:
        if "partitions" in wanted:
            raise BadSettings("--partitions and partitions=... both say how many; give one of them")
        wanted["partitions"] = partitions
    made = True
    with opened_broker(folder, wait=wait, create=True) as broker:
        try:
            broker.create_topic(name, **wanted)
        except TopicExists:
            if not exist_ok:
                raise
            made = False
        count = len(broker.describe_topic(name).partitions)
    if as_json:
        print_json({"topic": name, "made": made, "partitions": count})
    else:
        stdout().print(f"{'made' if made else 'there already:'} {name}, {count_of(count, 'partition')}", soft_wrap=True)
    return OK


@app.command("ls")
@command
def ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the topics: what they hold, and how far behind their groups are. Needs no lock."""
    topics_of(folder)
    found = list(standing_of(folder).topics())
    if as_json:
        print_json(topics_document(folder, found))
    elif not found:
        stderr().print(f"no topics in {safe(folder)}", soft_wrap=True)
    else:
        show_table(stdout(), topics_table(found))
    return OK


def topics_document(folder: str, found: list[TopicStanding]) -> dict[str, Any]:
    """Topics for scripts."""
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


def topics_table(found: list[TopicStanding]) -> Table:
    """Topics for people."""
    shown = table(
        "topic",
        "partitions>",
        "messages>",
        "dead>",
        "disk>",
        "groups (messages behind)",
        wide="groups (messages behind)",
    )
    for topic in found:
        groups = ", ".join(f"{safe(group.name)} {group.lag:,}" for group in topic.groups)
        shown.add_row(
            safe(topic.name),
            f"{len(topic.partitions):,}",
            f"{topic.messages:,}",
            f"{topic.dead:,}",
            size(topic.bytes),
            groups or "none",
        )
    return shown


@app.command("show")
@command
def show_command(folder: DataFolder, name: Name, as_json: AsJson = False) -> int:
    """Show all of one topic: partitions, groups, settings. Needs no lock."""
    topic = _standing(folder, name)
    if as_json:
        print_json(_document(topic))
        return OK
    console = stdout()
    facts = Table.grid(padding=(0, 2))
    facts.add_row("topic", safe(topic.name))
    facts.add_row(
        "made", f"{short_time(topic.created_ms * 1_000_000)} UTC" if topic.created_ms else "by an early release"
    )
    facts.add_row("messages", f"{topic.messages:,} ({size(topic.bytes)})")
    facts.add_row("dead letters", f"{topic.dead:,}")
    console.print(facts)
    console.print()
    show_table(console, _partitions_table(topic))
    console.print()
    if topic.groups:
        show_table(console, groups_table(topic.groups))
    else:
        console.print("no groups")
    if topic.settings:
        console.print()
        show_settings(topic.settings)
    return OK


def _standing(folder: str, name: str) -> TopicStanding:
    if is_address(folder):
        return standing_of(folder).topic(check_topic_name(name))
    found = topics_of(folder)
    if check_topic_name(name) not in found:
        raise unknown_topic(folder, name, found)
    return standing_of(folder).topic(name)


def _partitions_table(topic: TopicStanding) -> Table:
    shown = table("partition>", "first>", "next>", "messages>", "disk>", "segments>")
    for each in topic.partitions:
        numbers = (each.start, each.end, each.end - each.start)
        shown.add_row(str(each.number), *(f"{n:,}" for n in numbers), size(each.bytes), f"{each.segments:,}")
    return shown


@app.command("alter")
@command
def alter_command(
    folder: DataFolder,
    name: Name,
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE", help="Such as max_attempts=3, or max_attempts=default.")
    ],
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Change settings of a topic; they count at once, and are kept."""
    wanted = changes_of(changes)
    if "partitions" in wanted:
        raise BadSettings(f"partitions are added with `holdfast topic partitions {folder} {name} --add N`")
    _standing(folder, name)
    with opened_broker(folder, wait=wait) as broker:
        broker.alter_topic(name, **wanted)
        settings = msgspec.structs.asdict(settings_of(broker, name))
    now = {setting: settings[setting] for setting in wanted}
    if as_json:
        print_json({"topic": name, "settings": msgspec.to_builtins(now)})
    else:
        show_settings(now)
    return OK


@app.command("partitions")
@command
def partitions_command(
    folder: DataFolder,
    name: Name,
    add: Annotated[int | None, typer.Option("--add", metavar="N", min=1, help="Add so many.")] = None,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Show the partitions of a topic, or add some. They are never taken away."""
    topic = _standing(folder, name)
    if add is not None:
        if not as_json:
            stdout().print(
                f"{safe(name)} will have {count_of(len(topic.partitions) + add, 'partition')}, for good. From then on "
                "most keys go to other partitions than before: messages of one key that are there already may be "
                "handled beside newer ones",
                soft_wrap=True,
            )
        if not confirmed("Add them?", "topic partitions", yes=yes, as_json=as_json):
            return NOT_DONE
        with opened_broker(folder, wait=wait) as broker:
            broker.add_partitions(name, add)
        topic = _standing(folder, name)
    if as_json:
        print_json({"topic": name, "partitions": msgspec.to_builtins(topic.partitions)})
    else:
        show_table(stdout(), _partitions_table(topic))
    return OK


@app.command("delete")
@command
def delete_command(
    folder: DataFolder,
    name: Name,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Take a topic away for good, with all its messages, groups and dead letters."""
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
        stdout().print(_loss(topic, behind, "would" if dry_run else "will"), soft_wrap=True)
    if not dry_run:
        if not confirmed("Delete it?", "topic delete", yes=yes, as_json=as_json):
            return NOT_DONE
        with opened_broker(folder, wait=wait) as broker:
            broker.delete_topic(name)
        found["deleted"] = True
        if not as_json:
            stdout().print(f"deleted {safe(name)}", soft_wrap=True)
    if as_json:
        print_json(found)
    return OK


def _loss(topic: TopicStanding, behind: int, will: str) -> str:
    groups = count_of(len(topic.groups), "group")
    names = f" ({', '.join(safe(group.name) for group in topic.groups)})" if topic.groups else ""
    left = f"; {count_of(behind, 'message')} not handled yet" if behind else ""
    messages, letters = count_of(topic.messages, "message"), count_of(topic.dead, "dead letter")
    return f"{safe(topic.name)} {will} be gone for good, with {messages}, {letters} and {groups}{names}{left}"


@app.command("compact")
@command
def compact_command(folder: DataFolder, name: Name, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Keep the last message of each key now, as cleanup=compact does in time; offsets never change."""
    _standing(folder, name)
    done = _compacted_by_owner(folder, name) or _compacted(folder, name, wait, as_json=as_json)
    if as_json:
        print_json({"topic": name, **msgspec.to_builtins(done)})
        return OK
    stdout().print(
        f"{count_of(done.removed_messages, 'message')} dropped for newer ones of their keys, {size(done.freed_bytes)} "
        f"freed: {count_of(done.segments, 'segment')} written anew",
        soft_wrap=True,
    )
    return OK


def _compacted_by_owner(folder: str, name: str) -> KeysCompacted | None:
    """What a server, or the process that owns the folder, has done; None where there is none."""
    if not is_address(folder) and not has_owner(folder):
        return None
    with opened_broker(folder) as broker:
        return broker.compact_topic(name)


def _compacted(folder: str, name: str, wait: str, *, as_json: bool) -> KeysCompacted:
    # Without the threads that look after a folder: they compact as well, and what they do would go uncounted.
    with owned(folder, wait=wait, keep=False) as engine, engine.using(name) as topic:
        if topic.settings.cleanup == "delete":
            raise InvalidRequest(
                f"{name} does not go by keys: its messages go by retention (cleanup=delete). Change that with "
                f"`holdfast topic alter {folder} {name} cleanup=compact`; to let go of handled messages use "
                f"`holdfast compact {folder} --topic {name}`"
            )
        engine.tick()
        with share("compacting", shown=not as_json) as progress:
            return topic.compact_keys(progress, roll=True)
