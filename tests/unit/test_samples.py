"""Samples of the last days: what is counted, how long it is kept, and that nothing depends on it."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.broker.check.folder import check_folder
from holdfast.broker.dead_letters import DeadLetterLog
from holdfast.broker.sampler import EVERY_S, QueueSampler
from holdfast.broker.samples import SAMPLES, TOTAL, Sample, SampleStore, ring_for
from holdfast.codec.samples import HEADER_BYTES, LONGEST_S, RINGS, SERIES_BYTES, SeriesKey, Slot, file_header
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.brokers import FOLDER, Place, taken

KEY = SeriesKey("queue", "jobs", "default", 7)
PATH = f"{FOLDER}/{SAMPLES}"


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    found.clock.step_wall(seconds=-found.clock.now_ns() % (900 * 10**9) / 1e9)  # to the start of a step in every ring
    yield found
    found.close()


def sampler(place: Place) -> QueueSampler:
    found = place.engine.sampler
    assert isinstance(found, QueueSampler)
    return found


def pass_time(place: Place, seconds: float = EVERY_S) -> None:
    """Time passes, with a sample at the end of each step."""
    for _ in range(round(seconds / EVERY_S)):
        place.clock.advance(seconds=EVERY_S)
        sampler(place).tick()


def samples(place: Place, key: SeriesKey, span_s: float = 900) -> list[Sample]:
    return sampler(place).store.read(key, span_s).samples


def queue_key(place: Place, topic: str = "jobs", group: str = "default") -> SeriesKey:
    return SeriesKey("queue", topic, group, place.engine.topic(topic).id)


def store_of(disk: SimulatedDisk, clock: ManualClock, **options: Any) -> SampleStore:
    if not disk.exists(f"{FOLDER}/topics"):
        disk.make_folder(f"{FOLDER}/topics")
    return SampleStore(World(clock=clock, disk=disk, ids=SeededIds(1)), FOLDER, **options)


def slot(clock: ManualClock, published: float = 1, **more: Any) -> Slot:
    return Slot(clock.now_ns() // 10**9, published, **more)


def published_in(store: SampleStore, span_s: float, key: SeriesKey = KEY) -> float:
    """How many messages the samples of that time add up to, once the last step is over."""
    store._world.clock.advance(seconds=EVERY_S)  # type: ignore[attr-defined]
    found = store.read(key, span_s)
    return sum(each.published_rate for each in found.samples) * found.step_seconds


# What is sampled.


def test_a_queue_is_sampled_with_rates_levels_and_handling_times(place):
    queue = place.broker.queue("jobs")
    queue.put_many([b"%d" % i for i in range(50)])
    message = queue.get(timeout=0)
    place.clock.advance(seconds=2)
    message.ack()
    queue.get(timeout=0).nack(error="no luck")
    place.clock.advance(seconds=EVERY_S - 2)
    sampler(place).tick()

    (found,) = samples(place, queue_key(place))
    assert (found.published_rate, found.handled_rate, found.failed_rate) == pytest.approx((10, 0.2, 0.2))
    assert (found.ready, found.dead) == (48, 0)
    assert found.oldest_seconds == pytest.approx(5)
    assert found.handle_p50_seconds == pytest.approx(2, rel=0.05)
    assert found.handle_p99_seconds == pytest.approx(2, rel=0.05)


def test_quantiles_are_those_of_the_step_and_not_of_all_times(place):
    queue = place.broker.queue("jobs")
    for seconds in (4, 1):
        queue.put(b"a")
        message = queue.get(timeout=0)
        place.clock.advance(seconds=seconds)
        message.ack()
        place.clock.advance(seconds=EVERY_S - seconds)
        sampler(place).tick()

    assert [each.handle_p50_seconds for each in samples(place, queue_key(place))] == pytest.approx([4, 1], rel=0.05)
    (both,) = samples(place, queue_key(place), 3600)
    assert both.handle_p99_seconds == pytest.approx(4, rel=0.05)
    (total,) = samples(place, TOTAL, 3600)
    assert total.handle_p99_seconds == pytest.approx(4, rel=0.05)


def test_dead_letters_are_sampled(place):
    queue = place.broker.queue("jobs")
    queue.put(b"a")
    queue.get(timeout=0).reject("bad")
    pass_time(place)
    assert samples(place, queue_key(place))[-1].dead == 1


def test_with_several_groups_dead_letters_are_not_all_read_at_every_sample(place, monkeypatch):
    place.broker.create_topic("jobs", max_attempts=1)
    one = place.broker.group("jobs", "one")
    place.broker.group("jobs", "two")
    reads = []
    read_all = DeadLetterLog.all
    monkeypatch.setattr(DeadLetterLog, "all", lambda *given: reads.append(1) or read_all(*given))
    for number in range(1, 4):
        place.broker.publish("jobs", b"a")
        one.receive(timeout=0).reject("bad")
        pass_time(place)
        assert samples(place, queue_key(place, group="one"))[-1].dead == number
    one.dead.redrive()
    pass_time(place)
    pass_time(place)
    assert samples(place, queue_key(place, group="one"))[-1].dead == 0
    assert len(reads) <= 3  # of each group at the first look, and by the redrive
    pass_time(place, 300)
    assert samples(place, queue_key(place, group="one"))[-1].dead == 0


def test_what_is_gone_is_not_kept_in_mind(place):
    place.broker.create_topic("jobs")
    for number in range(5):
        place.broker.group("jobs", f"g{number}")
        pass_time(place)
        place.broker.delete_group(f"g{number}", topic="jobs")
    pass_time(place)
    assert {key.group for key in sampler(place)._watched} <= {""}


def test_commits_are_read_once_for_all_topics(place, monkeypatch):
    for number in range(5):
        place.broker.create_topic(f"t{number}")
    with place.broker.consumer("t0", group="copy", start="earliest") as consumer:
        place.broker.publish("t0", b"a")
        consumer.poll(0)
        consumer.commit()
        reads = []
        stream = place.engine.streams.group("copy")
        entries = stream.offsets.entries
        monkeypatch.setattr(stream.offsets, "entries", lambda: reads.append(1) or entries())
        sampler(place).sample()
        assert len(reads) == 1


def test_the_total_counts_a_message_once_that_two_groups_read(place):
    place.broker.queue("jobs")
    place.broker.group("jobs", "audit")
    place.broker.queue("jobs").put_many([b"a", b"b"])
    taken(place.broker.group("jobs", "audit"))
    pass_time(place)

    (total,) = samples(place, TOTAL)
    assert total.published_rate * EVERY_S == pytest.approx(2)
    assert total.ready == 2
    (audit,) = samples(place, queue_key(place, group="audit"))
    assert (audit.ready, round(audit.handled_rate * EVERY_S)) == (0, 2)


def test_a_group_that_comes_later_does_not_count_what_came_before(place):
    place.broker.create_topic("jobs")
    place.broker.producer().send("jobs", b"a").result()
    pass_time(place)
    place.broker.group("jobs", "late")
    place.broker.producer().send("jobs", b"b").result()
    pass_time(place)
    assert [round(each.published_rate * EVERY_S) for each in samples(place, queue_key(place, group="late"))] == [1]
    assert [round(each.published_rate * EVERY_S) for each in samples(place, TOTAL)] == [1, 1]


def test_a_stream_group_is_sampled_with_its_lag(place):
    place.broker.create_topic("events")
    with place.broker.consumer("events", group="copy", start="earliest") as consumer:
        place.broker.producer().send("events", b"a").result()
        assert len(consumer.poll(0)) == 1
        consumer.commit()
        pass_time(place)
        for body in (b"b", b"c", b"d"):
            place.broker.producer().send("events", body).result()
        consumer.poll(0)
        pass_time(place)
        consumer.commit()
        pass_time(place)
    key = SeriesKey("stream", "events", "copy", place.engine.topic("events").id)
    found = samples(place, key)
    assert [each.ready for each in found] == [0, 3, 0]
    assert [round(each.handled_rate * EVERY_S) for each in found] == [0, 0, 3]
    assert found[1].oldest_seconds == pytest.approx(5, abs=0.5)


def test_a_topic_that_never_held_anything_gets_no_place(place):
    place.broker.queue("jobs")
    pass_time(place, 60)
    assert sampler(place).store.series() == [TOTAL]


def test_a_late_sample_is_spread_over_the_steps_that_it_stands_for(place):
    queue = place.broker.queue("jobs")
    pass_time(place)
    queue.put_many([b"a"] * 8)
    place.clock.advance(seconds=4 * EVERY_S)
    sampler(place).tick()
    assert [each.published_rate * EVERY_S for each in samples(place, queue_key(place))] == pytest.approx([2] * 4)


def test_levels_that_no_counter_shows_are_seen_within_a_minute(place):
    queue = place.broker.queue("jobs")
    queue.put_many([b"a"] * 5)
    pass_time(place)
    queue.purge()
    pass_time(place, 65)
    assert samples(place, queue_key(place))[-1].ready == 0


# How long it is kept.


def test_each_ring_keeps_its_time_and_no_more():
    clock = ManualClock()
    store = store_of(SimulatedDisk(), clock)
    for ring in RINGS:
        for _ in range(ring.steps + 10):
            clock.advance(seconds=ring.step_s)
            store.merge(KEY, slot(clock))
        found = store.read(KEY, ring.span_s)
        assert (found.step_seconds, len(found.samples)) == (ring.step_s, ring.steps)
        assert [each.at for each in found.samples] == sorted(each.at for each in found.samples)


@pytest.mark.parametrize(("span_s", "step_s"), [(1, 5), (900, 5), (901, 60), (21_600, 60), (86_400, 900), (10**7, 900)])
def test_the_finest_ring_that_covers_the_time_answers(span_s, step_s):
    assert ring_for(span_s).step_s == step_s


def test_counts_add_up_and_of_levels_the_highest_stays():
    clock = ManualClock(1_700_000_100 * 10**9)
    store = store_of(SimulatedDisk(), clock)
    for ready in (3, 9, 4):
        store.merge(KEY, slot(clock, 2, ready=ready, oldest_s=ready / 2))
    clock.advance(seconds=60)
    (found,) = store.read(KEY, 3600).samples
    assert (found.published_rate * 60, found.ready, found.oldest_seconds) == (pytest.approx(6), 9, 4.5)


def test_a_step_under_way_counts_only_the_time_that_passed():
    clock = ManualClock(1_700_000_100 * 10**9)
    store = store_of(SimulatedDisk(), clock)
    store.merge(KEY, slot(clock, 100))
    clock.advance(seconds=10)
    (found,) = store.read(KEY, 86_400).samples
    assert found.published_rate <= 10


def test_a_wall_clock_that_is_set_back_or_forward_leaves_no_samples_of_other_times():
    clock = ManualClock()
    store = store_of(SimulatedDisk(), clock)
    store.merge(KEY, slot(clock))
    clock.step_wall(seconds=-3600)
    assert published_in(store, 900) == 0
    clock.step_wall(seconds=3600 + LONGEST_S)
    assert published_in(store, LONGEST_S) == 0


# Many series.


def test_the_busiest_series_have_a_place_and_the_total_always_has():
    clock = ManualClock()
    store = store_of(SimulatedDisk(), clock, most_series=4)
    keys = [SeriesKey("queue", f"q{i}", "default", i) for i in range(6)]
    assert [store.merge(key, slot(clock)) for key in keys] == [True] * 3 + [False] * 3
    store.note_traffic(dict.fromkeys(keys[:3], 10.0))
    store.note_traffic({keys[0]: 10.0, keys[1]: 10.0, keys[2]: 1.0, keys[3]: 15.0, keys[4]: 500.0})
    assert set(store.series()) == {TOTAL, keys[0], keys[1], keys[4]}
    assert store.read(keys[4], 900).samples == []


def test_the_file_never_grows_beyond_its_series():
    clock, disk = ManualClock(), SimulatedDisk()
    store = store_of(disk, clock, most_series=4)
    for i in range(20):
        key = SeriesKey("queue", f"q{i}", "default", i)
        store.merge(key, slot(clock))
        store.note_traffic({key: 10.0**i})
        store.save()
    assert len(disk.contents(PATH)) == HEADER_BYTES + 4 * SERIES_BYTES


# Restarts, crashes and damage.


def test_samples_survive_a_restart_and_a_kill(place):
    place.broker.queue("jobs").put_many([b"a"] * 5)
    pass_time(place, 60)
    key = queue_key(place)
    place.reopen()
    assert sum(each.published_rate for each in samples(place, key)) * EVERY_S == pytest.approx(5)
    place.kill()
    assert sum(each.published_rate for each in samples(place, key)) * EVERY_S == pytest.approx(5)


def test_a_restart_in_the_midst_of_a_step_goes_on_where_it_was():
    clock, disk = ManualClock(1_700_000_100 * 10**9), SimulatedDisk()
    for _ in range(2):
        store = store_of(disk, clock)
        store.merge(KEY, slot(clock, 3))
        store.save()
    assert store_of(disk, clock).read(KEY, 3600).samples[0].published_rate == pytest.approx(6)


def test_a_process_that_is_over_before_its_first_sample_writes_none(place):
    place.broker.queue("jobs").put(b"a")
    place.reopen()
    assert not place.disk.exists(PATH)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_leaves_samples_that_were_taken_or_none(seed):
    clock, disk = ManualClock(), SimulatedDisk()
    store, put = store_of(disk, clock), 0
    for _ in range(40):
        clock.advance(seconds=5)
        store.merge(KEY, slot(clock))
        put += 1
        if put % 3 == 0:
            store.save()
    after = store_of(disk.cut(random.Random(seed)), clock)
    assert 0 <= published_in(after, 900) <= put + 0.01
    after.merge(KEY, slot(clock))
    after.save()
    assert published_in(after, 900) >= 1


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_costs_one_sample_or_one_series_or_all_but_never_lies(seed):
    clock, disk = ManualClock(), SimulatedDisk()
    store = store_of(disk, clock)
    for _ in range(100):
        clock.advance(seconds=5)
        store.merge(KEY, slot(clock))
    store.save()
    before = {each.at: each for each in store.read(KEY, 900).samples}
    rng = random.Random(seed)
    position = rng.choice([rng.randrange(20), HEADER_BYTES + SERIES_BYTES + rng.randrange(512 + 180 * 40)])
    disk.flip(PATH, position, 1 << rng.randrange(8))
    again = store_of(disk, clock)
    found = again.read(KEY, 900)
    assert all(before[each.at] == each for each in found.samples)
    again.merge(KEY, slot(clock))
    again.save()
    assert published_in(store_of(disk, clock), 900) >= 1


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\0" * 9000, file_header()[:30]])
def test_a_file_that_is_none_of_ours_is_begun_anew(content):
    clock, disk = ManualClock(), SimulatedDisk()
    store = store_of(disk, clock)
    disk.open(PATH, write=True, create=True).write(0, [content])
    store.merge(KEY, slot(clock))
    store.save()
    assert published_in(store_of(disk, clock), 900) == pytest.approx(1)


def test_a_file_of_another_version_is_begun_anew():
    clock, disk = ManualClock(), SimulatedDisk()
    header = bytearray(file_header())
    header[8] = 2
    from holdfast.checksum import crc32c

    header[16:20] = crc32c(bytes(header[:16])).to_bytes(4, "little")
    store = store_of(disk, clock)
    disk.open(PATH, write=True, create=True).write(0, [bytes(header)])
    assert "version 2" in str(check_folder(FOLDER, World(clock=clock, disk=disk, ids=SeededIds(1))).notes)
    store.merge(KEY, slot(clock))
    store.save()
    assert published_in(store_of(disk, clock), 900) == pytest.approx(1)


def test_samples_of_another_series_in_the_same_place_do_not_count():
    """What a crash may leave: the new header, and slots of the series that had the block before."""
    clock, disk = ManualClock(), SimulatedDisk()
    store = store_of(disk, clock)
    store.merge(KEY, slot(clock))
    store.save()
    other = SeriesKey("queue", "other", "default", 8)
    new = store_of(SimulatedDisk(), clock)
    new.merge(other, slot(clock))
    new.save()
    header = new._world.disk.contents(PATH)[HEADER_BYTES + SERIES_BYTES :][:512]  # type: ignore[attr-defined]
    disk.open(PATH, write=True).write(HEADER_BYTES + SERIES_BYTES, [header])
    assert store_of(disk, clock).read(other, 900).samples == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_disk_that_fails_costs_only_samples(place, code):
    queue = place.broker.queue("jobs")
    queue.put(b"a")
    pass_time(place, 30)
    place.disk.faults.fail(1, code, sticky=True)
    try:
        sampler(place)._tidy()
    finally:
        place.disk.faults.clear()
    assert not place.disk.exists(PATH)
    queue.put(b"b")
    assert taken(queue) == [b"a", b"b"]
    pass_time(place, 60)
    assert len(place.disk.contents(PATH)) > HEADER_BYTES


def test_with_little_room_on_the_disk_the_file_is_left_alone():
    clock, disk = ManualClock(), SimulatedDisk(capacity_bytes=1024 * 1024)
    store = store_of(disk, clock)
    store.merge(KEY, slot(clock))
    store.save()
    assert not disk.exists(PATH)
    assert published_in(store, 900) == pytest.approx(1)


def test_check_knows_the_file_and_takes_its_damage_for_a_note(place):
    place.broker.queue("jobs").put(b"a")
    pass_time(place, 60)
    assert check_folder(FOLDER, place.world, owned=True).notes == ()
    place.disk.flip(PATH, HEADER_BYTES + 512 + place.clock.now_ns() // 10**9 % 900 // 5 * 40 - 20)
    report = check_folder(FOLDER, place.world, owned=True)
    assert report.ok
    assert "0 series and 1 samples are left out" in report.notes[0]
    place.disk.flip(PATH, HEADER_BYTES + 3)
    assert "1 series" in check_folder(FOLDER, place.world, owned=True).notes[0]
    place.disk.flip(PATH, 0)
    assert "cannot be used" in check_folder(FOLDER, place.world, owned=True).notes[0]
