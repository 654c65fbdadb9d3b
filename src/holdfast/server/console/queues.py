"""The pages of a queue: messages by phase, dead letters by error, charts, tail, settings, and a form to send."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from holdfast.api.contents import home_of, record_of
from holdfast.api.listing import DeadGroup, DeadKinds, DeadLetter, Found, Listed, Waiting, chosen, fingerprint
from holdfast.api.topics import TopicInfo
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.contents import differing_settings
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, message_id, parse_message_id
from holdfast.broker.history import history_of_letter
from holdfast.broker.tracing.log import ACKED, BURIED, LEASED, NACKED, PUBLISHED, REDRIVEN, RELEASED, RETURNED
from holdfast.delivery.events import Phase
from holdfast.env.world import checkpoint
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.local.group import LocalGroup, until_ms
from holdfast.local.listing import Mark, find_message, listed, no_message, parse_mark, seen
from holdfast.local.search import Full
from holdfast.model import Record
from holdfast.protocol.messages import InGroup, Name
from holdfast.server.api.admin import group_samples, settings_of_topic
from holdfast.server.api.dead import OTHERS, KindCounts, kinds_of
from holdfast.server.api.topics import described
from holdfast.server.console.charts import RANGES, ChartQuery, charts_of, flow_of, spark_of
from holdfast.server.console.overview import OLD_S, QueueRow
from holdfast.server.console.overview import row_of as queue_row_of
from holdfast.server.console.rendering import SHOWN_BYTES, as_text, beginning, page, plain, preview, render, visible
from holdfast.server.http.messages import Response
from holdfast.server.served import ServedGroup
from holdfast.server.service import Call
from holdfast.server.turns import Scan
from holdfast.settings import TopicSettings

_TABS: Final = ("ready", "leased", "delayed", "dead", "done")
_POLICY: Final = (
    "durability",
    "lease_ms",
    "max_attempts",
    "backoff_ms",
    "backoff_factor",
    "retention_ms",
    "retention_done_bytes",
    "dead_retention_ms",
    "key_order",
    "trace_sample",
)


_FIXED: Final = ("partitions", "durability")  # partitions are added and never removed; each program has its durability


class QueueQuery(InGroup, kw_only=True):
    """The messages to show."""

    tab: Tab = "ready"
    where: Annotated[str, Meta(max_length=10_000)] = ""
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 50
    after: Annotated[str, Meta(max_length=100)] = ""


class SendQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The group whose page led to the form."""

    group: Name | None = None


class SendPageQuery(SendQuery, kw_only=True):
    """The message that the form starts with."""

    copy_of: Annotated[str, Meta(max_length=500)] = ""


async def head_of(call: Call, group: ServedGroup | None) -> dict[str, Any]:
    """The facts for the head of every page of a queue."""
    info = await described(call, call.path["queue"])
    name, engine = call.path["queue"], call.service.engine
    if group is None:
        row = QueueRow(topic=name, messages=info.messages, spark=spark_of(flow_of(engine, name, info.id)))
    else:
        row = await asyncio.to_thread(queue_row_of, engine, group.queue_group.topic, group.queue_group)
    chosen = None if group is None or group.group == DEFAULT_GROUP else group.group
    return {
        "queue": name,
        "info": info,
        "row": row,
        "group": chosen,
        "old_s": OLD_S,
        "may_here": {action: call.principal.may(action, name) for action in ("publish", "consume", "admin")},
    }


def policy_of(info: TopicInfo, group: ServedGroup | None) -> list[tuple[str, str, bool]]:
    """The most important settings, and all that were changed, as (name, value, changed)."""
    if group is None:
        return [(name, _setting_text(name, value), True) for name, value in info.settings.items()]
    settings = group.settings
    changed = differing_settings(settings, TopicSettings())
    known = msgspec.structs.asdict(settings)
    names = [name for name in _POLICY if name in known] + [name for name in changed if name not in _POLICY]
    return [(name, _setting_text(name, known[name]), name in changed) for name in names]


def _setting_text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name.endswith("_ms") and isinstance(value, int) and value >= 1000:
        return f"{value / 1000:,.10g} s"
    return str(value).lower() if isinstance(value, bool) else str(value)


@page("/ui/queues/{queue}", query=QueueQuery)
async def queue(call: Call) -> Response:
    """The messages of a queue in one phase that match a condition."""
    query: QueueQuery = call.query
    group = await group_for(call, query.group)
    found: list[MessageRow] = []
    problem = more = ""
    damaged = 0
    if group is not None:
        try:
            where = query.where.strip() or None
            found, more, damaged = await call.scan(rows, group, query.tab, where, query.limit, query.after)
        except InvalidRequest as error:
            problem = str(error)
    head = await head_of(call, group)
    return render(
        call,
        "queue.html",
        status=400 if problem else 200,
        section="messages",
        query=query,
        tabs=_TABS,
        rows=found,
        more=more,
        damaged=damaged,
        scanned=call.service.settings.scan_messages,
        problem=problem,
        policy=policy_of(head["info"], group),
        done_places=DONE_PLACES,
        **head,
    )


@page("/ui/queues/{queue}/tail", query=InGroup)
async def tail(call: Call) -> Response:
    """Messages as they arrive."""
    group = await group_for(call, call.query.group)
    return render(call, "tail.html", section="tail", **await head_of(call, group))


class CopiedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the form shows it; the body of one that is not text, or too long, is left out."""

    body: str
    key: str
    headers: str
    priority: int
    is_text: bool
    is_long: bool


def _copied(_scan: Scan, group: ServedGroup, wanted: str) -> CopiedMessage:
    found = find(group, wanted)
    value = record_of(found).value
    is_long = len(value) > SHOWN_BYTES
    text = None if is_long else as_text(beginning(value, SHOWN_BYTES))
    headers = [f"{name}: {value}" for name, value in found.headers.pairs if isinstance(value, str)]
    if text is not None and not _is_plain(text):
        text = None
    return CopiedMessage(
        body=text or "",
        key=found.key if isinstance(found.key, str) and _is_plain(found.key) else "",
        headers="\n".join(line for line in headers if _is_plain(line) and "\n" not in line),
        priority=found.priority,
        is_text=text is not None,
        is_long=is_long,
    )


def _is_plain(text: str) -> bool:
    """Whether a form that shows the text sends the same text."""
    return visible(text) == text


@page("/ui/queues/{queue}/send", action="publish", query=SendPageQuery)
async def send(call: Call) -> Response:
    """A form for a new message, or for a copy of one."""
    query: SendPageQuery = call.query
    copied = None
    if query.copy_of:
        call.principal.check("read", call.path["queue"])
        copied = await call.scan(_copied, await needed_group(call, "it has no messages to copy"), query.copy_of)
    try:
        group = await group_for(call, call.query.group)
    except HoldfastError:
        group = None
    facts: dict[str, Any] = {"copied": copied, "copy_of": query.copy_of}
    return render(call, "send.html", section="send", **facts, **await head_of(call, group))


@page("/ui/queues/{queue}/charts", query=ChartQuery)
async def charts(call: Call) -> Response:
    """How a group in either mode fared over time; without a group, how the queue did."""
    query: ChartQuery = call.query
    name = call.path["queue"]
    samples = await asyncio.to_thread(group_samples, call, name, query.group, RANGES[query.range])
    group = await group_for(call, samples.group) if samples.mode == "queue" else None
    return render(
        call,
        "queue_charts.html",
        section="charts",
        charts=charts_of(samples, query.range),
        charts_group=samples.group,
        asked_group=query.group,
        ranges=RANGES,
        **await head_of(call, group),
    )


class SettingsQuery(SendQuery, kw_only=True):
    """Whether to show all settings, or only those that were changed."""

    all: bool = False


@page("/ui/queues/{queue}/settings", query=SettingsQuery)
async def settings(call: Call) -> Response:
    """The partitions and settings of a queue, and what can only be done to a queue as a whole."""
    query: SettingsQuery = call.query
    head = await head_of(call, await group_for(call, query.group))
    found = await asyncio.to_thread(settings_of_topic, call.service, head["queue"], every=query.all)
    return render(call, "queue_settings.html", section="settings", query=query, settings=found, fixed=_FIXED, **head)


# Messages of a queue, found by phase and condition or by id.

Tab: TypeAlias = Literal["ready", "leased", "delayed", "dead", "done"]

DONE_PLACES: Final = 10_000  # offsets of each partition that one page searches for done messages


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message in a list, with what its page knows better. `place` is an id that finds it directly."""

    message: Listed[Any]
    place: str
    phase: str
    key: str
    preview: str
    attempts: int
    holder: str
    due_ms: int
    since_ms: int
    until_ms: int


async def group_for(call: Call, name: str | None) -> ServedGroup | None:
    """The group that a page shows: the one asked for, otherwise the default group, otherwise the first.

    None for a topic without queue groups. Raises NotFound if the group asked for does not exist.
    """
    topic = call.path["queue"]
    if name is None or call.service.known_group(topic, name) is None:
        groups = (await described(call, topic)).groups
        if name is None:
            name = DEFAULT_GROUP if DEFAULT_GROUP in groups or not groups else groups[0]
            if not groups:
                return None
        if name not in groups:
            raise NotFound(f"{topic} has no group {name} in queue mode; known groups: {', '.join(groups) or 'none'}")
    return await call.service.group(topic, name)


async def needed_group(call: Call, otherwise: str) -> ServedGroup:
    """The group that a page shows. Raises NotFound where there is none, and says what follows from that."""
    group = await group_for(call, call.query.group)
    if group is None:
        raise NotFound(f"{call.path['queue']} has no group in queue mode, so {otherwise}")
    return group


def rows(
    scan: Scan, group: ServedGroup, tab: Tab, where: str | None, limit: int, after: str
) -> tuple[list[MessageRow], str, int]:
    """The rows of a tab, where to continue if the search reached its limit, and the number of damaged messages."""
    if tab == "done":
        return *_done_rows(group, where, limit, _places(after)), 0
    found: list[MessageRow] = []
    mark = parse_mark(after) if after else None
    try:
        for each in listed(group.port, tab, where, limit, after=mark, look=scan.look, lost=scan.lost):
            found.append(row_of(each))
    except Full:
        return found, "" if scan.mark is None else scan.mark.text, scan.damaged
    return found, "", scan.damaged


def _places(after: str) -> int:
    """The number of offsets of each partition that earlier pages have searched."""
    if not after:
        return 0
    if not (after.isascii() and after.isdigit()):
        raise InvalidRequest(
            f"after={after!r} cannot be used here: give the number of offsets already searched, as the page's link does"
        )
    return int(after)


def _done_rows(group: ServedGroup, where: str | None, limit: int, passed: int) -> tuple[list[MessageRow], str]:
    """The newest done messages, and the number of offsets searched if the log has more."""
    now_ms = group.port.engine.world.clock.now_ns() // 1_000_000
    newest: list[Listed[bytes]] = []
    for places in (2 * limit, DONE_PLACES):  # a short search is usually enough
        newest = list(chosen(_done(group, passed, places), where, limit, now_ms=now_ms))
        if len(newest) == limit:
            return [row_of(found) for found in newest], ""  # the page offers a higher limit
    looked = passed + DONE_PLACES
    left = any(delivery.partition.log.start < _done_end(delivery) - looked for delivery in group.deliveries)
    return [row_of(found) for found in newest], str(looked) if left else ""


def _done_end(delivery: Delivery) -> int:
    """The offset after the newest done message."""
    state = delivery.group
    with delivery.lock:
        return max(state.floor, state.done.max() + 1 if state.done else 0)


def _done(group: ServedGroup, passed: int, places: int) -> Iterator[Listed[bytes]]:
    """Yield done messages that are still in the log, newest first: skip `passed` offsets, then search `places`."""
    for delivery in group.deliveries:
        log, state = delivery.partition.log, delivery.group
        end = _done_end(delivery) - passed
        start = min(max(log.start, end - places), log.end)
        newest: deque[Record] = deque()
        for record in log.records(start, on_damage="skip", whole=False):
            checkpoint()
            if record.offset >= end:
                break
            if state.phase(record.offset) is Phase.DONE:
                newest.appendleft(record)
        for record in newest:
            yield seen(group.port, delivery, record, "done")


def row_of(found: Listed[Any]) -> MessageRow:
    """The row of a message in a list."""
    record, delivery = record_of(found), home_of(found)
    lease = None if isinstance(found, DeadLetter | Waiting) else delivery.group.leases.get(record.offset)
    return MessageRow(
        message=found,
        place=place_of(found),
        phase=found.phase,
        key=plain(found.key),
        preview=preview(record.value),
        attempts=found.attempts,
        holder=found.holder,
        due_ms=_due_ms(found),
        since_ms=0 if lease is None else lease.at_ms,
        until_ms=0 if lease is None else until_ms(delivery, lease),
    )


def _due_ms(found: Listed[Any]) -> int:
    return 0 if found.due_at is None else round(found.due_at.timestamp() * 1000)


def place_of(found: Listed[Any]) -> str:
    """An id with the message's offset. The id of a message that was delayed has none, so it must be searched for."""
    if isinstance(found, DeadLetter | Waiting):
        return found.id
    return message_id(found.topic, found.partition, found.offset, None)


def find(group: ServedGroup, wanted: str) -> Listed[bytes]:
    """A message by its id, in any phase, as long as it is in the log. Raises NotFound if it is not."""
    return looked_up(find_message, group, wanted).message


def looked_up(look: Callable[[LocalGroup, str], Found | None], group: ServedGroup, wanted: str) -> Found:
    """What `look` finds by an id. Raises NotFound if that is nothing, or if the id is none of this queue."""
    try:
        found = look(group.port, wanted)
    except InvalidRequest as error:
        raise NotFound(str(error)) from None
    if found is None:
        raise no_message(wanted, group.topic)
    return found


# Dead letters grouped by error, so that they can be redriven or purged together.

_MOST_GROUPS: Final = 200
_SPANS: Final = 24  # columns of the small chart of a kind
_PATIENCE_NS: Final = 80_000_000  # counting goes on at the next visit after this long
_CUT: Final = 200  # an error of this length was cut
_DETAIL: Final = r"""(?:0x[0-9a-fA-F]+|'[^']*'|"[^"]*"|[0-9]+|…)"""
_MOST_PARTS: Final = 12  # keeps conditions short: errors that differ only after this many parts count as the same


class DeadPageQuery(InGroup, kw_only=True):
    """The dead letters to group."""

    where: Annotated[str, Meta(max_length=10_000)] = ""
    after: Annotated[str, Meta(max_length=100)] = ""


class TriedQuery(InGroup, kw_only=True):
    """The letters that were redriven, separated by commas, and the condition that chose them."""

    ids: Annotated[str, Meta(min_length=1, max_length=20_000)]
    where: Annotated[str, Meta(max_length=10_000)] = ""


class DeadKind(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same error, the condition that matches them, and how many died when."""

    group: DeadGroup
    where: str
    over_time: list[int] = []

    @property
    def most(self) -> int:
        return max(self.over_time, default=0)


class _Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """The letters that match a condition among those that one page looks at."""

    groups: list[DeadGroup]
    looked: int
    more: str


@page("/ui/queues/{queue}/dead", query=DeadPageQuery)
async def dead(call: Call) -> Response:
    """Dead letters by kind of error, the most frequent first."""
    query: DeadPageQuery = call.query
    group = await needed_group(call, "it has no dead letters")
    where, problem = query.where.strip(), ""
    counts = KindCounts([], 0, 0, 0)
    looked, more = 0, ""
    try:
        if where:
            found = await call.scan(_filtered, group, where, query.after)
            letters = sum(each.count for each in found.groups)
            counts = KindCounts(found.groups[:_MOST_GROUPS], len(found.groups), letters, letters)
            looked, more = found.looked, found.more
        else:
            counts = await _counted(call, group)
    except InvalidRequest as error:
        problem = str(error)
    kinds = [
        DeadKind(
            group=each,
            where="" if each.error == OTHERS else both(where, where_of(each)),
            over_time=counts.over_time[i] if counts.over_time else [],
        )
        for i, each in enumerate(counts.groups)
    ]
    return render(
        call,
        "dead.html",
        status=400 if problem else 200,
        section="dead",
        query=query,
        kinds=kinds,
        counts=counts,
        left_out=max(counts.kinds - len(kinds), 0),
        looked=looked,
        more=more,
        problem=problem,
        **await head_of(call, group),
    )


@page("/ui/queues/{queue}/redriven", query=TriedQuery)
async def redriven(call: Call) -> Response:
    """What became of letters that were redriven, and the rest of them."""
    query: TriedQuery = call.query
    group = await needed_group(call, "it has no dead letters")
    ids = [each for each in query.ids.split(",") if each][:_MOST_TRIED]
    tried = await call.scan(_tried, group, ids)
    facts: dict[str, Any] = {"query": query, "tried": tried, "summary": _summary(tried)}
    return render(call, "redriven.html", section="dead", **facts, **await head_of(call, group))


# What became of a few letters that were redriven, before the rest follows.

_MOST_TRIED: Final = 100

_FATES: Final = {ACKED: "done", LEASED: "running", NACKED: "failed, retried", REDRIVEN: "redriven"}
_FATES_WAITING: Final = dict.fromkeys((PUBLISHED, RELEASED, RETURNED), "waiting")


class TriedLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A letter that was redriven, and what became of it. `now` is the id of the message or letter that it is now."""

    id: str
    now: str
    fate: str
    error: str = ""
    same: bool = False
    holder: str = ""


def _tried(_scan: Scan, group: ServedGroup, ids: list[str]) -> list[TriedLetter]:
    return [_fate(group, wanted) for wanted in ids]


def _fate(group: ServedGroup, wanted: str) -> TriedLetter:
    try:
        place = parse_message_id(wanted, group.topic + DEAD_SUFFIX)
        delivery = group.queue_group.delivery(place.partition)
        letter = None if place.offset is None else delivery.dead.letter(place.offset, gone=True)
    except InvalidRequest as error:
        raise NotFound(str(error)) from None
    if letter is None or place.offset is None:
        return TriedLetter(id=wanted, now=wanted, fate="no longer stored")
    if delivery.dead.letter(place.offset) is not None:
        return TriedLetter(id=wanted, now=wanted, fate="not redriven", error=letter.note.error)
    steps = history_of_letter(delivery, letter)
    last = steps[-1]
    if last.step == BURIED and last.id != letter.note.id and last.offset is not None:
        again = delivery.dead.letter_of(last.offset)
        now = (
            last.id
            if again is None
            else message_id(group.topic + DEAD_SUFFIX, delivery.number, again.record.offset, None)
        )
        is_same = fingerprint(last.error) == fingerprint(letter.note.error)
        return TriedLetter(id=wanted, now=now, fate="failed again", error=last.error, same=is_same, holder=last.holder)
    if last.id == letter.note.id and last.step == BURIED:
        return TriedLetter(id=wanted, now=last.id, fate="redriven to another queue, or purged")
    fate = (_FATES | _FATES_WAITING).get(last.step, last.step)
    return TriedLetter(id=wanted, now=last.id, fate=fate, error=last.error, holder=last.holder)


def _summary(tried: list[TriedLetter]) -> str:
    """Such as: 7 done, 3 failed again (same error)."""
    counts = Counter(each.fate for each in tried)
    parts = []
    for fate, count in counts.most_common():
        same = sum(each.same for each in tried if each.fate == fate)
        what = "" if fate != "failed again" else " (same error)" if same == count else f" ({same} with the same error)"
        parts.append(f"{count} {fate}{what}")
    return ", ".join(parts)


async def _counted(call: Call, group: ServedGroup) -> KindCounts:
    """The kinds of all letters, as far as they can be counted in a moment."""
    clock = call.service.world.clock
    counted = kinds_of(group)
    async with counted.turn:
        late_ns = clock.monotonic_ns() + _PATIENCE_NS
        await call.scan(counted.count, lambda: clock.monotonic_ns() > late_ns)
        return await call.scan(counted.counts, _MOST_GROUPS, clock.now_ns() // 1_000_000, _SPANS)


def _filtered(scan: Scan, group: ServedGroup, where: str, after: str) -> _Filtered:
    """Look through one page's worth of letters, from the start or behind a place."""
    kinds, more = DeadKinds(), ""
    mark: Mark | None = parse_mark(after) if after else None
    try:
        for letter in listed(group.port, "dead", where, None, after=mark, look=scan.look, lost=scan.lost):
            assert isinstance(letter, DeadLetter)
            kinds.add(letter)
    except Full:
        more = "" if scan.mark is None else scan.mark.text
    return _Filtered(groups=kinds.groups(), looked=scan.looked, more=more)


def where_of(kind: DeadGroup) -> str:
    """A condition that matches the dead letters of one kind. People read and edit it."""
    reason = f'reason == "{kind.reason}"'
    if not kind.error:
        return f'{reason} and error == ""'
    parts = kind.error.split("…")
    pattern = "^" + _DETAIL.join(map(re.escape, parts[:_MOST_PARTS]))
    if len(kind.error) < _CUT and len(parts) <= _MOST_PARTS:
        pattern += "$"
    return f"{reason} and headline ~ {_quoted(pattern)}"


def both(one: str, other: str) -> str:
    """The conjunction of two conditions, of which the first may be empty."""
    return f"({one}) and {other}" if one else other


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
