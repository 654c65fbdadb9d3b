"""The head of a request: what its headers are called, and which ones are refused whatever they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from holdfast.server.http.hosts import parse_host
from holdfast.server.http.limits import Limits
from holdfast.server.http.refused import Refused

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


def large_head(limits: Limits) -> Refused:
    return Refused(f"the request's headers have more than {limits.header_bytes} bytes, which is the limit", status=431)
