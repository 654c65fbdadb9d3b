"""Frames: both checksums cover every byte, a frame is valid in one place only, newer formats are not damage."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
from crc32c import crc32c

from holdfast.codec.encode import FramePlace, Packing, encode_batch, gap_body, header_for
from holdfast.codec.frame import (
    HEADER_BYTES,
    Codec,
    FrameHeader,
    Kind,
    check_body,
    frame_bytes,
    read_frame,
    read_header,
)
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import ChecksumMismatch, CorruptData, InvalidRequest, UnknownFormat
from holdfast.model import Batch, Producer, Record
from holdfast.settings import LogSettings
from holdfast.storage.frames import Damage, FrameRules, find_frame, first_log_id, used_end, walk
from holdfast.storage.log import Log
from holdfast.storage.state import Epochs

LOG_ID = 0xC0FFEE07
NOW_NS = 1_700_000_000_000_000_000
MAX_RAW_BYTES = 64 * 1024 * 1024
CODECS = [Codec.NONE, Codec.ZSTD, Codec.LZ4, Codec.GZIP]

# The header as format.md tells it, and where each field lies.
LAYOUT = "4sIIIIIBBHIQqQIIQIIII"
FIELDS = FrameHeader.__struct_fields__

FULL = Batch(
    values=[b"first", b"", b"third message", b"x" * 40],
    times_ns=[NOW_NS - 5, NOW_NS, -1, 0],
    keys=[b"key", None, b"", b"k"],
    headers=[[("a", b"1"), ("a", b"2")], [], [("", b"")], [("naïve ☃", b"\xff")]],
    priorities=[0, 255, 3, 4],
    expires_at_ms=[0, 1, 2**62, 3],
    due_at_ms=[9, 0, 8, 2**62],
    flags=[1, 0, 255, 2],
)


def encoded(
    batch: Batch,
    *,
    position: int = 0,
    base_offset: int = 0,
    codec: Codec = Codec.NONE,
    cap_bytes: int = 1 << 30,
    log_id: int = LOG_ID,
    epoch: int = 1,
    kind: Kind = Kind.DATA,
) -> list[bytes]:
    """The batch as whole frames, one behind the other; packed wherever it has a codec."""
    packing = Packing(codec, None, 0, 0)
    bodies = encode_batch(batch, NOW_NS, packing=packing, cap_bytes=cap_bytes, kind=kind)
    frames = []
    for left, body in zip(range(len(bodies) - 1, -1, -1), bodies, strict=True):
        place = FramePlace(log_id, epoch, position, base_offset, 0)
        frames.append(header_for(body, place, batch_remaining=left) + b"".join(body.parts))
        position, base_offset = position + body.frame_bytes, base_offset + body.count
    return frames


def one(value: bytes, *, position: int = 0, base_offset: int = 0, epoch: int = 1, log_id: int = LOG_ID) -> bytes:
    batch = Batch(values=[value])
    return encoded(batch, position=position, base_offset=base_offset, epoch=epoch, log_id=log_id)[0]


def segment_of(*values: bytes) -> list[bytes]:
    """Frames of one message each, from position and offset 0 on."""
    frames: list[bytes] = []
    for value in values:
        frames.append(one(value, position=sum(map(len, frames)), base_offset=len(frames)))
    return frames


def resealed(frame: bytes, **fields: object) -> bytes:
    """The frame with other header fields and a header checksum that is right for them."""
    values = dict(zip(FIELDS, struct.unpack_from("<" + LAYOUT, frame), strict=True)) | fields
    checked = struct.pack("<" + LAYOUT[:-1], *list(values.values())[:-1])
    return checked + struct.pack("<I", crc32c(checked)) + frame[HEADER_BYTES:]


def with_body(frame: bytes, stored: bytes, **fields: object) -> bytes:
    """The frame with another stored body (padded here) and checksums that are right for it."""
    padded = stored + bytes(-len(stored) % 8)
    changed = {"body_bytes": len(stored), "body_crc": crc32c(padded)} | fields
    return resealed(frame[:HEADER_BYTES] + padded, **changed)


def read(frame: bytes, position: int = 0):
    return read_frame(memoryview(frame), 0, position, max_raw_bytes=MAX_RAW_BYTES)


def walked(data: bytes, *, log_id: int = LOG_ID, offset: int = 0, epochs: Epochs | None = None, bodies: bool = True):
    return list(walk(memoryview(data), FrameRules(log_id, offset, epochs=epochs or Epochs()), bodies=bodies))


def offsets(found: list[FrameHeader | Damage]) -> list[int]:
    return [item.base_offset for item in found if isinstance(item, FrameHeader)]


def damages(found: list[FrameHeader | Damage]) -> list[Damage]:
    return [item for item in found if isinstance(item, Damage)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_gives_back_its_messages_with_offsets_and_epoch(codec: Codec):
    (frame,) = encoded(FULL, base_offset=7_000_000_000, codec=codec, epoch=3)
    got = list(read(frame).records())
    assert read(frame).header.codec == codec
    assert got[0] == Record(
        7_000_000_000, NOW_NS - 5, b"first", b"key", (("a", b"1"), ("a", b"2")), 0, 0, 9, 1, epoch=3
    )
    assert [record.offset for record in got] == [7_000_000_000 + i for i in range(4)]
    assert [record.value for record in got] == FULL.values
    assert [record.key for record in got] == FULL.keys
    assert [record.headers for record in got] == [tuple(row) for row in FULL.headers or ()]
    assert [record.flags for record in got] == FULL.flags


def test_a_frame_without_columns_fills_in_time_and_nothing_else():
    (frame,) = encoded(Batch(values=[b"a", b"b"]), base_offset=5)
    assert read(frame).header.columns == 0
    assert list(read(frame).records()) == [Record(5, NOW_NS, b"a", epoch=1), Record(6, NOW_NS, b"b", epoch=1)]


def test_the_header_keeps_the_latest_time_of_its_messages():
    (frame,) = encoded(FULL)
    assert read(frame).header.max_time_ns == NOW_NS
    (older,) = encoded(Batch(values=[b"a", b"b"], times_ns=[-7, -9]))
    assert read(older).header.max_time_ns == -7


def test_a_batch_over_the_cap_becomes_several_frames_that_count_down():
    values = [bytes([i]) * 100 for i in range(10)]
    frames = encoded(Batch(values=values, priorities=list(range(10))), base_offset=40, cap_bytes=250)
    headers = [header for header in walked(b"".join(frames), offset=40) if isinstance(header, FrameHeader)]
    assert [header.count for header in headers] == [2] * 5
    assert [header.base_offset for header in headers] == [40, 42, 44, 46, 48]
    assert [header.batch_remaining for header in headers] == [4, 3, 2, 1, 0]
    assert [header.next_offset for header in headers] == [42, 44, 46, 48, 50]
    assert [header.end for header in headers] == [sum(map(len, frames[: i + 1])) for i in range(5)]
    got = [
        record
        for frame, header in zip(frames, headers, strict=True)
        for record in read(frame, header.position).records()
    ]
    assert [record.value for record in got] == values
    assert [record.priority for record in got] == list(range(10))


def test_a_message_over_the_cap_gets_a_frame_of_its_own():
    values = [b"a", b"b" * 1000, b"c", b"d"]
    frames = encoded(Batch(values=values), cap_bytes=10)
    assert [read_header(memoryview(f), 0, struct.unpack_from("<I", f, 8)[0]).count for f in frames] == [1, 1, 2]


def test_keys_and_headers_count_towards_the_cap():
    batch = Batch(values=[b""] * 4, keys=[b"k" * 60] * 4, headers=[[("n" * 20, b"v" * 20)]] * 4)
    assert len(encoded(batch, cap_bytes=100)) == 4
    assert len(encoded(batch, cap_bytes=250)) == 2


def test_many_tiny_messages_do_not_make_a_frame_far_over_the_cap():
    frames = encoded(Batch(values=[b""] * 20_000, times_ns=[0] * 20_000), cap_bytes=1024)
    assert max(map(len, frames)) < 20 * 1024


@pytest.mark.parametrize("length", range(17))
def test_padding_is_zero_and_brings_the_frame_to_eight_bytes(length: int):
    frame = one(b"v" * length)
    header = read(frame).header
    assert len(frame) % 8 == 0
    assert len(frame) == frame_bytes(header.body_bytes)
    assert frame[HEADER_BYTES + header.body_bytes :] == bytes(-header.body_bytes % 8)


def test_padding_is_covered_by_the_checksum():
    frame = bytearray(one(b"v"))
    assert read(bytes(frame)).header.body_bytes % 8
    frame[-1] = 1
    with pytest.raises(ChecksumMismatch):
        read(bytes(frame))


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_is_noticed(codec: Codec):
    (frame,) = encoded(FULL, codec=codec)
    for at in range(len(frame)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            flipped = bytearray(frame)
            flipped[at] ^= mask
            with pytest.raises(ChecksumMismatch):
                read(bytes(flipped))


def test_every_flipped_byte_is_noticed_by_a_walk_and_costs_its_frame_only():
    frames = segment_of(b"before", b"in the middle!", b"behind")
    data = b"".join(frames)
    start, end = len(frames[0]), len(frames[0]) + len(frames[1])
    for at in range(start, end):
        flipped = bytearray(data)
        flipped[at] ^= 0x40
        found = walked(bytes(flipped))
        assert offsets(found) == [0, 2]
        assert [(d.position, d.end, d.first_offset, d.next_offset) for d in damages(found)] == [(start, end, 1, 2)]


@pytest.mark.parametrize("field", ["body_bytes", "raw_bytes", "count", "batch_remaining", "flags", "base_offset"])
@pytest.mark.parametrize("value", [0, 1, 2**15, 2**31 - 1, 2**32 - 1])
def test_a_spoiled_length_is_a_wrong_checksum_not_a_cut_short_write(field: str, value: int):
    frame = one(b"payload", base_offset=9)
    damaged = resealed(frame, **{field: min(value, 0xFFFF) if field == "flags" else value})
    damaged = damaged[:84] + frame[84:]  # the old checksum
    if damaged != frame:
        with pytest.raises(ChecksumMismatch, match="does not match its checksum"):
            read(damaged)


def test_a_frame_cut_at_any_length_is_an_error():
    (frame,) = encoded(FULL)
    for length in range(len(frame)):
        with pytest.raises(ChecksumMismatch):
            read(frame[:length])


def test_a_frame_cut_at_any_length_is_a_torn_tail_for_a_walk():
    frames = segment_of(b"good", b"torn off")  # no padding: else the zeros behind would make it whole again
    data = b"".join(frames)
    start = len(frames[0])
    for length in range(start + 1, len(data)):
        for tail in (b"", bytes(100)):
            found = walked(data[:length] + tail)
            assert offsets(found) == [0]
            (torn,) = damages(found)
            assert (torn.position, torn.first_offset, torn.next_offset) == (start, 1, None)
            assert start < torn.end <= length


def test_a_frame_at_another_position_is_refused():
    frame = one(b"here", position=800)
    assert read(frame, 800).values() == [b"here"]
    for position in (0, 8, 792, 808, 801, 2**32 - 8):
        with pytest.raises(ChecksumMismatch, match="written for position 800"):
            read(frame, position)


def test_a_frame_of_another_log_is_refused_by_a_walk():
    mine, theirs = segment_of(b"mine", b"theirs")
    theirs = resealed(theirs, log_id=LOG_ID + 1)
    assert read(theirs, len(mine)).values() == [b"theirs"]
    found = walked(mine + theirs)
    assert offsets(found) == [0]
    assert "another log" in damages(found)[0].reason


def test_offsets_that_run_backwards_are_refused_by_a_walk():
    first = one(b"a", base_offset=5)
    again = one(b"b", position=len(first), base_offset=5)
    assert offsets(walked(first + again, offset=5)) == [5]
    assert offsets(walked(first, offset=6)) == []


def test_a_frame_of_a_cut_off_epoch_is_void():
    first = one(b"kept", epoch=1)
    second = one(b"void", position=len(first), base_offset=1, epoch=1)
    table = Epochs([(1, 0), (2, 1)])
    assert offsets(walked(first + second, epochs=table)) == [0]
    assert offsets(walked(first + second, epochs=Epochs([(1, 0), (2, 2)]))) == [0, 1]


def test_missing_offsets_between_good_frames_are_named():
    first = one(b"a")
    later = one(b"b", position=len(first), base_offset=10)
    (missing,) = damages(walked(first + later))
    assert (missing.position, missing.end) == (len(first), len(first))
    assert (missing.first_offset, missing.next_offset) == (1, 10)


NEWER = {
    "version": {"magic": b"HFR\x03"},
    "version 0": {"magic": b"HFR\x00"},
    "kind": {"kind": 6},
    "kind 0": {"kind": 0},
    "codec": {"codec": 4},
    "columns": {"columns": 1 << 9},
    "high columns": {"columns": 1 << 31},
    "flags": {"flags": 1 << 9},
    "high flags": {"flags": 1 << 15},
}


@pytest.mark.parametrize("fields", NEWER.values(), ids=NEWER)
def test_what_a_newer_release_wrote_is_unknown_and_not_damage(fields: dict[str, object]):
    with pytest.raises(UnknownFormat) as caught:
        read(resealed(one(b"from the future"), **fields))
    assert not isinstance(caught.value, ChecksumMismatch)


@pytest.mark.parametrize("bodies", [True, False])
@pytest.mark.parametrize("fields", NEWER.values(), ids=NEWER)
def test_a_walk_stops_at_a_newer_frame_and_never_calls_it_torn(fields: dict[str, object], bodies: bool):
    old, new = segment_of(b"old", b"new")
    new = resealed(new, **fields)
    for data in (old + new, old + new + bytes(200), old + new + b"torn behind"):
        with pytest.raises(UnknownFormat):
            walked(data, bodies=bodies)


@pytest.mark.parametrize("fields", NEWER.values(), ids=NEWER)
def test_a_newer_frame_behind_damage_is_unknown_too(fields: dict[str, object]):
    old, new = segment_of(b"old", b"new")
    new = resealed(new, **fields)
    broken = bytearray(old)
    broken[90] ^= 1
    with pytest.raises(UnknownFormat):
        walked(bytes(broken) + new)


def test_a_plain_body_must_have_one_length():
    for raw_bytes in (0, 10, 12, 10_000):
        frame = read(resealed(one(b"abc"), raw_bytes=raw_bytes))
        for decode in (frame.columns, frame.values, lambda frame=frame: list(frame.records())):
            with pytest.raises(CorruptData, match="two lengths"):
                decode()


@pytest.mark.parametrize("end", [-1, 4, 5, 8, 11, 12, 2**31 - 1])
def test_a_single_value_never_reaches_beyond_its_body(end: int):
    frame = with_body(one(b"abc"), struct.pack("<ii", 0, end) + b"abc")
    for decode in (read(frame).values, lambda: list(read(frame).records()), lambda: read(frame).columns().values()):
        with pytest.raises(CorruptData):
            decode()


def test_a_frame_that_claims_more_bytes_than_there_are_is_none_even_if_its_checksums_are_right():
    frame = one(b"abcdefgh")
    longer = resealed(frame, body_bytes=1000, raw_bytes=1000)  # the sum of the body is that of what is there
    with pytest.raises(ChecksumMismatch, match="the file ends inside"):
        read(longer)
    for bodies in (True, False):
        assert offsets(walked(longer, bodies=bodies)) == []


def test_a_gap_frame_is_a_header_that_says_how_many_are_lost():
    body = gap_body(HEADER_BYTES, 2**32 - 1, NOW_NS)
    frame = header_for(body, FramePlace(LOG_ID, 2, 0, 10, 10), batch_remaining=0) + b"".join(body.parts)
    assert len(frame) == HEADER_BYTES
    (header,) = walked(frame, offset=10)
    assert isinstance(header, FrameHeader)
    assert (header.kind, header.base_offset, header.next_offset) == (Kind.GAP, 10, 10 + 2**32 - 1)
    with pytest.raises(CorruptData):
        read(frame).values()


def test_a_gap_frame_never_has_messages():
    body = gap_body(HEADER_BYTES + 16, 2, NOW_NS)
    frame = header_for(body, FramePlace(LOG_ID, 2, 0, 10, 10), batch_remaining=0) + b"".join(body.parts)
    with pytest.raises(CorruptData):
        read(frame).values()


def test_the_producer_is_kept():
    (body,) = encode_batch(Batch(values=[b"a"]), NOW_NS, packing=Packing(), cap_bytes=100)
    producer = Producer(2**64 - 1, 2**32 - 1, 2**32 - 2)
    frame = header_for(body, FramePlace(LOG_ID, 1, 0, 0, 0), batch_remaining=0, producer=producer) + b"".join(
        body.parts
    )
    header = read(frame).header
    assert (header.producer_id, header.producer_epoch, header.first_sequence) == (2**64 - 1, 2**32 - 1, 2**32 - 2)


@pytest.mark.parametrize(
    "options",
    [{"kind": Kind.GAP}, {"kind": 99}, {"producer": Producer(-1)}, {"producer": Producer(1, 2**32)}],
    ids=["gap", "unknown kind", "negative producer", "large epoch"],
)
def test_a_kind_or_producer_that_no_frame_can_have_is_refused_and_nothing_is_kept(options: dict[str, Any]):
    log = Log.open("log", LogSettings(min_free_bytes=0), World(ManualClock(), SimulatedDisk(), SeededIds()))
    with pytest.raises(InvalidRequest):
        log.append([b"a"], **options)
    assert log.written_end == 0


def nested(*, at_right_place: bool, log_id: int = LOG_ID, **fields: object) -> tuple[list[bytes], int]:
    """Three frames; the middle one's payload is itself a whole frame, which the answer's number locates."""
    first = one(b"first")
    inside_at = len(first) + HEADER_BYTES + 8  # behind the two value ends
    inner = one(b"I am no frame", position=inside_at if at_right_place else len(first), base_offset=1, log_id=log_id)
    middle = one(resealed(inner, **fields) + b"tail", position=len(first), base_offset=1)
    behind = one(b"behind", position=len(first) + len(middle), base_offset=2)
    return [first, middle, behind], inside_at


def damaged_middle(frames: list[bytes], at: int) -> bytes:
    middle = bytearray(frames[1])
    middle[at] ^= 0xFF
    return frames[0] + bytes(middle) + frames[2]


@pytest.mark.parametrize("at", [0, 20, 84, 87, -1, -8])
def test_a_copy_of_a_frame_inside_a_payload_is_never_taken_for_one(at: int):
    frames, inside_at = nested(at_right_place=False)
    assert frames[1][inside_at - len(frames[0]) :].startswith(b"HFR\x01")  # aligned, so that it is looked at
    assert offsets(walked(b"".join(frames))) == [0, 1, 2]
    found = walked(damaged_middle(frames, at))
    assert offsets(found) == [0, 2]
    assert [(d.position, d.end) for d in damages(found)] == [(len(frames[0]), len(frames[0]) + len(frames[1]))]


def test_a_copy_from_an_earlier_segment_at_the_very_same_position_is_refused_by_its_offset():
    frames, inside_at = nested(at_right_place=True, base_offset=0)
    data = damaged_middle(frames, 84)
    assert read_header(memoryview(data), inside_at, inside_at).log_id == LOG_ID
    assert offsets(walked(data)) == [0, 2]


def test_a_frame_of_another_log_inside_a_payload_is_refused_even_at_its_own_position():
    frames, inside_at = nested(at_right_place=True, log_id=LOG_ID ^ 1)
    data = damaged_middle(frames, -1)
    assert read_header(memoryview(data), inside_at, inside_at).log_id != LOG_ID
    assert offsets(walked(data)) == [0, 2]


def test_a_newer_header_of_another_log_inside_a_payload_does_not_stop_a_walk():
    frames, _ = nested(at_right_place=True, log_id=LOG_ID ^ 1, magic=b"HFR\x03")
    assert offsets(walked(damaged_middle(frames, -1))) == [0, 2]


def test_a_payload_full_of_foreign_headers_does_not_make_a_search_slow():
    """Each claims a body up to the end: to sum up every one of them would take the square of the time."""
    first, (template, *_) = one(b"first"), encoded(Batch(values=[b""]), log_id=LOG_ID ^ 1)
    inside_at, many = len(first) + HEADER_BYTES + 8, 47_000
    payload = b"".join(
        resealed(
            template[:HEADER_BYTES],
            position=inside_at + i * HEADER_BYTES,
            body_bytes=(many - 1 - i) * HEADER_BYTES,
            base_offset=1,
        )
        for i in range(many)
    )
    middle = bytearray(one(payload, position=len(first), base_offset=1))
    middle[84] ^= 1
    data = first + bytes(middle) + one(b"behind", position=len(first) + len(middle), base_offset=2)
    started = time.process_time()
    assert offsets(walked(data)) == [0, 2]
    assert time.process_time() - started < 2  # it takes 0.2 s, or else 5


def test_a_frame_begins_at_a_multiple_of_eight_or_is_none():
    first = one(b"first")
    inside_at = len(first) + HEADER_BYTES + 8 + 3
    inner = one(b"right in all but this", position=inside_at, base_offset=1)
    middle = bytearray(one(b"abc" + inner, position=len(first), base_offset=1))
    behind = one(b"behind", position=len(first) + len(middle), base_offset=2)
    middle[84] ^= 1
    data = first + bytes(middle) + behind
    assert read_header(memoryview(data), inside_at, inside_at).log_id == LOG_ID
    assert offsets(walked(data)) == [0, 2]


def test_magic_bytes_in_payloads_are_harmless():
    frames = segment_of(b"HFR\x01" * 50, b"HFR" * 41 + b"HFR\x01HFR\x01", b"\0\0\0\0HFR\x01" * 9)
    data = b"".join(frames)
    assert offsets(walked(data)) == [0, 1, 2]
    broken = bytearray(data)
    broken[len(frames[0]) + 85] ^= 1
    assert offsets(walked(bytes(broken))) == [0, 2]


def test_a_search_finds_a_frame_across_the_edge_of_its_window():
    window = 1 << 20
    for position in (window - 8, window, window + 8, 2 * window):
        data = b"\xff" * position + one(b"far", position=position)
        found = find_frame(memoryview(data), 0, FrameRules(LOG_ID, 0))
        assert found is not None
        assert found.position == position
        assert first_log_id(memoryview(data)) == LOG_ID


def test_zeros_behind_the_last_frame_are_no_damage():
    frames = segment_of(b"a", b"b")
    data = b"".join(frames)
    for zeros in (0, 1, 7, 8, 88, 4096, 3 << 20):
        assert damages(walked(data + bytes(zeros))) == []
        assert used_end(memoryview(data + b"x" + bytes(zeros)), len(data)) == len(data) + 1


def test_an_empty_segment_has_neither_frames_nor_damage():
    assert walked(b"") == []
    assert walked(bytes(4096)) == []
    assert first_log_id(memoryview(bytes(4096))) is None


def test_a_walk_without_bodies_still_refuses_a_frame_that_does_not_fit():
    (frame,) = segment_of(b"v" * 100)
    assert offsets(walked(frame, bodies=False)) == [0]
    assert offsets(walked(frame[:-8], bodies=False)) == []


def test_a_body_is_checked_only_where_it_is_whole():
    frame = one(b"abcdefgh")
    header = read_header(memoryview(frame), 0, 0)
    check_body(memoryview(frame + b"more"), 0, header)
    with pytest.raises(ChecksumMismatch, match="the file ends inside"):
        check_body(memoryview(frame[:-1]), 0, header)
