"""`holdfast put`: messages from arguments, files, stdin or JSON lines."""

from __future__ import annotations

import binascii
import os
import sys
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Annotated, Any, BinaryIO, Final, NamedTuple

import msgspec
import typer

import holdfast
from holdfast.api.drafts import NewMessage
from holdfast.api.ports import port_of
from holdfast.api.times import parse_duration, parse_instant
from holdfast.cli.opening import chosen_topic, opened_broker, see_to_queue
from holdfast.cli.options import WAIT, AsJson, QueueFolder, Topic, Wait
from holdfast.cli.output import OK, command, print_json_line, stderr
from holdfast.cli.progress import counter
from holdfast.cli.text import safe
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.model import CodecName, Durability
from holdfast.storage.checks.finding import count_of

# What `holdfast put` is given: arguments, files, stdin, lines or JSON lines, as messages with their places.


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


_BATCH_MESSAGES: Final = 1_000
_BATCH_BYTES: Final = 4 * 1024 * 1024


@command
def put_command(
    folder: QueueFolder,
    bodies: Annotated[list[str] | None, typer.Argument(metavar="BODY", help="A message each; `-` is stdin.")] = None,
    files: Annotated[list[str] | None, typer.Option("--file", metavar="FILE", help="A message each.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="A message for each line of stdin or of the files.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="A message for each line, as JSON: body, body_base64 or json; key, ...")
    ] = False,
    key: Annotated[str | None, typer.Option("--key", help="The messages' key.")] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be repeated.")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="9 is the most urgent.")] = 0,
    delay: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Ready after 30s, 1h30m, 7d.")] = None,
    due: Annotated[str | None, typer.Option("--due", metavar="ISO", help="Ready at 2026-01-31T12:00:00Z, +1h.")] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Of no use after this time.")] = None,
    dedup_id: Annotated[str | None, typer.Option("--dedup-id", help="Store it once, however often it is put.")] = None,
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="What it belongs to.")] = None,
    durability: Annotated[Durability | None, typer.Option("--durability", help="What it must survive.")] = None,
    codec: Annotated[CodecName | None, typer.Option("--codec", help="How it is packed.")] = None,
    no_create: Annotated[bool, typer.Option("--no-create", help="The queue must be there.")] = False,
    topic: Topic = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print ids.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Put messages into a queue, which is made where there is none. Prints their ids.

    Bodies are arguments, files, or stdin where neither is given. A large input is stored in batches of 1,000, each
    wholly or not at all.
    """
    given = (bodies or [], files or [])
    _check_call(*given, dedup_id, lines=lines, jsonl=jsonl)
    defaults = Defaults(
        key=None if key is None else text_or_bytes(key),
        headers=header_pairs(headers or []),
        priority=priority,
        delay=delay,
        at=due,
        ttl=ttl,
        dedup_id=None if dedup_id is None else text_or_bytes(dedup_id),
        correlation_id=correlation_id,
    )
    intake = Intake(defaults, real_world().clock.now_ns() // 1_000_000, lines=lines, jsonl=jsonl)
    name = chosen_topic(folder, topic, create=not no_create)
    putting = _Putting(name, durability, codec, as_json=as_json, quiet=quiet)
    try:
        # The first messages before the queue: a mistake in the call must not leave an empty queue behind.
        batches = _batches(intake.items(*given))
        first = list(islice(batches, 1))
        with opened_broker(folder, wait=wait, create=not no_create) as broker:
            see_to_queue(broker, name, create=not no_create)
            putting.put_all(broker, chain(first, batches))
    except InvalidRequest as error:
        raise putting.with_count(error) from None
    putting.summary()
    return OK


def _check_call(bodies: list[str], files: list[str], dedup_id: str | None, *, lines: bool, jsonl: bool) -> None:
    if lines and jsonl:
        raise InvalidRequest("--lines and --jsonl both say what a line is; give one of them")
    if not bodies and not files and sys.stdin.isatty():
        raise InvalidRequest("no body is given; write it behind the folder, or use --file, or send it to stdin")
    if dedup_id is not None and (len(bodies) + len(files) > 1 or lines or jsonl):
        raise InvalidRequest("--dedup-id is for one message; give each line its own with --jsonl")


class _Putting:
    """Batches into the queue, ids out of it."""

    def __init__(
        self, topic: str, durability: Durability | None, codec: CodecName | None, *, as_json: bool, quiet: bool
    ) -> None:
        self._topic = topic
        self._durability = durability
        self._codec = codec
        self._as_json = as_json
        self._quiet = quiet
        self._kept = ""
        self.stored = 0
        self.duplicates = 0

    def put_all(self, broker: holdfast.Broker, batches: Iterable[list[Item]]) -> None:
        """One batch after the other, with the count of them for those who look on."""
        with counter("putting", shown=not self._as_json) as told:
            for batch in batches:
                self.put(broker, batch)
                told(self.stored)

    def put(self, broker: holdfast.Broker, batch: list[Item]) -> None:
        """All of them or none; of those for several partitions: all that go to one."""
        messages = [item.message for item in batch]
        try:
            receipts = broker.publish_many(self._topic, messages, durability=self._durability, codec=self._codec)
        except InvalidRequest as error:
            if len(batch) > 1 or self.stored:
                error.args = (f"{place_of_mistake(broker, self._topic, batch)}: {error}",)
            raise
        self.stored += len(receipts)
        for stored in receipts:
            self.duplicates += stored.duplicate
            self._kept = stored.durability
            if self._as_json:
                print_json_line(
                    {
                        "id": stored.id,
                        "offset": stored.offset,
                        "duplicate": stored.duplicate,
                        "durability": stored.durability,
                    }
                )
            elif not self._quiet:
                sys.stdout.write(f"{safe(stored.id)}\n")

    def summary(self) -> None:
        """For people, and only where there is something to say beyond one id."""
        if self._as_json or (self.stored == 1 and not self.duplicates):
            return
        again = f", {self.duplicates:,} of them known before" if self.duplicates else ""
        sys.stdout.flush()
        durability = f" ({self._kept})" if self._kept else ""
        stderr().print(f"{count_of(self.stored, 'message')}{again}{durability}")

    def with_count(self, error: InvalidRequest) -> InvalidRequest:
        """The error, and what had been stored before it."""
        text = str(error).removesuffix(". Nothing was stored")
        before = f"{count_of(self.stored, 'message')} before this batch stored; of this one nothing"
        error.args = (f"{text}. {before if self.stored else 'Nothing was stored'}",)
        return error


def place_of_mistake(broker: holdfast.Broker, topic: str, batch: list[Item]) -> str:
    """Which message of a batch cannot be stored; all of them where that cannot be told."""
    found = port_of(broker).unfit(topic, [item.message for item in batch])
    return f"{batch[0].place} to {batch[-1].place}" if found is None else batch[found].place


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.message.body or b"")
        if len(batch) >= _BATCH_MESSAGES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
