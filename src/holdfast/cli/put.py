"""`holdfast put`: messages from arguments, files, stdin or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Annotated, Final

import typer

import holdfast
from holdfast.cli.intake import Defaults, Intake, Item, header_pairs, text_or_bytes
from holdfast.cli.opened import chosen_topic, opened_broker
from holdfast.cli.options import WAIT, AsJson, QueueFolder, Topic, Wait
from holdfast.cli.output import OK, command, print_json_line, stderr
from holdfast.cli.progress import counter
from holdfast.cli.queues import see_to_queue
from holdfast.cli.remote import is_remote
from holdfast.cli.text import safe
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.model import CodecName, Durability
from holdfast.storage.finding import count_of

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
    if is_remote(broker):
        return batch[0].place if len(batch) == 1 else f"{batch[0].place} to {batch[-1].place}"
    with broker._engine.using(topic) as used:
        publisher, most_bytes = broker._publisher(used), used.settings.max_message_bytes
        for item in batch:
            try:
                draft = publisher.draft(item.message)
            except HoldfastError:
                return item.place
            if len(draft.value) + len(draft.key or b"") > most_bytes:
                return item.place
    return f"{batch[0].place} to {batch[-1].place}"


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
