"""The command line: which commands there are, and how mistakes in a call are answered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Final

import typer

from holdfast import __version__
from holdfast.cli import (
    check,
    completion,
    config,
    consume,
    dead,
    doctor,
    get,
    group,
    lock,
    log,
    look,
    operate,
    pipeline,
    produce,
    profile,
    put,
    repair,
    serve,
    server,
    settings,
    settle,
    state,
    stats,
    tail,
    token,
    top,
    topic,
    trace,
    ui,
    worker,
)
from holdfast.cli.output import INTERRUPTED, NOT_DONE, print_error
from holdfast.cli.placed import PLACE, App
from holdfast.errors import HoldfastError

app = App(
    name="holdfast",
    help="Durable queues and topics in a folder: put, get, look, check, repair. All of them speak JSON (--json).",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("put")(put.put_command)
app.command("get")(get.get_command)
app.command("ack")(settle.ack_command)
app.command("nack")(settle.nack_command)
app.command("reject")(settle.reject_command)
app.command("defer")(settle.defer_command)
app.command("extend")(settle.extend_command)
app.command("produce")(produce.produce_command)
app.command("consume")(consume.consume_command)
app.command("worker")(worker.worker_command)
app.command("peek")(look.peek_command)
app.command("tail")(tail.tail_command)
app.command("list")(look.list_command)
app.command("show")(look.show_command)
app.command("stats")(stats.stats_command)
app.command("top")(top.top_command)
app.command("cancel")(operate.cancel_command)
app.command("seek")(operate.seek_command)
app.command("compact")(operate.compact_command)
app.command("settings")(settings.settings_command)
app.add_typer(completion.app, name="completion")
app.add_typer(config.app, name="config")
app.add_typer(dead.app, name="dead")
app.add_typer(group.app, name="group")
app.add_typer(lock.app, name="lock")
app.add_typer(log.app, name="log")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(profile.app, name="profile")
app.add_typer(state.app, name="state")
app.add_typer(token.app, name="token")
app.add_typer(topic.app, name="topic")
app.add_typer(trace.app, name="trace")
app.command("serve")(serve.serve_command)
app.command("ui")(ui.ui_command)
app.command("status")(server.status_command)
app.command("waiters")(server.waiters_command)
app.command("audit")(server.audit_command)
app.command("check")(check.check_command)
app.command("repair")(repair.repair_command)
app.command("doctor")(doctor.doctor_command)

# The package behind typer has been click and a copy of it; either way this is the root of its errors.
_CallError: Final = next(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and kind.__name__ == "ClickException"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"holdfast {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    at: Annotated[
        str | None, typer.Option("--at", metavar=PLACE, help="Where the command works, instead of its first argument.")
    ] = None,
    profile_name: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="The same by the name of a profile.")
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit(NOT_DONE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # File names need not be text, and a terminal need not know every letter.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_run(given))


@cache
def _commands() -> Callable[..., Any]:
    """All commands; made once, since that takes longer than most of them."""
    return typer.main.get_command(app)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = _commands()(list(arguments), prog_name="holdfast", standalone_mode=False)
    except _CallError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "holdfast"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        print_error("usage", f"{message} (see `{path} --help`)", as_json="--json" in arguments)
        return NOT_DONE
    except HoldfastError as error:
        print_error(error.code, str(error), as_json="--json" in arguments)
        return NOT_DONE
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
