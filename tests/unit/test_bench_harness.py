"""The benchmark harness: its arithmetic, its tables, its files. Never how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench import wording
from bench.child import FORK, Sample, TooSlow
from bench.harness import Case, Operation, Outcome, Timed, missing_modules, run, sample_count
from bench.kill import fill_and_kill
from bench.operations import all_cases
from bench.operations.latency import _Run, quantile
from bench.operations.takes import timed_takes
from bench.peers import EVERYBODY
from bench.peers.raw_log import RawLog
from bench.programs import Program, missing_programs
from bench.queues import QUEUES, Queue, Taken
from bench.queues.server import Server, ServerFailed, free_port
from bench.queues.sqlite_by_hand import SqliteClaimed
from bench.report import Report, as_json, as_markdown, write
from bench.scale import Scale, passes_that_fill, quick
from bench.spark import processes
from bench.stats import summaries
from bench.survival import AckUndone, Survivor, _left
from bench.table import headings, rows
from bench.targets import Verdict, verdicts

PUT = Operation("put", "One message a call.")
OPENING = Operation("open after kill", "Open it.", measures="opening")
LATENCY = Operation("latency at 1,000/s", "From put to get.", measures="latency")
GET_ACK = Operation("get + ack", "One by one.", promise="ack")
DEPTH = Operation("get + ack at depth", "One by one.", promise="ack")
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


@pytest.mark.slow
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


def test_a_contestant_below_the_pace_is_too_slow_and_did_not_fail(tmp_path):
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        raise TooSlow("moved 7 messages a second")
        yield

    (outcome,) = run([case("A", prepare)], tmp_path, rounds=2)
    assert (outcome.status, outcome.problem) == ("too slow", "moved 7 messages a second")
    assert rows([outcome], FULL)[0].cells[-1] == "too slow: moved 7 messages a second"


def test_a_contestant_that_dies_or_hangs_is_out(tmp_path):
    dies = case("dies", lambda folder: os._exit(3))
    hangs = case("hangs", lambda folder: time.sleep(60))
    # A busy machine may take a while to begin a process, and to notice that it is gone.
    (gone,) = run([dies], tmp_path / "dies", rounds=1, timeout_s=30)
    assert (gone.status, gone.problem) == ("failed", "died without a word")
    (silent,) = run([hangs], tmp_path / "hangs", rounds=1, timeout_s=0.3)
    assert (silent.status, silent.problem) == ("failed", "no answer within 0 s")


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
        (wording.size(123_400_000), "123 MB"),
        (wording.size(999), "999 B"),
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


class Kitchen:
    """A host that takes note of what happens to it."""

    def __init__(self, *, broken: bool = False) -> None:
        self.events: list[str] = []
        self.broken = broken

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        self.events.append("started")
        if self.broken:
            raise OSError("no gas")
        yield
        self.events.append("ended")


@pytest.mark.slow
def test_what_samples_share_is_started_once_and_ended_when_all_are_taken(tmp_path):
    kitchen, unused = Kitchen(), Kitchen()
    cases = [
        case("A", host=kitchen),
        case("B", host=kitchen),
        case("C", operation=GET_ACK, host=kitchen),
        case("D", host=unused, not_run="not run: too slow"),
    ]
    outcomes = run(cases, tmp_path, rounds=2, on_sample=lambda which, number: kitchen.events.append(which.contestant))
    assert [len(outcome.samples) for outcome in outcomes] == [2, 2, 2, 0]
    assert kitchen.events == ["A", "started", "B", "D", "A", "B", "D", "C", "C", "ended"]
    assert unused.events == []


def test_what_does_not_start_fails_those_that_need_it_and_nobody_else(tmp_path):
    kitchen = Kitchen(broken=True)
    first, second, other = run([case("A", host=kitchen), case("B", host=kitchen), case("C")], tmp_path, rounds=2)
    assert {(outcome.status, outcome.problem.partition(" (")[0]) for outcome in (first, second)} == {
        ("failed", "OSError: no gas")
    }
    assert len(other.samples) == 2
    assert kitchen.events == ["started"]


def test_memory_is_shown_by_its_peak_and_compared_with_nothing():
    memory = Operation("memory", "Read all.", measures="memory")
    samples = [Sample(1000, 2.0, 0.0, anon_bytes=number) for number in (90_000_000, 123_400_000)]
    peer = Outcome(case("Spark", operation=memory), [Sample(1000, 1.0, 0.0, anon_bytes=70_000_000)])
    small, large = rows([Outcome(case("holdfast", operation=memory), samples), peer], FULL)
    assert headings(memory)[2:5] == ["messages read", "peak of a worker", "time to read"]
    assert small.cells[0] == "Spark"
    assert large.cells[2:5] == ["1.00 k", "123 MB", "2.00 s"]
    assert small.cells[5] == "–"


def test_beside_others_the_cpu_time_is_shown_too():
    beside = Operation("beside", "Publish.", measures="beside")
    (row,) = rows([Outcome(case("holdfast", operation=beside), [Sample(1000, 2e-3, 1e-3)])], FULL)
    assert headings(beside)[4] == "CPU of a message"
    assert row.cells[2:5] == ["500 k", "2.00 µs", "1.00 µs"]


def test_a_sample_that_measured_memory_itself_is_left_as_it_is(tmp_path):
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        yield lambda: Sample(1, 1.0, 0.0, anon_bytes=42)

    (outcome,) = run([case("A", prepare)], tmp_path, rounds=1)
    assert outcome.samples[0].anon_bytes == 42


def test_targets_of_spark_are_ratios_of_one_run():
    read = Operation("Spark read", "To nowhere.")

    def found_with(parquet_ns: float, zstd_ns: float) -> list[bool | None]:
        peers = [("Spark Parquet, uncompressed", parquet_ns), ("Spark Parquet, zstd", zstd_ns)]
        outcomes = [measured(name, each_ns, operation=read) for name, each_ns in peers]
        found = summaries([measured("holdfast", 300, operation=read), *outcomes])
        return [verdict.reached for verdict in verdicts("Spark read", "holdfast", found, FULL)]

    assert found_with(200, 310) == [True, True]
    assert found_with(190, 290) == [False, False]


def test_what_a_process_and_its_children_burn_and_hold_is_found():
    receiver, sender = FORK.Pipe(duplex=False)

    def burn() -> None:
        ends = time.process_time() + 0.1
        while time.process_time() < ends:
            pass
        sender.send("burned")
        time.sleep(60)

    before = processes.cpu_seconds(os.getpid())
    child = FORK.Process(target=burn)
    child.start()
    assert receiver.recv() == "burned"
    assert child.pid in processes.descendants(os.getpid())
    assert processes.anon_bytes(child.pid) > 1_000_000
    assert processes.cpu_seconds(os.getpid()) >= before + 0.05
    child.kill()
    child.join()
    assert processes.anon_bytes(child.pid) == 0


@pytest.mark.slow
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
    named = write(report_of(measured("holdfast", 800)), tmp_path, "spark")
    assert [path.name for path in named] == ["spark.json", "spark.md"]


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
    for peer in EVERYBODY + QUEUES:
        assert peer.survives in ("nothing", "kill -9", "power cut")
        assert peer.note


def test_every_queue_says_what_its_ack_survives_and_shows_in_its_name_that_it_has_none():
    for queue in QUEUES:
        assert queue.ack_survives in ("no ack", "nothing", "kill -9", "power cut")
        assert ("(no ack)" in queue.name) == (queue.ack_survives == "no ack")


class ListQueue(Queue):
    """In memory; `broken` says what goes wrong when a message is taken."""

    name = "a list"
    survives = "nothing"
    ack_survives = "nothing"
    note = "for tests"

    def __init__(self, broken: str = "") -> None:
        super().__init__(100)
        self.waiting: list[bytes] = []
        self.most_waiting = 0
        self.arrived = threading.Semaphore(0)
        self.broken = broken

    def put(self, body: bytes) -> None:
        self.waiting.append(body)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self.arrived.release()

    def get(self, wait_s: float) -> Taken | None:
        if self.broken == "raises":
            raise OSError("disk gone")
        if not self.arrived.acquire(timeout=wait_s):
            return None
        if self.broken == "slow":
            time.sleep(0.02)
        return Taken(self.waiting.pop(0), None)


def test_a_latency_is_shown_by_its_quantiles():
    def latency_of(name: str, *p50_ns: float) -> Outcome:
        samples = [Sample(1000, 1.0, 0.0, p50_ns=ns, p99_ns=10 * ns) for ns in p50_ns]
        return Outcome(case(name, operation=LATENCY), samples)

    ours, peer = rows([latency_of("holdfast", 20_000, 30_000, 90_000), latency_of("SQLite", 600_000)], FULL)
    assert headings(LATENCY)[2:6] == ["p50", "p99", "p50, min – max", "vs holdfast"]
    assert ours.cells[2:6] == ["30.0 µs", "300 µs", "20.0 – 90.0 µs", "1.0×"]
    assert peer.cells[2:6] == ["600 µs", "6.00 ms", "600 – 600 µs", "20× slower"]
    (operation,) = as_json(report_of(latency_of("holdfast", 20_000)))["operations"]
    assert operation["contestants"][0]["messages_per_second"] is None  # the rate was given, not found


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_the_smallest_figure_that_this_share_does_not_exceed(share, expected):
    assert quantile([float(number) for number in range(1, 101)], share) == expected


def sample_when_quiet(made: Callable[[], _Run]) -> Sample:
    """Run it again where a busy machine kept it from running for a tenth of a second, which counts as too slow."""
    for _ in range(20):
        with suppress(TooSlow):
            return made().sample()
    pytest.fail("too slow twenty times in a row")


def test_a_latency_run_times_each_message_between_two_threads():
    queue = ListQueue()
    sample = sample_when_quiet(lambda: _Run([queue], queue, body_bytes=100, rate=2000, count=100))
    assert sample.messages == 100
    assert sample.seconds >= 100 / 2000
    assert 0 < sample.p50_ns <= sample.p99_ns < 1e9
    assert queue.waiting == []


def test_several_threads_may_put_and_one_take_what_is_there():
    queue = ListQueue()
    sample = sample_when_quiet(lambda: _Run([queue] * 3, queue, body_bytes=100, rate=2000, count=100, most=10))
    assert sample.messages == 100
    assert 0 < sample.p50_ns <= sample.p99_ns < 1e9
    assert queue.waiting == []


def test_a_queue_slower_than_the_rate_has_no_latency_and_one_that_fails_says_why():
    slow, fails = ListQueue("slow"), ListQueue("raises")
    with pytest.raises(TooSlow, match="messages a second"):
        _Run([slow], slow, body_bytes=100, rate=5000, count=20).sample()
    with pytest.raises(OSError, match="disk gone"):
        _Run([fails], fails, body_bytes=100, rate=5000, count=20).sample()


def test_takes_are_timed_without_their_puts_and_keep_the_depth():
    queue, spent = ListQueue(), []

    def take(count: int) -> None:
        started = time.perf_counter()
        queue.take_each(count)
        spent.append(time.perf_counter() - started)

    started = time.perf_counter()
    timed = timed_takes(queue, take, quick(100), waiting=300)
    spent.clear()
    sample = timed()
    elapsed = time.perf_counter() - started
    assert sample.messages == 100 * len(spent)
    assert sum(spent) <= sample.seconds < elapsed
    assert (len(queue.waiting), queue.most_waiting) == (300, 400)


def test_an_empty_queue_does_not_pass_for_a_fast_one(tmp_path):
    queue = SqliteClaimed(100)
    queue.open(tmp_path)
    queue.put(b"only one")
    for take in (queue.take_each, queue.take_many):
        with pytest.raises(LookupError):
            take(2)
    queue.close()


@pytest.mark.parametrize("queue", [one for one in QUEUES if not one.programs], ids=lambda one: one.name)
def test_a_queue_gives_out_in_order_what_was_put_and_nothing_twice(queue, tmp_path):
    missing = missing_modules(queue.needs)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    bodies = FULL.bodies(30)
    made = queue(100)
    made.open(tmp_path)
    made.put_each(bodies[:10])
    made.put_many(bodies[10:])
    made.take_each(5)
    made.take_many(5)
    first = made.get(0)
    assert first.body == bodies[10]
    made.ack(first.receipt)
    other = made.other_side()
    held = other.get(1)
    assert held.body == bodies[11]
    assert made.read_all() == 18
    assert made.get(0) is None
    made.close()


def test_a_server_that_is_not_installed_is_named_with_what_to_type(tmp_path):
    absent = Program("surely-not-a-server", "surely-not")
    other = Program("nor-this", "surely-not")
    assert missing_programs([absent, Program("sh", "dash"), other]) == [
        "surely-not-a-server and nor-this (apt-get install surely-not)"
    ]
    (skipped,) = run([case("A", programs=(absent,))], tmp_path, rounds=1)
    assert skipped.problem == "not installed: surely-not-a-server (apt-get install surely-not)"


def test_a_case_that_is_left_out_on_purpose_says_why(tmp_path):
    (skipped,) = run([case("A", not_run="not run: too slow")], tmp_path, rounds=1)
    assert (skipped.status, skipped.problem) == ("skipped", "not run: too slow")


def test_a_server_that_does_not_start_leaves_its_last_words(tmp_path):
    def refused() -> None:
        raise ConnectionError("refused")

    with pytest.raises(ServerFailed, match="refused; no such option"):
        Server(["sh", "-c", "echo no such option >&2; exit 1"], tmp_path, refused)


def test_a_server_ends_when_asked_and_when_its_starter_is_killed(tmp_path):
    server = Server(["sleep", "60"], tmp_path, lambda: None)
    server.stop()
    assert server.process.returncode is not None
    receiver, sender = FORK.Pipe(duplex=False)

    def start_and_wait() -> None:
        sender.send(Server(["sleep", "60"], tmp_path, lambda: None).process.pid)
        time.sleep(60)

    starter = FORK.Process(target=start_and_wait)
    starter.start()
    running = os.pidfd_open(receiver.recv())
    starter.kill()
    starter.join()
    assert select.select([running], [], [], 30)[0] == [running]  # readable once it has ended
    os.close(running)


def test_a_free_port_can_be_bound():
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))


def test_targets_of_the_queue_are_judged_by_time_by_depth_and_by_memory():
    deep = "holdfast, 10,000,000 deep"
    found = summaries([measured("holdfast", 3900, operation=GET_ACK)])
    assert verdicts("get + ack", "holdfast", found, FULL) == [Verdict("≤ 4 µs", reached=True)]
    as_fast = Outcome(case(deep, operation=DEPTH), [Sample(1000, 1.1e-3, 0.0, anon_bytes=100_000_000)])
    heavy = Outcome(case(deep, operation=DEPTH), [Sample(1000, 1.5e-3, 0.0, anon_bytes=900_000_000)])
    unknown = Outcome(case(deep, operation=DEPTH), [Sample(1000, 1.1e-3, 0.0)])
    for outcome, expected in ((as_fast, [True, True]), (heavy, [False, False]), (unknown, [True, None])):
        found = summaries([measured("holdfast", 1000, operation=DEPTH), outcome])
        assert [verdict.reached for verdict in verdicts("get + ack at depth", deep, found, FULL)] == expected


def test_the_tables_of_get_and_ack_name_what_the_ack_survives():
    assert headings(GET_ACK)[1] == "ack survives"
    assert headings(PUT)[1] == "put survives"


def test_an_acked_message_that_comes_back_is_found_out():
    queue = ListQueue()
    queue.put_each([b"one", b"two", b"three"])
    assert _left(queue, acked={b"zero"}) == 3
    queue.put_each([b"zero", b"four"])
    with pytest.raises(AckUndone, match="1 of 2 acked came back"):
        _left(queue, acked={b"zero", b"one"})


def test_what_an_ack_survives_has_a_table_of_its_own():
    put = Survivor("queuelib", "nothing", "no close, no messages", "0 of 300")
    ack = Survivor("litequeue", "kill -9", "NORMAL", "UNDONE: 3 of 100 acked came back", "ack")
    text = as_markdown(replace(report_of(measured("holdfast", 800)), survivors=[put, ack]))
    assert "| contestant | its ack survives | found after kill -9 | how |" in text
    assert text.index("What a put survives") < text.index("What an ack survives") < text.index("UNDONE: 3 of 100")
    assert ack.broke_its_promise
    assert not put.broke_its_promise
