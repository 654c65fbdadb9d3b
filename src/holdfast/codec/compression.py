"""Compression of a frame's body, and the limits that keep a hostile body from costing memory.

The stored length of the plain body (`raw_bytes`) is part of the checked header. Before a byte is
unpacked, it is held against the caller's limit and against what the codec could possibly produce
from so few bytes, so the memory that is spent is always justified by the input.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from holdfast.errors import CorruptData, MessageTooLarge, UnknownFormat


class Codec(IntEnum):
    """How a frame's body is packed; the number is stored."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2
    GZIP = 3


DEFAULT_LEVEL: Final = {Codec.ZSTD: 3, Codec.LZ4: 0, Codec.GZIP: 6}

# The most that one packed byte can become: zstd holds 128 KiB in a block of 4 bytes (3 for the block's
# header, 1 for the repeated byte), lz4 255 bytes in a length byte, deflate 1032 to 1.
_MOST_RATIO: Final = {Codec.NONE: 1, Codec.ZSTD: 128 * 1024 // 3, Codec.LZ4: 255, Codec.GZIP: 1032}
_RATIO_SLACK_BYTES = 64 * 1024

# More than any setting lets a writer pack. Readers go by this and not by what the settings say today: a frame that was
# stored under a higher limit must be readable, or it would stand in the way of all behind it.
MOST_RAW_BYTES: Final = 1 << 30


def compress(codec: Codec, data: bytes, *, level: int | None) -> bytes:
    """The packed form of `data`."""
    return _COMPRESS[codec](data, DEFAULT_LEVEL[codec] if level is None else level)


def decompress(codec: Codec, data: bytes, *, raw_bytes: int, max_raw_bytes: int) -> bytes:
    """The plain form, which must be of exactly `raw_bytes`; anything else is damage or an attack."""
    if raw_bytes > max_raw_bytes:
        raise MessageTooLarge(
            f"a frame unpacks to {raw_bytes} bytes, over the limit of {max_raw_bytes}; it was not unpacked: "
            "no version of Holdfast packs so much"
        )
    if raw_bytes > len(data) * _MOST_RATIO[codec] + _RATIO_SLACK_BYTES:
        raise CorruptData(f"{len(data)} bytes of {codec.name.lower()} cannot unpack to {raw_bytes} bytes")
    try:
        plain = _DECOMPRESS[codec](data, raw_bytes)
    except (ValueError, RuntimeError, zlib.error, MemoryError) as error:
        raise CorruptData(f"a {codec.name.lower()} body does not unpack: {error}") from None
    if len(plain) != raw_bytes:
        raise CorruptData(f"a {codec.name.lower()} body unpacks to {len(plain)} bytes, not to {raw_bytes}")
    return plain


def _zstd_compress(data: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def _zstd_decompress(data: bytes, raw_bytes: int) -> bytes:
    import zstandard

    try:
        # The library trusts this field when it allocates, so it is compared first.
        if zstandard.frame_content_size(data) != raw_bytes:
            raise ValueError("the content size inside differs from the frame's header")
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _lz4_compress(data: bytes, level: int) -> bytes:
    import lz4.block

    if level > 0:
        packed = lz4.block.compress(data, mode="high_compression", compression=level, store_size=False)
    else:
        packed = lz4.block.compress(data, mode="fast", acceleration=max(1, -level), store_size=False)
    return bytes(packed)


def _lz4_decompress(data: bytes, raw_bytes: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=raw_bytes))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from None


def _gzip_compress(data: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def _gzip_decompress(data: bytes, raw_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(31)
    plain = unpacker.decompress(data, raw_bytes + 1)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the stream does not end where the body ends")
    return plain


def _none_compress(data: bytes, level: int) -> bytes:
    raise UnknownFormat("codec none does not pack")


def _none_decompress(data: bytes, raw_bytes: int) -> bytes:
    return bytes(data)


_COMPRESS: Final[dict[Codec, Callable[[bytes, int], bytes]]] = {
    Codec.NONE: _none_compress,
    Codec.ZSTD: _zstd_compress,
    Codec.LZ4: _lz4_compress,
    Codec.GZIP: _gzip_compress,
}
_DECOMPRESS: Final[dict[Codec, Callable[[bytes, int], bytes]]] = {
    Codec.NONE: _none_decompress,
    Codec.ZSTD: _zstd_decompress,
    Codec.LZ4: _lz4_decompress,
    Codec.GZIP: _gzip_decompress,
}
