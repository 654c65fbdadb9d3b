"""Samples by every way in: threads and tasks, the owner, a second process's way through its socket, and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.api import port_of
from holdfast.errors import Forbidden, InvalidRequest, UnknownGroup, UnknownTopic
from holdfast.remote.sync.group import RemoteGroupPort
from tests.integration.http_gear import Serving, serving
from tests.integration.test_http_access import GROUP, STREAM, TOPIC, guarded, prepared


def quiet(engine: Any) -> Any:
    """An engine whose samples only the test takes."""
    engine.sampler.before_close()
    return engine


def sample(engine: Any) -> None:
    """What the owner's keeper does every few seconds."""
    engine.sampler.sample()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data") as found:
        quiet(found.server.service.engine)
        yield found


def filled(broker: Any) -> None:
    queue = broker.queue("jobs")
    queue.put_many([b"a"] * 10)
    queue.get(timeout=0).ack()
    broker.group("jobs", "audit").receive(timeout=0).nack()


def check(broker: Any) -> None:
    """All that can be asked of a broker that was filled and sampled once."""
    (found,) = broker.queue("jobs").samples().samples
    assert (found.ready, found.handled_rate > 0, found.handle_p50_seconds is not None) == (9, True, True)
    audit = broker.samples("jobs", "audit", last=3600)
    assert (audit.group, audit.mode, audit.step_seconds) == ("audit", "queue", 60)
    assert audit.samples[-1].failed_rate > 0
    assert broker.group("jobs", "audit").samples(last=86_400).step_seconds == 900
    total = broker.samples()
    assert (total.topic, total.mode, sum(each.ready for each in total.samples)) == ("", "total", 9)
    assert isinstance(total.samples[0], holdfast.Sample)
    with pytest.raises(UnknownTopic):
        broker.samples("nothing")
    with pytest.raises(UnknownGroup, match="nobody"):
        broker.samples("jobs", "nobody")
    for wrong in (0, -1, 604_801, "1h", None):
        with pytest.raises(InvalidRequest, match="last"):
            broker.samples(last=wrong)
    with pytest.raises(InvalidRequest, match="topic"):
        broker.samples(group="audit")


def test_the_owner_and_who_comes_through_its_socket_get_the_same(tmp_path):
    with holdfast.open_broker(tmp_path / "data") as broker, holdfast.open_broker(tmp_path / "data") as beside:
        assert isinstance(beside.queue("jobs")._port, RemoteGroupPort)
        quiet(port_of(broker).engine)
        filled(broker)
        sample(port_of(broker).engine)
        check(broker)
        check(beside)


def test_a_client_of_a_server_gets_the_same(server):
    with holdfast.connect(server.url) as broker:
        filled(broker)
        sample(server.server.service.engine)
        check(broker)


def test_tasks_get_the_same(tmp_path):
    async def use() -> None:
        async with holdfast.aio.open_broker(tmp_path / "data") as broker:
            quiet(port_of(broker).engine)
            queue = await broker.queue("jobs")
            await queue.put(b"a")
            sample(port_of(broker).engine)
            assert (await queue.samples()).samples[0].ready == 1
            assert (await broker.samples()).samples[0].ready == 1
            assert (await broker.samples("jobs", last=7 * 86_400)).step_seconds == 900

    asyncio.run(use())


def test_a_topic_without_groups_and_a_stream_group_have_samples(server):
    with holdfast.connect(server.url) as broker:
        broker.create_topic("events")
        broker.publish("events", b"a")
        with broker.consumer("events", group="copy") as consumer:
            consumer.poll(timeout=10)
            consumer.commit()
        sample(server.server.service.engine)
        assert broker.samples("events").mode == "topic"
        assert broker.samples("events").samples[0].published_rate > 0
        copy = broker.samples("events", "copy")
        assert (copy.mode, copy.samples[0].ready) == ("stream", 0)


@pytest.mark.parametrize("last", [0, -5, 604_801, "x", "nan", "inf", "-inf"])
def test_a_time_that_no_ring_covers_is_refused(server, last):
    assert server.request("PUT", "/v1/queues/jobs", {}).status == 200
    for path in ("/v1/samples", "/v1/queues/jobs/samples"):
        assert server.get(path, query={"last": last}).status == 400


def test_an_answer_is_bounded(server):
    assert server.request("PUT", "/v1/queues/jobs", {}).status == 200
    assert server.post("/v1/queues/jobs/enqueue", {"json": 1}).status == 201
    for _ in range(5):
        sample(server.server.service.engine)
    for last in (0.0001, 1, 900, 3600, 21_600, 86_400, 604_800):
        found = server.get("/v1/queues/jobs/samples", query={"last": last}).body
        assert len(found["samples"]) <= 672
        assert 0 < last / found["step_seconds"] <= 672


def test_samples_are_only_for_those_who_may_read_the_queue_and_the_group(tmp_path):
    with guarded(tmp_path) as server:
        prepared(server)
        own, path = "token-of-of-these", f"/v1/queues/{TOPIC}/samples"
        assert server.get(path, token=own).status == 200
        assert server.get(path, token=own, query={"group": GROUP}).status == 200
        assert server.get("/v1/samples", token=own).status == 403  # it tells of all topics
        assert server.get("/v1/samples", token="token-of-reader").status == 200
        assert server.get(path, token="token-of-of-others").status == 403
        for group in (GROUP, STREAM, "no-such-group"):
            answer = server.get(path, token="token-of-of-other-names", query={"group": group})
            assert (answer.status, answer.code) == (403, Forbidden.code)
