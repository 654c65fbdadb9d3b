"""What the tidy tests look at: the files of this repository."""

from __future__ import annotations

import ast
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"


@cache
def files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, under version control."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone, to know which files belong to the repository")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return tuple(path for name in sorted(set(listed.split("\0"))) if name and (path := ROOT / name).is_file())


def modules() -> list[Path]:
    """The modules of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)  # those are made by protoc


@cache
def tree_of(module: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(module.read_text("utf-8"), filename=str(module))


def text_of(path: Path) -> str | None:
    """The file's text, or nothing if it is not a text file."""
    raw = path.read_bytes()
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def name_of(path: Path) -> str:
    """The path as people write it: from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def layer_of(module: Path) -> str:
    """The first name below the package: `storage` for src/holdfast/storage/log.py."""
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


def assert_none(faults: list[str], advice: str) -> None:
    """Fail with one fault a line, then what to do about them."""
    if faults:
        pytest.fail("\n".join([*faults, "", advice]), pytrace=False)


def with_part(page: str, begin: str, end: str, made: str) -> str:
    """The page, with what stands between the two marks made anew."""
    before, found, rest = page.partition(begin)
    _old, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no part between {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"
