# Generated from aio/transactions.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""Transactions, for threads: what a block of code publishes, acks, commits and writes takes effect as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from holdfast.api import port_of
from holdfast.api.drafts import Bodies, Seconds, Stored, duration_ms
from holdfast.api.sync.consumer import Consumer
from holdfast.api.sync.message import Message, settle, taken_of
from holdfast.api.transactions import (
    LONGEST_S,
    MOST_OPERATIONS,
    AckedReceipts,
    ChangedDocument,
    MemberOffsets,
    PublishedMessage,
    TransactionInfo,
    TransactionRequest,
    changed_document,
    published_message,
    removed_document,
)
from holdfast.broker.folder.layout import check_name
from holdfast.errors import Closed, InvalidRequest, LeaseLost, Unavailable

if TYPE_CHECKING:
    from holdfast.api.sync.ports import TransactionsPort
    from holdfast.membership import TopicPartition

list_ = list  # inside the class the name means its method


class TransactionDocuments:
    """The documents that a transaction changes, as `transaction.documents`."""

    def __init__(self, change: Callable[[ChangedDocument], None]) -> None:
        self._change = change

    def update(self, name: str, value: Any, *, version: int | None = None) -> None:
        """Write a document when the transaction commits.

        Args:
            name: The name of the document.
            value: Any value that JSON can represent, up to 1 MiB.
            version: The version that it must have; 0 if it must not exist. Without one, any will do.

        Raises:
            InvalidRequest: An argument cannot be used, or the transaction changes this document already.
            MessageTooLarge: The value is larger than 1 MiB.
        """
        self._change(changed_document(name, value, version))

    def remove(self, name: str, *, version: int | None = None) -> None:
        """Delete a document when the transaction commits.

        Args:
            name: The name of the document.
            version: The version that it must have. Without one, any will do.

        Raises:
            InvalidRequest: An argument cannot be used, or the transaction changes this document already.
        """
        self._change(removed_document(name, version))


class Transaction:
    """Messages, acks, offsets and documents that take effect together when the block ends, or not at all.

    Nothing is stored and nothing is visible to anybody before that. If the block raises, nothing has happened: messages
    that it received are returned to their queues as usual.

        with broker.transaction(name="billing") as transaction:
            message = orders.get()
            transaction.publish("invoices", invoice_of(message.body))
            transaction.ack(message)
    """

    def __init__(self, port: TransactionsPort, name: str | None, body_type: Any, timeout: Seconds) -> None:
        self._port = port
        self._given = None if name is None else check_name(name, "transaction")
        self._bodies = Bodies(body_type)
        self._most_ms = duration_ms(timeout, "timeout", minimum_ms=1, maximum_ms=LONGEST_S * 1000)
        self._until_ns = 0
        self._open = False
        self._messages: list[PublishedMessage] = []
        self._acked: dict[int, Message[Any]] = {}
        self._consumers: dict[int, tuple[Consumer[Any], dict[TopicPartition, int]]] = {}
        self._changed: dict[str, ChangedDocument] = {}
        self.name = ""
        self.epoch = 0
        self.stored: list[Stored] = []
        self.documents = TransactionDocuments(self._change)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or self._given or 'without a name'} ({self._size()} operations)>"

    def publish(self, topic: str, body: Any, *, partition: int | None = None, **options: Any) -> None:
        """Publish a message when the transaction commits. After that, `stored` says where it is.

        Args:
            topic: The topic.
            body: The body, in the type that the broker was opened with: bytes by default.
            partition: The partition; by default that of the key, or the next one in turn.
            **options: The options of a NewMessage: key, headers, priority, delay, at, ttl, dedup_id, correlation_id.

        Raises:
            InvalidRequest: An argument cannot be used.
        """
        self._add()
        self._messages.append(published_message(self._bodies, topic, body, partition, options))

    def publish_many(self, topic: str, bodies: Iterable[Any]) -> None:
        """Publish several messages when the transaction commits.

        Args:
            topic: The topic.
            bodies: Their bodies.

        Raises:
            InvalidRequest: A body cannot be used.
        """
        for body in bodies:
            self.publish(topic, body)

    def ack(self, *messages: Message[Any]) -> None:
        """Ack messages when the transaction commits. Until then you hold their leases.

        Args:
            *messages: Messages in flight, of any queue or group of the same folder or server.

        Raises:
            InvalidRequest: One of them is settled already, or comes from elsewhere.
        """
        for message in messages:
            self._add()
            if not isinstance(message, Message):
                raise InvalidRequest(f"{message!r:.80} cannot be acked: pass the messages that `get` returned")
            if message.settled or id(message) in self._acked:
                raise InvalidRequest(f"message {message.id} is settled already: ack each message once")
            if port_of(message).place != self._port.place:
                raise InvalidRequest(
                    f"message {message.id} comes from {port_of(message).place}, and this transaction is for "
                    f"{self._port.place}: a transaction covers one folder or server"
                )
            self._acked[id(message)] = message

    def commit(self, consumer: Consumer[Any]) -> None:
        """Commit the position of a consumer when the transaction commits: everything it has returned so far.

        Args:
            consumer: A consumer with auto_commit=False, of the same folder or server.

        Raises:
            InvalidRequest: It commits by itself, or it has been given to this transaction already.
        """
        self._add()
        if not isinstance(consumer, Consumer):
            raise InvalidRequest(
                f"commit takes a consumer, not {type(consumer).__name__}: the transaction itself commits when its "
                "block ends"
            )
        if consumer.settings.auto_commit:
            raise InvalidRequest(
                f"the consumer of {consumer.group} commits by itself, outside of the transaction: open it with "
                "auto_commit=False"
            )
        self._consumers[id(consumer)] = consumer, dict(unkept(consumer))

    def abort(self) -> None:
        """Let the block end without effect, and without an error."""
        self._open = False

    def __enter__(self) -> Transaction:
        if self._open or self.name:
            raise InvalidRequest("a transaction can be used once: open another with broker.transaction()")
        self.name, self.epoch = self._port.begin(self._given)
        self._until_ns = self._port.mono_ns() + self._most_ms * 1_000_000
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_open, self._open = self._open, False
        if error is None and is_open and self._size():
            self._commit()

    def _commit(self) -> None:
        if self._port.mono_ns() > self._until_ns:
            raise Unavailable(
                f"the transaction took longer than its timeout of {self._most_ms / 1000:g} s, so nothing of it was "
                "done. Do less in one transaction, or pass a longer timeout"
            )
        request = TransactionRequest(
            self.name, self.epoch, self._messages, self._receipts(), self._offsets(), [*self._changed.values()]
        )
        try:
            self.stored = self._port.commit(request)
        except LeaseLost:
            settle([message for message in self._acked.values() if message.lost])
            raise
        settle(list(self._acked.values()))
        for consumer, offsets in self._consumers.values():
            keep(consumer, offsets)

    def _receipts(self) -> list[AckedReceipts]:
        found: dict[tuple[str, str], list[str]] = {}
        for message in self._acked.values():
            port = port_of(message)
            found.setdefault((port.topic, port.group), []).append(port.receipt(taken_of(message)))
        return [AckedReceipts(topic, group, receipts) for (topic, group), receipts in found.items()]

    def _offsets(self) -> list[MemberOffsets]:
        return [
            MemberOffsets(consumer.group, consumer.member_id or "", offsets)
            for consumer, offsets in self._consumers.values()
            if offsets
        ]

    def _change(self, document: ChangedDocument) -> None:
        self._add()
        if document.name in self._changed:
            raise InvalidRequest(f"the transaction changes document {document.name} already: write each document once")
        self._changed[document.name] = document

    def _add(self) -> None:
        """Check that there is room for one more operation."""
        if not self._open:
            raise Closed("the transaction is not open: use it inside its block, `with broker.transaction() as ...`")
        if self._size() >= MOST_OPERATIONS:
            raise InvalidRequest(
                f"a transaction can have {MOST_OPERATIONS} operations: split the work into several transactions"
            )

    def _size(self) -> int:
        return len(self._messages) + len(self._acked) + len(self._consumers) + len(self._changed)


# What a consumer has returned and not committed, and how it learns that this was committed elsewhere.
_partitions: Callable[[Any], Any] = attrgetter("_port.partitions")


def unkept(consumer: Consumer[Any]) -> dict[TopicPartition, int]:
    """Return the offsets that a commit of this consumer would commit."""
    given = {place: (each, max(each.given, each.start)) for place, each in _partitions(consumer).items()}
    return {place: offset for place, (each, offset) in given.items() if offset != each.kept}


def keep(consumer: Consumer[Any], offsets: dict[TopicPartition, int]) -> None:
    """Note that these offsets are committed."""
    for place, offset in offsets.items():
        if place in _partitions(consumer):
            _partitions(consumer)[place].kept = offset


class Transactions:
    """The transactions that a data folder or a server knows by name, as `broker.transactions`."""

    def __init__(self, port: TransactionsPort) -> None:
        self._port = port

    def list(self) -> list_[TransactionInfo]:
        """List the transactions that have a name.

        Returns:
            Their names, how often they were begun, and whether they are finished.
        """
        return self._port.all()

    def delete(self, name: str) -> bool:
        """Forget a name. A program that still uses it cannot commit, and begins anew.

        Args:
            name: The name.

        Returns:
            False if it is unknown.
        """
        return self._port.forget(check_name(name, "transaction"))
