"""The page on security names a test for every claim, and those tests exist."""

from __future__ import annotations

import ast
import re

from tests.tidy.repo import ROOT, assert_none, tree_of

PAGE = ROOT / "docs" / "explanation" / "security.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_the_page_on_security_names_exists():
    missing = [
        f"{file}::{name}" for file, name in NAMED.findall(PAGE.read_text("utf-8")) if name not in functions_in(file)
    ]
    assert_none(missing, "docs/explanation/security.md names tests that do not exist; rename them there, too.")


def test_every_risk_of_the_top_ten_names_the_tests_behind_it():
    lines = PAGE.read_text("utf-8").splitlines()
    rows = {number: next((line for line in lines if line.startswith(f"| API{number} ")), "") for number in range(1, 11)}
    assert_none(
        [f"API{number}" for number, row in rows.items() if not NAMED.search(row)],
        "Each of the ten risks has a row in docs/explanation/security.md, with a test.",
    )


def functions_in(file: str) -> set[str]:
    path = ROOT / file
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
