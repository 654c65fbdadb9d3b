"""What callers may make over HTTP is bounded, and so is what it costs: groups, partitions, descriptors."""

from __future__ import annotations

import os
import time

import pytest

from holdfast.settings import BrokerSettings, TopicSettings
from tests.integration.http_gear import serving

BROKER = BrokerSettings(open_files=100, topic=TopicSettings(min_free_bytes=0, durability="os"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_six_hundred_group_names_take_few_descriptors_and_end_at_the_cap(tmp_path):
    with serving(tmp_path, broker=BROKER, max_groups=150) as server:
        server.request("PUT", "/v1/queues/jobs", {})
        before = descriptors()
        statuses = []
        for number in range(600):
            statuses.append(server.request("POST", "/v1/queues/jobs/dequeue", {"group": f"g{number}"}).status)
        assert statuses[:149] == [204] * 149 or statuses[:149] == [200] * 149
        assert set(statuses[149:]) == {400}
        refused = server.request("POST", "/v1/queues/jobs/dequeue", {"group": "more"})
        assert refused.code == "invalid_request"
        assert "max_groups" in refused.body["error"]["message"]
        assert descriptors() - before <= BROKER.open_files + 60
        # Those that are there go on.
        server.request("POST", "/v1/queues/jobs/enqueue", {"messages": [{"body": "x"}]})
        assert server.request("POST", "/v1/queues/jobs/dequeue", {"group": "g0"}).status == 200


WAYS_TO_A_GROUP = {
    "dequeue": ("POST", "/v1/queues/jobs/dequeue", {"group": "more"}),
    "subscribe": ("POST", "/v1/queues/jobs/subscribe", {"group": "more"}),
    "put": ("PUT", "/v1/topics/jobs/groups/more", {}),
    "join": ("POST", "/v1/groups/more/members", {"topics": ["jobs"]}),
}


@pytest.mark.parametrize("way", WAYS_TO_A_GROUP)
def test_every_way_to_a_new_group_ends_at_the_cap(tmp_path, way):
    with serving(tmp_path, broker=BROKER, max_groups=2) as server:
        server.request("PUT", "/v1/queues/jobs", {})
        assert server.request("PUT", "/v1/topics/jobs/groups/second", {}).status == 200
        answer = server.request(*WAYS_TO_A_GROUP[way])
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "max_groups" in answer.body["error"]["message"]
        assert server.request("PUT", "/v1/topics/jobs/groups/second", {}).status == 200


WAYS_TO_PARTITIONS = {
    "create": ("POST", "/v1/topics", {"name": "new", "partitions": 5}),
    "create by settings": ("POST", "/v1/topics", {"name": "new", "settings": {"partitions": 5}}),
    "put": ("PUT", "/v1/queues/new", {"partitions": 5}),
    "put again": ("PUT", "/v1/queues/jobs", {"partitions": 5}),
    "patch": ("PATCH", "/v1/topics/jobs", {"settings": {"partitions": 5}}),
    "add": ("POST", "/v1/topics/jobs/partitions", {"count": 3}),
}


@pytest.mark.parametrize("way", WAYS_TO_PARTITIONS)
def test_every_way_to_more_partitions_ends_at_the_cap(tmp_path, way):
    with serving(tmp_path, broker=BROKER, max_partitions=4) as server:
        server.request("PUT", "/v1/queues/jobs", {"partitions": 2})
        answer = server.request(*WAYS_TO_PARTITIONS[way])
        assert (answer.status, answer.code) == (400, "bad_settings")
        assert "max_partitions" in answer.body["error"]["message"]
        assert server.request("GET", "/v1/topics/new").status == 404
        assert server.request("PATCH", "/v1/topics/jobs", {"settings": {"partitions": 4}}).status == 200


def test_growth_ends_soon_after_its_caller_has_gone(tmp_path):
    with serving(tmp_path, broker=BROKER, max_partitions=10_000) as server:
        server.request("PUT", "/v1/queues/jobs", {})
        connection = server.connection()
        connection.request(
            "PATCH", "/v1/topics/jobs", b'{"settings": {"partitions": 10000}}', {"content-type": "application/json"}
        )

        def count() -> int:
            return len(server.request("GET", "/v1/topics/jobs").body["partitions"])

        while count() < 10:
            pass
        connection.close()
        seen = [count()]
        while len(seen) < 2 or seen[-1] != seen[-2]:  # it stops by itself: two looks find the same
            server.request("PATCH", "/v1/topics/jobs", {"settings": {"max_attempts": 3}})  # behind a step under way
            seen.append(count())
        assert seen[-1] < 1_000


WAYS_TO_A_LARGE_TOPIC = {
    "create": ("POST", "/v1/topics", b'{"name": "jobs", "partitions": 3000}'),
    "put": ("PUT", "/v1/queues/jobs", b'{"partitions": 3000}'),
}


@pytest.mark.parametrize("way", WAYS_TO_A_LARGE_TOPIC)
def test_a_topic_is_not_made_any_further_when_its_caller_has_gone(tmp_path, way):
    with serving(tmp_path, broker=BROKER, max_partitions=10_000) as server:
        connection = server.connection()
        connection.request(*WAYS_TO_A_LARGE_TOPIC[way], {"content-type": "application/json"})
        while not list(tmp_path.rglob("topics/jobs/10")):
            time.sleep(0.01)
        connection.close()
        assert server.request("DELETE", "/v1/topics/jobs").status == 204  # behind the partition under way
        made = server.request("PUT", "/v1/queues/jobs", {"partitions": 2})
        assert made.status in (200, 201)
        assert server.request("POST", "/v1/queues/jobs/enqueue", {"messages": [{"body": "x"}]}).status < 300
