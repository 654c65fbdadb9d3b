"""What commands print: tables, JSON, colours if the terminal has them, and readable numbers and times."""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from holdfast.cli.parsing import UsageError, cells
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.later import json

# Asking before an irreversible change.


def confirmed(question: str, what: str, *, yes: bool, as_json: bool, looks: bool = True) -> bool:
    """Ask for confirmation. Raises if there is no terminal and --yes is not given; `looks`: it has --dry-run, too."""
    if yes:
        return True
    if as_json or not somebody_answers():
        look = "look at it with --dry-run, then " if looks else ""
        raise InvalidRequest(
            f"{what} asks for confirmation, and there is no terminal: "
            f"{look}run it again with --yes. Nothing was changed"
        )
    # Not with `input`, which would print part of the question to stdout.
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not answer:
        note("Nothing was changed.")
    return answer


def somebody_answers() -> bool:
    return sys.stdin.isatty()


# Exit codes, and how a command ends.


OK: Final = 0
DAMAGED: Final = 1
NOT_DONE: Final = 2
NOTHING_THERE: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141


def stdout() -> Console:
    """Return the console for results. Created at each call, since stdout may be replaced."""
    return Console(sys.stdout)


def stderr() -> Console:
    """Return the console for everything that is not a result."""
    return Console(sys.stderr)


def say(text: str) -> None:
    """Print one line of the result. It is not wrapped, so that it can be copied."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """Print one line to stderr."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")


def json_text(document: Any) -> str:
    """Return JSON on one line, in plain ASCII, without control characters."""
    return json.dumps(document)


def write_bytes(content: bytes) -> None:
    """Write all of it to stdout, after what was printed before.

    With PYTHONUNBUFFERED, stdout has no buffer, and a write may be partial without raising if the reader goes away
    in the middle of it.
    """
    sys.stdout.flush()
    rest = memoryview(content)
    while rest:
        rest = rest[sys.stdout.buffer.write(rest) :]


def print_each(documents: Iterable[Any]) -> None:
    """Print a list as JSON: each of its objects on a line of its own."""
    for document in documents:
        print_json(document)


def print_json(document: Any) -> None:
    """Print one JSON object on a line of its own."""
    text = json_text(document) + "\n"
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
    try:
        sys.stdout.flush()
    except OSError:
        hush()  # it may be stdout that failed, and the interpreter would try again
    sys.stderr.write(line + "\n")


def exit_code(call: Callable[[], int], *, as_json: bool) -> int:
    """Run a command and return its exit code. Errors become a line and a code, never a traceback."""
    try:
        code = call()
        sys.stdout.flush()
    except UsageError as error:
        print_error("usage", f"{error} (see `{error.path} --help`)", as_json=as_json)
        return NOT_DONE
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
    except Exception as error:
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        message = f"{type(error).__name__}: {error}. This is a bug in holdfast; set HOLDFAST_TRACEBACK=1 to see where"
        print_error("internal", message, as_json=as_json)
        return NOT_DONE
    return code


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    from importlib.util import find_spec  # few commands ask

    with suppress(ImportError, ValueError):
        return find_spec(package) is not None
    return False


def hush() -> None:
    """Discard what the interpreter still writes to stdout at exit, since its reader is gone."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# Consoles, styles and tables. Drawn here rather than by a library, which takes longer to load than most commands run.

# The width for pipes, which need no line breaks.
_PIPE_CELLS: Final = 1_000
_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


class Text:
    """A line of text with styles such as `bold red`, which terminals show and files do not."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts = [(text, style)]

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str]) -> Text:
        """Return a text of several parts, plain or with a style."""
        made = cls()
        for part in parts:
            made.append(*((part, "") if isinstance(part, str) else part))
        return made

    def append(self, text: str, style: str = "") -> None:
        self.parts.append((text, style))

    def stripped(self) -> Text:
        """Drop the spaces at the end."""
        while self.parts and not self.parts[-1][0].strip(" "):
            self.parts.pop()
        if self.parts:
            text, style = self.parts.pop()
            self.parts.append((text.rstrip(" "), style))
        return self

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def cell_len(self) -> int:
        return cell_len(self.plain)

    def painted(self) -> str:
        """Return the text with the codes that make a terminal show its styles."""
        return "".join(
            f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m" if style and text else text
            for text, style in self.parts
        )


def cell_len(text: str) -> int:
    """Return how many cells of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, most: int) -> str:
    """Return the text, or as much of it as fits into so many cells."""
    if cell_len(text) <= most:
        return text
    while text and cell_len(text) > most - 1:
        text = text[:-1]
    return f"{text}…" if most else ""


class Console:
    """Where a command prints: knows its width, and whether it shows styles."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.is_terminal = file.isatty()
        self.styled = self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        piped = file is sys.stdout and not self.is_terminal and not os.environ.get("COLUMNS")
        self.width = _PIPE_CELLS if piped else cells()

    def print(self, shown: str | Text | Table = "") -> None:
        """Print a line or a table. Lines are not broken, so that they can be copied."""
        self.file.write(self.painted(shown) + "\n")

    def painted(self, shown: str | Text | Table) -> str:
        """Return what would be printed."""
        if isinstance(shown, Table):
            return "\n".join(line.painted() if self.styled else line.plain for line in shown.lines(self.width)).rstrip()
        return shown if isinstance(shown, str) else shown.painted() if self.styled else shown.plain


class Column(NamedTuple):
    """A column: cut at `cells` if it is set; if it is `wide`, its cells may be broken into several lines."""

    title: str
    right: bool = False
    wide: bool = False
    cells: int | None = None


class Table:
    """Rows of cells, of which some may have several lines. Names are never cut; a wide column gives way."""

    def __init__(self, *columns: Column, titles: bool = True, ruled: bool = False, gap: int = 2) -> None:
        self._columns = list(columns)
        self._rows: list[list[str | Text]] = []
        self._titles = titles
        self._ruled = ruled
        self._gap = " " * gap

    def add_row(self, *texts: str | Text) -> None:
        self._rows.append(list(texts))

    def __len__(self) -> int:
        return len(self._rows)

    def lines(self, room: int) -> Iterator[Text]:
        """Yield the lines for a terminal of this width."""
        widths = self._widths(room)
        if self._titles:
            yield from self._row([column.title for column in self._columns], widths)
            if self._ruled:
                yield Text("─" * min(sum(widths) + len(self._gap) * (len(widths) - 1), room))
        for row in self._rows:
            yield from self._row(row, widths)

    def _widths(self, room: int) -> list[int]:
        widths = []
        for number, column in enumerate(self._columns):
            texts = [_plain(row[number]) for row in self._rows] + ([column.title] if self._titles else [])
            longest = max((cell_len(line) for text in texts for line in text.split("\n")), default=0)
            widths.append(longest if column.cells is None else column.cells)
        over = sum(widths) + len(self._gap) * (len(widths) - 1) - room
        for number in sorted(range(len(widths)), key=lambda each: -widths[each]):
            if over > 0 and self._columns[number].wide:
                least = max(len(self._columns[number].title), min(widths[number], 16))
                over, widths[number] = (
                    over - (widths[number] - max(least, widths[number] - over)),
                    max(least, widths[number] - over),
                )
        return widths

    def _row(self, row: Sequence[str | Text], widths: Sequence[int]) -> Iterator[Text]:
        folded = [self._cell(*each) for each in zip(row, self._columns, widths, strict=True)]
        for number in range(max(len(each) for each in folded)):
            line = Text()
            for place, (column, width) in enumerate(zip(self._columns, widths, strict=True)):
                part = folded[place][number] if number < len(folded[place]) else Text()
                space = " " * max(width - part.cell_len, 0)
                line.append(space if column.right else "")
                line.parts += part.parts
                line.append("" if column.right or place == len(widths) - 1 else space)
                line.append(self._gap if place < len(widths) - 1 else "")
            yield line.stripped()

    def _cell(self, text: str | Text, column: Column, width: int) -> list[Text]:
        if column.cells is not None:
            return [Text(cut(_plain(text), width))]
        if isinstance(text, Text):
            return [text]
        lines = [part for line in text.split("\n") for part in (_folded(line, width) if column.wide else [line])]
        return [Text(line) for line in lines]


def _plain(text: str | Text) -> str:
    return text if isinstance(text, str) else text.plain


def _folded(line: str, width: int) -> list[str]:
    """Break a line between words, and a word that is too long anywhere."""
    found = [""]
    for word in line.split(" "):
        fits = cell_len(found[-1]) + cell_len(word) + 1 <= width
        if found[-1] and fits:
            found[-1] += f" {word}"
            continue
        if found[-1]:
            found.append("")
        while cell_len(word) > width:
            found[-1:] = [word[:width], ""]
            word = word[width:]
        found[-1] += word
    return found


def table(*titles: str, wide: str = "") -> Table:
    """Return a table. A title ending in `>` is of a column of numbers; the `wide` column may be broken."""
    names = [(title.removesuffix(">"), title.endswith(">")) for title in titles]
    return Table(*(Column(name, right, wide=name == wide) for name, right in names))


def facts_table() -> Table:
    """Return a table of two columns without titles, a name and a fact, which may be broken."""
    return Table(Column(""), Column("", wide=True), titles=False)


def ruled_table(*titles: str) -> Table:
    """Return a table with a line below its titles, whose cells may be broken."""
    return Table(*(Column(title, wide=number > 0) for number, title in enumerate(titles)), ruled=True, gap=3)


# Progress bars.


_BAR_CELLS: Final = 24
_BAR_AFTER_S: Final = 1.0  # shorter work needs none
_BAR_EVERY_S: Final = 0.1
_SPINNER: Final = "|/-\\"


class _Bar:
    """A line on the terminal that shows how far some work is. A thread draws it, so that it moves during long calls."""

    def __init__(self, console: Console, what: str, kind: str) -> None:
        self._console = console
        self._what = what
        self._as_text: Callable[[int], str] = size if kind == "bytes" else lambda count: f"{count:,}"
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._at = (0, 0)
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        self._thread.start()

    def update(self, done: int, total: int = 0) -> None:
        self._at = (done, total)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _draw(self) -> None:
        if self._ended.wait(_BAR_AFTER_S):
            return
        turn = 0
        while not self._ended.wait(_BAR_EVERY_S):
            turn += 1
            line = cut(self._line(_SPINNER[turn % len(_SPINNER)]), self._console.width - 1)
            self._console.file.write(f"\r{line}\x1b[K")
            self._console.file.flush()
        self._console.file.write("\r\x1b[K")
        self._console.file.flush()

    def _line(self, spinner: str) -> str:
        done, total = self._at
        passed_s = time.monotonic() - self._began_s
        clock = f"{int(passed_s) // 60}:{int(passed_s) % 60:02}"
        if not done and not total:
            return f"{spinner} {self._what}  {clock}"
        rate = f"{self._as_text(round(done / passed_s))}/s"
        if not total:
            return f"{spinner} {self._what}  {self._as_text(done)}  {rate}  {clock}"
        share = min(done / total, 1.0)
        bar = "█" * round(share * _BAR_CELLS)
        left_s = round(passed_s / share - passed_s) if share else 0
        left = f"{left_s // 60}:{left_s % 60:02} left" if share else clock
        counts = f"{self._as_text(done)} of {self._as_text(total)}"
        return f"{self._what} {bar:░<{_BAR_CELLS}} {share:4.0%}  {counts}  {rate}  {left}"


@contextmanager
def progress(what: str, kind: str = "count", *, shown: bool) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the amount done and the total, of messages or of bytes.

    If the work takes more than a moment and stderr is a terminal, a bar shows how far it is; without any call, a
    spinner shows that it goes on.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda done, total=0: None
        return
    bar = _Bar(stderr(), what, kind)
    try:
        yield bar.update
    finally:
        bar.end()


# Output that is refreshed: repainted on a terminal, appended elsewhere.


class Screen:
    """Where refreshed output is shown: in place on a terminal, or on all of it if `whole`; else one after the other."""

    def __init__(self, console: Console, *, painted: bool = True, whole: bool = False) -> None:
        self._console = console
        self._painted = painted and console.is_terminal
        self._whole = self._painted and whole
        self._lines = 0

    def __enter__(self) -> Screen:
        self._write("\x1b[?1049h\x1b[?25l" if self._whole else "\x1b[?25l" if self._painted else "")
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("\x1b[?1049l\x1b[?25h" if self._whole else "\x1b[?25h" if self._painted else "")

    def update(self, *shown: str | Text | Table) -> None:
        """Show this instead of what was shown before."""
        if self._painted:
            self._console.width = cells()  # the window may have another size by now
        lines = [line for each in shown for line in self._console.painted(each).split("\n")]
        if not self._painted:
            self._write("".join(f"{line}\n" for line in lines))
            return
        start = "\x1b[H" if self._whole else f"\x1b[{self._lines}F" if self._lines else ""
        if self._whole:
            lines = lines[: max(rows() - 1, 1)]
        self._lines = len(lines)
        self._write(start + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def rows() -> int:
    """Return the height of the terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines
    except (OSError, ValueError):
        return 24


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
