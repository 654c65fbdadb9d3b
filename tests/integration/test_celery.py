"""Celery on a folder and on a server, with its real worker program: tasks, results, remote control, kills."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integration.process_gear import ServerProcess, server_process

pytest.importorskip("celery")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 90  # only what hangs takes so long
PROGRAM = """
import os
import signal
import time

from celery import Celery, Task
from celery.exceptions import Reject
from kombu import Queue
from kombu.common import Broadcast

PLACE = os.environ["PLACE"]
app = Celery("program", broker=PLACE, backend=os.environ.get("RESULTS", PLACE))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "1")),
    worker_pool_restarts=True,
    worker_hijack_root_logger=False,
    worker_lost_wait=1.0,
    broker_transport_options={"lease": float(os.environ.get("LEASE", "30"))},
)


def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open(os.environ["NOTES"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@app.task
def add(x, y):
    return x + y


@app.task
def total(numbers):
    return sum(numbers)


@app.task
def count(number):
    note("ran", number)


@app.task
def letter(name):
    note("wrote", name)


app.conf.task_routes = {"program.letter": {"queue": "mail", "priority": 7}}


@app.task(bind=True)
def sleep(self, seconds, name):
    note("began", name, os.getpid(), self.request.delivery_info.get("redelivered"))
    time.sleep(seconds)
    note("ended", name)
    return name


@app.task(bind=True)
def die_once(self, name):
    note("began", name, self.request.delivery_info.get("redelivered"))
    if not self.request.delivery_info.get("redelivered"):
        os.kill(os.getpid(), signal.SIGKILL)
    note("ended", name)


@app.task
def fail():
    raise ValueError("the printer is on fire")


@app.task(acks_on_failure_or_timeout=False)
def fail_unacked():
    raise ValueError("the printer is on fire")


@app.task(acks_late=False)
def early(name):
    note("began", name)
    time.sleep(600)


@app.task
def tell(text):
    note("told", os.getpid(), text)


app.conf.task_queues = [Queue("celery"), Broadcast("everybody")] if os.environ.get("BROADCAST") else None


@app.task
def refuse():
    raise Reject("it cannot be handled", requeue=False)


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def fail_twice(self):
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)
    return self.request.retries
"""


class Site:
    """A folder with the program, its notes, and the place that it uses."""

    def __init__(self, folder: Path, place: str, url: str) -> None:
        self.folder = folder
        self.place = place
        self.url = url
        self.notes_file = folder / "notes"
        self.environment = os.environ | {"PLACE": place, "NOTES": str(self.notes_file), "PYTHONPATH": str(folder)}
        (folder / "program.py").write_text(PROGRAM)

    def broker(self) -> holdfast.Broker:
        return holdfast.open_broker(self.url)

    def notes(self) -> list[list[str]]:
        return [line.split() for line in self.notes_file.read_text().splitlines()] if self.notes_file.exists() else []

    def run(self, code: str, *, patience_s: float = PATIENCE_S) -> str:
        """Run a program that uses the app, as users would; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", f"from program import *\n{code}"],
            env=self.environment, capture_output=True, text=True, timeout=patience_s,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a worker."""
        with (self.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "program", "worker", "-l", "INFO", *arguments],
                env=self.environment | environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @contextmanager
    def worker(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start(*arguments, **environment)
        try:
            yield process
        finally:
            kill(process)

    def log(self) -> str:
        return (self.folder / "worker.log").read_text()


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a worker and all its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"this did not happen: {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(params=["folder", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_at(request.param, tmp_path) as (found, _):
        yield found


@contextmanager
def site_at(kind: str, folder: Path) -> Iterator[tuple[Site, ServerProcess | None]]:
    if kind == "folder":
        yield Site(folder, f"holdfast://{folder}/data", f"{folder}/data"), None
        return
    with server_process(folder / "data", "--no-console") as server:
        yield Site(folder, f"holdfast+{server.url}", server.url), server


def test_tasks_results_chords_retries_and_dead_letters(site: Site):
    with site.worker("-P", "prefork", "-c", "2"):
        printed = site.run(
            "from celery import chord\n"
            "print(add.delay(2, 3).get(timeout=60))\n"
            "print(chord([add.s(n, n) for n in range(4)])(total.s()).get(timeout=60))\n"
            "print(fail_twice.delay().get(timeout=60))\n"
            "refuse.delay()\n"
            "print(app.control.ping(timeout=20, limit=1)[0])\n"
            "print(*app.control.inspect(timeout=20, limit=1).registered())\n"
        ).splitlines()
        assert printed[:3] == ["5", "12", "2"]
        assert "pong" in printed[3]
        assert printed[4] == printed[3].split("'")[1]
        with site.broker() as broker, broker.queue("celery") as queue:
            letter = until(queue.dead.list, "a rejected task becomes a dead letter")[0]
            assert letter.headers["task"] == "program.refuse"


def test_what_celery_would_drop_is_a_dead_letter(site: Site):
    with site.broker() as broker, site.worker("-P", "solo"):
        site.run(
            "app.send_task('program.unknown', (1,))\n"
            "fail_unacked.delay()\n"
            "with app.producer_pool.acquire() as producer:\n"
            "    for headers in ({}, {'task': 'program.add', 'id': '1'}):\n"
            "        producer.publish(b'{', routing_key='celery', content_type='application/json',\n"
            "                         content_encoding='utf-8', headers=headers)\n"
            "    producer.publish({'a': 1}, routing_key='celery')\n"
        )
        broker.queue("celery").put(b"not a task")
        with broker.queue("celery") as queue:
            letters = until(lambda: len(found := queue.dead.list()) == 6 and found, "all are dead letters")
            assert queue.stats().leased == 0
        by_task = {letter.headers.get("task"): letter.error for letter in letters}
        assert set(by_task) == {"program.unknown", "program.fail_unacked", "program.add", None}
        assert "the body cannot be decoded: Expecting property name" in by_task["program.add"]


def test_a_task_that_is_acked_early_is_not_run_again(site: Site):
    # Not in the pool `solo`: it blocks Celery's event loop, which sends such an ack, until the task has ended.
    with site.broker() as broker, site.worker("-c", "1", LEASE="1") as first:
        site.run("early.delay('a')")
        until(site.notes, "the task begins")
        queue = broker.queue("celery")
        until(lambda: queue.stats().floor == 1, "it is acked while it runs")
        kill(first)
        with site.worker("-P", "solo", LEASE="1"):
            site.run("print(add.delay(1, 2).get(timeout=60))")
    assert site.notes() == [["began", "a"]]


def test_a_broadcast_reaches_every_worker_and_leaves_no_queue(site: Site):
    site.environment["BROADCAST"] = "1"
    with site.broker() as broker:
        with site.worker("-P", "solo", "-n", "one@%h") as first, site.worker("-P", "solo", "-n", "two@%h") as second:
            until(lambda: len([name for name in broker.topics() if name.startswith("bcast.")]) == 2, "both listen")
            site.run("tell.apply_async(('hello',), queue='everybody')")
            until(lambda: len(site.notes()) == 2, "both have run it")
            assert {note[1] for note in site.notes()} == {str(first.pid), str(second.pid)}
            first.terminate()
            assert first.wait(PATIENCE_S) == 0
            kill(second)
        until(lambda: site.run("tell.apply_async(('nobody',), queue='everybody')") == "", "it is sent")
        left = [name for name in broker.topics() if name.startswith("bcast.")]
        assert len(left) <= 1, "the queue of the worker that was stopped is gone"


def test_a_lost_child_a_failed_chord_and_remote_control(site: Site):
    with site.worker("-P", "prefork", "-c", "2", "-n", "one@%h"):
        printed = site.run(
            "from celery import chord\n"
            "from celery.exceptions import ChordError, TaskRevokedError\n"
            "inspect, control = app.control.inspect(timeout=20, limit=1), app.control\n"
            "die_once.delay('a').get(timeout=60)\n"  # its child is killed, and the worker has the task delivered again
            "body = chord([add.s(1, 1), fail.s()])(total.s())\n"
            "while not body.ready():\n"
            "    time.sleep(0.1)\n"
            "print(isinstance(body.result, ChordError), 'the printer is on fire' in str(body.result))\n"
            "long = sleep.delay(600, 'long')\n"
            "def active():\n"
            "    return [task['id'] for tasks in (inspect.active() or {}).values() for task in tasks]\n"
            "while long.id not in active():\n"
            "    time.sleep(0.1)\n"
            "later = count.apply_async(('later',), countdown=3600)\n"
            "control.revoke(later.id, reply=True, timeout=20, limit=1)\n"
            "control.revoke(long.id, terminate=True, signal='SIGKILL', reply=True, timeout=20, limit=1)\n"
            "try:\n"
            "    long.get(timeout=60)\n"
            "except TaskRevokedError:\n"
            "    print('revoked')\n"
            "control.add_consumer('more', reply=True, timeout=20, limit=1)\n"
            "print(sleep.apply_async((0, 'more'), queue='more').get(timeout=60))\n"
            "control.cancel_consumer('more', reply=True, timeout=20, limit=1)\n"
            "(stats,) = inspect.stats().values()\n"
            "print(stats['pool']['max-concurrency'], stats['broker']['transport'])\n"
        ).splitlines()
        assert printed[:4] == ["True True", "revoked", "more", "2 holdfast"]
        assert [note[2] for note in site.notes() if note[:2] == ["began", "a"]] == ["False", "True"]
        assert ["ended", "long"] not in site.notes()
        with site.broker() as broker, broker.queue("celery") as queue:
            (delayed,) = queue.messages("delayed")
            assert queue.run_now(delayed.id)
            until(lambda: not (queue.stats().ready or queue.stats().leased), "the revoked task is acked")
            assert ["ran", "later"] not in site.notes()
            site.run("sleep.apply_async((0, 'nobody'), queue='more')")
            assert broker.queue("more").stats().ready == 1


REMOTE = """
asked = {"timeout": 60, "limit": 1}
inspect, control = app.control.inspect(**asked), app.control


def only(replies):
    (reply,) = replies.values()
    return reply


def ok(call, *args, **options):
    (reply,) = call(*args, reply=True, **options, **asked)
    print(call.__name__, "ok" in only(reply))


def wait(condition):
    while not condition():
        time.sleep(0.1)


def queues():
    return [queue["name"] for queue in only(inspect.active_queues())]


wait(lambda: control.ping(timeout=1, limit=1))  # what is asked before it listens is lost
"""


@pytest.fixture
def alone(tmp_path: Path) -> Site:
    return Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data")


def test_a_worker_whose_children_are_all_busy_answers_every_call_of_inspect(alone: Site):
    with alone.worker("-c", "1", "-n", "one@%h", PREFETCH="2"):
        printed = alone.run(
            f"{REMOTE}\n"
            "first = sleep.delay(600, 'first')\n"
            "wait(lambda: [task['id'] for task in only(inspect.active())] == [first.id])\n"
            "next_ = sleep.delay(0, 'next')\n"
            "wait(lambda: [task['id'] for task in only(inspect.reserved())] == [next_.id])\n"
            "found = only(inspect.query_task(first.id, next_.id))\n"
            "print(found[first.id][0], found[next_.id][0], only(inspect.scheduled()))\n"
            "print(queues(), only(inspect.conf())['task_acks_late'])\n"
            "print(only(inspect.hello('two@host'))['clock'] > 0, only(inspect.clock())['clock'] > 0)\n"
            "print('holdfast' in only(inspect.report())['ok'], 'program.add' in only(inspect.registered()))\n"
            "print(len(inspect.memsample()), len(inspect.memdump()))\n"
            "ok(control.revoke, next_.id)\n"
            "print(only(inspect.revoked()) == [next_.id])\n"
            "ok(control.terminate, first.id, signal='SIGKILL')\n"
            "wait(lambda: first.status == next_.status == 'REVOKED')\n",
            patience_s=3 * PATIENCE_S,  # they are many
        )
    assert printed.splitlines() == [
        "active reserved []", "['celery'] True", "True True", "True True", "1 1", "revoke True", "True",
        "terminate True",
    ]  # fmt: skip


def test_a_worker_carries_out_every_call_of_control(alone: Site):
    with alone.worker("-c", "1", "-n", "one@%h") as worker:
        printed = alone.run(
            f"{REMOTE}\n"
            "ok(control.revoke_by_stamped_headers, {'header': 'value'})\n"
            "ok(control.time_limit, 'program.sleep', hard=1)\n"
            "ok(control.rate_limit, 'program.count', '600/m')\n"
            "ok(control.pool_grow)\n"
            "wait(lambda: len(only(inspect.stats())['pool']['processes']) == 2)\n"
            "ok(control.pool_shrink)\n"
            "wait(lambda: len(only(inspect.stats())['pool']['processes']) == 1)\n"
            "ok(control.pool_restart)\n"
            "ok(control.enable_events)\n"
            "ok(control.disable_events)\n"
            "ok(control.add_consumer, 'more')\n"
            "print(queues())\n"
            "ok(control.cancel_consumer, 'more')\n"
            "print(add.delay(2, 3).get(timeout=60))\n"
            "control.heartbeat()\n"
            "control.election('1', 'nothing', None)\n"
            "control.shutdown()\n",
            patience_s=3 * PATIENCE_S,
        )
        assert worker.wait(PATIENCE_S) == 0, alone.log()
    lines = printed.splitlines()
    told = [line for line in lines if line.endswith(" True")]
    assert [line for line in lines if line not in told] == ["['celery', 'more']", "5"]
    assert len(told) == 10


def test_priorities_and_routes_decide_what_runs_first_and_where(site: Site):
    site.run(
        "for number, priority in enumerate((0, 3, 9, 3, None)):\n"
        "    count.apply_async((number,), priority=priority)\n"
        "letter.delay('a')\n"
        "letter.apply_async(('b',), queue='elsewhere')\n"
    )
    with site.broker() as broker:
        assert [message.priority for message in broker.queue("mail").peek(5)] == [7]
        assert broker.queue("elsewhere").qsize() == 1
    with site.worker("-P", "solo", "-Q", "celery"):
        until(lambda: len(site.notes()) == 5, "the tasks of one queue run")
        assert [note[1] for note in site.notes()] == ["2", "1", "3", "0", "4"]
    with site.worker("-P", "solo", "-Q", "mail,elsewhere"):
        until(lambda: len(site.notes()) == 7, "the tasks of the others run")
        assert sorted(note[1] for note in site.notes()[5:]) == ["a", "b"]


def test_a_purge_drops_what_waits_and_says_how_much(site: Site):
    printed = site.run(
        "for number in range(3): count.delay(number)\n"
        "count.apply_async((3,), countdown=3600)\n"
        "print(app.control.purge())\n"
        "print(app.control.purge())\n"
    )
    assert printed.splitlines() == ["4", "0"]
    with site.broker() as broker:
        stats = broker.queue("celery").stats()
        assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 0)


def test_events_tell_what_a_task_went_through_and_leave_no_queue(site: Site):
    with site.worker("-P", "solo", "-E"):
        printed = site.run(
            "seen, sent = [], []\n"
            "def look(event):\n"
            "    if not sent:\n"
            "        sent.append(app.send_task('program.add', (1, 2)))\n"
            "    if event['type'].startswith('task-'):\n"
            "        seen.append(event['type'])\n"
            "    receiver.should_stop = 'task-succeeded' in seen\n"
            "with app.connection_for_read() as connection:\n"
            "    receiver = app.events.Receiver(connection, handlers={'*': look})\n"
            "    receiver.capture(timeout=60, wakeup=True)\n"  # the worker says that it is there; then the task is sent
            "print(*seen)\n"
        )
        assert printed.split() == ["task-received", "task-started", "task-succeeded"]
        with site.broker() as broker:
            assert not [name for name in broker.topics() if name.startswith("celeryev.")]


def test_a_worker_goes_on_to_the_next_url_when_its_server_does_not_answer(tmp_path: Path):
    with socket.socket() as taken, server_process(tmp_path / "data", "--no-console") as server:
        taken.bind(("127.0.0.1", 0))
        dead = f"holdfast+http://127.0.0.1:{taken.getsockname()[1]}"
        site = Site(tmp_path, f"{dead};holdfast+{server.url}", server.url)
        site.environment["RESULTS"] = f"holdfast+{server.url}"
        with site.worker("-P", "solo"):
            assert site.run("print(add.delay(2, 3).get(timeout=60))") == "5"


def test_a_worker_killed_in_the_middle_of_a_task_leaves_it_to_another(site: Site):
    with site.worker("-P", "prefork", "-c", "1", "-n", "one@%h", LEASE="2") as first:
        site.run("sleep.delay(5, 'a')")
        until(lambda: ["began", "a"] in [note[:2] for note in site.notes()], "the task begins")
        kill(first)
    with site.worker("-P", "solo", "-n", "two@%h", LEASE="2"):
        until(lambda: ["ended", "a"] in site.notes(), "another worker runs the task")
        began = [note for note in site.notes() if note[0] == "began"]
        assert [note[3] for note in began] == ["False", "True"]
        with site.broker() as broker, broker.queue("celery") as queue:
            until(lambda: queue.stats().floor == 1, "the task is acked")


def test_a_task_longer_than_its_lease_runs_once(site: Site):
    with site.worker("-P", "threads", "-c", "2", LEASE="1"):
        site.run("print(sleep.delay(4, 'long').get(timeout=60))")
    assert [note[:2] for note in site.notes()] == [["began", "long"], ["ended", "long"]]


def test_an_eta_outlives_the_worker_and_is_not_held_in_its_memory(site: Site):
    site.run("add.delay(1, 1); count.apply_async((7,), countdown=6)")
    with site.worker("-P", "solo"), site.broker() as broker, broker.queue("celery") as queue:
        until(lambda: queue.stats().floor == 1, "the worker has received what was ready")
        assert queue.stats().delayed == 1
        assert queue.stats().leased == 0
    with site.worker("-P", "solo"):
        until(lambda: site.notes() == [["ran", "7"]], "the task runs when it is due")


def test_a_warm_shutdown_finishes_the_task_and_gives_back_the_rest(site: Site):
    with site.worker("-P", "prefork", "-c", "1") as worker:
        site.run("sleep.delay(8, 'a'); sleep.delay(0, 'b')")
        until(site.notes, "the first task begins")
        worker.terminate()
        assert worker.wait(PATIENCE_S) == 0
    assert ["ended", "a"] in site.notes()
    with site.broker() as broker, broker.queue("celery") as queue:
        stats = queue.stats()
        assert (stats.leased, stats.dead) == (0, 0)
        assert stats.ready == 1
        assert queue.peek()[0].headers["task"] == "program.sleep"


def test_a_worker_takes_no_more_than_its_prefetch_allows(site: Site):
    site.run("for queue in ('x', 'y', 'z'):\n    for n in range(3): sleep.apply_async((8, queue), queue=queue)")
    with site.worker("-P", "solo", "-c", "1", "-Q", "x,y,z"), site.broker() as broker:
        until(site.notes, "the first task begins")
        end = time.monotonic() + 2
        queues = [broker.queue(name) for name in "xyz"]
        while time.monotonic() < end:
            # A message that found no room is leased for the moment that it takes to put it back.
            until(lambda: sum(queue.stats().leased for queue in queues) <= 1, "only one message is held")
            time.sleep(0.1)


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_every_task_of_four_processes_runs_though_server_and_workers_are_killed(kind: str, tmp_path: Path, scale):
    each = scale(150, 2_500)
    with site_at(kind, tmp_path) as (site, server):
        code = f"import sys\nfrom program import *\nfor n in range({each}): count.delay(f'{{sys.argv[1]}}-{{n}}')"
        senders = [
            subprocess.Popen([sys.executable, "-c", code, str(number)], env=site.environment) for number in range(4)
        ]
        with site.worker("-P", "threads", "-c", "4", LEASE="2") as first:
            until(lambda: len(site.notes()) > each, "some tasks have run")
            kill(first)
            if server is not None:
                server.kill()
                server.start()
            with site.worker("-P", "threads", "-c", "4", LEASE="2"):
                for sender in senders:
                    assert sender.wait(PATIENCE_S) == 0
                wanted = {f"{sender}-{n}" for sender in range(4) for n in range(each)}
                until(lambda: {note[1] for note in site.notes()} >= wanted, "every task has run")
                ran = Counter(note[1] for note in site.notes())
                assert sum(ran.values()) - len(ran) <= 8, "only what was in flight at a kill may run twice"


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")
def test_gevent_runs_tasks_through_a_server_and_refuses_a_folder(tmp_path: Path):
    with server_process(tmp_path / "data", "--no-console") as server:
        site = Site(tmp_path, f"holdfast+{server.url}", server.url)
        with site.worker("-P", "gevent", "-c", "4", LEASE="1") as worker:
            printed = site.run(
                "results = [sleep.delay(3, name) for name in 'abcd']\n"
                "print(*(result.get(timeout=60, interval=0.05) for result in results))\n"
            )
            assert printed == "a b c d"
            assert sorted(note[:2] for note in site.notes()[:4]) == [["began", name] for name in "abcd"]
            assert len(site.notes()) == 8, "each ran once, though it took longer than its lease"
            worker.terminate()
            assert worker.wait(PATIENCE_S) == 0
    alone = Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data")
    with alone.worker("-P", "gevent") as worker:
        assert worker.wait(PATIENCE_S) != 0
    assert "needs real threads, which gevent has replaced here" in alone.log()


def test_an_idle_worker_waits_without_polling(tmp_path: Path):
    site = Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data")
    with site.worker("-P", "solo") as worker:
        site.run("print(add.delay(1, 2).get(timeout=60))")

        def rested() -> bool:  # a worker that polls never does; a busy machine may take a while to let one start
            before, began = cpu_seconds(worker.pid), time.monotonic()
            time.sleep(3)
            return cpu_seconds(worker.pid) - before < 0.1 * (time.monotonic() - began)

        assert any(rested() for _ in range(10))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_expired_results_are_absent_and_cleaned_up(tmp_path: Path):
    site = Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data")
    printed = site.run(
        "app.conf.result_expires = 1\n"
        "backend = app.backend\n"
        "backend.store_result('one', 5, 'SUCCESS')\n"
        "print(backend.get_result('one'))\n"
        "backend._cache.clear()\n"
        "time.sleep(1.2)\n"
        "print(backend.get_result('one'))\n"
        "backend.cleanup()\n"
        "import holdfast.integrations.kombu as transport\n"
        "print(transport.places.at(PLACE, {}).broker.documents.list())\n"
    )
    assert printed.splitlines() == ["5", "None", "[]"]


BEAT = """
app.conf.beat_schedule = {
    "every second": {"task": "program.count", "schedule": 1.0, "args": ("tick",)},
    "each minute": {"task": "program.letter", "schedule": crontab(), "args": ("cron",)},
}
"""


def beating(site: Site, *arguments: str) -> subprocess.Popen[bytes]:
    """A `celery beat` on the program, with periodic tasks."""
    program = site.folder / "program.py"
    if BEAT not in program.read_text():
        program.write_text(f"from celery.schedules import crontab\n{PROGRAM}{BEAT}")
    with (site.folder / "beat.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "program", "beat", "-S", "holdfast", "-l", "INFO",
             "--pidfile=", *arguments],
            env=site.environment, cwd=site.folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def beaten(site: Site) -> list[str]:
    """The dedup ids of what beats have sent each second."""
    with site.broker() as broker:
        if "celery" not in broker.topics():
            return []
        found = [message.headers["kombu"] for message in broker.read("celery", limit=1000)]
    ids = [json.loads(envelope)["properties"].get("dedup_id", "") for envelope in found]
    return [each for each in ids if each.startswith("celery.beat.every_x20second@")]


def test_any_number_of_beats_send_each_run_once_though_they_are_killed(site: Site):
    beats = [beating(site) for _ in range(3)]
    try:
        until(lambda: len(beaten(site)) >= 4, "the beats send")
        for number in (0, 1):
            kill(beats[number])
            before = len(beaten(site))
            until(lambda before=before: len(beaten(site)) >= before + 2, "the other beats send")
        kill(beats[2])
        before = len(beaten(site))
        beats += [beating(site), beating(site)]
        until(lambda: len(beaten(site)) >= before + 3, "the next beats send")
    finally:
        for process in beats:
            kill(process)
    ids = beaten(site)
    assert len(set(ids)) == len(ids)
    moments = [datetime.fromisoformat(each.partition("@")[2]) for each in ids]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(sorted(moments))]
    assert all(gap == int(gap) for gap in gaps), "all beats have the same dues"
    with site.worker("-P", "solo", "-Q", "celery"):
        until(lambda: len(site.notes()) == len(ids), "each of them runs")


def test_beat_without_holdfast_as_its_broker_says_what_to_do(tmp_path: Path):
    site = Site(tmp_path, "memory://", "")
    site.environment["RESULTS"] = "cache+memory://"
    process = beating(site)
    assert process.wait(PATIENCE_S) != 0
    assert "needs Holdfast as its broker" in (tmp_path / "beat.log").read_text()
