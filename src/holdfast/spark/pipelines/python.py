"""`python`: pipelines of your own, each a function from rows to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.errors import BadSettings
from holdfast.spark.pipelines.batches import ADDED_TO, OURS, Slice, StepOptions, check_columns, step_kind, write_batch
from holdfast.spark.pipelines.checkpoint import LedgerBatch
from holdfast.spark.pipelines.lake import BATCH, DATE
from holdfast.spark.pipelines.spec import Context, Spec, read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Function = TypeVar("Function", bound=Callable[..., Any])
_MARK: Final = "__holdfast_pipeline__"


class PythonOptions(StepOptions, frozen=True, kw_only=True):
    """Options of `python`. `function` is the function's name, if it is not that of the pipeline."""

    function: str | None = None
    partition_by: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("a pipeline of your own needs a source: the name of one that writes a table")


def pipeline(
    *,
    source: str,
    name: str | None = None,
    expect: Sequence[dict[str, Any]] = (),
    partition_by: Sequence[str] | None = None,
    max_rows_per_batch: int = 5_000_000,
) -> Callable[[Function], Function]:
    """Make a function a pipeline: it gets the new rows of its source, batch by batch, and returns rows."""

    def mark(function: Function) -> Function:
        given = {
            "source": source,
            "expect": list(expect),
            "max_rows_per_batch": max_rows_per_batch,
            "partition_by": None if partition_by is None else list(partition_by),
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


def _write(context: Context, piece: Slice) -> LedgerBatch:
    rows = _called(context, piece.rows.drop(BATCH))
    check_columns(rows, context.options.expect, context.name)
    partition_by = context.options.partition_by
    if partition_by is None:
        partition_by = (DATE,) if DATE in rows.columns else ()
    # The function may return more rows or fewer: what came in is known from the source.
    return write_batch(context, piece.batch, rows, partition_by=partition_by, rows_in=piece.count, **piece.facts)


def _called(context: Context, rows: DataFrame) -> DataFrame:
    from pyspark.sql import DataFrame

    assert context.spec.function is not None
    found = context.spec.function(rows)
    if not isinstance(found, DataFrame):
        raise BadSettings(
            f"{context.name}: the function {_name(context)} answered with {type(found).__name__}: "
            "it must return a DataFrame"
        )
    for name, kind in found.dtypes:
        if name.lower() in (BATCH, *OURS):
            raise BadSettings(f"{context.name}: a column cannot be named {name!r}: the table has one of its own")
        if name.lower() == DATE and kind != "date":
            raise BadSettings(f"{context.name}: the column {name!r} is {kind}: it is the day, and must be a date")
    return found


def _name(context: Context) -> str:
    return getattr(context.spec.function, "__name__", "without a name")


_TEMPLATE: Final = """\
    kind: python
    source: orders-silver
    function: enrich            # a function of `file:`, from rows to rows
"""
KIND: Final = step_kind(
    PythonOptions,
    _TEMPLATE,
    sources=ADDED_TO,
    write=_write,
    note=lambda context: f"by the function {_name(context)}",
    identity=lambda options: {"source": options.source},
)
