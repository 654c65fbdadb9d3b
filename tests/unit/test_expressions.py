"""Regular expressions take a time that grows with the text, whatever pattern and text they are given."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from holdfast import InvalidRequest
from holdfast.delivery.where import MAX_PATTERN_CHARACTERS, MAX_STEPS, Expression, compile_where
from holdfast.server.tokens import Patterns


class Message:
    def __init__(self, body: bytes) -> None:
        self.body = body


# Each of them would take `re` longer than the age of the world.
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)+$", "(a|aa)+$", "(.*a){20}$", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_a_pattern_made_to_run_for_ever_ends_at_once(pattern: str) -> None:
    assert not Expression(pattern).found_in("a" * 10_000 + "!")
    assert not compile_where(f'body ~ "{pattern}"', now_ms=0)(Message(b"a" * 10_000 + b"!"))
    assert Expression("(a+)+$").matches("a" * 10_000)


def test_a_token_pattern_of_many_stars_ends_at_once() -> None:
    assert not Patterns(["*a" * 50 + "*b"]).match("a" * 200)
    assert not Patterns(["?*" * 90 + "b"]).match("a" * 200)
    assert Patterns(["*a" * 50 + "*b"]).match("a" * 199 + "b")


@pytest.mark.parametrize(("pattern", "named"), [
    (r"a(?=b)", "look-arounds such as (?="), (r"(?<!b)a", "look-arounds such as (?<!"), ("(?!a)", "look-arounds"),
    (r"(a)\1", r"back-references such as \1"), (r"(?P<x>a)(?P=x)", "back-references such as (?P="),
    (r"(a)?(?(1)b|c)", "conditions such as (?("), ("(?>a)b", "atomic groups such as (?>"), ("(?x) a", "flags"),
    ("(?#say)a", "comments"), ("a*+", "bad repetition operator: *+"), ("(", "missing ): ("), ("[", "missing ]: ["),
    (r"\h", r"invalid escape sequence: \h"), ("a{1001}", "invalid repetition size: {1001}"), (r"\pL{900}", "too large"),
    ("((a?){30}){30}(b{500}|c{500})", "instructions"), ("a" * (MAX_PATTERN_CHARACTERS + 1), "characters"),
])  # fmt: skip
def test_what_cannot_be_used_is_named(pattern: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(named)):
        Expression(pattern)


def test_a_large_pattern_is_refused_for_a_long_text_before_it_is_searched() -> None:
    large = Expression("[ab]*a[ab]{900}c")
    assert not large.found_in("ab" * 5_000)
    with pytest.raises(InvalidRequest, match="too large for a text of 1000000 bytes: it may be used on"):
        large.found_in("ab" * 500_000)
    assert not Expression("refused|Timeout").found_in("x" * (MAX_STEPS // 50))


def test_many_patterns_in_one_condition_have_no_more_time_for_a_message_than_one() -> None:
    text = "ab" * 40_000
    one = Expression("[ab]*a[ab]{90}c")
    assert one.steps(text) < MAX_STEPS
    many = " or ".join(['body ~ "[ab]*a[ab]{90}c"'] * (MAX_STEPS // one.steps(text) + 1))
    wanted = compile_where(many, now_ms=0)
    with pytest.raises(InvalidRequest, match="together are too large"):
        wanted(SimpleNamespace(body=text.encode()))
    assert not wanted(SimpleNamespace(body=b"ab")), "each message has its own"


@pytest.mark.parametrize("pattern", [
    "Timeout|refused", r"^requests\.\w+: read", "(?i)TIMEOUT", "x{2,3}", r"\bread\b", "[^a-c]+", "(?P<name>t.m)",
    r"caf\u00e9", r"\U0001F600", r"end\Z", "é|ü", r"\\u00e9", "", "(?s)a.b", "(?m)^two$", r"\x41", r"[\u00e0-\u00ff]",
])  # fmt: skip
@pytest.mark.parametrize("text", [
    "", "requests.Timeout: read timed out", "refused", "café ü", "😀", "the end", r"\u00e9", "a\nb", "one\ntwo", "xxA",
])  # fmt: skip
def test_usual_patterns_find_what_they_find_in_python(pattern: str, text: str) -> None:
    assert Expression(pattern).found_in(text) == (re.search(pattern, text) is not None)


def test_bytes_that_are_not_utf_8_can_be_looked_for() -> None:
    text = b"caf\xe9 x".decode(errors="surrogateescape")
    assert Expression(r"^caf\udce9 x$").found_in(text)
    assert Expression("caf\udce9").found_in(text)
    assert Expression(r"[\udc80-\udcff]").found_in(text)
    assert not Expression(r"[\udc80-\udcff]").found_in("café")


def test_a_refused_pattern_writes_nothing_to_the_standard_error() -> None:
    code = "from holdfast.delivery.where import *\ntry: Expression('(')\nexcept InvalidRequest: print('refused')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("refused\n", "")
