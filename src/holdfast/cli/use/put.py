"""`holdfast put` and `holdfast produce`: messages from arguments, files, stdin or JSON lines."""

from __future__ import annotations

import binascii
import os
import sys
import time
from base64 import b64decode
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

import holdfast
from holdfast.api import port_of
from holdfast.api.arguments import durability_of
from holdfast.api.drafts import NewMessage, parse_duration, parse_instant
from holdfast.cli import opening
from holdfast.cli.output import OK, note, print_json, progress, safe, say, size, stdout
from holdfast.cli.parsing import argument, option
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.model import Acks, CodecName, Durability, count_of

if TYPE_CHECKING:
    from holdfast.api.sync.producer import Producer
    from holdfast.producing.parcels import Sent

# The input of `holdfast put`: arguments, files, stdin, lines or JSON lines, as messages with their places.


STDIN = "-"


class SharedOptions(NamedTuple):
    """Options of `put` and `produce` that apply to every message."""

    headers: Annotated[list[str] | None, option("--header NAME=VALUE", "Add a header.")] = None
    priority: Annotated[
        int, option("--priority", "The priority; 9 is the most urgent, 0 the default.", least=0, most=9)
    ] = 0


NO_OPTIONS: Final = SharedOptions()


class Item(NamedTuple):
    """A message, and its place in the input, for error messages."""

    place: str
    message: NewMessage


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of JSON. Its names are those of the library: `at` is the option --due."""

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


_AS_GIVEN: Final = ("key", "priority", "dedup_id", "correlation_id")  # what a line has replaces what all have


class PutInput:
    """Yields the messages of one call one by one, so that the input may have any size."""

    def __init__(self, defaults: NewMessage, now_ms: int, *, lines: bool, jsonl: bool) -> None:
        self._now_ms = now_ms
        self._lines = lines
        self._jsonl = jsonl
        self._defaults = defaults

    def items(self, bodies: Sequence[str], files: Sequence[str]) -> Iterator[Item]:
        """Yield arguments first, then files; stdin if neither is given."""
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
            raise InvalidRequest(
                "there is no body, and stdin is empty; to put an empty message, give an empty body: ''"
            )
        yield Item(name, self._message(content))

    def _message(self, body: bytes) -> NewMessage:
        return msgspec.structs.replace(self._defaults, body=body)

    def _of_line(self, place: str, content: bytes) -> Item:
        try:
            line = msgspec.json.decode(content, type=Line)
            return Item(place, self._of_fields(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{place}: {error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{place}: {error}") from None

    def _of_fields(self, line: Line) -> NewMessage:
        given = {name: value for name in _AS_GIVEN if (value := getattr(line, name)) is not None}
        if line.headers:
            headers = line.headers.items() if isinstance(line.headers, dict) else line.headers
            given["headers"] = (*(self._defaults.headers or ()), *headers)
        if line.delay is not None or line.at is not None:
            given["delay"] = _seconds(line.delay, "delay")
            given["at"] = None if line.at is None else parse_instant(line.at, self._now_ms, "at")
        if line.ttl is not None:
            given["ttl"] = _seconds(line.ttl, "ttl")
        return msgspec.structs.replace(self._defaults, body=_body(line), **given)


def text_or_bytes(argument: str) -> str | bytes:
    """Return an argument as text, or as bytes if it is not valid text."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument)
    return argument


def separator_of(text: str) -> bytes:
    """Parse the separator between key and body in a line; `\\t` and `\\0` are understood as escapes."""
    return os.fsencode({"\\t": "\t", "\\0": "\0"}.get(text, text))


def header_pairs(headers: Sequence[str] | None) -> tuple[tuple[str, str | bytes], ...] | None:
    """Parse `name=value` to pairs; None if there are none."""
    pairs = []
    for header in headers or ():
        name, sign, value = header.partition("=")
        if not sign or not name:
            raise InvalidRequest(f"--header {header!r} cannot be used: write it like name=value")
        pairs.append((name, text_or_bytes(value)))
    return tuple(pairs) or None


def _body(line: Line) -> bytes | None:
    """Return the body of a line; None for a tombstone, which deletes the messages with its key."""
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
            raise InvalidRequest(f"body_base64 cannot be read: {error}. Give valid base64") from None
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


def put_command(
    folder: opening.QueueFolder,
    bodies: Annotated[list[str] | None, argument("BODY", "The body of a message; `-` reads it from stdin.")] = None,
    files: Annotated[list[str] | None, option("--file FILE", "Put the contents of this file as a message.")] = None,
    lines: Annotated[bool, option("--lines", "Put each line of stdin, or of the files, as a message.")] = False,
    jsonl: Annotated[bool, option("--jsonl", "Each line is a message as JSON; see `holdfast help json`.")] = False,
    key: Annotated[str | None, option("--key", "The key of the messages.")] = None,
    shared: SharedOptions = NO_OPTIONS,
    delay: Annotated[str | None, option("--delay TIME", "Deliver after this time, such as 30s, 1h30m or 7d.")] = None,
    due: Annotated[
        str | None, option("--due ISO", "Deliver at this time, such as 2026-01-31T12:00:00Z or +1h.")
    ] = None,
    ttl: Annotated[str | None, option("--ttl TIME", "Drop the messages if nobody takes them within this time.")] = None,
    dedup_id: Annotated[
        str | None, option("--dedup-id", "Store the message only once, however often it is put.")
    ] = None,
    correlation_id: Annotated[str | None, option("--correlation-id", "An id that related messages share.")] = None,
    durability: Annotated[
        Durability | None, option("--durability", "Which failures they survive; see `holdfast help durability`.")
    ] = None,
    acks: Annotated[Acks | None, option("--acks", "The same, by other names: all for fsync, leader for os.")] = None,
    codec: Annotated[CodecName | None, option("--codec", "How to compress them.")] = None,
    no_create: Annotated[bool, option("--no-create", "Fail if there is no such queue.")] = False,
    topic: opening.Topic = None,
    quiet: Annotated[bool, option("--quiet", "Do not print the ids.")] = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Put messages into a queue. Creates the queue if there is none, and prints the id of each message.

    Bodies come from the arguments, from files, or from stdin if there are neither. A large input is stored in batches
    of 1,000; each batch is stored completely or not at all.

    Examples:
        holdfast put jobs 'resize photo 17'
        holdfast put jobs --lines < urls.txt
        holdfast put http://127.0.0.1:7700/jobs --file order.json --priority 9 --delay 10m
    """
    given = (bodies or [], files or [])
    _check_put(*given, dedup_id, lines=lines, jsonl=jsonl)
    now_ms = real_world().clock.now_ns() // 1_000_000
    defaults = NewMessage(
        None,
        key=key and text_or_bytes(key),
        headers=header_pairs(shared.headers),
        priority=shared.priority,
        delay=_seconds(delay, "--delay"),
        at=None if due is None else parse_instant(due, now_ms, "--due"),
        ttl=_seconds(ttl, "--ttl"),
        dedup_id=dedup_id and text_or_bytes(dedup_id),
        correlation_id=correlation_id,
    )
    if delay is not None and due is not None:
        raise InvalidRequest("--delay and --due both say when; give one of them")
    intake = PutInput(defaults, now_ms, lines=lines, jsonl=jsonl)
    name = opening.chosen_topic(folder, topic, create=not no_create)
    durability = durability_of(acks, durability)
    putting = _Putting(name, durability, codec, as_json=as_json, quiet=quiet)
    putting.run(folder, _batches(intake.items(*given)), wait, create=not no_create)
    return OK


def _check_put(bodies: list[str], files: list[str], dedup_id: str | None, *, lines: bool, jsonl: bool) -> None:
    if lines and jsonl:
        raise InvalidRequest("--lines and --jsonl both say what a line is; give one of them")
    if not bodies and not files and sys.stdin.isatty():
        raise InvalidRequest("there is no body; write it after the place, use --file, or send it to stdin")
    if dedup_id is not None and (len(bodies) + len(files) > 1 or lines or jsonl):
        raise InvalidRequest("--dedup-id is for one message; give each line its own with --jsonl")


class _Putting:
    """Puts batches into the queue and prints ids."""

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

    def run(self, folder: str, batches: Iterator[list[Item]], wait: str, *, create: bool) -> None:
        """Put everything, and print a summary."""
        try:
            # Read the first messages before creating the queue: a usage error must not leave an empty queue behind.
            first = list(islice(batches, 1))
            with opening.opened_broker(folder, wait=wait, create=create) as broker:
                opening.see_to_queue(broker, self._topic, create=create)
                self.put_all(broker, chain(first, batches))
        except InvalidRequest as error:
            raise self.with_count(error) from None
        self.summary()

    def put_all(self, broker: holdfast.Broker, batches: Iterable[list[Item]]) -> None:
        """Put one batch after the other, with a progress bar at a terminal."""
        with progress("putting", "count", shown=not self._as_json) as report:
            for batch in batches:
                self.put(broker, batch)
                report(self.stored)

    def put(self, broker: holdfast.Broker, batch: list[Item]) -> None:
        """Put a batch, all or nothing per partition."""
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
                print_json(
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
        """Print a summary for people, if there is more to say than one id."""
        if self._as_json or (self.stored == 1 and not self.duplicates):
            return
        again = f", {self.duplicates:,} of them already known" if self.duplicates else ""
        sys.stdout.flush()
        durability = f" ({self._kept})" if self._kept else ""
        note(f"{count_of(self.stored, 'message')}{again}{durability}")

    def with_count(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error with the number of messages stored before it."""
        text = str(error).removesuffix(". Nothing was stored")
        before = f"{count_of(self.stored, 'message')} of earlier batches stored, and none of this one"
        error.args = (f"{text}. {before if self.stored else 'Nothing was stored'}",)
        return error


def place_of_mistake(broker: holdfast.Broker, topic: str, batch: list[Item]) -> str:
    """Return the place of the message that cannot be stored, or of the whole batch if that is not known."""
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


# The most messages in flight; beyond that, wait for the oldest answer.
_MOST_UNANSWERED: Final = 20_000
_TELL_EVERY: Final = 1_000


def produce_command(
    folder: opening.DataFolder,
    topic: Annotated[str, argument("TOPIC", "The topic to publish to.", complete=opening.topic_names)],
    bodies: Annotated[list[str] | None, option("-m", "--message BODY", "Publish this message.")] = None,
    files: Annotated[list[str] | None, option("--file FILE", "Publish each line of this file as a message.")] = None,
    jsonl: Annotated[bool, option("--jsonl", "Each line is a message as JSON; see `holdfast help json`.")] = False,
    whole: Annotated[bool, option("--whole", "Publish each file, or stdin, as one message.")] = False,
    key: Annotated[str | None, option("--key", "The key of the messages.")] = None,
    key_separator: Annotated[
        str | None, option("--key-separator TEXT", r"Split each line here: the key, then the body.")
    ] = None,
    shared: SharedOptions = NO_OPTIONS,
    partition: Annotated[int | None, option("--partition N", "Publish to this partition.", least=0)] = None,
    acks: Annotated[
        Literal["none", "leader", "all"] | None,
        option("--acks", "Do not wait (none), or wait until messages survive kill -9 (leader) or a power cut (all)."),
    ] = None,
    linger: Annotated[str | None, option("--linger TIME", "How long to wait for a batch to fill.")] = None,
    batch_messages: Annotated[int | None, option("--batch-messages", "The most messages in a batch.", least=1)] = None,
    batch_bytes: Annotated[
        str | None, option("--batch-bytes SIZE", "The most bytes in a batch, such as 64KiB.")
    ] = None,
    name: Annotated[
        str | None, option("--name", "The producer's name. A new producer of this name fences the old one.")
    ] = None,
    resume: Annotated[
        bool, option("--resume", "Store only those messages that an earlier call did not store.")
    ] = False,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Publish messages to a topic, in batches. Prints how many there were, and how fast they were stored.

    Messages are the lines of stdin or of files, or those given with -m. With --name and --resume you can repeat the
    same call after a crash, and each message is stored once.

    Examples:
        holdfast produce ./data clicks < clicks.log
        holdfast produce ./data clicks --key-separator '\\t' --file clicks.tsv
        holdfast produce ./data clicks --name import-1 --resume --file clicks.log
    """
    _check_produce(bodies, files, name, resume=resume, jsonl=jsonl, whole=whole)
    separator = None if key_separator is None else _separator(key_separator, key, jsonl=jsonl)
    defaults = NewMessage(
        None, key=key and text_or_bytes(key), headers=header_pairs(shared.headers), priority=shared.priority
    )
    changes = _producer_changes(acks, linger, batch_messages, batch_bytes)
    intake = PutInput(defaults, real_world().clock.now_ns() // 1_000_000, lines=not whole and not jsonl, jsonl=jsonl)
    chosen = opening.chosen_topic(folder, topic)
    items = _keyed(intake.items(bodies or [], files or []), separator)
    first = list(islice(items, 1))  # before opening the folder, so that no other command waits for our input
    with opening.opened_broker(folder, wait=wait) as broker:
        producing = _Producing(broker.producer(name=name, resume=resume, **changes), chosen, partition)
        producing.run(chain(first, items), shown=not as_json)
    producing.summary(as_json=as_json)
    return OK


def _producer_changes(acks: str | None, linger: str | None, messages: int | None, size: str | None) -> dict[str, Any]:
    """Return the producer settings that were given."""
    from holdfast.cli.operate.settings import size_of  # not needed by `put`, which should start fast

    given = {
        "acks": acks,
        "linger_ms": None if linger is None else round(parse_duration(linger, "--linger") * 1000),
        "batch_messages": messages,
        "batch_bytes": None if size is None else size_of("--batch-bytes", size),
    }
    return {name: value for name, value in given.items() if value is not None}


def _check_produce(
    bodies: Sequence[str] | None,
    files: Sequence[str] | None,
    name: str | None,
    *,
    resume: bool,
    jsonl: bool,
    whole: bool,
) -> None:
    if jsonl and whole:
        raise InvalidRequest("--jsonl and --whole both say what a message is; give one of them")
    if resume and name is None:
        raise InvalidRequest(
            "--resume continues where an earlier producer of the same --name stopped: give --name as well"
        )
    if not bodies and not files and sys.stdin.isatty():
        raise InvalidRequest("there is no message; use -m or --file, or send lines to stdin")


def _separator(text: str, key: str | None, *, jsonl: bool) -> bytes:
    if key is not None or jsonl or not text:
        raise InvalidRequest(
            "--key-separator takes the key from each line: use it without --key and --jsonl, and do not leave it empty"
        )
    return separator_of(text)


def _keyed(items: Iterator[Item], separator: bytes | None) -> Iterator[Item]:
    """Yield the messages, with the key that precedes the separator."""
    if separator is None:
        yield from items
        return
    for place, message in items:
        key, found, body = message.body.partition(separator)
        if not found:
            shown = separator.decode("utf-8", "backslashreplace")
            raise InvalidRequest(f"{place}: there is no {shown!r} after the key: write KEY{shown}BODY")
        try:
            yield Item(place, msgspec.structs.replace(message, key=key.decode(), body=body))
        except UnicodeDecodeError:
            yield Item(place, msgspec.structs.replace(message, key=key, body=body))


class _Producing:
    """Sends messages and collects the answers."""

    def __init__(self, producer: Producer, topic: str, partition: int | None) -> None:
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._unanswered: deque[Sent] = deque()
        self._seconds = 0.0
        self._spans: dict[int, list[int]] = {}  # partition -> messages, first offset, last offset
        self.sent = self.stored = self.known = self.bytes = 0

    def run(self, items: Iterator[Item], *, shown: bool) -> None:
        """Send all messages and wait for their answers; an error says how many were stored before it."""
        began = time.monotonic()
        try:
            with progress("producing", "count", shown=shown) as report:
                for place, message in items:
                    self._send(place, message)
                    if not self.sent % _TELL_EVERY:
                        report(self.sent)
                self._answered(0)
        except HoldfastError as error:
            self._end()
            before = f"{self._count()} before that" if self.stored or self.known else "Nothing was stored"
            error.args = (f"{str(error).rstrip('.')}. {before}",)
            raise
        except KeyboardInterrupt:
            self._end()
            note(f"interrupted: {self._count()}")
            raise
        self._producer.close()
        self._seconds = time.monotonic() - began

    def _send(self, place: str, message: NewMessage) -> None:
        try:
            options = msgspec.structs.asdict(message)
            sent = self._producer.send(self._topic, options.pop("body"), partition=self._partition, **options)
        except InvalidRequest as error:
            error.args = (f"{place}: {error}",)
            raise
        self._unanswered.append(sent)
        self.sent += 1
        self.bytes += len(message.body or b"")
        if len(self._unanswered) > _MOST_UNANSWERED:
            self._answered(_MOST_UNANSWERED // 2)

    def _answered(self, most: int) -> None:
        """Wait for answers until at most `most` are left."""
        if not most:
            self._producer.flush()
        while len(self._unanswered) > most:
            stored = self._unanswered.popleft().result()
            if stored is None:
                continue  # sent with acks=none
            self.known += stored.duplicate
            self.stored += not stored.duplicate
            if stored.offset is not None:
                span = self._spans.setdefault(stored.partition, [0, stored.offset, stored.offset])
                span[0] += 1
                span[1], span[2] = min(span[1], stored.offset), max(span[2], stored.offset)

    def _end(self) -> None:
        """After an error or Ctrl-C, wait for what was sent, and count it."""
        while self._unanswered:
            try:
                self._answered(0)
            except HoldfastError:
                continue  # report the first error only
        try:
            self._producer.close()
        except HoldfastError:
            return

    def _count(self) -> str:
        again = f", {self.known:,} were already there" if self.known else ""
        return f"{count_of(self.stored, 'message')} stored{again}"

    def summary(self, *, as_json: bool) -> None:
        """Print how many messages were stored, where, and how fast."""
        acks = self._producer.settings.acks
        rate = self.sent / max(self._seconds, 1e-9)
        if as_json:
            partitions = [
                {"partition": number, "messages": count, "first": first, "last": last}
                for number, (count, first, last) in sorted(self._spans.items())
            ]
            print_json(
                {
                    "topic": self._topic,
                    "messages": self.sent,
                    "stored": None if acks == "none" else self.stored,
                    "duplicates": self.known,
                    "bytes": self.bytes,
                    "acks": acks,
                    "seconds": round(self._seconds, 6),
                    "messages_per_second": round(rate),
                    "partitions": partitions,
                }
            )
            return
        from holdfast.cli.look.trace import time_text  # not needed by `put`, which should start fast

        again = f"; {self.known:,} of them were already there" if self.known else ""
        text = f"{count_of(self.sent, 'message')} ({size(self.bytes)}) to {safe(self._topic)}"
        speed = f" in {time_text(round(self._seconds * 1e9))}, {rate:,.0f} per second" if self.sent > 1 else ""
        say(f"{text}{speed} (acks {acks}){again}")
        for number, (count, first, last) in sorted(self._spans.items()) if len(self._spans) > 1 else ():
            stdout().print(f"  partition {number}: {count_of(count, 'message')} (offsets {first} to {last})")
