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


class Compiled:
    """Lets the Python processes of Spark load modules that are compiled already.

    Every session starts some, and every stream one more. Each would compile what it imports: pyspark, since Spark's
    home has it in a zip, and where the environment forbids to write bytecode all of ours, too. That is two thirds of
    the time from its start to its first row.
    """

    def __init__(self, folder: Path) -> None:
        import pyspark

        self._home, self._bytecode = folder / "home", folder / "bytecode"
        self._home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name != "python":  # which holds the zip; without it, workers import what is installed
                (self._home / entry.name).symlink_to(entry)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[pytest.MonkeyPatch]:
        """For the processes that are started in this block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARK_HOME", str(self._home))
            patch.setenv("PYTHONPYCACHEPREFIX", str(self._bytecode))
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            yield patch


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", autouse=True)
def _programs_of_tests_are_compiled(compiled: Compiled) -> Iterator[None]:
    with compiled.in_force():
        yield


@pytest.fixture(scope="session")
def spark(jvm_folder: Path, compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of all tests, on two cores; a test that changes its settings sets them back."""
    from holdfast.spark.session import session

    with contextlib.chdir(jvm_folder), compiled.in_force() as patch:
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
