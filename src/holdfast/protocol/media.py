"""How values travel: JSON for people, where bytes are base64; MessagePack for programs, where they are themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
LINES: Final = "application/x-ndjson"
FRAMES: Final = "application/vnd.holdfast.frames"  # MessagePack values, each behind its length in four bytes
RAW: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
MULTIPART: Final = "multipart/form-data"
# Nobody said what it is: curl says the second of whatever it is given with -d. It is taken for JSON.
UNSAID: Final = ("", "application/x-www-form-urlencoded")

_LENGTH_BYTES: Final = 4
_LINE: Final = re.compile(rb"[^\n]+")
_SLICE: Final = 64 * 1024  # so much is cut into lines at once: each is an object

_Value = TypeVar("_Value")

_to_json: Final = msgspec.json.Encoder().encode
_to_msgpack: Final = msgspec.msgpack.Encoder().encode
_decoders: dict[tuple[bool, Any], Any] = {}


def encode(value: object, media: str) -> bytes:
    """A value as bytes of the media type: MessagePack where that is said, JSON otherwise."""
    return _to_msgpack(value) if media in (MSGPACK, FRAMES) else _to_json(value)


def decode(content: bytes, media: str, kind: type[_Value] | Any) -> _Value:
    """The value that the bytes stand for; msgspec's errors say where they do not fit."""
    packed = media in (MSGPACK, FRAMES)
    decoder = _decoders.get((packed, kind))
    if decoder is None:
        decoder = msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)
        _decoders[packed, kind] = decoder
    found: _Value = decoder.decode(content)
    return found


def framed(value: object, media: str) -> bytes:
    """One value of a stream: a line of JSON, or MessagePack behind its length."""
    if media == FRAMES:
        content = _to_msgpack(value)
        return len(content).to_bytes(_LENGTH_BYTES, "big") + content
    return _to_json(value) + b"\n"


class Unframer:
    """Cuts a stream of values apart, however it comes in. Whoever stops asking is not given, and nobody makes, more."""

    def __init__(self, media: str) -> None:
        self._packed = media == FRAMES
        self._rest = bytearray()

    def feed(self, content: bytes) -> Iterator[bytes]:
        """The values that are whole by now."""
        if self._packed:
            yield from self._frames(content)
            return
        for at in range(0, len(content), _SLICE):
            yield from self._lines(content if len(content) <= _SLICE else content[at : at + _SLICE])

    def _lines(self, content: bytes) -> Iterator[bytes]:
        known = len(self._rest)
        self._rest += content
        end = self._rest.rfind(b"\n", known)  # before that there is none: a long line is not looked at again
        if end >= 0:
            lines = bytes(self._rest[:end])
            del self._rest[: end + 1]
            yield from _LINE.findall(lines)

    def _frames(self, content: bytes) -> Iterator[bytes]:
        self._rest += content
        at = 0
        while len(self._rest) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(self._rest[at : at + _LENGTH_BYTES], "big")
            if len(self._rest) < end:
                break
            yield bytes(self._rest[at + _LENGTH_BYTES : end])
            at = end
        del self._rest[:at]
