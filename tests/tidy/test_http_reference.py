"""The pages on the HTTP API show every route, and every value that goes over the wire, as they are in the code."""

from __future__ import annotations

import pytest

from tests.tidy.http_reference import BEGIN, END, PAGE, VALUES, all_routes, tags, with_routes, with_values

RENEW = "renew it: python -m tests.tidy.http_reference --write"


def test_the_page_shows_the_table_of_routes():
    page = PAGE.read_text("utf-8")
    assert with_routes(page) == page, RENEW


def test_the_page_of_values_shows_every_field():
    page = VALUES.read_text("utf-8")
    assert with_values(page) == page, RENEW


def test_every_route_is_in_one_table():
    page = PAGE.read_text("utf-8")
    for route in all_routes():
        assert page.count(f"\n| `{route.method} {route.pattern}` |") == 1


def test_every_table_stands_below_a_heading_of_its_own():
    parts = PAGE.read_text("utf-8").split("\n## ")
    for tag in tags():
        assert [part for part in parts if BEGIN.format(name=tag) in part and END.format(name=tag) in part]


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="no part between"):
        with_values("# Values\n")
