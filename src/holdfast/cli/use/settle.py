"""`holdfast ack`, `nack`, `reject`, `defer`, `extend`: by receipt, or for the message of the last `get --export`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

import holdfast
from holdfast.api.ports import port_of
from holdfast.api.sync.message import taken_of
from holdfast.api.times import parse_duration, to_datetime
from holdfast.cli.look.messages import moment, seconds_text
from holdfast.cli.opening import Views, opened_broker
from holdfast.cli.options import WAIT, AsJson, Group, QueueFolder, Topic, Wait
from holdfast.cli.output import NOT_DONE, OK, command, print_error, print_json_line, stdout
from holdfast.cli.text import safe
from holdfast.errors import HoldfastError, InvalidRequest

RECEIPT = "HOLDFAST_RECEIPT"
GROUP = "HOLDFAST_GROUP"

Receipts: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="RECEIPT", help=f"From `get`; by default ${RECEIPT}.")
]
StateOption: TypeAlias = Annotated[
    str | None, typer.Option("--state", metavar="JSON", help="First keep this document with the messages.")
]
_Message: TypeAlias = holdfast.Message[bytes]


@command
def ack_command(
    folder: QueueFolder,
    receipts: Receipts = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Messages are handled: they never come back."""
    settling = _Settling(folder, topic, group, wait, as_json=as_json)
    return settling.run(receipts, "acked", lambda message: message.ack())


@command
def nack_command(
    folder: QueueFolder,
    receipts: Receipts = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="Again after this time; by default the queue's.")
    ] = None,
    error: Annotated[str | None, typer.Option("--error", metavar="TEXT", help="What went wrong.")] = None,
    state: StateOption = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Messages failed: they come back after a while, or go to the dead letters after the last attempt."""
    delay_s = None if delay is None else parse_duration(delay, "--delay")

    def nack(message: _Message) -> None:
        message.nack(delay=delay_s, error=error)

    settling = _Settling(folder, topic, group, wait, as_json=as_json)
    return settling.run(receipts, "nacked", _with_state(state, nack))


@command
def reject_command(
    folder: QueueFolder,
    receipts: Receipts = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.")] = "",
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Messages can never be handled: straight to the dead letters."""
    settling = _Settling(folder, topic, group, wait, as_json=as_json)
    return settling.run(receipts, "rejected", lambda message: message.reject(reason))


@command
def defer_command(
    folder: QueueFolder,
    receipts: Receipts = None,
    delay: Annotated[str, typer.Option("--delay", metavar="TIME", help="Again after this time.")] = "0",
    state: StateOption = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Not now: messages come back, and this does not count as an attempt."""
    delay_s = parse_duration(delay, "--delay")

    def defer(message: _Message) -> None:
        message.defer(delay=delay_s)

    settling = _Settling(folder, topic, group, wait, as_json=as_json)
    return settling.run(receipts, "deferred", _with_state(state, defer))


@command
def extend_command(
    folder: QueueFolder,
    receipts: Receipts = None,
    lease: Annotated[
        str | None, typer.Option("--lease", metavar="TIME", help="So long from now; by default the queue's.")
    ] = None,
    state: StateOption = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """More time for messages in hand."""
    lease_s = None if lease is None else parse_duration(lease, "--lease")
    settling = _Settling(folder, topic, group, wait, as_json=as_json)
    return settling.run(receipts, "extended", _with_state(state, lambda message: message.extend(lease_s)))


def _with_state(state: str | None, settle: Callable[[_Message], None]) -> Callable[[_Message], None]:
    """The same, after the document was kept; `null` takes it away."""
    if state is None:
        return settle
    try:
        value = msgspec.json.decode(state.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"--state is no JSON: {error}. A text needs its quotes: '\"a text\"'") from None

    def keep(message: _Message) -> None:
        message.state.load()
        message.state.save(value)
        settle(message)

    return keep


class _Settling:
    """What became of messages, each receipt for itself: one that is no longer good does not stop the others."""

    def __init__(self, folder: str, topic: str | None, group: str | None, wait: str, *, as_json: bool) -> None:
        self._folder = folder
        self._topic = topic
        self._group = group
        self._wait = wait
        self._as_json = as_json

    def run(self, receipts: list[str] | None, verb: str, settle: Callable[[_Message], None]) -> int:
        group = self._group or (None if receipts else os.environ.get(GROUP) or None)
        code = OK
        with opened_broker(self._folder, wait=self._wait) as broker:
            views = Views(broker, self._folder, self._topic, group)
            for receipt in receipts or [_exported()]:
                try:
                    queue = views.of_receipt(receipt)
                    message = queue.resume(receipt)
                    settle(message)
                except HoldfastError as error:
                    print_error(error.code, str(error), as_json=self._as_json)
                    code = NOT_DONE
                    continue
                self._show(_after(queue, message, verb))
        return code

    def _show(self, facts: dict[str, Any]) -> None:
        if self._as_json:
            print_json_line(facts)
        else:
            stdout().print(_sentence(facts), soft_wrap=True)


def _exported() -> str:
    receipt = os.environ.get(RECEIPT, "")
    if not receipt:
        raise InvalidRequest(f"no receipt: give it behind the folder, or set ${RECEIPT} with `holdfast get --export`")
    return receipt


def _after(group: holdfast.Group[bytes], message: _Message, verb: str) -> dict[str, Any]:
    """Where the message stands now."""
    phase, until_ms = {"acked": ("done", 0), "rejected": ("dead", 0)}.get(verb) or port_of(group).phase(
        taken_of(message)
    )
    if phase == "done" and verb != "acked":
        phase = "dead"  # that was the last attempt
    until = to_datetime(until_ms * 1_000_000) if until_ms else None
    return {"done": verb, "id": message.id, "receipt": message.receipt, "phase": phase, **moment("until", until)}


def _sentence(facts: dict[str, Any]) -> str:
    text = f"{facts['done']} {safe(facts['id'])}"
    if facts["until_ms"] is not None:
        when = seconds_text(to_datetime(facts["until_ms"] * 1_000_000))
        return f"{text}: {'yours until' if facts['phase'] == 'leased' else 'ready again at'} {when} UTC"
    rest = {"dead": ": it is with the dead letters now", "ready": ": it is ready again"}
    return f"{text}{rest.get(facts['phase'], '')}"
