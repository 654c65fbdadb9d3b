"""The table of moves as a diagram and a table for docs/internals/delivery.md.

`python -m tests.tidy.moves_diagram --write` renews the page; without `--write` it prints.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict

from holdfast.delivery.events import MOVES, Phase
from tests.tidy.repo import ROOT

PAGE = ROOT / "docs" / "internals" / "delivery.md"
BEGIN = "<!-- moves: made by `python -m tests.tidy.moves_diagram --write` from MOVES in delivery/events.py -->"
END = "<!-- end of moves -->"


def rendered() -> str:
    """Everything between the two marks."""
    return f"{BEGIN}\n\n{_diagram()}\n\n{_table()}\n\n{END}"


def with_moves(page: str) -> str:
    """The page, with the part between its marks made anew."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN!r} and {END!r}")
    return before + rendered() + after


def _diagram() -> str:
    arrows: defaultdict[tuple[Phase, Phase], list[str]] = defaultdict(list)
    for (source, event), target in MOVES.items():
        arrows[source, target].append(event.__name__)
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    direction LR",
        f"    [*] --> {Phase.READY.value}: publish",
        *(f"    {source.value} --> {target.value}: {', '.join(events)}" for (source, target), events in arrows.items()),
        "```",
    ]
    return "\n".join(lines)


def _table() -> str:
    """A row for each event: what it says, and where it leads from each phase; a dash where it must not come."""
    events = list(dict.fromkeys(event for _, event in MOVES))
    lines = [
        f"| event | {' | '.join(phase.value for phase in Phase)} | what happened |",
        f"|---|{'---|' * (len(Phase) + 1)}",
    ]
    for event in events:
        targets = (MOVES.get((phase, event)) for phase in Phase)
        cells = " | ".join("–" if target is None else target.value for target in targets)
        said = (inspect.getdoc(event) or "").splitlines()[0]
        lines.append(f"| `{event.__name__}` | {cells} | {said} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        PAGE.write_text(with_moves(PAGE.read_text("utf-8")), "utf-8")
        return 0
    sys.stdout.write(rendered() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
