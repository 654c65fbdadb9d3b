"""What `holdfast put` is given: arguments, files, stdin, lines or JSON lines, as messages with their places."""

from __future__ import annotations

import binascii
import os
import sys
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import msgspec

from holdfast.embedded.drafts import NewMessage
from holdfast.embedded.times import parse_duration, parse_instant
from holdfast.errors import InvalidRequest

STDIN = "-"


class Defaults(NamedTuple):
    """What the options say of every message."""

    key: str | bytes | None
    headers: tuple[tuple[str, str | bytes], ...]
    priority: int
    delay: str | None = None
    at: str | None = None
    ttl: str | None = None
    dedup_id: str | bytes | None = None
    correlation_id: str | None = None


class Item(NamedTuple):
    """A message, and where it stands in the input: for errors."""

    place: str
    message: NewMessage


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of JSON: what a message can have, with the words of the library: `at` is the option --due."""

    body: str | msgspec.UnsetType | None = msgspec.UNSET
    body_base64: str | msgspec.UnsetType = msgspec.UNSET
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    key: str | None = None
    headers: dict[str, str] | list[tuple[str, str]] | None = None
    priority: int | None = None
    delay: float | str | None = None
    at: str | None = None
    ttl: float | str | None = None
    dedup_id: str | None = None
    correlation_id: str | None = None


_decode_line = msgspec.json.Decoder(Line).decode


class Intake:
    """All messages of one call, one after the other, so that an input of any size fits."""

    def __init__(self, defaults: Defaults, now_ms: int, *, lines: bool, jsonl: bool) -> None:
        self._now_ms = now_ms
        self._lines = lines
        self._jsonl = jsonl
        self._defaults = defaults
        self._delay = None if defaults.delay is None else parse_duration(defaults.delay, "--delay")
        self._at = None if defaults.at is None else parse_instant(defaults.at, now_ms, "--due")
        self._ttl = None if defaults.ttl is None else parse_duration(defaults.ttl, "--ttl")
        if self._delay is not None and self._at is not None:
            raise InvalidRequest("--delay and --due both say when; give one of them")

    def items(self, bodies: Sequence[str], files: Sequence[str]) -> Iterator[Item]:
        """Arguments first, then files; stdin where neither is given."""
        for number, body in enumerate(bodies, 1):
            if body == STDIN:
                yield from self._of_stream("stdin", sys.stdin.buffer)
            elif self._jsonl:
                yield self._of_line(f"argument {number}", os.fsencode(body))
            else:
                yield Item(f"argument {number}", self._message(os.fsencode(body)))
        for path in files:
            with _opened(path) as stream:
                yield from self._of_stream(path, stream)
        if not bodies and not files:
            yield from self._of_stream("stdin", sys.stdin.buffer, needed=True)

    def _of_stream(self, name: str, stream: BinaryIO, *, needed: bool = False) -> Iterator[Item]:
        if self._lines or self._jsonl:
            for number, line in enumerate(stream, 1):
                place, content = f"{name}, line {number}", line.removesuffix(b"\n")
                if not self._jsonl:
                    yield Item(place, self._message(content))
                elif content.strip():
                    yield self._of_line(place, content)
            return
        content = stream.read()
        if needed and not content:
            raise InvalidRequest("no body is given, and stdin is empty; an empty message is put with an empty body: ''")
        yield Item(name, self._message(content))

    def _message(self, body: bytes) -> NewMessage:
        given = self._defaults
        return NewMessage(
            body=body,
            key=given.key,
            headers=given.headers,
            priority=given.priority,
            delay=self._delay,
            at=self._at,
            ttl=self._ttl,
            dedup_id=given.dedup_id,
            correlation_id=given.correlation_id,
        )

    def _of_line(self, place: str, content: bytes) -> Item:
        try:
            line = _decode_line(content)
            return Item(place, self._of_fields(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{place}: {error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{place}: {error}") from None

    def _of_fields(self, line: Line) -> NewMessage:
        given = self._defaults
        own_time = line.delay is not None or line.at is not None
        headers = line.headers.items() if isinstance(line.headers, dict) else line.headers or ()
        return NewMessage(
            body=_body(line),
            key=given.key if line.key is None else line.key,
            headers=(*given.headers, *headers),
            priority=given.priority if line.priority is None else line.priority,
            delay=_seconds(line.delay, "delay") if own_time else self._delay,
            at=None if line.at is None and own_time else self._at_of(line),
            ttl=self._ttl if line.ttl is None else _seconds(line.ttl, "ttl"),
            dedup_id=given.dedup_id if line.dedup_id is None else line.dedup_id,
            correlation_id=given.correlation_id if line.correlation_id is None else line.correlation_id,
        )

    def _at_of(self, line: Line) -> Any:
        return self._at if line.at is None else parse_instant(line.at, self._now_ms, "at")


def text_or_bytes(argument: str) -> str | bytes:
    """An argument as text; as its bytes where these are none."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument)
    return argument


def separator_of(text: str) -> bytes:
    """What stands between key and body in a line; `\\t` and `\\0` may be written as they are read."""
    return os.fsencode({"\\t": "\t", "\\0": "\0"}.get(text, text))


def header_pairs(headers: Sequence[str]) -> tuple[tuple[str, str | bytes], ...]:
    """From `name=value` to pairs."""
    pairs = []
    for header in headers:
        name, sign, value = header.partition("=")
        if not sign or not name:
            raise InvalidRequest(f"--header {header!r} cannot be used: write it like name=value")
        pairs.append((name, text_or_bytes(value)))
    return tuple(pairs)


def _body(line: Line) -> bytes | None:
    """None is a tombstone: whatever had the key is gone."""
    given = [name for name in ("body", "body_base64", "json") if getattr(line, name) is not msgspec.UNSET]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "there is no body"
        raise InvalidRequest(f"{found}; give one of body, body_base64 and json")
    if line.body is None or isinstance(line.body, str):
        return None if line.body is None else line.body.encode()
    if isinstance(line.body_base64, str):
        try:
            return b64decode(line.body_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"body_base64 cannot be read: {error}") from None
    return bytes(line.json)  # type: ignore[arg-type]


def _seconds(value: float | str | None, name: str) -> float | None:
    return parse_duration(value, name) if isinstance(value, str) else value


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    with open(path, "rb") as stream:
        yield stream
