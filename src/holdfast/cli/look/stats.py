"""`holdfast stats` and `holdfast top`: how many messages are in which state, and how fast they move."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from holdfast.api.drafts import parse_duration, to_datetime
from holdfast.api.ports import port_of
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.inspect.status import GroupStanding, TopicStanding
from holdfast.cli.look.log import owner_of
from holdfast.cli.opening import AsJson, DataFolder, QueueAt, Topic, topics_of, unknown_topic
from holdfast.cli.operate.topics import topics_document, topics_table
from holdfast.cli.output import (
    OK,
    Screen,
    command,
    facts_table,
    moment,
    print_json,
    print_json_line,
    safe,
    screen,
    seconds_text,
    show_table,
    size,
    stdout,
    table,
)
from holdfast.cli.places import option, queue_of
from holdfast.cli.reading import standing_of, standing_with_delayed
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, Unavailable
from holdfast.storage.checks.finding import count_of


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A group, or a query of another process. `settled` is only meaningful compared with another sample."""

    name: str
    mode: str
    ready: int
    leased: int
    retries: int
    oldest_seconds: float
    settled: int


class TopicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A topic. `delayed` messages are in no group yet; `published` is the sum of the ends of its partitions."""

    name: str
    messages: int
    delayed: int
    dead: int
    bytes: int
    published: int
    groups: list[GroupLoad]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of all topics, with its time on a monotonic clock."""

    at_s: float
    topics: list[TopicLoad]


class LoadSource:
    """The source of the numbers: a data folder, read without owning it, or a server."""

    def __init__(self, place: str, topic: str | None) -> None:
        self.name = place
        self._topic = topic
        if not is_address(place):
            found = topics_of(place)
            if topic is not None and topic not in found:
                raise unknown_topic(place, topic, found)

    def look(self) -> Load:
        """Take a sample."""
        at_s, (topics, delayed) = time.monotonic(), standing_with_delayed(self.name, self._topic)
        return Load(at_s=at_s, topics=[_load_of(topic, delayed.get(topic.name, 0)) for topic in topics])

    def owner(self) -> str:
        """Describe the process that owns the folder."""
        if is_address(self.name):
            return "a server"
        owner = owner_of(self.name)
        return f"owned by {owner}" if owner is not None and owner.alive else "no owner to be seen"


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
    interval: Annotated[str, option("--interval TIME", "How often to look.")] = "2s",
    once: Annotated[bool, option("--once", "Look once, without rates, and end.")] = False,
    topic: Topic = None,
    as_json: AsJson = False,
) -> int:
    """Show all queues, how full they are and how fast they move, until Ctrl-C.

    Needs no lock: works beside a process that owns the folder.
    """
    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.1:
        raise InvalidRequest(f"--interval {interval} is too often; give 100ms or more")
    source = LoadSource(folder, topic)
    if not once:
        _watch(source, interval_s, as_json=as_json)
    load = source.look()
    if as_json:
        print_json(document(source.name, load, None))
    else:
        show_table(stdout(), load_table(load, None))
    return OK


def _watch(source: LoadSource, interval_s: float, *, as_json: bool) -> None:
    """Show samples until interrupted. An error in the first sample is raised; later ones are shown."""
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


def _looked(source: LoadSource, live: Screen, *, as_json: bool) -> Load | None:
    try:
        return source.look()
    except HoldfastError as error:  # an owner that is changing much, or a deleted topic
        if as_json:
            print_json_line({"error": {"code": error.code, "message": str(error)}})
        else:
            live.update(Text(safe(str(error))), refresh=True)
        return None


def document(name: str, load: Load, before: Load | None) -> dict[str, Any]:
    """Return a sample as a JSON document; rates are null in the first."""
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
    """Return a table with a row for each group, and one for each topic without groups."""
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
    """Return a row for a topic without groups, all of whose messages are ready."""
    return GroupLoad(name="-", mode="", ready=topic.messages, leased=0, retries=0, oldest_seconds=0.0, settled=0)


def _caption(source: LoadSource, load: Load) -> Text:
    groups = sum(len(topic.groups) for topic in load.topics)
    counts = f"{count_of(len(load.topics), 'topic')}, {count_of(groups, 'group')}"
    now = datetime.fromtimestamp(real_world().clock.now_ns() / 1e9, UTC)
    line = safe(f"{now:%H:%M:%S} UTC  {counts}  {source.name}, {source.owner()}")
    return Text(f"{line}\n", no_wrap=True, overflow="ellipsis")


class _Rates:
    """How many messages went in and out per second since the previous sample."""

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
        # A negative count means that a group was reset or a tail was lost, which is no rate.
        return round(max(count, 0) / self._seconds, 3) if self._seconds > 0 else None


def _by_name(topics: Iterable[TopicLoad]) -> Mapping[str, TopicLoad]:
    return {topic.name: topic for topic in topics}


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def _age(seconds: float) -> str:
    """Format an age: a short one to the second, a long one to the minute."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if whole >= 3600:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if whole >= 60 else f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"


@command
def stats_command(
    at: QueueAt,
    watch: Annotated[bool, option("--watch", "Look again and again, until Ctrl-C.")] = False,
    every: Annotated[str, option("--every TIME", "How often to look, with --watch.")] = "2s",
) -> int:
    """Count the messages that are ready, leased, delayed and dead, and tell what they take.

    Of a folder with several topics it tells what each holds, and how far behind its groups are.
    """
    looking = _Looking(at)
    if not watch:
        found, shown = looking.look()
        if at.as_json:
            print_json(found)
        else:
            show_table(stdout(), shown)
        return OK
    every_s = parse_duration(every, "--every")
    if every_s < 0.1:
        raise InvalidRequest(f"--every {every} is too often; give 100ms or more")
    _watch_stats(looking, every_s, as_json=at.as_json)
    return OK


class _Looking:
    """Samples a queue, or many topics, repeatedly."""

    def __init__(self, at: QueueAt) -> None:
        self._at = at

    def look(self) -> tuple[dict[str, Any], Table]:
        """Return the current counts, as a JSON document and as a table."""
        place = self._at.folder
        named = self._at.topic or self._at.group or queue_of(place)
        if not named and len(topics_of(place)) > 1:
            topics = list(standing_of(place).topics())
            return topics_document(place, topics), topics_table(topics)
        with self._at.opened() as queue:
            oldest_ns = port_of(queue).oldest_ready_ns()
            stats = queue.stats()  # after the line above, which may come across damage
            found: dict[str, Any] = {**msgspec.to_builtins(stats), "folder": queue.folder}
        for own in ("metrics", "waiters", "durability"):
            del found[own]  # these describe only this process
        found |= moment("oldest_ready", None if oldest_ns is None else to_datetime(oldest_ns))
        return found, _stats_table(found)


def _watch_stats(looking: _Looking, every_s: float, *, as_json: bool) -> None:
    """Print the counts repeatedly. The folder is free between two samples; while it is busy, say so."""
    looking.look()  # an error now is raised; later ones are shown
    console = stdout()
    with screen(console, painted=not as_json) as live:
        while True:
            try:
                found, shown = looking.look()
                if as_json:
                    print_json_line(found)
                else:
                    live.update(shown, refresh=True)
            except Unavailable as busy:
                if as_json:
                    print_json_line({"busy": str(busy)})
                else:
                    live.update(Text(safe(str(busy))), refresh=True)
            console.file.flush()
            time.sleep(every_s)


def _stats_table(found: dict[str, Any]) -> Table:
    facts = facts_table()
    of_group = "" if found["group"] == DEFAULT_GROUP else f", group {safe(found['group'])}"
    facts.add_row("queue", f"{safe(found['name'])} in {safe(found['folder'])}{of_group}")
    for phase in ("ready", "leased", "delayed", "dead"):
        facts.add_row(phase, f"{found[phase]:,}")
    if found["damaged"]:
        facts.add_row("damaged", f"{found['damaged']:,}, which nobody can read: see `holdfast check`")
    if found["oldest_ready_ms"] is not None:
        when = to_datetime(found["oldest_ready_ms"] * 1_000_000)
        facts.add_row("oldest ready", f"{seconds_text(when)} UTC ({_age_of(found['oldest_ready_ms'])} old)")
    start, end = found["start"], found["end"]
    if found["partitions"] > 1:  # the offsets are sums, which mean nothing
        facts.add_row("partitions", f"{found['partitions']:,}, with {count_of(end - start, 'message')} kept")
    else:
        kept = f"{start} to {end - 1} are kept; all before {found['floor']} are settled" if end > start else "none yet"
        facts.add_row("offsets", kept)
    facts.add_row("disk", f"{size(found['bytes'])} in {count_of(found['segments'], 'segment')}")
    return facts


def _age_of(ms: int) -> str:
    now_ms = real_world().clock.now_ns() // 1_000_000
    return str(timedelta(seconds=max(0, now_ms - ms) // 1000))
