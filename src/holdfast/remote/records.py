"""What a server says of messages, as the records that a broker keeps: one set of accessors serves both."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Contents
from holdfast.api.listed import DeadLetter, Listed, Waiting
from holdfast.api.times import instant_ns
from holdfast.broker.folder.layout import parse_message_id
from holdfast.broker.messages import (
    BYTES_HEADERS,
    CORRELATION_ID,
    MOVED,
    ORIGINAL,
    TEXT_HEADERS,
    TEXT_KEY,
    TOMBSTONE,
    DeadNote,
    Original,
    encode_original,
)
from holdfast.client.client import Client
from holdfast.client.http import path_of
from holdfast.client.payloads import Payload
from holdfast.model import Record
from holdfast.protocol import dead, messages, queues


class ToldPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a message is kept, as its server says: which is also what the message is called."""

    topic: str
    number: int
    id: str

    def id_of(self, record: Record) -> str:
        """The message's id."""
        return self.id


def place_of(told: messages.Said) -> ToldPlace:
    """Where the message is kept."""
    return ToldPlace(told.topic, told.partition, told.id)


def record_told(told: messages.Said, payload: Payload | None) -> Record:
    """The message as a broker keeps it; `payload` is its body where that did not come along."""
    offset: Any = told.offset
    value: Any = told.body if payload is None else payload
    marked = told.correlation_id not in ("", told.id)
    keyed = told.key is not None or told.key_data is not None
    if not (marked or keyed or told.headers or told.original_id or told.tombstone):  # as most are
        times = told.priority, told.expires_at_ms, told.due_at_ms
        return Record(offset, told.timestamp_ns, value, None, (), *times)
    headers, flags = _headers(told)
    if told.key is not None:
        flags |= TEXT_KEY
    if told.tombstone:
        flags |= TOMBSTONE
    if marked:
        headers.append((CORRELATION_ID, told.correlation_id.encode()))
    if told.original_id:
        flags |= MOVED
        headers.append((ORIGINAL, encode_original(Original(told.original_id, 0, 0))))
    key = told.key_data if told.key is None else told.key.encode()
    return Record(
        offset,
        told.timestamp_ns,
        value,
        key,
        tuple(headers),
        told.priority,
        told.expires_at_ms,
        told.due_at_ms,
        flags,
    )


def _headers(told: messages.Said) -> tuple[list[tuple[str, bytes]], int]:
    """The headers as they are stored, and the flag that says that some are text."""
    stored: list[tuple[str, bytes]] = []
    as_bytes: list[int] = []
    for i, each in enumerate(told.headers):
        if each.data is not None:
            as_bytes.append(i)
        stored.append((each.name, (each.value or "").encode() if each.data is None else each.data))
    if len(as_bytes) == len(stored):
        return stored, 0
    if as_bytes:
        stored.append((BYTES_HEADERS, b",".join(b"%d" % i for i in as_bytes)))
    return stored, TEXT_HEADERS


def contents_told(client: Client, bodies: Bodies, told: messages.Said) -> Contents[Any]:
    """A message that was read or peeked at."""
    payload = None
    if told.omitted:
        path = path_of("topics", told.topic, "partitions", told.partition, "payload", offset=told.offset)
        payload = Payload(client.beside, path, told.size)
    return Contents(place_of(told), bodies, record_told(told, payload))


def path_by_id(queue: str, group: str, message_id: str) -> str:
    """Where the body of a message is, which may be a dead letter, or still be delayed."""
    return path_of("queues", queue, "messages", message_id, "payload", group=group)


def listed_told(client: Client, bodies: Bodies, queue: str, group: str, told: queues.Listed) -> Listed[Any]:
    """A message that was looked at, and where it stands."""
    payload = Payload(client.beside, path_by_id(queue, group, told.id), told.size) if told.omitted else None
    record, home = record_told(told, payload), place_of(told)
    if isinstance(told, dead.Letter):
        return DeadLetter(home, bodies, record, _note(told, group))
    if told.offset is None:
        number = parse_message_id(told.id, told.topic).delayed_id
        return Waiting(home, bodies, msgspec.structs.replace(record, offset=number), told.due_ms)
    return Listed(
        home,
        bodies,
        record,
        told.phase,
        due_ms=told.due_ms,
        attempts=told.attempts,
        holder=told.holder,
        error=told.error,
        until_ms=told.lease_until_ms,
    )


def _note(told: dead.Letter, group: str) -> DeadNote:
    first = Original(told.original_id, told.original_offset, instant_ns(told.original_timestamp, "original_timestamp"))
    return DeadNote(
        id=told.original_id,
        topic=told.topic,
        partition=told.partition,
        group=group,
        offset=told.original_offset,
        timestamp_ns=first.timestamp_ns,
        reason=told.reason,
        error=told.error,
        attempts=told.attempts,
        first_ms=_ms(told.first_delivery),
        last_ms=_ms(told.last_delivery),
        dead_at_ms=_ms(told.dead_at),
        holder=told.holder,
        priority=told.priority,
        failures=tuple(told.failures),
        state=None if told.state is None else msgspec.json.encode(told.state),
        original=first,
        expires_at_ms=told.expires_at_ms,
        due_at_ms=told.due_at_ms,
    )


def _ms(time: datetime | None) -> int:
    return 0 if time is None else instant_ns(time, "time") // 1_000_000
