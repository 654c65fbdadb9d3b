"""Runs the contestants of each operation side by side: A B C, A B C, … each time in a fresh process.

Interleaving spreads the machine's moods over everybody; a fresh process keeps one contestant's memory,
threads and open files away from the next. Nothing here knows a queue: a `Case` brings its own preparation.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from bench.child import Prepare, Sample, SampleFailed, Timed, one_line, take_sample
from bench.programs import Program, missing_programs

__all__ = ["OURS", "Case", "Operation", "Outcome", "Timed", "by_operation", "missing_modules", "run", "sample_count"]

OURS = "holdfast"

Status: TypeAlias = Literal["measured", "skipped", "failed", "too slow"]


@dataclass(frozen=True)
class Operation:
    """One thing that is measured. An "opening" is judged by its whole time, "latency" by its median, "memory" by
    its peak, all else by the time for a message; "beside" others, the CPU time says what is the message's own;
    "idle" is what those cost who wait.
    """

    name: str
    about: str
    measures: Literal["messages", "opening", "latency", "beside", "memory", "idle", "spark"] = "messages"
    most_rounds: int = 1000
    promise: Literal["put", "ack"] = "put"
    """Which call it is whose lasting the table names."""


class Host(Protocol):
    """What takes too long to start for each sample: it runs from its first sample until all are taken."""

    def running(self, folder: Path) -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Case:
    """One contestant of one operation; `prepare` fills a folder, warms up, and yields what is timed."""

    operation: Operation
    contestant: str
    prepare: Prepare
    survives: str = ""
    note: str = ""
    needs: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()
    not_run: str = ""
    """Why it is left out on purpose."""
    host: Host | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is Holdfast, in whatever variant ("holdfast, indexes deleted")."""
        return self.contestant == OURS or self.contestant.startswith(f"{OURS},")


@dataclass
class Outcome:
    """What came of a case: its samples, or why there are none."""

    case: Case
    samples: list[Sample] = field(default_factory=list)
    status: Status = "measured"
    problem: str = ""


def run(
    cases: Iterable[Case],
    folder: Path,
    *,
    rounds: int,
    timeout_s: float = 300.0,
    on_sample: Callable[[Case, int], None] = lambda case, round_number: None,
) -> list[Outcome]:
    """Measure all cases, operation by operation; `on_sample` hears of each sample before it is taken."""
    outcomes = [_outcome_before(case) for case in cases]
    with ExitStack() as stack:
        hosts = _Hosts(stack, folder)
        for operation, group in by_operation(outcomes):
            for round_number in range(min(rounds, operation.most_rounds)):
                for outcome in group:
                    on_sample(outcome.case, round_number)
                    hosts.start_for(outcome)
                    if outcome.status == "measured":
                        _add_sample(outcome, folder, timeout_s)
    return outcomes


class _Hosts:
    """Those that run; one that does not start fails the cases that need it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._problems: dict[int, str] = {}

    def start_for(self, outcome: Outcome) -> None:
        host = outcome.case.host
        if host is None or outcome.status != "measured":
            return
        if id(host) not in self._problems:
            self._problems[id(host)] = ""
            try:
                self._stack.enter_context(host.running(self._folder))
            except Exception as problem:
                self._problems[id(host)] = one_line(problem)
        if self._problems[id(host)]:
            outcome.status, outcome.problem = "failed", self._problems[id(host)]


def by_operation(outcomes: Iterable[Outcome]) -> list[tuple[Operation, list[Outcome]]]:
    """The outcomes of each operation together, in the order in which they first came."""
    groups: dict[Operation, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.case.operation, []).append(outcome)
    return list(groups.items())


def sample_count(cases: Sequence[Case], rounds: int) -> int:
    """How many samples a run takes: the length of its progress bar."""
    return sum(min(rounds, case.operation.most_rounds) for case in cases)


def missing_modules(names: Iterable[str]) -> list[str]:
    """Those of the modules that are not installed here; looks without importing the last part."""
    return [name for name in names if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _outcome_before(case: Case) -> Outcome:
    if case.not_run:
        return Outcome(case, status="skipped", problem=case.not_run)
    missing = missing_modules(case.needs) + missing_programs(case.programs)
    if missing:
        return Outcome(case, status="skipped", problem=f"not installed: {', '.join(missing)}")
    return Outcome(case)


def _add_sample(outcome: Outcome, folder: Path, timeout_s: float) -> None:
    """A contestant that fails once is out: half a set of rounds would not be comparable."""
    place = folder / "round"
    place.mkdir(parents=True)
    try:
        outcome.samples.append(take_sample(outcome.case.prepare, place, timeout_s))
    except SampleFailed as problem:
        outcome.status, outcome.problem = "too slow" if problem.too_slow else "failed", str(problem)
    finally:
        # Removing also drops dirty pages, so that the next contestant does not pay for this one's writes.
        shutil.rmtree(place)
