"""A Spark session that is ready to use, and the one line that makes any other session ready."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.env.environ import environment, set_variable
from holdfast.errors import NotInstalled
from holdfast.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

JAVA_OPTIONS = "spark.driver.extraJavaOptions"

Value = str | int | float | bool | None

# Timestamps of messages are UTC; days and hours in tables should not depend on the machine that made them.
EVERYWHERE: Mapping[str, Value] = {"spark.sql.session.timeZone": "UTC"}

# One machine: no network is needed, nothing listens for browsers, and Spark's own progress bars do not write
# over those of a program. A shuffle of 200 parts, Spark's default, is for a cluster.
ON_ONE_MACHINE: Mapping[str, Value] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    JAVA_OPTIONS: f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}",
    "spark.sql.shuffle.partitions": 8,
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
}

_ONE_MACHINE = re.compile(r"local(\[.*\])?")


def session(app: str = "holdfast", master: str = "local[*]", **conf: Value) -> SparkSession:
    """The session of this process, or a new one with Java found for it; it reads and writes `holdfast`.

    `conf` are settings of Spark, `session(**{"spark.driver.memory": "4g"})`, and go before ours; None leaves a setting
    to Spark. A session that runs already is used as it is.
    """
    running = _running()
    if running is None:
        running = _start(app, master, conf)
    elif conf:
        log.warning("a Spark session runs already; stop it to change its settings", extra={"ignored": sorted(conf)})
    register(running)
    return running


def register(spark: SparkSession) -> None:
    """Make the source and sink `holdfast` known to a session of your own, classic or Connect."""
    from holdfast.spark.source import HoldfastSource

    spark.dataSource.register(HoldfastSource)


def settings_for(master: str | None, conf: Mapping[str, Value]) -> dict[str, Value]:
    """The settings of a new session; no master: somebody else has chosen it."""
    ours: dict[str, Value] = dict(EVERYWHERE)
    if master is not None:
        ours["spark.master"] = master
        if _ONE_MACHINE.fullmatch(master):
            ours |= ON_ONE_MACHINE
    if conf.get(JAVA_OPTIONS) and JAVA_OPTIONS in ours:
        conf = {
            **conf,
            JAVA_OPTIONS: f"{ours[JAVA_OPTIONS]} {conf[JAVA_OPTIONS]}",
        }  # of two that differ, Java takes the later
    ours |= conf
    return {name: value for name, value in ours.items() if value is not None}


def _running() -> SparkSession | None:
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NotInstalled(f"there is no Spark here ({error}): run `pip install 'holdfast[spark]'`") from error
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _start(app: str, master: str, conf: Mapping[str, Value]) -> SparkSession:
    from pyspark.sql import SparkSession

    variables = environment()
    chosen = str(conf.get("spark.master") or master)
    # A server of Spark Connect, or the JVM that spark-submit started, has its own master, and Java where it is.
    server = str(conf.get("spark.remote") or variables.get("SPARK_REMOTE", ""))
    submitted = "PYSPARK_GATEWAY_PORT" in variables
    if not submitted and not server.startswith("sc://"):
        set_variable("JAVA_HOME", str(java_home(variables)))
        if _ONE_MACHINE.fullmatch(server or chosen):
            # Spark would start its workers with whatever `python3` is first on the path.
            for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
                set_variable(name, variables.get(name, sys.executable))
    builder = SparkSession.builder.appName(app)
    for name, value in settings_for(None if server or submitted else chosen, conf).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
