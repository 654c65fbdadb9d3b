"""Runs the Python of a page from top to bottom, and compares what it prints with what the page says.

What stands behind a `print`, as in `print(stored.id)  # mail-0-0`, is what it prints; where it prints more than once,
as in a loop, ` / ` stands between the texts, and `...` or `…` for anything.

This module is sent to the Python that runs a page, which may have nothing but an installed wheel: it imports only the
standard library.
"""

from __future__ import annotations

import re
import sys
from typing import Any

_SAID = re.compile(r"\s*print\(.*\)  # (?P<said>.+)")
_ANYTHING = re.compile(r"\s*(?:\.\.\.|…)\s*")


def run(name: str, blocks: list[tuple[int, str]]) -> None:
    """Run the blocks of a page, each given with the number of its first line, which tracebacks then tell."""
    printed: dict[int, list[str]] = {}

    def tell(*values: object, **options: Any) -> None:
        print(*values, **options)  # noqa: T201
        printed.setdefault(sys._getframe(1).f_lineno, []).append(" ".join(map(str, values)))

    names = {"__name__": "__main__", "print": tell}
    for first, code in blocks:
        exec(compile("\n" * (first - 1) + code, name, "exec"), names)
    faults = [
        f"{name}:{line}: says {said!r}, and printed {' / '.join(printed.get(line, ['nothing']))!r}"
        for first, code in blocks
        for line, said in expected(first, code)
        if not matches(said, " / ".join(printed.get(line, [])))
    ]
    if faults:
        raise SystemExit("\n".join(faults))


def expected(first: int, code: str) -> list[tuple[int, str]]:
    """What a block says that it prints, with the lines that do."""
    found = ((line, _SAID.fullmatch(text)) for line, text in enumerate(code.splitlines(), first))
    return [(line, each["said"]) for line, each in found if each]


def matches(said: str, printed: str) -> bool:
    """Whether what is printed is what was said."""
    return re.fullmatch(".*".join(map(re.escape, _ANYTHING.split(said))), printed, re.DOTALL) is not None
