"""The rules of house style that a machine can check."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repo import PACKAGE, ROOT, assert_none, files, layer_of, modules, name_of, text_of, tree_of

MODULE_LINES = 700
FUNCTION_LINES = 60

# Only these layers touch the outside world; all others are given clock, disk and ids.
DOORS = frozenset({"env", "cli", "testing"})
OUTSIDE = frozenset({"os", "random", "secrets", "socket", "time"})
HARMLESS = frozenset({("os", "PathLike"), ("os", "fspath")})

# What `import holdfast` may load besides the standard library. msgspec brings typing_extensions,
# pyroaring brings cython_runtime.
LOADED_AT_IMPORT = frozenset({"crc32c", "cython_runtime", "holdfast", "msgspec", "pyroaring", "typing_extensions"})

# One word for each concept. Faces speak foreign protocols and keep their words.
FACES = frozenset({"client", "integrations", "server", "spark"})
WORDS = {
    "config": "settings",
    "dequeue": "receive",
    "enqueue": "publish",
    "flush": "sync",
    "generation": "epoch",
    "invisible": "leased",
    "job": "message",
    "reservation": "lease",
    "shard": "partition",
    "subscription": "group",
    "tube": "topic",
    "visibility": "lease",
    "wal": "log, or journal",
}

# Names that everybody expects, in the layer that is to have them: the command `holdfast config show`, and the room of
# the settings file, which cannot be called as the settings are.
EXPECTED = frozenset({("cli", "config"), ("config", "config"), ("api", "flush")})

# A shard of a cluster is no partition: it holds whole topics.
OTHER_THINGS = frozenset(
    (layer, word) for layer in ("cluster", "cli", "api", "local", "protocol", "remote") for word in ("shard", "shards")
)

# Folders of somebody's machine, at the start of a path.
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:root|work)/")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_module_is_too_long():
    lines = {module: len(module.read_text("utf-8").splitlines()) for module in modules()}
    assert_none(
        [f"{name_of(module)}: {count} lines" for module, count in lines.items() if count > MODULE_LINES],
        f"A module has at most {MODULE_LINES} lines: make it two, each with one purpose.",
    )


def test_no_function_is_too_long():
    faults = []
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > FUNCTION_LINES:
                    faults.append(f"{name_of(module)}:{node.lineno}: {node.name} has {count} lines")
    assert_none(faults, f"A function has at most {FUNCTION_LINES} lines: name a part of it.")


def test_every_module_says_what_it_is_for():
    assert_none(
        [name_of(module) for module in modules() if not ast.get_docstring(tree_of(module))],
        "Begin each of these modules with a docstring; one sentence is enough.",
    )


def test_only_the_command_line_prints():
    faults = []
    for module in modules():
        if layer_of(module) == "cli":
            continue
        faults += [
            f"{name_of(module)}:{node.lineno}"
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
    assert_none(faults, "Return it, or log it with the module's logger; only holdfast.cli prints.")


def test_only_env_and_cli_touch_the_outside_world():
    faults = []
    for module in modules():
        if layer_of(module) not in DOORS:
            faults += [f"{name_of(module)}:{line}: {what}" for line, what in outside_imports(tree_of(module))]
    assert_none(
        faults,
        "Take clock, disk and ids as arguments (holdfast.env). For types, `from os import PathLike` is fine.",
    )


def outside_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in OUTSIDE:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if node.module.partition(".")[0] in OUTSIDE and (node.module, alias.name) not in HARMLESS:
                    yield node.lineno, f"from {node.module} import {alias.name}"


def test_importing_holdfast_loads_little():
    listing = (
        "import sys; before = set(sys.modules); import holdfast; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"`import holdfast` fails:\n{done.stderr}"
    loaded = {name for name in done.stdout.split() if not name.startswith("_")}
    assert_none(
        sorted(loaded - sys.stdlib_module_names - LOADED_AT_IMPORT),
        "`import holdfast` loads these packages. Import them in the function that needs them.",
    )


def test_each_concept_has_one_word():
    faults = []
    for module in modules():
        if layer_of(module) in FACES:
            continue
        for line, name in names_given(tree_of(module), module):
            faults += [
                f"{name_of(module)}:{line}: {name}: for `{word}` we say {WORDS[word]}"
                for word in parts_of(name)
                if word in WORDS
                and (layer_of(module), name) not in EXPECTED
                and (layer_of(module), word) not in OTHER_THINGS
            ]
    assert_none(faults, "Rename them; foreign words stay inside the face that speaks them.")


def names_given(tree: ast.Module, module: Path) -> Iterator[tuple[int, str]]:
    """Every name that the module makes up itself, with its line: foreign APIs keep their words."""
    yield 1, module.parent.name if module.stem == "__init__" else module.stem
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts_of(name: str) -> set[str]:
    """The words of a name, also without a plural s: {"wal", "file", "files"} for `WalFiles`."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return words | {word.removesuffix("s") for word in words}


def test_the_words_of_a_name():
    assert parts_of("_wal_path") == {"wal", "path"}
    assert parts_of("ShardID") == {"shard", "id"}
    assert parts_of("walk_jobs") == {"walk", "jobs", "job"}


def test_every_todo_names_its_issue():
    faults = []
    for path in files():
        if path.suffix != ".py":
            continue
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.COMMENT and re.search(r"\b(?:TODO|FIXME|XXX)\b(?!\s*\(#\d+\))", token.string):
                faults.append(f"{name_of(path)}:{token.start[0]}: {token.string}")
    assert_none(faults, "Do it now, or open an issue and write its number: TODO(#12).")


def test_no_file_names_a_path_of_somebodys_machine():
    faults = []
    for path in files():
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                faults.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert_none(faults, "Write paths from the root of the repository, or take them from a setting.")


def test_every_folder_of_the_package_is_a_package():
    folders = {PACKAGE, *(module.parent for module in modules())}
    assert_none(
        [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()],
        "Add an __init__.py: without it mypy and import-linter do not see the folder.",
    )
