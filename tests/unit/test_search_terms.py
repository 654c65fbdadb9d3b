"""What people type into the search box, as conditions that messages meet or do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.api.listing import parse_search
from holdfast.delivery.where import compile_where
from holdfast.errors import InvalidRequest

DAY_NS = 1_794_873_600_000_000_000  # 2026-11-17T00:00:00Z
NOW_MS = DAY_NS // 1_000_000 + 12 * 3_600_000


def matches(text: str, **facts: Any) -> bool:
    message = SimpleNamespace(
        id="orders-0-1",
        correlation_id="orders-0-1",
        key="c-7",
        error="",
        body=b'{"order": {"id": 7, "lines": [{"sku": "A-1"}]}, "odd name": true}',
        headers={"tenant": "acme", "x y": "1"},
        timestamp_ns=DAY_NS + 10 * 3_600_000_000_000 + 30 * 60_000_000_000,
    )
    vars(message).update(facts)
    return compile_where(parse_search(text).where or None, now_ms=NOW_MS)(message)


@pytest.mark.parametrize(
    "text",
    [
        "key=c-7",
        "tenant=acme",
        '"x y"',
        "$.order.id=7",
        "$.order.lines[0].sku=A-1",
        '$["odd name"]=true',
        "LINES",
        '"order": tenant=acme',
        "orders-0-1",
        "id=orders-0-1",
        "time=2026-11-17",
        "time=2026-11-17T10",
        "time=2026-11-17T10:30",
        "time>2026-11-16 time<2026-11-18",
        "age<2h",
        "age>1h sku",
        "time<9999-12-31",
        "where json.order.id > 6 and key != null",
        "queue=ord",
    ],
)
def test_a_term_finds_the_message(text: str):
    assert matches(text, body=b'{"order": {"id": 7, "lines": [{"sku": "A-1"}]}, "odd name": true, "said": "x y"}')


def test_the_last_day_that_can_be_written_has_no_day_after_it():
    assert not matches("time=9999-12-31")
    assert not matches("time=9999-12-31T23:59:59")


@pytest.mark.parametrize(
    "text",
    [
        "key=c-8",
        "tenant=other",
        "other=acme",
        "$.order.id=8",
        "$.order.lines[1].sku=A-1",
        "nothing",
        "sku nothing",
        "time=2026-11-16",
        "time=2026-11-17T10:31",
        "age>2h",
        "where attempts > 3",
    ],
)
def test_a_term_finds_no_other(text: str):
    assert not matches(text)


def test_text_is_text_whatever_it_contains():
    odd = 'a"b\\c (.*) [x'
    assert matches('"a\\"b\\\\c (.*) [x"', body=odd.encode())
    assert not matches('"(.*)"')


def test_a_number_may_be_text_in_the_body():
    assert matches("$.id=7", body=b'{"id": "7"}')
    assert matches("$.id=7", body=b'{"id": 7}')


def test_an_id_and_the_name_of_a_queue_are_told_apart():
    assert parse_search("orders.dlq-0-3").id == "orders.dlq-0-3"
    assert parse_search("orders-0-d3").id == "orders-0-d3"
    assert parse_search("key=orders-0-3").id == ""
    assert parse_search('queue="my queue" x').queue == "my queue"


@pytest.mark.parametrize("text", ["", "   ", "time=yesterday", "age<long", "$.a[=1", "$a=1"])
def test_what_cannot_be_understood_is_refused(text: str):
    with pytest.raises(InvalidRequest):
        parse_search(text)
