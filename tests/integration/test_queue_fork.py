"""A forked child has the parent's objects and not its files: it is told so, and the parent goes on."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.storage import Log

FORK = multiprocessing.get_context("fork")


def in_a_child(call: Callable[[], object]) -> str:
    """What the call came to in a forked child."""
    ours, theirs = FORK.Pipe()

    def run() -> None:
        try:
            theirs.send(repr(call()))
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = FORK.Process(target=run)
    process.start()
    assert ours.poll(30), "the child hangs"
    answer: str = ours.recv()
    process.join(30)
    return answer


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    with holdfast.open(tmp_path / "jobs") as opened:
        opened.put(b"before")
        yield opened


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
def test_a_child_is_told_that_the_parent_owns_the_queue(queue, call):
    assert "before a fork" in in_a_child(lambda: call(queue))
    assert queue.stats().ready == 1


def test_a_child_that_closes_or_ends_leaves_the_folder_to_the_parent(queue):
    assert in_a_child(queue.close) == "None"
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(holdfast.Busy):
        holdfast.open(queue.folder, share=False)
    queue.put(b"after")
    assert [message.body for message in queue.peek(5)] == [b"before", b"after"]


def test_a_message_in_hand_is_the_parents_alone(queue):
    message = queue.get(timeout=0)
    assert "before a fork" in in_a_child(message.ack)
    message.ack()
    assert queue.stats().ready == 0


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
