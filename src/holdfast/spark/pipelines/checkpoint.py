"""A pipeline's checkpoint: what it was made for, which batches are written, and how to start over.

_checkpoints/NAME/lock         the process that runs it
_checkpoints/NAME/spec.json    what it was made for
_checkpoints/NAME/id           a number that changes when the pipeline starts over
_checkpoints/NAME/forgetting   exists only while all of it is being removed
_checkpoints/NAME/runs.json    the last runs, and how each ended
_checkpoints/NAME/batches/     the batches that were written (see `Ledger`)
_checkpoints/NAME/run          the run whose streaming query may write (see `streams`)
_checkpoints/NAME/writing      locked while a batch of it is written
_checkpoints/NAME/uploads      what the names of files have that are being uploaded into a store
_checkpoints/NAME/spark/       Spark's own checkpoint, where the source is a topic
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, Final, Never

import msgspec

from holdfast.env import World
from holdfast.env.disk import FolderLocked, LakeDisk
from holdfast.errors import CorruptData, HoldfastError, InvalidRequest
from holdfast.spark.pipelines.spec import Context, Outcome, Project, Spec, Summary, kind_named
from holdfast.spark.pipelines.stores import LakeStore, remove_all, tables_at
from holdfast.storage.files import LOCK, durable_replace, join, read_file, remove_tree, take_lock

# The ledger lists the batches that a pipeline has written. Each has one small file, which makes the batch count:
#
#     _checkpoints/NAME/batches/000000000012.pending   batch 12 is decided; its files are being moved into the tables
#     _checkpoints/NAME/batches/000000000012.json      all of them are there
#     _checkpoints/NAME/batches/totals.json            the sum of older batches, which have no files of their own
#
# A pending batch is finished before anything else happens, from what its file says. Readers of the table take batches
# up to the last one that is finished.


_NAME: Final = re.compile(r"([0-9]{12})\.(json|pending)")
KEPT: Final = 1_000


class FileMove(msgspec.Struct, frozen=True):
    """A file or folder to move from staging into a table. Both paths are relative to the lake."""

    staged: str
    place: str


class TableChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a batch does to one Delta table, in one transaction. Paths are relative to the lake.

    The files that the batch adds below the table are added to it, or take the place of all others (`replaces`).
    If rows are `staged`, those are merged into the table instead: a row with the same `keys` is updated if `newer` is
    true, or removed if `deleted` is true as well; both are SQL on the old row `t` and the new one `s`.
    """

    table: str
    schema: str
    partition_by: tuple[str, ...] = ()
    replaces: bool = False
    staged: str | None = None
    keys: tuple[str, ...] = ()
    newer: str | None = None
    deleted: str | None = None


class RowTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rows: of one batch, or of several."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    quarantined: int = 0
    duplicates: int = 0
    expectations: dict[str, int] = {}

    def counts(self) -> dict[str, Any]:
        """The counts by their names."""
        return {name: getattr(self, name) for name in RowTotals.__struct_fields__}


class LedgerBatch(RowTotals, frozen=True, kw_only=True):
    """One batch: its counts, the files that it consists of (`adds`), and what it does to Delta tables (`changes`).

    `swaps` are folders that versions before Delta had decided to exchange. `through` is the last batch of the source's
    table that it includes, and `source_id` identifies the checkpoint that this batch belongs to. `offsets` are Spark's,
    if Spark decides what a batch holds. `state` belongs to the kind.
    """

    batch: int
    bytes: int = 0
    adds: tuple[FileMove, ...] = ()
    swaps: tuple[FileMove, ...] = ()
    changes: tuple[TableChange, ...] = ()
    through: int | None = None
    source_id: str | None = None
    offsets: str | None = None
    state: dict[str, Any] = {}
    at_ms: int = 0


class Totals(RowTotals, frozen=True, kw_only=True):
    """The sum of the batches up to `through`."""

    through: int = -1
    batches: int = 0

    def and_(self, batch: LedgerBatch) -> Totals:
        """The sum with one more batch."""
        sums = self.counts()
        failed = Counter(sums.pop("expectations"))
        failed.update(batch.expectations)
        sums = {name: count + getattr(batch, name) for name, count in sums.items()}
        return Totals(through=batch.batch, batches=self.batches + 1, expectations=dict(failed), **sums)


class Ledger:
    """The batches of one pipeline. Reading needs no lock. Only the holder of the checkpoint's lock writes."""

    def __init__(self, world: World, checkpoint: str) -> None:
        self._disk = world.disk
        self.folder = join(checkpoint, "batches")

    def numbers(self) -> list[int]:
        """The finished batches that are kept one by one, in order."""
        return self._numbered("json")

    def last(self) -> LedgerBatch | None:
        """The newest finished batch."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def read(self, number: int) -> LedgerBatch:
        return self._decode(_file(number, "json"))

    def after(self, number: int) -> list[LedgerBatch]:
        """The finished batches beyond this one. Those that are no longer kept one by one come as one."""
        totals, found = self._beyond(number)
        if number < totals.through:
            return [LedgerBatch(batch=totals.through, rows_out=totals.rows_out), *found]
        return found

    def totals(self) -> Totals:
        """Everything that was ever written."""
        totals, found = self._beyond(-1)
        for batch in found:
            totals = totals.and_(batch)
        return totals

    def pending(self) -> LedgerBatch | None:
        """The batch that is decided but not finished, if there is one."""
        numbers = self._numbered("pending")
        with suppress(FileNotFoundError):  # finished since we looked
            return self._decode(_file(numbers[-1], "pending")) if numbers else None
        return None

    def decide(self, batch: LedgerBatch) -> None:
        """From here on the batch counts, whatever happens."""
        self._disk.make_folder(self.folder)
        durable_replace(self._disk, self.folder, _file(batch.batch, "pending"), msgspec.json.encode(batch))

    def finish(self, batch: LedgerBatch) -> None:
        """All files of a decided batch are where they belong."""
        number = batch.batch
        self._disk.rename(join(self.folder, _file(number, "pending")), join(self.folder, _file(number, "json")))
        self._disk.sync_folder(self.folder)
        self._forget_old()

    def _beyond(self, number: int) -> tuple[Totals, list[LedgerBatch]]:
        """The sums, and the batches that are neither in them nor up to this one."""
        while True:
            totals = self._totals()
            with suppress(FileNotFoundError):  # the holder of the lock has just added it to the sums: look again
                first = max(number, totals.through) + 1
                return totals, [self.read(each) for each in self.numbers() if each >= first]

    def _forget_old(self) -> None:
        numbers = self.numbers()
        if len(numbers) < 2 * KEPT:
            return
        totals = self._totals()
        for number in numbers[:-KEPT]:
            if number > totals.through:
                totals = totals.and_(self.read(number))
        durable_replace(self._disk, self.folder, "totals.json", msgspec.json.encode(totals))
        for number in numbers[:-KEPT]:
            self._disk.remove(join(self.folder, _file(number, "json")))

    def _totals(self) -> Totals:
        content = read_file(self._disk, join(self.folder, "totals.json"))
        return Totals() if content is None else msgspec.json.decode(content, type=Totals)

    def _numbered(self, end: str) -> list[int]:
        try:
            names = self._disk.names(self.folder)
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NAME.fullmatch(name)) and found[2] == end]

    def _decode(self, name: str) -> LedgerBatch:
        path = join(self.folder, name)
        content = read_file(self._disk, path)
        if content is None:
            raise FileNotFoundError(path)
        try:
            return msgspec.json.decode(content, type=LedgerBatch)
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{path} is not what was written there ({error}); run the pipeline with --full-refresh to start over"
            ) from None


def ledger_of(context: Context, name: str | None = None) -> Ledger:
    """The ledger of the pipeline that runs, or of another one of its project."""
    return Ledger(context.world, context.project.checkpoint(name or context.name))


def _file(number: int, end: str) -> str:
    return f"{number:012d}.{end}"


class Tally:
    """Adds up the counts of a run's batches, and reports its progress."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._totals = Totals()
        self._files = 0
        self._noted_ns = context.world.clock.monotonic_ns()
        self.notes: list[str] = []
        self.lag: int | None = None

    @property
    def batches(self) -> int:
        return self._totals.batches

    def add(self, batch: LedgerBatch, lag: int | None = None) -> None:
        """Count a batch that was written. `lag` is the number of rows that the source has beyond it."""
        self._totals = totals = self._totals.and_(batch)
        self._files += len(batch.adds) + sum(each.staged is not None for each in batch.changes)
        self.lag = lag
        self._context.report(batch.batch, totals.rows_in, totals.rows_out, lag)
        now_ns = self._context.world.clock.monotonic_ns()
        if self._context.follow and now_ns - self._noted_ns >= PART_NS:
            context, seconds = self._context, (now_ns - self._noted_ns) / 1e9
            part = msgspec.structs.replace(without(self.summary(), context.noted), seconds=seconds)
            context.noted.append(part)
            self._noted_ns = now_ns
            note_run(context.world, context.project, Outcome(pipeline=context.name, summary=part))

    def summary(self, **details: Any) -> Summary:
        """The summary of the run so far."""
        return self._context.summary(
            batches=self.batches,
            files=self._files,
            lag=self.lag,
            notes=tuple(self.notes),
            details=details,
            **self._totals.counts(),
        )


# A run with `follow` may go on for weeks. What it did is noted every so often, as if it were a run of its own.
PART_NS: Final = 300_000_000_000
_COUNTED: Final = ("batches", "rows_in", "rows_out", "dropped", "quarantined", "duplicates", "files")


def without(done: Summary, parts: Sequence[Summary]) -> Summary:
    """What a run did beside these parts of it."""
    counts = {name: getattr(done, name) - sum(getattr(part, name) for part in parts) for name in _COUNTED}
    failed = {
        name: count - sum(part.expectations.get(name, 0) for part in parts) for name, count in done.expectations.items()
    }
    return msgspec.structs.replace(done, expectations=failed, **counts)


class NotedRun(RowTotals, frozen=True, kw_only=True):
    """One run: when it ended, and how. `ok` is false if it failed, or found something a person must look at."""

    at_ms: int
    ok: bool
    seconds: float = 0.0
    batches: int = 0
    lag: int | None = None
    error: str | None = None


def note_run(world: World, project: Project, outcome: Outcome) -> None:
    """Add a run to those that are kept. A run that cannot be noted has happened all the same."""
    done, at_ms = outcome.summary, world.clock.now_ns() // 1_000_000
    if done is None:
        noted = NotedRun(at_ms=at_ms, ok=False, error=str(outcome.error))
    else:
        noted = msgspec.convert({**msgspec.structs.asdict(done), "at_ms": at_ms}, NotedRun)
    runs = [*runs_of(world, project, outcome.pipeline), noted][-RUNS_KEPT:]
    with suppress(OSError):
        durable_replace(world.disk, project.checkpoint(outcome.pipeline), RUNS, msgspec.json.encode(runs))


def runs_of(world: World, project: Project, name: str) -> list[NotedRun]:
    """The last runs of a pipeline, oldest first."""
    content = read_file(world.disk, join(project.checkpoint(name), RUNS))
    try:
        return [] if content is None else msgspec.json.decode(content, type=list[NotedRun])
    except msgspec.MsgspecError:
        return []  # only figures are lost


RUN: Final = "run"
WRITING: Final = "writing"
UPLOADS: Final = "uploads"
SPARK: Final = "spark"
_LOOK_S: Final = 0.05


@contextmanager
def writing(world: World, checkpoint: str) -> Iterator[None]:
    """Let nobody else write a batch, or begin or end a run, during the block. Waits as long as somebody does."""
    lock = None
    while lock is None:
        try:
            lock = world.disk.lock(join(checkpoint, WRITING), b"")
        except FolderLocked:
            world.clock.wait(Event(), _LOOK_S)
    try:
        yield
    finally:
        lock.release()


def end_run(world: World, checkpoint: str) -> None:
    """After a batch that is being written now, no query of an earlier run writes any more."""
    if world.disk.exists(join(checkpoint, RUN)):
        with writing(world, checkpoint):
            world.disk.remove(join(checkpoint, RUN))


def sync_state(disk: LakeDisk, checkpoint: str, batch: int) -> None:
    """Sync the state that Spark has after this batch, whose rows are staged: the ledger is about to count on it."""
    folder = join(checkpoint, f"{SPARK}/state")
    folders = set()
    for name in disk.files_below(folder):
        version = posixpath.basename(name).lstrip(".").partition(".")[0]
        if not version.isdigit() or int(version) == batch + 1:
            with suppress(FileNotFoundError):  # of a task that was tried twice
                disk.sync_file(join(folder, name))
            folders.add(posixpath.dirname(name))
    for each in {above for name in folders for above in _and_above(name)}:
        disk.sync_folder(posixpath.normpath(join(folder, each)))


def _and_above(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = posixpath.dirname(folder)
    yield "."


RUNS = "runs.json"
RUNS_KEPT = 200
SPEC = "spec.json"
ID = "id"
FORGETTING = "forgetting"


@contextmanager
def held(world: World, project: Project, spec: Spec) -> Iterator[None]:
    """Lock the pipeline's checkpoint for the block. Raises Busy, which names the owner, if it is locked already."""
    folder = project.checkpoint(spec.name)
    LakeDisk().make_folder(project.home)
    world.disk.make_folder(folder)
    lock = take_lock(world, folder, f"Wait until that run of {spec.name} has ended, or end it")
    try:
        yield
    finally:
        lock.release()


def check_fit(world: World, project: Project, spec: Spec) -> None:
    """Raise InvalidRequest if the checkpoint was made with other options; note the options of a new one."""
    folder = project.checkpoint(spec.name)
    if not world.disk.exists(join(folder, ID)):
        durable_replace(world.disk, folder, ID, f"{world.ids.random_u32():08x}".encode())
    wanted = _identity(spec)
    content = read_file(world.disk, join(folder, SPEC))
    if content is None or not _is_used(world, folder):
        durable_replace(world.disk, folder, SPEC, msgspec.json.encode(wanted))
        return
    made_for = json.loads(content)
    for field in sorted(wanted):
        old, new = made_for.get(field), wanted.get(field)
        if old != new:
            raise InvalidRequest(
                f"the checkpoint of {spec.name} was made with {field} {_said(old)}, but it is now {_said(new)}: "
                "give the pipeline another name, or start over with "
                f"`holdfast pipeline run {spec.name} --full-refresh`, which removes its tables and reads everything "
                "again"
            )


def checkpoint_id(world: World, project: Project, name: str) -> str | None:
    """The number that changes when a pipeline starts over; None if it has not run yet."""
    content = read_file(world.disk, join(project.checkpoint(name), ID))
    return None if content is None else content.decode("ascii", "replace")


def _is_used(world: World, folder: str) -> bool:
    """Whether a batch was ever begun. Before that, options may change."""
    others = set(world.disk.names(folder)) - {LOCK, SPEC, ID, RUN, WRITING, UPLOADS, RUNS, "schema.json", SPARK}
    offsets = join(folder, f"{SPARK}/offsets")
    return bool(others) or (world.disk.exists(offsets) and bool(world.disk.names(offsets)))


def forget(world: World, project: Project, spec: Spec) -> None:
    """Remove the tables and the checkpoint of a pipeline, except for the lock that the caller holds.

    A table without its checkpoint would get its rows a second time, and a checkpoint without its table would not get
    them at all. So a note is written first and removed last: the next run finishes an interrupted removal.
    """
    checkpoint = project.checkpoint(spec.name)
    durable_replace(world.disk, checkpoint, FORGETTING, b"")
    tables = tables_at(project.lake)
    for folder in (
        project.table(spec.name),
        project.quarantine(spec.name),
        f"{project.lake}/_staging/{spec.name}",
        f"{project.lake}/_staging/{spec.name}.merging",
    ):
        if isinstance(tables, LakeStore):
            remove_all(tables, folder)
        else:
            remove_tree(world.disk, folder)
    if isinstance(tables, LakeStore):
        remove_tree(world.disk, f"{project.home}/{spec.name}")
    for name in world.disk.names(checkpoint):
        if name not in (LOCK, WRITING, FORGETTING):
            remove_tree(world.disk, join(checkpoint, name))
    for folder in (project.home, f"{project.home}/_staging", checkpoint):
        if world.disk.exists(folder):
            world.disk.sync_folder(folder)
    world.disk.remove(join(checkpoint, FORGETTING))


def is_half_forgotten(world: World, project: Project, spec: Spec) -> bool:
    """Whether a removal was interrupted."""
    return world.disk.exists(join(project.checkpoint(spec.name), FORGETTING))


def _identity(spec: Spec) -> dict[str, Any]:
    identity = {"kind": spec.kind, **kind_named(spec.kind).identity(spec.options)}
    plain: dict[str, Any] = json.loads(msgspec.json.encode(identity))
    return plain


def _said(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one pipeline over all of its runs. `lag` is what its source has beyond that, if it is known.

    A kind that has no batches, such as a report, shows the rows of its last run. `ok` is None before the first run.
    """

    pipeline: str
    kind: str
    batches: int
    last_batch: int | None
    last_batch_at_ms: int | None
    rows_in: int
    rows_out: int
    dropped: int
    quarantined: int
    duplicates: int
    expectations: dict[str, int]
    pending: bool
    lag: int | None
    last_run_at_ms: int | None
    ok: bool | None
    error: str | None


def status_of(world: World, project: Project, spec: Spec) -> PipelineStatus:
    """The status of a pipeline, read from its checkpoint without a session and without a lock."""
    ledger = Ledger(world, project.checkpoint(spec.name))
    totals, last = ledger.totals(), ledger.last()
    counts = totals.counts()
    run = next(reversed(runs_of(world, project, spec.name)), None)
    if last is None and run is not None:
        counts = run.counts()
    return PipelineStatus(
        pipeline=spec.name,
        kind=spec.kind,
        batches=totals.batches,
        last_batch=None if last is None else last.batch,
        last_batch_at_ms=None if last is None else last.at_ms,
        pending=ledger.pending() is not None,
        lag=_lag(world, project, spec),
        last_run_at_ms=None if run is None else run.at_ms,
        ok=None if run is None else run.ok,
        error=None if run is None else run.error,
        **counts,
    )


class _NeedsSession(Exception):
    """A plan asked for a Spark session."""


def _no_session() -> Never:
    raise _NeedsSession


def _lag(world: World, project: Project, spec: Spec) -> int | None:
    try:
        return kind_named(spec.kind).plan(Context(world=world, session=_no_session, project=project, spec=spec)).rows
    except (HoldfastError, _NeedsSession, OSError):
        return None
