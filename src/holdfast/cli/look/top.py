"""`holdfast top`: what goes on in a data folder, looked at again and again, beside whoever owns it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import msgspec
import typer
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import partition_folder
from holdfast.broker.inspect.messages import count_beside
from holdfast.broker.inspect.status import FolderStatus, GroupStanding, TopicStanding
from holdfast.cli.look.log import owner_of
from holdfast.cli.look.topics import ToldStanding
from holdfast.cli.opening import topics_of, unknown_topic
from holdfast.cli.options import AsJson, DataFolder, Topic
from holdfast.cli.output import OK, command, print_json, print_json_line, stdout
from holdfast.cli.progress import Screen, screen
from holdfast.cli.text import safe, show_table, size, table
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.storage.checks.finding import count_of


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A group, or a query of another process. `settled` only says something beside the one of another look."""

    name: str
    mode: str
    ready: int
    leased: int
    retries: int
    oldest_seconds: float
    settled: int


class TopicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A topic; `delayed` are those that no group has got yet, `published` is where its partitions end, summed up."""

    name: str
    messages: int
    delayed: int
    dead: int
    bytes: int
    published: int
    groups: list[GroupLoad]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all topics, with the moment of it on a clock that never steps."""

    at_s: float
    topics: list[TopicLoad]


class Source(Protocol):
    """Where the numbers come from."""

    name: str

    def look(self) -> Load:
        """How things are now."""

    def owner(self) -> str:
        """Who runs it, for people."""


class FolderSource:
    """A data folder, read without owning it."""

    def __init__(self, folder: str, topic: str | None) -> None:
        self.name = folder
        self._topic = topic
        self._world = real_world()
        found = topics_of(folder)
        if topic is not None and topic not in found:
            raise unknown_topic(folder, topic, found)

    def look(self) -> Load:
        standing, at_s = FolderStatus(self._world, self.name), time.monotonic()
        found = standing.topics() if self._topic is None else [standing.topic(self._topic)]
        return Load(at_s=at_s, topics=[_load_of(topic, self._delayed(topic)) for topic in found])

    def owner(self) -> str:
        owner = owner_of(self.name)
        return f"owned by {owner}" if owner is not None and owner.alive else "no owner to be seen"

    def _delayed(self, topic: TopicStanding) -> int:
        return sum(
            count_beside(self._world, partition_folder(self.name, topic.name, each.number)) for each in topic.partitions
        )


class ServerSource:
    """A server, which is asked."""

    def __init__(self, place: str, topic: str | None) -> None:
        self.name = place
        self._topic = topic

    def look(self) -> Load:
        topics, delayed = ToldStanding(self.name).look(self._topic)
        loads = [_load_of(topic, delayed.get(topic.name, 0)) for topic in topics]
        return Load(at_s=time.monotonic(), topics=loads)

    def owner(self) -> str:
        return "a server"


def _load_of(topic: TopicStanding, delayed: int) -> TopicLoad:
    return TopicLoad(
        name=topic.name,
        messages=topic.messages,
        delayed=delayed,
        dead=topic.dead,
        bytes=topic.bytes,
        published=sum(each.end for each in topic.partitions),
        groups=[_group_load(group) for group in topic.groups],
    )


def _group_load(group: GroupStanding) -> GroupLoad:
    retries = sum(each.waiting for each in group.partitions)
    return GroupLoad(
        name=group.name,
        mode=group.mode,
        ready=max(group.lag - group.leased - retries, 0),
        leased=group.leased,
        retries=retries,
        oldest_seconds=round(group.lag_seconds, 3),
        settled=sum(each.end - each.lag for each in group.partitions),
    )


@command
def top_command(
    folder: DataFolder,
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="How often to look.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Look once, without rates, and end.")] = False,
    topic: Topic = None,
    as_json: AsJson = False,
) -> int:
    """Show all queues, how full they are and how fast they move, until Ctrl-C.

    Needs no lock: works beside a process that owns the folder.
    """
    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.1:
        raise InvalidRequest(f"--interval {interval} is too often; give 100ms or more")
    source: Source = ServerSource(folder, topic) if is_address(folder) else FolderSource(folder, topic)
    if not once:
        _watch(source, interval_s, as_json=as_json)
    load = source.look()
    if as_json:
        print_json(document(source.name, load, None))
    else:
        show_table(stdout(), load_table(load, None))
    return OK


def _watch(source: Source, interval_s: float, *, as_json: bool) -> None:
    """What is wrong at the first look is an error; what comes later is shown."""
    console, before = stdout(), source.look()
    load: Load | None = before
    with screen(console, painted=not as_json, whole=True) as live:
        while True:
            if load is not None:
                shown_before = None if load is before else before
                if as_json:
                    print_json_line(document(source.name, load, shown_before))
                else:
                    live.update(Lines(_caption(source, load), load_table(load, shown_before)), refresh=True)
                before = load
            console.file.flush()
            time.sleep(interval_s)
            load = _looked(source, live, as_json=as_json)


def _looked(source: Source, live: Screen, *, as_json: bool) -> Load | None:
    try:
        return source.look()
    except HoldfastError as error:  # an owner that changes much just now, or a topic that went
        if as_json:
            print_json_line({"error": {"code": error.code, "message": str(error)}})
        else:
            live.update(Text(safe(str(error))), refresh=True)
        return None


def document(name: str, load: Load, before: Load | None) -> dict[str, Any]:
    """One look for scripts; rates are null in the first."""
    rates = _Rates(load, before)
    return {
        "folder": name,
        "topics": [
            {
                **msgspec.to_builtins(topic),
                "in_per_second": rates.of_topic(topic),
                "groups": [
                    {**msgspec.to_builtins(group), "out_per_second": rates.of_group(topic, group)}
                    for group in topic.groups
                ],
            }
            for topic in load.topics
        ],
    }


def load_table(load: Load, before: Load | None) -> Table:
    """The same for people: a line for each group, and one for a topic that has none."""
    rates = _Rates(load, before)
    titles = ("topic", "group", "ready>", "leased>", "delayed>", "dead>", "oldest>", "in/s>", "out/s>", "disk>")
    shown = table(*titles)
    for topic in load.topics:
        for group in topic.groups or [_nobody(topic)]:
            shown.add_row(
                safe(topic.name),
                safe(group.name),
                f"{group.ready:,}",
                f"{group.leased:,}",
                f"{topic.delayed + group.retries:,}",
                f"{topic.dead:,}",
                _age(group.oldest_seconds) if group.oldest_seconds else "-",
                _rate(rates.of_topic(topic)),
                _rate(rates.of_group(topic, group)),
                size(topic.bytes),
            )
    return shown


def _nobody(topic: TopicLoad) -> GroupLoad:
    """All is ready for a group that is still to come."""
    return GroupLoad(name="-", mode="", ready=topic.messages, leased=0, retries=0, oldest_seconds=0.0, settled=0)


def _caption(source: Source, load: Load) -> Text:
    groups = sum(len(topic.groups) for topic in load.topics)
    counts = f"{count_of(len(load.topics), 'topic')}, {count_of(groups, 'group')}"
    now = datetime.fromtimestamp(real_world().clock.now_ns() / 1e9, UTC)
    line = safe(f"{now:%H:%M:%S} UTC  {counts}  {source.name}, {source.owner()}")
    return Text(f"{line}\n", no_wrap=True, overflow="ellipsis")


class _Rates:
    """How much went in and out since the look before."""

    def __init__(self, load: Load, before: Load | None) -> None:
        self._seconds = 0.0 if before is None else load.at_s - before.at_s
        self._topics = {} if before is None else _by_name(before.topics)

    def of_topic(self, topic: TopicLoad) -> float | None:
        before = self._topics.get(topic.name)
        return None if before is None else self._rate(topic.published - before.published)

    def of_group(self, topic: TopicLoad, group: GroupLoad) -> float | None:
        known = self._topics.get(topic.name)
        before = None if known is None else {each.name: each for each in known.groups}.get(group.name)
        return None if before is None else self._rate(group.settled - before.settled)

    def _rate(self, count: int) -> float | None:
        # A group that was set back, or a tail that was lost: that is no speed.
        return round(max(count, 0) / self._seconds, 3) if self._seconds > 0 else None


def _by_name(topics: Iterable[TopicLoad]) -> Mapping[str, TopicLoad]:
    return {topic.name: topic for topic in topics}


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def _age(seconds: float) -> str:
    """A short time to the second, a long one to the minute."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if whole >= 3600:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if whole >= 60 else f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"
