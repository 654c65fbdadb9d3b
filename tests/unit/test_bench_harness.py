"""The benchmark harness: its arithmetic, its tables, its files. Never how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench import wording
from bench.child import Sample
from bench.harness import Case, Operation, Outcome, Timed, run, sample_count
from bench.kill import fill_and_kill
from bench.operations import all_cases
from bench.peers import EVERYBODY
from bench.peers.raw_log import RawLog
from bench.report import Report, as_json, as_markdown, write
from bench.scale import Scale, passes_that_fill, quick
from bench.stats import summaries
from bench.survival import Survivor
from bench.table import headings, rows
from bench.targets import Verdict, verdicts

PUT = Operation("put", "One message a call.")
OPENING = Operation("open after kill", "Open it.", measures="opening")
FULL = Scale()


@contextmanager
def does_nothing(folder: Path) -> Iterator[Timed]:
    yield lambda: 1


def case(contestant: str, prepare=does_nothing, operation: Operation = PUT, **more) -> Case:
    return Case(operation, contestant, prepare, more.pop("survives", "kill -9"), **more)


def measured(contestant: str, *each_ns: float, operation: Operation = PUT, messages: int = 1000) -> Outcome:
    samples = [Sample(messages, ns * messages / 1e9, 0.0) for ns in each_ns]
    return Outcome(case(contestant, operation=operation), samples)


def report_of(*outcomes: Outcome, scale: Scale = FULL) -> Report:
    machine = {
        "cores": 2,
        "python": "3.11.7",
        "file_system": "ext4",
        "date": "2025-01-31",
        "cpu": "EPYC",
        "load_before": 0.5,
    }
    survivors = [Survivor("queuelib", "nothing", "no close, no messages", "0 of 300")]
    return Report(machine, scale, 3, list(outcomes), survivors)


def test_the_contestants_take_turns_in_every_round(tmp_path):
    calls = []
    cases = [case("A"), case("B"), case("C")]
    run(cases, tmp_path, rounds=2, on_sample=lambda which, number: calls.append((which.contestant, number)))
    assert calls == [("A", 0), ("B", 0), ("C", 0), ("A", 1), ("B", 1), ("C", 1)]
    assert sample_count(cases, rounds=2) == len(calls)


def test_an_operation_may_limit_its_rounds(tmp_path):
    heavy = Operation("heavy", "Takes long.", most_rounds=1)
    (outcome,) = run([case("A", operation=heavy)], tmp_path, rounds=3)
    assert len(outcome.samples) == 1


def test_each_sample_has_a_process_and_an_empty_folder_of_its_own(tmp_path):
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        assert list(folder.iterdir()) == []
        (folder / "left behind").touch()
        yield os.getpid

    (outcome,) = run([case("A", prepare)], tmp_path, rounds=2)
    processes = {sample.messages for sample in outcome.samples}
    assert outcome.status == "measured"
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert list(tmp_path.iterdir()) == []


def test_only_the_timed_part_is_timed(tmp_path):
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        time.sleep(0.2)
        yield lambda: 7
        time.sleep(0.2)

    started = time.perf_counter()
    (outcome,) = run([case("A", prepare)], tmp_path, rounds=1)
    elapsed = time.perf_counter() - started
    assert outcome.samples[0].messages == 7
    assert outcome.samples[0].seconds <= elapsed - 0.4  # holds however slow the machine is


def test_a_contestant_that_is_not_installed_is_skipped_and_says_so(tmp_path):
    missing = case("LMDB", needs=("json", "surely_not_installed", "surely_not.below"))
    skipped, other = run([missing, case("B")], tmp_path, rounds=1)
    assert (skipped.status, skipped.samples) == ("skipped", [])
    assert skipped.problem == "not installed: surely_not_installed, surely_not.below"
    assert other.status == "measured"


def test_a_contestant_that_fails_is_out_and_the_others_go_on(tmp_path):
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        raise OSError("no room")
        yield

    failed, other = run([case("A", prepare), case("B")], tmp_path, rounds=2)
    assert failed.status == "failed"
    assert failed.problem.startswith("OSError: no room (test_bench_harness.py:")
    assert len(other.samples) == 2


def test_a_contestant_that_dies_or_hangs_is_out(tmp_path):
    dies = case("dies", lambda folder: os._exit(3))
    hangs = case("hangs", lambda folder: time.sleep(60))
    found = run([dies, hangs], tmp_path, rounds=1, timeout_s=0.3)
    assert [outcome.status for outcome in found] == ["failed", "failed"]
    assert [outcome.problem for outcome in found] == ["died without a word", "no answer within 0 s"]


def test_a_summary_is_the_median_with_its_spread_and_its_ratio_to_ours():
    found = summaries([measured("holdfast", 500, 900, 400), measured("SQLite", 10_000, 90_000, 12_000)])
    ours, peer = found["holdfast"], found["SQLite"]
    assert (ours.median_ns, ours.min_ns, ours.max_ns) == pytest.approx((500, 400, 900))
    assert ours.messages_per_second == pytest.approx(2_000_000)
    assert (ours.ratio, peer.ratio) == pytest.approx((1, 24))


def test_without_ours_there_are_no_ratios():
    assert summaries([measured("SQLite", 10_000)])["SQLite"].ratio is None


def test_openings_are_compared_only_where_both_hold_as_much():
    ours = measured("holdfast", 10, operation=OPENING, messages=1_000_000)
    same = measured("no index", 30, operation=OPENING, messages=1_000_050)
    less = measured("SQLite", 1, operation=OPENING, messages=1000)
    found = summaries([ours, same, less])
    assert found["no index"].ratio == pytest.approx(3, rel=0.01)
    assert found["SQLite"].ratio is None


def test_the_warm_up_finds_how_many_passes_fill_the_time():
    scale = Scale(body_bytes=100, warm_up_seconds=0.02, seconds=0.2, sample_bytes=100 * 1000)
    assert passes_that_fill(lambda: time.sleep(0.5), scale, messages_each=1) == 1
    assert passes_that_fill(lambda: None, scale, messages_each=10) == 100


def test_bodies_are_distinct_text_of_the_length_asked_for():
    bodies = Scale(body_bytes=33).bodies(50)
    assert {len(body) for body in bodies} == {33}
    assert len(set(bodies)) == 50
    assert all(body.isascii() for body in bodies)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (wording.count(1_234_567), "1.23 M"),
        (wording.count(999_900), "1.00 M"),
        (wording.count(45_600), "45.6 k"),
        (wording.count(12), "12.0"),
        (wording.duration(41.27), "41.3 ns"),
        (wording.duration(12_345), "12.3 µs"),
        (wording.duration(1.5e9), "1.50 s"),
        (wording.duration_range(1200, 1500), "1.20 – 1.50 µs"),
        (wording.duration_range(900, 1500), "900 ns – 1.50 µs"),
        (wording.ratio(23.4), "23× slower"),
        (wording.ratio(2.34), "2.3× slower"),
        (wording.ratio(0.5), "2.0× faster"),
        (wording.ratio(1.01), "1.0×"),
        (wording.ratio(None), "–"),
    ],
)
def test_figures_are_worded_with_three_digits_and_a_unit(text, expected):
    assert text == expected


def test_a_table_has_the_fastest_first_and_the_skipped_last():
    skipped = Outcome(case("LMDB"), status="skipped", problem="not installed: lmdb")
    found = rows([skipped, measured("SQLite WAL, NORMAL", 20_000), measured("holdfast", 800)], FULL)
    assert headings(PUT)[2:6] == ["messages/s", "a message", "min – max", "vs holdfast"]
    assert [row.cells[0] for row in found] == ["holdfast", "SQLite WAL, NORMAL", "LMDB"]
    assert found[0].cells[2:] == [
        "1.25 M", "800 ns", "800 – 800 ns", "1.0×",
        "≤ 1.0 µs: reached; ≥ 20× SQLite-based queues: reached",
    ]  # fmt: skip
    assert found[1].cells[1:6] == ["kill -9", "50.0 k", "20.0 µs", "20.0 – 20.0 µs", "25× slower"]
    assert found[2].cells[-1] == "skipped: not installed: lmdb"


def test_an_opening_is_shown_by_its_whole_time():
    (row,) = rows([measured("holdfast", 50, 60, 70, operation=OPENING, messages=10_000_000)], FULL)
    assert headings(OPENING)[2:4] == ["messages held", "time to open"]
    assert row.cells[2:5] == ["10.0 M", "600 ms", "500 – 700 ms"]


def test_a_target_is_reached_or_not():
    slow = summaries([measured("holdfast", 1100), measured("litequeue", 11_000)])
    assert verdicts("put", "holdfast", slow, FULL) == [
        Verdict("≤ 1.0 µs", reached=False),
        Verdict("≥ 20× SQLite-based queues", reached=False),
    ]


def test_a_target_is_not_judged_where_the_run_cannot_tell():
    found = summaries([measured("holdfast", 800)])
    without_peers = verdicts("put", "holdfast", found, FULL)
    assert [verdict.reached for verdict in without_peers] == [True, None]
    for other in (quick(100), Scale(body_bytes=1000)):
        assert {verdict.reached for verdict in verdicts("put", "holdfast", found, other)} == {None}


def test_the_json_has_every_round_of_everybody():
    skipped = Outcome(case("LMDB"), status="skipped", problem="not installed: lmdb")
    data = json.loads(json.dumps(as_json(report_of(measured("holdfast", 800, 900), skipped))))
    assert set(data) == {"machine", "scale", "rounds", "operations", "survival"}
    (operation,) = data["operations"]
    ours, lmdb = operation["contestants"]
    assert (operation["name"], operation["measures"]) == ("put", "messages")
    assert [sample["messages"] for sample in ours["rounds"]] == [1000, 1000]
    assert ours["summary"]["median_ns"] == pytest.approx(850)
    assert ours["targets"][0] == {"text": "≤ 1.0 µs", "reached": True}
    assert (lmdb["status"], lmdb["summary"], lmdb["rounds"]) == ("skipped", None, [])


def test_the_markdown_shows_ours_in_bold_and_what_each_put_survives():
    text = as_markdown(report_of(measured("holdfast", 800), measured("SQLite", 1600)))
    assert "EPYC, 2 cores, Python 3.11.7, ext4, 2025-01-31" in text
    assert "| **holdfast** | **kill -9** | **1.25 M** |" in text
    assert "| SQLite | kill -9 | 625 k | 1.60 µs | 1.60 – 1.60 µs | 2.0× slower |  |" in text
    assert "| queuelib | nothing | 0 of 300 | no close, no messages |" in text


def test_the_results_warn_of_a_busy_machine_and_of_a_disk_that_is_none():
    report = report_of(measured("holdfast", 800))
    assert "**" not in as_markdown(report).split("##")[0]
    assert "load 6.8" in as_markdown(replace(report, machine={**report.machine, "load_before": 6.8}))
    assert "in memory" in as_markdown(replace(report, machine={**report.machine, "file_system": "tmpfs"}))


def test_the_result_files_are_written(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("the picture needs matplotlib")
    opening = measured("holdfast", 50, operation=OPENING)
    report = report_of(measured("holdfast", 800), measured("SQLite", 1600), opening)
    paths = write(report, tmp_path / "results")
    assert [path.name for path in paths] == ["results.json", "results.md", "results.png", "results.svg"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[3].read_text()


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.report.missing_modules", list)
    paths = write(report_of(measured("holdfast", 800)), tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.md"]


def test_a_killed_writer_leaves_what_was_acknowledged(tmp_path):
    scale = quick(100)
    acknowledged = fill_and_kill(RawLog, scale, tmp_path, 250, batch=100)
    log = RawLog(scale.body_bytes)
    log.open(tmp_path)
    assert acknowledged == 300  # whole batches
    assert log.read_all() >= acknowledged
    log.close()


def test_every_operation_has_ours_and_a_pattern_picks_without_losing_it():
    cases = all_cases(quick(100))
    for operation in {one.operation for one in cases}:
        names = [one.contestant for one in cases if one.operation == operation]
        assert "holdfast" in names
        assert len(set(names)) == len(names)
    picked = all_cases(quick(100), only="^put: SQLite")
    assert [one.contestant for one in picked] == ["holdfast", "SQLite WAL, NORMAL"]


def test_every_peer_says_what_its_put_survives():
    for peer in EVERYBODY:
        assert peer.survives in ("nothing", "kill -9", "power cut")
        assert peer.note
