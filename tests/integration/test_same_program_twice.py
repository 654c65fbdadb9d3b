"""One program, whoever has the folder: the first process, one that comes later, or a server; for threads and tasks.

The program is written for tasks. The one for threads is the same text without `async` and `await`. Everything that it
gets is printed: the classes of objects, what they say of themselves, results, and errors word for word. What it prints
must be the same line by line wherever and however it runs.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.integration.process_gear import PATIENCE_S, plain_environment, server_process

pytestmark = pytest.mark.slow

TASKS = '''
import asyncio, queue as standard, sys
from datetime import UTC, datetime
import holdfast
from holdfast import aio as face
from holdfast.aio import AsyncBroker, AsyncConsumer, AsyncGroup, AsyncMessage, AsyncProducer, AsyncQueue

PLACE = sys.argv[1]


def said(of, fields):
    """Some of what an object says, and its class."""
    return type(of).__name__, *(getattr(of, name) for name in fields.split())


async def refused(what, call):
    """What is not possible: the error, with its code and all that it tells."""
    try:
        print(what, "was possible:", await call())
    except holdfast.HoldfastError as error:
        parents = [each.__name__ for each in type(error).__mro__[1:-3]]
        print(what, "was refused:", type(error).__name__, parents, error.code, error.retryable, error)


async def use_queue():
    queue = await face.open(PLACE, topic="jobs", max_attempts=2, backoff_ms=0)
    print(queue, type(queue), isinstance(queue, AsyncQueue), isinstance(queue, AsyncGroup))
    print(queue.name, queue.topic, queue.group, queue.closed, queue.settings)
    print(await queue.put(b"one", key="k", headers={"a": "b"}, priority=3, correlation_id="c"))
    print(await queue.put(b"text"), await queue.put(b"", durability="os"))
    print(await queue.put_many([b"two", holdfast.NewMessage(b"three", priority=9)]))
    first, again = [await queue.put(b"four", dedup_id="d") for _ in range(2)]
    print(first, again, first.id == again.id)
    later = await queue.put(b"later", delay=3600)
    print(later, later.id, await queue.qsize(), await queue.empty())
    print([(each, each.body, each.key, each.priority, dict(each.headers)) for each in await queue.peek(3)])
    for phase in ("ready", "delayed"):
        print([(each, each.body, said(each, "phase attempts reason error"))
               async for each in queue.messages(phase, where="priority < 9", limit=3)])
    print(await queue.cancel(later.id), await queue.cancel(later.id))

    async with await queue.get(timeout=5) as message:
        print(message, type(message), isinstance(message, AsyncMessage))
        print(said(message, "id original_id topic partition offset raw size body key priority correlation_id"))
        print(said(message, "attempt lost settled expires_at due_at"), message.headers, message.open().read())
        print(type(message.timestamp), type(message.receipt), type(message.fence), type(message.holder))
        await message.extend(30)
        print(type(message.state), await message.state.load(), await message.state.save({"step": 1}))
        print(await message.state.load(), message.state.version)
        print([each async for each in queue.messages("leased")])
    print(message.settled, message.lost)
    await refused("acking twice", message.ack)
    await refused("extending what is done", message.extend)
    try:
        async with await queue.get(timeout=5) as failed:
            raise ValueError("not today")
    except ValueError as error:
        print("raised:", error, getattr(error, "__notes__", []), failed.settled)
    message = await queue.get(timeout=5)
    print(message, message.attempt)
    await message.nack(error="broken 17")
    message = await queue.get(timeout=5)
    resumed = await queue.resume(message.receipt)
    print(message.attempt, type(resumed), resumed.id == message.id)
    await resumed.reject("useless")
    await refused("what was rejected by another hand", message.ack)
    deferred = await queue.get(timeout=5)
    await deferred.defer()
    rest = await queue.get_many(10, timeout=0)
    print(rest, [each.attempt for each in rest])
    await queue.nack_many(rest[:1], error=KeyError("k"))
    await queue.ack_many(rest[1:])
    await refused("acking all again", lambda: queue.ack_many(rest))
    await refused("acking other things", lambda: queue.ack_many([1]))
    again = await queue.get(False)
    print(again, again.attempt)
    await again.reject(RuntimeError("never"))

    letters = await queue.dead.list()
    print(type(queue.dead), letters)
    for letter in letters:
        print(said(letter, "id original_id original_offset phase reason error attempts body key priority"))
        print([said(failure, "why error") for failure in letter.failures], isinstance(letter, holdfast.DeadLetter))
    print([said(each, "reason error count example") for each in await queue.dead.groups()])
    print(await queue.dead.show(letters[0].id), await queue.dead.list(where='error ~ "never"', limit=1))
    print(await queue.dead.redrive(letters[0].id, dry_run=True), await queue.dead.redrive([letters[0].id]))
    print(await queue.dead.purge(letters[1].id), await queue.dead.list())
    await refused("a letter that is gone", lambda: queue.dead.show(letters[1].id))
    await refused("redriving what is gone", lambda: queue.dead.redrive(letters[1].id))
    await refused("a letter with a strange id", lambda: queue.dead.show("nonsense"))
    await refused("purging by a strange id", lambda: queue.dead.purge("nonsense"))
    await refused("a letter without an id", lambda: queue.dead.show(7))
    async with await queue.get(timeout=5) as back:
        print(back, back.original_id, back.attempt)
    print([said(step, "step id offset group attempt why error") for step in await queue.history(back.original_id)])

    counts = "name group ready leased delayed dead start end floor bytes segments waiters durability partitions damaged"
    print(said(await queue.stats(), counts), type((await queue.stats()).metrics))
    print(await queue.committed(), await queue.seek("start"), await queue.qsize(), await queue.committed())
    print(await queue.seek(offset=4), await queue.seek(time=datetime(2001, 1, 1, tzinfo=UTC)), await queue.seek("end"))
    print(await queue.put(b"dropped"), await queue.purge(), await queue.qsize(), type(await queue.compact()))
    print(await queue.apply_retention(), await queue.sync())

    try:
        await queue.get(timeout=0)
    except standard.Empty as error:
        print("empty:", type(error), error)
    await refused("getting from an empty queue", queue.get_nowait)
    await refused("waiting in vain", lambda: queue.get(timeout=0.01))
    await refused("text as a body", lambda: queue.put("text"))
    await refused("a priority of ten", lambda: queue.put(b"", priority=10))
    await refused("a delay below nothing", lambda: queue.put(b"", delay=-1))
    await refused("too large", lambda: queue.put(b"x" * 11_000_000))
    await refused("a header of a number", lambda: queue.put(b"", headers={"a": 1}))
    await refused("no durability", lambda: queue.put(b"", durability="much"))
    await refused("no messages", lambda: queue.get_many(0))
    await refused("no receipt", lambda: queue.resume("nonsense"))
    await refused("no id", lambda: queue.history("nonsense"))
    await refused("no such message", lambda: queue.history("jobs-0-999"))
    await refused("no place", lambda: queue.seek("middle"))
    await refused("an offset too far", lambda: queue.seek(offset=999))
    await refused("a partition that is not there", lambda: queue.seek("start", partition=7))
    await queue.close()
    await queue.close()
    print(queue, queue.closed)
    await refused("a closed queue", lambda: queue.put(b""))
    await refused("getting from a closed queue", lambda: queue.get(timeout=0))
    await refused("a message of a closed queue", back.ack)
    await refused("no setting", lambda: face.open(PLACE, topic="jobs", colour="red"))
    await refused("no such value", lambda: face.open(PLACE, topic="jobs", max_attempts=-1))
    await refused("no queue", lambda: face.open(PLACE, topic="missing", create=False))
    await refused("no name", lambda: face.open(PLACE, topic="not a name"))

    async with face.open(PLACE, topic="typed", body_type=dict) as typed:
        print(typed, await typed.put({"n": 1}), [each.body for each in await typed.peek()])
        await refused("another type", lambda: typed.put("text"))
    async with face.open(PLACE, topic="typed", body_type=int) as wrong, await wrong.get(timeout=5) as message:
        try:
            print(message.body)
        except holdfast.BadBody as error:
            print("bad:", error)


async def use_broker():
    async with face.open_broker(PLACE) as broker:
        print(broker, type(broker), isinstance(broker, AsyncBroker), broker.closed)
        print(said(await broker.create_topic("orders", partitions=2, max_attempts=5),
                   "name partitions groups stream_groups settings messages bytes"))
        print(said(await broker.alter_topic("orders", max_attempts=4), "name settings"))
        print(said(await broker.add_partitions("orders", 1), "name partitions"))
        print(await broker.topics())
        print([await broker.publish("orders", b"%d" % number, partition=number % 3) for number in range(6)])
        print(await broker.publish_many("orders", [b"a", b"b"], partition=1))
        print(await broker.publish("orders", b"k", key="k"))
        print(await broker.read("orders", partition=1, offset=1, limit=2))

        async with broker.group("orders", "billing", max_attempts=3) as group:
            print(group, type(group), isinstance(group, AsyncQueue), group.settings.max_attempts)
            message = await group.receive(timeout=5)
            print(type(message), message.attempt, message.topic)
            await message.ack()
            rest = await group.receive_many(100, timeout=0)
            print(sorted((each.partition, each.offset, each.body) for each in rest), await group.committed())
            await refused("nothing left", group.receive_nowait)
            print(said(await group.stats(), "name group ready leased delayed dead partitions"))
            await group.ack_many(rest)
            print(await group.committed())
        print(group, group.closed)
        await refused("a closed group", lambda: group.receive(timeout=0))
        print(await broker.queue("orders"), [said(each, "name topic mode members lag problem")
                                             for each in await broker.groups("orders")])

        async with broker.producer(name="till", linger_ms=1) as producer:
            print(type(producer), isinstance(producer, AsyncProducer))
            print(said(producer, "name closed settings"))
            sent = await producer.send("orders", b"sent", partition=0)
            print(type(sent), await result(sent), sent, sent.done())
            many = await producer.send_many("orders", [b"x", b"y"], partition=2)
            print(type(many), len(many), await result(many), many[0])
            print(await producer.flush())
            await refused("a producer's bad body", lambda: producer.send("orders", 7))
            await refused("a producer's unknown topic", lambda: producer.send("missing", b""))
            await refused("a producer's partition", lambda: producer.send("orders", b"", partition=9))
        print(producer.closed)
        await refused("a closed producer", lambda: producer.send("orders", b""))

        async with broker.consumer("orders", group="audit", auto_commit=False, max_records=100) as consumer:
            print(consumer, type(consumer), isinstance(consumer, AsyncConsumer), consumer.topics, consumer.group)
            polled = []
            while len(polled) < 12:
                polled += await consumer.poll(5)
            print(sorted((each.partition, each.offset, each.body, type(each).__name__) for each in polled))
            print(consumer, consumer.assignment(), [consumer.position("orders", number) for number in range(3)])
            print([await consumer.committed("orders", number) for number in range(3)])
            await consumer.commit(polled)
            print([await consumer.committed("orders", number) for number in range(3)])
            await consumer.seek("orders", 1, 2)
            print(await consumer.poll(5), consumer.position("orders", 1))
            print([said(each, "topic partition offset end messages") for each in await consumer.lag()])
            await consumer.commit(offsets={("orders", 1): 1})
            print([said(each, "topic partition offset end messages") for each in await consumer.lag()])
            await consumer.seek_to_start("orders", 0)
            print(await consumer.poll(5, max_records=1))
            await consumer.seek_to_end()
            print(await consumer.poll(0))
            await consumer.seek_to_time(datetime(2001, 1, 1, tzinfo=UTC), "orders", 2)
            async for message in consumer:
                print(message, isinstance(message, holdfast.StreamMessage))
                print(said(message, "topic partition offset body key id"))
                break
            consumer.pause("orders", 0)
            print(consumer.paused(), consumer.resume(), consumer.paused())
            await refused("an offset of text", lambda: consumer.seek("orders", 0, "1"))
            await refused("an offset beyond the end", lambda: consumer.seek("orders", 0, 999))
            await refused("a partition of nobody", lambda: consumer.seek("orders", 9, 0))
            await refused("committing too far", lambda: consumer.commit(offsets={("orders", 0): 999}))
            await refused("the committed of nothing", lambda: consumer.committed("orders", 9))
            print([said(each, "name topic mode members lag problem") for each in await broker.groups()])
            await refused("a reset under a member", lambda: broker.reset_offsets("audit", "orders", to="earliest"))
        print(consumer, consumer.closed)
        await refused("polling a closed consumer", lambda: consumer.poll(0))
        print(await broker.reset_offsets("audit", "orders", to="earliest", dry_run=True))
        print(await broker.reset_offsets("audit", "orders", to=1, partition=1))
        print(said(await broker.describe_topic("orders"), "name partitions groups stream_groups settings"))

        lock = await broker.locks.acquire("nightly", owner="me", lease=60)
        print(said(lock, "name owner lease"), type(lock.fence), isinstance(lock, holdfast.Lock), type(broker.locks))
        await refused("a lock that is held", lambda: broker.locks.acquire("nightly", owner="you", if_not_exists=True))
        print(said(await broker.locks.keepalive(lock, 30), "name owner lease"))
        print([said(each, "name held owner waiting document_version") for each in await broker.locks.list()])
        document = await broker.documents.update("plan", {"a": [1, None, "ü"]}, lock=lock)
        print(said(document, "name value version"), type(broker.documents))
        print(said(await broker.documents.update("plan", 2, version=1), "name value version"))
        await refused("an old version", lambda: broker.documents.update("plan", 3, version=1))
        await refused("no JSON", lambda: broker.documents.update("plan", object()))
        print(await broker.documents.list(), said(await broker.documents.get("plan"), "name value version"))
        print(await broker.documents.get("none"), await broker.locks.release(lock))
        print(said(await broker.locks.describe("nightly"), "name held owner fence waiting acquired_at expires_at"))
        await refused("a lock that was let go", lambda: broker.locks.keepalive(lock))
        await refused("releasing twice", lambda: broker.locks.release(lock))
        await refused("writing with it", lambda: broker.documents.update("plan", 4, lock=lock))
        async with broker.locks.hold("nightly", owner="me") as held:
            print(said(held, "name owner lost"), held.fence > lock.fence)
        try:
            async with broker.locks.hold("nightly", owner="me") as held:
                print(held.fence > lock.fence, await broker.locks.force_release("nightly"))
        except holdfast.LeaseLost as error:
            print("lost:", error)
        print(await broker.locks.force_release("nightly"), await broker.locks.list())
        print(await broker.documents.remove("plan"), await broker.documents.remove("plan"))

        await refused("no topic", lambda: broker.publish("missing", b""))
        await refused("describing no topic", lambda: broker.describe_topic("missing"))
        await refused("a group of no topic", lambda: broker.group("missing", "g"))
        await refused("a consumer of no topic", lambda: broker.consumer("missing", group="g"))
        await refused("a topic that is there", lambda: broker.create_topic("orders"))
        await refused("no name", lambda: broker.create_topic("not a name"))
        await refused("too few partitions", lambda: broker.create_topic("none", partitions=0))
        await refused("too few of a queue", lambda: broker.queue("none", partitions=0))
        await refused("partitions in words", lambda: broker.create_topic("none", partitions="two"))
        await refused("no setting", lambda: broker.create_topic("none", colour="red"))
        await refused("no change", lambda: broker.alter_topic("orders"))
        await refused("a partition too many", lambda: broker.publish("orders", b"", partition=9))
        await refused("reading too far", lambda: broker.read("orders", offset=999))
        await refused("reading no partition", lambda: broker.read("orders", partition=9))
        await refused("a stream group in queue mode", lambda: broker.group("orders", "audit"))
        await refused("a queue group in stream mode", lambda: broker.consumer("orders", group="billing"))
        await refused("resetting no group", lambda: broker.reset_offsets("nobody", "orders", to="latest"))
        await refused("deleting no group", lambda: broker.delete_group("nobody"))
        await refused("compacting a queue", lambda: broker.compact_topic("orders"))
        await refused("keeping it", lambda: broker.trace("nonsense"))
        print(await broker.apply_retention("orders"), await broker.delete_group("audit"), await broker.groups("jobs"))
        group = await broker.group("orders", "billing")
        print(await broker.delete_topic("orders"), await broker.topics(), await broker.sync())
        for what in (lambda: group.receive(timeout=0), group.stats, group.dead.list, lambda: group.peek(1)):
            await refused("a group of a deleted topic", what)
    print(broker.closed)
    await refused("a closed broker", lambda: broker.topics())
    await refused("locks of a closed broker", lambda: broker.locks.list())


async def main():
    await use_queue()
    await use_broker()


async def result(sent):
    return await sent


asyncio.run(main())
'''
THREADS = re.sub(r"\b(async|await) |Async(?=[A-Z])", "", TASKS)
THREADS = THREADS.replace("return sent\n", "return sent.result()\n").replace("asyncio.run(main())", "main()")
THREADS = THREADS.replace("from holdfast import aio as face\n", "face = holdfast\n")
THREADS = THREADS.replace("from holdfast.aio import", "from holdfast import")
STYLES = {"threads": THREADS, "tasks": TASKS}

OWNERS = {
    "threads": """
import sys, holdfast
with holdfast.open_broker(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
""",
    "tasks": """
import asyncio, sys, holdfast
async def main():
    async with holdfast.aio.open_broker(sys.argv[1]):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
""",
}


@contextmanager
def nobody(folder: Path) -> Iterator[str]:
    """The program is the first to come."""
    yield str(folder)


@contextmanager
def owner(style: str, folder: Path) -> Iterator[str]:
    """Another process has the folder open."""
    command = [sys.executable, "-c", OWNERS[style], str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield str(folder)
        assert process.poll() is None, "the owner has ended"
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


@contextmanager
def server(folder: Path, *, by_url: bool) -> Iterator[str]:
    """`holdfast serve` has it."""
    with server_process(folder) as process:
        yield process.url if by_url else str(folder)


PLACES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "first": nobody,
    "beside threads": partial(owner, "threads"),
    "beside tasks": partial(owner, "tasks"),
    "beside a server": partial(server, by_url=False),
    "over HTTP": partial(server, by_url=True),
}


# All that may differ: what is behind a socket is said to be at a place, not in it, and times and processes are new.
WORDS = [
    (r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME"),
    (r"held by [^ )]+:\d+", "held by SOMEBODY"),
    (r"\bat PLACE", "in PLACE"),
    (r"the server in PLACE has no queue", "PLACE holds no queue"),
    (r"the connection to PLACE is closed; connect again", "the queue in PLACE is closed; open it again to use it"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"holdfast\.api\.aio\.", "holdfast.api.sync."),
]


def printed(style: str, place: str, folder: Path) -> list[str]:
    """What the program prints, without what may differ."""
    with PLACES[place](folder) as where:
        command = [sys.executable, "-c", STYLES[style], where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=plain_environment())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:] + done.stderr
    text = done.stdout.replace(where, "PLACE").replace(str(folder), "PLACE")  # a server's errors name its folder
    for pattern, instead in WORDS:
        text = re.sub(pattern, instead, text)
    return text.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program for threads prints as the first process."""
    return printed("threads", "first", tmp_path_factory.mktemp("first") / "data")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", PLACES)
def test_a_program_prints_the_same_wherever_and_however_it_runs(
    place: str, style: str, tmp_path: Path, expected: list[str]
):
    assert len(expected) > 150
    differences = difflib.unified_diff(expected, printed(style, place, tmp_path / "data"), lineterm="", n=0)
    assert "\n".join(differences) == ""
