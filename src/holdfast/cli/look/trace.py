"""`holdfast trace`: the history of a message, step by step. Reads without a lock, and takes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from holdfast.api.drafts import instant_ns, parse_instant, to_datetime
from holdfast.broker.folder.layout import partition_folder, topic_of_id
from holdfast.broker.metrics import Times
from holdfast.broker.tracing import TraceStep, log
from holdfast.cli import output
from holdfast.cli.opening import AsJson, QueueFolder, opened_broker, topics_of
from holdfast.cli.parsing import Section, argument, option
from holdfast.client.opening import is_address
from holdfast.delivery.where import headline
from holdfast.env import real_world
from holdfast.errors import InvalidRequest, NotAQueue
from holdfast.model import count_of
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join

# The life of a message as a drawing: one line for each step, with a bar for each lease and each wait.
#
#   0 ms  ●                                         published
#  12 ms  ├───────┤                                 leased     billing, attempt 1, by host:77
# 512 ms          ✗┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄                 nacked     billing, attempt 1, retried at +1.5 s
#                                                              ValueError: no route
#  1.5 s                           ○                released   billing
#  1.6 s                            ├────────┤      leased     billing, attempt 2, by host:77
#  2.1 s                                     ✓      acked      billing, attempt 2


_MARKS: Final = {
    log.PUBLISHED: "●",
    log.DELAYED: "◌",
    log.RELEASED: "○",
    log.EXTENDED: "┼",
    log.ACKED: "✓",
    log.NACKED: "✗",
    log.RETURNED: "↩",
    log.BURIED: "†",
    log.REDRIVEN: "↻",
    log.EXPIRED: "∅",
    log.CANCELLED: "⊘",
    log.SKIPPED: "»",
    log.LOST: "!",
    log.REPLAYED: "«",
    log.OMITTED: "⋮",
}
_STYLES: Final = {log.ACKED: "green", log.NACKED: "red", log.RETURNED: "yellow", log.BURIED: "red", log.LOST: "red"}
# Steps that end a lease, and thereby its bar.
_ENDS: Final = frozenset({log.ACKED, log.NACKED, log.RETURNED, log.BURIED})

_TIME_CELLS: Final = 9
_NAME_CELLS: Final = max(map(len, log.STEPS)) + 2
_LEAST_BAR: Final = 10
_MOST_BAR: Final = 48
_LEAST_TEXT: Final = 40
_MOST_ERROR_CELLS: Final = 200
_UNITS: Final = (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0))


def life_line(steps: Sequence[TraceStep], *, width: int, now_ns: int) -> Iterator[output.Text]:
    """Yield the lines of the drawing. The steps are in order of time; a running lease is drawn up to `now_ns`."""
    if not steps:
        return
    drawing = _Drawing(steps, width, now_ns)
    of_many = len({step.id for step in steps}) > 1
    for i, step in enumerate(steps):
        if of_many and (i == 0 or steps[i - 1].id != step.id):
            yield output.Text(output.safe(step.id), "bold")
        yield from drawing.lines(i, step)


def time_text(ns: int) -> str:
    """Format a duration briefly."""
    seconds = ns / 1e9
    if abs(seconds) < 1:
        return f"{ns / 1e6:.3g} ms" if ns else "0 ms"
    for unit, size in _UNITS:
        if abs(seconds) >= size * (1 if unit == "s" else 2):
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


class _Drawing:
    def __init__(self, steps: Sequence[TraceStep], width: int, now_ns: int) -> None:
        self._steps = steps
        self._begin_ns = steps[0].at_ns
        self._now_ns = max(now_ns, steps[-1].at_ns)
        last_ns = max(step.at_ns for step in steps)
        if self._runs_still():
            last_ns = self._now_ns
        self._whole_ns = max(last_ns - self._begin_ns, 1)
        free = width - _TIME_CELLS - _NAME_CELLS - _LEAST_TEXT - 6
        self._cells = min(max(free, _LEAST_BAR), _MOST_BAR)
        self._indent = _TIME_CELLS + 2 + self._cells + 2 + _NAME_CELLS

    def lines(self, i: int, step: TraceStep) -> Iterator[output.Text]:
        time = time_text(step.at_ns - self._begin_ns)
        line = output.Text(f"{time:>{_TIME_CELLS}}  ")
        line.append(self._bar(i, step), _STYLES.get(step.step, ""))
        line.append("  ")
        line.append(f"{output.safe(step.step):{_NAME_CELLS}}", _STYLES.get(step.step, ""))
        line.append(output.safe(", ".join(self._facts(step))))
        yield line.stripped()
        error = headline(step.error.strip())
        if error:
            yield output.Text(" " * self._indent + output.cut(output.safe(error), _MOST_ERROR_CELLS), "red")

    def _bar(self, i: int, step: TraceStep) -> str:
        row = [" "] * self._cells
        at = self._cell(step.at_ns)
        if step.step == log.LEASED:
            end_ns = self._lease_end_ns(i, step)
            end = self._cell(self._now_ns if end_ns is None else end_ns)
            for cell in range(at, end + 1):
                row[cell] = "─"
            row[at] = "├"
            if end_ns is None:
                row[end] = "▶"
            elif end > at:
                row[end] = "┤"
            else:
                row[at] = "│"
        else:
            if step.due_ms:
                for cell in range(at + 1, self._cell(step.due_ms * 1_000_000) + 1):
                    row[cell] = "┄"
            row[at] = _MARKS.get(step.step, "?")
        return "".join(row)

    def _cell(self, at_ns: int) -> int:
        cell = (at_ns - self._begin_ns) * (self._cells - 1) // self._whole_ns
        return min(max(cell, 0), self._cells - 1)

    def _lease_end_ns(self, i: int, step: TraceStep) -> int | None:
        """Return when the lease that began here ended; None if no step says so."""
        for later in self._steps[i + 1 :]:
            if later.step in _ENDS and later.span_id == step.span_id and later.id == step.id:
                return later.at_ns
        return None

    def _runs_still(self) -> bool:
        return any(
            step.step == log.LEASED and self._lease_end_ns(i, step) is None and self._is_last_lease(i, step)
            for i, step in enumerate(self._steps)
        )

    def _is_last_lease(self, i: int, step: TraceStep) -> bool:
        return not any(later.id == step.id and later.group == step.group for later in self._steps[i + 1 :])

    def _facts(self, step: TraceStep) -> Iterator[str]:
        if step.group:
            yield step.group
        if step.attempt:
            yield f"attempt {step.attempt}"
        if step.step == log.LEASED and step.holder:
            yield f"by {step.holder}"
        if step.why:
            yield step.why
        if step.until_ms:
            yield f"until {self._after(step.until_ms)}"
        if step.due_ms:
            yield f"{'due' if step.step == log.DELAYED else 'retried'} at {self._after(step.due_ms)}"
        if step.related:
            yield f"{'as' if step.step == log.REDRIVEN else 'it was'} {step.related}"

    def _after(self, at_ms: int) -> str:
        return "+" + time_text(max(at_ms * 1_000_000 - self._begin_ns, 0))


app = Section("What happened to messages, step by step.")

_SHORT_ID: Final = 12
# The list tracks this many messages at a time; the ones with the oldest last step are dropped first.
_MOST_LIVES: Final = 100_000
_MOST_STEPS: Final = 10_000

_Topic: TypeAlias = Annotated[str | None, option("--topic", "Only this topic.")]
_Group: TypeAlias = Annotated[str | None, option("--group", "Only this group.")]
_Since: TypeAlias = Annotated[
    str | None, option("--since TIME", "Only from this time on, such as -1h or 2026-11-16T10:00:00Z.")
]
_Until: TypeAlias = Annotated[str | None, option("--until TIME", "Only up to this time.")]


@app.command("show")
def show_command(
    folder: QueueFolder,
    message_id: Annotated[str, argument("ID", "The id of a message, such as orders-0-42.")],
    as_json: AsJson = False,
) -> int:
    """Draw the life of one message. It begins when the message is published, and includes redrives.

    Examples:
        holdfast trace show ./data orders-0-42
    """
    if not _is_id(message_id) and _is_id(folder):  # the place used to come last
        message_id, folder = folder, message_id
    topic_of_id(message_id)  # raises for an invalid id
    if is_address(folder):
        with opened_broker(folder) as broker:
            steps = broker.trace(message_id)
    else:
        steps = log.trace(_log(folder), message_id)
    if not steps:
        raise InvalidRequest(
            f"there is no trace of {message_id} in {folder}: it was not sampled (see the setting trace_sample), it "
            "never existed, or its trace has been dropped"
        )
    if as_json:
        output.print_json({"id": message_id, "steps": [_document(step) for step in steps]})
        return output.OK
    console = output.stdout()
    console.print(_summary(message_id, steps))
    console.print()
    for line in life_line(steps, width=min(console.width, 200), now_ns=real_world().clock.now_ns()):
        console.print(line)
    return output.OK


def _is_id(text: str) -> bool:
    try:
        return bool(topic_of_id(text))
    except InvalidRequest:
        return False


@app.command("search")
def search_command(
    folder: QueueFolder,
    topic: _Topic = None,
    group: _Group = None,
    event: Annotated[str | None, option("--event", "Only this event, such as leased, nacked or buried.")] = None,
    holder: Annotated[str | None, option("--holder", "Only this holder.")] = None,
    error: Annotated[str | None, option("--error TEXT", "Only errors that contain this text.")] = None,
    since: _Since = None,
    until: _Until = None,
    limit: Annotated[int, option("--limit", "At most this many steps.", least=1, most=1_000_000)] = 100,
    last: Annotated[bool, option("--last", "The newest steps instead of the oldest.")] = False,
    as_json: AsJson = False,
) -> int:
    """Find steps by topic, group, event, holder, error and time, oldest first.

    Examples:
        holdfast trace search ./data --event nacked --since -1h
        holdfast trace search ./data --error 'connection refused' --last --limit 10
    """
    wanted = _search(topic, group, since, until, event=event, holder=holder, error=error)
    steps = _steps(folder, wanted, limit, last=last)
    if as_json:
        for step in steps:
            output.print_json(_document(step))
    elif not _show_steps(steps):
        output.note("no such step was traced")
    return output.OK


@app.command("ls")
def ls_command(
    folder: QueueFolder,
    topic: _Topic = None,
    since: _Since = None,
    limit: Annotated[int, option("--limit", "At most this many messages.", least=1, most=100_000)] = 20,
    as_json: AsJson = False,
) -> int:
    """List the messages that were traced most recently, newest last.

    Examples:
        holdfast trace ls ./data --topic orders
    """
    lives = _lives(_all_steps(folder, _search(topic, None, since, None)))
    chosen = lives[-limit:]
    if as_json:
        for life in chosen:
            output.print_json(life.document)
    elif not chosen:
        output.note("no message was traced")
    else:
        output.stdout().print(_lives_table(chosen))
    return output.OK


@app.command("stats")
def stats_command(
    folder: QueueFolder,
    topic: _Topic = None,
    group: _Group = None,
    since: _Since = None,
    until: _Until = None,
    as_json: AsJson = False,
) -> int:
    """Count the steps, and show how long messages waited and how long they were handled.

    Examples:
        holdfast trace stats ./data --since -1h
    """
    wanted = _search(topic, None, since, until)
    found = log.stats(step for step in _all_steps(folder, wanted) if group is None or step.group in ("", group))
    if as_json:
        output.print_json(msgspec.to_builtins(found, str_keys=True))
    else:
        output.stdout().print(_stats_table(found))
    return output.OK


def _steps(place: str, wanted: log.Search, limit: int, *, last: bool) -> Iterable[TraceStep]:
    if is_address(place):
        with opened_broker(place) as broker:
            return broker.search_traces(**_question(wanted), limit=limit, last=last)
    found = log.search(_log(place), wanted)
    return log.newest(found, limit) if last else islice(found, limit)


def _all_steps(place: str, wanted: log.Search) -> Iterator[TraceStep]:
    """Yield all matching steps; from a server, as many of the newest as one answer holds."""
    return iter(_steps(place, wanted, _MOST_STEPS, last=True)) if is_address(place) else log.search(_log(place), wanted)


def _question(wanted: log.Search) -> dict[str, Any]:
    """Return a search as the arguments that a broker takes."""
    ever, names = log.Search(), ("topic", "group", "event", "holder", "error")
    times = {"since": (wanted.since_ns, ever.since_ns), "until": (wanted.until_ns, ever.until_ns)}
    said = {name: to_datetime(ns) for name, (ns, unset) in times.items() if ns != unset}
    return {name: getattr(wanted, name) for name in names} | said


def _log(folder: str) -> LogReader:
    world = real_world()
    place = join(partition_folder(folder, log.TRACES), "log")
    if not is_log(world, place):
        topics_of(folder)  # raises if this is not a data folder
        raise NotAQueue(f"nothing was traced in {folder} yet: give a topic the setting trace_sample, from 0 to 1")
    return LogReader(place, world=world)


def _search(topic: str | None, group: str | None, since: str | None, until: str | None, **more: Any) -> log.Search:
    times: dict[str, Any] = {}
    now_ms = real_world().clock.now_ns() // 1_000_000
    if since is not None:
        times["since_ns"] = instant_ns(parse_instant(since, now_ms, "--since"), "--since")
    if until is not None:
        times["until_ns"] = instant_ns(parse_instant(until, now_ms, "--until"), "--until")
    return log.Search(topic=topic, group=group, **times, **more)


def _document(step: TraceStep) -> dict[str, Any]:
    """Return a step as a JSON document, with the fields that are set."""
    found: dict[str, Any] = msgspec.to_builtins(step)
    return {"time": output.iso_time(step.at_ns), **found}


def _summary(message_id: str, steps: list[TraceStep]) -> str:
    life = _TracedMessage(steps[0])
    for step in steps:
        life.add(step)
    attempts = f", taken {count_of(life.deliveries, 'time')}" if life.deliveries else ""
    begun = f"{output.short_time(steps[0].at_ns)} UTC, {life.last.step} after {time_text(life.ns)}{attempts}"
    return output.safe(f"{message_id}: {begun}; trace {steps[0].trace_id}")


def _show_steps(steps: Iterable[TraceStep]) -> bool:
    console, shown = output.stdout(), False
    for step in steps:
        facts = [step.group, step.holder, f"attempt {step.attempt}" if step.attempt else "", step.why]
        error = headline(step.error)
        text = ", ".join(fact for fact in facts if fact) + (f": {error}" if error else "")
        when = (output.iso_time(step.at_ns) or "-")[:23].replace("T", " ")
        console.print(output.safe(f"{when}  {step.id:24}  {step.step:9}  {text}".rstrip()))
        shown = True
    return shown


class _TracedMessage:
    """One message, as far as its steps tell."""

    def __init__(self, first: TraceStep) -> None:
        self.first = self.last = first
        self.deliveries = 0
        self.error = ""

    def add(self, step: TraceStep) -> None:
        self.last = step
        self.deliveries += step.step == log.LEASED
        if step.error or step.step == log.BURIED:
            self.error = headline(step.error) or step.why

    @property
    def ns(self) -> int:
        return self.last.at_ns - self.first.at_ns

    @property
    def document(self) -> dict[str, Any]:
        return {
            "id": self.first.id,
            "trace_id": self.first.trace_id,
            "begun": output.iso_time(self.first.at_ns),
            "last": self.last.step,
            "last_time": output.iso_time(self.last.at_ns),
            "deliveries": self.deliveries,
            "seconds": self.ns / 1e9,
            "error": self.error,
        }


def _lives(steps: Iterator[TraceStep]) -> list[_TracedMessage]:
    """Return what became of each message, the one with the newest step last."""
    lives: dict[str, _TracedMessage] = {}
    for step in steps:
        life = lives.pop(step.id, None)
        if life is None or step.step == log.PUBLISHED:
            life = _TracedMessage(step)
        life.add(step)
        lives[step.id] = life
        if len(lives) > _MOST_LIVES:
            del lives[next(iter(lives))]
    return list(lives.values())


def _lives_table(lives: list[_TracedMessage]) -> output.Table:
    shown = output.table("id", "begun (UTC)", "took", "taken", "last", "trace", "error", wide="error")
    for life in lives:
        shown.add_row(
            output.safe(life.first.id),
            output.short_time(life.first.at_ns),
            time_text(life.ns),
            str(life.deliveries),
            output.safe(life.last.step),
            output.safe(life.first.trace_id[:_SHORT_ID]),
            output.safe(life.error),
        )
    return shown


def _stats_table(found: log.TraceStats) -> output.Table:
    facts = output.facts_table()
    facts.add_row("messages", f"{found.messages:,}")
    for step, count in found.steps.items():
        facts.add_row(output.safe(step), f"{count:,}")
    facts.add_row("first delivery", _times(found.first_delivery))
    facts.add_row("handling", _times(found.handling))
    attempts = ", ".join(f"{count:,} after {attempts}" for attempts, count in found.attempts.items())
    facts.add_row("done or dead", attempts or "none")
    for error, count in found.errors:
        facts.add_row(count_of(count, "time"), output.safe(headline(error)))
    return facts


def _times(times: Times) -> str:
    if times.p50 is None or times.p95 is None or times.max is None:
        return "none"
    values = {"half": times.p50, "95 %": times.p95, "all": times.max}
    return ", ".join(f"{part} within {time_text(round(value * 1e9))}" for part, value in values.items())
