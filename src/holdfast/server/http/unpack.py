"""Bodies that come compressed: never more comes out of them than may be, whatever went in.

A few hundred bytes can stand for gigabytes. What comes out is counted as it comes: against the limit on bodies, and,
above what nobody notices, against what went in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import zstandard

from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.server.http.refused import Refused

FREE_BYTES: Final = 1024 * 1024  # so much may come out of anything

_AT_ONCE: Final = 1024
_MOST_WINDOW_BYTES: Final = 8 * 1024 * 1024


class Unpacker:
    """Undoes one content encoding."""

    def __init__(self, name: str, most_bytes: int, most_ratio: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._most_ratio = most_ratio
        self._came = self._went = 0
        self._packed: Any
        if name == "gzip":
            self._packed = zlib.decompressobj(wbits=31)
        else:
            self._packed = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """What comes out of the next part, piece by piece; MessageTooLarge as soon as it is too much."""
        try:
            # A little at a time: what comes out of a kilobyte can be waited for.
            for i in range(0, len(chunk), _AT_ONCE):
                if self._packed.eof:
                    raise self._broken("more follows behind its end")
                piece = chunk[i : i + _AT_ONCE]
                found = self._packed.decompress(piece)
                self._came += len(piece)
                self._went += len(found)
                self._check()
                if found:
                    yield found
        except (zlib.error, zstandard.ZstdError) as error:
            raise self._broken(str(error)) from None

    def end(self) -> None:
        """Refuse a body that ended too early, or too late."""
        if not self._packed.eof:
            raise self._broken("it ends too early")
        if self._packed.unused_data:
            raise self._broken("more follows behind its end")

    def _check(self) -> None:
        if self._went > self._most_bytes:
            raise too_large(self._most_bytes)
        if self._went > FREE_BYTES and self._went > self._came * self._most_ratio:
            raise MessageTooLarge(
                f"the request's body unpacks to more than {self._most_ratio} times what was sent, which is the limit "
                f"(max_unpack_ratio) above {FREE_BYTES} bytes; nothing was done. Send less at a time, or send it as "
                "it is"
            )

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the body is not {self._name} as its content-encoding says: {why}. Nothing was done")


def unpacker(encoding: str, most_bytes: int, most_ratio: int) -> Unpacker | None:
    """What undoes the content encoding of a request; None where there is none."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "zstd"):
        raise Refused(f"the content-encoding {encoding!r} is not known; send gzip, zstd or none", status=415)
    return Unpacker(name, most_bytes, most_ratio)


def too_large(most_bytes: int) -> MessageTooLarge:
    """The error for a body that is larger than may be, as it is or unpacked."""
    return MessageTooLarge(f"the request's body has more than {most_bytes} bytes, which is the limit; nothing was done")
