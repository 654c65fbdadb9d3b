"""`where`: a function or an expression decides which messages are meant."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.delivery.where import MAX_CHARACTERS, MAX_DEPTH, NAMES, compile_where, seconds_of
from holdfast.errors import InvalidRequest

NOW_MS = 1_763_287_200_000  # 2025-11-16T10:00:00Z


def message(body: bytes = b"", **facts: Any) -> SimpleNamespace:
    return SimpleNamespace(body=body, **facts)


DEAD = message(
    b'{"user": {"id": 42, "name": "Ada"}, "tags": ["a", "b", null], "urgent": true, "a b": 1.5, "none": null}',
    key=b"user-7",
    headers=(("kind", b"img"), ("x-tenant", b"acme"), ("kind", b"later"), ("n", b"5")),
    priority=7,
    offset=1200,
    id="01J-abc",
    attempts=3,
    correlation_id="c-1",
    timestamp_ns=(NOW_MS - 90_000) * 1_000_000,
    error="requests.Timeout: read timed out",
    reason="attempts",
    holder="worker-3",
)


def chosen(where: str, of: Any = DEAD) -> bool:
    answer = compile_where(where, now_ms=NOW_MS)(of)
    assert isinstance(answer, bool)
    return answer


def complaint(where: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compile_where(where, now_ms=NOW_MS)
    return str(caught.value)


TRUE_OF_DEAD = [
    'error ~ "Timeout"',
    'error ~ "^requests\\.\\w+: read"',
    "error ~ '(?i)timeout' and attempts >= 3",
    'error !~ "refused"',
    'key == "user-7"',
    'key ~ "^user-[0-9]+$"',
    'body ~ "Ada" and "Ada" in body',
    'header.kind == "img"',
    'header["x-tenant"] in ["acme", "globex"]',
    'header.x-tenant == "acme"',
    'header.x-tenant not in ["globex"]',
    "priority > 5 and priority <= 7",
    "7 == priority",
    "offset >= 1200 and offset < 1.3e3 and offset != -1",
    'id == "01J-abc" and correlation_id == "c-1" and reason == "attempts" and holder == "worker-3"',
    "json.user.id == 42",
    "json.user.id == 42.0",
    'json["user"]["name"] == "Ada"',
    'json["a b"] == 1.5',
    'json.tags[0] == "a" and json.tags[-2] == "b"',
    '"b" in json.tags and "c" not in json.tags',
    '"id" in json.user',
    "json.urgent",
    "json.urgent == true",
    "not json.none",
    "json.missing == null and json.user != null and json.tags[9] == null and json.user[0] == null",
    "json.none in [1, null]",
    "null in json.tags",
    "age == 90",
    "age > 1m and age < 1m31s",
    "age >= 1.5m and age <= 90000ms and age < 1h and age < 1d and age < 1w",
    'time < "2025-11-16T10:00:00Z"',
    'time == "2025-11-16T09:58:30Z" and time == "2025-11-16T10:58:30+01:00" and time == "2025-11-16T09:58:30"',
    '"2025-11-16" <= time',
    "priority == 1 or priority == 2 or priority == 7",
    "priority == 7 or priority == 7 and priority == 1",  # `and` binds closer
    "not priority == 1 and not not priority == 7",
    "not (priority == 1 or attempts == 1)",
    "priority == 1 OR True",
    "null == null",
    "[1] and not []",
    "\n priority\t>\r\n 5 ",
]


@pytest.mark.parametrize("where", TRUE_OF_DEAD)
def test_an_expression_chooses_what_it_describes(where: str):
    assert chosen(where)
    assert not chosen(f"not ({where})")


FALSE_OF_DEAD = [
    'error ~ "refused"',
    'error !~ "Timeout"',
    'header.kind == "later"',  # of a header that repeats the first counts
    "priority == 7 and attempts == 1",
    "(priority == 7 or priority == 7) and priority == 1",
    'json.user.name in ["Bob"]',
    "age < 90 or age > 90",
    'time > "2025-11-16T10:00:00Z"',
    'holder == "Worker-3"',
]


@pytest.mark.parametrize("where", FALSE_OF_DEAD)
def test_an_expression_leaves_out_what_it_does_not_describe(where: str):
    assert not chosen(where)


@pytest.mark.parametrize("sign", ["==", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize(
    "pair",
    [
        ("json.missing", "5"),
        ("json.user", "5"),
        ("json.user", "json.user"),
        ("json.tags", '"a"'),
        ("json.urgent", "1"),
        ("json.user.id", '"42"'),
        ("header.n", "5"),
        ("key", "7"),
        ("error", "json.missing"),
        ("json.missing", "json.none"),
        ("time", "json.user.name"),
        ("true", '"true"'),
    ],
)
def test_unlike_values_and_null_compare_as_false_whatever_is_asked(pair: tuple[str, str], sign: str):
    left, right = pair
    assert not chosen(f"{left} {sign} {right}")
    assert not chosen(f"{right} {sign} {left}")


@pytest.mark.parametrize(
    "where",
    [
        'json.missing ~ ""',
        'json.missing !~ "x"',
        'json.user.id ~ "4"',
        'json.user.id !~ "x"',
        "json.missing in [1]",
        "json.missing not in [1]",
        "5 in body",
        "5 not in body",
        "1 in json.urgent",
        "1 in [true]",
        "priority < null",
    ],
)
def test_a_search_for_what_cannot_be_there_is_false(where: str):
    assert not chosen(where)


@pytest.mark.parametrize("name", [name for name in NAMES if "." not in name])
def test_an_attribute_that_a_message_lacks_is_null(name: str):
    assert chosen(f"{name} == null", SimpleNamespace())
    assert not chosen(f"{name} != null", SimpleNamespace())
    assert chosen("json == null and json.a == null and header.a == null", SimpleNamespace())


@pytest.mark.parametrize("body", [b"", b"no json", b"\xff\xfe", b'{"a": ', b"[" * 100_000, b"NaN"])
def test_a_body_that_is_not_json_is_null_as_json(body: bytes):
    assert chosen("json == null and json.a[0].b == null", message(body))


def test_bytes_that_are_not_utf_8_can_still_be_searched():
    assert chosen('body ~ "^caf\\udce9 .*\u00fc$"', message(b"caf\xe9 \xc3\xbc"))
    assert chosen('key == "k" and header.h == "v"', message(key="k", headers={"h": "v"}))


def test_headers_may_be_a_mapping():
    assert chosen('header.kind == "img" and header.other == null', message(headers={"kind": b"img"}))


def test_the_body_is_parsed_at_most_once_and_only_when_asked_for():
    class Counting:
        reads = 0

        @property
        def body(self) -> bytes:
            self.reads += 1
            return b'{"a": 1}'

    one = Counting()
    assert chosen("json.a == 1 and json.a > 0 and json.b == null", one)
    assert one.reads == 1
    assert chosen("priority == null", one)
    assert one.reads == 1


def test_a_time_beyond_the_calendar_is_null():
    assert chosen("time == null and age < 0", message(timestamp_ns=10**21))


def test_a_text_keeps_the_backslashes_of_a_regular_expression():
    assert chosen(r'body ~ "^\d+\s\S$"', message(b"12 x"))
    assert chosen(r'body == "a\"b\\c\nd\te"', message(b'a"b\\c\nd\te'))
    assert chosen(r"""body == 'it\'s "x"'""", message(b'it\'s "x"'))


def test_a_function_is_used_as_it_is_and_none_chooses_everything():
    def odd(found: Any) -> object:
        return found.priority % 2  # any object: its truth counts

    assert compile_where(odd, now_ms=0)(DEAD) is True
    assert compile_where(lambda _found: None, now_ms=0)(DEAD) is False
    assert compile_where(None, now_ms=0)(DEAD) is True


def test_an_error_of_the_users_function_is_the_users():
    with pytest.raises(ZeroDivisionError):
        compile_where(lambda _found: 1 / 0, now_ms=0)(DEAD)


@pytest.mark.parametrize("where", [5, b"priority == 1", ["priority"], True])
def test_what_is_neither_function_nor_text_is_refused(where: Any):
    assert type(where).__name__ in complaint(where)


@pytest.mark.parametrize(
    ("where", "place", "says"),
    [
        ("", 0, "expected a name"),
        ("   ", 3, "expected a name"),
        ("priority >", 10, "expected a name"),
        ("priority > > 3", 11, "expected a name"),
        ("priority = 3", 9, "write == to compare"),
        ("priority == 3 4", 14, "expected `and`, `or` or the end"),
        ("1 < priority < 3", 13, "expected `and`, `or` or the end"),
        ("prio == 3", 0, "there is no 'prio'"),
        ("key == urgent", 7, "there is no 'urgent'; put texts in quotes"),
        ("(priority == 3", 14, "expected `)`"),
        ("and priority", 0, "expected a value before `and`"),
        ("priority not 3", 13, "expected `in` after `not`"),
        ('key == "abc', 7, "the closing quote is missing"),
        ("key == 'abc\"", 7, "the closing quote is missing"),
        ("priority == 3; import os", 13, "';' means nothing here"),
        ("__import__('os')", 0, "there is no '__import__'"),
        ("body.upper == 3", 0, "body has no parts"),
        ("header == 3", 0, "expected one header"),
        ("header.a.b == 3", 0, "expected one header"),
        ("header[0] == 3", 0, "expected one header"),
        ("json[1.5] == 3", 5, "expected a whole number or a text"),
        ("json[true] == 3", 5, "expected a whole number or a text"),
        ("json[0 == 3", 7, "expected `]`"),
        ("json[body] == 3", 5, "expected"),
        ("priority in [1 2]", 15, "expected `,` or `]`"),
        ("priority in [1, key]", 16, "expected"),
        ("priority in [1, [2]]", 16, "expected"),
        ("json.a == [1]", 7, "a list is looked into with `in`"),
        ("age > 5x", 6, "a duration such as"),
        ("age > 5m1h", 6, "a duration such as"),
        ('age > "5m"', 6, "a duration without quotes"),
        ('time > "yesterday"', 7, "a time in ISO 8601"),
        ("5 < time", 0, "a time in ISO 8601"),
        ('error ~ "("', 8, "this regular expression cannot be used"),
        ('error ~ "(?L)a"', 8, "this regular expression cannot be used"),
        ('error ~ "a{99999999999999999999}"', 8, "this regular expression cannot be used"),
        ("error ~ body", 8, "expected a regular expression as text"),
        ("error ~ 5", 8, "expected a regular expression as text"),
    ],
)
def test_a_bad_expression_is_shown_with_a_caret_under_the_place(where: str, place: int, says: str):
    first, shown, caret, *rest = complaint(where).split("\n")
    assert says in first
    assert shown == "  " + where
    assert caret == "  " + " " * place + "^"
    assert all(name in rest[0] for name in NAMES)


def test_a_long_expression_is_shown_around_the_place():
    where = "priority == 1 and " * 50 + "prio == 2 and " + "priority == 1 and " * 30 + "true"
    _first, shown, caret, *_rest = complaint(where).split("\n")
    assert len(shown) <= 2 + 100
    assert shown[caret.index("^") :].startswith("prio == 2")


def test_line_breaks_do_not_move_the_caret():
    _first, shown, caret, *_rest = complaint("priority == 1\n and\x1b prio == 2").split("\n")
    assert "\x1b" not in shown
    assert caret.index("^") == 2 + 18


def test_length_and_nesting_are_limited():
    deep = "(" * MAX_DEPTH + "true" + ")" * MAX_DEPTH
    assert chosen(deep)
    assert "nested more than" in complaint(f"({deep})")
    assert "nested more than" in complaint("(" * MAX_CHARACTERS)
    assert "characters" in complaint("1" * (MAX_CHARACTERS + 1))
    assert "cannot be used" in complaint(f'body ~ "{"(" * 900}{")" * 900}"')


@pytest.mark.parametrize(
    "where",
    [
        "not " * (MAX_CHARACTERS // 4 - 1) + "true",
        "true or " * (MAX_CHARACTERS // 8 - 1) + "true",
        "false or " * (MAX_CHARACTERS // 9 - 1) + "true",
        "json" + ".a" * ((MAX_CHARACTERS - 12) // 2) + " == null",
        "offset < " + "9" * (MAX_CHARACTERS - 9),
        "offset < " + "9" * (MAX_CHARACTERS - 10) + "d",
        "offset < 1e999",
    ],
)
def test_the_longest_expressions_do_not_exhaust_the_stack(where: str):
    assert len(where) <= MAX_CHARACTERS
    assert isinstance(chosen(where), bool)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("7ms", 0.007), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("7d", 604_800), ("1w1d", 691_200)],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "-5m", "30m1h", "5m5m", "5M", "٥m", "1e3s", ".5s", "5.s"])
def test_what_is_not_a_duration_is_none(text: str):
    assert seconds_of(text) is None


# Pieces of the language in any order come much further than any text does.
SIGNS = ["and", "or", "not", "in", "==", "!=", "<", ">=", "~", "!~", "=", "(", ")", "[", "]", ",", ".a", "[0]", "\\"]
VALUES = ["null", "true", "5", "-1", "1.5e3", "5m", "5x", "'b'", '"', '"a"', '"["', '"(?i)x"', '"2026-11-16"']
PIECES = st.sampled_from([*NAMES, *SIGNS, *VALUES])
EXPRESSIONS: st.SearchStrategy[str] = st.one_of(
    st.text(),
    st.text(alphabet="()[]~!=<>\"'\\.,-+ 01aeinort_\n"),
    st.lists(PIECES, max_size=12).map(" ".join),
    st.lists(PIECES, max_size=12).map("".join),
    st.text().map(lambda text: f'body ~ "{text}"'),
    st.text(alphabet="()[]{}?*+|^$.\\-:<=!#PLiamsux0123456789,").map(lambda text: f'body ~ "{text}"'),
)
MESSAGES = st.builds(
    message,
    st.one_of(st.binary(), st.sampled_from([b'{"a": {"b": [1, "x", null]}}', b"[]", b"1", b"true", b'"x"'])),
    key=st.none() | st.binary(),
    headers=st.none() | st.lists(st.tuples(st.text(), st.binary())) | st.dictionaries(st.text(), st.binary()),
    priority=st.integers(0, 9),
    timestamp_ns=st.none() | st.integers(0, 2**64 - 1),
    error=st.none() | st.text(),
)


@given(EXPRESSIONS)
@example('body ~ "[[a]"')
@example('body ~ "(?P<a>x)(?P=b)"')
@example("json.a ." + "a")
@example("5.")
@example("1e")
def test_any_text_compiles_or_is_refused_and_nothing_else(where: str):
    with contextlib.suppress(InvalidRequest):
        compile_where(where, now_ms=NOW_MS)


def without_regular_expressions(where: str) -> Callable[[Any], bool] | None:
    try:
        return None if "~" in where else compile_where(where, now_ms=NOW_MS)
    except InvalidRequest:
        return None


@given(st.lists(PIECES, max_size=8).map(" ".join), MESSAGES)
def test_whatever_compiles_answers_for_any_message(where: str, found: Any):
    test = without_regular_expressions(where)
    if test is not None:
        assert test(found) in {True, False}


READ = [
    "body",
    "key",
    "priority",
    "offset",
    "age",
    "time",
    "json",
    "json.a",
    "json.a.b",
    "json[0]",
    "header.h",
    "error",
]
OPERANDS = st.sampled_from([*READ, "null", "true", "5", "5m", '"x"', "[]", "[1, null]"])
COMPARISONS = st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"])


@given(OPERANDS, COMPARISONS, OPERANDS, MESSAGES)
def test_any_two_values_of_any_message_can_be_compared(left: str, sign: str, right: str, found: Any):
    test = without_regular_expressions(f"{left} {sign} {right}")
    if test is not None:
        assert test(found) in {True, False}
