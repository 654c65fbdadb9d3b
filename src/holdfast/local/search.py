"""Search through all queues and phases, a bounded piece at a time.

    queue      group      part                       order
    orders     default    log: every phase, done     newest first, in blocks from the end backwards
               default    delayed: not in the log    the next one first
               default    dead letters               oldest first
               mails      dead letters
    payments   ...

One call looks at a limited number of messages, for no longer than a second, and then says where to go on. Its answer
names what it looked at: for each queue how many messages of how many, and the queues that it did not reach.

`search_queue` yields the pieces and is sent where each stopped, so that a caller may run them wherever it wants: a
server runs them as scans, so that its callers take turns.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

from holdfast.api.drafts import Bodies
from holdfast.api.listing import (
    DeadLetter,
    Listed,
    SearchedQueue,
    SearchHit,
    SearchPage,
    SearchTerms,
    Waiting,
    as_expressions_see,
    note_of,
    parse_search,
)
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, topic_of_id
from holdfast.broker.messages import ONLY_FOR, mark
from holdfast.delivery.where import compile_where
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.later import pattern
from holdfast.local.group import LocalGroup
from holdfast.local.listing import Mark, find_message, listed, parse_mark, seen
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.local.broker import LocalBroker

Part: TypeAlias = Literal["log", "delayed", "dead"]

MOST_NS: Final = 1_000_000_000
_MOST_MESSAGES: Final = 100_000  # that a search in this process looks at before it says how far it got
MOST_BYTES: Final = 16 * 1024 * 1024  # of the messages in an answer, which stay in memory until it is sent
_LEAST_BLOCK: Final = 32  # offsets of the log that are read at a time: so many at first, more if that goes fast
_MOST_BLOCK: Final = 500
_MOST_NAMED: Final = 100  # queues that an answer names
_LOG_MARK: Final = pattern(r"([0-9]{1,9})\.([0-9]{1,18})")


class Full(Exception):
    """A scan has looked at as many messages as it may."""


class Looking(Protocol):
    """Counts the messages that are looked at."""

    most: int
    looked: int
    mark: Mark | None

    def look(self, partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
        """Called before a message is looked at; raises Full if the scan must end here."""

    def lost(self, messages: int) -> None:
        """Count messages that were skipped because they are damaged."""


class LocalLooking:
    """A scan in the caller's own thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.looked = 0
        self.mark: Mark | None = None
        self.damaged = 0

    def look(self, partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
        if self.looked == self.most:
            raise Full
        self.looked += 1
        self.mark = Mark(partition, offset, due_ms, number)

    def lost(self, messages: int) -> None:
        self.damaged += messages


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
    return InvalidRequest("after cannot be used: give the `next` of the previous page")


class MessageSearch:
    """One call: what it searches for, how much it may still look at, and what it has found so far."""

    def __init__(self, text: str, limit: int, after: str, messages: int, *, now_ms: int, mono_ns: Callable[[], int]):
        self.terms: SearchTerms = parse_search(text)
        self.test = compile_where(self.terms.where or None, now_ms=now_ms)
        self.start = parse_place(after) if after else SearchPlace("")
        self.limit = limit
        self.page = SearchPage(messages=[], where=self.terms.where, scanned_in_all=self.start.looked)
        self.budget = messages
        self.bytes = MOST_BYTES
        self.moved = False  # until the search has moved on, time does not count: the next piece would get no further
        self._mono_ns = mono_ns
        self._late_ns = mono_ns() + MOST_NS

    @property
    def is_spent(self) -> bool:
        return self.budget <= 0 or self.bytes <= 0 or (self.moved and self._mono_ns() >= self._late_ns)

    @property
    def wanted_id(self) -> str:
        """The id to look up first; empty if the text cannot be one, or further pages are searched."""
        return self.terms.id if not self.start.topic else ""

    def queues(self, names: list[str]) -> list[str]:
        """Return the queues to search, from the one where the search goes on."""
        part = self.terms.queue.lower()
        return sorted(name for name in names if part in name.lower() and name >= self.start.topic)

    def begin(self, name: str) -> SearchPlace:
        """Return where the search of a queue begins."""
        return self.start if name == self.start.topic else SearchPlace(name)

    def stop(self, place: SearchPlace, rest: list[str]) -> None:
        """Note where the next call goes on, and the queues that were not reached."""
        page = self.page
        page.left, page.left_out = rest[:_MOST_NAMED], max(len(rest) - _MOST_NAMED, 0)
        page.next = msgspec.structs.replace(place, looked=page.scanned_in_all).text

    def skip(self, report: SearchedQueue, error: HoldfastError) -> None:
        """Note that a queue cannot be searched, which must not hide the others. Raises what is wrong in all of them."""
        if isinstance(error, InvalidRequest):
            raise error
        report.problem = str(error)
        if report not in self.page.queues:
            self.page.queues.append(report)

    def add(self, piece: SearchPiece, report: SearchedQueue) -> None:
        """Note what a piece found."""
        self.page.messages = _without_shadows([*self.page.messages, *piece.found])
        self.page.scanned += piece.looked
        self.page.scanned_in_all += piece.looked
        report.searched += piece.looked


def topic_of_wanted(wanted: str) -> str:
    """The topic that a message id names; raises InvalidRequest if it is none."""
    return topic_of_id(wanted).removesuffix(DEAD_SUFFIX)


def found_by_id(group: LocalGroup, wanted: str) -> SearchHit | None:
    """The message with this id, as a group has it."""
    try:
        found = find_message(group, wanted)
    except HoldfastError:
        return None
    return None if found is None else SearchHit(found.message, group.group)


def search_queue(
    search: MessageSearch, begin: SearchPlace, groups: Mapping[str, LocalGroup], report: SearchedQueue
) -> Generator[SearchPiece, str, SearchPlace | None]:
    """Search one queue from a place on; returns the place where it stopped, None if it was searched to its end."""
    names = list(groups)
    main = DEFAULT_GROUP if DEFAULT_GROUP in groups else names[0]
    sections: list[tuple[str, Part]] = [(main, "log"), (main, "delayed")]
    sections += [(name, "dead") for name in [main, *(each for each in names if each != main)]]
    if (begin.group, begin.part) not in sections:
        begin = SearchPlace(begin.topic, main)
    for group, part in sections[sections.index((begin.group, begin.part)) :]:
        is_first = (begin.group, begin.part) == (group, part)
        place = SearchPlace(begin.topic, group, part, begin.mark if is_first else "")
        if search.is_spent or len(search.page.messages) >= search.limit:
            return place
        piece = SearchPiece(search, groups[group], groups, part, place.mark)
        stopped = yield piece
        search.add(piece, report)
        if stopped:
            return msgspec.structs.replace(place, mark=stopped)
    report.whole = search.moved = True
    return None


def size_of(groups: Mapping[str, LocalGroup]) -> int:
    """The messages that a search of the queue looks at in all."""
    main = groups.get(DEFAULT_GROUP) or next(iter(groups.values()))
    logs = sum(each.partition.log.end - each.partition.log.start for each in main.deliveries)
    delayed = sum(0 if each.partition.delayed is None else len(each.partition.delayed) for each in main.deliveries)
    topic = main.queue_group.topic
    if len(groups) == len(topic.groups):
        return logs + delayed + topic.dead_count()
    return logs + delayed + sum(group.queue_group.stats().dead for group in groups.values())  # reads all letters


def _without_shadows(found: list[SearchHit]) -> list[SearchHit]:
    """Without messages that are done because they died, if their dead letter was found as well."""
    died = {(hit.group, note_of(hit.message).id) for hit in found if isinstance(hit.message, DeadLetter)}
    return [hit for hit in found if isinstance(hit.message, DeadLetter) or (hit.group, hit.message.id) not in died]


class SearchPiece:
    """One part of one queue while it is searched."""

    def __init__(
        self, search: MessageSearch, group: LocalGroup, groups: Mapping[str, LocalGroup], part: Part, mark: str
    ) -> None:
        self._search, self._group, self._groups = search, group, groups
        self._part, self._mark = part, mark
        self._limit = search.limit - len(search.page.messages)
        self.found: list[SearchHit] = []
        self.looked = 0
        self._block_size = _LEAST_BLOCK

    def run(self, scan: Looking) -> str:
        """Search on from the mark; returns the mark to go on from, empty at the end of the part."""
        before = scan.looked
        scan.most = min(scan.most, self._search.budget)
        try:
            return self._log(scan, self._mark) if self._part == "log" else self._listed(scan, self._part, self._mark)
        finally:
            self.looked = scan.looked - before
            self._search.budget -= self.looked
            self._search.moved = True

    @property
    def _is_full(self) -> bool:
        return len(self.found) >= self._limit or self._search.bytes <= 0

    def _add(self, hit: SearchHit) -> None:
        self.found.append(hit)
        self._search.bytes -= hit.message.size

    def _listed(self, scan: Looking, part: Part, mark: str) -> str:
        after = parse_mark(mark) if mark else None

        def look(*place: int) -> None:
            if scan.looked and not scan.looked % 64:
                self._search.moved = True
                if self._search.is_spent:
                    raise Full
            scan.look(*place)

        try:
            for each in listed(self._group, part, None, None, after=after, look=look, lost=scan.lost):
                if part == "delayed" and not isinstance(each, Waiting):
                    continue  # it is in the log, and was found there
                if self._search.test(as_expressions_see(each)):
                    self._add(SearchHit(each, self._group.group))
                    if self._is_full:
                        break
            else:
                return ""
        except Full:
            pass
        return "" if scan.mark is None else scan.mark.text

    def _log(self, scan: Looking, mark: str) -> str:
        partition, below = _log_mark(mark)
        for delivery in self._group.deliveries:
            if delivery.number < partition:
                continue
            log = delivery.partition.log
            high = min(below, log.end) if delivery.number == partition else log.end
            while high > log.start:
                room = min(self._block_size, scan.most - scan.looked)
                if room <= 0 or self._search.is_spent:
                    return f"{delivery.number}.{high}"
                low = max(log.start, high - room)
                last = self._block(scan, delivery, low, high)
                if last is not None:
                    return f"{delivery.number}.{last}"
                high = low
                self._block_size = min(2 * self._block_size, _MOST_BLOCK)
        return ""

    def _block(self, scan: Looking, delivery: Delivery, low: int, high: int) -> int | None:
        """Search a block, the newest first; the offset of the last message that was found, if no more fit."""
        newest: deque[tuple[int, SearchHit]] = deque()  # as many as fit; older ones are for the next piece
        held_bytes, is_cut = 0, False
        for record in delivery.partition.log.records(low, on_damage="skip", whole=False):
            if record.offset >= high:
                break
            scan.look(delivery.number, record.offset)
            hit = self._seen(delivery, record)
            if hit is None or not self._search.test(as_expressions_see(hit.message)):
                continue
            newest.append((record.offset, hit))
            held_bytes += hit.message.size
            while len(newest) > self._limit - len(self.found) or (len(newest) > 1 and held_bytes > self._search.bytes):
                held_bytes -= newest.popleft()[1].message.size
                is_cut = True
        self._search.moved = True
        for _, hit in reversed(newest):
            self._add(hit)
        return newest[0][0] if newest and (is_cut or self._is_full) else None

    def _seen(self, delivery: Delivery, record: Record) -> SearchHit | None:
        """The message as its group has it. One that was redriven belongs to one group only."""
        only = mark(record, ONLY_FOR)
        group = self._group if only is None else self._groups.get(only.decode("utf-8", "replace"))
        if group is None:
            return None
        own = group.queue_group.delivery(delivery.number)
        phase: Any = own.group.phase(record.offset).value
        due_ms = own.group.waiting.get(record.offset, 0)
        message: Listed[Any] = seen(group, own, record, phase, due_ms=due_ms)
        return SearchHit(message, group.group)


def _log_mark(mark: str) -> tuple[int, int]:
    """The partition and the offset below which the search of a log goes on; (-1, 0) for its beginning."""
    if not mark:
        return -1, 0
    found = _LOG_MARK.fullmatch(mark)
    if found is None:
        raise _not_a_place()
    return int(found[1]), int(found[2])


# The search of a process in the folder that it owns.


def search_folder(broker: LocalBroker, text: str, limit: int, after: str) -> SearchPage:
    """Search for what somebody typed, in all queues of the folder, until the limit or the budget is reached."""
    clock = broker.engine.world.clock
    now_ms = clock.now_ns() // 1_000_000
    search = MessageSearch(text, limit, after, _MOST_MESSAGES, now_ms=now_ms, mono_ns=clock.monotonic_ns)
    if search.wanted_id:
        search.page.messages = _by_id(broker, search.wanted_id)
        if search.page.messages:
            return search.page
    names = search.queues(broker.engine.topics())
    for i, name in enumerate(names):
        stopped = _search_one(broker, search, search.begin(name))
        if stopped is not None:
            search.stop(stopped, names[i + 1 :])
            break
    return search.page


def _by_id(broker: LocalBroker, wanted: str) -> list[SearchHit]:
    try:
        groups = _groups(broker, topic_of_wanted(wanted))
    except HoldfastError:
        return []
    found = [found_by_id(group, wanted) for group in groups.values()]
    return [each for each in found if each is not None]


def _search_one(broker: LocalBroker, search: MessageSearch, begin: SearchPlace) -> SearchPlace | None:
    report = SearchedQueue(queue=begin.topic)
    try:
        groups = _groups(broker, begin.topic)
        if not groups:
            search.page.not_queues.append(begin.topic)
            return None
        search.page.queues.append(report)
        report.messages = size_of(groups)
        work = search_queue(search, begin, groups, report)
        piece = next(work)
        while True:
            piece = work.send(piece.run(LocalLooking(search.budget)))
    except StopIteration as end:
        stopped: SearchPlace | None = end.value
        return stopped
    except HoldfastError as error:
        search.skip(report, error)
        return None


def _groups(broker: LocalBroker, topic: str) -> dict[str, LocalGroup]:
    """The groups of a topic in queue mode, by name."""
    bodies = Bodies(broker.body_type)
    names = broker.describe_topic_now(topic).groups
    return {name: broker.existing_group_now(LocalGroup, topic, name, bodies) for name in names}
