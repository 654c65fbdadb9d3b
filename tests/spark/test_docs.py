"""The pages of the docs whose examples or commands need Spark: each from top to bottom, in the one session."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.cli.main import main
from tests.tidy import markdown, served
from tests.tidy.pages import matches, run
from tests.tidy.repo import ROOT, name_of
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


# A folder in which something went wrong: what each guide begins with.
INCIDENTS = {
    "triage-dead-letters.md": """
        holdfast topic create shop orders
        holdfast put shop "order 1" "order 2" --topic orders
        for reason in "TimeoutError: the bank" "no such customer"; do
            eval "$(holdfast get shop --topic orders --export)"
            holdfast reject shop --topic orders --reason "$reason"
        done
    """,
    "replay-with-spark.md": """
        holdfast topic create shop orders
        holdfast topic create shop orders-retry --partitions 4
        holdfast put shop '{"country": "SE"}' '{"country": "DE"}' --topic orders
    """,
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_commands_of_a_guide_work(
    name: str, spark: SparkSession, empty_folder: Path, capsys: pytest.CaptureFixture[str]
):
    incident = ["bash", "-ec", INCIDENTS[name]]
    subprocess.run(incident, check=True, env=served.shell_environment(), cwd=empty_folder, timeout=60)
    tried = 0
    for block in markdown.blocks((ROOT / "docs" / "how-to" / name).read_text("utf-8")):
        if block.language == "yaml":  # the first is the file, and each later one an entry to add to it
            with (empty_folder / "pipelines.yaml").open("a") as file:
                file.write(textwrap.indent(block.code, "  ") if file.tell() else block.code)
        for command, said in served.commands(block.code) if block.language == "console" else ():
            with pytest.raises(SystemExit) as ended:
                main(shlex.split(command, comments=True)[1:])
            printed = capsys.readouterr()
            assert not ended.value.code, f"{command}: {printed.out}{printed.err}"
            assert not said or matches(said.strip(), printed.out.strip())
            tried += 1
    assert tried >= 2
