"""Charts and sparklines as SVG, and what the overview says needs attention."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.api.topics import GroupInfo
from holdfast.broker.samples import Sample, Samples
from holdfast.server.console.charts import NO_FLOW, Flow, bursts, charts_of, segments, spark_of
from holdfast.server.console.overview import OLD_S, QueueRow, concerns, disk_concern, totals_of

SPARK = spark_of(NO_FLOW)
COPY = "/ui/groups/copy"
START = datetime(2026, 1, 1, tzinfo=UTC)


def samples_of(mode: Any, *values: float | None) -> Samples:
    """Samples with the values as rates and ready messages; None is a step without one."""
    return Samples(
        topic="jobs",
        group="default",
        mode=mode,
        step_seconds=60,
        since=START,
        until=START + timedelta(minutes=len(values) - 1, seconds=30),
        samples=[
            Sample(
                at=START + timedelta(minutes=i),
                published_rate=value,
                handled_rate=value,
                failed_rate=0,
                ready=round(value),
                dead=0,
                oldest_seconds=value,
                handle_p50_seconds=None,
                handle_p99_seconds=None,
            )
            for i, value in enumerate(values)
            if value is not None
        ],
    )


def test_a_line_is_drawn_from_left_to_right_and_broken_by_gaps():
    assert segments([0, 10, None, 5, 5], 10, 100, 22) == ["0.0,21.0 25.0,1.0", "75.0,11.0 100.0,11.0"]
    assert segments([0, 10], 10, 100, 22, area=True) == ["0.0,22.0 0.0,21.0 100.0,1.0 100.0,22.0"]
    assert segments([None, 10, None], 10, 100, 22) == ["50.0,1.0 51.0,1.0"]
    assert segments([0, 0], 0, 100, 22) == ["0.0,21.0 100.0,21.0"]
    assert segments([], 1, 100, 22) == []


def test_what_is_above_the_scale_is_cut_and_marked():
    assert segments([5, 100], 10, 100, 22)[0].endswith("100.0,1.0")
    assert bursts([[5, 100], [1, None]], 10, 100) == ["100.0"]


def test_a_sparkline_of_a_server_that_just_began_is_no_sliver():
    flow = Flow(into=[None] * 170 + [1.0] * 10, out=[None] * 170 + [2.0] * 10)
    spark = spark_of(flow)
    assert float(spark.into[0].split(",")[0]) < 80
    assert (spark.into_now, spark.out_now, spark.seconds) == (1.0, 2.0, 120)


def test_a_burst_in_a_sparkline_is_named():
    flow = Flow(into=[1.0, 2.0] * 20 + [500.0], out=[0.0] * 41)
    assert spark_of(flow).peak == 500
    assert len(spark_of(flow).bursts) == 1
    assert spark_of(Flow(into=[1.0, 2.0], out=[0.0, 0.0])).peak == 0


@pytest.mark.parametrize(("mode", "titles"), [("queue", 5), ("stream", 3), ("topic", 1), ("total", 4)])
def test_each_mode_has_its_charts(mode, titles):
    charts = charts_of(samples_of(mode, 1, 2, 3), "1h")
    assert len(charts.charts) == titles
    assert len({chart.id for chart in charts.charts}) == titles


def test_a_chart_names_its_scale_its_peak_and_what_it_shows_now():
    (chart, *_) = charts_of(samples_of("queue", *[10, 20] * 20, 5000, 15), "1h").charts
    assert (chart.top, chart.peak) == ("30.0/s", "5,000/s")
    assert chart.lines[0].last == "15.0/s"
    assert "The highest value is 5,000/s" in chart.description


def test_the_table_says_what_the_charts_show():
    charts = charts_of(samples_of("queue", 1, None, 3), "1h")
    assert [values[:2] for _, values in charts.rows] == [["3.0/s", "3.0/s"], ["1.0/s", "1.0/s"]]
    assert charts.titles[:4] == ["Published", "Handled", "Failed", "Ready"]
    assert charts.rows[-1][0] == START
    assert charts.rows[0][1][5] == "–"


def test_without_samples_a_chart_says_so():
    charts = charts_of(samples_of("queue", None, None), "7d")
    assert not charts.sampled
    assert charts.charts[0].description == "No samples yet."
    assert charts.rows == []


# Totals and attention.


def row(topic: str = "jobs", group: str = "default", **facts: Any) -> QueueRow:
    return QueueRow(topic=topic, group=group, spark=SPARK, **facts)


def group_info(**facts: Any) -> GroupInfo:
    usual = {"name": "copy", "topic": "events", "mode": "stream", "lag": 0, "members": 1, "lag_seconds": 0.0}
    return GroupInfo(**usual | facts)


def test_a_message_that_two_groups_read_counts_once():
    slow, quick = row(ready=10, delayed=2, dead=1), row(group="audit", ready=4, delayed=2, leased=1, dead=2)
    assert totals_of([slow, quick, row("b", ready=1)]) == {"ready": 11, "leased": 0, "delayed": 2, "dead": 3}


def test_nothing_needs_attention_where_all_is_well():
    assert concerns([row(ready=10, age_s=OLD_S - 1, dead=3)], [group_info(lag=5, lag_seconds=10.0)]) == []


@pytest.mark.parametrize(
    ("rows", "groups", "what", "href"),
    [
        ([row(age_s=OLD_S + 1, ready=3)], [], "jobs is late", "/ui/queues/jobs/charts"),
        ([row(age_s=OLD_S + 1, ready=3, stalled=True)], [], "jobs is stalled", "/ui/workers"),
        ([row(dead=5, buried=2)], [], "jobs has new dead letters", "/ui/queues/jobs/dead"),
        (
            [row(group="ab", dead=5, buried=2)],
            [],
            "jobs, group ab has new dead letters",
            "/ui/queues/jobs/dead?group=ab",
        ),
        ([row(damaged=1)], [], "jobs is damaged", "/ui/queues/jobs"),
        ([row(problem="partition 0 is stopped: bad")], [], "jobs is damaged", "/ui/queues/jobs"),
        ([row(upkeep_error="no space left")], [], "Maintenance of jobs is failing", "/ui/queues/jobs"),
        ([], [group_info(problem="lost")], "Group copy on events is stopped", COPY),
        ([], [group_info(lag=9, lag_seconds=OLD_S)], "Group copy on events is falling behind", COPY),
        (
            [],
            [group_info(mode="query", lag=9, lag_seconds=OLD_S)],
            "Query copy on events is falling behind",
            COPY,
        ),
    ],
)
def test_what_needs_attention_is_said_with_where_to_handle_it(rows, groups, what, href):
    (found,) = concerns(rows, groups)
    assert (found.what, found.href) == (what, href)
    assert found.text
    assert found.link


def test_the_worst_comes_first_and_what_concerns_a_topic_only_once():
    spoiled = [row("c", damaged=2), row("c", group="audit", damaged=2)]
    rows = [row(dead=5, buried=2), row("b", upkeep_error="bad"), *spoiled]
    wanted = ["c is damaged", "Maintenance of b is failing", "jobs has new dead letters"]
    assert [each.what for each in concerns(rows, [])] == wanted


def test_a_disk_that_is_nearly_full_is_said():
    engine: Any = SimpleNamespace(settings=SimpleNamespace(topic=SimpleNamespace(min_free_bytes=100)))
    assert disk_concern(engine, 10**12) == []
    (found,) = disk_concern(engine, 10**6)
    assert (found.what, found.href) == ("The disk is nearly full", "/ui/health")
