"""Folders in a store: the local copy drops segments that the store has, and others read them straight from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.stored import snapshot
from holdfast.env import real_world
from holdfast.env.chain.checkpoints import write_checkpoint
from holdfast.errors import BadSettings, NotFound
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.ranges import DataFolder

SEGMENT = 128 * 1024  # more than a checkpoint has inline


class Stored:
    """A folder in a store that is a folder itself, and its owner on some machine."""

    def __init__(self, base: Path, machine: str = "one", *, limit: int | None = 0) -> None:
        self.url = f"file://{base}/store/jobs"
        self.settings = BrokerSettings(
            store_cache_dir=str(base / machine),
            topic=TopicSettings(segment_bytes=SEGMENT, min_free_bytes=0, tier_after_bytes=limit),
        )
        self.engine = BrokerEngine.open(self.url, settings=self.settings)
        if "jobs" not in self.engine.topics():
            self.engine.create_topic("jobs")

    @property
    def log(self):
        return self.engine.open_topic("jobs").partitions[0].log

    def fill(self, segments: int) -> list[bytes]:
        put = []
        while len(self.log.segments()) < segments:
            put += (batch := [b"%06d" % self.log.end + bytes(8_000) for _ in range(1)])
            self.log.append(batch, durability="fsync")
        assert self.engine.store is not None
        self.engine.store.commit()  # how far readers may read follows the messages, here at once
        return put

    def checkpoint(self) -> None:
        write_checkpoint(self.engine.tiering._chain, real_world().clock.now_ns())

    @property
    def local(self) -> list[str]:
        return sorted(path.name for path in Path(self.log.folder).glob("*.log"))

    def read(self) -> list[bytes]:
        return [bytes(record.value) for record in self.log.records(0)]


def test_the_copy_drops_what_a_checkpoint_has_and_reads_it_from_there(tmp_path):
    stored = Stored(tmp_path)
    put = stored.fill(4)
    stored.engine.tiering.tick()
    assert len(stored.local) == 4, "no checkpoint has them yet"
    stored.checkpoint()
    stored.engine.tiering.tick()
    assert len(stored.local) == 1
    assert stored.read() == put
    stored.checkpoint()  # lists them without fetching them
    stored.engine.close()

    again = Stored(tmp_path)
    assert len(again.local) == 1, "what was dropped stays in the store"
    assert again.read() == put
    again.engine.close()


def test_another_machine_fetches_only_what_is_read(tmp_path):
    stored = Stored(tmp_path)
    put = stored.fill(4)
    stored.checkpoint()
    put += stored.fill(5)
    stored.engine.close()

    other = Stored(tmp_path, "two")
    assert len(other.local) < 4
    put += [b"more"]
    other.log.append([b"more"], durability="fsync")
    assert other.read() == put
    other.engine.close()


def test_without_limits_the_copy_is_whole(tmp_path):
    stored = Stored(tmp_path, limit=None)
    put = stored.fill(4)
    stored.checkpoint()
    stored.engine.tiering.tick()
    stored.engine.close()
    other = Stored(tmp_path, "two", limit=None)
    assert len(other.local) == 4
    assert other.read() == put
    other.engine.close()


def test_removed_segments_go_from_the_copy_too(tmp_path):
    stored = Stored(tmp_path)
    put = stored.fill(4)
    stored.checkpoint()
    stored.engine.tiering.tick()
    start = stored.log.segments()[2].base_offset
    stored.log.trim(start)
    stored.engine.close()
    other = Stored(tmp_path, "two")
    assert [bytes(record.value) for record in other.log.records(start)] == put[start:]
    assert other.log.start == start
    other.engine.close()


def test_a_tier_beside_the_store_is_refused(tmp_path):
    settings = BrokerSettings(store_cache_dir=str(tmp_path), tier="s3://cold/jobs")
    with pytest.raises(BadSettings, match="its own tier"):
        BrokerEngine.open(f"file://{tmp_path}/store/jobs", settings=settings)


def messages_of(folder: str) -> list[bytes]:
    reader = DataFolder(folder).reader("jobs", 0)
    assert reader is not None
    return [bytes(record.value) for record in reader.records(0)]


def test_a_snapshot_is_what_was_there_then_and_fetches_segments_when_they_are_read(tmp_path):
    stored = Stored(tmp_path)
    put = stored.fill(3)
    stored.checkpoint()
    put += stored.fill(4)
    reader = BrokerSettings(store_cache_dir=str(tmp_path / "reader"))
    world = real_world()
    taken = snapshot(stored.url, reader, world)
    stored.fill(6)

    assert world.tier.fetched < 3
    assert messages_of(taken.folder) == put
    elsewhere = BrokerSettings(store_cache_dir=str(tmp_path / "task"))
    same = snapshot(stored.url, elsewhere, real_world(), taken.number)
    assert same.number == taken.number
    assert messages_of(same.folder) == put
    assert snapshot(stored.url, elsewhere, real_world(), taken.number) == same
    later = snapshot(stored.url, reader, real_world())
    assert messages_of(later.folder) == stored.read()
    assert messages_of(taken.folder) == put, "a snapshot does not change"
    stored.engine.close()


def test_a_snapshot_of_a_number_that_is_not_there_is_refused(tmp_path):
    stored = Stored(tmp_path)
    with pytest.raises(NotFound, match="there is no 12345"):
        snapshot(stored.url, BrokerSettings(store_cache_dir=str(tmp_path / "reader")), real_world(), 12_345)
    stored.engine.close()
