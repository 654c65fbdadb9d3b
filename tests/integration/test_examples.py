"""The examples are programs: each runs as its own process, says what it should, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LARGE = ("demo.py", "demo_spark.py", "log_tour.py")
PAGES = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in LARGE)
LINES = {"text_protocol.py": 200, "tasks_with_django.py": 75}  # of one that is longer than a page
SMALL = [path for path in PAGES if not path.name.startswith("spark_")]  # the others are run by tests/spark

# Far longer than any of them takes: only what hangs comes near it.
PATIENCE_S = 120

# Java says so of a module that Spark asks for.
OF_JAVA = "WARNING: Using incubator modules: jdk.incubator.vector\n"


def run(name: str, *arguments: str, folder: Path, patience_s: float = PATIENCE_S) -> str:
    """What the example printed; it ended with 0, without a warning, and removed its temporary files."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=patience_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not done.stderr.removeprefix(OF_JAVA)
    return done.stdout


def test_every_example_has_a_test_here():
    tested = {name.removeprefix("test_the_example_") for name in globals()}
    assert {path.stem for path in SMALL} <= tested


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= LINES.get(path.name, 60)


def test_the_example_queue_basics(tmp_path: Path):
    said = run("queue_basics.py", folder=tmp_path)
    assert "images-0-0 is on disk (fsync)" in said
    assert "b'resize 2' is taken, 1 ready, 1 leased" in said
    assert "after a restart: [(b'resize 2', 1), (b'resize 3', 1)]" in said
    assert "nothing is left" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_retries(tmp_path: Path):
    said = run("retries.py", folder=tmp_path)
    assert re.findall(r"attempt (\d)", said) == ["1", "2", "3", "1"]
    assert "dead: MAX_ATTEMPTS, 3 errors, the last: ConnectionError: the bank did not answer for order 7" in said
    assert said.endswith("redriven: 1\nattempt 1\norder 7 is paid\n")
    assert list(tmp_path.iterdir()) == []


def test_the_example_priorities_and_delays(tmp_path: Path):
    said = run("priorities_and_delays.py", folder=tmp_path)
    assert "cancelled: True\n9 alarm\n5 invoice\n0 newsletter\nreminder: not early" in said
    assert "expired: 1" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_async_workers(tmp_path: Path):
    said = run("async_workers.py", folder=tmp_path)
    assert said == "800 messages from 16 tasks handled by 8, each once: True\n"
    assert list(tmp_path.iterdir()) == []


def test_the_example_exactly_once_effects(tmp_path: Path):
    said = run("exactly_once_effects.py", folder=tmp_path)
    assert "put again: True\nbooked: True\n" in said
    assert "delivered again; booked: False\nbalance: 100\n" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_testing_with_the_kit(tmp_path: Path):
    assert "both tests pass" in run("testing_with_the_kit.py", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_example_topics_and_groups(tmp_path: Path):
    said = run("topics_and_groups.py", folder=tmp_path)
    assert "billed: 299, from partitions [0, 1, 2]\ndead in billing: ['order 13']\n" in said
    assert "shipped: 300, dead in shipping: 0\n" in said
    assert said.endswith("billing: queue mode, 0 left\nshipping: queue mode, 0 left\n")
    assert list(tmp_path.iterdir()) == []


def test_the_example_stream_consumers(tmp_path: Path):
    said = run("stream_consumers.py", folder=tmp_path)
    assert "alone: 4 partitions\ntogether: 2 and 2 partitions\nread: 1000, each once: True\n" in said
    assert "after one has left: 10 more, lag 0\na reset would bring 1010 again\nagain: 1010\n" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_idempotent_producer(tmp_path: Path):
    said = run("idempotent_producer.py", folder=tmp_path)
    assert "killed; some lines were stored, but not all: True\n" in said
    assert said.endswith("loaded again, all of these were known: True\nstored: 5000, each once: True\n")
    assert list(tmp_path.iterdir()) == []


def test_the_example_ordering_keys(tmp_path: Path):
    said = run("ordering_keys.py", folder=tmp_path)
    assert said == ("200 bookings for 20 accounts by 8 workers\n20 were tried again; each account in order: True\n")
    assert list(tmp_path.iterdir()) == []


def test_the_example_compacted_topic(tmp_path: Path):
    said = run("compacted_topic.py", folder=tmp_path)
    assert said == "stored: 5001, left: 50\na table of 49 prices, as it should be: True\n"
    assert list(tmp_path.iterdir()) == []


def test_the_example_traces(tmp_path: Path):
    said = run("traces.py", folder=tmp_path)
    steps = ["published", "leased", "nacked", "leased", "buried", "redriven", "published", "leased", "acked"]
    assert re.findall(r"^ +[\d.]+ ms  orders-0-\d  (\w+)", said, re.MULTILINE) == steps
    assert "nacked in the last hour: ['ann']\n2 messages, steps: 9, errors: [('no route to the bank', 2)]\n" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_worker(tmp_path: Path):
    said = run("worker.py", folder=tmp_path)
    assert said == (
        "['early (attempt 2)', 'flaky (attempt 3)', 'stuck (attempt 2)']\n"
        "handled 13, failed 2, retried 1, rejected 1\n"
        "timed out: 1, dead: ['nonsense']\nleft: 0\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_tasks_with_celery(tmp_path: Path):
    pytest.importorskip("celery")
    said = run("tasks_with_celery.py", folder=tmp_path)
    assert said == "cat.png-small\ndog.png-small owl.png-small\ndelayed: 1, dead: ['tasks_with_celery.pay']\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_tasks_with_django(tmp_path: Path):
    pytest.importorskip("holdfast.integrations.django.framework", exc_type=ImportError)
    said = run("tasks_with_django.py", folder=tmp_path)
    assert said == "cat.png-small\nConnectionError\ndelayed: 1, dead: ['tasks_with_django.pay']\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_tasks_with_dramatiq(tmp_path: Path):
    pytest.importorskip("dramatiq")
    said = run("tasks_with_dramatiq.py", folder=tmp_path)
    assert said.startswith("cat.png-small\ndog.png-small-small\ndelayed: 1, dead: [")
    assert "ConnectionError: the bank did not answer for order 7" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_tasks_with_taskiq(tmp_path: Path):
    pytest.importorskip("taskiq")
    said = run("tasks_with_taskiq.py", folder=tmp_path)
    assert said == "cat.png-small\nConnectionError('the bank did not answer for order 7')\ndelayed: 1, mail: [9]\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_served_queue(tmp_path: Path):
    said = run("served_queue.py", folder=tmp_path)
    assert said == ("killed once; 400 were put, 400 handled, 0 lost\nleft in the queue: 0\nthe server ended with 0\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_http_with_curl(tmp_path: Path):
    said = run("http_with_curl.py", folder=tmp_path)
    codes = re.findall(r'"code":"(\w+)"', said)
    assert codes == ["lease_lost"]
    assert said.count('{"settled":1}') == 2
    assert "no such mailbox" in said
    assert '"matched":1,"done":1' in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_text_protocol(tmp_path: Path):
    said = run("text_protocol.py", folder=tmp_path)
    assert said.startswith("> PUT orders two coffees\nSTORED orders-0-0\n> GET orders 5\nMESSAGE orders-0-0@")
    assert re.findall(r"^(OK|ERROR \w+|EMPTY)", said, re.MULTILINE) == ["OK", "ERROR lease_lost", "EMPTY"]
    assert said.endswith("BYE\none message was put, taken and acked; 0 are ready, 0 are leased\n")
    assert list(tmp_path.iterdir()) == []


def test_the_example_log_basics(tmp_path: Path):
    said = run("log_basics.py", folder=tmp_path)
    assert "offset 0 survives a power cut (fsync)" in said
    assert "opened again: offsets 0 to 4, ended in order: True" in said
    assert "the first message since then: order 2 paid" in said
    assert list(tmp_path.iterdir()) == []


def test_log_basics_keeps_its_log_where_it_is_told_to(tmp_path: Path):
    run("log_basics.py", "kept", folder=tmp_path)
    said = run("log_basics.py", "kept", folder=tmp_path)
    assert "offset 5 survives a power cut" in said
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_example_follow(tmp_path: Path):
    said = run("follow.py", folder=tmp_path)
    assert re.findall(r"offset (\d+):", said) == ["0", "10", "20", "30", "40"]
    assert "the reader has seen 50 messages; the owner appended 50" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_async_writers(tmp_path: Path):
    said = run("async_writers.py", folder=tmp_path)
    assert "3,200 messages from 64 tasks, each on disk before its task went on" in said
    syncs = int(re.search(r"^([\d,]+) syncs", said, re.MULTILINE)[1].replace(",", ""))
    assert 1 <= syncs < 3_200
    assert list(tmp_path.iterdir()) == []


def test_the_example_survive_kill(tmp_path: Path):
    said = run("survive_kill.py", folder=tmp_path)
    assert "nothing is lost, all in order, each once" in said
    assert "ended in order: False; epoch 2" in said
    assert list(tmp_path.iterdir()) == []


def test_the_example_arrow_load(tmp_path: Path):
    pytest.importorskip("pyarrow")
    said = run("arrow_load.py", "50000", folder=tmp_path)
    assert said.startswith("50,000 messages in")
    assert "the last one: 'order 49999 from Arrow'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.serial
@pytest.mark.timeout(600)
def test_the_demo_proves_that_nothing_was_lost_up_to_the_tables(tmp_path: Path):
    report = tmp_path / "kept" / "report.html"
    said = run("demo.py", "--report", str(report), folder=tmp_path, patience_s=500)
    assert (
        "20,000 messages acknowledged, 19,800 handled, 200 dead letters, 20,000 counted by the stream, 0 lost.\n"
        in said
    )
    assert len(re.findall(r"^ +[12] .* kill -9 +$", said, re.MULTILINE)) == 2
    assert re.search(r"^Recovery after kill -9: \d+ ms, \d+ ms\.$", said, re.MULTILINE)
    assert re.search(r"^silver +refine +20,000 +19,760 +240 ", said, re.MULTILINE)
    assert re.search(r"^14:00 +returns +1,648 +988 +88,836.0$", said, re.MULTILINE)
    assert re.search(r"^has a customer +orders +134$", said, re.MULTILINE)
    waiting = _letters_waiting(said)
    assert sum(waiting.values()) == 200
    assert set(waiting) <= {"LookupError: number <number> has no customer", "holder gone"}, waiting
    assert waiting.get("holder gone", 0) <= 2 * 4  # two kills, four workers: each may have had one in hand
    assert said.count("│ ok ") == 12
    assert "WRONG" not in said
    assert f"with plots: {report}\n" in said
    assert report.read_bytes().count(b"<img") == 2
    assert list(tmp_path.iterdir()) == [report.parent]


def _letters_waiting(said: str) -> dict[str, int]:
    """From the demo's table of dead letters: how many of each kind of error are not redriven."""
    rows = re.findall(r"^ +\d+ +(\d+) +(?:orders|returns|orders, returns) +(\S.*?) *$", said, re.MULTILINE)
    return {error: int(count) for count, error in rows if int(count)}


@pytest.mark.serial
def test_the_tour_of_the_log_proves_that_nothing_was_lost(tmp_path: Path):
    said = run("log_tour.py", folder=tmp_path)
    assert re.search(r"^[\d,]+ messages acknowledged before a kill, 0 lost\.$", said, re.MULTILINE)
    assert said.count("│ ok ") == 5
    assert "FAILED" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.serial
@pytest.mark.parametrize(("name", "made"), [("demo.py", "*/shop/lock"), ("log_tour.py", "*/log/*.log")])
def test_a_demo_that_is_told_to_end_takes_its_child_and_its_files_along(tmp_path: Path, name: str, made: str):
    demo = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), "--kills", "1000", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: any(tmp_path.glob(made)))
        demo.terminate()
        assert demo.wait(timeout=PATIENCE_S) == 143
        wait_until(lambda: not alive(demo.pid))
        assert list(tmp_path.iterdir()) == []
    finally:
        if alive(demo.pid):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()


def wait_until(happened) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
