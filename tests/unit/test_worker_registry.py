"""The registry of workers: who is listed for how long, who may tell whom what, and how much one caller may report."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Forbidden, InvalidRequest, NotFound
from holdfast.broker import workers
from holdfast.broker.workers import RunningMessage, WorkerRegistry, WorkerReport
from holdfast.env import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> WorkerRegistry:
    return WorkerRegistry(clock)


def report(worker_id: str = "w1", name: str = "mailer", **facts: Any) -> WorkerReport:
    return WorkerReport(id=worker_id, name=name, **facts)


def states(registry: WorkerRegistry) -> dict[str, str]:
    return {info.id: info.state for info in registry.all()}


def test_a_worker_is_listed_with_what_it_does_on_each_of_its_queues(registry):
    running = [RunningMessage(id="orders-0-7", seconds=1.5)]
    registry.report("a", "orders", "default", report(running=running, running_count=1, handled=3, failed=1, pid=7))
    registry.report("a", "mails", "default", report(handled=4, failed=1, pid=7))
    (info,) = registry.all()
    assert (info.name, info.pid, info.handled, info.failed, info.state) == ("mailer", 7, 4, 1, "running")
    assert [(queue.topic, queue.running_count) for queue in info.queues] == [("mails", 0), ("orders", 1)]
    assert registry.all(lambda topic, group: topic == "orders")[0].queues == info.queues[1:]
    assert registry.all(lambda topic, group: False) == []


def test_one_that_is_silent_is_lost_and_stays_listed_for_an_hour(registry, clock):
    registry.report("a", "orders", "default", report("w1"))
    registry.report("a", "orders", "default", report("w2", status="stopped"))
    clock.advance(seconds=29)
    assert states(registry) == {"w1": "running", "w2": "stopped"}
    clock.advance(seconds=1)
    assert states(registry) == {"w1": "lost", "w2": "stopped"}
    assert registry.states()["lost"] == 1
    clock.advance(seconds=3569)
    assert set(states(registry)) == {"w1", "w2"}
    clock.advance(seconds=1)
    assert states(registry) == {}


def test_an_order_is_told_until_it_is_obeyed(registry):
    registry.report("a", "orders", "default", report())
    assert registry.order("mailer", "drain") == ["w1"]
    assert registry.all()[0].order == "drain"
    assert registry.report("a", "orders", "default", report()) == "drain"
    assert registry.report("a", "orders", "default", report()) == "drain"  # that answer was lost
    assert registry.report("a", "orders", "default", report(status="draining")) is None
    registry.order("w1", "drain")  # by its id; it drains already
    assert registry.report("a", "orders", "default", report(status="drained")) is None
    registry.order("mailer", "resume")
    assert registry.report("a", "orders", "default", report(status="drained")) == "resume"
    assert registry.report("a", "orders", "default", report(status="running")) is None
    registry.order("mailer", "stop")
    assert registry.report("a", "orders", "default", report(status="running")) == "stop"
    assert registry.report("a", "orders", "default", report(status="stopping")) is None


def test_the_last_order_counts(registry):
    registry.report("a", "orders", "default", report())
    registry.order("mailer", "drain")
    registry.order("mailer", "stop")
    assert registry.report("a", "orders", "default", report()) == "stop"


def test_orders_for_nobody_and_orders_that_are_none(registry, clock):
    with pytest.raises(NotFound, match="no worker mailer is reporting now"):
        registry.order("mailer", "drain")
    registry.report("a", "orders", "default", report())
    with pytest.raises(InvalidRequest, match="order='dance'"):
        registry.order("mailer", "dance")
    clock.advance(seconds=60)
    with pytest.raises(NotFound):
        registry.order("mailer", "drain")


def test_no_report_touches_the_worker_of_another_caller(registry):
    registry.report("a", "orders", "default", report("w1", handled=5))
    registry.report("b", "orders", "default", report("w1", handled=9, status="stopped"))
    assert sorted((info.handled, info.state) for info in registry.all()) == [(5, "running"), (9, "stopped")]
    registry.order("mailer", "drain")
    assert registry.report("b", "orders", "default", report("w1", status="draining")) is None
    assert registry.report("a", "orders", "default", report("w1")) == "drain"


def only_orders(topic: str, group: str) -> None:
    if topic != "orders":
        raise Forbidden("no")


def test_whoever_may_not_order_on_all_queues_of_a_worker_tells_it_nothing(registry):
    registry.report("a", "orders", "default", report("w1"))
    registry.report("a", "secret", "default", report("w1"))
    with pytest.raises(Forbidden):
        registry.check_order("mailer", only_orders)
    with pytest.raises(Forbidden):
        registry.order("mailer", "stop", only_orders)
    assert registry.report("a", "orders", "default", report("w1")) is None


def test_a_worker_of_others_with_the_same_name_or_id_keeps_nobody_from_orders(registry):
    registry.report("a", "orders", "default", report("w1"))
    registry.report("b", "secret", "default", report("w2"))
    registry.report("b", "secret", "default", report("w3", name="w1"))
    registry.check_order("mailer", only_orders)
    assert registry.order("mailer", "stop", only_orders) == ["w1"]
    assert registry.order("w1", "stop", only_orders) == ["w1"]
    assert registry.report("b", "secret", "default", report("w2")) is None
    assert registry.report("a", "orders", "default", report("w1")) == "stop"


def test_the_queues_of_all_workers_of_one_caller_are_limited_too(registry, monkeypatch):
    monkeypatch.setattr(workers, "MOST_REPORTS_EACH", 4)
    monkeypatch.setattr(workers, "MOST_REPORTS", 6)
    for topic in ("a", "b"):
        registry.report("one", topic, "default", report("w1"))
        registry.report("one", topic, "default", report("w2"))
    for worker in ("w1", "w3"):
        with pytest.raises(InvalidRequest, match="of this caller"):
            registry.report("one", "c", "default", report(worker))
    registry.report("one", "a", "default", report("w1"))  # what is known is still reported
    registry.report("two", "a", "default", report("w9"))
    registry.report("two", "b", "default", report("w9"))
    with pytest.raises(InvalidRequest, match="3 workers are reporting"):
        registry.report("two", "c", "default", report("w9"))
    registry.report("one", "a", "default", report("w2", status="stopped"))
    registry.report("one", "c", "default", report("w1"))  # in the place of the one that stopped
    assert set(states(registry)) == {"w1", "w9"}


def test_what_one_caller_may_report_is_limited_and_others_are_not_pushed_out(registry, clock, monkeypatch):
    monkeypatch.setattr(workers, "MOST_WORKERS_EACH", 3)
    monkeypatch.setattr(workers, "MOST_WORKERS", 5)
    registry.report("b", "orders", "default", report("theirs"))
    for number in range(3):
        registry.report("a", "orders", "default", report(f"w{number}"))
    with pytest.raises(InvalidRequest, match="of this caller"):
        registry.report("a", "orders", "default", report("more"))
    registry.report("a", "orders", "default", report("w1", status="stopped"))
    registry.report("a", "orders", "default", report("more"))  # in the place of the one that stopped
    assert set(states(registry)) == {"theirs", "w0", "w2", "more"}
    registry.report("c", "orders", "default", report("c1"))
    with pytest.raises(InvalidRequest, match="5 workers are reporting"):
        registry.report("c", "orders", "default", report("c2"))
    monkeypatch.setattr(workers, "MOST_QUEUES", 2)
    registry.report("c", "mails", "default", report("c1"))
    with pytest.raises(InvalidRequest, match="2 queues"):
        registry.report("c", "more", "default", report("c1"))
