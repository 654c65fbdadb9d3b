"""Columns of Arrow become the same frames that the messages would, one by one."""

from __future__ import annotations

import pytest

from holdfast.codec.columns import Columns
from holdfast.codec.encode import Body, Packing
from holdfast.codec.frame import Codec, Frame, FrameHeader

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")

from holdfast.codec.arrow import Bytes, HeaderColumns, Rows, encode_rows  # noqa: E402  needs the two above

VALUES = [b"first", b"", b"x" * 300, b"last", b"\x00\xff"]
KEYS = [b"a", b"", None, b"key", None]
PAIRS = [[("n", b"1"), ("m", b"")], [], [("n", b"2")], [], [("z", b"9" * 20)]]


def column(values: list[bytes | None]) -> Bytes:
    return Bytes.of(pa.array([value or b"" for value in values], pa.binary()))


def full() -> Rows:
    pairs = [pair for row in PAIRS for pair in row]
    ends = np.cumsum([0, *map(len, PAIRS)]).astype(np.int32)
    return Rows(
        values=column(VALUES),
        keys=column(KEYS),
        keyed=np.array([key is not None for key in KEYS]),
        headers=HeaderColumns(
            ends, column([name.encode() for name, _ in pairs]), column([value for _, value in pairs])
        ),
        priorities=np.array([0, 9, 3, 0, 1], np.uint8),
        expires_at_ms=np.array([0, 5, 0, 7, 8], np.int64),
        due_at_ms=np.array([1, 0, 0, 0, 2], np.int64),
        flags=np.array([4, 0, 8, 0, 1], np.uint8),
    )


def opened(body: Body) -> Columns:
    stored = memoryview(b"".join(body.parts))
    assert len(stored) == -(-body.body_bytes // 8) * 8
    header = FrameHeader(
        b"", 0, 0, body.body_bytes, body.raw_bytes, body.count, body.kind, body.codec, 0, body.columns, 0, 0, 0, 0, 0,
        0, 0, 0, body.crc, 0,
    )  # fmt: skip
    return Frame(header, stored[: body.body_bytes], max_raw_bytes=1 << 20).columns()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("cap_bytes", [1, 100, 400, 1 << 20])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 4), (2, 3)])
def test_every_column_comes_out_as_it_went_in(codec, cap_bytes, start, stop):
    rows = full()
    bodies = list(encode_rows(rows, start, stop, 7, cap_bytes=cap_bytes, packing=Packing(codec, min_bytes=0)))
    at = start
    for body in bodies:
        columns, mine = opened(body), slice(at, at + body.count)
        assert columns.values() == VALUES[mine]
        assert (columns.keys() or [None] * body.count) == KEYS[mine]
        assert [list(pairs) for pairs in columns.headers() or [()] * body.count] == PAIRS[mine]
        for found, wanted in (
            (columns.priorities(), rows.priorities),
            (columns.expires_at_ms(), rows.expires_at_ms),
            (columns.due_at_ms(), rows.due_at_ms),
            (columns.flags(), rows.flags),
        ):
            assert list(found or [0] * body.count) == wanted[mine].tolist()
        at += body.count
    assert at == stop
    assert len(bodies) == (1 if cap_bytes > 1000 else stop - start if cap_bytes == 1 else len(bodies))


def test_a_column_in_which_nobody_has_anything_is_left_out():
    rows = full()
    nothing = Rows(
        values=rows.values,
        keys=rows.keys,
        keyed=np.zeros(5, np.bool_),
        headers=HeaderColumns(np.zeros(6, np.int32), column([]), column([])),
        priorities=np.zeros(5, np.uint8),
        flags=np.zeros(5, np.uint8),
    )
    (body,) = encode_rows(nothing, 0, 5, 7, cap_bytes=1 << 20)
    assert body.columns == 0
    assert opened(body).values() == VALUES


def test_the_values_of_a_slice_are_those_of_the_slice():
    array = pa.array([b"before", *VALUES, b"behind"], pa.binary()).slice(1, 5)
    (body,) = encode_rows(Rows(values=Bytes.of(array)), 0, 5, 7, cap_bytes=1 << 20)
    assert opened(body).values() == VALUES
