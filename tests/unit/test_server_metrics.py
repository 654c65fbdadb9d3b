"""What Prometheus reads: every metric is there, is written about, and moves when what it counts happens."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import holdfast
import holdfast.otel
from holdfast.broker.metrics import Metrics
from holdfast.broker.streams.queries import QueryLease
from holdfast.broker.workers import WorkerReport
from holdfast.env import SeededIds, World
from holdfast.env.chain.chain import Chain, Position, Standby
from holdfast.env.chain.engines import MemoryStore
from holdfast.errors import Conflict, LeaseLost, NotInstalled, SchemaMismatch
from holdfast.server.console.overview import sync_times
from holdfast.server.metrics import (
    OF_GROUP,
    OF_TOPIC,
    PREFIX,
    TIMES_OF_GROUP,
    TIMES_OF_TOPIC,
    HttpMetrics,
    ServerMetrics,
)
from tests.tidy import markdown
from tests.tidy.repo import ROOT
from tests.unit.brokers import FOLDER, Place

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Stage(Place):
    """A broker with a topic, and the metrics of a server on it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.broker.create_topic("orders", max_attempts=1)
        self.metrics = ServerMetrics(self.engine, **options)
        self.group = self.broker.group("orders", "billing")
        self.ends: list[Callable[[], object]] = []

    def put(self, body: bytes = b"pizza", **options: Any) -> Any:
        return self.broker.publish("orders", body, **options)

    def take(self, **options: Any) -> Any:
        return self.group.receive(timeout=0, **options)

    def samples(self, name: str) -> Samples:
        """The values of one metric, by their names and labels."""
        body, _ = self.metrics.render()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            if family.name == PREFIX + name
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """One value; of a histogram how many times it has."""
        samples = self.samples(name)
        found = [samples.get((PREFIX + name + end, tuple(sorted(labels.items())))) for end in ("", "_total", "_count")]
        return next((value for value in found if value is not None), None)

    def close(self) -> None:
        for end in self.ends:
            end()
        super().close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def names_of(metrics: ServerMetrics) -> set[str]:
    return {family.name.removeprefix(PREFIX) for family in metrics.collect()}


def lose_a_lease(stage: Stage) -> None:
    stage.put()
    message = stage.take(lease=1)
    stage.after(seconds=2)
    with pytest.raises(LeaseLost):
        message.ack()


def let_a_lease_end(stage: Stage) -> None:
    stage.put()
    held = stage.take(lease=1)
    stage.after(seconds=2)
    assert not held.settled


def reject_one(stage: Stage) -> None:
    stage.put()
    stage.take().reject("no oven")
    stage.after()


def redrive(stage: Stage) -> None:
    reject_one(stage)
    stage.group.dead.redrive()


def expire(stage: Stage) -> None:
    stage.put(ttl=1)
    stage.clock.advance(seconds=2)
    assert stage.group.receive_many(1, timeout=0) == []


def damage(stage: Stage) -> None:
    stage.put(b"spoiled")
    path = f"{stage.engine.folder}/topics/orders/0/log/{0:020d}.log"
    stage.disk.flip(path, stage.disk.contents(path).index(b"spoiled"))
    assert stage.group.receive_many(1, timeout=0) == []


def release(stage: Stage) -> None:
    stage.put(delay=60)
    stage.after(seconds=61)


def duplicate(stage: Stage) -> None:
    stage.put(dedup_id="once")
    stage.put(dedup_id="once")


def cancel(stage: Stage) -> None:
    assert stage.group.cancel(stage.put().id)


def read_by_a_query(stage: Stage) -> None:
    stage.put()
    world = World(clock=stage.clock, disk=stage.disk, ids=SeededIds(2))
    lease = QueryLease.start(world, FOLDER, "report", ttl_ms=60_000)
    assert lease.hold({"orders": (stage.broker.describe_topic("orders").id, {0: 0})})
    stage.clock.advance(seconds=5)
    stage.ends.append(lease.end)


def hold(stage: Stage) -> None:
    stage.put()
    held = stage.take()
    stage.ends.append(held.ack)


def wait_in_line(stage: Stage) -> None:
    line, waiter = stage.engine.topic("orders").groups["billing"].waiters, Waiter()
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with line.in_line(waiter):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(10)
    stage.ends += [leave.set, thread.join]


class Waiter:
    count = 1
    woken = False
    ticket = 0

    def wake(self) -> None:
        self.woken = True


def age(stage: Stage) -> None:
    stage.put()
    stage.clock.advance(seconds=5)


def join(stage: Stage) -> None:
    stage.ends.append(stage.broker.consumer("orders", group="statistics").close)


def fail_to_read(stage: Stage) -> None:
    stage.engine.topic("orders").partitions[0].log.segments = broken


def broken() -> Any:
    raise OSError(errno.EIO, "input/output error")


def lose_a_step(stage: Stage) -> None:
    stage.engine.traces.log.failed(OSError("no space left"))


def export(stage: Stage) -> None:
    stage.broker.alter_topic("orders", trace_sample=1.0)
    stage.metrics.trace_export = holdfast.otel.export(stage.broker, exporter=InMemorySpanExporter())
    stage.put()
    stage.metrics.trace_export.close()


def export_too_much(stage: Stage) -> None:
    stage.broker.alter_topic("orders", trace_sample=1.0)
    exporter = InMemorySpanExporter()
    stage.metrics.trace_export = holdfast.otel.export(stage.broker, exporter=exporter, most_waiting=0)
    stage.put()


def call(stage: Stage) -> None:
    stage.metrics.request_done("/v1/queues/{queue}/ack", "POST", 200, 4_000_000, 17, 34)


def stream(stage: Stage) -> None:
    loop = asyncio.new_event_loop()
    counted = stage.metrics.counted("/v1/queues/{queue}/watch", pieces())
    assert loop.run_until_complete(anext(counted)) == b"one"
    stage.ends += [lambda: loop.run_until_complete(counted.aclose()), loop.close]


async def pieces() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"four"


def report_a_worker(stage: Stage) -> None:
    stage.engine.workers.report("", "orders", "billing", WorkerReport(id="w1", name="mailer"))


def live_in_a_store(stage: Stage) -> None:
    """Have the folder in a store, with something unsent, and a standby."""
    chain = Chain.take_over(MemoryStore(), "", stage.clock, at=Position(), writer=b"w" * 16)
    assert chain is not None
    chain.batch.make("folder")
    standby = Standby(process="process 7 on host", number=1, lag_objects=1, lag_seconds=2.0)
    chain.standbys = lambda: [standby]
    stage.clock.advance(seconds=5)
    stage.metrics._engine._engine.store = chain


def shrink(stage: Stage) -> None:
    stage.disk._capacity_bytes = 5_000_000


def move(stage: Stage) -> None:
    """Seal the segment, and move it to a store."""
    stage.settings = msgspec.structs.replace(stage.settings, tier="s3://cold/jobs")
    stage.reopen()
    stage.metrics = ServerMetrics(stage.engine)
    stage.put()
    stage.broker.alter_topic("orders", tier_after_bytes=0)
    stage.engine.open_topic("orders").partitions[0].log.roll()
    stage.engine.tiering.tick()


def fetch(stage: Stage) -> None:
    move(stage)
    assert list(stage.engine.open_topic("orders").partitions[0].log.records(0))


def upgrade(stage: Stage) -> None:
    before = holdfast.__version__
    stage.ends.append(lambda: setattr(holdfast, "__version__", before))
    holdfast.__version__ = "99.0"


TOPIC: Final = {"topic": "orders"}
GROUP: Final = {"topic": "orders", "group": "billing"}
ROUTE: Final = {"route": "/v1/queues/{queue}/ack"}


# For each metric: what moves it, which of its values, and what that is afterwards (None: more than 0).
def mismatch(stage: Stage) -> None:
    stage.broker.alter_topic("orders", schema_check="warn")
    stage.put()
    stage.broker.alter_topic("orders", schema_check="reject")
    with pytest.raises(SchemaMismatch):
        stage.put()


def commit(stage: Stage) -> None:
    with stage.broker.transaction() as transaction:
        transaction.publish("orders", b"x")


def conflict(stage: Stage) -> None:
    with pytest.raises(Conflict), stage.broker.transaction() as transaction:
        transaction.documents.update("total", 1, version=9)


def fire(stage: Stage) -> None:
    stage.broker.schedules.put("job", "orders", b"x", every=60)
    stage.after(seconds=300)


def fail_to_fire(stage: Stage) -> None:
    stage.broker.create_topic("gone")
    stage.broker.schedules.put("job", "gone", b"x", every=60)
    stage.broker.delete_topic("gone")
    stage.after(seconds=60)


MOVES: Final[dict[str, tuple[Callable[[Stage], object], dict[str, str], float | None]]] = {
    "published": (Stage.put, TOPIC, 1),
    "published_bytes": (Stage.put, TOPIC, 5),
    "duplicates": (duplicate, TOPIC, 1),
    "released": (release, TOPIC, 1),
    "put_seconds": (Stage.put, TOPIC, 1),
    "lateness_seconds": (release, TOPIC, 1),
    "sync_seconds": (Stage.put, TOPIC, None),
    "delivered": (hold, GROUP, 1),
    "acked": (lambda stage: (stage.put(), stage.take().ack()), GROUP, 1),
    "nacked": (lambda stage: (stage.put(), stage.take().nack()), GROUP, 1),
    "deferred": (lambda stage: (stage.put(), stage.take().defer()), GROUP, 1),
    "rejected": (reject_one, GROUP, 1),
    "expired_leases": (let_a_lease_end, GROUP, 1),
    "returned": (lambda stage: (stage.put(), stage.take().defer()), GROUP, 1),
    "buried": (reject_one, GROUP, 1),
    "redriven": (redrive, GROUP, 1),
    "expired": (expire, GROUP, 1),
    "cancelled": (cancel, GROUP, 1),
    "lost_leases": (lose_a_lease, GROUP, 1),
    "damaged": (damage, GROUP, 1),
    "wait_seconds": (hold, GROUP, 1),
    "handle_seconds": (lambda stage: (stage.put(), stage.take().ack()), GROUP, 1),
    "partitions": (lambda stage: stage.broker.add_partitions("orders", 2), TOPIC, 3),
    "log_bytes": (Stage.put, TOPIC, None),
    "log_segments": (Stage.put, TOPIC, 1),
    "log_tiered_bytes": (move, TOPIC, None),
    "log_damaged_messages": (damage, TOPIC, 1),
    "dead_messages": (reject_one, TOPIC, 1),
    "queries": (read_by_a_query, TOPIC, 1),
    "query_lag_messages": (read_by_a_query, TOPIC, 1),
    "query_lag_seconds": (read_by_a_query, TOPIC, 5),
    "ready_messages": (Stage.put, GROUP, 1),
    "leased_messages": (hold, GROUP, 1),
    "delayed_messages": (lambda stage: stage.put(delay=60), GROUP, 1),
    "waiters": (wait_in_line, GROUP, 1),
    "group_paused": (lambda stage: stage.group.pause(), GROUP, 1),
    "lag_messages": (hold, {**GROUP, "mode": "queue"}, 1),
    "lag_seconds": (age, {**GROUP, "mode": "queue"}, 5),
    "group_members": (join, {"group": "statistics"}, 1),
    "workers": (report_a_worker, {"state": "running"}, 1),
    "topics": (lambda stage: stage.broker.create_topic("more"), {}, 2),
    "open_topics": (lambda stage: (stage.broker.create_topic("more"), stage.broker.publish("more", b"x")), {}, 2),
    "open_partitions": (lambda stage: stage.broker.add_partitions("orders", 2), {}, 3),
    "metrics_left_out_groups": (lambda stage: setattr(stage.metrics._engine, "_most_groups", 0), {}, 1),
    "metrics_failed_topics": (fail_to_read, {}, 1),
    "disk_free_bytes": (shrink, {}, None),
    "store_epoch": (live_in_a_store, {}, 1),
    "store_silent_seconds": (live_in_a_store, {}, 5),
    "store_unsent_bytes": (live_in_a_store, {}, None),
    "store_standbys": (live_in_a_store, {}, 1),
    "store_standby_lag_seconds": (live_in_a_store, {"process": "process 7 on host"}, 2),
    "tier_moved_bytes": (move, {}, None),
    "tier_fetched_bytes": (fetch, {}, None),
    "trace_steps_lost": (lose_a_step, {}, 1),
    "transactions_committed": (commit, {}, 1),
    "transactions_refused": (conflict, {}, 1),
    "schemas_refused": (mismatch, {}, 1),
    "schemas_passed": (mismatch, {}, 1),
    "schedules_fired": (fire, {}, 1),
    "schedules_missed": (fire, {}, 4),
    "schedules_failed": (fail_to_fire, {}, 1),
    "schedules_lateness_seconds": (fire, {}, 1),
    "trace_spans": (export, {"outcome": "exported"}, 1),
    "trace_steps_dropped": (export_too_much, {}, 1),
    "http_requests": (call, {**ROUTE, "method": "POST", "status": "200"}, 1),
    "http_request_seconds": (call, {**ROUTE, "method": "POST"}, 1),
    "http_received_bytes": (call, ROUTE, 17),
    "http_sent_bytes": (call, ROUTE, 34),
    "http_connections": (lambda stage: stage.metrics.connection_opened(), {}, 1),
    "http_open_connections": (lambda stage: stage.metrics.connection_opened(), {}, 1),
    "http_refused_connections": (lambda stage: stage.metrics.connection_refused("too many"), {"reason": "too many"}, 1),
    "http_streams": (stream, {"route": "/v1/queues/{queue}/watch"}, 1),
    "build_info": (upgrade, {"version": "99.0", "python": "any"}, 1),
}


@pytest.mark.parametrize("name", sorted(MOVES))
def test_each_metric_moves_when_what_it_counts_happens(stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr("platform.python_version", lambda: "any")
    happens, labels, expected = MOVES[name]
    before = stage.value(name, **labels)
    happens(stage)
    after = stage.value(name, **labels)
    assert after != before
    if expected is None:
        assert after is not None
        assert after > 0
    else:
        assert after == expected


def test_there_is_such_a_case_for_every_metric(stage: Stage):
    assert names_of(stage.metrics) == set(MOVES)


def test_every_metric_is_in_the_reference(stage: Stage):
    written = markdown.code((ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8"))
    full = {PREFIX + name for name in names_of(stage.metrics)}
    assert {name for name in full if name not in written} == set()


def test_every_instrument_of_the_engine_is_exported():
    exported = OF_TOPIC.keys() | OF_GROUP.keys() | TIMES_OF_TOPIC.keys() | TIMES_OF_GROUP.keys()
    assert exported == {instrument.name for instrument in Metrics()._instruments}


def test_what_comes_back_to_nothing_goes_back_to_nothing(stage: Stage):
    stage.put()
    stage.take().ack()
    stage.metrics.connection_opened()
    stage.metrics.connection_closed()
    for name in ("ready_messages", "leased_messages", "delayed_messages"):
        assert stage.value(name, **GROUP) == 0
    assert stage.value("lag_messages", **GROUP, mode="queue") == stage.value("lag_seconds", **GROUP, mode="queue") == 0
    assert stage.value("http_open_connections") == 0


def test_a_group_in_stream_mode_has_its_lag(stage: Stage):
    stage.put()
    stage.clock.advance(seconds=3)
    consumer = stage.broker.consumer("orders", group="statistics")
    labels = {"topic": "orders", "group": "statistics", "mode": "stream"}
    assert (stage.value("lag_messages", **labels), stage.value("lag_seconds", **labels)) == (1, 3)
    assert len(consumer.poll(0)) == 1
    consumer.commit()
    assert (stage.value("lag_messages", **labels), stage.value("lag_seconds", **labels)) == (0, 0)
    consumer.close()


def test_the_numbers_are_those_of_the_stats(stage: Stage):
    for _ in range(7):
        stage.put()
    held = stage.take()
    stage.take().defer(delay=60)
    stage.put(delay=60)
    reject_one(stage)
    stats = stage.group.stats()
    assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (5, 1, 2, 1)
    for name in ("ready", "leased", "delayed"):
        assert stage.value(f"{name}_messages", **GROUP) == getattr(stats, name)
    assert stage.value("dead_messages", **TOPIC) == stats.dead
    assert stage.value("log_bytes", **TOPIC) == stats.bytes
    held.ack()


def test_the_age_is_read_once_for_as_long_as_the_first_message_stays(stage: Stage):
    stage.put()
    stage.samples("lag_seconds")
    log = stage.engine.topic("orders").partitions[0].log
    read, log.records = log.records, broken
    stage.clock.advance(seconds=4)
    assert stage.value("lag_seconds", **GROUP, mode="queue") == 4
    log.records = read
    stage.put()
    stage.clock.advance(seconds=1)
    stage.take().ack()
    assert stage.value("lag_seconds", **GROUP, mode="queue") == 1


def test_the_syncs_of_all_open_topics_can_be_had_together(stage: Stage):
    stage.broker.create_topic("more")
    before = sync_times(stage.engine).count
    stage.put()
    stage.broker.publish("more", b"x")
    assert sync_times(stage.engine).count == before + 2


def test_no_topic_is_opened_for_a_look():
    stage = Stage()
    for number in range(5):
        stage.broker.create_topic(f"idle{number}")
    stage.reopen()
    metrics = ServerMetrics(stage.engine)
    text = metrics.render()[0].decode()
    assert "holdfast_topics 6.0" in text
    assert "holdfast_open_topics 0.0" in text
    assert "idle" not in text
    assert stage.engine.open_topics() == []
    stage.close()


def test_beyond_the_cap_topics_are_left_out_and_counted_and_those_shown_stay_so():
    stage = Stage(most_groups=2)
    for name in ("a", "b", "c"):
        stage.broker.create_topic(name)
        stage.broker.group(name, "one")
        stage.broker.publish(name, b"x")
    shown = {labels for (_, labels) in stage.samples("published")}
    assert shown == {(("topic", "orders"),), (("topic", "a"),)}
    assert stage.value("metrics_left_out_groups") == 2
    assert stage.value("open_topics") == 4
    stage.close()


def test_a_topic_that_fails_does_not_hide_the_others(stage: Stage):
    stage.broker.create_topic("more")
    stage.broker.publish("more", b"x")
    fail_to_read(stage)
    assert stage.value("published", topic="more") == 1
    assert stage.value("metrics_failed_topics") == 1


def test_the_buckets_of_a_histogram_add_up(stage: Stage):
    for seconds in (0.00005, 0.004, 0.004, 0.3, 100.0):
        stage.metrics.request_done("/x", "GET", 200, round(seconds * 1e9), 0, 0)
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in stage.samples("http_request_seconds").items()
        if name.endswith("_bucket")
    }
    assert (buckets["0.0001"], buckets["0.005"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (1, 3, 3, 4, 5)
    assert list(buckets.values()) == sorted(buckets.values())
    total = stage.samples("http_request_seconds")[
        PREFIX + "http_request_seconds_sum", (("method", "GET"), ("route", "/x"))
    ]
    assert total == pytest.approx(100.30805)


def test_the_bytes_of_a_stream_are_counted_and_it_ends_where_it_is_closed(stage: Stage):
    closed = []

    async def watched() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces():
                yield piece
        finally:
            closed.append(True)

    async def read(most: int) -> None:
        counted = stage.metrics.counted("/watch", watched())
        for _ in range(most):
            await anext(counted)
        assert stage.value("http_streams", route="/watch") == 1
        await counted.aclose()

    asyncio.run(read(1))
    asyncio.run(read(2))
    assert closed == [True, True]
    assert stage.value("http_streams", route="/watch") == 0
    assert stage.value("http_sent_bytes", route="/watch") == len(b"one" + b"one" + b"four")


def test_clients_cannot_invent_labels():
    metrics = HttpMetrics()
    metrics.request_done(None, "BREW", 404, 1_000_000, 0, 0)
    metrics.request_done(None, "PROPFIND", 404, 1_000_000, 0, 0)
    (requests,) = (family for family in metrics.collect() if family.name == "holdfast_http_requests")
    (sample,) = requests.samples
    assert sample.labels == {"route": "unknown", "method": "other", "status": "404"}
    assert sample.value == 2


def test_a_topic_name_with_quotes_cannot_break_the_page(stage: Stage):
    stage.metrics.request_done('/x"\n}', "GET", 200, 1_000_000, 0, 0)
    labels = {"route": '/x"\n}', "method": "GET", "status": "200"}
    assert stage.value("http_requests", **labels) == 1


def test_one_more_gauge_can_be_added(stage: Stage):
    stage.metrics.gauge("worker_sessions", "Workers that are connected.", lambda: 3)
    assert stage.value("worker_sessions") == 3


def test_the_process_is_there_too_and_two_servers_do_not_mix(stage: Stage):
    other = ServerMetrics(stage.engine)
    stage.metrics.connection_opened()
    assert b"process_resident_memory_bytes" in other.render()[0]
    assert b"holdfast_http_connections_total 0.0" in other.render()[0]


def test_the_format_is_the_one_asked_for(stage: Stage):
    body, content_type = stage.metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    body, content_type = stage.metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_without_the_package_of_prometheus_only_its_page_is_missing(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    stage.metrics.connection_opened()
    with pytest.raises(NotInstalled, match="pip install"):
        stage.metrics.render()
