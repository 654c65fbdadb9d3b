"""The command line: which commands there are, and how mistakes in a call are answered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from holdfast import __version__
from holdfast.cli import check, doctor, log, repair
from holdfast.cli.output import INTERRUPTED, NOT_DONE, print_error

app = typer.Typer(
    name="holdfast",
    help="Durable logs: look into them, check them, repair them. Every command also speaks JSON (--json).",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(log.app, name="log")
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


def _run(arguments: Sequence[str]) -> int:
    try:
        code = app(list(arguments), prog_name="holdfast", standalone_mode=False)
    except _CallError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "holdfast"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        print_error("usage", f"{message} (see `{path} --help`)", as_json="--json" in arguments)
        return NOT_DONE
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
