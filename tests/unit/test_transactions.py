"""Transactions of a folder: what they do together, and what is refused as a whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.broker.transactions import FolderTransactions
from holdfast.errors import Closed, Conflict, Fenced, InvalidRequest, LeaseLost, MessageTooLarge, Unavailable
from tests.unit.brokers import Place


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    found.broker.create_topic("orders")
    found.broker.create_topic("invoices", partitions=3)
    yield found
    found.close()


def bodies(broker: Any, topic: str = "invoices") -> list[bytes]:
    with broker._port.engine.using(topic) as found:
        return sorted(bytes(each.value) for part in found.partitions for each in part.log.records(part.log.start))


def test_all_of_it_happens_at_the_end_of_the_block(place: Place):
    broker, queue = place.broker, place.broker.queue("orders")
    queue.put_many([b"0", b"1"])
    with broker.transaction() as transaction:
        message = queue.get(timeout=0)
        transaction.publish("invoices", b"a", key="k", headers={"h": "1"})
        transaction.publish_many("invoices", [b"b", b"c"])
        transaction.ack(message)
        transaction.documents.update("total", {"n": 1}, version=0)
        assert bodies(broker) == []
        assert broker.documents.get("total") is None
        assert not message.settled
    assert bodies(broker) == [b"a", b"b", b"c"]
    assert [each.topic for each in transaction.stored] == ["invoices"] * 3
    assert message.settled
    assert broker.documents.get("total").value == {"n": 1}
    assert (queue.stats().ready, queue.stats().leased) == (1, 0)
    taken = broker.queue("invoices").get_many(3)
    assert {each.body: (each.key, dict(each.headers or {}).get("h")) for each in taken}[b"a"] == ("k", "1")
    with broker.transaction() as transaction:
        transaction.documents.remove("total", version=1)
    assert broker.documents.get("total") is None


def test_a_block_that_raises_or_aborts_does_nothing(place: Place):
    broker, queue = place.broker, place.broker.queue("orders")
    queue.put(b"0")
    with pytest.raises(ZeroDivisionError), broker.transaction("t") as transaction, queue.get(timeout=0) as message:
        transaction.publish("invoices", b"a")
        transaction.ack(message)
        raise ZeroDivisionError
    place.after(seconds=60)
    assert queue.stats().ready == 1  # its own block gave it back
    with broker.transaction("t") as transaction:
        transaction.publish("invoices", b"a")
        transaction.abort()
    assert (bodies(broker), transaction.stored) == ([], [])
    with broker.transaction("t"):
        pass  # nothing to do
    assert [(each.name, each.epoch, each.committed) for each in broker.transactions.list()] == [("t", 3, False)]


def refused(place: Place, error: type[Exception], what: str, transaction: Any) -> None:
    """The commit is refused, and nothing of it has happened."""
    transaction.publish("invoices", b"never")
    transaction.documents.update("never", 1)
    with pytest.raises(error, match=what):
        transaction.__exit__(None, None, None)
    assert bodies(place.broker) == []
    assert place.broker.documents.get("never") is None


def begun(place: Place, name: str | None = None, **options: Any) -> Any:
    return place.broker.transaction(name, **options).__enter__()


def test_a_lost_lease_refuses_all_of_it_and_gives_back_the_rest(place: Place):
    queue = place.broker.queue("orders", lease_ms=1_000)
    queue.put_many([b"0", b"1"])
    transaction = begun(place)
    lost, kept = queue.get(timeout=0), queue.get(timeout=0)
    kept.extend(3600)
    place.after(seconds=2)
    transaction.ack(lost, kept)
    refused(place, LeaseLost, "no longer yours", transaction)
    assert (lost.settled, kept.settled) == (True, False)
    kept.ack()


def test_a_document_that_changed_refuses_all_of_it(place: Place):
    place.broker.documents.update("total", 1)
    queue = place.broker.queue("orders")
    queue.put(b"0")
    transaction, message = begun(place), queue.get(timeout=0)
    transaction.ack(message)
    transaction.documents.update("total", 2, version=0)
    refused(place, Conflict, "total has version 1", transaction)
    message.ack()  # it is still held


def test_a_refused_transaction_shortens_no_lease(place: Place):
    queue = place.broker.queue("orders", lease_ms=1_000)
    queue.put_many([b"0", b"1"])
    long, short = queue.get(lease=3600), queue.get(timeout=0)
    place.broker.documents.update("total", 1)
    transaction = begun(place)
    transaction.ack(long, short)
    transaction.documents.update("total", 2, version=0)
    refused(place, Conflict, "total has version 1", transaction)
    place.after(seconds=30)
    assert not short.lost  # extended to a minute while it was decided
    place.after(seconds=1800)
    assert not long.lost
    assert short.lost


def test_several_documents_change_together_with_versions_of_their_own(place: Place):
    with place.broker.transaction() as transaction:
        for name in ("a", "b", "c"):
            transaction.documents.update(name, name)
    versions = [place.broker.documents.get(name).version for name in ("a", "b", "c")]
    assert versions == [versions[0] + i for i in range(3)]
    assert place.broker.documents.list() == ["a", "b", "c"]  # the transaction's own is not among them


def test_a_later_transaction_of_a_name_fences_the_earlier(place: Place):
    first, second = begun(place, "billing"), begun(place, "billing")
    refused(place, Fenced, "epoch 2 of the same name", first)
    second.publish("invoices", b"second")
    second.__exit__(None, None, None)
    assert bodies(place.broker) == [b"second"]
    third = begun(place, "billing")
    assert place.broker.transactions.delete("billing")
    third.publish("invoices", b"third")
    with pytest.raises(Fenced, match="not known here"):
        third.__exit__(None, None, None)
    assert not place.broker.transactions.delete("billing")


def test_two_transactions_cannot_ack_the_same_message(place: Place, monkeypatch: pytest.MonkeyPatch):
    """The second comes while the first is decided: its lease is still there."""
    queue = place.broker.queue("orders")
    queue.put(b"0")
    receipt = queue.get(timeout=0).receipt
    first, second = begun(place), begun(place)
    first.ack(queue.resume(receipt))
    second.ack(queue.resume(receipt))
    finish, failed = FolderTransactions._finish, []

    def meanwhile(self: Any, name: str, state: Any, *, again: bool = False) -> Any:
        monkeypatch.setattr(FolderTransactions, "_finish", finish)
        thread = threading.Thread(target=commit, args=(second,))
        thread.start()
        thread.join()
        return finish(self, name, state, again=again)

    def commit(transaction: Any) -> None:
        transaction.publish("invoices", b"second")
        with pytest.raises(LeaseLost) as error:
            transaction.__exit__(None, None, None)
        failed.append(error)

    monkeypatch.setattr(FolderTransactions, "_finish", meanwhile)
    first.publish("invoices", b"first")
    first.__exit__(None, None, None)
    assert "another transaction" in str(failed[0].value)
    assert bodies(place.broker) == [b"first"]


def test_a_commit_that_is_sent_again_is_answered_as_the_first_one(place: Place):
    queue = place.broker.queue("orders")
    queue.put(b"0")
    with place.broker.transaction("t") as transaction:
        transaction.ack(queue.get(timeout=0))
        transaction.publish("invoices", b"a", delay=60)
    requests: list[Any] = []
    port = transaction._port
    commit = port.commit

    def keep(request: Any) -> Any:
        requests.append(request)
        return commit(request)

    port.commit = keep
    again = type(transaction)(port, "t", None, 60).__enter__()
    again.publish("invoices", b"b")
    again.__exit__(None, None, None)
    assert commit(requests[0]) == again.stored
    place.kill()
    assert place.broker.transaction("t")._port.commit(requests[0]) == again.stored
    assert bodies(place.broker) == [b"b"]


def test_the_offsets_of_a_consumer_are_committed_with_the_rest(place: Place):
    broker = place.broker
    broker.publish_many("orders", [b"0", b"1", b"2"])
    with broker.consumer("orders", group="readers", auto_commit=False) as consumer:
        assert len(consumer.poll(timeout=1, max_records=2)) == 2
        with broker.transaction() as transaction:
            transaction.commit(consumer)
            transaction.publish("invoices", b"a")
        assert consumer.committed("orders", 0) == 2
        assert consumer.poll(timeout=1)[0].body == b"2"
        consumer.commit()
        assert consumer.committed("orders", 0) == 3
        with broker.consumer("orders", group="readers") as other:
            transaction = begun(place)
            with pytest.raises(InvalidRequest, match="auto_commit=False"):
                transaction.commit(other)


def test_a_consumer_that_was_fenced_commits_nothing(place: Place):
    broker = place.broker
    broker.publish_many("orders", [b"0", b"1"])
    consumer = broker.consumer("orders", group="readers", auto_commit=False, instance_id="one")
    assert consumer.poll(timeout=1)
    transaction = begun(place)
    transaction.commit(consumer)
    broker.consumer("orders", group="readers", auto_commit=False, instance_id="one").poll(timeout=0)
    refused(place, Fenced, "one", transaction)


def test_a_block_that_takes_too_long_commits_nothing(place: Place):
    transaction = begun(place, timeout=5)
    place.clock.advance(seconds=6)
    refused(place, Unavailable, "timeout of 5 s", transaction)


def test_priorities_delays_dedup_ids_and_times_to_live_are_those_of_a_put(place: Place):
    broker, queue = place.broker, place.broker.queue("invoices")
    broker.publish("invoices", b"known", dedup_id="d")
    with broker.transaction() as transaction:
        transaction.publish("invoices", b"low", partition=0)
        transaction.publish("invoices", b"high", priority=9, partition=0)
        transaction.publish("invoices", b"later", delay=60)
        transaction.publish("invoices", b"again", dedup_id="d")
        transaction.publish("invoices", b"gone", ttl=1, partition=1)
    assert [each.duplicate for each in transaction.stored] == [False, False, False, True, False]
    assert transaction.stored[2].delayed_id is not None
    place.after(seconds=5)
    taken = [message.body for message in queue.get_many(10)]
    assert sorted(taken) == [b"high", b"known", b"low"]
    assert taken.index(b"high") < taken.index(b"low")
    place.after(seconds=60)
    assert [message.body for message in queue.get_many(10)] == [b"later"]


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda t: t.publish("no such", b"x"), "'no such' cannot be used"),
        (lambda t: t.publish("orders.dlq", b"x"), "dead letters"),
        (lambda t: t.publish("orders", "text"), "bytes"),
        (lambda t: t.publish("orders", b"x", partition="1"), "partition='1'"),
        (lambda t: t.publish("orders", b"x", colour=1), "colour"),
        (lambda t: t.ack(b"x"), "pass the messages"),
        (lambda t: t.commit(t), "commit takes a consumer"),
        (lambda t: t.documents.update("a b", 1), "'a b' cannot be used"),
        (lambda t: t.documents.update("a", object()), "cannot be written"),
        (lambda t: (t.documents.update("a", 1), t.documents.remove("a")), "changes document a already"),
    ],
)
def test_wrong_arguments_are_refused_at_once(place: Place, act: Any, what: str):
    transaction = begun(place)
    with pytest.raises(InvalidRequest, match=what):
        act(transaction)


def test_what_only_the_broker_can_judge_refuses_all_of_it(place: Place):
    transaction = begun(place)
    transaction.publish("nowhere", b"x")
    refused(place, holdfast.UnknownTopic, "nowhere", transaction)
    transaction = begun(place)
    transaction.publish("orders", b"x", partition=7)
    refused(place, holdfast.UnknownTopic, "7", transaction)
    transaction = begun(place)
    transaction.publish("orders", b"x", priority=10)
    refused(place, InvalidRequest, "priority=10", transaction)
    transaction = begun(place)
    transaction.publish_many("orders", [bytes(3 * 1024 * 1024)] * 3)
    refused(place, MessageTooLarge, "the limit is", transaction)


def test_a_transaction_is_used_once_and_inside_its_block(place: Place):
    transaction = place.broker.transaction()
    with pytest.raises(Closed, match="inside its block"):
        transaction.publish("orders", b"x")
    with transaction:
        pass
    with pytest.raises(Closed, match="inside its block"):
        transaction.publish("orders", b"x")
    with pytest.raises(InvalidRequest, match="used once"):
        transaction.__enter__()
    for options in ({"name": "a b"}, {"timeout": 0}, {"timeout": 3601}):
        with pytest.raises(InvalidRequest):
            place.broker.transaction(**options)


def test_a_message_of_another_folder_is_refused(place: Place, tmp_path):
    with holdfast.open(tmp_path / "other") as other:
        other.put(b"x")
        message = other.get(timeout=0)
        transaction = begun(place)
        with pytest.raises(InvalidRequest, match="one folder or server"):
            transaction.ack(message)
        message.ack()
        with pytest.raises(InvalidRequest, match="settled already"):
            transaction.ack(message)


def test_transactions_without_a_name_are_forgotten_after_a_while(place: Place):
    for _ in range(3):
        with place.broker.transaction() as transaction:
            transaction.publish("orders", b"x")
    transactions = place.engine.transactions()
    assert len(transactions.all()) == 3
    assert place.broker.transactions.list() == []
    place.after(seconds=700)
    assert transactions.all() == {}
    assert place.kill().transactions.list() == []


def test_a_topic_that_was_deleted_since_is_passed_over(place: Place):
    """Decided, then killed: the next owner finds one of the topics gone, and another created again."""
    transactions = place.engine.transactions()
    finish, transactions._finish = transactions._finish, lambda *_, **__: (_ for _ in ()).throw(Closed("killed"))
    transaction = begun(place)
    transaction.publish("orders", b"1")
    transaction.publish("invoices", b"2")
    with pytest.raises(Closed):
        transaction.__exit__(None, None, None)
    place.broker.delete_topic("orders")
    place.broker.create_topic("orders")
    assert finish is not None
    place.kill()
    place.engine.tick()
    assert bodies(place.broker) == [b"2"]
    assert bodies(place.broker, "orders") == []


def test_tasks_use_the_same_words(tmp_path):
    asyncio.run(in_tasks(tmp_path))


async def in_tasks(tmp_path):
    async with holdfast.aio.open_broker(tmp_path / "data") as broker:
        await broker.create_topic("invoices")
        queue = await broker.queue("orders")
        await queue.put(b"0")
        async with broker.transaction("t") as transaction:
            message = await queue.get(timeout=1)
            transaction.publish("invoices", b"a")
            transaction.ack(message)
            transaction.documents.update("total", 1)
        assert message.settled
        assert transaction.stored[0].id == "invoices-0-0"
        assert [each.committed for each in await broker.transactions.list()] == [True]
        first = broker.transaction("t")
        async with broker.consumer("invoices", group="g", auto_commit=False) as consumer:
            assert await consumer.poll(timeout=1)
            async with first:
                first.commit(consumer)
            assert await consumer.committed("invoices", 0) == 1
        with pytest.raises(Fenced):
            async with broker.transaction("t") as older:
                older.publish("invoices", b"older")
                async with broker.transaction("t"):
                    pass
        assert await broker.transactions.delete("t")
