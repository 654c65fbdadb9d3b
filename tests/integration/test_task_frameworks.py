"""What every task framework is promised on Holdfast, with its own worker program: kills, long tasks, delays, ends."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration import test_django_tasks, test_dramatiq, test_taskiq
from tests.integration.frameworks_gear import PATIENCE_S, Site, kill, until
from tests.integration.process_gear import ServerProcess, server_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Framework(NamedTuple):
    """A framework's program and worker. Programs have `send_gated(name, delay=None)` and `send_count(number)`."""

    module: str  # which has to be installed
    files: dict[str, str]
    worker: list[str]
    queue: str  # where its tasks are
    few: tuple[str, ...] = ()  # arguments for a worker that runs one task at a time
    stopping: str = ""  # what it logs when it is told to stop


LEASE_S = 2
FRAMEWORKS = {
    "django": Framework(
        "holdfast.integrations.django.framework",
        test_django_tasks.FILES,
        [*test_django_tasks.WORKER, "--queue", "default", "--lease", str(LEASE_S)],
        "default",
        ("--concurrency", "1"),
    ),
    "taskiq": Framework(
        "taskiq", test_taskiq.FILES, test_taskiq.WORKER, "taskiq", ("--max-async-tasks", "1", "--max-prefetch", "0")
    ),
    "dramatiq": Framework(
        "dramatiq", test_dramatiq.FILES, test_dramatiq.WORKER, "default", ("--threads", "1"), "Shutting down"
    ),
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    found = FRAMEWORKS[request.param]
    try:
        importlib.import_module(found.module)
    except ImportError as error:
        pytest.skip(str(error))
    return found


@contextmanager
def site_at(kind: str, folder: Path, framework: Framework) -> Iterator[tuple[Site, ServerProcess | None]]:
    if kind == "folder":
        yield Site(folder, f"holdfast://{folder}/data", f"{folder}/data", framework.files, framework.worker), None
        return
    with server_process(folder / "data", "--no-console") as server:
        yield Site(folder, f"holdfast+{server.url}", server.url, framework.files, framework.worker), server


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_task_outlives_its_worker_and_runs_for_longer_than_its_lease(kind: str, tmp_path: Path, framework: Framework):
    with site_at(kind, tmp_path, framework) as (site, _), site.broker() as broker, ExitStack() as workers:
        first = workers.enter_context(site.worker(*framework.few))
        site.run("send_gated('a')")
        until(site.notes, "the task begins")
        kill(first)
        workers.enter_context(site.worker())
        until(lambda: [note[:2] for note in site.notes()].count(["began", "a"]) == 2, "another worker begins it")
        queue = broker.queue(framework.queue)
        # A message whose lease were not renewed would be ready, or be taken by the third worker, when it has ended.
        workers.enter_context(site.worker())
        (leased,) = queue.messages("leased")
        end = time.monotonic() + 2 * LEASE_S
        until(lambda: time.monotonic() > end, "two leases have passed")
        assert [message.attempts for message in queue.messages("leased")] == [leased.attempts]
        site.open_gate("a")
        until(lambda: queue.stats().floor == 1, "the task is acked")
        assert [note[0] for note in site.notes()] == ["began", "began", "ended"]


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_delay_outlives_the_worker_and_a_stopped_worker_finishes_its_task(
    kind: str, tmp_path: Path, framework: Framework
):
    with site_at(kind, tmp_path, framework) as (site, server), site.broker() as broker:
        queue = broker.queue(framework.queue)
        with site.worker(*framework.few) as worker:
            site.run("send_gated('now'); send_gated('next'); send_gated('later', delay=3600)")
            until(site.notes, "the first task begins")
            assert queue.stats().delayed == 1
            worker.terminate()
            until(lambda: framework.stopping in site.log(), "the worker has heard it")
            site.open_gate("now")
            site.open_gate("next")  # it may have been begun, or not
            assert worker.wait(PATIENCE_S) == 0, site.log()
        began = [note[1] for note in site.notes() if note[0] == "began"]
        assert sorted(note[1] for note in site.notes() if note[0] == "ended") == sorted(began)
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (2 - len(began), 0, 1, 0)
        assert all(message.attempts == 0 for message in queue.messages("ready"))
        if server is not None:
            server.kill()
            server.start()
        site.open_gate("later")
        (delayed,) = queue.messages("delayed")
        with site.worker():
            until(lambda: ["ended", "next"] in site.notes(), "what was put back runs")
            assert ["ended", "later"] not in site.notes()
            assert queue.run_now(delayed.id)
            until(lambda: ["ended", "later"] in site.notes(), "the delayed task runs when it is due")


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_every_task_of_four_processes_runs_though_server_and_worker_are_killed(
    kind: str, tmp_path: Path, framework: Framework, scale: Callable[[int, int], int]
):
    each = scale(60, 2_500)
    with site_at(kind, tmp_path, framework) as (site, server):
        code = f"import sys\nfor number in range({each}):\n    send_count(f'{{sys.argv[1]}}-{{number}}')"
        senders = [site.begin(code, str(number)) for number in range(4)]
        with site.worker() as first:
            until(lambda: len(site.notes()) > each, "some tasks have run")
            kill(first)
            if server is not None:
                server.kill()
                server.start()
            with site.worker():
                for sender in senders:
                    assert sender.wait(PATIENCE_S) == 0, (site.folder / "sender.log").read_text()
                wanted = {f"{sender}-{number}" for sender in range(4) for number in range(each)}
                until(lambda: {note[1] for note in site.notes()} >= wanted, "every task has run")
        ran = Counter(note[1] for note in site.notes())
        assert sum(ran.values()) - len(ran) <= 40, "only what was in flight at a kill may run twice"
