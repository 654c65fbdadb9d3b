"""docs/internals/README.md names every module there is, in one line each."""

from __future__ import annotations

from tests.tidy.modules_reference import PAGE, rendered, with_modules
from tests.tidy.repo import assert_none

RENEW = "renew it: python -m tests.tidy.modules_reference --write"


def test_the_page_names_every_module():
    page = PAGE.read_text()
    assert with_modules(page) == page, RENEW


def test_every_module_says_what_it_is_for():
    silent = [line for line in rendered().splitlines() if line.endswith("`: ")]
    assert_none(silent, "Give each of these modules a docstring.")
