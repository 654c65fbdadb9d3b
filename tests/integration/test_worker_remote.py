"""The worker on queues that live elsewhere: behind a server, or in a folder that another object owns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Reject, UnknownTopic, Worker
from tests.integration.http_gear import serving
from tests.unit.workers import PATIENCE_S, ended, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(params=["server", "shared"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "server":
        with serving(tmp_path / "data") as server:
            yield server.url
    else:
        with holdfast.open_broker(tmp_path / "data"):
            yield str(tmp_path / "data")


@pytest.fixture
def broker(at: str) -> Iterator[Any]:
    with holdfast.open_broker(at) as broker:
        broker.create_topic("orders", backoff_ms=0)
        yield broker


def plain(outcome: Any) -> Any:
    return outcome


def awaited(outcome: Any) -> Any:
    async def handler(message: Any) -> None:
        outcome(message)

    return handler


@pytest.mark.parametrize("kind", [plain, awaited])
def test_a_worker_does_what_it_does_on_a_queue_of_its_own(at: str, broker: Any, kind: Any):
    broker.publish_many("orders", [b"good"] * 20 + [b"bad", b"never"])
    group = broker.group("orders", "default")

    def outcome(message: Any) -> None:
        if message.body == b"bad" and message.attempt == 1:
            raise ValueError("once")
        if message.body == b"never":
            raise Reject("no")

    errors = []
    worker = Worker(
        kind(outcome), queue="orders", at=at, poll=0.1, on_error=lambda error, message: errors.append(str(error))
    )
    worker.start()
    eventually(lambda: worker.health().handled == 21 and worker.health().rejected == 1)
    assert ended(worker) == 0
    assert errors == ["once"]
    stats = group.stats()
    assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (0, 0, 0, 1)


@pytest.mark.parametrize("kind", [plain, awaited])
def test_a_handler_that_outlives_its_lease_keeps_it(at: str, broker: Any, kind: Any):
    broker.publish("orders", b"long")
    held = threading.Event()
    lost = []

    def outcome(message: Any) -> None:
        held.wait(1.5)  # an async handler blocks its loop with that
        lost.append((message.attempt, message.lost))

    worker = Worker(kind(outcome), queue="orders", at=at, lease=0.5, poll=0.1)
    worker.start()
    eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0
    assert lost == [(1, False)]


def test_at_the_end_nothing_stays_leased(at: str, broker: Any):
    broker.publish_many("orders", [b"a"] * 5)
    begun, go = threading.Semaphore(0), threading.Event()

    def handler(message: Any) -> None:
        begun.release()
        go.wait(PATIENCE_S)

    worker = Worker(handler, queue="orders", at=at, concurrency=2, drain=0.1, poll=0.1)
    worker.start()
    for _ in range(2):
        assert begun.acquire(timeout=PATIENCE_S)
    assert ended(worker) == 1
    go.set()
    group = broker.group("orders", "default")
    eventually(lambda: group.stats().leased == 0)
    found = [*group.messages("ready"), *group.messages("delayed")]
    assert sorted(listed.attempts for listed in found) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", [plain, awaited])
def test_a_queue_that_is_not_there_yet_is_waited_for(at: str, broker: Any, kind: Any, caplog: pytest.LogCaptureFixture):
    errors: list[BaseException] = []
    worker = Worker(
        kind(lambda message: None), queue="later", at=at, poll=0.1, on_error=lambda error, _: errors.append(error)
    )
    worker.start()
    eventually(lambda: errors)
    assert isinstance(errors[0], UnknownTopic)
    broker.create_topic("later")
    broker.publish("later", b"a")
    eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0
    assert len(errors) == 1
    (logged,) = [text for text in caplog.messages if "later" in text]
    assert logged.startswith("the queue does not exist yet, waiting for it: there is no topic later")


def test_a_worker_that_waits_for_its_queue_can_be_stopped_and_takes_from_its_others(at: str, broker: Any):
    broker.publish("orders", b"a")
    worker = Worker(lambda message: None, queue=["later", "orders"], at=at, poll=0.1)
    worker.start()
    eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0
    assert broker.topics() == ["orders"], "it makes none by itself"


def test_a_queue_by_its_address(tmp_path: Path):
    with serving(tmp_path / "data") as server, holdfast.open(f"{server.url}/orders", body_type=str) as queue:
        queue.put("a")
        seen = []
        with Worker(lambda message: seen.append(message.body), queue=f"{server.url}/orders", body_type=str) as worker:
            eventually(lambda: worker.health().handled == 1)
        assert seen == ["a"]


def test_a_server_that_goes_away_and_comes_back_is_waited_for(tmp_path: Path):
    seen = []
    with serving(tmp_path / "data") as server:
        port = int(server.url.rpartition(":")[2])
        with holdfast.open(f"{server.url}/orders") as queue:
            queue.put(b"first")
        worker = Worker(lambda message: seen.append(message.body), queue="orders", at=server.url, poll=0.1)
        worker.start()
        eventually(lambda: seen == [b"first"])
    with holdfast.open(tmp_path / "data", topic="orders") as queue:
        queue.put(b"second")
    with serving(tmp_path / "data", port=port):
        eventually(lambda: seen == [b"first", b"second"])
        assert ended(worker) == 0


@pytest.mark.parametrize("kind", [plain, awaited])
def test_a_worker_whose_server_is_away_can_be_stopped(tmp_path: Path, kind: Any):
    with serving(tmp_path / "data") as server, holdfast.open(f"{server.url}/orders") as queue:
        queue.put(b"a")
        worker = Worker(kind(lambda message: None), queue="orders", at=server.url, poll=0.1)
        worker.start()
        eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0
