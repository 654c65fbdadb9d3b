"""The docs tests are only as good as their reading of Markdown."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.tidy import markdown
from tests.tidy.test_docs import examples, names, resolves, run_examples

PAGE = dedent(
    """\
    # The `holdfast` command

    Common: `--json`.

    ## `holdfast check`

    See [the errors](errors.md#what-to-do "all of them") and ![a picture](<pic.svg>), not `[this](gone.md)`.

    ### In scripts

    Use `--quiet`.

    ## `holdfast log dump`

    ```python
    [not](a-link.md)
    # not a heading
    answer = 42
    ```

    <!-- not run: needs a server -->

    ```python
    raise SystemExit(1)
    ```

    1. In a list:
       ```python
       assert answer == 42
       ```

    [below]: docs/below.md
    """
)


def test_blocks_keep_their_lines_and_lose_their_indent():
    found = markdown.blocks(PAGE)
    assert [(block.language, block.line, block.skipped) for block in found] == [
        ("python", 16, False),
        ("python", 24, True),
        ("python", 29, False),
    ]
    assert found[2].code == "assert answer == 42\n"


def test_headings_are_not_taken_from_code():
    assert [heading.text for heading in markdown.headings(PAGE)] == [
        "The `holdfast` command",
        "`holdfast check`",
        "In scripts",
        "`holdfast log dump`",
    ]
    assert "in-scripts" in markdown.anchors(PAGE)


def test_a_section_ends_where_the_next_command_begins():
    check = markdown.section(PAGE, titled="holdfast check")
    assert check is not None
    assert names(markdown.code(check), "--quiet")
    assert "dump" not in check
    assert not names(markdown.code(markdown.section(PAGE, titled="holdfast") or ""), "--quiet")
    assert markdown.section(PAGE, titled="holdfast log") is None


def test_an_option_is_not_named_by_a_longer_one():
    assert names("`--all-topics` `-n`", "-n")
    assert not names("`--all-topics`", "--all")
    assert not names("`segment_bytes`", "bytes")


def test_links_are_found_outside_code():
    assert list(markdown.links(PAGE)) == [
        (7, "errors.md#what-to-do"),
        (7, "pic.svg"),
        (32, "docs/below.md"),
    ]


@pytest.mark.parametrize(
    ("target", "there"),
    [
        ("other.md", True),
        ("other.md#a-heading-with-code", True),
        ("#here", True),
        ("folder/", True),
        ("https://example.org/x", True),
        ("mailto:a@example.org", True),
        ("gone.md", False),
        ("other.md#gone", False),
        ("#gone", False),
    ],
)
def test_a_link_leads_to_a_file_and_a_heading(tmp_path: Path, target: str, *, there: bool):
    page = tmp_path / "page.md"
    page.write_text("# Here\n")
    (tmp_path / "other.md").write_text("## A heading, with `code`!\n")
    (tmp_path / "folder").mkdir()
    assert resolves(page, target) is there


def test_the_examples_of_a_page_share_their_names_and_fail_with_the_line_of_the_page(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = examples(page)
    assert found[0][1].endswith("answer = 42\n")
    good = [(16, "answer = 42\n"), found[1]]
    assert run_examples("page.md", good, cwd=tmp_path).returncode == 0
    bad = run_examples("page.md", [*good, (40, "assert answer == 41\n")], cwd=tmp_path)
    assert bad.returncode == 1
    assert 'File "page.md", line 40' in bad.stderr
