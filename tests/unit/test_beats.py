"""How often streams say that they are alive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.server.access.tokens import Principal
from holdfast.server.api.takes import _beat_s
from holdfast.server.waiting import WaitLimit


@pytest.mark.parametrize(("streams", "beat_s"), [(1, 0.1), (50, 0.1), (1_000, 2.0), (5_000, 10.0)])
def test_many_streams_of_one_caller_beat_no_more_often_together_than_some(streams: int, beat_s: float):
    waits, caller = WaitLimit(10_000), Principal(name="one")
    waits._by_caller["one", True] = streams
    call: Any = SimpleNamespace(service=SimpleNamespace(waits=waits), principal=caller)
    assert _beat_s(call, 0.1) == beat_s
    assert _beat_s(call, 15) == 15
    call.principal = Principal(name="other")
    assert _beat_s(call, 0.1) == 0.1, "others beat as they asked for"
