"""Errors of one kind have one fingerprint, those of different kinds do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark.pipelines.deadletters import MOST_CHARACTERS, fingerprint

EXAMPLES = [
    ("", ""),
    ("timed out", "timed out"),
    ("timed out after 30 s", "timed out after <number> s"),
    ("timed out after 1.5e-3 s", "timed out after <number> s"),
    ("balance is -17.50, limit is +3", "balance is <number>, limit is <number>"),
    ("1,234,567 rows", "<number> rows"),
    ("order-17 is gone", "order-<number> is gone"),
    ("retry 3/5", "retry <number>/<number>"),
    ("10ms over", "<number>ms over"),
    ("no user 3f2504e0-4f89-11d3-9a0c-0305e82c3301", "no user <uuid>"),
    ("no user 3F2504E0-4F89-11D3-9A0C-0305E82C3301!", "no user <uuid>!"),
    ("<Order object at 0x7f3a2c>", "<Order object at <hex>>"),
    ("commit deadbeef42 not found", "commit <hex> not found"),
    ("a facade decade", "a facade decade"),
    ("KeyError: 'customer'", "KeyError: <text>"),
    ('no column "amount"', "no column <text>"),
    ("bad value b'\\x00\\'1'", "bad value <text>"),
    ("use `limit` here", "use <text> here"),
    ("can't open 'a.txt', don't ask", "can't open <text>, don't ask"),
    ("the user's name isn't set", "the user's name isn't set"),
    ("cannot reach 10.0.0.7:5432", "cannot reach <address>"),
    ("cannot reach 10.0.0.7", "cannot reach <address>"),
    ("cannot reach [2001:db8::1]:443", "cannot reach <address>"),
    ("cannot reach 2001:db8:0:0:0:0:0:1", "cannot reach <address>"),
    ("localhost:8080 refused", "<address> refused"),
    ("GET https://shop.example/orders/17?x=1 failed", "GET <url> failed"),
    ("see https://shop.example/faq.", "see <url>."),
    ("mail to anna.b+x@mail.example bounced", "mail to <email> bounced"),
    ("no such file: /srv/data/17.json", "no such file: <path>"),
    ("no such file: ~/orders/today", "no such file: <path>"),
    ("cannot read ../in/x.csv.", "cannot read <path>."),
    ("cannot read C:\\data\\x.csv", "cannot read <path>"),
    ("bytes and/or text, 5 km/h", "bytes and/or text, <number> km/h"),
    ("late since 2026-11-16T06:40:00.123Z", "late since <time>"),
    ("late since 2026-11-16 06:40:00+01:00", "late since <time>"),
    ("late since 2026-11-16", "late since <time>"),
    ("ids [1, 2, 3] are unknown", "ids [<number>, ...] are unknown"),
    ("keys ['a', 'b'] are missing", "keys [<text>, ...] are missing"),
    ("too   many\tblanks ", "too many blanks"),
    ("  \n ValueError: bad\nTraceback (most recent call last):\n  File ...", "ValueError: bad"),
    ("Traceback (most recent call last):\n  File 'x', line 3\nOSError: [Errno 5] I/O", "OSError: [Errno <number>] I/O"),
    ("Größe 12 zu groß", "Größe <number> zu groß"),
]


@pytest.mark.parametrize(("error", "kind"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_what_differs_each_time_is_taken_out(error: str, kind: str):
    assert fingerprint(error) == kind


def test_a_fingerprint_is_never_long():
    assert len(fingerprint("word " * 1000)) == MOST_CHARACTERS


@given(st.integers(min_value=0), st.uuids(), st.text(alphabet="abc xyz/", max_size=20))
def test_errors_that_differ_in_details_only_are_of_one_kind(number: int, uuid: object, text: str):
    def error(number: int, uuid: object, text: str) -> str:
        return f"order {number} of {uuid} failed: '{text}' at 0x{number:x}"

    assert fingerprint(error(number, uuid, text)) == fingerprint(error(7, "3f2504e0-4f89-11d3-9a0c-0305e82c3301", ""))


@given(st.text(max_size=60))
def test_the_fingerprint_of_a_fingerprint_is_itself(error: str):
    assert fingerprint(fingerprint(error)) == fingerprint(error)
