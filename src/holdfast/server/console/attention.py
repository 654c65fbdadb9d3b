"""What needs somebody's attention, the worst first, each with a link to where it can be handled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from holdfast.api.topics import GroupInfo
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.model import Pause
from holdfast.server.console.charts import Flow, Spark
from holdfast.server.console.rendering import age, count, size

OLD_S: Final = 15 * 60  # the age from which a message is shown in red
MOST_SHOWN: Final = 12
_LOW_BYTES: Final = 1024**3  # less free space than this is little, whatever the settings say


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One queue group of one topic. A topic without one has a row with an empty group."""

    topic: str
    group: str = ""
    messages: int = 0
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    dead: int = 0
    age_s: float = 0.0
    waiters: int = 0
    spark: Spark
    buried: int = 0
    damaged: int = 0
    stalled: bool = False
    problem: str = ""
    upkeep_error: str = ""
    paused: Pause | None = None

    @property
    def is_old(self) -> bool:
        return self.age_s >= OLD_S

    @property
    def dead_grows(self) -> bool:
        return self.dead > 0 and self.buried > 0


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that needs attention: what, in which words, and where it can be handled."""

    what: str
    text: str
    href: str
    link: str


def concerns(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> list[Concern]:
    """What is wrong with these queues and groups, the worst first."""
    found = [*_damage(rows, groups), *_upkeep(rows), *_stalled(rows, groups), *_old(rows), *_dead(rows)]
    return list(dict.fromkeys(found))  # what concerns a topic is in the rows of all its groups


def disk_concern(engine: BrokerEngine, free_bytes: int) -> list[Concern]:
    """That the disk is nearly full, if it is."""
    least = engine.settings.topic.min_free_bytes
    if free_bytes >= max(_LOW_BYTES, 2 * least):
        return []
    text = f"{size(free_bytes)} free; below {size(least)} (min_free_bytes) new messages are refused"
    return [Concern(what="The disk is nearly full", text=text, href="/ui/health", link="Health")]


def link_of(topic: str, group: str = "", page: str = "") -> str:
    """The address of a page of a queue."""
    asked = f"?{urlencode({'group': group})}" if group not in ("", DEFAULT_GROUP) else ""
    return f"/ui/queues/{quote(topic, safe='')}{page}{asked}"


def _name(row: QueueRow) -> str:
    return row.topic if row.group in ("", DEFAULT_GROUP) else f"{row.topic}, group {row.group}"


def _damage(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> Iterator[Concern]:
    for row in rows:
        link, href = "Open the queue", link_of(row.topic)
        if row.problem:
            yield Concern(what=f"{row.topic} is damaged", text=row.problem, href=href, link=link)
        if row.damaged:
            text = f"{_messages(row.damaged)} cannot be read; run `holdfast check` on the folder"
            yield Concern(what=f"{row.topic} is damaged", text=text, href=href, link=link)
    for info in groups:
        if info.problem:
            what = f"Group {info.name} on {info.topic} stands still"
            yield Concern(what=what, text=info.problem, href=_group_link(info), link="Open the group")


def _upkeep(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.upkeep_error:
            what = f"Upkeep of {row.topic} fails"
            yield Concern(what=what, text=row.upkeep_error, href=link_of(row.topic), link="Open the queue")


def _stalled(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> Iterator[Concern]:
    for row in rows:
        if row.stalled:
            text = f"{_messages(row.ready)} ready, and none was handled lately; {_takers(row)}"
            yield Concern(what=f"{_name(row)} stands still", text=text, href="/ui/workers", link="Workers")
    for info in groups:
        if info.lag and info.lag_seconds >= OLD_S and not info.problem:
            kind = "Query" if info.mode == "query" else "Group"
            text = f"{_messages(info.lag)} and {age(info.lag_seconds)} behind"
            if info.mode == "stream" and not info.members:
                text += "; it has no members"
            what = f"{kind} {info.name} on {info.topic} falls behind"
            yield Concern(what=what, text=text, href=_group_link(info), link="Open the group")


def _old(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.is_old and not row.stalled:
            text = f"the oldest message waits for {age(row.age_s)}"
            href = link_of(row.topic, row.group, "/charts")
            yield Concern(what=f"{_name(row)} is late", text=text, href=href, link="Charts")


def _dead(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.dead_grows:
            text = f"{count(row.buried)} more in the last 15 min, {count(row.dead)} in all"
            href = link_of(row.topic, row.group, "/dead")
            yield Concern(what=f"Dead letters of {_name(row)} grow", text=text, href=href, link="Dead letters")


def is_stalled(flow: Flow, ready: int, age_s: float) -> bool:
    """Whether messages wait for long and none was handled since samples are taken, or for 15 minutes."""
    return ready > 0 and age_s >= OLD_S and not flow.handled


def _takers(row: QueueRow) -> str:
    return f"{count(row.waiters)} wait for messages" if row.waiters else "nobody waits for messages"


def _messages(number: int) -> str:
    return "1 message" if number == 1 else f"{count(number)} messages"


def _group_link(info: GroupInfo) -> str:
    return f"/ui/groups/{quote(info.name, safe='')}"
