"""Search through all queues and phases, a bounded piece at a time.

    queue      group      part                       order
    orders     default    log: every phase, done     newest first, in blocks from the end backwards
               default    delayed: not in the log    the next one first
               default    dead letters               oldest first
               mails      dead letters
    payments   ...

One call looks at no more than `scan_messages` messages, for no longer than a second, and then says where to go on. Its
answer names what it looked at: for each queue how many messages of how many, and the queues that it did not reach.
The pieces run as scans, so callers take turns.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from holdfast.api.listing import DeadLetter, Listed, Waiting, as_expressions_see, note_of
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, topic_of_id
from holdfast.broker.messages import ONLY_FOR, mark
from holdfast.delivery.where import compile_where, moment_of, seconds_of
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.local.listing import find_message, listed, parse_mark, seen
from holdfast.model import Record
from holdfast.protocol.messages import FoundMessage, QueueSearched, SearchAnswer, SearchQuery
from holdfast.server.api.queues import as_listed
from holdfast.server.api.topics import described
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup
from holdfast.server.service import Call
from holdfast.server.turns import Full, Scan

Part: TypeAlias = Literal["log", "delayed", "dead"]

MOST_NS: Final = 1_000_000_000
MOST_BYTES: Final = 16 * 1024 * 1024  # of the messages in an answer, which stay in memory until it is sent
_LEAST_BLOCK: Final = 32  # offsets of the log that are read at a time: so many at first, more if that goes fast
_MOST_BLOCK: Final = 500
_MOST_NAMED: Final = 100  # queues that an answer names
_LOG_MARK: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,18})")


class SearchPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a search goes on: the queue, its group and part, the place in it, and how many it has looked at so far."""

    topic: str
    group: str = ""
    part: Part = "log"
    mark: str = ""
    looked: int = 0

    @property
    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def parse_place(text: str) -> SearchPlace:
    """The place that an answer named as `next`."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=SearchPlace)
    except (ValueError, binascii.Error, msgspec.DecodeError):
        raise _not_a_place() from None


def _not_a_place() -> InvalidRequest:
    return InvalidRequest("after cannot be used: give what the page before named as `next`")


class Hit(NamedTuple):
    """A message that was found, and the group whose phase it has."""

    group: str
    message: Listed[Any]
    phase: str


class Searched(msgspec.Struct, kw_only=True):
    """What one piece of a search found, and what it looked at."""

    found: list[Hit]
    queues: list[QueueSearched]
    left: list[str]  # queues that were not reached
    left_out: int  # how many more of them there are
    no_group: list[str]  # topics without a group in queue mode, whose messages have no phase
    where: str
    looked: int  # in this piece
    looked_in_all: int  # in this piece and those before
    next: str


class _Budget:
    """How many messages one piece may still look at, how large those it finds may be, and until when."""

    def __init__(self, messages: int, now_ns: Callable[[], int]) -> None:
        self.messages = messages
        self.bytes = MOST_BYTES
        self.moved = False  # until the search has moved on, time does not count: the next piece would get no further
        self._now_ns = now_ns
        self._late_ns = now_ns() + MOST_NS

    @property
    def is_spent(self) -> bool:
        return self.messages <= 0 or self.bytes <= 0 or (self.moved and self._now_ns() >= self._late_ns)


async def search(call: Call, text: str, limit: int, after: str) -> Searched:
    """Search one piece for what somebody typed."""
    terms = parse_search(text)
    service, clock = call.service, call.service.world.clock
    test = compile_where(terms.where or None, now_ms=clock.now_ns() // 1_000_000)
    start = parse_place(after) if after else SearchPlace("")
    budget = _Budget(service.settings.scan_messages, clock.monotonic_ns)
    answer = Searched(
        found=[],
        queues=[],
        left=[],
        left_out=0,
        no_group=[],
        where=terms.where,
        looked=0,
        looked_in_all=start.looked,
        next="",
    )
    if terms.id and not after:
        answer.found = await _by_id(call, terms.id)
        if answer.found:
            return answer
    names = [name for name in await _names(call, terms) if name >= start.topic]
    for i, name in enumerate(names):
        begin = start if name == start.topic else SearchPlace(name)
        stopped = await _search_queue(call, begin, test, limit, budget, answer)
        if stopped is not None:
            rest = names[i + 1 :]
            answer.left, answer.left_out = rest[:_MOST_NAMED], max(len(rest) - _MOST_NAMED, 0)
            answer.next = msgspec.structs.replace(stopped, looked=answer.looked_in_all).text
            break
        budget.moved = True
    return answer


async def _names(call: Call, terms: SearchTerms) -> list[str]:
    principal = call.principal
    return sorted(
        name
        for name in await call.service.port.topics()
        if principal.sees(name) and principal.may("read", name) and terms.queue.lower() in name.lower()
    )


async def _by_id(call: Call, wanted: str) -> list[Hit]:
    """The message with this id, in each group that the caller may use."""
    try:
        topic = topic_of_id(wanted).removesuffix(DEAD_SUFFIX)
        if not (call.principal.sees(topic) and call.principal.may("read", topic)):
            return []
        groups = (await described(call, topic)).groups
    except HoldfastError:
        return []
    found = []
    for name in groups:
        group = await call.service.group(topic, name)
        one = await call.scan(lambda _scan, group=group: _found(group, wanted))
        if one is not None:
            found.append(one)
    return found


def _found(group: ServedGroup, wanted: str) -> Hit | None:
    try:
        found = find_message(group.port, wanted)
    except HoldfastError:
        return None
    return None if found is None else Hit(group.group, found.message, found.phase)


async def _search_queue(
    call: Call, begin: SearchPlace, test: Callable[[Any], bool], limit: int, budget: _Budget, answer: Searched
) -> SearchPlace | None:
    """Search one queue from a place on; the place where it stopped, None if it was searched to its end."""
    report = QueueSearched(queue=begin.topic)
    try:
        groups = (await described(call, begin.topic)).groups
        if not groups:
            answer.no_group.append(begin.topic)
            return None
        answer.queues.append(report)
        main = DEFAULT_GROUP if DEFAULT_GROUP in groups else groups[0]
        sections: list[tuple[str, Part]] = [(main, "log"), (main, "delayed")]
        sections += [(name, "dead") for name in [main, *(each for each in groups if each != main)]]
        if (begin.group, begin.part) not in sections:
            begin = SearchPlace(begin.topic, main)
        served = {name: await call.service.group(begin.topic, name) for name in groups}
        report.messages = await asyncio.to_thread(_size, served[main], list(served.values()))
        for group, part in sections[sections.index((begin.group, begin.part)) :]:
            is_first = (begin.group, begin.part) == (group, part)
            place = SearchPlace(begin.topic, group, part, begin.mark if is_first else "")
            if budget.is_spent or len(answer.found) >= limit:
                return place
            piece = _Piece(served[group], served, test, limit - len(answer.found), budget)
            stopped = await call.scan(piece.run, part, place.mark)
            answer.found = _without_shadows([*answer.found, *piece.found])
            answer.looked += piece.looked
            answer.looked_in_all += piece.looked
            report.searched += piece.looked
            if stopped:
                return msgspec.structs.replace(place, mark=stopped)
    except InvalidRequest:
        raise  # of the search itself: it is the same in every queue
    except HoldfastError as error:  # a queue that cannot be opened must not hide the others
        report.problem = str(error)
        if report not in answer.queues:
            answer.queues.append(report)
        return None
    report.whole = True
    return None


def _without_shadows(found: list[Hit]) -> list[Hit]:
    """Without messages that are done because they died, if their dead letter was found as well."""
    died = {(hit.group, note_of(hit.message).id) for hit in found if isinstance(hit.message, DeadLetter)}
    return [hit for hit in found if isinstance(hit.message, DeadLetter) or (hit.group, hit.message.id) not in died]


def _size(main: ServedGroup, groups: list[ServedGroup]) -> int:
    """The messages that a search of the queue looks at in all."""
    logs = sum(each.partition.log.end - each.partition.log.start for each in main.deliveries)
    delayed = sum(0 if each.partition.delayed is None else len(each.partition.delayed) for each in main.deliveries)
    topic = main.queue_group.topic
    if len(groups) == len(topic.groups):
        return logs + delayed + topic.dead_count()
    return logs + delayed + sum(group.queue_group.stats().dead for group in groups)  # reads all letters


class _Piece:
    """One part of one queue while it is searched on a thread."""

    def __init__(
        self,
        group: ServedGroup,
        groups: dict[str, ServedGroup],
        test: Callable[[Any], bool],
        limit: int,
        budget: _Budget,
    ) -> None:
        self._group, self._groups = group, groups
        self._test = test
        self.found: list[Hit] = []
        self.looked = 0
        self._limit, self._budget = limit, budget
        self._block_size = _LEAST_BLOCK

    def run(self, scan: Scan, part: Part, mark: str) -> str:
        """Search on from a mark; the mark to go on from, empty at the end of the part."""
        before = scan.looked
        scan.most = min(scan.most, self._budget.messages)
        try:
            return self._log(scan, mark) if part == "log" else self._listed(scan, part, mark)
        finally:
            self.looked = scan.looked - before
            self._budget.messages -= self.looked
            self._budget.moved = True

    @property
    def _is_full(self) -> bool:
        return len(self.found) >= self._limit or self._budget.bytes <= 0

    def _add(self, group: str, message: Listed[Any]) -> None:
        self.found.append(Hit(group, message, message.phase))
        self._budget.bytes -= message.size

    def _listed(self, scan: Scan, part: Part, mark: str) -> str:
        after = parse_mark(mark) if mark else None

        def look(*place: int) -> None:
            if scan.looked and not scan.looked % 64:
                self._budget.moved = True
                if self._budget.is_spent:
                    raise Full
            scan.look(*place)

        try:
            for each in listed(self._group.port, part, None, None, after=after, look=look, lost=scan.lost):
                if part == "delayed" and not isinstance(each, Waiting):
                    continue  # it is in the log, and was found there
                if self._test(as_expressions_see(each)):
                    self._add(self._group.group, each)
                    if self._is_full:
                        break
            else:
                return ""
        except Full:
            pass
        return "" if scan.mark is None else scan.mark.text

    def _log(self, scan: Scan, mark: str) -> str:
        partition, below = _log_mark(mark)
        for delivery in self._group.deliveries:
            if delivery.number < partition:
                continue
            log = delivery.partition.log
            high = min(below, log.end) if delivery.number == partition else log.end
            while high > log.start:
                room = min(self._block_size, scan.most - scan.looked)
                if room <= 0 or self._budget.is_spent:
                    return f"{delivery.number}.{high}"
                low = max(log.start, high - room)
                last = self._block(scan, delivery, low, high)
                if last is not None:
                    return f"{delivery.number}.{last}"
                high = low
                self._block_size = min(2 * self._block_size, _MOST_BLOCK)
        return ""

    def _block(self, scan: Scan, delivery: Delivery, low: int, high: int) -> int | None:
        """Search a block, the newest first; the offset of the last message that was found, if no more fit."""
        newest: deque[tuple[int, str, Listed[Any]]] = deque()  # as many as fit; older ones are for the next piece
        held_bytes, is_cut = 0, False
        for record in delivery.partition.log.records(low, on_damage="skip", whole=False):
            if record.offset >= high:
                break
            scan.look(delivery.number, record.offset)
            message = self._seen(delivery, record)
            if message is None or not self._test(as_expressions_see(message[1])):
                continue
            newest.append((record.offset, *message))
            held_bytes += message[1].size
            while len(newest) > self._limit - len(self.found) or (len(newest) > 1 and held_bytes > self._budget.bytes):
                held_bytes -= newest.popleft()[2].size
                is_cut = True
        self._budget.moved = True
        for _, *found in reversed(newest):
            self._add(*found)
        return newest[0][0] if newest and (is_cut or self._is_full) else None

    def _seen(self, delivery: Delivery, record: Record) -> tuple[str, Listed[Any]] | None:
        """The message as its group has it. One that was redriven belongs to one group only."""
        only = mark(record, ONLY_FOR)
        group = self._group if only is None else self._groups.get(only.decode("utf-8", "replace"))
        if group is None:
            return None
        own = group.queue_group.delivery(delivery.number)
        phase: Any = own.group.phase(record.offset).value
        due_ms = own.group.waiting.get(record.offset, 0)
        return group.group, seen(group.port, own, record, phase, due_ms=due_ms)


def _log_mark(mark: str) -> tuple[int, int]:
    """The partition and the offset below which the search of a log goes on; (-1, 0) for its beginning."""
    if not mark:
        return -1, 0
    found = _LOG_MARK.fullmatch(mark)
    if found is None:
        raise _not_a_place()
    return int(found[1]), int(found[2])


# What people type into the search box, as a condition in the language of `where`.
#
#     orders-0-42                  the message with this id
#     key=customer-7               its key
#     tenant=acme                  a header
#     $.order.id=7                 a part of a JSON body, as a number or as text
#     time=2026-11-17              published (or dead) on this day; also time>..., time<..., age<1h, age>2d
#     queue=orders                 only in queues with this in their names
#     card declined                each word in body, key, error, id or correlation id, in upper or lower case
#     "card declined"              these words in this order
#     where attempts > 3           a condition as `holdfast ls --where` takes it
#
# Several terms must all hold.

_TERM: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|((?:[^\s"]|"(?:[^"\\]|\\.)*")+)')
_PAIR: Final = re.compile(r"(time|age)(>=|<=|>|<|=)(.+)|(\$[^=]*|[^=<>\s]+)=(.*)", re.DOTALL)
_PATH: Final = re.compile(r"""\.([^.\[\]]+)|\[([0-9]+)\]|\[["']([^"'\]]+)["']\]""")
_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ID: Final = re.compile(r"[^\s=\"$]+-[0-9]+-d?[0-9]+")
_WHERE: Final = "where "


class SearchTerms(NamedTuple):
    """A search: the condition on messages, the text in the names of queues, and the id if it may be one."""

    where: str
    queue: str = ""
    id: str = ""


def parse_search(text: str) -> SearchTerms:
    """Read what somebody typed. Raises InvalidRequest for what cannot be understood."""
    text = text.strip()
    if not text:
        raise InvalidRequest("type what to search for: an id, key=..., a header as name=value, $.path=..., or a text")
    if text.lower().startswith(_WHERE):
        return SearchTerms(text[len(_WHERE) :].strip())
    conditions, queue = [], ""
    for quoted, plain in _TERM.findall(text):
        if not plain:
            conditions.append(_contains(_unescaped(quoted)))
            continue
        pair = _PAIR.fullmatch(plain)
        if pair is None:
            conditions.append(_contains(plain.replace('"', "")))
        elif pair[1] is not None:
            conditions.append(_when(pair[1], pair[2], _unquoted(pair[3])))
        elif pair[4] == "queue":
            queue = _unquoted(pair[5])
        else:
            conditions.append(_equals(pair[4], _unquoted(pair[5])))
    return SearchTerms(" and ".join(conditions), queue, text if _ID.fullmatch(text) else "")


def _contains(word: str) -> str:
    pattern = literal(f"(?i){re.escape(word)}")
    named = literal(word)
    return f"(body ~ {pattern} or key ~ {pattern} or error ~ {pattern} or id == {named} or correlation_id == {named})"


def _equals(name: str, value: str) -> str:
    if name.startswith("$"):
        path = "json" + "".join(_parts(name))
        if value in ("true", "false", "null"):
            return f"({path} == {value} or {path} == {literal(value)})"
        if _NUMBER.fullmatch(value):
            return f"({path} == {value} or {path} == {literal(value)})"
        return f"{path} == {literal(value)}"
    if name in ("key", "id", "holder", "reason", "correlation_id"):
        return f"{name} == {literal(value)}"
    return f"header[{literal(name)}] == {literal(value)}"


def _parts(path: str) -> Iterator[str]:
    at = 1
    while at < len(path):
        found = _PATH.match(path, at)
        if found is None:
            raise InvalidRequest(f"the path {path} cannot be read at {path[at:]!r}; write it as $.order.items[0].id")
        at = found.end()
        name = found[1] or found[3]
        yield f"[{found[2]}]" if name is None else f"[{literal(name)}]"


def _when(name: str, relation: str, value: str) -> str:
    if name == "age":
        if seconds_of(value) is None:
            raise InvalidRequest(f"age{relation}{value} is no length of time; write it as 30s, 5m, 2h or 7d")
        return f"age {'==' if relation == '=' else relation} {value}"
    moment = moment_of(value)
    if moment is None:
        raise InvalidRequest(f"{value!r} is no time; write it as 2026-11-17, 2026-11-17T10:30 or 2026-11-17T10:30:15Z")
    if relation != "=":
        return f"time {relation} {literal(moment.isoformat())}"
    since = f"time >= {literal(moment.isoformat())}"
    try:
        return f"{since} and time < {literal((moment + _precision(value)).isoformat())}"
    except OverflowError:  # the last day of the year 9999 has no day after it
        return since


def _precision(value: str) -> timedelta:
    """The length of the span that a time without its smaller parts stands for."""
    _, _, clock = value.replace(" ", "T").partition("T")
    parts = re.sub(r"(Z|[+-][0-9:]+)$", "", clock).count(":")
    if not clock:
        return timedelta(days=1)
    return (timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1))[min(parts, 2)]


def literal(text: str) -> str:
    """A text as a literal of the language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return _unescaped(value[1:-1])
    return value


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


routes = Routes("search")


@routes.add("GET", "/v1/search", action="read", scope="any", query=SearchQuery, answers=SearchAnswer)
async def find_messages(call: Call) -> SearchAnswer:
    """Messages in any queue and phase that the caller may read, with what was searched; page by page with `after`."""
    query: SearchQuery = call.query
    found = await search(call, query.q, query.limit, query.after)
    return SearchAnswer(
        messages=await asyncio.to_thread(lambda: list(map(_as_found, found.found))),
        next=found.next,
        scanned=found.looked,
        scanned_in_all=found.looked_in_all,
        queues=found.queues,
        left=found.left,
        left_out=found.left_out,
        not_queues=found.no_group,
        where=found.where,
    )


def _as_found(hit: Hit) -> FoundMessage:
    facts = msgspec.structs.asdict(as_listed(hit.message, bodies=False)) | {"phase": hit.phase}
    return FoundMessage(**facts, group=hit.group)
