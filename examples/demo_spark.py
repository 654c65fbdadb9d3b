"""The last part of the demo: what its topics hold becomes tables, on Spark, and is compared with the queue."""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Console

# The same file could be given to `holdfast pipeline run --all`.
PIPELINES = """\
folder: shop
lake: lake
pipelines:
  bronze: {kind: land, topics: [orders, returns]}
  silver:
    kind: refine
    source: bronze
    schema: "number long not null, customer string, amount double, at timestamp"
    key: number
    expect:
      - {name: has a customer, check: "customer IS NOT NULL", on_fail: quarantine}
  gold:
    kind: aggregate
    source: silver
    time: at
    window: "2 hours"
    by: [_topic]
    measures: {messages: "count(1)", customers: "count(DISTINCT customer)", total: "sum(amount)"}
  letters: {kind: deadletters}
  proof: {kind: reconcile, source: bronze}
"""

# A figure of the account: what, how many, because, and how many there must be.
Figure = tuple[str, int, str, int | None]


def installed() -> bool:
    return find_spec("pyspark") is not None


def to_tables(console: Console, home: Path, report: Path, sent: int) -> list[Figure]:
    """Run the pipelines over `home/shop`, show what came out, and keep the report."""
    from holdfast.spark import run, session

    (home / "pipelines.yaml").write_text(PIPELINES, "utf-8")
    with console.status("Spark starts"):
        spark = session(
            "demo",
            **{
                "spark.local.dir": str(home / "spark"),
                "spark.sql.shuffle.partitions": 2,
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # for a short run
            },
        )
    try:
        with console.status("the pipelines run"):
            done = {each.pipeline: each for each in run(home / "pipelines.yaml", spark=spark)}
        table = new_table("pipeline", "kind", "rows in", "rows out", "put aside", "seconds")
        for each in done.values():
            counts = (each.rows_in, each.rows_out, each.quarantined)
            table.add_row(each.pipeline, each.kind, *(f"{count:,}" for count in counts), f"{each.seconds:.1f}")
        console.print(table)
        show(console, spark, home / "lake")
    finally:
        with suppress(Exception):  # it may have been interrupted in the middle of a call
            spark.stop()
    report.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(done["letters"].details["report"], report)
    console.print(f"\n  The report on the dead letters, with plots: {report}", soft_wrap=True)
    silver, faults = done["silver"], done["proof"].details
    return [
        ("landed in the lake", done["bronze"].rows_out, "queue to Parquet", sent),
        ("refined or put aside", silver.rows_out + silver.quarantined, "nothing goes missing", sent),
        ("in the queue, not in the lake", faults["missing"], "compared one by one", 0),
        ("in the lake twice", faults["duplicated"], "exactly once", 0),
        ("in the lake, but changed", faults["changed"] + faults["unknown"], "checksums agree", 0),
    ]


def show(console: Console, spark: SparkSession, lake: Path) -> None:
    """A look at each of the tables."""
    from holdfast.spark import read_delta

    gold = read_delta(spark, f"{lake}/gold").orderBy("window_start", "_topic")
    console.print("\n  lake/gold: two hours at a time")
    print_rows(console, gold.selectExpr(
        "date_format(window_start, 'HH:mm') AS from", "_topic AS topic", "messages", "customers", "total",
    ))  # fmt: skip
    aside = read_delta(spark, f"{lake}/silver.quarantine").selectExpr("topic", "explode(_reasons) AS reason")
    console.print("\n  lake/silver.quarantine: what was put aside")
    print_rows(console, aside.groupBy("reason", "topic").count().orderBy("reason", "topic"))
    kinds = spark.read.parquet(f"{lake}/letters/kinds").orderBy("error_kind")
    console.print("\n  lake/letters/kinds: what the dead letters died of")
    print_rows(
        console, kinds.selectExpr("count", "waiting", "concat_ws(', ', topics) AS topics", "error_kind AS error")
    )


def print_rows(console: Console, rows: DataFrame) -> None:
    table = new_table(*rows.columns)
    for row in rows.collect():
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in row))
    console.print(table)


def new_table(*titles: str) -> Table:
    """Numbers to the right, words to the left."""
    words = ("ended", "topic", "topics", "reason", "error", "pipeline", "kind", "from")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in words else "right")
    return table
