"""`holdfast peek`, `list`, `show`: look at messages without taking them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

import holdfast
from holdfast.cli.lookup import everything_about, show_everything
from holdfast.cli.messages import (
    ATTEMPTS,
    DUE,
    ERROR,
    HEADERS,
    HOLDER,
    ID,
    KEY,
    PRIORITY,
    REASON,
    SIZE,
    TIME,
    USUAL,
    AnyMessage,
    Column,
    Pages,
    document,
    lease_end,
    moment,
    seconds_text,
)
from holdfast.cli.opened import opened, topic_named
from holdfast.cli.options import WAIT, AsJson, Group, Limit, QueueFolder, Topic, Wait, Where
from holdfast.cli.output import OK, command, print_json_line, stderr, stdout
from holdfast.cli.text import safe
from holdfast.embedded.listed import PhaseName

DEAD: Final = (ID, TIME, KEY, ATTEMPTS, REASON, ERROR)


@command
def peek_command(
    folder: QueueFolder,
    count: Annotated[int, typer.Option("--count", min=1, max=100_000, help="So many messages.")] = 10,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Show the messages that would come next, in their order, without taking them."""
    with opened(folder, topic=topic, group=group, wait=wait) as queue:
        show_messages(queue.peek(count), USUAL, "no message is ready", as_json=as_json)
    return OK


@command
def list_command(
    folder: QueueFolder,
    phase: Annotated[PhaseName, typer.Argument(metavar="PHASE", help="ready, leased, delayed or dead.")] = "ready",
    where: Where = None,
    limit: Limit = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """List the messages that are ready, leased, delayed or dead."""
    with opened(folder, topic=topic, group=group, wait=wait) as queue:
        messages = queue.messages(phase, where=where, limit=limit)
        nothing = f"no message is {phase}" if where is None else f"no message that is {phase} is chosen by --where"
        columns: dict[str, tuple[Column, ...]] = {
            "ready": USUAL,
            "leased": (ID, _until(queue), HOLDER, KEY, ATTEMPTS, SIZE),
            "delayed": (ID, DUE, KEY, HEADERS, PRIORITY, ATTEMPTS, SIZE),
            "dead": DEAD,
        }
        show_messages(messages, columns[phase], nothing, as_json=as_json, leases_of=queue)
    return OK


@command
def show_command(
    folder: QueueFolder,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Of a message or a dead letter.")],
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Show everything about one message: where it stands, what it holds, what went wrong."""
    topic = topic_named(folder, topic, message_id)
    with opened(folder, topic=topic, group=group, wait=wait) as queue:
        show_everything(everything_about(queue, message_id), as_json=as_json)
    return OK


def show_messages(
    messages: Iterable[AnyMessage],
    columns: tuple[Column, ...],
    nothing: str,
    *,
    as_json: bool,
    leases_of: holdfast.Queue[Any] | None = None,
) -> None:
    """As a table, or one JSON object a line."""
    if as_json:
        for message in messages:
            print_json_line(document(message, **_lease(leases_of, message)))
    elif not Pages(stdout(), columns).show(messages):
        stderr().print(safe(nothing))


def _lease(queue: holdfast.Queue[Any] | None, message: AnyMessage) -> dict[str, Any]:
    if queue is None or getattr(message, "phase", "") != "leased":
        return {}
    until = lease_end(queue, message)
    return {} if until is None else moment("lease_until", until)


def _until(queue: holdfast.Queue[Any]) -> Column:
    return Column("until (UTC)", 19, lambda message: seconds_text(lease_end(queue, message)))
