"""`deadletters`: which errors there are, since when and how many, as tables and as a report; and a redrive by SQL.

Each run makes the tables and the report again and replaces the old ones in one step.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.client.opening import is_address
from holdfast.config.settings_file import read_settings
from holdfast.env.process import environment
from holdfast.errors import BadSettings
from holdfast.local.sync.broker import open_broker
from holdfast.model import count_of
from holdfast.spark.pipelines import f, report
from holdfast.spark.pipelines.report import (
    OTHERS,
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
from holdfast.spark.places import stored_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from holdfast.api.sync.broker import Broker


# A fingerprint is an error without its details, so that a thousand failures of one kind count as one.
#
# Python and Spark share one table of rules: `fingerprint` is for a string, and `fingerprint_column` does the same for a
# column without a Python worker. The rules use only what both dialects of regular expressions share.


MOST_CHARACTERS: Final = 300

_TRACEBACK: Final = "Traceback (most recent call last)"
_BLANKS: Final = " \t\r\n"

# `\b` differs between Java versions; these do not.
_BEGIN: Final = r"(?<![A-Za-z0-9_])"
_END: Final = r"(?![A-Za-z0-9_])"
_HEX: Final = r"[0-9a-fA-F]"
_OCTET: Final = r"[0-9]{1,3}"

# In this order: if a text matches several rules, the most specific one comes first.
RULES: Final = (
    (rf"{_BEGIN}{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}{_END}", "<uuid>"),
    (
        rf"{_BEGIN}[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}"
        r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?" + _END,
        "<time>",
    ),
    (rf"{_BEGIN}[a-zA-Z][a-zA-Z0-9+.-]*://[^ \t'\"<>()]*[^ \t'\"<>(),.;:!?]", "<url>"),
    (rf"{_BEGIN}[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", "<email>"),
    # An apostrophe inside a word opens no quotation.
    (rf"{_BEGIN}[bBrRuUfF]?'(?:[^'\\]|\\.)*'{_END}", "<text>"),
    (rf"{_BEGIN}[bBrRuUfF]?\"(?:[^\"\\]|\\.)*\"{_END}", "<text>"),
    (r"`[^`]*`", "<text>"),
    (rf"{_BEGIN}{_OCTET}(?:\.{_OCTET}){{3}}(?::[0-9]+)?{_END}", "<address>"),
    (rf"\[{_HEX}*:[0-9a-fA-F:]+\](?::[0-9]+)?", "<address>"),
    (rf"{_BEGIN}{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}{_END}", "<address>"),
    (rf"{_BEGIN}localhost:[0-9]+{_END}", "<address>"),
    (rf"{_BEGIN}[A-Za-z]:\\[^ \t'\":*?<>|]+", "<path>"),
    (r"(?<![A-Za-z0-9_.<>/~])(?:~|\.{1,2})?(?:/[A-Za-z0-9_.@+%=-]*[A-Za-z0-9_@+%=-])+/?", "<path>"),
    (rf"{_BEGIN}0[xX]{_HEX}+{_END}", "<hex>"),
    (rf"{_BEGIN}(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9]){_HEX}{{8,}}{_END}", "<hex>"),
    (rf"{_BEGIN}[+-]?[0-9]+(?:[.,][0-9]+)*(?:[eE][+-]?[0-9]+)?", "<number>"),
    (r"[0-9]+(?:[.,][0-9]+)*", "<number>"),
    # A list is a list, however long.
    (r"<number>(?:, ?<number>)+", "<number>, ..."),
    (r"<text>(?:, ?<text>)+", "<text>, ..."),
    (r"[ \t\r]+", " "),
)

_COMPILED: Final = tuple((re.compile(pattern), replacement) for pattern, replacement in RULES)


def fingerprint(error: str) -> str:
    """The kind of an error: its first line, or the last one of a bare traceback, without details that vary."""
    lines = error.strip(_BLANKS).split("\n")
    text = lines[-1] if lines[0].startswith(_TRACEBACK) else lines[0]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:MOST_CHARACTERS]


def fingerprint_column(error: Column) -> Column:
    """The fingerprints of a column. Null counts as an empty error."""
    lines = f.split(f.btrim(f.coalesce(error, f.lit("")), f.lit(_BLANKS)), "\n")
    first = f.element_at(lines, 1)
    text = f.when(first.startswith(_TRACEBACK), f.element_at(lines, -1)).otherwise(first)
    for pattern, replacement in RULES:
        text = f.regexp_replace(text, pattern, replacement)
    return f.btrim(text, f.lit(" ")).substr(1, MOST_CHARACTERS)


WAITING: Final = "waiting"

_SAMPLES: Final = 5
_SHOWN_SAMPLES: Final = 3
_KINDS_IN_PLOTS: Final = 6
_BARS: Final = 12
_KINDS_IN_TABLE: Final = 200
_EXAMPLES: Final = 5
_PLACES: Final = 6


class DeadLettersOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of `deadletters`. Without topics it reads all of them."""

    topics: tuple[str, ...] = ()
    where: str | None = None
    redrive: str | None = None
    redrive_limit: int | None = None
    redrive_rate: float | None = None

    def __post_init__(self) -> None:
        if self.redrive is None and (self.redrive_limit is not None or self.redrive_rate is not None):
            raise BadSettings("redrive_limit and redrive_rate have no effect without redrive: give a condition")
        if self.redrive_limit is not None and self.redrive_limit < 1:
            raise BadSettings(f"redrive_limit is {self.redrive_limit}: give a number of 1 or more")
        if self.redrive_rate is not None and not 0 < self.redrive_rate < float("inf"):
            raise BadSettings(f"redrive_rate is {self.redrive_rate:g}: give messages per second, above 0")


class ChosenLetters(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of the letters that a condition chose, by topic and group."""

    ids: dict[tuple[str, str], list[str]]

    @property
    def count(self) -> int:
        return sum(map(len, self.ids.values()))


def with_kinds(letters: DataFrame) -> DataFrame:
    """The letters with the kind of their error, and a short name for reason and kind together."""
    kinds = letters.withColumn("error_kind", fingerprint_column(f.col("error")))
    name = f.sha2(f.concat_ws("\n", f.col("reason"), f.col("error_kind")), 256)
    return kinds.withColumn("fingerprint", name.substr(1, 12))


def by_kind(letters: DataFrame) -> DataFrame:
    """One row for each kind of error, the most frequent first. `samples` are the ids of the newest letters."""
    from pyspark.sql import Window

    newest = Window.partitionBy("fingerprint").orderBy(f.col("dead_at").desc(), f.col("id"))
    ranked = letters.withColumn("rank", f.row_number().over(newest))
    sample = f.when(f.col("rank") <= _SAMPLES, f.struct("rank", "id"))
    return (
        ranked.groupBy("fingerprint", "reason", "error_kind")
        .agg(
            f.count("*").alias("count"),
            f.count_if(f.col("state") == WAITING).alias("waiting"),
            f.min("dead_at").alias("first_seen"),
            f.max("dead_at").alias("last_seen"),
            f.max("attempts").alias("most_attempts"),
            f.sort_array(f.collect_set("topic")).alias("topics"),
            f.sort_array(f.collect_set("group")).alias("groups"),
            f.sort_array(f.collect_set(f.concat_ws(" / ", "topic", "group"))).alias("topic_groups"),
            f.transform(f.sort_array(f.collect_list(sample)), lambda one: one["id"]).alias("samples"),
            f.min_by("error", "rank").alias("sample_error"),
        )
        .orderBy(f.col("count").desc(), "fingerprint")
    )


def by_hour(letters: DataFrame) -> DataFrame:
    """The number of letters of each kind by hour, topic and group."""
    return letters.groupBy(
        f.date_trunc("hour", "dead_at").alias("hour"), "topic", "group", "fingerprint", "reason", "error_kind"
    ).agg(f.count("*").alias("count"), f.count_if(f.col("state") == WAITING).alias("waiting"))


def letters_of(context: Context) -> DataFrame:
    """The dead letters that the options choose. The column `meant` is true for those to redrive."""
    options: DeadLettersOptions = context.options
    found = with_kinds(context.reader(table="dead_letters", subscribe=",".join(options.topics) or None).load())
    if options.where is not None:
        found = found.where(options.where)
    meant = f.lit(False) if options.redrive is None else f.coalesce(f.expr(f"({options.redrive})"), f.lit(False))
    # The large columns were only needed for the conditions.
    return found.withColumn("meant", meant & (f.col("state") == WAITING)).drop(
        "value", "headers", "failures", "document"
    )


def chosen_for_redrive(letters: DataFrame, options: DeadLettersOptions) -> ChosenLetters:
    """The waiting letters that the condition chooses, oldest first."""
    if options.redrive is None:
        return ChosenLetters(ids={})
    meant = letters.where("meant").orderBy("dead_at", "id")
    if options.redrive_limit is not None:
        meant = meant.limit(options.redrive_limit)
    ids: dict[tuple[str, str], list[str]] = {}
    for row in meant.select("topic", "group", "id").collect():
        ids.setdefault((row["topic"], row["group"]), []).append(row["id"])
    return ChosenLetters(ids=ids)


def _owner(context: Context) -> Broker:
    """The broker that has the letters: of this process, which then owns the folder, or a server's."""
    if is_address(context.folder):
        from holdfast.client.sync.opening import open_broker as open_anywhere

        return open_anywhere(context.folder)
    trusted = read_settings(context.world, environment()).broker.trust_folder
    place = stored_at(context.folder) or context.folder
    return open_broker(place, create=False, world=context.world, trust_folder=trusted)


def redrive(context: Context, chosen: ChosenLetters) -> int:
    """Redrive the letters. Returns their number. Raises Busy if another process owns the folder."""
    if not chosen.count:
        return 0
    rate = context.options.redrive_rate
    with _owner(context) as broker:
        return sum(
            broker.group(topic, group).dead.redrive(ids, rate=rate).done for (topic, group), ids in chosen.ids.items()
        )


def plan(context: Context) -> Plan:
    """What would be counted and redriven."""
    letters = letters_of(context).cache()
    try:
        count = letters.count()
        chosen = chosen_for_redrive(letters, context.options)
    finally:
        letters.unpersist()
    notes = []
    if context.options.redrive is not None:
        examples = [letter for ids in chosen.ids.values() for letter in ids][:_EXAMPLES]
        more = [f"and {chosen.count - len(examples)} more"] if chosen.count > len(examples) else []
        notes.append(f"redrives {count_of(chosen.count, 'dead letter')}: {', '.join([*examples, *more]) or 'none'}")
    return context.plan(
        [Read(what="dead_letters", start="oldest", end="newest", rows=count)],
        writes=[f"{context.report_folder}/{name}" for name in ("kinds", "hours", "report")],
        notes=notes,
        sized=False,
    )


def run(context: Context) -> Summary:
    """Tables, report, redrive."""
    letters = letters_of(context).cache()
    try:
        count = letters.count()
        with replaced_as_a_whole(context) as fresh:
            by_kind(letters).coalesce(1).write.parquet(f"{fresh}/kinds")
            by_hour(letters).coalesce(1).write.parquet(f"{fresh}/hours")
            kinds = context.spark.read.parquet(f"{fresh}/kinds").orderBy("count", ascending=False).collect()
            write_report(context.world, f"{fresh}/report", _report(context, letters, kinds))
        chosen = chosen_for_redrive(letters, context.options)
    finally:
        letters.unpersist()
    redriven = redrive(context, chosen)
    report = f"{context.report_folder}/report/report.html"
    notes = [f"report: {report}"]
    if context.options.redrive is not None:
        notes.append(f"redriven: {redriven} of {chosen.count} that match the condition")
    return context.summary(
        rows_in=count,
        rows_out=len(kinds),
        files=2,
        notes=tuple(notes),
        details={"kinds": len(kinds), "redriven": redriven, "report": report},
    )


def _report(context: Context, letters: DataFrame, kinds: list[Row]) -> Report:
    facts: list[tuple[str, Any]] = [
        ("dead letters", sum(kind["count"] for kind in kinds)),
        ("kinds of error", len(kinds)),
        ("still waiting", sum(kind["waiting"] for kind in kinds)),
    ]
    sections = [ReportSection(title="No dead letters", text="There is nothing to look at, which is good.")]
    if kinds:
        first = utc(min(kind["first_seen"] for kind in kinds))
        last = utc(max(kind["last_seen"] for kind in kinds))
        facts += [("oldest (UTC)", first), ("newest (UTC)", last)]
        sections = [_over_time(letters, kinds, first, last), _most_frequent(kinds), _all_kinds(kinds)]
    return report_of(context, "Dead letters", facts, sections)


def _over_time(letters: DataFrame, kinds: list[Row], first: datetime, last: datetime) -> ReportSection:
    step_s = step_for(first, last)
    times = steps_between(first, last, step_s)
    labels = dict(list(_labels(kinds).items())[:_KINDS_IN_PLOTS])
    counted = letters.groupBy(in_steps(f.col("dead_at"), step_s).alias("at"), "fingerprint").count()
    rows = [(utc(row["at"]), row["fingerprint"], float(row["count"])) for row in counted.collect()]
    series = {labels[name]: values for name, values in spread(rows, times, labels, 0.0).items()}
    if len(kinds) > len(labels):
        all_rows = [0.0] * len(times)
        for at, name, count in rows:
            if name not in labels:
                all_rows[times.index(at)] += count
        series[OTHERS] = all_rows
    plot = report.stacked(
        "over-time", "Dead letters by kind of error", times, series, unit=f"letters in {_span(step_s)}", step_s=step_s
    )
    return ReportSection(title="Over time", text="When messages died, by the kind of their last error.", plots=[plot])


def _most_frequent(kinds: list[Row]) -> ReportSection:
    labels = _labels(kinds)
    plot = report.bars(
        "kinds",
        "The most frequent kinds of error",
        {labels[kind["fingerprint"]]: float(kind["count"]) for kind in kinds[:_BARS]},
        unit="dead letters",
    )
    return ReportSection(title="The most frequent", plots=[plot])


def _all_kinds(kinds: list[Row]) -> ReportSection:
    text = "Numbers, quoted text, ids, addresses and paths do not make a kind. Examples are the newest letters."
    if len(kinds) > _KINDS_IN_TABLE:
        text += f" The first {_KINDS_IN_TABLE} of {len(kinds)}; the table `kinds` has all."
    rows = [
        [
            kind["error_kind"] or "(no error text)",
            kind["reason"],
            kind["count"],
            kind["waiting"],
            utc(kind["first_seen"]),
            utc(kind["last_seen"]),
            _some(kind["topic_groups"]),
            kind["samples"][:_SHOWN_SAMPLES],
        ]
        for kind in kinds[:_KINDS_IN_TABLE]
    ]
    columns = ["error", "reason", "count", "waiting", "first seen", "last seen", "topic / group", "examples"]
    return ReportSection(title="All kinds", text=text, table=ReportTable(columns=columns, rows=rows))


def _labels(kinds: list[Row]) -> dict[str, str]:
    """A label for each fingerprint, with the reason if another one has the same kind of error."""
    texts = [kind["error_kind"] or "(no error text)" for kind in kinds]
    return {
        kind["fingerprint"]: f"{kind['reason']}: {text}" if texts.count(text) > 1 else text
        for kind, text in zip(kinds, texts, strict=True)
    }


def _some(items: list[str]) -> list[str]:
    return items if len(items) <= _PLACES else [*items[:_PLACES], f"and {len(items) - _PLACES} more"]


def _span(step_s: int) -> str:
    for unit_s, name in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if step_s % unit_s == 0:
            count = step_s // unit_s
            return name if count == 1 and name != "hour" else f"{count} {name}{'' if count == 1 else 's'}"
    raise AssertionError(step_s)


_TEMPLATE: Final = """\
    kind: deadletters
    # topics: [orders]                      # all topics without this
    # where: "dead_at > now() - interval 7 days"
    # Redrive those that match a condition; `holdfast pipeline plan` lists them. Runs only while nobody has the folder.
    # redrive: "error LIKE '%Timeout%'"
    # redrive_limit: 1000
    # redrive_rate: 50                      # messages per second
"""
KIND: Final = PipelineKind(DeadLettersOptions, plan, run, _TEMPLATE, follows=False)
