"""Publishing: one message as the body of a request or as a form, many as a batch, and batches of producers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta

from holdfast.api.drafts import NewMessage as Draft
from holdfast.api.drafts import Stored as StoredMessage
from holdfast.api.drafts import StreamRequest, has_only_a_body, stream_options
from holdfast.broker.producers import KnownBatch, Producers
from holdfast.broker.topic import Topic
from holdfast.broker.tracing import TRACEPARENT, TRACESTATE, parse_tracestate
from holdfast.errors import InvalidRequest, NotInstalled, UnknownTopic
from holdfast.large import LARGE_BYTES
from holdfast.model import Appended, Producer
from holdfast.protocol.media import (
    JSON,
    LINES,
    MSGPACK,
    MULTIPART,
    RAW,
    SMALL_BYTES,
    UNSAID,
    Unframer,
    check_batch,
    check_values,
    decode,
    decoder,
    encoder,
)
from holdfast.protocol.messages import (
    MOST_HEADERS,
    MOST_MESSAGES,
    Acks,
    Batch,
    Codec,
    Durability,
    Header,
    NewMessage,
    Options,
    PartitionNumber,
    Stored,
    StoredBatch,
    Wire,
    durability_asked,
    headers_of,
)
from holdfast.protocol.topics import AppendQuery, BeginProducer, NextSequence, ProducerBegun, SequenceQuery, Written
from holdfast.server.http.heads import KnownHead
from holdfast.server.http.messages import DeferredAnswer, Request, Response
from holdfast.server.routing import Prepared, Routes
from holdfast.server.served import append_to
from holdfast.server.service import Call, Service, not_understood, partition_of
from holdfast.server.tokens import Principal
from holdfast.server.turns import Job
from holdfast.settings import ServerSettings

# Decoding the messages of a call, in any of the accepted formats, up to the limit for one call.
#
# Large bodies are decoded on a thread, in steps: a batch is first split into its messages, and each is then decoded
# separately. So neither a million messages nor one message of a million values holds up other calls.


# curl -d removes line breaks, and sends a file with the content type of a form.
_LINES_HINT: Final = f"If each line is a message, send it with curl -H 'content-type: {LINES}' --data-binary @FILE"
_FEW_LINES_BYTES: Final = 16 * 1024  # each line may be a message, which costs more than in a batch
_LOOK_EVERY: Final = 1_000
_MEDIA: Final = frozenset({JSON, MSGPACK, LINES, *UNSAID})

Drafts: TypeAlias = list[Draft] | list[bytes]
_Pairs: TypeAlias = list[tuple[str, str | bytes]]


class _Cut(Wire, kw_only=True):
    """A batch whose messages are not decoded yet."""

    messages: Annotated[list[msgspec.Raw], Meta(max_length=MOST_MESSAGES)] = msgspec.field(default_factory=list)
    bodies: Annotated[list[bytes], Meta(max_length=MOST_MESSAGES)] = msgspec.field(default_factory=list)


class _Form(NamedTuple):
    """The format of the messages, and their limit."""

    media: str
    most: int
    trace: _Pairs  # headers for messages without a trace context

    def too_many(self) -> InvalidRequest:
        return InvalidRequest(
            f"there are more than {self.most} messages in the call, which is the limit (max_batch_messages); nothing "
            "was stored. Send fewer at a time"
        )


async def drafts(call: Call) -> Drafts:
    """The messages of a request. If they are only bodies, returns just these, which are stored faster."""
    request, settings = call.request, call.service.settings
    media = request.media
    if media not in _MEDIA:
        raise not_understood(media, JSON, MSGPACK, LINES)
    form = _Form(media, settings.max_batch_messages, trace_pairs(call))
    content = await request.read_raw(settings.max_request_bytes)
    if len(content) <= (_FEW_LINES_BYTES if media == LINES else SMALL_BYTES) and not request.packed:
        return _read(Job(), form, [content])
    pieces = partial(request.unpacked, content, settings.max_request_bytes, settings.max_unpack_ratio)
    return await call.service.pool.run(lambda job: _read(job, form, pieces()))


def _read(job: Job, form: _Form, pieces: Iterable[bytes]) -> Drafts:
    try:
        found = _in_lines(job, form, pieces) if form.media == LINES else _in_batch(job, form, b"".join(pieces))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "" if form.media == MSGPACK else f". {_LINES_HINT}"
        raise InvalidRequest(f"the messages cannot be read: {error}. Nothing was stored{hint}") from None
    if not found:
        raise InvalidRequest("there is no message in the request's body: send at least one")
    return found


def _in_lines(job: Job, form: _Form, pieces: Iterable[bytes]) -> Drafts:
    return _all(job, form, (_message(line, JSON) for line in _lines(job, pieces)))


def _lines(job: Job, pieces: Iterable[bytes]) -> Iterator[bytes]:
    unframer = Unframer(LINES)
    for piece in pieces:
        job.check()
        yield from unframer.feed(piece)
    yield from unframer.feed(b"\n")


def _in_batch(job: Job, form: _Form, content: bytes) -> Drafts:
    messages: Iterator[NewMessage]
    if len(content) <= SMALL_BYTES:
        batch: Batch = decode(content, form.media, Batch)
        count, bodies = len(batch.messages), batch.bodies
        if not count and len(bodies) <= form.most and not form.trace:
            return bodies
        messages = iter(batch.messages)
    else:
        check_batch(content, form.media)
        job.check()
        cut: _Cut = decode(content, form.media, _Cut)
        count, bodies = len(cut.messages), cut.bodies
        messages = (_message(bytes(each), form.media) for each in cut.messages)
    if bodies and count:
        raise InvalidRequest(
            "give messages or bodies, not both, because their order would be unclear. Nothing was stored"
        )
    if max(count, len(bodies)) > form.most:
        raise form.too_many()
    if bodies and not form.trace:
        return bodies
    return _all(job, form, messages if count else (NewMessage(body=body) for body in bodies))


def _message(content: bytes, media: str) -> NewMessage:
    check_values(content, media)
    found: NewMessage = decode(content, media, NewMessage)
    return found


def _all(job: Job, form: _Form, messages: Iterator[NewMessage]) -> Drafts:
    found: list[Draft] = []
    for message in messages:
        if len(found) == form.most:
            raise form.too_many()
        found.append(_traced(form.trace, draft_of(message, _body(message))))
        if not len(found) % _LOOK_EVERY:
            job.check()
    return plain(found)


def plain(messages: list[Draft]) -> Drafts:
    """The messages, or just their bodies if they have nothing else."""
    return [message.body for message in messages] if all(map(_is_plain, messages)) else messages


def traced(call: Call, message: Draft) -> Draft:
    """The message with the caller's trace context, if it has none of its own."""
    return message if call.trace is None else _traced(trace_pairs(call), message)


def trace_pairs(call: Call) -> _Pairs:
    """The caller's trace context as headers of a message."""
    if call.trace is None:
        return []
    pairs: _Pairs = [(TRACEPARENT, call.request.header(TRACEPARENT))]
    state = call.request.header(TRACESTATE)
    if state and parse_tracestate(state) is not None:
        pairs.append((TRACESTATE, state))
    return pairs


def _traced(trace: _Pairs, message: Draft) -> Draft:
    pairs: Any = list(message.headers or ())  # always pairs here
    if not trace or any(pair[0].lower() in (TRACEPARENT, TRACESTATE) for pair in pairs):
        return message
    return msgspec.structs.replace(message, headers=pairs + trace)


def draft_of(message: Options, body: bytes | None) -> Draft:
    """A message as it is published."""
    return Draft(
        body=body,
        key=_either(message.key, message.key_data, "key"),
        headers=list(map(_pair, headers_of(message))) or None,
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
        raise InvalidRequest(f"the header {header.name} has neither value nor data: give one of them")
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
            raise InvalidRequest(f"json cannot be used: {error}. Use only values that JSON can hold") from None
    return None if message.tombstone else b""


def _is_plain(message: Draft) -> bool:
    return type(message.body) is bytes and has_only_a_body(message)


routes = Routes("messages")

_MANY: Final = 1_000
_NOTHING: Final = (None,) * 6  # options of a message

_Answer = TypeVar("_Answer")


class Placing(Wire, kw_only=True):
    """The partition and the durability of messages."""

    partition: PartitionNumber | None = None
    durability: Durability | None = None
    codec: Codec | None = None
    create: bool = False
    acks: Acks | None = None

    def __post_init__(self) -> None:
        self.durability = durability_asked(self.acks, self.durability)


if TYPE_CHECKING:

    class EnqueueQuery(Placing, Options):
        """The struct below, as far as a type checker needs to know it."""

        header: list[str]

else:
    # A struct cannot have two bases with fields, and the limits of an option are to be stated once, in Options. What
    # Options has besides these are bytes, which a query cannot carry, and the headers, which it writes differently.
    _LIKE_OPTIONS: Final = ("priority", "delay", "at", "ttl", "dedup_id", "correlation_id")
    EnqueueQuery = msgspec.defstruct(
        "EnqueueQuery",
        [
            ("key", Annotated[str, Meta(max_length=10_000)] | None, None),
            ("header", Annotated[list[str], Meta(max_length=MOST_HEADERS)], msgspec.field(default_factory=list)),
            *(
                (each.name, each.type, each.default)
                for each in msgspec.structs.fields(Options)
                if each.name in _LIKE_OPTIONS
            ),
        ],
        bases=(Placing,),
        namespace={
            "__doc__": "The options of one message, as query parameters; a header is name:value, and can be repeated."
        },
        module=__name__,
        kw_only=True,
    )


def _prepare_enqueue(service: Service, head: KnownHead) -> Prepared | None:
    """Answers calls that store one message with nothing but a body. Not if that takes a thread."""
    query: EnqueueQuery = head.query
    if query.codec is not None or head.takes == MULTIPART or not _is_bare(query):
        return None
    topic, partition, durability, encode = head.topic, query.partition, query.durability, encoder(head.media)
    store, port = service.publishing.publish_now, service.port

    async def synced(content: bytes, number: int) -> bytes | None:
        stored = await port.publish_plain(topic, content, number, durability)
        return None if stored is None else encode(stored_told(stored))

    def answer(_: Principal, content: bytes, __: int | None) -> bytes | DeferredAnswer | None:
        stored = store(topic, content, partition, durability)
        if isinstance(stored, int):
            return DeferredAnswer(synced(content, stored))
        return None if stored is None else encode(stored_told(stored))

    return Prepared(bytes, answer)


def _is_bare(query: EnqueueQuery) -> bool:
    given = query.key, query.delay, query.at, query.ttl, query.dedup_id, query.correlation_id
    return given == _NOTHING and not query.priority and not query.header


@routes.add(
    "POST",
    "/v1/queues/{queue}/enqueue",
    action="publish",
    query=EnqueueQuery,
    answers=Stored,
    status=201,
    takes=(RAW, MULTIPART),
    errors=("message_too_large", "disk_full"),
    prepare=_prepare_enqueue,
)
async def enqueue(call: Call) -> Response:
    """Store one message: the request's body is the message, byte for byte; or a form with `options` and `payload`."""
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
    return call.answer(stored_told(stored))


async def _form(request: Request, settings: ServerSettings) -> tuple[Options, AsyncIterator[bytes]]:
    """The options and payload of a form. Needs python-multipart, which a process may lack that only shares a folder."""
    try:
        from holdfast.server.forms import read_form
    except ImportError:
        raise NotInstalled("forms need python-multipart; run: pip install 'holdfast[server]'") from None
    return await read_form(request, settings.max_request_bytes, settings.max_unpack_ratio)


async def _publish_stream(call: Call, message: Draft, content: AsyncIterator[bytes]) -> StoredMessage:
    """Store a message whose body is still arriving and may be large."""
    query: EnqueueQuery = call.query
    if query.codec is not None:
        raise InvalidRequest("a payload sent as a form is stored as it is: leave codec out")
    options = {name: value for name, value in msgspec.structs.asdict(message).items() if name != "body"}
    length = call.request.length
    hint = length if call.request.media != MULTIPART and not call.request.packed else None
    await call.request.need_room(LARGE_BYTES if hint is None else min(hint, LARGE_BYTES))

    async def store() -> StoredMessage:
        request = StreamRequest(
            stream=content,
            message=stream_options(options),
            size_hint=hint,
            partition=query.partition,
            durability=query.durability,
        )
        return await call.service.port.upload(call.path["queue"], request)

    return await _made(call, call.path["queue"], query, store)


async def _made(call: Call, topic: str, query: Placing, store: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Call `store`. If the queue does not exist and the query asks for it, create the queue first."""
    try:
        return await store()
    except UnknownTopic as error:
        if not query.create:
            error.add_note(f"create it with PUT /v1/queues/{topic}, or add create=true")
            raise
    call.principal.check("admin", topic)
    await call.begin_act()
    await call.service.port.create_topic(topic, None, {}, exist_ok=True)
    await call.service.group(topic)
    return await store()


# What all routes that store a batch of messages have in common.
BATCH_FACTS: Final[dict[str, Any]] = {
    "query": Placing,
    "answers": StoredBatch,
    "status": 201,
    "takes": (JSON, MSGPACK, LINES),
    "content": Batch,
}


@routes.add(
    "POST", "/v1/queues/{queue}/batch", action="publish", **BATCH_FACTS, errors=("message_too_large", "disk_full")
)
async def enqueue_batch(call: Call) -> Response:
    """Store many messages, for each partition all or none: as JSON, MessagePack, or one JSON object per line."""
    return await stored_batch(call, await publish(call, call.path["queue"], await drafts(call), call.query))


async def publish(call: Call, topic: str, messages: Drafts, query: Placing) -> list[StoredMessage]:
    """Store messages in a topic. Returns their places."""

    async def store() -> list[StoredMessage]:
        return await call.service.publishing.publish(
            topic, messages, partition=query.partition, durability=query.durability, codec=query.codec
        )

    return await _made(call, topic, query, store)


async def stored_batch(call: Call, written: list[StoredMessage]) -> Response:
    """The answer for the messages of a batch, in its order."""
    if len(written) <= _MANY:
        return call.answer(StoredBatch(stored=list(map(stored_told, written))))

    def answer() -> Response:
        return call.answer(StoredBatch(stored=[call.encoded(stored_told(each)) for each in written]))

    return await call.service.pool.run(lambda _: answer())


def published(message: NewMessage) -> Draft:
    """A message as it is published, with its body."""
    return draft_of(message, _body(message))


def stored_told(stored: StoredMessage) -> Stored:
    """Where a message is, as the protocol says it."""
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


# Producers, which retry batches that got no answer: each batch has a number and is stored once.


producer_routes = Routes("producers")

_MOST_ID = 2**63 - 1
_MOST_SEQUENCE = 2**32 - 1


@producer_routes.add("POST", "/v1/producers", action="publish", scope="any", body=BeginProducer, status=201)
async def begin_producer(call: Call) -> ProducerBegun:
    """Register a producer whose batches are stored once, however often they are sent."""
    given: BeginProducer = call.body
    if given.resume and given.name is None:
        raise InvalidRequest(
            "resume needs a name: give one, to continue where the last producer with that name stopped"
        )
    if given.name is not None:
        call.principal.check_producer(given.name)
    engine = call.service.engine
    begun = await asyncio.to_thread(lambda: engine.producers().init(given.name, resume=given.resume))
    return ProducerBegun(id=str(begun.id), epoch=begun.epoch, since=begun.since)


class _ProducerBatch(msgspec.Struct, frozen=True, gc=False):
    """A producer's messages for one partition, and who sent them when."""

    service: Service
    caller: Principal
    began_ns: int
    place: tuple[str, int]  # topic and partition
    producer: Producer
    messages: Drafts
    query: AppendQuery  # what it says of the sequence is not looked at

    def check(self) -> None:
        """Raise if the producer may not write, or cannot write such messages. Its tables must be open."""
        for message in self.messages:
            if isinstance(message, bytes):
                break
            if message.delay is not None or message.at is not None or message.dedup_id is not None:
                raise InvalidRequest(
                    "messages with a delay, a time or a dedup_id cannot be part of a producer's sequence: send them to "
                    f"/v1/topics/{self.place[0]}/messages, each with a dedup_id"
                )
        producers, producer = self.service.engine.producers(), self.producer
        _check_name(producers, self.caller, producer.id)
        producers.check(producer.id, producer.epoch)

    def answer(self, encode: Callable[[object], bytes]) -> bytes | DeferredAnswer | None:
        """Store them in one step. None if that takes more than a sync, and nothing was done."""
        service, (name, number), query = self.service, self.place, self.query
        topic = service.engine.enter_open(name)
        if topic is None:
            return None
        try:
            partition = topic.partition(number)
            if partition.sequences is None or service.publishing.takes_a_thread(name, self.messages):
                return None
            if (query.durability or partition.log.settings.durability) == "fsync":
                return DeferredAnswer(self._synced(encode))
            self.check()
            publisher = service.port.publisher(topic)
            written = append_to(partition, publisher, self.messages, self.producer, query.durability, query.codec)
            return encode(self._written(topic, *written))
        finally:
            topic.users -= 1

    async def _synced(self, encode: Callable[[object], bytes]) -> bytes:
        return encode(await self.store())

    async def store(self) -> Written:
        """Store them, and wait until they are as durable as asked."""
        service, engine, (name, number) = self.service, self.service.engine, self.place
        with engine.using(name) as topic:
            partition = topic.partition(number)
            if partition.sequences is None:  # on a thread, because it may read a lot
                await asyncio.to_thread(partition.open_sequences)
                await asyncio.to_thread(engine.producers)
            self.check()
            written = await service.publishing.append(
                topic.name,
                partition,
                service.port.publisher(topic),
                self.messages,
                self.producer,
                self.query.durability,
                self.query.codec,
            )
            return self._written(topic, *written)

    def _written(self, topic: Topic, appended: Appended, known: KnownBatch | None) -> Written:
        if known is None:
            topic.metrics.put_seconds.observe_ns(self.service.world.clock.monotonic_ns() - self.began_ns)
        offsets = range(appended.offset, appended.next_offset) if known is None else known.offsets
        return Written(offsets=list(offsets), durability=appended.durability, duplicate=known is not None)


def _prepare_append(service: Service, head: KnownHead) -> Prepared | None:
    """Answers calls that store a producer's batch. Not if that takes a thread."""
    if head.takes not in _MEDIA - {LINES}:
        return None
    query: AppendQuery = head.query
    place, encode = (head.topic, partition_of(head.variables)), encoder(head.media)
    producer_id, epoch = _number(query.producer), query.epoch
    form, mono_ns = _Form(head.takes, service.settings.max_batch_messages, []), service.world.clock.monotonic_ns
    job = Job()  # which nobody gives up: it is done in one step
    decode_batch = decoder(head.takes, Batch)

    def decode(content: bytes) -> Drafts | None:
        if len(content) > SMALL_BYTES:
            return None
        try:
            batch: Batch = decode_batch(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _read(job, form, [content])  # which says what is wrong
        if len(batch.bodies) == 1 and not batch.messages:  # nearly all calls
            return batch.bodies
        return _read(job, form, [content])

    def answer(caller: Principal, messages: Drafts | None, sequence: int | None) -> bytes | DeferredAnswer | None:
        if messages is None or sequence is None or sequence > _MOST_SEQUENCE:
            return None
        producer = Producer(producer_id, epoch, sequence)
        given = service, caller, mono_ns(), place, producer, messages, query
        return _ProducerBatch(*given).answer(encode)

    return Prepared(decode, answer)


@producer_routes.add(
    "POST",
    "/v1/topics/{topic}/partitions/{partition}/append",
    action="publish",
    prepare=_prepare_append,
    query=AppendQuery,
    answers=Written,
    status=201,
    takes=(JSON, MSGPACK, LINES),
    content=Batch,
    errors=("message_too_large", "out_of_sequence", "fenced", "queue_full", "disk_full"),
)
async def append(call: Call) -> Written:
    """Store a producer's batch in a partition, all of it or nothing. A repeated call gets the same response."""
    query: AppendQuery = call.query
    began_ns = call.service.world.clock.monotonic_ns()
    producer = Producer(_number(query.producer), query.epoch, query.sequence)
    messages = await drafts(call)
    place = call.path["topic"], partition_of(call.path)
    return await _ProducerBatch(call.service, call.principal, began_ns, place, producer, messages, query).store()


def _check_name(producers: Producers, caller: Principal, producer_id: int) -> None:
    """Raise Forbidden if the id is that of a named producer whose name the caller may not use."""
    name = producers.name_of(producer_id)
    if name is not None:
        caller.check_producer(name)


@producer_routes.add("GET", "/v1/topics/{topic}/partitions/{partition}/sequence", action="publish", query=SequenceQuery)
async def next_sequence(call: Call) -> NextSequence:
    """Return the number that a producer's next message for this partition must have, and offsets of earlier ones."""
    return await asyncio.to_thread(_next_sequence, call, _number(call.query.producer))


def _next_sequence(call: Call, producer_id: int) -> NextSequence:
    query: SequenceQuery = call.query
    _check_name(call.service.engine.producers(), call.principal, producer_id)
    with call.service.engine.using(call.path["topic"]) as topic:
        sequences = topic.partition(partition_of(call.path)).open_sequences()
        return NextSequence(
            sequence=sequences.next_sequence(producer_id, query.since),
            offsets=sequences.offsets(producer_id, query.first, query.count),
        )


def _number(text: str) -> int:
    number = int(text)
    if not 0 < number <= _MOST_ID:
        raise InvalidRequest(f"{text} is not a producer's id: get one with POST /v1/producers")
    return number
