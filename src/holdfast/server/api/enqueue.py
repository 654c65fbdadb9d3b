"""Messages in: one as the body of a request, one with its options as a form, or many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from holdfast.api.drafts import NewMessage as Draft
from holdfast.api.drafts import Stored as Written
from holdfast.api.streams import stream_options
from holdfast.errors import InvalidRequest, NotInstalled, UnknownTopic
from holdfast.large import LARGE_BYTES
from holdfast.protocol.media import JSON, LINES, MSGPACK, MULTIPART, RAW
from holdfast.protocol.messages import (
    MOST_HEADERS,
    Batch,
    Codec,
    Durability,
    Instant,
    Options,
    PartitionNumber,
    Priority,
    Seconds,
    Stored,
    StoredBatch,
    Wire,
)
from holdfast.server.batches import Drafts, draft_of, drafts, plain, traced
from holdfast.server.calls import Call
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Routes
from holdfast.settings import ServerSettings

routes = Routes("messages")

_MANY: Final = 1_000

_Answer = TypeVar("_Answer")


class Placing(Wire, kw_only=True):
    """Where messages go, and how safe they are to be."""

    partition: PartitionNumber | None = None
    durability: Durability | None = None
    codec: Codec | None = None
    create: bool = False


class EnqueueQuery(Placing, kw_only=True):
    """The options of one message, behind the '?'; a header is name:value, and may be there more than once."""

    key: Annotated[str, Meta(max_length=10_000)] | None = None
    header: Annotated[list[str], Meta(max_length=MOST_HEADERS)] = msgspec.field(default_factory=list)
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
    request, settings = call.request, call.service.settings
    most_bytes = settings.max_request_bytes
    content: AsyncIterator[bytes] | None = None
    if request.media == MULTIPART:
        options, content = await _form(request, settings)
        message = draft_of(options, b"")
    elif request.complete or query.codec is not None:
        message = _plain(query, await request.read(most_bytes, settings.max_unpack_ratio))
    else:
        message, content = _plain(query, b""), request.chunks(most_bytes, settings.max_unpack_ratio)
    message = traced(call, message)
    if content is None:
        (stored,) = await publish(call, call.path["queue"], plain([message]), query)
    else:
        stored = await _publish_stream(call, message, content)
    if message.correlation_id is not None:
        call.correlation_id = message.correlation_id
    return call.answer(_stored(stored))


async def _form(request: Request, settings: ServerSettings) -> tuple[Options, AsyncIterator[bytes]]:
    """Needs python-multipart, which the owner of a shared folder may be without."""
    try:
        from holdfast.server.forms import read_form
    except ModuleNotFoundError:
        raise NotInstalled("forms need python-multipart; run: pip install 'holdfast[server]'") from None
    return await read_form(request, settings.max_request_bytes, settings.max_unpack_ratio)


async def _publish_stream(call: Call, message: Draft, content: AsyncIterator[bytes]) -> Written:
    """Store a message whose body is still coming, and may be large."""
    query: EnqueueQuery = call.query
    if query.codec is not None:
        raise InvalidRequest("what comes as a form is stored as it is: leave codec out")
    options = {name: value for name, value in msgspec.structs.asdict(message).items() if name != "body"}
    length = call.request.length
    hint = length if call.request.media != MULTIPART and not call.request.packed else None
    await call.request.need_room(LARGE_BYTES if hint is None else min(hint, LARGE_BYTES))

    async def store() -> Written:
        return await call.service.port.upload(
            call.path["queue"], content, stream_options(options), hint, query.partition, query.durability
        )

    return await _made(call, call.path["queue"], query, store)


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
    await call.service.port.create_topic(topic, None, {}, exist_ok=True)
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
    return await stored_batch(call, await publish(call, call.path["queue"], await drafts(call), call.query))


async def publish(call: Call, topic: str, messages: Drafts, query: Placing) -> list[Written]:
    """Store messages in a topic, and tell where they are."""

    async def store() -> list[Written]:
        return await call.service.publishing.publish(
            topic, messages, partition=query.partition, durability=query.durability, codec=query.codec
        )

    return await _made(call, topic, query, store)


async def stored_batch(call: Call, written: list[Written]) -> Response:
    """The answer for the messages of a batch, in its order."""
    if len(written) <= _MANY:
        return call.answer(StoredBatch(stored=list(map(_stored, written))))

    def answer() -> Response:
        return call.answer(StoredBatch(stored=[call.encoded(_stored(each)) for each in written]))

    return await call.service.pool.run(lambda _: answer())


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
