"""`refine`: landed messages to typed rows, each once; those that cannot be used are quarantined (silver)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, cast

from holdfast.errors import BadSettings
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import REASONS, Slice, StepOptions, check_columns, step_kind, write_batch
from holdfast.spark.pipelines.checkpoint import LedgerBatch
from holdfast.spark.pipelines.lake import DATE, quoted, read_table
from holdfast.spark.pipelines.parquet import BATCH
from holdfast.spark.pipelines.spec import Context, Expectation, interval_ms, no_expectation_named
from holdfast.storage.files import durable_replace, join, read_file

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType


INFER: Final = "infer"
SCHEMA: Final = "schema.json"
_SAMPLE: Final = 10_000
# Without a pattern Spark takes "2024", "10115" and "12:30" for times, too.
_TIMES: Final = "yyyy-MM-dd['T'][' ']HH:mm:ss[.SSSSSSSSS][.SSSSSS][.SSS][XXX]"
_SOURCE: Final = "_source"
_CORRUPT: Final = "_corrupt"
# Where a row comes from, beside its own columns.
LINEAGE: Final = ("_topic", "_partition", "_offset", "_timestamp", "_bytes")
# Fields that the schema does not know, as JSON.
RESCUED: Final = "_rescued"
_FIELDS: Final = "_fields"
_SHOWN_CHARACTERS: Final = 100
_NOTHING_RESCUED: Final = Expectation(name="rescued", check=f"{RESCUED} IS NULL", on_fail="warn")
_TOMBSTONE: Final = Expectation(name="tombstone", check=f"NOT {_SOURCE}.tombstone", on_fail="drop")


class RefineOptions(StepOptions, frozen=True, kw_only=True):
    """Options of `refine`."""

    schema: str = INFER
    key: str | tuple[str, ...] = ()
    within: str | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("a pipeline of the kind refine needs a source: the name of one of the kind land")
        if self.within is not None:
            interval_ms(self.within, "within")
            if not self.keys:
                raise BadSettings("within says how far back duplicates of a key are looked for: name the key")
        for each in (_TOMBSTONE, _NOTHING_RESCUED):
            no_expectation_named(each.name, self.expect)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key


def decoded(rows: DataFrame, schema: StructType, keys: tuple[str, ...] = ()) -> DataFrame:
    """Landed messages with the columns of their JSON, their origin, and the reasons why a row cannot be used."""
    from pyspark.sql.types import StringType, StructField, StructType

    with_rest = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    how = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    text = f.col("value").cast("string")
    read = f.from_json(text, with_rest, how)
    fields = f.from_json(text, "map<string, string>")
    found = rows.select(f.struct("*").alias(_SOURCE), read.alias("_read"), fields.alias(_FIELDS))
    whole = f.col("_read").isNotNull() & f.col(f"_read.{_CORRUPT}").isNull()
    there = ~f.col(f"{_SOURCE}.tombstone")
    wrong = f.array_compact(f.array(*[_wrong_value(field) for field in schema.fields]))
    unread = f.when(f.size(wrong) > 0, wrong).otherwise(f.array(f.lit("not JSON of the schema")))
    unusable = []
    for field in schema.fields:
        if not field.nullable or field.name in keys:
            missing = f.col("_read").getField(field.name).isNull()
            unusable.append(f.when(there & whole & missing, f.lit(f"{field.name} is null")))
    return found.select(
        *[f.col("_read").getField(field.name).alias(field.name) for field in schema.fields],
        *[f.col(f"{_SOURCE}.{name}").alias(f"_{name}") for name in ("topic", "partition", "offset", "timestamp")],
        f.octet_length(f"{_SOURCE}.value").alias("_bytes"),
        f.col(f"{_SOURCE}.{DATE}").alias(DATE),
        _SOURCE,
        _rescued(schema),
        f.when(there & ~whole, unread).otherwise(f.array_compact(f.array(*unusable))).alias(REASONS),
    )


def _wrong_value(field: StructField) -> Column:
    """Why a field could not be read, with its value; null if it could."""
    value = f.col(_FIELDS)[field.name]
    missing = f.col("_read").getField(field.name).isNull() & value.isNotNull()
    words = f.concat(f.lit(f"{field.name} is "), f.substring(value, 1, _SHOWN_CHARACTERS))
    return f.when(missing, f.concat(words, f.lit(f", which is not a valid {field.dataType.simpleString()}")))


def _rescued(schema: StructType) -> Column:
    """The fields that the schema does not know, as JSON; null if there are none."""
    known = f.array(*map(f.lit, schema.names))
    unknown = f.map_filter(_FIELDS, lambda name, value: ~f.array_contains(known, name))
    return f.when(f.size(unknown) > 0, f.to_json(unknown)).alias(RESCUED)


def first_of_each(rows: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    """The earliest row of each key."""
    from pyspark.sql import Window

    order = Window.partitionBy(*map(quoted, keys)).orderBy("_timestamp", "_topic", "_partition", "_offset")
    return rows.withColumn("_rank", f.row_number().over(order)).where("_rank = 1").drop("_rank")


def without_known(rows: DataFrame, known: DataFrame | None, keys: tuple[str, ...]) -> DataFrame:
    """The rows whose key is not known yet."""
    return rows if known is None else rows.join(known.select(*map(quoted, keys)).distinct(), list(keys), "left_anti")


def write(context: Context, piece: Slice) -> LedgerBatch:
    """One batch of the silver table."""
    options: RefineOptions = context.options
    schema = _schema(context, piece.rows)
    rows = decoded(piece.rows.drop(BATCH), schema, options.keys)
    check_columns(rows, options.expect, context.name)

    def good(found: DataFrame) -> DataFrame:
        found = found.drop(_SOURCE)
        if not options.keys:
            return found
        return without_known(first_of_each(found, options.keys), _known(context, piece), options.keys)

    def bad(found: DataFrame) -> DataFrame:
        return found.select(f"{_SOURCE}.*", REASONS)

    return write_batch(
        context,
        piece.batch,
        rows,
        partition_by=(DATE,),
        first=_TOMBSTONE,
        also=(_NOTHING_RESCUED,),
        good=good,
        bad=bad,
        redriven=piece.redriven,
        **piece.facts,
    )


def _known(context: Context, piece: Slice) -> DataFrame | None:
    """The rows of the table in which duplicates are looked for."""
    known = read_table(context, context.name, through=piece.batch - 1)
    within = context.options.within
    if known is None or within is None:
        return known
    earliest_us = piece.rows.agg(f.min(f.unix_micros("timestamp"))).collect()[0][0]
    if earliest_us is None:
        return known
    since = f.timestamp_micros(f.lit(earliest_us - interval_ms(within, "within") * 1000))
    return known.where((f.col(DATE) >= f.to_date(since)) & (f.col("_timestamp") >= since))


def _schema(context: Context, rows: DataFrame) -> StructType:
    """The schema of the options, or the one inferred from the first rows, which is stored for later batches."""
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    given = context.options.schema
    if given != INFER:
        try:
            schema = cast(StructType, StructType.fromDDL(given))
        except ParseException as error:
            words = str(error).strip().splitlines()[0]
            raise BadSettings(f"{context.name}: the schema {given!r} cannot be used: {words}") from None
    else:
        noted = read_file(context.disk, join(context.checkpoint, SCHEMA))
        if noted is None:
            noted = _inferred(context, rows).json().encode()
            durable_replace(context.disk, context.checkpoint, SCHEMA, noted)
        schema = _with_new_fields(context, rows, StructType.fromJson(json.loads(noted)))
    _check_names(context, schema)
    return schema


def _with_new_fields(context: Context, rows: DataFrame, schema: StructType) -> StructType:
    """The inferred schema with the fields that came up since, which is stored for later batches."""
    from pyspark.sql.types import StructType

    known = f.array(*map(f.lit, schema.names))
    names = f.coalesce(f.json_object_keys(f.col("value").cast("string")), f.array().cast("array<string>"))
    news = rows.where(f.size(f.array_except(names, known)) > 0)
    if news.isEmpty():
        return schema
    found = [
        field
        for field in _inferred(context, news).fields
        if field.name not in schema.names and not field.name.startswith("_") and field.name.lower() != DATE
    ]
    wider = StructType([*schema.fields, *found])
    durable_replace(context.disk, context.checkpoint, SCHEMA, wider.json().encode())
    return wider


def _inferred(context: Context, rows: DataFrame) -> StructType:
    texts = rows.where("NOT tombstone").selectExpr("cast(value AS string)").limit(_SAMPLE).collect()
    spark = context.spark
    how = {"mode": "DROPMALFORMED", "inferTimestamp": "true", "timestampFormat": _TIMES}
    found = spark.read.options(**how).json(spark.createDataFrame([(text[0],) for text in texts], "value string"))
    if not found.columns:
        raise BadSettings(
            f"{context.name}: no schema can be inferred: none of the first {len(texts)} messages is a JSON object. "
            "Give one, schema: 'id long, amount double'"
        )
    return found.schema


def _check_names(context: Context, schema: StructType) -> None:
    for name in schema.names:
        if name.startswith("_") or name.lower() == DATE:
            raise BadSettings(f"{context.name}: a column cannot be named {name!r}, as the table has its own: rename it")
    for key in context.options.keys:
        if key not in schema.names:
            raise BadSettings(f"{context.name}: its key {key!r} is not one of its columns: {', '.join(schema.names)}")


_TEMPLATE: Final = """\
    kind: refine
    source: orders-land         # a pipeline of the kind land
    schema: "id long not null, amount double, country string, at timestamp"   # or infer
    key: id                     # the first row of each key counts; [a, b] for several columns
    # within: "7 days"          # look for duplicates only so far back
    expect:
      - {name: positive, check: "amount > 0", on_fail: quarantine}   # warn, drop, quarantine or fail
"""
KIND: Final = step_kind(
    RefineOptions,
    _TEMPLATE,
    sources=("land",),
    write=write,
    note=lambda context: f"rows that cannot be used go to {context.quarantine}",
    identity=lambda options: (
        {"source": options.source, "key": options.keys}
        # Plain files cannot be widened; a Delta table takes new columns and wider types, and refuses others by itself.
        | ({"schema": options.schema} if options.format == "parquet" else {})
    ),
)
