"""What is around a message that is put alone: layouts and tables for `Writer.append_one`, which fuses all the rest.

`encode` says the same for any frame; a property test checks one against the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from struct import Struct
from typing import Final

from holdfast.codec.columns import KNOWN_COLUMNS
from holdfast.codec.frame import HEADER_BYTES, MAY_HOLD_SHORT, SHORT_AROUND, SHORT_HEADER, Codec, Kind, short_bytes
from holdfast.model import Producer

# The header of a long frame with a single message; its constant fields are packed together.
_HEADER: Final = Struct("<8sI20sQqQ24sI")
EPOCH_BYTES: Final = 4
_PRODUCER: Final = Struct("<IQI4x")  # and no frames of the same batch follow
NO_PRODUCER_FIELD: Final = bytes(_PRODUCER.size)
assert (_HEADER.size, EPOCH_BYTES + _PRODUCER.size) == (HEADER_BYTES - 4, 24)

LONG_HEADER: Final = _HEADER.pack
SIZES: Final = Struct("<II12s").pack  # lengths, and a `constant_field`
constant_field: Final = Struct("<IBBHI").pack  # count, kind, codec, flags, columns
ONE_VALUE: Final = Struct("<ii").pack
CRC: Final = Struct("<I").pack
PADDING: Final = tuple(bytes(-n % 8) for n in range(8))
_FLAGS_AT, _FLAGS_END = 14, 16  # in the sizes
_FIRST_FLAGS: Final = MAY_HOLD_SHORT.to_bytes(_FLAGS_END - _FLAGS_AT, "little")

_SHORT: Final = "<8sIHHQq"  # the header of a short frame; magic and log id are packed together
SMALL: Final = 1024  # larger values get long frames: there is little to save
# For each length of a value, what packs all of a short frame but its check, once it was needed.
SHORT_PACKS: Final[list[Callable[..., bytes] | None]] = [None] * SMALL
assert Struct(_SHORT).size == SHORT_HEADER.size


def short_pack(length: int) -> Callable[..., bytes]:
    """Return what is in `SHORT_PACKS` from now on."""
    padding = short_bytes(length) - SHORT_AROUND - length
    SHORT_PACKS[length] = pack = Struct(f"{_SHORT}{length}s{padding}x").pack
    return pack


def producer_field(producer: Producer) -> bytes:
    """Return a producer as the header of a frame has it."""
    return _PRODUCER.pack(producer.epoch, producer.id, producer.first_sequence)


@cache
def one_with(kind: Kind) -> list[bytes]:
    """Return the constant fields of a single message of this kind, for all columns that it can have."""
    pack = partial(constant_field, 1, kind, Codec.NONE, 0)
    return list(map(pack, range(KNOWN_COLUMNS + 1)))


def first_sizes(sizes: bytes) -> bytes:
    """Return the sizes as they are in the first frame of a segment."""
    return sizes[:_FLAGS_AT] + _FIRST_FLAGS + sizes[_FLAGS_END:]
