"""Frames to Arrow and back, buffer by buffer: no message is touched. Needs pyarrow (extra `arrow`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.checksum import crc32c
from holdfast.codec.columns import padding
from holdfast.codec.compression import Codec
from holdfast.codec.encode import PLAIN, Body, Packing, pack_again
from holdfast.codec.frame import Frame
from holdfast.errors import CorruptData, InvalidRequest, MessageTooLarge


def encode_arrow(
    values: Any, now_ns: int, *, cap_bytes: int, max_message_bytes: int, packing: Packing = PLAIN
) -> list[Body]:
    """Bodies for an array (or chunked array) of binary or text values; nulls are refused."""
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    bodies = [body for chunk in chunks for body in _encode_chunk(chunk, now_ns, cap_bytes, max_message_bytes)]
    return bodies if packing.codec is Codec.NONE else [pack_again(body, packing) for body in bodies]


def values_to_arrow(frame: Frame) -> pa.BinaryArray:
    """The frame's payloads as an Arrow array over the frame's own bytes; a copy where some were removed."""
    columns = frame.columns()
    ends, kept = columns.value_ends(), columns.kept()
    array = binary_array(frame, ends, columns.value_bytes(), len(ends) // 4 - 1)
    return array if kept is None else array.filter(pa.array(kept, type=pa.bool_()))


def binary_array(
    frame: Frame, ends: memoryview, data: memoryview, count: int, validity: memoryview | None = None
) -> pa.BinaryArray:
    """An array over bytes of the frame; CorruptData where they are none."""
    try:
        if ends[:4] != bytes(4):
            raise ValueError("the first item does not begin at 0")
        buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(ends), pa.py_buffer(data)]
        array = pa.Array.from_buffers(pa.binary(), count, buffers)
        array.validate(full=True)  # wrong ends would let Arrow read outside the buffer
    except (pa.ArrowException, ValueError) as error:
        raise CorruptData(f"the frame at offset {frame.base_offset} is not a valid Arrow array: {error}") from None
    return array


def _encode_chunk(chunk: Any, now_ns: int, cap_bytes: int, max_message_bytes: int) -> Iterator[Body]:
    if not isinstance(chunk, pa.Array):
        raise InvalidRequest(f"append_arrow takes an Arrow array of binary values, not {type(chunk).__name__}")
    if chunk.type in (pa.string(), pa.large_string(), pa.large_binary()) or pa.types.is_fixed_size_binary(chunk.type):
        try:
            chunk = chunk.cast(pa.binary())
        except pa.ArrowInvalid as error:
            raise MessageTooLarge(f"the array cannot be stored: {error}. Append it in smaller pieces") from None
    if chunk.type != pa.binary():
        raise InvalidRequest(f"append_arrow takes binary or text values, not {chunk.type}")
    if chunk.null_count:
        raise InvalidRequest(f"{chunk.null_count} of the values are null; a message has a value, maybe an empty one")
    if not len(chunk):
        return
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"the array is not valid: {error}. Nothing of it was kept") from None
    longest = pc.max(pc.binary_length(chunk)).as_py()
    if longest > max_message_bytes:
        raise MessageTooLarge(f"a message has {longest} bytes, the limit is {max_message_bytes}; nothing was kept")
    _, ends_buffer, data_buffer = chunk.buffers()
    first, count = chunk.offset, len(chunk) + 1
    ends = memoryview(ends_buffer).cast("B")[4 * first : 4 * (first + count)].cast("i")
    data = memoryview(data_buffer or b"").cast("B")
    for start, stop in _cuts(ends, cap_bytes):
        yield _body(ends, data, start, stop, now_ns)


def _cuts(ends: memoryview, cap_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of messages of at most `cap_bytes` with their ends, or of one larger message."""
    last = len(ends) - 1
    start = 0
    while start < last:
        stop = _farthest(ends, start, last, cap_bytes)
        yield start, stop
        start = stop


def _farthest(ends: memoryview, start: int, last: int, cap_bytes: int) -> int:
    low, high = start + 1, last
    while low < high:
        middle = (low + high + 1) // 2
        if ends[middle] - ends[start] + 4 * (middle - start) <= cap_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _body(ends: memoryview, data: memoryview, start: int, stop: int, now_ns: int) -> Body:
    first, last = ends[start], ends[stop]
    own_ends = pa.Array.from_buffers(pa.int32(), stop - start + 1, [None, pa.py_buffer(ends[start : stop + 1])])
    head = memoryview(pc.subtract(own_ends, pa.scalar(first, pa.int32())).buffers()[1]).cast("B")
    head = head[: 4 * (stop - start + 1)]
    values = data[first:last]
    gap = padding(len(head))
    body_bytes = len(head) + len(gap) + len(values)
    parts: list[bytes | memoryview] = [head, gap, values, padding(body_bytes)]
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return Body(parts, body_bytes, body_bytes, stop - start, 0, Codec.NONE, now_ns, crc)
