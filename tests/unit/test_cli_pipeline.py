"""`holdfast pipeline`, as far as it needs no JVM."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("pyspark")


import holdfast
from holdfast.cli import output
from holdfast.cli import pipeline as pipeline_view
from holdfast.cli.output import Console
from holdfast.env import ManualClock, real_world
from holdfast.errors import InvalidRequest
from holdfast.spark.pipelines.checkpoint import Ledger, LedgerBatch, Tally, held, note_run, runs_of, without
from holdfast.spark.pipelines.project import read_project
from holdfast.spark.pipelines.spec import Context, Outcome, Summary
from tests.unit.commands import Run, everything, runner

SHOP = """\
folder: shop
lake: lake
pipelines:
  land: {kind: land, topics: [orders]}
  silver: {kind: refine, source: land, key: id}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path) -> Run:
    monkeypatch.chdir(tmp_path)
    with holdfast.open_broker("shop", body_type=str) as broker:
        broker.create_topic("orders", partitions=2)
        for number in range(5):
            broker.publish("orders", f"order {number}", partition=0)
    (tmp_path / "pipelines.yaml").write_text(SHOP, encoding="utf-8")
    return runner(capsys, monkeypatch)


def test_ls_lists_what_the_file_declares(run):
    done = run("pipeline", "ls")
    assert done.code == 0
    assert [line.split()[:3] for line in done.out.splitlines()[1:]] == [
        ["land", "land", "orders"],
        ["silver", "refine", "land"],
    ]
    assert run("pipeline", "ls", "--json").document["pipelines"][1]["options"]["key"] == "id"


def test_plan_shows_offsets_and_writes_nothing(run, tmp_path):
    before = everything(tmp_path)
    done = run("pipeline", "plan", "--all")
    assert done.code == 0
    assert "reads   orders/0 from 0 to 5 (5 rows)" in done.out
    [land, silver] = run("pipeline", "plan", "land", "silver", "--json").document["plans"]
    assert (land["rows"], silver["rows"]) == (5, 0)
    assert everything(tmp_path) == before


def test_status_tells_batches_lag_and_who_runs_it(run, tmp_path):
    project = read_project(tmp_path / "pipelines.yaml")
    ledger = Ledger(real_world(), project.checkpoint("land"))
    with held(real_world(), project, project.spec("land")):
        batch = LedgerBatch(batch=0, rows_in=3, rows_out=2, dropped=1, at_ms=1_700_000_000_000)
        ledger.decide(batch)
        assert run("pipeline", "status", "--json").document["pipelines"][0]["pending"] is True
        ledger.finish(batch)
        [land, silver] = run("pipeline", "status", "--json").document["pipelines"]
        assert (land["batches"], land["rows_in"], land["dropped"], land["last_batch"]) == (1, 3, 1, 0)
        assert land["running_pid"] is not None
        assert (silver["batches"], silver["lag"], silver["running_pid"]) == (0, 2, None)
        busy = run("pipeline", "run", "land")
        assert busy.code == 2
        assert "is owned by process" in busy.err
    assert "2023-11-14 22:13:20" in run("pipeline", "status").out


def test_a_table_with_a_pending_batch_is_not_cleaned_up(run, tmp_path):
    import pyarrow as pa
    from deltalake import write_deltalake

    project = read_project(tmp_path / "pipelines.yaml")
    write_deltalake(project.table("land"), pa.table({"n": [1]}))
    waiting = Path(project.table("land"), "of-the-batch.parquet")
    waiting.write_bytes(b"rows that the table does not name yet")
    ledger, batch = Ledger(real_world(), project.checkpoint("land")), LedgerBatch(batch=0)
    ledger.decide(batch)
    for command in (("vacuum", "--older-than", "0s"), ("optimize",)):
        refused = run("pipeline", *command, "land")
        assert refused.code == 2
        assert "land has a batch that is decided and not finished" in refused.err
    assert waiting.exists()
    ledger.finish(batch)
    assert run("pipeline", "vacuum", "land", "--older-than", "0s").code == 0
    assert not waiting.exists()


def test_plan_and_status_are_right_before_and_after_a_reconcile_has_run(run, tmp_path):
    declared = tmp_path / "pipelines.yaml"
    text = declared.read_text("utf-8")
    proof = "  proof: {kind: reconcile, source: land}\n  again: {kind: replay, source: land, to: orders}\n"
    declared.write_text(f"{text.rstrip()}\n{proof}", "utf-8")
    done = run("pipeline", "plan", "--all", "--json")
    assert done.code == 0
    plans = {plan["pipeline"]: plan for plan in done.document["plans"]}
    assert plans["land"]["rows"] == 5
    for name in ("proof", "again"):
        assert plans[name]["notes"] == ["land has not run yet: run it first"]
    before = {each["pipeline"]: each for each in run("pipeline", "status", "--json").document["pipelines"]}
    assert (before["proof"]["ok"], before["proof"]["last_run_at_ms"]) == (None, None)
    assert run("pipeline", "status").out.count("never") == 4

    project = read_project(declared)
    for name in ("proof", "land"):
        Path(project.checkpoint(name)).mkdir(parents=True)
    found = Summary(pipeline="proof", kind="reconcile", rows_in=7, rows_out=6, ok=False)
    note_run(real_world(), project, Outcome(pipeline="proof", summary=found))
    note_run(real_world(), project, Outcome(pipeline="land", error=InvalidRequest("no such topic")))
    after = {each["pipeline"]: each for each in run("pipeline", "status", "--json").document["pipelines"]}
    assert (after["proof"]["rows_in"], after["proof"]["rows_out"], after["proof"]["ok"]) == (7, 6, False)
    assert after["proof"]["last_run_at_ms"] is not None
    assert (after["land"]["ok"], after["land"]["error"]) == (False, "no such topic")
    shown = {line.split()[0]: line for line in run("pipeline", "status").out.splitlines()}
    assert "found problems" in shown["proof"]
    assert "failed" in shown["land"]
    assert "never" in shown["silver"]


def test_a_pipeline_that_cannot_run_does_not_hide_the_plans_of_others(run, tmp_path):
    declared = tmp_path / "pipelines.yaml"
    text = declared.read_text("utf-8")
    other = "  gone: {kind: land, topics: [no-such-topic]}\n"
    declared.write_text(f"{text.rstrip()}\n{other}", "utf-8")
    done = run("pipeline", "plan", "--all", "--json")
    assert done.code == 2
    assert {plan["pipeline"]: plan["rows"] for plan in done.document["plans"]} == {"land": 5, "silver": 0}
    assert "there is no topic no-such-topic" in done.err
    status = {each["pipeline"]: each["lag"] for each in run("pipeline", "status", "--json").document["pipelines"]}
    assert status == {"land": 5, "silver": 0, "gone": None}
    # The source of silver starts over, so that silver cannot go on.
    project = read_project(declared)
    for name, batch in (("land", LedgerBatch(batch=0)), ("silver", LedgerBatch(batch=0, through=0, source_id="one"))):
        ledger = Ledger(real_world(), project.checkpoint(name))
        ledger.decide(batch)
        ledger.finish(batch)
    done = run("pipeline", "plan", "--all")
    assert done.code == 2
    assert "silver: its source land was started over" in done.err
    assert run("pipeline", "status").code == 0


def test_new_writes_a_file_that_can_be_read_and_never_writes_over_one(run, tmp_path):
    (tmp_path / "pipelines.yaml").unlink()
    assert run("pipeline", "new", "mine").code == 0
    assert run("pipeline", "ls", "--json").document["pipelines"][0]["pipeline"] == "mine"
    written = (tmp_path / "pipelines.yaml").read_text(encoding="utf-8")
    more = run("pipeline", "new", "silver", "--kind", "refine")
    assert (more.code, more.out.splitlines()[:2]) == (0, ["  silver:", "    kind: refine"])
    assert (tmp_path / "pipelines.yaml").read_text(encoding="utf-8") == written
    assert run("pipeline", "new", "my-own", "--python").code == 0
    assert run("pipeline", "new", "my-own", "--python").code == 2
    assert "def my_own(rows" in (tmp_path / "my_own.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "name a pipeline, or use --all; known pipelines: land, silver"),
        (("run", "lnd"), "did you mean 'land'?"),
        (("run", "land", "--all"), "not both"),
        (("run", "land", "--config", "none.yaml"), "there is no file none.yaml"),
        (("run", "land", "--config", "shop"), "is a folder"),
        (("run", "land", "--follow", "--every", "1ms"), "give 100 ms or more"),
        (("run", "land", "--full-refresh"), "asks for confirmation"),
        (("run", "land", "--conf", "ui.enabled=true"), "is not a setting: give spark.NAME=VALUE"),
        (("run", "land", "--conf", "spark.remote=sc://host"), "with --remote sc://host, not with --conf"),
        (("run", "land", "--remote", "sc://host", "--master", "local[2]"), "give --remote or --master, not both"),
        (("run", "land", "--remote", "http://host"), "give sc://HOST:PORT"),
        (("new", "x", "--kind", "lnd"), "did you mean 'land'?"),
        (("new", "../x"), "cannot be used"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(run, arguments, words):
    done = run("pipeline", *arguments)
    assert done.code == 2
    assert words in done.err
    assert done.err.count("\n") == 1


def test_without_spark_it_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(output, "is_installed", lambda package: package != "pyspark")
    done = run("pipeline", "ls")
    assert (done.code, done.err) == (
        2,
        "error: pipelines run on Spark, and pyspark cannot be found: pip install 'holdfast[spark]'\n",
    )


def test_a_terminal_sees_a_line_for_each_pipeline_and_a_pipe_sees_none(monkeypatch):
    from holdfast.spark.pipelines.spec import Progress

    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(output, "stderr", lambda: Console(screen))
    with pipeline_view.bars(["land", "silver"], shown=True) as tell:
        tell(Progress(pipeline="land", batch=3, rows_in=1500, rows_out=1400, lag=500))
        tell(Progress(pipeline="late", batch=0, rows_in=1, rows_out=1))  # one that nobody named: no harm
    shown = screen.getvalue()
    assert "batch 3, 1,500 rows in, 1,400 out" in shown
    assert "silver" in shown
    screen.truncate(0)
    with pipeline_view.bars(["land"], shown=False) as tell:
        tell(Progress(pipeline="land", batch=3, rows_in=1500, rows_out=1400))
    assert not screen.getvalue().strip("\0")


def test_the_first_signal_ends_a_run_in_order_and_the_second_at_once(capsys):
    class Stoppable:
        stops = 0

        def stop(self) -> None:
            self.stops += 1

    running = Stoppable()
    with pipeline_view.ending_in_order(running):
        signal.raise_signal(signal.SIGINT)
        assert running.stops == 1
        # No exception, which would free the locks while threads still write: the process is gone.
        assert {signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} == {signal.SIG_DFL}
    assert "ending; the current batch is finished first" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outcomes_are_told_in_a_table_and_in_one_document(capsys):
    from holdfast.errors import ExpectationFailed
    from holdfast.spark.pipelines.spec import Outcome, Summary

    summary = Summary(
        pipeline="land", kind="land", batches=2, rows_in=9, expectations={"a": 0, "b": 3}, notes=("done",), lag=4
    )
    outcomes = [Outcome(pipeline="land", summary=summary), Outcome(pipeline="s", error=ExpectationFailed("no"))]
    pipeline_view.show_outcomes(outcomes)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["land", "2", "9", "0", "0", "0", "0", "0", "4", "0.0"]
    assert lines[2:] == ["land: expectation b failed for 3 rows", "land: done"]
    document = pipeline_view.outcomes_document(outcomes)["pipelines"]
    assert (document[0]["rows_in"], document[0]["error"]) == (9, None)
    assert document[1] == {"pipeline": "s", "error": {"code": "expectation_failed", "message": "no"}}


def test_status_draws_the_last_runs_of_each_pipeline(run, tmp_path):
    project = read_project("pipelines.yaml")
    for number in range(4):
        late = {"late": 3 * number}
        done = Summary(
            pipeline="land", kind="land", rows_in=100 * number, rows_out=1, lag=9 - 3 * number, seconds=2.0,
            quarantined=number, expectations=late,
        )  # fmt: skip
        (tmp_path / "lake/_checkpoints/land").mkdir(parents=True, exist_ok=True)
        note_run(real_world(), project, Outcome(pipeline="land", summary=done))
    note_run(real_world(), project, Outcome(pipeline="land", error=InvalidRequest("no")))
    done = run("pipeline", "status")
    [line] = [line for line in done.out.splitlines() if "▁" in line]
    assert line.split() == ["land", "5", "1", "▁▃▆█", "150", "█▆▃▁", "0", "▁▃▆█▁", "0", "▁▃▆█▁", "0"]
    [land, silver] = run("pipeline", "status", "--json").document["pipelines"]
    assert [each["ok"] for each in land["runs"]] == [True] * 4 + [False]
    assert silver["runs"] == []


def test_a_page_shows_the_runs_of_each_pipeline_over_time(run, tmp_path):
    project = read_project("pipelines.yaml")
    (tmp_path / "lake/_checkpoints/land").mkdir(parents=True)
    for number in range(4):
        done = Summary(
            pipeline="land", kind="land", rows_in=100 * number, rows_out=50, lag=9 - 3 * number, seconds=2.0,
            quarantined=number, expectations={"late": 3 * number},
        )  # fmt: skip
        note_run(real_world(), project, Outcome(pipeline="land", summary=done))
    note_run(real_world(), project, Outcome(pipeline="land", error=InvalidRequest("<b>no</b>")))
    assert run("pipeline", "status", "--html", "page.html").code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<svg") == 4
    assert 'aria-label="Rows per second: read 0 to 150, last 150; written 25 to 25, last 25"' in page
    assert 'aria-label="Lag: rows not read yet: rows 0 to 9, last 0"' in page
    assert "late 0 to 9, last 9; dropped 0 to 0, last 0; quarantined 0 to 3, last 3" in page
    assert "5 runs, 1 of them failed" in page
    assert "It has not run yet." in page  # silver
    assert "<b>no</b>" not in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<script" not in page
    assert run("pipeline", "status", "--html", "nowhere/page.html").code == 2
    assert run("pipeline", "status", "--html", "page.html", "--json").code == 2


def test_a_run_that_goes_on_is_noted_in_parts(run, tmp_path):
    clock = ManualClock()
    world = msgspec.structs.replace(real_world(), clock=clock)
    project = read_project("pipelines.yaml")
    (tmp_path / "lake/_checkpoints/land").mkdir(parents=True)
    context = Context(world=world, session=lambda: None, project=project, spec=project.spec("land"), follow=True)
    tally = Tally(context)
    for number in range(12):
        clock.advance(ms=60_000)
        tally.add(LedgerBatch(batch=number, rows_in=10, rows_out=9, expectations={"late": 1}), lag=number)
    noted = runs_of(world, project, "land")
    assert [(each.rows_in, each.batches, each.seconds, each.lag) for each in noted] == [
        (50, 5, 300.0, 4),
        (50, 5, 300.0, 9),
    ]
    rest = without(tally.summary(), context.noted)
    assert (rest.rows_in, rest.batches, rest.expectations, rest.lag) == (20, 2, {"late": 2}, 11)
