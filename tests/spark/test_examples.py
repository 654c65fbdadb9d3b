"""The examples on Spark: each as a program of its own would run, but in the one session."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run an example by its name; answers with what it printed. It removes its temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run_it(name: str) -> str:
        capfd.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        said = capfd.readouterr()
        assert not said.err
        assert list(tmp_path.iterdir()) == []
        return said.out

    return run_it


def test_every_example_on_spark_has_a_test_here():
    tested = {name.removeprefix("test_the_example_") for name in globals()}
    assert {path.stem for path in EXAMPLES.glob("spark_*.py")} <= tested


def test_the_example_spark_batch(run):
    said = run("spark_batch.py")
    assert "messages: 3000\nde 3499.0\nfr 3498.0\njp 3497.0\noffsets: 10 11 12 13 14\n" in said
    assert "views: messages dead_letters groups delayed traces corrupt topics\n" in said
    assert said.endswith("dead letters: no such customer: 11\nnot billed yet: 2900\n")


def test_the_example_spark_stream(run):
    said = run("spark_stream.py")
    assert said == "first run: 2 batches\nsecond run: 1 batch\nrows: 1010 different ones: 1010\n"


def test_the_example_spark_write(run):
    assert run("spark_write.py").startswith("messages: 1010\nfirst: 9 {'kind': 'invoice'} ")


def test_the_example_spark_pipeline(run):
    said = run("spark_pipeline.py")
    assert said.count("a run would write lake/orders-") == 3
    assert "orders-in-euros: 90 in, 60 out, 30 put aside" in said
    assert "orders-in-euros: 9 in, 6 out, 3 put aside" in said
    assert said.endswith("orders: 66 euros: 1593.7\n")
