"""Bodies that come compressed: never more comes out of them than may be, whatever went in."""

from __future__ import annotations

import zlib
from typing import Any, Final

import zstandard

from holdfast.errors import InvalidRequest
from holdfast.server.http.refused import Refused

_AT_ONCE: Final = 1024
_MOST_WINDOW_BYTES: Final = 8 * 1024 * 1024


class Unpacker:
    """Undoes one content encoding."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._packed: Any
        if name == "gzip":
            self._packed = zlib.decompressobj(wbits=31)
        else:
            self._packed = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj()

    def feed(self, chunk: bytes) -> bytes:
        """What comes out of the next part; at most a little more than may be, so that it is noticed."""
        found, size = [], 0
        try:
            # A little at a time: what comes out of a kilobyte can be waited for.
            for i in range(0, len(chunk), _AT_ONCE):
                if self._packed.eof:
                    raise self._broken("more follows behind its end")
                found.append(self._packed.decompress(chunk[i : i + _AT_ONCE]))
                size += len(found[-1])
                if size > self._most_bytes:
                    break
        except (zlib.error, zstandard.ZstdError) as error:
            raise self._broken(str(error)) from None
        return b"".join(found)

    def end(self) -> None:
        """Refuse a body that ended too early, or too late."""
        if not self._packed.eof:
            raise self._broken("it ends too early")
        if self._packed.unused_data:
            raise self._broken("more follows behind its end")

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the body is not {self._name} as its content-encoding says: {why}. Nothing was done")


def unpacker(encoding: str, most_bytes: int) -> Unpacker | None:
    """What undoes the content encoding of a request; None where there is none."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "zstd"):
        raise Refused(f"the content-encoding {encoding!r} is not known; send gzip, zstd or none", status=415)
    return Unpacker(name, most_bytes)
