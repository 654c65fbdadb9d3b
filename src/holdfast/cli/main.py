"""The entry point of the command line: the list of commands, and how usage errors are reported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Final

import typer

from holdfast import __version__
from holdfast.cli.output import INTERRUPTED, NOT_DONE, print_error
from holdfast.cli.places import PLACE, CommandApp, option
from holdfast.env.process import set_variable
from holdfast.errors import HoldfastError
from holdfast.storage.files import TRUST

# The module of each command, in the order of the help. Only the module of the command that runs is imported.
_COMMANDS: Final = {
    "put": "use.put:put_command",
    "get": "use.get:get_command",
    "ack": "use.get:ack_command",
    "nack": "use.get:nack_command",
    "reject": "use.get:reject_command",
    "defer": "use.get:defer_command",
    "extend": "use.get:extend_command",
    "produce": "use.put:produce_command",
    "consume": "use.consume:consume_command",
    "worker": "use.consume:worker_command",
    "peek": "look.messages:peek_command",
    "tail": "use.consume:tail_command",
    "list": "look.messages:list_command",
    "show": "look.messages:show_command",
    "stats": "look.stats:stats_command",
    "top": "look.stats:top_command",
    "cancel": "operate.queue:cancel_command",
    "seek": "operate.queue:seek_command",
    "purge": "operate.queue:purge_command",
    "compact": "operate.queue:compact_command",
    "apply-retention": "operate.queue:apply_retention_command",
    "settings": "operate.settings:settings_command",
    "completion": "opening:completion_app",
    "config": "operate.settings:settings_file_app",
    "dead": "operate.queue:dead_app",
    "group": "operate.topics:group_app",
    "lock": "use.locks:lock_app",
    "log": "look.log:app",
    "pipeline": "pipeline:app",
    "profile": "operate.settings:app",
    "state": "use.locks:state_app",
    "token": "operate.token:app",
    "topic": "operate.topics:topic_app",
    "trace": "look.trace:app",
    "serve": "serve:serve_command",
    "ui": "serve:ui_command",
    "status": "serve:status_command",
    "waiters": "serve:waiters_command",
    "audit": "serve:audit_command",
    "check": "operate.check:check_command",
    "repair": "operate.check:repair_command",
    "doctor": "operate.doctor:doctor_command",
}
_COMPLETING: Final = "_HOLDFAST_COMPLETE"
_WITH_VALUE: Final = ("--at", "--profile")
_WITHOUT: Final = ("--trust-folder",)

# Depending on its version, typer uses click or a vendored copy of it; this is the base class of its errors.
_CallError: Final = next(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and kind.__name__ == "ClickException"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"holdfast {__version__}\n")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[bool, option("--version", "Print the version.", callback=_show_version, is_eager=True)] = False,
    at: Annotated[
        str | None, typer.Option("--at", metavar=PLACE, help="Where the command works, instead of its first argument.")
    ] = None,
    profile_name: Annotated[str | None, option("--profile NAME", "The same by the name of a profile.")] = None,
    trust_folder: Annotated[
        bool, option("--trust-folder", "Use a folder though other users may write to it, or have it.")
    ] = False,
) -> None:
    if trust_folder:
        set_variable(TRUST, "true")
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit(NOT_DONE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # File names need not be valid text, and a terminal need not support every character.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_run(given))


def app_of(names: Iterable[str]) -> CommandApp:
    """Return the program with these commands."""
    app = CommandApp(
        name="holdfast",
        help="Durable queues and topics, in a folder or at a server: put, get, look, check, repair. All speak JSON.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_root)
    for name in names:
        module, _, attribute = _COMMANDS[name].partition(":")
        found = getattr(importlib.import_module(f"holdfast.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return app_of(_COMMANDS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _program(name: str | None) -> Callable[..., Any]:
    """Return the program with one command, or with all. Cached: building it takes longer than most commands run."""
    return typer.main.get_command(app_of(_COMMANDS if name is None else [name]))


def _named(arguments: Sequence[str]) -> str | None:
    """Return the command that is called; None if there is no such command, or if all of them are needed."""
    if _COMPLETING in os.environ:
        return None
    words = iter(arguments)
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word in _WITHOUT:
            continue
        elif not word.startswith("-"):
            return word if word in _COMMANDS else None
        elif not word.startswith(tuple(f"{each}=" for each in _WITH_VALUE)):
            return None
    return None


def _run(arguments: Sequence[str]) -> int:
    try:
        code = _program(_named(arguments))(list(arguments), prog_name="holdfast", standalone_mode=False)
    except _CallError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "holdfast"
        message = error.format_message().rstrip(".").replace(": Value error, ", ": ")  # type: ignore[attr-defined]
        print_error("usage", f"{message} (see `{path} --help`)", as_json="--json" in arguments)
        return NOT_DONE
    except HoldfastError as error:
        print_error(error.code, str(error), as_json="--json" in arguments)
        return NOT_DONE
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
