"""The page on delivery shows the table of moves and the events as they are in the code."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.delivery import events
from holdfast.delivery.events import MOVES, Phase
from tests.tidy import markdown
from tests.tidy.moves_diagram import BEGIN, END, PAGE, rendered, with_moves

EVENTS = [
    kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None
]


def test_the_page_shows_the_table_of_moves():
    page = PAGE.read_text("utf-8")
    assert with_moves(page) == page, "renew it: python -m tests.tidy.moves_diagram --write"


def test_every_move_is_an_arrow_of_the_diagram():
    for (source, event), target in MOVES.items():
        arrows = [
            line for line in rendered().splitlines() if line.startswith(f"    {source.value} --> {target.value}:")
        ]
        assert len(arrows) == 1
        assert event.__name__ in arrows[0].partition(":")[2].replace(",", "").split()


def test_every_phase_can_be_reached_and_left():
    assert {source for source, _ in MOVES} == set(Phase)
    assert set(MOVES.values()) == set(Phase)


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="no part between"):
        with_moves("# Delivery\n")
    assert with_moves(f"a\n{BEGIN}\nold\n{END}\nb") == f"a\n{rendered()}\nb"


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_the_page_names_every_event_with_its_tag_and_fields(kind):
    page = PAGE.read_text("utf-8")
    fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
    row = f"| {kind.__struct_config__.tag} | `{kind.__name__}` | {fields} |"
    assert any(line.startswith(row) for line in page.splitlines()), f"the page should have a row that begins: {row}"


def test_the_diagram_is_a_block_of_its_own():
    assert [block.language for block in markdown.blocks(rendered())] == ["mermaid"]
