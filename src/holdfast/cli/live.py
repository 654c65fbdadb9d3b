"""Something that is shown anew again and again: painted over on a terminal, one behind the other elsewhere."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live


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
