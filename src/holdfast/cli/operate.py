"""`holdfast cancel`, `seek`, `compact`: what an operator does to a queue."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

import holdfast
from holdfast.cli.ask import confirmed
from holdfast.cli.opened import opened
from holdfast.cli.options import WAIT, AsJson, DryRun, QueueFolder, Wait, Yes
from holdfast.cli.output import NOT_DONE, OK, command, print_error, print_json, print_json_line, stdout
from holdfast.cli.text import safe, size
from holdfast.embedded.times import instant_ns, parse_instant
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, OffsetOutOfRange
from holdfast.storage.finding import count_of


@command
def cancel_command(
    folder: QueueFolder,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="What `put` printed.")],
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Take back messages that nobody works on: ready or delayed ones."""
    code = OK
    with opened(folder, wait=wait) as queue:
        for message_id in ids:
            try:
                if not queue.cancel(message_id):
                    raise InvalidRequest(
                        f"{message_id} cannot be cancelled: somebody works on it, or it is done, dead or cancelled"
                    )
            except HoldfastError as error:
                print_error(error.code, str(error), as_json=as_json)
                code = NOT_DONE
                continue
            if as_json:
                print_json_line({"done": "cancelled", "id": message_id})
            else:
                stdout().print(f"cancelled {safe(message_id)}", soft_wrap=True)
    return code


@command
def seek_command(
    folder: QueueFolder,
    to: Annotated[str | None, typer.Argument(metavar="start|end", help="Where to go on.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="Go on with this message.")] = None,
    when: Annotated[
        str | None, typer.Option("--time", metavar="ISO", help="Go on with the first message of this time, or -1h.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Go on elsewhere: all before is passed over, all behind comes again. The one way that done messages come back."""
    if sum(given is not None for given in (to, offset, when)) != 1 or to not in (None, "start", "end"):
        raise InvalidRequest("seek goes to one place: start, end, --offset N or --time ISO")
    with opened(folder, wait=wait) as queue:
        target = _target(queue, to, offset, when)
        again, passed = _effect(queue, target)
        found: dict[str, Any] = {"offset": target, "again": again, "passed_over": passed, "changed": False}
        if not as_json:
            stdout().print(
                f"going on with offset {target}: {count_of(again, 'handled message')} will come again, "
                f"{count_of(passed, 'message')} will be passed over",
                soft_wrap=True,
            )
        if not dry_run:
            if not confirmed("Go there?", "seek", yes=yes, as_json=as_json):
                return NOT_DONE
            queue.seek(offset=target)
            found["changed"] = True
    if as_json:
        print_json(found)
    return OK


def _target(queue: holdfast.Queue[bytes], to: str | None, offset: int | None, when: str | None) -> int:
    log = queue._log
    if to is not None:
        return log.start if to == "start" else log.end
    if when is not None:
        now_ms = real_world().clock.now_ns() // 1_000_000
        return max(log.find_time(instant_ns(parse_instant(when, now_ms, "--time"), "--time")), log.start)
    assert offset is not None
    if not log.start <= offset <= log.end:
        raise OffsetOutOfRange(
            f"cannot go to offset {offset}: {log.start} to {log.end} are kept",
            offset=offset,
            start=log.start,
            end=log.end,
        )
    return offset


def _effect(queue: holdfast.Queue[bytes], target: int) -> tuple[int, int]:
    """How many handled messages come again, and how many that are not handled are passed over.

    What somebody works on stays there either way.
    """
    group, end = queue._delivery.group, queue._log.end
    again = max(min(group.floor, end) - target, 0) + group.done.range_cardinality(max(target, group.floor), end)
    if target <= group.floor:
        return again, 0
    held = sum(offset < target for table in (group.leases, group.burials) for offset in table)
    done = group.done.range_cardinality(group.floor, target)
    return again, target - group.floor - done - held


@command
def compact_command(folder: QueueFolder, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Let go of all messages that are done, whatever retention says; they cannot be replayed any more."""
    with opened(folder, wait=wait) as queue:
        freed = queue.compact()
    if as_json:
        print_json(msgspec.to_builtins(freed))
    else:
        total = freed.bytes + freed.journal_bytes
        stdout().print(
            f"{size(total)} freed: {count_of(freed.segments, 'segment')} of messages ({size(freed.bytes)}), "
            f"{size(freed.journal_bytes)} of journal",
            soft_wrap=True,
        )
    return OK
