"""Transactions of an engine: from what callers ask for to what the broker decides. All of it waits for the disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from holdfast.api.drafts import Stored, to_datetime
from holdfast.api.transactions import ChangedDocument, TransactionInfo, TransactionRequest
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import UNNAMED
from holdfast.broker.transactions import Commit, StoredMessage, TransactionState, dedup_id
from holdfast.delivery.events import Receipt
from holdfast.errors import InvalidRequest, LeaseLost
from holdfast.locking import Remove, ReplaceDocument

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery
    from holdfast.broker.topic import Topic
    from holdfast.local.broker import LocalBroker


def begin(engine: BrokerEngine, name: str | None) -> tuple[str, int]:
    """Begin a transaction; returns its name and its epoch. Nothing is stored for one without a name."""
    if name is None:
        engine.check_open()
        return UNNAMED + engine.world.ids.random_bytes(16).hex(), 1
    return name, engine.transactions().begin(name)


def commit(port: LocalBroker, request: TransactionRequest) -> list[Stored]:
    """Commit a transaction. Raises if it must be refused; then nothing has happened."""
    engine = port.engine
    with ExitStack() as held:
        topics = {name: held.enter_context(engine.using(name)) for name in _topics(request)}
        transactions = engine.transactions()
        known = transactions.committed_places(request.name, request.epoch)
        if known is None:
            known = transactions.commit(
                Commit(
                    request.name,
                    request.epoch,
                    _messages(port, topics, request),
                    [_command(each) for each in request.documents],
                    _claims(topics, request),
                    [(engine.streams.group(each.group), each.member, each.offsets) for each in request.offsets],
                )
            )
    return [Stored(each.topic, each.offset, each.delayed_id, each.duplicate, "fsync", each.partition) for each in known]


def all_transactions(engine: BrokerEngine) -> list[TransactionInfo]:
    """Return all transactions that have a name."""
    return infos_of(engine.transactions().all())


def infos_of(states: Mapping[str, TransactionState]) -> list[TransactionInfo]:
    """Return stored transactions as users see them, without those that have no name."""
    return [
        TransactionInfo(
            name=name,
            epoch=state.epoch,
            changed_at=to_datetime(state.at_ms * 1_000_000),
            committed=state.decided == state.epoch,
            unfinished=state.pending is not None,
        )
        for name, state in sorted(states.items())
        if not name.startswith(UNNAMED)  # whoever knows such a name could ask what it did
    ]


def _topics(request: TransactionRequest) -> list[str]:
    return sorted({each.topic for each in request.messages} | {each.topic for each in request.acks})


def _messages(port: LocalBroker, topics: dict[str, Topic], request: TransactionRequest) -> list[StoredMessage]:
    """Return the messages as they will be stored, each with a partition and a dedup id."""
    found = []
    for number, each in enumerate(request.messages):
        topic, new = topics[each.topic], each.message
        publisher = port.publisher(topic)
        # By its key, or in turn: a dedup id of ours must not decide it.
        partition = publisher.route(publisher.draft(new, new.body), each.partition)
        if new.dedup_id is None:
            new = msgspec.structs.replace(new, dedup_id=dedup_id(request.name, request.epoch, number))
        draft = publisher.draft(new, new.body)
        assert draft.dedup_id is not None
        found.append(
            StoredMessage(
                topic.name,
                topic.id,
                partition,
                bytes(draft.value),
                draft.key,
                draft.headers,
                draft.priority,
                draft.expires_at_ms,
                draft.due_at_ms,
                draft.dedup_id,
                draft.flags,
            )
        )
    for name, topic in topics.items():
        here = [message for message in found if message.topic == name]
        routed: dict[int, list[int]] = {}
        for i, message in enumerate(here):
            routed.setdefault(message.partition, []).append(i)
        port.publisher(topic).check_sizes([message.draft for message in here], routed)
    return found


def _claims(topics: dict[str, Topic], request: TransactionRequest) -> list[tuple[Topic, str, Delivery, list[Receipt]]]:
    """Return which deliveries the receipts are of. Raises LeaseLost for one that was not issued here."""
    found: dict[tuple[str, str, int], tuple[Topic, str, Delivery, list[Receipt]]] = {}
    for each in request.acks:
        topic = topics[each.topic]
        if not topic.has_group(each.group):
            raise LeaseLost(f"{each.topic} has no group {each.group}, so nothing of it can be acked. Nothing was done")
        group = topic.group(each.group)
        for text in each.receipts:
            delivery, receipt = group.claim(text)
            place = (each.topic, each.group, delivery.number)
            own = found.setdefault(place, (topic, each.group, delivery, []))[3]
            if receipt in own:
                raise InvalidRequest(f"{text} is given twice: ack each message once. Nothing was done")
            own.append(receipt)
    return list(found.values())


def _command(document: ChangedDocument) -> ReplaceDocument | Remove:
    if document.content is None:
        return Remove(document.name, document.version)
    return ReplaceDocument(document.name, document.content, document.version)
