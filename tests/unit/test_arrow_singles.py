"""Frames of single messages that are taken apart together, beside the same taken apart one by one."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("pyarrow")

from holdfast.codec.arrow import Singles, is_single
from holdfast.codec.columns import DUE, EXPIRY, FLAGS, PRIORITIES
from holdfast.codec.frame import Frame
from holdfast.errors import CorruptData
from holdfast.model import Batch
from tests.unit.test_frame import encoded, read

MESSAGES = [
    Batch(values=[b"plain"]),
    Batch(values=[b""]),
    Batch(values=[b"keyed"], keys=[b"a key of 19 letters"]),
    Batch(values=[b"with all"], keys=[b""], priorities=[7], expires_at_ms=[9], due_at_ms=[2**40], flags=[4]),
    Batch(values=[b"v" * 300], flags=[1]),
]


def frame_of(batch: Batch) -> Frame:
    (frame,) = encoded(batch)
    return read(frame)


def damaged(frame: Frame, at: int) -> Frame:
    body = bytearray(frame.stored)
    body[at] ^= 0x85
    return Frame(frame.header, memoryview(bytes(body)), max_raw_bytes=1 << 20)


def test_values_keys_and_numbers_are_those_of_each_frame():
    frames = [frame_of(batch) for batch in MESSAGES]
    assert all(map(is_single, frames))
    singles = Singles(frames)
    assert singles.values().to_pylist() == [batch.values[0] for batch in MESSAGES]
    assert singles.keys().to_pylist() == [batch.keys and batch.keys[0] for batch in MESSAGES]
    for column, kind, wanted in ((PRIORITIES, "u1", 7), (EXPIRY, "i8", 9), (DUE, "i8", 2**40)):
        assert singles.numbers(column, kind).tolist() == [0, 0, 0, wanted, 0]
    assert singles.numbers(FLAGS, "u1").tolist() == [0, 0, 0, 4, 1]


@pytest.mark.parametrize(
    "batch",
    [
        Batch(values=[b"one", b"two"]),
        Batch(values=[b"timed"], times_ns=[1]),
        Batch(values=[b"with headers"], headers=[(("name", b"value"),)]),
        Batch(values=[b"long" * 2000]),
    ],
)
def test_other_frames_are_not_of_this_kind(batch):
    assert not is_single(frame_of(batch))


@pytest.mark.parametrize("batch", MESSAGES)
def test_a_spoiled_body_is_found_out_as_by_the_plain_way(batch):
    good = frame_of(batch)
    for at in range(len(good.stored)):
        bad = damaged(good, at)
        try:
            columns = bad.columns()
            wanted = (columns.values(), columns.keys() or [None])
        except CorruptData:
            with pytest.raises(CorruptData, match="the frame at offset 0 do not fit"):
                Singles([good, bad])
        else:
            singles = Singles([bad])
            assert (singles.values().to_pylist(), singles.keys().to_pylist()) == wanted
