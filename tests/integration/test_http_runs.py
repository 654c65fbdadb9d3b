"""Messages that are sent and settled as runs: the same messages, by the same receipts, as those sent one by one."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.broker.folder.layout import run_receipt
from holdfast.protocol.media import MSGPACK, RUNS
from holdfast.protocol.messages import Deliveries, DeliveryRun
from tests.integration.faults_gear import vanish
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until
from tests.integration.test_http_known_heads import Line

QUEUE = "/v1/queues/orders"
_DECODE = msgspec.msgpack.Decoder(Deliveries).decode


class RunsLine(Line):
    """A connection of a caller who accepts runs, or of one who does not."""

    accepts = RUNS

    def post(self, verb: str, **body: Any) -> tuple[int, bytes]:
        return self.call(self.request(verb, **body))

    def request(self, verb: str, **body: Any) -> bytes:
        content = json.dumps(body).encode()
        head = f"POST {QUEUE}/{verb} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: {self.accepts}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content

    def take(self, count: int, **more: Any) -> Deliveries:
        status, body = self.post("dequeue", count=count, **more)
        assert status == 200, body
        return _DECODE(body)

    def taken(self, count: int, **more: Any) -> DeliveryRun:
        """What is taken, which is one run."""
        found = self.take(count, **more)
        assert not found.messages
        (run,) = found.runs
        return run

    def settle(self, verb: str, receipts: list[str], **more: Any) -> Any:
        return self.settled(verb, receipts=receipts, **more)

    def settle_run(self, verb: str, *runs: DeliveryRun, offsets: list[int] | None = None, **more: Any) -> Any:
        """Settle messages by their runs: all of them, or those at the offsets."""
        given = [
            {
                "partition": run.partition,
                "token": base64.b64encode(run.token).decode(),
                "offsets": offsets or run.offsets,
            }
            for run in runs
        ]
        return self.settled(verb, receipts=[], runs=given, **more)

    def settled(self, verb: str, **given: Any) -> Any:
        status, body = self.post(verb, **given)
        found = msgspec.msgpack.decode(body)
        return found["settled"] if status == 200 else found["error"]


class PlainLine(RunsLine):
    accepts = MSGPACK


def receipts_of(run: DeliveryRun) -> list[str]:
    return [run_receipt(run.token, f"{run.topic}-{run.partition}-", offset) for offset in run.offsets]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.request("PUT", QUEUE, {"settings": {"lease_ms": 600_000}}).status == 200
        yield found


@pytest.fixture(params=[False, True], ids=["by the handler", "in one step"])
def line(request: pytest.FixtureRequest, server: Serving) -> Iterator[RunsLine]:
    """A connection whose heads are new, or known from calls before."""
    line = RunsLine(server)
    if request.param:
        for _ in range(4):
            put(server, b"a", b"b")
            assert line.settle_run("ack", line.taken(10)) == 2
            line.take(10)
    yield line
    line.close()


def put(server: Serving, *bodies: bytes, **options: Any) -> None:
    for body in bodies:
        assert server.post(f"{QUEUE}/enqueue", body, query=options).status == 201


def test_a_run_tells_what_the_messages_one_by_one_tell(server: Serving, line: RunsLine) -> None:
    put(server, *(b"%d" % number for number in range(5)))
    run = line.taken(5, attempt_id="one")
    one_by_one = PlainLine(server)
    again = one_by_one.take(5, attempt_id="one").messages  # the same take, answered once more
    one_by_one.close()
    assert [each.body for each in again] == run.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert [each.offset for each in again] == run.offsets
    assert [each.timestamp_ns for each in again] == run.timestamps_ns
    assert [each.receipt for each in again] == receipts_of(run)
    assert [each.id for each in again] == [f"{run.topic}-{run.partition}-{offset}" for offset in run.offsets]
    assert {each.correlation_id == each.id for each in again} == {True}
    facts = {(each.topic, each.partition, each.fence, each.holder, each.lease_ms, each.attempt) for each in again}
    assert facts == {(run.topic, run.partition, run.fence, run.holder, run.lease_ms, 1)}


def test_a_caller_who_does_not_ask_for_runs_gets_none(server: Serving) -> None:
    line = PlainLine(server)
    for _ in range(4):
        put(server, b"a", b"b")
        found = line.take(10)
        assert (len(found.messages), found.runs) == (2, [])
    line.close()
    put(server, b"a", b"b")
    assert [*server.post(f"{QUEUE}/dequeue", {"count": 10}).body] == ["messages"]


@pytest.mark.parametrize("options", [{"key": "a"}, {"priority": 3}, {"ttl": 600}, {"header": "a:b"}])
def test_messages_with_more_than_a_body_are_sent_one_by_one(
    server: Serving, line: RunsLine, options: dict[str, Any]
) -> None:
    for _ in range(2):  # the second by the handler, whichever answered the first
        put(server, b"plain")
        put(server, b"more", **options)
        found = line.take(10)
        assert found.runs == []
        assert sorted(each.body for each in found.messages) == [b"more", b"plain"]
        assert line.settle("ack", [each.receipt for each in found.messages]) == 2


def test_a_message_that_failed_or_has_state_is_sent_with_that(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b")
    receipts = receipts_of(line.taken(10))
    assert line.settle("nack", receipts[:1], delay=0) == 1
    saved = {"receipt": receipts[1], "version": 0, "value": {"page": 3}}
    assert server.request("PUT", f"{QUEUE}/state", saved).status == 200
    assert line.settle("nack", receipts[1:], intent="defer", delay=0) == 1
    found = line.take(10, state=True)
    assert found.runs == []
    failed, deferred = sorted(found.messages, key=lambda each: each.offset)
    assert (failed.attempt, deferred.attempt) == (2, 1)
    assert deferred.state is not None
    assert deferred.state.value == {"page": 3}


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend"])
@pytest.mark.parametrize("order", ["as sent", "reversed", "some", "twice"])
def test_receipts_of_a_run_settle_in_any_order_and_number(
    server: Serving, line: RunsLine, verb: str, order: str
) -> None:
    put(server, b"a", b"b", b"c")
    receipts = receipts_of(line.taken(3))
    given = {"as sent": receipts, "reversed": receipts[::-1], "some": receipts[1:], "twice": [*receipts, *receipts]}
    assert line.settle(verb, given[order]) == len(set(given[order]))
    if verb != "extend":
        assert line.settle(verb, given[order])["code"] == "lease_lost"


def test_of_a_run_only_what_is_still_leased_is_acked_and_the_rest_is_named(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b", b"c")
    receipts = receipts_of(line.taken(3))
    assert line.settle("ack", receipts[1:2]) == 1
    error = line.settle("ack", receipts)
    assert error["code"] == "lease_lost"
    assert error["facts"]["receipts"] == receipts[1:2]
    assert line.settle("ack", receipts)["facts"]["receipts"] == receipts
    assert server.get(f"{QUEUE}/stats").body["leased"] == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_run_with_a_receipt_that_nobody_gave_acks_the_others_only(server: Serving, line: RunsLine, at: int) -> None:
    put(server, b"a", b"b", b"c")
    receipts = receipts_of(line.taken(3))
    made_up = receipts[at][:-1] + ("A" if receipts[at][-1] != "A" else "B")
    error = line.settle("ack", [*receipts[:at], made_up, *receipts[at + 1 :]])
    assert error["facts"]["receipts"] == [made_up]
    assert line.settle("ack", [receipts[at]]) == 1


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend"])
@pytest.mark.parametrize("which", ["all", "reversed", "some", "twice"])
def test_the_token_of_a_run_settles_any_of_its_messages(server: Serving, line: RunsLine, verb: str, which: str) -> None:
    put(server, b"a", b"b", b"c")
    run = line.taken(3)
    all_ = run.offsets
    given = {"all": all_, "reversed": all_[::-1], "some": all_[1:], "twice": [*all_, *all_]}[which]
    assert line.settle_run(verb, run, offsets=given) == len(set(given))
    if verb != "extend":
        error = line.settle_run(verb, run, offsets=given)
        assert error["code"] == "lease_lost"
        assert sorted(error["facts"]["receipts"]) == sorted(receipts_of(run)[-len(set(given)) :])
        left = server.get(f"{QUEUE}/stats").body["leased"]
        assert left == 3 - len(set(given))


def test_of_messages_named_by_their_run_those_still_leased_are_acked_and_the_rest_is_named(
    server: Serving, line: RunsLine
) -> None:
    put(server, b"a", b"b", b"c")
    run = line.taken(3)
    assert line.settle_run("ack", run, offsets=run.offsets[1:2]) == 1
    error = line.settle_run("ack", run)
    assert (error["code"], error["facts"]["receipts"]) == ("lease_lost", receipts_of(run)[1:2])
    assert server.get(f"{QUEUE}/stats").body["leased"] == 0


def test_runs_and_receipts_may_be_given_together(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b", b"c", b"d")
    one, other = line.taken(2), line.taken(2)
    receipts = receipts_of(other)[:1]
    runs = [{"partition": 0, "token": base64.b64encode(one.token).decode(), "offsets": one.offsets}]
    assert line.settled("ack", receipts=receipts, runs=runs) == 3
    assert line.settle_run("ack", one, other)["facts"]["receipts"] == [*receipts_of(one), *receipts]
    assert server.get(f"{QUEUE}/stats").body["leased"] == 0


@pytest.mark.parametrize("change", ["token", "fence", "granted", "offset", "partition", "length"])
def test_a_token_that_nobody_gave_settles_nothing(server: Serving, line: RunsLine, change: str) -> None:
    put(server, b"a", b"b", b"c")
    run = line.taken(2)
    at = {"token": 28, "fence": 8, "granted": 12}.get(change)
    if at is not None:
        run.token = run.token[:at] + bytes([run.token[at] ^ 1]) + run.token[at + 1 :]
    offsets = [*run.offsets, run.offsets[-1] + 1] if change == "offset" else None
    if change == "partition":
        run.partition = 1
    if change == "length":
        run.token += b"x"
    error = line.settle_run("ack", run, offsets=offsets)
    expected = {"partition": "unknown_topic", "length": "invalid_request"}.get(change, "lease_lost")
    assert error["code"] == expected
    # What was leased by it is acked; the message that it does not cover is named, and stays.
    if change == "offset":
        assert error["facts"]["receipts"] == [run_receipt(run.token, "orders-0-", run.offsets[-1] + 1)]
    stats = server.get(f"{QUEUE}/stats").body
    assert (stats["leased"], stats["ready"]) == ((0, 1) if change == "offset" else (2, 1))


def test_a_token_settles_no_message_that_another_take_has_leased_since(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b")
    first = line.taken(2)
    assert line.settle_run("nack", first, intent="defer", delay=0) == 2
    second = line.taken(2)
    assert second.offsets == first.offsets
    assert line.settle_run("ack", first)["code"] == "lease_lost"
    assert server.get(f"{QUEUE}/stats").body["leased"] == 2
    assert line.settle_run("ack", second) == 2


def test_a_call_that_names_no_message_or_too_many_is_refused(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b")
    run = line.taken(2)
    assert line.settled("ack", receipts=[])["code"] == "invalid_request"
    assert line.settled("ack", receipts=[], runs=[])["code"] == "invalid_request"
    error = line.settle_run("ack", run, run, offsets=list(range(6_000)))
    assert error["code"] == "invalid_request"
    assert "10,000" in error["message"]
    assert line.settle_run("ack", run) == 2


def test_a_run_of_one_group_settles_nothing_in_another(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b")
    line.take(1, group="audit")
    mine, theirs = line.taken(2), line.take(2, group="audit")
    assert line.settle("ack", receipts_of(mine), group="audit")["code"] == "lease_lost"
    assert line.settle_run("ack", mine, group="audit")["code"] == "lease_lost"
    assert line.settle("ack", receipts_of(mine)) == 2
    assert theirs.messages or theirs.runs


def test_a_run_of_a_deleted_queue_settles_nothing_in_the_next_one(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b")
    before = line.taken(2)
    assert server.request("DELETE", "/v1/topics/orders").status < 300
    assert server.request("PUT", QUEUE, {}).status == 200
    put(server, b"a", b"b")
    line.taken(2)
    assert line.settle("ack", receipts_of(before))["code"] == "lease_lost"
    assert line.settle_run("ack", before)["code"] == "lease_lost"
    assert server.get(f"{QUEUE}/stats").body["leased"] == 2


def test_a_run_that_its_caller_never_read_is_ready_again(server: Serving, line: RunsLine) -> None:
    put(server, b"a", b"b", b"c")
    line.socket.sendall(line.request("dequeue", count=3))
    assert line.socket.recv(1, socket.MSG_PEEK)
    vanish(line.socket)
    other = RunsLine(server)
    found: list[bytes] = []

    def take() -> bool:
        answer = other.take(3)
        found.extend(body for run in answer.runs for body in run.bodies)
        return len(found) == 3

    until(take, "what nobody read is ready again")
    other.close()
    assert sorted(found) == [b"a", b"b", b"c"]


def test_messages_too_large_for_one_step_are_all_delivered(server: Serving, line: RunsLine) -> None:
    size, count = 100_000, 12
    put(server, *(b"%d" % (number % 10) * size for number in range(count)))
    offsets: list[int] = []

    def take() -> bool:
        found = line.take(count)
        offsets.extend(each.offset for each in found.messages)
        offsets.extend(offset for run in found.runs for offset in run.offsets)
        assert {len(each.body) for each in found.messages} | {
            len(body) for run in found.runs for body in run.bodies
        } <= {size}
        return len(offsets) == count

    until(take, "all of them are delivered")
    assert len(set(offsets)) == count


@pytest.mark.parametrize("count", [2, 100, 250, 1_000])
def test_our_clients_get_runs_of_any_length(server: Serving, count: int) -> None:
    bodies = [b"%d" % number for number in range(count)]
    with holdfast.connect(server.url) as broker:
        queue = broker.queue("orders")
        queue.put_many(bodies)
        messages = queue.get_many(count)
        assert [message.body for message in messages] == bodies
        first = messages[0]
        assert (first.id, first.attempt, first.correlation_id) == ("orders-0-0", 1, "orders-0-0")
        assert first.receipt.startswith("orders-0-0@")
        assert first.fence
        assert not first.lost
        messages[0].ack()
        messages[1].nack(delay=0)
        queue.ack_many(messages[2:])
        (again,) = queue.get_many(count)
        assert (again.body, again.attempt) == (bodies[1], 2)
        again.ack()
        assert queue.qsize() == 0


def test_our_client_renews_the_leases_of_a_run(server: Serving) -> None:
    with holdfast.connect(server.url) as broker:
        queue = broker.queue("orders")
        queue.put_many([b"a", b"b"])
        messages = queue.get_many(2, lease=3, renew=True)

        def ends() -> list[int]:
            paths = [f"{QUEUE}/messages/{message.id}" for message in messages]
            return [server.get(path).body["lease_until_ms"] for path in paths]

        first = ends()
        until(lambda: all(now > before for now, before in zip(ends(), first, strict=True)), "both are renewed")
