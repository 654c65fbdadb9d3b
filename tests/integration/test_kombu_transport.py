"""The kombu transport by itself: servers that do not answer, failover, priorities, and the end of a consumer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integration.process_gear import server_process, until

kombu = pytest.importorskip("kombu")

from kombu.exceptions import OperationalError  # noqa: E402

from holdfast.integrations.kombu import restore_url  # noqa: E402

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 60  # only what hangs takes so long
SOON_S = 0.2  # how long to wait for a server that is not there
BOTH_S = 8  # the same with an alternate, which has half of it to answer


@pytest.fixture
def dead_url() -> Iterator[str]:
    """The URL of a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"holdfast+http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Any]:
    with kombu.Connection(f"holdfast://{tmp_path}/data") as connection:
        yield connection


def send(connection: Any, queue: Any, *bodies: str, **options: Any) -> None:
    for body in bodies:
        connection.Producer().publish(body, routing_key=queue.name, declare=[queue], **options)


def receive(connection: Any, count: int) -> None:
    for _ in range(count):
        connection.drain_events(timeout=PATIENCE_S)


def test_a_server_that_does_not_answer_is_an_error_of_the_connection(dead_url: str):
    connection = kombu.Connection(dead_url, connect_timeout=SOON_S)
    with pytest.raises(connection.connection_errors) as caught:
        connection.transport.establish_connection()
    assert isinstance(caught.value, holdfast.Unavailable)
    assert dead_url.removeprefix("holdfast+") in str(caught.value)
    tries: list[BaseException] = []
    with pytest.raises(OperationalError):
        connection.ensure_connection(
            lambda error, _: tries.append(error), max_retries=2, interval_start=0, interval_step=0
        )
    assert len(tries) == 2


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_connection_goes_on_to_the_alternate_that_answers(kind: str, tmp_path: Path, dead_url: str):
    folder = tmp_path / "Data of A"
    if kind == "folder":
        works_at(f"holdfast://{folder}", str(folder), dead_url)
        return
    with server_process(folder, "--no-console") as server:
        works_at(f"holdfast+{server.url}", server.url, dead_url)


def works_at(live_url: str, place: str, dead_url: str) -> None:
    with kombu.Connection([dead_url, live_url], connect_timeout=BOTH_S) as connection:
        queue = kombu.Queue("jobs", routing_key="jobs")
        send(connection, queue, "one")
        assert connection.as_uri() == live_url
        with connection.clone() as other:
            assert queue(other.default_channel).get().payload == "one"
    with holdfast.open_broker(place) as broker:
        assert broker.topics() == ["jobs"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_that_loses_its_server_sends_to_the_next(tmp_path: Path):
    with (
        server_process(tmp_path / "a", "--no-console") as first,
        server_process(tmp_path / "b", "--no-console") as next_,
    ):
        urls = [f"holdfast+{server.url}" for server in (first, next_)]
        with kombu.Connection(urls, connect_timeout=BOTH_S) as connection:
            queue = kombu.Queue("jobs", routing_key="jobs")
            send(connection, queue, "one")
            first.kill()
            connection.close()
            send(connection, queue, "two")
            assert connection.as_uri() == urls[1]
        with holdfast.open_broker(next_.url) as broker:
            assert broker.queue("jobs").qsize() == 1


@pytest.mark.parametrize(
    "url",
    [
        "holdfast:///var/lib/Shop",
        "holdfast://Jobs",
        "holdfast://Jobs/of/Today",
        "holdfast+http://127.0.0.1:7700",
        "holdfast+https://:T%2Fken@Host:7700",
        "holdfast+s3://Bucket/Jobs",
        "holdfast+unix:///run/holdfast",
    ],
)
def test_a_url_survives_a_failover(url: str):
    before = "holdfast+http://:secret@127.0.0.1:1/queue"
    connection = kombu.Connection([before, url])
    connection.switch(url)
    restore_url(connection)
    assert connection.hostname == url.removeprefix("holdfast+")
    connection.switch(before)
    restore_url(connection)
    assert connection.hostname == before.removeprefix("holdfast+")


@pytest.mark.parametrize(
    "url", ["holdfast:///var/lib/shop", "holdfast+http://:token@host:7700", "holdfast+s3://b/jobs"]
)
def test_a_url_that_is_no_alternate_is_put_together_again(url: str):
    connection = kombu.Connection("holdfast:///tmp")
    connection.switch(url)
    restore_url(connection)
    assert connection.hostname == url.removeprefix("holdfast+")


def test_a_simple_buffer_gives_what_it_was_given_and_leaves_no_queue(tmp_path: Path):
    connection = kombu.Connection(f"holdfast://{tmp_path}/data")
    with connection, closing(connection.SimpleBuffer("buffer")) as buffer:
        buffer.put("one")
        assert buffer.get(timeout=PATIENCE_S).payload == "one"
    with holdfast.open_broker(tmp_path / "data") as broker:
        assert "buffer" not in broker.topics()
        assert not broker.locks.describe("kombu.queue.buffer").held


def test_the_most_urgent_message_comes_first_even_among_those_taken(connection: Any):
    queue, received = kombu.Queue("jobs", routing_key="jobs", max_priority=10), []
    with connection.Consumer([queue], callbacks=[lambda body, message: received.append(message)]):
        for body, priority in (("calm", 3), ("pressing", 6), ("calm too", 3), ("none", None)):
            send(connection, queue, body, priority=priority)
        held = connection.default_channel.shared.queue("jobs", {})
        until(lambda: held.stats().leased == 4, "they are taken")  # the consumer's thread has taken them, in any order
        until(lambda: connection.transport.arrived.count(connection.default_channel, "jobs") == 4, "they are taken")
        receive(connection, 4)
        assert [message.payload for message in received] == ["pressing", "calm", "calm too", "none"]
        for message in received:
            message.requeue()
        until(lambda: connection.transport.arrived.count(connection.default_channel, "jobs") == 4, "they are taken")
        send(connection, queue, "most pressing", priority=9)
        until(lambda: connection.transport.arrived.count(connection.default_channel, "jobs") == 5, "they are taken")
        received.clear()
        receive(connection, 5)
        assert [message.payload for message in received] == ["most pressing", "pressing", "calm", "calm too", "none"]


def test_queues_take_turns_whatever_the_priority_of_their_messages(connection: Any):
    calm, pressing = (kombu.Queue(name, routing_key=name) for name in ("calm", "pressing"))
    received: list[str] = []
    arrived, channel = connection.transport.arrived, connection.default_channel
    with connection.Consumer([calm, pressing], callbacks=[lambda body, message: received.append(body)], no_ack=True):
        send(connection, calm, "calm")
        until(lambda: arrived.count(channel, "calm") == 1, "they are taken")
        send(connection, pressing, "pressing", priority=9)
        until(lambda: arrived.count(channel, "pressing") == 1, "they are taken")
        receive(connection, 2)
    assert received == ["calm", "pressing"]


def test_a_consumer_that_ends_puts_back_what_it_was_not_given(connection: Any):
    queue, received = kombu.Queue("jobs", routing_key="jobs"), []
    consumer = connection.Consumer([queue], callbacks=[lambda body, message: received.append(body)], no_ack=True)
    send(connection, queue, "one", "two", "three")
    held = connection.default_channel.shared.queue("jobs", {})
    with consumer:
        until(lambda: held.stats().leased == 3, "they are taken")
        receive(connection, 1)
    stats = held.stats()
    assert (stats.ready, stats.leased, stats.dead) == (2, 0, 0)
    assert [message.attempts for message in held.messages("ready")] == [0, 0]
    send(connection, queue, "urgent", priority=9)
    with consumer:
        receive(connection, 3)
    assert received == ["one", "urgent", "two", "three"]
