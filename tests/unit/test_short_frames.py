"""Short frames: every byte is covered, each is valid in one place only, and a long one before them says the rest."""

from __future__ import annotations

import time

import pytest

from holdfast.codec import frame as frame_module
from holdfast.codec.encode import FramePlace, Packing, encode_batch, header_for
from holdfast.codec.frame import (
    HEADER_BYTES,
    MAY_HOLD_SHORT,
    SHORT_AROUND,
    SHORT_MAGIC,
    SHORT_MOST,
    FrameHeader,
    frames_in,
    read_frame,
    read_header,
    short_bytes,
    short_frame,
    stored_frame,
)
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import ChecksumMismatch, CorruptData, UnknownFormat
from holdfast.model import Batch, Producer, Record
from holdfast.settings import LogSettings
from holdfast.storage import frames as frames_module
from holdfast.storage import writer as writer_module
from holdfast.storage.frames import Damage, FrameRules, find_frame, walk
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.unit.logs import FOLDER, Logged

LOG_ID = 0xC0FFEE07
NOW_NS = 1_700_000_000_000_000_000


def short(value: bytes, *, position: int, offset: int, epoch: int = 1, log_id: int = LOG_ID) -> bytes:
    return short_frame(log_id, position, epoch, offset, NOW_NS, value)


def long(value: bytes, *, position: int, offset: int) -> bytes:
    (body,) = encode_batch(Batch(values=[value]), NOW_NS, packing=Packing(), cap_bytes=1 << 30)
    place = FramePlace(LOG_ID, 1, position, offset, 0)
    return header_for(body, place, batch_remaining=0) + b"".join(body.parts)


def segment(*values: bytes) -> list[bytes]:
    """A long frame, and a short one for each of the values."""
    frames = [long(b"the first", position=0, offset=0)]
    for offset, value in enumerate(values, 1):
        frames.append(short(value, position=sum(map(len, frames)), offset=offset))
    return frames


def walked(data: bytes) -> list[FrameHeader | Damage]:
    return list(walk(memoryview(data), FrameRules(LOG_ID, 0)))


def offsets(data: bytes) -> list[int]:
    return [found.base_offset for found in walked(data) if isinstance(found, FrameHeader)]


def layouts(log: Log) -> str:
    """One letter for each frame of the log."""
    return "".join("s" if frame.header.is_short else "L" for frame in log.read(log.start))


def opened(disk: SimulatedDisk | None = None, **settings: object) -> Log:
    defaults = {"min_free_bytes": 0, "durability": "os"} | settings
    return Log.open("log", LogSettings(**defaults), World(ManualClock(), disk or SimulatedDisk(), SeededIds()))


def test_a_message_of_100_bytes_takes_136():
    assert len(short(bytes(100), position=0, offset=0)) == short_bytes(100) == 136


@pytest.mark.parametrize("length", [0, 1, 7, 48, 51, 52, 53, 59, 60, 61, 100, 1023, SHORT_MOST])
def test_a_short_frame_has_room_for_a_gap_and_reads_as_the_long_one_it_stands_for(length: int):
    value = bytes(range(256)) * 256
    frame = short(value[:length], position=800, offset=7, epoch=SHORT_MOST)
    assert len(frame) == short_bytes(length) >= HEADER_BYTES
    assert len(frame) % 8 == 0
    assert len(frame) < HEADER_BYTES + SHORT_AROUND or len(frame) - length < SHORT_AROUND + 8
    found = read_frame(memoryview(frame), 0, 800, max_raw_bytes=1 << 20)
    assert found.header.end == 800 + len(frame)
    assert found.records() == [Record(7, NOW_NS, value[:length], epoch=SHORT_MOST)]
    assert found.values() == found.values_in_place() == found.columns().values() == [value[:length]]
    (body,) = encode_batch(Batch(values=[value[:length]]), NOW_NS, packing=Packing(), cap_bytes=1 << 30)
    assert bytes(found.stored) == b"".join(body.parts)[: body.body_bytes]
    assert b"".join(stored_frame(found)) == frame


def test_frames_of_both_layouts_can_be_read_out_of_a_copy():
    frames = segment(b"a", bytes(100), b"b" * 500)
    copied = list(frames_in(memoryview(b"".join(frames[1:])), max_raw_bytes=1 << 20))
    assert [frame.values()[0] for frame in copied] == [b"a", bytes(100), b"b" * 500]
    with pytest.raises(CorruptData):
        list(frames_in(memoryview(b"".join(frames[1:])[:-8]), max_raw_bytes=1 << 20))


@pytest.mark.parametrize("value", [b"", b"x", bytes(100), b"y" * 77], ids=len)
def test_a_flip_in_any_byte_is_detected_and_costs_one_message(value: bytes):
    frames = segment(b"before", value, b"behind")
    start, whole = len(frames[0]) + len(frames[1]), b"".join(frames)
    assert offsets(whole) == [0, 1, 2, 3]
    for at in range(start, start + len(frames[2])):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            found = walked(bytes(data))
            assert [f.base_offset for f in found if isinstance(f, FrameHeader)] == [0, 1, 3]
            (damage,) = [f for f in found if isinstance(f, Damage)]
            assert (damage.position, damage.end) == (start, start + len(frames[2]))


@pytest.mark.parametrize("zeros", [0, 4096])
def test_what_is_cut_at_any_byte_is_no_frame(zeros: int):
    frames = segment(b"before", bytes(range(100)))
    whole = b"".join(frames)
    start = len(whole) - len(frames[2])
    for end in range(start, len(whole)):
        assert offsets(whole[:end] + bytes(zeros)) == [0, 1]
    assert offsets(whole + bytes(zeros)) == [0, 1, 2]


def test_a_length_from_a_damaged_frame_is_not_used():
    frames = segment(b"x" * 100, b"behind")
    data = bytearray(b"".join(frames))
    data[len(frames[0]) + 12 : len(frames[0]) + 14] = b"\xff\xff"
    assert offsets(bytes(data)) == [0, 2]


@pytest.mark.parametrize("fields", [{}, {"log_id": LOG_ID ^ 1, "right": 1}, {"offset": 0, "right": 1}], ids=str)
def test_a_copy_of_a_short_frame_inside_a_value_is_never_taken_for_one(fields: dict[str, int]):
    first = long(b"the first", position=0, offset=0)
    inside_at = len(first) + 32
    place = {"position": inside_at if fields.pop("right", 0) else 0, "offset": 1} | fields
    inner = short(b"I am no frame", **place)
    middle = bytearray(short(inner, position=len(first), offset=1))
    behind = short(b"behind", position=len(first) + len(middle), offset=2)
    assert inside_at % 8 == 0
    assert offsets(first + bytes(middle) + behind) == [0, 1, 2]
    middle[-1] ^= 1
    assert offsets(first + bytes(middle) + behind) == [0, 2]


def test_a_value_full_of_foreign_short_headers_does_not_make_a_search_slow():
    """Each claims the longest value: to sum up every one of them would read each byte thousands of times."""
    many = 20_000
    payload = b"".join(short(b"", position=i * HEADER_BYTES, offset=1, log_id=LOG_ID ^ 1) for i in range(many))
    payload = bytearray(payload)
    for i in range(many):
        payload[i * HEADER_BYTES + 12 : i * HEADER_BYTES + 14] = b"\xff\xff"
    started = time.process_time()
    assert find_frame(memoryview(bytes(payload) + bytes(1 << 16)), 0, FrameRules(LOG_ID, 0)) is None
    assert time.process_time() - started < 1  # 0.1 s, or else some seconds


def test_a_frame_of_another_log_or_place_is_none():
    frame = memoryview(short(b"x", position=80, offset=3))
    assert read_header(frame, 0, 80).base_offset == 3
    with pytest.raises(ChecksumMismatch):
        read_header(frame, 0, 88)
    with pytest.raises(CorruptData):
        read_header(frame, 0, 80, LOG_ID ^ 1)
    with pytest.raises(ChecksumMismatch):
        read_header(frame[:-1], 0, 80)


def test_only_plain_small_single_messages_get_short_frames():
    log = opened()
    log.append_one(b"the first of a segment")
    for batch in (
        Batch(values=[b"plain"]),
        Batch(values=[b"keyed"], keys=[b"k"]),
        Batch(values=[b"two", b"at once"]),
        Batch(values=[b"urgent"], priorities=b"\5"),
        Batch(values=[b"x" * 1023]),
        Batch(values=[b"x" * 1024]),
    ):
        log.append(batch)
    log.append([b"of a producer"], producer=Producer(5, 0, 0))
    log.append([b"small"], codec="gzip")
    log.append([b"x" * 1023 * 2], codec="gzip")
    assert layouts(log) == "LsLLLsLLsL"


def test_the_first_frame_of_a_segment_and_the_first_after_a_sync_an_opening_or_a_cut_are_long():
    disk = SimulatedDisk()
    log = opened(disk)

    def put(count: int) -> None:
        for _ in range(count):
            log.append_one(b"x")

    put(3)
    assert layouts(log) == "Lss"
    log.sync()
    put(2)
    log.append([b"held"], durability="fsync")
    put(2)
    assert layouts(log) == "LssLssLs"
    log.truncate(7)
    put(2)
    assert layouts(log) == "LssLssLLs"
    log.roll()
    put(2)
    assert layouts(log) == "LssLssLLsLs"
    log.close()
    log = opened(disk)
    put(2)
    assert layouts(log) == "LssLssLLsLsLs"


def interrupt_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """Have the next call of this function end like one during which a signal arrives, at its very beginning."""
    original = getattr(where, name)

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(where, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.parametrize("step", ["_use", "_expect_long"])
def test_the_first_frame_of_a_segment_is_long_if_a_signal_came_when_it_was_started(
    monkeypatch: pytest.MonkeyPatch, step: str
):
    log = opened()
    for _ in range(3):
        log.append_one(b"x")
    interrupt_once(monkeypatch, log._writer, step)
    with pytest.raises(KeyboardInterrupt):
        log.roll()
    for _ in range(3):
        log.append_one(b"x")
    assert layouts(log) == "LssLss"
    assert [facts.base_offset for facts in log.segments()] == [0, 3]


def test_no_short_frame_follows_a_sync_that_a_signal_ended(monkeypatch: pytest.MonkeyPatch):
    log = opened()
    log.append_one(b"x")
    log.append_one(b"x")
    interrupt_once(monkeypatch, log._writer, "_expect_long")
    with pytest.raises(KeyboardInterrupt):
        log._writer.sync()
    log.append_one(b"x")
    *_, last = [frame.header for frame in log.read(0)]
    assert not last.is_short or log._writer.synced_end == 0


def test_one_frame_in_64_kib_is_long():
    log = opened()
    for _ in range(2000):
        log.append_one(bytes(100))
    found = layouts(log)
    assert [found.index("L", 1), found.count("L")] == [483, 5]


def test_an_epoch_above_65535_gets_long_frames():
    log = opened()
    with log._writer.lock:
        log._writer.begin_epoch(SHORT_MOST, log._writer.epochs)
    log.append_one(b"a")
    log.append_one(b"b")
    with log._writer.lock:
        log._writer.begin_epoch(SHORT_MOST + 1, log._writer.epochs)
    log.append_one(b"c")
    log.append_one(b"d")
    assert layouts(log) == "LsLL"
    assert [record.epoch for record in log.records(0)] == [SHORT_MOST] * 2 + [SHORT_MOST + 1] * 2


def written_by_the_release_before(monkeypatch: pytest.MonkeyPatch, disk: SimulatedDisk) -> None:
    """A log with one segment of long frames, whose first one has no flags."""
    with monkeypatch.context() as before:
        before.setattr("holdfast.codec.encode.MAY_HOLD_SHORT", 0)
        before.setattr(frames_module, "MAY_HOLD_SHORT", 0)
        before.setattr(writer_module, "MAY_HOLD_SHORT", 0)
        log = opened(disk)
        log.append([b"one", b"two"])
        log.append([b"three", b"four"])
        log.close()


@pytest.mark.parametrize("clean", [True, False])
def test_a_segment_that_an_older_release_began_gets_no_short_frames(monkeypatch: pytest.MonkeyPatch, clean: bool):
    disk = SimulatedDisk()
    written_by_the_release_before(monkeypatch, disk)
    log = opened(disk)
    assert next(iter(log.read(0))).header.flags == 0
    log.append_one(b"five")
    log.append_one(b"six")
    if clean:
        log.close()
    log = opened(disk if clean else disk.kill())
    log.append_one(b"seven")
    log.append_one(b"eight")
    assert layouts(log) == "LLLLLL"
    log.roll()
    log.append_one(b"nine")
    log.append_one(b"ten")
    assert layouts(log) == "LLLLLLLs"


@pytest.mark.parametrize("clean", [True, False])
def test_a_release_that_does_not_know_short_frames_refuses_the_log(monkeypatch: pytest.MonkeyPatch, clean: bool):
    disk = SimulatedDisk()
    log = opened(disk)
    for _ in range(3):
        for _ in range(40):
            log.append_one(bytes(100))
        log.roll()
    log.append_one(b"last")
    if clean:
        log.close()
    disk = disk if clean else disk.kill()
    before = {name: disk.contents(f"log/{name}") for name in disk.names("log") if name.endswith(".log")}
    monkeypatch.setattr(frame_module, "KNOWN_FLAGS", 0xFF)
    monkeypatch.setattr(frames_module, "KNOWN_FLAGS", 0xFF)
    monkeypatch.setattr(frame_module, "SHORT_VERSION", 255)
    world = World(ManualClock(), disk, SeededIds())
    reader = LogReader("log", world=world) if clean else None
    for offset in (0, 39, 60, 120) if reader is not None else ():
        with pytest.raises(UnknownFormat):
            list(reader.records(offset, on_damage="skip"))
    with pytest.raises(UnknownFormat):
        opened(disk)
    after = {name: disk.contents(f"log/{name}") for name in disk.names("log") if name.endswith(".log")}
    assert after == before


def test_damage_to_the_smallest_short_frame_is_repaired_with_a_gap():
    logged = Logged()
    log = logged.open()
    for n in range(6):
        logged.append(log, [b"%d" % n], durability="os")
    log.close()
    name = logged.segments()[0]
    small = logged.frames(name)[3]
    assert small.is_short
    logged.flip(name, small.position + 33)
    logged.repair()
    assert logged.readable() == ({n: b"%d" % n for n in range(6) if n != 3}, {3})


def test_a_repaired_first_frame_still_says_that_short_ones_may_follow():
    logged = Logged()
    log = logged.open()
    for n in range(6):
        logged.append(log, [b"%d" % n], durability="os")
    log.close()
    name = logged.segments()[0]
    logged.flip(name, 90)
    logged.repair()
    first = logged.frames(name)[0]
    assert (first.kind, first.flags) == (4, MAY_HOLD_SHORT)
    assert logged.disk.contents(f"{FOLDER}/{name}")[first.end :].startswith(SHORT_MAGIC)


def test_key_compaction_leaves_short_frames_short_at_their_new_places():
    log = opened()
    log.append(Batch(values=[b"old"], keys=[b"k"]))
    for n in range(5):
        log.append_one(b"without a key %d" % n)
    log.append(Batch(values=[b"x" * 300], keys=[b"k"]))
    log.append_one(b"last")
    log.roll()
    log.append(Batch(values=[b"new"], keys=[b"k"]))
    log.sync()
    before = {record.offset: record for record in log.records(0)}
    assert layouts(log) == "LLssssLsL"
    assert log.compact_keys(before=log.end, tombstone_ms=0, min_saving_percent=0).removed_messages == 2
    assert layouts(log) == "LLssssLsL"  # the two that are gone are holes
    assert {record.offset: record for record in log.records(0)} == {n: before[n] for n in before if n not in (0, 6)}
    first, *others = [frame.header for frame in log.read(0)][:-1]
    assert first.flags == MAY_HOLD_SHORT + 1
    assert [header.position for header in others] == [header.end for header in [first, *others][:-1]]
