"""What tests on Spark share: one session for all of a process, and the marker `spark` that keeps them by themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Py4J and Spark's workers leave sockets and pipes to the garbage collector.
ALLOWED = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)
            for warning in ALLOWED:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)  # those of the test itself go before


@pytest.fixture(scope="session")
def jvm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the JVM and its workers were started: what relative paths mean to them."""
    return tmp_path_factory.mktemp("jvm")


@pytest.fixture(scope="session")
def spark(jvm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of all tests, on two cores; a test that changes its settings sets them back."""
    from holdfast.spark.session import session

    with contextlib.chdir(jvm_folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # workers import functions of tests by name
        shared = session(
            "tests",
            "local[2]",
            **{
                # Compiling little and collecting plainly halves what the JVM of a short run burns.
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": 2,
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
    jvm = shared.sparkContext._gateway.proc
    yield shared
    shared.stop()
    end(jvm)


def end(jvm: subprocess.Popen[bytes]) -> None:
    """A JVM that Python started ends when its input does; one that does not is killed."""
    if jvm.stdin is not None:
        jvm.stdin.close()
    try:
        jvm.wait(timeout=20)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
