"""A form of two parts: the options of a message as JSON, and its payload as it is."""

from __future__ import annotations

from typing import Final

import msgspec
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from holdfast.errors import InvalidRequest
from holdfast.protocol.messages import Options
from holdfast.server.http.messages import Request

_MOST_OPTIONS_BYTES: Final = 1024 * 1024
_HINT: Final = "send one part named options (JSON) and one named payload"


class _Parts:
    """Gathers the parts as the parser finds them."""

    def __init__(self) -> None:
        self.found: dict[str, bytearray] = {}
        self._field = bytearray()
        self._value = bytearray()
        self._name = ""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._begin,
            "on_part_data": lambda data, start, end: self.found[self._name].extend(data[start:end]),
        }

    def _header(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field.clear()
        self._value.clear()

    def _begin(self) -> None:
        if self._name in self.found or self._name not in ("options", "payload"):
            raise InvalidRequest(f"the form's part {self._name!r} is not understood, or there twice; {_HINT}")
        self.found[self._name] = bytearray()


async def read_form(request: Request, most_bytes: int) -> tuple[Options, bytes]:
    """The options and the payload of a message."""
    _, options = parse_options_header(request.header("content-type"))
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("the content-type multipart/form-data has no boundary")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        async for chunk in request.chunks(most_bytes):
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}; {_HINT}") from None
    if "payload" not in parts.found:
        raise InvalidRequest(f"the form has no payload; {_HINT}")
    told = bytes(parts.found.get("options", b"{}"))
    if len(told) > _MOST_OPTIONS_BYTES:
        raise InvalidRequest(f"the form's options have more than {_MOST_OPTIONS_BYTES} bytes")
    try:
        return msgspec.json.decode(told, type=Options), bytes(parts.found["payload"])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the form's options cannot be read: {error}") from None
