"""Checks what each contestant says its put and its ack survive, as far as kill -9 can: nobody pulls a plug here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from bench.harness import Operation, Outcome, Timed, run
from bench.kill import fill_and_kill, take_and_kill
from bench.operations.puts import opened, peer_case
from bench.operations.takes import opened_queue, queue_case
from bench.peers import EVERYBODY, NOTHING, Peer
from bench.queues import QUEUES, Queue
from bench.scale import Scale

_KILLED = Operation("survives kill -9", "Put one by one, kill -9, open again, count.")
_ACKED = Operation("ack survives kill -9", "Put, ack a third, kill -9, open again, take the rest.", promise="ack")


class AckUndone(Exception):
    """A message came back though its ack had returned."""


@dataclass(frozen=True)
class Survivor:
    """What one contestant promised and what was found."""

    name: str
    survives: str
    note: str
    found: str
    call: Literal["put", "ack"] = "put"

    @property
    def broke_its_promise(self) -> bool:
        return self.found.startswith(("LOST", "UNDONE"))


def check_survival(scale: Scale, folder: Path) -> list[Survivor]:
    """Every contestant that is installed, once: the logs for their puts, the queues for their acks too."""
    puts = [peer_case(_KILLED, peer, partial(_count_after_kill, peer, scale)) for peer in EVERYBODY]
    acks = [queue_case(_ACKED, queue, partial(_left_after_kill, queue, scale)) for queue in QUEUES]
    found = run(puts + acks, folder, rounds=1, timeout_s=60)
    promises = [peer.survives for peer in EVERYBODY] + [queue.survives for queue in QUEUES]
    return [_survivor(outcome, promise, scale) for outcome, promise in zip(found, promises, strict=True)]


@contextmanager
def _count_after_kill(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    fill_and_kill(peer, scale, folder, scale.killed_after, batch=1)
    with opened(peer, scale, folder) as queue:
        yield queue.read_all


@contextmanager
def _left_after_kill(queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies(scale.killed_after)
    acked = bodies[: len(bodies) // 3]
    take_and_kill(queue, folder, bodies, len(acked))
    with opened_queue(queue, scale, folder) as made:
        yield lambda: _left(made, set(acked))


def _left(queue: Queue, acked: set[bytes]) -> int:
    found = list(iter(lambda: _taken(queue), None))
    if back := acked.intersection(found):
        raise AckUndone(f"{len(back)} of {len(acked)} acked came back")
    return len(found)


def _taken(queue: Queue) -> bytes | None:
    if (taken := queue.get(0)) is None:
        return None
    queue.ack(taken.receipt)
    return taken.body


def _survivor(outcome: Outcome, put_survives: str, scale: Scale) -> Survivor:
    case, expected = outcome.case, scale.killed_after
    if case.operation.promise == "ack":
        expected -= expected // 3
    found = _found(outcome, expected, promised=put_survives != NOTHING)
    return Survivor(case.contestant, case.survives, case.note, found, case.operation.promise)


def _found(outcome: Outcome, expected: int, *, promised: bool) -> str:
    if outcome.problem.startswith(AckUndone.__name__):
        text = outcome.problem.removeprefix(f"{AckUndone.__name__}: ").partition(" (")[0]  # not where it was raised
        return text if outcome.case.survives == NOTHING else f"UNDONE: {text}"
    if outcome.status != "measured":
        return f"{outcome.status}: {outcome.problem}"
    kept = min(outcome.samples[0].messages, expected)
    text = f"{kept} of {expected}"
    if kept < expected and promised:
        return f"LOST {expected - kept}: {text}"
    return text
