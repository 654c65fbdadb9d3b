"""`holdfast state`: documents with versions, changed by compare-and-swap."""

from __future__ import annotations

import sys
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

import holdfast
from holdfast.broker.folder.layout import check_name
from holdfast.broker.locks import replayed_locks
from holdfast.cli.look.messages import moment
from holdfast.cli.opening import opened_broker, topics_of
from holdfast.cli.options import WAIT, AsJson, DataFolder, Wait
from holdfast.cli.output import NOTHING_THERE, OK, Section, command, json_text, print_json, stderr, stdout
from holdfast.cli.text import safe, show_table, table
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.local.locks import document_from

app = Section("State documents: JSON values with versions.")

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The document's name.")]
Version: TypeAlias = Annotated[
    int | None, typer.Option("--version", metavar="N", min=0, help="Only if it has this version; 0: if there is none.")
]
LeaseIdOption: TypeAlias = Annotated[
    str | None, typer.Option("--lease-id", metavar="LEASE", help="Only while this lease of a lock is good.")
]


@app.command("get")
@command
def get_command(folder: DataFolder, name: Name, as_json: AsJson = False) -> int:
    """Print a document as JSON. Takes no lock of the folder. Exit code: 3 where there is none."""
    document = _document(folder, check_name(name, "document"))
    if document is None:
        stderr().print(f"there is no document {safe(name)} in {safe(folder)}", soft_wrap=True)
        return NOTHING_THERE
    if as_json:
        print_json(_facts(document, value=document.value))
    else:
        sys.stdout.write(json_text(document.value, indent=2) + "\n")
    return OK


@app.command("put")
@command
def put_command(
    folder: DataFolder,
    name: Name,
    value: Annotated[str | None, typer.Argument(metavar="JSON", help="The value; stdin by default.")] = None,
    version: Version = None,
    lease_id: LeaseIdOption = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Make or replace a document."""
    content = sys.stdin.buffer.read() if value is None else value.encode("utf-8", "surrogateescape")
    try:
        decoded = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the value is no JSON: {error}. A text needs its quotes: '\"a text\"'") from None
    with opened_broker(folder, wait=wait, create=True) as broker:
        document = broker.documents.update(name, decoded, version=version, lock=lease_id)
    if as_json:
        print_json(_facts(document))
    else:
        stdout().print(f"{safe(name)} has version {document.version} now", soft_wrap=True)
    return OK


@app.command("rm")
@command
def rm_command(
    folder: DataFolder,
    name: Name,
    version: Version = None,
    lease_id: LeaseIdOption = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Take a document away. Exit code: 3 where there is none."""
    with opened_broker(folder, wait=wait) as broker:
        removed = broker.documents.remove(name, version=version, lock=lease_id)
    if as_json:
        print_json({"name": name, "removed": removed})
    else:
        stdout().print(f"{safe(name)} is removed" if removed else f"there is no document {safe(name)}", soft_wrap=True)
    return OK if removed else NOTHING_THERE


@app.command("ls")
@command
def ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the documents. Takes no lock of the folder."""
    found = _documents(folder)
    if as_json:
        print_json({"folder": folder, "documents": [_facts(document) for document, _ in found]})
    elif not found:
        stderr().print(f"no documents in {safe(folder)}", soft_wrap=True)
    else:
        shown = table("document", "version>", "bytes>")
        for document, size in found:
            shown.add_row(safe(document.name), str(document.version), f"{size:,}")
        show_table(stdout(), shown)
    return OK


def _document(place: str, name: str) -> holdfast.Document | None:
    if is_address(place):
        with opened_broker(place) as broker:
            return broker.documents.get(name)
    topics_of(place)
    found = replayed_locks(real_world(), place).table.documents.get(name)
    return None if found is None else document_from(name, found)


def _documents(place: str) -> list[tuple[holdfast.Document, int]]:
    """All of them, and how many bytes each has."""
    if is_address(place):
        with opened_broker(place) as broker:
            documents = [broker.documents.get(name) for name in broker.documents.list()]
            return [(each, len(msgspec.json.encode(each.value))) for each in documents if each is not None]
    topics_of(place)
    found = sorted(replayed_locks(real_world(), place).table.documents.items())
    return [(document_from(name, content), len(content.content)) for name, content in found]


def _facts(document: holdfast.Document, **more: Any) -> dict[str, Any]:
    return {"name": document.name, "version": document.version, **moment("updated", document.updated_at), **more}
