"""The spans of time in which the console counts dead letters."""

from __future__ import annotations

import pytest

from holdfast.server.api.dead import _spans

DAY_MS = 86_400_000


@pytest.mark.parametrize("age_ms", [0, 1, 999, 23_999, 24_000, 3_600_000, DAY_MS, 24 * DAY_MS, 400 * DAY_MS])
def test_the_spans_reach_from_the_first_letter_until_now(age_ms: int):
    first_ms = 1_795_000_123_456
    now_ms = first_ms + age_ms
    since_ms, span_ms = _spans(first_ms, now_ms, 24)
    assert since_ms <= first_ms < since_ms + span_ms
    assert now_ms < since_ms + 24 * span_ms


def test_the_spans_stay_while_time_passes():
    first_ms = 1_795_000_123_456
    passing = {_spans(first_ms, first_ms + DAY_MS + step, 24) for step in range(0, 3_600_000, 5000)}
    assert len(passing) == 1
