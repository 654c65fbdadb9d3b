"""The life of a message as a picture: one line for each step, with a bar for each lease and each wait.

  0 ms  ●                                         published
 12 ms  ├───────┤                                 leased     billing, attempt 1, by host:77
512 ms          ✗┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄                 nacked     billing, attempt 1, comes again at +1.5 s
                                                             ValueError: no route
 1.5 s                           ○                released   billing
 1.6 s                            ├────────┤      leased     billing, attempt 2, by host:77
 2.1 s                                     ✓      acked      billing, attempt 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from holdfast.broker.traces import (
    ACKED,
    BURIED,
    CANCELLED,
    DELAYED,
    EXPIRED,
    EXTENDED,
    LEASED,
    LOST,
    NACKED,
    OMITTED,
    PUBLISHED,
    REDRIVEN,
    RELEASED,
    REPLAYED,
    RETURNED,
    SKIPPED,
    STEPS,
    TraceStep,
)
from holdfast.cli.text import safe

_MARKS: Final = {
    PUBLISHED: "●",
    DELAYED: "◌",
    RELEASED: "○",
    EXTENDED: "┼",
    ACKED: "✓",
    NACKED: "✗",
    RETURNED: "↩",
    BURIED: "†",
    REDRIVEN: "↻",
    EXPIRED: "∅",
    CANCELLED: "⊘",
    SKIPPED: "»",
    LOST: "!",
    REPLAYED: "«",
    OMITTED: "⋮",
}
_STYLES: Final = {ACKED: "green", NACKED: "red", RETURNED: "yellow", BURIED: "red", LOST: "red"}
# What ends a lease: a bar goes from its beginning to here.
_ENDS: Final = frozenset({ACKED, NACKED, RETURNED, BURIED})

_TIME_CELLS: Final = 9
_NAME_CELLS: Final = max(map(len, STEPS)) + 2
_LEAST_BAR: Final = 10
_MOST_BAR: Final = 48
_LEAST_TEXT: Final = 40
_MOST_ERROR_CELLS: Final = 200
_UNITS: Final = (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0))


def life_line(steps: Sequence[TraceStep], *, width: int, now_ns: int) -> Iterator[Text]:
    """The lines of the picture; the steps are in the order of time, `now_ns` is where a running lease has come to."""
    if not steps:
        return
    drawing = _Drawing(steps, width, now_ns)
    of_many = len({step.id for step in steps}) > 1
    for i, step in enumerate(steps):
        if of_many and (i == 0 or steps[i - 1].id != step.id):
            yield Text(safe(step.id), style="bold")
        yield from drawing.lines(i, step)


def time_text(ns: int) -> str:
    """A length of time for people, short."""
    seconds = ns / 1e9
    if abs(seconds) < 1:
        return f"{ns / 1e6:.3g} ms" if ns else "0 ms"
    for unit, size in _UNITS:
        if abs(seconds) >= size * (1 if unit == "s" else 2):
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


class _Drawing:
    def __init__(self, steps: Sequence[TraceStep], width: int, now_ns: int) -> None:
        self._steps = steps
        self._begin_ns = steps[0].at_ns
        self._now_ns = max(now_ns, steps[-1].at_ns)
        last_ns = max(step.at_ns for step in steps)
        if self._runs_still():
            last_ns = self._now_ns
        self._whole_ns = max(last_ns - self._begin_ns, 1)
        free = width - _TIME_CELLS - _NAME_CELLS - _LEAST_TEXT - 6
        self._cells = min(max(free, _LEAST_BAR), _MOST_BAR)
        self._indent = _TIME_CELLS + 2 + self._cells + 2 + _NAME_CELLS

    def lines(self, i: int, step: TraceStep) -> Iterator[Text]:
        time = time_text(step.at_ns - self._begin_ns)
        line = Text(f"{time:>{_TIME_CELLS}}  ", no_wrap=True, overflow="ignore")
        line.append(self._bar(i, step), style=_STYLES.get(step.step, ""))
        line.append("  ")
        line.append(f"{safe(step.step):{_NAME_CELLS}}", style=_STYLES.get(step.step, ""))
        line.append(safe(", ".join(self._facts(step))))
        line.rstrip()
        yield line
        error = step.error.strip().split("\n", 1)[0]
        if error:
            shown = safe(error)
            if cell_len(shown) > _MOST_ERROR_CELLS:
                shown = shown[: _MOST_ERROR_CELLS - 1] + "…"
            yield Text(" " * self._indent + shown, style="red", no_wrap=True, overflow="ignore")

    def _bar(self, i: int, step: TraceStep) -> str:
        row = [" "] * self._cells
        at = self._cell(step.at_ns)
        if step.step == LEASED:
            end_ns = self._lease_end_ns(i, step)
            end = self._cell(self._now_ns if end_ns is None else end_ns)
            for cell in range(at, end + 1):
                row[cell] = "─"
            row[at] = "├"
            if end_ns is None:
                row[end] = "▶"
            elif end > at:
                row[end] = "┤"
            else:
                row[at] = "│"
        else:
            if step.due_ms:
                for cell in range(at + 1, self._cell(step.due_ms * 1_000_000) + 1):
                    row[cell] = "┄"
            row[at] = _MARKS.get(step.step, "?")
        return "".join(row)

    def _cell(self, at_ns: int) -> int:
        cell = (at_ns - self._begin_ns) * (self._cells - 1) // self._whole_ns
        return min(max(cell, 0), self._cells - 1)

    def _lease_end_ns(self, i: int, step: TraceStep) -> int | None:
        """When the lease that began here ended; None where it runs still, as far as anybody wrote down."""
        for later in self._steps[i + 1 :]:
            if later.step in _ENDS and later.span_id == step.span_id and later.id == step.id:
                return later.at_ns
        return None

    def _runs_still(self) -> bool:
        return any(
            step.step == LEASED and self._lease_end_ns(i, step) is None and self._is_last_lease(i, step)
            for i, step in enumerate(self._steps)
        )

    def _is_last_lease(self, i: int, step: TraceStep) -> bool:
        return not any(later.id == step.id and later.group == step.group for later in self._steps[i + 1 :])

    def _facts(self, step: TraceStep) -> Iterator[str]:
        if step.group:
            yield step.group
        if step.attempt:
            yield f"attempt {step.attempt}"
        if step.step == LEASED and step.holder:
            yield f"by {step.holder}"
        if step.why:
            yield step.why
        if step.until_ms:
            yield f"until {self._after(step.until_ms)}"
        if step.due_ms:
            yield f"{'due' if step.step == DELAYED else 'comes again'} at {self._after(step.due_ms)}"
        if step.related:
            yield f"{'as' if step.step == REDRIVEN else 'it was'} {step.related}"

    def _after(self, at_ms: int) -> str:
        return "+" + time_text(max(at_ms * 1_000_000 - self._begin_ns, 0))
