"""`holdfast pipeline`: run pipelines from queues to tables, and show their progress."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from holdfast.api.drafts import parse_duration
from holdfast.cli import output
from holdfast.cli.opening import AsJson, Yes
from holdfast.cli.parsing import Section, argument, option
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest, NotInstalled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.spark.pipelines import spec
    from holdfast.spark.pipelines.checkpoint import NotedRun, PipelineStatus
    from holdfast.spark.pipelines.project import Runner
    from holdfast.spark.pipelines.spec import Project


@contextmanager
def bars(names: Sequence[str], *, shown: bool) -> Iterator[Callable[[spec.Progress], None]]:
    """Show how far each pipeline is, on stderr if that is a terminal."""
    console = output.stderr()
    if not shown or not console.is_terminal:
        yield lambda progress: None
        return
    lines = dict.fromkeys(names, "waiting")

    def show() -> None:
        shown = output.facts_table()
        for name, line in lines.items():
            shown.add_row(output.safe(name), line)
        live.update(shown)

    def tell(news: spec.Progress) -> None:
        if news.pipeline in lines:
            share = "" if not news.lag else f"{news.rows_in / (news.rows_in + news.lag):.0%}, "
            words = f"{share}batch {news.batch}, {news.rows_in:,} rows in, {news.rows_out:,} out"
            lines[news.pipeline] = words
            show()

    with output.Screen(console) as live:
        show()
        yield tell
        live.update()


@contextmanager
def ending_in_order(runner: Runner) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run between two batches; the second ends the process at once.

    Raising an exception instead would release the locks while other threads may still be writing.
    """
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: Any) -> None:
        runner.stop()
        output.note("ending; the current batch is finished first")
        for each in former:
            signal.signal(each, signal.SIG_DFL)

    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def outcomes_document(outcomes: Sequence[spec.Outcome]) -> dict[str, Any]:
    """Return the JSON document of a run."""
    documents = []
    for outcome in outcomes:
        document = {} if outcome.summary is None else msgspec.to_builtins(outcome.summary)
        error = None
        if outcome.error is not None:
            code = outcome.error.code if isinstance(outcome.error, HoldfastError) else "os_error"
            error = {"code": code, "message": str(outcome.error)}
        documents.append({"pipeline": outcome.pipeline, **document, "error": error})
    return {"pipelines": documents}


def show_outcomes(outcomes: Sequence[spec.Outcome]) -> None:
    """Print what was done as a table, then notes."""
    summaries = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    if not summaries:
        return
    shown = output.table(
        "pipeline",
        "batches>",
        "rows in>",
        "out>",
        "dropped>",
        "quarantined>",
        "duplicates>",
        "files>",
        "lag>",
        "seconds>",
    )
    for each in summaries:
        counts = (
            each.batches,
            each.rows_in,
            each.rows_out,
            each.dropped,
            each.quarantined,
            each.duplicates,
            each.files,
        )
        lag = "" if each.lag is None else f"{each.lag:,}"
        shown.add_row(output.safe(each.pipeline), *(f"{count:,}" for count in counts), lag, f"{each.seconds:.1f}")
    output.stdout().print(shown)
    for each in summaries:
        for name, count in each.expectations.items():
            if count:
                output.say(f"{output.safe(each.pipeline)}: expectation {output.safe(name)} failed for {count:,} rows")
        for remark in each.notes:
            output.say(f"{output.safe(each.pipeline)}: {output.safe(remark)}")


def plan_lines(plan: spec.Plan) -> Iterator[str]:
    """Format a plan as text."""
    rows = "" if plan.rows is None else f", about {plan.rows:,} rows"
    content = "" if plan.bytes is None else f", {output.size(plan.bytes)}"
    yield f"{output.safe(plan.pipeline)} ({plan.kind}){rows}{content}"
    for read in plan.reads:
        count = "" if read.rows is None else f" ({read.rows:,} rows)"
        yield f"  reads   {output.safe(read.what)} from {output.safe(read.start)} to {output.safe(read.end)}{count}"
    for place in plan.writes:
        yield f"  writes  {output.safe(place)}"
    for remark in plan.notes:
        yield f"  note    {output.safe(remark)}"


def standing_table(standings: Sequence[PipelineStatus], running: Mapping[str, int | None]) -> output.Table:
    """Return a table of the pipelines' progress."""
    shown = output.table(
        "pipeline",
        "kind",
        "last run",
        "last batch>",
        "at",
        "rows in>",
        "out>",
        "dropped>",
        "aside>",
        "behind>",
        "running",
    )
    for each in standings:
        at_ms = each.last_batch_at_ms if each.last_run_at_ms is None else each.last_run_at_ms
        shown.add_row(
            output.safe(each.pipeline),
            each.kind,
            _last_run(each),
            "-" if each.last_batch is None else str(each.last_batch),
            "-" if at_ms is None else output.short_time(at_ms * 1_000_000),
            f"{each.rows_in:,}",
            f"{each.rows_out:,}",
            f"{each.dropped:,}",
            f"{each.quarantined:,}",
            "" if each.lag is None else f"{each.lag:,}",
            f"process {running[each.pipeline]}" if running.get(each.pipeline) else "",
        )
    return shown


def history_table(runs: Mapping[str, Sequence[NotedRun]]) -> output.Table:
    """Return a table with sparklines of what each run of a pipeline read, left, and found bad."""
    shown = output.table("pipeline", "runs>", "failed>", "rows/s", "behind", "late", "bad")
    for name, noted in runs.items():
        if len(noted) > 1:
            some = noted[-_RUNS_SHOWN:]
            lines: list[list[float | None]] = [
                [run.rows_in / run.seconds if run.seconds else None for run in some],
                [run.lag for run in some],
                [run.expectations.get("late", 0) for run in some],
                [run.dropped + run.quarantined for run in some],
            ]
            failed = sum(not run.ok for run in some)
            shown.add_row(output.safe(name), str(len(some)), str(failed), *map(_line_text, lines))
    return shown


def _line_text(line: Sequence[float | None]) -> str:
    """Return a sparkline and its last value; nothing if there never was any."""
    from holdfast.cli.look.stats import sparkline

    known = [value for value in line if value is not None]
    return f"{sparkline(line)} {known[-1]:,.0f}" if any(known) else ""


def _last_run(each: PipelineStatus) -> str:
    if each.ok is None:
        return "never" if each.last_batch is None else "-"  # by a version that did not note its runs
    return "ok" if each.ok else "found problems" if each.error is None else "failed"


app = Section("Pipelines from queues to tables and back, on Spark.")

Names: TypeAlias = Annotated[list[str] | None, argument("NAME", "The pipelines.")]
Declared: TypeAlias = Annotated[str, option("--config FILE", "The file that declares the pipelines (YAML or Python).")]
All: TypeAlias = Annotated[bool, option("--all", "All pipelines in the file.")]
FILE = "pipelines.yaml"
_RUNS_SHOWN = 24


@app.command("run")
def run_command(
    names: Names = None,
    declared: Declared = FILE,
    follow: Annotated[bool, option("--follow", "Keep running until Ctrl-C or SIGTERM.")] = False,
    every: Annotated[
        str, option("--every TIME", "With --follow, how often to look for new data (100ms or more).")
    ] = "1s",
    everything: All = False,
    full_refresh: Annotated[
        bool, option("--full-refresh", "Delete the tables and checkpoints first, and start over.")
    ] = False,
    master: Annotated[
        str | None, option("--master URL", "Where Spark runs: spark://host:7077, yarn, local[4]; by default local[*].")
    ] = None,
    remote: Annotated[
        str | None, option("--remote URL", "A Spark Connect server to run on instead: sc://host:15002.")
    ] = None,
    conf: Annotated[list[str] | None, option("--conf NAME=VALUE", "A Spark setting.")] = None,
    from_quarantine: Annotated[
        bool, option("--from-quarantine", "Only retry the quarantined rows, for example after a fix.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Run pipelines in one Spark application. Each runs after the one that it reads from.

    Examples:
        holdfast pipeline run --all
        holdfast pipeline run orders --follow --every 5s
        holdfast pipeline run --all --master spark://host:7077 --conf spark.executor.memory=4g
        holdfast pipeline run --all --remote sc://host:15002
    """
    start = _starting(master, remote, conf or [])
    project = _project(declared)
    wanted = _wanted(project, names, everything=everything)
    if full_refresh and not _may_forget(project, wanted, yes=yes, as_json=as_json):
        return output.NOT_DONE
    from holdfast.spark.pipelines.project import Runner

    every_ms = round(parse_duration(every, "--every") * 1000)
    with bars(wanted, shown=not as_json) as tell:
        runner = Runner(project, tell=tell, start=start)
        with ending_in_order(runner):
            outcomes = runner.run(
                wanted, follow=follow, every_ms=every_ms, full_refresh=full_refresh, from_quarantine=from_quarantine
            )
    if as_json:
        output.print_json(outcomes_document(outcomes))
    else:
        show_outcomes(outcomes)
    for outcome in outcomes:
        if outcome.error is not None:
            code = outcome.error.code if isinstance(outcome.error, HoldfastError) else "os_error"
            output.print_error(code, str(outcome.error), as_json=as_json)
    if any(outcome.error is not None for outcome in outcomes):
        return output.NOT_DONE
    if runner.stopped and not follow:
        return output.INTERRUPTED
    return output.OK if all(outcome.summary is None or outcome.summary.ok for outcome in outcomes) else output.DAMAGED


@app.command("plan")
def plan_command(
    names: Names = None, declared: Declared = FILE, everything: All = False, as_json: AsJson = False
) -> int:
    """Show what a run would read and write. Writes nothing. A pipeline that cannot run says why; the others are shown.

    Examples:
        holdfast pipeline plan --all
    """
    project = _project(declared)
    from holdfast.spark.pipelines.project import Runner

    runner, plans, refused = Runner(project), [], list[HoldfastError]()
    for spec in project.in_order(_wanted(project, names, everything=everything)):
        try:
            plans += runner.plan([spec.name])
        except HoldfastError as error:
            refused.append(error)
    if as_json:
        output.print_json({"plans": msgspec.to_builtins(plans)})
    else:
        for plan in plans:
            output.say("\n".join(plan_lines(plan)))
    for each in refused:
        output.print_error(each.code, str(each), as_json=as_json)
    return output.NOT_DONE if refused else output.OK


@app.command("ls")
def ls_command(declared: Declared = FILE, as_json: AsJson = False) -> int:
    """List the pipelines that a file declares.

    Examples:
        holdfast pipeline ls --config pipelines.yaml
    """
    project = _project(declared)
    if as_json:
        listed = [
            {"pipeline": spec.name, "kind": spec.kind, "options": msgspec.to_builtins(spec.options)}
            for spec in project.pipelines.values()
        ]
        output.print_json({"folder": project.folder, "lake": project.lake, "pipelines": listed})
        return output.OK
    shown = output.table("pipeline", "kind", "reads", "table")
    for spec in project.in_order(project.pipelines):
        topics = getattr(spec.options, "topics", None) or ()
        reads = ", ".join(spec.options.reads or topics) or getattr(spec.options, "pattern", None) or ""
        shown.add_row(output.safe(spec.name), spec.kind, output.safe(reads), output.safe(project.table(spec.name)))
    output.stdout().print(shown)
    return output.OK


@app.command("status")
def status_command(
    names: Names = None,
    declared: Declared = FILE,
    html: Annotated[str | None, option("--html FILE", "Write a page with charts of the last runs instead.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show the progress of pipelines: batches, rows, lag, last runs, and who runs them.

    Needs neither a JVM nor a lock.

    Examples:
        holdfast pipeline status
        holdfast pipeline status --html pipelines.html
    """
    if html is not None and as_json:
        raise InvalidRequest("--html writes a page and --json prints figures: choose one of them")
    project = _project(declared)
    from holdfast.cli.look.log import owner_of
    from holdfast.spark.pipelines.checkpoint import runs_of, status_of

    specs = project.in_order(names or project.pipelines)
    standings = [status_of(real_world(), project, spec) for spec in specs]
    runs = {spec.name: runs_of(real_world(), project, spec.name) for spec in specs}
    owners = {spec.name: owner_of(project.checkpoint(spec.name)) for spec in specs}
    running = {name: owner.pid for name, owner in owners.items() if owner is not None and owner.alive}
    if html is not None:
        from holdfast.spark.pipelines.history import history_report
        from holdfast.spark.pipelines.report import html_of

        _write_page(html, html_of(history_report(project.lake, standings, runs, real_world().clock.now_ns())))
        output.note(f"wrote {output.safe(html)}")
        return output.OK
    if as_json:
        document = [
            {
                **msgspec.to_builtins(each),
                "running_pid": running.get(each.pipeline),
                "runs": msgspec.to_builtins(runs[each.pipeline]),
            }
            for each in standings
        ]
        output.print_json({"lake": project.lake, "pipelines": document})
        return output.OK
    output.stdout().print(standing_table(standings, running))
    if any(len(each) > 1 for each in runs.values()):
        output.say("\nThe last runs, the oldest first:")
        output.stdout().print(history_table(runs))
    return output.OK


def _write_page(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None


@app.command("optimize")
def optimize_command(
    names: Names = None, declared: Declared = FILE, everything: All = False, as_json: AsJson = False
) -> int:
    """Merge small files of Delta tables. Readers are not interrupted; the old files stay until `vacuum`.

    Examples:
        holdfast pipeline optimize --all
    """
    from holdfast.spark.pipelines.lake import optimize

    def change(table: str) -> dict[str, Any]:
        figures = optimize(table)
        return {"files_removed": figures["numFilesRemoved"], "files_added": figures["numFilesAdded"]}

    return _for_tables(declared, names, change, everything=everything, as_json=as_json)


@app.command("vacuum")
def vacuum_command(
    names: Names = None,
    declared: Declared = FILE,
    older_than: Annotated[
        str,
        option(
            "--older-than TIME",
            "Keep the files that versions younger than this need, for time travel and slow readers.",
        ),
    ] = "7d",
    dry_run: Annotated[bool, option("--dry-run", "Only show how many files would be deleted.")] = False,
    everything: All = False,
    as_json: AsJson = False,
) -> int:
    """Delete files that Delta tables no longer need: those that were merged or replaced, and those never committed.

    Examples:
        holdfast pipeline vacuum --all --dry-run
    """
    from holdfast.spark.pipelines.lake import vacuum

    hours = round(parse_duration(older_than, "--older-than") / 3600)

    def change(table: str) -> dict[str, Any]:
        return {"files_to_delete" if dry_run else "files_deleted": len(vacuum(table, hours, dry_run=dry_run))}

    return _for_tables(declared, names, change, everything=everything, as_json=as_json)


def _for_tables(
    declared: str,
    names: list[str] | None,
    change: Callable[[str], dict[str, Any]],
    *,
    everything: bool,
    as_json: bool,
) -> int:
    """Change the Delta tables of these pipelines, each with its lock held, and print what was done."""
    project = _project(declared)
    from holdfast.spark.pipelines.checkpoint import Ledger, held
    from holdfast.spark.pipelines.lake import delta_tables

    done = []
    for name in _wanted(project, names, everything=everything):
        tables = delta_tables(project, name)
        if tables:
            with held(real_world(), project, project.spec(name)):
                if Ledger(real_world(), project.checkpoint(name)).pending() is not None:
                    raise InvalidRequest(
                        f"{name} has a batch that is decided and not finished, whose files the table does not name "
                        f"yet: finish it with `holdfast pipeline run {name}`, then do this again"
                    )
                done += [{"pipeline": name, "table": each, **change(each)} for each in tables]
    if as_json:
        output.print_json({"tables": done})
        return output.OK
    for each in done:
        figures = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in [*each.items()][2:])
        output.say(f"{output.safe(each['table'])}: {figures}")
    if not done:
        output.note("there is no Delta table yet")
    return output.OK


@app.command("new")
def new_command(
    name: Annotated[str, argument("NAME", "The name of the pipeline.")],
    kind: Annotated[str, option("--kind KIND", "What the pipeline does.")] = "land",
    python: Annotated[bool, option("--python", "Write a Python file with a function of your own.")] = False,
    declared: Annotated[str | None, option("--config FILE", f"The file to write; {FILE} by default.")] = None,
) -> int:
    """Write a commented file to start from. If the file exists, prints the entry to add to it.

    Examples:
        holdfast pipeline new orders --kind land
    """
    _need_spark()
    from holdfast.broker.folder.layout import check_name
    from holdfast.spark.pipelines.spec import entry, kind_named, python_template, yaml_template

    check_name(name, "pipeline")
    kind_named(kind)
    path = Path(declared or (f"{name.replace('-', '_')}.py" if python else FILE))
    text = python_template(name, path.name) if python else yaml_template(name, kind, str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if python:
            raise InvalidRequest(
                f"{path} already exists; nothing was written. Choose another name, or remove it first"
            ) from None
        output.note(f"{output.safe(str(path))} already exists; add this to its pipelines:")
        output.say(entry(name, kind).rstrip("\n"))
        return output.OK
    output.note(f"wrote {output.safe(str(path))}; look through it, then: holdfast pipeline plan {name}")
    return output.OK


@app.command("export")
def export_command(
    folder: Annotated[str, option("--sdp DIR", "Where to write the project.")],
    declared: Declared = FILE,
    as_json: AsJson = False,
) -> int:
    """Export land, refine and aggregate as a Spark Declarative Pipelines project.

    Examples:
        holdfast pipeline export --sdp ./project
    """
    project = _project(declared)
    from holdfast.spark.pipelines.sdp import export

    exported = export(real_world(), project, str(Path(folder).resolve()))
    if as_json:
        output.print_json(msgspec.to_builtins(exported))
        return output.OK
    for each in exported.notes:
        output.note(output.safe(each))
    output.note(f"wrote {len(exported.files)} files; {output.safe(exported.files[1])} says how to run it")
    return output.OK


def _starting(master: str | None, remote: str | None, conf: Sequence[str]) -> Callable[[], SparkSession]:
    """What starts a session as the command line says."""
    settings: dict[str, str] = {}
    if remote is not None:
        if master is not None:
            raise InvalidRequest("a Spark Connect server has its own master: give --remote or --master, not both")
        if not remote.startswith("sc://"):
            raise InvalidRequest(f"--remote {remote!r} is not a Spark Connect server: give sc://HOST:PORT")
        settings["spark.remote"] = remote
    for each in conf:
        name, equals, value = each.partition("=")
        if not equals or not name.startswith("spark."):
            raise InvalidRequest(f"--conf {each!r} is not a setting: give spark.NAME=VALUE, like spark.ui.enabled=true")
        if name == "spark.remote":
            raise InvalidRequest(f"name the Spark Connect server with --remote {value}, not with --conf")
        settings[name] = value

    def start() -> SparkSession:
        from holdfast.spark.session import session

        return session("holdfast pipelines", master or "local[*]", **settings)

    return start


def _project(declared: str) -> Project:
    _need_spark()
    from holdfast.spark.pipelines.project import read_project

    return read_project(declared)


def _need_spark() -> None:
    missing = [
        package for package in ("pyspark", "pyarrow", "numpy", "yaml", "deltalake") if not output.is_installed(package)
    ]
    if missing:
        raise NotInstalled(
            f"pipelines run on Spark, and {', '.join(missing)} cannot be found: pip install 'holdfast[spark]'"
        )


def _wanted(project: Project, names: list[str] | None, *, everything: bool) -> list[str]:
    if everything:
        if names:
            raise InvalidRequest("name pipelines, or use --all, not both")
        return list(project.pipelines)
    if not names:
        raise InvalidRequest(f"name a pipeline, or use --all; known pipelines: {', '.join(project.pipelines)}")
    return [project.spec(name).name for name in names]


def _may_forget(project: Project, names: list[str], *, yes: bool, as_json: bool) -> bool:
    gone = ", ".join(output.safe(project.table(name)) for name in names)
    return output.confirmed(
        f"Remove {gone} and start over?", "pipeline run --full-refresh", yes=yes, as_json=as_json, looks=False
    )
