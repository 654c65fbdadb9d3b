"""`holdfast stats --history`: sparklines of what was sampled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import holdfast
from holdfast.api import port_of
from holdfast.broker.samples import Sample, Samples, line_of, peak_of, squeezed, top_of
from holdfast.cli.look.stats import sparkline
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys, monkeypatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def jobs(tmp_path):
    """A queue that was sampled once."""
    with holdfast.open(tmp_path / "jobs") as queue:
        port_of(queue).engine.sampler.before_close()  # the only sample is that of the test
        queue.put_many([b"a"] * 10)
        queue.get(timeout=0).ack()
        port_of(queue).engine.sampler.sample()
    return tmp_path / "jobs"


def test_the_history_of_a_queue_has_a_sparkline_for_each_thing(run, jobs):
    done = run("stats", jobs, "--history", "1h")
    assert done.code == 0, done.err
    assert "jobs, group default" in done.out
    lines = {line.split("  ")[0]: line for line in done.out.splitlines()}
    assert set(lines) >= {"published", "handled", "failed", "ready", "oldest", "handling, median"}
    assert "█" in lines["ready"]
    assert " 9 " in lines["ready"]


def test_the_history_as_json_is_what_the_library_returns(run, jobs):
    found = run("stats", jobs, "--history", "15m", "--json").document
    assert (found["topic"], found["group"], found["mode"], found["step_seconds"]) == ("jobs", "default", "queue", 5)
    assert found["samples"][0]["ready"] == 9


def test_of_several_topics_all_together_are_shown(run, tmp_path):
    with holdfast.open_broker(tmp_path / "shop") as broker:
        for name in ("a", "b"):
            broker.queue(name).put(b"x")
        port_of(broker).engine.sampler.sample()
    done = run("stats", tmp_path / "shop", "--history", "15m")
    assert "all topics" in done.out
    one = run("stats", tmp_path / "shop", "--topic", "a", "--history", "15m", "--json").document
    assert one["samples"][0]["ready"] == 1


def test_without_samples_it_says_when_there_are_some(run, tmp_path):
    holdfast.open(tmp_path / "new").close()
    done = run("stats", tmp_path / "new", "--history", "7d")
    assert done.code == 0
    assert "takes one every 5 seconds" in " ".join(done.out.split())


@pytest.mark.parametrize("wrong", [["8d"], ["0"], ["soon"], ["1h", "--watch"]])
def test_a_wrong_time_is_refused(run, jobs, wrong):
    assert run("stats", jobs, "--history", *wrong).code == 2


# Lines.


def samples_of(*values: float | None) -> Samples:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return Samples(
        topic="jobs",
        group="default",
        mode="queue",
        step_seconds=60,
        since=start,
        until=start + timedelta(minutes=len(values) - 1),
        samples=[
            Sample(
                at=start + timedelta(minutes=i),
                published_rate=value,
                handled_rate=0,
                failed_rate=0,
                ready=0,
                dead=0,
                oldest_seconds=0,
                handle_p50_seconds=None,
                handle_p99_seconds=None,
            )
            for i, value in enumerate(values)
            if value is not None
        ],
    )


def test_a_line_has_a_gap_where_nothing_was_sampled():
    assert line_of(samples_of(1, None, 3), "published_rate") == [1, None, 3]


def test_a_squeezed_line_keeps_its_peaks():
    assert squeezed([1, 9, 2, None, None, None, 4, 3], 4) == [9, 2, None, 4]


def test_a_burst_does_not_flatten_the_rest():
    usual = [8.0, 9.0, 10.0] * 20
    assert top_of(usual) == 10
    assert top_of([*usual, 1000.0]) == 15
    assert peak_of([*usual, 1000.0]) == 1000
    assert top_of([*usual, 30.0]) == 30
    assert top_of([0.0, None, 0.0]) == 0


def test_a_sparkline_marks_what_is_above_its_scale():
    line = sparkline([1.0, None, *[10.0, 5.0] * 20, 1000.0])
    assert (line[0], line[1], line[-1]) == ("▁", " ", "▲")
    assert len(set(line)) == 5
    assert sparkline([0.0, 0.0]) == "▁▁"
