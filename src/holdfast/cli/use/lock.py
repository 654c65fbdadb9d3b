"""`holdfast lock`: take locks for a time, keep them, give them back, and see who has them."""

from __future__ import annotations

import os
import shlex
import sys
import time
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

import typer

import holdfast
from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import check_name
from holdfast.broker.locks import LockStatus, held_now, replayed_locks
from holdfast.cli.look.messages import moment, seconds_text
from holdfast.cli.opening import is_remote, opened_broker, topics_of
from holdfast.cli.options import WAIT, AsJson, DataFolder, Wait
from holdfast.cli.output import NOT_DONE, NOTHING_THERE, OK, Section, command, print_json, stderr, stdout
from holdfast.cli.text import safe, show_table, table
from holdfast.cli.use.get import default_holder
from holdfast.client.address import is_address
from holdfast.delivery.decide import Moment
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, LockHeld
from holdfast.local.locks import info_of

app = Section("Locks with leases and fencing numbers.")

LEASE_ID: Final = "HOLDFAST_LEASE_ID"
_NAMES: Final = ("HOLDFAST_LOCK", LEASE_ID, "HOLDFAST_FENCE")

# Somebody else may have given the lock back meanwhile.
_LOOK_EVERY_S: Final = 0.1

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.")]
LeaseIdArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="LEASE", help=f"From `acquire`; by default ${LEASE_ID}.")
]


@app.command("acquire")
@command
def acquire_command(
    folder: DataFolder,
    name: Name,
    owner: Annotated[str | None, typer.Option("--owner", metavar="NAME", help="Who has it; this shell.")] = None,
    lease: Annotated[str, typer.Option("--lease", metavar="TIME", help="It is yours so long.")] = "30s",
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Wait so long for the lock.")] = "0",
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Only where there is no lock and no document of that name.")
    ] = False,
    export: Annotated[bool, typer.Option("--export", help="Print shell variables, for eval.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Take a lock for a time. Exit code: 3 where somebody else has it."""
    if export and as_json:
        raise InvalidRequest("--export and --json both say what is printed; give one of them")
    options: dict[str, Any] = {
        "owner": default_holder() if owner is None else owner,
        "lease": parse_duration(lease, "--lease"),
        "if_not_exists": if_not_exists,
    }
    try:
        lock = _acquired(folder, name, options, parse_duration(timeout, "--timeout"), wait)
    except LockHeld as held:
        sys.stdout.write(_nothing_exported(NOTHING_THERE) if export else "")
        stderr().print(safe(str(held)), soft_wrap=True)
        return NOTHING_THERE
    except HoldfastError:
        sys.stdout.write(_nothing_exported(NOT_DONE) if export else "")
        raise
    if export:
        values = (lock.name, lock.lease_id, str(lock.fence))
        lines = [f"export {key}={shlex.quote(value)}\n" for key, value in zip(_NAMES, values, strict=True)]
        sys.stdout.write("".join(lines))
    else:
        _show_lock(lock, as_json=as_json)
    return OK


def _acquired(folder: str, name: str, options: dict[str, Any], timeout_s: float, wait: str) -> holdfast.Lock:
    """While somebody has it the folder is let go of, so that they can give it back."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            with opened_broker(folder, wait=wait, create=True) as broker:
                # Whoever owns the folder lets us stand in line there.
                left_s = max(give_up - time.monotonic(), 0) if is_remote(broker) else 0
                return broker.locks.acquire(name, wait=left_s, **options)
        except LockHeld:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(left_s, _LOOK_EVERY_S))


def _nothing_exported(code: int) -> str:
    return f"unset {' '.join(_NAMES)}\n(exit {code})\n"


@app.command("keepalive")
@command
def keepalive_command(
    folder: DataFolder,
    lease_id: LeaseIdArgument = None,
    lease: Annotated[
        str | None, typer.Option("--lease", metavar="TIME", help="So long from now; as long as before by default.")
    ] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Let a lease go on."""
    lease_s = None if lease is None else parse_duration(lease, "--lease")
    with opened_broker(folder, wait=wait) as broker:
        _show_lock(broker.locks.keepalive(_lease_id(lease_id), lease_s), as_json=as_json)
    return OK


@app.command("release")
@command
def release_command(
    folder: DataFolder,
    lease_id: LeaseIdArgument = None,
    force: Annotated[
        str | None, typer.Option("--force", metavar="NAME", help="Take this lock from whoever has it.")
    ] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Give a lock back; or take one from its holder, by name. Exit code: 3 where nobody has that."""
    if force is not None and lease_id is not None:
        raise InvalidRequest("a lease and --force both say what is released; give one of them")
    given = _lease_id(lease_id) if force is None else check_name(force, "lock")
    with opened_broker(folder, wait=wait) as broker:
        if force is None:
            broker.locks.release(given)
        elif not broker.locks.force_release(given):
            stderr().print(f"nobody has {safe(given)}", soft_wrap=True)
            return NOTHING_THERE
    if as_json:
        print_json({"released": given})
    else:
        stdout().print(f"released {safe(given)}", soft_wrap=True)
    return OK


@app.command("show")
@command
def show_command(folder: DataFolder, name: Name, as_json: AsJson = False) -> int:
    """Who has a lock, since and until when. Takes no lock of the folder."""
    info = _infos(folder, check_name(name, "lock"))[0]
    if as_json:
        print_json(_document(info))
    elif info.held:
        stdout().print(
            f"{safe(info.name)} is held by {safe(info.owner or '')} since {_time(info.acquired_at)}, until "
            f"{_time(info.expires_at)} UTC, with the fence {info.fence}",
            soft_wrap=True,
        )
    else:
        stdout().print(f"{safe(info.name)} is free", soft_wrap=True)
    return OK


@app.command("ls")
@command
def ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the locks that somebody has. Takes no lock of the folder."""
    infos = _infos(folder)
    if as_json:
        print_json({"folder": folder, "locks": [_document(info) for info in infos]})
    elif not infos:
        stderr().print(f"no locks are held in {safe(folder)}", soft_wrap=True)
    else:
        shown = table("lock", "owner", "since", "until", "fence")
        for info in infos:
            since, until = _time(info.acquired_at), _time(info.expires_at)
            shown.add_row(safe(info.name), safe(info.owner or ""), since, until, str(info.fence))
        show_table(stdout(), shown)
    return OK


def _infos(folder: str, name: str | None = None) -> list[holdfast.LockInfo]:
    """One lock, or all that are held, beside whoever owns the folder; or a server's."""
    if is_address(folder):
        with opened_broker(folder) as broker:
            return broker.locks.list() if name is None else [broker.locks.describe(name)]
    topics_of(folder)
    world = real_world()
    now = Moment(world.clock.now_ns() // 1_000_000, world.clock.monotonic_ns() // 1_000_000)
    known, _ = replayed_locks(world, folder)
    held = held_now(world, known, now)
    versions = {name: document.version for name, document in known.documents.items()}
    return [
        info_of(LockStatus(each, held.get(each), 0, versions.get(each, 0)), now)
        for each in (held if name is None else [name])
    ]


def _lease_id(given: str | None) -> str:
    lease_id = given or os.environ.get(LEASE_ID, "")
    if not lease_id:
        raise InvalidRequest(f"no lease: give it behind the folder, or set ${LEASE_ID} with `lock acquire --export`")
    return lease_id


def _show_lock(lock: holdfast.Lock, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "name": lock.name,
                "owner": lock.owner,
                "fence": lock.fence,
                "lease_id": lock.lease_id,
                "lease_seconds": lock.lease,
                **moment("acquired", lock.acquired_at),
                **moment("expires", lock.expires_at),
            }
        )
    else:
        stdout().print(
            f"{safe(lock.name)} is yours until {_time(lock.expires_at)} UTC\nlease {safe(lock.lease_id)}",
            soft_wrap=True,
        )


def _document(info: holdfast.LockInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "held": info.held,
        "owner": info.owner,
        "fence": info.fence,
        **moment("acquired", info.acquired_at),
        **moment("expires", info.expires_at),
        "document_version": info.document_version,
    }


def _time(when: datetime | None) -> str:
    return "-" if when is None else seconds_text(when)
