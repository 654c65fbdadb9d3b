"""Real clusters on loopback: a standalone master with two workers, and a Spark Connect server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest

import holdfast
from holdfast.client.spark_commits import routes
from holdfast.spark.session import java_home
from tests.integration.http_gear import serving
from tests.spark.scripts import run_script

pytestmark = [pytest.mark.slow, pytest.mark.serial]

SPARK = Path(pyspark.__file__).parent
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_HOME": str(java_home(os.environ)),
        "SPARK_HOME": str(SPARK),
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "512m",
        "SPARK_DAEMON_JAVA_OPTS": SMALL,
        "PYSPARK_PYTHON": sys.executable,
    }


@contextmanager
def running(folder: Path, name: str, *command: str, port: int | None = None) -> Iterator[None]:
    """A process of Spark's, in a folder of its own; it listens before the block begins."""
    own = folder / name
    own.mkdir()
    with (own / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=own, env=environment(), stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while port is not None:
            assert process.poll() is None, (own / "log").read_text()[-3000:]
            with socket.socket() as trying:
                if trying.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < until, (own / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    start, here = str(SPARK / "bin/spark-class"), "127.0.0.1"
    deploy, url = "org.apache.spark.deploy", f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        chief = (start, f"{deploy}.master.Master", "--host", here, "--port", str(port), "--webui-port", "0")
        stack.enter_context(running(folder, "master", *chief, port=port))
        for name in ("one", "two"):
            worker = (start, f"{deploy}.worker.Worker", "--host", here, "-c", "1", "-m", "700M", "--webui-port", "0")
            stack.enter_context(running(folder, name, *worker, "-d", str(folder / name), url))
        yield url


ON_A_CLUSTER = """
import os
import holdfast, holdfast.spark

# The driver's folder is not the one that executors run in.
with holdfast.open_broker("here") as broker:
    broker.create_topic("orders", partitions=2)
    broker.publish_many("orders", [b"%d" % number for number in range(500)])

spark = holdfast.spark.session("cluster", {master!r}, **{{
    "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": False,
    "spark.executor.memory": "512m", "spark.cores.max": 2, "spark.sql.shuffle.partitions": 2,
    "spark.driver.extraJavaOptions": {small!r}, "spark.executor.extraJavaOptions": {small!r},
}})
here = spark.read.format("holdfast").options(path="here", topic="orders").load()
assert here.count() == 500, here.count()
query = (
    spark.readStream.format("holdfast")
    .options(path={url!r}, topic="orders", startingOffsets="earliest", maxOffsetsPerTrigger="400").load()
    .select("key", "value").writeStream.format("holdfast")
    .options(path={url!r}, topic="copies", checkpointLocation=os.path.abspath("checkpoint"))
    .trigger(availableNow=True).start()
)
query.awaitTermination()
copies = spark.read.format("holdfast").options(path={url!r}, topic="copies").load()
assert copies.selectExpr("count(DISTINCT value)", "count(*)").first()[:] == (1000, 1000)
spark.stop()
print("done")
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server whose folder nobody else knows."""
    with serving(tmp_path / "shop", more=lambda: [routes]) as server:
        with holdfast.connect(server.url) as broker:
            broker.create_topic("orders", partitions=2)
            broker.create_topic("copies")
            broker.publish_many("orders", [b"order %d" % number for number in range(1000)])
        yield server.url


def test_executors_of_a_cluster_read_a_folder_and_read_and_write_through_a_server(master: str, url: str) -> None:
    done = run_script(ON_A_CLUSTER.format(master=master, url=url, small=SMALL), 240, environment=environment())
    assert done.stdout == "done\n", done.stderr[-4000:]


OVER_CONNECT = """
import holdfast.spark
from pyspark.sql.connect.session import SparkSession

spark = holdfast.spark.session("connected", **{{"spark.remote": {remote!r}}})
assert isinstance(spark, SparkSession)
orders = spark.read.format("holdfast").options(path={url!r}, topic="orders").load()
orders.select("value").write.format("holdfast").options(path={url!r}, topic="copies").mode("append").save()
query = (
    spark.readStream.format("holdfast").options(path={url!r}, topic="copies", startingOffsets="earliest").load()
    .select("value").writeStream.format("holdfast")
    .options(path={url!r}, topic="copies", checkpointLocation={checkpoint!r})
    .trigger(availableNow=True).start()
)
query.awaitTermination()
copies = spark.read.format("holdfast").options(path={url!r}, topic="copies").load()
assert copies.selectExpr("count(DISTINCT value)", "count(*)").first()[:] == (1000, 2000)
spark.stop()
print("done")
"""


def test_a_client_of_spark_connect_reads_and_writes_through_a_server(url: str, tmp_path: Path) -> None:
    port = free_port()
    server = (
        str(SPARK / "bin/spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", "spark.ui.enabled=false",
        "--driver-java-options", SMALL, "spark-internal",
    )  # fmt: skip
    with running(tmp_path, "connect", *server, port=port):
        script = OVER_CONNECT.format(remote=f"sc://127.0.0.1:{port}", url=url, checkpoint=str(tmp_path / "checkpoint"))
        variables = {name: value for name, value in environment().items() if name != "SPARK_HOME"}
        done = run_script(script, 200, environment=variables)
    assert done.stdout == "done\n", done.stderr[-4000:]
