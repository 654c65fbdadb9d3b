"""How late delayed messages are when much comes in meanwhile: from the due time until consumers can get them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import holdfast
from bench.child import Sample
from bench.harness import OURS, Case, Operation, Timed
from bench.operations.latency import quantile
from bench.peers import KILL
from bench.scale import BATCH, Scale
from holdfast.broker.partition import Partition

_FAR_S = (3_600, 90_000)
_PATIENCE_S = 120.0


def cases(scale: Scale) -> list[Case]:
    """Ours alone: no peer stores delayed messages in this process."""
    steady = [(f"delayed, {rate:,}/s come in", rate, 0) for rate in (1_000, 15_000)]
    loaded = f"delayed, {scale.delayed_far:,} wait, 1,000/s come in"
    many = [*steady, ("delayed, as many come in as can", 0, 0), (loaded, 1_000, scale.delayed_far)]
    return [Case(_operation(name), OURS, partial(_late, rate, far, scale), survives=KILL) for name, rate, far in many]


def _operation(name: str) -> Operation:
    return Operation(
        name,
        "How late: from the due time until the message can be got. Put by the hundred, due after 0.5 to 3 seconds.",
        measures="latency",
        most_rounds=3,
    )


@contextmanager
def _late(rate: int, far: int, scale: Scale, folder: Path) -> Iterator[Timed]:
    with holdfast.open(folder / "queue", durability="os") as queue:
        chance, body = random.Random(1), scale.bodies(1)[0]
        for _ in range(far // 1_000):
            queue.put_many([_due(body, chance.uniform(*_FAR_S)) for _ in range(1_000)])
        yield partial(_sample, queue, rate, scale, body)


def _sample(queue: holdfast.Queue[bytes], rate: int, scale: Scale, body: bytes) -> Sample:
    partition = queue._port.deliveries[0].partition
    chance, seen = random.Random(2), _Seen(partition)
    started, cpu_started, count, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
    while elapsed < scale.delayed_seconds:
        if rate and count >= rate * elapsed:
            time.sleep(0.001)
        else:
            queue.put_many([_due(body, chance.uniform(0.5, 3.0)) for _ in range(BATCH)])
            count += BATCH
        elapsed = time.perf_counter() - started
    while partition.log.end < count and time.perf_counter() - started < elapsed + _PATIENCE_S:
        time.sleep(0.01)
    late_ns = sorted(map(float, seen.late_ns(count)))
    if len(late_ns) < count:
        raise RuntimeError(f"{len(late_ns)} of {count} messages came due within {_PATIENCE_S:.0f} s")
    return Sample(
        count,
        elapsed,
        time.process_time() - cpu_started,
        p50_ns=quantile(late_ns, 0.50),
        p99_ns=quantile(late_ns, 0.99),
    )


def _due(body: bytes, delay_s: float) -> holdfast.NewMessage:
    return holdfast.NewMessage(body=body, delay=delay_s)


class _Seen:
    """Stands in line as a group does, and only notes when which messages could be got."""

    def __init__(self, partition: Partition) -> None:
        self._log = partition.log
        self._at: list[tuple[int, int]] = []
        partition.lines.append(self)  # type: ignore[arg-type]

    def wake(self, messages: int) -> None:
        """Some have become readable."""
        self._at.append((self._log.end, time.time_ns()))

    def late_ns(self, most: int) -> Iterator[int]:
        """How late each message was, in the order of the log."""
        times = iter(self._at)
        end, at_ns = 0, 0
        for record in islice((record for frame in self._log.read(0) for record in frame.records()), most):
            while end <= record.offset:
                end, at_ns = next(times)
            yield at_ns - record.due_at_ms * 1_000_000
