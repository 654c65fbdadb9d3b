"""A model checker of histories: is there an order of the calls in which each did what it said?

A history is linearizable if every call can be given one instant between its start and its end, so that the calls, in
the order of these instants, are what one caller alone could have seen. The search is that of Wing and Gong, with two
additions of Porcupine: histories are divided by key, and a set of calls that was already tried with the same states is
not tried again.

A model says what a call does to a state: `step` returns the states that are possible afterwards, none if the call
cannot have had this outcome. A call whose outcome is not known has no end: it may have happened at any time after its
start, or not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Call = TypeVar("Call")
State = TypeVar("State", bound=Hashable)

NEVER = math.inf  # the end of a call whose outcome is not known
MOST_STEPS = 2_000_000


@dataclass(frozen=True)
class Timed(Generic[Call]):
    """A call, when it began, and when its outcome was known."""

    call: Call
    began: float
    ended: float


@dataclass
class Outcome(Generic[Call]):
    """What the search found. `longest` is the longest order that was possible, `stuck` what could not follow it."""

    good: bool
    steps: int
    longest: list[Call]
    stuck: list[Call]
    gave_up: bool = False


def by_key(calls: Iterable[Timed[Call]], key: Callable[[Call], Hashable]) -> dict[Hashable, list[Timed[Call]]]:
    """The calls of each key. Keys have nothing to do with each other, so each is searched by itself."""
    found: dict[Hashable, list[Timed[Call]]] = defaultdict(list)
    for each in calls:
        found[key(each.call)].append(each)
    return dict(found)


def linearize(
    calls: Sequence[Timed[Call]],
    start: State,
    step: Callable[[State, Call], Iterable[State]],
    most_steps: int = MOST_STEPS,
) -> Outcome[Call]:
    """Look for an order of the calls that a single caller could have seen."""
    order = sorted(calls, key=lambda each: (each.began, each.ended))
    must = sum(1 << at for at, each in enumerate(order) if each.ended != NEVER)
    tried: set[tuple[int, frozenset[State]]] = set()
    path: list[int] = []
    best: list[int] = []
    steps = 0
    first: frozenset[State] = frozenset([start])
    pending = [(0, first, iter(_next(order, 0)))]
    while pending:
        done, states, candidates = pending[-1]
        if done & must == must:
            return Outcome(True, steps, [order[at].call for at in path], [])
        for at in candidates:
            steps += 1
            after = frozenset(new for state in states for new in step(state, order[at].call))
            if not after or (order[at].ended == NEVER and after <= states):
                continue  # impossible; or not known to have happened, and without effect
            now = done | 1 << at
            if (now, after) in tried:
                continue
            tried.add((now, after))
            path.append(at)
            pending.append((now, after, iter(_next(order, now))))
            break
        else:
            if len(path) >= len(best):
                best = list(path)
            pending.pop()
            if path:
                path.pop()
        if steps > most_steps:
            return Outcome(False, steps, [order[at].call for at in best], [], gave_up=True)
    reached = sum(1 << at for at in best)
    stuck = [order[at].call for at in _next(order, reached)]
    return Outcome(not must, steps, [order[at].call for at in best], stuck)


def _next(order: Sequence[Timed[Call]], done: int) -> list[int]:
    """The calls that may come next: those that began before any other one that is left had ended."""
    found: list[int] = []
    first_end = NEVER
    for at, each in enumerate(order):
        if each.began > first_end:
            break  # they are in the order of their starts
        if not done >> at & 1:
            found.append(at)
            first_end = min(first_end, each.ended)
    return sorted(found, key=lambda at: order[at].ended)
