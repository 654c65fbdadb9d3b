"""What `holdfast pipeline new` writes: a file to begin with, every line of it explained."""

from __future__ import annotations

from typing import Final

from holdfast.spark.pipelines.kinds import kind_named

_HEAD: Final = """\
# Pipelines: `holdfast pipeline run {name} --config {file}`, and `holdfast pipeline plan` to see what that would do.
# Paths are meant from where this file is.
folder: data                    # the data folder with the topics
lake: lake                      # where tables go; checkpoints are in lake/_checkpoints
# file: my_pipelines.py         # functions of your own; see `holdfast pipeline new NAME --python`

pipelines:
"""

PYTHON: Final = '''\
"""Pipelines of our own: functions from rows to rows. Name this file in the YAML with `file: {file}`."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from holdfast.spark import pipeline


# It is called with the new rows of its source, batch by batch; what it returns goes to the table lake/{name}.
# A batch that was cut short is done again from the beginning, so it should do nothing else than return rows.
@pipeline(
    source="orders-silver",  # the pipeline whose table it reads
    name="{name}",
    expect=[{{"name": "has_country", "check": "country IS NOT NULL", "on_fail": "quarantine"}}],
    # partition_by=["country"],  # the folders of the table; by default the day, where there is a column dt
)
def {function}(rows: DataFrame) -> DataFrame:
    return rows.withColumn("country", f.upper("country"))
'''


def yaml_template(name: str, kind: str, file: str) -> str:
    """A file with one pipeline of this kind."""
    return f"{_HEAD.format(name=name, file=file)}{entry(name, kind)}"


def entry(name: str, kind: str) -> str:
    """One entry below `pipelines:`, to be added to a file that is there."""
    import yaml

    key = name if yaml.safe_load(name) == name else f'"{name}"'  # "on" and "2024" are no names to YAML
    return f"  {key}:\n{kind_named(kind).template}"


def python_template(name: str, file: str) -> str:
    """A Python file with one function."""
    function = "".join(c if c.isalnum() else "_" for c in name)
    return PYTHON.format(name=name, file=file, function=function if not function[:1].isdigit() else f"_{function}")
