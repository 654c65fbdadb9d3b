"""Queues: take messages, settle them, look at them, fetch their bodies; and search through all queues.

One call of the search looks at no more than `scan_messages` messages. The pieces run as scans, so callers take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from holdfast.api.arguments import ACK, MessageOutcome, check_seek, error_text, gives_back
from holdfast.api.contents import home_of, record_of
from holdfast.api.drafts import duration_ms, lease_of
from holdfast.api.listing import Listed as Found
from holdfast.api.listing import SearchedQueue, SearchHit, SearchPage, until_ms_of
from holdfast.api.topics import TopicInfo, changes_of
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.metrics import QueueStats
from holdfast.broker.upkeep import reading
from holdfast.errors import HoldfastError, InvalidRequest, LeaseLost, NotFound
from holdfast.local.listing import find_message, listed, look_up, mark_of, no_message, parse_mark
from holdfast.local.search import Full, MessageSearch, SearchPlace, found_by_id, search_queue, size_of, topic_of_wanted
from holdfast.model import Record
from holdfast.protocol import messages as wire
from holdfast.protocol.media import RAW, SMALL_BYTES, encode
from holdfast.protocol.messages import (
    Ack,
    Cancelled,
    Committed,
    Compacted,
    CreateQueue,
    DeadQuery,
    Deliveries,
    Delivery,
    Extend,
    InGroup,
    Listed,
    ListedMessages,
    ListQuery,
    LookupQuery,
    Messages,
    Nack,
    Number,
    PeekQuery,
    Purged,
    Receipt,
    Receipts,
    Reject,
    Said,
    SaveState,
    SearchAnswer,
    SearchQuery,
    Seek,
    Settled,
    Sought,
    State,
    Take,
    Whole,
    Wire,
)
from holdfast.server.api.takes import existing_group, prepare_take, take
from holdfast.server.api.topics import altered, check_new, described
from holdfast.server.http.heads import KnownHead
from holdfast.server.http.messages import ANSWER_BYTES, Response, StreamResponse, payload
from holdfast.server.routing import Prepared, Routes
from holdfast.server.served import ServedGroup, _said, document_content, said, texts_of
from holdfast.server.service import Call, Service, body_decoder, partition_of
from holdfast.server.tokens import Principal
from holdfast.server.turns import Scan
from holdfast.settings import TopicSettings

routes = Routes("queues")

_CANCELLABLE = frozenset({"ready", "delayed"})

_SaidT = TypeVar("_SaidT", bound=Said)

_FEW = 100  # messages that are read and encoded on the event loop; more go to a thread


class InHand(InGroup, kw_only=True):
    """A message in flight, by its receipt."""

    receipt: Receipt


@routes.add("PUT", "/v1/queues/{queue}", action="admin", body=CreateQueue, act=True)
async def create_queue(call: Call) -> TopicInfo:
    """Create a queue, or change the settings of an existing one. You can safely repeat the call."""
    wanted: CreateQueue = call.body
    port, name = call.service.port, call.path["queue"]
    changes = changes_of(wanted.settings)
    if wanted.partitions is not None:
        changes["partitions"] = wanted.partitions
    if name in await port.topics():
        if changes:
            await altered(call, name, changes)
        else:
            call.count = 0  # a worker that starts: the audit log says that nothing was changed
    else:
        check_new(call, changes)
        await port.create_topic(name, None, changes, exist_ok=True)
    await call.service.group(name)
    return await described(call, name)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dequeue",
    action="consume",
    body=Take,
    answers=Deliveries,
    gives=(RAW,),
    errors=("too_many_waiters",),
    prepare=partial(prepare_take, state=False),
)
async def dequeue(call: Call) -> Response | StreamResponse:
    """Lease messages; returns an empty list if none arrives in time."""
    return await take(call, state=False)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dequeueWithState",
    action="consume",
    body=Take,
    answers=Deliveries,
    gives=(RAW,),
    errors=("too_many_waiters",),
    prepare=partial(prepare_take, state=True),
)
async def dequeue_with_state(call: Call) -> Response | StreamResponse:
    """Like `dequeue`, with the state document of each message."""
    return await take(call, state=True)


async def _settled(call: Call, outcome: Callable[[TopicSettings], MessageOutcome]) -> Settled:
    """Settle messages, and free their room in the windows of streams, also if the lease was lost."""
    given: Receipts = call.body
    group = await existing_group(call)
    settling = outcome(group.settings)
    receipts = await texts_of(group, given)
    try:
        await group.port.settle(receipts, settling, given.durability)
    except LeaseLost:
        if settling.verb != "extend":
            await call.service.windows.settled(group, receipts)
        raise
    if settling.verb != "extend":
        await call.service.windows.settled(group, receipts)
    return Settled(settled=len(set(receipts)))


def _prepare_ack(service: Service, head: KnownHead) -> Prepared:
    """Answers acks of one message, or of runs. Not if they wait for a sync, or a stream may have the messages."""
    queue, done = head.topic, encode(Settled(settled=1), head.media)

    def answer(_: Principal, given: Ack, __: int | None) -> bytes | None:
        receipts = given.receipts
        if given.durability is not None:
            return None
        group = service.known_group(queue, given.group or DEFAULT_GROUP)
        if group is None or service.windows.of(group):
            return None
        if not given.runs:
            return done if len(receipts) == 1 and group.port.ack_receipt_now(receipts[0]) else None
        if receipts or not group.port.ack_runs_now(given.runs):
            return None
        return encode(Settled(settled=sum([len(run.offsets) for run in given.runs])), head.media)

    return Prepared(body_decoder(head.takes, Ack), answer)


@routes.add("POST", "/v1/queues/{queue}/ack", action="consume", body=Ack, errors=("lease_lost",), prepare=_prepare_ack)
async def ack(call: Call) -> Settled:
    """Confirm that messages are done. If some receipts are not valid, the error names them; the others are acked."""
    return await _settled(call, _acked)


def _acked(_: TopicSettings) -> MessageOutcome:
    return ACK


@routes.add("POST", "/v1/queues/{queue}/nack", action="consume", body=Nack, errors=("lease_lost",))
async def nack(call: Call) -> Settled:
    """Return messages that failed or were dropped, which counts as an attempt; `intent` "defer" does not count."""
    given: Nack = call.body

    def nacked(settings: TopicSettings) -> MessageOutcome:
        if given.intent != "failure" and given.error is not None:
            raise InvalidRequest(
                f"a message with intent={given.intent} has no error; leave it out, or use intent=failure"
            )
        delay_ms = None if given.delay is None else duration_ms(given.delay, "delay")
        if given.intent != "failure":
            return MessageOutcome(given.intent, delay_ms)
        return MessageOutcome("nack", delay_ms, error_text(given.error, settings.max_error_chars))

    return await _settled(call, nacked)


@routes.add("POST", "/v1/queues/{queue}/reject", action="consume", body=Reject, errors=("lease_lost",))
async def reject(call: Call) -> Settled:
    """Make messages dead letters at once, because retrying cannot help."""
    given: Reject = call.body
    return await _settled(
        call, lambda settings: MessageOutcome("reject", why=error_text(given.reason, settings.max_error_chars))
    )


@routes.add("POST", "/v1/queues/{queue}/extend", action="consume", body=Extend, errors=("lease_lost",))
async def extend(call: Call) -> Settled:
    """Extend the lease of messages, from now; a lease of 0 ends it."""
    given: Extend = call.body

    def extended(_: TopicSettings) -> MessageOutcome:
        if gives_back(given.lease):
            return MessageOutcome("defer")
        return MessageOutcome("extend", lease_ms=None if given.lease is None else lease_of(given.lease))

    return await _settled(call, extended)


@routes.add("GET", "/v1/queues/{queue}/state", action="consume", query=InHand, errors=("lease_lost",))
async def get_state(call: Call) -> State:
    """Return the state document of a message in flight; version 0 if there is none."""
    query: InHand = call.query
    return (await existing_group(call)).state(query.receipt)


@routes.add(
    "PUT",
    "/v1/queues/{queue}/state",
    action="consume",
    body=SaveState,
    errors=("lease_lost", "conflict", "message_too_large"),
)
async def save_state(call: Call) -> State:
    """Save the state of a message in flight, if it still has this version; without a value, remove it."""
    given: SaveState = call.body
    group = await existing_group(call)
    value = None if given.value is UNSET else given.value
    content = None
    if value is not None and (call.request.received > SMALL_BYTES or call.request.packed):
        content = await call.service.pool.run(lambda _: document_content(value))
    return await group.save_state(given.receipt, given.version, value, given.durability, content)


@routes.add("GET", "/v1/queues/{queue}/stats", action="read", query=InGroup)
async def stats(call: Call) -> QueueStats:
    """Count the messages by phase, with their size on disk and the metrics since the server started."""
    return await (await existing_group(call)).port.stats()


@routes.add("GET", "/v1/queues/{queue}/peek", action="read", query=PeekQuery, answers=Messages)
async def peek(call: Call) -> Response:
    """Show the messages that would be delivered next, without taking them."""
    query: PeekQuery = call.query
    group = await existing_group(call)
    found = await asyncio.to_thread(group.port.peek_now, query.count, ANSWER_BYTES)

    def answer() -> Response:
        return call.answer(Messages(messages=[call.encoded(said(home_of(each), record_of(each))) for each in found]))

    return answer() if len(found) <= _FEW else await call.service.pool.run(lambda _: answer())


@routes.add("GET", "/v1/queues/{queue}/messages", action="read", query=ListQuery)
async def messages(call: Call) -> ListedMessages:
    """List ready, leased, delayed, dead or done messages without taking them; `after` gets the next page."""
    query: ListQuery = call.query
    group = await existing_group(call)
    return await call.scan(_look, group, query)


def _look(scan: Scan, group: ServedGroup, query: ListQuery) -> ListedMessages:
    room = BodyAllowance(bodies=query.bodies)
    found, more = page(scan, group, query.phase, query, lambda each: room.use(as_listed(each, bodies=room.left > 0)))
    return ListedMessages(messages=found, next=more, scanned=scan.looked, damaged=scan.damaged)


def page(
    scan: Scan, group: ServedGroup, phase: str, query: ListQuery | DeadQuery, tell: Callable[[Found[Any]], _SaidT]
) -> tuple[list[_SaidT], str]:
    """One page of messages in a phase, and the mark to continue from. Holds only messages of the page in memory."""
    after = None if query.after is None else parse_mark(query.after)
    answers: list[_SaidT] = []
    try:
        for each in listed(group.port, phase, query.where, query.limit, after=after, look=scan.look, lost=scan.lost):
            answers.append(tell(each))
            if len(answers) == query.limit:
                return answers, mark_of(each).text
    except Full:
        return answers, "" if scan.mark is None else scan.mark.text
    return answers, ""


class BodyAllowance:
    """The bytes of bodies that an answer may still hold. Further messages are sent without their bodies."""

    def __init__(self, *, bodies: bool) -> None:
        self.left = ANSWER_BYTES if bodies else 0

    def use(self, message: _SaidT) -> _SaidT:
        """Count the body of a message, and return the message."""
        self.left -= len(message.body)
        return message


def as_listed(found: Found[Any], *, bodies: bool = True) -> Listed:
    """A message from a listing, as it is sent."""
    facts = _said(found, record_of(found)) | {"offset": found.offset}
    if not bodies:
        facts |= {"body": b"", "omitted": True}
    due = found.due_at
    return Listed(
        **facts,
        phase=found.phase,
        attempts=found.attempts,
        holder=found.holder,
        reason=found.reason,
        error=found.error,
        due_ms=0 if due is None else round(due.timestamp() * 1000),
        **_lease(found),
    )


def _lease(found: Found[Any]) -> dict[str, Any]:
    """The holder of a message and the end of its lease. Not the receipt: the right to read is none to settle."""
    if found.phase != "leased":
        return {}
    until_ms = until_ms_of(found)
    return {"lease_until_ms": until_ms} if until_ms else {}


@routes.add(
    "DELETE",
    "/v1/queues/{queue}/messages/{id}",
    action="consume",
    query=InGroup,
    act=True,
    looks_first=True,  # otherwise any consumer could fill the audit log with ids that never existed
)
async def cancel(call: Call) -> Cancelled:
    """Cancel a message that nobody is working on."""
    group = await existing_group(call)
    found = await asyncio.to_thread(find_message, group.port, call.path["id"])
    if found is None:
        _check_was_there(group, call.path["id"])
    if found is None or found.phase not in _CANCELLABLE:
        return Cancelled(cancelled=False)
    await call.begin_act()
    return Cancelled(cancelled=await group.port.cancel(call.path["id"]))


def _check_was_there(group: ServedGroup, message_id: str) -> None:
    """Raise InvalidRequest for a message that never existed. One that is gone can no longer be cancelled."""
    delivery, place = group.queue_group.place(message_id)
    was_delayed = place.delayed_id is not None and delivery.partition.was_delayed(place.delayed_id)
    if not was_delayed and (place.offset is None or place.offset >= delivery.partition.log.written_end):
        raise InvalidRequest(f"there is no message {message_id}: check the id, as it was returned when it was stored")


@routes.add("POST", "/v1/queues/{queue}/seek", action="admin", body=Seek, act=True, errors=("offset_out_of_range",))
async def seek(call: Call) -> Sought:
    """Move the group's position: earlier messages are skipped, later ones are delivered again."""
    given: Seek = call.body
    group = await existing_group(call)
    check_seek(given.to, given.offset, given.time)
    offset = await group.port.seek(given.to, given.offset, given.time, given.partition)
    return Sought(offset=offset)


@routes.add("POST", "/v1/queues/{queue}/purge", action="admin", query=InGroup, body=InGroup, act=True)
async def purge(call: Call) -> Purged:
    """Drop every message that is not in flight, including delayed ones unless other groups read the topic."""
    call.count = await (await existing_group(call)).port.purge()
    return Purged(purged=call.count)


@routes.add("POST", "/v1/queues/{queue}/compact", action="admin", query=InGroup, body=InGroup, act=True)
async def compact(call: Call) -> Compacted:
    """Drop done messages now, whatever the retention settings say."""
    freed = await (await existing_group(call)).port.compact()
    return Compacted(segments=freed.segments, bytes=freed.bytes, journal_bytes=freed.journal_bytes)


@routes.add("GET", "/v1/queues/{queue}/committed", action="read", query=InGroup)
async def committed(call: Call) -> Committed:
    """Return the end of the contiguous run of settled messages in each partition."""
    found = await (await existing_group(call)).port.committed()
    return Committed(offsets={str(number): offset for number, offset in found.items()})


@routes.add("GET", "/v1/queues/{queue}/messages/{id}", action="read", query=InGroup)
async def show(call: Call) -> Listed:
    """Return one message, whatever its phase, with its body."""
    group = await existing_group(call)
    found = await call.scan(find, group, call.path["id"])
    if found is None:
        raise NotFound(f"there is no message {call.path['id']}, or it was removed: check the id")
    return found


def find(_scan: Scan, group: ServedGroup, message_id: str) -> Listed | None:
    """A message by its id, unless it is done. A dead letter has a different id than the message had."""
    try:
        found = find_message(group.port, message_id)
    except InvalidRequest:
        return None  # not an id of this queue
    if found is None or found.phase == "done" or found.message.id != message_id:
        return None
    return as_listed(found.message)


# Messages in flight by receipt, for a client that continues where another process stopped.


@routes.add("GET", "/v1/queues/{queue}/inHand", action="consume", query=InHand, errors=("lease_lost",))
async def in_hand(call: Call) -> Delivery:
    """Return the message of a receipt, as it was delivered; `lease_lost` if it is no longer held."""
    query: InHand = call.query
    group = await existing_group(call)
    delivery, delivered = await asyncio.to_thread(group.queue_group.resume, query.receipt)
    return group.delivery(delivery, delivered, state=True)


# Everything that is known of one message, by its id.


@routes.add("GET", "/v1/queues/{queue}/lookup", action="read", query=LookupQuery, errors=("not_found",))
async def lookup(call: Call) -> Whole:
    """Return one message in any phase, with its lease, its state document and its history step by step."""
    query: LookupQuery = call.query
    group = await existing_group(call)
    found = await call.scan(_whole, group, query.id)
    if found is None:
        raise no_message(query.id, group.topic)
    return found


def _whole(_scan: Scan, group: ServedGroup, message_id: str) -> Whole | None:
    found = look_up(group.port, message_id)
    if found is None:
        return None
    message, phase, *_ = found
    facts = msgspec.structs.asdict(as_listed(message)) | {"phase": phase}
    return Whole(
        **{**facts, "lease_until_ms": found.lease_until_ms},
        leased_at_ms=found.leased_at_ms,
        first_delivery_ms=found.first_delivery_ms,
        last_delivery_ms=found.last_delivery_ms,
        failures=list(found.failures),
        state=found.state,
        history=list(found.history),
    )


# Bodies alone, as they are. Large ones are streamed and never held in memory as a whole.


payload_routes = Routes("messages")

Answer = Response | StreamResponse


class AtOffset(Wire, kw_only=True):
    """The offset of the message."""

    offset: Number


@payload_routes.add(
    "GET", "/v1/queues/{queue}/payload", action="consume", query=InHand, gives=(RAW,), errors=("lease_lost",)
)
async def payload_in_hand(call: Call) -> Answer:
    """Return the body of a message in flight, byte for byte."""
    query: InHand = call.query
    group = await existing_group(call)
    _, delivered = await asyncio.to_thread(group.queue_group.resume, query.receipt)
    return payload(delivered.record.value)


@payload_routes.add(
    "GET", "/v1/queues/{queue}/messages/{id}/payload", action="read", query=InGroup, gives=(RAW,), errors=("not_found",)
)
async def payload_of(call: Call) -> Answer:
    """Return the body of a message or a dead letter, no matter who holds it."""
    group = await existing_group(call)
    found = await call.scan(lambda _: find_message(group.port, call.path["id"]))
    if found is None:
        raise NotFound(f"there is no message {call.path['id']}, or it was removed: check the id")
    return payload(record_of(found.message).value)


@payload_routes.add(
    "GET",
    "/v1/topics/{topic}/partitions/{partition}/payload",
    action="read",
    query=AtOffset,
    gives=(RAW,),
    errors=("not_found", "offset_out_of_range", "removed"),
)
async def payload_at(call: Call) -> Answer:
    """Return the body of the message at an offset."""
    query: AtOffset = call.query
    record = await asyncio.to_thread(_record, call, query.offset)
    return payload(record.value)


def _record(call: Call, offset: int) -> Record:
    engine: Any = call.service.engine
    with reading(engine.using, call.path["topic"]) as topic:
        log = topic.partition(partition_of(call.path)).log
        for record in log.records(offset, whole=False):
            if record.offset == offset:
                found: Record = record
                return found
            break
    raise NotFound(f"there is no message at offset {offset} of {call.path['topic']}: it was removed, or never stored")


async def search(call: Call, text: str, limit: int, after: str) -> SearchPage:
    """Search one piece for what somebody typed."""
    clock, most = call.service.world.clock, call.service.settings.scan_messages
    asked = MessageSearch(text, limit, after, most, now_ms=clock.now_ns() // 1_000_000, mono_ns=clock.monotonic_ns)
    if asked.wanted_id:
        asked.page.messages = await _by_id(call, asked.wanted_id)
        if asked.page.messages:
            return asked.page
    principal = call.principal
    seen = [name for name in await call.service.port.topics() if principal.sees(name) and principal.may("read", name)]
    names = asked.queues(seen)
    for i, name in enumerate(names):
        stopped = await _search_queue(call, asked, asked.begin(name))
        if stopped is not None:
            asked.stop(stopped, names[i + 1 :])
            break
    return asked.page


async def _by_id(call: Call, wanted: str) -> list[SearchHit]:
    """The message with this id, in each group that the caller may use."""
    try:
        topic = topic_of_wanted(wanted)
        if not (call.principal.sees(topic) and call.principal.may("read", topic)):
            return []
        groups = (await described(call, topic)).groups
    except HoldfastError:
        return []
    found = []
    for name in groups:
        group = await call.service.group(topic, name)
        one = await call.scan(lambda _scan, group=group: found_by_id(group.port, wanted))
        if one is not None:
            found.append(one)
    return found


async def _search_queue(call: Call, asked: MessageSearch, begin: SearchPlace) -> SearchPlace | None:
    """Search one queue from a place on; the place where it stopped, None if it was searched to its end."""
    report = SearchedQueue(queue=begin.topic)
    try:
        groups = (await described(call, begin.topic)).groups
        if not groups:
            asked.page.not_queues.append(begin.topic)
            return None
        asked.page.queues.append(report)
        ports = {name: (await call.service.group(begin.topic, name)).port for name in groups}
        report.messages = await asyncio.to_thread(size_of, ports)
        work = search_queue(asked, begin, ports, report)
        piece = next(work)
        while True:
            piece = work.send(await call.scan(piece.run))
    except StopIteration as end:
        stopped: SearchPlace | None = end.value
        return stopped
    except HoldfastError as error:
        asked.skip(report, error)
        return None


search_routes = Routes("search")


@search_routes.add("GET", "/v1/search", action="read", scope="any", query=SearchQuery)
async def find_messages(call: Call) -> SearchAnswer:
    """Find messages in all queues and phases that you may read, and say what was searched; `after` continues."""
    query: SearchQuery = call.query
    found = await search(call, query.q, query.limit, query.after)
    return SearchAnswer(
        messages=await asyncio.to_thread(lambda: list(map(_as_found, found.messages))),
        next=found.next,
        scanned=found.scanned,
        scanned_in_all=found.scanned_in_all,
        queues=[wire.QueueSearched(**msgspec.structs.asdict(each)) for each in found.queues],
        left=found.left,
        left_out=found.left_out,
        not_queues=found.not_queues,
        where=found.where,
    )


def _as_found(hit: SearchHit) -> wire.FoundMessage:
    facts = msgspec.structs.asdict(as_listed(hit.message, bodies=False)) | {"phase": hit.message.phase}
    return wire.FoundMessage(**facts, group=hit.group)
