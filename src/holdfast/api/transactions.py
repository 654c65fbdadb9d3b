"""What a transaction does, as its caller collects it, and transactions as users see them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.api.drafts import Bodies, NewMessage
from holdfast.api.locks import check_version, document_content
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.errors import InvalidRequest
from holdfast.membership import TopicPartition

MOST_OPERATIONS: Final = 10_000
LONGEST_S: Final = 3600


class PublishedMessage(msgspec.Struct, frozen=True):
    """A message that a transaction publishes; its body is bytes, or None to delete a key."""

    topic: str
    message: NewMessage
    partition: int | None = None


class AckedReceipts(msgspec.Struct, frozen=True):
    """Messages of a group that a transaction acks."""

    topic: str
    group: str
    receipts: list[str]


class MemberOffsets(msgspec.Struct, frozen=True):
    """Offsets that a transaction commits for a member of a stream group."""

    group: str
    member: str
    offsets: Mapping[TopicPartition, int]


class ChangedDocument(msgspec.Struct, frozen=True):
    """A document that a transaction writes as JSON, or removes if there is no content."""

    name: str
    content: bytes | None
    version: int | None = None


class TransactionRequest(msgspec.Struct, frozen=True):
    """All that a transaction is to do."""

    name: str
    epoch: int
    messages: list[PublishedMessage] = []
    acks: list[AckedReceipts] = []
    offsets: list[MemberOffsets] = []
    documents: list[ChangedDocument] = []


class TransactionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that the folder knows: its name, how often it was begun, and the last commit.

    `unfinished` means that it is committed, but something, such as a full disk, keeps its messages from being stored.
    """

    name: str
    epoch: int
    changed_at: datetime
    committed: bool
    unfinished: bool = False


def published_message(
    bodies: Bodies, topic: object, body: Any, partition: object, options: Mapping[str, Any]
) -> PublishedMessage:
    """Return a message to publish, with its body encoded now. Raises InvalidRequest if something is wrong with it."""
    name = check_topic_name(topic)
    if partition is not None and (type(partition) is not int or partition < 0):
        raise InvalidRequest(f"partition={partition!r:.80} cannot be used: give a number from 0 on")
    encoded = None if body is None else bodies.encode(body)
    try:
        message = NewMessage(encoded, **options)
    except TypeError as error:
        raise InvalidRequest(f"{error}: `publish` of a transaction takes the options of a NewMessage") from None
    return PublishedMessage(name, message, partition)


def changed_document(name: object, value: Any, version: object) -> ChangedDocument:
    """Return a document to write, with its value encoded now."""
    name = check_name(name, "document")
    return ChangedDocument(name, document_content(name, value), check_version(version))


def removed_document(name: object, version: object) -> ChangedDocument:
    """Return a document to remove."""
    return ChangedDocument(check_name(name, "document"), None, check_version(version))
