"""`holdfast get`, and `ack`, `nack`, `reject`, `defer`, `extend`, which settle what it took, by receipt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Any, Final, TypeAlias

import msgspec

import holdfast
from holdfast.api import port_of
from holdfast.api.drafts import moment_at, parse_duration, to_datetime
from holdfast.api.sync.message import taken_of
from holdfast.cli import output
from holdfast.cli.look.messages import base64_text, body_text, bytes_of, document, header_text, lease_end, text_value
from holdfast.cli.opening import OpeningTurns, QueueAt, Views, chosen_topic, opened_broker, view
from holdfast.cli.parsing import argument, option
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import Empty, Forbidden, HoldfastError, InvalidRequest
from holdfast.later import shlex
from holdfast.model import Pause, count_of

# A message as shell variables, which `holdfast get --export` prints for `eval`.


# Each is set or unset every time, so that no value of the previous message is left over.
NAMES: Final = tuple(
    f"HOLDFAST_{name}"
    for name in (
        "RECEIPT",
        "ID",
        "ATTEMPT",
        "KEY",
        "KEY_BASE64",
        "CORRELATION_ID",
        "PRIORITY",
        "TIMESTAMP",
        "HEADERS",
        "BODY",
        "BODY_FILE",
        "PAYLOAD_PATH",
        "STATE",
        "QUEUE",
        "TOPIC",
        "GROUP",
    )
)

# Keep large bodies out of the environment: if it is too large, no program can be started.
_MOST_BODY_BYTES: Final = 32 * 1024


def fits_variable(message: holdfast.Message[bytes]) -> bool:
    """Whether the body can be the value of a variable."""
    if message.size > _MOST_BODY_BYTES:
        return False
    text = text_value(message.raw)
    return text is not None and "\0" not in text


def variables(
    folder: str, group: str, message: holdfast.Message[bytes], body_file: str | None, state: Any = None
) -> str:
    """Return the lines for a POSIX shell to evaluate."""
    key = bytes_of(message.key)
    key_text = None if key is None else text_value(key)
    headers = {name: _readable(value) for name, value in reversed(message.headers.pairs)}
    body = text_value(message.raw) if message.size <= _MOST_BODY_BYTES and body_file is None else None
    values = {
        "HOLDFAST_QUEUE": folder if is_address(folder) else os.path.abspath(folder),
        "HOLDFAST_TOPIC": message.topic,
        "HOLDFAST_GROUP": group,
        "HOLDFAST_RECEIPT": message.receipt,
        "HOLDFAST_ID": message.id,
        "HOLDFAST_ATTEMPT": str(message.attempt),
        "HOLDFAST_KEY": key_text,
        "HOLDFAST_KEY_BASE64": None if key is None or key_text is not None else base64_text(key),
        "HOLDFAST_CORRELATION_ID": message.correlation_id,
        "HOLDFAST_PRIORITY": str(message.priority),
        "HOLDFAST_TIMESTAMP": message.timestamp.isoformat(),
        "HOLDFAST_HEADERS": output.json_text(headers),
        "HOLDFAST_BODY": body,
        "HOLDFAST_BODY_FILE": body_file,
        "HOLDFAST_PAYLOAD_PATH": body_file,
        "HOLDFAST_STATE": None if state is None else output.json_text(state),
    }
    return "".join(_line(name, values[name]) for name in NAMES)


def nothing_exported(code: int, names: Sequence[str] = NAMES) -> str:
    """Return the lines to print instead, so that `eval` ends with this exit code and no variable is left over."""
    return f"unset {' '.join(names)}\n(exit {code})\n"


def _line(name: str, value: str | None) -> str:
    usable = value is not None and "\0" not in value
    return f"export {name}={shlex.quote(value or '')}\n" if usable else f"unset {name}\n"


def _readable(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


_EVER_S: Final = 10 * 365 * 86_400.0

_Taken = Callable[[holdfast.Group[bytes], "list[holdfast.Message[bytes]]"], None]


def get_command(
    at: QueueAt,
    count: Annotated[int, option("--count", "At most this many messages.", least=1, most=100_000)] = 1,
    timeout: Annotated[str, option("--timeout TIME", "How long to wait for a message.")] = "0",
    block: Annotated[bool, option("--block", "Wait for a message as long as it takes.")] = False,
    lease: Annotated[
        str | None, option("--lease TIME", "How long the messages are yours; the queue's setting by default.")
    ] = None,
    holder: Annotated[str | None, option("--holder", "--owner NAME", "Who is working on them.")] = None,
    ack: Annotated[bool, option("--ack", "Ack the messages as soon as they are printed.")] = False,
    raw: Annotated[bool, option("--raw", "Print only the body, byte for byte.")] = False,
    out: Annotated[str | None, option("--out", "--payload-out FILE", "Write the body to a file.")] = None,
    stateful: Annotated[bool, option("--stateful", "Also print the message's state document.")] = False,
    export: Annotated[bool, option("--export", "Print shell variables, for `eval`.")] = False,
) -> int:
    """Take the next message, or several. Ack it with its receipt when you are done; otherwise it is redelivered.

    Exit code: 3 if no message is ready.

    Examples:
        holdfast get jobs
        holdfast get jobs --count 10 --timeout 30s --json
        eval "$(holdfast get jobs --export)" && process "$HOLDFAST_BODY" && holdfast ack
    """
    _check_call(count, out, raw=raw, export=export, as_json=at.as_json)
    lease_s = None if lease is None else parse_duration(lease, "--lease")

    def taken(queue: holdfast.Group[bytes], messages: list[holdfast.Message[bytes]]) -> None:
        with given_back_unless_shown(messages), _body_file(messages[0], out, export=export) as path:
            showing = _Showing(at.folder, queue, acked=ack, out=path, stateful=stateful)
            showing.show(messages, raw=raw, export=export, as_json=at.as_json)
            sys.stdout.flush()
        if ack:
            queue.ack_many(messages)

    try:
        options = {"lease": lease_s, "holder": default_holder() if holder is None else holder, "detached": True}
        timeout_s = _patience_s(timeout, block=block)
        _take(at._replace(topic=chosen_topic(at.folder, at.topic)), taken, count, timeout_s, options)
    except Empty as empty:
        sys.stdout.write(nothing_exported(output.NOTHING_THERE) if export else "")
        output.note(f"{output.safe(str(empty))}")
        return output.NOTHING_THERE
    except HoldfastError:
        sys.stdout.write(nothing_exported(output.NOT_DONE) if export else "")
        raise
    return output.OK


def _check_call(count: int, out: str | None, *, raw: bool, export: bool, as_json: bool) -> None:
    if sum((raw, export, as_json)) > 1:
        raise InvalidRequest("--raw, --export and --json all say what is printed; give one of them")
    if count > 1 and (raw or export or out):
        raise InvalidRequest("--raw, --export and --out are for one message; leave out --count, or use --json")


def _patience_s(timeout: str, *, block: bool) -> float:
    timeout_s = parse_duration(timeout, "--timeout")
    if block and timeout_s:
        raise InvalidRequest("--block waits without limit, --timeout does not; give one of them")
    return _EVER_S if block else timeout_s


@contextmanager
def given_back_unless_shown(messages: Iterable[holdfast.Message[bytes]]) -> Iterator[None]:
    """Return the messages to the queue if showing them fails: nobody has seen them."""
    try:
        yield
    except BaseException:
        for message in messages:
            message.defer()
        raise


@contextmanager
def _body_file(message: holdfast.Message[bytes], out: str | None, *, export: bool) -> Iterator[str | None]:
    """Yield the file for the body: the given one, or a new one if the environment cannot hold the body.

    The consumer of the message removes a new file; it is removed here if its path was never printed.
    """
    path, made = out, False
    if path is None and export and not fits_variable(message):
        import tempfile  # for large bodies only

        number, path = tempfile.mkstemp(prefix="holdfast-")
        os.close(number)
        made = True
    try:
        if path is not None:
            with open(path, "wb") as file:
                file.writelines(message.chunks())
        yield path
    except BaseException:
        if made and path is not None:
            os.unlink(path)
        raise


def default_holder() -> str:
    """Return the shell that called this command, since the command itself ends at once."""
    note = real_world().ids.process_note()
    return f"{note['host']}:{os.getppid()}"


def _take(at: QueueAt, taken: _Taken, count: int, timeout_s: float, options: dict[str, Any]) -> None:
    """Pass on what is ready, or what arrives in time."""
    topic, paused = at.topic or "", None
    with closing(OpeningTurns(at.folder, topic, timeout_s, at.wait).each()) as turns:
        for broker, wait_s in turns:
            group = view(broker, topic, at.group, make=True)
            found = group.receive_many(count, timeout=wait_s, **options)
            if found:
                taken(group, found)
                return
            paused = _pause_of(group)
    if paused is not None:
        from holdfast.cli.operate.queue import pause_text

        raise Empty(f"{at.folder} is paused {pause_text(paused)}; `holdfast resume` ends it")
    ready = f"became ready within {timeout_s:g} s" if timeout_s else "is ready"
    raise Empty(f"no message {ready} in {at.folder}")


def _pause_of(group: holdfast.Group[bytes]) -> Pause | None:
    """Return the pause of a group, if it is paused and the caller may know."""
    with suppress(Forbidden):
        return group.stats().paused
    return None


class _Showing:
    """Prints messages that were taken, for people, scripts or the shell."""

    def __init__(
        self, folder: str, queue: holdfast.Group[bytes], *, acked: bool, out: str | None, stateful: bool
    ) -> None:
        self._folder = folder
        self._queue = queue
        self._acked = acked
        self._out = out
        self._stateful = stateful

    def show(self, messages: Sequence[holdfast.Message[bytes]], *, raw: bool, export: bool, as_json: bool) -> None:
        if as_json:
            for message in messages:
                more: dict[str, Any] = output.moment("lease_until", lease_end(self._queue, message))
                more |= {"state": message.state.load()} if self._stateful else {}
                output.print_json(document(message, **more, acked=self._acked))
        elif export:
            state = messages[0].state.load() if self._stateful else None
            output.write_bytes(variables(self._folder, self._queue.group, messages[0], self._out, state).encode())
        elif raw:
            if self._out is None:
                for chunk in messages[0].chunks():
                    output.write_bytes(chunk)
            self._show_receipt(messages[0])
        else:
            console = output.stdout()
            for number, message in enumerate(messages):
                if number:
                    console.print()
                self._show_facts(console, message)

    def _show_receipt(self, message: holdfast.Message[bytes]) -> None:
        """Print the receipt to stderr, next to a raw body; scripts use --export."""
        if not self._acked:
            sys.stdout.flush()
            output.note(f"receipt {output.safe(message.receipt)}")

    def _show_facts(self, console: output.Console, message: holdfast.Message[bytes]) -> None:
        facts = output.facts_table()
        facts.add_row("id", output.safe(message.id))
        if self._acked:
            facts.add_row("acked", "yes")
        else:
            facts.add_row("receipt", output.safe(message.receipt))
            facts.add_row("yours until", f"{output.seconds_text(lease_end(self._queue, message))} UTC")
        most = self._queue.settings.max_attempts
        facts.add_row("attempt", f"{message.attempt} of {most}" if most else str(message.attempt))
        if message.key is not None:
            facts.add_row("key", output.preview(bytes_of(message.key) or b"", 200))
        if message.headers:
            facts.add_row("headers", header_text(message))
        if message.priority:
            facts.add_row("priority", str(message.priority))
        if message.correlation_id != message.id:
            facts.add_row("correlation", output.safe(message.correlation_id))
        facts.add_row("published", f"{output.seconds_text(message.timestamp)} UTC")
        if self._stateful:
            facts.add_row("state", output.safe(output.json_text(message.state.load())))
        if self._out is not None:
            facts.add_row("body", f"{count_of(message.size, 'byte')} in {output.safe(self._out)}")
        else:
            facts.add_row("body", count_of(message.size, "byte"))
        console.print(facts)
        if self._out is None:
            console.print(body_text(message.raw))


RECEIPT = "HOLDFAST_RECEIPT"
GROUP = "HOLDFAST_GROUP"

Receipts: TypeAlias = Annotated[list[str] | None, argument("RECEIPT", f"From `get`; by default ${RECEIPT}.")]
StateOption: TypeAlias = Annotated[str | None, option("--state JSON", "Save this document with the messages first.")]
_Message: TypeAlias = holdfast.Message[bytes]


def ack_command(
    at: QueueAt,
    receipts: Receipts = None,
) -> int:
    """Confirm that messages are done. They are never delivered again.

    Examples:
        holdfast ack jobs jobs-0-17@1
        holdfast ack                    # after eval "$(holdfast get jobs --export)"
    """
    return _settled(at, receipts, "acked", lambda message: message.ack())


def nack_command(
    at: QueueAt,
    receipts: Receipts = None,
    delay: Annotated[str | None, option("--delay TIME", "When to retry; the queue's setting by default.")] = None,
    error: Annotated[str | None, option("--error TEXT", "The error.")] = None,
    state: StateOption = None,
) -> int:
    """Report that messages failed, so that they are retried. After the last attempt they become dead letters.

    Examples:
        holdfast nack jobs jobs-0-17@1 --error 'connection refused'
        holdfast nack jobs jobs-0-17@1 --delay 5m
    """
    delay_s = None if delay is None else parse_duration(delay, "--delay")

    def nack(message: _Message) -> None:
        message.nack(delay=delay_s, error=error)

    return _settled(at, receipts, "nacked", _with_state(state, nack))


def reject_command(
    at: QueueAt,
    receipts: Receipts = None,
    reason: Annotated[str, option("--reason TEXT", "The reason.")] = "",
) -> int:
    """Send messages straight to the dead letters. Use it if retrying cannot help.

    Examples:
        holdfast reject jobs jobs-0-17@1 --reason 'not valid JSON'
    """
    return _settled(at, receipts, "rejected", lambda message: message.reject(reason))


def defer_command(
    at: QueueAt,
    receipts: Receipts = None,
    delay: Annotated[str, option("--delay TIME", "When they are ready again.")] = "0",
    state: StateOption = None,
) -> int:
    """Return messages for later, without counting an attempt.

    Examples:
        holdfast defer jobs jobs-0-17@1 --delay 1h
    """
    delay_s = parse_duration(delay, "--delay")

    def defer(message: _Message) -> None:
        message.defer(delay=delay_s)

    return _settled(at, receipts, "deferred", _with_state(state, defer))


def extend_command(
    at: QueueAt,
    receipts: Receipts = None,
    lease: Annotated[
        str | None, option("--lease TIME", "The new lease, from now; the queue's setting by default.")
    ] = None,
    state: StateOption = None,
) -> int:
    """Extend the lease of messages. Use it if the work takes longer than expected.

    Examples:
        holdfast extend jobs jobs-0-17@1 --lease 10m
    """
    lease_s = None if lease is None else parse_duration(lease, "--lease")
    return _settled(at, receipts, "extended", _with_state(state, lambda message: message.extend(lease_s)))


def _with_state(state: str | None, settle: Callable[[_Message], None]) -> Callable[[_Message], None]:
    """Return a function that saves the document before it settles; `null` removes the document."""
    if state is None:
        return settle
    try:
        value = msgspec.json.decode(state.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"--state is not JSON: {error}. A text needs its quotes: '\"a text\"'") from None

    def keep(message: _Message) -> None:
        message.state.load()
        message.state.save(value)
        settle(message)

    return keep


def _settled(at: QueueAt, receipts: list[str] | None, verb: str, settle: Callable[[_Message], None]) -> int:
    """Settle messages one by one: an invalid receipt does not stop the others."""
    group = at.group or (None if receipts else os.environ.get(GROUP) or None)
    code = output.OK
    with opened_broker(at.folder, wait=at.wait) as broker:
        views = Views(broker, at._replace(group=group))
        for receipt in receipts or [_exported()]:
            try:
                view = views.of_receipt(receipt)
                message = view.resume(receipt)
                settle(message)
            except HoldfastError as error:
                output.print_error(error.code, str(error), as_json=at.as_json)
                code = output.NOT_DONE
                continue
            facts = _after(view, message, verb)
            if at.as_json:
                output.print_json(facts)
            else:
                output.say(_sentence(facts))
    return code


def _exported() -> str:
    receipt = os.environ.get(RECEIPT, "")
    if not receipt:
        raise InvalidRequest(f"no receipt: give it after the place, or set ${RECEIPT} with `holdfast get --export`")
    return receipt


def _after(group: holdfast.Group[bytes], message: _Message, verb: str) -> dict[str, Any]:
    """Return the state of the message after it was settled."""
    phase, until_ms = {"acked": ("done", 0), "rejected": ("dead", 0)}.get(verb) or port_of(group).phase(
        taken_of(message)
    )
    if phase == "done" and verb != "acked":
        phase = "dead"  # that was the last attempt
    facts = {"done": verb, "id": message.id, "receipt": message.receipt, "phase": phase}
    return {**facts, **output.moment("until", moment_at(until_ms))}


def _sentence(facts: dict[str, Any]) -> str:
    text = f"{facts['done']} {output.safe(facts['id'])}"
    if facts["until_ms"] is not None:
        when = output.seconds_text(to_datetime(facts["until_ms"] * 1_000_000))
        return f"{text}: {'yours until' if facts['phase'] == 'leased' else 'ready again at'} {when} UTC"
    rest = {"dead": ": it is now a dead letter", "ready": ": it is ready again"}
    return f"{text}{rest.get(facts['phase'], '')}"
