"""Everything that is known of one message, wherever it is by now."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.broker.layout import DEAD_SUFFIX, receipt_text
from holdfast.broker.station import Station
from holdfast.cli.messages import (
    AnyMessage,
    body_text,
    bytes_of,
    document,
    header_text,
    lease_end,
    moment,
    seconds_text,
)
from holdfast.cli.output import print_json, stdout
from holdfast.cli.text import preview, safe
from holdfast.delivery.commands import Receipt
from holdfast.delivery.group import Failure
from holdfast.embedded.listed import DeadLetter, Listed, Waiting
from holdfast.embedded.times import to_datetime
from holdfast.errors import InvalidRequest


class Everything(NamedTuple):
    """One message with its history."""

    message: AnyMessage
    phase: str
    facts: dict[str, Any]
    failures: tuple[Failure, ...]

    @property
    def document(self) -> dict[str, Any]:
        failures = [
            {**moment("at", _at(failure.at_ms)), "holder": failure.holder, "why": failure.why, "error": failure.error}
            for failure in self.failures
        ]
        return document(self.message, **{**self.facts, "phase": self.phase, "failures": failures})


def everything_about(queue: holdfast.Queue[bytes], message_id: str) -> Everything:
    """What is known of the message or dead letter with this id; InvalidRequest where there is none."""
    if message_id.startswith(f"{queue.name}{DEAD_SUFFIX}-"):
        return everything_about_letter(queue.dead.show(message_id))
    station, place = queue._group.place(message_id)
    offset, log = place.offset, station.partition.log
    if place.delayed_id is not None:
        store = station.partition.delayed
        waiting = None if store is None else store.get(place.delayed_id)
        if waiting is not None:
            return Everything(Waiting(queue, station, waiting), "delayed", {}, ())
        offset = station.partition.find_released(place.delayed_id, log.start)
    if offset is not None and offset < log.end:
        buried = _letter_of(queue, station, offset)
        if buried is not None:
            return everything_about_letter(buried)
        found = _in_log(queue, station, offset)
        if found is not None:
            return found
    raise InvalidRequest(
        f"there is no message {message_id} in {queue.folder}: it never was, or it is done and was dropped since"
    )


def dead_id(queue: holdfast.Queue[bytes], message_id: str) -> str:
    """The id of a dead letter, found by that or by the id that the message had when it was alive."""
    if not message_id.startswith(f"{queue.name}-"):
        return queue.dead.show(message_id).id
    station, place = queue._group.place(message_id)
    found = None
    for letter in station.letters():
        if letter.note.id == message_id or letter.note.offset == place.offset:
            found = letter  # after a seek it may have died more than once: the last time counts
    if found is None:
        raise InvalidRequest(f"there is no dead letter of {message_id}; it may have been redriven or purged")
    return DeadLetter(queue, station, found).id


def _letter_of(queue: holdfast.Queue[bytes], station: Station, offset: int) -> DeadLetter[bytes] | None:
    """The dead letter of a message, if it is one and nobody brought the message back meanwhile."""
    if station.delivery.group.phase(offset).value != "done":
        return None
    for letter in station.letters():
        if letter.note.offset == offset:
            return DeadLetter(queue, station, letter)
    return None


def _in_log(queue: holdfast.Queue[bytes], station: Station, offset: int) -> Everything | None:
    if offset < station.partition.log.start:
        return None
    records = station.delivery.fetch([offset])
    if not records:
        return None
    group = station.delivery.group
    phase = group.phase(offset).value
    listed: Any = phase  # `done` is no phase that can be listed, and is shown here nevertheless
    message = Listed(queue, station, records[0], listed, due_ms=group.waiting.get(offset, 0))
    facts: dict[str, Any] = {}
    lease = group.leases.get(offset)
    if lease is not None:
        facts["receipt"] = receipt_text(queue.name, station.number, Receipt(offset, lease.fence))
        facts |= moment("leased_at", _at(lease.at_ms)) | moment("lease_until", lease_end(queue, message))
    history = group.histories.get(offset)
    if history is not None:
        facts |= moment("first_delivery", _at(history.first_ms)) | moment("last_delivery", _at(history.last_ms))
    state = group.documents.get(offset)
    if state is not None:
        facts["state"] = msgspec.json.decode(state.content)
    return Everything(message, phase, facts, history.failures if history is not None else ())


def everything_about_letter(letter: DeadLetter[bytes]) -> Everything:
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
    return Everything(letter, "dead", facts, letter.failures)


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
        ("receipt", safe(known.get("receipt", ""))),
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
