"""Pages of pipelines: their runs, how long each took, what it read and wrote, and what failed.

A run is noted in the lake by whoever ran it. The server only reads these notes, from the folder that `lake` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.broker.samples import squeezed
from holdfast.env import World
from holdfast.errors import NotFound
from holdfast.server.console.charts import Charts, Flow, Spark, chart_of, spark_of
from holdfast.server.console.rendering import age, count, page, rate, render
from holdfast.server.http.messages import Response
from holdfast.server.service import Call
from holdfast.storage.files import join, read_file

CHECKPOINTS: Final = "_checkpoints"
_COLUMNS: Final = 200
_LISTED: Final = 50


class PipelineRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it was noted: when it ended, and how. It may have found something, and yet not failed."""

    at_ms: int
    ok: bool
    error: str | None = None
    seconds: float = 0.0
    rows_in: int = 0
    rows_out: int = 0
    lag: int | None = None
    dropped: int = 0
    quarantined: int = 0
    expectations: dict[str, int] = {}
    batches: int = 0
    duplicates: int = 0

    @property
    def rows_per_second(self) -> float | None:
        return self.rows_in / self.seconds if self.seconds else None

    @property
    def out_per_second(self) -> float | None:
        return self.rows_out / self.seconds if self.seconds else None

    @property
    def bad(self) -> int:
        """Rows that were left out or put aside."""
        return self.dropped + self.quarantined

    @property
    def late(self) -> int:
        """Rows that came after their window was closed."""
        return self.expectations.get("late", 0)


class PipelineRuns(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline, and the runs of it that are still noted, the oldest first."""

    name: str
    kind: str
    runs: list[PipelineRun]

    @property
    def last(self) -> PipelineRun | None:
        return self.runs[-1] if self.runs else None

    @property
    def failures(self) -> int:
        return sum(not run.ok for run in self.runs)

    @property
    def spark(self) -> Spark:
        """Rows read and written per second, run by run."""
        rates = [run.rows_per_second for run in self.runs], [run.out_per_second for run in self.runs]
        return spark_of(Flow(into=squeezed(rates[0], _COLUMNS), out=squeezed(rates[1], _COLUMNS)))

    def outcome(self, run: PipelineRun) -> str:
        """How a run ended, in a word or two. A run of `reconcile` is a proof."""
        if run.error is not None:
            return "failed"
        if self.kind == "reconcile":
            return "proved" if run.ok else "differences found"
        return "ok" if run.ok else "problems found"


def pipelines_in(world: World, lake: str) -> list[PipelineRuns]:
    """The pipelines of a lake, by name; notes that cannot be read are as if they were not there."""
    folder = join(lake, CHECKPOINTS)
    names = sorted(world.disk.names(folder)) if world.disk.exists(folder) else []
    return [runs for name in names if (runs := _runs_of(world, folder, name)) is not None]


def _runs_of(world: World, folder: str, name: str) -> PipelineRuns | None:
    made_for = _noted(world, join(folder, f"{name}/spec.json"), dict[str, Any])
    if made_for is None:
        return None
    runs: list[PipelineRun] = _noted(world, join(folder, f"{name}/runs.json"), list[PipelineRun]) or []
    return PipelineRuns(name=name, kind=str(made_for.get("kind", "")), runs=runs)


def _noted(world: World, path: str, kind: Any) -> Any:
    try:
        content = read_file(world.disk, path)
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


@page("/ui/pipelines")
async def pipelines(call: Call) -> Response:
    """All pipelines of the lake, each with its last run."""
    found = await _found(call)
    return render(call, "pipelines.html", lake=call.service.settings.lake, pipelines=found)


@page("/ui/pipelines/{pipeline}")
async def pipeline(call: Call) -> Response:
    """One pipeline: its runs over time, as charts and as a table."""
    name = call.path["pipeline"]
    for each in await _found(call):
        if each.name == name:
            runs = each.runs[: -_LISTED - 1 : -1]
            return render(call, "pipeline.html", pipeline=each, runs=runs, charts=run_charts(each.runs))
    raise NotFound(f"the lake has no pipeline {name}: run it once, then it is listed here")


async def _found(call: Call) -> list[PipelineRuns]:
    lake = call.service.settings.lake
    if lake is None:
        raise NotFound("this server has no lake: start it with --lake FOLDER, or name it as lake in its settings")
    return await asyncio.to_thread(pipelines_in, call.service.world, lake)


# Charts. Their columns are runs, not times: between two runs nothing happens.


class RunChart(msgspec.Struct, frozen=True):
    """What a chart shows of each run: values, each with a name and a kind; and how they read."""

    title: str
    lines: tuple[tuple[str, str, Callable[[PipelineRun], float | None]], ...]
    text: Callable[[float], str] = lambda value: count(round(value))


_CHARTS: Final = (
    RunChart(
        "Rows per second",
        (("read", "into", lambda run: run.rows_per_second), ("written", "out", lambda run: run.out_per_second)),
        rate,
    ),
    RunChart("Rows not read yet", (("behind", "into", lambda run: run.lag),)),
    RunChart(
        "Rows late, dropped or quarantined",
        (("late", "out", lambda run: run.late), ("bad", "failed", lambda run: run.bad)),
    ),
    RunChart("Duration", (("took", "into", lambda run: run.seconds or None),), age),
)


def run_charts(runs: Sequence[PipelineRun]) -> Charts | None:
    """The charts of these runs; None if there are too few for a line."""
    if len(runs) < 2:
        return None
    since, until = (datetime.fromtimestamp(run.at_ms / 1000, UTC) for run in (runs[0], runs[-1]))
    charts = []
    for number, plan in enumerate(_CHARTS):
        lines = [(name, kind, squeezed([value(run) for run in runs], _COLUMNS)) for name, kind, value in plan.lines]
        charts.append(chart_of(f"runs-{number}", plan.title, lines, plan.text))
    return Charts(range="7d", charts=charts, since=since, until=until, step="", titles=[], rows=[], sampled=True)
