"""The log from outside: what each call promises, and how it refuses."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.codec.frame import Kind
from holdfast.env import ManualClock, SeededIds, World, process
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import (
    BadSettings,
    Closed,
    InvalidRequest,
    MessageTooLarge,
    NotALog,
    OffsetOutOfRange,
    TailLost,
    Unavailable,
)
from holdfast.model import Appended, Batch, LogPosition, Producer
from holdfast.settings import LogSettings, load
from holdfast.storage import Log, LogReader, open_log
from holdfast.storage.frames import SegmentIndex
from holdfast.storage.recovery import SegmentLimits
from holdfast.storage.retention import truncate_tail
from holdfast.storage.segment import ActiveSegment
from tests.crash.histories import FOLDER, small_settings


@pytest.fixture
def world() -> World:
    return World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))


@pytest.fixture
def log(world) -> Log:
    return Log.open(FOLDER, small_settings(), world)


def values(log) -> list[bytes]:
    return [record.value for record in log.records(log.start)]


def test_offsets_count_from_zero_and_the_answer_says_what_it_survives(log):
    assert log.append([b"a"]) == Appended(0, 1, "os")
    assert log.append([b"b", b"c"], durability="fsync") == Appended(1, 3, "fsync")
    assert log.append_one(b"d", "interval") == Appended(3, 4, "interval")
    assert asyncio.run(log.append_async([b"e"], durability="fsync")) == Appended(4, 5, "fsync")
    assert asyncio.run(log.append_one_async(b"f", "fsync")) == Appended(5, 6, "fsync")
    assert values(log) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_an_empty_batch_stores_nothing(log):
    log.append([b"a"])
    assert log.append([]) == Appended(1, 1, "os")
    assert log.end == 1


def test_an_empty_message_is_a_message(log):
    log.append([b"", b"x", b""])
    log.append_one(b"")
    assert values(log) == [b"", b"x", b"", b""]


def test_a_message_keeps_all_its_columns(log):
    log.append(
        Batch(
            values=[b"v1", b"v2"],
            times_ns=[11, 12],
            keys=[None, b""],
            headers=[[("a", b"1"), ("a", b"2")], []],
            priorities=[0, 9],
            expires_at_ms=[5, 0],
            due_at_ms=[0, 6],
            flags=[1, 0],
        ),
        producer=Producer(7, 2, 100),
        kind=Kind.JOURNAL,
    )
    first, second = log.records(0)
    assert (first.timestamp_ns, first.key, first.headers) == (11, None, (("a", b"1"), ("a", b"2")))
    assert (first.priority, first.expires_at_ms, first.due_at_ms, first.flags) == (0, 5, 0, 1)
    assert (second.timestamp_ns, second.key, second.headers, second.priority) == (12, b"", (), 9)
    (frame,) = log.read(0)
    assert frame.header.kind == Kind.JOURNAL
    assert (frame.header.producer_id, frame.header.producer_epoch, frame.header.first_sequence) == (7, 2, 100)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (b"bytes", r"write append\(\[message\]\)"),
        ("text", r"write append\(\[message\]\)"),
        (17, "a list of messages, not int"),
        (["text"], "must be bytes, not str"),
        ([b"good", None], "must be bytes, not NoneType"),
        ([memoryview(b"12345678").cast("i")], "must be bytes, not memoryview"),
        (Batch(values=[b"a", b"b"], keys=[b"k"]), "keys has 1 items for 2 values"),
        (Batch(values=[b"a"], keys=["text"]), "a key must be bytes or None, not str"),
        (Batch(values=[b"a"], headers=[[("n", "text")]]), "a header's value must be bytes, not str"),
        (Batch(values=[b"a"], headers=[[(b"n", b"v")]]), "a header's name must be text, not bytes"),
        (Batch(values=[b"a"], headers=[["n"]]), "cannot be stored"),
        (Batch(values=[b"a"], priorities=[256]), "cannot be stored"),
        (Batch(values=[b"a"], times_ns=[2**63]), "cannot be stored"),
        (Batch(values=[b"a"], due_at_ms=["soon"]), "cannot be stored"),
    ],
)
def test_bad_messages_are_refused_in_words_and_nothing_is_kept(log, messages, says):
    with pytest.raises(InvalidRequest, match=says):
        log.append(messages)
    assert log.written_end == 0
    assert log.append([b"good"]).offset == 0


def test_a_message_over_the_limit_is_refused_with_key_and_headers_counted(world):
    log = Log.open(FOLDER, small_settings(max_message_bytes=100, max_batch_bytes=250), world)
    log.append([bytes(100)])
    with pytest.raises(MessageTooLarge, match="message 1 of the batch has 101 bytes"):
        log.append([b"", bytes(101)])
    with pytest.raises(MessageTooLarge):
        log.append_one(bytes(101))
    with pytest.raises(MessageTooLarge, match="has 101 bytes"):
        log.append(Batch(values=[bytes(90)], keys=[bytes(6)], headers=[[("name", b"x")]]))
    with pytest.raises(MessageTooLarge, match="the batch has 300 bytes"):
        log.append([bytes(100)] * 3)
    assert log.end == 1


@pytest.mark.parametrize("call", ["durability", "codec"])
def test_an_unknown_choice_is_refused_with_the_known_ones(log, call):
    with pytest.raises(InvalidRequest, match=r"'paper' is not known; use one of"):
        log.append([b"x"], **{call: "paper"})
    with pytest.raises(InvalidRequest):
        log.append_one(b"x", "paper")


def test_after_close_every_call_is_refused_and_closing_again_is_fine(log):
    log.append([b"x"])
    log.close()
    log.close()
    for call in (
        lambda: log.append([b"y"]),
        lambda: log.append_one(b"y"),
        lambda: log.append([b"y"], durability="fsync"),
        lambda: log.trim(1),
        log.retain,
        lambda: log.truncate(0),
        log.tick,
        lambda: log.read(0),
        lambda: log.records(0),
        lambda: log.find_time(0),
    ):
        with pytest.raises(Closed, match="is closed; open it again"):
            call()


def test_a_missing_folder_is_made_or_refused(world):
    with pytest.raises(NotALog, match="there is no folder"):
        Log.open("nowhere", small_settings(), world, create=False)
    world.disk.make_folder("empty")
    with pytest.raises(NotALog, match="holds no log"):
        Log.open("empty", small_settings(), world, create=False)
    with pytest.raises(NotALog):
        LogReader("empty", small_settings(), world)
    Log.open("empty", small_settings(), world).close()
    Log.open("empty", small_settings(), world, create=False).close()


def test_a_file_where_the_folder_should_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for create in (True, False):
        with pytest.raises(NotALog):
            open_log(str(tmp_path / "file"), create=create)


def test_offsets_outside_the_log_are_refused_with_what_there_is(log):
    log.append([b"a", b"b"])
    with pytest.raises(OffsetOutOfRange, match="offset 3 is beyond the end: the log holds 0 to 1; read from 2"):
        list(log.read(3))
    with pytest.raises(OffsetOutOfRange):
        list(log.read(-1))
    assert list(log.read(2)) == []


def test_reading_from_the_middle_of_a_frame_gives_the_messages_from_there(log):
    log.append([b"a", b"b", b"c"])
    assert [record.value for record in log.records(1)] == [b"b", b"c"]
    assert [frame.base_offset for frame in log.read(1)] == [0]


def test_a_batch_larger_than_a_frame_is_several_frames_and_one_batch(log):
    log.append([bytes([n]) * 600 for n in range(4)])
    assert [(f.count, f.header.batch_remaining) for f in log.read(0)] == [(1, 3), (1, 2), (1, 1), (1, 0)]


def test_each_frame_of_a_batch_says_where_its_first_message_stands_in_the_producers_sequence(log):
    log.append([bytes(600)] * 3, producer=Producer(id=5, epoch=1, first_sequence=2**32 - 2))
    assert [f.header.first_sequence for f in log.read(0)] == [2**32 - 2, 2**32 - 1, 0]


def test_a_batch_larger_than_a_segment_gets_a_segment_of_its_own(log):
    log.append([b"before"])
    big = [bytes([n]) * 3000 for n in range(5)]
    log.append(big)
    log.append([b"after"])
    assert values(log) == [b"before", *big, b"after"]
    assert len(log.segments()) == 3


def test_nothing_is_acknowledged_while_the_name_of_its_segment_is_still_being_synced(world, log, monkeypatch):
    log.append([b"a"], durability="fsync")
    sync_names, acknowledged, too_early = world.disk.sync_names, [], []
    other = threading.Thread(target=lambda: acknowledged.append(log.append([b"b"], durability="fsync")))

    def sync_while_another_appends(folder: str) -> None:
        if not other.ident:
            other.start()
            other.join(0.2)
            too_early.extend(acknowledged)
        sync_names(folder)

    monkeypatch.setattr(world.disk, "sync_names", sync_while_another_appends)
    log.roll()
    other.join()
    assert not too_early
    assert len(acknowledged) == 1


def test_segments_roll_by_bytes_by_count_and_by_age(world):
    log = Log.open("bytes", small_settings(), world)
    for _ in range(9):
        log.append_one(bytes(1000))
    assert [s.base_offset for s in log.segments()] == [0, 3, 6]
    log = Log.open("count", small_settings(segment_messages=4), world)
    for _ in range(9):
        log.append_one(b"x")
    assert [s.base_offset for s in log.segments()] == [0, 4, 8]
    log = Log.open("age", small_settings(segment_ms=1000), world)
    for _ in range(3):
        log.append_one(b"x")
        world.clock.advance(seconds=1)
    assert [s.base_offset for s in log.segments()] == [0, 1, 2]


@pytest.mark.parametrize("ending", ["close", "kill", "reboot"])
@pytest.mark.parametrize(
    ("where", "name"), [(ActiveSegment, "__init__"), (ActiveSegment, "sealed"), (SegmentIndex, "encode")]
)
def test_a_segment_whose_start_a_signal_ended_is_not_taken_for_the_end_of_the_log(
    log, world, monkeypatch, where, name, ending
):
    log.append([b"one"])
    with monkeypatch.context() as during:
        during.setattr(where, name, _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.roll()
    log.append([b"two"])
    log.append_one(b"three")
    log.roll()
    log.append_one(b"four")
    log.sync()
    expected = [b"one", b"two", b"three", b"four"]
    assert values(log) == expected
    assert [facts.base_offset for facts in log.segments()] == [0, 3]
    disk, ids = world.disk, SeededIds(1)
    if ending == "close":
        log.close()
    else:
        disk = disk.kill()
    if ending == "reboot":
        ids.reboot()
    with Log.open(FOLDER, small_settings(), World(ManualClock(), disk, ids)) as again:
        assert (again.report.cut, again.report.damage, again.report.lost_tail) == (None, (), None)
        assert values(again) == expected


def _raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_segment_names_are_base_offsets_of_twenty_digits(log, world):
    for _ in range(5):
        log.append_one(bytes(1500))
    names = [name for name in world.disk.names(FOLDER) if name.endswith(".log")]
    assert names == ["00000000000000000000.log", "00000000000000000002.log", "00000000000000000004.log"]


def test_a_quiet_log_reserves_little(tmp_path):
    folder = tmp_path / "log"
    with open_log(str(folder)) as log:
        log.append([b"hello"])
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000


def test_a_position_is_valid_until_its_tail_is_lost(log):
    log.append([b"a"])
    log.append([b"b"])
    held = log.position(2)
    log.check_position(held)
    log.truncate(1)
    with pytest.raises(TailLost, match=r"that epoch ends at 1.*Continue from 1") as caught:
        log.check_position(held)
    assert caught.value.epoch_end == 1
    log.check_position(LogPosition(held.epoch, 1))
    log.append([b"another b"])
    log.check_position(log.position(2))
    assert values(log) == [b"a", b"another b"]


def test_truncating_inside_a_batch_is_refused_and_changes_nothing(log):
    log.append([b"a"])
    log.append([b"b", b"c"])
    log.append([bytes(800), bytes(800)])  # two frames, one batch
    for offset in (2, 4):
        with pytest.raises(InvalidRequest, match="inside a batch"):
            log.truncate(offset)
    with pytest.raises(OffsetOutOfRange):
        log.truncate(6)
    assert log.end == 5
    log.truncate(3)
    assert values(log) == [b"a", b"b", b"c"]


def test_truncating_over_segments_removes_them_and_writing_goes_on(log, world):
    for n in range(10):
        log.append_one(bytes([n]) * 1000)
    log.truncate(4)
    assert values(log) == [bytes([n]) * 1000 for n in range(4)]
    log.append_one(b"new")
    log.close()
    log = Log.open(FOLDER, small_settings(), world)
    assert log.report.clean
    assert values(log)[-1] == b"new"
    log.truncate(0)
    assert (log.start, log.end) == (0, 0)
    assert log.append_one(b"from the start").offset == 0


def test_fsync_messages_hold_back_what_follows_until_they_are_synced(world):
    """The readable end is a contiguous prefix of messages that are as durable as promised."""
    log = Log.open(FOLDER, small_settings(), world)
    seen: list[int] = []
    world.disk.on_call = lambda call: seen.append(log.end) if call == "sync" else None
    log.append([b"a"], durability="os")
    assert log.end == 1
    log.append([b"b"], durability="fsync")
    assert seen[-1] == 1, "visible before it was on disk"
    assert log.end == 2


def test_a_reader_in_the_same_world_sees_what_the_owner_published(log, world):
    log.append([b"a"])
    reader = LogReader(FOLDER, small_settings(), world)
    assert values(reader) == [b"a"]
    for n in range(8):
        log.append([bytes([n]) * 1500])
    assert values(reader) == values(log)
    assert reader.find_time(0) == 0
    assert reader.position(9) == log.position(9)


def test_settings_are_held_to_their_limits():
    for bad in (
        {"segment_bytes": 10},
        {"durability": "maybe"},
        {"codec": "rar"},
        {"codec": "gzip", "codec_level": 12},
        {"max_message_bytes": 0},
        {"min_free_bytes": -1},
        {"segment_messages": 0},
        {"sync_interval_ms": "fast"},
        {"max_message_bytes": (1 << 30) + 1},
    ):
        with pytest.raises(BadSettings):
            LogSettings(**bad)
    with pytest.raises(BadSettings, match="unknown setting segmentbytes; did you mean segment_bytes"):
        load(LogSettings, {"segmentbytes": 5})
    assert load(LogSettings, {"durability": "os"}).durability == "os"


def test_the_sum_of_what_is_reserved_grows_in_steps(tmp_path):
    with open_log(str(tmp_path), LogSettings(durability="os")) as log:
        sizes = set()
        for _ in range(200):
            log.append_one(bytes(10_000))
            sizes.add(log.segments()[-1].bytes)
        assert min(sizes) <= 64 * 1024
        assert len(sizes) <= 7


def test_a_sync_that_a_truncation_overtakes_acknowledges_nothing(world):
    log = Log.open(FOLDER, small_settings(), world)
    log.append([b"kept"], durability="fsync")

    def truncate_once(call: str) -> None:
        if call == "sync":
            world.disk.on_call = None
            limits = SegmentLimits(log.settings.index_bytes, log.settings.segment_bytes)
            truncate_tail(world, log._writer, FOLDER, limits, 1)

    world.disk.on_call = truncate_once
    with pytest.raises(Unavailable, match="truncated away before it was synced"):
        log.append([b"a", b"b", b"c"], durability="fsync")
    assert (log.end, log.synced_end) == (1, 1)
    world.disk.on_call = truncate_once
    with pytest.raises(Unavailable, match="truncated away before it was synced"):
        asyncio.run(log.append_async([b"a", b"b", b"c"], durability="fsync"))
    calls = world.disk.calls["sync"]
    assert log.append([b"d"], durability="fsync").offset == 1
    assert world.disk.calls["sync"] > calls, "acknowledged by a sync that came before it"
    assert values(log) == [b"kept", b"d"]


def test_a_truncation_that_was_begun_is_finished_at_the_next_opening(log, world):
    """Once the new epoch is durable, what lies behind its beginning is void, though its bytes be whole."""
    for n in range(8):
        log.append_one(bytes([n]) * 1000, "fsync")
    left = []
    world.disk.on_call = lambda call: left.append((call, world.disk.kill()))
    log.truncate(3)
    renamed = next(i for i, (call, _) in enumerate(left) if call == "rename")
    assert len(left) > renamed + 5
    for _, disk in left[renamed:]:
        with Log.open(FOLDER, small_settings(), World(world.clock, disk, SeededIds(1))) as again:
            assert values(again) == [bytes([n]) * 1000 for n in range(3)]
            assert again.append_one(b"next").offset == 3


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_a_foreign_empty_segment_does_not_move_the_end(log, world, ending):
    for n in range(5):
        log.append_one(bytes([n]) * 1500, "fsync")
    if ending == "closed":
        log.close()
    disk = world.disk.kill()
    disk.open(f"{FOLDER}/{9999:020d}.log", write=True, create=True).close()
    with Log.open(FOLDER, small_settings(), World(world.clock, disk, SeededIds(1))) as again:
        assert again.end == 5
        assert again.append_one(b"next").offset == 5


def test_truncating_behind_what_is_synced_is_refused(log, world):
    """Else an unsynced message would count as synced."""
    log.append_one(b"unsynced", "os")
    with pytest.raises(Unavailable, match="others appended"):
        truncate_tail(world, log._writer, FOLDER, SegmentLimits(512, 4096), 1)
    log.truncate(1)
    assert values(log) == [b"unsynced"]


def test_a_message_comes_after_the_one_that_is_being_appended_instead_of_waiting_for_the_lock(log, monkeypatch):
    writer, inside, waited = log._writer, threading.Event(), []

    def let_others_run(_pause_s):
        waited.append(writer.lock.locked())
        inside.set()
        other.join()

    monkeypatch.setattr("holdfast.env.process.let_others_run", let_others_run)
    plain = writer._segment_for

    def slow(*args):
        second.start()
        assert inside.wait(10)
        return plain(*args)

    second = threading.Thread(target=log.append_one, args=(b"second",))
    monkeypatch.setattr(writer, "_segment_for", slow)
    other = threading.Thread(target=log.append_one, args=(bytes(3000),))
    other.start()
    other.join()
    second.join()
    assert waited == [True], "the second one looked again only after the first had let go"
    assert [bytes(record.value) for record in log.records(0)] == [bytes(3000), b"second"]


def test_a_lock_that_is_held_for_long_is_waited_for_in_the_end(log, monkeypatch):
    turns, enough = [], threading.Event()

    def turn(pause_s: float) -> None:
        turns.append(pause_s)
        if len(turns) == len(process._PAUSES_S):
            enough.set()

    monkeypatch.setattr(process, "let_others_run", turn)
    with log._writer.lock:
        second = threading.Thread(target=log.append_one, args=(b"second",))
        second.start()
        assert enough.wait(10)
        second.join(0.05)
        assert second.is_alive(), "it waits for the lock"
    second.join()
    assert turns == list(process._PAUSES_S)
    assert 0.05 < sum(turns) < 0.5, "it gets in line soon, or those who are quicker could keep it waiting"
    turns.clear()
    log.append_one(b"third")
    assert turns == []
