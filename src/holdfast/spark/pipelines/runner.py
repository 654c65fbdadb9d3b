"""Many named pipelines in one Spark application, one after the other or side by side.

A JVM for each would cost most of a gigabyte and ten seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from signal import SIGINT, getsignal, signal
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.env import World, real_world
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest, PipelineFailed
from holdfast.spark.pipelines.checkpoint import check_fit, forget, held, is_half_forgotten
from holdfast.spark.pipelines.spec import Context, Outcome, Plan, Progress, Project, Spec, kind_named, located

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What goes wrong inside of Spark, as one sentence: the cause, without two languages' stacks.


# How an error of ours reads when it has been through Spark's Python workers.
_OURS: Final = re.compile(r"holdfast\.errors\.(\w+): (.+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Full|Failed|Lost|Request)): (.+)$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)


def keep_pyspark_quiet() -> None:
    """PySpark logs its errors on stderr before it raises them; whoever catches one decides what is said."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def in_words(error: Exception, where: str) -> Exception:
    """The same error, where it is one of ours; else one that says what happened."""
    if isinstance(error, HoldfastError | OSError | KeyboardInterrupt):
        return error
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    if not isinstance(error, PySparkException):
        return PipelineFailed(f"{where}: {type(error).__name__}: {error}")
    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        from holdfast import errors

        kind = getattr(errors, ours[1], PipelineFailed)
        try:
            return kind(f"{where}: {ours[2].strip()}")
        except TypeError:  # one that wants to know more
            return PipelineFailed(f"{where}: {ours[2].strip()}")
    if isinstance(error, AnalysisException | ParseException):
        return BadSettings(f"{where}: {_STATE.sub('', text).strip().splitlines()[0]}")
    causes = _LAST.findall(text)
    words = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
    return PipelineFailed(f"{where}: {_STATE.sub('', words)}")


# A source is asked for news through Python: more often than this costs more than it brings.
LEAST_EVERY_MS = 100
_LOOK_S = 0.2
# What tables depend on, whatever the session of somebody's own has: days and times without a zone are UTC. Times are
# as Parquet has them today: with what Spark writes by default nobody can skip parts of a file by time. A file that was
# merged away while it was to be read must be an error, or its rows would be left out.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}


class Runner:
    """Runs pipelines of one project. `stop` may be called from anywhere, a signal handler too."""

    def __init__(
        self,
        project: Project,
        *,
        spark: SparkSession | None = None,
        world: World | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._project = located(project)
        self._spark = spark
        self._world = real_world() if world is None else world
        self._tell = tell
        self._starting = Lock()
        self._stopping = Event()
        self._asked = False

    def stop(self) -> None:
        """End what runs, between two batches."""
        self._asked = True
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for that."""
        return self._asked

    def plan(self, names: Sequence[str]) -> list[Plan]:
        """What a run would read and write."""
        specs = self._project.in_order(names)
        return [kind_named(spec.kind).plan(self._context(spec)) for spec in specs]

    def run(
        self, names: Sequence[str], *, follow: bool = False, every_ms: int = 1_000, full_refresh: bool = False
    ) -> list[Outcome]:
        """Run these pipelines, each behind the one that it reads from; `follow` runs them until `stop`."""
        specs = self._project.in_order(names)
        if follow:
            _check_follow(specs, every_ms)
        with ExitStack() as locks:
            for spec in specs:
                locks.enter_context(held(self._world, self._project, spec))
            for spec in specs:
                if full_refresh or is_half_forgotten(self._world, self._project, spec):
                    forget(self._world, self._project, spec)
                check_fit(self._world, self._project, spec)
            locks.enter_context(_settings_of(self._session()))
            if follow:
                return self._side_by_side([self._context(spec, follow=True, every_ms=every_ms) for spec in specs])
            return self._one_by_one(specs)

    def _one_by_one(self, specs: Sequence[Spec]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        for spec in specs:
            before = outcomes.get(spec.options.source or "")
            if before is not None and before.error is not None:
                error = InvalidRequest(f"{spec.name} was not run: {before.pipeline}, its source, failed")
                outcomes[spec.name] = Outcome(pipeline=spec.name, error=error)
            elif not self._stopping.is_set():
                outcomes[spec.name] = _outcome(self._context(spec))
        return list(outcomes.values())

    def _side_by_side(self, contexts: Sequence[Context]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}

        def run(context: Context) -> None:
            outcomes[context.name] = _outcome(context)
            if outcomes[context.name].error is not None:
                self._stopping.set()  # somebody must look: nothing goes on half

        threads = [Thread(target=run, args=(context,), name=f"pipeline {context.name}") for context in contexts]
        try:
            for thread in threads:
                thread.start()
            _wait_for(threads)
        finally:  # an interrupt, too, must not free the locks while something is still written
            self._stopping.set()
            _wait_for(threads)
        return [outcomes[context.name] for context in contexts]

    def _context(self, spec: Spec, *, follow: bool = False, every_ms: int = 1_000) -> Context:
        return Context(
            world=self._world,
            session=self._session,
            project=self._project,
            spec=spec,
            follow=follow,
            every_ms=every_ms,
            stopping=self._stopping,
            tell=self._tell,
        )

    def _session(self) -> SparkSession:
        with self._starting:
            keep_pyspark_quiet()
            if self._spark is None:
                from holdfast.spark.session import session

                with _signals_kept():
                    self._spark = session("holdfast pipelines")
            return self._spark


def _wait_for(threads: Sequence[Thread]) -> None:
    for thread in threads:
        while thread.is_alive():  # a plain join would keep signals waiting
            thread.join(_LOOK_S)


@contextmanager
def _settings_of(spark: SparkSession) -> Iterator[None]:
    """Our settings for the time of a run, then those that the session had."""
    former = {name: spark.conf.get(name, None) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, before in former.items():
            if before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """A new session takes Ctrl-C for itself; what it does is for whoever started the run to say."""
    if current_thread() is not main_thread():
        yield
        return
    former = getsignal(SIGINT)
    try:
        yield
    finally:
        signal(SIGINT, former)


def _outcome(context: Context) -> Outcome:
    clock = context.world.clock
    began_ns = clock.monotonic_ns()
    try:
        summary = kind_named(context.spec.kind).run(context)
        seconds = (clock.monotonic_ns() - began_ns) / 1e9
        return Outcome(pipeline=context.name, summary=msgspec.structs.replace(summary, seconds=seconds))
    except Exception as error:
        return Outcome(pipeline=context.name, error=in_words(error, context.name))


def _check_follow(specs: Sequence[Spec], every_ms: int) -> None:
    if every_ms < LEAST_EVERY_MS:
        raise InvalidRequest(f"a pipeline looks for news every {LEAST_EVERY_MS} ms at most, not every {every_ms} ms")
    for spec in specs:
        if not kind_named(spec.kind).follows:
            raise InvalidRequest(f"{spec.name} is of the kind {spec.kind}, which has an end: run it without --follow")


def raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the first error, for those who expect one."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
