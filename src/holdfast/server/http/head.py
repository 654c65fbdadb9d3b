"""Heads of requests and answers: header names, checks that refuse a request as HTTP, status lines."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

from holdfast.errors import Forbidden, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.server.http.admission import ConnectionLimits

# What a Host header may say: a name or an address, and a port; nothing else that a URL could hold there.


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_][A-Za-z0-9._-]{0,252}))(?::([0-9]{0,5}))?")
_KEPT: Final = 64  # a server goes by few names, and every call says one
_MOST_PORT: Final = 65_535


@lru_cache(maxsize=_KEPT)
def parse_host(text: str) -> tuple[str, int | None] | None:
    """Name and port in small letters, None where there is no port; None for what is no host at all."""
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    address, name, digits = found.groups()
    if address is not None and not _is_ipv6(address):
        return None
    port = int(digits) if digits else None
    if port is not None and port > _MOST_PORT:
        return None
    return (address or name).lower(), port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


# Requests that are refused for what they are as HTTP, whatever they ask for.


class Refused(InvalidRequest):
    """The request cannot be answered as HTTP; `status` says how that is told."""

    def __init__(self, message: str, *, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class TooLarge(Refused):
    """The body is larger than any may be."""

    code = MessageTooLarge.code


class TooMany(Refused):
    """There is no room for one more connection now."""

    code = Unavailable.code
    retryable = True


def no_room() -> TooMany:
    """What to say to a client for which there is no connection."""
    return TooMany(
        "there are too many connections, in all (max_connections) or from one address (max_connections_per_address); "
        "this one is closed. Try again in a second, keep connections and use them again, or close those that you "
        "do not need",
        status=503,
        headers=(("retry-after", "1"),),
    )


class NotTheSameUser(Refused):
    """Somebody else's process has come to a socket that is for one user."""

    code = Forbidden.code


# The first lines of an answer, as bytes.


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


# Nearly every request has these, in one of two spellings: to look them up is faster than to make them again.
_USUAL: Final = (
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "traceparent",
    "user-agent",
    "x-correlation-id",
)
NAMES: Final = {spelt.encode(): name for name in _USUAL for spelt in (name, name.title())}


def check_head(headers: Mapping[str, str], version: str) -> None:
    """Refuse a head that a proxy on the way could read in another way than we do."""
    host = headers.get("host")
    if host is None:
        if version != "1.0":
            raise Refused("the request has no Host header, which HTTP/1.1 asks for", status=400)
    elif parse_host(host) is None:
        raise Refused("the Host header is no name or address with a port", status=400)
    if "transfer-encoding" not in headers:
        return
    if version == "1.0":
        raise Refused("HTTP/1.0 knows no transfer-encoding: send a content-length", status=400)
    codings = [coding.strip().lower() for coding in headers["transfer-encoding"].split(",")]
    if codings[-1] != "chunked":
        raise Refused("the last transfer-encoding must be chunked, or nobody knows where the body ends", status=400)
    if len(codings) > 1:
        raise Refused("the only transfer-encoding here is chunked; say gzip as content-encoding", status=501)


def unquoted(path: str) -> str:
    """The path with its escapes undone; an escaped slash stays one, so that it is no end of a name."""
    parts = [unquote(part).replace("/", "%2F") for part in path.split("/")]
    return "/".join(parts)


def large_head(limits: ConnectionLimits) -> Refused:
    return Refused(f"the request's headers have more than {limits.header_bytes} bytes, which is the limit", status=431)
