"""One suite of stories for every face: a folder, a server, a folder that another owns; for threads and for tasks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast import Conflict, Empty, InvalidRequest, LeaseLost, NewMessage, NotAQueue, NotFound, UnknownTopic, aio
from holdfast.api.aio import message as aio_locks
from holdfast.api.sync import message as locks
from holdfast.cli.look import messages
from tests.integration.http_gear import serving

PLACES = ["folder", "server", "shared"]


async def done(answer: Any) -> Any:
    """The answer of a call, for threads or for tasks."""
    return await answer if inspect.isawaitable(answer) else answer


async def answer(sent: Any) -> Any:
    """What became of a message that a producer was given, for threads or for tasks."""
    return await sent if inspect.isawaitable(sent) else sent.result(60)


async def all_of(found: Any) -> list[Any]:
    """What is listed, for threads or for tasks."""
    found = await done(found)
    return [each async for each in found] if hasattr(found, "__aiter__") else list(found)


async def eventually(look: Callable[[], Any]) -> Any:
    """What a look finds, once it finds something; another thread brings it about."""
    async with asyncio.timeout(60):
        while not (found := await look()):
            await asyncio.sleep(0.01)
    return found


async def as_awaited(answer: Any) -> Any:
    """The answer of a call for tasks, which must be awaited."""
    assert inspect.isawaitable(answer)
    return await answer


@asynccontextmanager
async def entered(opened: Any) -> AsyncIterator[Any]:
    """A block of something that threads enter with `with`, and tasks with `async with`."""
    if hasattr(opened, "__aenter__"):
        async with opened as found:
            yield found
    else:
        with opened as found:
            yield found


async def next_of(consumer: Any) -> Any:
    """The next message of a loop over a consumer, which goes on with the next one behind it."""
    return await anext(aiter(consumer)) if hasattr(consumer, "__aiter__") else next(iter(consumer))


class Place:
    """Where queues are, and by which faces to come there."""

    def __init__(self, where: str, *, tasks: bool) -> None:
        self.where = where
        self.tasks = tasks
        self.faces: Any = aio if tasks else holdfast

    @asynccontextmanager
    async def queue(self, **options: Any) -> AsyncIterator[Any]:
        queue = await done(self.faces.open(self.where, topic="jobs", **options))
        try:
            yield queue
        finally:
            await done(queue.close())

    @asynccontextmanager
    async def broker(self, **options: Any) -> AsyncIterator[Any]:
        broker = await done(self.faces.open_broker(self.where, **options))
        try:
            yield broker
        finally:
            await done(broker.close())


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[str]:
    folder = tmp_path / "data"
    if request.param == "folder":
        yield str(folder)
    elif request.param == "server":
        with serving(folder) as server:
            yield server.url
    else:
        with holdfast.open_broker(folder):
            yield str(folder)


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def place(request: pytest.FixtureRequest, where: str) -> Place:
    return Place(where, tasks=request.param)


def story(function: Callable[[Place], Any]) -> Callable[[Place], None]:
    """A test of a story that is told once for all faces."""

    def test(place: Place) -> None:
        asyncio.run(function(place))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@story
async def test_all_that_a_queue_gives_is_of_one_class_wherever_it_is(place):
    prefix = "Async" if place.tasks else ""
    async with place.queue(max_attempts=1) as queue:
        assert isinstance(queue, aio.AsyncQueue if place.tasks else holdfast.Queue)
        assert repr(queue).startswith(f"<{prefix}Queue jobs ")
        await done(queue.put_many([b"a", b"b", NewMessage(b"later", delay=600)]))
        message = await done(queue.get(timeout=5))
        assert type(message) is (aio.AsyncMessage if place.tasks else holdfast.Message)
        assert repr(message) == f"<{prefix}Message {message.id}: b'a'>"
        await done(message.reject("no"))
        for found, kind in ((await done(queue.peek()), "Contents"), (await done(queue.dead.list()), "DeadLetter")):
            assert [type(each).__name__ for each in found] == [kind]
        for phase, kind in (("ready", "Listed"), ("delayed", "Waiting"), ("dead", "DeadLetter")):
            assert [type(each).__name__ for each in await all_of(queue.messages(phase))] == [kind]
    async with place.broker() as broker:
        group = await done(broker.group("jobs", "others"))
        assert type(group) is (aio.AsyncGroup if place.tasks else holdfast.Group)
        assert repr(group).startswith(f"<{prefix}Group of others jobs ")


@story
async def test_a_broker_is_of_one_class_wherever_it_is_and_refuses_with_the_same_words(place):
    kind = aio.AsyncBroker if place.tasks else holdfast.Broker
    async with place.broker() as broker:
        assert type(broker) is kind
        assert repr(broker).startswith(f"<{kind.__name__} ")
        await done(broker.create_topic("jobs", partitions=2))
        refusals = {
            "count=0 cannot be used": lambda: broker.add_partitions("jobs", 0),
            "alter_topic changes settings": lambda: broker.alter_topic("jobs"),
            "exist_ok=1 cannot be used": lambda: broker.create_topic("jobs", exist_ok=1),
            "limit=0 cannot be used": lambda: broker.read("jobs", limit=0),
            "offset='x' is not an offset": lambda: broker.read("jobs", offset="x"),
            "on_damage='hide' cannot be used": lambda: broker.read("jobs", on_damage="hide"),
            "start='middle' cannot be used": lambda: broker.group("jobs", "g", start="middle"),
            "create=1 cannot be used": lambda: broker.queue("jobs", create=1),
            "to='middle' cannot be used": lambda: broker.reset_offsets("g", "jobs", to="middle"),
            "dry_run=1 cannot be used": lambda: broker.reset_offsets("g", "jobs", to="latest", dry_run=1),
            "limit=-1 cannot be used": lambda: broker.search_traces(limit=-1),
            "last=1 cannot be used": lambda: broker.search_traces(last=1),
            "a message's id must be a str, not int": lambda: broker.trace(5),
            "colour cannot be used here": lambda: broker.publish_stream("jobs", [b"x"], colour="red"),
        }
        for words, call in refusals.items():
            with pytest.raises(holdfast.HoldfastError) as caught:
                await done(call())
            assert words in str(caught.value)
        assert (await done(broker.describe_topic("jobs"))).messages == 0
        assert await done(broker.groups()) == []


@story
async def test_what_is_opened_is_awaited_or_entered(place):
    opened = [
        lambda broker: broker.queue("jobs"),
        lambda broker: broker.group("jobs", "g"),
        lambda broker: broker.consumer("jobs", group="stream"),
        lambda broker: broker.producer(),
    ]
    async with entered(place.faces.open_broker(place.where)) as broker:
        await done(broker.create_topic("jobs"))
        for call in opened:
            async with entered(call(broker)) as found:
                assert not found.closed
            assert found.closed
            one = await (as_awaited if place.tasks else done)(call(broker))
            assert type(one) is type(found)
            await done(one.close())
    assert broker.closed


@story
async def test_what_cannot_be_asked_for_is_refused_with_the_same_words_everywhere(place):
    async with place.queue() as queue:
        refusals = {
            "count=0 cannot be used": lambda: queue.get_many(0),
            "timeout='soon' cannot be used": lambda: queue.get(timeout="soon"),
            "holder=5 cannot be used": lambda: queue.get(holder=5),
            "renew=1 cannot be used": lambda: queue.get(renew=1),
            "ack_many takes messages, not int": lambda: queue.ack_many([5]),
            "nack_many takes a list of messages, not str": lambda: queue.nack_many("x"),
            "a receipt must be a str, not int": lambda: queue.resume(5),
            "a message's id must be a str, not int": lambda: queue.cancel(5),
            "seek takes one of": queue.seek,
            "seek cannot go to 'middle'": lambda: queue.seek("middle"),
            "offset='x' is not an offset": lambda: queue.seek(offset="x"),
            "phase='nope' is not known": lambda: queue.messages("nope"),
            "limit=-1 cannot be used": lambda: queue.messages(limit=-1),
            "a dead letter's id must be a str, not int": lambda: queue.dead.show(5),
            "rate=0 cannot be used": lambda: queue.dead.redrive(rate=0),
            "give ids or where, not both": lambda: queue.dead.purge(["x"], where="true"),
            "size_hint=-1 cannot be used": lambda: queue.put_stream([b"x"], size_hint=-1),
            "colour cannot be used here": lambda: queue.put_stream([b"x"], colour="red"),
            "put_many takes a list": lambda: queue.put_many(b"x"),
        }
        for words, call in refusals.items():
            with pytest.raises(InvalidRequest) as caught:
                await done(call())
            assert words in str(caught.value)
        assert (await done(queue.stats())).end == 0


@story
async def test_what_is_put_comes_out_as_it_went_in(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"\x00\xff", key="k", headers={"a": "text", "b": b"\xfe"}, priority=3))
        assert (stored.offset, stored.partition, stored.duplicate) == (0, 0, False)
        message = await done(queue.get(timeout=5))
        assert (message.id, message.body, message.raw) == (stored.id, b"\x00\xff", b"\x00\xff")
        assert (message.key, message.priority, message.attempt) == ("k", 3, 1)
        assert dict(message.headers) == {"a": "text", "b": b"\xfe"}
        assert (message.topic, message.partition, message.offset) == ("jobs", 0, 0)
        assert message.correlation_id == stored.id
        assert message.timestamp.tzinfo is UTC
        assert not message.lost
        await done(message.ack())
        assert message.settled
        with pytest.raises(Empty):
            await done(queue.get_nowait())


@story
async def test_bodies_have_the_type_that_the_queue_was_opened_with(place):
    async with place.queue(body_type=dict) as queue:
        await done(queue.put({"n": 1}))
        message = await done(queue.get(timeout=5))
        assert message.body == {"n": 1}
        await done(message.ack())
        with pytest.raises(holdfast.BadBody):
            await done(queue.put(b"no dict"))


@story
async def test_many_at_once_keep_their_order(place):
    async with place.queue() as queue:
        stored = await done(queue.put_many([b"a", NewMessage(body=b"b", key=b"raw"), b"c"]))
        assert [each.offset for each in stored] == [0, 1, 2]
        messages = await done(queue.get_many(10, timeout=5))
        assert [message.body for message in messages] == [b"a", b"b", b"c"]
        assert messages[1].key == b"raw"
        await done(queue.ack_many(messages))
        assert (await done(queue.stats())).ready == 0
        assert await done(queue.committed()) == {0: 3}


@story
async def test_a_nack_brings_it_back_and_counts(place):
    async with place.queue(backoff_ms=1) as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=5))
        await done(message.nack(delay=0, error=ValueError("not today")))
        again = await done(queue.get(timeout=5))
        assert again.attempt == 2
        assert again.fence > message.fence
        await done(again.defer())
        assert (await done(queue.get(timeout=5))).attempt == 2


@story
async def test_a_rejected_one_is_a_dead_letter_that_can_be_redriven(place):
    async with place.queue() as queue:
        await done(queue.put(b"x", headers={"tenant": "a"}))
        await done((await done(queue.get(timeout=5))).reject("never"))
        (letter,) = await done(queue.dead.list())
        assert (letter.body, letter.reason, letter.error) == (b"x", "REJECTED", "never")
        assert letter.headers["tenant"] == "a"
        assert (await done(queue.dead.show(letter.id))).original_offset == 0
        assert [group.count for group in await done(queue.dead.groups())] == [1]
        assert (await done(queue.dead.redrive(dry_run=True))).matched == 1
        assert (await done(queue.dead.redrive(letter.id))).done == 1
        assert (await done(queue.get(timeout=5))).body == b"x"


@story
async def test_dead_letters_can_be_put_into_another_queue(place):
    async with place.broker() as broker:
        queue = await done(broker.queue("jobs"))
        other = await done(broker.queue("repairs"))
        sent = {"key": "k", "headers": {"tenant": "a", "raw": b"\xff"}, "priority": 4, "correlation_id": "c-1"}
        for body, options in ((b"x", sent), (b"y", {}), (b"z", {})):
            await done(queue.put(body, **options))
            await done((await done(queue.get(timeout=5))).reject("never"))
        letters = await done(queue.dead.list())
        with pytest.raises(UnknownTopic):
            await done(queue.dead.redrive(to="nowhere"))
        with pytest.raises(UnknownTopic):
            await done(queue.dead.redrive(to="nowhere", dry_run=True))
        with pytest.raises(InvalidRequest):
            await done(queue.dead.redrive(to="jobs.dlq"))
        assert len(await done(queue.dead.list())) == 3
        assert (await done(queue.dead.redrive([letters[0].id, letters[1].id], to="repairs"))).done == 2
        assert [letter.body for letter in await done(queue.dead.list())] == [b"z"]
        first, second = sorted(await done(other.get_many(5, timeout=5)), key=lambda each: each.body)
        assert (first.body, first.key, first.priority, first.attempt) == (b"x", "k", 4, 1)
        assert (dict(first.headers), first.correlation_id) == ({"tenant": "a", "raw": b"\xff"}, "c-1")
        assert (second.body, second.key, second.correlation_id) == (b"y", None, letters[1].original_id)
        await done(other.ack_many([first, second]))
        last = (await done(queue.history(letters[0].original_id)))[-1]
        assert (last.step, last.related) == ("redriven", "")
        assert (await done(queue.dead.redrive(to="jobs"))).done == 1  # its own: as without a name
        assert (await done(queue.get(timeout=5))).body == b"z"


@story
async def test_dead_letters_are_a_topic_to_read(place):
    async with place.broker() as broker:
        queue = await done(broker.queue("jobs", partitions=2))
        assert await done(broker.read("jobs.dlq")) == []
        await done(queue.put(b"x", key="k", headers={"tenant": "a"}))
        message = await done(queue.get(timeout=5))
        await done(message.reject("never"))
        (letter,) = await done(queue.dead.list())
        (found,) = await done(broker.read("jobs.dlq", partition=message.partition, offset=0))
        assert (found.id, found.topic, found.body, found.key) == (letter.id, "jobs.dlq", b"x", "k")
        assert dict(found.headers) == {"tenant": "a"}
        info = await done(broker.describe_topic("jobs.dlq"))
        assert (info.name, len(info.partitions), info.messages, info.groups) == ("jobs.dlq", 2, 1, [])
        assert await done(broker.topics()) == ["jobs"]
        for refused in (
            lambda: broker.publish("jobs.dlq", b"x"),
            lambda: broker.delete_topic("jobs.dlq"),
            lambda: broker.group("jobs.dlq", "g"),
            lambda: broker.queue("jobs.dlq"),
            lambda: broker.read("jobs.dlq.dlq"),
        ):
            with pytest.raises(InvalidRequest, match="are for dead letters"):
                await done(refused())
        with pytest.raises(UnknownTopic):
            await done(broker.read("nothing.dlq"))
        with pytest.raises(UnknownTopic):
            await done(broker.read("jobs.dlq", partition=5))


@story
async def test_a_purge_drops_all_that_nobody_has_in_hand(place):
    async with place.broker() as broker:
        queue = await done(broker.queue("jobs", backoff_ms=60_000))
        await done(queue.put_many([b"held", b"failed", b"a", b"b"]))
        await done(queue.put(b"later", delay=3600))
        held, failed = await done(queue.get_many(2, timeout=5))
        await done(failed.nack())
        assert await done(queue.purge()) == 4
        stats = await done(queue.stats())
        assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 1)
        await done(held.ack())
        assert await done(queue.purge()) == 0
        await done(queue.put(b"new"))
        assert (await done(queue.get(timeout=5))).body == b"new"


@story
async def test_a_purge_leaves_to_other_groups_what_is_theirs(place):
    async with place.broker() as broker:
        queue = await done(broker.queue("jobs"))
        other = await done(broker.group("jobs", "other"))
        await done(queue.put_many([b"a", b"b"]))
        await done(queue.put(b"later", delay=3600))
        assert await done(queue.purge()) == 2
        assert await done(queue.empty())
        stats = await done(other.stats())
        assert (stats.ready, stats.delayed) == (2, 1)


@story
async def test_a_message_that_is_dropped_counts_as_an_attempt_and_dies_of_the_last_one(place):
    async with place.queue(lease_ms=600_000, max_attempts=3, dropped_delay_ms=0) as queue:
        await done(queue.put(b"poison"))
        for attempt in (1, 2, 3):
            message = await done(queue.get(timeout=30))
            assert message.attempt == attempt
            del message
            gc.collect()
        await eventually(lambda: all_of(queue.messages("dead")))
        (letter,) = await all_of(queue.dead.list())
        assert [failure.why for failure in letter.failures][:2] == ["dropped unhandled"] * 2
        assert (letter.attempts, letter.error) == (3, "dropped unhandled")


@story
async def test_a_message_that_is_dropped_waits_for_the_backoff(place):
    async with place.queue(lease_ms=600_000, backoff_ms=600_000) as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=30))
        del message
        gc.collect()
        (listed,) = await eventually(lambda: all_of(queue.messages("delayed")))
        assert listed.attempts == 1
        assert (await done(queue.stats())).ready == 0


@story
async def test_the_history_of_a_message_is_told_from_its_publication_to_its_end(place):
    async with place.queue(max_attempts=2, backoff_ms=0) as queue:
        first = await done(queue.put(b"x", ttl=3_600))
        for error in ("no", "never"):
            message = await done(queue.get(timeout=30, holder="worker-1"))
            await done(message.nack(error=error))
        (letter,) = await eventually(lambda: all_of(queue.dead.list()))
        assert letter.expires_at == message.expires_at
        assert [step.step for step in await done(queue.history(letter.id))][-1] == "buried"
        await done(queue.dead.redrive())
        message = await done(queue.get(timeout=30, holder="worker-2"))
        assert message.original_id == letter.original_id == first.id
        await done(message.ack())
        for name in (first.id, message.id, letter.id):  # a redriven letter leads to the message that it was
            steps = await done(queue.history(name))
            assert [(step.step, step.holder, step.error) for step in steps] == [
                ("published", "", ""),
                ("leased", "worker-1", ""),
                ("nacked", "worker-1", "no"),
                ("leased", "worker-1", ""),
                ("buried", "worker-1", "never"),
                ("redriven", "", ""),
                ("published", "", ""),
                ("leased", "worker-2", ""),
                ("acked", "worker-2", ""),
            ]
        with pytest.raises(NotFound, match="there is no message jobs-0-77"):
            await done(queue.history("jobs-0-77"))


@story
async def test_a_lease_that_is_over_is_lost(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=5, lease=0.05))
        other = await done(queue.get(timeout=5))
        with pytest.raises(LeaseLost):
            await done(message.ack())
        assert message.settled
        await done(other.ack())


@story
async def test_a_lease_is_renewed_while_the_message_is_in_hand(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=5, lease=4, renew=True))
        first = last = await lease_end(queue)
        while last <= first:  # it is renewed when a third of it is over; only what hangs waits for long
            with pytest.raises(Empty):
                await done(queue.get(timeout=0.2))
            last = await lease_end(queue)
        assert not message.lost
        await done(message.ack())


async def lease_end(queue: Any) -> datetime:
    """When the lease of the only message ends, as far as this end knows."""
    found = queue.messages("leased")
    (message,) = [each async for each in found] if hasattr(found, "__aiter__") else list(found)
    ends: datetime = messages.lease_end(queue, message)
    return ends


@story
async def test_it_is_used_as_the_queue_of_the_standard_library_is(place):
    async with place.queue() as queue:
        assert await done(queue.empty())
        await done(queue.put_nowait(b"a", key="k"))
        await done(queue.put_many([NewMessage(b"b"), NewMessage(b"c", priority=1)]))
        assert (await done(queue.qsize()), await done(queue.empty())) == (3, False)
        messages = [
            await done(queue.get(True, 5)),
            await done(queue.get(False)),
            await done(queue.get(block=True, timeout=5)),
        ]
        assert sorted(message.body for message in messages) == [b"a", b"b", b"c"]
        assert await done(queue.qsize()) == 0
        for empty in (lambda: queue.get(False), lambda: queue.get(True, 0.01), queue.get_nowait):
            with pytest.raises(Empty):
                await done(empty())
        with pytest.raises(InvalidRequest, match="block=5 cannot be used"):
            await done(queue.get(5))


@story
async def test_a_lease_of_nothing_gives_the_message_back_now(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=5))
        await done(message.extend(0))
        assert message.settled
        again = await done(queue.get(timeout=5))
        assert (again.id, again.attempt) == (message.id, 1)
        with pytest.raises(LeaseLost):
            await done(message.extend(timedelta(0)))
        await done(again.ack())


@story
async def test_a_lease_has_a_longest_time(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        with pytest.raises(InvalidRequest, match=r"lease=.* from 0.001 s to 2592000 s"):
            await done(queue.get(timeout=5, lease=1e9))
        message = await done(queue.get(timeout=5, lease=timedelta(days=30)))
        with pytest.raises(InvalidRequest, match=r"lease=.* from 0 s to 2592000 s"):
            await done(message.extend(1e9))
        assert not message.lost
        await done(message.extend(timedelta(days=30)))
        await done(message.ack())


@story
async def test_a_document_goes_with_a_message_from_one_holder_to_the_next(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        message = await done(queue.get(timeout=5))
        assert await done(message.state.load()) is None
        await done(message.state.save({"step": 1}))
        await done(message.nack(delay=0))
        again = await done(queue.get(timeout=5))
        assert await done(again.state.load()) == {"step": 1}
        stale = await done(queue.resume(again.receipt))
        await done(again.state.save({"step": 2}))
        stale.state.version = 1
        with pytest.raises(Conflict):
            await done(stale.state.save({"step": 3}))
        await done(again.ack())


@story
async def test_a_receipt_is_enough_to_go_on(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        receipt = (await done(queue.get(timeout=5, detached=True))).receipt
        message = await done(queue.resume(receipt))
        assert message.body == b"x"
        await done(message.ack())
        with pytest.raises(LeaseLost):
            await done(queue.resume(receipt))


@story
async def test_a_delayed_one_waits_and_can_be_cancelled(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"later", delay=timedelta(hours=1)))
        assert stored.delayed_id is not None
        listed = queue.messages("delayed")
        found = [each async for each in listed] if hasattr(listed, "__aiter__") else list(listed)
        assert [(each.id, each.offset, each.body) for each in found] == [(stored.id, stored.offset, b"later")]
        assert stored.offset is None
        assert found[0].due_at > datetime.now(UTC) + timedelta(minutes=50)
        assert await done(queue.cancel(stored.id))
        assert not await done(queue.cancel(stored.id))


@story
async def test_no_delay_and_a_time_that_has_passed_mean_now(place):
    passed = datetime(2020, 1, 31, tzinfo=UTC)
    async with place.queue() as queue:
        assert (await done(queue.put(b"1", delay=0))).offset == 0
        assert (await done(queue.put(b"2", at=passed))).offset == 1
        new = [b"3", NewMessage(b"4", delay=timedelta(0)), NewMessage(b"5", at=passed)]
        assert [stored.offset for stored in await done(queue.put_many(new))] == [2, 3, 4]
        taken = await done(queue.get_many(9))
        assert [message.raw for message in taken] == [b"1", b"2", b"3", b"4", b"5"]
        await done(queue.ack_many(taken))
    async with place.broker() as broker:
        producer = broker.producer()
        for when in ({}, {"delay": 0}, {"at": passed}):
            await done(producer.send("jobs", b"x", **when))
        await done(producer.close())
        queue = await done(broker.queue("jobs"))
        assert (await done(queue.stats())).ready == 3


@story
async def test_what_is_open_cannot_be_pickled_and_says_what_to_do(place):
    async with place.broker() as broker, place.queue() as queue:
        for opened in (broker, queue):
            with pytest.raises(TypeError, match=r"^<.*> cannot be pickled: .* open it there$"):
                pickle.dumps(opened)


@story
async def test_a_duplicate_is_answered_with_the_first(place):
    async with place.queue() as queue:
        first = await done(queue.put(b"x", dedup_id="order-1"))
        second = await done(queue.put(b"x", dedup_id="order-1"))
        assert second.duplicate
        assert second.id == first.id
        assert (await done(queue.stats())).ready == 1


@story
async def test_looking_takes_nothing(place):
    async with place.queue() as queue:
        await done(queue.put_many([b'{"n": 1}', b'{"n": 2}']))
        assert [each.body for each in await done(queue.peek(5))] == [b'{"n": 1}', b'{"n": 2}']
        for where in ("json.n > 1", lambda each: b"2" in each.body):
            listed = queue.messages(where=where)
            found = [each async for each in listed] if hasattr(listed, "__aiter__") else list(listed)
            assert [each.offset for each in found] == [1]
        assert await done(queue.seek("end")) == 2
        assert (await done(queue.stats())).ready == 0
        await done(queue.seek(offset=1))
        assert (await done(queue.get(timeout=5))).offset == 1


@story
async def test_wrong_calls_are_refused_alike(place):
    async with place.queue() as queue:
        for wrong in (
            lambda: queue.put("text"),
            lambda: queue.put(b"x", priority=10),
            lambda: queue.put(b"x", delay=-1),
            lambda: queue.put(b"x", headers=7),
            lambda: queue.put_many(b"bytes"),
            lambda: queue.get(timeout=-1),
            lambda: queue.get(lease=0),
            lambda: queue.get_many(0),
            lambda: queue.seek("middle"),
            lambda: queue.peek(0),
            lambda: queue.put(b"x", codec="rar"),
            lambda: queue.resume("nonsense"),
            lambda: queue.dead.show("nonsense"),
        ):
            with pytest.raises(InvalidRequest):
                await done(wrong())
    with pytest.raises(NotAQueue):
        await done(place.faces.open(place.where, topic="missing", create=False))


@story
async def test_topics_are_made_changed_and_deleted(place):
    async with place.broker() as broker:
        info = await done(broker.create_topic("orders", partitions=2, max_attempts=3))
        assert (info.name, len(info.partitions), info.settings["max_attempts"]) == ("orders", 2, 3)
        with pytest.raises(holdfast.TopicExists):
            await done(broker.create_topic("orders"))
        assert len((await done(broker.add_partitions("orders", 1))).partitions) == 3
        assert (await done(broker.alter_topic("orders", max_attempts=4))).settings["max_attempts"] == 4
        assert await done(broker.topics()) == ["orders"]
        await done(broker.delete_topic("orders"))
        with pytest.raises(UnknownTopic):
            await done(broker.publish("orders", b"x"))


@story
async def test_keys_go_to_the_partitions_that_they_always_go_to(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=4))
        stored = [await done(broker.publish("orders", b"x", key=f"k{i}")) for i in range(8)]
        from holdfast.broker.messages import partition_for

        assert [each.partition for each in stored] == [partition_for(f"k{i}".encode(), 4) for i in range(8)]
        chosen = await done(broker.publish("orders", b"mine", partition=3))
        assert chosen.partition == 3
        found = await done(broker.read("orders", partition=3, offset=chosen.offset))
        assert [each.body for each in found] == [b"mine"]
        with pytest.raises(UnknownTopic):
            await done(broker.publish("orders", b"x", partition=9))


@story
async def test_groups_read_the_same_messages_each_for_itself(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish_many("orders", [b"a", b"b"]))
        first = await done(broker.group("orders", "first", max_attempts=2))
        assert first.settings.max_attempts == 2
        second = await done(broker.group("orders", "second"))
        for group in (first, second):
            messages = await done(group.receive_many(5, timeout=5))
            assert [message.body for message in messages] == [b"a", b"b"]
            await done(group.ack_many(messages))
        assert [info.lag for info in await done(broker.groups("orders"))] == [0, 0]
        resets = await done(broker.reset_offsets("first", "orders", to="earliest"))
        assert [(reset.before, reset.after) for reset in resets] == [(2, 0)]
        await done(broker.delete_group("second", "orders"))
        assert [info.name for info in await done(broker.groups("orders"))] == ["first"]


@story
async def test_a_consumer_goes_on_behind_what_was_handled(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=2))
        await done(broker.publish_many("orders", [NewMessage(body=b"%d" % i, key=f"k{i}") for i in range(10)]))
        consumer = await done(broker.consumer("orders", group="billing"))
        assert consumer.assignment() == [("orders", 0), ("orders", 1)]
        got: list[bytes] = []
        while len(got) < 10:
            got += [message.body for message in await done(consumer.poll(timeout=5))]
        assert sorted(got) == [b"%d" % i for i in range(10)]
        await done(consumer.close())
        again = await done(broker.consumer("orders", group="billing"))
        assert await done(again.poll(timeout=0.05)) == []
        await done(again.seek_to_start())
        assert len(await done(again.poll(timeout=5))) > 0
        await done(again.close())


@story
async def test_a_consumer_that_commits_itself_gets_the_rest_again(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish_many("orders", [b"a", b"b", b"c"]))
        consumer = await done(broker.consumer("orders", group="billing", auto_commit=False))
        messages = await done(consumer.poll(timeout=5))
        await done(consumer.commit(messages[:1]))
        assert await done(consumer.committed("orders", 0)) == 1
        assert consumer.position("orders", 0) == 3
        await done(consumer.close())
        again = await done(broker.consumer("orders", group="billing", auto_commit=False))
        assert [message.body for message in await done(again.poll(timeout=5))] == [b"b", b"c"]
        await done(again.close())


@story
async def test_a_consumer_seeks_and_tells_where_it_stands(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish_many("orders", [b"a", b"b", b"c"]))
        consumer = await done(broker.consumer("orders", group="billing", auto_commit=False))

        async def next_body() -> bytes:
            (message,) = await done(consumer.poll(timeout=5, max_records=1))
            body: bytes = message.body
            return body

        # Awaited as the names for tasks are, whatever they answer: a seek that nobody awaits is not done.
        called = as_awaited if place.tasks else done
        assert await called(consumer.committed("orders", 0)) == 0
        await called(consumer.seek("orders", 0, 2))
        assert await next_body() == b"c"
        await called(consumer.seek_to_start())
        assert await next_body() == b"a"
        (lag,) = await called(consumer.lag())
        assert (lag.topic, lag.partition, lag.messages) == ("orders", 0, 2)
        await called(consumer.seek_to_time(datetime.now(UTC) - timedelta(hours=1), "orders"))
        assert await next_body() == b"a"
        await called(consumer.seek_to_end("orders", 0))
        assert await done(consumer.poll(timeout=0)) == []
        await done(consumer.commit())
        assert await called(consumer.committed("orders", 0)) == 3
        with pytest.raises(UnknownTopic):
            await called(consumer.committed("orders", 7))
        with pytest.raises(holdfast.OffsetOutOfRange):
            await called(consumer.seek("orders", 0, 99))
        with pytest.raises(InvalidRequest):
            await called(consumer.seek_to_time(None))
        await done(consumer.close())


@story
async def test_what_is_opened_is_a_queue_or_a_broker_wherever_it_is(place):
    kinds = aio if place.tasks else holdfast
    prefix = "Async" if place.tasks else ""
    async with place.broker() as broker:
        assert isinstance(broker, getattr(kinds, f"{prefix}Broker"))
        queue, group = await done(broker.queue("jobs")), await done(broker.group("jobs", "others"))
        assert isinstance(queue, getattr(kinds, f"{prefix}Queue"))
        assert isinstance(group, getattr(kinds, f"{prefix}Group"))
        assert not isinstance(group, getattr(kinds, f"{prefix}Queue"))


@story
async def test_a_broker_has_queues(place):
    async with place.broker() as broker:
        with pytest.raises(NotAQueue):
            await done(broker.queue("jobs", create=False))
        queue = await done(broker.queue("jobs", max_attempts=3, body_type=dict))
        assert (queue.name, queue.group, queue.settings.max_attempts) == ("jobs", "default", 3)
        await done(queue.put({"n": 1}))
        again = await done(broker.queue(max_attempts=4))  # the only one; another setting is kept from now on
        assert (again.name, again.settings.max_attempts) == ("jobs", 4)
        message = await done(again.get(timeout=5))
        assert message.body == b'{"n":1}'
        await done(message.ack())
        await done(queue.close())
        assert queue.closed
        assert not again.closed
        with pytest.raises(holdfast.Closed):
            await done(queue.get_nowait())
        await done(again.put(b"goes on"))
        await done(broker.queue("other"))
        with pytest.raises(InvalidRequest, match="choose one with"):
            await done(broker.queue())
        with pytest.raises(holdfast.BadSettings, match="each program chooses it for itself"):
            await done(broker.queue("jobs", ack_durability="os"))
        with pytest.raises(holdfast.BadSettings):
            await done(broker.queue("jobs", max_attempt=3))


@story
async def test_settings_that_are_given_stand_instead_of_those_that_are_kept(place):
    async with place.queue(max_attempts=7, backoff_ms=5):
        pass
    async with place.queue(settings=holdfast.QueueSettings(lease_ms=9_000, ack_durability="os")) as queue:
        settings = queue.settings
        assert (settings.max_attempts, settings.backoff_ms, settings.lease_ms) == (5, 1_000, 9_000)
    async with place.queue() as queue:
        assert (queue.settings.max_attempts, queue.settings.lease_ms) == (5, 9_000)


@story
async def test_each_program_chooses_what_its_messages_and_its_acks_survive(place):
    async with place.queue(durability="os", ack_durability="fsync", backoff_ms=1) as queue:
        assert (await done(queue.put(b"x"))).durability == "os"
        await done((await done(queue.get(timeout=5))).nack(delay=0))
        message = await done(queue.get(timeout=5))
        await done(message.extend(20))
        await done(message.state.save({"at": 1}))
        await done(message.ack())
        assert (await done(queue.stats())).ready == 0
    for bad in ({"ack_durability": "disk"}, {"durability": "disk"}):
        with pytest.raises(holdfast.BadSettings, match=r"cannot be used: give one of fsync, interval, os"):
            async with place.queue(**bad):
                pass


@story
async def test_a_producer_stores_what_it_was_given(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=2))
        producer = broker.producer(name="importer")
        sent = [await done(producer.send("orders", b"%d" % i, key=f"k{i}")) for i in range(20)]
        await done(producer.flush())
        assert all(each.done() for each in sent)
        many = await done(producer.send_many("orders", [b"x", b"y"], partition=1))
        stored = await many if hasattr(many, "__await__") else many.result()
        assert [each.partition for each in stored] == [1, 1]
        await done(producer.close())
        assert (await done(broker.describe_topic("orders"))).messages == 22


@story
async def test_a_producer_is_of_one_class_wherever_it_sends_and_can_be_awaited(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=2))
        producer = broker.producer(name="importer")
        assert type(producer) is (aio.AsyncProducer if place.tasks else holdfast.Producer)
        assert await done(producer) is producer
        newer = await done(broker.producer(name="importer"))  # begins at once, and fences the one before it
        with pytest.raises(holdfast.Fenced):
            await answer(await done(producer.send("orders", b"old")))
        assert (await answer(await done(newer.send("orders", b"new", partition=1)))).partition == 1
        for each in (producer, newer):
            await done(each.close())
            assert each.closed
            with pytest.raises(holdfast.Closed):
                await done(each.send("orders", b"late"))


@story
async def test_what_a_producer_sends_is_stored_as_it_was_given(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        producer = await done(broker.producer(linger_ms=1))
        options: list[dict[str, Any]] = [
            {},
            {"key": "text"},
            {"key": b"bytes"},
            {"key": "\u00e9", "headers": {"a": "b"}, "priority": 7, "correlation_id": "c"},
            {"dedup_id": "d"},
            {"dedup_id": "d"},
        ]
        sent = [await done(producer.send("orders", b"%d" % i, **each)) for i, each in enumerate(options)]
        stored = [await answer(each) for each in sent]
        assert [(each.offset, each.duplicate) for each in stored] == [
            (0, False), (1, False), (2, False), (3, False), (4, False), (4, True)
        ]  # fmt: skip
        later = await answer(await done(producer.send("orders", b"later", delay=3600)))
        assert (later.offset, later.delayed_id, later.duplicate) == (None, 0, False)
        await done(producer.close())
        found = await done(broker.read("orders"))
        assert [each.body for each in found] == [b"0", b"1", b"2", b"3", b"4"]
        assert [each.key for each in found] == [None, "text", b"bytes", "\u00e9", None]
        assert (found[3].headers["a"], found[3].priority, found[3].correlation_id) == ("b", 7, "c")


@story
async def test_an_error_is_raised_by_flush_where_nobody_was_told_of_it(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        producer = await done(broker.producer(retries=0, linger_ms=60_000))
        sent = await done(producer.send("orders", b"x"))
        await done(broker.delete_topic("orders"))
        with pytest.raises(holdfast.HoldfastError):
            await done(producer.flush())
        assert sent.done()
        with pytest.raises(holdfast.HoldfastError):
            await answer(sent)
        await done(producer.flush())
        await done(producer.close())


@story
async def test_a_lock_is_held_by_one_at_a_time(place):
    async with place.broker() as broker:
        lock = await done(broker.locks.acquire("nightly", owner="a", lease=30))
        with pytest.raises(holdfast.LockHeld):
            await done(broker.locks.acquire("nightly", owner="b", wait=0))
        assert (await done(broker.locks.describe("nightly"))).owner == "a"
        assert (await done(broker.locks.keepalive(lock))).fence == lock.fence
        await done(broker.locks.release(lock))
        document = await done(broker.documents.update("cursor", {"at": 1}, version=0))
        with pytest.raises(Conflict):
            await done(broker.documents.update("cursor", {"at": 2}, version=0))
        assert (await done(broker.documents.get("cursor"))).value == {"at": 1}
        assert await done(broker.documents.list()) == ["cursor"]
        assert await done(broker.documents.remove("cursor", version=document.version))
        assert await done(broker.documents.get("cursor")) is None


@story
async def test_locks_are_of_one_class_wherever_they_are_kept(place):
    async with place.broker() as broker:
        module = aio_locks if place.tasks else locks
        kinds = (type(broker.locks), type(broker.documents), type(broker.locks.hold("nightly")))
        prefix = "Async" if place.tasks else ""
        assert kinds == tuple(getattr(module, prefix + name) for name in ("Locks", "Documents", "HeldLock"))


@story
async def test_arguments_of_locks_and_documents_are_refused_in_the_same_words(place):
    async with place.broker() as broker:
        for call, why in (
            (lambda: broker.locks.acquire("a/b"), "'a/b' cannot be used"),
            (lambda: broker.locks.acquire("a", owner="x\n"), "owner='x\\\\n' cannot be used"),
            (lambda: broker.locks.acquire("a", lease=31 * 86400), "lease=2678400 cannot be used"),
            (lambda: broker.locks.acquire("a", if_not_exists=1), "if_not_exists=1 cannot be used"),
            (lambda: broker.locks.release(5), "5 is not a lease of a lock"),
            (lambda: broker.documents.update("a", object()), "document a cannot be written"),
            (lambda: broker.documents.update("a", 1, version=-1), "version=-1 cannot be used"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await done(call())
        assert await done(broker.locks.list()) == []


@story
async def test_a_document_is_stored_as_json_whatever_the_value_was(place):
    async with place.broker() as broker:
        at = datetime(2026, 1, 2, tzinfo=UTC)
        document = await done(broker.documents.update("plan", {"at": at, "data": b"\x00", "of": (1, 2)}))
        assert document.value == {"at": "2026-01-02T00:00:00Z", "data": "AA==", "of": [1, 2]}
        large = await done(broker.documents.update("plan", "x" * 1_000_000, version=document.version))
        assert await done(broker.documents.get("plan")) == large


@story
async def test_a_held_lock_can_be_awaited_or_entered_and_is_released_behind_its_block(place):
    async with place.broker() as broker:
        held = broker.locks.hold("nightly", owner="a", lease=30)
        with pytest.raises(InvalidRequest, match="not been acquired"):
            _ = held.lost
        if place.tasks:
            assert await held is held
            assert not held.lost
            async with held:
                assert (await broker.locks.describe("nightly")).fence == held.fence
        else:
            with held:
                assert broker.locks.describe("nightly").fence == held.fence
        assert not held.lost
        assert not (await done(broker.locks.describe("nightly"))).held


@story
async def test_a_consumer_and_its_messages_are_of_one_class_wherever_they_are_kept(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish("orders", b"a"))
        consumer = await done(broker.consumer("orders", group="readers"))
        assert type(consumer) is (aio.AsyncConsumer if place.tasks else holdfast.Consumer)
        (message,) = await done(consumer.poll(5))
        assert type(message) is holdfast.StreamMessage
        assert repr(consumer).startswith(f"<{type(consumer).__name__} of readers on orders (1 partition")
        assert repr(message) == "<StreamMessage orders-0-0: b'a'>"
        await done(consumer.close())


@story
async def test_a_consumer_can_be_awaited_or_entered_and_leaves_behind_its_block(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish("orders", b"a"))
        consumer = await done(broker.consumer("orders", group="readers"))
        assert await done(consumer.poll(5))
        await done(consumer.close())
        if place.tasks:
            async with broker.consumer("orders", group="readers") as consumer:
                assert consumer.assignment() == [("orders", 0)]
        else:
            with broker.consumer("orders", group="readers") as consumer:
                assert consumer.assignment() == [("orders", 0)]
        assert consumer.closed


@story
async def test_a_block_that_fails_commits_nothing_of_what_it_polled(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish("orders", b"a"))
        with pytest.raises(ZeroDivisionError):
            async with entered(broker.consumer("orders", group="readers")) as consumer:
                assert await done(consumer.poll(5))
                _ = 1 / 0
        async with entered(broker.consumer("orders", group="readers")) as consumer:
            assert [each.raw for each in await done(consumer.poll(5))] == [b"a"]
        async with entered(broker.consumer("orders", group="readers")) as consumer:
            assert await done(consumer.poll(0)) == []


@story
async def test_closed_by_another_than_the_one_that_polls_it_commits_nothing_of_what_that_one_has(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish("orders", b"a"))
        consumer = await done(broker.consumer("orders", group="readers"))
        polled, over = asyncio.Event(), asyncio.Event()

        async def poll() -> None:
            assert await consumer.poll(5)
            polled.set()
            await over.wait()

        if place.tasks:
            polling = asyncio.create_task(poll())
            await polled.wait()
            await consumer.close()
            over.set()
            await polling
        else:
            assert consumer.poll(5)
            await asyncio.to_thread(consumer.close)
        async with entered(broker.consumer("orders", group="readers")) as again:
            assert [each.raw for each in await done(again.poll(5))] == [b"a"]


@story
async def test_a_message_of_a_stream_says_what_it_was_given(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        later = await done(broker.publish("orders", b"later", delay=0.05))
        options = {"key": b"raw", "headers": {"a": "text", "b": b"\xfe"}, "correlation_id": "c-1", "priority": 2}
        await done(broker.publish("orders", b"x" * 50, **options, ttl=3600))
        await done(broker.publish("orders", b"y" * 2_000_000, key="text"))
        found = {}
        async with entered(broker.consumer("orders", group="readers")) as consumer:
            while len(found) < 3:
                found |= {each.size: each for each in await done(consumer.poll(5))}
        delayed, small, large = (found[size] for size in (5, 50, 2_000_000))
        assert (delayed.id, delayed.original_id, delayed.correlation_id) == (later.id, later.id, later.id)
        assert delayed.due_at is not None
        assert (small.key, dict(small.headers)) == (b"raw", {"a": "text", "b": b"\xfe"})
        assert (small.correlation_id, small.priority, small.partition) == ("c-1", 2, 0)
        assert small.expires_at is not None
        assert repr(small) == f"<StreamMessage {small.id}: {b'x' * 40!r}…>"
        assert large.key == "text"
        assert large.id in repr(large)
        assert large.raw == b"y" * 2_000_000
        assert b"".join(large.chunks()) == large.raw
        with large.open() as file:
            assert file.read(3) == b"yyy"


@story
async def test_a_pause_counts_at_once_in_a_loop_and_nothing_is_lost(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=2))
        for number in range(2):
            await done(broker.publish_many("orders", [b"%d-%d" % (number, i) for i in range(3)], partition=number))
        async with entered(broker.consumer("orders", group="readers", auto_commit=False)) as consumer:
            first = await next_of(consumer)
            consumer.pause(first.topic, first.partition)
            others = [(await next_of(consumer)).partition for _ in range(3)]
            assert others == [1 - first.partition] * 3
            assert consumer.position("orders", first.partition) == 1
            consumer.resume()
            assert [(await next_of(consumer)).offset for _ in range(2)] == [1, 2]
            await done(consumer.seek_to_start("orders", 0))
            assert [(await next_of(consumer)).raw for _ in range(3)] == [b"0-0", b"0-1", b"0-2"]


@story
async def test_arguments_of_a_consumer_are_refused_in_the_same_words(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders"))
        await done(broker.publish("orders", b"a"))
        for options, why in (
            ({"topics": []}, "at least one topic"),
            ({"topics": 7}, "topics=7 cannot be used"),
            ({"group": "a/b"}, "'a/b' cannot be used"),
            ({"instance_id": ""}, "instance_id='' cannot be used"),
            ({"on_revoked": 7}, "on_revoked=7 cannot be used"),
        ):
            given = {"topics": "orders", "group": "readers", **options}
            with pytest.raises(InvalidRequest, match=why):
                await done(broker.consumer(**given))
        async with entered(broker.consumer("orders", group="readers")) as consumer:
            for call, why in (
                (lambda: consumer.poll(0, 0), "max_records=0 cannot be used"),
                (lambda: consumer.seek("orders", 7, 0), "partition 7 of 'orders' is not assigned to this consumer"),
                (lambda: consumer.seek("orders", 0, "x"), "offset='x' is not an offset"),
                (lambda: consumer.seek_to_start("returns"), "this consumer reads orders, not 'returns'"),
                (lambda: consumer.commit([7]), "7 is not a message of a consumer"),
                (lambda: consumer.commit(offsets={"orders": 1}), "offsets="),
            ):
                with pytest.raises(InvalidRequest, match=why):
                    await done(call())


@story
async def test_what_is_closed_says_so(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
    assert queue.closed
    with pytest.raises(holdfast.Closed):
        await done(queue.put(b"x"))
