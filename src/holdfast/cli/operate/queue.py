"""Commands that operate a queue: change messages, pause and resume, seek, purge, compact, and handle dead letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from typing import Annotated, Final, TypeAlias

import msgspec

import holdfast
from holdfast.api import port_of
from holdfast.api.drafts import parse_instant
from holdfast.api.listing import DeadGroup
from holdfast.api.sync.message import DeadLetters
from holdfast.broker.folder.layout import DEFAULT_GROUP, check_name
from holdfast.broker.metrics import Compacted
from holdfast.broker.streams import ResetEffect
from holdfast.cli import opening, output
from holdfast.cli.look.messages import (
    DEAD,
    dead_id,
    everything_about,
    everything_about_letter,
    show_everything,
    show_messages,
)
from holdfast.cli.parsing import Section, argument, option
from holdfast.env import real_world
from holdfast.errors import Busy, HoldfastError, InvalidRequest, OffsetOutOfRange
from holdfast.local.listing import LettersBeside
from holdfast.model import Pause, Retained, count_of


def show_moves(console: output.Console, moves: Sequence[ResetEffect]) -> None:
    """Print a sentence for one partition, or a table and the sum for several."""
    again, passed = sum(move.again for move in moves), sum(move.passed_over for move in moves)
    where = f"offset {moves[0].after}" if len(moves) == 1 else "these offsets"
    if len(moves) > 1:
        shown = output.table("topic", "partition>", "from>", "to>", "again>", "skipped>")
        for move in moves:
            before = "new" if move.before is None else f"{move.before:,}"
            numbers = (before, *(f"{number:,}" for number in (move.after, move.again, move.passed_over)))
            shown.add_row(output.safe(move.topic), str(move.partition), *numbers)
        console.print(shown)
    console.print(
        f"moving to {where}: {count_of(again, 'handled message')} will be delivered again, "
        f"{count_of(passed, 'message')} will be skipped"
    )


_MessageIds: TypeAlias = Annotated[list[str], argument("ID", "The id of a message, as `put` printed it.")]


def cancel_command(at: opening.QueueAt, ids: _MessageIds) -> int:
    """Cancel messages that nobody is working on. They must be ready or delayed.

    Examples:
        holdfast cancel jobs jobs-0-17 jobs-0-18
    """
    return _change_each(
        at,
        ids,
        lambda queue, message_id: queue.cancel(message_id),
        "cancelled",
        "cannot be cancelled: it is leased, done, dead or cancelled already; `holdfast show` says which",
    )


def take_back_command(at: opening.QueueAt, ids: _MessageIds) -> int:
    """Take leased messages back from their consumers. They are ready at once, and the attempt is not counted.

    A consumer that is still working on such a message can no longer ack it. To end a lease that you hold, use `nack` or
    `defer` with its receipt.

    Examples:
        holdfast take-back jobs jobs-0-17
        holdfast take-back http://host:7700/jobs jobs-0-17
    """
    return _change_each(
        at,
        ids,
        lambda queue, message_id: queue.take_back(message_id),
        "taken back",
        "is not leased, so there is nothing to take back; `holdfast show` says what state it is in",
    )


def run_now_command(at: opening.QueueAt, ids: _MessageIds) -> int:
    """Make delayed messages ready now. Also ends the wait before a retry.

    Examples:
        holdfast run-now jobs jobs-0-d3
        holdfast run-now jobs $(holdfast ls jobs delayed --json | jq -r .id)
    """
    return _change_each(
        at,
        ids,
        lambda queue, message_id: queue.run_now(message_id),
        "made ready",
        "is not delayed, so there is nothing to wait for; `holdfast show` says what state it is in",
    )


def _change_each(
    at: opening.QueueAt,
    ids: Sequence[str],
    change: Callable[[holdfast.Group[bytes], str], bool],
    done: str,
    refused: str,
) -> int:
    """Change messages one by one, print what happened to each, and go on after an error."""
    code = output.OK
    with opening.opened_broker(at.folder, wait=at.wait) as broker:
        views = opening.Views(broker, at)
        for message_id in ids:
            try:
                if not change(views.of_id(message_id), message_id):
                    raise InvalidRequest(f"{message_id} {refused}")
            except HoldfastError as error:
                output.print_error(error.code, str(error), as_json=at.as_json)
                code = output.NOT_DONE
                continue
            if at.as_json:
                output.print_json({"done": done, "id": message_id})
            else:
                output.say(f"{done} {output.safe(message_id)}")
    return code


def seek_command(
    at: opening.QueueAt,
    to: Annotated[str | None, argument("start|end", "Move to the start or the end.")] = None,
    offset: Annotated[int | None, option("--offset", "Move to this offset.", least=0)] = None,
    when: Annotated[
        str | None, option("--time ISO", "Move to the first message at or after this time, such as -1h.")
    ] = None,
    partition: opening.PartitionNumber = None,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
) -> int:
    """Move a queue's position, to replay or to skip messages.

    Earlier messages are skipped; later ones are delivered again. This is the only way to receive
    finished messages again. Asks for confirmation.

    Examples:
        holdfast seek jobs start --dry-run
        holdfast seek jobs --time -1h --yes
        holdfast seek jobs end
    """
    if sum(given is not None for given in (to, offset, when)) != 1 or to not in (None, "start", "end"):
        raise InvalidRequest("seek goes to one place: start, end, --offset N or --time ISO")
    name = opening.chosen_topic(at.folder, at.topic)
    with opening.opened_broker(at.folder, wait=at.wait) as broker:
        queue = opening.view(broker, name, at.group)
        moves = moves_of(broker, queue.group, queue.name, _place(to, offset, when), partition)
        if offset is not None and len(moves) > 1:
            raise InvalidRequest(f"{queue.name} has {len(moves)} partitions, each with offsets: give --partition N")
        if offset is not None and moves[0].after != offset:
            kept = broker.describe_topic(queue.name).partitions[moves[0].partition]
            raise OffsetOutOfRange(
                f"cannot go to offset {offset}: {kept.start} to {kept.end} are kept; choose one of these",
                offset=offset,
                start=kept.start,
                end=kept.end,
            )
        if not at.as_json:
            show_moves(output.stdout(), moves)
        if not dry_run:
            if not output.confirmed("Go there?", "seek", yes=yes, as_json=at.as_json):
                return output.NOT_DONE
            for move in moves:
                queue.seek(offset=move.after, partition=move.partition)
    if at.as_json:
        again, passed = sum(move.again for move in moves), sum(move.passed_over for move in moves)
        output.print_json(
            {
                "offset": moves[0].after if len(moves) == 1 else None,
                "again": again,
                "passed_over": passed,
                "changed": not dry_run,
                "partitions": msgspec.to_builtins(moves),
            }
        )
    return output.OK


def _place(to: str | None, offset: int | None, when: str | None) -> str | int | datetime:
    if to is not None:
        return "earliest" if to == "start" else "latest"
    if when is not None:
        now_ms = real_world().clock.now_ns() // 1_000_000
        return parse_instant(when, now_ms, "--time")
    assert offset is not None
    return offset


def moves_of(
    broker: holdfast.Broker, group: str, topic: str, to: str | int | datetime, partition: int | None
) -> list[ResetEffect]:
    """Return the new position of a group in each partition, and its effect on messages."""
    resets = broker.reset_offsets(group, topic, to=to, partition=partition, dry_run=True)
    effects: list[ResetEffect] = port_of(broker).effects(group, resets)
    return effects


def pause_command(
    at: opening.QueueAt,
    reason: Annotated[str, option("--reason TEXT", "The reason, shown wherever the queue is listed.")] = "",
) -> int:
    """Stop handing out messages; publishing continues. Stays in effect until `holdfast resume`, even across a restart.

    Messages in flight can be settled as usual. Consumers wait as they do on an empty queue.

    Examples:
        holdfast pause jobs --reason 'the bank is down'
    """
    with at.opened() as queue:
        changed = queue.pause(reason=reason)
        stats = queue.stats()
    if at.as_json:
        _print_pause(queue.name, queue.group, stats.paused, changed=changed)
    elif stats.paused is not None:  # else somebody has resumed it in this moment
        already = "is paused" if changed else "was already paused"
        output.say(
            f"{_named_group(queue.name, queue.group)} {already} {pause_text(stats.paused)}; {stats.leased:,} in flight"
        )
    return output.OK


def resume_command(at: opening.QueueAt) -> int:
    """Hand out messages again after `pause`.

    Examples:
        holdfast resume jobs
    """
    with at.opened() as queue:
        changed = queue.resume()
        stats = queue.stats()
    if at.as_json:
        _print_pause(queue.name, queue.group, stats.paused, changed=changed)
    else:
        now = "is resumed" if changed else "was not paused"
        output.say(f"{_named_group(queue.name, queue.group)} {now}; {stats.ready:,} ready")
    return output.OK


def pause_text(pause: Pause) -> str:
    """Return since when a group is paused, and why."""
    return f"since {output.seconds_text(pause.since)} UTC{f': {output.safe(pause.reason)}' if pause.reason else ''}"


def _named_group(queue: str, group: str) -> str:
    return f"{output.safe(queue)}, group {output.safe(group)},"


def _print_pause(queue: str, group: str, paused: Pause | None, *, changed: bool) -> None:
    output.print_json({"queue": queue, "group": group, "changed": changed, "paused": msgspec.to_builtins(paused)})


def purge_command(at: opening.QueueAt, dry_run: opening.DryRun = False, yes: opening.Yes = False) -> int:
    """Drop every waiting message of a queue. Messages in flight stay, and so do dead letters.

    Delayed messages are dropped, too, unless other groups read the topic. Asks for confirmation.

    Examples:
        holdfast purge jobs --dry-run
        holdfast purge jobs --yes
    """
    with at.opened() as queue:
        stats, purged = queue.stats(), 0
        if not at.as_json:
            waiting = f"{count_of(stats.ready, 'message')} ready, {count_of(stats.delayed, 'message')} delayed"
            output.say(f"{waiting}, {stats.leased:,} in flight in {output.safe(queue.name)}")
        if not dry_run:
            if not output.confirmed("Drop all that are not in flight?", "purge", yes=yes, as_json=at.as_json):
                return output.NOT_DONE
            with output.progress("dropping messages", shown=not at.as_json):
                purged = queue.purge()
    if at.as_json:
        output.print_json({"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "purged": purged})
    elif not dry_run:
        output.stdout().print(f"{count_of(purged, 'message')} dropped for good")
    return output.OK


def compact_command(
    folder: opening.QueueFolder,
    topic: opening.Topic = None,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Free the disk space of messages that are done. Ignores the retention settings. The messages cannot be replayed.

    Examples:
        holdfast compact jobs
    """
    name = opening.chosen_topic(folder, topic)
    with opening.opened_broker(folder, wait=wait) as broker, output.progress("compacting", shown=not as_json):
        freed: Compacted = port_of(broker).compact_groups(name)
    if as_json:
        output.print_json(msgspec.to_builtins(freed))
    else:
        total = freed.bytes + freed.journal_bytes
        output.say(
            f"{output.size(total)} freed: {count_of(freed.segments, 'segment')} of messages "
            f"({output.size(freed.bytes)}), {output.size(freed.journal_bytes)} of journal"
        )
    return output.OK


def apply_retention_command(
    folder: opening.QueueFolder,
    topic: opening.Topic = None,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Apply the retention settings now. The owner of the queue also applies them every minute.

    Examples:
        holdfast apply-retention ./data
        holdfast apply-retention ./data --topic orders
    """
    gone: dict[str, Retained] = {}
    with (
        opening.opened_broker(folder, wait=wait) as broker,
        output.progress("applying retention", shown=not as_json) as advance,
    ):
        names = sorted(broker.topics()) if topic is None else [topic]
        for number, name in enumerate(names):
            advance(number, len(names))
            gone[name] = broker.apply_retention(name)
    if as_json:
        output.print_json({"topics": [{"topic": name, **msgspec.to_builtins(each)} for name, each in gone.items()]})
        return output.OK
    for name, each in gone.items():
        output.say(
            f"{output.safe(name)}: {count_of(each.messages, 'message')} and "
            f"{count_of(each.dead_letters, 'dead letter')} dropped, {output.size(each.bytes)} freed"
        )
    return output.OK


dead_app = Section("Dead letters: list, inspect, redrive and drop them.")

_AT_ONCE: Final = 500
_COUNT_CELLS: Final = 7

_Ids: TypeAlias = Annotated[list[str] | None, argument("ID", "The id of a dead letter; all of them by default.")]
_Do: TypeAlias = Callable[[Sequence[str]], int]


@dead_app.command("ls")
def dead_ls_command(
    at: opening.QueueAt,
    by_error: Annotated[bool, option("--by-error", "Count them by reason and error.")] = False,
    where: opening.Where = None,
    limit: opening.Limit = None,
) -> int:
    """List the dead letters, oldest first.

    Examples:
        holdfast dead ls jobs
        holdfast dead ls jobs --by-error
        holdfast dead ls jobs --where 'key == "alice"' --limit 20
    """
    with _looking(at) as (_, letters):
        if by_error:
            _show_groups(letters.groups(where=where)[:limit], as_json=at.as_json)
        else:
            show_messages(letters.list(where=where, limit=limit), DEAD, "no dead letters", as_json=at.as_json)
    return output.OK


@dead_app.command("show")
def dead_show_command(
    at: opening.QueueAt,
    letter_id: Annotated[str, argument("ID", "The id of a dead letter, or of the original message.")],
) -> int:
    """Show everything about one dead letter, with every error.

    Examples:
        holdfast dead show jobs jobs.dlq-0-3
    """
    with _looking(at.of(letter_id)) as (queue, letters):
        if queue is None:
            found = everything_about_letter(letters.show(letter_id))
        else:
            found = everything_about(queue, dead_id(queue, letter_id))
        # Only what the letter itself holds, as when another process owns the folder; `holdfast show` has the history.
        show_everything(found._replace(history=()), as_json=at.as_json)
    return output.OK


@contextmanager
def _looking(at: opening.QueueAt) -> Iterator[tuple[holdfast.Group[bytes] | None, DeadLetters[bytes] | LettersBeside]]:
    """Open the queue and its dead letters; if another process owns the folder, only the letters on disk."""
    with ExitStack() as closing:
        try:
            queue = closing.enter_context(at.opened())
        except Busy:
            name = check_name(at.group or DEFAULT_GROUP, "group")
            yield (
                None,
                LettersBeside(real_world(), at.folder.rstrip("/"), opening.chosen_topic(at.folder, at.topic), name),
            )
        else:
            yield queue, queue.dead


@dead_app.command("redrive")
def dead_redrive_command(
    at: opening.QueueAt,
    ids: _Ids = None,
    where: opening.Where = None,
    limit: opening.Limit = None,
    rate: Annotated[float | None, option("--rate", "At most this many messages per second.")] = None,
    to: Annotated[str | None, option("--to TOPIC", "Publish them to this topic instead.")] = None,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
) -> int:
    """Redrive dead letters: return them to the queue. They keep their order. --to sends them to another topic.

    Examples:
        holdfast dead redrive jobs --dry-run
        holdfast dead redrive jobs jobs.dlq-0-3
        holdfast dead redrive jobs --where 'attempts > 2' --rate 50 --yes
    """
    if rate is not None and not rate > 0:
        raise InvalidRequest(f"--rate {rate:g} cannot be used: give messages per second, above 0")
    size = _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 10)))
    pause_s = 0.0 if rate is None else size / rate
    with at.of(ids[0] if ids else None).opened() as queue:
        with _reading(at):
            chosen = queue.dead.redrive(_given(ids), where=where, limit=limit, dry_run=True, to=to).ids
        done = "redriven" if to is None else f"redriven to {output.safe(to)}"
        moving = _Moving("redrive", done, chosen, size, pause_s, as_json=at.as_json)
        return moving.run(lambda some: queue.dead.redrive(some, to=to).done, dry_run=dry_run, yes=yes)


@dead_app.command("purge")
def dead_purge_command(
    at: opening.QueueAt,
    ids: _Ids = None,
    where: opening.Where = None,
    limit: opening.Limit = None,
    dry_run: opening.DryRun = False,
    yes: opening.Yes = False,
) -> int:
    """Drop dead letters for good.

    Examples:
        holdfast dead purge jobs jobs.dlq-0-3
        holdfast dead purge jobs --where 'reason == "EXPIRED"' --yes
    """
    with at.of(ids[0] if ids else None).opened() as queue:
        with _reading(at):
            moving = _Moving(
                "purge",
                "dropped for good",
                queue.dead.purge(_given(ids), where=where, limit=limit, dry_run=True).ids,
                _AT_ONCE,
                0,
                as_json=at.as_json,
            )
        return moving.run(lambda some: queue.dead.purge(some).done, dry_run=dry_run, yes=yes)


def _reading(at: opening.QueueAt) -> AbstractContextManager[Callable[..., None]]:
    """Show that many dead letters are being read."""
    return output.progress("reading the dead letters", shown=not at.as_json)


class _Moving:
    """Redrives or purges many dead letters, a few at a time."""

    def __init__(self, verb: str, done: str, ids: Sequence[str], size: int, pause_s: float, *, as_json: bool) -> None:
        self._verb = verb
        self._done = done
        self._ids = ids
        self._size = size
        self._pause_s = pause_s
        self._as_json = as_json

    def run(self, do: _Do, *, dry_run: bool, yes: bool) -> int:
        """Say how many letters there are, ask for confirmation, and process them."""
        ids, done = self._ids, 0
        would = "would be" if dry_run or not ids else "will be"
        if not self._as_json:
            output.stdout().print(f"{count_of(len(ids), 'dead letter')} {would} {self._done}")
        if not dry_run and ids:
            if not output.confirmed("Go on?", f"dead {self._verb}", yes=yes, as_json=self._as_json):
                return output.NOT_DONE
            with output.progress(self._verb, shown=not self._as_json) as advance:
                for i in range(0, len(ids), self._size):
                    if i and self._pause_s:
                        time.sleep(self._pause_s)
                    done += do(ids[i : i + self._size])
                    advance(min(i + self._size, len(ids)), len(ids))
            if not self._as_json:
                output.stdout().print(f"{count_of(done, 'dead letter')} {self._done}")
        if self._as_json:
            output.print_json({"matched": len(ids), "done": done, "ids": list(ids)})
        return output.OK


def _given(ids: list[str] | None) -> list[str] | None:
    return ids or None


def _show_groups(groups: Sequence[DeadGroup], *, as_json: bool) -> None:
    if as_json:
        for group in groups:
            times = output.moment("first", group.first) | output.moment("last", group.last)
            output.print_json({**msgspec.structs.asdict(group), **times})
        return
    if not groups:
        output.note("no dead letters")
        return
    console = output.stdout()
    reasons = max(len("reason"), *(len(output.safe(group.reason)) for group in groups))
    console.print(f"{'count':>{_COUNT_CELLS}}  {'reason':{reasons}}  {'last (UTC)':19}  example, error")
    for group in groups:
        facts = (
            f"{output.safe(group.reason):{reasons}}  {output.seconds_text(group.last):19}  {output.safe(group.example)}"
        )
        console.print(f"{group.count:>{_COUNT_CELLS},}  {facts}")
        if group.error:
            console.print(f"{'':{_COUNT_CELLS}}  {output.safe(group.error)}")
