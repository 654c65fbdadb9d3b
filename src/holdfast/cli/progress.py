"""How far long work has come: on stderr, and only where somebody is looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.cli.output import stderr

# Below this it is over before anybody has read it.
_LONG: Final = 1_000


@contextmanager
def counter(what: str, *, shown: bool, total: int | None = None, least: int = _LONG) -> Iterator[Callable[[int], None]]:
    """A function that is told how many are done, of a total that need not be known."""
    console = stderr()
    if not shown or not console.is_terminal:
        yield lambda done: None
        return
    first = SpinnerColumn() if total is None else BarColumn()
    columns = (first, TextColumn(what), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=total)

    def told(done: int) -> None:
        if done >= least:
            bar.start()
            bar.update(task, completed=done)

    try:
        yield told
    finally:
        bar.stop()
