"""How much work a run does."""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

BATCH = 100
MIB = 1 << 20

# A pass is the smallest piece of timed work: two batches, or so many single puts.
PASS_MESSAGES = 2 * BATCH


@dataclass(frozen=True)
class Scale:
    """Every contestant gets the same time, not the same count: they differ by a factor of ten thousand."""

    body_bytes: int = 100
    seconds: float = 0.4
    warm_up_seconds: float = 0.05
    sample_bytes: int = 256 * MIB
    reopen_bytes: int = 1024 * MIB
    reopen_single_bytes: int = 128 * MIB
    reopen_peer_bytes: int = 64 * MIB
    arrow_messages: int = 100_000
    callers: int = 64
    killed_after: int = 300
    latency_seconds: float = 2.0
    delayed_seconds: float = 6.0
    delayed_far: int = 1_000_000
    idle_polls: int = 1000
    waiting: int = 1000
    """Messages in a queue that is in use, but not deep."""
    most_depth: int = 10_000_000
    spark_rows: int = 5_000_000
    spark_written_rows: int = 2_000_000
    spark_single_rows: int = 200_000
    spark_batches: int = 60
    beside_seconds: float = 3.0

    @property
    def most_messages(self) -> int:
        """Of one sample, so that a fast contestant does not fill the disk or the page cache."""
        return max(PASS_MESSAGES, self.sample_bytes // self.body_bytes)

    def bodies(self, count: int = PASS_MESSAGES) -> list[bytes]:
        """Distinct, incompressible, and ASCII, because some peers store text only."""
        source = random.Random(count)
        return [base64.b64encode(source.randbytes(self.body_bytes))[: self.body_bytes] for _ in range(count)]


def quick(body_bytes: int) -> Scale:
    """Enough to see that everything runs; its figures mean little."""
    return Scale(
        body_bytes,
        seconds=0.04,
        warm_up_seconds=0.01,
        sample_bytes=16 * MIB,
        reopen_bytes=32 * MIB,
        reopen_single_bytes=4 * MIB,
        reopen_peer_bytes=8 * MIB,
        arrow_messages=20_000,
        killed_after=50,
        latency_seconds=0.2,
        delayed_seconds=0.5,
        delayed_far=20_000,
        idle_polls=50,
        waiting=100,
        most_depth=10_000,
        spark_rows=30_000,
        spark_written_rows=20_000,
        spark_single_rows=3_000,
        spark_batches=5,
        beside_seconds=0.3,
    )


def passes_that_fill(run_pass: Callable[[], object], scale: Scale, messages_each: int) -> int:
    """Warm up, and learn from it how many passes take the scale's time."""
    passes, started, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < scale.warm_up_seconds:
        run_pass()
        passes += 1
        elapsed = time.perf_counter() - started
    most = max(1, scale.most_messages // messages_each)
    return max(1, min(most, round(passes / elapsed * scale.seconds)))
