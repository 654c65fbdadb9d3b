"""Batches of a pipeline: what is read for one, what is expected of its rows, and how they are written.

A condition that is null for a row is not met by it.

The ledger of a pipeline also holds how far it has read its source, in the same file that makes a batch count. So rows
are never written without being noted, nor noted without being written.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from holdfast.errors import BadSettings, ExpectationFailed, InvalidRequest
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.checkpoint import (
    FileMove,
    LedgerBatch,
    RowTotals,
    TableChange,
    Tally,
    checkpoint_id,
    ledger_of,
)
from holdfast.spark.pipelines.lake import (
    additions,
    change,
    commit,
    finish_pending,
    fitted,
    quoted,
    read_table,
    rows_in_files,
    stage,
    staged_rows,
    with_missing,
)
from holdfast.spark.pipelines.parquet import BATCH
from holdfast.spark.pipelines.spec import (
    Context,
    Expectation,
    LakeOptions,
    OnFail,
    PipelineKind,
    PipelineOptions,
    Plan,
    Positive,
    Read,
    Summary,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


# A column with the reasons why a row cannot be used at all, whatever is expected of it. A kind may fill it.
REASONS: Final = "_reasons"
_FAILED: Final = "_failed"
# A column of staged rows that change a table: whether the row removes its key.
_DELETED: Final = "_deleted"
_IS_DELETED: Final = f"s.{_DELETED}"
OURS: Final = (REASONS, _FAILED, _DELETED)


def names_that(expectations: Iterable[Expectation], *actions: OnFail) -> list[str]:
    """The names of the expectations with one of these actions."""
    return [each.name for each in expectations if each.on_fail in actions]


def unmet_sql(expectations: Sequence[Expectation]) -> str:
    """SQL for the names of the expectations that a row does not meet, as an array."""
    parts = [f"IF(coalesce(({each.check}), false), NULL, '{each.name}')" for each in expectations]
    return f"array_compact(array({', '.join(parts)}))" if parts else "cast(array() as array<string>)"


def check_columns(rows: DataFrame, expectations: Iterable[Expectation], where: str) -> None:
    """Raise BadSettings if a condition cannot be used on these rows, before any of them is read."""
    from pyspark.errors import AnalysisException, ParseException

    for each in expectations:
        try:
            kind = dict(rows.limit(0).selectExpr(f"({each.check}) AS met").dtypes)["met"]
        except (AnalysisException, ParseException) as error:
            words = str(error).partition("\n")[0].partition(" SQLSTATE")[0]
            raise BadSettings(f"{where}: the check of {each.name!r}, {each.check}, cannot be used: {words}") from None
        if kind != "boolean":
            raise BadSettings(f"{where}: the check of {each.name!r}, {each.check}, is {kind}: it must be true or false")


class Sorted:
    """Rows sorted by expectations: `good` go on, `bad` are quarantined, and `counts` tells how many of each.

    If the rows are used for more than one output (`kept`), they are counted by a query of their own. Otherwise they are
    counted while `good` is written, and the counts are there after that.
    If a row does not meet `first`, nothing else is expected of it.
    """

    def __init__(
        self, rows: DataFrame, expectations: Sequence[Expectation], *, kept: bool, first: Expectation | None = None
    ) -> None:
        from pyspark.sql import Observation

        unmet = f.expr(unmet_sql(expectations))
        if first is not None:
            unmet = f.when(f.expr(first.check), unmet).otherwise(f.expr(unmet_sql([first])))
            expectations = [first, *expectations]
        self._expectations = expectations
        aside, reasons = _any_of(names_that(expectations, "quarantine")), f.col(_FAILED)
        if REASONS in rows.columns:  # a row that cannot be used at all is not checked any further
            unmet = f.when(f.size(REASONS) == 0, unmet).otherwise(f.expr(unmet_sql(())))
            aside, reasons = aside | (f.size(REASONS) > 0), f.concat(REASONS, _FAILED)
        marked = rows.withColumn(_FAILED, unmet)
        dropped = ~aside & _any_of(names_that(expectations, "drop"))
        counts = [f.count(f.lit(1)).alias("rows"), _count_of(dropped, "dropped"), _count_of(aside, "quarantined")]
        for number, each in enumerate(expectations):
            counts.append(_count_of(f.array_contains(_FAILED, each.name), f"failed_{number}"))
        self._sums = marked.agg(*counts)
        self._observed = None if kept else Observation()
        counted = marked if self._observed is None else marked.observe(self._observed, *counts)
        self.good = counted.where(~aside & ~dropped).drop(_FAILED, REASONS)
        self.bad = marked.where(aside).withColumn(REASONS, reasons).drop(_FAILED)

    def counts(self, where: str) -> RowTotals:
        """The counts. Raises ExpectationFailed if a row does not meet an expectation with `on_fail: fail`."""
        found = self._sums.collect()[0].asDict() if self._observed is None else self._observed.get
        failed = {each.name: found[f"failed_{number}"] or 0 for number, each in enumerate(self._expectations)}
        check_failures(failed, self._expectations, where)
        rows, dropped, quarantined = found["rows"], found["dropped"] or 0, found["quarantined"] or 0
        return RowTotals(
            rows_in=rows,
            rows_out=rows - dropped - quarantined,
            dropped=dropped,
            quarantined=quarantined,
            expectations=failed,
        )


def check_failures(failed: Mapping[str, int], expectations: Iterable[Expectation], where: str) -> None:
    """Raise ExpectationFailed if rows do not meet an expectation with `on_fail: fail`."""
    for each in expectations:
        count = failed.get(each.name, 0)
        if each.on_fail == "fail" and count:
            rows = "1 row does" if count == 1 else f"{count} rows do"
            raise ExpectationFailed(
                f"{where}: {rows} not meet {each.name!r} ({each.check}); nothing of this batch was written. "
                "Fix the rows at their source, or set them aside with on_fail: quarantine"
            )


def _count_of(condition: Column, name: str) -> Column:
    return f.sum(condition.cast("long")).alias(name)


def _any_of(names: list[str]) -> Column:
    if not names:
        return f.lit(False)
    return f.arrays_overlap(f.col(_FAILED), f.array(*map(f.lit, names)))


class Upsert(msgspec.Struct, frozen=True, kw_only=True):
    """How rows change a table instead of being added to it: a row takes the place of that with the same `keys`.

    Of several, the one with the largest `latest_by` counts, also against the table's. A row for which the SQL `deleted`
    is true removes its key.
    """

    keys: tuple[str, ...]
    latest_by: str | None = None
    deleted: str | None = None

    @property
    def newer(self) -> str | None:
        """SQL that is true if the new row `s` counts, and not the table's `t`."""
        if self.latest_by is None:
            return None
        name = quoted(self.latest_by)
        return f"t.{name} IS NULL OR s.{name} >= t.{name}"


PIPELINE: Final = "_pipeline"
Change = Callable[["DataFrame"], "DataFrame"]


def _unchanged(rows: DataFrame) -> DataFrame:
    return rows


def write_batch(
    context: Context,
    number: int,
    rows: DataFrame,
    *,
    partition_by: Sequence[str],
    first: Expectation | None = None,
    also: Sequence[Expectation] = (),
    good: Change = _unchanged,
    bad: Change = _unchanged,
    redriven: int | None = None,
    upsert: Upsert | None = None,
    **facts: Any,
) -> LedgerBatch:
    """Write rows as one batch: those that meet the expectations to the table, and others to its quarantine.

    If a row does not meet `first`, nothing else is expected of it. `also` is expected beside what the options say.
    `good` and `bad` turn the rows of either sort into those that are written; rows that `good` leaves out count as
    duplicates. If the rows are those of the quarantine (`redriven` is their number), those left take its place.
    With `upsert`, rows of the table are changed, and the expectations see the rows that change it.
    `facts` are other fields of the ledger's entry, such as how far the source was read, or ones that it knows better.
    """
    expectations = [*also, *context.options.expect]
    two_outputs = REASONS in rows.columns or bool(names_that(expectations, "quarantine"))
    kept = rows.persist() if two_outputs else rows
    batch = f.lit(number).cast("long")
    try:
        found = Sorted(kept, expectations, kept=two_outputs, first=first)
        usable = good(found.good).withColumn(BATCH, batch)
        if upsert is None:
            staged, moves, changes = _added(context, context.table, usable, partition_by, number)
        else:
            staged, moves, changes = _merged(context, usable, partition_by, upsert)
        counts = found.counts(context.name)
        if counts.quarantined or redriven is not None:
            aside = bad(found.bad).withColumn(PIPELINE, f.lit(context.name)).withColumn(BATCH, batch)
            _, more, other = _added(context, context.quarantine, aside, (), number, replaces=redriven is not None)
            moves, changes = moves + more, changes + other
    finally:
        if two_outputs:
            kept.unpersist()
    rows_out = rows_in_files(context, staged)
    facts = counts.counts() | {"rows_out": rows_out, "duplicates": counts.rows_out - rows_out} | facts
    if redriven is not None:  # they came in before
        facts |= {"rows_in": 0, "quarantined": counts.quarantined - redriven}
    changes += facts.pop("changes", ())
    return commit(context, LedgerBatch(batch=number, adds=tuple(moves), changes=tuple(changes), **facts))


def _added(
    context: Context, table: str, rows: DataFrame, partition_by: Sequence[str], number: int, *, replaces: bool = False
) -> tuple[str, list[FileMove], list[TableChange]]:
    """Stage rows for a table: where they are, and what makes them a part of it."""
    rows = fitted(context, table, rows)
    staged = stage(context, rows, posixpath.basename(table), partition_by, table=table)
    moves = additions(context, staged, table, number)
    is_delta = context.options.format == "delta"
    made = [change(context, table, rows, partition_by, replaces=replaces)] if is_delta and (moves or replaces) else []
    return staged, moves, made


def _merged(
    context: Context, rows: DataFrame, partition_by: Sequence[str], upsert: Upsert
) -> tuple[str, list[FileMove], list[TableChange]]:
    """Stage rows that change the table: where they are, and what is done with them."""
    if upsert.latest_by is not None:
        whole, keys = f.struct(*map(quoted, rows.columns)), map(quoted, upsert.keys)
        rows = rows.groupBy(*keys).agg(f.max_by(whole, quoted(upsert.latest_by)).alias("_row")).select("_row.*")
    rows = with_missing(context, context.table, fitted(context, context.table, rows))
    deleted = None if upsert.deleted is None else _IS_DELETED
    if upsert.deleted is not None:
        rows = rows.withColumn(_DELETED, f.coalesce(f.expr(upsert.deleted), f.lit(False)))
    staged = stage(context, rows, posixpath.basename(context.table), ())
    if upsert.latest_by is None:
        _check_keys(context, staged_rows(context, staged, rows.schema), upsert)
    how = {"staged": posixpath.relpath(staged, context.project.lake), "keys": upsert.keys}
    made = change(context, context.table, rows.drop(_DELETED), partition_by, newer=upsert.newer, deleted=deleted, **how)
    return staged, [], [made]


def _check_keys(context: Context, rows: DataFrame, upsert: Upsert) -> None:
    """Raise InvalidRequest if a batch has two rows of one key: which of them counts would be left to chance."""
    keys = list(map(quoted, upsert.keys))
    twice = rows.groupBy(*keys).count().where("count > 1").limit(1).collect()
    if twice:
        values = ", ".join(f"{name} {twice[0][name]}" for name in upsert.keys)
        raise InvalidRequest(
            f"{context.name}: a batch has several rows with {values}, and the table keeps one: choose it with "
            "latest_by, a column that is larger for newer rows"
        )


# From one table to the next: a batch consists of batches that the source has finished and this pipeline has not read.


_TRIES: Final = 5
# The kinds that only add rows to their tables. Only such tables can be read from where the last batch ended.
ADDED_TO: Final = ("land", "refine", "python")
_SLOW: Final = "failed to connect back"
_GONE: Final = ("FILE_NOT_EXIST", "FileNotFoundException", "PATH_NOT_FOUND")

Answer = TypeVar("Answer")


def retried(action: Callable[[], Answer], tries: int, *words: str) -> Answer:
    """Call `action` until it does not fail with one of these words in its error, `tries` times at most."""
    for _ in range(tries - 1):
        try:
            return action()
        except Exception as error:
            if not any(word in str(error) for word in words):
                raise
    return action()


def patiently(action: Callable[[], Answer]) -> Answer:
    """Call `action`, again if Spark's Python worker took too long to start, before which nothing has happened."""
    return retried(action, _TRIES, _SLOW)


def reading_files(action: Callable[[], Answer]) -> Answer:
    """Call `action`, again if files of a table were merged between listing and reading them."""
    return retried(action, _TRIES, *_GONE)


class StepOptions(LakeOptions, frozen=True, kw_only=True):
    """Options of the kinds that read another pipeline's table."""

    max_rows_per_batch: Positive = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one batch is made of: the rows of some batches of the source. `previous` is the batch before.

    `count` is the number of rows, from the ledger of the source. `redriven` is the same if they are of the quarantine.
    """

    batch: int
    through: int
    source_id: str | None
    rows: DataFrame
    count: int
    previous: LedgerBatch | None
    redriven: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """How far the source was read, for the ledger."""
        return {"through": self.through, "source_id": self.source_id}


Write = Callable[["Context", Slice], LedgerBatch]


def step_kind(
    options: type[PipelineOptions],
    template: str,
    *,
    sources: Sequence[str],
    write: Write,
    note: Callable[[Context], str],
    identity: Callable[[Any], dict[str, Any]],
) -> PipelineKind:
    """A kind that reads a table of these kinds batch by batch, and writes each with `write`. `note` is for its plan."""

    def plan(context: Context) -> Plan:
        check_source(context, context.options.source, sources)
        return plan_steps(context, note(context))

    def run(context: Context) -> Summary:
        check_source(context, context.options.source, sources)
        return run_steps(context, write)

    return PipelineKind(options, plan, run, template, identity=identity)


def check_source(context: Context, name: str, kinds: Sequence[str]) -> None:
    """Raise BadSettings if a source is of another kind, or if its rows change, so that it cannot be read on."""
    source = context.project.spec(name)
    if source.kind not in kinds:
        raise BadSettings(
            f"{context.name}: its source {source.name} is of the kind {source.kind}: it must be {' or '.join(kinds)}"
        )
    if getattr(source.options, "upsert_by", ()):
        raise BadSettings(
            f"{context.name}: its source {source.name} has upsert_by: rows that change cannot be read incrementally. "
            "A function "
            "can have the whole of it: name it in tables"
        )


def run_steps(context: Context, write: Write) -> Summary:
    """Read the source batch by batch until there is no more; with `follow`, until the run is stopped."""
    finish_pending(context)
    tally = Tally(context)
    if context.from_quarantine:
        _redrive(context, write, tally)
        return tally.summary()
    while not context.stopping.is_set():
        if not reading_files(lambda: _one_batch(context, write, tally)):
            if not context.follow:
                break
            context.stopping.wait(context.every_ms / 1000)
    tally.lag = sum(batch.rows_out for batch in _waiting(context, ledger_of(context).last()))
    return tally.summary()


def _redrive(context: Context, write: Write, tally: Tally) -> None:
    """Try the rows of the quarantine once more, as one batch. Those that still cannot be used stay there."""
    previous = ledger_of(context).last()
    name = posixpath.basename(context.quarantine)
    aside = None if previous is None else read_table(context, name, through=previous.batch)
    count = 0 if aside is None else aside.count()
    if aside is None or previous is None or not count:
        tally.notes.append("there is nothing in the quarantine")
        return
    batch = write(
        context,
        Slice(
            batch=previous.batch + 1,
            through=_position(previous),
            source_id=previous.source_id,
            rows=aside.drop(*OURS, PIPELINE),
            count=count,
            previous=previous,
            redriven=count,
        ),
    )
    tally.notes.append(f"{-batch.quarantined} of {count} rows left the quarantine")
    tally.add(batch)


def plan_steps(context: Context, *notes: str) -> Plan:
    """What `run_steps` would read."""
    last = ledger_of(context).last()
    _checked_source_id(context, last)
    read = Read.of_batches(context.options.source, _position(last), _waiting(context, last))
    return context.plan([read], notes=notes)


def _one_batch(context: Context, write: Write, tally: Tally) -> bool:
    """Write the next batch. Returns False if the source has nothing new."""
    previous = ledger_of(context).last()
    source_id = _checked_source_id(context, previous)
    waiting = _waiting(context, previous)
    if not waiting:
        return False
    number = 0 if previous is None else previous.batch + 1
    through = last_within(waiting, context.options.max_rows_per_batch)
    rows = read_table(context, context.options.source, after=_position(previous), through=through)
    if rows is None:  # the source quarantined every row
        state = previous.state if previous else {}
        batch = commit(context, LedgerBatch(batch=number, through=through, source_id=source_id, state=state))
    else:
        count = sum(each.rows_out for each in waiting if each.batch <= through)
        batch = write(
            context,
            Slice(batch=number, through=through, source_id=source_id, rows=rows, count=count, previous=previous),
        )
    tally.add(batch, sum(each.rows_out for each in waiting if each.batch > through))
    return True


def _checked_source_id(context: Context, previous: LedgerBatch | None) -> str | None:
    """The id of the source's checkpoint. Raises InvalidRequest if it changed: the source then counts from 0 again."""
    source_id = checkpoint_id(context.world, context.project, context.options.source)
    if previous is not None and previous.source_id != source_id:
        raise InvalidRequest(
            f"{context.name}: its source {context.options.source} was started over since this table was written: "
            f"start this one over too, with `holdfast pipeline run {context.name} --full-refresh`"
        )
    return source_id


def _position(last: LedgerBatch | None) -> int:
    return -1 if last is None or last.through is None else last.through


def _waiting(context: Context, last: LedgerBatch | None) -> list[LedgerBatch]:
    """The batches of the source that are not in the table yet."""
    return ledger_of(context, context.options.source).after(_position(last))


def last_within(waiting: list[LedgerBatch], most_rows: int) -> int:
    """The last batch of a source to read: as many as have `most_rows` rows together, but at least one."""
    totals = accumulate(batch.rows_out for batch in waiting)
    fitting = [batch.batch for batch, rows in zip(waiting, totals, strict=True) if rows <= most_rows]
    return fitting[-1] if fitting else waiting[0].batch
