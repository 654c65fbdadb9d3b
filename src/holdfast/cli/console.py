"""Consoles, progress bars and live screens. Rich takes a while to load: only commands that print for people do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

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


# Below this it is over before anybody has read it.
_LONG: Final = 1_000


@contextmanager
def counter(what: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told how many are done, where nobody knows how many there will be."""
    with _bar(what, SpinnerColumn(), shown=shown) as update:
        yield lambda done: update(done, None) if done >= _LONG else None


@contextmanager
def share(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many are done, and of how many."""
    with _bar(what, BarColumn(), shown=shown) as update:
        yield lambda done, total: update(done, total) if done else None


@contextmanager
def _bar(what: str, first: ProgressColumn, *, shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    console = stderr()
    if not shown or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (first, TextColumn(what), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int | None) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

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


def screen(console: Console, *, painted: bool = True, whole: bool = False) -> Live | Plain:
    """For a `with`: the terminal, all of it where that is wanted; or the end of a file."""
    if console.is_terminal and painted:
        return Live(console=console, auto_refresh=False, screen=whole)
    return Plain(console)
