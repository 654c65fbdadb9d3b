"""`holdfast log`: what a log holds, as a whole and message by message."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.broker.catalog import Catalog
from holdfast.broker.check.parts import parts_of
from holdfast.broker.routing import check_partition
from holdfast.cli.dump import Dump
from holdfast.cli.info import info_of, show_info
from holdfast.cli.opened import chosen_topic, is_queue, log_of
from holdfast.cli.options import AsJson, Folder, Topic
from holdfast.cli.output import DAMAGED, OK, command, print_json, stdout
from holdfast.cli.reading import check_has_log
from holdfast.cli.section import Section
from holdfast.cli.text import time_ns_of
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.storage import LogReader

app = Section("Look into a log.")


@app.command("info")
@command
def info_command(folder: Folder, as_json: AsJson = False) -> int:
    """Show a log's offsets, times, segments, owner and disk use; of a queue: those of each of its logs."""
    if not is_queue(folder):
        info = info_of(folder)
        if as_json:
            print_json(info)
        else:
            show_info(stdout(), info)
        return OK
    infos = [{"name": part.name, **info_of(part.folder)} for part in parts_of(real_world(), folder)]
    if as_json:
        print_json({"folder": folder, "logs": infos})
        return OK
    console = stdout()
    for number, info in enumerate(infos):
        if number:
            console.print()
        show_info(console, info)
    return OK


@app.command("dump")
@command
def dump_command(
    folder: Folder,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="Begin here, not at the start.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=0, help="Stop after so many messages.")] = None,
    from_time: Annotated[
        str | None,
        typer.Option("--from-time", metavar="ISO", help="Begin with the first message of this time (UTC) or later."),
    ] = None,
    topic: Topic = None,
    partition: Annotated[int, typer.Option("--partition", metavar="N", min=0, help="Of the topic; 0 by default.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Print messages of a log, or of a queue's own log: a table, or one JSON object a line.

    Damaged messages are named and passed over; the exit code is then 1.
    """
    if offset is not None and from_time is not None:
        raise InvalidRequest("--offset and --from-time both say where to begin; give one of them")
    reader = LogReader(_log(folder, topic, partition) if is_queue(folder) else folder)
    dump = Dump(reader, as_json=as_json)
    start = _start(reader, offset, from_time)
    whole = dump.run(start, limit)
    return OK if whole else DAMAGED


def _log(folder: str, topic: str | None, partition: int) -> str:
    name = chosen_topic(folder, topic)
    check_partition(partition, name, Catalog(real_world(), folder).facts(name).partitions)
    log = log_of(folder, name, partition)
    check_has_log(folder, name, log)
    return log


def _start(reader: LogReader, offset: int | None, from_time: str | None) -> int:
    if from_time is None:
        return reader.start if offset is None else offset
    try:
        return reader.find_time(time_ns_of(from_time))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"--from-time {from_time!r} is no time; write it like 2026-01-31T12:00:00Z (or without Z: UTC)"
        ) from None
