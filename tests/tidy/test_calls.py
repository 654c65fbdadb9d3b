"""A message is put, taken and acked with no more Python calls than before: `python tools/calls.py` counts them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tidy.repo import ROOT, assert_none

# On Python 3.11; later versions have fewer, since a comprehension is no call there. HTTP has a little
# room: the loop and its versions are not ours. There, each call comes in a millisecond of its own, and makes anew what
# the notes of one millisecond share: two calls that threads and tasks make far less often.
CEILINGS = {
    "threads": {"put": 3, "get": 15, "ack": 8, "get at once": 32},
    "tasks": {"put": 3, "get": 15, "ack": 8, "get at once": 32},
    "HTTP": {"put": 20, "get": 42, "ack": 28, "get at once": 42},
}


@pytest.mark.slow
def test_no_hot_path_takes_more_calls_than_it_did():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "calls.py"), "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert_none(
        [
            f"{who}, {verb}: {counts[who][verb]} calls, and the ceiling is {ceiling}"
            for who, ceilings in CEILINGS.items()
            for verb, ceiling in ceilings.items()
            if counts[who][verb] > ceiling
        ],
        "Save the calls again, or say in the commit why they are worth it.",
    )
