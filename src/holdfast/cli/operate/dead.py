"""`holdfast dead`: look at the dead letters of a queue, put them back, drop them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Final, TypeAlias

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import holdfast
from holdfast.api.listing import DeadGroup
from holdfast.api.sync.group import DeadLetters
from holdfast.broker.folder.layout import DEFAULT_GROUP, check_name
from holdfast.cli.look.messages import (
    DEAD,
    dead_id,
    everything_about,
    everything_about_letter,
    moment,
    seconds_text,
    show_everything,
    show_messages,
)
from holdfast.cli.opening import chosen_topic, opened, topic_named
from holdfast.cli.options import WAIT, AsJson, DryRun, Group, Limit, QueueFolder, Topic, Wait, Where, Yes
from holdfast.cli.output import NOT_DONE, OK, Section, command, confirmed, print_json, print_json_line, stderr, stdout
from holdfast.cli.text import safe
from holdfast.env import real_world
from holdfast.errors import Busy, InvalidRequest
from holdfast.local.dead_letters import LettersBeside
from holdfast.storage.checks.finding import count_of

app = Section("Dead letters: look at them, put them back, drop them.")

_AT_ONCE: Final = 500
_COUNT_CELLS: Final = 7

_Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Of dead letters; all of them by default.")
]
_Do: TypeAlias = Callable[[Sequence[str]], int]


@app.command("ls")
@command
def ls_command(
    folder: QueueFolder,
    by_error: Annotated[bool, typer.Option("--by-error", help="Count them by reason and kind of error.")] = False,
    where: Where = None,
    limit: Limit = None,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """List the dead letters, oldest first."""
    with _looking(folder, topic, group, wait) as (_, letters):
        if by_error:
            _show_groups(letters.groups(where=where)[:limit], as_json=as_json)
        else:
            show_messages(letters.list(where=where, limit=limit), DEAD, "no dead letters", as_json=as_json)
    return OK


@app.command("show")
@command
def show_command(
    folder: QueueFolder,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="Of a dead letter, or the message's own.")],
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Show everything about one dead letter: every error, and where it came from."""
    topic = topic_named(folder, topic, letter_id)
    with _looking(folder, topic, group, wait) as (queue, letters):
        if queue is None:
            found = everything_about_letter(letters.show(letter_id))
        else:
            found = everything_about(queue, dead_id(queue, letter_id))
        # What the letter itself remembers, which is the same beside an owner; `holdfast show` tells the whole chain.
        show_everything(found._replace(history=()), as_json=as_json)
    return OK


@contextmanager
def _looking(
    folder: str, topic: str | None, group: str | None, wait: str
) -> Iterator[tuple[holdfast.Queue[bytes] | None, DeadLetters[bytes] | LettersBeside]]:
    """The queue and its letters; beside a living owner only the letters, as it has written them."""
    with ExitStack() as closing:
        try:
            queue = closing.enter_context(opened(folder, topic=topic, group=group, wait=wait))
        except Busy:
            name = check_name(group or DEFAULT_GROUP, "group")
            yield None, LettersBeside(real_world(), folder.rstrip("/"), chosen_topic(folder, topic), name)
        else:
            yield queue, queue.dead


@app.command("redrive")
@command
def redrive_command(
    folder: QueueFolder,
    ids: _Ids = None,
    where: Where = None,
    limit: Limit = None,
    rate: Annotated[float | None, typer.Option("--rate", help="At most so many messages a second.")] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TOPIC", help="Make them new messages of another topic instead.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Put dead letters back into the queue, in their original order, each once; or into another one."""
    if rate is not None and not rate > 0:
        raise InvalidRequest(f"--rate {rate:g} cannot be used: give messages a second, above 0")
    size = _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 10)))
    pause_s = 0.0 if rate is None else size / rate
    topic = topic_named(folder, topic, ids[0]) if ids else topic
    with opened(folder, topic=topic, group=group, wait=wait) as queue:
        chosen = queue.dead.redrive(_given(ids), where=where, limit=limit, dry_run=True, to=to).ids
        done = "put back" if to is None else f"put into {safe(to)}"
        moving = _Moving("redrive", done, chosen, size, pause_s, as_json=as_json)
        return moving.run(lambda some: queue.dead.redrive(some, to=to).done, dry_run=dry_run, yes=yes)


@app.command("purge")
@command
def purge_command(
    folder: QueueFolder,
    ids: _Ids = None,
    where: Where = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    topic: Topic = None,
    group: Group = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Drop dead letters for good."""
    topic = topic_named(folder, topic, ids[0]) if ids else topic
    with opened(folder, topic=topic, group=group, wait=wait) as queue:
        chosen = queue.dead.purge(_given(ids), where=where, limit=limit, dry_run=True).ids
        moving = _Moving("purge", "dropped for good", chosen, _AT_ONCE, 0, as_json=as_json)
        return moving.run(lambda some: queue.dead.purge(some).done, dry_run=dry_run, yes=yes)


class _Moving:
    """Many dead letters, a few at a time."""

    def __init__(self, verb: str, done: str, ids: Sequence[str], size: int, pause_s: float, *, as_json: bool) -> None:
        self._verb = verb
        self._done = done
        self._ids = ids
        self._size = size
        self._pause_s = pause_s
        self._as_json = as_json

    def run(self, do: _Do, *, dry_run: bool, yes: bool) -> int:
        """Say how many, ask, do it."""
        ids, done = self._ids, 0
        would = "would be" if dry_run or not ids else "will be"
        if not self._as_json:
            stdout().print(f"{count_of(len(ids), 'dead letter')} {would} {self._done}")
        if not dry_run and ids:
            if not confirmed("Go on?", f"dead {self._verb}", yes=yes, as_json=self._as_json):
                return NOT_DONE
            with _bar(self._verb, len(ids), shown=not self._as_json) as advance:
                for i in range(0, len(ids), self._size):
                    if i and self._pause_s:
                        time.sleep(self._pause_s)
                    done += do(ids[i : i + self._size])
                    advance(min(i + self._size, len(ids)))
            if not self._as_json:
                stdout().print(f"{count_of(done, 'dead letter')} {self._done}")
        if self._as_json:
            print_json({"matched": len(ids), "done": done, "ids": list(ids)})
        return OK


def _given(ids: list[str] | None) -> list[str] | None:
    return ids or None


@contextmanager
def _bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    console = stderr()
    if not shown or not console.is_terminal or total <= _AT_ONCE:
        yield lambda done: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _show_groups(groups: Sequence[DeadGroup], *, as_json: bool) -> None:
    if as_json:
        for group in groups:
            times = moment("first", group.first) | moment("last", group.last)
            print_json_line({**msgspec.structs.asdict(group), **times})
        return
    if not groups:
        stderr().print("no dead letters")
        return
    console = stdout()
    reasons = max(len("reason"), *(len(safe(group.reason)) for group in groups))
    console.print(f"{'count':>{_COUNT_CELLS}}  {'reason':{reasons}}  {'last (UTC)':19}  example, error", soft_wrap=True)
    for group in groups:
        facts = f"{safe(group.reason):{reasons}}  {seconds_text(group.last):19}  {safe(group.example)}"
        console.print(f"{group.count:>{_COUNT_CELLS},}  {facts}", soft_wrap=True)
        if group.error:
            console.print(f"{'':{_COUNT_CELLS}}  {safe(group.error)}", soft_wrap=True)
