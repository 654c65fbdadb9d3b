"""Dead letters of a queue: list, group, count, redrive and purge them. Also delayed messages, and acts on one."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
from pyroaring import BitMap64

from holdfast.api.arguments import chosen_ids
from holdfast.api.contents import PartitionHome
from holdfast.api.drafts import Bodies, to_datetime
from holdfast.api.listing import DeadGroup, DeadKinds, DeadLetter, Listed, Waiting, fingerprint
from holdfast.broker.dead_letters import DeadLetterLog
from holdfast.broker.dead_letters import note_of as note_in
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, check_topic_name, message_id, parse_message_id
from holdfast.broker.group import QueueGroup
from holdfast.broker.partition import Partition
from holdfast.env.world import checkpoint
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.local.listing import (
    ChosenLetter,
    LocalLetters,
    Mark,
    Redriving,
    at_once,
    choose,
    drop,
    in_order,
    listed,
    mark_of,
    parse_mark,
)
from holdfast.local.search import Full
from holdfast.protocol.media import LINES, ErrorAnswer, fault_of, framed
from holdfast.protocol.messages import (
    Cancelled,
    DeadGroups,
    DeadGroupsQuery,
    DeadQuery,
    DelayedQuery,
    InGroup,
    Letter,
    Letters,
    ListedMessages,
    MessageChanged,
    Purge,
    Redrive,
    RedriveTold,
)
from holdfast.server.api.queues import BodyAllowance, as_listed, page
from holdfast.server.api.takes import existing_group
from holdfast.server.http.messages import StreamResponse
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup
from holdfast.server.service import Call
from holdfast.server.turns import Scan

routes = Routes("dead letters")

_MOST_IDS = 1_000  # ids in an answer
_STEP_S = 1.0
_AT_ONCE = 1_000  # dead letters purged at a time


@routes.add("GET", "/v1/queues/{queue}/dead", action="read", query=DeadQuery)
async def list_dead(call: Call) -> Letters:
    """List dead letters that match a condition, oldest first; `after` gets the next page."""
    query: DeadQuery = call.query
    group = await existing_group(call)
    return await call.scan(_letters, group, query)


def _letters(scan: Scan, group: ServedGroup, query: DeadQuery) -> Letters:
    room = BodyAllowance(bodies=query.bodies)

    def tell(letter: Listed[bytes]) -> Letter:
        assert isinstance(letter, DeadLetter)
        return room.use(_letter(letter, bodies=room.left > 0))

    letters, more = page(scan, group, "dead", query, tell)
    return Letters(letters=letters, next=more, scanned=scan.looked, damaged=scan.damaged)


async def each_letter(
    call: Call, group: ServedGroup, where: str | None, limit: int | None, take: Callable[[DeadLetter[bytes]], None]
) -> None:
    """Pass on all dead letters that match the condition, some at a time, so that other scans get their turn."""
    after: Mark | None = None
    taken = 0

    def some(scan: Scan) -> bool:
        nonlocal after, taken
        left = None if limit is None else limit - taken
        try:
            for letter in listed(group.port, "dead", where, left, after=after, look=scan.look):
                assert isinstance(letter, DeadLetter)
                take(letter)
                taken += 1
        except Full:
            after = scan.mark
            return True
        return False

    while await call.scan(some):
        pass


async def _chosen(call: Call, group: ServedGroup) -> list[ChosenLetter]:
    """The dead letters that a redrive or a purge applies to."""
    wanted: Purge = call.body
    if wanted.ids is not None:
        ids = chosen_ids(wanted.ids, wanted.where)
        return await call.scan(lambda _: LocalLetters(group.port).chosen(ids, None, wanted.limit))
    letters: list[ChosenLetter] = []
    await each_letter(call, group, wanted.where, wanted.limit, lambda letter: letters.append(choose(letter)))
    return letters


def _letter(letter: DeadLetter[bytes], *, bodies: bool = True) -> Letter:
    facts = msgspec.structs.asdict(as_listed(letter, bodies=bodies))
    facts["original_id"] = letter.original_id
    return Letter(
        **facts,
        original_offset=letter.original_offset,
        original_timestamp=letter.original_timestamp,
        dead_at=letter.dead_at,
        failures=list(letter.failures),
        first_delivery=letter.first_delivery,
        last_delivery=letter.last_delivery,
        state=letter.state,
    )


@routes.add("GET", "/v1/queues/{queue}/dead/groups", action="read", query=DeadGroupsQuery)
async def dead_groups(call: Call) -> DeadGroups:
    """Count dead letters by reason and kind of error, the most frequent first."""
    query: DeadGroupsQuery = call.query
    group = await existing_group(call)
    if query.where is not None:
        kinds = DeadKinds()
        await each_letter(call, group, query.where, None, kinds.add)
        return DeadGroups(groups=kinds.groups()[: query.limit])
    counted = kinds_of(group)
    async with counted.turn:
        while await call.scan(counted.count):
            pass
        now_ms = call.service.world.clock.now_ns() // 1_000_000
        found = await call.scan(counted.counts, query.limit, now_ms)
    return DeadGroups(groups=found.groups)


@routes.add(
    "GET",
    "/v1/queues/{queue}/dead/{id}",
    action="read",
    query=InGroup,
    errors=("unknown_topic", "unknown_group", "not_found"),
)
async def show_dead(call: Call) -> Letter:
    """Return one dead letter with every error, its reason, its original message and its state document."""
    group = await existing_group(call)
    letter = await group.port.letter(call.path["id"])
    return await asyncio.to_thread(_letter, letter)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dead/redrive",
    action="admin",
    body=Redrive,
    answers=RedriveTold,
    gives=(LINES,),
    act=True,
    errors=("message_too_large", "queue_full", "disk_full"),
)
async def redrive(call: Call) -> RedriveTold | StreamResponse:
    """Redrive dead letters into the queue, each once. With `Accept: application/x-ndjson`, reports its progress.

    With `to` they become new messages of that topic, to which the caller must be allowed to publish.
    """
    wanted: Redrive = call.body
    group = await existing_group(call)
    if wanted.to is not None:
        call.principal.check("publish", wanted.to)
        # Raises UnknownTopic before anything is done.
        await call.service.port.describe_topic(check_topic_name(wanted.to))
    letters = await asyncio.to_thread(in_order, await _chosen(call, group))
    call.count = len(letters) if wanted.dry_run else 0
    if wanted.dry_run:
        return _redrive_answer(letters, 0)
    if LINES in call.request.header("accept"):
        return StreamResponse(_lines(call, group, letters), LINES)
    done = 0
    async for done in _redriven(call, group, letters):
        call.count = done  # also if the call is cut short
    return _redrive_answer(letters, done)


async def _redriven(call: Call, group: ServedGroup, letters: list[ChosenLetter]) -> AsyncIterator[int]:
    """Redrive dead letters at the requested rate. Yields the number done so far."""
    wanted: Redrive = call.body
    loop = asyncio.get_running_loop()
    done, size, due = 0, at_once(wanted.rate), loop.time()
    with Redriving(group.port, wanted.to) as redriving:
        for i in range(0, len(letters), size):
            while (left_s := due - loop.time()) > 0:
                await asyncio.sleep(min(left_s, _STEP_S))
                yield done
            if call.service.leaving:
                return
            done += await asyncio.to_thread(redriving.put_back, letters[i : i + size])
            if wanted.rate is not None:
                due += size / wanted.rate
            yield done


async def _lines(call: Call, group: ServedGroup, letters: list[ChosenLetter]) -> AsyncIterator[bytes]:
    done = 0
    yield framed(RedriveTold(matched=len(letters), done=0, ended=False), LINES)
    try:
        async for done in _redriven(call, group, letters):
            call.count = done
            call.confirm()
            yield framed(RedriveTold(matched=len(letters), done=done, ended=False), LINES)
    except (HoldfastError, asyncio.CancelledError) as caught:
        error = caught if isinstance(caught, HoldfastError) else call.why_ended()
        if error is None:
            raise
        call.error = error
        yield framed(ErrorAnswer(error=fault_of(error, correlation_id=call.correlation_id)), LINES)
    else:
        yield framed(_redrive_answer(letters, done), LINES)


@routes.add("POST", "/v1/queues/{queue}/dead/purge", action="admin", body=Purge, act=True)
async def purge(call: Call) -> RedriveTold:
    """Drop dead letters for good."""
    wanted: Purge = call.body
    group = await existing_group(call)
    letters = await _chosen(call, group)
    call.count = done = 0
    for i in range(0, 0 if wanted.dry_run else len(letters), _AT_ONCE):
        done += await asyncio.to_thread(drop, letters[i : i + _AT_ONCE])
        call.count = done  # also if the call is cut short
    return _redrive_answer(letters, done)


def _redrive_answer(letters: list[ChosenLetter], done: int) -> RedriveTold:
    return RedriveTold(matched=len(letters), done=done, ids=[letter.id for letter in letters[:_MOST_IDS]])


# Delayed messages: list and cancel them.


_BYTES: Final = Bodies(None)

delayed_routes = Routes("delayed")

_Line: TypeAlias = tuple[int, int, int, Any]  # due time, partition, number, message: in the order of the list
_LAST: Final = 2**62  # beyond any number


@delayed_routes.add("GET", "/v1/topics/{topic}/delayed", action="read", query=DelayedQuery)
async def list_delayed(call: Call) -> ListedMessages:
    """List delayed messages, the next one first; `after` gets the next page."""
    return await call.scan(_delayed, call)


def _delayed(_scan: Scan, call: Call) -> ListedMessages:
    query: DelayedQuery = call.query
    after = None if query.after is None else parse_mark(query.after)
    with call.service.engine.using(call.path["topic"]) as topic:
        room, found, more = BodyAllowance(bodies=query.bodies), [], ""
        lines = [_of_partition(number, each, after, query.limit) for number, each in enumerate(topic.partitions)]
        for _, number, _, message in islice(merge(*lines), query.limit):
            home = PartitionHome(topic.name, number)
            waiting: Waiting[bytes] = Waiting(home, _BYTES, message.record, message.due_at_ms)
            found.append(room.use(as_listed(waiting, bodies=room.left > 0)))
            if len(found) == query.limit:
                more = mark_of(waiting).text
        return ListedMessages(messages=found, next=more, scanned=len(found))


def _of_partition(number: int, partition: Partition, after: Mark | None, limit: int) -> Iterator[_Line]:
    """The delayed messages of a partition after a mark, in the order of the whole list."""
    if partition.delayed is None:
        return
    place: tuple[int, int] | None = None
    if after is not None:
        # Messages due at the same time are listed by partition: lower partitions are done, higher ones are not.
        place = after.due_ms, after.number if number == after.partition else _LAST if number < after.partition else -1
    for message in partition.delayed.waiting(after=place, limit=limit):
        checkpoint()
        yield message.due_at_ms, number, message.record.offset, message


@delayed_routes.add(
    "DELETE",
    "/v1/topics/{topic}/delayed/{id}",
    action="consume",
    act=True,
    looks_first=True,  # otherwise any consumer could fill the audit log with ids that never existed
    errors=("unknown_topic", "not_found"),
)
async def cancel_delayed(call: Call) -> Cancelled:
    """Cancel a delayed message; returns false if it is no longer delayed."""
    if not await asyncio.to_thread(_cancel, call, only_look=True):
        return Cancelled(cancelled=False)
    await call.begin_act()
    return Cancelled(cancelled=await asyncio.to_thread(_cancel, call))


def _cancel(call: Call, *, only_look: bool = False) -> bool:
    name = call.path["topic"]
    with call.service.engine.using(name) as topic:
        try:
            place = parse_message_id(call.path["id"], name)
        except InvalidRequest as error:
            raise NotFound(str(error)) from None
        if place.delayed_id is None:
            raise NotFound(
                f"{call.path['id']} is not the id of a delayed message; use the id that was returned when it was stored"
            )
        partition = topic.partition(place.partition)
        if only_look:
            return partition.delayed is not None and partition.delayed.get(place.delayed_id) is not None
        return partition.cancel_delayed(place.delayed_id)


# Acts on one message.

_MESSAGE: Final = "/v1/queues/{queue}/messages/{id}"


@routes.add("POST", f"{_MESSAGE}/takeBack", action="admin", query=InGroup, body=InGroup, act=True)
async def take_back(call: Call) -> MessageChanged:
    """End the lease of a message, no matter who holds it: it is ready at once, and the attempt is not counted."""
    return await _changed(call, QueueGroup.take_back)


@routes.add("POST", f"{_MESSAGE}/runNow", action="admin", query=InGroup, body=InGroup, act=True)
async def run_now(call: Call) -> MessageChanged:
    """End the delay of a message, or its wait for a retry: it is ready at once."""
    return await _changed(call, QueueGroup.run_now)


async def _changed(call: Call, change: Callable[[QueueGroup, str], bool]) -> MessageChanged:
    group = await existing_group(call)
    changed = await asyncio.to_thread(change, group.queue_group, call.path["id"])
    call.count = int(changed)
    return MessageChanged(changed=changed)


# Kinds of dead letters, counted once: a page or a call reads only the letters that came since the last one.
#
#     kind                      letters of one partition                 what is left of them
#     (reason, error) --------> offsets in the log of the letters -----> offsets that are neither redriven nor purged
#
# The log of the dead letters is only ever appended to, so each letter is read once and its offset put into the set of
# its kind. What happened to it since is known in memory, by the delivery of the letters: the letters of a kind that are
# left are a difference of two sets. Letters are appended in the order in which messages died, so a few known times give
# the letters that died in any span.

Kind: TypeAlias = tuple[str, str]  # reason and error

MOST_KINDS: Final = 10_000  # kept for one partition; errors beyond that many are one kind
OTHERS: Final = "(other errors)"
_TIME_STEP_MS: Final = 1_000
_MOST_TIMES: Final = 20_000
_NS_IN_MS: Final = 1_000_000


class KindCounts(NamedTuple):
    """The kinds, the most frequent first, and how many letters were counted of how many there are."""

    groups: list[DeadGroup]
    kinds: int
    letters: int
    of: int
    over_time: list[list[int]] = []  # noqa: RUF012  # for each group, letters in equal spans from `since_ms` on
    since_ms: int = 0

    @property
    def is_whole(self) -> bool:
        return self.letters >= self.of


class _PartitionKinds:
    """The kinds of the dead letters of one group on one partition."""

    def __init__(self, dead_log: DeadLetterLog) -> None:
        self.dead_log = dead_log
        self.reached = 0  # letters below this offset are counted
        self.offsets: dict[Kind, BitMap64] = {}
        self._times: list[tuple[int, int]] = []  # (time of death, offset), one for each second or more
        self._step_ms = _TIME_STEP_MS

    def count(self, group: str, look: Callable[[int], None]) -> None:
        """Read on from where the last call ended. `look` is called with each offset, and may raise."""
        log = self.dead_log.target.log
        start = min(max(self.dead_log.letters.group.floor, log.start, self.reached), log.end)
        for record in log.records(start, on_damage="skip", whole=False):
            look(record.offset)
            note = note_in(record)
            if note is not None and note.group == group:
                self._add((note.reason, fingerprint(note.error)), record.offset, note.dead_at_ms)
            self.reached = record.offset + 1
        self.reached = max(self.reached, log.end)

    def _add(self, kind: Kind, offset: int, at_ms: int) -> None:
        if kind not in self.offsets and len(self.offsets) >= MOST_KINDS:
            kind = kind[0], OTHERS
        self.offsets.setdefault(kind, BitMap64()).add(offset)
        if not self._times or at_ms >= self._times[-1][0] + self._step_ms:
            self._times.append((at_ms, offset))
            if len(self._times) > _MOST_TIMES:
                del self._times[1::2]
                self._step_ms *= 2

    def left(self) -> dict[Kind, BitMap64]:
        """The letters of each kind that are neither redriven nor purged; forgets the others."""
        state, log = self.dead_log.letters.group, self.dead_log.target.log
        with self.dead_log.letters.lock:
            gone = state.done | BitMap64(state.leases) | BitMap64(state.waiting) | BitMap64(state.burials)
            first = max(state.floor, log.start)
        found = {}
        for kind, offsets in list(self.offsets.items()):
            offsets.remove_range(0, first)
            if not offsets:
                del self.offsets[kind]
                continue
            left = offsets - gone
            if left:
                found[kind] = left
        return found

    @property
    def uncounted(self) -> int:
        log = self.dead_log.target.log
        return max(log.end - max(self.reached, log.start), 0)

    def offset_at(self, ms: int) -> int:
        """About the first letter that died at this time or later."""
        at = bisect_left(self._times, ms, key=itemgetter(0))
        return self._times[at][1] if at < len(self._times) else self.reached


class CountedKinds:
    """The kinds of the dead letters of one group. One caller at a time may use it."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = deliveries
        self._parts: dict[int, _PartitionKinds] = {}
        self.turn = asyncio.Lock()

    def count(self, scan: Scan, is_late: Callable[[], bool] | None = None) -> bool:
        """Count letters that came since; whether some are left, as the scan is full or `is_late` says so."""

        def look(number: int, offset: int) -> None:
            if is_late is not None and scan.looked and not scan.looked % 64 and is_late():
                raise Full
            scan.look(number, offset)

        try:
            for delivery, part in self._each():
                part.count(delivery.name, lambda offset, number=delivery.number: look(number, offset))  # type: ignore[misc]
        except Full:
            return True
        return False

    def _each(self) -> Iterator[tuple[Delivery, _PartitionKinds]]:
        for delivery in self._deliveries:
            delivery.check_open()
            delivery.dead.store_dead()
            dead_log = delivery.dead.dead_log
            if dead_log is not None:
                part = self._parts.get(delivery.number)
                if part is None or part.dead_log is not dead_log:  # the topic was closed and opened since
                    part = self._parts[delivery.number] = _PartitionKinds(dead_log)
                yield delivery, part

    def counts(self, _scan: Scan, limit: int, now_ms: int, spans: int = 0) -> KindCounts:
        """The most frequent kinds, as far as they are counted."""
        found: dict[Kind, list[tuple[Delivery, _PartitionKinds, BitMap64]]] = {}
        uncounted = 0
        for delivery, part in self._each():
            uncounted += part.uncounted
            for kind, left in part.left().items():
                found.setdefault(kind, []).append((delivery, part, left))
        sizes = {kind: sum(len(left) for _, _, left in places) for kind, places in found.items()}
        most = sorted(found, key=lambda kind: (-sizes[kind], kind[1]))[:limit]
        groups = [(kind, made) for kind in most if (made := _kind_group(kind, sizes[kind], found[kind])) is not None]
        first_ms = min([round(made.first.timestamp() * 1000) for _, made in groups], default=now_ms)
        since_ms, span_ms = _spans(first_ms, now_ms, spans) if spans else (first_ms, 0)
        over_time = [_over_time(found[kind], since_ms, span_ms, spans) for kind, _ in groups] if spans else []
        letters = sum(sizes.values())
        return KindCounts([made for _, made in groups], len(sizes), letters, letters + uncounted, over_time, since_ms)


def _kind_group(kind: Kind, size: int, places: list[tuple[Delivery, _PartitionKinds, BitMap64]]) -> DeadGroup | None:
    """A kind with its first and last letter, which are read anew; None if all of them are gone by now."""
    first_ms, last = 0, (0, "")
    for delivery, _, left in places:
        for offset in dict.fromkeys((left.min(), left.max())):
            letter = delivery.dead.letter(offset)
            if letter is None:
                continue
            at_ms = letter.note.dead_at_ms
            first_ms = min(first_ms or at_ms, at_ms)
            last = max(last, (at_ms, message_id(delivery.topic + DEAD_SUFFIX, delivery.number, offset, None)))
    if not first_ms:
        return None
    return DeadGroup(
        reason=kind[0],
        error=kind[1],
        count=size,
        first=to_datetime(first_ms * _NS_IN_MS),
        last=to_datetime(last[0] * _NS_IN_MS),
        example=last[1],
    )


_SPANS_MS: Final = tuple(1000 * seconds for seconds in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400))


def _spans(first_ms: int, now_ms: int, spans: int) -> tuple[int, int]:
    """Where the first span begins, and how long each is, so that they reach until now.

    They begin at round times: what is counted in them stays the same while nothing dies.
    """
    longest_ms = _SPANS_MS[-1] * ((now_ms - first_ms) // (spans * _SPANS_MS[-1]) + 2)
    reaching = (span_ms for span_ms in _SPANS_MS if first_ms - first_ms % span_ms + spans * span_ms > now_ms)
    span_ms = next(reaching, longest_ms)
    return first_ms - first_ms % span_ms, span_ms


def _over_time(
    places: list[tuple[Delivery, _PartitionKinds, BitMap64]], since_ms: int, span_ms: int, spans: int
) -> list[int]:
    bounds = [since_ms + span_ms * i for i in range(1, spans)]
    counts = [0] * spans
    for _, part, left in places:
        edges = [0, *(part.offset_at(ms) for ms in bounds), 2**62]
        for i in range(spans):
            if edges[i] < edges[i + 1]:
                counts[i] += left.range_cardinality(edges[i], edges[i + 1])
    return counts


_kept: Final[WeakKeyDictionary[ServedGroup, CountedKinds]] = WeakKeyDictionary()


def kinds_of(group: ServedGroup) -> CountedKinds:
    """The counted kinds of a group, for as long as the server keeps the group."""
    return _kept.setdefault(group, CountedKinds(group.deliveries))
