"""The figures to reach (docs: DESIGN, section 8), beside the figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from bench.harness import OURS
from bench.scale import Scale
from bench.stats import Summary

Summaries: TypeAlias = Mapping[str, Summary]


@dataclass(frozen=True)
class Target:
    """A figure for one of our rows; `reached` answers None where this run cannot tell."""

    operation: str
    contestant: str
    text: str
    reached: Callable[[Summaries], bool | None]


@dataclass(frozen=True)
class Verdict:
    """A target, and whether this run reached it."""

    text: str
    reached: bool | None

    def __str__(self) -> str:
        word = {True: "reached", False: "NOT reached", None: "not judged in this run"}[self.reached]
        return f"{self.text}: {word}"


def _at_most_ns(limit: float, contestant: str = OURS) -> Callable[[Summaries], bool | None]:
    return lambda found: found[contestant].median_ns <= limit


def _p99_at_most_ns(limit: float) -> Callable[[Summaries], bool | None]:
    return lambda found: None if (p99_ns := found[OURS].p99_ns) is None else p99_ns <= limit


def _at_most_seconds(limit: float, contestant: str = OURS) -> Callable[[Summaries], bool | None]:
    return lambda found: found[contestant].seconds <= limit


def _times_faster(times: float, *peers: str) -> Callable[[Summaries], bool | None]:
    """Than the fastest of the peers that were measured."""

    def reached(found: Summaries) -> bool | None:
        ratios = [found[peer].ratio or 0.0 for peer in peers if peer in found]
        return min(ratios) >= times if ratios else None

    return reached


def _at_most_bytes(limit: float, contestant: str) -> Callable[[Summaries], bool | None]:
    """Of anonymous memory; None where the system does not tell."""

    def reached(found: Summaries) -> bool | None:
        held = found[contestant].anon_bytes
        return None if held is None else held <= limit

    return reached


def _at_most_times_ours(times: float, contestant: str) -> Callable[[Summaries], bool | None]:
    """Of the time that our plain row took in the same run."""

    def reached(found: Summaries) -> bool | None:
        ratio = found[contestant].ratio
        return None if ratio is None else ratio <= times

    return reached


def _as_ours(contestant: str) -> Callable[[Summaries], bool | None]:
    return _at_most_times_ours(1.2, contestant)


def _at_most_times_peer(times: float, peer: str) -> Callable[[Summaries], bool | None]:
    """Of the time that a peer took in the same run."""

    return _beside_peer(times, OURS, peer)


def _beside_peer(times: float, contestant: str, peer: str) -> Callable[[Summaries], bool | None]:
    """A row of ours that is not the plain one beside a peer, in the same run."""

    def reached(found: Summaries) -> bool | None:
        if contestant not in found or peer not in found:
            return None
        return found[contestant].median_ns <= times * found[peer].median_ns

    return reached


def _as_small(found: Summaries) -> bool | None:
    """The peak with large segments is that with small ones."""
    small, large = (found[name].anon_bytes if name in found else None for name in (OURS, _LARGE))
    return None if small is None or large is None else large <= 1.2 * small


_NO_INDEX = f"{OURS}, indexes deleted"
_LARGE = f"{OURS}, 512 MiB segments"
PARQUET = "Spark Parquet, uncompressed"
PARQUET_ZSTD = "Spark Parquet, zstd"
RATE = "Spark rate source"
FLOOR = "Spark, a Python source that does nothing"
_BY_FUNCTION = f"{OURS}, read()"
_LANDED = f"{OURS}, table()"
_DEEP = f"{OURS}, 10,000,000 deep"
_PARTITIONED = f"{OURS}, 3 partitions"
_DELAYED = (
    "delayed, 1,000/s come in",
    "delayed, 15,000/s come in",
    "delayed, as many come in as can",
    "delayed, 1,000,000 wait, 1,000/s come in",
)

TARGETS = (
    Target("put", OURS, "≤ 1.0 µs", _at_most_ns(1000)),
    Target("put", OURS, "≥ 20× SQLite-based queues", _times_faster(20, "SQLite WAL, NORMAL", "litequeue")),
    Target("put many (100)", OURS, "≤ 150 ns", _at_most_ns(150)),
    Target("put from Arrow", OURS, "≤ 60 ns", _at_most_ns(60)),
    Target("durable put, 64 tasks", OURS, "≥ 100k/s", _at_most_ns(1e9 / 100_000)),
    Target("get + ack", OURS, "≤ 4 µs", _at_most_ns(4000)),
    Target("get + ack many (100)", OURS, "≤ 0.6 µs", _at_most_ns(600)),
    Target("publish by producer (1,000)", OURS, "≥ 1,000,000/s", _at_most_ns(1000)),
    Target("publish by producer (1,000)", _PARTITIONED, "the speed of one log (within 20 %)", _as_ours(_PARTITIONED)),
    Target("stream poll (500)", OURS, "≥ 1,500,000/s", _at_most_ns(1e9 / 1_500_000)),
    Target("group: receive + ack many (1,000)", OURS, "≥ 1,000,000/s", _at_most_ns(1000)),
    Target("get + ack at depth", _DEEP, "as at 1,000 (within 20 %)", _as_ours(_DEEP)),
    Target("get + ack at depth", _DEEP, "≤ 150 MB of memory", _at_most_bytes(150e6, _DEEP)),
    *[Target(operation, OURS, "p99 ≤ 100 ms", _p99_at_most_ns(100e6)) for operation in _DELAYED],
    Target("Spark read", OURS, "faster than zstd Parquet", _at_most_times_peer(1, PARQUET_ZSTD)),
    Target("Spark read", OURS, "≤ 1.5× uncompressed Parquet", _at_most_times_peer(1.5, PARQUET)),
    Target("Spark read, random values", OURS, "faster than zstd Parquet", _at_most_times_peer(1, PARQUET_ZSTD)),
    Target("Spark read, random values", OURS, "≤ 1.5× uncompressed Parquet", _at_most_times_peer(1.5, PARQUET)),
    Target("Spark read, load()", OURS, "≤ 1.6× uncompressed Parquet", _at_most_times_peer(1.6, PARQUET)),
    Target("Spark read, load()", _BY_FUNCTION, "≤ 1.6× uncompressed Parquet", _beside_peer(1.6, _BY_FUNCTION, PARQUET)),
    Target("Spark read, load()", _LANDED, "≤ 1.1× uncompressed Parquet", _beside_peer(1.1, _LANDED, PARQUET)),
    Target("Spark write", OURS, "≤ 1.1× uncompressed Parquet", _at_most_times_peer(1.1, PARQUET)),
    Target("Spark micro-batch", OURS, "≤ 1.2× the rate source", _at_most_times_peer(1.2, RATE)),
    Target("Spark first query", OURS, "≤ 1.3× plain Spark", _at_most_times_peer(1.3, PARQUET)),
    Target("Spark worker's memory", _LARGE, "as with small segments (within 20 %)", _as_small),
    Target("server: idle long polls", OURS, "≤ 50 MB for 1,000", _at_most_bytes(50e6, OURS)),
    Target("open after kill", OURS, "1 GiB in ≤ 1 s", _at_most_seconds(1)),
    Target("open after kill", _NO_INDEX, "1 GiB in ≤ 3 s", _at_most_seconds(3, _NO_INDEX)),
)


def verdicts(operation: str, contestant: str, found: Summaries, scale: Scale) -> list[Verdict]:
    """What is to be said about one row. The targets are for full runs with 100-byte messages only."""
    like_for_like = scale == Scale()
    return [
        Verdict(target.text, target.reached(found) if like_for_like else None)
        for target in TARGETS
        if (target.operation, target.contestant) == (operation, contestant) and contestant in found
    ]
