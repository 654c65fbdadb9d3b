"""Where shards belong, what nodes say of themselves, and how a cluster is created. Time is passed in."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import msgspec
import pytest

from holdfast.broker.samples import Sample, Samples
from holdfast.broker.tracing import TraceStep
from holdfast.client.opening import joined, parse_address
from holdfast.cluster.description import DESCRIPTION, create_cluster, read_cluster
from holdfast.cluster.placement import NodeTraits, Role, assignments, ranked, shard_of_topic
from holdfast.cluster.registry import NodeRecord, NodeTable, Registry
from holdfast.cluster.table import Placed, PlacedOtherwise, PlacementStore, PlacementTable
from holdfast.env import real_world
from holdfast.env.chain.engines import MemoryStore, open_store, parse_place
from holdfast.errors import BadSettings, Conflict, CorruptData, InvalidRequest, NotFound, UnknownFormat
from holdfast.local.opening import open_broker_port
from holdfast.local.sync.broker import LocalBrokerPort
from holdfast.protocol.topics import Steps
from holdfast.server.cluster.across import shown_steps
from holdfast.server.cluster.merging import MERGED, ShardAnswer, merged_samples
from holdfast.server.cluster.node import checked_name, node_id_of
from holdfast.server.cluster.passing import is_plain
from holdfast.settings import BrokerSettings, ServerSettings

NODES = [f"node-{number}" for number in range(5)]
SHARDS = range(256)


# Placement


def test_a_node_that_goes_moves_only_its_own_shards_and_each_to_the_second():
    for gone in NODES:
        rest = [node for node in NODES if node != gone]
        for shard in SHARDS:
            before, after = ranked(shard, NODES), ranked(shard, rest)
            assert after[0] == (before[1] if before[0] == gone else before[0])


def test_a_node_that_comes_takes_only_what_it_wins():
    for shard in SHARDS:
        before, after = ranked(shard, NODES), ranked(shard, [*NODES, "new"])
        assert after[0] in (before[0], "new")


def test_shards_spread_over_all_nodes():
    counts = [sum(ranked(shard, NODES)[0] == node for shard in range(1024)) for node in NODES]
    assert min(counts) > 1024 / len(NODES) * 0.75, counts


def test_the_order_of_nodes_does_not_matter():
    assert all(ranked(shard, NODES) == ranked(shard, NODES[::-1]) for shard in SHARDS)


ALIKE = dict.fromkeys(NODES, NodeTraits())
MOST = len(SHARDS)


def test_each_shard_has_one_owner_and_one_standby():
    for each in assignments(MOST, ALIKE):
        roles = [each.role_of(node) for node in NODES]
        assert (roles.count(Role.OWN), roles.count(Role.STAND_BY)) == (1, 1)


def test_who_stands_by_is_who_owns_it_when_the_owner_is_gone():
    for shard, each in enumerate(assignments(MOST, ALIKE)):
        rest = {node: traits for node, traits in ALIKE.items() if node != each.owner}
        assert assignments(MOST, rest)[shard].owner == each.standby


def test_a_node_that_leaves_keeps_nothing_but_what_nobody_else_can_have():
    assert all(each.role_of("node-0") is Role.NOTHING for each in assignments(MOST, ALIKE, ["node-0"]))
    assert assignments(1, {"node-0": NodeTraits()}, ["node-0"]) == [("node-0", "")]


def test_a_node_of_twice_the_weight_owns_twice_as_many_shards():
    heavy = {**ALIKE, "node-0": NodeTraits(weight=2)}
    counts = Counter(each.owner for each in assignments(1024, heavy))
    assert 1.6 < counts["node-0"] / (sum(counts.values()) - counts["node-0"]) * 4 < 2.4, counts
    for before, after in zip(assignments(1024, ALIKE), assignments(1024, heavy), strict=True):
        assert after.owner in (before.owner, "node-0"), "only shards that it wins move"


def test_the_standby_is_in_another_zone_if_there_is_one():
    zones = {node: NodeTraits(zone="ab"[number % 2]) for number, node in enumerate(NODES)}
    for shard, each in enumerate(assignments(MOST, zones)):
        assert zones[each.owner].zone != zones[each.standby].zone
        rest = {node: traits for node, traits in zones.items() if traits.zone != zones[each.owner].zone}
        assert assignments(MOST, rest)[shard].owner == each.standby, "it takes over when the whole zone is gone"
    alone = dict.fromkeys(NODES, NodeTraits(zone="a"))
    assert assignments(MOST, alone) == assignments(MOST, ALIKE)


def test_no_node_is_given_more_shards_than_it_may_own():
    limited = {**ALIKE, "node-1": NodeTraits(max_shards=3)}
    counts = Counter(each.owner for each in assignments(MOST, limited))
    assert counts["node-1"] == 3
    assert sum(counts.values()) == MOST
    full = assignments(10, dict.fromkeys(NODES[:2], NodeTraits(max_shards=2)))
    assert Counter(each.owner for each in full) == {"node-0": 2, "node-1": 2, "": 6}
    assert all(each.standby == "" for each in full if not each.owner)


def test_topics_spread_over_all_shards():
    counts = [0] * 16
    for number in range(1000):
        counts[shard_of_topic(f"topic-{number}", 16)] += 1
    assert min(counts) > 30


# Nodes


def record(node: str, number: int = 1, *, instance: str = "i", **shards: int) -> NodeRecord:
    owned = {int(shard.removeprefix("s")): epoch for shard, epoch in shards.items()}
    return NodeRecord(node=node, url=f"http://{node}", instance=instance, number=number, shards=owned)


def table(ended: set[str] | None = None) -> NodeTable:
    return NodeTable("me", stale_s=3, has_ended=lambda process: process.get("pid") in (ended or set()))


S = 1_000_000_000


def test_a_node_that_writes_nothing_new_is_not_counted():
    nodes = table()
    nodes.hear(record("a"), 0)
    nodes.hear(record("b"), 0)
    nodes.hear(record("b", 2), 2 * S)
    assert set(nodes.live(int(2.9 * S))) == {"a", "b"}
    nodes.hear(record("a"), int(2.9 * S))  # the same again is no sign of life
    assert set(nodes.live(3 * S)) == {"b"}


def test_a_node_whose_process_has_ended_is_not_counted():
    ended: set[str] = set()
    nodes = table(ended)
    nodes.hear(msgspec.structs.replace(record("a"), process={"pid": "7"}), 0)
    assert set(nodes.live(1)) == {"a"}
    ended.add("7")
    assert not nodes.live(1)


def test_an_older_record_changes_nothing():
    nodes = table()
    assert nodes.hear(record("a", 5, s1=1), 0)
    assert not nodes.hear(record("a", 4, s2=1), 0)
    owner = nodes.owner_of(1)
    assert owner is not None
    assert owner.node == "a"
    assert nodes.owner_of(2) is None


def test_of_two_that_say_they_own_a_shard_the_later_epoch_counts():
    nodes = table()
    nodes.hear(record("stopped", s1=3), 0)
    nodes.hear(record("next", s1=4), 0)
    owner = nodes.owner_of(1)
    assert owner is not None
    assert owner.node == "next"


def test_a_node_whose_records_are_gone_is_forgotten_but_not_one_that_has_just_come():
    nodes = table()
    nodes.hear(record("a"), 0)
    nodes.hear(record("b"), 9 * S)
    assert nodes.keep_only(set(), 10 * S)
    assert set(nodes.known) == {"b"}


def test_a_node_keeps_its_newest_records_and_removes_all_at_its_end():
    store = MemoryStore()
    registry = Registry(store, "", real_world().clock)
    for number in range(1, 6):
        registry.write(record("a", number, s1=number))
    assert len(list(store.keys("cluster/nodes/"))) == 2
    assert registry.read()["a"].shards == {1: 5}
    after = Registry(store, "", real_world().clock)
    assert after.adopt("a") == 5
    after.write(record("a", 6))
    assert after.read()["a"].number == 6
    after.remove()
    assert not list(store.keys(""))


def test_the_records_of_a_node_that_is_long_gone_are_removed_but_not_its_newer_ones():
    store = MemoryStore()
    registry = Registry(store, "", real_world().clock)
    registry.write(record("a", 1))
    registry.write(record("a", 2))
    nodes = table()
    nodes.hear(record("a", 1), 0)
    assert not nodes.long_gone(600 * S)
    registry.remove_of(nodes.long_gone(601 * S)["a"])
    assert registry.read()["a"].number == 2


def test_a_record_that_cannot_be_read_hides_no_other():
    store = MemoryStore()
    store.create("cluster/nodes/bad/00000000000000000001", b"{")
    registry = Registry(store, "", real_world().clock)
    registry.write(record("a"))
    assert set(registry.read()) == {"a"}


@pytest.mark.parametrize(
    ("url", "name"),
    [("http://10.0.0.5:7700", "10.0.0.5-7700"), ("https://n1.example", "n1.example-443"), ("http://[::1]:7", "--1-7")],
)
def test_a_node_is_named_after_its_address(url, name):
    assert node_id_of(url) == name


@pytest.mark.parametrize(
    ("node_id", "advertised", "settings", "said"),
    [
        ("-a", None, {}, "cannot have the name"),
        (None, None, {"host": "0.0.0.0"}, "--advertise"),
        (None, None, {"port": 0}, "--node-id"),
        (None, "10.0.0.5:7700", {}, "not the address of a node"),
        (None, "http://host:1/path", {}, "not the address of a node"),
    ],
)
def test_a_node_that_cannot_be_named_or_found_is_refused(node_id, advertised, settings, said):
    with pytest.raises(BadSettings, match=said):
        checked_name(node_id, advertised, ServerSettings(**settings))


# The description


def test_a_cluster_is_created_once():
    made = create_cluster("memory://cluster-once", real_world(), shards=4)
    assert read_cluster("memory://cluster-once") == made
    with pytest.raises(Conflict, match="a cluster in memory://cluster-once already"):
        create_cluster("memory://cluster-once", real_world(), shards=8)
    assert read_cluster("memory://cluster-once").shards == 4


@pytest.mark.parametrize("shards", [0, 1025])
def test_a_cluster_has_1_to_1024_shards(shards):
    with pytest.raises(InvalidRequest, match="1 to 1024"):
        create_cluster("memory://cluster-shards", real_world(), shards=shards)


def test_what_is_no_store_is_refused():
    with pytest.raises(InvalidRequest, match="is not a store"):
        create_cluster("./jobs", real_world(), shards=4)
    with pytest.raises(NotFound, match="holdfast cluster init"):
        read_cluster("memory://cluster-none")


def test_a_place_that_holds_a_queue_cannot_hold_a_cluster(tmp_path):
    url = "memory://cluster-queue"
    settings = BrokerSettings(store_cache_dir=str(tmp_path))
    open_broker_port(LocalBrokerPort, url, settings=settings).engine.close()
    with pytest.raises(InvalidRequest, match="data folder of a single server"):
        create_cluster(url, real_world(), shards=4)


def test_a_place_that_holds_a_cluster_cannot_hold_a_queue(tmp_path):
    create_cluster("memory://cluster-apart", real_world(), shards=4)
    settings = BrokerSettings(store_cache_dir=str(tmp_path))
    with pytest.raises(InvalidRequest, match="holds a cluster"):
        open_broker_port(LocalBrokerPort, "memory://cluster-apart", settings=settings)


def test_a_store_that_ignores_the_condition_cannot_hold_a_cluster(monkeypatch):
    monkeypatch.setattr(MemoryStore, "create", lambda self, key, content: self._objects.update({key: content}) or True)
    with pytest.raises(Exception, match="ignores the condition"):
        create_cluster("memory://cluster-liar", real_world(), shards=4)


@pytest.mark.parametrize(("content", "kind"), [(b'{"format": 2}', UnknownFormat), (b'{"format": 1}', CorruptData)])
def test_a_description_that_cannot_be_read_is_refused(content, kind):
    store, root = open_store(parse_place(f"memory://cluster-{kind.__name__}"))
    store.create(f"{root}{DESCRIPTION}", content)
    with pytest.raises(kind):
        read_cluster(f"memory://cluster-{kind.__name__}")


# Answers of all shards


class Topic(msgspec.Struct):
    name: str


class Page(msgspec.Struct):
    topics: list[Topic]
    more: bool = False
    next: str = ""
    delayed: dict[str, int] = {}


def pages(*of_shards: list[str], limit: int, after: str = "") -> list[ShardAnswer]:
    found = []
    for shard, names in enumerate(of_shards):
        left = [name for name in sorted(names) if name > after]
        page = Page([Topic(name) for name in left[:limit]], more=len(left) > limit)
        page.next = left[limit - 1] if len(left) > limit else ""
        found.append(ShardAnswer(shard, "n", page))
    return found


@pytest.mark.parametrize("pattern", ["/v1/topics", "/v1/standing"])
@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_pages_of_all_shards_put_together_name_every_topic_once_in_order(pattern, limit):
    merge = MERGED["GET", pattern].merge
    names = ["a", "b", "c", "d", "e", "f", "g"]
    for cut in combinations(range(len(names)), 3):
        here = [name for at, name in enumerate(names) if at in cut]
        there = [name for at, name in enumerate(names) if at not in cut]
        seen, after = [], ""
        while True:
            page = merge(pages(here, there, [], limit=limit, after=after), {"limit": str(limit)})
            seen += [topic.name for topic in page.topics]
            more = page.more if pattern == "/v1/topics" else bool(page.next)
            if not more:
                break
            after = seen[-1] if pattern == "/v1/topics" else page.next
        assert seen == names


# Addresses of several nodes


def test_several_addresses_are_one_place():
    address = parse_address("http://a:1/jobs,http://b:2")
    assert (address.host, address.queue, [each.host for each in address.others]) == ("a", "jobs", ["b"])
    assert joined(["http://a:1", "http://b:2"]) == "http://a:1,http://b:2"


@pytest.mark.parametrize("text", ["http://a,https://b", "http://a/x,http://b/y", "http://a,b", "http://a,"])
def test_several_addresses_that_do_not_fit_are_refused(text):
    with pytest.raises(InvalidRequest):
        parse_address(text)


def test_the_queue_may_be_named_behind_any_of_the_addresses():
    address = parse_address("http://a:1,http://b:2/jobs")
    assert (address.queue, address.text, address.others[0].port) == ("jobs", "http://a:1", 2)


# The table of placements


def test_of_two_changes_that_expect_the_same_move_one_is_made():
    placements = PlacementStore(MemoryStore(), "")
    placements.change("orders", "", Placed(1, "a"))
    with pytest.raises(PlacedOtherwise) as refused:
        placements.change("orders", "", Placed(2, "b"))
    assert refused.value.table.topics == {"orders": Placed(1, "a")}
    placements.change("orders", "", Placed(1, "a"))  # repeated: it has been made
    assert placements.change("orders", "a", Placed(2, "b")).version == 2


def test_a_change_that_lost_the_race_for_a_number_is_made_with_the_next():
    class Rival(MemoryStore):
        """Another node comes first, once."""

        is_first = True

        def create(self, key: str, content: bytes) -> bool:
            if self.is_first:
                self.is_first = False
                PlacementStore(self, "").change("mails", "", Placed(0, "m"))
            return super().create(key, content)

    placements = PlacementStore(Rival(), "")
    table = placements.change("orders", "", Placed(1, "a"))
    assert (table.version, table.topics) == (2, {"mails": Placed(0, "m"), "orders": Placed(1, "a")})


def test_a_number_that_was_removed_and_is_created_again_changes_nothing():
    store = MemoryStore()
    placements = PlacementStore(store, "")
    for number in range(100):
        placements.change("orders", str(number - 1) if number else "", Placed(number % 7, str(number)))
    kept = list(store.keys("cluster/placement/"))
    assert len(kept) == 64
    first = PlacementTable(version=1, topics={"orders": Placed(5, "late")})
    assert store.create(f"cluster/placement/{1:020}", msgspec.json.encode(first))
    assert placements.read().topics == {"orders": Placed(99 % 7, "99")}
    with pytest.raises(PlacedOtherwise):
        placements.change("orders", "", Placed(5, "late"))


def test_dead_letters_are_where_their_topic_was_put():
    table = PlacementTable(version=1, topics={"orders": Placed(5, "a")})
    assert table.shard_of("orders", 16) == table.shard_of("orders.dlq", 16) == 5
    assert table.shard_of("payments", 16) == shard_of_topic("payments", 16)


@pytest.mark.parametrize(
    ("content", "error"),
    [(b'{"format":2}', UnknownFormat), (b"{", CorruptData), (b'{"format":1,"topics":7}', CorruptData)],
)
def test_a_table_that_cannot_be_read_is_refused(content, error):
    store = MemoryStore()
    store.create(f"cluster/placement/{1:020}", content)
    with pytest.raises(error):
        PlacementStore(store, "").read()


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-correlation-id: a\r\n\r\nok", True),
        (b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", False),  # more is to come
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nok", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", False),
        (b"HTTP/1.1 421 Misdirected Request\r\nx-holdfast-moved: 1\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n", False),
        (b"", False),
    ],
)
def test_only_whole_answers_of_success_are_passed_back_unread(data: bytes, is_whole: bool):
    assert is_plain(data) is is_whole


def steps(*times: int, more: str = "") -> Steps:
    return Steps(steps=[TraceStep(at, "published", f"t-0-{at}", "t") for at in times], next=more)


def shown(*pages: Steps, limit: int = 10, is_last: bool = False) -> list[int]:
    return [step.at_ns for _, step in shown_steps(pages, limit, is_last=is_last)]


def test_steps_of_several_shards_are_shown_up_to_the_time_that_all_have_told_of():
    assert shown(steps(1, 4), steps(2, 3)) == [1, 2, 3, 4]
    assert shown(steps(1, 4, 9), steps(2, 3, more="7")) == [1, 2, 3]  # the second one may have a step at 4
    assert shown(steps(1, 4), steps(2, 3), limit=2) == [1, 2]
    assert shown(steps(1), steps(more="7")) == []  # nothing is known of the second one yet
    assert shown(steps(1, 5, 9), steps(4, 8, more="7"), is_last=True) == [4, 5, 8, 9]
    assert shown(steps(1, 5, 9), steps(4, 8), limit=2, is_last=True) == [8, 9]


def test_samples_of_shards_add_up():
    def samples(at_s: int, **facts: Any) -> Samples:
        at = datetime.fromtimestamp(at_s, UTC)
        usual: dict[str, Any] = dict.fromkeys(("published_rate", "handled_rate", "failed_rate", "oldest_seconds"), 1.0)
        usual |= {"ready": 2, "dead": 0, "handle_p50_seconds": None, "handle_p99_seconds": None}
        one = Sample(at=at, **{**usual, **facts})
        return Samples(topic="", group="", mode="total", step_seconds=5, since=at, until=at, samples=[one])

    found = merged_samples([samples(10), samples(5), samples(10, ready=3, oldest_seconds=7.0, handle_p99_seconds=0.5)])
    assert [sample.at.timestamp() for sample in found.samples] == [5, 10]
    last = found.samples[-1]
    assert (last.published_rate, last.ready, last.oldest_seconds, last.handle_p99_seconds) == (2.0, 5, 7.0, 0.5)
    assert (found.since.timestamp(), found.until.timestamp()) == (5, 10)
