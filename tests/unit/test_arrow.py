"""Arrow: arrays go in and come out buffer by buffer, and are the same messages as lists are."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.codec.encode import Packing, encode_batch
from holdfast.codec.frame import Codec, Frame
from holdfast.env import ManualClock, RealDisk, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import CorruptData, InvalidRequest, MessageTooLarge
from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.unit.test_frame import CODECS, FULL, NOW_NS, encoded, read, resealed, with_body

pa = pytest.importorskip("pyarrow")

from holdfast.codec.arrow import encode_arrow, values_to_arrow  # noqa: E402  needs pyarrow

VALUES = [b"first", b"", b"third", b"x" * 300, b"", "naïve ☃".encode(), b"last"]


def binary(values: list[bytes] | None = None, kind=None):
    return pa.array(VALUES if values is None else values, kind or pa.binary())


def opened(**settings: object) -> Log:
    world = World(ManualClock(NOW_NS), SimulatedDisk(), SeededIds(1))
    return Log.open("log", LogSettings(min_free_bytes=0, **settings), world)  # type: ignore[arg-type]


def stored(log: Log) -> bytes:
    """All bytes of the log's segments."""
    disk = log._world.disk
    assert isinstance(disk, SimulatedDisk)
    names = [name for name in disk.names("log") if name.endswith(".log")]
    return b"".join(disk.contents(f"log/{name}") for name in names)


ARRAYS = {
    "binary": (binary(), VALUES),
    "large binary": (binary(kind=pa.large_binary()), VALUES),
    "text": (pa.array(["a", "", "naïve ☃"]), [b"a", b"", "naïve ☃".encode()]),
    "large text": (pa.array(["a", "", "b"], pa.large_string()), [b"a", b"", b"b"]),
    "fixed size": (pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), [b"ab", b"cd", b"ef"]),
    "fixed size of nothing": (pa.array([b"", b""], pa.binary(0)), [b"", b""]),
    "empty values": (binary([b""] * 5), [b""] * 5),
    "one": (binary([b"x"]), [b"x"]),
    "slice": (binary()[2:5], VALUES[2:5]),
    "slice of one": (binary()[3:4], VALUES[3:4]),
    "slice to the end": (binary()[5:], VALUES[5:]),
    "slice of a slice": (binary()[1:6][1:3], VALUES[2:4]),
    "slice of large binary": (binary(kind=pa.large_binary())[2:5], VALUES[2:5]),
    "slice of text": (pa.array(["a", "bb", "ccc"])[1:], [b"bb", b"ccc"]),
    "slice of fixed size": (pa.array([b"ab", b"cd", b"ef"], pa.binary(2))[1:], [b"cd", b"ef"]),
    "slice without its nulls": (pa.array([None, b"a", b"b", None], pa.binary())[1:3], [b"a", b"b"]),
    "chunked": (pa.chunked_array([binary()[1:], binary([]), binary()[:2]]), VALUES[1:] + VALUES[:2]),
    "chunked text": (pa.chunked_array([["a", "b"], ["c"]]), [b"a", b"b", b"c"]),
}


@pytest.mark.parametrize(("array", "values"), ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize(
    "settings",
    [{"frame_bytes": 1024}, {}, *({"codec": codec, "codec_min_bytes": 0} for codec in ("zstd", "lz4", "gzip"))],
    ids=["small frames", "plain", "zstd", "lz4", "gzip"],
)
def test_an_array_is_stored_as_the_list_of_its_values(array, values: list[bytes], settings: dict[str, object]):
    by_arrow, by_list = opened(**settings), opened(**settings)
    assert by_arrow.append_arrow(array) == by_list.append(values)
    assert list(by_arrow.records(0)) == list(by_list.records(0))
    assert [record.value for record in by_arrow.records(0)] == values
    if not isinstance(array, pa.ChunkedArray):  # each chunk is a frame of its own
        assert stored(by_arrow) == stored(by_list)


@pytest.mark.parametrize(
    "array", [binary([]), binary()[3:3], pa.chunked_array([], pa.binary()), pa.array([], "string")]
)
def test_an_empty_array_stores_nothing(array):
    log = opened()
    log.append([b"before"])
    appended = log.append_arrow(array)
    assert (appended.offset, log.written_end) == (1, 1)
    log.append([b"after"])
    assert [record.value for record in log.records(0)] == [b"before", b"after"]


def test_an_empty_append_answers_an_empty_range():
    log = opened(durability="os")
    log.append([b"before"])
    for appended in (log.append([]), log.append_arrow(binary([]))):
        assert (appended.offset, appended.next_offset) == (1, 1)


@pytest.mark.parametrize("cap_bytes", [1, 7, 64, 1000])
def test_a_large_array_becomes_the_same_frames_as_a_list(cap_bytes: int):
    values = [b"v" * (n % 50) for n in range(300)]
    bodies = encode_arrow(binary(values), NOW_NS, cap_bytes=cap_bytes, max_message_bytes=100)
    as_list = encode_batch(Batch(values=values), NOW_NS, packing=Packing(), cap_bytes=cap_bytes)
    assert sum(body.count for body in bodies) == 300
    for body in bodies:
        assert body.count == 1 or body.raw_bytes - 4 * (body.count + 1) <= cap_bytes + 4
    assert [value for body in bodies for value in values_in(body)] == [v for b in as_list for v in values_in(b)]


def test_many_tiny_values_do_not_make_a_frame_far_over_the_cap():
    bodies = encode_arrow(binary([b""] * 20_000), NOW_NS, cap_bytes=1024, max_message_bytes=100)
    assert max(body.frame_bytes for body in bodies) < 20 * 1024


def values_in(body) -> list[bytes]:
    raw = b"".join(body.parts)[: body.body_bytes]
    ends = struct.unpack_from(f"<{body.count + 1}i", raw)
    data = raw[(4 * (body.count + 1) + 7) // 8 * 8 :]
    assert ends[-1] == len(data)
    return [data[start:end] for start, end in pairwise(ends)]


def test_a_batch_of_several_frames_counts_down():
    log = opened(frame_bytes=1024)
    log.append_arrow(binary([b"v" * 600] * 4))
    assert [frame.header.batch_remaining for frame in log.read(0)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([b"a", None], pa.binary()),
        pa.array([None], pa.string()),
        pa.array([b"ab", None], pa.binary(2)),
        pa.array([b"a", None], pa.large_binary()),
        pa.array([b"a", None, b"c"], pa.binary())[1:],
        pa.chunked_array([[b"a"], [None]], pa.binary()),
    ],
)
def test_nulls_are_refused_and_nothing_is_kept(array):
    log = opened()
    with pytest.raises(InvalidRequest, match="null"):
        log.append_arrow(array)
    assert log.written_end == 0


@pytest.mark.parametrize("wrong", [pa.array([1, 2]), pa.nulls(2), pa.array([["a"]]), [b"a"], b"a", None])
def test_other_things_than_binary_are_refused(wrong):
    log = opened()
    with pytest.raises(InvalidRequest):
        log.append_arrow(wrong)
    assert log.written_end == 0


def test_a_message_over_the_limit_is_refused_and_nothing_is_kept():
    log = opened(max_message_bytes=100)
    for array in (binary([b"a", b"b" * 101]), pa.array(["b" * 101]), pa.chunked_array([[b"a"], [b"b" * 101]])):
        with pytest.raises(MessageTooLarge, match="101"):
            log.append_arrow(array)
    assert log.written_end == 0
    log.append_arrow(binary([b"b" * 100]))
    assert log.written_end == 1


def test_a_batch_over_the_limit_is_refused_and_nothing_is_kept():
    log = opened(max_batch_bytes=1000)
    with pytest.raises(MessageTooLarge):
        log.append_arrow(binary([b"v" * 100] * 11))
    assert log.written_end == 0


@pytest.fixture
def three_gibibytes(tmp_path: Path) -> Iterator[mmap.mmap]:
    """Bytes that take no room: a file of holes."""
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(3 << 30)
        yield mmap.mmap(file.fileno(), 3 << 30, prot=mmap.PROT_READ)


def test_an_array_too_large_for_int32_ends_is_refused(three_gibibytes: mmap.mmap):
    ends = struct.pack("<4q", 0, 1 << 30, 2 << 30, 3 << 30)
    array = pa.Array.from_buffers(pa.large_binary(), 3, [None, pa.py_buffer(ends), pa.py_buffer(three_gibibytes)])
    with pytest.raises(MessageTooLarge):
        opened().append_arrow(array)


def made(ends: bytes, data: bytes, count: int):
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def test_a_buffer_of_ends_may_be_longer_than_the_array():
    array = made(struct.pack("<ii", 0, 3) + b"?", b"abc", 1)
    array.validate(full=True)
    log = opened()
    log.append_arrow(array)
    assert [record.value for record in log.records(0)] == [b"abc"]


def test_an_invalid_array_is_refused_and_nothing_is_kept():
    log = opened()
    with pytest.raises(InvalidRequest):
        log.append_arrow(made(struct.pack("<3i", 0, 5, 3), b"abcde", 2))
    assert log.written_end == 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_comes_back_as_an_array_of_its_values(codec: Codec):
    (frame,) = encoded(FULL, codec=codec)
    array = values_to_arrow(read(frame))
    assert array.type == pa.binary()
    assert array.to_pylist() == FULL.values


def test_an_array_lies_inside_the_frame_without_a_copy():
    (frame,) = encoded(FULL)
    buffer = pa.py_buffer(frame)
    array = values_to_arrow(read(frame))
    _, ends, data = array.buffers()
    for part in (ends, data):
        assert buffer.address + 88 <= part.address
        assert part.address + part.size <= buffer.address + buffer.size


def test_an_array_of_a_mapped_file_is_not_copied_and_outlives_its_reader(tmp_path: Path):
    world = World(ManualClock(NOW_NS), RealDisk(), SeededIds(1))
    folder = str(tmp_path / "log")
    with Log.open(folder, LogSettings(min_free_bytes=0), world) as log:
        log.append(VALUES)
        reader = LogReader(folder, world=world)
        (frame,) = reader.read(0)
        array = values_to_arrow(frame)
        mapped = pa.py_buffer(frame.columns().value_bytes())
        assert array.buffers()[2].address == mapped.address
        assert array.buffers()[1].address == mapped.address - 8 * 4
        del frame, reader, mapped
    assert array.to_pylist() == VALUES


@pytest.mark.parametrize("array", [array for array, _ in ARRAYS.values()], ids=ARRAYS)
def test_what_went_in_as_arrow_comes_out_as_arrow(array):
    log = opened()
    log.append_arrow(array)
    chunks = [values_to_arrow(frame) for frame in log.read(0)]
    assert (
        pa.chunked_array(chunks, pa.binary()).to_pylist()
        == pa.chunked_array(array.chunks if isinstance(array, pa.ChunkedArray) else [array])
        .cast(pa.binary())
        .to_pylist()
    )


def wrong_frame(ends: tuple[int, ...], data: bytes = b"abc") -> Frame:
    packed = struct.pack(f"<{len(ends)}i", *ends)
    body = packed + bytes(-len(packed) % 8) + data
    (frame,) = encoded(Batch(values=[b""]))
    return read(with_body(frame, body, raw_bytes=len(body), count=len(ends) - 1))


@pytest.mark.parametrize(
    "ends",
    [
        (0, 3, 2),
        (0, -1, 3),
        (-1, 0, 3),
        (0, 2**31 - 1, 3),
        (0, 1, 4),
        (0, 0, 2**31 - 1),
        (0, 1, -2),
    ],
)
def test_wrong_ends_never_let_arrow_read_outside(ends: tuple[int, ...]):
    with pytest.raises(CorruptData):
        values_to_arrow(wrong_frame(ends))


def test_both_ways_of_reading_refuse_the_same_frames():
    frame = wrong_frame((1, 2, 3))
    with pytest.raises(CorruptData):
        frame.values()
    with pytest.raises(CorruptData):
        values_to_arrow(frame)


def test_a_count_that_the_frame_cannot_hold_is_refused():
    (frame,) = encoded(Batch(values=[b"abc"]))
    for count in (3, 1000, 2**32 - 1):
        with pytest.raises(CorruptData):
            values_to_arrow(read(resealed(frame, count=count)))
