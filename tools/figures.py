"""Figures on the structure of src: how much there is, how often it is written, who reaches into whom.

`python tools/figures.py` prints the table; `--json` prints it as JSON; `--list FIGURE` prints what a figure counts,
one thing a line; `--root FOLDER` looks at another checkout, so that two commits can be compared with one script.
Everything is read as text: nothing of the package is imported or run. tests/tidy/test_figures.py holds the ceilings.

A figure counts what its line in the table says. Four need a longer definition:

- A face class is one of several public classes for one concept: strip the prefixes `Async` and `Remote` from the
  class names, and count every class whose concept has an `Async` variant (`Queue`, `AsyncQueue`, `RemoteQueue` and
  `AsyncRemoteQueue` are four). Bases that only share code between a local and a remote variant are not counted.
- A pair is two modules, or two places of one, that share a run of six or more lines. Docstrings, comments, blank
  lines, imports and lone punctuation are passed over, as is a run that stands in more than eight places. `Equal`
  compares the lines, `same shape` puts one placeholder for every name, string and number first, so it includes
  the equal ones; keywords and built-in names stay as they are.
- A short module has fewer than 60 lines. The `__init__` of a folder that holds a docstring and no code is passed over:
  Python wants the file, and there is nothing in it to put elsewhere.
- docs/internals names a module if a page has its path below the package (`broker/topic`, `broker/topic.py` or
  `broker.topic`), or its bare name in a block of code, where the trees are drawn.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gc
import io
import json
import keyword
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

SHORT_LINES = 60
RUN_LINES = 6
MOST_PLACES = 8  # a run that stands in more places is a habit of the language, not a copy
FACES = frozenset({"embedded", "client", "api", "local", "remote"})

_NOT_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
# From Python 3.12 an f-string is several tokens. They are put together again, so that every version counts the same.
_F_START = getattr(tokenize, "FSTRING_START", None)
_F_END = getattr(tokenize, "FSTRING_END", None)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_GENERATED = re.compile(r"\bgenerated (by|from)\b", re.IGNORECASE)  # in the first line
_SLF001 = re.compile(r"#.*\bnoqa:.*\bSLF001\b")


class Line(NamedTuple):
    """One line of code: where it is, its tokens, and the same with a placeholder for each name and value."""

    number: int
    text: str
    shape: str


class Module:
    """One file of the package, read once."""

    def __init__(self, path: Path, source: Path) -> None:
        self.name = path.relative_to(source).as_posix()
        self.text = path.read_text("utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text, filename=str(path))
        self.nodes = list(ast.walk(self.tree))
        self.generated = bool(_GENERATED.search(self.lines[0] if self.lines else ""))

    @property
    def dotted(self) -> str:
        """The name that is imported: `holdfast.broker` for broker/__init__.py."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def layer(self) -> str:
        """The folder below the package, or the module in it: `broker`, `model.py`."""
        return Path(self.name).parts[1]

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(_whole_strings(tokenize.generate_tokens(io.StringIO(self.text).readline)))

    @cached_property
    def docstrings(self) -> set[int]:
        """The lines on which a docstring begins."""
        found = set()
        for node in self.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node, clean=False):
                found.add(node.body[0].lineno)
        return found

    @cached_property
    def code(self) -> list[tokenize.TokenInfo]:
        """The tokens, without comments, docstrings and those that only lay out."""
        return [
            token
            for token in self.tokens
            if token.type not in _NOT_CODE and not (token.type == tokenize.STRING and token.start[0] in self.docstrings)
        ]

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        return [token for token in self.tokens if token.type == tokenize.COMMENT]

    @cached_property
    def imports(self) -> set[int]:
        """The lines that import statements take."""
        return {
            line
            for node in self.nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @cached_property
    def code_lines(self) -> list[Line]:
        """What pairs are looked for in."""
        by_line: dict[int, list[tokenize.TokenInfo]] = defaultdict(list)
        for token in self.code:
            by_line[token.start[0]].append(token)
        return [
            Line(number, " ".join(token.string for token in tokens), " ".join(map(_placeholder, tokens)))
            for number, tokens in sorted(by_line.items())
            if number not in self.imports and any(token.type != tokenize.OP for token in tokens)
        ]


def _whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    depth = 0
    begun: list[tokenize.TokenInfo] = []
    for token in tokens:
        if _F_START is not None and token.type == _F_START:
            depth += 1
        if depth == 0:
            yield token
            continue
        begun.append(token)
        if token.type == _F_END:
            depth -= 1
            if depth == 0:
                text = " ".join(part.string for part in begun)
                yield tokenize.TokenInfo(tokenize.STRING, text, begun[0].start, token.end, begun[0].line)
                begun = []


def _placeholder(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return token.string if keyword.iskeyword(token.string) or hasattr(builtins, token.string) else "name"
    return {tokenize.STRING: '""', tokenize.NUMBER: "0"}.get(token.type, token.string)


class Package:
    """The modules of a checkout, and what is counted in them. A method for a figure returns the things it counts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root.resolve() / "src"
        self.modules: list[Module]
        with _without_collector():
            self.modules = [
                Module(path, self.source)
                for path in sorted(self.source.rglob("*.py"))
                if "_pb2" not in path.name  # made by protoc
            ]
        self.written: list[Module] = [module for module in self.modules if not module.generated]

    def lines(self) -> int:
        return sum(len(module.lines) for module in self.modules)

    def tokens(self, *, generated: bool) -> int:
        return sum(len(module.code) for module in self.modules if module.generated is generated)

    def classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    yield module, node

    def face_classes(self) -> list[str]:
        variants: dict[str, list[tuple[Module, str]]] = defaultdict(list)
        for module, node in self.classes():
            # A port has an implementation for each place by design; what users hold must not.
            if module.layer in FACES and not node.name.startswith("_") and not node.name.endswith(("Port", "Calls")):
                variants[re.sub("^(Async)?(Remote)?", "", node.name)].append((module, node.name))
        return [
            f"{module.name}: {name}{' (generated)' if module.generated else ''}"
            for _, found in sorted(variants.items())
            if len(found) > 1 and any(name.startswith("Async") for _, name in found)
            for module, name in found
        ]

    def declarations(self, option: str = "priority") -> list[str]:
        """Parameters, annotated fields and properties of this name, in code that people write."""
        found = []
        for module in self.written:
            for node in module.nodes:
                if isinstance(node, (ast.arg, ast.AnnAssign, *_FUNCTIONS)) and _declared(node) == option:
                    found.append(f"{module.name}:{node.lineno}")
        return found

    def class_names_used_again(self) -> list[str]:
        places: dict[str, set[str]] = defaultdict(set)
        for module, node in self.classes():
            places[node.name].add(module.name)
        return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items()) if len(found) > 1]

    def short_modules(self) -> list[str]:
        return [
            f"{module.name}: {len(module.lines)} lines"
            for module in self.modules
            if len(module.lines) < SHORT_LINES and (module.code or not module.name.endswith("__init__.py"))
        ]

    def importers(self) -> dict[str, set[str]]:
        """Who imports each module, at its head, for types or within a function."""
        known = {module.dotted: module.name for module in self.modules}
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            for node in module.nodes:
                for name in _imported(node):
                    if name in known and known[name] != module.name:
                        found[known[name]].add(module.name)
        return found

    def one_sibling(self) -> list[str]:
        return [
            f"{name}: {next(iter(by))}"
            for name, by in sorted(self.importers().items())
            if len(by) == 1 and Path(next(iter(by))).parent == Path(name).parent
        ]

    def unnamed_modules(self) -> list[str]:
        pages = "\n".join(page.read_text("utf-8") for page in sorted((self.root / "docs" / "internals").glob("*.md")))
        said = _words(pages)
        drawn = _words("\n".join(re.findall(r"^```.*?^```", pages, re.DOTALL | re.MULTILINE)))
        return [
            module.name
            for module in self.modules
            if not _paths(module) & said and Path(module.dotted.replace(".", "/")).name not in drawn
        ]

    def setattr_calls(self) -> list[str]:
        return [
            f"{module.name}:{node.lineno}"
            for module in self.modules
            for node in module.nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
        ]

    def private_exceptions(self) -> list[str]:
        return [
            f"{module.name}:{number}"
            for module in self.modules
            for number, line in enumerate(module.lines, start=1)
            if _SLF001.search(line)
        ]

    def private_names(self) -> list[str] | None:
        """What ruff finds; nothing where there is no ruff."""
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "SLF001"]
        command += ["--exclude", "*_pb2*"]
        done = subprocess.run(
            [*command, "--output-format", "json", str(self.source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in {0, 1} or not done.stdout:
            return None
        places = json.loads(done.stdout)
        return [
            f"{Path(one['filename']).relative_to(self.source).as_posix()}:{one['location']['row']}: {one['message']}"
            for one in places
        ]

    def share(self, lines: Callable[[Module], int]) -> float:
        return round(100 * sum(map(lines, self.modules)) / self.lines(), 1)

    def pairs(self, *, shape: bool, within: frozenset[str] | None = None) -> list[str]:
        """Pairs of written modules, of all layers or within some, with the first run that they share."""
        places: dict[tuple[str, ...], list[tuple[Module, int]]] = defaultdict(list)
        for module in self.written:
            if within is not None and module.layer not in within:
                continue
            lines = [line.shape if shape else line.text for line in module.code_lines]
            for start in range(len(lines) - RUN_LINES + 1):
                places[tuple(lines[start : start + RUN_LINES])].append((module, start))
        found: dict[tuple[Module, Module], str] = {}
        for where in places.values():
            if len(where) <= MOST_PLACES:
                for (one, start), (other, again) in combinations(where, 2):
                    if one is not other or abs(again - start) >= RUN_LINES:
                        row = f"{_run(one, start)} ~ {_run(other, again)}"
                        found.setdefault((one, other), row)
        return list(found.values())


@contextmanager
def _without_collector() -> Iterator[None]:
    """Syntax trees are large and free of cycles: looking for some takes longer than making the trees."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(module: Module, start: int) -> str:
    lines = module.code_lines
    return f"{module.name}:{lines[start].number}-{lines[start + RUN_LINES - 1].number}"


def _declared(node: ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, _FUNCTIONS):
        return node.name
    target = node.target
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _imported(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import may load: `from a import b` may name the module a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _paths(module: Module) -> set[str]:
    """How a page may write where a module is."""
    dotted = module.dotted.removeprefix("holdfast.")
    path = dotted.replace(".", "/")
    below = {dotted, path} if "/" in path else set()  # `model` alone is a word like any other
    return below | {f"{path}.py", module.name, f"src/{module.name}", module.dotted}


def _words(text: str) -> set[str]:
    return {word.rstrip("./") for word in re.findall(r"[\w./]+", text)}


Counted = int | float | list[str] | None
FIGURES: dict[str, tuple[str, Callable[[Package], Counted]]] = {
    "modules": ("modules", lambda package: len(package.modules)),
    "lines": ("lines", Package.lines),
    "tokens": ("code tokens, without generated modules", lambda package: package.tokens(generated=False)),
    "generated_modules": ("generated modules", lambda package: len(package.modules) - len(package.written)),
    "generated_tokens": ("code tokens of generated modules", lambda package: package.tokens(generated=True)),
    "face_classes": ("face classes: one concept, written for each style and place", Package.face_classes),
    "priority": ("declarations of `priority`", Package.declarations),
    "equal_pairs": ("pairs that share six or more equal lines", lambda package: package.pairs(shape=False)),
    "equal_face_pairs": (
        "the same, among the faces",
        lambda package: package.pairs(shape=False, within=FACES),
    ),
    "shape_pairs": ("pairs of the same shape", lambda package: package.pairs(shape=True)),
    "private_names": ("private names reached from outside (SLF001)", Package.private_names),
    "private_exceptions": ("exceptions from that (noqa: SLF001)", Package.private_exceptions),
    "class_names": ("class names defined in more than one module", Package.class_names_used_again),
    "short_modules": (f"modules under {SHORT_LINES} lines, without empty folders' own", Package.short_modules),
    "one_sibling": ("modules imported only by one sibling", Package.one_sibling),
    "unnamed_modules": ("modules that docs/internals never names", Package.unnamed_modules),
    "imports_percent": (
        "imports, in percent of lines",
        lambda package: package.share(lambda module: len(module.imports)),
    ),
    "comments_percent": (
        "lines that are comments, in percent",
        lambda package: package.share(lambda module: sum(one.line.lstrip().startswith("#") for one in module.comments)),
    ),
    "setattr_calls": ("calls of setattr", Package.setattr_calls),
}


def figure(package: Package, name: str) -> int | float | None:
    """One figure; nothing where it cannot be taken, because ruff is not installed."""
    counted = FIGURES[name][1](package)
    return len(counted) if isinstance(counted, list) else counted


def main() -> None:
    """Print the table, or what one figure counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="another checkout")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", metavar="FIGURE", choices=FIGURES, help="print what this figure counts")
    given = parser.parse_args()
    package = Package(given.root)
    if given.list:
        counted = FIGURES[given.list][1](package)
        rows = counted if isinstance(counted, list) else [str(counted)]
    elif given.json:
        rows = [json.dumps({name: figure(package, name) for name in FIGURES}, indent=2)]
    else:
        rows = [f"{_shown(figure(package, name)):>9}  {name:<19} {what}" for name, (what, _) in FIGURES.items()]
    sys.stdout.write("".join(f"{row}\n" for row in rows))


def _shown(value: float | None) -> str:
    return "no ruff" if value is None else f"{value:,}"


if __name__ == "__main__":
    main()
