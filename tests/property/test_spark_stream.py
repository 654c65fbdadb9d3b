"""A stream beside an owner, in any order of events: each message is delivered once, or the loss of it is an error.

Only files and a checkpoint are between the two, as with Spark, but without it: batches are planned, noted, read,
delivered and committed one by one, and the query may end after any of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict

from holdfast.broker.streams.queries import QueryLease
from holdfast.env import SeededIds
from holdfast.errors import OffsetOutOfRange, TailLost
from holdfast.model import Batch
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.options import ReadPolicy, stream_read_options
from holdfast.spark.ranges import DataFolder, Positions, StreamPlanner, from_json, splits, to_json
from holdfast.spark.readers import Maker, message_schema, record_batches
from tests.unit.brokers import FOLDER, Place

SETTINGS = BrokerSettings(topic=TopicSettings(min_free_bytes=0, segment_bytes=4096, frame_bytes=1024))
TTL_MS = 10_000
SCHEMA = message_schema(metadata=True, headers=False)
KEYS = [None, b"a", b"b"]

Where = tuple[str, int]


class Story:
    """Topics that grow, lose their heads to retention, their tails to power cuts, and middles to compaction."""

    def __init__(self, most: int | None, most_bytes: str) -> None:
        self.place = Place(settings=SETTINGS)
        self.most, self.most_bytes = most, most_bytes
        self.number = 0
        self.published: dict[Where, dict[int, tuple[bytes, bytes | None]]] = {}
        self.add_topic("orders")
        self.start_over()

    def log(self, where: Where) -> Any:
        return self.place.engine.topic(where[0]).partition(where[1]).log

    def add_topic(self, topic: str) -> None:
        self.place.broker.create_topic(topic)
        self.published[topic, 0] = {}

    def some_log(self, rng: Random) -> Any:
        return self.log(rng.choice(list(self.published)))

    def grow(self, rng: Random) -> None:
        """Another topic, or another partition of one."""
        if rng.random() < 0.3 and ("organs", 0) not in self.published:
            self.add_topic("organs")
        elif len(self.published) < 4:
            topic, _ = rng.choice(list(self.published))
            count = sum(1 for name, _ in self.published if name == topic)
            self.place.broker.alter_topic(topic, partitions=count + 1)
            self.published[topic, count] = {}

    def publish(self, rng: Random) -> None:
        where, size = rng.choice(list(self.published)), rng.choice([10, 10, 400])
        values = [b"%d" % (self.number + n) + bytes(size) for n in range(rng.choice([1, 1, 3, 30]))]
        self.number += len(values)
        batch = Batch(values=values, keys=rng.choices(KEYS, k=len(values)))
        appended = self.log(where).append(batch, durability=rng.choice(["os", "os", "fsync"]))
        self.published[where] |= dict(enumerate(zip(values, batch.keys, strict=True), appended.offset))

    def trim(self, rng: Random) -> None:
        """Retention, which asks what the query needs."""
        log = self.some_log(rng)
        if rng.random() < 0.7:
            log.roll()
        log.trim(rng.randint(0, log.end))

    def compact(self, rng: Random) -> None:
        log = self.some_log(rng)
        log.roll()
        log.compact_keys(before=log.end, tombstone_ms=0, min_saving_percent=0)

    def end_owner(self, rng: Random) -> None:
        """Another one comes. The query and its readers go on only if all was in order."""
        how = rng.choice(["in order", "killed", "power cut", "power cut"])
        if how == "in order":
            self.place.reopen()
        elif how == "killed":  # the simulated disk is another one then, so the query begins anew with it
            self.place.kill()
            self.restart_query()
        else:
            self.cut_the_power(rng)

    def cut_the_power(self, rng: Random) -> None:
        self.place.disk = self.place.disk.cut(rng)
        self.place.ids = SeededIds(self.number + 1)
        self.place.ids.reboot()
        self.place.broker = self.place.open()
        for where, messages in self.published.items():
            end = self.log(where).end
            reached = [from_json(noted) for noted in (self.committed, self.planned) if noted is not None]
            self.tail_is_lost |= any(offset_at(positions, where) > end for positions in reached)
            for offset in [offset for offset in messages if offset >= end]:
                del messages[offset]
        self.restart_query()

    def start_over(self) -> None:
        """A new query with a new checkpoint."""
        self.delivered: dict[Where, dict[int, bytes]] = {}
        self.began: dict[str, dict[int, int]] = {}
        self.committed: Any = None
        self.planned: Any = None
        self.tail_is_lost = False
        self.restart_query()

    def end_query(self, rng: Random) -> None:
        """Another one goes on with its checkpoint, maybe after what the pin has left is too old to count."""
        self.restart_query()
        if rng.random() < 0.5:
            self.place.clock.advance(ms=TTL_MS)
        if rng.random() < 0.3:
            self.admission.freeze()

    def restart_query(self) -> None:
        given = {"path": FOLDER, "subscribePattern": "or.*", "startingOffsets": "earliest"}
        options = stream_read_options(CaseInsensitiveDict({**given, "maxBytesPerTrigger": self.most_bytes}), 0)
        self.folder = DataFolder(FOLDER, self.place.world)
        self.admission = StreamPlanner(self.folder, options)
        self.lease: QueryLease | None = None

    def hold(self, positions: Positions) -> None:
        if self.lease is None:
            self.lease = QueryLease.start(self.place.world, FOLDER, "stream", ttl_ms=TTL_MS)
        assert self.lease.hold(self.admission.unread(positions))
        self.held_from = {where: self.log(where).start for where in self.published}

    def go_on(self, rng: Random) -> None:
        """Some batches; now and then one is planned or delivered, and the query ends before it is noted."""
        for _ in range(rng.randint(1, 4)):
            if self.planned is None:
                self.plan()
            if self.planned is not None and rng.random() < 0.9:
                self.run(commit=rng.random() < 0.8, tasks=rng.randint(0, 3))

    def plan(self) -> None:
        """What Spark notes before it runs a batch."""
        if self.committed is None:
            self.hold(Positions())
            self.committed = noted(self.admission.initial())
            self.note_beginnings()
        start = from_json(self.committed)
        starts = {} if self.lease is None else self.held_from
        self.hold(start)
        with self.refused_rightly(start, starts):
            end = noted(self.admission.latest(start, self.most))
            self.planned = None if end == self.committed else end

    def run(self, commit: bool, tasks: int) -> None:
        """Read and deliver the batch; without the commit it is run again, by this query or the next."""
        start, end = from_json(self.committed), from_json(self.planned)
        starts = {} if self.lease is None else self.held_from
        self.hold(start)
        with self.refused_rightly(start, starts):
            ranges = splits(self.folder, self.admission.ranges(start, end), tasks)
            rows = [
                row
                for wanted in ranges
                for batch in record_batches(DataFolder(FOLDER, self.place.world), wanted, Maker(SCHEMA), ReadPolicy())
                for row in batch.to_pylist()
            ]
            if commit:
                self.committed, self.planned = self.planned, None
                self.note_beginnings()
                self.deliver(rows)
                event("a batch with rows" if rows else "a batch without rows")

    def note_beginnings(self) -> None:
        """A partition of a topic that is known is read from its beginning, wherever that was when the topic came."""
        for topic, known in from_json(self.committed).topics.items():
            self.began.setdefault(topic, {number: at.offset for number, at in known.partitions.items()})

    def deliver(self, rows: list[dict[str, Any]]) -> None:
        assert not self.tail_is_lost, "a lost tail was passed over"
        for row in rows:
            messages = self.delivered.setdefault((row["topic"], row["partition"]), {})
            assert row["offset"] not in messages, "delivered twice"
            assert not messages or row["offset"] > max(messages), "out of order"
            messages[row["offset"]] = row["value"]
        for where, messages in self.published.items():
            if where[0] in self.began:
                first, stop = self.began[where[0]].get(where[1], 0), offset_at(from_json(self.committed), where)
                got = self.delivered.get(where, {})
                assert all(first <= offset < stop for offset in got)
                last = {key: offset for offset, (_, key) in messages.items()}
                for offset in range(first, stop):
                    value, key = messages[offset]
                    assert got.get(offset, value) == value
                    assert offset in got or (key is not None and last[key] > offset), f"{where} {offset} is missing"

    @contextmanager
    def refused_rightly(self, start: Positions, held_from: dict[Where, int]) -> Iterator[None]:
        """An error is right where messages are gone, and not while the query held on to them."""
        try:
            yield
        except TailLost:
            event("a lost tail is told")
            assert self.tail_is_lost
        except OffsetOutOfRange:
            event("messages gone are told")
            gone = [w for w in self.published if w[0] in start.topics and self.log(w).start > offset_at(start, w)]
            assert gone
            assert all(where not in held_from or held_from[where] > offset_at(start, where) for where in gone)
        else:
            return
        self.start_over()


def noted(positions: Positions) -> Any:
    """By way of a checkpoint."""
    return msgspec.json.decode(msgspec.json.encode(to_json(positions)))


def offset_at(positions: Positions, where: Where) -> int:
    position = positions.at(*where)
    return 0 if position is None else position.offset


steps = st.sampled_from(["publish"] * 4 + ["go_on"] * 4 + ["grow", "trim", "compact", "end_owner", "end_query"])


@pytest.mark.slow
@given(
    most=st.sampled_from([None, 5, 40]),
    most_bytes=st.sampled_from(["none", "1", "3k"]),
    story=st.lists(st.tuples(steps, st.integers(0, 2**32)), min_size=30, max_size=80),
)
def test_each_message_is_delivered_once_or_its_loss_is_told(
    most: int | None, most_bytes: str, story: list[tuple[str, int]]
) -> None:
    story_run = Story(most, most_bytes)
    for step, seed in story:
        getattr(story_run, step)(Random(seed))
