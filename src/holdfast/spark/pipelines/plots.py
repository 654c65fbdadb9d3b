"""Plots of one style: dark text on light, colours that everybody can tell apart, dates that do not overlap.

Each function answers with the bytes of a PNG. Figures are made without pyplot: no display, no state between them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: told apart by people who see fewer colours, and in print.
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
    """A picture: `name` is that of its file, `title` says what one sees, also to those who cannot."""

    name: str
    title: str
    png: bytes


def bars(name: str, title: str, values: Mapping[str, float], *, unit: str) -> Plot:
    """One bar for each label, the first on top; labels are long and so stand on the left."""
    figure, axes = _figure(title, height=1.3 + _BAR_INCHES * max(1, len(values)))
    labels = [_shortened(label) for label in values]
    places = range(len(labels))
    drawn = axes.barh(places, list(values.values()), color=COLOURS[0], height=0.7)
    axes.bar_label(drawn, labels=[_number(value) for value in values.values()], padding=4, color=_INK, fontsize=9)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*values.values(), 1]) * 1.12)
    _whole_numbers(axes.xaxis)
    axes.xaxis.set_major_formatter(lambda value, _place: _number(value))
    axes.set_xlabel(unit)
    axes.grid(visible=False, axis="y")
    return Plot(name=name, title=title, png=_png(figure))


def columns(name: str, title: str, values: Mapping[str, float], *, unit: str, label: str) -> Plot:
    """One column for each short label, in their order: how often each number of attempts came."""
    figure, axes = _figure(title)
    drawn = axes.bar(range(len(values)), list(values.values()), color=COLOURS[0], width=0.7)
    axes.bar_label(drawn, labels=[_number(value) for value in values.values()], padding=3, color=_INK, fontsize=9)
    axes.set_xticks(range(len(values)), list(values))
    _whole_numbers(axes.yaxis)
    axes.set_ylim(0, max([*values.values(), 1]) * 1.12)
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    axes.grid(visible=False, axis="x")
    return Plot(name=name, title=title, png=_png(figure))


def stacked(name: str, title: str, times: Sequence[datetime], series: Series, *, unit: str, step_s: float) -> Plot:
    """Counts over time, one colour for each series, stacked; each column is as wide as its time."""
    figure, axes = _figure(title, height=_height(series))
    base = [0.0] * len(times)
    for number, (label, values) in enumerate(series.items()):
        heights = [value or 0.0 for value in values]
        width = step_s / 86_400 * 0.9
        axes.bar(
            _dates(times),
            heights,
            width=width,
            bottom=base,
            align="edge",
            color=_colour(number),
            label=_shortened(label),
        )
        base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.set_ylim(0, max([*base, 1]) * 1.08)
    _whole_numbers(axes.yaxis)
    axes.set_ylabel(unit)
    _date_axis(axes, times)
    _legend(figure, axes)
    return Plot(name=name, title=title, png=_png(figure))


def lines(name: str, title: str, times: Sequence[datetime], series: Series, *, unit: str, log: bool = False) -> Plot:
    """Values over time, one line with its own marker for each series; a gap where there is no value."""
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
    """Matplotlib says nothing of the types there."""
    from matplotlib import dates

    return dates


def _whole_numbers(axis: Any) -> None:
    """There is no half of a letter."""
    axis.get_major_locator().set_params(integer=True)


def _legend(figure: Any, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Below the plot, so that it hides nothing.
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=_legend_columns(labels),
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
        )


def _legend_columns(labels: Sequence[str]) -> int:
    return 1 if max(map(len, labels)) > 24 else min(4, len(labels))


def _height(series: Series) -> float:
    """So high that the legend takes nothing from the plot."""
    labels = [_shortened(label) for label in series] or [""]
    return _HEIGHT_INCHES + _LEGEND_INCHES * -(-len(labels) // _legend_columns(labels))


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A sign that the font lacks is drawn as a box, and no reason to bother anybody.
        warnings.filterwarnings("ignore", message="Glyph")
        canvas: Any = FigureCanvasAgg(figure)
        canvas.print_png(picture, metadata={"Software": ""})
    return picture.getvalue()


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _shortened(label: str) -> str:
    """A label that fits, and that matplotlib takes for what it is: no formulas, nothing hidden."""
    text = label if len(label) <= _LABEL_CHARACTERS else label[: _LABEL_CHARACTERS - 1] + "…"
    printable = "".join(character if character.isprintable() else " " for character in text)
    escaped = printable.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped or "(no text)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"
