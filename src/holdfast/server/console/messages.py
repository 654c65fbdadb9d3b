"""The page of a message, with its body and history; and the search for messages in all queues."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Meta

from holdfast.api.contents import home_of, record_of
from holdfast.api.drafts import to_datetime
from holdfast.api.listing import DeadLetter, Listed, SearchHit, SearchPage, note_of
from holdfast.broker.tracing import TraceStep, log
from holdfast.broker.tracing.log import LEASED
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.local.listing import look_up
from holdfast.protocol.media import RAW
from holdfast.protocol.messages import InGroup, Wire
from holdfast.server.api.admin import is_shown
from holdfast.server.api.queues import search
from holdfast.server.console.queues import MessageRow, find, head_of, looked_up, needed_group, row_of
from holdfast.server.console.rendering import (
    SAFE,
    ShownPayload,
    View,
    as_text,
    base_of,
    beginning,
    page,
    payload,
    plain,
    reason,
    render,
    spanning_page,
    visible,
)
from holdfast.server.http.messages import Response, StreamResponse
from holdfast.server.served import ServedGroup
from holdfast.server.service import Call
from holdfast.server.turns import Scan

_MOST: Final = 4_096  # a longer body is not written into a command


def curl(found: Listed[Any], base: str) -> str:
    """A curl command that sends the message again."""
    pairs: list[tuple[str, str]] = []
    if isinstance(found.key, str):
        pairs.append(("key", found.key))
    pairs += [("header", f"{name}:{value}") for name, value in found.headers.pairs if isinstance(value, str)]
    if found.priority:
        pairs.append(("priority", str(found.priority)))
    url = f"{base}/v1/queues/{quote(found.topic, safe='')}/enqueue" + (f"?{urlencode(pairs)}" if pairs else "")
    start, text = _start(found)
    if start is None:
        return f"curl -X POST --data-binary @body.bin {shlex.quote(url)}  # download the body as body.bin first"
    if text is not None and not text.startswith("@") and visible(text) == text:
        return f"curl -X POST --data-binary {shlex.quote(text)} {shlex.quote(url)}"
    packed = base64.b64encode(start).decode()
    return f"echo {packed} | base64 -d | curl -X POST --data-binary @- {shlex.quote(url)}"


def python(found: Listed[Any], base: str) -> str:
    """Python code that sends the message again."""
    start, text = _start(found)
    if start is None:
        body = 'Path("body.bin").read_bytes()'
    elif text is None:
        body = repr(start)
    else:
        body = f"{text!r}.encode()" if not text.isascii() else repr(start)
    options = []
    if found.key is not None:
        options.append(f"key={found.key!r}")
    if found.headers:
        options.append(f"headers={dict(found.headers)!r}")
    if found.priority:
        options.append(f"priority={found.priority}")
    lines = ["from pathlib import Path", ""] if start is None else []
    lines += [
        "import holdfast",
        "",
        f"with holdfast.connect({base!r}) as broker:",
        f"    broker.publish({', '.join([repr(found.topic), body, *options])})",
    ]
    return "\n".join(lines)


def _start(found: Listed[Any]) -> tuple[bytes | None, str | None]:
    value = record_of(found).value
    if len(value) > _MOST:
        return None, None
    start = beginning(value, _MOST)
    return start, as_text(start)


# The history of a message: from its trace if it has one, otherwise from the journals.

_GOOD: Final = frozenset({log.ACKED})
_BAD: Final = frozenset({log.NACKED, log.BURIED, log.LOST, log.EXPIRED})
_MS: Final = 1_000_000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it is shown. `tone` is good, bad or empty; `related` is the id before or after a move."""

    at_ns: int
    name: str
    says: str = ""
    error: str = ""
    tone: str = ""
    related: str = ""
    message: str = ""


def life_of(steps: Sequence[TraceStep]) -> list[Step]:
    """The steps as they are shown; without message ids if all are of one message."""
    shown = [_shown_lifeline(step) for step in steps]
    if len({step.message for step in shown}) <= 1:
        return [msgspec.structs.replace(step, message="") for step in shown]
    return shown


def _shown_lifeline(step: TraceStep) -> Step:
    facts = [
        f"group {step.group}" if step.group and step.group != "default" else "",
        f"to {step.holder}" if step.step == log.LEASED else f"by {step.holder}" if step.holder else "",
        f"attempt {step.attempt}" if step.attempt else "",
        reason(step.why) if step.why not in ("", step.step) else "",
        f"due {_time(step.due_ms)}" if step.due_ms else "",
        f"lease until {_time(step.until_ms)}" if step.until_ms else "",
    ]
    return Step(
        at_ns=step.at_ns,
        name="moved to the dead letters" if step.step == log.BURIED else step.step,
        says=", ".join(filter(None, facts)),
        error=step.error,
        tone="good" if step.step in _GOOD else "bad" if step.step in _BAD else "",
        related=step.related,
        message=step.id,
    )


def _time(ms: int) -> str:
    return f"{to_datetime(ms * _MS):%H:%M:%S}Z"


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery of a message: to whom, for how long, how it ended; `same_as` is the row that has the same error."""

    number: int
    message: str
    holder: str
    at_ns: int
    ended_ns: int = 0  # 0 while it is being worked on
    outcome: str = ""
    tone: str = ""
    error: str = ""
    same_as: int = 0


_OUTCOMES: Final = {
    log.ACKED: "done",
    log.NACKED: "failed, retried",
    log.BURIED: "failed, moved to the dead letters",
    log.EXPIRED: "expired",
    log.LOST: "lost",
}
_RETURNS: Final = {
    "lease ended": "lease expired before the ack, redelivered",
    "holder gone": "worker disappeared, redelivered",
    "dropped unhandled": "worker dropped it without acking, redelivered",
} | {"deferred": "returned by the worker", "taken back": "lease taken back by an administrator"}


def attempts_of(steps: Sequence[TraceStep]) -> list[AttemptRow]:
    """The deliveries of a message and of those it was redriven from or into, in order."""
    found: list[AttemptRow] = []
    open_at: dict[tuple[str, str], int] = {}
    seen: dict[str, int] = {}
    for step in steps:
        place = step.id, step.group
        if step.step == LEASED:
            open_at[place] = len(found)
            found.append(AttemptRow(number=step.attempt or 1, message=step.id, holder=step.holder, at_ns=step.at_ns))
        elif place in open_at and step.step in (*_OUTCOMES, log.RETURNED):
            at = open_at.pop(place)
            error = without_own_frames(step.error)
            found[at] = msgspec.structs.replace(
                found[at],
                ended_ns=step.at_ns,
                outcome=_RETURNS.get(step.why, step.why) if step.step == log.RETURNED else _OUTCOMES[step.step],
                tone="good" if step.step in _GOOD else "bad",
                error=error,
                same_as=seen.get(error, 0) if error else 0,
            )
            if error:
                seen.setdefault(error, at + 1)
    return found


_OWN_FILE: Final = re.compile(r"""[/\\]holdfast[/\\](?:worker|api|local|remote|client|cli|testing)[/\\.]""")


def without_own_frames(error: str) -> str:
    """A traceback without the frames of Holdfast itself, which say nothing about the handler's bug."""
    kept, is_own = [], False
    for line in error.split("\n"):
        if line.startswith('  File "'):
            is_own = _OWN_FILE.search(line) is not None
        elif not line.startswith("    "):  # the code of a frame is indented further
            is_own = False
        if not is_own:
            kept.append(line)
    return "\n".join(kept)


def lives_of(steps: Sequence[TraceStep], now: str) -> list[str]:
    """The ids under which a message lived: as a message, as what it was redriven into, and as a dead letter now."""
    ids = dict.fromkeys(step.id for step in steps)
    ids |= dict.fromkeys(filter(None, [*(step.related for step in steps), now]))
    return list(ids) if len(ids) > 1 else []


class MessageQuery(InGroup, kw_only=True):
    """How to show the body."""

    view: View | None = None


class MessageShown(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a message's page."""

    row: MessageRow
    expires_ms: int
    headers: list[tuple[str, str]]
    payload: ShownPayload
    life: list[Step]
    attempts: list[AttemptRow]
    lives: list[str]
    here: tuple[str, str]  # the ids that lead to this page
    error: str
    traced: bool
    state: str
    original: str
    curl: str
    python: str


@page("/ui/queues/{queue}/messages/{id}", query=MessageQuery)
async def message(call: Call) -> Response:
    """One message in any phase."""
    group = await needed_group(call, "its messages have no pages")
    shown = await call.scan(_shown, call, group)
    return render(call, "message.html", section="message", query=call.query, m=shown, **await head_of(call, group))


@page("/ui/queues/{queue}/messages/{id}/body", query=InGroup)
async def body(call: Call) -> StreamResponse:
    """The body of a message, byte for byte, as a file."""
    group = await needed_group(call, "its messages have no pages")
    found = await call.scan(lambda _: find(group, call.path["id"]))
    name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in call.path["id"])
    headers = [*SAFE, ("content-disposition", f'attachment; filename="{name}.bin"')]
    return StreamResponse(aiter(found.chunks()), RAW, headers=headers, length=found.size)


def _shown(_scan: Scan, call: Call, group: ServedGroup) -> MessageShown:
    whole = looked_up(look_up, group, call.path["id"])
    found: Listed[Any] = whole.message
    steps = whole.history
    own = note_of(found).id if isinstance(found, DeadLetter) else found.id
    traced = []
    with suppress(HoldfastError):
        traced = [step for step in group.port.engine.trace(own) if is_shown(call, step)]
    attempts = attempts_of(steps)
    base = base_of(call)
    query: MessageQuery = call.query
    return MessageShown(
        row=_row(found, attempts),
        expires_ms=record_of(found).expires_at_ms,
        headers=[(name, plain(value)) for name, value in found.headers.pairs],
        payload=payload(record_of(found).value, query.view),
        life=life_of(traced or steps),
        attempts=attempts,
        lives=lives_of(steps, found.id),
        here=(found.id, own),
        error=without_own_frames(found.error),
        traced=bool(traced),
        state=_state(found),
        original=found.original_id if found.original_id != found.id else "",
        curl=curl(found, base),
        python=python(found, base),
    )


def _row(found: Listed[Any], attempts: Sequence[AttemptRow]) -> MessageRow:
    """The head of the page. The attempt that is running counts, unlike in lists."""
    row = row_of(found)
    running = [each.number for each in attempts if each.message == found.id and not each.ended_ns]
    return msgspec.structs.replace(row, attempts=max([row.attempts, *running]))


def _state(found: Listed[Any]) -> str:
    """The state document of a message, formatted; empty if there is none."""
    if isinstance(found, DeadLetter):
        content = note_of(found).state
    else:
        document = home_of(found).group.documents.get(found.offset)
        content = None if document is None else document.content
    return "" if content is None else msgspec.json.format(content, indent=2).decode("utf-8", "replace")


# The search page: one box over all queues and phases.


class SearchPageQuery(Wire, kw_only=True):
    """What was typed, and where to go on."""

    q: Annotated[str, Meta(max_length=1_000)] = ""
    after: Annotated[str, Meta(max_length=1_000)] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50


class HitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was found. `group` is empty for the default group, as in addresses of pages."""

    queue: str
    group: str
    id: str
    place: str
    phase: str
    key: str
    preview: str
    timestamp_ns: int
    attempts: int
    error: str


class SearchFacts(msgspec.Struct, kw_only=True):
    """A page of a search, whose messages are rows; or what is wrong with the search."""

    found: SearchPage | None = None
    rows: list[HitRow] = []
    problem: str = ""


def show_search(call: Call, facts: SearchFacts) -> Response:
    """The page of a search."""
    return render(
        call,
        "search.html",
        status=400 if facts.problem else 200,
        searched_text=call.query.q,
        query=call.query,
        found=facts.found,
        rows=facts.rows,
        problem=facts.problem,
    )


@spanning_page("/ui/search", SearchFacts, show_search, scope="any", query=SearchPageQuery)
async def search_page(call: Call) -> SearchFacts:
    """Messages in all queues that match what was typed, and what was searched for them."""
    query: SearchPageQuery = call.query
    if not query.q.strip():
        return SearchFacts()
    try:
        found = await search(call, query.q, query.limit, query.after)
        rows = await call.scan(lambda _scan: list(map(_hit_row, found.messages)))
    except InvalidRequest as error:
        return SearchFacts(problem=str(error))
    found.messages = []
    return SearchFacts(found=found, rows=rows)


def _hit_row(hit: SearchHit) -> HitRow:
    found = hit.message
    row = row_of(found)
    return HitRow(
        queue=found.topic,
        group="" if hit.group == "default" else hit.group,
        id=found.id,
        place=row.place,
        phase=found.phase,
        key=row.key,
        preview=row.preview,
        timestamp_ns=found.timestamp_ns,
        attempts=row.attempts,
        error=found.error,
    )
