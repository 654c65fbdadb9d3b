"""`holdfast produce`: lines into a topic, many at once."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from holdfast.api.sync.producer import Producer
from holdfast.api.times import parse_duration
from holdfast.cli.completion import topic_names
from holdfast.cli.look.trace import time_text
from holdfast.cli.opening import chosen_topic, opened_broker
from holdfast.cli.operate.settings import size_of
from holdfast.cli.options import WAIT, AsJson, DataFolder, PartitionNumber, Wait
from holdfast.cli.output import OK, command, print_json, stderr, stdout
from holdfast.cli.progress import counter
from holdfast.cli.text import safe, size
from holdfast.cli.use.put import Defaults, Intake, Item, header_pairs, separator_of, text_or_bytes
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.producing.sent import Sent
from holdfast.storage.checks.finding import count_of

# So many may be on their way; above that the oldest answer is waited for.
_MOST_UNANSWERED: Final = 20_000
_TELL_EVERY: Final = 1_000


@command
def produce_command(
    folder: DataFolder,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where the messages go.", autocompletion=topic_names)],
    bodies: Annotated[list[str] | None, typer.Option("-m", "--message", metavar="BODY", help="A message.")] = None,
    files: Annotated[list[str] | None, typer.Option("--file", metavar="FILE", help="A message for each line.")] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Each line is a message as JSON, as for `holdfast put`.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Each file, or stdin, is one message.")] = False,
    key: Annotated[str | None, typer.Option("--key", help="The messages' key.")] = None,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", metavar="TEXT", help=r"What stands before it in a line is the key.")
    ] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be repeated.")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="9 is the most urgent.")] = 0,
    partition: PartitionNumber = None,
    acks: Annotated[
        Literal["none", "leader", "all"] | None,
        typer.Option("--acks", help="What is waited for: nothing, kill -9 (leader) or a power cut (all)."),
    ] = None,
    linger: Annotated[
        str | None, typer.Option("--linger", metavar="TIME", help="How long a batch waits to be full.")
    ] = None,
    batch_messages: Annotated[int | None, typer.Option("--batch-messages", min=1, help="How many are a batch.")] = None,
    batch_bytes: Annotated[
        str | None, typer.Option("--batch-bytes", metavar="SIZE", help="How many bytes are one, such as 64KiB.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The producer's name: a new one of it fences the one before.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Given the same messages again, store those that are not stored yet.")
    ] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Send messages to a topic: the lines of stdin or of files, or those given with -m. Says how many, and how fast.

    They are gathered into batches. With --name and --resume the same call may be made again after a crash, and each
    message is stored once.
    """
    _check_call(bodies, files, name, resume=resume, jsonl=jsonl, whole=whole)
    separator = None if key_separator is None else _separator(key_separator, key, jsonl=jsonl)
    defaults = Defaults(
        key=None if key is None else text_or_bytes(key),
        headers=header_pairs(headers or []),
        priority=priority,
    )
    changes = _changes(acks, linger, batch_messages, batch_bytes)
    intake = Intake(defaults, real_world().clock.now_ns() // 1_000_000, lines=not whole and not jsonl, jsonl=jsonl)
    chosen = chosen_topic(folder, topic)
    items = _keyed(intake.items(bodies or [], files or []), separator)
    first = list(islice(items, 1))  # before the folder is owned: nobody need wait for our input
    with opened_broker(folder, wait=wait) as broker:
        producing = _Producing(broker.producer(name=name, resume=resume, **changes), chosen, partition)
        producing.run(chain(first, items), shown=not as_json)
    producing.summary(as_json=as_json)
    return OK


def _changes(acks: str | None, linger: str | None, messages: int | None, size: str | None) -> dict[str, Any]:
    """The settings of the producer that were given."""
    given = {
        "acks": acks,
        "linger_ms": None if linger is None else round(parse_duration(linger, "--linger") * 1000),
        "batch_messages": messages,
        "batch_bytes": None if size is None else size_of("--batch-bytes", size),
    }
    return {name: value for name, value in given.items() if value is not None}


def _check_call(
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
        raise InvalidRequest("--resume goes on where an earlier producer of the same --name ended: give the name, too")
    if not bodies and not files and sys.stdin.isatty():
        raise InvalidRequest("no message is given; use -m or --file, or send lines to stdin")


def _separator(text: str, key: str | None, *, jsonl: bool) -> bytes:
    if key is not None or jsonl or not text:
        raise InvalidRequest(
            "--key-separator tells the key of each line: give it without --key and --jsonl, and a text"
        )
    return separator_of(text)


def _keyed(items: Iterator[Item], separator: bytes | None) -> Iterator[Item]:
    """The messages, with the key that stands before the separator."""
    if separator is None:
        yield from items
        return
    for place, message in items:
        key, found, body = message.body.partition(separator)
        if not found:
            shown = separator.decode("utf-8", "backslashreplace")
            raise InvalidRequest(f"{place}: there is no {shown!r} behind a key")
        try:
            yield Item(place, msgspec.structs.replace(message, key=key.decode(), body=body))
        except UnicodeDecodeError:
            yield Item(place, msgspec.structs.replace(message, key=key, body=body))


class _Producing:
    """Messages out, answers in."""

    def __init__(self, producer: Producer, topic: str, partition: int | None) -> None:
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._unanswered: deque[Sent] = deque()
        self._seconds = 0.0
        self._spans: dict[int, list[int]] = {}  # partition -> messages, first offset, last offset
        self.sent = self.stored = self.known = self.bytes = 0

    def run(self, items: Iterator[Item], *, shown: bool) -> None:
        """Send all of them and wait for their answers; an error says how many were stored before it."""
        began = time.monotonic()
        try:
            with counter("producing", shown=shown) as told:
                for place, message in items:
                    self._send(place, message)
                    if not self.sent % _TELL_EVERY:
                        told(self.sent)
                self._answered(0)
        except HoldfastError as error:
            self._end()
            before = f"{self._count()} before that" if self.stored or self.known else "Nothing was stored"
            error.args = (f"{str(error).rstrip('.')}. {before}",)
            raise
        except KeyboardInterrupt:
            self._end()
            stderr().print(f"interrupted: {self._count()}", soft_wrap=True)
            raise
        self._producer.close()
        self._seconds = time.monotonic() - began

    def _send(self, place: str, message: Any) -> None:
        try:
            sent = self._producer.send(
                self._topic,
                message.body,
                key=message.key,
                headers=message.headers or None,
                priority=message.priority,
                delay=message.delay,
                at=message.at,
                ttl=message.ttl,
                dedup_id=message.dedup_id,
                correlation_id=message.correlation_id,
                partition=self._partition,
            )
        except InvalidRequest as error:
            error.args = (f"{place}: {error}",)
            raise
        self._unanswered.append(sent)
        self.sent += 1
        self.bytes += len(message.body or b"")
        if len(self._unanswered) > _MOST_UNANSWERED:
            self._answered(_MOST_UNANSWERED // 2)

    def _answered(self, most: int) -> None:
        """Take in answers until at most so many are left."""
        if not most:
            self._producer.flush()
        while len(self._unanswered) > most:
            stored = self._unanswered.popleft().result()
            if stored is None:
                continue  # nobody waits for an answer
            self.known += stored.duplicate
            self.stored += not stored.duplicate
            if stored.offset is not None:
                span = self._spans.setdefault(stored.partition, [0, stored.offset, stored.offset])
                span[0] += 1
                span[1], span[2] = min(span[1], stored.offset), max(span[2], stored.offset)

    def _end(self) -> None:
        """After a mistake or Ctrl-C: what was sent is still to be stored, and counted."""
        while self._unanswered:
            try:
                self._answered(0)
            except HoldfastError:
                continue  # the first error is the one that is told
        try:
            self._producer.close()
        except HoldfastError:
            return

    def _count(self) -> str:
        again = f", {self.known:,} were there already" if self.known else ""
        return f"{count_of(self.stored, 'message')} stored{again}"

    def summary(self, *, as_json: bool) -> None:
        """How many, where, how fast."""
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
        again = f"; {self.known:,} of them were there already" if self.known else ""
        text = f"{count_of(self.sent, 'message')} ({size(self.bytes)}) to {safe(self._topic)}"
        speed = f" in {time_text(round(self._seconds * 1e9))}, {rate:,.0f} a second" if self.sent > 1 else ""
        stdout().print(f"{text}{speed} (acks {acks}){again}", soft_wrap=True)
        for number, (count, first, last) in sorted(self._spans.items()) if len(self._spans) > 1 else ():
            stdout().print(f"  partition {number}: {count_of(count, 'message')} (offsets {first} to {last})")
