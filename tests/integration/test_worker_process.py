"""Workers as processes: killed, told to end, with handlers that block, raise and take too long."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

pytestmark = pytest.mark.slow

PATIENCE_S = 60  # only what hangs takes so long

HANDLERS = """
import asyncio, os, pathlib, time

def note(message, word="done"):
    with open("seen", "a") as file:
        file.write(f"{word} {message.body} {message.attempt}\\n")

def steady(message):
    time.sleep(0.005)
    note(message)

def until_told(message):
    note(message, "begun")
    while not os.path.exists("go"):
        time.sleep(0.005)
    note(message)

def hangs_once(message):
    note(message, "begun")
    if message.attempt == 1:
        time.sleep(1000)
    note(message)

def fails_once(message):
    if message.attempt == 1:
        raise ValueError("not yet")
    note(message)

def outlives_its_lease(message):
    begun = time.monotonic()
    while time.monotonic() < begun + 1:
        assert not message.lost
        time.sleep(0.01)
    note(message)

async def side_by_side(message):
    note(message, "begun")
    while not os.path.exists("go"):
        await asyncio.sleep(0.005)
    await message.ack()
    note(message)

async def blocks_the_loop(message):
    note(message, "begun")
    time.sleep(1000)
"""


class Place:
    """A folder with handlers and a queue, and workers that are started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        (folder / "handlers.py").write_text(HANDLERS)

    def put(self, count: int) -> None:
        with self.queue() as queue:
            queue.put_many([str(number) for number in range(count)])

    def queue(self) -> holdfast.Queue[Any]:
        return holdfast.open(self.folder / "q", body_type=str, backoff_ms=0, backoff_jitter_percent=0)

    def worker(self, handler: str, *options: str) -> subprocess.Popen[str]:
        # -P: as for the installed command, the folder that it is started in is not searched for modules by itself.
        program = [sys.executable, "-P", "-W", "error", "-c", "from holdfast.cli.main import main; main()"]
        started = subprocess.Popen(
            [*program, "worker", f"handlers:{handler}", "--at", "q", *options],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(started)
        return started

    def seen(self, word: str = "done") -> list[tuple[int, int]]:
        """The bodies and attempts that handlers noted."""
        notes = self.folder / "seen"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [(int(body), int(attempt)) for did, body, attempt in map(str.split, lines) if did == word]

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


def eventually(holds: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ended, and its log."""
    _, log = process.communicate(timeout=PATIENCE_S)
    return process.returncode, log


def test_what_a_killed_worker_had_comes_again_and_nothing_is_lost(place: Place):
    place.put(300)
    for number in range(1, 4):
        worker = place.worker("steady")
        eventually(lambda number=number: len(set(place.seen())) >= 60 * number)
        worker.kill()
        worker.communicate()
    worker = place.worker("steady")
    eventually(lambda: {body for body, _ in place.seen()} == set(range(300)))
    worker.terminate()
    assert ended(worker)[0] == 0
    with place.queue() as queue:
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (0, 0, 0, 0)
    again = len(place.seen()) - 300
    assert again <= 3 * 8  # at most what was running at each kill


def test_a_command_on_a_queue_that_is_not_there_yet_says_so_and_waits(place: Place):
    place.put(0)
    worker = place.worker("steady", "--queue", "later")
    assert worker.stderr is not None
    line = next(line for line in worker.stderr if "waiting for it" in line)
    assert "there is no topic later in " in line
    with holdfast.open_broker(place.folder / "q", body_type=str) as broker:
        broker.create_topic("later")
        broker.publish("later", "0")
    eventually(lambda: place.seen() == [(0, 1)])
    worker.terminate()
    assert ended(worker)[0] == 0


def test_workers_share_a_folder_and_take_over_from_one_that_is_killed(place: Place):
    place.put(50)
    owner = place.worker("until_told", "--concurrency", "2")
    eventually(lambda: len(place.seen("begun")) == 2)
    other = place.worker("until_told", "--concurrency", "2")
    eventually(lambda: len(place.seen("begun")) == 4)
    owner.kill()
    owner.communicate()
    place.go()
    eventually(lambda: {body for body, _ in place.seen()} == set(range(50)))
    other.terminate()
    code, log = ended(other)
    assert code == 0, log
    with place.queue() as queue:
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (0, 0, 0, 0)
    again = [body for body, attempt in place.seen() if attempt > 1]
    assert set(again) <= {body for body, _ in place.seen("begun")[:4]}  # what both had at the kill


def test_sigterm_lets_what_runs_finish_and_leaves_the_rest_untouched(place: Place):
    place.put(10)
    worker = place.worker("until_told", "--concurrency", "3")
    eventually(lambda: len(place.seen("begun")) == 3)
    worker.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.2)
    place.go()
    code, log = ended(worker)
    assert code == 0, log
    assert sorted(place.seen()) == [(0, 1), (1, 1), (2, 1)]
    with place.queue() as queue:
        assert [(listed.body, listed.attempts) for listed in queue.messages("ready")] == [
            (str(number), 0) for number in range(3, 10)
        ]


def test_what_does_not_finish_in_time_is_given_back_with_the_reason(place: Place):
    place.put(1)
    worker = place.worker("hangs_once", "--drain", "200ms")
    eventually(lambda: place.seen("begun"))
    worker.send_signal(signal.SIGINT)
    code, log = ended(worker)
    assert code == 1, log
    assert "handler did not finish in time" in log
    with place.queue() as queue:
        (listed,) = queue.messages("ready")
        assert (listed.attempts, listed.error.partition(":")[0]) == (1, "shutdown")


def test_a_second_signal_ends_it_at_once(place: Place):
    place.put(1)
    worker = place.worker("hangs_once", "--drain", "1h", "--json")
    eventually(lambda: place.seen("begun"))
    worker.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.3)
    worker.terminate()
    assert ended(worker)[0] == -signal.SIGTERM
    with place.queue() as queue:
        assert [listed.attempts for listed in queue.messages("ready")] == [1]


def test_a_handler_that_blocks_loses_its_message_after_its_time(place: Place):
    place.put(2)
    worker = place.worker("hangs_once", "--concurrency", "1", "--time-limit", "300ms")
    eventually(lambda: sorted(place.seen()) == [(0, 2), (1, 2)])
    worker.terminate()
    code, log = ended(worker)
    assert code == 0, log
    assert log.count("handler exceeded its time limit") == 2


def test_a_handler_that_raises_is_tried_again_and_logged_with_its_traceback(place: Place):
    place.put(1)
    worker = place.worker("fails_once", "--json")
    eventually(lambda: place.seen() == [(0, 2)])
    worker.terminate()
    code, log = ended(worker)
    assert code == 0, log
    (failed,) = [line for line in map(json.loads, log.splitlines()) if line["message"] == "handler failed"]
    assert (failed["level"], failed["queue"], failed["id"], failed["attempt"]) == ("WARNING", "q", "q-0-0", 1)
    assert failed["exception"]["message"] == "not yet"
    assert "in fails_once" in failed["exception"]["traceback"]


def test_a_handler_that_outlives_its_lease_keeps_its_message(place: Place):
    place.put(1)
    worker = place.worker("outlives_its_lease", "--lease", "200ms")
    eventually(lambda: place.seen() == [(0, 1)])
    worker.terminate()
    assert ended(worker)[0] == 0


def test_async_handlers_run_as_tasks(place: Place):
    place.put(20)
    worker = place.worker("side_by_side", "--concurrency", "20")
    eventually(lambda: len(place.seen("begun")) == 20)
    worker.terminate()
    place.go()
    code, log = ended(worker)
    assert code == 0, log
    assert sorted(place.seen()) == [(number, 1) for number in range(20)]


@pytest.mark.slow
def test_one_that_cannot_ask_for_messages_ends_with_a_code_of_its_own(place: Place):
    place.put(1)
    # Long enough to open the queue first, however busy the machine is: until then it is silent, too.
    worker = place.worker("blocks_the_loop", "--exit-after-silence", "5s", "--drain", "100ms")
    code, log = ended(worker)
    assert code == 4, log
    assert "it could not receive messages for" in log
    with place.queue() as queue:
        assert [listed.attempts for listed in queue.messages("ready")] == [1]


def test_the_health_page_of_a_process(place: Place):
    place.put(3)
    port = free_port()
    worker = place.worker("steady", "--health", str(port))
    eventually(lambda: len(place.seen()) == 3)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    health = json.loads(answer.read())
    connection.close()
    assert (answer.status, health["status"]) == (200, "running")
    assert health["seconds_since_last_receive"] < 30
    worker.terminate()
    assert ended(worker)[0] == 0


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
