"""What a take costs when many messages wait, beside what it costs when few do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.harness import Case, Operation, Timed
from bench.operations.takes import opened_queue, queue_case, timed_takes
from bench.queues import QUEUES, Queue
from bench.queues.ours import HoldfastQueueSynced
from bench.scale import Scale

DEPTH = Operation(
    "get + ack at depth",
    "As get + ack, with 1,000 messages waiting and with as many as its name says.",
    most_rounds=3,
    promise="ack",
)


def cases(scale: Scale) -> list[Case]:
    """Every queue twice; ours without syncs only, since it is not the sync that could grow with depth."""
    queues = [queue for queue in QUEUES if not issubclass(queue, HoldfastQueueSynced)]
    return [case for queue in queues for case in _pair(queue, scale)]


def _pair(queue: type[Queue], scale: Scale) -> Iterator[Case]:
    depth = min(queue.depth, scale.most_depth)
    if depth == 0:
        yield queue_case(
            DEPTH, queue, _nothing, not_run="not run: no put of many, and filling one by one takes minutes"
        )
        return
    yield queue_case(DEPTH, queue, partial(_at_depth, queue, scale.waiting, scale))
    yield queue_case(DEPTH, queue, partial(_at_depth, queue, depth, scale), name=f"{queue.name}, {depth:,} deep")


@contextmanager
def _at_depth(queue: type[Queue], depth: int, scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(queue, scale, folder) as made:
        yield timed_takes(made, made.take_each, scale, waiting=depth)


@contextmanager
def _nothing(folder: Path) -> Iterator[Timed]:
    yield lambda: 0
