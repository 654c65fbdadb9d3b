"""`holdfast transaction`: what is published, acked and written takes effect together, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

from holdfast.api import port_of
from holdfast.api.transactions import TransactionInfo
from holdfast.broker.folder.layout import check_name
from holdfast.broker.transactions import stored_transactions
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, Wait, opened_broker
from holdfast.cli.parsing import Section, argument
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.local.transactions import infos_of

app = Section("Messages, acks and documents that take effect together.")

TransactionName: TypeAlias = Annotated[str, argument("NAME", "The transaction's name.")]
_STDIN = "-"


@app.command("commit")
def commit_command(
    folder: DataFolder,
    file: Annotated[str, argument("FILE", "What to do, as JSON; `-` reads it from stdin.")] = _STDIN,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Publish, ack and write what a JSON file says, all of it or nothing, and print the ids of the messages.

    The JSON is the body of POST /v1/transactions/commit, with messages, acks and documents. With the name and the
    epoch of an earlier commit, the answer is the same, and nothing is done again.

    Examples:
        holdfast transaction commit ./data done.json
        echo '{"messages": [{"topic": "invoices", "text": "1 book"}]}' | holdfast transaction commit ./data
    """
    from holdfast.protocol.media import JSON, decode
    from holdfast.protocol.transactions import CommitTransaction
    from holdfast.server.api.transactions import request_of

    given: CommitTransaction = decode(_content(file), JSON, CommitTransaction)
    if given.offsets:
        raise InvalidRequest("offsets cannot be committed here: they belong to a consumer, which this command is not")
    with opened_broker(folder, wait=wait) as broker:
        port = port_of(broker).transactions()
        name, epoch = (given.name, given.epoch) if given.name is not None else port.begin(None)
        stored = port.commit(request_of(given, name, epoch))
    if as_json:
        output.print_json({"name": name, "epoch": epoch, "ids": [each.id for each in stored]})
    else:
        for each in stored:
            output.say(output.safe(each.id))
    return output.OK


@app.command("ls")
def ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the transactions that have a name. Does not lock the folder.

    Examples:
        holdfast transaction ls ./data
    """
    found = _transactions(folder)
    if as_json:
        output.print_each(map(_document, found))
    elif not found:
        output.note(f"no transactions with a name in {output.safe(folder)}")
    else:
        shown = output.table("transaction", "begun>", "last change", "state")
        for each in found:
            changed = output.seconds_text(each.changed_at)
            shown.add_row(output.safe(each.name), f"{each.epoch:,}", changed, _state(each))
        output.stdout().print(shown)
    return output.OK


@app.command("rm")
def rm_command(folder: DataFolder, name: TransactionName, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Forget the name of a transaction; a program that still uses it cannot commit. Exit code: 3 if there is none.

    Examples:
        holdfast transaction rm ./data billing
    """
    with opened_broker(folder, wait=wait) as broker:
        deleted = broker.transactions.delete(name)
    if as_json:
        output.print_json({"name": name, "deleted": deleted})
    else:
        output.say(f"{output.safe(name)} is forgotten" if deleted else f"there is no transaction {output.safe(name)}")
    return output.OK if deleted else output.NOTHING_THERE


def _content(file: str) -> bytes:
    if file == _STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}; name a file, or - for stdin") from None


def _transactions(folder: str) -> list[TransactionInfo]:
    if is_address(folder):
        with opened_broker(folder) as broker:
            return broker.transactions.list()
    return infos_of(stored_transactions(real_world(), folder))


def _state(each: TransactionInfo) -> str:
    if each.unfinished:
        return "committed, unfinished"
    return "committed" if each.committed else "begun"


def _document(each: TransactionInfo) -> dict[str, object]:
    return {
        "name": check_name(each.name, "transaction"),
        "epoch": each.epoch,
        "committed": each.committed,
        "unfinished": each.unfinished,
        **output.moment("changed_at", each.changed_at),
    }
