"""Every command that the docs show is one that there is, with options that it has."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tidy import markdown
from tests.tidy.repo import assert_none, files, name_of

_SHOWN = re.compile(r"^(?:\$ )?(?:sudo )?(?:[./\w-]+/)?holdfast (?P<rest>[a-z].*)$")
_ENDS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<"})
_SHELLS = frozenset({"", "text", "console", "sh", "bash"})


def test_every_command_that_is_shown_is_there():
    root = importlib.import_module("holdfast.cli.main")
    faults = [
        f"{name_of(page)}: holdfast {rest}: {fault}"
        for page in files()
        if page.suffix == ".md" and page.name != "CHANGELOG.md"
        for rest in shown(page)
        for fault in mistakes(root, rest)
    ]
    assert_none(sorted(set(faults)), "These cannot be typed: see `holdfast --help`.")


def shown(page: Path) -> Iterator[str]:
    """What stands behind `holdfast` in blocks of a shell, and in spans of code."""
    text = page.read_text("utf-8")
    lines = [
        line
        for block in markdown.blocks(text)
        if block.language in _SHELLS
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *markdown.spans(text)]:
        found = _SHOWN.match(line.strip())
        if found:
            yield found["rest"]


def mistakes(root: Any, rest: str) -> Iterator[str]:
    """What is wrong with a command line, as far as its words tell."""
    try:
        words = shlex.split(rest, comments=True)
    except ValueError:
        return  # an apostrophe: it is a sentence
    command: Any = None
    for number, word in enumerate(words):
        if word in _ENDS:
            return
        if word.startswith("--"):
            name = word.partition("=")[0]
            if name not in {*root.ROOT_OPTIONS, *getattr(command, "options", ())}:
                yield f"there is no option {name}"
        elif not word.startswith("-") and not hasattr(command, "options"):
            if number == 0 and not re.fullmatch(r"[a-z]+", word):
                return
            try:
                command, _, rest = root.find(words[: number + 1])
            except root.UsageError:
                rest = [word]
            if rest and not hasattr(command, "options"):  # otherwise its usual command is meant
                yield f"there is no command {word}"
                return


def test_a_mistyped_command_or_option_is_noticed():
    root = importlib.import_module("holdfast.cli.main")
    assert list(mistakes(root, "put jobs 'a body' --priority 9 | wc --lines")) == []
    assert list(mistakes(root, "dead redrive jobs --dry-run")) == []
    assert list(mistakes(root, "put jobs --prio 9")) == ["there is no option --prio"]
    assert list(mistakes(root, "putt jobs")) == ["there is no command putt"]
    assert list(mistakes(root, "dead raise jobs")) == ["there is no command raise"]
