"""Where topics, locks and documents live can never change: a cluster looks for them where it has put them."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.broker.moving import MoveNote
from holdfast.cluster.description import shard_url
from holdfast.cluster.placement import ranked, shard_of_key, shard_of_topic
from holdfast.cluster.table import Placed, PlacementStore, PlacementTable
from holdfast.env.chain.engines import MemoryStore

TOPICS = {
    "orders": (7, 727),
    "payments": (13, 829),
    "a": (3, 163),
    "queue": (0, 256),
    "emails.high": (1, 225),
    "user_events": (8, 616),
}
KEYS = {
    "orders": (3, 195),
    "payments": (6, 470),
    "a": (15, 671),
    "queue": (12, 172),
    "emails.high": (7, 935),
    "user_events": (15, 415),
}


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_stays_in_its_shard(name):
    assert (shard_of_topic(name, 16), shard_of_topic(name, 1024)) == TOPICS[name]
    assert shard_of_topic(f"{name}.dlq", 16) == shard_of_topic(name, 16)


@pytest.mark.parametrize("name", KEYS)
def test_a_lock_stays_in_its_shard(name):
    assert (shard_of_key(name, 16), shard_of_key(name, 1024)) == KEYS[name]


def test_nodes_of_two_releases_rank_each_other_alike():
    assert ranked(0, ["a", "b", "c", "d"]) == ["a", "c", "b", "d"]
    assert ranked(7, ["d", "c", "b", "a"]) == ["b", "d", "c", "a"]


def test_a_shard_stays_at_its_place_in_the_store():
    assert shard_url("s3://bucket/jobs", 7) == "s3://bucket/jobs/shards/0007"
    assert shard_url("postgresql://me@host/db/jobs?sslmode=require", 1023) == (
        "postgresql://me@host/db/jobs/shards/1023?sslmode=require"
    )


TABLE = b'{"format":1,"version":2,"topics":{"orders":{"shard":3,"move":"5f0c"}}}'


def test_the_table_of_placements_is_read_and_written_as_ever():
    store = MemoryStore()
    store.create(f"jobs/cluster/placement/{2:020}", TABLE)
    placements = PlacementStore(store, "jobs/")
    assert placements.read() == PlacementTable(version=2, topics={"orders": Placed(3, "5f0c")})
    placements.change("mails", "", Placed(0, "9a"))
    assert store.read(f"jobs/cluster/placement/{3:020}") == (
        b'{"format":1,"version":3,"topics":{"mails":{"shard":0,"move":"9a"},"orders":{"shard":3,"move":"5f0c"}}}'
    )


def test_the_note_of_a_move_that_another_release_began_is_understood():
    note = b'{"move":"5f0c","topic":"orders","source":7,"target":3,"before":""}'
    assert msgspec.json.decode(note, type=MoveNote) == MoveNote(move="5f0c", topic="orders", source=7, target=3)
