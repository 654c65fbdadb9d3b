"""Output of commands: results on stdout, everything else on stderr, errors on one line, and an exit code.

0    done; nothing is wrong
1    done, but damage was found, or is left
2    not done: a mistake in the call, no such log or queue, it has another owner, the disk is full
3    nothing there: no message was ready in time
130  interrupted
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import typer

from holdfast.cli.places import AT, PROFILE, CommandApp, unbundled, with_place
from holdfast.cli.text import safe, safe_lines
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Asking before something is changed for good.


def confirmed(question: str, what: str, *, yes: bool, as_json: bool) -> bool:
    """Ask for confirmation. Without a terminal and without --yes that is an error."""
    if yes:
        return True
    if as_json or not somebody_answers():
        raise InvalidRequest(
            f"{what} asks before it changes anything, and nobody is there to answer: "
            "look at it with --dry-run, then run it again with --yes. Nothing was changed"
        )
    # Not by way of `input`, which would put a part of the question on stdout.
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not answer:
        stderr().print("Nothing was changed.")
    return answer


def somebody_answers() -> bool:
    return sys.stdin.isatty()


# Commands behind one word, such as `holdfast topic`.


class CommandSection(CommandApp):
    """A group of commands, such as `holdfast topic`; called without a command, it prints its help."""

    def __init__(self, about: str) -> None:
        super().__init__(help=about, rich_markup_mode=None)
        self.callback(invoke_without_command=True)(_show_commands)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        """One of the commands: a function that answers with its exit code."""
        added = super().command(name, **options)

        def add(function: _Function) -> _Function:
            added(command(function))
            return function

        return add


def _show_commands(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())
        raise typer.Exit(NOT_DONE)


OK: Final = 0
DAMAGED: Final = 1
NOT_DONE: Final = 2
NOTHING_THERE: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_P = ParamSpec("_P")


def stdout() -> Console:
    """For results. Made when needed, so that it writes to what stdout is at that moment."""
    return _console(stderr=False)


def stderr() -> Console:
    """For everything that is not the result."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from holdfast.cli.console import OurConsole

    return OurConsole(stderr=stderr)


def say(text: str) -> None:
    """One line of the result; it is not broken, so that it can be copied."""
    stdout().print(text, soft_wrap=True)


def note(text: str) -> None:
    """One line on stderr."""
    stderr().print(text, soft_wrap=True)


def json_text(document: Any, *, indent: int | None = None) -> str:
    """JSON in plain ASCII, without control characters."""
    return json.dumps(document, indent=indent)


def write_bytes(content: bytes) -> None:
    """Write all of it to stdout, after what was printed before.

    With PYTHONUNBUFFERED stdout has no buffer, and one write may take only a part: if the reader goes away then, it
    raises nothing.
    """
    sys.stdout.flush()
    rest = memoryview(content)
    while rest:
        rest = rest[sys.stdout.buffer.write(rest) :]


def print_json(document: Any) -> None:
    """The one JSON document that a command answers with."""
    _write_ascii(json_text(document, indent=2) + "\n")


def print_json_line(document: Any) -> None:
    _write_ascii(json_text(document) + "\n")


def _write_ascii(text: str) -> None:
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        write_bytes(text.encode("ascii"))
    else:
        sys.stdout.write(text)


def print_error(code: str, message: str, *, as_json: bool) -> None:
    """One line on stderr; more where the message points at a place in an expression, or lists mistakes."""
    if as_json:
        line = json_text({"error": {"code": code, "message": message}})
    elif code == BadSettings.code:
        line = "error: " + "\n- ".join(map(safe, message.split("\n- ")))  # a settings file may have many mistakes
    else:
        line = f"error: {safe_lines(message)}"
    sys.stdout.flush()
    sys.stderr.write(line + "\n")


def command(function: Callable[_P, int]) -> Callable[_P, None]:
    """A command that answers with its exit code; errors become a line and a code, never a traceback."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        for name in (AT, PROFILE):  # the folder has the place now
            kwargs.pop(name, None)
        for name, kind in bundles.items():
            kwargs[name] = kind(**{field: kwargs.pop(field) for field in kind._fields})
        raise typer.Exit(_exit_code(lambda: function(*args, **kwargs), as_json=as_json))

    signature, bundles = unbundled(function)
    run.__signature__ = with_place(signature)  # type: ignore[attr-defined]
    return run


def _exit_code(call: Callable[[], int], *, as_json: bool) -> int:
    try:
        code = call()
        sys.stdout.flush()
    except HoldfastError as error:
        print_error(error.code, str(error), as_json=as_json)
        return NOT_DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        hush()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error("os_error", f"{where}{error.strerror or error}", as_json=as_json)
        return NOT_DONE
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        message = f"{type(error).__name__}: {error}. This is a bug in holdfast; set HOLDFAST_TRACEBACK=1 to see where"
        print_error("internal", message, as_json=as_json)
        return NOT_DONE
    return code


def hush() -> None:
    """Discard what the interpreter still writes to stdout at exit, since its reader is gone."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
