"""Transactions: what one call publishes, acks, commits and writes takes effect together, or not at all.

A caller needs the rights for each thing that its transaction does, as for the single calls. A name is used like that of
a producer, which it is for its messages: who begins it fences the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TypeAlias

from msgspec import UNSET

from holdfast.api.locks import document_content
from holdfast.api.transactions import (
    MOST_OPERATIONS,
    AckedReceipts,
    ChangedDocument,
    MemberOffsets,
    PublishedMessage,
    TransactionRequest,
)
from holdfast.broker.folder.layout import UNNAMED, check_name, check_topic_name
from holdfast.errors import InvalidRequest
from holdfast.membership import TopicPartition
from holdfast.protocol.transactions import (
    BeginTransaction,
    CommitTransaction,
    TransactionBegun,
    TransactionCommitted,
    TransactionDeleted,
    TransactionDocument,
    TransactionList,
    TransactionMessage,
    TransactionOffsets,
)
from holdfast.server.api.enqueue import published, stored_told
from holdfast.server.members import ServedMember
from holdfast.server.routing import Routes
from holdfast.server.service import Call

StreamOffsets: TypeAlias = Mapping[TopicPartition, int]

routes = Routes("transactions")


async def _may_commit(call: Call) -> None:
    """Raise Forbidden unless the caller may do each thing that the transaction does."""
    given: CommitTransaction = call.body
    principal = call.principal
    if given.name is not None and not given.name.startswith(UNNAMED):
        principal.check_producer(given.name)
    for topic in {each.topic for each in given.messages}:
        principal.check("publish", topic)
    for acks in given.acks:
        principal.check("consume", acks.topic)
        principal.check_queue_group(acks.group)
    for offsets in given.offsets:
        principal.check_group(offsets.group)
    for document in given.documents:
        principal.check("lock", document.name)


@routes.add("POST", "/v1/transactions", action="publish", scope="any", body=BeginTransaction, status=201)
async def begin_transaction(call: Call) -> TransactionBegun:
    """Begin a transaction; one with a name fences earlier ones of that name, which can then no longer commit."""
    given: BeginTransaction = call.body
    if given.name is not None:
        call.principal.check_producer(given.name)
    name, epoch = await call.service.transactions.begin(given.name)
    return TransactionBegun(name=name, epoch=epoch)


@routes.add(
    "POST",
    "/v1/transactions/commit",
    action="publish",
    scope="any",
    allowed=_may_commit,
    body=CommitTransaction,
    errors=("unknown_topic", "lease_lost", "conflict", "fenced", "message_too_large", "disk_full"),
)
async def commit_transaction(call: Call) -> TransactionCommitted:
    """Do all of it, or nothing. A call that is repeated with the same name and epoch is answered as the first one."""
    given: CommitTransaction = call.body
    size = len(given.messages) + sum(len(each.receipts) for each in given.acks) + len(given.documents)
    if size > MOST_OPERATIONS:
        raise InvalidRequest(f"the transaction has {size} operations, the limit is {MOST_OPERATIONS}: use several")
    service, name, epoch = call.service, given.name, given.epoch
    if name is None:
        name, epoch = await service.transactions.begin(None)
    async with AsyncExitStack() as turns:
        members = _members(call, given)
        for member, _ in members.values():
            await turns.enter_async_context(member.turn())
        request = TransactionRequest(
            name,
            epoch,
            [
                PublishedMessage(check_topic_name(each.topic), published(each), each.partition)
                for each in given.messages
            ],
            [AckedReceipts(each.topic, each.group, each.receipts) for each in given.acks],
            [MemberOffsets(group, member, offsets) for (group, member), (_, offsets) in members.items()],
            [_document(each) for each in given.documents],
        )
        stored = await service.transactions.commit(request)
        for member, offsets in members.values():
            member.keep(offsets)
    return TransactionCommitted(name=name, epoch=epoch, stored=[stored_told(each) for each in stored])


@routes.add("GET", "/v1/transactions", action="publish", scope="any")
async def list_transactions(call: Call) -> TransactionList:
    """List the transactions whose names you may use."""
    found = await call.service.transactions.all()
    return TransactionList(transactions=[each for each in found if call.principal.producers.match(each.name)])


@routes.add("DELETE", "/v1/transactions/{transaction}", action="publish", scope="any", act=True)
async def delete_transaction(call: Call) -> TransactionDeleted:
    """Forget the name of a transaction: a program that still uses it cannot commit, and begins anew."""
    name = check_name(call.path["transaction"], "transaction")
    call.principal.check_producer(name)
    return TransactionDeleted(deleted=await call.service.transactions.forget(name))


def _members(call: Call, given: CommitTransaction) -> dict[tuple[str, str], tuple[ServedMember, StreamOffsets]]:
    """Return the members whose offsets are committed, in an order in which all callers wait for their turns."""
    found: dict[tuple[str, str], tuple[ServedMember, StreamOffsets]] = {}
    for each in sorted(given.offsets, key=lambda each: (each.group, each.member)):
        if (each.group, each.member) in found:
            raise InvalidRequest(f"the member {each.member} is given twice: give all its offsets at once")
        member = call.service.members.find(each.group, each.member)
        for topic in member.topics:
            call.principal.check("consume", topic)
        found[each.group, each.member] = member, _positions(each)
    return found


def request_of(given: CommitTransaction, name: str, epoch: int) -> TransactionRequest:
    """Return what a transaction does, as a port does it."""
    return TransactionRequest(
        name,
        epoch,
        list(map(_message, given.messages)),
        [AckedReceipts(each.topic, each.group, each.receipts) for each in given.acks],
        [MemberOffsets(each.group, each.member, _positions(each)) for each in given.offsets],
        list(map(_document, given.documents)),
    )


def _positions(given: TransactionOffsets) -> StreamOffsets:
    return {(at.topic, at.partition): at.offset for at in given.offsets}


def _message(given: TransactionMessage) -> PublishedMessage:
    return PublishedMessage(check_topic_name(given.topic), published(given), given.partition)


def _document(given: TransactionDocument) -> ChangedDocument:
    if given.remove == (given.value is not UNSET):
        raise InvalidRequest(f"document {given.name}: give either a value or remove")
    content = None if given.remove else document_content(given.name, given.value)
    return ChangedDocument(check_name(given.name, "document"), content, given.version)
