"""What clients cost that wait: connections with a long poll each, and no message for any of them."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.child import Sample
from bench.harness import Timed
from bench.queues.server import keep_apart
from bench.scale import Scale
from bench.server.ours import QUEUE, HoldfastServer

_SETTLE_S = 1.0
_BODY = b'{"wait": 60}'


@contextmanager
def idle_polls(scale: Scale, folder: Path) -> Iterator[Timed]:
    """The memory that the polls add to the server, and the CPU time that it takes while nothing happens."""
    keep_apart()
    made = HoldfastServer(scale.body_bytes)
    made.open(folder)
    assert made.server is not None
    process = made.server.process.pid
    polls: list[socket.socket] = []
    try:
        _wait_until_quiet(process)
        before = _own_bytes(process)
        polls += [_poll(made.address) for _ in range(scale.idle_polls)]
        _wait_until_quiet(process)

        def timed() -> Sample:
            cpu_started, started = _cpu_seconds(process), time.perf_counter()
            time.sleep(scale.latency_seconds)
            seconds, cpu = time.perf_counter() - started, _cpu_seconds(process) - cpu_started
            _check_waiting(polls)
            return Sample(len(polls), seconds, cpu, anon_bytes=max(0, _own_bytes(process) - before))

        yield timed
    finally:
        for poll in polls:
            poll.close()
        made.close()


def _poll(address: tuple[str, int]) -> socket.socket:
    made = socket.create_connection(address)
    head = f"POST /v1/queues/{QUEUE}/dequeue HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(_BODY)}\r\n\r\n"
    made.sendall(head.encode() + _BODY)
    return made


def _check_waiting(polls: list[socket.socket]) -> None:
    """One that was answered does not wait: it was refused, or its time was over."""
    watch = select.poll()
    for poll in polls:
        watch.register(poll, select.POLLIN)
    answered = watch.poll(0)
    if answered:
        first = next(poll for poll in polls if poll.fileno() == answered[0][0])
        raise LookupError(f"{len(answered)} of {len(polls)} polls do not wait: {first.recv(4096)!r}")


def _wait_until_quiet(process: int) -> None:
    """Until it has used no CPU to speak of for a while."""
    for _ in range(10):
        before = _cpu_seconds(process)
        time.sleep(_SETTLE_S / 2)
        if _cpu_seconds(process) - before < 0.01:
            return


def _own_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _cpu_seconds(process: int) -> float:
    """Of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
