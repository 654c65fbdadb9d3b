"""`python`: pipelines of your own, each a function from DataFrames to one: of new rows, or of streams."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.spark.pipelines.batches import (
    ADDED_TO,
    OURS,
    Slice,
    StepOptions,
    Upsert,
    check_columns,
    check_source,
    patiently,
    plan_steps,
    run_steps,
    write_batch,
)
from holdfast.spark.pipelines.checkpoint import LedgerBatch, ledger_of
from holdfast.spark.pipelines.lake import DATE, finish_pending, is_delta, read_table
from holdfast.spark.pipelines.parquet import BATCH
from holdfast.spark.pipelines.spec import Context, Expectation, PipelineKind, Plan, Spec, Summary, read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Function = TypeVar("Function", bound=Callable[..., Any])
_ALL: Final = 2**62
_MARK: Final = "__holdfast_pipeline__"


class PythonOptions(StepOptions, frozen=True, kw_only=True):
    """Options of `python`. `function` is the function's name, if it is not that of the pipeline.

    With `source`, the function is called for each batch with its new rows; with `sources`, once for each run, with
    streams. The whole of each of `tables` follows.
    """

    function: str | None = None
    partition_by: tuple[str, ...] | None = None
    sources: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    output_mode: Literal["append", "update"] = "append"
    upsert_by: str | tuple[str, ...] = ()
    latest_by: str | None = None
    delete_when: str | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.sources):
            raise BadSettings(
                "a pipeline of your own needs a source: the name of one that writes a table, or several as sources: "
                "[NAME, NAME], which are read as streams"
            )
        if len(set(self.sources)) < len(self.sources):
            raise BadSettings("a source is named twice: name it once, and use its DataFrame as often as you like")
        if not self.keys and (self.latest_by is not None or self.delete_when is not None):
            raise BadSettings("latest_by and delete_when are about rows that change: name their key with upsert_by")
        if self.keys and self.format != "delta":
            raise BadSettings("rows of plain Parquet files cannot change: leave out format, or upsert_by")
        if self.output_mode == "update" and not (self.sources and self.keys):
            raise BadSettings(
                "with output_mode: update, a stream sends a row again when it changes: give it sources, and the key "
                "of the row as upsert_by"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.upsert_by,) if isinstance(self.upsert_by, str) else self.upsert_by

    @property
    def upsert(self) -> Upsert | None:
        return Upsert(keys=self.keys, latest_by=self.latest_by, deleted=self.delete_when) if self.keys else None

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.sources, *self.tables)


def pipeline(
    *,
    source: str | None = None,
    sources: Sequence[str] = (),
    tables: Sequence[str] = (),
    name: str | None = None,
    expect: Sequence[dict[str, Any]] = (),
    partition_by: Sequence[str] | None = None,
    max_rows_per_batch: int = 5_000_000,
    output_mode: str = "append",
    upsert_by: str | Sequence[str] = (),
    latest_by: str | None = None,
    delete_when: str | None = None,
) -> Callable[[Function], Function]:
    """Make a function a pipeline: it gets the rows of its source or sources as DataFrames, and returns one.

        @pipeline(source="orders-silver", upsert_by="id")
        def orders_by_id(rows):
            return rows.where("country IS NOT NULL")

    Args:
        source: The pipeline whose new rows the function gets, batch by batch.
        sources: Instead: pipelines that the function gets as streams, once per run.
        tables: Further pipelines, of whose tables the function gets all rows.
        name: The name of the pipeline; by default that of the function, with `-` for `_`.
        expect: Expectations: mappings with `name`, `check` and `on_fail`.
        partition_by: The columns that name the folders of the table; by default `dt`, if there is such a column.
        max_rows_per_batch: The maximum number of source rows at a time; but never less than one batch of the source.
        output_mode: With `sources` and `upsert_by`: `update` writes a row again whenever it changes.
        upsert_by: One or more columns: a new row with the same values replaces the old one.
        latest_by: With `upsert_by`: of several rows, the one with the largest value in this column counts.
        delete_when: With `upsert_by`: a condition in SQL; a row that meets it removes its key.

    Returns:
        A decorator, which returns the function itself.

    Raises:
        BadSettings: An option is missing or has a value that cannot be used; raised when the function is decorated.
    """

    def mark(function: Function) -> Function:
        given = {
            "source": source,
            "sources": list(sources),
            "tables": list(tables),
            "expect": list(expect),
            "max_rows_per_batch": max_rows_per_batch,
            "partition_by": None if partition_by is None else list(partition_by),
            "output_mode": output_mode,
            "upsert_by": upsert_by if isinstance(upsert_by, str) else list(upsert_by),
            "latest_by": latest_by,
            "delete_when": delete_when,
        }
        said = name or function.__name__.replace("_", "-")
        options = read_options(PythonOptions, given, said)
        setattr(function, _MARK, Spec(name=said, kind="python", options=options, function=function))
        return function

    return mark


def marked(value: object) -> Spec | None:
    """The pipeline that `pipeline` made of a function; None for anything else."""
    spec = getattr(value, _MARK, None)
    return spec if isinstance(spec, Spec) else None


def executed(path: str, where: str) -> ModuleType:
    """The module that a Python file of the user is. Raises BadSettings, with the line that is wrong."""
    spec = spec_from_file_location("holdfast_user_pipelines", path)
    if spec is None or spec.loader is None:
        raise BadSettings(f"{where}: {path} is not a Python file: name one that ends in .py")
    module = module_from_spec(spec)
    modules[module.__name__] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    except HoldfastError:
        raise
    except FileNotFoundError:
        raise BadSettings(f"{where}: there is no file {path}: create it, or correct the name") from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f", line {lines[-1]}" if lines else ""
        raise BadSettings(f"{path}{line}: {type(error).__name__}: {error}") from None
    finally:
        del modules[
            module.__name__
        ]  # so that Spark sends functions to its workers by value: they cannot import the module
    return module


def _plan(context: Context) -> Plan:
    options: PythonOptions = context.options
    _check(context)
    notes = [f"by the function {_name(context)}", *(f"reads all of table {name}" for name in options.tables)]
    if not options.sources:
        return plan_steps(context, *notes)
    from holdfast.spark.pipelines.streams import reads_of

    return context.plan(reads_of(context, options.sources), notes=notes)


def _run(context: Context) -> Summary:
    _check(context)
    return _run_streams(context) if context.options.sources else run_steps(context, _write)


def _check(context: Context) -> None:
    for name in (*context.options.sources, *filter(None, [context.options.source])):
        check_source(context, name, ADDED_TO)
    for name in context.options.tables:
        kind = context.project.spec(name).kind
        if kind not in (*ADDED_TO, "aggregate", "compact"):
            raise BadSettings(
                f"{context.name}: {name}, one of its tables, is of the kind {kind}, which has no table: leave it out"
            )


def _run_streams(context: Context) -> Summary:
    """Call the function once, and write what comes out of its streams."""
    from holdfast.spark.pipelines.streams import missing_tables, reads_of, run_stream, table_stream

    options: PythonOptions = context.options
    finish_pending(context)
    missing = missing_tables(context, options.sources)
    if missing:
        return context.summary(notes=(f"{', '.join(missing)} has no rows yet",))

    def opened() -> DataFrame:
        rows = _called(context, *(table_stream(context, name, options.max_rows_per_batch) for name in options.sources))
        if not rows.isStreaming:
            raise BadSettings(f"{context.name}: the function {_name(context)} must return a stream, of its sources")
        _check_rows(context, rows)
        return rows

    return run_stream(
        context,
        patiently(opened),
        write_streamed,
        lambda: sum(read.rows or 0 for read in reads_of(context, options.sources)),
        output_mode=options.output_mode,
    )


def write_streamed(context: Context, rows: DataFrame, batch: int, offsets: str | None) -> LedgerBatch:
    """One batch of what the function made of its streams."""
    from holdfast.spark.pipelines.streams import rows_between

    before = ledger_of(context).last()
    rows_in = rows_between(context, None if before is None else before.offsets, offsets)
    return _written(context, batch, rows, rows_in=rows_in, offsets=offsets)


def _write(context: Context, piece: Slice) -> LedgerBatch:
    rows = _called(context, piece.rows.drop(BATCH))
    _check_rows(context, rows)
    # The function may return more rows or fewer: what came in is known from the source.
    return _written(context, piece.batch, rows, rows_in=piece.count, **piece.facts)


def _written(context: Context, batch: int, rows: DataFrame, **facts: Any) -> LedgerBatch:
    partition_by = context.options.partition_by
    if partition_by is None:
        partition_by = (DATE,) if DATE in rows.columns else ()
    return write_batch(context, batch, rows, partition_by=partition_by, upsert=context.options.upsert, **facts)


def _check_rows(context: Context, rows: DataFrame) -> None:
    """Raise BadSettings if an option names a column that the function's rows do not have, before any is read."""
    check_columns(rows, context.options.expect, context.name)
    options: PythonOptions = context.options
    for option, names in (("upsert_by", options.keys), ("latest_by", filter(None, [options.latest_by]))):
        for name in names:
            if name not in rows.columns:
                raise BadSettings(
                    f"{context.name}: {option} names {name!r}, but the function {_name(context)} returns only "
                    f"{', '.join(rows.columns)}"
                )
    if options.delete_when is not None:
        check_columns(rows, [Expectation(name="delete_when", check=options.delete_when)], context.name)


def _called(context: Context, *rows: DataFrame) -> DataFrame:
    from pyspark.sql import DataFrame

    assert context.spec.function is not None
    found = context.spec.function(*rows, *(_whole(context, name) for name in context.options.tables))
    if not isinstance(found, DataFrame):
        raise BadSettings(
            f"{context.name}: the function {_name(context)} returned {type(found).__name__}: it must return a DataFrame"
        )
    for name, kind in found.dtypes:
        if name.lower() in (BATCH, *OURS):
            raise BadSettings(f"{context.name}: a column cannot be named {name!r}, as the table has its own: rename it")
        if name.lower() == DATE and kind != "date":
            raise BadSettings(f"{context.name}: the column {name!r} is {kind}: it is the day, and must be a date")
    return found


def _whole(context: Context, name: str) -> DataFrame:
    """All rows of a table, as of its last batch."""
    last = ledger_of(context, name).last()
    rows = None
    if last is not None:
        # A version of a Delta table is whole, and a row that is changed just now must not be left out. Of plain files
        # those of a batch may be there that is not finished.
        changes = is_delta(context.tables, context.project.table(name))
        rows = read_table(context, name, through=_ALL if changes else last.batch)
    if rows is None:
        raise InvalidRequest(f"{context.name}: {name}, one of its tables, has no rows yet: run it first")
    return rows.drop(BATCH)


def _name(context: Context) -> str:
    return getattr(context.spec.function, "__name__", "without a name")


_TEMPLATE: Final = """\
    kind: python
    source: orders-silver
    function: enrich            # a function of `file:`, from rows to rows
    # sources: [orders-silver, payments-silver]   # instead of source: streams, to join or to group
    # tables: [customers]       # further tables, of which the function gets all rows
    # upsert_by: order          # the table has one row for each; others are replaced
    # latest_by: at             # of several rows, the one with the largest counts
    # delete_when: "op = 'd'"   # such a row removes its key
"""


def _identity(options: PythonOptions) -> dict[str, Any]:
    return {"source": options.source, "sources": options.sources or None, "upsert_by": options.keys or None}


KIND: Final = PipelineKind(PythonOptions, _plan, _run, _TEMPLATE, _identity)
