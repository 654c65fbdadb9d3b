"""What commands print: tables, JSON, colours if the terminal has them, and readable numbers and times."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

import typer

from holdfast.cli.places import AT, PROFILE, CommandApp, unbundled, with_place
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


_Function = TypeVar("_Function", bound=Callable[..., Any])


# Asking before an irreversible change.


def confirmed(question: str, what: str, *, yes: bool, as_json: bool) -> bool:
    """Ask for confirmation. Raises if there is no terminal and --yes is not given."""
    if yes:
        return True
    if as_json or not somebody_answers():
        raise InvalidRequest(
            f"{what} asks before it changes anything, and nobody is there to answer: "
            "look at it with --dry-run, then run it again with --yes. Nothing was changed"
        )
    # Not with `input`, which would print part of the question to stdout.
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not answer:
        stderr().print("Nothing was changed.")
    return answer


def somebody_answers() -> bool:
    return sys.stdin.isatty()


# Groups of commands, such as `holdfast topic`.


class CommandSection(CommandApp):
    """A group of commands, such as `holdfast topic`; called without a command, it prints its help."""

    def __init__(self, about: str) -> None:
        super().__init__(help=about, rich_markup_mode=None)
        self.callback(invoke_without_command=True)(_show_commands)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        """Register a command: a function that returns its exit code."""
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
    """Return the console for results. Created at each call, since stdout may be replaced."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console for everything that is not a result."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from holdfast.cli.console import OurConsole

    return OurConsole(stderr=stderr)


def say(text: str) -> None:
    """Print one line of the result. It is not wrapped, so that it can be copied."""
    stdout().print(text, soft_wrap=True)


def note(text: str) -> None:
    """Print one line to stderr."""
    stderr().print(text, soft_wrap=True)


def json_text(document: Any, *, indent: int | None = None) -> str:
    """Return JSON in plain ASCII, without control characters."""
    return json.dumps(document, indent=indent)


def write_bytes(content: bytes) -> None:
    """Write all of it to stdout, after what was printed before.

    With PYTHONUNBUFFERED, stdout has no buffer, and a write may be partial without raising if the reader goes away
    in the middle of it.
    """
    sys.stdout.flush()
    rest = memoryview(content)
    while rest:
        rest = rest[sys.stdout.buffer.write(rest) :]


def print_json(document: Any) -> None:
    """Print the JSON document that is a command's result."""
    _write_ascii(json_text(document, indent=2) + "\n")


def print_json_line(document: Any) -> None:
    _write_ascii(json_text(document) + "\n")


def _write_ascii(text: str) -> None:
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        write_bytes(text.encode("ascii"))
    else:
        sys.stdout.write(text)


def print_error(code: str, message: str, *, as_json: bool) -> None:
    """Print one line to stderr; more if the message marks a place in an expression, or lists several errors."""
    if as_json:
        line = json_text({"error": {"code": code, "message": message}})
    elif code == BadSettings.code:
        line = "error: " + "\n- ".join(map(safe, message.split("\n- ")))  # a settings file may have many errors
    else:
        line = f"error: {safe_lines(message)}"
    sys.stdout.flush()
    sys.stderr.write(line + "\n")


def command(function: Callable[_P, int]) -> Callable[_P, None]:
    """Make a command of a function that returns an exit code. Errors become a line and a code, never a traceback."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        for name in (AT, PROFILE):  # their value has become the folder argument
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


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    with suppress(ImportError, ValueError):
        return find_spec(package) is not None
    return False


def hush() -> None:
    """Discard what the interpreter still writes to stdout at exit, since its reader is gone."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# Consoles, progress bars and live screens. Rich is slow to import, so only commands that print for people use it.

# The columns of each kind of bar, and when the work is long enough to show one.
_BARS: Final[dict[str, tuple[str, Callable[[int, int], bool]]]] = {
    "count": ("Spinner Text MofNComplete TimeElapsed", lambda done, total: done >= 1_000),
    "share": ("Bar Text MofNComplete TimeElapsed", lambda done, total: done > 0),
    "bytes": ("Text Bar Download TimeRemaining", lambda done, total: total >= 256 * 1024 * 1024),
}


@contextmanager
def progress(what: str, kind: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the amount done and the total; shows a bar on stderr if that is a terminal."""
    console = stderr()
    if not shown or not console.is_terminal:
        yield lambda done, total=0: None
        return
    from rich import progress as rich_progress

    columns, is_long = _BARS[kind]
    options: dict[str, dict[str, Any]] = {"Text": {"text_format": what}, "Download": {"binary_units": True}}
    made = [getattr(rich_progress, f"{name}Column")(**options.get(name, {})) for name in columns.split()]
    bar = rich_progress.Progress(*made, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int = 0) -> None:
        if is_long(done, total):
            bar.start()
            bar.update(task, completed=done, total=total or None)

    try:
        yield update
    finally:
        bar.stop()


# Output that is refreshed: repainted on a terminal, appended elsewhere.


class Screen(Protocol):
    """Where refreshed output is shown."""

    def update(self, shown: RenderableType, *, refresh: bool) -> None: ...


class Plain:
    """Replaces rich's Live without a terminal: prints one table after the other."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, shown: RenderableType, *, refresh: bool) -> None:
        self._console.print(shown)


def screen(console: Console, *, painted: bool = True, whole: bool = False) -> Any:
    """Return a context manager for refreshed output: on the terminal, full-screen if `whole`, or appended to a file."""
    if console.is_terminal and painted:
        from rich.live import Live

        return Live(console=console, auto_refresh=False, screen=whole)
    return Plain(console)


# Making values safe to print: the content of a message must never control the terminal.


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def safe(text: str) -> str:
    """Escape everything in the text that is not plainly visible: `\\x1b`, `\\n`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def safe_lines(text: str) -> str:
    """Make a text safe that may mark a place with a caret; keeps its lines, and the caret's column."""
    lines = text.split("\n")
    if not any(line.strip(" ") == "^" for line in lines):
        return safe(text)  # line breaks in any other text come from user data
    from rich.cells import cell_len

    shown: list[str] = []
    for i, line in enumerate(lines):
        if i and line.strip(" ") == "^":
            shown.append(" " * cell_len(safe(lines[i - 1][: len(line) - 1])) + "^")
        else:
            shown.append(safe(line))
    return "\n".join(shown)


def preview(value: bytes, most: int) -> str:
    """Return the start of a value on one line of at most `most` characters; bytes that are not text are escaped."""
    # A character has at most four bytes, so one that is cut off here is beyond what is shown.
    text = safe(value[: most * 4 + 4].decode("utf-8", "backslashreplace"))
    return text if len(text) <= most else text[: most - 1] + "…"


def as_json(name: str, value: bytes | None) -> dict[str, Any]:
    """Return a value for a JSON object: as text under its name, or in base64 if it is not UTF-8."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode("ascii")}


def iso_time(time_ns: int | None) -> str | None:
    """Return UTC in ISO 8601 with all nine digits; None if there is no time or no such date."""
    if time_ns is None:
        return None
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    try:
        return f"{_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{rest_ns:09d}Z"
    except OverflowError:
        return None


def short_time(time_ns: int | None) -> str:
    """Return UTC to the second, for tables."""
    text = iso_time(time_ns)
    return "-" if text is None else text[:19].replace("T", " ")


def moment(name: str, when: datetime | None) -> dict[str, Any]:
    """Return a time for a JSON object in two forms: ISO 8601, and milliseconds since 1970."""
    if when is None:
        return {name: None, f"{name}_ms": None}
    text = when.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {name: text, f"{name}_ms": (when - _EPOCH) // timedelta(milliseconds=1)}


def seconds_text(when: datetime | None) -> str:
    """Format a time as UTC to the second."""
    return "" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def time_ns_of(text: str) -> int:
    """Parse an ISO 8601 time to nanoseconds since 1970; UTC if it names no zone. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def size(number: int) -> str:
    """Format a number of bytes."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{number:,} B" if unit == 0 else f"{value:,.1f} {_UNITS[unit]}"


def duration(microseconds: float) -> str:
    """Format a latency."""
    if microseconds < 1000:
        return f"{microseconds:,.0f} µs"
    return f"{microseconds / 1000:,.1f} ms" if microseconds < 1_000_000 else f"{microseconds / 1e6:,.1f} s"


# Plain tables: numbers are right-aligned, names are never cut.


def table(*titles: str, wide: str = "") -> Table:
    """Return a table. A title ending in `>` is of a column of numbers; the `wide` column may wrap."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in titles:
        name = title.removesuffix(">")
        if name == wide:
            made.add_column(name, overflow="fold", min_width=len(name))
        else:
            made.add_column(name, justify="right" if title.endswith(">") else "left", no_wrap=True)
    return made


def facts_table() -> Table:
    """Return a table of two columns without titles, a name and a fact, which may wrap."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    return made


def ruled_table(*titles: str) -> Table:
    """Return a table with a line below its titles, whose cells may wrap."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold")
    return made


def show_table(console: Console, shown: Table) -> None:
    """Print a table; on a terminal that is too narrow, names overflow rather than being cut."""
    from rich.cells import cell_len
    from rich.measure import Measurement

    for column in shown.columns:
        if column.no_wrap:  # otherwise rich breaks it at a space
            column.min_width = max(cell_len(str(text)) for text in (column.header, *column.cells))
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).minimum
    width = console.width
    console.width = max(width, needed)
    console.print(shown)
    console.width = width
