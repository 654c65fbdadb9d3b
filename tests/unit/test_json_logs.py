"""Log lines: one JSON object each, or one line of text, with every fact and no secret."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.server.metrics import HIDDEN, JsonFormatter, TextFormatter, hidden, is_secret, start_logging

SECRET = "kF9x-2pQ_7vR4tY8uW1zA3bC5dE6fG0h"


def record(message: str = "upkeep failed", *args: object, raised: bool = False, **extra: object) -> logging.LogRecord:
    exc_info = None
    if raised:
        try:
            raise OSError(f"no space left, token={SECRET}")
        except OSError:
            exc_info = sys.exc_info()
    made = logging.getLogger("holdfast.broker").makeRecord(
        "holdfast.broker", logging.WARNING, "broker.py", 7, message, args, exc_info, extra=extra
    )
    made.created = 1_800_000_000.25
    return made


def as_json(*args: Any, **extra: Any) -> dict[str, Any]:
    line = JsonFormatter().format(record(*args, **extra))
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def as_text(*args: Any, **extra: Any) -> str:
    return TextFormatter().format(record(*args, **extra))


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("not me")


def test_a_line_is_one_object_with_the_facts_of_the_record_and_every_extra():
    assert as_json("topic %s is full", "orders", topic="orders", partition=3, share=0.5, last=None) == {
        "time": "2027-01-15T08:00:00.250000Z",
        "level": "WARNING",
        "logger": "holdfast.broker",
        "message": "topic orders is full",
        "topic": "orders",
        "partition": 3,
        "share": 0.5,
        "last": None,
    }


def test_an_error_comes_with_its_traceback_in_the_same_line():
    exception = as_json(raised=True)["exception"]
    assert exception["type"] == "OSError"
    assert exception["message"] == f"no space left, token={HIDDEN}"
    assert exception["traceback"].startswith("Traceback (most recent call last)")


def test_an_extra_does_not_hide_a_field_of_the_record():
    found = as_json(time="noon", level="low", logger="me")
    assert (found["level"], found["level_"], found["time_"], found["logger_"]) == ("WARNING", "low", "noon", "me")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\xff\x00abc", "\\xff\x00abc"),
        ("\ud800 alone", "\\ud800 alone"),
        (2**70, str(2**70)),
        (float("nan"), None),
        ({"a": {1}, 2: (b"x",)}, {"a": [1], "2": ["x"]}),
        (Odd(), "<Odd that cannot be shown>"),
        (ValueError("no"), "no"),
    ],
)
def test_a_value_of_any_kind_becomes_json(value: object, shown: object):
    assert as_json(value=value)["value"] == shown


def test_a_value_that_holds_itself_ends_somewhere():
    value: list[object] = []
    value.append(value)
    assert "..." in json.dumps(as_json(value=value)["value"])


def test_a_phrase_whose_arguments_do_not_fit_is_still_a_line():
    assert as_json("%d messages", "many")["message"] == "%d messages ('many',)"


def test_a_line_of_text_has_the_extras_behind_the_phrase():
    line = as_text(topic="orders", error="no space left", count=3, empty="", headers={"a": "b"})
    assert line == (
        "2027-01-15 08:00:00.250 WARNING holdfast.broker: upkeep failed "
        'topic=orders error="no space left" count=3 empty="" headers={"a":"b"}'
    )


def test_a_traceback_in_text_is_set_in():
    first, *rest = as_text(raised=True).split("\n")
    assert first.endswith("upkeep failed")
    assert rest
    assert all(line.startswith("  ") for line in rest)
    assert rest[-1] == f"  OSError: no space left, token={HIDDEN}"


@given(st.text(), st.text())
def test_nothing_that_somebody_sends_begins_a_line_of_its_own(message: str, value: str):
    escaped = message.replace("%", "%%")
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record(escaped, topic=value))
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "Authorization",
        "token",
        "auth_token",
        "accessToken",
        "X-Api-Key",
        "api_key",
        "PASSWORD",
        "set-cookie",
    ],
)
def test_what_goes_by_the_name_of_a_secret_is_hidden(name: str):
    assert is_secret(name)
    assert as_json(**{name: SECRET})[name] == HIDDEN
    assert as_json(headers={name: SECRET})["headers"][name] == HIDDEN
    assert SECRET not in as_text(**{name: SECRET}, headers=[{name: SECRET}])


@pytest.mark.parametrize("name", ["topic", "token_name", "tokens_file", "key", "secretary", "message_id", ""])
def test_other_names_are_none(name: str):
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"got 'bearer {SECRET}', refused",
        f'{{"token": "{SECRET}", "name": "ann"}}',
        f"GET /v1/queues?token={SECRET}&limit=3",
        f"connect to https://ann:{SECRET}@example.org/v1 failed",
        f"http://{SECRET}@localhost:7700",
        f"password='{SECRET}'",
        f"x-api-key: {SECRET}",
        "Authorization: Basic YW5uOmtGOXgtMnBRXzd2UjR0WTh1VzF6QQ==",
    ],
)
def test_a_secret_inside_a_text_is_hidden_wherever_it_stands(text: str):
    for line in (json.dumps(as_json(text, error=text, inner=[text])), as_text(text, error=text, inner=[text])):
        assert SECRET not in line
        assert "YW5u" not in line
        assert HIDDEN in line


@pytest.mark.parametrize(
    "text",
    [
        "the token of ann has expired",
        "basic settings were read from https://example.org/a@b",
        "3 tokens, 2 secrets",
        "no bearer here",
    ],
)
def test_a_text_without_secrets_stays_as_it_is(text: str):
    assert hidden(text) == text


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
@pytest.mark.parametrize(("form", "begin"), [("json", "{"), ("text", "20")])
def test_all_that_is_logged_goes_to_the_stream(form: Any, begin: str):
    stream = io.StringIO()
    start_logging(form, stream)
    logging.getLogger("holdfast.server").info("ready", extra={"port": 7700})
    logging.getLogger("somebody.else").debug("chatter")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(begin)
    assert "7700" in line
