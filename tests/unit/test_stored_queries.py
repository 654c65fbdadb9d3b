"""Queries that read a folder in a store without its owner: the owner finds their notes there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder import stored as stored_folders
from holdfast.broker.folder.stored import snapshot
from holdfast.broker.streams.queries import QueryLease
from holdfast.broker.streams.stored_queries import StoredNote
from holdfast.env import ManualClock, RealDisk, SystemIds, World, real_world
from holdfast.env.chain.chain import ChainTimes
from holdfast.env.chain.engines import FolderStore, StoreUnreachable, open_store, parse_place
from holdfast.settings import BrokerSettings, TopicSettings

TTL_MS = 60_000


class Lease(QueryLease):
    """A query as Spark's is, without Spark."""

    def __init__(self, world: World, url: str) -> None:
        super().__init__(world, url, "readers", ttl_ms=TTL_MS, kind="spark", lasting=True)
        self.noted = StoredNote(*open_store(parse_place(url)), self.file)

    def put(self, content: bytes) -> None:
        self.noted.put(content)

    def take_away(self) -> None:
        self.noted.remove()


class Stored:
    """A folder in a store with an owner, on a clock that tests set."""

    def __init__(self, home: Path) -> None:
        self.clock = ManualClock()
        self.world = World(clock=self.clock, disk=RealDisk(), ids=SystemIds())
        self.url = f"file://{home}/store/jobs"
        self.notes = home / "store/jobs/query"
        topic = TopicSettings(segment_bytes=4096, frame_bytes=1024, min_free_bytes=0)
        settings = BrokerSettings(topic=topic, store_cache_dir=str(home / "owner"), store_lease_ms=600_000)
        with pytest.MonkeyPatch.context() as patch:
            # The clock may be set while an object is on its way, which then seems to have taken that long.
            patch.setattr(stored_folders, "ChainTimes", partial(ChainTimes, slowest_s=600.0))
            self.engine = BrokerEngine.open(self.url, settings=settings, world=self.world)
        self.engine.create_topic("jobs")
        self.topic = self.engine.open_topic("jobs")
        self.log = self.topic.partitions[0].log
        for _ in range(40):
            self.log.append([bytes(500)] * 2)
        self.log.sync()

    def needs(self, lease: Lease, offset: int) -> None:
        assert lease.hold({"jobs": (self.topic.id, {0: offset})})
        self.clock.advance(ms=1_000)  # the owner looks once a second


@pytest.fixture
def stored(tmp_path: Path):
    stored = Stored(tmp_path)
    yield stored
    stored.engine.close()


def test_the_owner_keeps_what_a_query_in_the_store_has_not_read(stored):
    lease = Lease(stored.world, stored.url)
    stored.needs(lease, 30)
    stored.log.trim(stored.log.end)
    assert 0 < stored.log.start <= 30
    stored.needs(lease, 60)
    stored.log.trim(stored.log.end)
    assert 30 < stored.log.start <= 60
    assert [query.group for query, _ in stored.engine.queries.on(stored.topic)] == ["readers"]
    lease.end()
    stored.clock.advance(ms=1_000)
    assert stored.engine.queries.on(stored.topic) == []
    stored.log.trim(stored.log.end)
    assert stored.log.start > 60
    assert list(stored.notes.iterdir()) == []


def test_a_query_that_is_not_renewed_ends_and_its_notes_go(stored):
    lease = Lease(stored.world, stored.url)
    stored.needs(lease, 30)
    for _ in range(5):
        stored.clock.advance(ms=TTL_MS // 3)
        lease.renew()
        stored.engine.queries.tidy()
    assert len(list(stored.notes.iterdir())) == 2  # the last two stay
    assert stored.engine.queries.floor("jobs", stored.topic.id, 0) == 30
    stored.clock.advance(ms=TTL_MS)
    assert stored.engine.queries.floor("jobs", stored.topic.id, 0) is None
    assert list(stored.notes.iterdir()) == []
    lease.renew()  # it was only slow
    stored.clock.advance(ms=1_000)
    assert stored.engine.queries.floor("jobs", stored.topic.id, 0) == 30


def test_a_query_can_be_removed_by_the_name_of_its_group(stored):
    stored.needs(Lease(stored.world, stored.url), 30)
    assert stored.engine.queries.remove("others") == 0
    assert stored.engine.queries.remove("readers") == 1
    stored.clock.advance(ms=1_000)
    assert stored.engine.queries.floor("jobs", stored.topic.id, 0) is None


def test_while_the_store_does_not_answer_the_last_notes_count(stored, monkeypatch):
    stored.needs(Lease(stored.world, stored.url), 30)
    assert stored.engine.queries.floor("jobs", stored.topic.id, 0) == 30

    def fails(*_: object) -> None:
        raise StoreUnreachable("no route")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "keys", fails)
        stored.clock.advance(ms=1_000)
        assert stored.engine.queries.floor("jobs", stored.topic.id, 0) == 30


def test_a_stream_keeps_only_its_newest_snapshots(tmp_path):
    stored = Stored(tmp_path)
    settings = BrokerSettings(store_cache_dir=str(tmp_path / "reader"))
    taken = []
    for _ in range(6):
        stored.log.append([b"x"], durability="fsync")
        stored.engine.store.commit()
        taken.append(snapshot(stored.url, settings, real_world(), stream="0000aaaa"))
    whole = snapshot(stored.url, settings, real_world())
    there = [Path(each.folder).exists() for each in taken]
    assert there == [False, True, True, True, True, True]
    assert "stream-" not in whole.folder
    again = snapshot(
        stored.url, settings, real_world(), taken[0].number, stream="0000aaaa"
    )  # a task that is tried again
    assert (again.folder, Path(again.folder).exists()) == (taken[0].folder, True)
    stored.engine.close()
