"""The runs of pipelines over time, as a page: rows per second, lag, late and bad rows, durations.

It shows what the runs have noted, so neither Spark nor a lock is needed. Its pictures are SVG inside of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

import msgspec

from holdfast.spark.pipelines.checkpoint import NotedRun, PipelineStatus
from holdfast.spark.pipelines.report import COLOURS, Cell, Report, ReportSection, ReportTable

WIDTH: Final = 480
HEIGHT: Final = 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 26
_LISTED: Final = 20
_GRID: Final = 4  # parts of the height
_BAD: Final = "#D1242F"
_POINTS_SHOWN: Final = 60  # beyond so many runs, points would hide the line

Measure = Callable[[NotedRun], float | None]


class HistoryChart(msgspec.Struct, frozen=True):
    """What a picture shows of each run: values, each with its name; and how a value reads."""

    title: str
    lines: tuple[tuple[str, Measure], ...]
    text: Callable[[float], str]


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:,.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def _per_second(rows: int, run: NotedRun) -> float | None:
    return rows / run.seconds if run.seconds else None


CHARTS: Final = (
    HistoryChart(
        "Rows per second",
        (
            ("read", lambda run: _per_second(run.rows_in, run)),
            ("written", lambda run: _per_second(run.rows_out, run)),
        ),
        _whole,
    ),
    HistoryChart("Lag: rows not read yet", (("rows", lambda run: run.lag),), _whole),
    HistoryChart(
        "Late and bad rows",
        (
            ("late", lambda run: run.expectations.get("late", 0)),
            ("dropped", lambda run: run.dropped),
            ("quarantined", lambda run: max(run.quarantined, 0)),  # fewer than none: some have left it
        ),
        _whole,
    ),
    HistoryChart("Duration", (("run", lambda run: run.seconds or None),), _seconds),
)


def history_report(
    lake: str, standings: Sequence[PipelineStatus], runs: Mapping[str, Sequence[NotedRun]], now_ns: int
) -> Report:
    """A page about these pipelines: how each stands, and its runs."""
    now = datetime.fromtimestamp(now_ns / 1e9, UTC)
    every = [run for noted in runs.values() for run in noted]
    facts: list[tuple[str, Cell]] = [
        ("pipelines", len(standings)),
        ("runs shown", len(every)),
        ("failed runs", sum(run.error is not None for run in every)),
        ("rows read in them", sum(run.rows_in for run in every)),
        ("rows behind now", sum(each.lag or 0 for each in standings)),
    ]
    sections = [_overview(standings), *(_section(each, runs.get(each.pipeline, ())) for each in standings)]
    made = f"{lake}, {now:%Y-%m-%d %H:%M} UTC"
    return Report(title="Pipelines", made=made, facts=facts, sections=sections)


def _overview(standings: Sequence[PipelineStatus]) -> ReportSection:
    titles = (
        "pipeline",
        "kind",
        "batches",
        "rows in",
        "rows out",
        "late",
        "dropped",
        "quarantined",
        "behind",
        "last run",
    )
    rows: list[Sequence[Cell]] = [
        (
            each.pipeline, each.kind, each.batches, each.rows_in, each.rows_out, each.expectations.get("late", 0),
            each.dropped, each.quarantined, each.lag, _last_run(each),
        )
        for each in standings
    ]  # fmt: skip
    return ReportSection(
        title="All pipelines",
        text="Rows of all runs; for a kind without batches, those of its last run.",
        table=ReportTable(columns=titles, rows=rows),
    )


def _last_run(each: PipelineStatus) -> str:
    if each.ok is None:
        return "never"
    return "ok" if each.ok else "found problems" if each.error is None else "failed"


def _section(each: PipelineStatus, runs: Sequence[NotedRun]) -> ReportSection:
    title = f"{each.pipeline} ({each.kind})"
    if not runs:
        return ReportSection(title=title, text="It has not run yet.")
    failed = sum(run.error is not None for run in runs)
    text = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {failed} of them failed (red marks). "
    text += "A run with --follow counts as one run every five minutes."
    pictures = [svg_of(chart, runs) for chart in CHARTS] if len(runs) > 1 else []
    titles = (
        "ended",
        "seconds",
        "batches",
        "rows in",
        "rows out",
        "late",
        "dropped",
        "quarantined",
        "behind",
        "outcome",
    )
    rows: list[Sequence[Cell]] = [
        (
            _moment(run), round(run.seconds, 3), run.batches, run.rows_in, run.rows_out,
            run.expectations.get("late", 0), run.dropped, run.quarantined, run.lag,
            run.error or ("ok" if run.ok else "found problems"),
        )
        for run in reversed(runs[-_LISTED:])
    ]  # fmt: skip
    table = ReportTable(columns=titles, rows=rows)
    return ReportSection(title=title, text=text, pictures=pictures, table=table)


def _moment(run: NotedRun) -> datetime:
    return datetime.fromtimestamp(run.at_ms / 1000, UTC)


def svg_of(chart: HistoryChart, runs: Sequence[NotedRun]) -> str:
    """The picture of a chart, over the times at which the runs ended. Each point tells its value."""
    # Nobody knows how far a run came that failed.
    lines = {name: [None if run.error else value(run) for run in runs] for name, value in chart.lines}
    known = [value for line in lines.values() for value in line if value is not None]
    top = _round_up(max(known, default=0)) or 1.0
    first_ms, last_ms = runs[0].at_ms, max(run.at_ms for run in runs)
    span_ms = max(last_ms - first_ms, 1)

    def across(run: NotedRun) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (run.at_ms - first_ms) / span_ms

    def up(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [*_grid(chart, top, up), *_time_labels(first_ms, last_ms)]
    parts += [
        f'<line x1="{across(run):.1f}" x2="{across(run):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="{_BAD}" '
        f'stroke-width="1.5" opacity=".5"><title>{escape(f"{_moment(run):%Y-%m-%d %H:%M}: {run.error}")}</title></line>'
        for run in runs
        if run.error is not None
    ]
    for number, (name, line) in enumerate(lines.items()):
        points = [
            (across(run), up(value), run, value) for run, value in zip(runs, line, strict=True) if value is not None
        ]
        colour, width = COLOURS[number], max(3.4 - 1.2 * number, 1.2)  # where lines meet, all of them are seen
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        radius = 2.5 if len(points) <= _POINTS_SHOWN else 1
        for x, y, run, value in points:
            said = escape(f"{_moment(run):%Y-%m-%d %H:%M} {name}: {chart.text(value)}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{said}</title></circle>'
            )
    said = f"{chart.title}: {'; '.join(f'{name} {_range_text(line, chart)}' for name, line in lines.items())}"
    legend = "".join(
        f'<span><i style="background:{COLOURS[number]}"></i>{escape(name)} {escape(_last_text(line, chart))}</span>'
        for number, (name, line) in enumerate(lines.items())
    )
    return (
        f'<figure><figcaption><b>{escape(chart.title)}</b>{legend}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(said)}">{"".join(parts)}</svg></figure>'
    )


def _grid(chart: HistoryChart, top: float, up: Callable[[float], float]) -> list[str]:
    """The horizontal lines, and what they stand for."""
    parts = []
    for step in range(_GRID + 1):
        value = top * step / _GRID
        y = up(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        if step % 2 == 0:
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(chart.text(value))}</text>'
            )
    return parts


def _time_labels(first_ms: int, last_ms: int) -> list[str]:
    """When the first run ended, and the last."""
    words = "%H:%M:%S" if last_ms - first_ms < 600_000 else "%m-%d %H:%M"
    ends = ((_LEFT, "start", first_ms), (WIDTH - _RIGHT, "end", last_ms))
    return [
        f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">{datetime.fromtimestamp(ms / 1000, UTC):{words}}</text>'
        for x, anchor, ms in ends
    ]


def _last_text(line: Sequence[float | None], chart: HistoryChart) -> str:
    known = [value for value in line if value is not None]
    return chart.text(known[-1]) if known else "-"


def _range_text(line: Sequence[float | None], chart: HistoryChart) -> str:
    known = [value for value in line if value is not None]
    return f"{chart.text(min(known))} to {chart.text(max(known))}, last {chart.text(known[-1])}" if known else "unknown"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 (and so on by tens) that is no smaller: a quarter of it reads well."""
    if value <= 0:
        return 0.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= value * (1 - 1e-9))
