"""The picture: one panel for each operation, the fastest on top, ours in colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import wording
from bench.harness import Operation
from bench.machine import title
from bench.peers.base import KILL, NO_ACK, NOTHING, POWER_CUT
from bench.table import Row

if TYPE_CHECKING:
    from bench.report import Report

# Okabe and Ito's blues against greys, the darker the safer: print and any eye can tell them apart.
_OURS = {KILL: "#56B4E9", POWER_CUT: "#0072B2"}
_PEERS = {NOTHING: "#DEDEDE", KILL: "#B3B3B3", POWER_CUT: "#7A7A7A"}
_AFTER = {NOTHING: "nothing, or has no ack", KILL: "kill -9", POWER_CUT: "a power cut"}
_OUR_INK = "#0067A1"
_INK = "#222222"
_FAINT = "#6B6B6B"
_BETTER = {
    "messages": "messages a second · time for each; longer is better",
    "opening": "time to open · messages held; shorter is better",
    "latency": "p50 · p99; shorter is better",
    "beside": "messages a second · CPU time for each; longer is better",
    "memory": "peak of a worker; shorter is better",
    "spark": "messages a second · time for each; longer is better",
    "idle": "memory for those who wait; shorter is better",
}

# In inches.
_BAR, _PANEL_HEAD, _PAGE_HEAD, _PAGE_FOOT = 0.26, 0.66, 1.08, 0.12
_LABELS, _BARS, _MARGIN = 3.1, 3.55, 0.3
_COLUMN = _LABELS + _BARS


@dataclass(frozen=True)
class _Panel:
    operation: Operation
    rows: list[Row]

    @property
    def height(self) -> float:
        return _PANEL_HEAD + _BAR * len(self.rows)


def draw(report: Report, folder: Path, name: str = "results") -> list[Path]:
    """Write NAME.png and NAME.svg; answers their paths. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [_Panel(operation, measured) for operation, rows in report.tables() if (measured := _with_figures(rows))]
    style: Any = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK, "svg.fonttype": "path"}
    # A fixed salt: the same figures give the same file, and version control shows no change.
    with plt.rc_context({**style, "svg.hashsalt": "holdfast"}):
        figure = _figure(plt, panels, report)
        paths = [folder / f"{name}.png", folder / f"{name}.svg"]
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
        plt.close(figure)
    return paths


def _with_figures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.summary]


def _figure(plt: Any, panels: list[_Panel], report: Report) -> Any:
    columns = _columns(panels)
    width = 2 * _COLUMN + 3 * _MARGIN
    height = _PAGE_HEAD + max(sum(panel.height for panel in column) for column in columns) + _PAGE_FOOT
    figure = plt.figure(figsize=(width, height), facecolor="white")
    _page_head(figure, report, width, height)
    for at, column in enumerate(columns):
        left = _MARGIN + at * (_COLUMN + _MARGIN) + _LABELS
        top = height - _PAGE_HEAD
        for panel in column:
            bars = _BAR * len(panel.rows)
            bottom = top - _PANEL_HEAD + 0.24 - bars
            axes = figure.add_axes((left / width, bottom / height, (_BARS - 1.15) / width, bars / height))
            _draw_panel(axes, panel)
            top -= panel.height
    return figure


def _columns(panels: list[_Panel]) -> list[list[_Panel]]:
    """Two columns of about the same height, the order kept: down the left one, then down the right one."""
    whole = sum(panel.height for panel in panels)
    cuts = range(len(panels) + 1)
    best = min(cuts, key=lambda cut: abs(whole / 2 - sum(panel.height for panel in panels[:cut])))
    return [panels[:best], panels[best:]]


def _page_head(figure: Any, report: Report, width: float, height: float) -> None:
    def text(down: float, words: str, **style: Any) -> None:
        figure.text(_MARGIN / width, 1 - down / height, words, va="top", **style)

    text(0.18, "Holdfast and what else one could use", fontsize=15, fontweight="bold")
    text(
        0.52,
        f"{title(report.machine)}. {report.how}. Logarithmic scales.",
        color=_FAINT,
    )
    _legend(figure, width, height)


def _legend(figure: Any, width: float, height: float) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colour, label=f"{whose} survives {_AFTER[survives]}")
        for whose, colours in (("ours", _OURS), ("a peer's", _PEERS))
        for survives, colour in colours.items()
    ]
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(_MARGIN / width, 1 - 0.77 / height),
        ncols=len(patches),
        borderpad=0,
        borderaxespad=0,
        frameon=False,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.6,
    )


def _draw_panel(axes: Any, panel: _Panel) -> None:
    values = [_value(row) for row in panel.rows]
    axes.set_xscale("log")
    # Half a decade of room, so that the shortest bar can still be seen; its length says nothing by itself.
    axes.set_xlim(min(values) / 3, max(values))
    axes.barh(range(len(values)), values, height=0.74, color=[_colour(row) for row in panel.rows])
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_axis_off()
    for at, row in enumerate(panel.rows):
        _draw_labels(axes, at, row, values[at])
    _at_left(axes, -0.62, panel.operation.name, fontsize=11, fontweight="bold", va="bottom")
    axes.annotate(
        _BETTER[panel.operation.measures], (1, 1), (1.15 * 72, 4), "axes fraction", "offset points",
        ha="right", va="bottom", color=_FAINT, fontsize=8,
    )  # fmt: skip


def _value(row: Row) -> float:
    assert row.summary is not None
    return {
        "messages": row.summary.messages_per_second,
        "opening": row.summary.seconds,
        "latency": row.summary.median_ns,
        "beside": row.summary.messages_per_second,
        "memory": row.summary.anon_bytes or 1,
        "spark": row.summary.messages_per_second,
        "idle": row.summary.anon_bytes or 1,
    }[row.outcome.case.operation.measures]


def _colour(row: Row) -> str:
    case = row.outcome.case
    colours = _OURS if case.is_ours else _PEERS
    survives = NOTHING if case.survives == NO_ACK else case.survives
    return colours.get(survives, colours[KILL])


def _draw_labels(axes: Any, at: int, row: Row, value: float) -> None:
    case = row.outcome.case
    style = {"color": _OUR_INK if case.is_ours else _INK, "fontweight": "bold" if case.is_ours else "normal"}
    _at_left(axes, at, case.contestant, va="center", **style)
    axes.annotate(_words(row), (value, at), (4, 0), textcoords="offset points", va="center", fontsize=8, **style)


def _words(row: Row) -> str:
    summary, measures = row.summary, row.outcome.case.operation.measures
    assert summary is not None
    if measures == "opening":
        return f"{wording.duration(1e9 * summary.seconds)} · {wording.count(summary.messages)}"
    if measures == "latency":
        return f"{wording.duration(summary.median_ns)} · {wording.duration(summary.p99_ns or 0)}"
    if measures in ("memory", "idle"):
        return wording.size(summary.anon_bytes or 0)
    each = summary.cpu_ns if measures == "beside" else summary.median_ns
    return f"{wording.count(summary.messages_per_second)}/s · {wording.duration(each)}"


def _at_left(axes: Any, at: float, words: str, **style: Any) -> None:
    """Text at the left edge of the panel's column, beside bar number `at`."""
    axes.annotate(
        words, (0, at), (-_LABELS * 72, 0), axes.get_yaxis_transform(), "offset points",
        ha="left", annotation_clip=False, **style,
    )  # fmt: skip
