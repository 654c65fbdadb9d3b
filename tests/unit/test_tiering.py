"""Segments that leave the disk for a store: they stay readable, and nobody needs them locally."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from holdfast.broker.backup.taking import captured
from holdfast.broker.check.folder import check_folder
from holdfast.broker.check.repair import repair_folder
from holdfast.broker.engine import BrokerEngine
from holdfast.env import RealDisk, real_world
from holdfast.env.chain.engines import MemoryStore
from holdfast.env.tier import Stub, TieredDisk
from holdfast.errors import BadSettings, DamagedRange, OffsetOutOfRange, Unavailable
from holdfast.local.broker import describe, groups_on
from holdfast.model import Batch
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage import LogReader
from tests.unit.tiers import CACHE_BYTES, FOLDER, LOG, PLACE, TieredFolder


def tiered(**topic) -> TieredFolder:
    folder = TieredFolder(**topic)
    folder.fill()
    folder.move()
    return folder


def test_all_segments_but_the_active_one_leave_the_disk_and_stay_readable():
    folder = tiered()
    assert len(folder.files) == 1
    assert len(folder.stubs) == 4
    assert folder.read() == folder.put
    assert len(folder.files) == 1  # what was fetched is in the cache


def test_only_what_is_beyond_the_limit_leaves():
    folder = tiered(tier_after_bytes=3 * 4096)
    assert len(folder.files) == 3
    assert len(folder.stubs) == 2
    assert folder.files[0] > folder.stubs[-1], "the oldest leave first"


def test_a_segment_leaves_when_it_is_old_enough():
    folder = tiered(tier_after_bytes=None, tier_after_ms=60_000)
    assert not folder.stubs
    folder.clock.advance(seconds=61)
    folder.move()
    assert len(folder.stubs) == 4
    assert folder.read() == folder.put


def test_nothing_leaves_without_limits():
    folder = TieredFolder(tier_after_bytes=None)
    folder.fill()
    folder.move()
    assert not folder.stubs
    assert not list(folder.objects.keys(""))


def test_sizes_and_times_are_known_without_fetching():
    folder = tiered()
    folder.engine.close()
    folder = folder.after(folder.disk)
    segments = folder.log.segments()
    assert len(segments) == 5
    assert folder.log.find_time(folder.clock.now_ns() + 1) == folder.log.end
    assert folder.tier.fetched == 0


def test_a_reader_that_does_not_own_the_folder_fetches_too():
    folder = tiered()
    reader = LogReader(LOG, world=folder.world)
    assert [bytes(record.value) for record in reader.records(0)] == folder.put
    assert folder.tier.fetched == 4


def test_a_store_that_does_not_answer_costs_only_the_readers_of_that_range():
    folder = tiered()
    folder.store.is_cut = True
    with pytest.raises(Unavailable, match=r"store.*try again") as caught:
        folder.read()
    assert caught.value.retryable
    assert folder.log.append([b"new"], durability="fsync").offset == len(folder.put)
    assert folder.read(folder.log.segments()[-1].base_offset)[-1] == b"new"
    folder.store.is_cut = False
    assert folder.read() == [*folder.put, b"new"]


def test_while_the_store_does_not_answer_segments_stay_on_the_disk():
    folder = TieredFolder()
    folder.fill()
    folder.store.is_cut = True
    folder.move()
    assert len(folder.files) == 5
    assert not folder.stubs
    folder.store.is_cut = False
    folder.move()
    assert len(folder.files) == 1
    assert folder.read() == folder.put


def test_damage_in_the_store_costs_only_the_messages_that_it_hits():
    folder = tiered()
    key = next(iter(folder.objects.keys("tier/")))
    content = bytearray(folder.objects.read(key))
    content[100] ^= 0xFF
    folder.objects.remove(key)
    folder.objects.create(key, bytes(content))
    with pytest.raises(DamagedRange) as caught:
        folder.read()
    assert folder.read(caught.value.next_offset) == folder.put[caught.value.next_offset :]
    report = check_folder(FOLDER, folder.world)
    assert not report.ok


def test_an_object_that_is_gone_is_an_error_that_names_it():
    folder = tiered()
    key = next(iter(folder.objects.keys("tier/")))
    folder.objects.remove(key)
    with pytest.raises(Unavailable, match=f"missing from {PLACE}"):
        folder.read()


def test_a_store_that_returns_other_bytes_gets_no_segment():
    folder = TieredFolder()
    folder.fill()
    folder.store.read = lambda key: b"something else"
    folder.move()
    assert not folder.stubs
    assert len(folder.files) == 5


def test_two_readers_of_one_segment_fetch_it_once():
    folder = tiered()
    reads, go = [], threading.Event()
    plain = folder.store.read

    def slowly(key):
        reads.append(key)
        go.wait(5)
        return plain(key)

    folder.store.read = slowly
    results: list[list[bytes]] = []
    readers = [LogReader(LOG, world=folder.world) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda r=reader: results.append([bytes(next(r.records(0)).value)]))
        for reader in readers
    ]
    for thread in threads:
        thread.start()
    while not reads:
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert results == [[folder.put[0]]] * 4
    assert len(reads) == 1


def test_the_cache_is_bounded_and_a_reader_keeps_what_it_reads():
    folder = TieredFolder()
    folder.fill(12)
    folder.move()
    held = folder.log.records(0)
    first = [bytes(next(held).value)]
    assert folder.read() == folder.put  # evicts the first segment
    kept = [name for name in folder.disk.names(f"{FOLDER}/tier") if "-" in name]
    assert sum(int(name.partition("-")[2]) for name in kept) <= CACHE_BYTES
    assert len(kept) < 11
    assert first + [bytes(record.value) for record in held] == folder.put


def test_what_does_not_fit_into_the_cache_is_read_all_the_same():
    folder = tiered()
    folder.tier.limit_cache(f"{FOLDER}/tier", 0)
    assert folder.read() == folder.put
    assert not [name for name in folder.disk.names(f"{FOLDER}/tier") if "-" in name]


def test_a_cached_file_that_a_crash_cut_short_is_fetched_again():
    folder = tiered()
    assert folder.read() == folder.put
    cached = next(name for name in folder.disk.names(f"{FOLDER}/tier") if "-" in name)
    folder.disk.flip(f"{FOLDER}/tier/{cached}", 50)
    folder.engine.close()
    after = folder.after(folder.disk)
    assert after.read() == folder.put
    assert after.tier.fetched == 1


def test_retention_removes_the_objects_too():
    folder = tiered()
    assert len(list(folder.objects.keys("tier/"))) == 4
    start = folder.log.segments()[2].base_offset
    folder.log.trim(start)
    folder.move()
    assert len(list(folder.objects.keys("tier/"))) == 2
    assert folder.read(start) == folder.put[start:]
    with pytest.raises(OffsetOutOfRange):
        folder.read(0)


def test_a_deleted_topic_leaves_nothing_in_the_store():
    folder = tiered()
    folder.engine.delete_topic("jobs")
    folder.move()
    assert not list(folder.objects.keys(""))


def test_objects_of_another_folder_are_not_touched():
    folder = tiered()
    others = [f"tier/0123456789abcdef-jobs-0-{0:020}-77", "chain/1", "tier/x"]
    for key in others:
        folder.objects.create(key, b"theirs")
    folder.engine.delete_topic("jobs")
    folder.move()
    assert sorted(folder.objects.keys("")) == sorted(others)


def test_truncating_into_a_moved_segment_brings_it_back():
    folder = tiered()
    at = folder.log.segments()[1].base_offset + 4
    folder.log.truncate(at)
    assert folder.read() == folder.put[:at]
    assert len(folder.files) == 1
    assert len(folder.stubs) == 1
    folder.log.append([b"again"], durability="fsync")
    folder.engine.close()
    folder.put = [*folder.put[:at], b"again"]
    assert folder.after(folder.disk).read() == folder.put


def test_key_compaction_of_moved_segments_brings_back_what_it_rewrites():
    folder = TieredFolder()
    while len(folder.log.segments()) < 5:
        folder.log.append(Batch(values=[b"v" * 200, b"w" * 200], keys=[b"a", b"b"]), durability="fsync")
    folder.move()
    assert len(folder.files) == 1
    folder.log.compact_keys(before=folder.log.end, tombstone_ms=0)
    assert len(folder.files) > 1
    left = folder.read()
    assert len(left) < folder.log.end
    folder.move()
    assert len(folder.files) == 1
    assert folder.read() == left


def test_a_group_gets_messages_from_moved_segments():
    folder = TieredFolder()
    topic = folder.engine.open_topic("jobs")
    group = topic.group("workers")
    folder.fill()
    folder.move()
    got = group.receive(len(folder.put), lease_ms=1_000, holder="", detached=False) or []
    assert [bytes(each.record.value) for _, messages in got for each in messages] == folder.put


def test_neither_check_nor_repair_takes_a_store_that_does_not_answer_for_damage():
    folder = tiered()
    assert check_folder(FOLDER, folder.world).ok
    folder.engine.close()
    after = folder.after(folder.disk)
    for name in [name for name in folder.disk.names(f"{FOLDER}/tier") if "-" in name]:
        folder.disk.remove(f"{FOLDER}/tier/{name}")
    after.store.is_cut = True
    with pytest.raises(Unavailable, match="did not return it"):
        check_folder(FOLDER, after.world)
    after.engine.close()
    with pytest.raises(Unavailable, match="did not return it"):
        repair_folder(FOLDER, after.world)
    after.store.is_cut = False
    assert check_folder(FOLDER, after.world).ok


def test_ages_and_sizes_are_told_while_the_store_does_not_answer():
    folder = TieredFolder()
    folder.engine.open_topic("jobs").group("workers")
    folder.fill()
    folder.move()
    folder.clock.advance(seconds=30)
    folder.store.is_cut = True
    info = describe(folder.engine, folder.engine.open_topic("jobs"))
    assert info.partitions[0].tiered_bytes == 4 * 4096
    assert info.partitions[0].bytes > info.partitions[0].tiered_bytes
    assert groups_on(folder.engine, folder.engine.open_topic("jobs"))[0].lag_seconds >= 30
    assert folder.tier.fetched == 0


def test_a_backup_has_what_has_moved_and_fetches_it_once():
    folder = tiered()
    with captured(folder.engine.world, FOLDER) as source:
        paths = [file.path for file in source.files]
        assert not [path for path in paths if path.startswith("tier/") or path.endswith(".stub")]
        moved = [i for i, path in enumerate(paths) if path.startswith("topics/jobs/0/log/") and path.endswith(".log")]
        assert len(moved) == 5
        assert all(source.files[i].stamp for i in moved[:-1]), "the next backup knows them again"
        assert folder.tier.fetched == 0
        content = source.read(moved[0], 0, 1 << 20)
        assert folder.put[0] in content


def test_a_stub_is_as_it_was_written():
    """The format of stubs: one that was written once must be read for good."""
    stub = Stub(place="s3://cold/jobs", key="tier/a-jobs-0-0-b", size=3, crc=910901175, sha256="ba78", cache="../tier")
    written = (
        b'12c1786c {"place":"s3://cold/jobs","key":"tier/a-jobs-0-0-b","size":3,"sha256":"ba78","cache":"../tier",'
        b'"crc":910901175,"version":1}\n'
    )
    assert stub.encode() == written
    assert Stub.parse(written) == stub
    assert stub.matches(b"abc")
    for damaged in (b"", b"x", written[1:], written.replace(b"jobs", b"jabs")):
        with pytest.raises(ValueError, match=r"checksum|base 16"):
            Stub.parse(damaged)


@pytest.mark.parametrize("place", ["memory://x", "/a/folder", "ftp://host/x"])
def test_a_tier_must_be_a_store_that_lasts(place, tmp_path):
    with pytest.raises(BadSettings, match="tier="):
        BrokerEngine.open(tmp_path / "jobs", settings=BrokerSettings(tier=place))


def test_limits_without_a_store_are_refused(tmp_path):
    engine = BrokerEngine.open(tmp_path / "jobs")
    with pytest.raises(BadSettings, match="HOLDFAST_BROKER_TIER"):
        engine.create_topic("jobs", None, {"tier_after_bytes": 0})
    engine.create_topic("jobs")
    with pytest.raises(BadSettings, match="HOLDFAST_BROKER_TIER"):
        engine.alter_topic("jobs", {"tier_after_ms": 1})
    engine.close()


def test_whoever_reads_on_finds_the_next_segment_fetched(tmp_path):
    store = MemoryStore(PLACE)
    tier = TieredDisk(RealDisk(), lambda _: (store, ""), read_ahead=True)
    world = msgspec.structs.replace(real_world(), disk=tier, tier=tier)
    topic = TopicSettings(segment_bytes=4096, min_free_bytes=0, tier_after_bytes=0)
    engine = BrokerEngine.open(tmp_path / "jobs", settings=BrokerSettings(tier=PLACE, topic=topic), world=world)
    engine.create_topic("jobs")
    log = engine.open_topic("jobs").partitions[0].log
    while len(log.segments()) < 6:
        log.append([bytes(500)], durability="os")
    engine.tiering.tick()
    bases = [segment.base_offset for segment in log.segments()]

    next(log.records(bases[0]))
    assert tier.fetched == 1
    next(log.records(bases[1]))  # the second in a row
    ahead = tmp_path / "jobs" / "tier" / tier.stubs(log.folder)[f"{bases[2]:020}.log"].cached_name
    until = time.monotonic() + 60
    while not ahead.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert ahead.exists()
    assert tier.fetched == 3
    engine.close()
