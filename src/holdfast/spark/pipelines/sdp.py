"""Export of pipelines as a project of Spark Declarative Pipelines.

The project needs Holdfast only to read messages. It uses only `select`: in Spark 4.3 a `withColumn` on a table of the
same project binds the flow to what the table holds now, so that it is always one run behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.spark.pipelines.batches import unmet_sql
from holdfast.spark.pipelines.land import stream_options
from holdfast.spark.pipelines.spec import Expectation, Project, Spec, interval_ms
from holdfast.storage.files import durable_replace, read_file

if TYPE_CHECKING:
    from holdfast.env import World

SPEC: Final = "spark-pipeline.yml"
README: Final = "README.md"
FOLDER: Final = "transformations"

_MARK: Final = "# Made by `holdfast pipeline export`."
_HEAD: Final = '''\
"""{title}"""

{mark}
from pyspark import pipelines as dp
from pyspark.sql import SparkSession
{imports}
spark = SparkSession.active()
'''

_LAND: Final = """

@dp.table(name={table!r}, partition_cols=["dt", "topic"])
def {function}():
    messages = spark.readStream.format("holdfast").options(**{options}).load()
    return messages.select("*", f.current_timestamp().alias("_landed_at"), f.to_date("timestamp").alias("dt"))
"""

_REFINE: Final = '''
SCHEMA = {schema!r}
REASONS = {reasons!r}


def checked():
    """Every message that has a value, with the columns of its JSON, and why it cannot be used."""
    rows = spark.read.table({source!r}).where("value IS NOT NULL")
    how = {{"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"}}
    read = f.from_json(f.col("value").cast("string"), SCHEMA + ", _corrupt string", how)
    typed = rows.select("*", read.alias("_read")).selectExpr(
        "_read.*", "_read IS NOT NULL AND _read._corrupt IS NULL AS _whole", "topic AS _topic",
        "partition AS _partition", "offset AS _offset", "timestamp AS _timestamp",
        "octet_length(value) AS _bytes", "dt", "struct(key, value) AS _source",
    )
    return typed.select("*", f.expr(REASONS).alias("_reasons"))


@dp.materialized_view(name={table!r})
def {function}():
    good = checked().where("size(_reasons) = 0").selectExpr("* EXCEPT (_reasons, _source, _whole, _corrupt)")
{good}

@dp.materialized_view(name={aside!r})
def {function}_quarantine():
    bad = checked().where("size(_reasons) > 0")
    return bad.selectExpr("_topic", "_partition", "_offset", "_timestamp", "_source.key", "_source.value", "_reasons")
'''

_FIRST_OF_EACH: Final = """\
    order = Window.partitionBy({keys}).orderBy("_timestamp", "_topic", "_partition", "_offset")
    ranked = good.select("*", f.row_number().over(order).alias("_rank"))
    return ranked.where("_rank = 1").selectExpr("* EXCEPT (_rank)")
"""

_AGGREGATE: Final = """

@dp.materialized_view(name={table!r})
def {function}():
    rows = spark.read.table({source!r}).where({time_sql!r})
    placed = rows.select("*", f.window({time!r}, {length!r}, {slide!r}).alias("_window"))
    timed = placed.selectExpr("*", "_window.start AS window_start", "_window.end AS window_end")
    return timed.groupBy({by}).agg(
{measures}
    )
"""

_SAID: Final = """\
# {name}

A project of Spark Declarative Pipelines, made by `holdfast pipeline export` from {where}.

    pip install 'holdfast[spark]' 'pyspark[pipelines]'
    spark-pipelines run --spec {spec} \\
        --conf spark.sql.catalogImplementation=hive --conf spark.sql.warehouse.dir={warehouse}

Without a catalog that lasts (`hive` is in Spark's own package) a second run finds tables that it does not know. Run one
at a time, and always from the same folder: the catalog is in its `metastore_db`.

| pipeline | table | |
|---|---|---|
{tables}

## What is not the same as `holdfast pipeline run`

- `refine` and `aggregate` are recomputed from all rows by each run. So no window is ever closed: late rows count.
- There are no expectations. `drop` and `quarantine` are conditions here; nothing is counted, `warn` and `fail` are
  left out.
- No merging of small files, no summary, no lag, no `--follow`: a run takes what is there and ends.
{notes}"""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were written, and notes on what could not be exported."""

    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(world: World, project: Project, folder: str) -> Exported:
    """Write the project. Raises InvalidRequest if the folder holds something else, or nothing can be exported."""
    root = folder.rstrip("/")
    _check_folder(world, root)
    specs = [spec for spec in project.in_order(project.pipelines) if spec.kind in _MAKERS]
    notes = [
        f"{spec.name} is left out: the kind {spec.kind} has no counterpart"
        for spec in project.pipelines.values()
        if spec.kind not in _MAKERS
    ]
    if not specs:
        raise InvalidRequest(f"{project.where} has no pipeline of the kinds {', '.join(_MAKERS)}: nothing to export")
    tables = table_names(spec.name for spec in specs)
    world.disk.make_folder(f"{root}/{FOLDER}")
    files = []
    for spec in specs:
        text, more = _MAKERS[spec.kind](project, spec, tables)
        notes += [f"{spec.name}: {note}" for note in more]
        durable_replace(world.disk, f"{root}/{FOLDER}", f"{tables[spec.name]}.py", text.encode())
        files.append(f"{root}/{FOLDER}/{tables[spec.name]}.py")
    name = root.rpartition("/")[2] or "holdfast"
    durable_replace(world.disk, root, README, _readme(project, specs, tables, root, name, notes).encode())
    durable_replace(world.disk, root, SPEC, _spec(root, name).encode())
    return Exported(files=(f"{root}/{SPEC}", f"{root}/{README}", *files), notes=tuple(notes))


def table_names(names: Iterable[str]) -> dict[str, str]:
    """The name of each pipeline's table in a catalog, of letters, digits and underscores."""
    found: dict[str, str] = {}
    for name in names:
        table = re.sub(r"[^a-z0-9_]", "_", name.lower())
        table = f"t_{table}" if table[0].isdigit() else table
        if table in found.values():
            raise InvalidRequest(f"two pipelines would have the table {table}: rename {name}")
        found[name] = table
    return found


def columns_of(schema: str) -> list[tuple[str, bool]]:
    """The columns of a schema in DDL, each with whether it is NOT NULL."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(schema):
        depth += character in "<("
        depth -= character in ">)"
        if character == "," and not depth:
            parts.append(schema[start:place])
            start = place + 1
    parts.append(schema[start:])
    return [(_name(part), bool(_NOT_NULL.search(part))) for part in parts if part.strip()]


def _name(column: str) -> str:
    found = _NAME.match(column)
    assert found is not None, "a part that is not blank has a name"
    return found[1] or found[2]


_NAME: Final = re.compile(r"\s*(?:`([^`]+)`|([^\s:]+))")
_NOT_NULL: Final = re.compile(r"\s+not\s+null\s*$", re.IGNORECASE)
_NOT_NULLS: Final = re.compile(r"\s+not\s+null\b", re.IGNORECASE)

Made = tuple[str, list[str]]


def _land(project: Project, spec: Spec, tables: dict[str, str]) -> Made:
    given = json.dumps(stream_options(project.folder, f"{spec.name}-sdp", spec.options), indent=4)
    table = tables[spec.name]
    body = _LAND.format(table=table, function=table, options=given.replace("\n", "\n    "))
    return _head(f"{spec.name}: topics to a table, every message once.") + body, _unsaid(spec.options.expect)


def _refine(project: Project, spec: Spec, tables: dict[str, str]) -> Made:
    options = spec.options
    if options.schema == "infer":
        raise InvalidRequest(f"{spec.name} infers its schema, which an export cannot: give it one, schema: 'id long'")
    quarantined = [each for each in options.expect if each.on_fail == "quarantine"]
    needed = [name for name, not_null in columns_of(options.schema) if not_null or name in options.keys]
    reasons = ["IF(_whole, NULL, 'not JSON of the schema')"]
    reasons += [f"IF(_whole AND `{name}` IS NULL, '{name} is null', NULL)" for name in needed]
    unmet = f"IF(_whole, {unmet_sql(quarantined)}, cast(array() AS array<string>))"
    table = tables[spec.name]
    good = "".join(
        f"    good = good.where({f'coalesce(({each.check}), false)'!r})  # {each.name}\n"
        for each in options.expect
        if each.on_fail == "drop"
    )
    keys = ", ".join(map(repr, options.keys))
    body = _REFINE.format(
        schema=_NOT_NULLS.sub("", options.schema),
        reasons=f"array_compact(concat(array({', '.join(reasons)}), {unmet}))",
        source=tables[options.source],
        table=table,
        aside=f"{table}_quarantine",
        function=table,
        good=good + (_FIRST_OF_EACH.format(keys=keys) if keys else "    return good\n"),
    )
    title = f"{spec.name}: typed rows of {options.source}, each once."
    notes = _unsaid(each for each in options.expect if each.on_fail in ("warn", "fail"))
    return _head(title, window=bool(keys)) + body, notes


def _aggregate(project: Project, spec: Spec, tables: dict[str, str]) -> Made:
    options = spec.options
    source = project.spec(options.source)
    if options.source not in tables:
        raise InvalidRequest(
            f"{spec.name} reads from {options.source}, of the kind {source.kind}: it cannot be exported"
        )
    time = options.time or ("_timestamp" if source.kind == "refine" else "timestamp")
    length_ms = interval_ms(options.window, "window")
    measures = options.measures or _usual_measures(source.kind, time, length_ms / 1000)
    table = tables[spec.name]
    body = _AGGREGATE.format(
        table=table,
        function=table,
        source=tables[options.source],
        time=time,
        time_sql=f"`{time}` IS NOT NULL",
        length=f"{length_ms} milliseconds",
        slide=f"{interval_ms(options.slide or options.window, 'slide')} milliseconds",
        by=", ".join(map(repr, ("window_start", "window_end", *options.by))),
        measures="\n".join(f"        f.expr({sql!r}).alias({name!r})," for name, sql in measures.items()),
    )
    return _head(f"{spec.name}: numbers of {options.source} by time window.") + body, _unsaid(options.expect)


_MAKERS: Final = {"land": _land, "refine": _refine, "aggregate": _aggregate}


def _usual_measures(kind: str, time: str, seconds: float) -> dict[str, str]:
    """The measures of `aggregate` if none are named."""
    size = "_bytes" if kind == "refine" else "coalesce(octet_length(value), 0)"
    measures = {
        "count": "count(1)",
        "per_second": f"count(1) / {seconds!r}",
        "bytes": f"sum({size})",
        "mean_bytes": f"avg({size})",
        "max_bytes": f"max({size})",
    }
    until = "_timestamp" if kind == "refine" else "_landed_at"
    if until != time:
        latency = f"(unix_micros({until}) - unix_micros(`{time}`)) / 1000"
        measures["latency_ms_mean"] = f"avg({latency})"
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            measures[f"latency_ms_{name}"] = f"percentile_approx({latency}, {share})"
        measures["latency_ms_max"] = f"max({latency})"
    return measures


def _unsaid(expectations: Iterable[Expectation]) -> list[str]:
    return [f"the expectation {each.name!r} ({each.on_fail}) is left out" for each in expectations]


def _head(title: str, *, window: bool = False) -> str:
    imports = "from pyspark.sql import Window\n" if window else ""
    return _HEAD.format(title=title, mark=_MARK, imports=f"{imports}from pyspark.sql import functions as f\n")


def _spec(root: str, name: str) -> str:
    return (
        f"{_MARK}\nname: {json.dumps(name)}\nstorage: {json.dumps(f'file://{root}/storage')}\n"
        f"libraries:\n  - glob:\n      include: {FOLDER}/**\n"
        'configuration:\n  spark.sql.session.timeZone: "UTC"\n'
    )


def _readme(project: Project, specs: list[Spec], tables: dict[str, str], root: str, name: str, notes: list[str]) -> str:
    rows = [f"| {spec.name} | `{tables[spec.name]}` | {spec.kind} |" for spec in specs]
    rows += [
        f"| {spec.name} | `{tables[spec.name]}_quarantine` | put aside |" for spec in specs if spec.kind == "refine"
    ]
    more: list[Any] = [f"- {note}" for note in notes]
    return _SAID.format(
        name=name,
        where=project.where,
        spec=f"{root}/{SPEC}",
        warehouse=f"{root}/warehouse",
        tables="\n".join(rows),
        notes="".join(f"{note}\n" for note in more),
    )


def _check_folder(world: World, root: str) -> None:
    if not world.disk.exists(root) or not world.disk.names(root):
        return
    made = read_file(world.disk, f"{root}/{SPEC}")
    if made is None or not made.decode(errors="replace").startswith(_MARK):
        raise InvalidRequest(f"{root} holds something else: name an empty folder, or one that an export made")
