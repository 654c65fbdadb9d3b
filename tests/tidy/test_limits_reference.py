"""The page on limits has the numbers of the code."""

from __future__ import annotations

import pytest

from tests.tidy.limits_reference import PAGE, with_limits


def test_the_page_shows_every_limit_as_it_is():
    page = PAGE.read_text("utf-8")
    assert with_limits(page) == page, "renew it: python -m tests.tidy.limits_reference --write"


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="no part between"):
        with_limits("# Limits\n")
