"""Whatever mix of columns, codec and cap: what was put in comes out, with the right offsets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import columns as c
from holdfast.codec.encode import FramePlace, Packing, encode_batch, header_for, message_sizes
from holdfast.codec.frame import HEADER_BYTES, MAY_HOLD_SHORT, Codec, FrameHeader, Kind, frame_bytes, read_frame
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import MessageTooLarge
from holdfast.model import Batch, Producer, Record
from holdfast.settings import LogSettings
from holdfast.storage.frames import FrameRules, walk
from holdfast.storage.log import Log
from tests.golden.test_golden import frames_of

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT8 = st.integers(0, 255)
VALUES = st.one_of(st.binary(max_size=60), st.binary(min_size=1, max_size=4).map(lambda unit: unit * 50))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PAIRS = st.lists(st.tuples(NAMES, st.binary(max_size=12)), max_size=4)
BIG_HEADER = st.integers(65_530, 65_600).map(lambda length: [("big", b"h" * length)])

# bit of the column, its name in a batch, its name in a record, what a message without it has
PLAIN_COLUMNS = [
    (c.PRIORITIES, "priorities", "priority", UINT8),
    (c.EXPIRY, "expires_at_ms", "expires_at_ms", INT64),
    (c.DUE, "due_at_ms", "due_at_ms", INT64),
    (c.FLAGS, "flags", "flags", UINT8),
]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """One to some messages, each column there or not."""
    count = draw(st.one_of(st.integers(1, 12), st.integers(1, 70)))

    def column(items: st.SearchStrategy) -> list:
        return draw(st.lists(items, min_size=count, max_size=count))

    used: dict[str, list] = {"values": column(VALUES)}
    if draw(st.booleans()):
        used["times_ns"] = column(INT64)
    if draw(st.booleans()):
        used["keys"] = column(draw(st.sampled_from([st.binary(max_size=9), st.none() | st.binary(max_size=9)])))
    if draw(st.booleans()):
        used["headers"] = column(PAIRS)
        if draw(st.integers(0, 9)) == 0:
            used["headers"][draw(st.integers(0, count - 1))] = draw(BIG_HEADER)
    for _, name, _, items in PLAIN_COLUMNS:
        if draw(st.booleans()):
            used[name] = column(items)
    return Batch(**used)


PLACES = st.builds(
    FramePlace,
    log_id=st.integers(1, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**28).map(lambda n: n * 8),
    base_offset=st.integers(0, 2**63),
    synced_offset=st.integers(0, 2**64 - 1),
)
PRODUCERS = st.builds(
    Producer, id=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32 - 1), first_sequence=st.integers(0, 2**32 - 1)
)
PACKINGS = st.builds(
    Packing,
    codec=st.sampled_from(list(Codec)),
    level=st.none() | st.integers(0, 9),
    min_bytes=st.sampled_from([0, 100, 1024]),
    min_saving_percent=st.sampled_from([0, 5]),
)


def expected(batch: Batch, base_offset: int, now_ns: int, epoch: int) -> list[Record]:
    """The records that a batch must become, without the codec."""
    count = len(batch.values)
    return [
        Record(
            base_offset + i,
            now_ns if batch.times_ns is None else batch.times_ns[i],
            batch.values[i],
            None if batch.keys is None else batch.keys[i],
            () if batch.headers is None else tuple(batch.headers[i]),
            epoch=epoch,
            **{field: column[i] for _, name, field, _ in PLAIN_COLUMNS if (column := getattr(batch, name)) is not None},
        )
        for i in range(count)
    ]


def columns_used(batch: Batch) -> int:
    used = c.TIMES if batch.times_ns is not None else 0
    used |= c.KEYS if batch.keys is not None else 0
    used |= c.HEADERS if batch.headers is not None else 0
    return used | sum(bit for bit, name, _, _ in PLAIN_COLUMNS if getattr(batch, name) is not None)


def encode(batch: Batch, place: FramePlace, packing: Packing, cap_bytes: int, now_ns: int, **more) -> bytes:
    """All frames of the batch, as they would lie in a segment from the place on."""
    bodies = encode_batch(batch, now_ns, packing=packing, cap_bytes=cap_bytes, kind=more.get("kind", Kind.DATA))
    position, base_offset, stored = place.position, place.base_offset, []
    for left, body in zip(range(len(bodies) - 1, -1, -1), bodies, strict=True):
        at = FramePlace(place.log_id, place.epoch, position, base_offset, place.synced_offset)
        stored += [header_for(body, at, batch_remaining=left, producer=more.get("producer", Producer())), *body.parts]
        position, base_offset = position + body.frame_bytes, base_offset + body.count
    return b"".join(stored)


def read_all(data: bytes, position: int) -> list:
    frames, at = [], 0
    while at < len(data):
        frame = read_frame(memoryview(data), at, position + at, max_raw_bytes=1 << 24)
        frames.append(frame)
        at = frame.header.end - position
    assert at == len(data)
    return frames


@given(
    batch=batches(),
    place=PLACES,
    producer=PRODUCERS,
    packing=PACKINGS,
    cap_bytes=st.one_of(st.integers(1, 300), st.just(1 << 20)),
    now_ns=INT64,
    kind=st.sampled_from([Kind.DATA, Kind.CONTROL, Kind.JOURNAL]),
)
def test_every_mix_comes_back(
    batch: Batch, place: FramePlace, producer: Producer, packing: Packing, cap_bytes: int, now_ns: int, kind: Kind
):
    data = encode(batch, place, packing, cap_bytes, now_ns, kind=kind, producer=producer)
    frames = read_all(data, place.position)

    records = [record for frame in frames for record in frame.records()]
    assert records == expected(batch, place.base_offset, now_ns, place.epoch)
    assert [value for frame in frames for value in frame.values()] == batch.values

    headers = [frame.header for frame in frames]
    sizes = message_sizes(batch)
    assert sizes == [sum(map(len, texts_of(batch, i))) for i in range(len(batch.values))]
    for header in headers:
        first = header.base_offset - place.base_offset
        assert header.count == 1 or sum(sizes[first : first + header.count]) <= cap_bytes
        check_header(header, batch, place, producer, kind, packing, data)
    assert [header.batch_remaining for header in headers] == list(range(len(headers) - 1, -1, -1))
    assert sum(header.count for header in headers) == len(batch.values)
    assert all(earlier.next_offset == later.base_offset for earlier, later in pairwise(headers))
    assert headers[-1].next_offset == place.base_offset + len(batch.values)


def texts_of(batch: Batch, i: int) -> Iterator[bytes]:
    """All that counts as the size of a message."""
    yield bytes(batch.values[i])  # type: ignore[arg-type]
    yield (batch.keys[i] if batch.keys else None) or b""
    for name, value in batch.headers[i] if batch.headers else ():
        yield name.encode() + value


def check_header(
    header: FrameHeader, batch: Batch, place: FramePlace, producer: Producer, kind: Kind, packing: Packing, data: bytes
) -> None:
    """What every frame of a batch must say, and zeros up to its end that the checksum covers."""
    assert (header.log_id, header.epoch, header.synced_offset) == (place.log_id, place.epoch, place.synced_offset)
    assert (header.producer_id, header.producer_epoch) == (producer.id, producer.epoch)
    assert header.first_sequence == producer.first_sequence
    assert (header.magic, header.kind, header.flags) == (b"HFR\x01", kind, 0 if header.position else MAY_HOLD_SHORT)
    assert header.columns & ~c.KEY_VALIDITY == columns_used(batch)
    assert header.codec in (Codec.NONE, packing.codec)
    if header.codec == Codec.NONE:
        assert header.raw_bytes == header.body_bytes
    else:
        assert header.body_bytes * 100 <= header.raw_bytes * (100 - packing.min_saving_percent)
        assert header.raw_bytes >= packing.min_bytes
    start = header.position - place.position
    length = frame_bytes(header.body_bytes)
    assert length % 8 == 0
    behind = data[start + HEADER_BYTES : start + length]
    assert behind[header.body_bytes :] == bytes(-header.body_bytes % 8)
    assert crc32c(behind) == header.body_crc
    assert crc32c(data[start : start + HEADER_BYTES - 4]) == header.header_crc


@given(batch=batches(), codec=st.sampled_from(list(Codec)), cap_bytes=st.integers(1, 2000))
def test_a_key_column_has_validity_only_where_a_key_is_missing(batch: Batch, codec: Codec, cap_bytes: int):
    place = FramePlace(1, 1, 0, 0, 0)
    for frame in read_all(encode(batch, place, Packing(codec, None, 0, 0), cap_bytes, 0), 0):
        keys = frame.columns().keys()
        assert bool(frame.header.columns & c.KEY_VALIDITY) == (keys is not None and None in keys)


@given(batch=batches(), packing=PACKINGS, cap_bytes=st.integers(1, 2000), now_ns=INT64)
def test_a_reader_written_from_the_documentation_reads_the_same(
    batch: Batch, packing: Packing, cap_bytes: int, now_ns: int
):
    place = FramePlace(77, 5, 0, 1000, 0)
    data = encode(batch, place, packing, cap_bytes, now_ns)
    read = [record for _, records in frames_of(data, log_id=77) for record in records]
    assert read == [
        {
            "offset": record.offset,
            "timestamp_ns": record.timestamp_ns,
            "value": record.value,
            "key": record.key,
            "headers": [list(pair) for pair in record.headers],
            "priority": record.priority,
            "expires_at_ms": record.expires_at_ms,
            "due_at_ms": record.due_at_ms,
            "flags": record.flags,
            "epoch": record.epoch,
        }
        for record in expected(batch, 1000, now_ns, 5)
    ]


@given(batch=batches(), packing=PACKINGS, cap_bytes=st.integers(1, 2000))
def test_a_walk_goes_through_all_frames_of_a_batch(batch: Batch, packing: Packing, cap_bytes: int):
    place = FramePlace(9, 2, 0, 50, 0)
    data = encode(batch, place, packing, cap_bytes, 0)
    for bodies in (True, False):
        found = list(walk(memoryview(data + bytes(64)), FrameRules(9, 50), bodies=bodies))
        assert found == [frame.header for frame in read_all(data, 0)]


@given(history=st.lists(st.tuples(batches(), st.sampled_from([None, "none", "zstd", "lz4", "gzip"])), max_size=5))
def test_a_log_gives_back_every_batch(history: list):
    clock = ManualClock()
    world = World(clock, SimulatedDisk(), SeededIds(3))
    settings = LogSettings(
        min_free_bytes=0, segment_bytes=8192, frame_bytes=1024, codec_min_bytes=0, durability="os", index_bytes=512
    )
    written: list[Record] = []
    log = Log.open("log", settings, world)
    for batch, codec in history:
        appended = log.append(batch, codec=codec)
        assert (appended.offset, appended.next_offset) == (len(written), len(written) + len(batch.values))
        written += expected(batch, len(written), clock.now_ns(), log.epoch)
        clock.advance(ms=1)
    assert list(log.records(0)) == written
    for offset in range(0, len(written) + 1, 7):
        assert list(log.records(offset)) == written[offset:]
    log.close()
    assert list(Log.open("log", settings, world).records(0)) == written


@given(
    values=st.lists(VALUES, min_size=1, max_size=300),
    codec=st.sampled_from([None, "none", "zstd", "lz4", "gzip"]),
    frame_bytes=st.sampled_from([1024, 4096]),
)
def test_a_list_of_values_is_stored_as_a_batch_of_nothing_else(values: list[bytes], codec, frame_bytes: int):
    settings = LogSettings(
        min_free_bytes=0, frame_bytes=frame_bytes, codec_min_bytes=0, max_message_bytes=150, max_batch_bytes=5000
    )
    outcomes = []
    for messages in (values, Batch(values=values)):
        disk = SimulatedDisk()
        log = Log.open("log", settings, World(ManualClock(), disk, SeededIds(6)))
        try:
            appended = log.append(messages, codec=codec)
        except MessageTooLarge as error:
            outcomes.append(str(error))
        else:
            outcomes.append((appended, disk.contents("log/00000000000000000000.log")))
            assert [record.value for record in log.records(0)] == values
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("maps", [True, False])
@given(values=st.lists(st.binary(max_size=200), max_size=30), reopen_at=st.integers(0, 30))
def test_a_single_put_writes_the_very_bytes_of_a_batch_of_one(maps: bool, values: list[bytes], reopen_at: int):
    contents = []
    for single in (True, False):
        disk, clock = SimulatedDisk(maps=maps), ManualClock()
        world = World(clock, disk, SeededIds(4))
        settings = LogSettings(min_free_bytes=0, segment_bytes=4096, frame_bytes=1024, durability="os")
        log = Log.open("log", settings, world)
        for i, value in enumerate(values):
            if i == reopen_at:
                log.close()
                log = Log.open("log", settings, world)
            assert (log.append_one(value) if single else log.append([value])).offset == i
            clock.advance(ns=1)
        log.close()
        contents.append({name: disk.contents(f"log/{name}") for name in disk.names("log") if name != "lock"})
    assert contents[0] == contents[1]
