"""What a page says that its examples print is what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy.pages import expected, matches
from tests.tidy.test_docs import run_examples


def test_the_text_behind_a_print_is_what_it_says():
    code = "print(1)  # 1\nprint(2)\nx = 3  # three\nif x:\n    print(f'#{x}')  # #3\n"
    assert expected(11, code) == [(11, "1"), (15, "#3")]


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("1 []", "1 []", True),
        ("1 []", "1 [2]", False),
        ("one / two / …", "one / two / three", True),
        ("one ... three", "one two three", True),
        ("…", "", True),
        ("one", "", False),
    ],
)
def test_dots_stand_for_anything(said: str, printed: str, same: bool):
    assert matches(said, printed) is same


def test_a_page_that_prints_something_else_fails_and_names_the_line(tmp_path: Path):
    def run(code: str) -> tuple[int, str]:
        done = run_examples("page.md", [(5, code)], cwd=tmp_path)
        return done.returncode, done.stderr.strip()

    assert run("for n in 1, 2:\n    print(n, n)  # 1 1 / 2 2\n") == (0, "")
    assert run("for n in 1, 2:\n    print(n, n)  # 1 1\n") == (1, "page.md:6: says '1 1', and printed '1 1 / 2 2'")
    assert run("if False:\n    print(1)  # 1\n") == (1, "page.md:6: says '1', and printed 'nothing'")
