"""`python -m bench.spark.first SOURCE FOLDER ROWS`: start a session, do one query, and say so."""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.spark.data import TOPIC

_CONF = {"spark.driver.memory": "1g"}


def main(source: str, folder: str, rows: int) -> None:
    """Spark of its own accord reads Parquet; ours comes with its source."""
    from holdfast.spark.session import session, settings_for

    spark: Any
    if source == "parquet":
        from pyspark.sql import SparkSession

        builder = SparkSession.builder
        for name, value in settings_for("local[2]", _CONF).items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        found = spark.read.schema("value binary").parquet(folder)
    else:
        spark = session("bench", "local[2]", **_CONF)
        reader = spark.read.format("holdfast").schema("value binary").option("path", folder).option("topic", TOPIC)
        found = reader.option("endingOffsets", json.dumps({TOPIC: {"0": rows}})).load()
    assert found.selectExpr("count(value)").first()[0] == rows
    print("done", flush=True)
    jvm = spark.sparkContext._gateway.proc
    jvm.stdin.close()
    jvm.wait()  # so that its CPU time counts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
