"""Everything that is known of one message, wherever it is by now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import to_builtins
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.broker.traces import TraceStep
from holdfast.cli.lifeline import life_line
from holdfast.cli.messages import (
    AnyMessage,
    body_text,
    bytes_of,
    document,
    header_text,
    moment,
    seconds_text,
)
from holdfast.cli.output import print_json, stdout
from holdfast.cli.remote import asked, is_remote
from holdfast.cli.text import preview, safe
from holdfast.delivery.group import Failure
from holdfast.embedded.listed import DeadLetter
from holdfast.embedded.lookup import Found, look_up
from holdfast.embedded.times import to_datetime
from holdfast.env import real_world
from holdfast.errors import InvalidRequest, NotFound


class Everything(NamedTuple):
    """One message with its history."""

    message: AnyMessage
    phase: str
    facts: dict[str, Any]
    failures: tuple[Failure, ...]
    history: Sequence[TraceStep]

    @property
    def document(self) -> dict[str, Any]:
        failures = [
            {**moment("at", _at(failure.at_ms)), "holder": failure.holder, "why": failure.why, "error": failure.error}
            for failure in self.failures
        ]
        facts = {**self.facts, "phase": self.phase, "failures": failures}
        if self.history:
            facts["history"] = to_builtins(self.history)
        return document(self.message, **facts)


def everything_about(queue: holdfast.Queue[bytes], message_id: str) -> Everything:
    """What is known of the message or dead letter with this id; InvalidRequest where there is none."""
    found = _asked(queue, message_id) if is_remote(queue) else look_up(queue, message_id)
    if found is None:
        raise InvalidRequest(
            f"there is no message {message_id} in {queue.folder}: it never was, or it is done and was dropped since"
        )
    if found.phase == "dead":
        return everything_about_letter(queue.dead.show(found.message.id), found.history)
    facts: dict[str, Any] = {}
    if found.leased_at_ms:
        facts |= moment("leased_at", _at(found.leased_at_ms)) | moment("lease_until", _at(found.lease_until_ms))
    if found.first_delivery_ms:
        facts |= moment("first_delivery", _at(found.first_delivery_ms))
        facts |= moment("last_delivery", _at(found.last_delivery_ms))
    if found.state is not None:
        facts["state"] = found.state
    return Everything(found.message, found.phase, facts, found.failures, found.history)


def _asked(queue: Any, message_id: str) -> Found:
    from holdfast.client.messages import RemoteListed
    from holdfast.protocol.queues import Whole

    told = asked(queue, Whole, "queues", queue.name, "lookup", id=message_id, group=queue.group)
    message: Any = RemoteListed(queue, told)
    return Found(
        message,
        told.phase,
        told.leased_at_ms,
        told.lease_until_ms,
        told.first_delivery_ms,
        told.last_delivery_ms,
        tuple(told.failures),
        told.state,
        told.history,
    )


def dead_id(queue: holdfast.Queue[bytes], message_id: str) -> str:
    """The id of a dead letter, found by that or by the id that the message had when it was alive."""
    if not message_id.startswith(f"{queue.name}-"):
        return queue.dead.show(message_id).id
    if is_remote(queue):
        with suppress(NotFound):
            found = _asked(queue, message_id)
            if found.phase == "dead":
                return found.message.id
        raise _no_letter(message_id)
    station, place = queue._group.place(message_id)
    letter_found = None
    for letter in station.letters():
        if message_id in (letter.note.id, letter.note.first.id) or letter.note.offset == place.offset:
            letter_found = letter  # after a seek it may have died more than once: the last time counts
    if letter_found is None:
        raise _no_letter(message_id)
    return DeadLetter(queue, station, letter_found).id


def _no_letter(message_id: str) -> InvalidRequest:
    return InvalidRequest(f"there is no dead letter of {message_id}; it may have been redriven or purged")


def everything_about_letter(letter: DeadLetter[bytes], history: Sequence[TraceStep] = ()) -> Everything:
    """What is known of a dead letter."""
    facts = {
        "original_id": letter.original_id,
        **moment("original_time", letter.original_timestamp),
        **moment("dead_at", letter.dead_at),
        **moment("first_delivery", letter.first_delivery),
        **moment("last_delivery", letter.last_delivery),
    }
    if letter.state is not None:
        facts["state"] = letter.state
    return Everything(letter, "dead", facts, letter.failures, history)


def show_everything(found: Everything, *, as_json: bool) -> None:
    """All of it, for people or for scripts."""
    if as_json:
        print_json(found.document)
    else:
        _show(stdout(), found)


def _show(console: Console, found: Everything) -> None:
    message, known = found.message, found.document
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("id", safe(message.id))
    for title, text in _rows(message, known):
        if text:
            facts.add_row(title, text)
    for number, failure in enumerate(found.failures, 1):
        summary = f"{seconds_text(_at(failure.at_ms))} UTC, {safe(failure.holder)}: {safe(failure.why)}"
        facts.add_row(f"failure {number}", f"{summary}\n{_lines(failure.error)}" if failure.error else summary)
    facts.add_row("body", f"{message.size:,} bytes")
    console.print(facts)
    for line in life_line(found.history, width=console.width, now_ns=real_world().clock.now_ns()):
        console.print(line, soft_wrap=True)
    console.print(body_text(message.raw), soft_wrap=True)


def _rows(message: AnyMessage, known: dict[str, Any]) -> list[tuple[str, str]]:
    def time(name: str) -> str:
        ms = known.get(f"{name}_ms")
        return f"{seconds_text(_at(ms))} UTC" if ms else ""

    reason = safe(known.get("reason", ""))
    return [
        ("phase", known["phase"] + (f" ({reason})" if reason else "")),
        ("was", safe(known.get("original_id", ""))),
        ("published", time("original_time") or f"{seconds_text(message.timestamp)} UTC"),
        ("due", time("due_at")),
        ("expires", time("expires_at")),
        ("died", time("dead_at")),
        ("key", preview(bytes_of(message.key) or b"", 200)),
        ("headers", header_text(message)),
        ("priority", str(message.priority or "")),
        ("correlation", safe(message.correlation_id) if message.correlation_id != message.id else ""),
        ("holder", safe(known.get("holder", ""))),
        ("leased until", time("lease_until")),
        ("attempts", str(known.get("attempts") or "")),
        ("first taken", time("first_delivery")),
        ("last taken", time("last_delivery")),
        ("state", safe(str(msgspec.json.encode(known["state"]), "utf-8")) if "state" in known else ""),
    ]


def _lines(text: str) -> str:
    return "\n".join(safe(line) for line in text.splitlines())


def _at(ms: int | None) -> datetime | None:
    return to_datetime(ms * 1_000_000) if ms else None
