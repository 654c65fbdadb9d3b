"""Compression: when a body is packed, which level is used, and what a hostile body may cost."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from functools import cache

import lz4.block
import msgspec
import pytest
import zstandard

from holdfast.codec.encode import Packing, encode_batch
from holdfast.codec.frame import MOST_RAW_BYTES, Codec, compress, decompress
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import BadSettings, CorruptData, InvalidRequest, MessageTooLarge
from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.unit.test_frame import MAX_RAW_BYTES, encoded, read, with_body

GIB = 1 << 30
PACKERS = [Codec.ZSTD, Codec.LZ4, Codec.GZIP]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200
REFUSED = (CorruptData, MessageTooLarge)


def packed_as(codec: Codec, values: list[bytes], **packing: int | None) -> int:
    """The codec that a batch of these values ends up with."""
    rules = {"level": None, "min_bytes": 0, "min_saving_percent": 5} | packing
    (body,) = encode_batch(Batch(values=values), 0, packing=Packing(codec, **rules), cap_bytes=GIB)  # type: ignore[arg-type]
    assert body.raw_bytes >= body.body_bytes
    return body.codec


def unpack(codec: Codec, data: bytes, raw_bytes: int, *, max_raw_bytes: int = MAX_RAW_BYTES) -> bytes:
    return decompress(codec, data, raw_bytes=raw_bytes, max_raw_bytes=max_raw_bytes)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that was in use at once during a call, which must be refused."""
    tracemalloc.start()
    try:
        with pytest.raises(REFUSED):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@cache
def bomb(codec: Codec) -> bytes:
    """A gibibyte of zeros, packed."""
    if codec is Codec.LZ4:
        # One zero, a match that repeats it (each 255 adds as many bytes), and the five literals that end a block.
        run = GIB - 1 - 4 - 15 - 5
        return b"\x1f\0\x01\0" + b"\xff" * (run // 255) + bytes([run % 255]) + b"\x50" + bytes(5)
    packer = (
        zstandard.ZstdCompressor(level=1).compressobj(size=GIB)
        if codec is Codec.ZSTD
        else zlib.compressobj(1, zlib.DEFLATED, 31)
    )
    mebibyte = bytes(1 << 20)
    return b"".join([*(packer.compress(mebibyte) for _ in range(1024)), packer.flush()])


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.parametrize("data", [b"", b"a", TEXT, bytes(1 << 20), random.Random(1).randbytes(100_000)])
def test_what_was_packed_comes_back(codec: Codec, data: bytes):
    for level in (None, 0, 1, 9):
        assert unpack(codec, compress(codec, data, level=level), len(data)) == data


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.slow
def test_the_best_packed_body_is_not_taken_for_a_bomb(codec: Codec):
    zeros = bytes(48 << 20)
    for level in (None, 9):
        assert unpack(codec, compress(codec, zeros, level=level), len(zeros)) == zeros


@pytest.mark.parametrize("codec", PACKERS)
def test_below_the_least_size_a_body_stays_plain(codec: Codec):
    body_bytes = 8 + 2000
    assert packed_as(codec, [bytes(2000)], min_bytes=body_bytes + 1) == Codec.NONE
    assert packed_as(codec, [bytes(2000)], min_bytes=body_bytes) == codec


@pytest.mark.parametrize("codec", PACKERS)
def test_incompressible_bodies_stay_plain(codec: Codec):
    noise = random.Random(2).randbytes(50_000)
    assert packed_as(codec, [noise]) == Codec.NONE
    assert packed_as(codec, [noise], min_saving_percent=0) == Codec.NONE


@pytest.mark.parametrize("codec", PACKERS)
def test_a_body_stays_plain_unless_enough_is_saved(codec: Codec):
    noise = random.Random(3).randbytes(100_000)
    little, enough = noise + bytes(3_000), noise + bytes(8_000)  # about 3 % and 7 % to save
    assert packed_as(codec, [little]) == Codec.NONE
    assert packed_as(codec, [enough]) == codec
    assert packed_as(codec, [little], min_saving_percent=1) == codec
    assert packed_as(codec, [enough], min_saving_percent=20) == Codec.NONE


@pytest.mark.parametrize("codec", PACKERS)
def test_exactly_the_least_saving_is_enough(codec: Codec):
    noise = random.Random(4).randbytes(1_000)
    for noisy in range(100, 900):  # until a whole number of percent is saved
        values = [noise[:noisy] + bytes(992 - noisy)]
        (body,) = encode_batch(Batch(values=values), 0, packing=Packing(codec, None, 0, 0), cap_bytes=GIB)
        assert (body.codec, body.raw_bytes) == (codec, 1_000)
        if body.body_bytes % 10 == 0:
            break
    saved_percent = 100 - body.body_bytes // 10
    assert packed_as(codec, values, min_saving_percent=saved_percent) == codec
    assert packed_as(codec, values, min_saving_percent=saved_percent + 1) == Codec.NONE


@pytest.mark.parametrize(("codec", "low", "high"), [(Codec.ZSTD, -7, 19), (Codec.LZ4, -7, 12), (Codec.GZIP, 1, 9)])
def test_the_level_is_respected(codec: Codec, low: int, high: int):
    words = [b"%x" % n for n in range(400)]
    text = b" ".join(random.Random(5).choices(words, k=30_000))
    assert len(compress(codec, text, level=high)) < len(compress(codec, text, level=low))


@pytest.mark.parametrize(
    ("codec", "level", "same_as"),
    [
        (Codec.ZSTD, 12, lambda data: zstandard.ZstdCompressor(level=12).compress(data)),
        (Codec.ZSTD, None, lambda data: zstandard.ZstdCompressor(level=3).compress(data)),
        (Codec.GZIP, 9, lambda data: zlib.compress(data, 9, 31)),
        (Codec.GZIP, None, lambda data: zlib.compress(data, 6, 31)),
        (Codec.LZ4, 1, lambda data: lz4.block.compress(data, "high_compression", compression=1, store_size=False)),
        (Codec.LZ4, 12, lambda data: lz4.block.compress(data, "high_compression", compression=12, store_size=False)),
        (Codec.LZ4, -5, lambda data: lz4.block.compress(data, "fast", acceleration=5, store_size=False)),
        (Codec.LZ4, None, lambda data: lz4.block.compress(data, store_size=False)),
    ],
)
def test_a_level_means_what_it_means_to_the_library(codec: Codec, level: int | None, same_as: Callable[[bytes], bytes]):
    text = b" ".join(random.Random(6).choices([b"%x" % n for n in range(400)], k=5_000))
    assert compress(codec, text, level=level) == same_as(text)


@pytest.mark.parametrize(
    ("codec", "level"),
    [("zstd", 23), ("zstd", -8), ("lz4", 13), ("lz4", -8), ("gzip", 10), ("gzip", -1), ("none", 23)],
)
def test_a_level_that_the_codec_does_not_have_is_refused(codec: str, level: int):
    with pytest.raises(BadSettings, match="codec_level"):
        LogSettings(codec=codec, codec_level=level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "level"), [("zstd", 22), ("zstd", -7), ("lz4", 12), ("lz4", -7), ("gzip", 9), ("gzip", 0)]
)
def test_every_level_that_the_settings_allow_can_be_written_and_read(codec: str, level: int):
    log = opened(codec=codec, codec_level=level, codec_min_bytes=0)
    log.append([TEXT, b"", TEXT])
    assert [record.value for record in log.records(0)] == [TEXT, b"", TEXT]


@pytest.mark.parametrize("changes", [{"codec": "brotli"}, {"codec_min_saving_percent": 100}, {"codec_min_bytes": -1}])
def test_other_settings_that_cannot_be_are_refused(changes: dict[str, object]):
    with pytest.raises(BadSettings):
        LogSettings(**changes)  # type: ignore[arg-type]


def opened(**settings: object) -> Log:
    world = World(ManualClock(), SimulatedDisk(), SeededIds())
    return Log.open("log", LogSettings(min_free_bytes=0, **settings), world)  # type: ignore[arg-type]


def codecs_of(log: Log) -> list[int]:
    return [frame.header.codec for frame in log.read(log.start)]


def test_the_codec_of_the_settings_can_be_overridden_for_a_call():
    log = opened(codec="gzip", codec_level=9)
    log.append([TEXT])
    log.append([TEXT], codec="none")
    log.append([TEXT], codec="zstd")
    log.append([TEXT], codec="lz4")
    log.append([b"short"], codec="lz4")
    assert codecs_of(log) == [Codec.GZIP, Codec.NONE, Codec.ZSTD, Codec.LZ4, Codec.NONE]
    assert [record.value for record in log.records(0)] == [TEXT] * 4 + [b"short"]


def test_a_level_belongs_to_its_own_codec_only():
    log = opened(codec="zstd", codec_level=22)
    log.append([TEXT], codec="gzip")  # 22 would be refused by gzip
    assert codecs_of(log) == [Codec.GZIP]


def test_an_unknown_codec_for_a_call_is_refused_and_nothing_is_kept():
    log = opened()
    with pytest.raises(InvalidRequest, match="brotli"):
        log.append([b"a"], codec="brotli")  # type: ignore[arg-type]
    assert log.written_end == 0


@pytest.mark.parametrize(
    "batch",
    [
        Batch(values=[bytes(65_536)]),
        Batch(values=[bytes(65_000)], keys=[bytes(536)]),
        Batch(values=[bytes(1_000)] * 200),
        Batch(values=[b""] * 20_000),
        Batch(values=[b""], headers=[[("", b"")] * 20_000]),
    ],
    ids=["the largest", "the largest with its key", "many", "empty ones", "empty headers"],
)
def test_whatever_was_taken_can_be_read_under_the_same_settings(batch: Batch):
    log = opened(codec="zstd", max_message_bytes=65_536, max_raw_bytes=65_536)
    log.append(batch)
    assert [record.value for record in log.records(0)] == batch.values


def test_what_was_stored_under_a_higher_limit_is_read_and_keeps_nothing_behind_it_back():
    log = opened(codec="zstd")
    log.append([bytes(200_000)])
    log.change(msgspec.structs.replace(log.settings, max_message_bytes=65_536, max_raw_bytes=65_536))
    log.append([b"behind it"])
    log.close()
    again = Log.open(log.folder, log.settings, log._world)
    for each in (again.records(0), LogReader(log.folder, log.settings, log._world).records(0)):
        assert [record.value for record in each] == [bytes(200_000), b"behind it"]
    again.close()


def test_no_setting_lets_a_writer_pack_more_than_readers_take():
    with pytest.raises(BadSettings):
        LogSettings(max_raw_bytes=MOST_RAW_BYTES + 1)


@pytest.mark.parametrize("codec", PACKERS)
def test_a_body_over_the_readers_limit_is_not_unpacked(codec: Codec):
    packed = compress(codec, bytes(100_000), level=None)
    assert unpack(codec, packed, 100_000, max_raw_bytes=100_000) == bytes(100_000)
    with pytest.raises(MessageTooLarge, match="over the limit of"):
        unpack(codec, packed, 100_000, max_raw_bytes=99_999)


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.slow
def test_a_bomb_that_tells_its_size_costs_no_memory(codec: Codec):
    packed = bomb(codec)
    assert peak_bytes(lambda: unpack(codec, packed, GIB)) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.parametrize("answer_bytes", [0, 1, 1000, 1 << 20])
def test_a_bomb_that_lies_about_its_size_costs_no_more_than_it_told(codec: Codec, answer_bytes: int):
    packed = bomb(codec)
    most_bytes = len(packed) + 3 * answer_bytes + 300_000
    assert peak_bytes(lambda: unpack(codec, packed, answer_bytes, max_raw_bytes=2 * GIB)) < most_bytes


# What tracemalloc does not see: memory that the libraries take by themselves.
GROWTH = """
import resource, sys
from holdfast.codec.frame import Codec, decompress
codec, data = Codec(int(sys.argv[1])), sys.stdin.buffer.read()
def refused(raw_bytes, max_raw_bytes):
    try:
        decompress(codec, data, raw_bytes=raw_bytes, max_raw_bytes=max_raw_bytes)
    except Exception:
        return
    sys.exit("it was unpacked")
refused(0, 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused(1 << 30, 100_000_000)
refused(1 << 20, 1 << 30)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("codec", PACKERS)
def test_a_bomb_does_not_make_the_process_grow(codec: Codec):
    done = subprocess.run([sys.executable, "-c", GROWTH, str(int(codec))], input=bomb(codec), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < 16 * 1024  # KiB; its own four or five MiB may be copied once


@pytest.mark.parametrize("codec", PACKERS)
def test_a_size_that_so_few_bytes_cannot_have_costs_no_memory(codec: Codec):
    packed = compress(codec, b"tiny", level=None)
    for raw_bytes in (10 << 20, 2 * GIB, 2**32 - 1):
        assert peak_bytes(lambda raw=raw_bytes: unpack(codec, packed, raw, max_raw_bytes=2**32)) < 100_000


@pytest.mark.parametrize("codec", PACKERS)
def test_a_frame_with_two_gibibytes_to_come_is_refused_without_memory(codec: Codec):
    (frame,) = encoded(Batch(values=[TEXT]), codec=codec)
    lying = with_body(frame, frame[88 : 88 + read(frame).header.body_bytes], raw_bytes=2 * GIB)
    assert peak_bytes(lambda: read(lying).values()) < 100_000


@pytest.mark.parametrize("codec", PACKERS)
def test_a_body_that_unpacks_to_less_than_its_header_says_is_refused(codec: Codec):
    with pytest.raises(CorruptData):
        unpack(codec, compress(codec, TEXT, level=None), len(TEXT) + 1)


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.parametrize("raw_bytes", [0, 1, len(TEXT) - 1])
def test_a_body_that_unpacks_to_more_than_its_header_says_is_refused(codec: Codec, raw_bytes: int):
    with pytest.raises(CorruptData):
        unpack(codec, compress(codec, TEXT, level=None), raw_bytes)


def test_a_content_size_inside_a_zstd_body_is_not_believed():
    packed = bytearray(compress(Codec.ZSTD, bytes(100_000), level=None))
    assert zstandard.frame_content_size(bytes(packed)) == 100_000
    at = packed.index((100_000).to_bytes(4, "little"))
    packed[at : at + 4] = GIB.to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(packed)) == GIB
    assert peak_bytes(lambda: unpack(Codec.ZSTD, bytes(packed), 100_000)) < 100_000
    packed[at : at + 4] = (100_001).to_bytes(4, "little")
    with pytest.raises(CorruptData):
        unpack(Codec.ZSTD, bytes(packed), 100_001)


def test_a_zstd_body_without_a_content_size_is_refused():
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
    with pytest.raises(CorruptData):
        unpack(Codec.ZSTD, packed, len(TEXT))


GARBAGE = {
    "garbage": b"garbage",
    "zeros": bytes(8),
    "one byte": b"\0",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("codec", PACKERS)
def test_bytes_behind_the_packed_body_are_refused(codec: Codec, garbage: bytes):
    with pytest.raises(CorruptData):
        unpack(codec, compress(codec, TEXT, level=None) + garbage, len(TEXT))


def test_a_second_gzip_member_is_refused():
    with pytest.raises(CorruptData):
        unpack(Codec.GZIP, gzip.compress(TEXT) + gzip.compress(TEXT), 2 * len(TEXT))


@pytest.mark.parametrize("codec", PACKERS)
def test_a_packed_body_cut_at_any_length_is_refused(codec: Codec):
    packed = compress(codec, TEXT[:500], level=None)
    for length in range(len(packed)):
        with pytest.raises(CorruptData):
            unpack(codec, packed[:length], 500)


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_unpack(codec: Codec, seed: int):
    noise = random.Random(seed).randbytes(300)
    for raw_bytes in (0, 1, 300, 1000):
        with pytest.raises(CorruptData):
            unpack(codec, noise, raw_bytes)
