"""What users can see is what it was: the Python API, the HTTP API, the command line, codes of errors and exits."""

from __future__ import annotations

import pytest

from tests.tidy.repo import assert_none
from tests.tidy.surface import FOLDER, SURFACES, differences, rendered


@pytest.mark.parametrize("file", SURFACES)
def test_what_users_can_see_has_not_changed(file: str):
    assert_none(
        differences((FOLDER / file).read_text("utf-8"), rendered(file)),
        "If users are meant to see this change: `python -m tests.tidy.surface --write`, and a line in CHANGELOG.md.",
    )


def test_every_baseline_is_compared():
    assert {path.name for path in FOLDER.iterdir()} == set(SURFACES)


def test_a_change_is_told_by_name():
    before = "a.B.go(x: int) -> int\na.B: class\na.old: int\n~ a.Remote: class\n"
    now = "a.B.go(x: int, *, fast: bool = False) -> int\na.B: class\na.new = 3\n"
    assert differences(before, now) == [
        "gone: a.old",
        "new: a.new = 3",
        "changed: a.B.go()\n    was: a.B.go(x: int) -> int\n    is:  a.B.go(x: int, *, fast: bool = False) -> int",
    ]


def test_of_a_long_entry_the_part_that_changed_is_told():
    before, now = (f"GET /x: {'same ' * 200}{word}{' same' * 200}\n" for word in ("left", "right"))
    (difference,) = differences(before, now)
    assert "left" in difference
    assert "right" in difference
    assert len(difference) < 1000
