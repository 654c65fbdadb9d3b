"""Consoles, progress bars and live screens. Rich takes a while to load: only commands that print for people do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

from rich.console import Console, RenderableType

from holdfast.cli.output import stderr

# What reads from a pipe has no edge that text must end at.
_PIPE_CELLS: Final = 1_000


class OurConsole(Console):
    """Nothing in a message is markup, and a reader that went away is an error like any other."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        if not stderr and not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _PIPE_CELLS

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


# The columns of each kind of bar, and when the work is long enough to show one.
_BARS: Final[dict[str, tuple[str, Callable[[int, int], bool]]]] = {
    "count": ("Spinner Text MofNComplete TimeElapsed", lambda done, total: done >= 1_000),
    "share": ("Bar Text MofNComplete TimeElapsed", lambda done, total: done > 0),
    "bytes": ("Text Bar Download TimeRemaining", lambda done, total: total >= 256 * 1024 * 1024),
}


@contextmanager
def progress(what: str, kind: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """A function to call with how much is done, and of how much; shows it on stderr, where a person looks on."""
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


# Something that is shown anew again and again: painted over on a terminal, one behind the other elsewhere.


class Screen(Protocol):
    """Where it is shown."""

    def update(self, shown: RenderableType, *, refresh: bool) -> None: ...


class Plain:
    """Live, where there is no screen to paint on: one table behind the other."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, shown: RenderableType, *, refresh: bool) -> None:
        self._console.print(shown)


def screen(console: Console, *, painted: bool = True, whole: bool = False) -> Any:
    """For a `with`: the terminal, all of it where that is wanted; or the end of a file."""
    if console.is_terminal and painted:
        from rich.live import Live

        return Live(console=console, auto_refresh=False, screen=whole)
    return Plain(console)
