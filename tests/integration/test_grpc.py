"""The gRPC face: every call and every role, streams, health, TLS, and callers that are slow, hostile or gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")

from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import BadSettings, InvalidRequest  # noqa: E402
from holdfast.protocol.media import KINDS  # noqa: E402
from holdfast.server.grpc.face import MOST_BYTES, GrpcCall, code_of  # noqa: E402
from holdfast.server.grpc.values import filled, given  # noqa: E402
from holdfast.server.routing import status_of_code  # noqa: E402
from holdfast.server.tokens import digest_of  # noqa: E402
from holdfast.v1 import holdfast_pb2 as pb  # noqa: E402
from holdfast.v1 import holdfast_pb2_grpc as rpc  # noqa: E402
from tests.integration import test_http_access as access  # noqa: E402
from tests.integration.http_gear import Serving, serving  # noqa: E402
from tests.integration.process_gear import server_process, until  # noqa: E402
from tests.tidy.repo import ROOT  # noqa: E402
from tests.unit.certificates import Issuer  # noqa: E402

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 60
Code = grpc.StatusCode
ALLOWED_IN = {Code.OK, Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.ABORTED, Code.OUT_OF_RANGE,
              Code.ALREADY_EXISTS, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.UNIMPLEMENTED}  # fmt: skip


@contextmanager
def channel_to(address: str, token: str | None = None, *, credentials: Any = None) -> Iterator[Any]:
    """A channel of its own connection, with a token in every call."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", "localhost")])
    with channel:
        yield channel if token is None else grpc.intercept_channel(channel, _WithToken(token))


class _WithToken(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    def __init__(self, token: str) -> None:
        self._more = ("authorization", f"Bearer {token}")

    def _intercept(self, then: Any, details: Any, request: Any) -> Any:
        return then(details._replace(metadata=[*(details.metadata or ()), self._more]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _intercept


def address_of(server: Serving) -> str:
    assert server.server.grpc is not None
    return server.server.grpc.address


@contextmanager
def queues_of(folder: Path, **settings: Any) -> Iterator[tuple[Serving, Any]]:
    """A server, and the queues of a caller without a token."""
    with serving(folder / "data", grpc_port=0, **settings) as server, channel_to(address_of(server)) as channel:
        yield server, rpc.QueueServiceStub(channel)


def code(call: Callable[[], Any]) -> Any:
    """How a call ends."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


def publish(queues: Any, *bodies: bytes, queue: str = "jobs") -> Any:
    return queues.Publish(pb.PublishRequest(queue=queue, bodies=bodies, create=True))


# Calls


def test_messages_are_published_taken_settled_and_looked_at(tmp_path: Path):
    with queues_of(tmp_path) as (_, queues):
        stored = queues.Publish(
            pb.PublishRequest(
                queue="jobs",
                create=True,
                messages=[
                    pb.NewMessage(body=b"\xff", key="k", headers=[pb.Header(name="h", value="v")], priority=7),
                    pb.NewMessage(text="later", delay=3600),
                    pb.NewMessage(json=pb.NewMessage().json.__class__(number_value=3)),
                ],
            )
        ).stored
        assert [each.topic for each in stored] == ["jobs"] * 3
        first, second = queues.Take(pb.TakeRequest(queue="jobs", count=10)).messages
        assert (first.body, first.key, first.priority, first.attempt) == (b"\xff", "k", 7, 1)
        assert [(header.name, header.value) for header in first.headers] == [("h", "v")]
        assert second.body == b"3"
        saved = pb.SaveMessageStateRequest(queue="jobs", receipt=second.receipt, version=0)
        saved.value.struct_value.update({"step": 2, "names": ["a", None, True, 1.5]})
        assert queues.SaveMessageState(saved).version == 1
        state = queues.GetMessageState(pb.GetMessageStateRequest(queue="jobs", receipt=second.receipt))
        assert dict(state.value.struct_value)["step"] == 2
        assert queues.Ack(pb.AckRequest(queue="jobs", receipts=[first.receipt])).settled == 1
        assert queues.Nack(pb.NackRequest(queue="jobs", receipts=[second.receipt], intent="defer")).settled == 1
        stats = queues.GetStats(pb.GetStatsRequest(queue="jobs"))
        assert (stats.ready, stats.delayed, stats.leased) == (1, 1, 0)
        (delayed,) = queues.ListMessages(pb.ListMessagesRequest(queue="jobs", phase="delayed")).messages
        assert (delayed.body, delayed.phase) == (b"later", "delayed")
        assert queues.RunMessageNow(pb.RunMessageNowRequest(queue="jobs", id=delayed.id)).changed


def test_locks_documents_topics_and_schedules_answer_too(tmp_path: Path):
    with queues_of(tmp_path) as (server, _), channel_to(address_of(server)) as channel:
        topics, locks = rpc.TopicServiceStub(channel), rpc.LockServiceStub(channel)
        created = pb.CreateTopicRequest(name="events", partitions=2)
        created.settings.update({"max_attempts": 3})
        assert len(topics.CreateTopic(created).partitions) == 2
        assert [each.name for each in topics.ListTopics(pb.ListTopicsRequest()).topics] == ["events"]
        topics.PublishToTopic(pb.PublishToTopicRequest(topic="events", bodies=[b"x"], partition=1))
        request = pb.ReadMessagesRequest(topic="events", partition=1)
        assert [each.body for each in topics.ReadMessages(request).messages] == [b"x"]
        lock = locks.AcquireLock(pb.AcquireLockRequest(name="nightly"))
        assert lock.fence > 0
        assert locks.GetLock(pb.GetLockRequest(name="nightly")).held
        written = pb.UpdateDocumentRequest(name="positions", version=0)
        written.value.list_value.extend([1, "a"])
        assert locks.UpdateDocument(written).version == 1
        assert list(locks.GetDocument(pb.GetDocumentRequest(name="positions")).value.list_value) == [1, "a"]
        assert code(lambda: locks.UpdateDocument(written)) == Code.ABORTED
        schedules = rpc.ScheduleServiceStub(channel)
        schedules.PutSchedule(pb.PutScheduleRequest(schedule="hourly", topic="events", text="now", every=3600))
        assert len(schedules.GetNextDues(pb.GetNextDuesRequest(schedule="hourly", count=3)).times) == 3
        assert rpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest()).version == holdfast.__version__


def test_a_large_body_comes_in_parts(tmp_path: Path):
    body = os.urandom(3_000_000)
    with queues_of(tmp_path) as (_, queues):
        publish(queues, body)
        (message,) = queues.Take(pb.TakeRequest(queue="jobs")).messages
        parts = queues.ReadPayloadInFlight(pb.ReadPayloadInFlightRequest(queue="jobs", receipt=message.receipt))
        assert b"".join(part.data for part in parts) == body
        missing = pb.ReadPayloadRequest(queue="jobs", id="jobs-0-9")
        assert code(lambda: list(queues.ReadPayload(missing))) == Code.NOT_FOUND


def test_an_error_has_a_status_a_code_and_says_what_to_do(tmp_path: Path):
    with queues_of(tmp_path) as (_, queues):
        with pytest.raises(grpc.RpcError) as caught:
            queues.GetStats(pb.GetStatsRequest(queue="jobs"), metadata=[("x-correlation-id", "mine")])
        told = dict(caught.value.trailing_metadata())
        assert caught.value.code() == Code.NOT_FOUND
        assert "there is no topic jobs" in caught.value.details()
        assert (told["holdfast-code"], told["holdfast-retryable"]) == ("unknown_topic", "false")
        assert told["x-correlation-id"] == "mine"
        for name in ("", "a/b", "../v1/topics"):
            assert code(lambda name=name: queues.GetStats(pb.GetStatsRequest(queue=name))) == Code.INVALID_ARGUMENT
        assert code(lambda: queues.Ack(pb.AckRequest(queue="jobs"))) == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_error_has_a_status(name: str):
    assert code_of(name, status_of_code(name)) not in (Code.OK, Code.UNKNOWN)


def test_a_call_that_waits_ends_at_its_deadline_and_leaves_nothing_behind(tmp_path: Path):
    with queues_of(tmp_path) as (server, queues):
        publish(queues, b"first")
        queues.Purge(pb.PurgeRequest(queue="jobs"))
        waiting = pb.TakeRequest(queue="jobs", wait=PATIENCE_S)
        assert code(lambda: queues.Take(waiting, timeout=0.2)) == Code.DEADLINE_EXCEEDED
        until(lambda: not server.server.service.waits.waiting, "nobody waits")
        publish(queues, b"second")
        assert queues.GetStats(pb.GetStatsRequest(queue="jobs")).ready == 1
        later = queues.Take.future(waiting)
        assert [message.body for message in later.result(PATIENCE_S).messages] == [b"second"]


# Streams


def test_a_stream_of_publishes_is_answered_in_order_and_goes_on_after_an_error(tmp_path: Path):
    with queues_of(tmp_path) as (_, queues):
        publish(queues, b"0")
        requests = [
            pb.PublishStreamRequest(number=1, queue="jobs", bodies=[b"1", b"2"]),
            pb.PublishStreamRequest(number=2, queue="nowhere", bodies=[b"lost"]),
            pb.PublishStreamRequest(number=3, queue="jobs", messages=[pb.NewMessage(body=b"3", dedup_id="3")] * 2),
        ]
        answers = list(queues.PublishStream(iter(requests), timeout=PATIENCE_S))
        assert [answer.number for answer in answers] == [1, 2, 3]
        assert [each.offset for each in answers[0].stored] == [1, 2]
        assert (answers[1].error.code, len(answers[1].stored)) == ("unknown_topic", 0)
        assert [each.duplicate for each in answers[2].stored] == [False, True]


class Subscription:
    """A subscription of a client that decides itself when it reads and what it sends."""

    def __init__(self, queues: Any, queue: str = "jobs", **start: Any) -> None:
        import queue as queue_

        self._sent: Any = queue_.SimpleQueue()
        self._numbers = count(1)
        self._sent.put(pb.SubscribeRequest(start=pb.SubscribeStart(queue=queue, **start)))
        self.call = queues.Subscribe(iter(self._sent.get, None), timeout=PATIENCE_S)

    def send(self, **kind: Any) -> int:
        number = next(self._numbers)
        self._sent.put(pb.SubscribeRequest(number=number, **kind))
        return number

    def messages(self) -> list[Any]:
        """The next messages."""
        return next(list(answer.messages) for answer in self.call if answer.messages)

    def settled(self, number: int) -> Any:
        return next(answer.settled for answer in self.call if answer.settled.number == number)

    def end(self) -> None:
        self._sent.put(None)
        self.call.cancel()


@pytest.fixture
def subscribed() -> Iterator[Callable[..., Subscription]]:
    begun: list[Subscription] = []

    def begin(*arguments: Any, **start: Any) -> Subscription:
        begun.append(Subscription(*arguments, **start))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


def test_a_subscription_delivers_as_many_as_may_be_unsettled_and_settles_on_the_same_stream(
    tmp_path: Path, subscribed: Callable[..., Subscription]
):
    with queues_of(tmp_path) as (_, queues):
        publish(queues, *(b"%d" % number for number in range(5)))
        stream = subscribed(queues, prefetch=2, heartbeat=0.1)
        first, second = stream.messages()
        assert queues.GetStats(pb.GetStatsRequest(queue="jobs")).leased == 2
        assert next(stream.call) == pb.SubscribeResponse(), "a heartbeat, and no third message"
        number = stream.send(reject=pb.RejectRequest(receipts=[first.receipt], reason="no"))
        assert stream.settled(number).settled == 1
        number = stream.send(extend=pb.ExtendRequest(receipts=[second.receipt], lease=60))
        assert stream.settled(number).settled == 1
        number = stream.send(nack=pb.NackRequest(receipts=[second.receipt], delay=3600, error="later"))
        assert stream.settled(number).settled == 1
        number = stream.send(ack=pb.AckRequest(receipts=["x"]))
        assert stream.settled(number).error.code
        number = stream.send()
        assert stream.settled(number).error.code == "invalid_request"
        stats = queues.GetStats(pb.GetStatsRequest(queue="jobs"))
        assert (stats.dead, stats.delayed, stats.leased) == (1, 1, 2)


def test_a_subscription_that_ends_gives_back_what_was_not_sent_and_one_that_only_reads_goes_on(tmp_path: Path):
    with queues_of(tmp_path) as (server, queues):
        publish(queues, b"0")
        start = pb.SubscribeRequest(start=pb.SubscribeStart(queue="jobs", prefetch=10))
        reading = queues.Subscribe(iter([start]), timeout=PATIENCE_S)
        assert [message.body for answer in [next(reading), next(reading)] for message in answer.messages] == [b"0"]
        publish(queues, b"1")
        assert [message.body for message in next(reading).messages] == [b"1"]
        reading.cancel()
        until(lambda: not server.server.service.waits.waiting, "the stream has ended")
        publish(queues, b"2")
        assert [message.body for message in queues.Take(pb.TakeRequest(queue="jobs")).messages] == [b"2"]
        first = pb.SubscribeRequest(ack=pb.AckRequest(receipts=["x"]))
        assert code(lambda: list(queues.Subscribe(iter([first])))) == Code.INVALID_ARGUMENT
        nowhere = pb.SubscribeRequest(start=pb.SubscribeStart(queue="nowhere"))
        assert code(lambda: list(queues.Subscribe(iter([nowhere])))) == Code.NOT_FOUND


# Who may


def asked(call: GrpcCall, route: Any, producer: str) -> dict[str, Any]:
    """The request of a call, about what the access test names."""
    path, _, query = access.path_of(route).partition("?")
    values: dict[str, Any] = dict(access.body_of(route) or {})
    values |= {name: [value] if name in ("topics", "ids") else value for name, value in parse_qsl(query)}
    parts = dict(zip(route.pattern.split("/"), path.split("/"), strict=True))
    values |= {name: parts[f"{{{name}}}"] for name in call.variables}
    if "/sequence" in route.pattern:
        values["producer"] = producer
    return {
        name: int(value) if name in ("partition", "offset") and isinstance(value, str) else value
        for name, value in values.items()
    }


def _asked_once(ask: Any, request: Any, metadata: Any) -> None:
    """Make a call, and read one part of an answer that has several."""
    answer = ask(request, metadata=metadata, timeout=PATIENCE_S)
    if isinstance(answer, grpc.Call):
        next(answer, None)


@pytest.mark.slow
def test_every_call_lets_in_whom_it_may_and_nobody_else(tmp_path: Path):
    wrong, calls_made = [], 0
    with access.guarded(tmp_path, grpc_port=0) as server, channel_to(address_of(server)) as channel:
        assert server.server.grpc is not None
        routes = {access.name_of(route): route for route in access.routes_of(server)}
        for name, call in server.server.grpc.calls.items():
            producer = access.prepared(server)  # anew: calls before may have taken something away
            route = routes[f"{call.method} {call.path}"]
            request = filled(call.request, asked(call, route, producer))
            method = channel.unary_stream if call.is_raw else channel.unary_unary
            ask = method(name, call.request.SerializeToString, call.response.FromString)
            for caller in access.CALLERS:
                calls_made += 1
                metadata = [("authorization", f"Bearer {caller.token}")] if caller.token else []
                found = code(partial(_asked_once, ask, request, metadata))
                refusal = access.wanted(caller, route)
                expected = {401: Code.UNAUTHENTICATED, 403: Code.PERMISSION_DENIED}
                fits = found in {expected[status] for status in refusal} if refusal else found in ALLOWED_IN
                if not fits:
                    wrong.append(f"{caller.name}: {name}: {found}, not {refusal or 'let in'}")
    assert wrong == []
    assert calls_made > 300


@pytest.mark.slow
def test_streams_let_in_whom_the_calls_they_are_made_of_let_in(tmp_path: Path):
    with access.guarded(tmp_path, grpc_port=0) as server:
        access.prepared(server)
        for caller in access.CALLERS:
            with channel_to(address_of(server), caller.token) as channel:
                queues = rpc.QueueServiceStub(channel)
                may = access.MAY.get(caller.name, set()) if caller.known and caller.name != "of-others" else set()
                batch = pb.PublishStreamRequest(number=1, queue=access.TOPIC, bodies=[b"x"])
                try:
                    (answer,) = queues.PublishStream(iter([batch]), timeout=PATIENCE_S)
                    found = answer.error.code
                except grpc.RpcError as error:
                    found = error.code()
                wanted = "" if "publish" in may else "forbidden" if caller.known else Code.UNAUTHENTICATED
                assert found == wanted, caller.name
                start = pb.SubscribeRequest(start=pb.SubscribeStart(queue=access.TOPIC, group=access.GROUP))
                reading = queues.Subscribe(iter([start]), timeout=PATIENCE_S)
                allowed = "consume" in may and caller.name != "of-other-names"
                refused = Code.PERMISSION_DENIED if caller.known else Code.UNAUTHENTICATED
                assert code(lambda reading=reading: next(reading)) == (Code.OK if allowed else refused), caller.name
                reading.cancel()


def tokens(folder: Path, *names: str) -> str:
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    entries = [{"name": name, "sha256": digest_of(f"token-of-{name}"), "role": "admin"} for name in names]
    path.write_text(json.dumps({"tokens": entries}))
    return str(path)


@pytest.mark.slow
def test_streams_and_waits_end_when_their_token_is_revoked(tmp_path: Path, subscribed: Callable[..., Subscription]):
    with serving(tmp_path / "data", grpc_port=0, tokens_file=tokens(tmp_path, "a", "b")) as server:  # noqa: SIM117
        with (
            channel_to(address_of(server), "token-of-a") as mine,
            channel_to(address_of(server), "token-of-b") as other,
        ):
            queues = rpc.QueueServiceStub(mine)
            publish(queues, b"0")
            queues.Purge(pb.PurgeRequest(queue="jobs"))
            stream = subscribed(queues)
            next(stream.call)
            waiting = queues.Take.future(pb.TakeRequest(queue="jobs", wait=PATIENCE_S))
            until(lambda: server.server.service.waits.waiting == 2, "both wait")
            tokens(tmp_path, "b")
            assert code(lambda: waiting.result(PATIENCE_S)) == Code.UNAUTHENTICATED
            assert code(lambda: list(stream.call)) == Code.UNAUTHENTICATED
            assert code(lambda: publish(queues, b"1")) == Code.UNAUTHENTICATED
            publish(rpc.QueueServiceStub(other), b"2")
            assert rpc.QueueServiceStub(other).GetStats(pb.GetStatsRequest(queue="jobs")).ready == 1


def test_administrative_calls_are_in_the_audit_log(tmp_path: Path):
    with serving(tmp_path / "data", whole=True, grpc_port=0) as server, channel_to(address_of(server)) as channel:
        rpc.TopicServiceStub(channel).CreateTopic(pb.CreateTopicRequest(name="events"))
        acts = server.get("/v1/admin/audit").body["acts"]
        assert any("/v1/topics" in json.dumps(act) and "events" in json.dumps(act) for act in acts)


# Slow, hostile and gone


@pytest.mark.slow
def test_a_caller_that_does_not_read_ends_its_own_stream_and_holds_up_nobody(
    tmp_path: Path, subscribed: Callable[..., Subscription]
):
    body = os.urandom(1_000_000)
    with queues_of(tmp_path, write_timeout_ms=500) as (server, queues):
        for _ in range(20):
            publish(queues, body)
        stream = subscribed(queues, prefetch=20)  # and nothing is read
        until(lambda: server.server.service.waits.waiting == 1, "it is subscribed")
        publish(queues, b"other", queue="other")
        assert queues.Take(pb.TakeRequest(queue="other"), timeout=PATIENCE_S).messages[0].body == b"other"
        until(lambda: not server.server.service.waits.waiting, "the stream was ended")
        assert code(lambda: list(stream.call)) == Code.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_requests_that_never_come_take_no_room_of_others(tmp_path: Path):
    with serving(
        tmp_path / "data", grpc_port=0, tokens_file=tokens(tmp_path, "slow", "quick"), max_request_bytes=MOST_BYTES,
        body_timeout_ms=1_000, header_timeout_ms=1_000,
    ) as server, channel_to(address_of(server), "token-of-slow") as slow:  # fmt: skip
        never: Iterator[Any] = iter(lambda: time.sleep(PATIENCE_S), 0)
        calls = [
            slow.stream_stream("/holdfast.v1.QueueService/Publish", lambda _: b"", lambda content: content)(never)
            for _ in range(50)
        ]
        until(lambda: server.server.service.room.used("slow"), "they have begun")
        with channel_to(address_of(server), "token-of-quick") as quick:
            publish(rpc.QueueServiceStub(quick), b"x")
        found = {code(lambda call=call: list(call)) for call in calls[:2]}
        assert found <= {Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()


def test_what_is_no_request_is_refused_and_the_server_goes_on(tmp_path: Path):
    with queues_of(tmp_path) as (server, queues), channel_to(address_of(server)) as channel:
        ask = channel.unary_unary("/holdfast.v1.QueueService/Publish", bytes, bytes)
        assert code(lambda: ask(b"\xff\xff\xff")) == Code.INVALID_ARGUMENT
        assert code(lambda: ask(bytes(MOST_BYTES + 1))) == Code.RESOURCE_EXHAUSTED
        assert (
            code(lambda: channel.unary_unary("/holdfast.v1.QueueService/Nothing", bytes, bytes)(b""))
            == Code.UNIMPLEMENTED
        )
        deep = pb.UpdateDocumentRequest(name="deep")
        value = deep.value
        for _ in range(40):
            value = value.list_value.values.add()
        locks = rpc.LockServiceStub(channel)
        assert code(lambda: locks.UpdateDocument(deep)) in (Code.OK, Code.INVALID_ARGUMENT)
        many = pb.PublishRequest(queue="jobs", messages=[pb.NewMessage()] * 200_000, create=True)
        assert code(lambda: queues.Publish(many)) == Code.INVALID_ARGUMENT
        host, _, port = address_of(server).rpartition(":")
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(10_000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9_000),
        ):
            with socket.create_connection((host, int(port))) as raw, suppress(OSError):
                raw.sendall(garbage)
                raw.recv(10)
        publish(queues, b"x")


@pytest.mark.slow
def test_what_a_stream_was_told_is_stored_survives_a_kill_of_the_server(tmp_path: Path):
    with server_process(tmp_path / "data", "--no-console", "--grpc-port", "0") as server:
        told: list[int] = []

        def batches() -> Iterator[Any]:
            for number in count(1):
                yield pb.PublishStreamRequest(number=number, queue="jobs", bodies=[b"%d" % number])

        with channel_to(address_in(server.said)) as channel:
            queues = rpc.QueueServiceStub(channel)
            publish(queues, b"0")
            try:
                for answer in queues.PublishStream(batches(), timeout=PATIENCE_S):
                    told.append(answer.number)
                    if len(told) == 50:
                        server.kill()
            except grpc.RpcError as error:
                assert error.code() == Code.UNAVAILABLE
        server.start()
        with channel_to(address_in(server.said)) as channel:
            found = rpc.QueueServiceStub(channel).Take(pb.TakeRequest(queue="jobs", count=10_000)).messages
        bodies = [int(message.body) for message in found]
        assert bodies == list(range(len(bodies)))
        assert bodies[-1] >= told[-1] >= 50


@pytest.mark.slow
def test_a_server_that_stops_ends_subscriptions_and_finishes_calls(
    tmp_path: Path, subscribed: Callable[..., Subscription]
):
    with server_process(tmp_path / "data", "--no-console", "--grpc-port", "0", "--drain", "5s") as server:  # noqa: SIM117
        with channel_to(address_in(server.said)) as channel:
            queues = rpc.QueueServiceStub(channel)
            publish(queues, b"0")
            stream = subscribed(queues)
            (message,) = stream.messages()
            assert message.body == b"0"
            server.tell_to_go()
            assert code(lambda: list(stream.call)) in (Code.OK, Code.UNAVAILABLE)
            assert server.exit_code() == 0


def address_in(said: str) -> str:
    found = re.search(r"grpcs?://(\S+)", said)
    assert found is not None, said
    return found[1]


# Health, reflection, TLS, settings


def test_health_and_reflection_need_no_token(tmp_path: Path):
    with serving(tmp_path / "data", grpc_port=0, tokens_file=tokens(tmp_path, "a")) as server:  # noqa: SIM117
        with channel_to(address_of(server)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "holdfast.v1.QueueService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert code(lambda: health.Check(health_pb2.HealthCheckRequest(service="x"))) == Code.NOT_FOUND
            watching = health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=PATIENCE_S)
            assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            watching.cancel()
            reflected = reflection_pb2_grpc.ServerReflectionStub(channel)
            asking = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="holdfast.v1.QueueService"),
            ]
            listed, described = reflected.ServerReflectionInfo(iter(asking), timeout=PATIENCE_S)
            names = {service.name for service in listed.list_services_response.service}
            assert {"holdfast.v1.QueueService", "grpc.health.v1.Health"} <= names
            assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


@pytest.mark.slow
def test_tls_asks_for_the_certificates_that_the_settings_name(tmp_path: Path):
    issuer = Issuer()
    authority = issuer.write(tmp_path / "authority.pem")
    cert, key = issuer.issue(tmp_path, "server", "localhost")
    mine, my_key = issuer.issue(tmp_path, "robot")
    settings = {"tls_cert_file": str(cert), "tls_key_file": str(key), "tls_client_ca_file": str(authority)}
    root = authority.read_bytes()
    both = grpc.ssl_channel_credentials(root, my_key.read_bytes(), mine.read_bytes())
    with serving(tmp_path / "data", grpc_port=0, tls=context_of(settings), **settings) as server:
        with channel_to(address_of(server), credentials=both) as channel:
            publish(rpc.QueueServiceStub(channel), b"x")
            (message,) = rpc.QueueServiceStub(channel).Take(pb.TakeRequest(queue="jobs")).messages
            assert message.holder == "robot"
        for credentials in (grpc.ssl_channel_credentials(root), None):
            with channel_to(address_of(server), credentials=credentials) as channel:
                queues = rpc.QueueServiceStub(channel)
                assert code(lambda queues=queues: publish(queues, b"x")) == Code.UNAVAILABLE


def context_of(settings: dict[str, str]) -> ssl.SSLContext:
    from holdfast.env import real_world
    from holdfast.server.callers import tls_context
    from holdfast.settings import ServerSettings

    context = tls_context(ServerSettings(**settings), real_world().clock)  # type: ignore[arg-type]
    assert context is not None
    return context


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadSettings, match=f"cannot listen for gRPC on 127.0.0.1:{port}.*--grpc-port"):  # noqa: SIM117
            with serving(tmp_path / "data", grpc_port=port):
                pass


# Values


def test_values_keep_what_protobuf_can_tell():
    request = pb.UpdateDocumentRequest(name="n", version=0)
    request.value.struct_value.update({"whole": 3, "part": 0.5, "none": None, "list": [True, {"x": "y"}]})
    said = given(request)
    assert said == {
        "name": "n",
        "version": 0,
        "value": {"whole": 3, "part": 0.5, "none": None, "list": [True, {"x": "y"}]},
    }
    assert isinstance(said["value"]["whole"], int)
    assert filled(pb.UpdateDocumentRequest, said) == request
    assert given(pb.TakeRequest(queue="q")) == {"queue": "q", "wait": 0.0, "state": False}
    with pytest.raises(InvalidRequest):
        from holdfast.server.grpc.face import _parsed

        _parsed(pb.TakeRequest, b"\xff")


# Another language


@pytest.mark.slow
def test_the_example_in_node_publishes_and_subscribes(tmp_path: Path):
    example = ROOT / "examples" / "grpc_node"
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: it brings gRPC for node")
    folder = tmp_path / "node"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install gRPC for node here: {installed.stderr[-300:]}")
    with server_process(tmp_path / "data", "--no-console", "--grpc-port", "0") as server:
        ran = subprocess.run(
            ["node", "jobs.js", address_in(server.said), str(ROOT / "proto")],
            cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines() == ["stored jobs-0-0, jobs-0-1", "done: resize cat.png", "done: resize dog.png"]
