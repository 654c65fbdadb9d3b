"""What the batches of a stream read: limits, new partitions, what was lost, on a disk that can lose power."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict

import holdfast
from holdfast.broker.streams.queries import QueryLease, list_queries
from holdfast.env import SeededIds, World
from holdfast.errors import HoldfastError, InvalidRequest, OffsetOutOfRange, TailLost, UnknownTopic
from holdfast.model import LogPosition
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.options import stream_read_options
from holdfast.spark.ranges import (
    DataFolder,
    Positions,
    Range,
    StreamPlanner,
    TopicPositions,
    batch_ranges,
    from_json,
    splits,
    to_json,
)
from holdfast.storage.segment import Segment
from tests.unit.brokers import FOLDER, Place

SETTINGS = BrokerSettings(topic=TopicSettings(min_free_bytes=0, segment_bytes=4096))


class Stream:
    """A query that plans one batch after the other, as Spark would."""

    def __init__(self, place: Place, **options: str) -> None:
        self.place = place
        self.given = {"path": FOLDER, "topic": "orders", "startingOffsets": "earliest", **options}
        self.admission = self.plan()
        self.at = self.admission.initial()

    def plan(self) -> StreamPlanner:
        options = stream_read_options(CaseInsensitiveDict(self.given), 0)
        return StreamPlanner(DataFolder(FOLDER, self.place.world), options)

    def batch(self, most: int | None = None) -> list[Range]:
        """The next batch, by way of a checkpoint."""
        end = self.admission.latest(self.at, most)
        end = from_json(msgspec.json.decode(msgspec.json.encode(to_json(end))))
        ranges = self.admission.ranges(self.at, end)
        self.at = end
        return ranges


def place_with(partitions: int = 1, **options: Any) -> Place:
    place = Place(settings=SETTINGS)
    place.broker.create_topic("orders", partitions=partitions, **options)
    return place


def fill(place: Place, count: int, partition: int = 0, size: int = 10) -> None:
    for _ in range(count):
        place.broker.publish("orders", bytes(size), partition=partition)


def test_a_stream_reads_each_offset_once_also_of_partitions_that_come_later() -> None:
    place = place_with(2)
    fill(place, 3, 0)
    fill(place, 2, 1)
    stream = Stream(place)
    assert stream.batch() == [Range("orders", 0, 0, 3), Range("orders", 1, 0, 2)]
    assert stream.batch() == []
    place.broker.alter_topic("orders", partitions=3)
    fill(place, 1, 0)
    fill(place, 4, 2)
    assert stream.batch() == [Range("orders", 0, 3, 4), Range("orders", 2, 0, 4)]


def test_a_stream_that_begins_at_the_end_reads_what_comes() -> None:
    place = place_with(2)
    fill(place, 3, 0)
    stream = Stream(place, startingOffsets="latest")
    assert stream.batch() == []
    fill(place, 1, 0)
    fill(place, 1, 1)
    assert stream.batch() == [Range("orders", 0, 3, 4), Range("orders", 1, 0, 1)]


def test_a_new_topic_that_fits_the_pattern_is_read_from_its_beginning() -> None:
    place = place_with()
    stream = Stream(place, topic="", subscribePattern="or.*")
    place.broker.create_topic("organs")
    place.broker.create_topic("other")
    place.broker.publish("organs", b"x")
    place.broker.publish("other", b"x")
    assert stream.batch() == []  # noted
    assert stream.batch() == [Range("organs", 0, 0, 1)]
    assert stream.batch() == []


def test_a_limit_is_shared_out_by_what_each_partition_has() -> None:
    place = place_with(3)
    fill(place, 80, 0)
    fill(place, 20, 1)
    fill(place, 1, 2)
    stream = Stream(place)
    assert stream.batch(10) == [Range("orders", 0, 0, 7), Range("orders", 1, 0, 1), Range("orders", 2, 0, 1)]
    read = 9
    while ranges := stream.batch(10):
        read += sum(wanted.stop - wanted.start for wanted in ranges)
    assert read == 101


def test_a_limit_of_bytes_ends_a_batch() -> None:
    place = place_with()
    fill(place, 200, size=500)
    stream = Stream(place, maxBytesPerTrigger="20k")
    sizes = []
    while ranges := stream.batch():
        sizes += [wanted.stop - wanted.start for wanted in ranges]
    assert sum(sizes) == 200
    assert max(sizes) <= 40
    assert min(sizes[:-1]) >= 20


def test_one_large_message_is_read_whatever_the_limit() -> None:
    place = place_with()
    fill(place, 3, size=3000)
    stream = Stream(place, maxBytesPerTrigger="1")
    assert [stream.batch() for _ in range(3)] == [[Range("orders", 0, i, i + 1)] for i in range(3)]


def test_with_available_now_a_run_ends_at_what_was_there() -> None:
    place = place_with()
    fill(place, 5)
    stream = Stream(place)
    stream.admission.freeze()
    fill(place, 5)
    assert stream.batch(3) == [Range("orders", 0, 0, 3)]
    assert stream.batch(3) == [Range("orders", 0, 3, 5)]
    assert stream.batch(3) == []


def test_what_retention_took_is_an_error_that_names_it() -> None:
    place = place_with()
    stream = Stream(place)
    fill(place, 100, size=500)
    place.broker._port.engine.topic("orders").partition(0).log.trim(50)
    with pytest.raises(OffsetOutOfRange, match=r"messages of orders/0 are gone.*failOnDataLoss"):
        stream.batch()


def test_with_leave_to_skip_the_loss_is_counted_once_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    place = place_with()
    stream = Stream(place, failOnDataLoss="false")
    fill(place, 100, size=500)
    log = place.broker._port.engine.topic("orders").partition(0).log
    log.trim(50)
    with caplog.at_level(logging.WARNING):
        assert stream.batch() == [Range("orders", 0, log.start, 100)]
    assert caplog.messages == [
        f"{log.start} messages of orders/0 are gone, offsets 0 to {log.start - 1}: the stream continues after them"
    ]


def lose_a_tail(place: Place) -> None:
    """Ten messages are read before they are on disk, and a power cut takes them; ten others come."""
    fill(place, 5)
    place.broker.sync()
    for _ in range(10):
        place.broker.publish("orders", b"lost", partition=0, durability="os")


def after_the_cut(place: Place) -> None:
    """Of the ways in which the power can go, one that takes all that was not synced."""
    for seed in range(1000):
        disk = place.disk.cut(Random(seed))
        world = World(clock=place.clock, disk=disk, ids=SeededIds(2))
        with holdfast.open_broker(FOLDER, world=world, settings=SETTINGS) as broker:
            if broker.describe_topic("orders").partitions[0].end == 5:
                break
    else:
        raise AssertionError("no cut takes the tail")
    place.disk, place.ids = disk, SeededIds(2)
    place.broker = place.open()
    fill(place, 20)


def test_a_tail_lost_in_a_power_cut_is_reported_never_skipped_over() -> None:
    place = place_with()
    lose_a_tail(place)
    stream = Stream(place)
    assert stream.batch() == [Range("orders", 0, 0, 15)]
    after_the_cut(place)
    stream.admission = stream.plan()
    with pytest.raises(TailLost, match="10 messages of orders/0 that this query has read, offsets 5 to 14"):
        stream.batch()


def test_with_leave_to_skip_the_stream_goes_on_where_the_lost_tail_began() -> None:
    place = place_with()
    lose_a_tail(place)
    stream = Stream(place, failOnDataLoss="false")
    stream.batch()
    after_the_cut(place)
    stream.admission = stream.plan()
    assert stream.batch() == [Range("orders", 0, 5, 25)]
    assert stream.batch() == []


def test_a_batch_that_was_planned_into_a_lost_tail_is_not_read_short() -> None:
    place = place_with()
    lose_a_tail(place)
    stream = Stream(place)
    start = stream.at
    end = stream.admission.latest(start, None)
    after_the_cut(place)
    with pytest.raises(TailLost):
        stream.plan().ranges(start, end)


def test_a_checkpoint_of_another_topic_is_refused() -> None:
    place = place_with()
    place.broker.create_topic("other")
    stream = Stream(place)
    stream.given["topic"] = "other"
    with pytest.raises(InvalidRequest, match="the checkpoint is of topic orders, and this query reads other"):
        stream.plan().latest(stream.at, None)


def test_a_checkpoint_of_a_topic_that_was_made_anew_is_refused() -> None:
    place = place_with()
    stream = Stream(place)
    place.broker.delete_topic("orders")
    place.broker.create_topic("orders")
    with pytest.raises(InvalidRequest, match="deleted and recreated"):
        stream.plan().latest(stream.at, None)


def test_a_checkpoint_of_another_folder_is_refused_in_words() -> None:
    place = place_with()
    topic_id = DataFolder(FOLDER, place.world).topic_id("orders")
    elsewhere = Positions({"orders": TopicPositions(topic_id, {7: LogPosition(1, 3)})})
    with pytest.raises(InvalidRequest, match="the checkpoint knows orders/7"):
        Stream(place).admission.ranges(Positions(), elsewhere)


@pytest.mark.parametrize("document", [{}, {"version": 2}, {"0": 5}, {"version": 1, "topics": {"a": {"id": "x"}}}])
def test_offsets_that_are_not_ours_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="checkpoint"):
        from_json(document)


def test_a_position_is_the_same_text_however_it_came_about() -> None:
    one = Positions({"b": TopicPositions(1, {10: LogPosition(1, 2), 9: LogPosition(1, 1)}), "a": TopicPositions(2)})
    other = Positions({"a": TopicPositions(2), "b": TopicPositions(1, {9: LogPosition(1, 1), 10: LogPosition(1, 2)})})
    assert msgspec.json.encode(to_json(one)) == msgspec.json.encode(to_json(other))


def test_a_folder_or_topic_that_is_not_there_is_named() -> None:
    place = place_with()
    with pytest.raises(HoldfastError, match="there is no folder /nowhere"):
        DataFolder("/nowhere", place.world)
    with pytest.raises(UnknownTopic, match=r"there is no topic nix in .*; known topics: orders"):
        Stream(place, topic="nix")
    with pytest.raises(UnknownTopic, match="no partition 5"):
        Stream(place, topic="", assign='{"orders": [5]}')


def test_offsets_must_be_given_for_what_is_read_and_nothing_else() -> None:
    place = place_with(2)
    with pytest.raises(UnknownTopic, match="does not say where orders/1"):
        Stream(place, startingOffsets='{"orders": {"0": 0}}')
    with pytest.raises(UnknownTopic, match="names orders/2"):
        Stream(place, startingOffsets='{"orders": {"0": 0, "1": 0, "2": 0}}')


def ranges_of(place: Place, **options: str) -> list[Range]:
    from holdfast.spark.options import batch_read_options

    given = CaseInsensitiveDict({"path": FOLDER, "topic": "orders", **options})
    return batch_ranges(DataFolder(FOLDER, place.world), batch_read_options(given, 0))


def test_a_batch_reads_between_offsets_or_times() -> None:
    place = place_with()
    fill(place, 3)
    place.clock.advance(seconds=60)
    moment = str(place.clock.now_ns() // 1_000_000)
    fill(place, 4)
    place.clock.advance(seconds=60)
    later = str(place.clock.now_ns() // 1_000_000)
    fill(place, 1)
    assert ranges_of(place) == [Range("orders", 0, 0, 8)]
    assert ranges_of(place, startingTimestamp=moment) == [Range("orders", 0, 3, 8)]
    assert ranges_of(place, startingTimestamp=moment, endingTimestamp=later) == [Range("orders", 0, 3, 7)]
    assert ranges_of(place, startingOffsets='{"orders":{"0":2}}', endingOffsets='{"orders":{"0":5}}') == [
        Range("orders", 0, 2, 5)
    ]
    assert ranges_of(place, startingOffsets="latest") == []
    with pytest.raises(OffsetOutOfRange, match=r'option "startingOffsets" says 99 for orders/0, which ends at 8'):
        ranges_of(place, startingOffsets='{"orders":{"0":99}}')


def test_a_batch_reads_between_times_of_each_partition() -> None:
    place = place_with(2)
    fill(place, 3, 0)
    fill(place, 2, 1)
    place.clock.advance(seconds=60)
    moment = place.clock.now_ns() // 1_000_000
    fill(place, 4, 0)
    times = f'{{"orders": {{"0": {moment}, "1": 0}}}}'
    assert ranges_of(place, startingOffsetsByTimestamp=times) == [Range("orders", 0, 3, 7), Range("orders", 1, 0, 2)]
    assert ranges_of(place, endingOffsetsByTimestamp=times) == [Range("orders", 0, 0, 3)]
    beyond = f'{{"orders": {{"0": 0, "1": {moment}}}}}'
    with pytest.raises(OffsetOutOfRange, match=f"orders/1 has no message of the time {moment} "):
        ranges_of(place, startingOffsetsByTimestamp=beyond)
    with pytest.raises(OffsetOutOfRange, match="orders/1 has no message"):
        ranges_of(place, startingTimestamp=str(moment), startingOffsetsByTimestampStrategy="error")
    found = ranges_of(place, startingOffsetsByTimestamp=beyond, startingOffsetsByTimestampStrategy="latest")
    assert found == [Range("orders", 0, 0, 7)]
    with pytest.raises(UnknownTopic, match='"startingOffsetsByTimestamp" does not say where orders/1'):
        ranges_of(place, startingOffsetsByTimestamp='{"orders": {"0": 0}}')


@pytest.mark.parametrize("sizes", [(100, 1, 1), (7, 7, 7), (1, 2, 97), (50, 49, 1)])
def test_there_are_as_many_tasks_as_asked_and_none_has_more_than_asked(sizes: tuple[int, ...]) -> None:
    place = place_with(3)
    for number, count in enumerate(sizes):
        fill(place, count, number)
    folder, whole = DataFolder(FOLDER, place.world), ranges_of(place)
    for least in range(3, 22):
        parts = splits(folder, whole, least)
        assert len(parts) == min(least, sum(sizes))
        assert sum(part.messages for part in parts) == sum(sizes)
        assert all(part.messages for part in parts)
    assert len(splits(folder, whole, 10_000)) == sum(sizes)
    assert max(part.messages for part in splits(folder, whole, 0, 10)) <= 10


def test_tasks_follow_segments_and_more_are_cut_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_with()
    fill(place, 100, size=500)
    folder = DataFolder(FOLDER, place.world)
    whole = [Range("orders", 0, 0, 100)]
    assert splits(folder, whole, 0) == whole
    parts = splits(folder, whole, 7)
    assert len(parts) == 7
    monkeypatch.setattr("holdfast.spark.ranges._TASK_BYTES", 1)
    by_segment = splits(folder, whole, 0)
    bases = [segment.base_offset for segment in place.broker._port.engine.topic("orders").partition(0).log.segments()]
    assert [part.start for part in by_segment] == bases
    for found in (parts, by_segment):
        assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
        assert (found[0].start, found[-1].stop) == (0, 100)


def test_tasks_become_larger_where_there_would_be_many_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_with()
    fill(place, 400, size=500)
    folder, whole = DataFolder(FOLDER, place.world), [Range("orders", 0, 0, 400)]
    segments = len(place.broker._port.engine.topic("orders").partition(0).log.segments())
    monkeypatch.setattr("holdfast.spark.ranges._TASK_BYTES", 1)
    monkeypatch.setattr("holdfast.spark.ranges._MANY_TASKS", 4)
    parts = splits(folder, whole, 0)
    assert 4 <= len(parts) <= segments // 2
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    monkeypatch.setattr("holdfast.spark.ranges._MOST_TASK_BYTES", 1)
    assert len(splits(folder, whole, 0)) == segments


def test_the_head_of_a_new_partition_that_is_gone_before_it_was_read_is_a_loss() -> None:
    place = place_with()
    stream = Stream(place)
    stream.batch()
    place.broker.alter_topic("orders", partitions=2)
    fill(place, 100, 1, size=500)
    log = place.broker._port.engine.topic("orders").partition(1).log
    log.trim(50)
    with pytest.raises(OffsetOutOfRange, match=f"{log.start} messages of orders/1 are gone"):
        stream.batch()


def test_a_topic_that_is_new_to_the_query_is_read_from_where_it_was_noted() -> None:
    place = place_with()
    place.broker.create_topic("organs")
    for _ in range(100):
        place.broker.publish("organs", bytes(500))
    log = place.broker._port.engine.topic("organs").partition(0).log
    log.trim(50)
    stream = Stream(place)
    stream.given |= {"topic": "", "subscribe": "orders,organs"}
    stream.admission = stream.plan()
    first = log.start
    assert stream.batch() == []
    assert stream.at.at("organs", 0) == LogPosition(1, first)
    log.trim(80)
    with pytest.raises(OffsetOutOfRange, match="messages of organs/0 are gone"):
        stream.batch()


def test_what_is_gone_is_told_once_over_restarts(caplog: pytest.LogCaptureFixture) -> None:
    place = place_with()
    stream = Stream(place, failOnDataLoss="false")
    fill(place, 100, size=500)
    log = place.broker._port.engine.topic("orders").partition(0).log
    log.roll()
    log.trim(100)
    with caplog.at_level(logging.WARNING):
        assert stream.batch() == []
        stream.admission = stream.plan()
        assert stream.batch() == []
    assert [message for message in caplog.messages if "gone" in message] == [
        "100 messages of orders/0 are gone, offsets 0 to 99: the stream continues after them"
    ]


def test_a_pattern_may_match_nothing_at_first() -> None:
    place = place_with()
    stream = Stream(place, topic="", subscribePattern=r"shop\..*", startingOffsets="latest")
    assert stream.batch() == []
    stream.admission.freeze()
    assert stream.batch() == []
    place.broker.create_topic("shop.orders")
    place.broker.publish("shop.orders", b"x")
    assert stream.batch() == []
    stream.admission = stream.plan()
    assert stream.batch() == []
    assert stream.batch() == [Range("shop.orders", 0, 0, 1)]


def test_partitions_that_are_not_assigned_are_not_held() -> None:
    place = place_with(3)
    stream = Stream(place, topic="", assign='{"orders": [1]}')
    place.broker.alter_topic("orders", partitions=4)
    lease = QueryLease.start(place.world, FOLDER, "report")
    lease.hold(stream.admission.unread(stream.at))
    [query] = list_queries(place.world, FOLDER)
    topic_id = stream.admission.folder.topic_id("orders")
    assert [query.floor("orders", topic_id, number) for number in range(4)] == [None, 0, None, None]
    fill(place, 2, 1)
    fill(place, 2, 2)
    assert stream.batch() == [Range("orders", 1, 0, 2)]


def test_an_offset_in_a_partition_without_messages_is_refused() -> None:
    place = place_with(2)
    fill(place, 3, 0)
    offsets = '{"orders": {"0": 2, "1": 1}}'
    for read in (lambda: Stream(place, startingOffsets=offsets), lambda: ranges_of(place, endingOffsets=offsets)):
        with pytest.raises(OffsetOutOfRange, match="says 1 for orders/1, which ends at 0"):
            read()


def test_planning_looks_only_at_what_a_batch_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_with()
    fill(place, 400, size=500)
    stream = Stream(place, maxBytesPerTrigger="8k")
    stream.batch()
    opened = []
    index_to = Segment.index_to
    monkeypatch.setattr(Segment, "index_to", lambda segment, to: opened.append(segment) or index_to(segment, to))
    assert stream.batch()
    assert len({segment.base_offset for segment in opened}) <= 4


def test_many_partitions_get_about_as_many_tasks_as_are_wanted() -> None:
    ranges = [Range("orders", number, 0, 1 + number % 3) for number in range(100)]
    folder = DataFolder(FOLDER, place_with(100).world)
    assert splits(folder, [], 10) == []
    for wanted in (1, 100, 130, 1000):
        parts = splits(folder, ranges, wanted)
        assert sum(part.stop - part.start for part in parts) == sum(each.stop - each.start for each in ranges)
        assert all(part.start < part.stop for part in parts)


def old_messages() -> Place:
    """A topic whose messages retention may take by now."""
    place = place_with(retention_ms=1_000)
    fill(place, 30, size=1_000)
    place.clock.advance(seconds=60)
    return place


def test_what_a_new_stream_is_told_stays_though_retention_runs_between_any_two_steps() -> None:
    """The owner has asked who needs its oldest segment, and removes it; meanwhile a query comes and looks."""
    changes: list[str] = []
    place = old_messages()
    place.disk.on_call = changes.append
    place.engine.topic("orders").retain()
    place.disk.on_call = None
    place.close()
    assert changes.count("remove") > 5
    for moment in range(len(changes)):
        place, calls, streams = old_messages(), iter(range(len(changes))), []

        def come(call: str, place: Place = place, calls: Any = calls, streams: list[Any] = streams) -> None:
            if next(calls) == moment:  # noqa: B023
                place.disk.on_call = None
                lease = QueryLease.start(place.world, FOLDER, "lake", lasting=True)
                lease.hold({"orders": (place.engine.topic("orders").id, {})})
                streams.append(Stream(place))

        place.disk.on_call = come
        place.engine.topic("orders").retain()
        place.disk.on_call = None
        place.engine.topic("orders").retain()
        (stream,) = streams
        stream.batch()  # raises where something of it is gone
        place.close()
