"""Charts of samples, drawn as SVG on the server: sparklines of the last minutes, and pages of up to seven days."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.samples import Line, Sample, Samples, line_of, peak_of, squeezed, top_of
from holdfast.codec.samples import SeriesKey
from holdfast.protocol.messages import InGroup
from holdfast.server.console.rendering import age, count, rate

Range: TypeAlias = Literal["15m", "1h", "6h", "24h", "7d"]

RANGES: Final[dict[Range, int]] = {"15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800}

# Sizes in SVG units; the pages stretch the pictures, but not the width of their lines.
WIDTH: Final = 600
HEIGHT: Final = 120
SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 24

_COLUMNS: Final = 300  # no more points in a line than a page has pixels for
_TABLE_ROWS: Final = 48
_SPARK_S: Final = 900
_LEAST_STEPS: Final = 24  # a sparkline of a server that just started is two minutes wide, not a sliver
_LATELY: Final = 3  # samples


class ChartQuery(InGroup, kw_only=True):
    """The time that charts show."""

    range: Range = "15m"


# Sparklines.


class Spark(msgspec.Struct, frozen=True, kw_only=True):
    """A sparkline: messages in as an area, messages out as a line, and both current rates.

    `peak` is the highest rate if it is above the scale; its places are marked.
    """

    into: list[str]
    out: list[str]
    bursts: list[str]
    into_now: float
    out_now: float
    peak: float = 0.0
    seconds: float = 0.0


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """How a group fared lately: rates in and out, in messages per second, and by how much its dead letters grew."""

    into: list[float | None]
    out: list[float | None]
    step_s: int = 5
    buried: int = 0

    @property
    def handled(self) -> bool:
        """Whether any message was handled."""
        return any(self.out)


def flow_of(engine: BrokerEngine, topic: str, topic_id: int, group: str = "") -> Flow:
    """How a group in queue mode fared lately; without a group, the rates into the topic."""
    key = SeriesKey("queue" if group else "topic", topic, group, topic_id)
    samples = engine.sampler.store.read(key, _SPARK_S)
    return Flow(
        into=line_of(samples, "published_rate"),
        out=line_of(samples, "handled_rate"),
        step_s=samples.step_seconds,
        buried=_growth(samples.samples),
    )


NO_FLOW: Final = Flow(into=[], out=[])


def _growth(samples: list[Sample]) -> int:
    return max(samples[-1].dead - min(sample.dead for sample in samples), 0) if samples else 0


def spark_of(flow: Flow) -> Spark:
    """A sparkline with both lines on the same scale."""
    known = [i for i, value in enumerate(flow.into) if value is not None]
    start = min(known[0] if known else 0, max(len(flow.into) - _LEAST_STEPS, 0))
    into, out = flow.into[start:], flow.out[start:]
    top, peak = top_of(into, out), peak_of(into, out)
    plot = partial(segments, top=top, width=SPARK_WIDTH, height=SPARK_HEIGHT)
    return Spark(
        into=plot(into, area=True),
        out=plot(out),
        bursts=bursts([into, out], top, SPARK_WIDTH),
        into_now=_lately(flow.into),
        out_now=_lately(flow.out),
        peak=peak if peak > top else 0.0,
        seconds=len(into) * flow.step_s,
    )


def _lately(line: Line) -> float:
    last = [value for value in line if value is not None][-_LATELY:]
    return sum(last) / len(last) if last else 0.0


# Lines as the points of SVG polylines and polygons.


def segments(line: Line, top: float, width: int, height: int, *, area: bool = False) -> list[str]:
    """The points of each stretch of the line without a gap, or of the area under it; what is above `top` is cut."""
    found: list[str] = []
    stretch: list[tuple[float, float]] = []
    for i, value in enumerate([*line, None]):
        if value is not None:
            up = min(value / top, 1.0) if top else 0.0
            stretch.append((_across(i, len(line), width), height - 1 - (height - 2) * up))
        elif stretch:
            if len(stretch) == 1:  # a stretch of one step would be no line at all
                stretch.append((min(stretch[0][0] + 1, width), stretch[0][1]))
            if area:
                stretch = [(stretch[0][0], height), *stretch, (stretch[-1][0], height)]
            found.append(" ".join(f"{x:.1f},{y:.1f}" for x, y in stretch))
            stretch = []
    return found


def bursts(lines: Sequence[Line], top: float, width: int) -> list[str]:
    """Where lines are above the scale."""
    places = {i for line in lines for i, value in enumerate(line) if value is not None and value > top}
    return [f"{_across(i, len(lines[0]), width):.1f}" for i in sorted(places)]


def _across(i: int, steps: int, width: int) -> float:
    return width * i / (steps - 1) if steps > 1 else float(width)


# Charts.


class ChartLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart: its name, its kind, by which it is drawn, its points, and its last value as text."""

    name: str
    kind: str
    points: list[str]
    area: list[str]
    last: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart, with what it shows in words."""

    id: str
    title: str
    lines: list[ChartLine]
    top: str
    bursts: list[str]
    peak: str
    description: str


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """The charts of a series over one range of time, and the same as a table."""

    range: Range
    charts: list[Chart]
    since: datetime
    until: datetime
    step: str
    titles: list[str]
    rows: list[tuple[datetime, list[str]]]
    sampled: bool


class _Plan(msgspec.Struct, frozen=True):
    """What a chart shows: fields of samples, each with a name and a kind; and how its values read."""

    title: str
    fields: tuple[tuple[str, str, str], ...]
    text: Callable[[float], str]


def _whole(value: float) -> str:
    return count(round(value))


_RATES: Final = _Plan(
    "Messages per second",
    (("published_rate", "published", "into"), ("handled_rate", "handled", "out"), ("failed_rate", "failed", "failed")),
    rate,
)
_READY: Final = _Plan("Ready", (("ready", "ready", "into"),), _whole)
_OLDEST: Final = _Plan("Age of the oldest message", (("oldest_seconds", "oldest", "out"),), age)
_HANDLING: Final = _Plan(
    "Handling time, from lease to ack",
    (("handle_p50_seconds", "p50", "into"), ("handle_p99_seconds", "p99", "out")),
    age,
)
_DEAD: Final = _Plan("Dead letters", (("dead", "dead letters", "failed"),), _whole)
_BEHIND: Final = _Plan("Behind, messages", (("ready", "behind", "into"),), _whole)

_PLANS: Final = {
    "total": (_RATES, _READY, _OLDEST, _HANDLING),
    "queue": (_RATES, _READY, _OLDEST, _HANDLING, _DEAD),
    "stream": (_RATES, _BEHIND, _OLDEST),
    "topic": (_RATES,),
}


def charts_of(samples: Samples, chosen: Range, *, most: int | None = None) -> Charts:
    """The charts of these samples; at most so many."""
    plans = _PLANS[samples.mode][:most]
    fields = [(field, name, plan) for plan in plans for field, name, _ in plan.fields]
    lines = {field: squeezed(line_of(samples, field), _TABLE_ROWS) for field, _, _ in fields}
    steps = max(map(len, lines.values()))
    span = samples.until - samples.since
    rows = [
        (samples.since + span * i / steps, [_cell(lines[field][i], plan.text) for field, _, plan in fields])
        for i in range(steps)
        if any(line[i] is not None for line in lines.values())
    ]
    return Charts(
        range=chosen,
        charts=[_chart(plan, i, samples) for i, plan in enumerate(plans)],
        since=samples.since,
        until=samples.until,
        step=age(samples.step_seconds),
        titles=[plan.title if len(plan.fields) == 1 else name.capitalize() for _, name, plan in fields],
        rows=rows[::-1],
        sampled=bool(samples.samples),
    )


def _chart(plan: _Plan, number: int, samples: Samples) -> Chart:
    lines = [(name, kind, squeezed(line_of(samples, field), _COLUMNS)) for field, name, kind in plan.fields]
    return chart_of(f"chart-{number}", plan.title, lines, plan.text, sampled=bool(samples.samples))


def chart_of(
    identity: str,
    title: str,
    lines: Sequence[tuple[str, str, Line]],
    text: Callable[[float], str],
    *,
    sampled: bool = True,
) -> Chart:
    """A chart of these lines, each with its name and its kind, on one scale."""
    top, peak = top_of(*(line for _, _, line in lines)), peak_of(*(line for _, _, line in lines))
    drawn = [
        ChartLine(
            name=name,
            kind=kind,
            points=segments(line, top, WIDTH, HEIGHT),
            area=segments(line, top, WIDTH, HEIGHT, area=True) if kind == "into" else [],
            last=_cell(next((value for value in reversed(line) if value is not None), None), text),
        )
        for name, kind, line in lines
    ]
    said = "; ".join(f"{line.name}: now {line.last}" for line in drawn)
    return Chart(
        id=identity,
        title=title,
        lines=drawn,
        top=text(top) if top else "",
        bursts=bursts([line for _, _, line in lines], top, WIDTH),
        peak=text(peak) if peak > top else "",
        description=f"{said}. The highest value is {text(peak)}." if sampled else "No samples yet.",
    )


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)
