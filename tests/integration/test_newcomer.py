"""What a newcomer does: install the wheel into an empty environment, then follow the README, tutorials and guides."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tidy.once import once
from tests.tidy.repo import ROOT, name_of
from tests.tidy.served import shell_environment
from tests.tidy.test_docs import needs_spark, pages_with_examples, run_page

PATIENCE_S = 280

# Guides whose first step is to install more than `[server]`; the tests of the docs run them where that is installed.
MORE = {
    "load-from-arrow.md": "arrow",
    "use-schemas.md": "schemas",
    "export-traces.md": "otel",
    "test-your-code.md": "pytest",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the wheel and what it asks for, and nothing of this tree."""
    return str(once(tmp_path_factory, "newcomer", install) / "venv" / "bin" / "python")


def install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], cwd=folder)
    (wheel,) = folder.glob("holdfast-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], cwd=folder)
    found = str(folder / "venv" / "bin" / "python")
    run([*pip, "--python", found, "install", f"{wheel}[server]"], cwd=folder)


def run(command: list[str], *, cwd: Path) -> str:
    python = command[0]
    done = subprocess.run(
        command, cwd=cwd, env=shell_environment(python), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def pages() -> list[Path]:
    """README, tutorials and guides that need no Spark, which is a hundred times larger than all the rest."""
    followed = [page for page in pages_with_examples() if page.parent.name in {ROOT.name, "tutorial", "how-to"}]
    return [page for page in followed if not needs_spark(page) and page.name not in MORE]


def test_a_newcomer_gets_what_the_readme_the_tutorials_and_the_guides_show(python: str, tmp_path: Path):
    where = run([python, "-c", "import holdfast; print(holdfast.__file__)"], cwd=tmp_path)
    assert where.startswith(str(Path(python).parents[1])), "the wheel is not what is tested"
    assert len(pages()) > 20

    def follow(page: Path) -> str:
        folder = tmp_path / page.stem
        folder.mkdir()
        done = run_page(page, cwd=folder, python=python)
        printed = done.stdout + done.stderr
        warned = re.search(r"\w*Warning: .*", printed)
        first = page.parent.name in {ROOT.name, "tutorial"}  # what people do first must not puzzle them
        if done.returncode == 0 and warned is None and not (first and done.stderr):
            return ""
        return f"{name_of(page)}:\n{printed[-2_000:]}"

    with ThreadPoolExecutor(2) as pool:
        faults = [fault for fault in pool.map(follow, pages()) if fault]
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_the_commands_of_the_wheel_say_their_version_and_help(python: str, tmp_path: Path):
    holdfast = str(Path(python).parent / "holdfast")
    assert re.search(r"\d+\.\d+", run([holdfast, "--version"], cwd=tmp_path))
    assert "serve" in run([holdfast, "--help"], cwd=tmp_path)
