"""`holdfast pipeline`: run pipelines from queues to tables, and see where they are."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from holdfast.api.times import parse_duration
from holdfast.cli.look.log import owner_of
from holdfast.cli.options import AsJson, Yes
from holdfast.cli.output import (
    DAMAGED,
    INTERRUPTED,
    NOT_DONE,
    OK,
    Section,
    command,
    confirmed,
    print_error,
    print_json,
    stderr,
    stdout,
)
from holdfast.cli.pipeline_view import (
    bars,
    ending_in_order,
    outcomes_document,
    plan_lines,
    show_outcomes,
    standing_table,
)
from holdfast.cli.text import safe, show_table, table
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, NotInstalled

if TYPE_CHECKING:
    from holdfast.spark.pipelines.spec import Project

app = Section("Pipelines from queues to tables and back, on Spark.")

Names: TypeAlias = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which pipelines.")]
Declared: TypeAlias = Annotated[
    str, typer.Option("--config", metavar="FILE", help="The file that declares the pipelines, YAML or Python.")
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All pipelines of the file.")]
FILE = "pipelines.yaml"


@app.command("run")
@command
def run_command(
    names: Names = None,
    declared: Declared = FILE,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C or SIGTERM.")] = False,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="With --follow: look for news so often, from 100ms on.")
    ] = "1s",
    everything: All = False,
    full_refresh: Annotated[
        bool, typer.Option("--full-refresh", help="Remove the tables and checkpoints first, and begin anew.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Run pipelines, each behind the one that it reads from, in one Spark application."""
    project = _project(declared)
    wanted = _wanted(project, names, everything=everything)
    if full_refresh and not _may_forget(project, wanted, yes=yes, as_json=as_json):
        return NOT_DONE
    from holdfast.spark.pipelines.runner import Runner

    every_ms = round(parse_duration(every, "--every") * 1000)
    with bars(wanted, shown=not as_json) as tell:
        runner = Runner(project, tell=tell)
        with ending_in_order(runner):
            outcomes = runner.run(wanted, follow=follow, every_ms=every_ms, full_refresh=full_refresh)
    if as_json:
        print_json(outcomes_document(outcomes))
    else:
        show_outcomes(outcomes)
    for outcome in outcomes:
        if outcome.error is not None:
            code = outcome.error.code if isinstance(outcome.error, HoldfastError) else "os_error"
            print_error(code, str(outcome.error), as_json=as_json)
    if any(outcome.error is not None for outcome in outcomes):
        return NOT_DONE
    if runner.stopped and not follow:
        return INTERRUPTED
    return OK if all(outcome.summary is None or outcome.summary.ok for outcome in outcomes) else DAMAGED


@app.command("plan")
@command
def plan_command(
    names: Names = None, declared: Declared = FILE, everything: All = False, as_json: AsJson = False
) -> int:
    """Show what a run would read and write. Writes nothing."""
    project = _project(declared)
    from holdfast.spark.pipelines.runner import Runner

    plans = Runner(project).plan(_wanted(project, names, everything=everything))
    if as_json:
        print_json({"plans": msgspec.to_builtins(plans)})
        return OK
    for plan in plans:
        stdout().print("\n".join(plan_lines(plan)), soft_wrap=True)
    return OK


@app.command("ls")
@command
def ls_command(declared: Declared = FILE, as_json: AsJson = False) -> int:
    """List the pipelines that a file declares."""
    project = _project(declared)
    if as_json:
        listed = [
            {"pipeline": spec.name, "kind": spec.kind, "options": msgspec.to_builtins(spec.options)}
            for spec in project.pipelines.values()
        ]
        print_json({"folder": project.folder, "lake": project.lake, "pipelines": listed})
        return OK
    shown = table("pipeline", "kind", "reads", "table")
    for spec in project.in_order(project.pipelines):
        topics = getattr(spec.options, "topics", None) or ()
        reads = spec.options.source or ", ".join(topics) or getattr(spec.options, "pattern", None) or ""
        shown.add_row(safe(spec.name), spec.kind, safe(reads), safe(project.table(spec.name)))
    show_table(stdout(), shown)
    return OK


@app.command("status")
@command
def status_command(names: Names = None, declared: Declared = FILE, as_json: AsJson = False) -> int:
    """Show how far pipelines are: batches, rows, lag, and who runs them. Needs neither Spark's JVM nor a lock."""
    project = _project(declared)
    from holdfast.spark.pipelines.checkpoint import status_of

    specs = project.in_order(names or project.pipelines)
    standings = [status_of(real_world(), project, spec) for spec in specs]
    owners = {spec.name: owner_of(project.checkpoint(spec.name)) for spec in specs}
    running = {name: owner.pid for name, owner in owners.items() if owner is not None and owner.alive}
    if as_json:
        document = [{**msgspec.to_builtins(each), "running_pid": running.get(each.pipeline)} for each in standings]
        print_json({"lake": project.lake, "pipelines": document})
    else:
        show_table(stdout(), standing_table(standings, running))
    return OK


@app.command("new")
@command
def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the pipeline.")],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="What it does.")] = "land",
    python: Annotated[bool, typer.Option("--python", help="A function of your own, in a Python file.")] = False,
    declared: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help=f"The file to write; {FILE} by default.")
    ] = None,
) -> int:
    """Write a commented file to begin with; where it is there already, print the entry to add to it."""
    _need_spark()
    from holdfast.broker.folder.layout import check_name
    from holdfast.spark.pipelines.project import entry, python_template, yaml_template
    from holdfast.spark.pipelines.spec import kind_named

    check_name(name, "pipeline")
    kind_named(kind)
    path = Path(declared or (f"{name.replace('-', '_')}.py" if python else FILE))
    text = python_template(name, path.name) if python else yaml_template(name, kind, str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if python:
            raise InvalidRequest(f"{path} is there already; nothing was written") from None
        stderr().print(f"{safe(str(path))} is there already; add this below its pipelines:", soft_wrap=True)
        stdout().print(entry(name, kind).rstrip("\n"), soft_wrap=True)
        return OK
    stderr().print(f"wrote {safe(str(path))}; look through it, then: holdfast pipeline plan {name}", soft_wrap=True)
    return OK


@app.command("export")
@command
def export_command(
    folder: Annotated[str, typer.Option("--sdp", metavar="DIR", help="Where the project goes.")],
    declared: Declared = FILE,
    as_json: AsJson = False,
) -> int:
    """Write land, refine and aggregate as a project of Spark Declarative Pipelines."""
    project = _project(declared)
    from holdfast.spark.pipelines.sdp import export

    exported = export(real_world(), project, str(Path(folder).resolve()))
    if as_json:
        print_json(msgspec.to_builtins(exported))
        return OK
    for note in exported.notes:
        stderr().print(safe(note), soft_wrap=True)
    stderr().print(f"wrote {len(exported.files)} files; {safe(exported.files[1])} says how to run it", soft_wrap=True)
    return OK


def _project(declared: str) -> Project:
    _need_spark()
    from holdfast.spark.pipelines.project import read_project

    return read_project(declared)


def _need_spark() -> None:
    missing = [package for package in ("pyspark", "pyarrow", "numpy", "yaml") if not _is_there(package)]
    if missing:
        raise NotInstalled(
            f"pipelines run on Spark, and {', '.join(missing)} cannot be found: pip install 'holdfast[spark]'"
        )


def _is_there(package: str) -> bool:
    with suppress(ImportError, ValueError):
        return find_spec(package) is not None
    return False


def _wanted(project: Project, names: list[str] | None, *, everything: bool) -> list[str]:
    if everything:
        if names:
            raise InvalidRequest("name pipelines, or say --all, not both")
        return list(project.pipelines)
    if not names:
        raise InvalidRequest(f"name a pipeline, or say --all; there are {', '.join(project.pipelines)}")
    return [project.spec(name).name for name in names]


def _may_forget(project: Project, names: list[str], *, yes: bool, as_json: bool) -> bool:
    gone = ", ".join(safe(project.table(name)) for name in names)
    return confirmed(f"Remove {gone} and begin anew?", "holdfast pipeline run --full-refresh", yes=yes, as_json=as_json)
