"""The page of a message: what it says, where it stands, and its life so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.broker.traces import LEASED, TraceStep
from holdfast.embedded.listed import DeadLetter, Listed
from holdfast.embedded.lookup import history_of
from holdfast.errors import HoldfastError, NotFound
from holdfast.protocol.media import RAW
from holdfast.protocol.queues import InGroup
from holdfast.server.api.traces import is_shown
from holdfast.server.calls import Call
from holdfast.server.console import recipes
from holdfast.server.console.finding import MessageRow, find, group_for, letter_of, row_of
from holdfast.server.console.lifeline import Step, life_of
from holdfast.server.console.queues import head_of
from holdfast.server.console.rates import Rates
from holdfast.server.console.rendering import SAFE, render
from holdfast.server.console.shown import Payload, View, payload, plain
from holdfast.server.http.messages import Response, StreamResponse
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan
from holdfast.server.served import ServedGroup


class MessageQuery(InGroup, kw_only=True):
    """How to show the body."""

    view: View | None = None


class MessageShown(msgspec.Struct, frozen=True, kw_only=True):
    """All that a message's page says."""

    row: MessageRow
    partition: int
    offset: int | None
    correlation_id: str
    expires_ms: int
    headers: list[tuple[str, str]]
    payload: Payload
    life: list[Step]
    traced: bool
    state: str
    letter: str
    original: str
    curl: str
    python: str


def message_routes(rates: Rates) -> Routes:
    """The pages of one message."""
    routes = Routes("console")

    @routes.add("GET", "/ui/queues/{queue}/messages/{id}", action="read", query=MessageQuery, hidden=True)
    async def message(call: Call) -> Response:
        """One message, wherever it stands."""
        group = await _group(call)
        shown = await call.scan(_shown, call, group)
        return render(
            call, "message.html", section="message", query=call.query, m=shown, **await head_of(call, rates, group)
        )

    @routes.add("GET", "/ui/queues/{queue}/messages/{id}/body", action="read", query=InGroup, hidden=True)
    async def body(call: Call) -> StreamResponse:
        """The body of a message, byte for byte, as a file."""
        group = await _group(call)
        found = await call.scan(lambda _: find(group, call.path["id"]))
        name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in call.path["id"])
        headers = [*SAFE, ("content-disposition", f'attachment; filename="{name}.bin"')]
        return StreamResponse(aiter(found.chunks()), RAW, headers=headers, length=found.size)

    return routes


async def _group(call: Call) -> ServedGroup:
    group = await group_for(call, call.query.group)
    if group is None:
        raise NotFound(f"{call.path['queue']} has no group in queue mode, so its messages have no pages")
    return group


def _shown(_scan: Scan, call: Call, group: ServedGroup) -> MessageShown:
    found = find(group, call.path["id"])
    traced = []
    with suppress(HoldfastError):
        own = found._stored.note.id if isinstance(found, DeadLetter) else found.id
        traced = [step for step in group._engine.trace(own) if is_shown(call, step)]
    steps = history_of(found)
    scheme = "https" if call.request.encrypted else "http"
    letter = letter_of(found)
    base = f"{scheme}://{call.request.header('host') or 'localhost'}"
    query: MessageQuery = call.query
    return MessageShown(
        row=_row(found, steps, letter),
        partition=found.partition,
        offset=found.offset,
        correlation_id=found.correlation_id,
        expires_ms=_expires_ms(found),
        headers=[(name, plain(value)) for name, value in found.headers.pairs],
        payload=payload(found._record.value, query.view),
        life=life_of(traced or steps),
        traced=bool(traced),
        state=_state(found),
        letter=letter,
        original=found.original_id if found.original_id != found.id else "",
        curl=recipes.curl(found, base),
        python=recipes.python(found, base),
    )


def _expires_ms(found: Listed[Any]) -> int:
    return found._stored.note.expires_at_ms if isinstance(found, DeadLetter) else found._record.expires_at_ms


def _row(found: Listed[Any], steps: Sequence[TraceStep], letter: str) -> MessageRow:
    """What the page says first. Of a message that is done its history alone knows who had it; one that died is dead."""
    row = row_of(found)
    if letter:
        row = msgspec.structs.replace(row, phase="dead")
    taken = [step for step in steps if step.step == LEASED and step.id == found.id]
    if row.phase != "done" or not taken:
        return row
    return msgspec.structs.replace(row, attempts=taken[-1].attempt, holder=taken[-1].holder)


def _state(found: Listed[Any]) -> str:
    """The document that goes with it."""
    if isinstance(found, DeadLetter):
        content = found._stored.note.state
    else:
        document = found._home.delivery.group.documents.get(found.offset)
        content = None if document is None else document.content
    return "" if content is None else msgspec.json.format(content, indent=2).decode("utf-8", "replace")
