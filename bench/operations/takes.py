"""Get and ack: alone, a hundred at a time, and the whole way of one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.child import Prepare, Sample
from bench.harness import Case, Operation, Timed
from bench.operations.puts import repeated
from bench.queues import QUEUES, Queue
from bench.scale import BATCH, Scale

GET_ACK = Operation(
    "get + ack",
    "One message at a time, one caller, 1,000 waiting; the puts are not timed.",
    promise="ack",
)
GET_ACK_MANY = Operation(
    f"get + ack many ({BATCH})",
    f"{BATCH} messages a call where there is such a call, else one by one; 1,000 waiting; the puts are not timed.",
    promise="ack",
)
ROUND_TRIP = Operation("put, get, ack", "One message at a time, one caller, through a queue that is else empty.")

# Short, because a round trip that syncs takes a millisecond.
_TRIPS = 10


def cases(scale: Scale) -> list[Case]:
    """Every queue."""
    single = [queue_case(GET_ACK, queue, partial(take_each, queue, scale)) for queue in QUEUES]
    many = [queue_case(GET_ACK_MANY, queue, partial(take_many, queue, scale)) for queue in QUEUES]
    trips = [queue_case(ROUND_TRIP, queue, partial(_round_trip, queue, scale)) for queue in QUEUES]
    return single + many + trips


def queue_case(
    operation: Operation, queue: type[Queue], prepare: Prepare, *, name: str = "", not_run: str = ""
) -> Case:
    """A case that carries what its queue says about itself."""
    return Case(
        operation,
        name or queue.name,
        prepare,
        queue.ack_survives if operation.promise == "ack" else queue.survives,
        queue.note,
        queue.needs,
        queue.programs,
        not_run,
    )


@contextmanager
def opened_queue(queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Queue]:
    """The queue, open in the folder; closed afterwards."""
    made = queue(scale.body_bytes)
    made.open(folder)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def take_each(queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(queue, scale, folder) as made:
        yield timed_takes(made, made.take_each, scale, waiting=scale.waiting)


@contextmanager
def take_many(queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened_queue(queue, scale, folder) as made:
        yield timed_takes(made, made.take_many, scale, waiting=scale.waiting)


@contextmanager
def _round_trip(queue: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    (body,) = scale.bodies(1)
    with opened_queue(queue, scale, folder) as made:

        def run_pass() -> None:
            for _ in range(_TRIPS):
                made.put(body)
                made.take_each(1)

        yield repeated(run_pass, scale, _TRIPS)


def timed_takes(
    queue: Queue, take: Callable[[int], None], scale: Scale, *, waiting: int, at_once: int = BATCH
) -> Timed:
    """Fill and warm up now; what is returned takes for the scale's time, and puts as many as it takes."""
    bodies = scale.bodies(at_once)
    for _ in range(waiting // at_once):
        queue.put_many(bodies)
    _takes(queue, take, bodies, scale.warm_up_seconds, scale.most_messages)
    return lambda: _takes(queue, take, bodies, scale.seconds, scale.most_messages)


def _takes(queue: Queue, take: Callable[[int], None], bodies: list[bytes], seconds: float, most: int) -> Sample:
    """The clock runs only while messages are taken, many at a time, so that reading it does not count."""
    messages, taken_s, cpu_s = 0, 0.0, 0.0
    while taken_s < seconds and messages < most:
        queue.put_many(bodies)
        cpu_started, started = time.process_time(), time.perf_counter()
        take(len(bodies))
        ended, cpu_ended = time.perf_counter(), time.process_time()
        messages += len(bodies)
        taken_s += ended - started
        cpu_s += cpu_ended - cpu_started
    return Sample(messages, taken_s, cpu_s)
