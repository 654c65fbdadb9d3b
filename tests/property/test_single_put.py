"""The fused paths of a single message write the same bytes as the plain one."""

from __future__ import annotations

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.broker.messages import Draft, batch_of
from holdfast.broker.metrics import Metrics
from holdfast.broker.partition import Partition
from holdfast.codec.columns import encode_head
from holdfast.codec.encode import single_head
from holdfast.codec.singles import log_prefixes, read_single
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Fenced, MessageTooLarge, OutOfSequence
from holdfast.model import NO_PRODUCER, Appended, Producer
from holdfast.settings import TopicSettings
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

puts = st.lists(
    st.tuples(
        st.lists(st.binary(max_size=1200), min_size=1, max_size=4)
        | st.lists(st.just(b"even"), min_size=2, max_size=300),
        st.sampled_from(["os", "fsync", "interval"]),
        st.integers(min_value=-50, max_value=5_000_000),
        st.just(NO_PRODUCER)
        | st.builds(Producer, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    ),
    max_size=12,
)
_SOME = Producer(2**64 - 1, 2**32 - 1, 2**32 - 1)


@example([(values, "os", 0, NO_PRODUCER) for values in ([b"x" * 1000] * 17, [b""] * 256, [b"y"] * 257)], True, {})
@example([(values, "os", 0, _SOME) for values in ([b"x"], [b"x" * 16_377], [b"y"] * 100)], True, {})
@given(puts, st.booleans(), st.sampled_from([{}, {"segment_messages": 3}, {"segment_ms": 3}]))
def test_fused_and_plain_agree_to_the_byte(history, maps, settings):
    fused, plain = SimulatedDisk(maps=maps), SimulatedDisk(maps=maps)
    ends = []
    for disk in (fused, plain):
        clock = ManualClock()
        log = Log.open(FOLDER, small_settings(**settings), World(clock=clock, disk=disk, ids=SeededIds(3)))
        if disk is plain:
            log.write_alone = lambda *_: -1
        for values, durability, step_ns, producer in history:
            clock.step_wall(ns=step_ns)
            if disk is fused and len(values) == 1 and producer is NO_PRODUCER:
                appended = log.append_one(values[0], durability)
            else:
                appended = log.append(values, durability=durability, producer=producer)
            ends.append((appended, log.end, log.synced_end))
        log.close()
    half = len(ends) // 2
    assert ends[:half] == ends[half:]
    assert fused.names(FOLDER) == plain.names(FOLDER)
    for name in fused.names(FOLDER):
        assert fused.contents(f"{FOLDER}/{name}") == plain.contents(f"{FOLDER}/{name}"), name


def _texts(**options):
    return st.text(st.characters(codec="utf-8"), **options)


drafts = st.builds(
    Draft,
    st.binary(max_size=300),
    key=st.none() | st.binary(max_size=20),
    headers=st.lists(st.tuples(_texts(min_size=1, max_size=12), st.binary(max_size=20)), max_size=4).map(tuple),
    priority=st.integers(0, 9),
    expires_at_ms=st.integers(0, 2**50),
    flags=st.integers(0, 15),
)


@given(drafts, st.integers(0, 2**50))
def test_the_head_of_a_single_message_is_that_of_a_batch_of_one(draft, due_at_ms):
    batch = msgspec.structs.replace(batch_of([draft]), due_at_ms=[due_at_ms] if due_at_ms else None)
    columns, parts = encode_head(batch)
    head = single_head(
        len(draft.value), draft.key, draft.headers, draft.priority, draft.expires_at_ms, due_at_ms, draft.flags
    )
    assert head == (b"".join(parts) if columns else b"", columns)


@given(
    st.lists(st.tuples(drafts, st.sampled_from([None, "os", "fsync", "interval"])), max_size=10),
    st.booleans(),
    st.sampled_from([{}, {"codec": "gzip"}, {"max_message_bytes": 100}]),
)
def test_a_draft_is_published_alone_as_it_is_in_a_list(history, maps, settings):
    found = []
    for alone in (True, False):
        disk, clock = SimulatedDisk(maps=maps), ManualClock()
        world = World(clock=clock, disk=disk, ids=SeededIds(3))
        partition = Partition.open(world, FOLDER, TopicSettings(min_free_bytes=0, **settings), Metrics())
        if not alone:
            partition.log.write_alone = lambda *_: -1
        steps = []
        for draft, durability in history:
            clock.advance(ns=1_000_000)
            steps.append(_published(partition, draft, durability, alone=alone))
            steps.append((partition.log.end, partition.log.synced_end))
        partition.close()
        names = disk.names(f"{FOLDER}/log")
        found.append((steps, {name: disk.contents(f"{FOLDER}/log/{name}") for name in names}))
    assert found[0] == found[1]


def _published(partition, draft, durability, *, alone):
    chosen = partition.log.chosen(durability)
    offset = partition.publish_one(msgspec.structs.astuple(draft), chosen) if alone else -1
    if offset >= 0:
        appended = Appended(offset, offset + 1, chosen)
        partition.log.wait(appended)
        return appended
    try:
        publication = partition.publish([draft], durability=durability)
    except MessageTooLarge as error:
        return str(error)
    partition.wait(publication)
    return publication.in_log


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=300),
            st.builds(Producer, st.integers(1, 2), st.integers(0, 1), st.integers(0, 4)),
            st.sampled_from([None, "os", "fsync", "interval"]),
        ),
        max_size=12,
    ),
    st.sampled_from([{}, {"codec": "gzip"}, {"max_message_bytes": 100}, {"trace_sample": 1.0}]),
)
def test_a_producers_message_is_appended_alone_as_it_is_in_a_list(history, settings):
    found = []
    for alone in (True, False):
        disk, clock = SimulatedDisk(), ManualClock()
        world = World(clock=clock, disk=disk, ids=SeededIds(3))
        partition = Partition.open(world, FOLDER, TopicSettings(min_free_bytes=0, **settings), Metrics())
        partition.open_sequences()
        steps = []
        for value, producer, durability in history:
            clock.advance(ns=1_000_000)
            steps.append(_appended(partition, value, producer, durability, alone=alone))
            steps.append((partition.log.end, partition.log.synced_end, partition.sequences.next_sequence(producer.id)))
        partition.close()
        names = disk.names(f"{FOLDER}/log")
        found.append((steps, {name: disk.contents(f"{FOLDER}/log/{name}") for name in names}))
    assert found[0] == found[1]


def _appended(partition, value, producer, durability, *, alone):
    chosen = partition.log.chosen(durability)
    try:
        offset = partition.append_one(value, producer, chosen) if alone else -1
        if offset >= 0:
            return Appended(offset, offset + 1, chosen), None
        appended, known = partition.append([value], producer, durability=durability)
        partition.log.wait(appended)
    except (Fenced, MessageTooLarge, OutOfSequence) as error:
        return str(error)
    return appended, None if known is None else known.offsets


@given(drafts, st.integers(0, 2**50))
def test_a_single_message_is_read_alone_as_it_is_from_its_frame(draft, due_at_ms):
    disk = SimulatedDisk()
    log = Log.open(FOLDER, small_settings(), World(clock=ManualClock(), disk=disk, ids=SeededIds(3)))
    log.append(msgspec.structs.replace(batch_of([draft]), due_at_ms=[due_at_ms] if due_at_ms else None))
    (frame,) = log.read(0)
    data = memoryview(disk.contents(f"{FOLDER}/{0:020d}.log"))
    assert read_single(data, 0, log_prefixes(log.log_id)) == (frame.records()[0], frame.header.end)
