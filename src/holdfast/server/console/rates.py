"""How fast messages came and went lately: a few samples of what the engine counts, kept in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice, pairwise
from typing import Final, TypeAlias

import msgspec

from holdfast.broker.broker import BrokerEngine

EVERY_S: Final = 5.0
KEPT: Final = 121  # samples: ten minutes
MOST: Final = 500  # groups of which samples are kept

WIDTH: Final = 120  # of the picture, in its own units
HEIGHT: Final = 24

Key: TypeAlias = tuple[str, str]
Counts: TypeAlias = tuple[int, int, int]

_NONE: Final[Counts] = (0, 0, 0)


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What went through a group, a second: lately, and as lines over time. `buried` is a number, of all that time."""

    into: list[float]
    out: list[float]
    buried: int

    @property
    def into_now(self) -> float:
        return _lately(self.into)

    @property
    def out_now(self) -> float:
        return _lately(self.out)


class Rates:
    """Samples of the counters of all open topics; the oldest make room for the newest."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._samples: deque[tuple[float, dict[Key, Counts]]] = deque(maxlen=KEPT)
        self.since_ns = 0

    def begin(self) -> None:
        """Take a sample now, and then every few seconds, if that was not begun before. Call it from the loop."""
        if not self.since_ns:
            self.since_ns = self._engine.world.clock.now_ns()
            self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._engine.closed:
            self.sample(loop.time())
            loop.call_later(EVERY_S, self._go_on, loop)

    def sample(self, at_s: float) -> None:
        """What is counted by now; no file is read for it."""
        found: dict[Key, Counts] = {}
        for topic in self._engine.open_topics():
            published = topic.metrics.published.value
            found[topic.name, ""] = published, 0, 0
            for group in list(topic.groups.values()):
                found[topic.name, group.name] = published, group.metrics.acked.value, group.metrics.buried.value
            if len(found) > MOST:
                break
        self._samples.append((at_s, dict(islice(found.items(), MOST))))

    @property
    def seconds(self) -> float:
        """How much time the samples cover."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def of(self, topic: str, group: str = "") -> Flow:
        """The flow through a group, or into a topic."""
        key, into, out, buried = (topic, group), [], [], 0
        for (before_s, before), (after_s, after) in pairwise(list(self._samples)):
            passed_s = max(after_s - before_s, 0.001)
            grown = [_growth(old, new) for old, new in zip(before.get(key, _NONE), after.get(key, _NONE), strict=True)]
            into.append(grown[0] / passed_s)
            out.append(grown[1] / passed_s)
            buried += grown[2]
        return Flow(into=into, out=out, buried=buried)


def _growth(before: int, after: int) -> int:
    """How much a counter grew; one that is smaller than before began anew, when its topic was opened again."""
    return after - before if after >= before else after


def _lately(line: list[float]) -> float:
    last = line[-3:]
    return sum(last) / len(last) if last else 0.0


def points(line: list[float], most: float) -> str:
    """A line as the points of a polyline in the picture; the newest is at its right edge."""
    return " ".join(
        f"{_across(i, line):.1f},{HEIGHT - 1 - (HEIGHT - 2) * (value / most if most else 0):.1f}"
        for i, value in enumerate(line)
    )


def area(line: list[float], most: float) -> str:
    """The same with all that is below it."""
    if not line:
        return ""
    return f"{_across(0, line):.1f},{HEIGHT} {points(line, most)} {WIDTH},{HEIGHT}"


def _across(i: int, line: list[float]) -> float:
    return WIDTH - WIDTH / (KEPT - 2) * (len(line) - 1 - i)
