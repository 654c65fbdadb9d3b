"""Pages that need a server have one, and their commands are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy import served
from tests.tidy.markdown import Block, blocks
from tests.tidy.test_docs import run_examples


def test_a_page_asks_for_a_server_by_a_mark():
    assert served.wanted("# Page\n\n<!-- with a server: holdfast serve data --read-only -->\n") == [
        "serve",
        "data",
        "--read-only",
    ]
    assert served.wanted("# Page\n\n```\nholdfast serve data\n```\n") is None


def test_commands_are_told_from_what_they_print():
    assert served.commands("$ one \\\n    two\nsays\n$ three\n$ four\nfive \\\nsix\n") == [
        ("one \\\n    two", "says\n"),
        ("three", ""),
        ("four", "five \\\nsix\n"),
    ]


def test_a_command_that_fails_fails_its_page_and_an_export_holds_on(tmp_path: Path):
    def outcome(*lines: str) -> int:
        code = "".join(f"$ {line}\n" for line in lines)
        return run_examples("page.md", [(1, served.program(Block("console", 1, code, False)))], cwd=tmp_path).returncode

    assert outcome("export NAME=ann", 'test "$NAME" = ann', "holdfast serve nowhere") == 0
    assert outcome("false") != 0
    assert outcome("false | true") != 0


def test_what_a_command_prints_is_compared_with_the_page(tmp_path: Path):
    def outcome(*printed: str) -> int:
        code = "\n".join(["$ printf 'one  \\ntwo 2 three\\n'", *printed])
        return run_examples("page.md", [(1, served.program(Block("console", 1, code, False)))], cwd=tmp_path).returncode

    assert outcome() == outcome("one", "two 2 three") == outcome("one", "...") == outcome("one", "two … three") == 0
    assert outcome("one") != 0
    assert outcome("one", "two ... four") != 0


def test_a_script_has_what_is_given_and_stops_at_the_first_step_that_fails(tmp_path: Path):
    def outcome(code: str) -> int:
        page = f"<!-- given:\nwork() {{ touch worked; }}\n-->\n```sh\n{code}\n```\n"
        steps = served.program(blocks(page)[0], served.given(page))
        return run_examples("page.md", [(1, steps)], cwd=tmp_path).returncode

    assert outcome("work\ntest -e worked") == 0
    assert outcome("false\ntrue") != 0
    assert outcome('eval "$(false)" && work; unknown_command') != 0


def test_a_block_that_is_named_becomes_a_file(tmp_path: Path):
    named, other = blocks("```toml\n# holdfast.toml\n[queue]\n```\n\n```toml\n[server]\n```\n")
    assert served.program(other) == ""
    assert run_examples("page.md", [(1, served.program(named))], cwd=tmp_path).returncode == 0
    assert (tmp_path / "holdfast.toml").read_text() == "# holdfast.toml\n[queue]\n"


def test_a_call_that_the_server_refuses_fails_its_page(tmp_path: Path):
    with served.server(["serve", "data"], tmp_path) as address:
        for path, good in (("/healthz", True), ("/v1/queues/nothing/stats", False)):
            page = f"```console\n$ curl -s {served.ADDRESS}{path}\n```\n"
            code = served.program(blocks(page)[0]).replace(served.ADDRESS, address)
            assert (run_examples("page.md", [(1, code)], cwd=tmp_path).returncode == 0) is good


def test_a_server_that_greets_otherwise_than_its_page_says_is_noticed(tmp_path: Path):
    page = "<!-- with a server: holdfast serve data -->\n```console\n$ holdfast serve data\nHello from data\n```\n"
    assert served.greeting(page) == "Hello from data\n"
    assert served.greeting("```console\n$ holdfast serve data\nHello\n```\n") == ""
    starting = served.server(["serve", "data"], tmp_path, greeting=served.greeting(page))
    with pytest.raises(AssertionError, match="Holdfast serves data"), starting:
        pass


@pytest.mark.parametrize(("handler", "good"), [("handle", True), ("nosuch", False)])
def test_a_worker_is_ended_once_it_has_started(tmp_path: Path, handler: str, good: bool):
    page = (
        "<!-- given:\nprintf 'def handle(message): pass\\n' > shop.py; holdfast put jobs x\n-->\n"
        f"```console\n$ holdfast worker jobs shop:{handler}\n```\n"
    )
    code = served.program(blocks(page)[0], served.given(page))
    assert (run_examples("page.md", [(1, code)], cwd=tmp_path).returncode == 0) is good
