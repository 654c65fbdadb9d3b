"""Commits of the sink that come late, or twice, or after others changed what they meant: no row is lost or doubled."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from holdfast.errors import CorruptData, InvalidRequest, MessageTooLarge, Unavailable  # noqa: E402
from holdfast.spark.commits import Staging  # noqa: E402
from holdfast.spark.incoming import Targets  # noqa: E402
from holdfast.spark.source import _slabs, batch_number  # noqa: E402
from tests.unit.sinks import ROOT, SETTINGS, Shop, batch_of  # noqa: E402

HOUR_MS = 3_600_000
SMALL = {"frame_bytes": 1024, "segment_bytes": 4096}


def cut_before_done(shop: Shop, *staged, **changes) -> Shop:
    """The folder as a commit leaves it that is killed just before it notes its end."""
    disks = []
    shop.disk.on_call = lambda call: disks.append(shop.disk.kill())
    shop.commit(*staged, **changes)
    shop.disk.on_call = None
    left = [disk for disk in disks if not disk.exists(f"{ROOT}/staging/query/done.json")]
    return Shop(left[-1])


# A commit that is resumed finds what it wrote, whatever happened in between


def fill_and_wait(shop: Shop) -> None:
    """Others publish so much that the segments could go, and time passes."""
    with shop.broker() as broker:
        for _ in range(8):
            broker.publish("orders", b"other" + bytes(1000))
        shop.clock.advance(ms=2 * HOUR_MS)
        broker._port.engine.tick()


def test_retention_does_not_take_what_a_commit_cut_short_must_find():
    shop = Shop(**SMALL, retention_ms=HOUR_MS, retention_check_ms=1_000)
    cut = cut_before_done(shop, shop.stage(batch_of([b"a", b"b"])))
    fill_and_wait(cut)
    assert cut.values()[:2] == [b"a", b"b"]
    cut.write(batch_of([b"a", b"b"]))
    assert cut.values().count(b"a") == 1
    fill_and_wait(cut)
    assert b"a" not in cut.values()


def test_a_commit_that_nobody_resumes_holds_retention_up_for_a_week():
    shop = Shop(**SMALL, retention_ms=HOUR_MS, retention_check_ms=1_000)
    cut = cut_before_done(shop, shop.stage(batch_of([b"a", b"b"])))
    cut.clock.advance(ms=8 * 24 * HOUR_MS)
    fill_and_wait(cut)
    assert b"a" not in cut.values()


def test_compaction_does_not_take_what_a_commit_cut_short_must_find():
    shop = Shop(**SMALL, cleanup="compact", trace_sample=1.0)
    cut = cut_before_done(shop, shop.stage(batch_of([b"old"], key=[b"k"])))
    with cut.broker() as broker:
        for _ in range(8):
            broker.publish("orders", b"new" + bytes(1000), key=b"k")
        partition = broker._port.engine.topic("orders").partitions[0]
        partition.log.compact_keys(before=partition.log.end, tombstone_ms=0)
    cut.write(batch_of([b"old"], key=[b"k"]))
    assert cut.values()[-1] != b"old"


def test_delayed_rows_that_were_put_away_meanwhile_are_found():
    shop = Shop()
    rows = batch_of([b"a", b"b"], delay=pa.array([60.0, 60.0]))
    cut = cut_before_done(shop, shop.stage(rows))
    with cut.broker() as broker:
        store = broker._port.engine.topic("orders").partitions[0].delayed
        assert store.spill(cut.clock.now_ns() // 1_000_000) == 2
        assert store.intake.start == 2
    cut.write(rows)
    with cut.broker() as broker:
        assert len(broker._port.engine.topic("orders").partitions[0].delayed) == 2


def test_rows_that_were_duplicates_are_not_written_by_a_commit_that_is_resumed_after_the_window():
    shop = Shop()
    rows = batch_of([b"a", b"again", b"c"], dedup_id=["1", "1", "2"])
    cut = cut_before_done(shop, shop.stage(rows))
    cut.clock.advance(ms=30 * 24 * HOUR_MS)
    cut.write(rows)
    assert cut.values() == [b"a", b"c"]


def test_rows_of_a_topic_that_was_deleted_meanwhile_went_with_it():
    shop = Shop()
    with shop.broker() as broker:
        broker.create_topic("others")
    rows = batch_of([b"a", b"b"], topic=["orders", "others"])
    cut = cut_before_done(shop, shop.stage(rows, topic=None), topic=None)
    with cut.broker() as broker:
        broker.delete_topic("orders")
        broker.create_topic("orders")
    cut.write(batch_of([b"c"]), batch=1)
    assert cut.values() == [b"c"]
    assert cut.values("others") == [b"b"]


def test_urgent_rows_of_compressed_frames_can_be_committed():
    shop = Shop(codec="zstd")
    shop.write(batch_of([bytes(1000)] * 50, priority=pa.array([5] * 50, pa.int32())))
    shop.write(batch_of([bytes(1000)] * 50, delay=pa.array([0.001] * 50)), batch=1)
    assert len(shop.values()) == 50


# Others who write at the same time


def test_a_topic_that_somebody_makes_while_tasks_run_has_each_row_once_after_a_crash():
    shop = Shop()
    options = {"topic": "new", "new_partitions": 1}
    first = shop.stage(batch_of([b"a", b"b"]), task=0, **options)
    with shop.broker() as broker:
        broker.create_topic("new")
    second = shop.stage(batch_of([b"c"]), task=1, **options)
    cut = cut_before_done(shop, first, second, **options)
    cut.write(batch_of([b"c", b"b", b"a"]), **options)
    assert cut.values("new") == [b"a", b"b", b"c"]


def test_a_topic_that_somebody_makes_with_other_partitions_while_tasks_run_gets_no_rows():
    shop = Shop()
    options = {"topic": "new", "new_partitions": 1}
    staged = shop.stage(batch_of([b"a"]), **options)
    with shop.broker() as broker:
        broker.create_topic("new", partitions=4)
    with pytest.raises(Unavailable, match="has 4 partitions, and the rows were meant for 1"):
        shop.commit(staged, **options)
    assert shop.values("new") == []


# Batches that are not what they seem


def test_a_stream_whose_checkpoint_is_older_than_what_it_wrote_is_refused():
    shop = Shop()
    for number in range(3):
        shop.write(batch_of([b"%d" % number]), batch=number)
    shop.commit(shop.stage(batch_of([b"2"]), batch=2), streaming=True)  # the last one, once more
    with pytest.raises(InvalidRequest, match=r"batch 1 of query.*up to 2.*checkpoint"):
        shop.commit(shop.stage(batch_of([b"1 and more"]), batch=1), streaming=True)
    assert shop.values() == [b"0", b"1", b"2"]


def test_the_id_of_a_write_to_one_topic_is_refused_for_another():
    shop = Shop()
    with shop.broker() as broker:
        broker.create_topic("others")
    shop.write(batch_of([b"a"]), write="nightly")
    with pytest.raises(InvalidRequest, match=r"nightly.*orders.*others"):
        shop.write(batch_of([b"b"]), write="nightly", topic="others")
    assert shop.values("others") == []
    shop.write(batch_of([b"b"]), write="nightly", batch=1, topic="others")
    assert shop.values("others") == [b"b"]


def test_the_number_of_a_batch_must_fit_where_the_log_keeps_it():
    assert batch_number({"batchId": "20261116"}) == 20261116
    with pytest.raises(InvalidRequest, match=r'"batchId".*at most 2147483646'):
        batch_number({"batchId": "1763251200000"})


def test_a_batch_write_that_a_power_cut_ends_at_any_moment_leaves_nothing_that_cannot_be_finished(caplog):
    shop, order, disks = Shop(), random.Random(1), []
    staged = shop.stage(batch_of([b"a"]), write="batch-1")
    shop.disk.on_call = lambda call: disks.extend(shop.disk.cut(order) for _ in range(3))
    shop.commit(staged, kept=False)
    for disk in disks:
        again = Shop(disk)
        again.write(batch_of([b"b"]), write="batch-2")
        assert set(again.values()) <= {b"a", b"b"}
        assert not list(Staging(again.world, ROOT).pending())
    assert "cannot be finished" not in caplog.text


def test_whoever_cannot_repeat_a_write_is_told_that_it_counts_though_it_failed():
    shop = Shop()
    staged = shop.stage(batch_of([b"a" * 100]), write="batch-1")
    (name,) = shop.files()
    file = shop.disk.open(f"{ROOT}/staging/{name}", write=True)
    file.write(120, [b"?"])
    file.close()
    with pytest.raises(CorruptData, match=r"checksum.* committed nevertheless: do not write them again"):
        shop.commit(staged, kept=False)


def test_a_batch_whose_staged_rows_are_gone_is_not_committed_and_can_be_run_again():
    shop = Shop()
    staged = shop.stage(batch_of([b"a"]))
    (name,) = shop.files()
    shop.disk.remove(f"{ROOT}/staging/{name}")
    with pytest.raises(Unavailable, match="has 0 bytes, and a task staged 104 there"):
        shop.commit(staged)
    shop.write(batch_of([b"a"]))
    assert shop.values() == [b"a"]


def test_what_others_put_into_the_staging_area_is_left_alone():
    shop = Shop()
    shop.disk.make_folder(f"{ROOT}/staging")
    shop.disk.open(f"{ROOT}/staging/notes", write=True, create=True).close()
    shop.write(batch_of([b"a"]))
    assert sorted(shop.files()) == ["notes", "query/done.json"]


def test_rows_of_a_task_keep_their_order_whether_or_not_they_have_a_dedup_id():
    shop = Shop()
    shop.write(batch_of([b"a", b"b", b"c", b"d"], dedup_id=[None, "1", None, "2"]))
    assert shop.values() == [b"a", b"b", b"c", b"d"]
    large = bytes(1_000_000)
    slabs = [
        batch_of([b"%d" % number + large] * 5, dedup_id=pa.array([dedup_id] + [None] * 4, pa.string()))
        for number, dedup_id in enumerate([None, "3", None, "4"])
    ]
    shop.write(*slabs, batch=1)
    assert [value[:1] for value in shop.values()[4:]] == [b"0"] * 5 + [b"1"] * 5 + [b"2"] * 5 + [b"3"] * 5


# Odd columns


def test_a_row_without_a_time_to_live_has_that_of_its_topic_also_where_others_expire():
    shop = Shop(ttl_ms=5_000)
    moments = pa.array([datetime(1970, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC"))
    shop.write(batch_of([b"a", b"b"], expires_at=moments))
    first, second = shop.records()[0]
    assert first.expires_at_ms == 1  # long ago, which is not never
    assert second.expires_at_ms == second.timestamp_ns // 1_000_000 + 5_000


def test_record_batches_are_put_together_only_while_they_are_small():
    shop = Shop()
    sink, targets = shop.sink(topic=None), Targets(shop.world, ROOT, SETTINGS, None)
    big = batch_of([bytes(65 << 20)])
    slabs = _slabs(iter([batch_of([b"a"]), batch_of([b"b"]), big, batch_of([]), big]), sink._options, targets)
    assert [slab.num_rows for slab in slabs] == [2, 1, 1]


@pytest.mark.parametrize("columns", [{"delay": pa.array([60.0])}, {"dedup_id": pa.array(["1"])}, {}])
def test_a_row_as_large_as_its_topic_allows_can_be_committed_whichever_way_it_goes(columns):
    shop = Shop(max_message_bytes=1_000, trace_sample=0.0 if columns else 1.0)
    room = 1_000 - len("holdfast.dedup-id" + "1") * ("dedup_id" in columns)
    shop.write(batch_of([bytes(room)], **columns))
    with pytest.raises(MessageTooLarge, match="1001"):
        shop.stage(batch_of([bytes(room + 1)], **columns))


def test_many_rows_that_go_the_long_way_are_not_one_batch():
    shop = Shop(max_batch_bytes=50_000)
    shop.write(batch_of([bytes(1_000)] * 100, delay=pa.array([60.0] * 100)))
    with shop.broker() as broker:
        assert len(broker._port.engine.topic("orders").partitions[0].delayed) == 100
