"""Many named pipelines in one Spark application, one after the other or side by side.

A JVM for each one would cost almost a gigabyte and ten seconds.
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


# How an error of ours looks after it has passed through Spark's Python workers.
_OURS: Final = re.compile(r"holdfast\.errors\.(\w+): (.+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Full|Failed|Lost|Request)): (.+)$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)


def keep_pyspark_quiet() -> None:
    """Keep PySpark from logging an error to stderr before it raises it."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def in_words(error: Exception, where: str) -> Exception:
    """The error itself if it is one of ours; otherwise one with the cause in one sentence, without stack traces."""
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
        except TypeError:  # it has other arguments
            return PipelineFailed(f"{where}: {ours[2].strip()}")
    if isinstance(error, AnalysisException | ParseException):
        return BadSettings(f"{where}: {_STATE.sub('', text).strip().splitlines()[0]}")
    causes = _LAST.findall(text)
    words = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
    return PipelineFailed(f"{where}: {_STATE.sub('', words)}")


# Spark asks the source for news through Python, which is not worth doing more often.
LEAST_EVERY_MS = 100
_LOOK_S = 0.2
# Settings that tables depend on, whatever the user's session has. Days and times without a zone are UTC. Times have
# the type that lets readers skip parts of a file by time, which Spark's default does not. A file that was merged away
# before it was read must be an error, or its rows would be missing.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}


class Runner:
    """Runs pipelines of one project. `stop` may be called from any thread, and from a signal handler."""

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
        """Stop all pipelines, each after its current batch."""
        self._asked = True
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._asked

    def plan(self, names: Sequence[str]) -> list[Plan]:
        """What a run would read and write."""
        specs = self._project.in_order(names)
        return [kind_named(spec.kind).plan(self._context(spec)) for spec in specs]

    def run(
        self, names: Sequence[str], *, follow: bool = False, every_ms: int = 1_000, full_refresh: bool = False
    ) -> list[Outcome]:
        """Run these pipelines, each after the one that it reads from; with `follow`, all of them until `stop`."""
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
                self._stopping.set()  # the others must not go on without it

        threads = [Thread(target=run, args=(context,), name=f"pipeline {context.name}") for context in contexts]
        try:
            for thread in threads:
                thread.start()
            _wait_for(threads)
        finally:  # not even an interrupt may release the locks while something is written
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
        while thread.is_alive():  # a join without a timeout would block signals
            thread.join(_LOOK_S)


@contextmanager
def _settings_of(spark: SparkSession) -> Iterator[None]:
    """Use our settings for the block, then restore those of the session."""
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
    """Restore the handler of Ctrl-C after the block: a new session replaces it."""
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
    """Raise the first error, if there is one."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
