"""`holdfast stats` and `holdfast top`: how many messages are in which state, and how fast they move or did lately."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec

from holdfast.api import port_of
from holdfast.api.drafts import parse_duration, to_datetime
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.inspect import GroupStanding, TopicStanding
from holdfast.broker.samples import Line, Samples, line_of, peak_of, squeezed, top_of
from holdfast.cli import output
from holdfast.cli.opening import AsJson, DataFolder, QueueAt, Topic, opened_broker, topics_of, unknown_topic
from holdfast.cli.parsing import cells, option
from holdfast.cli.places import queue_of
from holdfast.cli.reading import standing_of, standing_with_delayed
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, Unavailable
from holdfast.model import Pause, count_of


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A group, or a query of another process. `settled` is only meaningful compared with another sample."""

    name: str
    mode: str
    ready: int
    leased: int
    retries: int
    oldest_seconds: float
    settled: int
    paused: bool = False


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
        from holdfast.cli.look.log import owner_of

        owner = owner_of(self.name)
        return f"owned by {owner}" if owner is not None and owner.alive else "no visible owner"


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
        paused=group.paused is not None,
    )


Sort: TypeAlias = Literal["name", "ready", "leased", "delayed", "dead", "oldest", "in", "out", "disk"]
_SORTS: Final = get_args(Sort)
_ESCAPE: Final = "\x1b"
# The first rates are measured over this time, so that nobody waits for a whole interval to see any.
_FIRST_S: Final = 0.5


def top_command(
    folder: DataFolder,
    interval: Annotated[str, option("--interval TIME", "How often to refresh.")] = "2s",
    sort: Annotated[Sort, option("--sort", "Sort by this column; numbers in descending order.")] = "name",
    matching: Annotated[str, option("--filter PATTERN", "Only topics whose name matches, such as 'orders*'.")] = "",
    once: Annotated[bool, option("--once", "Print one table and exit.")] = False,
    topic: Topic = None,
    as_json: AsJson = False,
) -> int:
    """Watch all queues: how full they are, and how fast they move.

    Refreshes until you press q or Ctrl-C. While it runs, s chooses the column to sort by, r reverses the order, / asks
    for a filter, and the space bar pauses. Needs no lock, so it works while another process owns the folder.

    Examples:
        holdfast top ./data
        holdfast top http://127.0.0.1:7700 --sort in --filter 'orders*'
        holdfast top ./data --once --json
    """
    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.1:
        raise InvalidRequest(f"--interval {interval} is too short; use 100ms or more")
    source, view = LoadSource(folder, topic), View(sort, matching)
    before = source.look()  # an error now is raised; later ones are shown
    time.sleep(min(interval_s, _FIRST_S))
    if not once:
        _watch(source, view, before, interval_s, as_json=as_json)
    load = source.look()
    if once and as_json:
        output.print_json(document(source.name, load, before, view))
    elif once:
        output.stdout().print(load_table(load, before, view))
    return output.OK


class View:
    """Which rows are shown, and in which order."""

    def __init__(self, sort: str = "name", matching: str = "") -> None:
        self.sort = sort
        self.matching = matching
        self.reverse = False

    def next_sort(self) -> None:
        self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]

    def rows(self, load: Load, rates: _Rates) -> list[tuple[TopicLoad, GroupLoad]]:
        """Return a row for each group, and one for each topic without groups."""
        pattern = self.matching if any(sign in self.matching for sign in "*?[") else f"*{self.matching}*"
        topics = [topic for topic in load.topics if fnmatchcase(topic.name, pattern)]
        rows = [(topic, group) for topic in topics for group in topic.groups or [_nobody(topic)]]
        if self.sort != "name":
            rows.sort(key=lambda row: self._number(row[0], row[1], rates), reverse=True)
        return rows[::-1] if self.reverse else rows

    def _number(self, topic: TopicLoad, group: GroupLoad, rates: _Rates) -> float:
        found: dict[str, float | None] = {
            "ready": group.ready,
            "leased": group.leased,
            "delayed": topic.delayed + group.retries,
            "dead": topic.dead,
            "oldest": group.oldest_seconds,
            "in": rates.of_topic(topic),
            "out": rates.of_group(topic, group),
            "disk": topic.bytes,
        }
        return found[self.sort] or 0.0


def _watch(source: LoadSource, view: View, before: Load, interval_s: float, *, as_json: bool) -> None:
    """Show samples until interrupted, or until somebody presses q."""
    console = output.stdout()
    with Keys(shown=not as_json) as keys, output.Screen(console, painted=not as_json, whole=True) as live:
        while True:
            load = _looked(source, live, as_json=as_json)
            if load is not None and as_json:
                output.print_json(document(source.name, load, before, view))
            elif load is not None:
                live.update(*_frame(source, load, before, view))
            console.file.flush()
            shown = before
            before = load or before
            until = time.monotonic() + interval_s
            while (left := until - time.monotonic()) > 0:
                key = keys.pressed(left)
                if key == "q":
                    return
                if key == " ":
                    if load is not None:
                        live.update(*_frame(source, load, shown, view, paused=True))
                    while (key := keys.pressed(60)) not in (" ", "q"):
                        pass
                    if key == "q":
                        return
                if key and load is not None:
                    _obey(key, view, keys, live)
                    live.update(*_frame(source, load, shown, view))


def _obey(key: str, view: View, keys: Keys, live: output.Screen) -> None:
    """Change what is shown, as a key asks."""
    if key == "s":
        view.next_sort()
    elif key == "r":
        view.reverse = not view.reverse
    elif key == "/":
        typed = ""
        while key not in ("\r", "\n"):
            if key == _ESCAPE:
                return  # the filter stays as it was
            live.update(f"Show topics whose name contains: {typed}_")
            key = keys.pressed(60)
            typed = typed[:-1] if key in ("\x7f", "\b") else typed + key if key.isprintable() else typed
        view.matching = typed


def _frame(
    source: LoadSource, load: Load, before: Load, view: View, *, paused: bool = False
) -> list[str | output.Table]:
    shown: list[str | output.Table] = [_caption(source, load), load_table(load, before, view)]
    console = output.stdout()
    if console.is_terminal:
        chosen = f"sorted by {view.sort}{', reversed' if view.reverse else ''}"
        chosen += f", filter {output.safe(view.matching)}" if view.matching else ""
        keys = "paused: space goes on, q quits" if paused else "q quit  s sort  r reverse  / filter  space pause"
        width = cells()
        fits = output.cell_len(chosen) + output.cell_len(keys) + 3 <= width
        shown.append(
            "\n" + (f"{chosen}   {keys}" if fits else f"{output.cut(chosen, width)}\n{output.cut(keys, width)}")
        )
    return shown


class Keys:
    """Reads single keys from a terminal; elsewhere it only waits."""

    def __init__(self, *, shown: bool) -> None:
        self._reads = shown and sys.stdin.isatty() and sys.stdout.isatty()
        self._before: Any = None

    def __enter__(self) -> Keys:
        if self._reads:
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reads:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def pressed(self, wait_s: float) -> str:
        """Return the next key; nothing if none is pressed in this time."""
        if not self._reads:
            time.sleep(wait_s)
            return ""
        import select

        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return os.read(sys.stdin.fileno(), 1).decode("utf-8", "replace") if ready else ""


def _looked(source: LoadSource, live: output.Screen, *, as_json: bool) -> Load | None:
    try:
        return source.look()
    except HoldfastError as error:  # an owner that is changing much, or a deleted topic
        if as_json:
            output.print_json({"error": {"code": error.code, "message": str(error)}})
        else:
            live.update(output.safe(str(error)))
        return None


def document(name: str, load: Load, before: Load, view: View) -> dict[str, Any]:
    """Return a sample as a JSON document; the rates of what is new since the last one are null."""
    rates = _Rates(load, before)
    shown = list({topic.name: topic for topic, _ in view.rows(load, rates)}.values())
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
            for topic in shown
        ],
    }


def load_table(load: Load, before: Load, view: View) -> output.Table:
    """Return a table with a row for each group, and one for each topic without groups."""
    rates = _Rates(load, before)
    titles = ("topic", "group", "ready>", "leased>", "delayed>", "dead>", "oldest>", "in/s>", "out/s>", "disk>")
    shown = output.table(*titles)
    for topic, group in view.rows(load, rates):
        shown.add_row(
            output.safe(topic.name),
            f"{output.safe(group.name)}{' (paused)' if group.paused else ''}",
            f"{group.ready:,}",
            f"{group.leased:,}",
            f"{topic.delayed + group.retries:,}",
            f"{topic.dead:,}",
            _age(group.oldest_seconds) if group.oldest_seconds else "-",
            _rate(rates.of_topic(topic)),
            _rate(rates.of_group(topic, group)),
            output.size(topic.bytes),
        )
    return shown


def _nobody(topic: TopicLoad) -> GroupLoad:
    """Return a row for a topic without groups, all of whose messages are ready."""
    return GroupLoad(name="-", mode="", ready=topic.messages, leased=0, retries=0, oldest_seconds=0.0, settled=0)


def _caption(source: LoadSource, load: Load) -> str:
    groups = sum(len(topic.groups) for topic in load.topics)
    counts = f"{count_of(len(load.topics), 'topic')}, {count_of(groups, 'group')}"
    now = datetime.fromtimestamp(real_world().clock.now_ns() / 1e9, UTC)
    line = output.safe(f"{now:%H:%M:%S} UTC  {counts}  {source.name}, {source.owner()}")
    return f"{output.cut(line, output.stdout().width)}\n"


class _Rates:
    """How many messages went in and out per second since the previous sample."""

    def __init__(self, load: Load, before: Load) -> None:
        self._seconds = load.at_s - before.at_s
        self._topics = _by_name(before.topics)

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


def stats_command(
    at: QueueAt,
    watch: Annotated[bool, option("--watch", "Refresh until Ctrl-C.")] = False,
    every: Annotated[str, option("--every TIME", "How often to refresh, with --watch.")] = "2s",
    history: Annotated[
        str | None, option("--history TIME", "Show this much of the past as charts, such as 15m or 6h; at most 7d.")
    ] = None,
) -> int:
    """Count the messages of a queue by phase. Also shows its oldest message and the disk space it uses.

    In a folder with several topics, each topic is a row, with the lag of its groups.

    Examples:
        holdfast stats jobs
        holdfast stats ./data --watch --every 5s
        holdfast stats jobs --history 6h
    """
    if history is not None:
        if watch:
            raise InvalidRequest("give --history or --watch, not both")
        return show_history(at, parse_duration(history, "--history"))
    looking = _Looking(at)
    if not watch:
        found, shown = looking.look()
        if at.as_json:
            output.print_json(found)
        else:
            output.stdout().print(shown)
        return output.OK
    every_s = parse_duration(every, "--every")
    if every_s < 0.1:
        raise InvalidRequest(f"--every {every} is too short; use 100ms or more")
    _watch_stats(looking, every_s, as_json=at.as_json)
    return output.OK


class _Looking:
    """Samples a queue, or many topics, repeatedly."""

    def __init__(self, at: QueueAt) -> None:
        self._at = at

    def look(self) -> tuple[dict[str, Any], output.Table]:
        """Return the current counts, as a JSON document and as a table."""
        place = self._at.folder
        named = self._at.topic or self._at.group or queue_of(place)
        if not named and len(topics_of(place)) > 1:
            from holdfast.cli.operate.topics import topics_document, topics_table

            topics = list(standing_of(place).topics())
            return topics_document(place, topics), topics_table(topics)
        with self._at.opened() as queue:
            oldest_ns = port_of(queue).oldest_ready_ns()
            stats = queue.stats()  # after the line above, which may come across damage
            found: dict[str, Any] = {**msgspec.to_builtins(stats), "folder": queue.folder}
        for own in ("metrics", "waiters", "durability"):
            del found[own]  # these describe only this process
        found |= output.moment("oldest_ready", None if oldest_ns is None else to_datetime(oldest_ns))
        return found, _stats_table(found, stats.paused)


def _watch_stats(looking: _Looking, every_s: float, *, as_json: bool) -> None:
    """Print the counts repeatedly. The folder is free between two samples; while it is busy, say so."""
    looking.look()  # an error now is raised; later ones are shown
    console = output.stdout()
    with output.Screen(console, painted=not as_json) as live:
        while True:
            try:
                found, shown = looking.look()
                if as_json:
                    output.print_json(found)
                else:
                    live.update(shown)
            except Unavailable as busy:
                if as_json:
                    output.print_json({"busy": str(busy)})
                else:
                    live.update(output.safe(str(busy)))
            console.file.flush()
            time.sleep(every_s)


def _stats_table(found: dict[str, Any], paused: Pause | None) -> output.Table:
    facts = output.facts_table()
    of_group = "" if found["group"] == DEFAULT_GROUP else f", group {output.safe(found['group'])}"
    facts.add_row("queue", f"{output.safe(found['name'])} in {output.safe(found['folder'])}{of_group}")
    if paused is not None:
        from holdfast.cli.operate.queue import pause_text

        facts.add_row("paused", f"{pause_text(paused)}; `holdfast resume` ends it")
    for phase in ("ready", "leased", "delayed", "dead"):
        facts.add_row(phase, f"{found[phase]:,}")
    if found["damaged"]:
        facts.add_row("damaged", f"{found['damaged']:,}, which cannot be read: see `holdfast check`")
    if found["oldest_ready_ms"] is not None:
        when = to_datetime(found["oldest_ready_ms"] * 1_000_000)
        facts.add_row("oldest ready", f"{output.seconds_text(when)} UTC ({_age_of(found['oldest_ready_ms'])} old)")
    start, end = found["start"], found["end"]
    if found["partitions"] > 1:  # the offsets are sums, which mean nothing
        facts.add_row("partitions", f"{found['partitions']:,}, with {count_of(end - start, 'message')} kept")
    else:
        kept = (
            f"{start} to {end - 1} are kept; all messages before {found['floor']} are settled"
            if end > start
            else "none yet"
        )
        facts.add_row("offsets", kept)
    facts.add_row("disk", f"{output.size(found['bytes'])} in {count_of(found['segments'], 'segment')}")
    return facts


def _age_of(ms: int) -> str:
    now_ms = real_world().clock.now_ns() // 1_000_000
    return str(timedelta(seconds=max(0, now_ms - ms) // 1000))


# The past, from the samples that the owner of a folder takes.


_BARS: Final = "▁▂▃▄▅▆▇█"
_BURST: Final = "▲"  # above the scale
_NONE: Final = " "
_MOST_COLUMNS: Final = 60


def _rate_text(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 10 else f"{value:.2g}/s"


def _count_text(value: float) -> str:
    return f"{value:,.0f}"


def _time_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


_SAMPLED: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("published", "published_rate", _rate_text),
    ("handled", "handled_rate", _rate_text),
    ("failed", "failed_rate", _rate_text),
    ("ready", "ready", _count_text),
    ("dead", "dead", _count_text),
    ("oldest", "oldest_seconds", _time_text),
    ("handling, median", "handle_p50_seconds", _time_text),
    ("handling, 99%", "handle_p99_seconds", _time_text),
)


def show_history(at: QueueAt, span_s: float) -> int:
    """Print the samples of a queue; of a folder with several topics, those of all together."""
    place = at.folder
    if not (at.topic or at.group or queue_of(place)) and len(topics_of(place)) > 1:
        with opened_broker(place) as broker:
            samples = broker.samples(last=span_s)
    else:
        with at.opened() as queue:
            samples = queue.samples(last=span_s)
    if at.as_json:
        output.print_json(msgspec.to_builtins(samples))
        return output.OK
    output.stdout().print(_history_title(samples))
    if samples.samples:
        output.stdout().print(history_table(samples))
    return output.OK


def _history_title(samples: Samples) -> str:
    name = f"{output.safe(samples.topic)}, group {output.safe(samples.group)}" if samples.topic else "all topics"
    span = f"{output.seconds_text(samples.since)} to {output.seconds_text(samples.until)} UTC"
    if not samples.samples:
        return f"{name}: no samples from {span}. The owner of the folder takes one every 5 seconds while it is open."
    return f"{name}, {span}, in steps of {_time_text(samples.step_seconds)}"


def history_table(samples: Samples) -> output.Table:
    """Return a table with a sparkline for each thing that is sampled."""
    shown = output.table("", "last>", "peak>", "")
    for name, field, text in _SAMPLED:
        line = line_of(samples, field)
        known = [value for value in line if value is not None]
        if known:
            shown.add_row(name, text(known[-1]), text(peak_of(line)), sparkline(line))
    return shown


def sparkline(line: Line) -> str:
    """Return a line as text, one character for each column; what is above the scale is a triangle."""
    columns = squeezed(line, _MOST_COLUMNS)
    top = top_of(columns)
    return "".join(_bar(value, top) for value in columns)


def _bar(value: float | None, top: float) -> str:
    if value is None:
        return _NONE
    if value > top:
        return _BURST
    return _BARS[min(int(value / top * len(_BARS)), len(_BARS) - 1)] if top else _BARS[0]
