"""Charts and the overview over HTTP: what they show, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.codec.samples import Slot
from tests.integration.console_day import live_a_day
from tests.integration.http_gear import Serving, serving
from tests.integration.test_http_access import TOPIC, guarded, prepared

RANGES = ("15m", "1h", "6h", "24h", "7d")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        found.server.service.engine.sampler.before_close()  # the only samples are those of the test
        yield found


def page(server: Serving, path: str) -> str:
    answer = server.get(path, headers={"accept": "text/html"})
    assert answer.status == 200, answer.body
    return str(answer.body.decode())


def sample(server: Serving) -> None:
    server.server.service.engine.sampler.sample()


@pytest.mark.parametrize("chosen", RANGES)
def test_a_queue_has_charts_of_each_range_with_words_and_a_table(server, chosen):
    live_a_day(server)
    sample(server)
    text = page(server, f"/ui/queues/orders/charts?range={chosen}")
    assert text.count("<figure") == 5
    assert text.count("<desc") == 5
    assert "As a table" in text
    assert f'?range={chosen}" aria-current="true"' in text
    assert "<polyline" in text


def test_a_range_that_there_is_not_is_refused(server):
    live_a_day(server)
    assert server.get("/ui/queues/orders/charts", query={"range": "1y"}).status == 400
    assert server.get("/ui", query={"range": "1y"}).status == 400
    assert server.get("/ui/queues/orders/charts", query={"group": "nobody"}).status == 404


def test_a_queue_without_samples_says_so(server):
    live_a_day(server)
    assert "No samples for this time range yet" in page(server, "/ui/queues/mails/charts")


def test_the_overview_shows_stream_groups_with_their_lag(server):
    with holdfast.connect(server.url) as broker:
        broker.create_topic("events")
        for _ in range(7):
            broker.publish("events", b"a")
        with broker.consumer("events", group="copy", max_records=3) as consumer:
            consumer.poll(timeout=10)
            consumer.commit()
            text = page(server, "/ui")
    section = text.partition('id="streams"')[2]
    assert "/ui/groups/copy" in section
    assert "stream" in section
    assert 'data-label="messages behind">4<' in section
    sample(server)
    assert "Behind, messages" in page(server, "/ui/queues/events/charts?group=copy")


def test_the_overview_counts_a_message_once(server):
    with holdfast.connect(server.url) as broker:
        broker.queue("jobs")
        broker.group("jobs", "audit")
        broker.publish_many("jobs", [b"a"] * 4)
        broker.publish("jobs", b"later", delay=3600)
    totals = page(server, "/ui").partition('id="totals"')[2].partition("</dl>")[0]
    assert "<dt>ready</dt><dd>4</dd>" in totals
    assert "<dt>delayed</dt><dd>1</dd>" in totals


def test_a_paused_queue_is_not_forgotten(server):
    live_a_day(server)
    assert server.post("/v1/queues/orders/pause", {"reason": "the shop is closed"}).status == 200
    section = page(server, "/ui").partition('id="attention"')[2].partition("</section>")[0]
    assert "What needs attention" in section
    assert "orders is paused" in section
    assert "the shop is closed; 18 messages ready, and none is delivered until it is resumed" in section
    assert server.post("/v1/queues/orders/resume").status == 200
    assert "orders is paused" not in page(server, "/ui")


def test_growing_dead_letters_are_on_top_with_a_link(server):
    assert server.request("PUT", "/v1/queues/orders", {"settings": {"max_attempts": 1}}).status == 200
    sample(server)
    assert "Nothing needs attention" in page(server, "/ui")
    with holdfast.connect(server.url) as broker:
        queue = broker.queue("orders")
        queue.put_many([b"a", b"b"])
        sample(server)
        queue.get(timeout=5).reject("bad")
    engine = server.server.service.engine
    engine.topic("orders").tick()
    store, now_s = engine.sampler.store, engine.world.clock.now_ns() // 10**9
    sample(server)
    (key,) = [key for key in store.series() if key.topic == "orders"]
    store.merge(key, Slot(now_s - 60))  # a minute ago there was none
    text = page(server, "/ui")
    assert "orders has new dead letters" in text
    assert 'href="/ui/queues/orders/dead">Dead letters' in text


def test_a_failing_upkeep_is_shown_until_it_works_again(server, monkeypatch):
    live_a_day(server)
    topic = server.server.service.engine.topic("orders")

    def fail() -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(topic.duplicates, "tick", fail)
        topic.tick()
        text = page(server, "/ui")
    assert "Maintenance of orders is failing" in text
    assert "the disk is gone" in text
    topic.tick()
    assert "Maintenance of orders is failing" not in page(server, "/ui")


def test_who_may_not_read_everything_sees_neither_the_total_nor_the_disk(tmp_path):
    with guarded(tmp_path) as server:
        prepared(server)
        own = server.get("/ui", token="token-of-of-these").body.decode()
        everything = server.get("/ui", token="token-of-reader").body.decode()
    assert TOPIC in own
    for words in ("All queues over time", "free disk space"):
        assert words in everything
        assert words not in own
