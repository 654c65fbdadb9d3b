"""Files of every format version still open, and the specification is enough to read them.

The reader in this file is written from docs/internals/format.md and shares no code with Holdfast. It knows
the standard library only, its own CRC32C and LZ4 included; zstd is left to its package.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.codec.encode import FramePlace, Packing, encode_batch, header_for
from holdfast.codec.frame import read_frame, short_frame
from holdfast.errors import DamagedRange
from holdfast.model import Batch, Producer, Record
from holdfast.storage.frames import parse_index
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from holdfast.storage.state import parse_epochs
from tests.golden import make

HERE = Path(__file__).parent
VERSIONS = sorted(path for path in HERE.glob("v*") if path.is_dir())
COMPACTED = sorted(path for path in HERE.glob("compacted-v*") if path.is_dir())
FORMAT = HERE.parents[1] / "docs" / "internals" / "format.md"

HEADER = struct.Struct("<4s5IBBHIQqQ2IQ4I")
NAMES = [
    "magic",
    "log_id",
    "position",
    "body_bytes",
    "raw_bytes",
    "count",
    "kind",
    "codec",
    "flags",
    "columns",
    "base_offset",
    "max_time_ns",
    "synced_offset",
    "epoch",
    "producer_epoch",
    "producer_id",
    "first_sequence",
    "batch_remaining",
    "body_crc",
    "header_crc",
]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def table_entry(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


CRC_TABLE = [table_entry(n) for n in range(256)]


SHORT_HEADER = struct.Struct("<4sIIHHQq")


def short_at(data: bytes, at: int, log_id: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The short frame at this position, if there is one: what a long one would say, and its record."""
    magic, own_id, position, length, epoch, offset, time_ns = SHORT_HEADER.unpack_from(data, at)
    value_at = at + SHORT_HEADER.size
    end = at + max((SHORT_HEADER.size + length + 4 + 7) // 8 * 8, 88)
    check = struct.pack("<I", crc32c(data[at : end - 4]))
    if (magic, own_id, position) != (b"HFR\x02", log_id, at) or end > len(data) or data[end - 4 : end] != check:
        return None
    header = dict.fromkeys(NAMES, 0) | {
        "magic": magic,
        "position": at,
        "count": 1,
        "kind": 1,
        "base_offset": offset,
        "max_time_ns": time_ns,
        "epoch": epoch,
        "end": end,
    }
    parts = Parts(struct.pack("<2i", 0, length) + data[value_at : value_at + length])
    return header, next(records_of(header, parts))


def frames_of(data: bytes, log_id: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each good frame of a segment: header and records. What is no frame is passed over, eight bytes at a time."""
    at = 0
    while at + HEADER.size <= len(data):
        short = short_at(data, at, log_id)
        if short is not None:
            yield short[0], [short[1]]
            at = short[0]["end"]
            continue
        header = dict(zip(NAMES, HEADER.unpack_from(data, at), strict=True))
        body_at, end = at + HEADER.size, at + (HEADER.size + header["body_bytes"] + 7) // 8 * 8
        if (
            header["magic"][:3] != b"HFR"
            or crc32c(data[at : body_at - 4]) != header["header_crc"]
            or (header["position"], header["log_id"]) != (at, log_id)
            or end > len(data)
            or crc32c(data[body_at:end]) != header["body_crc"]
        ):
            at += 8
            continue
        assert header["magic"] == b"HFR\x01", "a newer version"
        assert header["columns"] < 512, "a newer version"
        assert header["flags"] < 512, "a newer version"
        header["end"] = end
        body = unpack(header["codec"], data[body_at : body_at + header["body_bytes"]], header["raw_bytes"])
        yield header, [] if header["kind"] in (4, 5) else list(records_of(header, Parts(body)))
        at = end


class Parts:
    """The body, taken apart front to back."""

    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def take(self, length: int) -> bytes:
        part = self.body[self.at : self.at + length]
        assert len(part) == length
        self.at += (length + 7) // 8 * 8
        return part

    def numbers(self, kind: str, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(struct.calcsize(kind) * count))

    def items(self, count: int) -> list[bytes]:
        ends = self.numbers("i", count + 1)
        data = self.take(ends[-1])
        return [data[start:end] for start, end in pairwise(ends)]


def records_of(header: dict[str, Any], parts: Parts) -> Iterator[dict[str, Any]]:
    count, columns = header["count"], header["columns"]
    ends = parts.numbers("i", count + 1)
    times = parts.numbers("q", count) if columns & 1 else (header["max_time_ns"],) * count
    valid = parts.take((count + 7) // 8) if columns & 2 else b"\xff" * count
    keys = parts.items(count) if columns & 4 else None
    pair_ends = parts.numbers("i", count + 1) if columns & 8 else (0,) * (count + 1)
    names, values = (parts.items(pair_ends[-1]), parts.items(pair_ends[-1])) if columns & 8 else ([], [])
    priorities = parts.numbers("B", count) if columns & 16 else (0,) * count
    expiry = parts.numbers("q", count) if columns & 32 else (0,) * count
    due = parts.numbers("q", count) if columns & 64 else (0,) * count
    flags = parts.numbers("B", count) if columns & 128 else (0,) * count
    removed = parts.take((count + 7) // 8) if columns & 256 else bytes(count)
    data = parts.body[parts.at :]
    for i in range(count):
        if removed[i // 8] >> i % 8 & 1:
            continue
        pairs = range(pair_ends[i], pair_ends[i + 1])
        yield {
            "offset": header["base_offset"] + i,
            "timestamp_ns": times[i],
            "value": data[ends[i] : ends[i + 1]],
            "key": None if keys is None or not valid[i // 8] >> i % 8 & 1 else keys[i],
            "headers": [[names[p].decode(), values[p]] for p in pairs],
            "priority": priorities[i],
            "expires_at_ms": expiry[i],
            "due_at_ms": due[i],
            "flags": flags[i],
            "epoch": header["epoch"],
        }


def unpack(codec: int, stored: bytes, raw_bytes: int) -> bytes:
    if codec == 0:
        plain = stored
    elif codec == 1:
        import zstandard

        plain = zstandard.ZstdDecompressor().decompress(stored)
    elif codec == 2:
        plain = lz4_block(stored)
    else:
        plain = zlib.decompress(stored, wbits=31)
    assert len(plain) == raw_bytes
    return plain


def lz4_block(data: bytes) -> bytes:
    out, at = bytearray(), 0

    def length(nibble: int) -> int:
        nonlocal at
        total, more = nibble, nibble == 15
        while more:
            total, more, at = total + data[at], data[at] == 255, at + 1
        return total

    while True:
        token, at = data[at], at + 1
        literals = length(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at == len(data):
            return bytes(out)
        distance, at = int.from_bytes(data[at : at + 2], "little"), at + 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-distance])


def readable_frames(folder: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """All frames of a log below its readable end."""
    words = struct.unpack("<24Q", (folder / "state").read_bytes())
    assert words[0].to_bytes(8, "little") == b"HFSTATE\x01"
    slots = [words[at : at + 5] for at in (8, 16)]
    slot = max(s for s in slots if s[0] and s[4] == crc32c(struct.pack("<4Q", *s[:4])))
    for path in sorted(folder.glob("*.log")):
        for header, records in frames_of(path.read_bytes(), log_id=slot[1] & 0xFFFFFFFF):
            if header["base_offset"] + header["count"] <= words[1]:
                yield header, records


def expected_of(version: Path) -> dict[str, Any]:
    facts = json.loads((version / "expected.json").read_text("utf-8"))
    for record in facts["records"]:
        record["value"] = bytes.fromhex(record["value"])
        record["key"] = None if record["key"] is None else bytes.fromhex(record["key"])
        record["headers"] = [[name, bytes.fromhex(value)] for name, value in record["headers"]]
    return facts


def as_records(facts: dict[str, Any]) -> list[Record]:
    return [Record(**record | {"headers": tuple(map(tuple, record["headers"]))}) for record in facts["records"]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(params=[*VERSIONS, *COMPACTED], ids=lambda path: path.name)
def version(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def copy(version: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(version / "log", tmp_path / "log"))


def test_there_are_files_of_the_version_that_is_written_today():
    assert make.HERE in VERSIONS
    assert make.COMPACTED in COMPACTED


def test_a_reader_reads_every_record_and_changes_nothing(version: Path, copy: Path):
    before, facts = contents(copy), expected_of(version)
    reader = LogReader(str(copy))
    assert (reader.log_id, reader.start, reader.end) == (facts["log_id"], facts["start"], facts["end"])
    assert [list(entry) for entry in reader.epochs.entries] == facts["epochs"]
    assert list(reader.records(reader.start, on_damage="skip")) == as_records(facts)
    assert contents(copy) == before


def test_an_owner_reads_every_record_and_goes_on_writing(version: Path, copy: Path):
    facts = expected_of(version)
    with Log.open(str(copy)) as log:
        assert log.report.clean
        assert (log.log_id, log.start, log.end, log.epoch) == (
            facts["log_id"],
            facts["start"],
            facts["end"],
            facts["epoch"],
        )
        assert list(log.records(log.start, on_damage="skip")) == as_records(facts)
        assert log.append([b"one more"]).offset == facts["end"]
    with Log.open(str(copy)) as log:
        assert [record.value for record in log.records(facts["end"])] == [b"one more"]
        assert list(log.records(log.start, on_damage="skip"))[:-1] == as_records(facts)


def test_what_was_lost_is_told_and_not_passed_over(version: Path, copy: Path):
    facts, reader = expected_of(version), LogReader(str(copy))
    lost, offset = [], reader.start
    while offset < reader.end:
        try:
            for record in reader.records(offset):
                offset = record.offset + 1
        except DamagedRange as damage:
            lost.append([damage.first_offset, damage.next_offset])
            offset = damage.next_offset
    assert lost == facts["lost"]


def test_the_log_opens_without_its_caches(version: Path, copy: Path):
    for index in copy.glob("*.idx"):
        index.unlink()
    with Log.open(str(copy)) as log:
        assert list(log.records(log.start, on_damage="skip")) == as_records(expected_of(version))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_every_kind_of_thing_is_in_the_golden_log(version: Path):
    frames = [header for header, _ in readable_frames(version / "log")]
    used = 0
    for header in frames:
        used |= header["columns"]
    assert used == 255
    assert {header["codec"] for header in frames} == {0, 1, 2, 3}
    assert {header["kind"] for header in frames} == {1, 2, 3, 4}
    assert {header["epoch"] for header in frames} == {1, 2, 3}
    assert max(header["batch_remaining"] for header in frames) > 0
    assert [header["producer_id"] for header in frames if header["producer_id"]] == [0xFEDCBA9876543210]
    assert len({header["magic"] for header in frames}) == int(version.name[1:])
    assert len(list((version / "log").glob("*.log"))) > 2
    assert len(list((version / "log" / "quarantine").iterdir())) == 2


@pytest.mark.parametrize("version", COMPACTED, ids=lambda path: path.name)
def test_every_kind_of_thing_is_in_the_compacted_log(version: Path):
    frames = [header for header, _ in readable_frames(version / "log")]
    assert {header["kind"] for header in frames} == {1, 5}
    assert {header["codec"] for header in frames} == {0, 1}
    assert {header["epoch"] for header in frames} == {1, 2}
    assert any(header["columns"] & 256 for header in frames)
    newer = 256 if version.name == "compacted-v2" else 0
    assert [header["flags"] for header in frames if header["position"] == 0] == [newer + 2, newer + 1, newer]
    assert any(header["magic"] == b"HFR\x02" for header in frames) == bool(newer)
    assert [header["flags"] for header in frames if header["position"] and header["flags"]] == []
    written = [(h["base_offset"], h["count"], h["first_sequence"]) for h in frames if h["producer_id"] == 77]
    assert written == [(43, 3, 2**32 - 2)]
    offset = 0
    for header in frames:
        assert header["base_offset"] == offset
        offset += header["count"]


def test_the_independent_reader_reads_every_record(version: Path):
    read = [record for _, records in readable_frames(version / "log") for record in records]
    assert read == expected_of(version)["records"]


def test_the_small_files_are_as_documented(version: Path):
    folder, facts = version / "log", expected_of(version)
    epochs = (folder / "epochs").read_bytes()
    magic, log_id, count = struct.unpack_from("<8sII", epochs)
    assert (magic, log_id) == (b"HFEPOCH\x01", facts["log_id"])
    assert [list(entry) for entry in struct.iter_unpack("<IQ", epochs[16:-4])] == facts["epochs"]
    assert count == len(facts["epochs"])
    assert epochs[-4:] == struct.pack("<I", crc32c(epochs[:-4]))
    assert parse_epochs(epochs) is not None
    for path in folder.glob("*.idx"):
        check_index(path, facts["log_id"])


def check_index(path: Path, log_id: int) -> None:
    content, frames = path.read_bytes(), list(frames_of(path.with_suffix(".log").read_bytes(), log_id))
    magic, found_id, count, base, next_offset, end, rewritten, max_time_ns = struct.unpack_from("<8sIIQQIIq", content)
    assert rewritten == frames[0][0]["flags"]
    assert (magic, found_id, base) == (b"HFINDEX\x01", log_id, int(path.stem))
    assert len(content) == 48 + 20 * count + 4
    assert content[-4:] == struct.pack("<I", crc32c(content[:-4]))
    last = frames[-1][0]
    assert next_offset == last["base_offset"] + last["count"]
    assert end == last["end"]
    assert max_time_ns >= max(header["max_time_ns"] for header, _ in frames)
    offsets = struct.unpack_from(f"<{count}Q", content, 48)
    times = struct.unpack_from(f"<{count}q", content, 48 + 8 * count)
    positions = struct.unpack_from(f"<{count}I", content, 48 + 16 * count)
    at = {header["position"]: header for header, _ in frames}
    for offset, time_ns, position in zip(offsets, times, positions, strict=True):
        assert at[position]["base_offset"] == offset
        earlier = [header["max_time_ns"] for header, _ in frames if header["position"] < position]
        assert time_ns >= max(earlier, default=-(2**63))
    index = parse_index(content, log_id, base, 512)
    assert index is not None
    assert (list(index.offsets), list(index.positions)) == (list(offsets), list(positions))


def test_our_crc_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283


EXAMPLE = """
48465201 0d0c0b0a 00000000 35000000 35000000 02000000 01 00 0001 06000000
2a00000000000000 00002a36fe9c9717 2800000000000000 03000000 07000000 3412000000000000 05000000 00000000
9f937ba6 c3fe8149
00000000 05000000 05000000 00000000
01 00000000000000
00000000 03000000 03000000 00000000
6b6579 0000000000
68656c6c6f 000000
"""


def hand_assembled() -> bytes:
    """The example of the documentation, put together with nothing but struct."""
    body = b"".join(
        (
            struct.pack("<3i", 0, 5, 5) + bytes(4),
            b"\x01" + bytes(7),
            struct.pack("<3i", 0, 3, 3) + bytes(4),
            b"key" + bytes(5),
            b"hello",
        )
    )
    padded = body + bytes(-len(body) % 8)
    fixed = struct.pack("<5I", 0x0A0B0C0D, 0, len(body), len(body), 2) + struct.pack("<BBHI", 1, 0, 256, 2 | 4)
    place = struct.pack("<QqQII", 42, 1_700_000_000_000_000_000, 40, 3, 7)
    head = b"HFR\x01" + fixed + place + struct.pack("<QIII", 0x1234, 5, 0, crc32c(padded))
    return head + struct.pack("<I", crc32c(head)) + padded


def test_a_frame_is_byte_for_byte_what_the_specification_says():
    example = bytes.fromhex(EXAMPLE)
    assert hand_assembled() == example
    batch = Batch(values=[b"hello", b""], keys=[b"key", None])
    (body,) = encode_batch(batch, 1_700_000_000_000_000_000, packing=Packing(), cap_bytes=1000)
    place = FramePlace(0x0A0B0C0D, 3, 0, 42, 40)
    header = header_for(body, place, batch_remaining=0, producer=Producer(0x1234, 7, 5))
    assert header + b"".join(body.parts) == example
    assert list(read_frame(memoryview(example), 0, 0, max_raw_bytes=1000).records()) == [
        Record(42, 1_700_000_000_000_000_000, b"hello", b"key", epoch=3),
        Record(43, 1_700_000_000_000_000_000, b"", None, epoch=3),
    ]


def test_the_example_of_the_documentation_is_this_very_frame():
    block = re.search(r'EXAMPLE = """(.*?)"""', FORMAT.read_text("utf-8"), re.DOTALL)
    assert block is not None
    digits = re.sub(r"#.*", "", block[1])
    assert bytes.fromhex("".join(digits.split())) == bytes.fromhex(EXAMPLE)


def test_a_short_frame_is_byte_for_byte_what_the_specification_says():
    fields = struct.pack("<4sIIHHQq", b"HFR\x02", 0x0A0B0C0D, 144, 5, 3, 44, 1_700_000_000_000_000_000)
    checked = fields + b"hello" + bytes(47)
    by_hand = checked + struct.pack("<I", crc32c(checked))
    assert len(by_hand) == 88
    assert short_frame(0x0A0B0C0D, 144, 3, 44, 1_700_000_000_000_000_000, b"hello") == by_hand
    header, record = next(frames_of(bytes(144) + by_hand, 0x0A0B0C0D))
    assert (header["position"], header["end"], record[0]["value"]) == (144, 144 + 88, b"hello")
    (found,) = read_frame(memoryview(by_hand), 0, 144, max_raw_bytes=1000).records()
    assert found == Record(44, 1_700_000_000_000_000_000, b"hello", epoch=3)
