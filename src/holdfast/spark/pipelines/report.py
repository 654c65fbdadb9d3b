"""A report: one HTML file with its pictures inside, without scripts or network; and the same pictures as PNG files.

Any value may come from a message that a stranger sent, so every value is escaped.
"""

from __future__ import annotations

import base64
import io
import posixpath
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from holdfast.env import World
from holdfast.env.disk import LakeDisk
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.spec import Context
from holdfast.storage.files import durable_replace, remove_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pyspark.sql import Column


OTHERS: Final = "all others"

_STEPS_S: Final = (10, 60, 300, 900, 3_600, 10_800, 43_200, 86_400, 604_800, 2_592_000)
_MOST_STEPS: Final = 96

Value = TypeVar("Value")


def step_for(first: datetime, last: datetime) -> int:
    """The seconds of one step on a time axis, so that the span does not have more steps than a plot can show."""
    span_s = (last - first).total_seconds()
    return next((step for step in _STEPS_S if span_s / step < _MOST_STEPS), _STEPS_S[-1])


def in_steps(moment: Column, step_s: int) -> Column:
    """A column with the start of the step that each time is in."""
    return f.timestamp_seconds(f.floor(f.unix_micros(moment) / (step_s * 1_000_000)) * step_s)


def steps_between(first: datetime, last: datetime, step_s: int) -> list[datetime]:
    """Every step from the one of `first` to the one of `last`."""
    start = int(first.timestamp() // step_s)
    end = int(last.timestamp() // step_s)
    return [datetime.fromtimestamp(start * step_s, UTC) + timedelta(seconds=n * step_s) for n in range(end - start + 1)]


def spread(
    rows: Iterable[tuple[datetime, str, Value]], times: list[datetime], names: Iterable[str], missing: Value
) -> dict[str, list[Value]]:
    """The values of each name at each time, or `missing` if there is none."""
    places = {time: place for place, time in enumerate(times)}
    found = {name: [missing] * len(times) for name in names}
    for time, name, value in rows:
        if name in found and time in places:
            found[name][places[time]] = value
    return found


def utc(moment: datetime) -> datetime:
    """The time in UTC. Spark returns times in the zone of this machine, without naming it."""
    return moment.astimezone(UTC)


# Plots. Figures are made without pyplot: there is no display, and no state between them.


# Okabe and Ito: people who see fewer colours can tell them apart, also in print.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")

_INK: Final = "#1F2328"
_FAINT: Final = "#D8DEE4"
_WIDTH_INCHES: Final = 9.5
_HEIGHT_INCHES: Final = 3.5
_LEGEND_INCHES: Final = 0.2
_BAR_INCHES: Final = 0.34
_DOTS_PER_INCH: Final = 110
_LABEL_CHARACTERS: Final = 64

Series = Mapping[str, Sequence[float | None]]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A picture. `name` is that of its file, and `title` is also the text for readers who cannot see it."""

    name: str
    title: str
    png: bytes


def bars(name: str, title: str, values: Mapping[str, float], *, unit: str) -> Plot:
    """Horizontal bars, the first on top, with long labels on the left."""
    figure, axes = _figure(title, height=1.3 + _BAR_INCHES * max(1, len(values)))
    places = range(len(values))
    _numbered(axes, axes.barh(places, list(values.values()), color=COLOURS[0], height=0.7), values, padding=4)
    axes.set_yticks(places, [_shortened(label) for label in values])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*values.values(), 1]) * 1.12)
    _whole_numbers(axes.xaxis)
    axes.xaxis.set_major_formatter(lambda value, _place: _number(value))
    axes.set_xlabel(unit)
    axes.grid(visible=False, axis="y")
    return Plot(name=name, title=title, png=_png(figure))


def columns(name: str, title: str, values: Mapping[str, float], *, unit: str, label: str) -> Plot:
    """Vertical bars with short labels, in their order."""
    figure, axes = _figure(title)
    places = range(len(values))
    _numbered(axes, axes.bar(places, list(values.values()), color=COLOURS[0], width=0.7), values, padding=3)
    axes.set_xticks(places, list(values))
    _whole_numbers(axes.yaxis)
    axes.set_ylim(0, max([*values.values(), 1]) * 1.12)
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    axes.grid(visible=False, axis="x")
    return Plot(name=name, title=title, png=_png(figure))


def _numbered(axes: Axes, drawn: Any, values: Mapping[str, float], *, padding: int) -> None:
    """Write its number beside each bar."""
    axes.bar_label(drawn, [_number(value) for value in values.values()], padding=padding, color=_INK, fontsize=9)


def stacked(name: str, title: str, times: Sequence[datetime], series: Series, *, unit: str, step_s: float) -> Plot:
    """Stacked counts over time, one colour for each series."""
    figure, axes = _figure(title, height=_height(series))
    base = [0.0] * len(times)
    for number, (label, values) in enumerate(series.items()):
        heights = [value or 0.0 for value in values]
        style: Any = {"color": _colour(number), "label": _shortened(label), "align": "edge"}
        axes.bar(_dates(times), heights, width=step_s / 86_400 * 0.9, bottom=base, **style)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.set_ylim(0, max([*base, 1]) * 1.08)
    _whole_numbers(axes.yaxis)
    axes.set_ylabel(unit)
    _date_axis(axes, times)
    _legend(figure, axes)
    return Plot(name=name, title=title, png=_png(figure))


def lines(name: str, title: str, times: Sequence[datetime], series: Series, *, unit: str, log: bool = False) -> Plot:
    """Values over time, one line for each series, with a gap if there is no value."""
    figure, axes = _figure(title, height=_height(series))
    for number, (label, values) in enumerate(series.items()):
        points = [float("nan") if value is None else value for value in values]
        axes.plot(
            _dates(times),
            points,
            color=_colour(number),
            marker=MARKERS[number % len(MARKERS)],
            # Each thinner than the one below it: where lines meet, all of them are seen.
            markersize=max(5.5 - number, 3),
            linewidth=max(2.4 - 0.5 * number, 1.2),
            label=_shortened(label),
        )
    # Of zeros there is no logarithm.
    if log and any(value for values in series.values() for value in values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _place: _number(value))
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    _date_axis(axes, times)
    _legend(figure, axes)
    return Plot(name=name, title=title, png=_png(figure))


def _figure(title: str, *, height: float = _HEIGHT_INCHES) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, horizontalalignment="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(lambda value, _place: _number(value))
    axes.grid(visible=True, color=_FAINT, linewidth=0.8)
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)
    return figure, axes


def _date_axis(axes: Axes, times: Sequence[datetime]) -> None:
    dates = _matplotlib_dates()
    if len(set(times)) == 1:
        # Left to itself a single moment gets an axis of years.
        axes.set_xlim(*_dates([times[0] - timedelta(hours=1), times[0] + timedelta(hours=2)]))

    locator = dates.AutoDateLocator(minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    # Says the day once and only what changes at each tick: nothing overlaps.
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.set_xlabel("time (UTC)")


def _dates(times: Sequence[datetime]) -> Any:
    return _matplotlib_dates().date2num(list(times))


def _matplotlib_dates() -> Any:
    """The module without its types: matplotlib has none for it."""
    from matplotlib import dates

    return dates


def _whole_numbers(axis: Any) -> None:
    """Show no fractions: counts have none."""
    axis.get_major_locator().set_params(integer=True)


def _legend(figure: Any, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        style = {"frameon": False, "fontsize": 9, "labelcolor": _INK}
        # Below the plot, so that it hides nothing.
        figure.legend(handles, labels, loc="outside lower left", ncols=_legend_columns(labels), **style)


def _legend_columns(labels: Sequence[str]) -> int:
    return 1 if max(map(len, labels)) > 24 else min(4, len(labels))


def _height(series: Series) -> float:
    """The height of a figure whose legend has room below the plot."""
    labels = [_shortened(label) for label in series] or [""]
    return _HEIGHT_INCHES + _LEGEND_INCHES * -(-len(labels) // _legend_columns(labels))


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box; that needs no warning.
        warnings.filterwarnings("ignore", message="Glyph")
        canvas: Any = FigureCanvasAgg(figure)
        canvas.print_png(picture, metadata={"Software": ""})
    return picture.getvalue()


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _shortened(label: str) -> str:
    """A label that fits and that matplotlib shows as it is: it would read `$` as a formula and hide a leading `_`."""
    text = label if len(label) <= _LABEL_CHARACTERS else label[: _LABEL_CHARACTERS - 1] + "…"
    printable = "".join(character if character.isprintable() else " " for character in text)
    escaped = printable.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped or "(no text)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


REPORT: Final = "report.html"

_STYLE: Final = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f8fa; color: #1f2328; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
p { margin: .25rem 0 .75rem; }
.made { color: #57606a; margin-bottom: 1.5rem; }
section, .facts { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; }
section, .facts { padding: 1rem 1.25rem; margin: 0 0 1.25rem; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; }
.facts div { display: flex; flex-direction: column-reverse; }
.facts dt { color: #57606a; font-size: .85rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
img { max-width: 100%; height: auto; display: block; margin: .5rem 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: .75rem 1.5rem; }
.pictures { margin: .75rem 0 1rem; }
figure { margin: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .85rem; color: #57606a; }
figcaption b { color: #1f2328; }
figcaption i { display: inline-block; width: .75rem; height: .2rem; margin-right: .35rem; vertical-align: middle; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 10.5px system-ui, sans-serif; fill: #57606a; }
svg .grid { stroke: #d8dee4; stroke-width: .8; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid #d8dee4; }
th { color: #57606a; font-weight: 600; vertical-align: bottom; }
td { overflow-wrap: break-word; min-width: 3.5rem; }
td:first-child:not(.time) { min-width: 12rem; }
th:last-child, td:last-child { padding-right: 0; }
.list { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.time { white-space: nowrap; font-variant-numeric: tabular-nums; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""

Cell = str | int | float | datetime | Sequence[str] | None


class ReportTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table in a report."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a report: a sentence about what it shows, then plots or pictures (figures as HTML), then a table."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    pictures: Sequence[str] = ()
    table: ReportTable | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a report. `facts` are the numbers on top."""

    title: str
    made: str
    facts: Sequence[tuple[str, Cell]]
    sections: Sequence[ReportSection]


def report_of(
    context: Context, title: str, facts: Sequence[tuple[str, Cell]], sections: Sequence[ReportSection]
) -> Report:
    """A report on the pipeline's data folder, made now."""
    now = datetime.fromtimestamp(context.world.clock.now_ns() / 1e9, UTC)
    return Report(title=title, made=f"{context.folder}, {now:%Y-%m-%d %H:%M} UTC", facts=facts, sections=sections)


def html_of(report: Report) -> str:
    """The whole page."""
    facts = "".join(f"<div><dt>{escape(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in report.facts)
    sections = "\n".join(_section(section) for section in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Should anything slip through the escaping, the browser still loads and runs nothing.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(report.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(report.title)}</h1>\n<p class="made">{escape(report.made)}</p>\n'
        f'<dl class="facts">{facts}</dl>\n{sections}\n</main>\n</body>\n</html>\n'
    )


def write_report(world: World, folder: str, report: Report) -> str:
    """Write the page and its pictures. Returns the path of the page."""
    world.disk.make_folder(folder)
    for section in report.sections:
        for plot in section.plots:
            durable_replace(world.disk, folder, f"{plot.name}.png", plot.png)
    durable_replace(world.disk, folder, REPORT, html_of(report).encode())
    return f"{folder}/{REPORT}"


def _section(section: ReportSection) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    for plot in section.plots:
        inlined = base64.b64encode(plot.png).decode()
        parts.append(f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{inlined}">')
    if section.pictures:
        parts.append(f'<div class="pictures">{"".join(section.pictures)}</div>')
    if section.table is not None:
        parts.append(_table(section.table))
    return "\n".join([*parts, "</section>"])


def _table(table: ReportTable) -> str:
    kinds = [_kind([row[place] for row in table.rows]) for place in range(len(table.columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.columns, kinds, strict=True))
    rows = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _kind(cells: Sequence[Cell]) -> str:
    given = [cell for cell in cells if cell is not None]
    if given and all(isinstance(cell, int | float) for cell in given):
        return ' class="number"'
    if given and all(isinstance(cell, datetime) for cell in given):
        return ' class="time"'
    return "" if not given or any(isinstance(cell, str) for cell in given) else ' class="list"'


def _text(cell: Cell) -> str:
    match cell:
        case None:
            return "–"
        case datetime():
            return escape(f"{cell:%Y-%m-%d %H:%M}")
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.3f}"
        case str():
            return escape(cell)
    return "<br>".join(escape(item) for item in cell)


# The folder of a report, which each run replaces.


@contextmanager
def replaced_as_a_whole(context: Context) -> Iterator[str]:
    """A folder to write into, which becomes that of the report at the end of the block. Errors change nothing."""
    disk, fresh = context.disk, f"{context.project.home}/_staging/{context.name}"
    remove_tree(disk, fresh)
    disk.make_folder(fresh)
    yield fresh
    swap_in(disk, fresh, context.report_folder)


def swap_in(disk: LakeDisk, fresh: str, table: str) -> None:
    """Put `fresh` in the place of `table`, and remove what was there."""
    for name in disk.files_below(fresh):
        disk.sync_file(f"{fresh}/{name}")
    _put_at(disk, fresh, table)
    disk.sync_folder(posixpath.dirname(table))
    for old in (f"{fresh}.old", fresh):
        remove_tree(disk, old)


def _put_at(disk: LakeDisk, new: str, place: str) -> None:
    """Move a folder to a place. What was there has the name `new` after that, or `new` with `.old`."""
    if not disk.exists(place):
        disk.make_folder(posixpath.dirname(place))
        disk.rename(new, place)
    elif not disk.exchange(new, place):
        # This disk cannot do it in one step. Rows that are missing for a moment are better than rows there twice.
        remove_tree(disk, f"{new}.old")
        disk.rename(place, f"{new}.old")
        disk.rename(new, place)
