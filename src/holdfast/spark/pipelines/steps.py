"""From one table to the next: the batches that the source has finished and this pipeline has not yet taken.

How far it is stands in its own ledger, in the same file that makes a batch count. So there is no moment at which rows
are written and not noted, or noted and not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.pipelines.checkpoint import checkpoint_id
from holdfast.spark.pipelines.context import Plan, Read, Summary
from holdfast.spark.pipelines.lake import finish_pending, read_table
from holdfast.spark.pipelines.ledger import Batch, Ledger, Tally
from holdfast.spark.pipelines.spec import Options, Positive, Spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark.pipelines.context import Context

_TRIES: Final = 5
# The kinds that only add rows to their tables.
ADDED_TO: Final = ("land", "refine", "python")
GONE: Final = ("FILE_NOT_EXIST", "FileNotFoundException", "PATH_NOT_FOUND")


class StepOptions(Options, frozen=True, kw_only=True):
    """Options of the kinds that read another pipeline's table."""

    max_rows_per_batch: Positive = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one batch is made of: the rows of some batches of the source; `previous` is the batch before."""

    batch: int
    through: int
    source_id: str | None
    rows: DataFrame
    previous: Batch | None


Write = Callable[["Context", Slice], Batch]


def source_of(context: Context) -> Spec:
    """The pipeline whose table is read."""
    source = context.options.source
    if source is None:
        raise InvalidRequest(f"{context.name} has no source: name the pipeline that it reads from, source: NAME")
    return context.project.spec(source)


def check_kind_of_source(context: Context, *kinds: str) -> None:
    """Only tables to which rows are added can be read on from where one was: in others they change."""
    source = source_of(context)
    if source.kind not in kinds:
        raise BadSettings(
            f"{context.name}: its source {source.name} is of the kind {source.kind}: it must be {' or '.join(kinds)}"
        )


def run_steps(context: Context, write: Write) -> Summary:
    """Take what the source has, batch by batch, until there is no more; with `follow` until told to stop."""
    finish_pending(context)
    tally = Tally(context)
    while not context.stopping.is_set():
        if not _one_batch(context, write, tally):
            if not context.follow:
                break
            context.stopping.wait(context.every_ms / 1000)
    tally.lag = _rows_left(context)
    return tally.summary()


def plan_steps(context: Context, *notes: str) -> Plan:
    """What `run_steps` would read."""
    source = source_of(context)
    last = Ledger(context.world, context.checkpoint).last()
    _checked_source_id(context, last)
    position = _position(last)
    waiting = _source_ledger(context).after(position)
    rows = sum(batch.rows_out for batch in waiting)
    size = sum(batch.bytes for batch in waiting)
    first = str(position + 1)
    read = Read(
        what=f"table {source.name}",
        start=f"batch {first}",
        end=f"batch {waiting[-1].batch}" if waiting else "nothing new",
        rows=rows,
        bytes=size,
    )
    return Plan(
        pipeline=context.name,
        kind=context.spec.kind,
        reads=(read,),
        rows=rows,
        bytes=size,
        writes=(context.table,),
        notes=notes,
    )


def _one_batch(context: Context, write: Write, tally: Tally) -> bool:
    """Whether there was anything to take."""
    previous = Ledger(context.world, context.checkpoint).last()
    position = _position(previous)
    for attempt in range(1, _TRIES + 1):
        source_id = _checked_source_id(context, previous)
        waiting = _source_ledger(context).after(position)
        if not waiting:
            return False
        through = _limit(waiting, context.options.max_rows_per_batch)
        try:
            batch = _write(context, write, previous, source_id, through)
        except Exception as error:
            # Files of the source were merged between our listing and our reading them: list them again.
            if attempt == _TRIES or not any(word in str(error) for word in GONE):
                raise
        else:
            tally.add(batch, sum(each.rows_out for each in waiting if each.batch > through))
            return True
    raise AssertionError


def _write(context: Context, write: Write, previous: Batch | None, source_id: str | None, through: int) -> Batch:
    number = 0 if previous is None else previous.batch + 1
    source = context.project.table(source_of(context).name)
    rows = read_table(context.spark, context.disk, source, after=_position(previous), through=through)
    if rows is None:  # batches that put every row aside
        state = previous.state if previous else {}
        batch = Batch(batch=number, through=through, source_id=source_id, state=state)
        ledger = Ledger(context.world, context.checkpoint)
        ledger.decide(batch)
        ledger.finish(batch)
        return batch
    piece = Slice(batch=number, through=through, source_id=source_id, rows=rows, previous=previous)
    return write(context, piece)


def _checked_source_id(context: Context, previous: Batch | None) -> str | None:
    """Batches are counted from 0 again where the source began anew: what was taken is not what these numbers say."""
    source_id = checkpoint_id(context.world, context.project, source_of(context).name)
    if previous is not None and previous.source_id != source_id:
        raise InvalidRequest(
            f"{context.name}: its source {source_of(context).name} was begun anew since this table was written: "
            f"begin this one anew, too, `holdfast pipeline run {context.name} --full-refresh`"
        )
    return source_id


def _position(last: Batch | None) -> int:
    return -1 if last is None or last.through is None else last.through


def _limit(waiting: list[Batch], most_rows: int) -> int:
    """How far to go in one batch: at least one of the source's, and no more rows than these beyond that."""
    through, rows = waiting[0].batch, waiting[0].rows_out
    for batch in waiting[1:]:
        rows += batch.rows_out
        if rows > most_rows:
            break
        through = batch.batch
    return through


def _rows_left(context: Context) -> int:
    position = _position(Ledger(context.world, context.checkpoint).last())
    return sum(batch.rows_out for batch in _source_ledger(context).after(position))


def _source_ledger(context: Context) -> Ledger:
    return Ledger(context.world, context.project.checkpoint(source_of(context).name))
