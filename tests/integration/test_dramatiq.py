"""Dramatiq on Holdfast: the broker with its real worker program, and its parts in this process."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integration.frameworks_gear import PATIENCE_S, Site, until
from tests.integration.process_gear import server_process
from tests.tidy import markdown
from tests.tidy.repo import ROOT

dramatiq = pytest.importorskip("dramatiq")

from dramatiq.errors import QueueJoinTimeout, QueueNotFound  # noqa: E402
from dramatiq.rate_limits import Barrier, BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter  # noqa: E402
from dramatiq.results import Results  # noqa: E402

from holdfast.integrations.dramatiq import HoldfastBroker, HoldfastRateLimits, HoldfastResults  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import os

import dramatiq
from dramatiq.middleware import GroupCallbacks
from dramatiq.results import Results
from holdfast.integrations.dramatiq import HoldfastBroker, HoldfastRateLimits, HoldfastResults
from notes_kept import note, sleep_until

PLACE = os.environ["PLACE"]
broker = HoldfastBroker(PLACE, lease=2)
broker.add_middleware(Results(backend=HoldfastResults(PLACE)))
broker.add_middleware(GroupCallbacks(HoldfastRateLimits(PLACE)))
dramatiq.set_broker(broker)


@dramatiq.actor
def gated(name):
    note("began", name)
    sleep_until(name)
    note("ended", name)


@dramatiq.actor
def count(number):
    note("ran", number)


@dramatiq.actor(store_results=True)
def add(x, y):
    return x + y


@dramatiq.actor(max_retries=1, min_backoff=1)
def fail():
    note("failed")
    raise ValueError("the printer is on fire")


@dramatiq.actor(queue_name="mail", broker_priority=7)
def mail():
    note("mailed")


def send_gated(name, delay=None):
    gated.send_with_options(args=(name,), delay=None if delay is None else delay * 1000)


def send_count(number):
    count.send(number)
"""
FILES = {"program.py": PROGRAM}
WORKER = ["-m", "dramatiq", "program", "--processes", "1"]


@pytest.fixture(params=["folder", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "folder":
        yield Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)
        return
    with server_process(tmp_path / "data", "--no-console") as server:
        yield Site(tmp_path, f"holdfast+{server.url}", server.url, FILES, WORKER)


def test_results_pipelines_retries_and_dead_letters(site: Site):
    with site.worker("--threads", "2"):
        printed = site.run(
            "print(add.send(2, 3).get_result(block=True, timeout=60_000))\n"
            "pipe = add.message(1, 1) | add.message(3)\n"
            "print(pipe.run().get_result(block=True, timeout=60_000))\n"
            "group = dramatiq.group([add.message(n, n) for n in range(4)]).run()\n"
            "print(sorted(group.get_results(block=True, timeout=60_000)))\n"
            "group = dramatiq.group([add.message(n, n) for n in range(8)])\n"
            "group.add_completion_callback(count.message('after the group'))\n"
            "group.run()\n"
            "fail.send()\n"
            "mail.send()\n"
            "broker.join('default', timeout=60_000)\n"
        )
        assert printed.splitlines() == ["5", "5", "[0, 2, 4, 6]"]
        until(lambda: ["mailed"] in site.notes(), "a task of another queue runs")
        until(lambda: ["ran", "after", "the", "group"] in site.notes(), "the callback of the group runs")
    assert site.notes().count(["ran", "after", "the", "group"]) == 1
    assert site.notes().count(["failed"]) == 2
    with site.broker() as broker, broker.queue("default") as queue:
        (letter,) = queue.dead.list()
        assert letter.headers["task"] == "fail"
        assert "ValueError: the printer is on fire" in letter.error
        (mail,) = broker.queue("mail").messages("done")
        assert mail.priority == 7


def test_a_message_that_is_no_message_is_a_dead_letter(tmp_path: Path):
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[])
    broker.declare_queue("default")
    queue = broker.queue("default")
    queue.put(b"not json")
    assert next(broker.consume("default", timeout=100)) is None
    (letter,) = queue.dead.list()
    assert "cannot be decoded" in letter.error


def test_a_consumer_holds_no_more_than_its_prefetch_and_puts_back_the_rest(tmp_path: Path):
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[])

    @dramatiq.actor(broker=broker)
    def add(x): ...

    for number in range(4):
        add.send(number)
    consumer = broker.consume("default", prefetch=2, timeout=50)
    first, second = next(consumer), next(consumer)
    assert next(consumer) is None
    assert broker.queue("default").stats().leased == 2
    consumer.ack(first)
    third = next(consumer)
    assert third.args == (2,)
    consumer.requeue([second])
    consumer.nack(third)
    fourth = next(consumer)
    assert fourth.args == (1,)
    consumer.requeue([fourth])
    consumer.close()
    stats = broker.queue("default").stats()
    assert (stats.ready, stats.leased, stats.dead) == (2, 0, 1)
    assert [message.attempts for message in broker.queue("default").messages("ready")] == [0, 0]


def test_delays_are_stored_and_joined_and_flushed(tmp_path: Path):
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[])

    @dramatiq.actor(broker=broker)
    def add(x): ...

    add.send_with_options(args=(1,), delay=3_600_000)
    assert broker.queue("default").stats().delayed == 1
    with pytest.raises(QueueJoinTimeout):
        broker.join("default", timeout=100)
    broker.flush_all()
    broker.join("default", timeout=10_000)
    for call in (broker.consume, broker.join, broker.flush):
        with pytest.raises(QueueNotFound):
            call("unknown")


def test_a_result_expires(tmp_path: Path):
    backend = HoldfastResults(f"{tmp_path}/data")
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[Results(backend=backend)])

    @dramatiq.actor(broker=broker, store_results=True)
    def add(x): ...

    message = add.send(1)
    backend.store_result(message, b"1".decode(), 50)
    until(lambda: backend._get(backend.build_message_key(message)) is dramatiq.results.Missing, "the result is gone")


def test_an_ack_reaches_a_server_that_was_killed_meanwhile(tmp_path: Path):
    with server_process(tmp_path / "data", "--no-console") as server:
        broker = HoldfastBroker(server.url, middleware=[])

        @dramatiq.actor(broker=broker)
        def add(x): ...

        add.send(1)
        consumer = broker.consume("default", timeout=100)
        message = next(consumer)
        server.kill()
        server.start()
        consumer.ack(message)
        until(lambda: broker.queue("default").stats().floor == 1, "it is acked")


def test_a_result_of_a_run_that_lost_its_lease_does_not_replace_that_of_the_next(tmp_path: Path):
    backend = HoldfastResults(f"{tmp_path}/data")
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[Results(backend=backend)], lease=60)

    @dramatiq.actor(broker=broker, store_results=True)
    def add(x): ...

    add.send(1)
    consumer = broker.consume("default", prefetch=2, timeout=60_000)
    first = next(consumer)
    assert broker.queue("default").take_back(first.lease.id)
    second = next(consumer)
    backend.store_result(second, "second", 60_000)
    until(lambda: first.lease.lost, "the first run has lost its lease")
    backend.store_result(first, "first", 60_000)
    backend.store_exception(first, ValueError("too late"), 60_000)
    assert backend.get_result(second) == "second"


def test_a_place_for_a_message_is_free_again_though_it_cannot_be_settled(tmp_path: Path):
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[])

    @dramatiq.actor(broker=broker)
    def add(x): ...

    add.send(1)
    consumer = broker.consume("default", timeout=60_000)
    message = next(consumer)
    broker.shared.broker.close()
    with pytest.raises(holdfast.Closed):
        consumer.ack(message)
    assert consumer._held == 0
    again = next(broker.consume("default", timeout=60_000))
    assert again.message_id == message.message_id


def test_a_child_sends_though_its_parent_has_used_the_broker(site: Site):
    printed = site.run(
        "add.send(1, 1)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    add.send(2, 2)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "add.send(3, 3)\n"
        "print(broker.queue('default').qsize())\n"
    )
    assert printed == "3"


def test_the_program_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "how-to" / "use-with-dramatiq.md").read_text("utf-8")
    (code,) = [block.code for block in markdown.blocks(page) if re.match(r"# shop\.py\n", block.code)]
    site = Site(tmp_path, "", "", {"program.py": code}, ["-m", "dramatiq", "program", "--processes", "1"])
    with site.worker():
        assert site.run("print(resize.send('cat.png').get_result(block=True, timeout=60_000))") == "cat.png-small"


@pytest.fixture
def limits(tmp_path: Path) -> HoldfastRateLimits:
    return HoldfastRateLimits(f"{tmp_path}/data")


def admitted(limiter: Any, tries: int) -> int:
    """How many of these tries, from eight threads at once, the limiter allows."""

    def attempt(_: int) -> bool:
        with limiter.acquire(raise_on_failure=False) as acquired:
            return bool(acquired)

    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(attempt, range(tries)))


def test_no_more_run_at_the_same_time_than_a_limiter_allows(limits: HoldfastRateLimits):
    limiter = ConcurrentRateLimiter(limits, "api@eu", limit=2)
    with limiter.acquire(), limiter.acquire():
        assert admitted(limiter, 20) == 0
        with pytest.raises(dramatiq.RateLimitExceeded), limiter.acquire():
            pass
    with limiter.acquire() as acquired:
        assert acquired


@pytest.mark.parametrize("kind", ["bucket", "window"])
def test_as_many_run_in_an_interval_as_a_limiter_allows(kind: str, limits: HoldfastRateLimits):
    hour = {"bucket": {"bucket": 3_600_000}, "window": {"window": 3_600}}[kind]
    limiter = {"bucket": BucketRateLimiter, "window": WindowRateLimiter}[kind](limits, "mail", limit=5, **hour)
    held = ConcurrentRateLimiter(limits, "mail", limit=1)  # of the same name, but another counter
    with held.acquire():
        assert 5 <= admitted(limiter, 40) <= 10  # 10, if the hour ends meanwhile
        assert admitted(held, 1) == 0


def test_a_window_counts_the_seconds_before_and_forgets_those_that_have_passed(limits: HoldfastRateLimits):
    def keys() -> list[str]:
        return ["mail@12", "mail@11", "mail@10"]

    assert limits.incr_and_sum("mail@10", keys, 1, 2, 1)
    until(lambda: limits.add("mail@10", 1, 3_600_000), "the counter has expired")
    assert limits.incr_and_sum("mail@11", keys, 1, 2, 3_600_000)
    assert not limits.incr_and_sum("mail@12", keys, 1, 2, 3_600_000)
    assert limits.incr_and_sum("mail@13", lambda: ["mail@13", "mail@12", "mail@11"], 1, 2, 3_600_000)
    assert not limits.decr("mail@13", 2, 0, 3_600_000)
    assert limits.decr("mail@13", 1, 0, 3_600_000)
    assert not limits.incr("mail@13", 3, 2, 3_600_000)


def test_a_barrier_opens_for_all_who_wait_when_the_last_has_come(limits: HoldfastRateLimits):
    barrier = Barrier(limits, "barrier", ttl=3_600_000)
    assert barrier.create(3)
    assert not barrier.create(1)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(barrier.wait, timeout=PATIENCE_S * 1000) for _ in range(2)]
        until(lambda: limits.incr("barrier", 0, 1, 3_600_000), "both wait")
        assert barrier.wait()
        assert [each.result() for each in waiting] == [True, True]
    other = Barrier(limits, "other")
    assert other.create(2)
    assert not other.wait(timeout=1)


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")
def test_gevent_runs_actors_through_a_server_and_refuses_a_folder(tmp_path: Path):
    worker_program = [str(Path(sys.executable).with_name("dramatiq-gevent")), "program", "--processes", "1"]
    with server_process(tmp_path / "data", "--no-console") as server:
        site = Site(tmp_path, f"holdfast+{server.url}", server.url, FILES, worker_program)
        with site.worker("--threads", "4") as worker:
            site.run("for name in 'abcd': gated.send(name)")
            until(lambda: len(site.notes()) == 4, "all run at the same time")
            for name in "abcd":
                site.open_gate(name)
            until(lambda: len(site.notes()) == 8, "all have ended")
            worker.terminate()
            assert worker.wait(PATIENCE_S) == 0
    alone = Site(tmp_path, f"{tmp_path}/data", f"{tmp_path}/data", FILES, worker_program)
    with alone.worker() as worker:
        assert worker.wait(PATIENCE_S) != 0
    assert "needs real threads, which gevent has replaced here" in alone.log()


def test_an_idle_consumer_sleeps(tmp_path: Path):
    broker = HoldfastBroker(f"{tmp_path}/data", middleware=[])

    @dramatiq.actor(broker=broker)
    def add(x): ...

    consumer, found = broker.consume("default", timeout=60_000), []
    waiting = threading.Thread(target=lambda: found.append(next(consumer)))
    waiting.start()
    add.send(1)  # wakes it, long before the timeout
    waiting.join(30)
    assert [message.args for message in found] == [(1,)]
