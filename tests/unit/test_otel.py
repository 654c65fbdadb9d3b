"""Traces as spans of OpenTelemetry: what each step becomes, and that nobody waits for a collector."""

from __future__ import annotations

import gzip
import importlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import holdfast.otel
from holdfast.broker.tracing import TraceStep
from holdfast.otel import SpanMaker
from holdfast.server.metrics import start_export
from tests.unit import queues
from tests.unit.brokers import Place

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    place.broker.create_topic("orders", trace_sample=1.0, max_attempts=2)
    yield place
    place.close()


class Spans:
    """What was exported of a broker, by the names of the spans."""

    def __init__(self, place: Place) -> None:
        self.exporter = InMemorySpanExporter()
        self.export = holdfast.otel.export(place.broker, exporter=self.exporter)

    def all(self) -> list[ReadableSpan]:
        """All of them, in the order in which they ended; nothing is exported any more."""
        self.export.close()
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]


@pytest.fixture
def spans(place: Place) -> Spans:
    return Spans(place)


def span_id(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def links(span: ReadableSpan) -> dict[str, str]:
    return {str((link.attributes or {})["holdfast.link"]): f"{link.context.span_id:016x}" for link in span.links}


def test_a_message_is_a_span_of_its_producer_and_one_of_its_consumer(place: Place, spans: Spans):
    stored = place.broker.publish("orders", b"pizza")
    billing = place.broker.group("orders", "billing")
    message = billing.receive(holder="ann")
    place.clock.advance(seconds=2)
    message.ack()
    publish, process = spans.all()
    assert (publish.name, publish.kind) == ("publish orders", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process orders", SpanKind.CONSUMER)
    assert process.context.trace_id == publish.context.trace_id
    assert parent_id(process) == span_id(publish)
    assert links(process) == {"published": span_id(publish)}
    assert process.end_time - process.start_time == 2_000_000_000
    assert process.status.status_code is StatusCode.UNSET
    assert dict(process.attributes) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": stored.id,
        "messaging.consumer.group.name": "billing",
        "messaging.client.id": "ann",
        "holdfast.attempt": 1,
        "holdfast.offset": 0,
        "holdfast.outcome": "acked",
    }
    assert publish.attributes["messaging.operation.type"] == "send"


def test_the_ids_are_those_of_the_trace_that_the_message_came_with(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza", headers={"traceparent": PARENT, "tracestate": "vendor=1"})
    (publish,) = spans.all()
    assert f"{publish.context.trace_id:032x}" == TRACE
    assert parent_id(publish) == SPAN
    assert publish.parent.is_remote
    assert publish.context.trace_state.to_header() == "vendor=1"


def test_a_retry_is_linked_to_the_attempt_before(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza")
    billing = place.broker.group("orders", "billing")
    billing.receive().nack(error="no route to the bank", delay=0)
    billing.receive().ack()
    first, second = spans.named("process orders")
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "no route to the bank"
    assert first.attributes["holdfast.outcome"] == first.attributes["error.type"] == "nacked"
    assert links(second)["attempt before"] == span_id(first)
    assert second.status.status_code is StatusCode.UNSET


def test_groups_are_not_taken_for_retries_of_each_other(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza")
    place.broker.group("orders", "billing").receive().nack(delay=0)
    place.broker.group("orders", "kitchen").receive().ack()
    _, kitchen = spans.named("process orders")
    assert "attempt before" not in links(kitchen)


def test_a_death_is_a_span_below_the_last_attempt_and_a_redrive_begins_below_the_first_life(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza")
    billing = place.broker.group("orders", "billing")
    billing.receive().nack(error="no oven", delay=0)
    billing.receive().nack(error="still no oven", delay=0)
    billing.dead.redrive()
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in spans.all():
        by_name.setdefault(span.name, []).append(span)
    last = by_name["process orders"][-1]
    (bury,) = by_name["bury orders"]
    assert parent_id(bury) == span_id(last)
    assert bury.status.description == last.status.description == "still no oven"
    assert bury.attributes["holdfast.reason"] == "MAX_ATTEMPTS"
    first, again = by_name["publish orders"]
    (redrive,) = by_name["redrive orders"]
    assert parent_id(again) == parent_id(redrive) == span_id(first)
    assert links(again) == {"redriven": span_id(first)}
    assert again.context.trace_id == first.context.trace_id


def test_a_lease_that_ends_by_time_is_an_error_and_a_deferred_message_is_none(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza")
    billing = place.broker.group("orders", "billing")
    billing.receive().defer(delay=0)
    kept = billing.receive(lease=1)
    kept.extend(2)
    place.after(seconds=3)
    deferred, ended = spans.named("process orders")
    assert deferred.status.status_code is StatusCode.UNSET
    assert (deferred.attributes["holdfast.outcome"], deferred.attributes["holdfast.reason"]) == ("returned", "deferred")
    assert ended.status.status_code is StatusCode.ERROR
    assert ended.attributes["error.type"] == "lease ended"
    assert [event.name for event in ended.events] == ["extended"]


def test_a_delayed_message_says_when_it_is_due_and_when_it_came(place: Place, spans: Spans):
    place.broker.publish("orders", b"pizza", delay=60)
    place.after(seconds=61)
    publish, release = spans.all()
    assert publish.attributes["holdfast.due_ms"] > publish.start_time // 1_000_000
    assert release.name == "release orders"
    assert parent_id(release) == span_id(publish)


def test_the_end_of_a_delivery_whose_begin_nobody_saw_is_still_a_span(place: Place):
    place.broker.publish("orders", b"pizza")
    message = place.broker.group("orders", "billing").receive()
    spans = Spans(place)
    message.ack()
    (process,) = spans.all()
    assert process.name == "process orders"
    assert process.start_time == process.end_time


def test_deliveries_that_never_end_are_forgotten_and_counted():
    maker = SpanMaker(most_open=3)
    for number in range(5):
        leased = TraceStep(number, "leased", f"orders-0-{number}", "orders", trace_id=TRACE, span_id=f"{number:016x}")
        assert list(maker.spans([leased], 0)) == []
    assert maker.forgotten == 2


class Stuck(SpanExporter):
    """A collector that answers when it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go_on.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.go_on.set()


def test_nobody_waits_for_a_collector_that_hangs_and_what_is_dropped_is_counted(place: Place):
    stuck = Stuck()
    export = holdfast.otel.export(place.broker, exporter=stuck, every_s=0, most_waiting=100, close_s=0)
    place.broker.publish("orders", b"first")
    assert stuck.asked.wait(10)
    for _ in range(300):
        place.broker.publish("orders", b"pizza")
    assert export.counts() == {"exported": 0, "failed": 0, "dropped": 200}
    export.close()
    assert export.counts()["failed"] >= 1
    assert len(list(place.broker.search_traces(event="published", limit=1000))) == 301


class Broken(SpanExporter):
    """A collector whose exporter raises."""

    def __init__(self) -> None:
        self.times = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.times += 1
        raise OSError("connection refused")

    def shutdown(self) -> None:
        pass


def test_an_exporter_that_raises_is_told_of_once_and_tried_again(place: Place, caplog: pytest.LogCaptureFixture):
    broken = Broken()
    with caplog.at_level(logging.WARNING, "holdfast"):
        with holdfast.otel.export(place.broker, exporter=broken) as export:
            place.broker.publish_many("orders", [b"pizza"] * 1200)
        assert export.counts() == {"exported": 0, "failed": 1200, "dropped": 0}
    assert broken.times == 3
    assert [record.message for record in caplog.records] == ["spans of traces could not be exported"]


def test_closing_the_broker_exports_the_last_steps():
    place = Place()
    place.broker.create_topic("orders", trace_sample=1.0)
    exporter = InMemorySpanExporter()
    export = holdfast.otel.export(place.broker, exporter=exporter)
    place.broker.publish("orders", b"pizza")
    held = place.broker.group("orders", "billing").receive()
    place.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["publish orders", "process orders"]
    assert export.counts()["exported"] == 2
    export.close()
    assert held.body == b"pizza"


def test_a_topic_that_is_not_traced_exports_nothing(place: Place, spans: Spans):
    place.broker.create_topic("quiet")
    place.broker.publish("quiet", b"shh", headers={"traceparent": PARENT})
    assert spans.all() == []


def test_the_traces_of_a_queue_that_another_owns_are_its_owners_to_export(tmp_path):
    folder = tmp_path / "jobs"
    refused = pytest.raises(holdfast.InvalidRequest, match="in the process that owns the folder")
    with holdfast.open(folder), holdfast.open(folder) as second, refused:
        holdfast.otel.export(second, exporter=InMemorySpanExporter())


def test_a_simple_queue_exports_too():
    place = queues.Place(trace_sample=1.0)
    exporter = InMemorySpanExporter()
    with holdfast.otel.export(place.q, exporter=exporter):
        place.q.put(b"pizza")
    place.q.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["publish jobs"]


def test_a_broker_for_tasks_exports_too():
    place = Place(tasks=True)
    place.broker.create_topic("orders", trace_sample=1.0)
    exporter = InMemorySpanExporter()
    with holdfast.otel.export(place.broker._inner, exporter=exporter):
        place.broker.publish("orders", b"pizza")
    place.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["publish orders"]


class Collector:
    """A tiny OTLP collector on loopback."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.paths.append(self.path)
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_spans_arrive_at_an_otlp_collector(place: Place, collector: Collector):
    with holdfast.otel.export(place.broker, endpoint=collector.url, headers={"x-team": "kitchen"}) as export:
        place.broker.publish("orders", b"pizza", headers={"traceparent": PARENT})
        place.broker.group("orders", "billing").receive().nack(error="no oven", delay=0)
    assert export.counts() == {"exported": 2, "failed": 0, "dropped": 0}
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["x-team"] == "kitchen"
    (resource,) = collector.received[0].resource_spans
    assert ("service.name", "holdfast") in [
        (each.key, each.value.string_value) for each in resource.resource.attributes
    ]
    publish, process = resource.scope_spans[0].spans
    assert publish.trace_id.hex() == process.trace_id.hex() == TRACE
    assert publish.parent_span_id.hex() == SPAN
    assert process.parent_span_id == publish.span_id == process.links[0].span_id
    assert process.status.message == "no oven"


def test_a_server_exports_where_a_setting_or_a_variable_says(
    place: Place, collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    engine = place.engine
    assert start_export(engine, None, {}) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    assert start_export(engine, None, {**variables, "OTEL_SDK_DISABLED": "true"}) is None
    for endpoint, environment in ((collector.url, {}), (None, variables)):
        export = start_export(engine, endpoint, environment)
        assert export is not None
        place.broker.publish("orders", b"pizza")
        export.close()
        assert export.counts()["exported"] == 1
    assert collector.paths == ["/v1/traces"] * 2


def test_without_the_package_a_setting_is_refused_and_a_variable_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    importlib.invalidate_caches()
    with pytest.raises(holdfast.BadSettings, match=r"pip install 'holdfast\[otel\]'"):
        start_export(place.engine, "http://localhost:4318", {})
    assert start_export(place.engine, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is None
    assert "traces are not exported" in caplog.text


def test_an_endpoint_that_is_no_url_is_refused(place: Place):
    with pytest.raises(holdfast.BadSettings, match="give a URL"):
        holdfast.otel.export(place.broker, endpoint="localhost:4318")
