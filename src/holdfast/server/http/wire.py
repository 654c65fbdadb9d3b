"""The first lines of an answer, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

# What every answer says to browsers: it is what it is called, and nothing of it is for pages of other sites.
_ALWAYS: Final = "x-content-type-options: nosniff\r\ncross-origin-resource-policy: same-origin\r\n"
ALWAYS_SAID: Final = frozenset({"x-content-type-options", "cross-origin-resource-policy"})
_CACHING: Final = "cache-control"

_SAYING_CACHING: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n{_ALWAYS}" for status in HTTPStatus
}
_STATUS_LINES: Final = {status: f"{lines}{_CACHING}: no-store\r\n" for status, lines in _SAYING_CACHING.items()}
_NO_BODY: Final = frozenset({204, 304})

_MOST_TEXT: Final = 1024

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def head(
    status: int,
    media: str,
    headers: Sequence[tuple[str, str]],
    *,
    length: int | None,
    keep_alive: bool,
) -> bytes:
    """Status line and headers; without a length the body comes in chunks. What does not say otherwise is not kept."""
    lines = [_STATUS_LINES[status]]
    if media:
        lines.append(f"content-type: {media}\r\n")
    if length is None:
        lines.append("transfer-encoding: chunked\r\n")
    elif status not in _NO_BODY:
        lines.append(f"content-length: {length}\r\n")
    if not keep_alive:
        lines.append("connection: close\r\n")
    for name, value in headers:
        if "\r" in value or "\n" in value:
            raise ValueError(f"the header {name} would have ended early: {value!r}")
        if name == _CACHING:
            lines[0] = _SAYING_CACHING[status]
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1", "replace")


def header_text(text: str) -> str:
    """Any text as the value of a header: what has no place there is spelled out."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else letter.encode("unicode_escape").decode() for letter in text)
    return text[:_MOST_TEXT]


def chunk(content: bytes) -> bytes:
    """One piece of a body that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(content), content)


LAST_CHUNK: Final = b"0\r\n\r\n"
