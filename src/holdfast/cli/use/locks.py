"""`holdfast lock` and `holdfast state`: locks with leases, and documents with versions."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

import msgspec

import holdfast
from holdfast.api.drafts import parse_duration
from holdfast.broker.folder.layout import check_name
from holdfast.broker.locks import LockStatus, held_now, replayed_locks
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, OpeningTurns, Wait, opened_broker, topics_of
from holdfast.cli.parsing import Section, argument, option
from holdfast.cli.use.get import default_holder, nothing_exported
from holdfast.client.opening import is_address
from holdfast.delivery.decide import Moment
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, LockHeld
from holdfast.local.locks import document_from, info_of

lock_app = Section("Locks with leases and fencing numbers.")

LEASE_ID: Final = "HOLDFAST_LEASE_ID"
_NAMES: Final = ("HOLDFAST_LOCK", LEASE_ID, "HOLDFAST_FENCE")

LockName: TypeAlias = Annotated[str, argument("NAME", "The lock's name.")]
LeaseIdArgument: TypeAlias = Annotated[str | None, argument("LEASE", f"From `acquire`; by default ${LEASE_ID}.")]


@lock_app.command("acquire")
def acquire_command(
    folder: DataFolder,
    name: LockName,
    owner: Annotated[str | None, option("--owner NAME", "Who holds it; this shell by default.")] = None,
    lease: Annotated[str, option("--lease TIME", "How long to hold it.")] = "30s",
    timeout: Annotated[str, option("--timeout TIME", "How long to wait for the lock.")] = "0",
    if_not_exists: Annotated[
        bool, option("--if-not-exists", "Fail if there is a lock or a document with that name.")
    ] = False,
    export: Annotated[bool, option("--export", "Print shell variables, for `eval`.")] = False,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Acquire a lock for a limited time. Exit code: 3 if somebody else holds it.

    Examples:
        holdfast lock acquire ./data nightly --lease 5m
        eval "$(holdfast lock acquire ./data nightly --timeout 1m --export)"
    """
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
        sys.stdout.write(nothing_exported(output.NOTHING_THERE, _NAMES) if export else "")
        output.note(output.safe(str(held)))
        return output.NOTHING_THERE
    except HoldfastError:
        sys.stdout.write(nothing_exported(output.NOT_DONE, _NAMES) if export else "")
        raise
    if export:
        values = (lock.name, lock.lease_id, str(lock.fence))
        lines = [f"export {key}={shlex.quote(value)}\n" for key, value in zip(_NAMES, values, strict=True)]
        sys.stdout.write("".join(lines))
    else:
        _show_lock(lock, as_json=as_json)
    return output.OK


def _acquired(folder: str, name: str, options: dict[str, Any], timeout_s: float, wait: str) -> holdfast.Lock:
    refused: LockHeld | None = None
    with closing(OpeningTurns(folder, None, timeout_s, wait).each(create=True)) as turns:
        for broker, wait_s in turns:
            try:
                return broker.locks.acquire(name, wait=wait_s, **options)
            except LockHeld as held:
                refused = held
    assert refused is not None
    raise refused


@lock_app.command("keepalive")
def keepalive_command(
    folder: DataFolder,
    lease_id: LeaseIdArgument = None,
    lease: Annotated[
        str | None, option("--lease TIME", "The new lease, from now; the previous length by default.")
    ] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Renew the lease of a lock.

    Examples:
        holdfast lock keepalive ./data "$HOLDFAST_LEASE_ID" --lease 5m
    """
    lease_s = None if lease is None else parse_duration(lease, "--lease")
    with opened_broker(folder, wait=wait) as broker:
        _show_lock(broker.locks.keepalive(_lease_id(lease_id), lease_s), as_json=as_json)
    return output.OK


@lock_app.command("release")
def release_command(
    folder: DataFolder,
    lease_id: LeaseIdArgument = None,
    force: Annotated[str | None, option("--force NAME", "Release this lock, no matter who holds it.")] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Release a lock that you hold, or, with --force, anybody's. Exit code: 3 if nobody holds it.

    Examples:
        holdfast lock release ./data "$HOLDFAST_LEASE_ID"
        holdfast lock release ./data --force nightly
    """
    if force is not None and lease_id is not None:
        raise InvalidRequest("a lease and --force both say what is released; give one of them")
    given = _lease_id(lease_id) if force is None else check_name(force, "lock")
    with opened_broker(folder, wait=wait) as broker:
        if force is None:
            broker.locks.release(given)
        elif not broker.locks.force_release(given):
            output.note(f"nobody holds {output.safe(given)}")
            return output.NOTHING_THERE
    if as_json:
        output.print_json({"released": given})
    else:
        output.say(f"released {output.safe(given)}")
    return output.OK


@lock_app.command("show")
def lock_show_command(folder: DataFolder, name: LockName, as_json: AsJson = False) -> int:
    """Show who has a lock, since when and until when. Does not lock the folder.

    Examples:
        holdfast lock show ./data nightly
    """
    info = _infos(folder, check_name(name, "lock"))[0]
    if as_json:
        output.print_json(_lock_document(info))
    elif info.held:
        output.say(
            f"{output.safe(info.name)} is held by {output.safe(info.owner or '')} "
            f"since {_seconds_or_dash(info.acquired_at)}, until {_seconds_or_dash(info.expires_at)} UTC, "
            f"with the fence {info.fence}"
        )
    else:
        output.say(f"{output.safe(info.name)} is free")
    return output.OK


@lock_app.command("ls")
def lock_ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the locks that are held. Does not lock the folder.

    Examples:
        holdfast lock ls ./data
    """
    infos = _infos(folder)
    if as_json:
        output.print_each(map(_lock_document, infos))
    elif not infos:
        output.note(f"no locks are held in {output.safe(folder)}")
    else:
        shown = output.table("lock", "owner", "since", "until", "fence")
        for info in infos:
            since, until = _seconds_or_dash(info.acquired_at), _seconds_or_dash(info.expires_at)
            shown.add_row(output.safe(info.name), output.safe(info.owner or ""), since, until, str(info.fence))
        output.stdout().print(shown)
    return output.OK


def _infos(folder: str, name: str | None = None) -> list[holdfast.LockInfo]:
    """Return one lock, or all that are held: read without owning the folder, or from a server."""
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
        raise InvalidRequest(f"no lease: give it after the place, or set ${LEASE_ID} with `lock acquire --export`")
    return lease_id


def _show_lock(lock: holdfast.Lock, *, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {
                "name": lock.name,
                "owner": lock.owner,
                "fence": lock.fence,
                "lease_id": lock.lease_id,
                "lease_seconds": lock.lease,
                **output.moment("acquired", lock.acquired_at),
                **output.moment("expires", lock.expires_at),
            }
        )
    else:
        output.say(f"{output.safe(lock.name)} is yours until {_seconds_or_dash(lock.expires_at)} UTC")
        output.say(f"lease {output.safe(lock.lease_id)}")


def _lock_document(info: holdfast.LockInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "held": info.held,
        "owner": info.owner,
        "fence": info.fence,
        **output.moment("acquired", info.acquired_at),
        **output.moment("expires", info.expires_at),
        "document_version": info.document_version,
    }


def _seconds_or_dash(when: datetime | None) -> str:
    return "-" if when is None else output.seconds_text(when)


state_app = Section("JSON documents with versions.")

DocumentName: TypeAlias = Annotated[str, argument("NAME", "The document's name.")]
Version: TypeAlias = Annotated[
    int | None, option("--version N", "Only if this is its current version; 0 if it must not exist.", least=0)
]
LeaseIdOption: TypeAlias = Annotated[
    str | None, option("--lease-id LEASE", "Only while this lease of a lock is valid.")
]


@state_app.command("get")
def state_get_command(folder: DataFolder, name: DocumentName, as_json: AsJson = False) -> int:
    """Print a document as JSON. Does not lock the folder. Exit code: 3 if there is none.

    Examples:
        holdfast state get ./data cursor
    """
    document = _document(folder, check_name(name, "document"))
    if document is None:
        output.note(f"there is no document {output.safe(name)} in {output.safe(folder)}")
        return output.NOTHING_THERE
    if as_json:
        output.print_json(_document_facts(document, value=document.value))
    else:
        sys.stdout.write(output.json_text(document.value) + "\n")
    return output.OK


@state_app.command("put")
def state_put_command(
    folder: DataFolder,
    name: DocumentName,
    value: Annotated[str | None, argument("JSON", "The value; read from stdin by default.")] = None,
    version: Version = None,
    lease_id: LeaseIdOption = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Create or replace a document.

    Examples:
        holdfast state put ./data cursor '{"page": 17}'
        holdfast state put ./data cursor '{"page": 18}' --version 1
    """
    content = sys.stdin.buffer.read() if value is None else value.encode("utf-8", "surrogateescape")
    try:
        decoded = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the value is not JSON: {error}. A text needs its quotes: '\"a text\"'") from None
    with opened_broker(folder, wait=wait, create=True) as broker:
        document = broker.documents.update(name, decoded, version=version, lock=lease_id)
    if as_json:
        output.print_json(_document_facts(document))
    else:
        output.say(f"{output.safe(name)} is now at version {document.version}")
    return output.OK


@state_app.command("rm")
def state_rm_command(
    folder: DataFolder,
    name: DocumentName,
    version: Version = None,
    lease_id: LeaseIdOption = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Delete a document. Exit code: 3 if there is none.

    Examples:
        holdfast state rm ./data cursor
    """
    with opened_broker(folder, wait=wait) as broker:
        removed = broker.documents.remove(name, version=version, lock=lease_id)
    if as_json:
        output.print_json({"name": name, "removed": removed})
    else:
        output.say(f"{output.safe(name)} is removed" if removed else f"there is no document {output.safe(name)}")
    return output.OK if removed else output.NOTHING_THERE


@state_app.command("ls")
def state_ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the documents. Does not lock the folder.

    Examples:
        holdfast state ls ./data
    """
    found = _documents(folder)
    if as_json:
        output.print_each(_document_facts(document) for document, _ in found)
    elif not found:
        output.note(f"no documents in {output.safe(folder)}")
    else:
        shown = output.table("document", "version>", "bytes>")
        for document, size in found:
            shown.add_row(output.safe(document.name), str(document.version), f"{size:,}")
        output.stdout().print(shown)
    return output.OK


def _document(place: str, name: str) -> holdfast.Document | None:
    if is_address(place):
        with opened_broker(place) as broker:
            return broker.documents.get(name)
    topics_of(place)
    found = replayed_locks(real_world(), place).documents.get(name)
    return None if found is None else document_from(name, found)


def _documents(place: str) -> list[tuple[holdfast.Document, int]]:
    """Return all documents, with the size of each in bytes."""
    if is_address(place):
        with opened_broker(place) as broker:
            documents = [broker.documents.get(name) for name in broker.documents.list()]
            return [(each, len(msgspec.json.encode(each.value))) for each in documents if each is not None]
    topics_of(place)
    found = replayed_locks(real_world(), place).documents
    return [(document_from(name, content), len(content.content)) for name, content in found.items()]


def _document_facts(document: holdfast.Document, **more: Any) -> dict[str, Any]:
    return {"name": document.name, "version": document.version, **output.moment("updated", document.updated_at), **more}
