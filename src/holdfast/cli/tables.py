"""Plain tables: numbers to the right, names never cut."""

from __future__ import annotations

from rich.table import Table


def table(*titles: str, wide: str = "") -> Table:
    """A table with these titles; one that ends in `>` is of numbers, and the `wide` one may take several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in titles:
        name = title.removesuffix(">")
        justify = "right" if title.endswith(">") else "left"
        if name == wide:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify=justify, no_wrap=True, overflow="ignore")  # type: ignore[arg-type]
    return made
