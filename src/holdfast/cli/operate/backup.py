"""`holdfast backup` and `holdfast restore`: copies of a data folder in a store, taken while it is in use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias

import holdfast
from holdfast.api.drafts import parse_duration
from holdfast.cli.opening import AsJson, DryRun
from holdfast.cli.output import (
    DAMAGED,
    NOTHING_THERE,
    OK,
    moment,
    note,
    print_json,
    progress,
    ruled_table,
    safe,
    say,
    seconds_text,
    size,
    stdout,
    time_ns_of,
)
from holdfast.cli.parsing import Section, UsageError, argument, option
from holdfast.model import count_of

app = Section("Backups of a data folder: take, list and verify them.", usual="take")

Destination: TypeAlias = Annotated[
    str, argument("BACKUPS", "Where backups are: s3://bucket/name, az://, gs://, postgresql:// or a folder.")
]
At: TypeAlias = Annotated[
    str | None,
    option("--at TIME|NUMBER", "The backup of this number, or the newest one before this time; by default the newest."),
]

KeyFile: TypeAlias = Annotated[
    str | None,
    option("--key-file FILE", "The key of encrypted backups; by default `backup_key_file` of the settings, if set."),
]


@app.command("take")
def take_command(
    source: Annotated[str, argument("FOLDER", "A data folder, or the URL of one that lives in a store.")],
    destination: Destination,
    keep: Annotated[
        int | None, option("--keep N", "Keep this many backups of the folder; remove older ones.", least=1)
    ] = None,
    keep_for: Annotated[
        str | None,
        option("--keep-for TIME", "Keep backups of the folder for this long, such as 30d; the newest is always kept."),
    ] = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> int:
    """Back up a data folder, as of one moment, while it is in use. The word `take` can be left out.

    A segment is stored once, however many backups list it. An interrupted backup is not listed; the next
    one continues where it stopped. With a key, everything that is stored is encrypted.

    Examples:
        holdfast backup ./jobs s3://backups/jobs --keep 30
        holdfast backup s3://bucket/jobs /mnt/backups/jobs --keep-for 90d
    """
    seconds = None if keep_for is None else parse_duration(keep_for, "--keep-for")
    with progress("backup", "bytes", shown=not as_json) as show:
        made = holdfast.backup(source, destination, keep=keep, keep_for=seconds, key_file=key_file, progress=show)
    if as_json:
        print_json(_document(made))
        return OK
    went = f"; {count_of(made.removed, 'older backup')} removed" if made.removed else ""
    say(
        f"backup {made.number}: {count_of(made.files, 'file')}, {size(made.bytes)}, of which {size(made.new_bytes)} "
        f"are new{went}"
    )
    if made.problem:
        note(safe(made.problem))
    return OK


@app.command("ls")
def list_command(destination: Destination, key_file: KeyFile = None, as_json: AsJson = False) -> int:
    """List the backups in a place, oldest first.

    Examples:
        holdfast backup ls s3://backups/jobs
    """
    found = holdfast.backups(destination, key_file=key_file)
    if as_json:
        for each in found:
            print_json(_document(each))
    elif found:
        table = ruled_table("number", "time", "folder", "files", "size", "new", "")
        for each in found:
            row = [str(each.number), "", "", "", "", "", "encrypted, not readable" if each.encrypted else "damaged"]
            if not each.problem:
                row[1:] = [seconds_text(each.time), safe(each.source), f"{each.files:,}", size(each.bytes)]
                row += [size(each.new_bytes), "encrypted" if each.encrypted else ""]
            table.add_row(*row)
        stdout().print(table)
        for problem in (each.problem for each in found if each.problem):
            note(safe(problem))
    else:
        note("there are no backups")
    if any(each.problem for each in found):
        return DAMAGED
    return OK if found else NOTHING_THERE


@app.command("verify")
def verify_command(destination: Destination, at: At = None, key_file: KeyFile = None, as_json: AsJson = False) -> int:
    """Restore a backup into a temporary folder, check every message there, and open it.

    The exit code is 0 if all is well and 1 if something is damaged, for a job that runs every night. Set $TMPDIR to
    choose the disk.

    Examples:
        holdfast backup verify s3://backups/jobs
    """
    with progress("verify", "bytes", shown=not as_json) as show:
        found = holdfast.verify(destination, at=_moment(at), key_file=key_file, progress=show)
    if as_json:
        print_json({**_document(found), "ok": found.ok})
    else:
        for each in found.damage:
            say(f"damaged: {safe(each)}")
        verdict = "ok" if found.ok else f"damaged, {count_of(len(found.damage), 'finding')}"
        counts = f"{count_of(found.files, 'file')}, {size(found.bytes)}, {count_of(found.messages, 'message')}"
        say(f"backup {found.number}: {verdict}: {counts}")
    return OK if found.ok else DAMAGED


def restore_command(
    source: Annotated[
        str, argument("BACKUPS", "Where the backups are; or the URL of a data folder that lives in a store.")
    ],
    destination: Annotated[str, argument("FOLDER", "A new or empty folder, or an empty place in a store.")],
    at: Annotated[
        str | None,
        option(
            "--at TIME|NUMBER",
            "A time, or the number of a backup, or of an object in the store; the newest by default.",
        ),
    ] = None,
    dry_run: DryRun = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> int:
    """Restore a data folder as it was at a given time.

    Restores from a backup, or from the store that the folder lives in. The folder can be opened once it is complete
    and checked; an interrupted restore starts over.

    Examples:
        holdfast restore s3://backups/jobs ./jobs
        holdfast restore s3://bucket/jobs ./jobs-at-noon --at 2027-01-31T12:00:00Z
    """
    with progress("restore", "bytes", shown=not as_json) as show:
        found = holdfast.restore(source, destination, at=_moment(at), dry_run=dry_run, key_file=key_file, progress=show)
    if as_json:
        print_json({**_document(found), "dry_run": dry_run})
        return OK
    done = "would restore" if dry_run else "restored"
    say(
        f"{done} {safe(found.source)} as of {seconds_text(found.time)} (number {found.number}) into "
        f"{safe(found.destination)}: {count_of(found.files, 'file')}, {size(found.bytes)}"
    )
    return OK


def _moment(at: str | None) -> int | datetime | None:
    if at is None or at.isdecimal():
        return None if at is None else int(at)
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_ns_of(at) // 1000)
    except ValueError as error:
        raise UsageError(f"--at cannot be {at!r}: give a number, or a time such as 2027-01-31T12:00:00Z") from error


def _document(found: Any) -> dict[str, Any]:
    document = {name: getattr(found, name) for name in found.__struct_fields__ if name != "time"}
    return {**document, **moment("time", found.time)}
