"""Requests as bytes, and answers out of bytes; nothing here sends or waits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import httptools
import msgspec

from holdfast.protocol.media import MSGPACK

BROKEN: Final = httptools.HttpParserError

_MOST_HEAD: Final = 64 * 1024


class Ask(msgspec.Struct, kw_only=True):
    """One call. `again`: whether it may be sent once more when nobody knows what became of it."""

    method: str
    path: str
    body: bytes = b""
    media: str = MSGPACK
    answers: Any = None
    again: bool = True
    wait_s: float = 0.0  # so long the server may take its time, besides the usual
    headers: tuple[tuple[str, str], ...] = ()


class Answer:
    """What came back."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.keep = False


class AnswerReader:
    """Puts answers together, one after the other, from what a connection gives."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._parts: list[bytes] = []
        self._done = False
        self.begun = False
        self.continued = False  # whether the server has asked for the rest of a request

    @property
    def status(self) -> int:
        """Of the answer that comes in, once its head is there; else 0."""
        return self._answer.status

    def taken(self) -> list[bytes]:
        """What has come of the body so far, for those who do not want to hold all of it."""
        parts, self._parts = self._parts, []
        return parts

    def feed(self, content: bytes) -> Answer | None:
        """The answer, once it is whole."""
        self.begun = True
        self._parser.feed_data(content)
        if not self._done:
            return None
        answer, self._answer = self._answer, Answer()
        parts, self._parts = self._parts, []
        answer.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._done = self.begun = self.continued = False
        return answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, content: bytes) -> None:
        self._parts.append(content)

    def on_message_complete(self) -> None:
        if self._answer.status >= 200:  # not before: the server only says that it goes on
            self._answer.keep = self._parser.should_keep_alive()
            self._done = True
        else:
            self.continued = self.continued or self._answer.status == 100
            self._answer = Answer()


def path_of(*parts: str | int, **query: Any) -> str:
    """A path of these parts, whatever is in them, and a query of all that is given."""
    path = "/v1/" + "/".join(map(_quoted, parts))
    given = "&".join([_asked(name, value) for name, value in query.items() if value is not None and value != []])
    return f"{path}?{given}" if given else path


def _asked(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "&".join([_asked(name, each) for each in value])
    return f"{name}={_quoted(value)}"


def _quoted(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quote(str(value))


@lru_cache(maxsize=1024)
def _quote(text: str) -> str:
    return quote(text, safe="")


def common_headers(authority: str, token: str | None, more: Mapping[str, str]) -> bytes:
    """The headers that every request of a client has."""
    lines = [("host", authority), ("accept", MSGPACK), ("user-agent", "holdfast-python"), *more.items()]
    if token is not None:
        lines.append(("authorization", f"Bearer {token}"))
    return "".join(f"{name}: {value}\r\n" for name, value in lines).encode("latin-1")


def request_bytes(ask: Ask, common: bytes) -> bytes:
    """The request as it is sent."""
    head = f"{ask.method} {ask.path} HTTP/1.1\r\n".encode("latin-1") + common
    for name, value in ask.headers:
        head += f"{name}: {value}\r\n".encode("latin-1")
    if ask.body or ask.method not in ("GET", "DELETE"):
        head += b"content-type: %b\r\ncontent-length: %d\r\n" % (ask.media.encode(), len(ask.body))
    return head + b"\r\n" + ask.body
