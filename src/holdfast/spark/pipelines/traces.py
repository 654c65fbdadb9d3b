"""`traces`: how long messages waited and were worked on, how often they were tried; by topic and hour, with plots.

Times are those of `holdfast trace stats`: time to first delivery is from publication, or the end of the delay, to the
first lease in each group; handling time is from a lease to its end, however it ended. What began before the oldest step
that is kept is not timed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from holdfast.broker.tracing.log import ACKED, BURIED, LEASED, NACKED, PUBLISHED, RELEASED, RETURNED
from holdfast.spark.pipelines import f, report
from holdfast.spark.pipelines.report import (
    Report,
    ReportSection,
    ReportTable,
    in_steps,
    replaced_as_a_whole,
    report_of,
    spread,
    step_for,
    steps_between,
    utc,
    write_report,
)
from holdfast.spark.pipelines.spec import Context, PipelineKind, PipelineOptions, Plan, Read, Summary

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row


SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_ENDS: Final = (ACKED, NACKED, RETURNED, BURIED)
_ACCURACY: Final = 10_000
_TOPICS_IN_PLOTS: Final = 6
_MOST_ATTEMPTS: Final = 10
_HOURS_IN_TABLE: Final = 500


class TracesOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of `traces`. Without any it reads all steps of all topics."""

    topics: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    where: str | None = None


def first_deliveries(steps: DataFrame) -> DataFrame:
    """The time from ready to the first lease, for each message and group: topic, group, id, at, seconds.

    If a topic was deleted and made again, ids may repeat: publication starts the life of another message.
    """
    from pyspark.sql import Window

    ready = (f.col("step") == PUBLISHED) | ((f.col("step") == RELEASED) & (f.col("group") == ""))
    life = Window.partitionBy("topic", "id").orderBy("at", _rank()).rowsBetween(Window.unboundedPreceding, 0)
    timed = steps.withColumn("ready_at", f.last(f.when(ready, f.col("at")), ignorenulls=True).over(life))
    firsts = timed.where((f.col("step") == LEASED) & (f.col("attempt") == 1) & f.col("ready_at").isNotNull())
    return firsts.select("topic", "group", "id", "at", _seconds("ready_at", "at").alias("seconds"))


def deliveries(steps: DataFrame) -> DataFrame:
    """Each delivery that has ended: topic, group, id, attempt, at (of the lease), seconds, and how it ended."""
    from pyspark.sql import Window

    one = Window.partitionBy("topic", "id", "group").orderBy("at", _rank())
    held = steps.where(f.col("step").isin(LEASED, *_ENDS))
    paired = held.withColumn("ended_at", f.lead("at").over(one)).withColumn("ended_as", f.lead("step").over(one))
    ended = paired.where((f.col("step") == LEASED) & f.col("ended_as").isin(*_ENDS))
    seconds = _seconds("at", "ended_at").alias("seconds")
    return ended.select("topic", "group", "id", "attempt", "at", seconds, "ended_as")


def by_hour(steps: DataFrame, firsts: DataFrame, handled: DataFrame) -> DataFrame:
    """One row for each topic and hour: counts, and percentiles of both times in seconds."""
    key = ["topic", "hour"]
    hour = f.date_trunc("hour", "at").alias("hour")
    step = f.col("step")
    counts = {
        "published": step == PUBLISHED,
        "deliveries": step == LEASED,
        "retries": (step == LEASED) & (f.col("attempt") > 1),
        "acked": step == ACKED,
        "buried": step == BURIED,
    }
    counted = steps.groupBy("topic", hour).agg(*[f.count_if(each).alias(name) for name, each in counts.items()])
    first = firsts.groupBy("topic", hour).agg(*_percentiles("first_delivery"))
    handling = handled.groupBy("topic", hour).agg(*_percentiles("handling"))
    return counted.join(first, key, "left").join(handling, key, "left").orderBy("hour", "topic")


def attempts(steps: DataFrame) -> DataFrame:
    """The number of messages that were acked or buried, by topic and attempt."""
    done = steps.where(f.col("step").isin(ACKED, BURIED))
    return done.groupBy("topic", "attempt").agg(
        f.count_if(f.col("step") == ACKED).alias("acked"), f.count_if(f.col("step") == BURIED).alias("buried")
    )


def _percentiles(name: str) -> list[Column]:
    shares = f.percentile_approx("seconds", list(SHARES.values()), _ACCURACY)
    columns = [shares[place].alias(f"{name}_{share}") for place, share in enumerate(SHARES)]
    return [f.count("*").alias(f"{name}_count"), *columns, f.max("seconds").alias(f"{name}_max")]


def _rank() -> Column:
    """The order of steps in the same microsecond: a message is leased after it is published, for example."""
    return (
        f.when(f.col("step") == PUBLISHED, 0)
        .when(f.col("step") == RELEASED, 1)
        .when(f.col("step") == LEASED, f.col("attempt") * 2)
        .otherwise(f.col("attempt") * 2 + 1)
    )


def _seconds(since: str, until: str) -> Column:
    return (f.unix_micros(f.col(until)) - f.unix_micros(f.col(since))) / 1e6


def steps_of(context: Context) -> DataFrame:
    """The steps that the options choose."""
    options: TracesOptions = context.options
    found = context.reader(
        table="traces",
        subscribe=",".join(options.topics) or None,
        startingTimestamp=options.since,
        endingTimestamp=options.until,
    ).load()
    if options.where is not None:
        found = found.where(options.where)
    return found.select("at", "step", "id", "topic", "group", "attempt")


def plan(context: Context) -> Plan:
    rows = steps_of(context).count()
    return context.plan(
        [Read(what="traces", start="oldest", end="newest", rows=rows)],
        writes=[f"{context.report_folder}/{name}" for name in ("hours", "attempts", "report")],
        notes=() if rows else (_NONE,),
        sized=False,
    )


def run(context: Context) -> Summary:
    """Tables and report."""
    steps = steps_of(context).cache()
    firsts, handled = first_deliveries(steps).cache(), deliveries(steps).cache()
    try:
        count = steps.count()
        with replaced_as_a_whole(context) as fresh:
            by_hour(steps, firsts, handled).coalesce(1).write.parquet(f"{fresh}/hours")
            attempts(steps).coalesce(1).write.parquet(f"{fresh}/attempts")
            hours = context.spark.read.parquet(f"{fresh}/hours").orderBy("hour", "topic").collect()
            tries = context.spark.read.parquet(f"{fresh}/attempts").collect()
            sections = [*_times(firsts, handled), *_attempts(tries), _hours(hours)] if hours else []
            write_report(context.world, f"{fresh}/report", _report(context, hours, sections))
    finally:
        for each in (steps, firsts, handled):
            each.unpersist()
    report = f"{context.report_folder}/report/report.html"
    return context.summary(
        rows_in=count,
        rows_out=len(hours),
        files=2,
        notes=(f"report: {report}", *(() if count else (_NONE,))),
        details={"hours": len(hours), "report": report},
    )


def _report(context: Context, hours: list[Row], sections: list[ReportSection]) -> Report:
    shown = {"messages traced": "published", "deliveries": "deliveries", "retries": "retries", "dead": "buried"}
    facts = [(label, sum(row[name] for row in hours)) for label, name in shown.items()]
    return report_of(context, "The life of messages", facts, sections or [ReportSection(title="No traces", text=_NONE)])


def _times(firsts: DataFrame, handled: DataFrame) -> list[ReportSection]:
    first = "From publication, or the end of the delay, to the first lease in each group."
    handling = "From a lease to its end, whichever way it ended."
    return [
        *_percentiles_over_time("first-delivery", "Time to first delivery", first, firsts),
        *_percentiles_over_time("handling", "Handling time", handling, handled),
    ]


def _percentiles_over_time(name: str, title: str, text: str, rows: DataFrame) -> list[ReportSection]:
    """Percentiles of all topics together, and p95 of each if there are several. No section if nothing was timed."""
    span = rows.agg(f.min("at").alias("first"), f.max("at").alias("last")).collect()[0]
    if span["first"] is None:
        return []
    first, last = utc(span["first"]), utc(span["last"])
    step_s = step_for(first, last)
    times = steps_between(first, last, step_s)
    stepped = rows.select(in_steps(f.col("at"), step_s).alias("at"), "topic", "seconds")
    found = stepped.rollup("at", "topic").agg(*_percentiles("all")).where("at IS NOT NULL").collect()
    points = [(utc(row["at"]), share, row[f"all_{share}"]) for row in found if row["topic"] is None for share in SHARES]
    drawn = [
        report.lines(name, f"{title}, all topics", times, spread(points, times, SHARES, None), unit=_LOG, log=True)
    ]
    counts: Counter[str] = Counter()
    for row in found:
        if row["topic"] is not None:
            counts[row["topic"]] += row["all_count"]
    if len(counts) > 1:
        topics = [topic for topic, _ in counts.most_common(_TOPICS_IN_PLOTS)]
        series = spread([(utc(row["at"]), row["topic"], row["all_p95"]) for row in found], times, topics, None)
        drawn.append(report.lines(f"{name}-topics", f"{title}, p95 by topic", times, series, unit=_LOG, log=True))
    return [ReportSection(title=title, text=text, plots=drawn)]


def _attempts(tries: list[Row]) -> list[ReportSection]:
    most = max((row["attempt"] for row in tries), default=0)
    if not most:
        return []
    counts = {str(number): 0.0 for number in range(1, min(most, _MOST_ATTEMPTS) + 1)}
    if most > _MOST_ATTEMPTS:
        counts[f"{_MOST_ATTEMPTS + 1} or more"] = 0.0
    for row in tries:
        label = str(row["attempt"])
        counts[label if label in counts else [*counts][-1]] += row["acked"] + row["buried"]
    plot = report.columns("attempts", "Attempts until a message was done", counts, unit="messages", label="attempts")
    return [ReportSection(title="Attempts", text="A message is done when it is acked or dead.", plots=[plot])]


def _hours(hours: list[Row]) -> ReportSection:
    times = [f"{name}_{share}" for name in ("first_delivery", "handling") for share in SHARES]
    counts = ["published", "deliveries", "retries", "acked", "buried"]
    shown = hours[-_HOURS_IN_TABLE:]
    text = "Times are in seconds."
    if len(shown) < len(hours):
        text += f" The last {len(shown)} rows of {len(hours)}; the table `hours` has all."
    rows = [[utc(row["hour"]), row["topic"], *(row[name] for name in (*counts, *times))] for row in shown]
    columns = ["hour (UTC)", "topic", *counts]
    columns += [f"{name} {share}" for name in ("first delivery", "handling") for share in SHARES]
    return ReportSection(title="By topic and hour", text=text, table=ReportTable(columns=columns, rows=rows))


_LOG: Final = "seconds (log scale)"
_NONE: Final = "No message was traced: set trace_sample on the topics, such as 0.01 for one in a hundred."

_TEMPLATE: Final = """\
    kind: traces
    # topics: [orders]                      # all topics without this
    # since: "-7d"                          # ISO 8601, or so long ago; until: as well
    # where: "holder LIKE 'worker-%'"
"""
KIND: Final = PipelineKind(TracesOptions, plan, run, _TEMPLATE, follows=False)
