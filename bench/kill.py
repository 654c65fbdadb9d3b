"""A writer that dies by kill -9 while it writes: for recovery times, and to check what peers claim."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from bench.child import FORK, one_line
from bench.peers import Peer
from bench.queues import Queue
from bench.scale import BATCH, Scale

# The writer carries on until it is killed, but not for ever, should nobody be left to kill it.
_CARRY_ON_SECONDS = 5.0


class WriterFailed(Exception):
    """The writer died before it had written what it should."""


def fill_and_kill(peer: type[Peer], scale: Scale, folder: Path, count: int, *, batch: int) -> int:
    """Put messages in a process of its own and kill it in the middle of more; answers how many
    were acknowledged by then.
    """
    return _kill_when_ready(partial(_write, peer(scale.body_bytes), folder, scale.bodies(BATCH), count, batch))


def take_and_kill(queue: type[Queue], folder: Path, bodies: list[bytes], acked: int) -> None:
    """Put these, get and ack the first so many, and kill the server if there is one, and the process."""
    _kill_when_ready(partial(_take, queue(len(bodies[0])), folder, bodies, acked))


def _kill_when_ready(writer: Callable[[Connection], None]) -> int:
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_report, args=(writer, sender))
    process.start()
    sender.close()
    try:
        acknowledged: int | str = receiver.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(acknowledged, str):
        raise WriterFailed(acknowledged)
    return acknowledged


def _report(writer: Callable[[Connection], None], sender: Connection) -> None:
    try:
        writer(sender)
    except Exception as problem:
        sender.send(one_line(problem))


def _write(queue: Peer, folder: Path, bodies: list[bytes], count: int, batch: int, sender: Connection) -> None:
    queue.open(folder)
    put: Callable[[list[bytes]], None] = queue.put_each if batch == 1 else queue.put_many
    calls = -(-count // len(bodies))
    for _ in range(calls):
        put(bodies)
    sender.send(calls * len(bodies))
    ends = time.monotonic() + _CARRY_ON_SECONDS
    while time.monotonic() < ends:
        queue.put(bodies[0])


def _take(queue: Queue, folder: Path, bodies: list[bytes], acked: int, sender: Connection) -> None:
    queue.open(folder)
    queue.put_each(bodies)
    queue.take_each(acked)
    queue.kill_server()
    sender.send(acked)
    time.sleep(_CARRY_ON_SECONDS)
