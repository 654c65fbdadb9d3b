"""How a message says which schema its value has: the format of Confluent's serializers.

    at  size  field
    0    1    magic     0
    1    4    id        of the schema in the registry, big-endian
    5         indexes   Protobuf only: which message of the file, as its path; see below
              payload

The path is a list of zigzag varints: its length, then the index at each level of nesting. The most common one, the
first message of the file, is the single byte 0 instead of 2 0."""

from __future__ import annotations

import struct
from typing import Final

from holdfast.errors import SchemaMismatch

_HEADER = struct.Struct(">BI")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 5  # keeps the table above and the code in step

_MOST_VARINT_BYTES: Final = 5
_MOST_LEVELS: Final = 64


def split_header(value: bytes) -> tuple[int, bytes]:
    """Return the id of the schema of a message, and what follows it. Raises SchemaMismatch."""
    if len(value) < HEADER_BYTES or value[0] != 0:
        raise SchemaMismatch(
            "the value does not name its schema: it must begin with a zero byte and the schema's id in four bytes, as "
            "the serializers of a schema registry write it"
        )
    return _HEADER.unpack_from(value)[1], value[HEADER_BYTES:]


def with_header(schema_id: int, payload: bytes) -> bytes:
    """Return a payload as a message that names its schema."""
    return _HEADER.pack(0, schema_id) + payload


def split_indexes(payload: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return which message of a Protobuf file a payload holds, and what follows. Raises SchemaMismatch."""
    count, at = _zigzag(payload, 0)
    if count == 0:
        return (0,), payload[at:]
    if not 0 < count <= _MOST_LEVELS:
        raise SchemaMismatch(f"the value does not say which message of its schema it is: its path has {count} levels")
    path = []
    for _ in range(count):
        index, at = _zigzag(payload, at)
        path.append(index)
    return tuple(path), payload[at:]


def with_indexes(path: tuple[int, ...], payload: bytes) -> bytes:
    """Return a Protobuf payload with the path of its message."""
    if path == (0,):
        return b"\0" + payload
    return b"".join(map(_as_zigzag, (len(path), *path))) + payload


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(_MOST_VARINT_BYTES):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << 7 * shift
        if not byte & 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise SchemaMismatch("the value ends before it says which message of its schema it is")


def _as_zigzag(number: int) -> bytes:
    left, out = number << 1, bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)
