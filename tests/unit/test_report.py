"""A report is one page that needs nothing else, and nothing in it is taken for markup."""

from __future__ import annotations

import re
import struct
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from holdfast.env import real_world
from holdfast.spark.pipelines import report
from holdfast.spark.pipelines.report import Report, ReportSection, ReportTable, html_of, write_report

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOURS = [NOON + timedelta(hours=hour) for hour in range(5)]
EVIL = "<script>alert('&\"')</script>"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.words += data


def report_of(*sections: ReportSection, title: str = "Dead letters") -> Report:
    return Report(title=title, made=EVIL, facts=[("letters", 1234), (EVIL, EVIL)], sections=sections)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_every_value_is_escaped():
    table = ReportTable(columns=[EVIL, "list"], rows=[[EVIL, [EVIL, EVIL]]])
    plot = report.Plot(name="plot", title=EVIL, png=b"png")
    page = Page(html_of(report_of(ReportSection(title=EVIL, text=EVIL, table=table, plots=[plot]), title=EVIL)))
    assert "script" not in page.tags
    assert page.words.count(EVIL) == 11


def test_the_page_needs_no_other_file_and_no_script(tmp_path: Path):
    plot = report.bars("kinds", "Kinds of error", {"timed out": 3}, unit="letters")
    path = write_report(real_world(), str(tmp_path / "report"), report_of(ReportSection(title="Kinds", plots=[plot])))
    page = Page(Path(path).read_text("utf-8"))
    assert [source[:22] for source in page.sources] == ["data:image/png;base64,"]
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert (tmp_path / "report" / "kinds.png").read_bytes() == plot.png
    assert sorted(found.name for found in (tmp_path / "report").iterdir()) == ["kinds.png", "report.html"]


def test_a_report_is_replaced_as_a_whole(tmp_path: Path):
    write_report(real_world(), str(tmp_path), report_of(title="a much longer title than the second one"))
    path = write_report(real_world(), str(tmp_path), report_of(title="second"))
    text = Path(path).read_text("utf-8")
    assert text.endswith("</html>\n")
    assert "longer" not in text


def test_numbers_stand_on_the_right_and_are_readable():
    table = ReportTable(columns=["count", "share", "at", "none"], rows=[[1234567, 0.5, NOON, None]])
    text = html_of(report_of(ReportSection(title="Table", table=table)))
    assert '<td class="number">1,234,567</td><td class="number">0.500</td>' in text
    assert '<td class="time">2026-11-16 12:00</td><td>–</td>' in text


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 5])
def test_plots_can_be_drawn_of_any_number_of_values(count: int):
    hours, values = HOURS[:count], [float(number) for number in range(count)]
    drawn = [
        report.lines("a", "A", hours, {"p50": values, "p99": [None] * count}, unit="seconds"),
        report.lines("b", "B", hours, {"p50": values}, unit="seconds", log=True),
        report.stacked("c", "C", hours, {"x": values, "y": values}, unit="letters", step_s=3600),
        report.bars("d", "D", {str(number): value for number, value in enumerate(values)}, unit="letters"),
        report.columns("e", "E", {str(number): value for number, value in enumerate(values)}, unit="n", label="tries"),
    ]
    assert all(size_of(plot.png)[0] == 1045 for plot in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["$x^$", "_hidden", "", "a\x00b\nc", "x" * 500, "名前"])
def test_labels_are_drawn_as_they_are_whatever_they_hold(label: str):
    plot = report.stacked("a", "A", HOURS, {label: [1, 2, 3, 4, 5]}, unit="letters", step_s=3600)
    assert size_of(plot.png)[0] == 1045
    assert size_of(report.bars("b", "B", {label: 1}, unit="letters").png)[0] == 1045


def test_the_page_says_that_browsers_may_load_nothing():
    assert re.search(r"Content-Security-Policy.*default-src 'none'", html_of(report_of()))
