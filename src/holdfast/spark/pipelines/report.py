"""A report is one HTML file that needs nothing else: pictures inside, no script, no network; and the PNGs beside it.

Everything in it may come from messages of strangers, so every value is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Final

import msgspec

from holdfast.env import World
from holdfast.spark.pipelines.plots import Plot
from holdfast.storage.files import durable_replace

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


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a report."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a report: what it shows in a sentence, then pictures, then numbers."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    table: Table | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report says; `facts` are the few numbers on top."""

    title: str
    made: str
    facts: Sequence[tuple[str, Cell]]
    sections: Sequence[Section]


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
    """Write the page and its pictures; answers with the page's path."""
    world.disk.make_folder(folder)
    for section in report.sections:
        for plot in section.plots:
            durable_replace(world.disk, folder, f"{plot.name}.png", plot.png)
    durable_replace(world.disk, folder, REPORT, html_of(report).encode())
    return f"{folder}/{REPORT}"


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    for plot in section.plots:
        inlined = base64.b64encode(plot.png).decode()
        parts.append(f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{inlined}">')
    if section.table is not None:
        parts.append(_table(section.table))
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
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
