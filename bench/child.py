"""One sample: fork, prepare, time, report. Wall time is the figure; CPU time helps to spot a noisy round."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

# Fork, not spawn: a spawned child would import everything again, 50 cases times some rounds.
# The harness itself starts no threads, so that forking it is safe.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Sample:
    """One round of one contestant."""

    messages: int
    seconds: float
    cpu_seconds: float
    p50_ns: float | None = None
    p99_ns: float | None = None
    """From one message's put to its get, where that is what was measured."""
    anon_bytes: int | None = None
    """Memory that the process had for itself at the end: no mapped file, no page cache. Where memory is what is
    measured, the peak."""
    worker_cpu_seconds: float | None = None
    """Of `cpu_seconds`, what Spark's Python workers burned."""


# What is timed: it does the work and answers how many messages that was. One that must leave something out
# of the time, or measures something else, holds the clock itself and answers with its sample.
Timed: TypeAlias = Callable[[], int | Sample]
Prepare: TypeAlias = Callable[[Path], AbstractContextManager[Timed]]


class TooSlow(Exception):
    """The contestant did not reach the pace at which it was to be measured: nothing failed, and there is no figure."""


class SampleFailed(Exception):
    """The child raised, died, or did not answer in time."""

    def __init__(self, problem: str, *, too_slow: bool = False) -> None:
        super().__init__(problem)
        self.too_slow = too_slow


def take_sample(prepare: Prepare, folder: Path, timeout_s: float) -> Sample:
    """Run one round in a child process of its own."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_report_sample, args=(prepare, folder, sender))
    process.start()
    sender.close()  # so that the child's death ends the pipe
    try:
        answer = _answer(receiver, timeout_s)
    finally:
        process.kill()
        process.join()
    if isinstance(answer, TooSlow):
        raise SampleFailed(str(answer), too_slow=True)
    if isinstance(answer, str):
        raise SampleFailed(answer)
    return answer


def _answer(receiver: Connection, timeout_s: float) -> Sample | TooSlow | str:
    if not receiver.poll(timeout_s):
        return f"no answer within {timeout_s:.0f} s"
    try:
        answer: Sample | TooSlow | str = receiver.recv()
    except EOFError:
        return "died without a word"
    return answer


def _report_sample(prepare: Prepare, folder: Path, sender: Connection) -> None:
    try:
        sender.send(_sample(prepare, folder))
    except TooSlow as problem:
        sender.send(problem)
    except BaseException as problem:  # everything must reach the parent, or it would wait in vain
        sender.send(one_line(problem))


def _sample(prepare: Prepare, folder: Path) -> Sample:
    with prepare(folder) as timed:
        gc.collect()
        gc.freeze()  # the harness's own objects: a collection must not walk (and copy) inherited pages
        cpu_started, started = time.process_time(), time.perf_counter()
        found = timed()
        ended, cpu_ended = time.perf_counter(), time.process_time()
        anon_bytes = own_memory_bytes()
    if isinstance(found, int):
        found = Sample(found, ended - started, cpu_ended - cpu_started)
    return found if found.anon_bytes is not None else replace(found, anon_bytes=anon_bytes)


def own_memory_bytes() -> int | None:
    """Anonymous resident memory of this process; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None


def one_line(problem: BaseException) -> str:
    """What happened and where, without a traceback across the progress bar."""
    last = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(last.filename).name}:{last.lineno})"
