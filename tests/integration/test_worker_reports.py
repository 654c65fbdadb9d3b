"""Workers report themselves and do what they are told, wherever their queue is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import InvalidRequest, NotFound, Worker
from holdfast.worker import worker as worker_module
from tests.integration.http_gear import serving
from tests.unit.workers import PATIENCE_S, ended, eventually


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for seconds until a worker reports."""
    monkeypatch.setattr(worker_module, "REPORT_S", 0.02)


@pytest.fixture(params=["folder", "server", "shared"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "server":
        with serving(tmp_path / "data") as server, holdfast.open_broker(server.url) as broker:
            yield broker
    elif request.param == "shared":
        with holdfast.open_broker(tmp_path / "data"), holdfast.open_broker(tmp_path / "data") as broker:
            yield broker
    else:
        with holdfast.open_broker(tmp_path / "data") as broker:
            yield broker


class Handler:
    """A handler that waits until it is let go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.seen: list[bytes] = []

    def __call__(self, message: Any) -> None:
        self.go.wait(PATIENCE_S)
        self.seen.append(message.body)


def awaited(handler: Handler) -> Any:
    async def handle(message: Any) -> None:
        handler.seen.append(message.body)

    return handle


def info_of(broker: Any, name: str) -> Any:
    return next((info for info in broker.workers() if info.name == name), None)


def state_of(broker: Any, name: str) -> Any:
    info = info_of(broker, name)
    return None if info is None else info.state


def test_a_worker_is_listed_with_what_it_does(broker):
    broker.create_topic("orders")
    stored = broker.publish("orders", b"x")
    handler = Handler()
    with Worker(handler, queue=broker.group("orders", "default"), name="mailer", concurrency=3, poll=0.05) as worker:
        eventually(lambda: (found := info_of(broker, "mailer")) and found.queues[0].running)
        info = info_of(broker, "mailer")
        assert (info.state, info.pid, info.concurrency) == ("running", os.getpid(), 3)
        assert (info.version, info.handled) == (holdfast.__version__, 0)
        (queue,) = info.queues
        assert (queue.topic, queue.group, queue.running_count) == ("orders", "default", 1)
        assert (queue.running[0].id, queue.running[0].seconds >= 0) == (stored.id, True)
        (held,) = broker.group("orders", "default").messages("leased")
        assert held.holder == "mailer"  # the list of workers and a message's history call it by the same name
        handler.go.set()
        eventually(lambda: info_of(broker, "mailer").handled == 1)
        assert ended(worker) == 0
        assert state_of(broker, "mailer") == "stopped"


def test_a_drained_worker_finishes_takes_no_more_stays_and_takes_again_when_it_is_told(broker):
    broker.create_topic("orders")
    broker.publish("orders", b"one")
    handler = Handler()
    with Worker(handler, queue=broker.group("orders", "default"), name="mailer", poll=0.05) as worker:
        eventually(lambda: (found := info_of(broker, "mailer")) and found.queues[0].running_count == 1)
        assert len(broker.order_worker("mailer", "drain")) == 1
        eventually(lambda: state_of(broker, "mailer") == "draining")
        broker.publish("orders", b"two")
        handler.go.set()
        eventually(lambda: state_of(broker, "mailer") == "drained")
        assert worker.health().status == "drained"
        assert worker.health().ok
        assert handler.seen == [b"one"]
        eventually(lambda: broker.group("orders", "default").stats().ready == 1)
        assert worker.wait(0.1) is None
        broker.order_worker("mailer", "resume")
        eventually(lambda: handler.seen == [b"one", b"two"])
        eventually(lambda: state_of(broker, "mailer") == "running")


@pytest.mark.parametrize("kind", [lambda handler: handler, awaited], ids=["threads", "tasks"])
def test_a_stopped_worker_finishes_and_ends(broker, kind):
    broker.create_topic("orders")
    broker.publish("orders", b"one")
    handler = Handler()
    handler.go.set()
    with Worker(kind(handler), queue=broker.group("orders", "default"), name="mailer", poll=0.05) as worker:
        eventually(lambda: (found := info_of(broker, "mailer")) and found.handled == 1)
        broker.order_worker("mailer", "stop")
        assert worker.wait(PATIENCE_S) == 0
    eventually(lambda: state_of(broker, "mailer") == "stopped")
    with pytest.raises(NotFound):
        broker.order_worker("mailer", "stop")


def test_bad_names_and_orders_are_refused(broker):
    for name in ("", "x" * 201, "two\nlines", 5):
        with pytest.raises(InvalidRequest, match="name="):
            Worker(print, queue="nowhere", name=name)
    with pytest.raises(InvalidRequest, match="order='dance'"):
        broker.order_worker("mailer", "dance")
    with pytest.raises(InvalidRequest, match="name must be a str"):
        broker.order_worker(5, "drain")
    with pytest.raises(NotFound, match="no worker mailer"):
        broker.order_worker("mailer", "drain")


def test_a_worker_works_where_its_reports_are_refused(broker, monkeypatch):
    """As with an older server, or a token without the right."""
    broker.create_topic("orders")
    broker.publish("orders", b"one")
    group = broker.group("orders", "default")

    def refuse(self: Any, report: Any) -> None:
        raise NotFound("there is nothing at /v1/queues/orders/workers")

    monkeypatch.setattr(type(group._port), "report_worker", refuse)
    handler = Handler()
    handler.go.set()
    with Worker(handler, queue=group, poll=0.05) as worker:
        eventually(lambda: handler.seen == [b"one"])
        assert ended(worker) == 0
    assert broker.workers() == []
