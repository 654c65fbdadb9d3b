"""Whatever bytes there are: decoders answer or say CorruptData, spend no more than the input justifies, and end.

Random bytes hardly get past a checksum, so most tests here change what lies behind it and seal it again.
"""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.codec.columns import KNOWN_COLUMNS
from holdfast.codec.frame import (
    HEADER_BYTES,
    Codec,
    Frame,
    FrameHeader,
    Kind,
    compress,
    decompress,
    read_frame,
    read_header,
)
from holdfast.codec.singles import log_prefixes, read_single
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import CorruptData, HoldfastError, MessageTooLarge
from holdfast.model import Batch, LogPosition
from holdfast.settings import LogSettings
from holdfast.storage.frames import (
    Damage,
    FrameRules,
    SegmentIndex,
    find_frame,
    first_log_id,
    parse_index,
    used_end,
    walk,
)
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from holdfast.storage.state import MAGIC_WORD, WORDS, Epochs, LogState, parse_epochs
from tests.unit.test_frame import FULL, LOG_ID, encoded, one, resealed, with_body

T = TypeVar("T")

REFUSALS = (CorruptData, MessageTooLarge)
MAX_RAW_BYTES = 1 << 20
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
EDGES = st.sampled_from([0, 1, 2, 7, 8, 255, 2**15, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1])

SEEDS = [
    Batch(values=[b"only"]),
    Batch(values=[b""] * 9),
    Batch(values=[b"text " * 30] * 8, keys=[None, b"k"] * 4),
    FULL,
]


def read(data: bytes, position: int = 0) -> Frame:
    return read_frame(memoryview(data), 0, position, max_raw_bytes=MAX_RAW_BYTES)


def stored_body(frame: bytes) -> bytes:
    return frame[HEADER_BYTES : HEADER_BYTES + struct.unpack_from("<I", frame, 12)[0]]


@st.composite
def edits(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few changes: single bits, whole int32 (lengths, ends), a cut, a tail."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        if len(changed) >= 4 and draw(st.booleans()):
            at = draw(st.integers(0, len(changed) // 4 - 1)) * 4
            struct.pack_into("<I", changed, at, draw(st.one_of(EDGES, st.integers(0, 300), U32)))
        elif changed:
            changed[draw(st.integers(0, len(changed) - 1))] ^= 1 << draw(st.integers(0, 7))
    if draw(st.integers(0, 5)) == 0:
        changed = changed[: draw(st.integers(0, len(changed)))]
    if draw(st.integers(0, 5)) == 0:
        changed += draw(st.binary(max_size=40))
    return bytes(changed)


@st.composite
def sealed_frames(draw: st.DrawFn, codec: Codec) -> bytes:
    """A frame that was changed anywhere behind its checksums, which are right."""
    batch = draw(st.sampled_from(SEEDS))
    (frame,) = encoded(batch)
    plain = draw(edits(stored_body(frame)))
    stored = plain
    if codec is not Codec.NONE:
        stored = compress(codec, plain, level=None)
        if draw(st.booleans()):
            stored = draw(edits(stored))
    fields: dict[str, int] = {"codec": int(codec), "raw_bytes": len(plain)}
    if draw(st.booleans()):
        fields["raw_bytes"] = draw(st.one_of(EDGES, U32, st.integers(0, 3000)))
    if draw(st.booleans()):
        fields["count"] = draw(st.one_of(EDGES, U32, st.integers(0, 40)))
    if draw(st.booleans()):
        fields["columns"] = draw(st.one_of(st.integers(0, KNOWN_COLUMNS), U32))
    if draw(st.integers(0, 9)) == 0:
        fields["kind"] = draw(st.integers(0, 255))
    if draw(st.integers(0, 9)) == 0:
        fields["body_bytes"] = draw(st.one_of(EDGES, U32))
    return with_body(frame, stored, **fields)


def exercise(data: bytes) -> None:
    """Read all there is to read; only refusals may come out, and all ways of reading agree."""
    try:
        frame = read(data)
    except REFUSALS:
        return
    values = outcome(frame.values)
    rows = outcome(lambda: frame.columns().values())
    assert (rows is None) == (values is None)
    assert values is None or len(values) == len(frame.offsets()) <= frame.count
    assert frame.is_sparse or (rows == values and (values is None or len(values) == frame.count))
    assert values is None or sum(map(len, values)) <= frame.header.raw_bytes
    with contextlib.suppress(*REFUSALS):
        columns = frame.columns()
        for part in (columns.times_ns, columns.keys, columns.headers, columns.priorities, columns.flags):
            items = outcome(part)
            assert items is None or len(items) == (0 if frame.header.kind == Kind.HOLE else frame.count)
    records = outcome(lambda: list(frame.records()))
    if records is not None:
        assert [record.value for record in records] == values
        assert [record.offset for record in records] == list(frame.offsets())
    single = read_single(memoryview(data), frame.header.position, log_prefixes(frame.header.log_id))
    assert single is None or records == [single[0]]


def outcome(call: Callable[[], T]) -> T | None:
    """What a call answers, None where it refuses."""
    try:
        return call()
    except REFUSALS:
        return None


@given(data=st.binary(max_size=300), position=st.integers(0, 2**32), magic=st.booleans())
def test_any_bytes_as_a_frame(data: bytes, position: int, magic: bool):
    data = b"HFR\x01" + data if magic else data
    with pytest.raises(REFUSALS):
        read_header(memoryview(data), 0, position)
    with pytest.raises(REFUSALS):
        read(data, position)


@given(
    fields=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("log_id", "body_bytes", "raw_bytes", "count", "columns", "batch_remaining"), EDGES)
        | dict.fromkeys(("base_offset", "synced_offset", "producer_id"), U64)
        | {
            "kind": st.integers(0, 255),
            "codec": st.integers(0, 255),
            "magic": st.binary(min_size=4, max_size=4),
        },
    )
)
def test_any_header_with_a_right_checksum(fields: dict[str, object]):
    exercise(resealed(one(b"payload"), **fields))


@pytest.mark.parametrize("codec", Codec)
@given(data=st.data())
def test_any_body_behind_right_checksums(codec: Codec, data: st.DataObject):
    exercise(data.draw(sealed_frames(codec)))


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.LZ4, Codec.GZIP])
@given(data=st.binary(max_size=200), raw_bytes=st.integers(0, 70_000))
def test_any_bytes_as_a_packed_body(codec: Codec, data: bytes, raw_bytes: int):
    with contextlib.suppress(*REFUSALS):
        assert len(decompress(codec, data, raw_bytes=raw_bytes, max_raw_bytes=MAX_RAW_BYTES)) == raw_bytes


BEYOND = with_body(one(b""), struct.pack("<ii", 0, 100) + b"short", raw_bytes=13)


@example(frame=BEYOND)
@example(
    frame=bytes.fromhex(
        "4846520107eeffc0000000000c0000000c000000000000000100000050010000000000000000000000002a36fe9c9717"
        "000000000000000001000000000000000000000000000000000000000000000093385c5375dbda2f00000000040000006f6e6c7900000000"
    )
)  # no message, and a column that says which of them are gone
@given(frame=sealed_frames(Codec.NONE))
def test_any_body_as_arrow_is_the_same_as_without(frame: bytes):
    arrow = pytest.importorskip("holdfast.codec.arrow")
    try:
        checked = read(frame)
    except REFUSALS:
        return
    assert outcome(lambda: arrow.values_to_arrow(checked).to_pylist()) == outcome(checked.values)


@given(data=st.data(), codec=st.sampled_from(Codec))
def test_memory_is_bounded_by_what_came_in(data: st.DataObject, codec: Codec):
    frame = data.draw(sealed_frames(codec))
    exercise(frame)  # the libraries are loaded, their caches filled
    tracemalloc.start()
    try:
        exercise(frame)
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_RAW_BYTES + 100 * len(frame)
    finally:
        tracemalloc.stop()


def segment(values: list[bytes]) -> list[bytes]:
    """Frames from position and offset 0 on; some messages hold a copy of the frame before them, or a header."""
    frames: list[bytes] = []
    for i, value in enumerate(values):
        if frames and value.startswith(b"c"):
            value = value[:8].ljust(8) + frames[-1] + value
        if value.startswith(b"h"):
            value = value[:8].ljust(8) + frames[-1][:HEADER_BYTES] if frames else b"HFR\x01"
        frames.append(one(value, position=sum(map(len, frames)), base_offset=i))
    return frames


@st.composite
def damaged_segments(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Frames, and their bytes after bits were flipped, stretches zeroed or copied elsewhere, and the end cut."""
    head = st.sampled_from([b"", b"c", b"h", b"HFR\x01"])
    frames = segment(draw(st.lists(st.builds(bytes.__add__, head, st.binary(max_size=40)), min_size=1, max_size=8)))
    data = bytearray(b"".join(frames))
    places = st.integers(0, len(data) - 1)
    for _ in range(draw(st.integers(0, 4))):
        start, length = draw(places), draw(st.integers(1, 200))
        match draw(st.integers(0, 2)):
            case 0:
                data[start] ^= 1 << draw(st.integers(0, 7))
            case 1:
                data[start : start + length] = bytes(len(data[start : start + length]))
            case _:
                target = draw(places) // 8 * 8
                stretch = data[start // 8 * 8 :][: min(length, len(data) - target)]
                data[target : target + len(stretch)] = stretch
    if draw(st.integers(0, 3)) == 0:
        data = data[: draw(places)]
    return frames, bytes(data) + bytes(draw(st.sampled_from([0, 8, 100])))


@given(damaged=damaged_segments())
def test_a_walk_finds_every_whole_frame_and_no_other(damaged: tuple[list[bytes], bytes]):
    frames, data = damaged
    starts, at = [], 0
    for frame in frames:
        if is_whole(data[at : at + len(frame)], frame):
            starts.append(at)
        at += len(frame)
    found = list(walk(memoryview(data), FrameRules(LOG_ID, 0)))
    assert [item.position for item in found if isinstance(item, FrameHeader)] == starts
    check_tiling(found, data)


def is_whole(content: bytes, frame: bytes) -> bool:
    """Whether the bytes are the frame as far as checksums tell.

    A header that is copied over another one, inside a message, leaves the checksum of the body as it was: each header
    ends with its own.
    """
    if len(content) != len(frame) or content[:HEADER_BYTES] != frame[:HEADER_BYTES]:
        return False
    return crc32c(content[HEADER_BYTES:]) == crc32c(frame[HEADER_BYTES:])


def check_tiling(found: list[FrameHeader | Damage], data: bytes) -> None:
    """What a walk answers covers the segment, front to back, up to where only zeros follow."""
    position, offset = 0, 0
    for item in found:
        assert item.position == position
        if isinstance(item, FrameHeader):
            assert item.base_offset >= offset
            offset = item.next_offset
        else:
            assert item.first_offset == offset
            assert item.next_offset is None or item.next_offset >= offset
        position = item.end
    assert not any(data[position:])


@given(data=st.binary(max_size=2000), marks=st.lists(st.integers(0, 240), max_size=6), position=st.integers(0, 64))
def test_a_walk_over_any_bytes_ends_and_finds_nothing(data: bytes, marks: list[int], position: int):
    changed = bytearray(data)
    for mark in marks:
        changed[mark * 8 : mark * 8 + 4] = b"HFR\x01"
    view = memoryview(bytes(changed))
    for bodies in (True, False):
        found = list(walk(view, FrameRules(LOG_ID, 0), bodies=bodies))
        assert len(found) <= 1
        assert all(isinstance(item, Damage) for item in found)
        check_tiling(found, bytes(view))
    assert find_frame(view, position * 8, FrameRules(LOG_ID, 0)) is None
    assert first_log_id(view) is None
    assert used_end(view, 0) == len(bytes(view).rstrip(b"\0"))


@given(data=st.data())
def test_a_walk_over_sealed_frames_of_any_content_ends(data: st.DataObject):
    """Headers with right checksums and any fields: each is a whole frame, damage, or unknown."""
    pieces, position = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        piece = data.draw(sealed_frames(Codec.NONE))
        piece = resealed(
            piece,
            position=position,
            base_offset=data.draw(st.integers(0, 20)),
            epoch=data.draw(st.integers(0, 2)),
            log_id=data.draw(st.sampled_from([LOG_ID, LOG_ID, LOG_ID, 5])),
        )
        pieces.append(piece)
        position += len(piece)
    stored = b"".join(pieces)
    table = Epochs([(1, data.draw(st.integers(0, 20)))])
    for bodies in (True, False):
        try:
            found = list(walk(memoryview(stored), FrameRules(LOG_ID, 0, epochs=table), bodies=bodies))
        except CorruptData:
            continue
        check_tiling(found, stored)
        for item in found:
            if isinstance(item, FrameHeader):
                assert item.log_id == LOG_ID
                assert stored[item.position : item.position + 4] == b"HFR\x01"
                if bodies:
                    body = stored[item.position + HEADER_BYTES : item.end]
                    assert crc32c(body) == item.body_crc


@given(content=st.binary(max_size=200))
def test_any_bytes_as_index_or_epochs(content: bytes):
    assert parse_index(content, 1, 2, 512) is None
    assert parse_epochs(content) is None
    assert parse_index(b"HFINDEX\x01" + content, 1, 2, 512) is None
    assert parse_epochs(b"HFEPOCH\x01" + content) is None


@given(entries=st.lists(st.tuples(U32, U64), max_size=8), log_id=U32, cut=st.integers(1, 60), flip=st.integers(0, 200))
def test_epochs_come_back_and_any_change_is_noticed(entries: list[tuple[int, int]], log_id: int, cut: int, flip: int):
    content = struct.pack("<8sII", b"HFEPOCH\x01", log_id, len(entries))
    content += b"".join(struct.pack("<IQ", *entry) for entry in entries)
    content += struct.pack("<I", crc32c(content))
    parsed = parse_epochs(content)
    assert parsed is not None
    assert (parsed[0], list(parsed[1].entries)) == (log_id, entries)
    parsed[1].at(7)
    with contextlib.suppress(HoldfastError):
        parsed[1].check(LogPosition(1, 2**63))
    assert parse_epochs(content[:-cut]) is None
    assert parse_epochs(content + bytes(cut)) is None
    damaged = bytearray(content)
    damaged[flip % len(content)] ^= 1 + flip % 255
    assert parse_epochs(bytes(damaged)) is None


@given(count=EDGES, rest=st.binary(max_size=100))
def test_a_count_that_a_small_file_cannot_hold_is_refused(count: int, rest: bytes):
    for head in (struct.pack("<8sII", b"HFEPOCH\x01", 1, count), struct.pack("<8sII", b"HFINDEX\x01", 1, count)):
        content = head + rest
        content += struct.pack("<I", crc32c(content))
        parsed = parse_epochs(content)
        assert parsed is None or len(parsed[1].entries) == count
        parse_index(content, 1, 0, 512)


@given(count=st.one_of(EDGES, st.integers(0, 12)), entries=st.integers(0, 5))
def test_an_index_has_the_very_length_that_its_count_says(count: int, entries: int):
    content = struct.pack("<8sIIQQIIq", b"HFINDEX\x01", 1, count, 0, 9, 800, 0, 0) + bytes(20 * entries)
    index = parse_index(content + struct.pack("<I", crc32c(content)), 1, 0, 512)
    assert (index is not None) == (count == entries)
    assert index is None or len(index.offsets) == len(index.times) == len(index.positions) == count


@given(
    frames=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9), st.integers(-(2**63), 2**63 - 1)), max_size=20),
    flip=st.integers(0, 2000),
    offset=U64,
    time_ns=st.integers(-(2**63), 2**63 - 1),
)
def test_an_index_comes_back_and_any_change_is_noticed(
    frames: list[tuple[int, int, int]], flip: int, offset: int, time_ns: int
):
    index = SegmentIndex(1000, 512)
    for length, count, time in frames:
        end = index.end + length * 8
        index.add(index.end, end, index.next_offset, index.next_offset + count, time)
    content = index.encode(77)
    parsed = parse_index(content, 77, 1000, 512)
    assert parsed is not None
    for name in SegmentIndex.__slots__:
        if name != "next_entry_at":
            assert getattr(parsed, name) == getattr(index, name)
    assert parsed.position_before(offset) == index.position_before(offset)
    assert parsed.position_before_time(time_ns) == index.position_before_time(time_ns)
    assert parse_index(content, 78, 1000, 512) is None
    assert parse_index(content, 77, 1001, 512) is None
    assert parse_index(content[:-1], 77, 1000, 512) is None
    damaged = bytearray(content)
    damaged[flip % len(content)] ^= 1 + flip % 255
    assert parse_index(bytes(damaged), 77, 1000, 512) is None


def state_file(content: bytes) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("log")
    file = disk.open("log/state", write=True, create=True)
    if content:
        file.write(0, [content])
    return disk


@given(content=st.one_of(st.binary(max_size=400), st.binary(min_size=192, max_size=192)), magic=st.booleans())
def test_any_bytes_as_a_state_file_are_none(content: bytes, magic: bool):
    content = b"HFSTATE\x01" + content if magic else content
    for write in (True, False):
        assert LogState.open(state_file(content), "log", write=write) is None


@given(
    words=st.lists(U64, min_size=WORDS, max_size=WORDS),
    valid=st.lists(st.sampled_from([8, 16]), min_size=1),
    flip=st.integers(0, 39),
)
def test_a_state_file_with_a_valid_slot_says_what_that_slot_says(words: list[int], valid: list[int], flip: int):
    words[0] = MAGIC_WORD
    for slot in (8, 16):
        words[slot + 4] = 2**40  # no checksum
    for slot in valid:
        words[slot] = max(words[slot], 1)
        words[slot + 4] = crc32c(struct.pack("<4Q", *words[slot : slot + 4]))
    content = struct.pack(f"<{WORDS}Q", *words)
    for write in (True, False):
        state = LogState.open(state_file(content), "log", write=write)
        assert state is not None
        newest = max(set(valid), key=lambda slot: words[slot])
        identity = state.identity
        assert identity is not None
        assert identity.log_id | identity.epoch << 32 in {words[s + 1] for s in valid if words[s] == words[newest]}
        assert state.readable_end == words[1]
        assert state.synced_end == min(words[2], words[3])
        state.close()
    for other in (0, MAGIC_WORD + 1, MAGIC_WORD + (1 << 56)):
        assert LogState.open(state_file(struct.pack(f"<{WORDS}Q", other, *words[1:])), "log", write=False) is None
    if len(set(valid)) == 1:
        damaged = bytearray(content)
        damaged[valid[0] * 8 + flip] ^= 0x20
        assert LogState.open(state_file(bytes(damaged)), "log", write=False) is None


def small_log() -> SimulatedDisk:
    """A closed log of three segments."""
    disk = SimulatedDisk()
    world = World(ManualClock(), disk, SeededIds(5))
    settings = LogSettings(min_free_bytes=0, segment_bytes=4096, frame_bytes=1024, durability="os")
    with Log.open("log", settings, world) as log:
        for n in range(30):
            log.append([b"%d" % n * 100, b"x"])
    return disk


@given(
    name=st.sampled_from(["state", "epochs", "00000000000000000000.idx", "00000000000000000000.log"]),
    content=st.binary(max_size=300),
    keep=st.sampled_from([0, 8, 16, 48, 88, 4096]),
)
def test_a_log_with_any_bytes_for_one_of_its_files_opens(name: str, content: bytes, keep: int):
    """Opening decides what is left; it neither crashes nor finds a message that was never written."""
    disk = small_log()
    old = disk.contents(f"log/{name}")
    file = disk.open(f"log/{name}", write=True)
    file.truncate(0)
    file.write(0, [(old[:keep] + content).ljust(min(keep, len(old)), b"\0") or b"\0"])
    file.close()
    written = {2 * n + i: value for n in range(30) for i, value in enumerate((b"%d" % n * 100, b"x"))}
    world = World(ManualClock(), disk, SeededIds(5))
    for opened in (LogReader("log", world=world), Log.open("log", LogSettings(min_free_bytes=0), world)):
        for record in opened.records(opened.start, on_damage="skip"):
            assert record.value == written[record.offset]


def test_a_header_that_lies_about_its_latest_time_does_not_crash_a_search_by_time():
    disk = SimulatedDisk()
    world = World(ManualClock(), disk, SeededIds(5))
    with Log.open("log", LogSettings(min_free_bytes=0), world) as log:
        log.append(Batch(values=[b"early"], times_ns=[5]))
    path = "log/00000000000000000000.log"
    file = disk.open(path, write=True)
    file.write(0, [resealed(disk.contents(path)[:112], max_time_ns=2**62)])
    disk.remove(path.replace(".log", ".idx"))
    with contextlib.suppress(*REFUSALS):
        assert LogReader("log", world=world).find_time(10) == 1
