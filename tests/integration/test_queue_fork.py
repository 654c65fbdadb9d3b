"""A forked child has the parent's objects and not its files: it comes to the parent as any other process does."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import aio
from holdfast.client import shared_folder
from holdfast.remote.sync.group import RemoteGroupPort
from holdfast.storage import Log
from tests.integration.http_gear import serving

FORK = multiprocessing.get_context("fork")
_PATIENCE_S = 60


def in_a_child(call: Callable[[], object]) -> str:
    """What the call came to in a forked child."""
    ours, theirs = FORK.Pipe()

    def run() -> None:
        try:
            theirs.send(repr(call()))
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")

    process = FORK.Process(target=run)
    process.start()
    assert ours.poll(_PATIENCE_S), "the child hangs"
    answer: str = ours.recv()
    process.join(_PATIENCE_S)
    return answer


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Any]:
    # What a child takes and drops as it ends comes back with the end of its lease.
    with holdfast.open(tmp_path / "jobs", lease_ms=5_000) as opened:
        opened.put(b"before")
        yield opened


@pytest.fixture
def unshared(tmp_path: Path) -> Iterator[Any]:
    with holdfast.open(tmp_path / "jobs", share=False) as opened:
        opened.put(b"before")
        yield opened


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda q: q.put(b"x").offset, "1"),
        (lambda q: [each.offset for each in q.put_many([b"x", b"y"])], "[1, 2]"),
        (lambda q: q.put(b"x", key="k", delay=5).delayed_id, "0"),
        (lambda q: q.get(timeout=5).body, "b'before'"),
        (lambda q: next(iter(q)).body, "b'before'"),
        (lambda q: [each.body for each in q.peek()], "[b'before']"),
        (lambda q: q.stats().ready, "1"),
        (lambda q: q.dead.list(), "[]"),
        (lambda q: isinstance(q, holdfast.Queue), "True"),
        (lambda q: (q.name, q.group, q.closed), "('jobs', 'default', False)"),
        (lambda q: repr(q).startswith("<Queue jobs at "), "True"),
        (lambda q: q.close(), "None"),
    ],
)
def test_a_queue_that_was_opened_before_a_fork_works_in_the_child(queue, call, answer):
    assert in_a_child(lambda: call(queue)) == answer
    assert type(queue) is holdfast.Queue
    assert queue.get(timeout=_PATIENCE_S).body == b"before"  # what the child took and dropped comes back


def test_it_works_as_a_context_manager_and_again_in_a_child_of_the_child(queue):
    def work() -> list[str]:
        answers = [in_a_child(lambda: queue.put(b"unused by its parent").offset)]
        with queue as same:
            same.put(b"child")
            answers.append(in_a_child(lambda: same.put(b"grandchild").offset))
            answers.append(str(queue.put(b"child again").offset))
        return [*answers, str(queue.closed)]

    assert in_a_child(work) == "['1', '3', '4', 'True']"
    bodies = [b"before", b"unused by its parent", b"child", b"grandchild", b"child again"]
    assert [message.body for message in queue.peek(9)] == bodies


def test_a_fork_by_hand_shares_the_work_with_the_parent(queue):
    queue.put_many([b"%d" % i for i in range(20)])
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                for message in queue.get_many(5, timeout=_PATIENCE_S):
                    message.ack(durability="fsync")
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    assert queue.stats().ready == 11


@pytest.mark.parametrize("kind", ["broker", "queue", "group"])
def test_a_broker_and_what_it_gave_work_in_the_child(tmp_path, kind):
    with holdfast.open_broker(tmp_path / "shop", body_type=dict, durability="os") as broker:
        queue, group = broker.queue("jobs"), broker.group("jobs", "others")
        calls: dict[str, Callable[[], object]] = {
            "broker": lambda: (broker.publish("jobs", {"n": 1}).durability, broker.topics(), broker.closed),
            "queue": lambda: (queue.put({"n": 1}).durability, queue.get(timeout=5).body, queue.close()),
            "group": lambda: (queue.put({"n": 1}).durability, group.receive(timeout=5).body, queue.closed),
        }
        answers = {
            "broker": "('os', ['jobs'], False)",
            "queue": "('os', {'n': 1}, None)",
            "group": "('os', {'n': 1}, False)",
        }
        assert in_a_child(calls[kind]) == answers[kind]
        assert broker.describe_topic("jobs").messages == 1


def test_a_queue_for_tasks_works_in_the_child(tmp_path):
    async def work(queue: Any) -> bytes:
        await queue.put(b"child")
        async with await queue.get(timeout=_PATIENCE_S) as message:
            body: bytes = message.body
        await queue.close()
        return body

    queue = asyncio.run(_opened(tmp_path / "jobs"))
    try:
        assert in_a_child(lambda: asyncio.run(work(queue))) == "b'child'"
        assert asyncio.run(queue.stats()).ready == 0
    finally:
        asyncio.run(queue.close())


async def _opened(folder: Path) -> Any:
    return await aio.open(folder)


def test_a_queue_behind_a_server_has_connections_of_its_own_in_the_child(tmp_path):
    with serving(tmp_path / "data") as server, holdfast.open(server.url, topic="jobs") as queue:
        queue.put(b"before")
        assert in_a_child(lambda: (queue.put(b"child").offset, queue.get(timeout=5).body)) == "(1, b'before')"
        assert queue.put(b"after").offset == 2


def test_the_child_goes_on_when_the_parent_closes_the_queue(tmp_path):
    queue = holdfast.open(tmp_path / "jobs")
    ours, theirs = FORK.Pipe()

    def work() -> None:
        theirs.send(queue.put(b"first").offset)
        theirs.recv()
        theirs.send(queue.put(b"second").offset)  # now the child owns the folder
        queue.close()

    process = FORK.Process(target=work)
    process.start()
    assert ours.poll(_PATIENCE_S)
    assert ours.recv() == 0
    queue.close()
    ours.send("closed")
    assert ours.poll(_PATIENCE_S)
    assert ours.recv() == 1
    process.join(_PATIENCE_S)
    with holdfast.open(tmp_path / "jobs") as again:
        assert [message.body for message in again.peek(5)] == [b"first", b"second"]


def test_the_child_finds_the_folder_though_it_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with holdfast.open("jobs") as queue:

        def work() -> int | None:
            os.chdir("/")
            return queue.put(b"x").offset

        assert in_a_child(work) == "0"


def test_a_method_of_a_queue_that_was_looked_up_before_the_fork_works_in_the_child(queue):
    put = queue.put
    assert in_a_child(lambda: put(b"x").offset) == "1"
    assert queue.stats().ready == 2


def test_a_method_of_a_broker_that_was_looked_up_before_the_fork_works_in_the_child(tmp_path):
    with holdfast.open_broker(tmp_path / "shop") as broker:
        broker.create_topic("orders")
        publish = broker.publish
        assert in_a_child(lambda: publish("orders", b"x").offset) == "0"
        assert in_a_child(lambda: type(broker) is holdfast.Broker) == "True"
        assert broker.describe_topic("orders").messages == 1


def test_a_queue_that_was_closed_before_the_fork_is_closed_in_the_child(tmp_path):
    queue = holdfast.open(tmp_path / "jobs")
    queue.close()
    assert in_a_child(lambda: queue.closed) == "True"
    assert in_a_child(lambda: queue.put(b"x")).startswith("Closed: ")


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.put(b"x"),
        lambda q: q.put_many([b"x"]),
        lambda q: q.put(b"x", key="k"),
        lambda q: q.put(b"x", delay=5),
        lambda q: q.get(timeout=0),
        lambda q: q.peek(),
        lambda q: q.stats(),
        lambda q: q.dead.list(),
    ],
)
def test_where_the_folder_is_not_shared_a_child_is_told_that_the_parent_owns_it(unshared, call):
    assert "before a fork" in in_a_child(lambda: call(unshared))
    assert unshared.stats().ready == 1


def test_a_child_that_closes_or_ends_leaves_the_folder_to_the_parent(queue):
    assert in_a_child(lambda: queue.close()) == "None"  # noqa: PLW0108  looked up in the child
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(holdfast.Busy):
        holdfast.open(queue.folder, share=False)
    queue.put(b"after")
    assert [message.body for message in queue.peek(5)] == [b"before", b"after"]


@pytest.mark.parametrize("verb", ["ack", "nack", "defer", "reject", "extend"])
def test_a_message_in_hand_is_the_parents_alone(queue, verb):
    message = queue.get(timeout=0)

    def work() -> tuple[bool, bytes, bytes]:
        queue.put(b"another")
        with queue.get(timeout=5) as own:
            body = own.body
        with suppress(holdfast.Closed):
            getattr(message, verb)()
            raise AssertionError("settled")
        return message.lost, message.body, body

    assert in_a_child(work) == "(True, b'before', b'another')"
    assert "before a fork" in in_a_child(getattr(message, verb))
    assert not message.lost
    message.ack()
    assert queue.stats().ready == 0


def test_consumers_and_producers_are_the_parents_and_the_child_makes_its_own(tmp_path):
    with holdfast.open_broker(tmp_path / "shop") as broker:
        broker.create_topic("orders")
        producer, consumer = broker.producer(), broker.consumer("orders", group="billing")

        def work() -> list[str]:
            answers = []
            for call in (lambda: producer.send("orders", b"x"), lambda: consumer.poll(timeout=0)):
                try:
                    call()
                except holdfast.Closed:
                    answers.append("closed")
            with broker.producer() as own:
                own.send("orders", b"child").result(_PATIENCE_S)
            return answers

        assert in_a_child(work) == "['closed', 'closed']"
        assert [message.body for message in consumer.poll(timeout=_PATIENCE_S)] == [b"child"]
        producer.send("orders", b"parent").result(_PATIENCE_S)


def test_a_log_is_closed_in_a_child_as_well(tmp_path):
    with Log.open(tmp_path) as log:
        log.append([b"a"])
        assert "before a fork" in in_a_child(lambda: log.append([b"b"]))
        assert "before a fork" in in_a_child(lambda: log.append_one(b"b"))
        assert in_a_child(log.close) == "None"
        log.append([b"c"])
        assert [record.value for record in log.records(0)] == [b"a", b"c"]


def test_a_child_may_own_a_queue_of_its_own(tmp_path, queue):
    def work() -> int:
        with holdfast.open(tmp_path / "mine") as mine:
            mine.put(b"x")
            return mine.stats().ready

    assert in_a_child(work) == "1"


def test_a_take_that_came_to_no_answer_is_asked_for_again_by_the_parent_alone(tmp_path, monkeypatch):
    """Whoever gives a take its name again gets what it took: parent and child would both have the message."""
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        queue = broker.queue("jobs")
        queue.put_many([b"first", b"second"])
        asking = RemoteGroupPort._ask

        def unheard(*arguments: Any, **options: Any) -> Any:
            asking(*arguments, **options)
            raise holdfast.Unavailable("the answer was lost")

        with monkeypatch.context() as patched:
            patched.setattr(RemoteGroupPort, "_ask", unheard)
            with pytest.raises(holdfast.Unavailable):
                queue.receive(timeout=0, holder="worker")
        assert in_a_child(lambda: queue.receive(timeout=0, holder="worker").body) == "b'second'"
        assert queue.receive(timeout=0, holder="worker").body == b"first"


def test_threads_of_a_child_may_all_be_the_first_to_use_a_queue(queue, monkeypatch):
    port_of, client_of = shared_folder._port_of, shared_folder._client_of
    made, four = [], threading.Barrier(4)

    def together(*arguments: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            four.wait(0.5)
        return port_of(*arguments)

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(client_of(*arguments, **options))
        return made[-1]

    def from_threads() -> tuple[int, int]:
        with ThreadPoolExecutor(4) as threads:
            offsets = set(threads.map(lambda body: queue.put(body).offset, [b"x"] * 32))
        return len(offsets), len(made)

    monkeypatch.setattr(shared_folder, "_port_of", together)
    monkeypatch.setattr(shared_folder, "_client_of", counted)
    assert in_a_child(from_threads) == "(32, 1)"


# The owner's thread is loading its server when the main thread forks; the child needs some of the same modules.
FORKING = """
import importlib.abc, os, sys, threading, time
loading = threading.Event()
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("httptools.") and threading.current_thread().name == "holdfast-owner":
            loading.set()
            time.sleep(0.5)
sys.meta_path.insert(0, Slow())
import holdfast
queue = holdfast.open(sys.argv[1])
print("open", flush=True)
assert loading.wait(60)
child = os.fork()
if not child:
    queue.put(b"from the child")
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
"""


def test_a_fork_while_the_owner_loads_its_server_leaves_no_locked_modules_to_the_child(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path / "jobs")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        try:
            with holdfast.open(tmp_path / "jobs") as queue:
                assert queue.get(timeout=_PATIENCE_S).body == b"from the child"
            assert owner.wait(timeout=_PATIENCE_S) == 0
            assert owner.stdout.read() == "0\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)
