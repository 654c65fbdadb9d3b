"""The messages of one call, read out of its body, whatever form they come in: never more than one call may bring.

What is large is read on a thread, in steps: a batch is cut into its messages before any of them is made, and each is
made by itself. So neither a million messages nor one of a million values holds up anybody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta

from holdfast.api.drafts import NewMessage as Draft
from holdfast.api.drafts import has_only_a_body
from holdfast.codec.tracecontext import TRACEPARENT, TRACESTATE, parse_tracestate
from holdfast.errors import InvalidRequest
from holdfast.protocol.media import (
    JSON,
    LINES,
    MSGPACK,
    SMALL_BYTES,
    UNSAID,
    Unframer,
    check_batch,
    check_values,
    decode,
)
from holdfast.protocol.messages import MOST_MESSAGES, Batch, Header, NewMessage, Options, Wire, headers_of
from holdfast.server.calls import Call, not_understood
from holdfast.server.turns import Job

# curl -d takes the line ends out; and of a file it says that it is a form.
_LINES_HINT: Final = f"Where each line is a message, send it with curl -H 'content-type: {LINES}' --data-binary @FILE"
_FEW_LINES_BYTES: Final = 16 * 1024  # each line may be a message, and costs more than in a batch
_LOOK_EVERY: Final = 1_000

Drafts: TypeAlias = list[Draft] | list[bytes]
_Pairs: TypeAlias = list[tuple[str, str | bytes]]


class _Cut(Wire, kw_only=True):
    """A batch whose messages are not made yet."""

    messages: Annotated[list[msgspec.Raw], Meta(max_length=MOST_MESSAGES)] = msgspec.field(default_factory=list)
    bodies: Annotated[list[bytes], Meta(max_length=MOST_MESSAGES)] = msgspec.field(default_factory=list)


class _Form(NamedTuple):
    """In what form messages come, and how many may."""

    media: str
    most: int
    trace: _Pairs  # what each message is given that has no trace context of its own

    def too_many(self) -> InvalidRequest:
        return InvalidRequest(
            f"there are more than {self.most} messages in the call, which is the limit (max_batch_messages); nothing "
            "was stored. Send fewer at a time"
        )


async def drafts(call: Call) -> Drafts:
    """The messages of a request; bodies alone where there is nothing else: these go a shorter way."""
    request, settings = call.request, call.service.settings
    media = request.media
    if media not in (JSON, MSGPACK, LINES, *UNSAID):
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
        raise InvalidRequest("there is no message in the request's body")
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
        count, bodies, messages = len(batch.messages), batch.bodies, iter(batch.messages)
    else:
        check_batch(content, form.media)
        job.check()
        cut: _Cut = decode(content, form.media, _Cut)
        count, bodies = len(cut.messages), cut.bodies
        messages = (_message(bytes(each), form.media) for each in cut.messages)
    if bodies and count:
        raise InvalidRequest("give messages or bodies, not both: nobody could tell their order. Nothing was stored")
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
    """The messages, or their bodies alone where there is nothing else."""
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
