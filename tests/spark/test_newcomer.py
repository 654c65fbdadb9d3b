"""What a newcomer to pipelines types into a shell: the commands of the tutorial on Spark, with the installed wheel."""

from __future__ import annotations

import site
from pathlib import Path

import pytest

from tests.integration.test_newcomer import install
from tests.tidy import markdown, served
from tests.tidy.once import once
from tests.tidy.repo import ROOT, name_of
from tests.tidy.test_docs import run_examples

TUTORIAL = ROOT / "docs" / "tutorial" / "queue-to-gold.md"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the wheel, and with Spark as it is installed here, since it is a hundred times larger."""
    folder = once(tmp_path_factory, "newcomer", install)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "spark.pth").write_text("".join(f"{each}\n" for each in site.getsitepackages()))
    return str(folder / "venv" / "bin" / "python")


@pytest.mark.timeout(300)
def test_the_commands_of_the_tutorial_print_what_it_shows(python: str, tmp_path: Path):
    """The Python before Spark comes in, the files and the commands, from top to bottom."""
    found = markdown.blocks(TUTORIAL.read_text("utf-8"))
    starts = min(block.line for block in found if block.language == "python" and "spark" in block.code)
    steps = [
        (block.line, served.program(block))
        for block in found
        if block.language in {"console", "yaml"} or (block.language == "python" and block.line < starts)
    ]
    assert any("pipeline run" in code for _, code in steps)
    done = run_examples(name_of(TUTORIAL), steps, cwd=tmp_path, python=python, timeout_s=280)
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)
