"""Plain tables: numbers to the right, names never cut."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def table(*titles: str, wide: str = "") -> Table:
    """A table with these titles; one that ends in `>` is of numbers, and the `wide` one may take several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in titles:
        name = title.removesuffix(">")
        if name == wide:
            made.add_column(name, overflow="fold", min_width=len(name))
        else:
            made.add_column(name, justify="right" if title.endswith(">") else "left", no_wrap=True)
    return made


def show_table(console: Console, shown: Table) -> None:
    """Print it; where a terminal is too narrow for the names, they go over its edge and are not cut."""
    for column in shown.columns:
        if column.no_wrap:  # otherwise rich thinks that it may be broken at a space
            column.min_width = max(cell_len(str(text)) for text in (column.header, *column.cells))
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).minimum
    width = console.width
    console.width = max(width, needed)
    console.print(shown)
    console.width = width
