"""The pages of the docs whose examples need Spark: each from top to bottom, in the one session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.tidy.pages import run
from tests.tidy.repo import name_of
from tests.tidy.test_docs import examples, needs_spark, pages_with_examples


@pytest.fixture
def empty_folder(jvm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that Spark was started in, so that a relative path means the same to a page and to Spark."""
    empty(jvm_folder)
    monkeypatch.chdir(jvm_folder)
    yield jvm_folder
    empty(jvm_folder)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.parametrize("page", [page for page in pages_with_examples() if needs_spark(page)], ids=name_of)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path, spark: SparkSession, empty_folder: Path):
    run(name_of(page), examples(page))
    assert session_runs(spark), "a page leaves the session running"


def session_runs(spark: SparkSession) -> bool:
    return SparkSession.getActiveSession() is spark
