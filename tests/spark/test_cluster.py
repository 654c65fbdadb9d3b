"""Real clusters on loopback: a standalone master with two workers, and a Spark Connect server."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyspark
import pytest

import holdfast
from holdfast.client.spark_commits import routes
from holdfast.spark.pipelines.stores import in_store, store_options
from holdfast.spark.session import java_home
from tests.integration.http_gear import serving
from tests.integration.store_servers import moto
from tests.spark.scripts import run_script

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(900)]

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
def running(folder: Path, name: str, *command: str, port: int | None = None) -> Iterator[int]:
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
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Cluster(NamedTuple):
    """A master, and the processes of its workers."""

    url: str
    workers: list[int]

    def executors(self) -> list[int]:
        """The processes in which tasks run now: those that the workers started."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                facts = (place / "stat").read_text().rpartition(")")[2].split()
                if int(facts[1]) in self.workers and facts[0] != "Z":
                    found.append(int(place.name))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    start, here = str(SPARK / "bin/spark-class"), "127.0.0.1"
    deploy, url = "org.apache.spark.deploy", f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        chief = (start, f"{deploy}.master.Master", "--host", here, "--port", str(port), "--webui-port", "0")
        stack.enter_context(running(folder, "master", *chief, port=port))
        workers = []
        for name in ("one", "two"):
            worker = (start, f"{deploy}.worker.Worker", "--host", here, "-c", "1", "-m", "700M", "--webui-port", "0")
            workers.append(stack.enter_context(running(folder, name, *worker, "-d", str(folder / name), url)))
        yield Cluster(url, workers)


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


def test_executors_of_a_cluster_read_a_folder_and_read_and_write_through_a_server(cluster: Cluster, url: str) -> None:
    done = run_script(ON_A_CLUSTER.format(master=cluster.url, url=url, small=SMALL), 240, environment=environment())
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


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    server = (
        str(SPARK / "bin/spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", "spark.ui.enabled=false",
        "--conf", "spark.sql.shuffle.partitions=2", "--driver-java-options", SMALL, "spark-internal",
    )  # fmt: skip
    with running(tmp_path_factory.mktemp("server"), "connect", *server, port=port):
        yield f"sc://127.0.0.1:{port}"


def without_spark_home() -> dict[str, str]:
    """What a client has that knows nothing of a Spark on this machine."""
    return {name: value for name, value in environment().items() if name != "SPARK_HOME"}


def test_a_client_of_spark_connect_reads_and_writes_through_a_server(remote: str, url: str, tmp_path: Path) -> None:
    script = OVER_CONNECT.format(remote=remote, url=url, checkpoint=str(tmp_path / "checkpoint"))
    done = run_script(script, 200, environment=without_spark_home())
    assert done.stdout == "done\n", done.stderr[-4000:]


FUNCTIONS = """
from holdfast.spark import pipeline
from pyspark.sql import functions as f

@pipeline(sources=["silver"], name="pairs")
def pairs(rows):
    others = rows.selectExpr("id AS other", "id + 1 AS after")
    return rows.join(others, f.expr("id = after")).select("id", "other")

@pipeline(source="silver", tables=["hours"], upsert_by="country", latest_by="id")
def newest(rows, hours):
    assert hours.count() > 0
    return rows.select("country", "id")
"""

PIPELINES = """
folder: shop
lake: lake
file: functions.py
pipelines:
  land: {kind: land, topics: [orders], max_rows_per_batch: 40}
  silver:
    kind: refine
    source: land
    schema: "id long not null, country string"
    key: id
    expect:
      - {name: known, check: "country != 'xx'", on_fail: quarantine}
      - {name: small, check: "id < 80", on_fail: warn}
  hours:
    {kind: aggregate, source: silver, window: "1 day", watermark: "1 day", by: [country], measures: {n: "count(1)"}}
  proof: {kind: reconcile, source: land}
  strict:
    {kind: land, topics: [orders], max_rows_per_batch: 40, expect: [{name: never, check: "offset < 0", on_fail: fail}]}
"""
PROVED = ("land", "silver", "hours", "pairs", "newest", "proof")


class Project:
    """Pipelines in a folder of their own, run by the command line."""

    def __init__(self, home: Path, lake: str | None = None) -> None:
        self.home, self.sent = home, 0
        self.lake = str(home / "lake") if lake is None else lake
        places = "lake: lake" if lake is None else f"lake: {lake}\ncheckpoints: work"
        (home / "pipelines.yaml").write_text(PIPELINES.replace("lake: lake", places))
        (home / "functions.py").write_text(FUNCTIONS)
        with holdfast.open_broker(home / "shop") as broker:
            broker.create_topic("orders", partitions=2)

    def send(self, count: int) -> None:
        """Orders; every tenth is of a country that is not known, and the first is there twice."""
        numbers = [*range(self.sent, self.sent + count), 0]
        bodies = [{"id": number, "country": "xx" if number % 10 == 9 else "de"} for number in numbers]
        with holdfast.open_broker(self.home / "shop") as broker:
            broker.publish_many("orders", [json.dumps(body).encode() for body in bodies])
        self.sent += count

    def script(self, *arguments: str) -> str:
        command = ["pipeline", "run", "--config", str(self.home / "pipelines.yaml"), "--json", *arguments]
        return f"from holdfast.cli.main import main\nmain({command!r})"

    def run(self, *arguments: str, timeout_s: float = 600, code: int = 0) -> dict[str, Any]:
        done = run_script(self.script(*arguments), timeout_s, environment=without_spark_home())
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return {each["pipeline"]: each for each in json.loads(done.stdout)["pipelines"]}

    def table(self, name: str) -> pl.DataFrame:
        options = store_options(self.lake) if in_store(self.lake) else None
        return pl.read_delta(f"{self.lake}/{name}", storage_options=options)

    def check(self) -> None:
        """Every message is where it belongs, once."""
        known = [number for number in range(self.sent) if number % 10 != 9]
        assert len(self.table("land").select("partition", "offset").unique()) == len(self.table("land"))
        assert sorted(self.table("silver")["id"].to_list()) == known
        assert self.table("hours")["n"].sum() == len(known)
        assert sorted(self.table("pairs")["id"].to_list()) == [each for each in known if each - 1 in known]
        assert self.table("newest").select("country", "id").rows() == [("de", known[-1])]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_pipelines_run_on_spark_connect(remote: str, project: Project) -> None:
    project.send(100)
    first = project.run("--all", "--remote", remote, code=2)
    assert first["strict"]["error"]["code"] == "expectation_failed"  # as it was, from a process of the server
    assert first["strict"]["error"]["message"].startswith("strict: 40 rows do not meet 'never'")
    assert (first["land"]["rows_in"], first["land"]["batches"], first["land"]["lag"]) == (101, 3, 0)
    assert (first["silver"]["rows_out"], first["silver"]["quarantined"], first["silver"]["duplicates"]) == (90, 10, 1)
    assert first["silver"]["expectations"]["small"] == 20
    assert first["proof"]["ok"]
    project.check()
    project.send(20)
    again = project.run(*PROVED, "--remote", remote)
    assert (again["land"]["rows_in"], again["pairs"]["rows_out"]) == (21, 16)
    project.check()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project with its lake in a store, of whose keys only the command knows."""
    with moto(tmp_path) as (url, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield Project(tmp_path, url)


def test_the_processes_of_a_cluster_and_of_spark_connect_need_no_keys_for_a_lake_in_a_store(
    remote: str, cluster: Cluster, stored: Project, scale: Callable[[int, int], int]
) -> None:
    for arguments in (["--remote", remote], on_a_cluster(cluster))[: scale(1, 2)]:
        stored.send(50)
        done = stored.run(*PROVED, *arguments)
        assert (done["land"]["rows_in"], done["land"]["lag"], done["proof"]["ok"]) == (51, 0, True)
        stored.check()


def on_a_cluster(cluster: Cluster) -> list[str]:
    settings = {
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.executor.memory": "512m", "spark.cores.max": "2", "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": SMALL, "spark.executor.extraJavaOptions": SMALL,
    }  # fmt: skip
    return ["--master", cluster.url, *(part for each in settings.items() for part in ("--conf", "=".join(each)))]


@contextmanager
def following(project: Project, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that follows the topic, in a group of its own with its JVM. It is killed at the end of the block."""
    names = ("land", "silver", "hours", "pairs")
    command = [sys.executable, "-c", project.script(*names, "--follow", "--every", "100ms", *arguments)]
    log = project.home / "driver.log"
    with log.open("ab") as out:
        driver = subprocess.Popen(
            command, cwd=project.home, env=without_spark_home(), stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def wait_for(done: Callable[[], bool], driver: subprocess.Popen[bytes], project: Project) -> None:
    until = time.monotonic() + 300
    while not done():
        assert driver.poll() is None, (project.home / "driver.log").read_text()[-4000:]
        assert time.monotonic() < until, "nothing was written"
        time.sleep(0.1)


def test_killed_executors_and_drivers_lose_nothing_and_double_nothing(
    cluster: Cluster, project: Project, scale: Callable[[int, int], int]
) -> None:
    moments = random.Random()
    arguments = on_a_cluster(cluster)

    def batches(*names: str) -> int:
        return sum(len([*(project.home / "lake/_checkpoints" / name / "batches").glob("*.json")]) for name in names)

    for _ in range(scale(1, 8)):
        project.send(30)
        with following(project, arguments) as driver:
            before = batches("land")
            wait_for(lambda: batches("land") > before, driver, project)  # noqa: B023
            for _ in range(scale(2, 5)):
                time.sleep(moments.uniform(0, 2))
                for executor in cluster.executors()[: moments.choice([1, 2])]:
                    with suppress(ProcessLookupError):
                        os.kill(executor, signal.SIGKILL)
                before = batches("land", "silver", "hours", "pairs")
                project.send(10)
                wait_for(lambda: batches("land", "silver", "hours", "pairs") > before, driver, project)  # noqa: B023
            time.sleep(moments.uniform(0, 2))
        # Whatever moment it was: what can be seen are whole batches, each row once.
        seen = project.table("land").select("partition", "offset")
        assert len(seen) == len(seen.unique())
    done = project.run(*PROVED, *arguments)
    assert done["proof"]["ok"], done["proof"]
    assert done["proof"]["rows_out"] == len(project.table("land"))
    project.check()
