"""Transactions on the wire: what one does is sent in a single call, which stores all of it or nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.api.transactions import MOST_OPERATIONS, TransactionInfo
from holdfast.protocol.messages import Name, NewMessage, PartitionNumber, Receipt, ServerValue, Stored, Wire
from holdfast.protocol.topics import Offset

TransactionName = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^(~[0-9a-f]{32}|[A-Za-z0-9_][A-Za-z0-9._-]*)$")
]
_Epoch = Annotated[int, Meta(ge=1, le=2**53)]
_Many = Meta(max_length=MOST_OPERATIONS)


class BeginTransaction(Wire, kw_only=True):
    """The name of the transaction, which fences earlier ones of that name. Without a name it fences nothing."""

    name: Name | None = None


class TransactionBegun(ServerValue, kw_only=True):
    """The name and the epoch to commit with."""

    name: str
    epoch: int


class TransactionMessage(NewMessage, kw_only=True):
    """A message to store in a topic; without a partition, in that of its key or the next in turn."""

    topic: Name
    partition: PartitionNumber | None = None


class TransactionAcks(Wire, kw_only=True):
    """Messages of a group in queue mode to ack, by their receipts."""

    topic: Name
    group: Name = "default"
    receipts: Annotated[list[Receipt], Meta(min_length=1, max_length=MOST_OPERATIONS)]


class TransactionOffsets(Wire, kw_only=True):
    """Offsets to commit for a member of a group in stream mode."""

    group: Name
    member: Annotated[str, Meta(min_length=1, max_length=300)]
    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=MOST_OPERATIONS)]


class TransactionDocument(Wire, kw_only=True):
    """A document to write or to `remove`, provided that it has this version (0: does not exist), if one is given."""

    name: Name
    value: Any | UnsetType = UNSET
    remove: bool = False
    version: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class CommitTransaction(Wire, kw_only=True):
    """All that a transaction does. Without the name and the epoch that it was begun with, it is not safe to repeat."""

    name: TransactionName | None = None
    epoch: _Epoch = 1
    messages: Annotated[list[TransactionMessage], _Many] = msgspec.field(default_factory=list)
    acks: Annotated[list[TransactionAcks], _Many] = msgspec.field(default_factory=list)
    offsets: Annotated[list[TransactionOffsets], _Many] = msgspec.field(default_factory=list)
    documents: Annotated[list[TransactionDocument], _Many] = msgspec.field(default_factory=list)


class TransactionCommitted(ServerValue, kw_only=True):
    """The name and the epoch of the transaction, and where its messages are, in their order."""

    name: str
    epoch: int
    stored: list[Stored] = msgspec.field(default_factory=list)


class TransactionList(ServerValue, kw_only=True):
    """The transactions that you may use, by name."""

    transactions: list[TransactionInfo]


class TransactionDeleted(ServerValue, kw_only=True):
    """Whether there was such a transaction."""

    deleted: bool
