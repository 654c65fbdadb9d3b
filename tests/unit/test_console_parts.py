"""The parts of the console's pages that need no server: conditions, rates, bodies, recipes."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast
from holdfast.api.listing import DeadGroup, fingerprint
from holdfast.delivery.where import compile_where, headline
from holdfast.server.console import messages, rendering
from holdfast.server.console.queues import both, where_of

TRACEBACK = """Traceback (most recent call last):
  File "/app/shop/billing.py", line 41, in charge
    answer = gateway.charge(card, total)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/app/shop/gateway.py", line 88, in charge
    return accounts[name]
"""
ERRORS = [
    "",
    "plain",
    "plain and more",
    "card 17 of 'c-1' was declined",
    "card 99 of 'c-2' was declined",
    'quoted "this" and back\\slash \\d+ (group) [set] {n} ^$ | *',
    "first line\nsecond line",
    "first line",
    "tab\tand 0xdeadbeef",
    "long " * 100,
    "long " * 100 + "other end",
    "…",
    " ".join(map(str, range(70))),
    TRACEBACK + "KeyError: 'iban'",
    TRACEBACK + "KeyError: 'bic'\n",
    TRACEBACK + f"KeyError: 'iban'\n\nDuring handling of the above exception:\n\n{TRACEBACK}plain\n  more of it",
    "KeyError: 'other'\n\n" + TRACEBACK + "KeyError: 'other'",
    "Traceback (most recent call last):",
]


def kind(error: str) -> DeadGroup:
    now = datetime.now(UTC)
    return DeadGroup(reason="REJECTED", error=fingerprint(error), count=1, first=now, last=now, example="")


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
def test_the_condition_of_a_kind_of_error_chooses_that_kind_and_no_other(error: str):
    wanted = compile_where(where_of(kind(error)), now_ms=0)
    for other in ERRORS:
        letter = SimpleNamespace(error=other, reason="REJECTED")
        assert wanted(letter) == (fingerprint(other) == fingerprint(error)), other
    assert not wanted(SimpleNamespace(error=error, reason="MAX_ATTEMPTS"))


def test_a_bare_traceback_is_of_the_kind_of_its_exception():
    assert fingerprint(TRACEBACK + "KeyError: 'iban'") == "KeyError: …"
    assert fingerprint(TRACEBACK + "shop.Declined: 2 reasons\n  first\nsecond") == "shop.Declined: … reasons"
    chained = f"{TRACEBACK}KeyError: 1\n\nThe above exception was the direct cause:\n\n{TRACEBACK}ValueError: no"
    assert fingerprint(chained) == "ValueError: no"
    assert headline(f"ValueError: no\n\n{TRACEBACK}KeyError: 1") == "ValueError: no"
    assert headline("Traceback (most recent call last):\n  cut") == "Traceback (most recent call last):"
    assert headline("") == ""


def test_two_conditions_are_one():
    wanted = compile_where(both("attempts > 1 or key == null", where_of(kind("plain"))), now_ms=0)
    assert wanted(SimpleNamespace(error="plain", reason="REJECTED", attempts=2, key=None))
    assert not wanted(SimpleNamespace(error="other", reason="REJECTED", attempts=2, key=None))


@pytest.mark.parametrize(
    ("content", "view", "views"),
    [
        (b'{"a": [1, 2]}', "json", ("json", "text", "hex")),
        (b"[broken", "text", ("text", "hex")),
        (b"plain", "text", ("text", "hex")),
        (b"17", "text", ("text", "hex")),
        (b"\x00\x01", "hex", ("hex",)),
        (b"\xff\xfe", "hex", ("hex",)),
        (b"", "text", ("text", "hex")),
        (b'{"a": "\xff"}', "hex", ("hex",)),
        (b"[" * 60_000, "text", ("text", "hex")),
    ],
)
def test_a_body_is_shown_as_what_it_is(content: bytes, view: str, views: tuple[str, ...]):
    found = rendering.payload(content)
    assert (found.view, found.views, found.size, found.cut) == (view, views, len(content), False)
    assert rendering.payload(content, "hex").view == "hex"


def test_a_letter_that_the_end_cuts_in_two_does_not_make_bytes_of_a_text():
    text = "ü" * rendering.SHOWN_BYTES
    found = rendering.payload(b"x" + text.encode())
    assert (found.view, found.cut) == ("text", True)
    assert found.text.endswith("ü")


def test_what_is_long_is_one_short_line_in_a_list():
    assert rendering.preview(b"a\n  b\tc") == "a b c"
    assert rendering.preview(b"x" * 1000) == "x" * rendering.PREVIEW_BYTES + "…"
    assert rendering.preview(b"\x00" * 50).endswith("…")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (1, "1 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_a_length_of_time_is_short(seconds: float, text: str):
    assert rendering.age(seconds) == text


@pytest.mark.parametrize("body", [b'it\'s "quoted" $HOME `x` \\', b"@file", b"\x00\xff", "Grüße\n".encode()])
def test_a_recipe_sends_the_same_bytes(tmp_path: Path, body: bytes):
    with holdfast.open(tmp_path / "queue") as queue:
        queue.put(body, key="a b&c", headers={"tenant": "it's"}, priority=3)
        (found,) = queue.messages()
        command = messages.curl(found, "http://127.0.0.1:7")
        fake = 'curl() { printf "%s" "${4#@-}" > value; case "$4" in @-) cat > value;; esac; }; '
        subprocess.run(["bash", "-c", fake + command], cwd=tmp_path, check=True)
        assert (tmp_path / "value").read_bytes() == body
        assert "key=a+b%26c" in command
        program = messages.python(found, "http://127.0.0.1:7")
        sent: list[tuple[bytes, dict[str, object]]] = []
        broker = SimpleNamespace(publish=lambda _topic, content, **options: sent.append((content, options)))

        class Connected:
            def __enter__(self) -> SimpleNamespace:
                return broker

            def __exit__(self, *_: object) -> None: ...

        exec(program.replace("import holdfast\n", ""), {"holdfast": SimpleNamespace(connect=lambda _url: Connected())})
        assert sent == [(body, {"key": "a b&c", "headers": {"tenant": "it's"}, "priority": 3})]
