"""Builds the documentation as `make docs` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.once import once
from tests.tidy.repo import ROOT


def built(factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all tests of a run; a warning, such as a link that leads nowhere, fails."""
    return once(factory, "site", _build) / "0.0"


def _build(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "0.0")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}{done.stderr}\n`make docs` fails.", pytrace=False)
