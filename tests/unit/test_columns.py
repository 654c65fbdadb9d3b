"""Columns: the layout byte by byte, what each column keeps, and what a wrong body is refused for."""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from itertools import pairwise

import pytest

from holdfast.codec import columns as c
from holdfast.codec.columns import Columns, encode_columns, padding
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import CorruptData, InvalidRequest
from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage.log import Log


def columns_of(batch: Batch) -> Columns:
    bits, parts = encode_columns(batch)
    return Columns(memoryview(b"".join(parts)), len(batch.values), bits)


def parsed(body: bytes, count: int, bits: int = 0) -> Columns:
    return Columns(memoryview(body), count, bits)


def int32s(*numbers: int) -> bytes:
    """Numbers as a column of ends, padded."""
    packed = struct.pack(f"<{len(numbers)}i", *numbers)
    return packed + bytes(-len(packed) % 8)


def read_all(columns: Columns) -> None:
    """Touch every column."""
    columns.values()
    columns.times_ns()
    columns.keys()
    columns.headers()
    columns.priorities()
    columns.expires_at_ms()
    columns.due_at_ms()
    columns.flags()


LAYOUTS = {
    "values": (Batch(values=[b"ab", b"", b"c"]), 0, int32s(0, 2, 2, 3) + b"abc"),
    "one value": (Batch(values=[b"ab"]), 0, int32s(0, 2) + b"ab"),
    "empty values": (Batch(values=[b"", b""]), 0, int32s(0, 0, 0)),
    "times": (Batch(values=[b"a", b"b"], times_ns=[-1, 2]), 1, int32s(0, 1, 2) + struct.pack("<qq", -1, 2) + b"ab"),
    "keys": (
        Batch(values=[b"a"], keys=[b"key"]),
        4,
        int32s(0, 1) + int32s(0, 3) + b"key\0\0\0\0\0" + b"a",
    ),
    "keys with none": (
        Batch(values=[b"a", b"b", b"c"], keys=[None, b"", b"k"]),
        6,
        int32s(0, 1, 2, 3) + b"\x06" + bytes(7) + int32s(0, 0, 0, 1) + b"k" + bytes(7) + b"abc",
    ),
    "headers": (
        Batch(values=[b"a", b"b"], headers=[[("x", b"12"), ("é", b"")], []]),
        8,
        int32s(0, 1, 2) + int32s(0, 2, 2) + int32s(0, 1, 3) + b"x\xc3\xa9" + bytes(5) + int32s(0, 2, 2) + b"12"
        + bytes(6) + b"ab",
    ),
    "priorities": (Batch(values=[b"a"], priorities=[9]), 16, int32s(0, 1) + b"\x09" + bytes(7) + b"a"),
    "expiry": (Batch(values=[b"a"], expires_at_ms=[7]), 32, int32s(0, 1) + struct.pack("<q", 7) + b"a"),
    "due": (Batch(values=[b"a"], due_at_ms=[8]), 64, int32s(0, 1) + struct.pack("<q", 8) + b"a"),
    "flags": (Batch(values=[b"a"], flags=[c.TOMBSTONE]), 128, int32s(0, 1) + b"\x01" + bytes(7) + b"a"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "bits", "body"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_is_the_documented_one(batch: Batch, bits: int, body: bytes):
    got_bits, parts = encode_columns(batch)
    assert got_bits == bits
    assert b"".join(parts) == body


def test_columns_stand_in_the_order_of_their_bits():
    batch = Batch(
        values=[b"VALUE"],
        times_ns=[1],
        keys=[b"KEY"],
        headers=[[("NAME", b"HEADER")]],
        priorities=[0xA1],
        expires_at_ms=[0xA2],
        due_at_ms=[0xA3],
        flags=[0xA4],
    )
    bits, parts = encode_columns(batch, removed=[True])
    body = b"".join(parts)
    marks = [body.index(mark) for mark in (b"\x01", b"KEY", b"NAME", b"HEADER", b"\xa1", b"\xa2", b"\xa3", b"\xa4")]
    assert body.index(b"\xa4") + 8 == body.rindex(b"\x01")  # what is marked as removed
    assert bits == c.KNOWN_COLUMNS & ~c.KEY_VALIDITY
    assert marks == sorted(marks)
    assert body.endswith(b"VALUE")


def test_every_part_but_the_values_begins_at_a_multiple_of_eight():
    batch = Batch(values=[b"abc"] * 5, keys=[b"k", None, b"", b"long key", None], priorities=[1] * 5, flags=[0] * 5)
    columns = columns_of(batch)
    bits, parts = encode_columns(batch)
    body = b"".join(parts)
    start = len(body) - 15
    assert start % 8 == 0
    for bit in (c.KEY_VALIDITY, c.KEYS, c.PRIORITIES, c.FLAGS):
        assert bits & bit
        assert columns.span(bit) is not None
    assert columns.value_bytes().tobytes() == b"abc" * 5
    assert columns.span(c.TIMES) is None


def test_no_key_and_an_empty_key_are_two_things():
    keys = [None, b"", b"k", None, b"", b"", b"x", None, None]
    columns = columns_of(Batch(values=[b""] * 9, keys=keys))
    assert columns.columns & c.KEY_VALIDITY
    assert columns.keys() == keys


def test_keys_of_all_messages_need_no_validity():
    columns = columns_of(Batch(values=[b"a", b"b"], keys=[b"", b"k"]))
    assert columns.columns == c.KEYS
    assert columns.keys() == [b"", b"k"]


def test_all_keys_may_be_absent():
    assert columns_of(Batch(values=[b"a"] * 9, keys=[None] * 9)).keys() == [None] * 9


def test_headers_keep_repeats_order_and_emptiness():
    rows = [
        [("a", b"1"), ("b", b"2"), ("a", b"1"), ("a", b"")],
        [],
        [("", b""), ("", b"")],
        [("ключ 🔑", b"\x00\xff"), ("\x00", b"nul")],
    ]
    columns = columns_of(Batch(values=[b"v"] * 4, headers=rows))
    assert columns.headers() == [tuple(row) for row in rows]


def test_a_header_value_over_65535_bytes_does_not_spoil_what_follows():
    big = bytes(range(256)) * 300
    rows = [[("big", big), ("n" * 70_000, b"small")], [("after", b"1")]]
    batch = Batch(values=[b"first payload", b"second payload"], headers=rows, flags=[1, 2])
    columns = columns_of(batch)
    assert len(big) > 65_535
    assert columns.headers() == [tuple(row) for row in rows]
    assert columns.values() == batch.values
    assert list(columns.flags() or ()) == [1, 2]


def test_numbers_keep_their_extremes():
    edges = [-(2**63), -1, 0, 1, 2**63 - 1]
    batch = Batch(values=[b""] * 5, times_ns=edges, expires_at_ms=edges, due_at_ms=edges, priorities=[0, 255, 1, 2, 3])
    columns = columns_of(batch)
    assert list(columns.times_ns() or ()) == edges
    assert list(columns.expires_at_ms() or ()) == edges
    assert list(columns.due_at_ms() or ()) == edges
    assert list(columns.priorities() or ()) == [0, 255, 1, 2, 3]


@pytest.mark.parametrize(
    "batch",
    [
        Batch(values=[b"a"], times_ns=[2**63]),
        Batch(values=[b"a"], due_at_ms=[-(2**63) - 1]),
        Batch(values=[b"a"], priorities=[256]),
        Batch(values=[b"a"], priorities=[-1]),
        Batch(values=[b"a"], flags=[256]),
        Batch(values=[b"a"], headers=[[("\ud800", b"")]]),
        Batch(values=[b"a"], headers=[[("a", "text")]]),  # type: ignore[list-item]
        Batch(values=[b"a"], keys=["text"]),  # type: ignore[list-item]
        Batch(values=["text"]),  # type: ignore[list-item]
        Batch(values=[b"a"], priorities=[1, 2]),
        Batch(values=[b"a"], keys=[]),
    ],
)
def test_what_does_not_fit_its_column_is_refused_and_nothing_is_kept(batch: Batch):
    log = Log.open("log", LogSettings(min_free_bytes=0), World(ManualClock(), SimulatedDisk(), SeededIds()))
    with pytest.raises(InvalidRequest):
        log.append(batch)
    assert log.written_end == 0
    log.append([b"fine"])
    assert [record.value for record in log.records(0)] == [b"fine"]


WIDE = {
    "a memoryview of int32 as value": Batch(values=[memoryview(array("i", [1, 2])), b"second"]),  # type: ignore[list-item]
    "a memoryview of int32 as key": Batch(values=[b"a"], keys=[memoryview(array("i", [1, 2]))]),  # type: ignore[list-item]
    "a memoryview of int32 as header": Batch(values=[b"a"], headers=[[("n", memoryview(array("i", [1, 2])))]]),  # type: ignore[list-item]
    "priorities as an array of int64": Batch(values=[b"first", b"second"], priorities=array("q", [1, 2])),
    "flags as an array of int64": Batch(values=[b"first", b"second"], flags=array("q", [1, 1])),
    "times as bytes": Batch(values=[b"a"] * 8, times_ns=bytes(8)),
    "a key that is a number": Batch(values=[b"a"], keys=[0]),  # type: ignore[list-item]
    "a key that is empty text": Batch(values=[b"a"], keys=[""]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("batch", WIDE.values(), ids=WIDE)
def test_input_of_another_item_size_is_refused_or_kept_as_it_is(batch: Batch):
    log = Log.open("log", LogSettings(min_free_bytes=0), World(ManualClock(), SimulatedDisk(), SeededIds()))
    try:
        log.append(batch)
    except InvalidRequest:
        return
    records = list(log.records(0))
    assert [record.value for record in records] == [bytes(value) for value in batch.values]
    for key, record in zip(batch.keys or (), records, strict=False):
        assert not isinstance(key, (int, str))
        assert record.key == bytes(key or b"")
    for row, record in zip(batch.headers or (), records, strict=False):
        assert record.headers == tuple((name, bytes(value)) for name, value in row)
    for column, field in ((batch.priorities, "priority"), (batch.flags, "flags"), (batch.times_ns, "timestamp_ns")):
        assert column is None or [getattr(record, field) for record in records] == list(column)


@pytest.mark.parametrize(
    "ends",
    [(1, 2, 3), (-1, 0, 3), (0, 3, 2), (0, -1, 3), (0, 2, -3), (0, 1, 4), (0, 4, 4), (0, 2**31 - 1, 2**31 - 1)],
)
def test_wrong_value_ends_are_refused(ends: tuple[int, ...]):
    with pytest.raises(CorruptData):
        parsed(int32s(*ends) + b"abc", 2).values()


def test_a_body_cut_at_any_length_is_refused():
    for batch, _, _ in LAYOUTS.values():
        if not any(batch.values):
            continue
        bits, parts = encode_columns(batch)
        body = b"".join(parts)
        for length in range(len(body)):
            with pytest.raises(CorruptData):
                read_all(parsed(body[:length], len(batch.values), bits))


@pytest.mark.parametrize("bits", [0, *(1 << n for n in range(8)), c.KNOWN_COLUMNS])
def test_a_count_that_the_body_cannot_hold_costs_no_memory(bits: int):
    body = int32s(0, 1) + bytes(64)
    tracemalloc.start()
    try:
        for count in (2**32 - 1, 2**31, 2**24, 1000):
            with pytest.raises(CorruptData):
                read_all(parsed(body, count, bits))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pairs", [1, 2**20, 2**31 - 1])
def test_more_headers_than_there_are_bytes_are_refused_without_memory(pairs: int):
    body = int32s(0, 0) + int32s(0, pairs) + int32s(0)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData):
            parsed(body, 1, c.HEADERS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "column",
    [
        int32s(0, -1) + int32s(0) + int32s(0),  # ends into the pairs that fall
        int32s(1, 1) + int32s(0, 0) + int32s(0, 0),  # that do not begin at 0
        int32s(0, 2) + int32s(0, 5, 3) + b"names..." + int32s(0, 0, 0),  # names whose ends fall
        int32s(0, 1) + int32s(0, 99) + int32s(0, 0),  # names beyond the body
        int32s(0, 1) + int32s(0, 0) + int32s(0, 99),  # values beyond the body
    ],
)
def test_a_wrong_header_column_is_refused(column: bytes):
    with pytest.raises(CorruptData):
        read_all(parsed(int32s(0, 0) + column, 1, c.HEADERS))


def test_a_header_name_that_is_not_utf_8_is_refused():
    body = int32s(0, 0) + int32s(0, 1) + int32s(0, 1) + b"\xff" + bytes(7) + int32s(0, 0)
    columns = parsed(body, 1, c.HEADERS)
    assert columns.values() == [b""]
    with pytest.raises(CorruptData, match="UTF-8"):
        columns.headers()


def test_wrong_key_ends_are_refused():
    for ends in ((0, 9), (1, 1), (0, -1)):
        with pytest.raises(CorruptData):
            read_all(parsed(int32s(0, 0) + int32s(*ends) + b"k" + bytes(7), 1, c.KEYS))


def test_a_message_is_never_cut_out_of_its_neighbours_column():
    """Keys may not reach into the values, whatever their ends say: the column ends where it says."""
    body = int32s(0, 6) + int32s(0, 3) + b"key" + bytes(5) + b"secret"
    assert parsed(body, 1, c.KEYS).keys() == [b"key"]
    assert parsed(body, 1, c.KEYS).values() == [b"secret"]


def test_padding_reaches_the_next_multiple_of_eight():
    assert [len(padding(length)) for length in range(10)] == [0, 7, 6, 5, 4, 3, 2, 1, 0, 7]
    assert not any(padding(3))
    assert all(later >= earlier for earlier, later in pairwise(n + len(padding(n)) for n in range(50)))


@pytest.mark.parametrize("sizes", [[2, 3, 1], [3, 3, 3], [0, 0, 0], [2, 2, 3], [4, 0, 2, 2], [7] * 1024, [7] * 1025])
def test_items_of_one_length_are_read_like_any_others(sizes: list[int]):
    values = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    bits, parts = encode_columns(Batch(values=values))
    assert bits == 0
    assert c.plain_values(memoryview(b"".join(parts)), len(values)) == values


def test_items_of_one_length_that_reach_beyond_the_body_are_refused():
    for ends in ((0, 3, 6, 9), (0, 2**31 - 1), (1, 3, 6, 9), (0, 5, 3, 9)):
        with pytest.raises(CorruptData):
            c.plain_values(memoryview(int32s(*ends) + bytes(8)), len(ends) - 1)
