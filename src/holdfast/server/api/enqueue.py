"""Messages in: one as the body of a request, one with its options as a form, or many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta

from holdfast.codec.tracecontext import TRACEPARENT, TRACESTATE, parse_tracestate
from holdfast.embedded.drafts import NewMessage as Draft
from holdfast.embedded.drafts import has_only_a_body
from holdfast.embedded.publisher import Stored as Written
from holdfast.errors import InvalidRequest, NotInstalled, UnknownTopic
from holdfast.protocol.media import JSON, LINES, MSGPACK, MULTIPART, RAW, UNSAID, Unframer, decode
from holdfast.protocol.messages import (
    Batch,
    Codec,
    Durability,
    Header,
    Instant,
    NewMessage,
    Options,
    PartitionNumber,
    Priority,
    Seconds,
    Stored,
    StoredBatch,
    Wire,
)
from holdfast.server.calls import Call, not_understood
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Routes

routes = Routes("messages")

_MOST_HEADERS: Final = 1_000
# curl -d takes the line ends out; and of a file it says that it is a form.
_LINES_HINT: Final = f"Where each line is a message, send it with curl -H 'content-type: {LINES}' --data-binary @FILE"

_Answer = TypeVar("_Answer")
Drafts: TypeAlias = list[Draft] | list[bytes]


class Placing(Wire, kw_only=True):
    """Where messages go, and how safe they are to be."""

    partition: PartitionNumber | None = None
    durability: Durability | None = None
    codec: Codec | None = None
    create: bool = False


class EnqueueQuery(Placing, kw_only=True):
    """The options of one message, behind the '?'; a header is name:value, and may be there more than once."""

    key: Annotated[str, Meta(max_length=10_000)] | None = None
    header: Annotated[list[str], Meta(max_length=_MOST_HEADERS)] = msgspec.field(default_factory=list)
    priority: Priority = 0
    delay: Seconds | None = None
    at: Instant | None = None
    ttl: Annotated[float, Meta(gt=0, le=100 * 365 * 24 * 3600)] | None = None
    dedup_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    correlation_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


@routes.add(
    "POST",
    "/v1/queues/{queue}/enqueue",
    action="publish",
    query=EnqueueQuery,
    answers=Stored,
    status=201,
    takes=(RAW, MULTIPART),
    errors=("unknown_topic", "message_too_large", "disk_full"),
)
async def enqueue(call: Call) -> Response:
    """Store one message: the request's body is the message's, byte for byte; or a form of `options` and `payload`."""
    query: EnqueueQuery = call.query
    request, most_bytes = call.request, call.service.settings.max_request_bytes
    content: AsyncIterator[bytes] | None = None
    if request.media == MULTIPART:
        options, content = await _form(request, most_bytes)
        message = _draft(options, b"")
    elif request.complete or query.codec is not None:
        message = _plain(query, await request.read(most_bytes))
    else:
        message, content = _plain(query, b""), request.chunks(most_bytes)
    if content is None:
        (stored,) = await publish(call, call.path["queue"], prepared(call, [message]), query)
    else:
        stored = await _publish_stream(call, message, content)
    if message.correlation_id is not None:
        call.correlation_id = message.correlation_id
    return call.answer(stored)


async def _form(request: Request, most_bytes: int) -> tuple[Options, AsyncIterator[bytes]]:
    """Needs python-multipart, which the owner of a shared folder may be without."""
    try:
        from holdfast.server.forms import read_form
    except ModuleNotFoundError:
        raise NotInstalled("forms need python-multipart; run: pip install 'holdfast[server]'") from None
    return await read_form(request, most_bytes)


async def _publish_stream(call: Call, message: Draft, content: AsyncIterator[bytes]) -> Stored:
    """Store a message whose body is still coming, and may be large."""
    query: EnqueueQuery = call.query
    if query.codec is not None:
        raise InvalidRequest("what comes as a form is stored as it is: leave codec out")
    message = message if call.trace is None else _traced(call, message)
    options = {name: value for name, value in msgspec.structs.asdict(message).items() if name != "body"}
    length = call.request.header("content-length")
    hint = int(length) if length and call.request.media != MULTIPART and not call.request.packed else None

    async def store() -> Written:
        return await call.service.broker.publish_stream(
            call.path["queue"], content, hint, partition=query.partition, durability=query.durability, **options
        )

    return _stored(await _made(call, call.path["queue"], query, store))


async def _made(call: Call, topic: str, query: Placing, store: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """What storing answers; a queue that is not there is made first, where that is asked for."""
    try:
        return await store()
    except UnknownTopic as error:
        if not query.create:
            error.add_note(f"make it with PUT /v1/queues/{topic}, or say create=true")
            raise
    call.principal.check("admin", topic)
    await call.begin_act()
    await call.service.broker.create_topic(topic, exist_ok=True)
    await call.service.group(topic)
    return await store()


@routes.add(
    "POST",
    "/v1/queues/{queue}/batch",
    action="publish",
    query=Placing,
    answers=StoredBatch,
    status=201,
    takes=(JSON, MSGPACK, LINES),
    content=Batch,
    errors=("unknown_topic", "message_too_large", "disk_full"),
)
async def enqueue_batch(call: Call) -> Response:
    """Store many messages: those of one partition all or not at all. JSON, MessagePack, or one object a line."""
    stored = await publish(call, call.path["queue"], await drafts(call), call.query)
    return call.answer(StoredBatch(stored=stored))


async def drafts(call: Call) -> Drafts:
    """The messages of a request; bodies alone where there is nothing else: these go a shorter way."""
    request, most = call.request, call.service.settings.max_request_bytes
    media = request.media
    try:
        if media == LINES:
            lines = [line async for line in _lines(request.chunks(most))]
            batch = Batch(messages=[decode(line, JSON, NewMessage) for line in lines])
        elif media in (JSON, MSGPACK, *UNSAID):
            batch = decode(await request.read(most), media, Batch)
        else:
            raise not_understood(media, JSON, MSGPACK, LINES)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "" if media == MSGPACK else f". {_LINES_HINT}"
        raise InvalidRequest(f"the messages cannot be read: {error}. Nothing was stored{hint}") from None
    if batch.bodies and batch.messages:
        raise InvalidRequest("give messages or bodies, not both: nobody could tell their order. Nothing was stored")
    if not batch.bodies and not batch.messages:
        raise InvalidRequest("there is no message in the request's body")
    if batch.bodies and call.trace is None:
        return batch.bodies
    messages = [Draft(body=body) for body in batch.bodies]
    return prepared(call, messages or [_draft(message, _body(message)) for message in batch.messages])


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    unframer = Unframer(LINES)
    async for chunk in chunks:
        for line in unframer.feed(chunk):
            yield line
    for line in unframer.feed(b"\n"):
        yield line


def prepared(call: Call, messages: list[Draft]) -> Drafts:
    """The messages with the caller's trace context, or as bodies alone."""
    if call.trace is not None:
        return [_traced(call, message) for message in messages]
    return [message.body for message in messages] if all(map(_is_plain, messages)) else messages


async def publish(call: Call, topic: str, messages: Drafts, query: Placing) -> list[Stored]:
    """Store messages in a topic, and tell where they are."""
    broker = call.service.broker

    async def store() -> list[Written]:
        return await broker.publish_many(
            topic, messages, partition=query.partition, durability=query.durability, codec=query.codec
        )

    return list(map(_stored, await _made(call, topic, query, store)))


def _stored(stored: Written) -> Stored:
    return Stored(
        id=stored.id,
        topic=stored.topic,
        partition=stored.partition,
        offset=stored.offset,
        delayed_id=stored.delayed_id,
        duplicate=stored.duplicate,
        durability=stored.durability,
    )


def _plain(query: EnqueueQuery, body: bytes) -> Draft:
    headers = []
    for text in query.header:
        name, colon, value = text.partition(":")
        if not colon:
            raise InvalidRequest(f"header={text!r} cannot be used: give name:value")
        headers.append((name, value))
    return Draft(
        body=body,
        key=query.key,
        headers=headers or None,
        priority=query.priority,
        delay=query.delay,
        at=query.at,
        ttl=query.ttl,
        dedup_id=query.dedup_id,
        correlation_id=query.correlation_id,
    )


def _draft(message: Options, body: bytes | None) -> Draft:
    return Draft(
        body=body,
        key=_either(message.key, message.key_data, "key"),
        headers=list(map(_pair, message.headers)) or None,
        priority=message.priority,
        delay=message.delay,
        at=message.at,
        ttl=message.ttl,
        dedup_id=_either(message.dedup_id, message.dedup_data, "dedup_id"),
        correlation_id=message.correlation_id,
    )


def _either(text: str | None, data: bytes | None, name: str) -> str | bytes | None:
    if text is not None and data is not None:
        raise InvalidRequest(f"{name} is given as text and as data: choose one of them")
    return text if data is None else data


def _pair(header: Header) -> tuple[str, str | bytes]:
    value = _either(header.value, header.data, f"the header {header.name}")
    if value is None:
        raise InvalidRequest(f"the header {header.name} has neither value nor data")
    return header.name, value


def _body(message: NewMessage) -> bytes | None:
    if message.body is not None and message.text is None and message.json is UNSET and not message.tombstone:
        return message.body
    given: list[Any] = [
        message.body,
        message.text,
        None if message.json is UNSET else message.json if message.json is not None else UNSET,
    ]
    if sum(each is not None for each in given) + message.tombstone > 1:
        raise InvalidRequest("a message has one body: give one of body, text, json and tombstone")
    if message.body is not None:
        return message.body
    if message.text is not None:
        return message.text.encode()
    if message.json is not UNSET:
        try:
            return msgspec.json.encode(message.json)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"json cannot be used: {error}. It must be a value that JSON knows") from None
    return None if message.tombstone else b""


def _is_plain(message: Draft) -> bool:
    return type(message.body) is bytes and has_only_a_body(message)


def _traced(call: Call, message: Draft) -> Draft:
    """The message with the caller's trace context, if it has none of its own."""
    pairs = list(message.headers or ())  # always pairs here
    if any(pair[0].lower() in (TRACEPARENT, TRACESTATE) for pair in pairs):
        return message
    pairs.append((TRACEPARENT, call.request.header(TRACEPARENT)))
    state = call.request.header(TRACESTATE)
    if state and parse_tracestate(state) is not None:
        pairs.append((TRACESTATE, state))
    return msgspec.structs.replace(message, headers=pairs)
