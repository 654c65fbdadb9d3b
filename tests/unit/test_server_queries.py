"""What follows the '?' of a call: read in a short way where nothing is escaped, which must not be another way."""

from __future__ import annotations

from urllib.parse import parse_qsl

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.broker.folder.layout import parse_receipt
from holdfast.broker.leases import Prover
from holdfast.errors import InvalidRequest
from holdfast.server.service import _pairs
from holdfast.server.tokens import Patterns

TEXTS = st.text(alphabet="ab=&+%20;é/?", max_size=20)


@given(TEXTS)
@example("a=1&&b=2")
@example("a")
@example("=")
@example("a=%zz")
def test_the_short_way_reads_what_the_long_one_reads(text):
    try:
        expected = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict")
    except ValueError:
        with pytest.raises(InvalidRequest, match="cannot be read"):
            _pairs(text)
    else:
        assert _pairs(text) == expected


def test_a_receipt_is_read_as_it_was_written():
    text = Prover(b"key", mark=0).text("a-1-b-3-42", 0x10000000001, 7)
    assert parse_receipt(text, "a-1-b") == (3, 42, text.partition("@")[2])
    assert parse_receipt("42@10000000001", "jobs") == (0, 42, "10000000001")


@pytest.mark.parametrize(
    "text", ["", "42", "jobs-0-42", "other-0-42@1", "jobs-0-d42@1", "jobs-0-42@", "jobs-0-42@G", "jobs-0-42@1\n", 7]
)
def test_what_is_no_receipt_of_the_topic_is_refused(text):
    with pytest.raises(InvalidRequest, match="is not a receipt of jobs"):
        parse_receipt(text, "jobs")


def test_a_star_among_the_patterns_matches_every_name():
    patterns = Patterns(["orders", "*"])
    assert patterns.everything
    assert patterns.match("orders")
    assert patterns.match("anything\nelse")
