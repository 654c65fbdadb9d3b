"""A form of two parts: the options of a message as JSON, then its payload as it is, which may be large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from holdfast.errors import InvalidRequest
from holdfast.protocol.messages import Options
from holdfast.server.http.messages import Request

_MOST_OPTIONS_BYTES: Final = 1024 * 1024
_MOST_BEFORE_BYTES: Final = _MOST_OPTIONS_BYTES + 64 * 1024
_STEP_BYTES: Final = 32 * 1024
_HINT: Final = "send one part named options (JSON), if any, followed by one named payload"


class _Parts:
    """Splits a form into its parts as it arrives."""

    def __init__(self) -> None:
        self.options = bytearray()
        self.payload: list[bytes] = []
        self.begun: set[str] = set()
        self.ended = False
        self._field = bytearray()
        self._value = bytearray()
        self._name = ""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._begin,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _header(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field.clear()
        self._value.clear()

    def _begin(self) -> None:
        if self._name not in ("options", "payload") or self._name in self.begun or "payload" in self.begun:
            raise InvalidRequest(f"the form's part {self._name!r} is not expected there; {_HINT}")
        self.begun.add(self._name)

    def _end(self) -> None:
        self.ended = True

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "payload":
            self.payload.append(data[start:end])
            return
        self.options += data[start:end]
        if len(self.options) > _MOST_OPTIONS_BYTES:
            raise InvalidRequest(
                f"the form's options have more than {_MOST_OPTIONS_BYTES} bytes: put large content into the payload"
            )


async def read_form(request: Request, most_bytes: int, most_ratio: int) -> tuple[Options, AsyncIterator[bytes]]:
    """The options of a message, and its payload as it arrives."""
    _, given = parse_options_header(request.header("content-type"))
    boundary = given.get(b"boundary")
    if not boundary:
        raise InvalidRequest(
            "the content-type multipart/form-data has no boundary: let your HTTP client set the header"
        )
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}; {_HINT}") from None
    chunks = request.chunks(most_bytes, most_ratio)
    before = 0
    while "payload" not in parts.begun:
        chunk = await anext(chunks, None)
        if chunk is None:
            raise InvalidRequest(f"the form has no payload; {_HINT}")
        before += len(chunk)
        if before > _MOST_BEFORE_BYTES + len(chunk):
            raise InvalidRequest(f"the form has more than {_MOST_BEFORE_BYTES} bytes before its payload; {_HINT}")
        await _write(parser, chunk)
    try:
        options = msgspec.json.decode(bytes(parts.options or b"{}"), type=Options)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the form's options cannot be read: {error}. Send them as a JSON object") from None
    return options, _payload(parser, parts, chunks)


async def _payload(parser: MultipartParser, parts: _Parts, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        pieces, parts.payload = parts.payload, []
        if pieces:
            yield b"".join(pieces)
        chunk = await anext(chunks, None)
        if chunk is None:
            break
        await _write(parser, chunk)
    if not parts.ended:
        raise InvalidRequest("the form is incomplete, and nothing was stored: send it again as a whole")


async def _write(parser: MultipartParser, chunk: bytes) -> None:
    """Parse a chunk in steps, with turns for other tasks: the parser is slow on bytes that look like a boundary."""
    try:
        for at in range(0, len(chunk), _STEP_BYTES):
            if at:
                await asyncio.sleep(0)
            parser.write(chunk[at : at + _STEP_BYTES])
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}; {_HINT}") from None
